"""Rounds of two servers: each counts on both or on neither, whoever is lost while it is made, and in sums of a host."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import ExitStack

import numpy as np
import pytest

import psclient as ps
from pstesting.network import Relay
from pstesting.processes import PS0, PS1, QUICK, SECONDS, W0, W1, W2, ProcessCluster
from pstesting.script import DIRECTORY, ME, add_all, gate, say


def endure(lags):
    """Adds the same to a variable of each server, until a file says that it is the end.

    Worker 1 pushes to one of both servers, four rounds after its start; and then waits for a file. Where it may be cut
    off, its connections go through relays. It sends each push twice to the server that has it late.
    """
    from concurrent.futures import ThreadPoolExecutor

    def stall():
        say("stalled", [strategy.round, os.getpid()])
        while not (DIRECTORY / f"go on {os.getpid()}").exists():
            time.sleep(0.01)

    def is_due():
        return ME == 1 and first is not None and strategy._session.waits[0] == first + 4

    def push_twice(*args):
        answers = [push(*args) for _ in range(1 + ME)]
        return answers[0]

    first, pool = None, ThreadPoolExecutor(1)
    if ME == 1 and (DIRECTORY / "relays").exists():
        config = json.loads(os.environ["TF_CONFIG"])
        config["cluster"]["ps"] = json.loads((DIRECTORY / "relays").read_text())
        os.environ |= {"TF_CONFIG": json.dumps(config), "PS_TRANSPORT": "grpc"}
    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        v = ps.Variable(np.zeros(50), name="v")
        u = ps.Variable(np.zeros(50), name="u")
        end = ps.Variable(0.0, name="end")
    late = strategy._servers[lags]
    push = late.push
    late.push = lambda *args: (
        pool.submit(lambda: (stall(), push_twice(*args).result())) if is_due() else push_twice(*args)
    )
    say("open", float(v.numpy()[0]))
    while not float(end.numpy()):
        mine = np.full(50, 1000.0**ME)
        ends = np.float64(ME == 0 and (DIRECTORY / "end").exists())
        strategy.run(lambda mine=mine, ends=ends: add_all([(v, mine), (u, mine), (end, ends)]))
        last, found = strategy.last_round, (v.numpy(), u.numpy())
        first = last.number if first is None else first
        say("did", last.number)
        if not all((value == found[0][0]).all() for value in found):
            say("torn", [last.number, last.contributors, float(found[0][0]), float(found[1][0])])
        if last.excluded:
            say("left out", [last.number, last.excluded])
        time.sleep(0.01)
    say("sums", [float(v.numpy()[0]), float(u.numpy()[0])])


WAYS = ("kill", "stop", "cut", "replace", "duplicate")
"""How worker 1 is lost: it dies, stands still, its connections carry nothing, another takes its place when it is dead,
or when it stands still and goes on later."""


class Losses:
    """Loses worker 1 again and again, and starts it again.

    Args:
        job: the cluster.
        stack: ends the relays, and what was replaced.
        directory: the job's.
        lags: the server that has a push late.
    """

    def __init__(self, job, stack, directory, lags):
        self._job, self._stack, self._directory, self._lags = job, stack, directory, lags
        self._relays = [Relay(stack), Relay(stack)]
        for relay, server in zip(self._relays, (PS0, PS1), strict=True):
            relay.lead_to(job.cluster.addresses[server])
        self.out = []
        """The rounds that cannot have worker 1."""

    def lose(self, number, way, next_way):
        """Worker 1, which has pushed to one server, is lost, and started again once a round is over without it."""
        job = self._job
        round, pid = job.hear(W1, "stalled")
        relays, go_on = self._directory / "relays", self._directory / f"go on {pid}"
        relays.unlink(missing_ok=True)
        if next_way == "cut":
            relays.write_text(json.dumps([relay.address for relay in self._relays]))
        match way:
            case "kill":
                job.kill(W1)
                self._await(round)
            case "replace":
                job.kill(W1)
            case "stop":
                job.pause(W1)
                self._await(round)
                go_on.touch()
                job.resume(W1)  # it pushes the rest, and is told
                assert job.exited(W1) == 1
            case "cut":
                self._cut(number, round, go_on)
            case "duplicate":
                # Another process of the task waits for the lease of the first one, which then pushes the rest.
                first = job.cluster.processes[W1]
                self._stack.callback(first.kill)
                job.pause(W1)
                job.start(W1)
                job.until(lambda: len(job.said(W1, "open")) == number + 2)
                go_on.touch()
                first.send_signal(signal.SIGCONT)
                assert first.wait(SECONDS) == 1
        if way in ("kill", "stop", "duplicate"):
            self.out.append(round)
        if way != "duplicate":
            job.start(W1)  # where it is replaced, at once
        job.hear(W1, "open")

    def _await(self, round):
        self._job.until(lambda: max(self._job.said(W0, "did")) >= round)

    def _cut(self, number, round, go_on):
        """From the server that has its push late, or from both. While server 0 hears it, the others wait for it."""
        one = (number // len(WAYS) + self._lags) % 2 == 0
        cut = [self._relays[self._lags]] if one else self._relays
        for relay in cut:
            relay.cut()
        go_on.touch()  # what it pushes now arrives nowhere
        if one and self._lags == 1:
            time.sleep(1.5 * QUICK.session_timeout)
            assert max(self._job.said(W0, "did")) < round
        else:
            self._await(round)
            self.out.append(round)
        for relay in cut:
            relay.mend()
        if self.out[-1:] == [round]:
            assert self._job.exited(W1) == 1  # it is told
        else:
            self._await(round)
            self._job.kill(W1)


@pytest.mark.parametrize(
    ("lags", "deaths"),
    [pytest.param(0, 4, id="each way once"), pytest.param(1, 50, id="often", marks=pytest.mark.soak)],
)
@pytest.mark.usefixtures("compiled_rounds")
def test_no_round_is_torn(tmp_path, lags, deaths):
    """A worker is lost, in each of these ways, when one server has all of its push, and the other nothing."""
    keys = {"ps": 2, "workers": 2, "chief": "driver", "timeouts": QUICK}
    with ExitStack() as stack, ProcessCluster(endure, tmp_path, (lags,), **keys) as job:
        losses = Losses(job, stack, tmp_path, lags)
        ways = [WAYS[(1 + n) % len(WAYS)] for n in range(deaths + 1)]
        for number in range(deaths):
            losses.lose(number, ways[number], ways[number + 1])
        job.hear(W1, "stalled")
        job.kill(W1)
        (tmp_path / "end").touch()
        first, second = job.hear(W0, "sums", seconds=120)
        assert job.said(W0, "torn") == []
        assert job.said(W1, "torn") == []
        assert first == second
        assert set(losses.out) <= {round for round, _ in job.said(W0, "left out")}
        for task in (W0, PS0, PS1):
            assert job.exited(task) == 0


WORKERS = (W0, W1, W2)


def endure_in_sums(elements):
    """Adds the same to a variable of each server, until a file says that it is the end.

    Each contribution is a power of 1000, so that the sums' digits count contributions by worker. A worker says how many
    sums it has sent to each server. The worker that sends them holds once it has gathered what goes to server 1.
    """
    strategy = ps.ParameterServerStrategy()
    near, sums = strategy._exchange.pushes.near, [0, 0]

    def hold():
        try:
            (DIRECTORY / "held").touch(exist_ok=False)
        except FileExistsError:
            return
        say("holds", strategy.round)
        gate("never")

    def push(to, said, payload):
        if said.parts and sums[to] > 3 and to == 1:
            hold()
        sums[to] += bool(said.parts)
        return strategy._exchange.pushes.once(to, said, payload)

    near._push = push
    with strategy.scope():
        v = ps.Variable(np.zeros(elements), name="v")
        u = ps.Variable(np.zeros(elements), name="u")
        end = ps.Variable(0.0, name="end")
    mine = np.full(elements, 1000.0**ME)
    while not float(end.numpy()):
        ends = np.float64((DIRECTORY / "end").exists())
        strategy.run(lambda ends=ends: add_all([(v, mine), (u, mine), (end, ends)]))
        found = v.numpy(), u.numpy()
        assert all((value == found[0][0]).all() for value in found)
        say("did", strategy.round - 1)
        say("sums", sums)
        time.sleep(0.05)
    say("all", [float(v.numpy()[0]), float(u.numpy()[0])])


def test_a_worker_of_the_host_is_lost(tmp_path):
    """The others go on within its lease, in sums again, and both servers count the same.

    All that was answered to the lost worker counts, and at most one contribution more. The others push by themselves
    what it has gathered and not sent.
    """
    keys = {"ps": 2, "workers": 3, "chief": "driver", "timeouts": QUICK, "local_reduction": True, "gates": ["never"]}
    with ProcessCluster(endure_in_sums, tmp_path, (560_000,), **keys) as job:
        job.until(lambda: any(job.said(task, "holds") for task in WORKERS))
        gone = next(task for task in WORKERS if job.said(task, "holds"))
        others = [task for task in WORKERS if task != gone]
        job.kill(gone)
        goes_on(job, others, 3 * QUICK.session_timeout)
        (tmp_path / "end").touch()
        ((v, u),) = {tuple(job.hear(task, "all")) for task in others}
        assert v == u
        for task in WORKERS:
            count, did = int(v) // 1000**task.index % 1000, len(job.said(task, "did"))
            assert did <= count <= did + (task == gone), (task, count, did)
        for task in others:
            assert job.exited(task) == 0


def goes_on(job, others, seconds: float) -> None:
    """Waits until the others have done more rounds, and send sums to both servers again."""

    def sums():
        return np.sum([job.said(task, "sums")[-1] for task in others], axis=0)

    began, before, sent = time.monotonic(), {task: len(job.said(task, "did")) for task in others}, sums()
    job.until(lambda: all(len(job.said(task, "did")) > before[task] + 2 for task in others))
    assert time.monotonic() - began < seconds
    job.until(lambda: bool((sums() > sent).all()))
