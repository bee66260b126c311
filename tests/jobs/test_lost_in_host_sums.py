"""Workers of one host that sum their contributions: if one is lost, each contribution counts once, or not at all."""

from __future__ import annotations

import signal
import time

import numpy as np
import pytest

import psclient as ps
from pstesting.processes import QUICK, W0, W1, W2, ProcessCluster
from pstesting.script import DIRECTORY, ME, add_all, gate, say

WORKERS = (W0, W1, W2)

LARGE = 560_000
"""Elements of float64 that travel in more than one part."""


def endure(elements, sends, server):
    """Adds the same to a variable of each server, until a file says that it is the end.

    Each contribution is a power of 1000, so that the sums' digits count contributions by worker. A worker says how many
    sums it has sent to each server. Once they make sums one worker holds: where it has gathered what goes to `server`,
    or, if that is None, at a gate before a round; `sends` says whether that one sends their sums.
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
        if said.parts and sums[to] > 3 and to == server:
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
        if server is None and strategy.round > 3 and sends == near.leads:
            hold()
        ends = np.float64((DIRECTORY / "end").exists())
        strategy.run(lambda ends=ends: add_all([(v, mine), (u, mine), (end, ends)]))
        found = v.numpy(), u.numpy()
        assert all((value == found[0][0]).all() for value in found)
        say("did", strategy.round - 1)
        say("sums", sums)
        time.sleep(0.05)
    say("all", [float(v.numpy()[0]), float(u.numpy()[0])])


def soaked(*values):
    return pytest.param(*values, marks=pytest.mark.soak)


@pytest.mark.parametrize(
    ("how", "elements", "sends", "server"),
    [
        # who is lost between two rounds
        (signal.SIGKILL, 50, True, None),
        # in one run of many each of the three led a part, so that none held
        soaked(signal.SIGSTOP, 50, False, None),
        soaked(signal.SIGKILL, 50, False, None),
        soaked(signal.SIGSTOP, 50, True, None),
        soaked(signal.SIGSTOP, LARGE, False, None),
        soaked(signal.SIGKILL, LARGE, True, None),
        soaked(signal.SIGKILL, LARGE, False, None),
        soaked(signal.SIGSTOP, LARGE, True, None),
        # who sends, while it does
        (signal.SIGKILL, LARGE, True, 1),
        soaked(signal.SIGKILL, LARGE, True, 0),
        soaked(signal.SIGKILL, 50, True, 0),
        soaked(signal.SIGKILL, 50, True, 1),
    ],
)
def test_a_worker_of_the_host_is_lost(tmp_path, how, elements, sends, server):
    """The others go on within its lease, in sums again, and both servers count the same.

    All that was answered to the lost worker counts, and at most one contribution more. The others push by themselves
    what it has gathered and not sent. A worker that stood still is told that it is out.
    """
    keys = {"ps": 2, "workers": 3, "chief": "driver", "timeouts": QUICK, "aggregation": "host", "gates": ["never"]}
    with ProcessCluster(endure, tmp_path, (elements, sends, server), **keys) as job:
        job.until(lambda: any(job.said(task, "holds") for task in WORKERS))
        gone = next(task for task in WORKERS if job.said(task, "holds"))
        others = [task for task in WORKERS if task != gone]
        job.kill(gone, how)
        goes_on(job, others, 3 * QUICK.lease)
        if how == signal.SIGSTOP:
            job.kill(gone, signal.SIGCONT)
            job.kill(gone)
        (tmp_path / "end").touch()
        sums = {tuple(job.hear(task, "all")) for task in others}
        assert len(sums) == 1
        v, u = sums.pop()
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
