"""Every wait names whom it waits for: each of them, on real servers, with threads in place of other processes.

A wait is a generator: it brings the wait about, yields what the log is to say meanwhile, and then lets the other come.
`tests/kit/house.py` has which calls of the code they stand for.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import psclient as ps
from psclient._src.launch.joining import Joiner
from psclient.coordinator.worker import Worker
from pstesting.script import add
from tests.kit.house import TRIED
from tests.kit.internals import (
    Chief,
    Cluster,
    RemoteServer,
    Security,
    ServerConfig,
    ServerThread,
    Task,
    await_listening,
    connect,
)
from tests.kit.rig import SOON, core, eventually
from tests.kit.shell import free_port
from tests.kit.storage import write_checkpoint

CHIEF, PS0 = Task("chief", 0), Task("ps", 0)
W0, W1 = Task("worker", 0), Task("worker", 1)

PATIENT = ps.Timeouts(
    heartbeat_interval=0.1,
    call_timeout=SOON,
    round_timeout=SOON,
    report_interval=0.05,
    chief_timeout=SOON,
    start_timeout=SOON,
    no_workers_timeout=SOON,
    first_worker_timeout=SOON,
)
"""Waits end when the other comes."""

HASTY = replace(
    PATIENT, round_timeout=2.0, chief_timeout=2.0, start_timeout=2.0, no_workers_timeout=2.0, first_worker_timeout=2.0
)
"""Waits end at their deadlines, which are so late that a busy machine has come to the wait that is looked at."""


class Said(NamedTuple):
    """What is heard of a wait: in the log, while it lasts; and a pattern of its error at its deadline, or nothing."""

    word: str
    late: str = ""


class Site:
    """One server, and threads that are the other processes of a job; a context manager that waits for all of them."""

    def __init__(self, directory: Path, timeouts: ps.Timeouts) -> None:
        self.directory = directory
        self.timeouts = timeouts
        self.lines: list[str] = []
        """What is printed by processes, where there are some."""
        self.results: list[Future[Any]] = []
        self.ends: list[Callable[[], object]] = []
        """What lets everybody go on who waits for the test."""

    def __enter__(self) -> Site:
        self._stack = ExitStack()
        # Work of the server runs in threads of its own, which a test can keep busy.
        self.arrays, self.files = (self._stack.enter_context(ThreadPoolExecutor(1)) for _ in range(2))
        behind = core(root=self.directory, submit=self.arrays.submit, files=self.files.submit)
        self._stack.callback(behind.close)
        thread = self._stack.enter_context(ServerThread(behind, ServerConfig(behind.task), grace=0.0))
        self.address = thread.address
        self._pool = self._stack.enter_context(ThreadPoolExecutor(8))  # last: who is there takes its leave
        return self

    def __exit__(self, *rest: object) -> None:
        for end in self.ends:
            end()
        self._stack.close()

    def gate(self) -> threading.Event:
        """Something that a thread waits for, until the test sets it."""
        event = threading.Event()
        self.ends.append(event.set)
        return event

    def busy(self, pool: ThreadPoolExecutor) -> threading.Event:
        """Keeps the server's thread for arrays or files busy until the test sets what it returns."""
        gate = self.gate()
        pool.submit(gate.wait)
        return gate

    def start(self, work: Callable[[], Any]) -> Future[Any]:
        future = self._pool.submit(work)
        self.results.append(future)
        return future

    def spawn(self, program: str, **pipes: int) -> Any:
        """A process that waits for a line on its stdin, and is killed in the end."""
        command = [sys.executable, "-c", program]
        process = self._stack.enter_context(subprocess.Popen(command, bufsize=0, stdin=subprocess.PIPE, **pipes))
        self.ends.append(process.kill)
        return process

    def cluster(self, *chief: str) -> ps.ClusterSpec:
        jobs = {"ps": (self.address,), "worker": ("x:1", "x:2")}
        return ps.ClusterSpec(jobs | ({"chief": chief} if chief else {}))

    def work(self, task: Task, script: Callable[[ps.ParameterServerStrategy], object], *chief: str) -> Future[Any]:
        """A worker that runs a script, which is given its strategy."""
        resolver = ps.SimpleClusterResolver(self.cluster(*chief), task_type=task.job, task_id=task.index)

        def run() -> None:
            with ps.ParameterServerStrategy(cluster_resolver=resolver, timeouts=self.timeouts) as strategy:
                script(strategy)

        return self.start(run)

    def both(self, script: Callable[[Any], object], *chief: str) -> None:
        for task in (W0, W1):
            self.work(task, script, *chief)

    def drive(self) -> Chief:
        """A chief that only drives, until it is stopped or the job is over."""
        cluster = self.cluster("x:3")
        chief = Chief(CHIEF, connect(cluster, self.timeouts), cluster, self.timeouts)
        self.ends.append(lambda: chief.stop(abandon=True))
        self.start(chief.drive)
        return chief


def variable(strategy: Any, name: str = "v") -> Any:
    with strategy.scope():
        return ps.Variable(np.zeros(4), name=name)


def step(strategy: Any) -> None:
    add_to(strategy, variable(strategy))


def add_to(strategy: Any, v: Any) -> None:
    strategy.run(lambda: add(v, np.ones(4)))


# ---- The waits ----

Wait = Callable[[Site], Iterator[Said]]
WAITS: dict[str, Wait] = {}
LATE: list[str] = []


def waits(wait: Wait) -> Wait:
    WAITS[wait.__name__] = wait
    return wait


def ends(wait: Wait) -> Wait:
    """It ends at its deadline with an error that names it."""
    LATE.append(wait.__name__)
    return waits(wait)


def nothing(strategy: Any) -> None:
    """A script that ends at once."""


@ends
def for_a_chief(site: Site) -> Iterator[Said]:
    site.work(W0, nothing, "x:3")
    yield Said(f"{W0} waits for a chief to start the job", "no chief started the job within .* start the chief task")
    site.drive()
    site.work(W1, nothing, "x:3")


@ends
def for_workers(site: Site) -> Iterator[Said]:
    site.drive()
    never = f"{W0} (never connected), {W1} (never connected)"
    yield Said(
        f"the chief in {CHIEF} waits for {never}", f"{W0} never connected, {W1} never connected. The job has ended"
    )
    site.both(nothing, "x:3")


@ends
def for_a_worker_that_starts(site: Site) -> Iterator[Said]:
    site.work(W0, step)
    yield Said(f"{W0} waits for {W1} to start", f"check that {W0}, {W1} and the chief are running")
    site.work(W1, step)


@ends
def for_a_first_value(site: Site) -> Iterator[Said]:
    gate = site.gate()
    site.work(W0, lambda strategy: (gate.wait(), step(strategy)))
    site.work(W1, step)
    yield Said(f"{W1} waits for {W0} to set the initial value of variable 'v'", f"from {W0}; create the same variables")
    gate.set()


@waits
def for_a_worker_in_a_round(site: Site) -> Iterator[Said]:
    gate = site.gate()
    site.work(W0, step)
    site.work(W1, lambda strategy: (v := variable(strategy), gate.wait(), add_to(strategy, v)))
    yield Said(f"{W0} waits in round 0 for {W1}")
    gate.set()


def without_a_chief(site: Site, new: Callable[[Any], Callable[[], object]], word: str) -> Iterator[Said]:
    """Both workers have made a section, and make a new one while no chief is there."""
    gate, chief, met = site.gate(), site.drive(), threading.Barrier(3)

    def script(strategy: Any) -> None:
        make = new(strategy)
        step(strategy)
        met.wait()
        gate.wait()
        make()

    site.both(script, "x:3")
    met.wait(SOON)
    chief.stop(abandon=True)
    eventually(site.results[0].done)
    gate.set()
    yield Said(f"{W0} {word}")
    site.drive()


@waits
def for_approval(site: Site) -> Iterator[Said]:
    return without_a_chief(site, lambda s: lambda: s.reduce("sum", 1.0, axis=None), "waits in round 1 for the chief")


@waits
def for_approval_of_its_own(site: Site) -> Iterator[Said]:
    """Of a section of a variable that each worker updates alone."""

    def new(strategy: Any) -> Callable[[], object]:
        with strategy.scope():
            v = ps.Variable(np.zeros(2), consistency=ps.Async())
        v.numpy()
        return lambda: v.assign([1.0, 2.0])

    said = "update 0 of its own variables, with ps.Async()"
    return without_a_chief(
        site, new, f"waits for {PS0}, or for the chief, which has to approve its first use, to make {said}"
    )


@waits
def for_the_others_in_a_change(site: Site) -> Iterator[Said]:
    gate = site.gate()
    site.work(W0, lambda strategy: strategy.set_consistency(ps.Async()))
    site.work(W1, lambda strategy: (gate.wait(), strategy.set_consistency(ps.Async())))
    yield Said(f"{W0} waits for {W1} in set_consistency(ps.Async())")
    gate.set()


@waits
def for_the_others_to_take_it_in(site: Site) -> Iterator[Said]:
    """Who comes to a running job."""
    gate, went = site.gate(), site.gate()

    def fails(strategy: Any) -> None:
        step(strategy)
        raise InterruptedError

    def goes_on(strategy: Any) -> None:
        v = variable(strategy)
        while strategy.round < 6:
            if strategy.round == 1:
                went.set()
                gate.wait()
            add_to(strategy, v)

    site.work(W0, goes_on)
    failed = site.work(W1, fails)
    assert isinstance(failed.exception(SOON), InterruptedError)
    site.results.remove(failed)
    assert went.wait(SOON)
    site.work(W1, goes_on)
    yield Said(f"{W1} waits until {W0} reach the compiled step that it begins with", f"{W1} joined late and")
    gate.set()


def of_a_busy_server(site: Site, new: Callable[[Any], Callable[[], object]], word: str) -> Iterator[Said]:
    """Both workers ask a server for something that its thread for arrays does."""
    gate, opened = site.gate(), threading.Barrier(3)

    def script(strategy: Any) -> None:
        ask = new(strategy)
        opened.wait()
        gate.wait()
        ask()

    site.both(script)
    opened.wait()
    free = site.busy(site.arrays)
    gate.set()
    yield Said(f"{W0} waits for {word}")
    free.set()


@waits
def for_a_server_to_take_first_values(site: Site) -> Iterator[Said]:
    return of_a_busy_server(site, lambda s: lambda: variable(s, "u"), f"{PS0} to take the first value of variable 'u'")


@waits
def for_a_value(site: Site) -> Iterator[Said]:
    return of_a_busy_server(site, lambda s: variable(s, "u").numpy, f"variable 'u' of {PS0}")


def save(strategy: Any, made: Any = None) -> None:
    checkpoint = made or ps.train.Checkpoint(v=variable(strategy))
    checkpoint.save("run/ckpt", ps.train.CheckpointOptions(enable_async=False))


def to_save(site: Site, *said: str) -> Iterator[Said]:
    free = site.busy(site.files)
    site.both(save)
    yield Said(*said)
    free.set()


@ends
def for_a_checkpoint_to_be_written(site: Site) -> Iterator[Said]:
    return to_save(site, f"{W0} waits for {PS0} to complete a checkpoint", "the checkpoint was not completed in time")


@waits
def for_a_shard(site: Site) -> Iterator[Said]:
    """As the chief does, behind everybody's back."""
    return to_save(site, f"{PS0} is still writing its part of a checkpoint")


@ends
def for_a_checkpoint_to_be_read(site: Site) -> Iterator[Said]:
    write_checkpoint(site.directory / "run" / "ckpt-1", {"v": np.zeros(4)})
    gate, free = site.gate(), site.busy(site.files)
    site.both(lambda strategy: ps.train.Checkpoint(v=variable(strategy)).restore("run").expect_partial())
    yield Said(f"{W0} waits for {PS0} to read 'run", f"{PS0}: (restoring 'run|Restore did not complete)")
    gate.set()
    free.set()


@waits
def for_who_saves(site: Site) -> Iterator[Said]:
    """One process says what a checkpoint has; the others wait in the same round."""
    gate = site.gate()

    def script(strategy: Any, waits: Callable[[], object]) -> None:
        made = ps.train.Checkpoint(v=variable(strategy))
        step(strategy)
        waits()
        save(strategy, made)

    site.work(W0, lambda strategy: script(strategy, gate.wait))
    site.work(W1, lambda strategy: script(strategy, lambda: None))
    yield Said(f"{W1} waits in round 1 for {W0}")
    gate.set()


@ends
def for_others_that_never_came(site: Site) -> Iterator[Said]:
    """At its end, who drives beside its own script, which made no round."""
    site.work(W0, nothing)
    yield Said(
        f"{W0} has finished its script and continues as chief; it waits for {W1} (never connected)",
        f"{W1} never connected. The j",
    )
    site.work(W1, nothing)


@waits
def for_others_to_leave(site: Site) -> Iterator[Said]:
    gate = site.gate()
    site.work(W1, lambda strategy: gate.wait())
    site.work(W0, nothing)
    yield Said(f"{W0} has finished its script and continues as chief; it waits for {W1} (still connected)")
    gate.set()


@waits
def for_closures(site: Site) -> Iterator[Said]:
    """Which a worker runs, or nobody."""
    gate = site.gate()
    stays = ps.coordinator.function(name="stays")(lambda: gate.wait())

    def runs(task: Task, script: Callable[[ps.ParameterServerStrategy], object]) -> None:
        resolver = ps.SimpleClusterResolver(site.cluster("x:3"), task_type=task.job, task_id=task.index)

        def run() -> None:
            keys = {"consistency": ps.Async(), "cluster_resolver": resolver, "timeouts": site.timeouts}
            with ps.ParameterServerStrategy(**keys) as strategy:
                script(strategy)

        site.start(run)

    def coordinate(strategy: ps.ParameterServerStrategy) -> None:
        coordinator = ps.coordinator.ClusterCoordinator(strategy)
        coordinator.schedule(stays)
        coordinator.join()

    runs(CHIEF, coordinate)
    for task in (W0, W1):
        runs(task, lambda strategy: Worker(strategy).serve())
    yield Said(f"{CHIEF} waits for 1 closures, of which 1 are run, by 2 workers")
    gate.set()


@ends
def for_a_server_that_answers(site: Site) -> Iterator[Said]:
    port = free_port()
    server = RemoteServer(f"127.0.0.1:{port}", PS0, site.timeouts)
    site.start(lambda: server.open(W0, 1, 0, False))
    yield Said(f"no answer from {PS0} at 127.0.0.1:{port}", f"{PS0}: no answer at 127.0.0.1:{port}")
    behind = core()
    with ServerThread(behind, ServerConfig(behind.task, port=port), grace=0.0):
        site.results[-1].result(SOON)
        server.close()
    behind.close()


@ends
def for_a_server_that_listens(site: Site) -> Iterator[Said]:
    """Which whoever started it waits for."""
    program = "import sys\nsys.stdin.readline()\nprint('psserver listening on x:1')"
    process = site.spawn(program, stdout=subprocess.PIPE)
    site.start(lambda: await_listening(process, PS0, site.timeouts))
    yield Said(f"waiting for {PS0} to listen", f"{PS0}: the server did not listen within")
    process.stdin.write(b"\n")


@ends
def for_a_job_to_join(site: Site) -> Iterator[Said]:
    """A worker beyond the cluster, before a chief has begun the job."""

    def join() -> None:
        with Joiner([site.address], site.timeouts, Security(), None, "") as joiner:
            assert joiner.take().task == Task("worker", 2)

    joining = site.start(join)
    word = f"waiting for a job at {site.address}: the chief has not started a job there yet"
    yield Said(
        word, "found no job to join at .* the chief has not started a job there yet; start its servers and its chief"
    )
    site.drive()
    joining.result(SOON)
    site.both(nothing, "x:3")


@waits
def for_a_script_of_a_cluster(site: Site) -> Iterator[Said]:
    """The launcher, once another has ended."""
    (site.directory / "script.py").write_text(
        "import json, os, pathlib, time\nme = json.loads(os.environ['TF_CONFIG'])['task']['index']\n"
        "while me and not pathlib.Path(__file__).with_name('over').exists(): time.sleep(0.01)\n"
    )
    keys = {"script": str(site.directory / "script.py"), "chief": "none", "workers": 2, "timeouts": site.timeouts}
    cluster = Cluster(sink=lambda line: site.lines.append(line.text), **keys)
    site.ends.append((site.directory / "over").touch)

    def run() -> None:
        with cluster:
            assert cluster.wait(SOON).code == 0

    site.start(run)
    yield Said(f"psworker: waiting for {W1} to end; all other scripts have ended")
    (site.directory / "over").touch()


@waits
def for_a_newer_checkpoint(site: Site) -> Iterator[Said]:
    """An evaluator; only its directory is known."""
    directory = site.directory / "run"
    site.start(lambda: next(ps.train.checkpoints_iterator(str(directory), timeout=SOON)))
    yield Said(f"waits for a job to save a checkpoint in {directory}, after none")
    write_checkpoint(directory / "ckpt-1", {"v": np.zeros(4)})


DRAIN = """
import asyncio, sys
from psserver.cli import _thread
from psserver.config import ServerConfig
from pswire.telemetry import logging_setup
from pswire.cluster import Task
from pswire.limits import Timeouts

async def serve():
    config = ServerConfig(Task("ps", 0), timeouts=Timeouts(report_interval=0.05))
    async with _thread(config, "files", "writes a file") as files:
        files.submit(sys.stdin.readline)

logging_setup.configure("text", "info")
asyncio.run(serve())
"""


@waits
def for_a_disk(site: Site) -> Iterator[Said]:
    """A server that ends while it writes."""
    process = site.spawn(DRAIN, stderr=subprocess.PIPE)
    site.start(lambda: [site.lines.append(line.decode()) for line in process.stderr])
    yield Said(f"{PS0} still writes a file, and ends after that; another signal kills it at once")
    process.stdin.write(b"\n")
    assert process.wait(SOON) == 0


@pytest.fixture(autouse=True)
def heard(caplog, environ, leaves_soon):
    """What background work says is no warning; a worker whose script fails is started again."""
    caplog.set_level("INFO")
    environ["PS_SCRIPT_ERROR"] = "leave"
    environ["PS_REPORT_INTERVAL"] = str(PATIENT.report_interval)


def named(site: Site, caplog: pytest.LogCaptureFixture, text: str) -> bool:
    return text in caplog.text or any(text in line for line in site.lines)


@pytest.mark.parametrize("wait", WAITS)
def test_it_names_whom_it_waits_for_and_ends_when_that_one_comes(tmp_path, caplog, wait):
    """Again and again, as often as `Timeouts.report_interval` says."""
    with Site(tmp_path, PATIENT) as site:
        steps = WAITS[wait](site)
        said = next(steps)
        eventually(lambda: named(site, caplog, said.word))
        assert next(steps, None) is None
        for result in site.results:
            result.result(SOON)


@pytest.mark.parametrize("wait", LATE)
def test_at_its_deadline_it_ends_with_an_error_that_names_it(tmp_path, caplog, monkeypatch, wait):
    """Raised, or where no caller is left said in the log."""
    monkeypatch.setattr("pswire.limits.ROUND_LEASES", 0)  # a round may be over sooner than a lease, here
    with Site(tmp_path, HASTY) as site:
        said = next(WAITS[wait](site))
        assert said.late

        def found() -> bool:
            errors = [str(result.exception()) for result in site.results if result.done() and result.exception()]
            return any(re.search(said.late, text) for text in [*errors, caplog.text])

        eventually(found)


def test_another_signal_ends_a_server_whose_disk_hangs(tmp_path):
    """Once it has said for what it waits; nothing else could end it."""
    with Site(tmp_path, PATIENT) as site:
        process = site.spawn(DRAIN, stderr=subprocess.PIPE)
        for _ in range(2):  # it has turned to signals when it says so again
            assert b"another signal kills it" in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(SOON) == -signal.SIGTERM


def test_the_table_has_every_wait():
    """And no other: a row that stands for no call any more goes."""
    assert {*WAITS} == {name for names in TRIED.values() for name in names}
