"""A worker is killed in the middle of a change of consistency, and comes back."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import psclient as ps
from pstesting.processes import QUICK, W0, W1, W2, ProcessCluster
from pstesting.script import ME, add_all, gate, say

WORKERS = (W0, W1, W2)


def road(plan, stop):
    """Makes rounds with one consistency after the other, each up to a round that all share.

    Worker 1 waits before one of the changes, and the others after it. Digits of a sum count contributions by worker.
    """
    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        v = ps.Variable(np.zeros(4), name="v")
        u = ps.Variable(np.zeros(4), name="u")
    mine = np.full(4, 1000.0**ME)
    say("came")
    for number, (consistency, until) in enumerate(plan):
        if strategy.round >= until:
            continue
        if number == stop and ME == 1:
            gate("go")
        strategy.set_consistency(eval(consistency))
        say("changed", number)
        if number == stop and ME != 2:
            gate("on")
        while strategy.round < until:
            strategy.run(lambda: add_all([(v, mine), (u, mine)]))
            v.numpy()
            last = strategy.last_round
            say("made", [last.number, str(strategy.consistency), list(last.contributors)])
    say("sums", [v.numpy().tolist(), u.numpy().tolist()])
    gate("end")


ROAD = (
    ("ps.Sync()", 4),
    ("ps.Async()", 9),
    ("ps.Sync()", 13),
    ("ps.BoundedStaleness(2)", 18),
    ("ps.Sync()", 36),  # who comes is taken in a window of rounds later
)


def expected(job):
    """What both variables are: by what worker 0 has seen of common rounds, and by what each says of its own."""
    counts = Counter()
    for task in WORKERS:
        for _, consistency, contributors in job.said(task, "made"):
            if "Sync" not in consistency or task == W0:
                counts.update(contributors)
    return [[sum(counts[str(task)] * 1000.0**task.index for task in WORKERS)] * 4] * 2


def check_road(tmp_path, stop, early):
    """Worker 2 waits in a change when it is killed, and comes back before the change is made, or after it."""
    gates = ["go", "on", "end"]
    keys = {"ps": 2, "workers": 3, "chief": "driver", "gates": gates, "timeouts": QUICK}
    with ProcessCluster(road, tmp_path, (ROAD, stop), **keys) as job:
        job.hear_error(W2, f"waits for {W1} in set_consistency({ROAD[stop][0]})")
        job.kill(W2)
        waits = f"waits for {W1} in set_consistency({ROAD[stop][0]})", "waits to be taken in"
        together = "Sync" in ROAD[stop][0]
        if early:  # to asynchronous workers it comes at once, and so to the change itself
            job.start(W2)
            job.hear_error(W2, waits[0] if together else waits[1])
        job.open("go")
        job.hear(W0, "changed", stop)
        if not early:
            job.start(W2)
        if together and not early:
            job.hear_error(W2, waits[1])
        job.open("on")
        sums = [job.hear(task, "sums") for task in WORKERS]
        assert sums == [expected(job)] * 3
        made = [tuple(one) for one in job.said(W0, "made")]
        assert [number for number, *_ in made] == list(range(36))
        assert str(W2) in made[-1][2]  # it is there again
        job.open("end")
        job.finish()


@pytest.mark.parametrize(("stop", "early"), [(1, True), (2, True), (3, False), (4, True)])
def test_a_worker_that_is_killed_in_a_change_comes_back(tmp_path, stop, early):
    """Each contribution counts once, and each of its processes makes its rounds as the others do."""
    check_road(tmp_path, stop, early)


@pytest.mark.soak
@pytest.mark.parametrize(("stop", "early"), [(1, False), (2, False), (3, True), (4, False)])
def test_a_worker_that_is_killed_in_a_change_comes_back_at_other_times(tmp_path, stop, early):
    """The same."""
    check_road(tmp_path, stop, early)
