"""Workers of one host that sum what they contribute: whoever is lost, each contribution counts once, or not at all."""

from __future__ import annotations

import signal
import time

import numpy as np
import pytest

import psclient as ps
from pstesting.processes import QUICK, W0, W1, W2, ProcessCluster
from pstesting.script import DIRECTORY, ME, add_all, gate, say
from pswire.cluster import Task

WORKERS = (W0, W1, W2)
KEYS = {"ps": 2, "workers": 3, "chief": "driver", "timeouts": QUICK, "aggregation": "host"}


def endure(elements, stop, stall):
    """Adds the same to a variable of each server, until a file says that it is the end.

    Each contribution is a power of 1000, so that the sums' digits count contributions by worker. A worker says how many
    sums it has sent to each server. Once they make sums one worker holds: at a gate before a round, if it sends or does
    not, as `stop` says; or where it has gathered what goes to the server `stall`.
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

    def push(server, said, payload):
        if said.parts and sums[server] > 20 and server == stall:
            hold()
        sums[server] += bool(said.parts)
        return strategy._exchange.pushes.once(server, said, payload)

    near._push = push
    with strategy.scope():
        v = ps.Variable(np.zeros(elements), name="v")
        u = ps.Variable(np.zeros(elements), name="u")
        end = ps.Variable(0.0, name="end")
    while not float(end.numpy()):
        if stall is None and strategy.round > 20 and stop == near.leads:
            hold()
        mine = np.full(elements, 1000.0**ME)
        ends = np.float64((DIRECTORY / "end").exists())
        strategy.run(lambda mine=mine, ends=ends: add_all([(v, mine), (u, mine), (end, ends)]))
        found = v.numpy(), u.numpy()
        assert all((value == found[0][0]).all() for value in found)
        say("did", strategy.round - 1)
        say("sums", sums)
        time.sleep(0.005)
    say("all", [float(v.numpy()[0]), float(u.numpy()[0])])


def sums_of(job, tasks) -> list[int]:
    """Returns how many sums they have sent to each server."""
    return [sum(found) for found in zip([0, 0], *(job.said(task, "sums")[-1] for task in tasks), strict=True)]


def holding(job) -> Task:
    """Returns who holds, once one does."""
    job.until(lambda: any(job.said(task, "holds") for task in WORKERS))
    return next(task for task in WORKERS if job.said(task, "holds"))


def end(job, tmp_path, gone: Task, others) -> None:
    """Lets the others end, and checks their sums: of who is gone all count that were answered, and at most one more."""
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
    began, before, sums = time.monotonic(), {task: len(job.said(task, "did")) for task in others}, sums_of(job, others)
    job.until(lambda: all(len(job.said(task, "did")) > before[task] + 2 for task in others))
    assert time.monotonic() - began < seconds
    job.until(lambda: all(now > then for now, then in zip(sums_of(job, others), sums, strict=True)))


@pytest.mark.parametrize("sends", [True, False], ids=["who sends", "another"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("elements", [50, 700_000])
def test_a_worker_of_the_host_is_lost(tmp_path, elements, how, sends):
    """The others go on within its lease, in sums again; a worker that stood still is told that it is out."""
    with ProcessCluster(endure, tmp_path, (elements, sends, None), gates=["never"], **KEYS) as job:
        gone = holding(job)
        others = [task for task in WORKERS if task != gone]
        job.kill(gone, how)
        goes_on(job, others, 3 * QUICK.lease)
        if how == signal.SIGSTOP:
            job.kill(gone, signal.SIGCONT)
            job.kill(gone)
        end(job, tmp_path, gone, others)


@pytest.mark.parametrize("elements", [50, 700_000])
@pytest.mark.parametrize("server", [0, 1])
def test_who_sends_is_lost_while_it_does(tmp_path, elements, server):
    """Both servers count the same: the others push by themselves what it has not sent, and one may have it."""
    with ProcessCluster(endure, tmp_path, (elements, None, server), gates=["never"], **KEYS) as job:
        gone = holding(job)
        others = [task for task in WORKERS if task != gone]
        job.kill(gone)
        goes_on(job, others, 3 * QUICK.lease)
        end(job, tmp_path, gone, others)
