"""Workers that die, stop, or come back: rounds go on, and every contribution counts once and whole, or not at all."""

from __future__ import annotations

import time

import numpy as np
import pytest

import psclient as ps
from pstesting import faults
from pstesting.faults import Stall
from pstesting.processes import CHIEF, MARGIN, PS0, PS1, QUICK, W0, W1, W2, ProcessCluster
from pstesting.script import ME, add_all, gate, say
from tests.kit.internals import Task

W3 = Task("worker", 3)

LEASE = QUICK.lease


def endure(rounds, stops, leaves, elements=4, stall=None, whole=True):
    """Each contribution is a power of 100, so that the sums' digits count contributions by worker.

    Stops are (worker, round), each with a gate of its own; one worker leaves before a round.
    """
    if stall and stall[0] == ME:
        faults.use(
            Stall(lambda: strategy._session.waits[0] == stall[1], lambda: (say("stalled"), gate("never"))), only=1
        )
    strategy = ps.ParameterServerStrategy(consistency=ps.Sync(whole_rounds=whole))
    with strategy.scope():
        v = ps.Variable(np.zeros(elements), name="v")
        u = ps.Variable(np.zeros(elements), name="u")
    while strategy.round < rounds and [ME, strategy.round] != leaves:
        if [ME, strategy.round] in stops:
            say("at", strategy.round)
            gate(f"{ME} at {strategy.round}")
        mine = np.full(elements, 100.0**ME)
        strategy.run(lambda mine=mine: add_all([(v, mine), (u, mine)]))
        found = v.numpy(), u.numpy()
        assert all((value == value[0]).all() for value in found)
        say("did", strategy.round - 1)
    say("sums", [float(v[0]), float(u[0])])


def counts(*workers):
    """The sum of so many contributions of each worker."""
    return sum(count * 100.0**worker for worker, count in enumerate(workers))


def after_the_lease(job, task, round, began):
    """A task has done a round, not later than the lease allows."""
    job.hear(task, "did", round)
    assert time.monotonic() - began < LEASE + MARGIN


def test_workers_are_lost_one_after_another(tmp_path):
    """One leaves early, which nobody waits for; one is killed, and one is stopped: the others go on within a lease.

    They say which rounds are complete without whom, and end cleanly. The stopped one is told when it runs again.
    """
    stops = [[1, 5], [2, 7], [0, 9]]
    gates = [f"{worker} at {round}" for worker, round in stops]
    keys = {"ps": 2, "workers": 4, "chief": "driver", "timeouts": QUICK, "gates": gates}
    with ProcessCluster(endure, tmp_path, (12, stops, [3, 3]), **keys) as job:
        assert job.exited(W3) == 0
        job.hear(W1, "at", 5)
        job.kill(W1)
        began = time.monotonic()
        after_the_lease(job, W0, 5, began)
        job.hear(W2, "at", 7)
        job.pause(W2)
        job.open("2 at 7")
        began = time.monotonic()
        after_the_lease(job, W0, 7, began)
        job.resume(W2)
        assert job.exited(W2) == 1
        assert "this session was ended" in job.errors(W2)
        job.open("0 at 9")  # not before: with the last one the servers end, and would tell nobody
        assert job.hear(W0, "sums") == [counts(12, 5, 7, 3)] * 2
        assert f"round 5 of server 0 is complete without {W1}" in job.errors(W0)
        assert f"round 6 of server 0 is complete without {W1}" not in job.errors(W0)
        assert [job.exited(task) for task in (W0, CHIEF, PS0, PS1)] == [0] * 4


@pytest.mark.parametrize("whole", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_a_worker_killed_in_the_middle_of_a_push(tmp_path, whole):
    """A contribution counts if it is whole on all servers; without whole rounds each server counts what it has."""
    keys = {"ps": 2, "workers": 2, "chief": "driver", "timeouts": QUICK, "gates": ["never"]}
    with ProcessCluster(endure, tmp_path, (4, [], [], 560_000, [1, 2], whole), **keys) as job:
        job.hear(W1, "stalled")
        # The other server has both contributions.
        with job.server(PS0) as server:

            def has_all():
                found = server.status()
                waits = any(each.round == 2 and not each.missing for each in found.waiting)
                return waits if whole else found.round == 2

            job.until(has_all)
        job.kill(W1)
        began = time.monotonic()
        after_the_lease(job, W0, 2, began)
        assert job.hear(W0, "sums") == [counts(4, 2 if whole else 3), counts(4, 2)]
        assert f"round 2 of server 1 is complete without {W1}" in job.errors(W0)
        assert (f"round 2 of server 0 is complete without {W1}" in job.errors(W0)) == whole
        assert job.exited(W0) == 0


def learn(rows, batch, stops):
    """Adds up all rows of a dataset, each once; says which rows it took for which round.

    Stops are (worker, round, gate); at the gate "never" it has taken its rows.
    """
    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        v = ps.Variable(np.zeros(3), name="v")
    dataset = ps.ArrayDataset((np.arange(rows), np.arange(3.0 * rows).reshape(rows, 3))).shuffle(3).batch(batch)
    gates = {(round, name == "never"): name for who, round, name in stops if who == ME}
    say("open", float(v.read_value()[0]))
    for numbers, values in strategy.experimental_distribute_dataset(dataset):
        for took in (False, True):
            if took:
                say("took", [strategy.round, numbers])
            if (strategy.round, took) in gates:
                say("at", strategy.round)
                gate(gates[strategy.round, took])
        strategy.run(lambda values=values: add_all([(v, values.sum(axis=0))]))
        say("value", [strategy.round - 1, v.numpy()])
    say("sums", v.numpy())


def rows_taken(job, *tasks):
    return [row for task in tasks for _, rows in job.said(task, "took") for row in rows]


def exact(rows):
    return [float(sum(3 * row + column for row in rows)) for column in range(3)]


@pytest.mark.parametrize("chief", ["driver", pytest.param("script", marks=pytest.mark.soak)])
def test_workers_die_and_come_back(tmp_path, chief):
    """First one of them, then all: training goes on from the live variables and the data's position.

    A worker that comes back joins at a round boundary with the current values, at the group's place in the data. Every
    row counts once, but for those of the rounds that say that they were completed without it.
    """
    stops = [[1, 3, "never"], [0, 6, "one"], [0, 10, "all"], [1, 10, "all"]]
    keys = {"workers": 2, "chief": chief, "timeouts": QUICK, "gates": ["never", "one", "all"]}
    if chief == "script":
        stops = stops[:2]
    with ProcessCluster(learn, tmp_path, (96, 6, stops), **keys) as job, job.server(PS0) as server:

        def starts(*tasks):
            for task in tasks:
                job.start(task)
                job.hear(task, "open")
            job.until(lambda: len(server.status().epoch.members) == len(job.runners))

        job.hear(W1, "at", 3)
        job.kill(W1)
        lost = set(job.said(W1, "took")[-1][1])
        job.hear(W0, "at", 6)
        job.until(lambda: len(server.status().epoch.members) == len(job.runners) - 1)
        starts(W1)
        job.open("one")
        if chief == "driver":
            for task in (W0, W1):
                job.hear(task, "at", 10)
            for task in (W0, W1):
                job.kill(task)
            starts(W0, W1)
            job.open("all")
        for task in job.runners:
            assert job.hear(task, "sums") == exact(set(range(96)) - lost)
        assert sorted(rows_taken(job, *job.runners)) == list(range(96))
        assert lost
        # What it sees after a round is what the others see, also right after it has come back.
        seen = dict(job.said(W0, "value"))
        assert all(seen[round] == value for round, value in job.said(W1, "value"))
        assert job.said(W1, "value")[-1][0] == max(seen)
        for task in (*job.runners, PS0):
            assert job.exited(task) == 0


def test_worker_0_as_chief_dies_and_comes_back(tmp_path):
    """With it the chief dies; the other drives on in its place, and goes on with both when it is back."""
    stops, gates = [[0, 3, "never"], [1, 5, "back"]], ["never", "back"]
    with ProcessCluster(learn, tmp_path, (40, 4, stops), workers=2, gates=gates, timeouts=QUICK) as job:
        job.hear(W0, "at", 3)
        lost = job.said(W0, "took")[-1][1]
        job.kill(W0)
        job.hear_error(W1, f"nobody drives the job any more: {W1} does")
        job.hear(W1, "at", 5)
        job.start(W0)
        job.hear(W0, "open")
        job.open("back")
        for task in (W0, W1):
            assert job.hear(task, "sums") == exact(set(range(40)) - set(lost))
        job.finish()


# ---- Updates of variables that each worker makes alone ----


def push_both(rounds, stop, stays):
    """Adds to a variable of each kind on two servers; digits of a sum count contributions by worker.

    Worker 1 stands before one of its steps, and worker 0 before some of its, until the other one is back.
    """
    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        w = ps.Variable(np.zeros(4), name="w")
        t = ps.Variable(np.zeros(4), name="t", consistency=ps.Async())
        u = ps.Variable(np.zeros(4), name="u", consistency=ps.Async())
    mine = np.full(4, 1000.0**ME)
    while strategy.round < rounds:
        if ME == 1 and strategy.round == stop:
            say("at", strategy.round)
            gate("go")
        if ME == 0 and strategy.round in stays:
            gate(f"on{strategy.round}")
        strategy.run(lambda: add_all([(t, mine), (w, mine), (u, mine)]))
        say("sent")
        strategy.run(lambda: [t.read_value(), u.read_value()])
        say("own")
        w.numpy()
        say("made", list(strategy.last_round.contributors))
    say("done")
    gate("end")
    say("sums", [v.numpy().tolist() for v in (w, t, u)])


@pytest.mark.parametrize("after", ["sent", *(pytest.param(word, marks=pytest.mark.soak) for word in ("own", "made"))])
def test_a_worker_that_makes_rounds_of_its_own_dies_and_comes_back(tmp_path, after):
    """Once before its step, and once amid one, which then counts once or not at all: on each server, and whole.

    Its answered contributions count. The other does not wait for what it adds alone; in the rounds of all it waits
    until the lease ends. Started again, it is taken in where the other comes to the same section, and adds on.
    """
    stays = [6, 26]  # who comes is taken in a window of rounds later
    keys = {"ps": 2, "workers": 2, "chief": "driver", "timeouts": QUICK}
    gates = ["go", "end", *(f"on{round}" for round in stays)]
    with (
        ProcessCluster(push_both, tmp_path, (46, 4, stays), gates=gates, **keys) as job,
        job.server(PS0) as server,
    ):

        def sessions():
            return {member.session for member in server.status().epoch.members if member.task == W1}

        def comes_back(gate):
            before = sessions()
            job.kill(W1)
            job.open("go")
            job.start(W1)
            job.until(lambda: sessions() - before)
            job.open(gate)

        job.hear(W1, "at", 4)
        for _ in range(5):
            job.hear(W0, "own")  # also that of the step before which the other one stands
        comes_back("on6")
        for _ in range(3):
            job.hear(W1, after)
        comes_back("on26")
        for task in (W0, W1):
            job.hear(task, "done")
        job.open("end")
        common, *own = job.hear(W0, "sums")
        assert common == [sum(1000.0 ** (task == str(W1)) for each in job.said(W0, "made") for task in each)] * 4
        answered = len(job.said(W1, "own"))
        for value, *others in own:
            assert others == [value] * 3
            assert value % 1000 == len(job.said(W0, "own"))
            assert answered <= value // 1000 <= answered + 1
        job.finish()
