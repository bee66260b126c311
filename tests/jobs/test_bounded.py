"""Workers with bounded staleness: never too far ahead, and nobody waits for who is gone."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import numpy as np
import pytest

import psclient as ps
from pstesting.processes import MARGIN, PS0, QUICK, W0, W1, ProcessCluster
from pstesting.script import add_all
from tests.kit.workers import PATIENT, in_threads, learn, total


def history(rounds, k, slow, seconds):
    """Three workers, one of them slow; each counts its pushes in an element of its own.

    What a step reads says how far all are: nobody computes from what lacks a push of more than k rounds ago.
    """
    ended = threading.Barrier(3)

    def push(strategy, worker):
        with strategy.scope():
            v = ps.Variable(np.zeros(3, "int64"), name="v")
        mine, worst, ahead = np.eye(3, dtype="int64")[worker], 0, 0

        def step():
            seen = v.numpy()
            add_all([(v, mine)])
            return seen

        while strategy.round < rounds:
            if slow == worker:
                time.sleep(seconds)
            number = strategy.round
            seen = strategy.run(step)
            worst = max(worst, number - int(seen.min()))
            ahead = max(ahead, int(seen.max()) - int(seen.min()))
        ended.wait()
        return worst, ahead, v.numpy().tolist()

    found = in_threads(push, 3, 1, consistency=ps.BoundedStaleness(k))
    for worst, ahead, sums in found:
        assert worst <= k
        assert ahead <= k + 1  # one push more is applied, and its answer held
        assert sums == [rounds] * 3
    assert found[0][0] == k  # the bound was met: it is no accident that nobody went further


@pytest.mark.parametrize(
    ("k", "rounds"),
    [(2, 40), (0, 15), pytest.param(3, 3334, marks=pytest.mark.soak)],
)
def test_the_history_never_shows_a_greater_gap(k, rounds):
    """With a straggler; with k = 0 all keep step. The soak looks at 10,000 rounds."""
    history(rounds, k, 2, 0.005)


def test_a_killed_straggler_releases_the_others_and_comes_back(tmp_path):
    """The others stand k rounds ahead of it, go on within its lease, and its next process begins where they are."""
    keys = {"ps": 2, "workers": 2, "chief": "driver", "gates": ["go0", "go1", "end"], "timeouts": QUICK}
    stops = [[1, 4, "go1"], [0, 15, "go0"]]
    with (
        ProcessCluster(learn, tmp_path, (25, "ps.BoundedStaleness(2)", stops), **keys) as job,
        job.server(PS0) as first,
    ):
        job.hear(W1, "at", 4)
        job.hear(W0, "did", 5)
        job.until(lambda: any(one.missing == (W1,) for one in first.status().waiting))
        assert job.said(W0, "did") == list(range(6))
        assert first.status().gap == 3  # one push more is applied, whose answer is held
        began = time.monotonic()
        job.kill(W1)
        job.hear(W0, "at", 15)
        assert time.monotonic() - began < 2 * QUICK.lease + MARGIN
        job.open("go1")
        job.start(W1)
        # It begins where the other is, and gets two rounds ahead of it.
        job.hear(W1, "did", 16)
        assert job.said(W1, "did") == [*range(4), 15, 16]
        job.open("go0")
        job.hear(W0, "done", 25)
        job.hear(W1, "done", 25)
        job.open("end")
        for task in (W0, W1):
            assert job.hear(task, "sums") == total(25, 4 + 10)
        job.finish()


def test_workers_on_different_servers_keep_step():
    """A server that a worker's rounds do not touch is told of each: at once, and not with the next beat."""
    ended = threading.Barrier(2)

    def push(strategy, worker):
        with strategy.scope():
            both = [ps.Variable(np.zeros(2), name=f"v{server}") for server in (0, 1)]
        for _ in range(10):
            strategy.run(lambda: add_all([(both[worker], np.ones(2))]))
        ended.wait()
        return [v.numpy().tolist() for v in both]

    rare = replace(PATIENT, beat=PATIENT.lease / 3)  # a test that waits for beats takes minutes
    options = {"consistency": ps.BoundedStaleness(0), "ps_strategy": "round_robin", "timeouts": rare}
    began = time.monotonic()
    assert in_threads(push, **options) == [[[10.0] * 2] * 2] * 2
    assert time.monotonic() - began < 2 * rare.beat


def test_who_has_no_data_left_is_not_waited_for():
    """It rests until its next round, which is one of those that the others are at."""
    ended, over = threading.Barrier(2), threading.Barrier(2)

    def push(strategy, worker):
        with strategy.scope():
            v = ps.Variable(np.zeros(()), name="v")
        mine = ps.ArrayDataset(np.ones((30, 4)[worker])).batch(1)
        for batch in strategy.distribute_datasets_from_function(lambda context: mine):
            strategy.run(lambda batch=batch: add_all([(v, batch.sum())]))
        assert strategy.round == (30, 4)[worker]
        ended.wait()
        strategy.run(lambda: add_all([(v, 100.0)]))
        over.wait()
        return strategy.round, float(v.numpy())

    (first, one), (second, other) = in_threads(push, servers=1, consistency=ps.BoundedStaleness(1))
    assert (first, one, other) == (31, 234.0, 234.0)
    assert second >= 30


@pytest.mark.soak
def test_who_hangs_is_left_out(tmp_path):
    """It holds the others up for as long as a round may take, and no longer."""
    timeouts = replace(QUICK, lease=2.0, round=6.0)
    keys = {"workers": 2, "chief": "driver", "gates": ["go1", "end"], "timeouts": timeouts}
    with ProcessCluster(learn, tmp_path, (10, "ps.BoundedStaleness(1)", [[1, 1, "go1"]]), **keys) as job:
        job.hear(W0, "done", 10)
        job.open("go1")
        job.open("end")
        assert job.exited(W1) == 1
        assert "held up a round for longer than PS_TIMEOUT_ROUND" in job.errors(W1)
        assert job.exited(W0) == 0
