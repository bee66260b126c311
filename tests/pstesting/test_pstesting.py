"""Clusters for tests, forked processes, processor time, and recordings that can be replayed."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import psclient as ps
from pstesting import InProcessCluster, forks, processor_time
from pstesting.clock import Clock
from pstesting.forks import EXECS, HIGH, SEEDS, Forked
from pstesting.processes import W0, W1, until
from pstesting.processor_time import await_rest
from pstesting.replay import Grown, Recording, Replay
from tests.kit.contributions import streaming
from tests.kit.internals import TRANSPORTS, PSError, RoundReply, child_environ
from tests.kit.rig import SOON, WORKERS, Job, Servers, core, remote, sum_into, together


def train(cluster, worker, sums):
    with ps.ParameterServerStrategy(["cpu:0"], cluster_resolver=cluster.resolver(worker)) as strategy:
        with strategy.scope():
            v = ps.Variable(np.zeros(3), name="v")
            optimizer = ps.optimizers.SGD(1.0)
        for _ in range(5):
            strategy.run(lambda: optimizer.apply_gradients([(np.full(3, worker + 1.0), v)]))
        sums[worker] = v.numpy().tolist()


def test_workers_in_threads_train_on_servers_in_threads(tmp_path):
    """Two workers and two servers in this process, over real connections; nothing of it is left."""
    before, sums = set(threading.enumerate()), {}

    def ours():
        """The threads that have come since and that are not gRPC's, which keeps some of its own for a while."""
        threads = set(threading.enumerate()) - before
        return [one.name for one in threads if "grpc" not in repr(getattr(one, "_target", None))]

    with InProcessCluster(servers=2, workers=2, checkpoint_root=tmp_path) as cluster:
        assert len({*cluster.addresses}) == 2
        workers = [threading.Thread(target=train, args=(cluster, worker, sums)) for worker in range(2)]
        for thread in workers:
            thread.start()
        for thread in workers:
            thread.join()
    assert sums == {0: [-15.0] * 3, 1: [-15.0] * 3}
    until(lambda: not ours(), 60, lambda: f"{ours()} are left")


def test_leases_end_in_one_process(tmp_path):
    """A worker that falls silent is lost after its lease, as with server processes."""
    timeouts = ps.Timeouts(session_timeout=0.5, heartbeat_interval=0.1)
    with InProcessCluster(checkpoint_root=tmp_path, timeouts=timeouts) as cluster:
        (core,) = cluster.cores
        for task in (W0, W1):
            core.open(task, 1, 0, False)
        deadline = threading.Event()
        while any(session.state == "open" for session in core.status().sessions if session.member.task == W1):
            (number,) = [s.member.session for s in core.status().sessions if s.member.task == W0]
            core.heartbeat(number, -1, b"")
            assert not deadline.wait(0.05)
        assert [s.state for s in core.status().sessions if s.member.task == W0] == ["open"]


def test_the_example_of_the_document(tmp_path):
    """A test as docs/testing.md shows it passes: a worker dies, and is replaced."""
    text = (Path(__file__).parents[2] / "docs" / "testing.md").read_text(encoding="utf-8")
    examples = re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    (example,) = (each for each in examples if "test_a_worker_that_dies_is_replaced" in each)
    path = tmp_path / "example.py"
    path.write_text(example, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("example", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.test_a_worker_that_dies_is_replaced(tmp_path)


@pytest.mark.parametrize(("program", "most"), [("import time; time.sleep(60)", 10.0), ("while True: pass", 1.0)])
def test_who_sleeps_rests(monkeypatch: pytest.MonkeyPatch, program: str, most: float) -> None:
    """Once it has begun. Who always works, as a server at which 64 idle workers heartbeat, is not waited for for
    ever."""
    monkeypatch.setattr(processor_time, "MOST_SECONDS", most)
    with subprocess.Popen([sys.executable, "-c", program]) as process:
        try:
            begun = time.monotonic()
            (used,) = await_rest([process.pid])
            assert 0 < used < 10.0
            assert most > 1.0 or time.monotonic() - begun > most
        finally:
            process.kill()


SAYS = """
import json, os, signal, sys, threading
sys.stderr.write(sys.stdin.read())
main, here = sys.modules["__main__"], os.getcwd()
print(json.dumps({
    "argv": sys.argv, "parent": os.getppid(), "group": os.getpgid(0) == os.getpid(), "here": here,
    "session": os.getsid(0) == os.getpid(), "environ": dict(os.environ), "threads": threading.active_count(),
    "path": [each for each in sys.path if each], "main": getattr(main, "__file__", ""), "spec": str(main.__spec__),
    "own": main.__dict__ is globals(), "name": __name__, "terminal": sys.stdout.line_buffering,
    "open": [each for each in sorted(map(int, os.listdir("/proc/self/fd"))) if each < HIGH][:-1],
    "signals": [str(signal.getsignal(each)).split(" at ")[0] for each in signal.valid_signals()],
    "hash": hash("psserver"),
}))
sys.exit(7)
""".replace("HIGH", str(HIGH))

COMMANDS = {
    "psworker": ["-P", "-m", "psclient", "--", "says.py", "one"],
    "as a module": ["-m", "psclient", "--", "says.py", "one"],
    "a script": ["says.py", "one"],
    "text": ["-P", "-c", SAYS, "one"],
}
PLACES = {"psworker": {"process_group": 0}, "text": {"process_group": 0}, "a script": {"start_new_session": True}}


ENDS = """
import atexit, threading, time
atexit.register(print, "at exit", end="")
over = threading.Event()
threading.Thread(target=lambda: (over.wait(), time.sleep(0.1), print("thread"))).start()
over.set()
print("script")
sys.exit(300)
"""


def run(kind, command, environ, **keys):
    """Runs a script as a client would; returns what it says, what it wrote on stderr, and its exit code."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with kind([sys.executable, *command], env=environ, text=True, **pipes, **keys) as process:
        out, err = process.communicate("a word")
    return json.loads(out), err, process.returncode


@pytest.fixture
def script(tmp_path):
    (tmp_path / "says.py").write_text(SAYS, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("how", COMMANDS)
def test_a_fork_is_what_a_start_is(script, how):
    """A forked process has the parent, streams, directory, variables, files and signals of one that is started."""
    environ = child_environ(1, None, {"PS_JOB": "forks", "PYTHONPATH": f"{script}:{script}"})
    keys = {"cwd": script, **PLACES.get(how, {})}
    (forked, *rest), (started, *wanted) = (
        run(kind, COMMANDS[how], environ, **keys) for kind in (Forked, subprocess.Popen)
    )
    assert rest == wanted == ["a word", 7]
    assert forked["parent"] == os.getpid()
    assert forked.pop("hash") != started.pop("hash")
    assert forked == started


@pytest.mark.parametrize("text", ["1 / 0", "def f(:", "raise SystemExit('enough')", ENDS])
def test_a_script_fails_as_a_start_does(tmp_path, text):
    """A traceback has the script's lines only, and the exit code is Python's."""
    (tmp_path / "script.py").write_text(f"import sys\n{text}\n", encoding="utf-8")
    command = [sys.executable, "script.py"]
    ended = [run(command, cwd=tmp_path, capture_output=True, text=True) for run in (forks.run, subprocess.run)]
    assert len({(done.returncode, done.stdout, done.stderr) for done in ended}) == 1, ended


def test_forks_differ_as_processes_do(script):
    """Each has an order of its own in sets of strings; one with other variables of Python's is started by itself."""
    found = {run(Forked, COMMANDS["text"], child_environ(1, None))[0]["hash"] for _ in SEEDS}
    assert len(found) == len(SEEDS)
    environ = child_environ(1, None, {"PYTHONHASHSEED": "77"})
    (one, *_), (other, *_) = (run(kind, COMMANDS["text"], environ) for kind in (Forked, subprocess.Popen))
    assert one["hash"] == other["hash"]


def test_who_asks_for_a_start_gets_one(tmp_path):
    """A variable of the environment says so. A directory that is not there is an error, as `subprocess` has it."""
    command = [sys.executable, "-c", "print('fork' + 's' in open('/proc/self/cmdline').read())"]
    for said, forked in (("", b"True\n"), ("1", b"False\n")):
        assert forks.run(command, env={EXECS: said}, capture_output=True).stdout == forked
    with pytest.raises(FileNotFoundError):
        forks.run([sys.executable, "-c", "pass"], cwd=tmp_path / "nowhere")


def test_a_bare_environment_is_enough(script):
    """A fork has the variables that it is given, and no others."""
    environ = {"PYTHONFAULTHANDLER": "1"}
    text = "import faulthandler, os, sys; os.environ.pop('LC_CTYPE', None)  # which Python adds\n"
    text += "print(dict(os.environ), faulthandler.is_enabled(), sys.dont_write_bytecode)"
    command = [sys.executable, "-c", text]
    forked, started = (each(command, env=environ, capture_output=True) for each in (forks.run, subprocess.run))
    assert forked.stdout == started.stdout == b"{'PYTHONFAULTHANDLER': '1'} True False\n", forked.stderr


def test_a_launcher_forks_what_it_starts(tmp_path):
    """Servers and workers of a cluster that `psworker` starts have its fork server's command line, and are its own."""
    (tmp_path / "script.py").write_text(
        "import os\nprint('pstesting' in open('/proc/self/cmdline').read(), os.getppid())\n", encoding="utf-8"
    )
    command = [sys.executable, "-P", "-m", "psclient", "--standalone", "--no-chief", "script.py"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Forked[str](command, cwd=tmp_path, text=True, **pipes) as process:
        out, err = process.communicate()
    assert f"True {process.pid}" in out, err


def test_forks_have_modules_that_are_asked_for(tmp_path):
    """A script that is started so has them, and so have processes that it starts; others, before and after, do not."""
    (tmp_path / "says.py").write_text("import sys; print('wave', 'wave' in sys.modules)", encoding="utf-8")
    commands = [["says.py"], ["-P", "-m", "psclient", "--standalone", "--no-chief", "says.py"]]

    def found():
        done = [forks.run([sys.executable, *each], cwd=tmp_path, capture_output=True, text=True) for each in commands]
        return [word for end in done for word in re.findall(r"wave (\w+)", end.stdout)]

    assert found() == ["False", "False"]
    with forks.having("wave"):
        assert found() == ["True", "True"]
    assert found() == ["False", "False"]


SIZE = 4096


def same(mine, theirs):
    """Whether two answers say the same, payloads bit by bit."""
    if not (mine.done() and theirs.done()) or theirs.cancelled():
        return mine.done() == theirs.done()
    if error := theirs.exception():
        return type(mine.exception()) is type(error) and str(mine.exception()) == str(error)
    mine, theirs = mine.result(), theirs.result()
    if isinstance(theirs, RoundReply):
        for name in ("round", "generation", "excluded", "more"):
            assert getattr(mine, name) == getattr(theirs, name)
    if hasattr(theirs, "payload"):
        chunks = ([(at, bytes(buffer)) for at, buffer in each.payload.chunks] for each in (mine, theirs))
        return next(chunks) == next(chunks)
    return mine == theirs


def recorded(job, worker, other):
    """Rounds of two members side by side, reads, a checkpoint and a restore, a refused call, and a member that dies."""
    variables = [job.variable(worker, np.zeros(SIZE, "float32")) for _ in range(3)]
    plan = job.approve(sum_into(*variables), worker)
    want = tuple(variable.id for variable in variables)
    rng = np.random.default_rng(7)

    def rounds(member, count):
        for _ in range(count):
            member.push(plan, [rng.normal(size=SIZE).astype("f4") for _ in variables], want=want).result(SOON)
            member.round += 1

    with ThreadPoolExecutor(2) as threads:
        for each in [threads.submit(rounds, member, 20) for member in (worker, other)]:
            each.result()
    for variable in variables:
        job.value(worker, variable)
    with suppress(PSError):
        job.verbs[0].pull(worker.session, [99], 0).result(SOON)
    waits = worker.push(plan, [np.ones(SIZE, "f4")] * 3, want=want)
    job.servers.spend(30, worker.session, job.opened.session)
    job.close([worker.member])
    together(waits)
    worker.round += 1
    worker.generation = job.generation.number
    job.save(worker)
    rounds(worker, 2)
    job.restore(worker)
    rounds(worker, 2)


@pytest.mark.parametrize("kind", ["core", "thread", *TRANSPORTS])
@pytest.mark.parametrize("streams", [False, True])
def test_a_run_can_be_replayed(tmp_path, kind, streams, monkeypatch, stack):
    """Whatever its threads and its network did: variables, log, sessions, and each answer to each call."""
    if streams:
        streaming(monkeypatch)
    clock, root = Clock(), tmp_path / "was"
    pool = stack.enter_context(ThreadPoolExecutor(1))
    one = core(root=root, clock=clock, **({} if kind == "core" else {"submit": pool.submit}))
    recording = Recording(one)
    verb = stack.enter_context(remote(one, transport=kind)) if kind in TRANSPORTS else one
    job = Job(Servers([verb], [one], clock, root, kind in TRANSPORTS))
    recorded(job, *job.join(*WORKERS[:2]))
    pool.shutdown()
    steps = list(recording.steps)
    replay = Replay(recording)
    replay.run()
    assert replay.machine.status(clock()) == one.status()
    mine, theirs = replay.machine.job.store.values(), one.machine.job.store.values()
    assert mine.keys() == theirs.keys()
    assert all((mine[id] == theirs[id]).all() for id in theirs)
    assert replay.machine.job.log.entries == one.machine.job.log.entries
    answered = {arg for step in steps if not isinstance(step, Grown) for arg in step.args if isinstance(arg, Future)}
    assert len(answered) > 40
    assert all(same(replay.futures[future], future) for future in answered)
    one.close()
