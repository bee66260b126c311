"""Workers and chiefs are killed in the middle of a change of consistency, and come back."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import psclient as ps
from pstesting import faults
from pstesting.faults import Faults
from pstesting.processes import CHIEF, QUICK, W0, W1, W2, ProcessCluster
from pstesting.script import ME, add_all, gate, say

WORKERS = (W0, W1, W2)


def road(plan, stops):
    """Makes rounds with one consistency after the other, each up to a round that all share.

    Worker 1 waits before some of the changes, and worker 0 after them. Digits of a sum count contributions by worker.
    """
    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        v = ps.Variable(np.zeros(4), name="v")
        u = ps.Variable(np.zeros(4), name="u")
    mine = np.full(4, 1000.0**ME)
    for number, (consistency, until) in enumerate(plan):
        if strategy.round >= until:
            continue
        if number in stops and ME == 1:
            gate(f"go{number}")
        strategy.set_consistency(eval(consistency))
        say("changed", number)
        if number in stops and ME != 2:
            gate(f"on{number}")
        while strategy.round < until:
            strategy.run(lambda: add_all([(v, mine), (u, mine)]))
            v.numpy()
            last = strategy.last_round
            say("made", [last.number, str(strategy.consistency), list(last.contributors)])
    say("sums", [v.numpy().tolist(), u.numpy().tolist()])
    gate("end")


ROAD = (
    ("ps.Sync()", 3),
    ("ps.Async()", 7),
    ("ps.Sync()", 10),
    ("ps.BoundedStaleness(2)", 14),
    ("ps.Sync()", 32),  # who comes is taken in a window of rounds later
)


def expected(job):
    """The values of both variables: by the common rounds that worker 0 has seen, and the own rounds of each."""
    counts = Counter()
    for task in WORKERS:
        for _, consistency, contributors in job.said(task, "made"):
            if "Sync" not in consistency or task == W0:
                counts.update(contributors)
    return [[sum(counts[str(task)] * 1000.0**task.index for task in WORKERS)] * 4] * 2


@pytest.mark.parametrize(
    "killed",
    [
        pytest.param({1: "early", 2: "early", 3: "late", 4: "chief"}, id="all"),
        pytest.param({1: "late", 4: "late"}, id="late", marks=pytest.mark.soak),
        pytest.param({2: "late"}, id="late to rounds of all", marks=pytest.mark.soak),
        pytest.param({3: "early"}, id="early", marks=pytest.mark.soak),
        pytest.param({2: "chief", 4: "early"}, id="chief first", marks=pytest.mark.soak),
    ],
)
def test_a_worker_that_is_killed_in_changes_comes_back(tmp_path, killed):
    """Before a change is made, or after it: each contribution counts once, and its processes make rounds as the others.

    If the chief is killed, who drives in its place finds in the sessions who has asked for what, and makes the change.
    """
    gates = [*(f"{word}{number}" for number in killed for word in ("go", "on")), "end"]
    keys = {"ps": 2, "workers": 3, "chief": "driver", "gates": gates, "timeouts": QUICK}
    with ProcessCluster(road, tmp_path, (ROAD, list(killed)), **keys) as job:
        for number, how in killed.items():
            asks = f"waits for {W1} in set_consistency({ROAD[number][0]})"
            together = "Sync" in ROAD[number][0]
            job.hear_error(W2, asks)
            job.kill(CHIEF if how == "chief" else W2)
            if how == "early":  # to asynchronous workers it comes at once, and so to the change itself
                job.start(W2)
                job.hear_error(W2, asks if together else "waits to be taken in")
            job.open(f"go{number}")
            job.hear(W0, "changed", number)
            if how == "late":
                job.start(W2)
            if how == "late" and together:
                job.hear_error(W2, "waits to be taken in")
            job.open(f"on{number}")
        sums = [job.hear(task, "sums") for task in WORKERS]
        assert sums == [expected(job)] * 3
        made = [tuple(one) for one in job.said(W0, "made")]
        numbers = [[number for number, *_ in job.said(task, "made")] for task in WORKERS]
        assert numbers[0] == sorted(set(numbers[0]))
        # Who comes back may be a round ahead of the others where they go on together: then that is theirs as well.
        assert {number for each in numbers for number in each} == set(range(ROAD[-1][1]))
        assert str(W2) in made[-1][2]  # it is there again
        job.open("end")
        if "chief" not in killed.values():
            job.finish()


def hammered(rates, turns):
    """Goes from one consistency to another again and again, while the network loses and repeats what it likes."""
    network = Faults(11 + ME, rates)
    faults.use(network)
    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        v = ps.Variable(np.zeros(4), name="v")
        u = ps.Variable(np.zeros(4), name="u")
    mine, wrong, made = np.full(4, 1000.0**ME), [], 0
    for turn in range(turns):
        kinds = ps.Sync(), ps.Async(), ps.Sync(nonfinite="skip"), ps.BoundedStaleness(1)
        consistency = kinds[turn % 4]
        strategy.set_consistency(consistency)
        total = made * sum(1000.0**worker for worker in range(3))
        if isinstance(consistency, ps.Sync) and {*v.numpy().tolist(), *u.numpy().tolist()} != {total}:
            wrong.append([turn, total, v.numpy().tolist(), u.numpy().tolist()])
        until = strategy.round + 2
        while strategy.round < until:
            strategy.run(lambda: add_all([(v, mine), (u, mine)]))
            made += 1
    say("wrong", wrong)
    say("made", made)
    say("faults", network.counts)


ALL = {"drop": 0.1, "cut": 0.05, "repeat": 0.05, "twice": 0.05, "late": 0.05, "lose": 0.1}


@pytest.mark.ci
@pytest.mark.parametrize(
    ("rates", "turns"), [(ALL, 9), pytest.param({k: 2 * v for k, v in ALL.items()}, 41, marks=pytest.mark.soak)]
)
def test_each_contribution_counts_once_whatever_the_network_does(tmp_path, rates, turns):
    """Also what is asked again, and heard late, of a change."""
    with ProcessCluster(hammered, tmp_path, (rates, turns), ps=2, workers=3) as job:
        for task in WORKERS:
            assert job.hear(task, "wrong") == []
            assert job.hear(task, "made") == 2 * turns
        job.finish()


def pushes(elements):
    """The second push of worker 2 is whole on one server, and begins on the other; the others call for a change."""
    stalls = []
    if ME == 2:
        faults.use(faults.Stall(lambda: bool(stalls), lambda: (say("stalled"), gate("never"))), only=1)
    strategy = ps.ParameterServerStrategy(consistency=ps.Async())
    with strategy.scope():
        v = ps.Variable(np.zeros(elements), name="v")
        u = ps.Variable(np.zeros(elements), name="u")
    mine = np.full(elements, 1000.0**ME)

    def say_values(what):
        say(what, [np.unique(variable.numpy()) for variable in (v, u)])

    for _ in range(2):
        strategy.run(lambda: add_all([(v, mine), (u, mine)]))
        v.numpy()
        stalls.append(ME)
    strategy.set_consistency(ps.Sync())
    say_values("before")
    strategy.run(lambda: add_all([(v, mine), (u, mine)]))
    say_values("after")
    gate("end")


@pytest.mark.ci
def test_a_push_of_a_lost_worker_counts_where_it_was_whole_before_a_change(tmp_path):
    """And never later: what the others read after the change stays as it is, until they push."""
    keys = {"ps": 2, "workers": 3, "chief": "driver", "gates": ["never", "end"], "timeouts": QUICK}
    with ProcessCluster(pushes, tmp_path, (560_000,), **keys) as job:
        job.hear(W2, "stalled")
        job.hear_error(W0, f"waits for {W2}")
        job.kill(W2)
        for task in (W0, W1):
            assert job.hear(task, "before") == [[2_002_002.0], [1_002_002.0]]
            assert job.hear(task, "after") == [[2_003_003.0], [1_003_003.0]]
        job.open("end")
