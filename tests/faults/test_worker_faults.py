"""Workers that die, stop, or come back: rounds go on, and every contribution counts once and whole, or not at all."""

from __future__ import annotations

import signal
import time

import numpy as np
import pytest

import psclient as ps
from pstesting import faults
from pstesting.faults import Stall
from pstesting.processes import CHIEF, MARGIN, PS0, QUICK, SECONDS, W0, W1, W2, ProcessCluster
from pstesting.script import ME, add_all, gate, open_gate, say

LEASE = QUICK.lease


def endure(rounds, stops, elements, stall, whole=True):
    """Each contribution is a power of 100, so that the sums' digits count contributions by worker.

    Stops are (worker, round), each with a gate of its own.
    """
    if stall and stall[0] == ME:
        faults.use(
            Stall(lambda: strategy._session.waits[0] == stall[1], lambda: (say("stalled"), gate("never"))), only=1
        )
    strategy = ps.ParameterServerStrategy(consistency=ps.Sync(whole_rounds=whole))
    with strategy.scope():
        v = ps.Variable(np.zeros(elements), name="v")
        u = ps.Variable(np.zeros(elements), name="u")
    say("open", strategy.task.index)
    while strategy.round < rounds:
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


def test_a_worker_killed_between_rounds(tmp_path):
    """The round completes within the lease, without it and saying so; the others end cleanly."""
    keys = {"ps": 2, "workers": 3, "chief": "driver", "timeouts": QUICK, "gates": ["1 at 5"]}
    with ProcessCluster(endure, tmp_path, (12, [[1, 5]], 4, None), **keys) as job:
        job.hear(W1, "at", 5)
        job.kill(W1)
        began = time.monotonic()
        after_the_lease(job, W0, 5, began)
        for task in (W0, W2):
            assert job.hear(task, "sums") == [counts(12, 5, 12)] * 2
            assert f"round 5 of server 0 is complete without {W1}" in job.errors(task)
            assert f"round 6 of server 0 is complete without {W1}" not in job.errors(task)
        for task in (W0, W2, CHIEF, PS0):
            assert job.exited(task) == 0


@pytest.mark.parametrize("whole", [True, False])
def test_a_worker_killed_in_the_middle_of_a_push(tmp_path, whole):
    """What had arrived whole on all servers counts, and nothing else; without whole rounds, on each what it has."""
    keys = {"ps": 2, "workers": 2, "chief": "driver", "timeouts": QUICK, "gates": ["never"]}
    with ProcessCluster(endure, tmp_path, (8, [], 700_000, [1, 5], whole), **keys) as job:
        job.hear(W1, "stalled")
        # The other server has both contributions.
        with job.server(PS0) as server:

            def has_all():
                found = server.status()
                waits = any(each.round == 5 and not each.missing for each in found.waiting)
                return waits if whole else found.round == 5

            job.until(has_all)
        job.kill(W1)
        began = time.monotonic()
        after_the_lease(job, W0, 5, began)
        assert job.hear(W0, "sums") == [counts(8, 5 if whole else 6), counts(8, 5)]
        assert f"round 5 of server 1 is complete without {W1}" in job.errors(W0)
        assert (f"round 5 of server 0 is complete without {W1}" in job.errors(W0)) == whole
        assert job.exited(W0) == 0


def test_a_stopped_worker(tmp_path):
    """Its lease ends, and the others go on; when it runs again it is told, and disturbs nobody."""
    keys = {"ps": 2, "workers": 2, "timeouts": QUICK, "gates": ["1 at 5", "0 at 9"]}
    with ProcessCluster(endure, tmp_path, (12, [[1, 5], [0, 9]], 4, None), **keys) as job:
        job.hear(W1, "at", 5)
        job.kill(W1, signal.SIGSTOP)
        job.open("1 at 5")
        began = time.monotonic()
        after_the_lease(job, W0, 5, began)
        job.kill(W1, signal.SIGCONT)
        assert job.exited(W1) == 1
        assert "this session was ended" in job.errors(W1)
        job.open("0 at 9")  # not before: with the last one the servers end, and would tell nobody
        assert job.hear(W0, "sums") == [counts(12, 5)] * 2
        assert job.exited(W0) == 0


def test_a_worker_that_leaves_early(tmp_path):
    """It ends cleanly and is not waited for; the job ends cleanly when the last one does."""

    def leave(rounds):
        strategy = ps.ParameterServerStrategy()
        with strategy.scope():
            v = ps.Variable(np.zeros(2), name="v")
        while strategy.round < rounds[ME]:
            strategy.run(lambda: add_all([(v, np.full(2, 100.0**ME))]))
        say("sums", v.numpy())

    with ProcessCluster(leave, tmp_path, ([20, 5],), workers=2, chief="driver") as job:
        job.finish()
        assert job.said(W0, "sums")[0][0] in (counts(20, 5), counts(20, 5))


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


def restart(job, task, server, members):
    """Starts a task again, and waits until the cluster has taken note of it."""
    job.start(task)
    job.hear(task, "open")
    job.until(lambda: len(server.status().epoch.members) == members)


@pytest.mark.parametrize(
    ("chief", "deaths"),
    [
        ("driver", 1),
        pytest.param("script", 1, marks=pytest.mark.soak),
        pytest.param("none", 5, marks=pytest.mark.soak),
    ],
)
def test_a_worker_that_dies_and_comes_back(tmp_path, chief, deaths):
    """It joins at a round boundary with the current values, at the group's place in the data.

    Every row counts once, but for those of the rounds that say that they were completed without it.
    """
    stops = [stop for n in range(deaths) for stop in ([1, 3 + 8 * n, "never"], [0, 6 + 8 * n, f"go{n}"])]
    keys = {"workers": 2, "chief": chief, "timeouts": QUICK, "gates": {gate for *_, gate in stops}}
    lost = set()
    with ProcessCluster(learn, tmp_path, (240, 6, stops), **keys) as job, job.server(PS0) as server:
        for n in range(deaths):
            job.hear(W1, "at", 3 + 8 * n)
            job.kill(W1)
            lost |= set(job.said(W1, "took")[-1][1])
            job.hear(W0, "at", 6 + 8 * n)
            job.until(lambda: len(server.status().epoch.members) == len(job.runners) - 1)
            job.start(W1)
            job.hear(W1, "open")
            job.until(lambda: len(server.status().epoch.members) == len(job.runners))
            job.open(f"go{n}")
        for task in job.runners:
            assert job.hear(task, "sums") == exact(set(range(240)) - lost)
        assert sorted(rows_taken(job, *job.runners)) == list(range(240))
        assert lost
        # What it sees after a round is what the others see, also right after it has come back.
        seen = dict(job.said(W0, "value"))
        assert all(seen[round] == value for round, value in job.said(W1, "value"))
        assert job.said(W1, "value")[-1][0] == max(seen)
        for task in (*job.runners, PS0):
            assert job.exited(task) == 0


def test_all_workers_die_and_new_ones_come(tmp_path):
    """Training goes on from the live variables and the data's position: every row counts once."""
    stops = [[0, 5, "go"], [1, 5, "go"]]
    keys = {"workers": 2, "chief": "driver", "gates": ["go"], "timeouts": QUICK}
    with ProcessCluster(learn, tmp_path, (80, 4, stops), **keys) as job, job.server(PS0) as server:
        for task in (W0, W1):
            job.hear(task, "at", 5)
        for task in (W0, W1):
            job.kill(task)
        for task in (W0, W1):
            job.start(task)
            job.hear(task, "open")
        job.until(lambda: len(server.status().epoch.members) == 2)  # else the first may be done before the second comes
        job.open("go")
        for task in (W0, W1):
            assert job.hear(task, "sums") == exact(range(80))
        assert sorted(rows_taken(job, W0, W1)) == list(range(80))
        job.finish()


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


def come_back_behind(job):
    """Worker 1 dies in round 2, its next life reads in round 4 and waits, worker 0 goes on; returns what was read."""
    job.hear(W1, "at", 2)
    job.kill(W1)
    job.open("0 at 2")
    job.hear(W0, "at", 4)
    job.start(W1)
    before = job.hear(W1, "open")
    job.open("0 at 4")
    return before


def look_again(rows, batch):
    """Adds up all rows of a dataset; a life that finds something there waits before it begins."""
    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        v = ps.Variable(np.zeros(3), name="v")
    dataset = ps.ArrayDataset(np.arange(3.0 * rows).reshape(rows, 3)).batch(batch)
    found = float(v.read_value()[0])
    say("open", found)
    if found:
        gate("look")
    for values in strategy.experimental_distribute_dataset(dataset):
        if strategy.round in (2, 4):
            say("at", strategy.round)
            gate(f"{ME} at {strategy.round}")
        strategy.run(lambda values=values: add_all([(v, values.sum(axis=0))]))
    say("sums", v.numpy())


def test_what_was_read_before_taking_part_is_read_again(tmp_path):
    """A worker that comes back when the others are done finds nothing left to do, and the value as it is then."""
    gates = ["look", "0 at 2", "1 at 2", "0 at 4"]
    with ProcessCluster(look_again, tmp_path, (24, 4), workers=2, chief="driver", gates=gates, timeouts=QUICK) as job:
        before = come_back_behind(job)
        sums = job.hear(W0, "sums")
        assert 0 < before < sums[0]
        job.open("look")
        assert job.hear(W1, "sums") == sums
        job.finish()


def test_a_worker_without_data_of_its_own_comes_back(tmp_path):
    """Its own batches are long used up: it gets empty ones until the others are done, and is in step afterwards."""

    def work(lengths):
        strategy = ps.ParameterServerStrategy()
        with strategy.scope():
            v = ps.Variable(np.zeros(1), name="v")
        say("open")

        def mine(context):
            return [np.full((2, 1), 100.0**ME) for _ in range(lengths[ME])]

        batches = strategy.experimental_distribute_datasets_from_function(mine)
        for turn in range(2):
            sizes = []
            for batch in batches:
                if (ME, turn, strategy.round) in ((0, 0, 6), (1, 0, 3)):
                    say("at", strategy.round)
                    gate("go" if ME == 0 else "never")
                strategy.run(lambda batch=batch: add_all([(v, batch.sum(axis=0))]))
                sizes.append(len(batch))
            say("pass", [turn, sizes, strategy.round])
        say("sums", float(v[0]))

    keys = {"workers": 2, "chief": "driver", "gates": ["go", "never"], "timeouts": QUICK}
    with ProcessCluster(work, tmp_path, ((12, 4),), **keys) as job, job.server(PS0) as server:
        job.hear(W1, "at", 3)
        job.kill(W1)
        job.hear(W0, "at", 6)
        job.start(W1)
        job.hear(W1, "open")
        job.until(lambda: len(server.status().epoch.members) == 2)
        job.open("go")
        for task, sizes, rest in ((W0, [2] * 12, [2] * 12), (W1, [0] * 5, [2] * 4 + [0] * 8)):
            assert job.hear(task, "pass") == [0, sizes, 12]
            assert job.hear(task, "pass") == [1, rest, 24]
            assert job.hear(task, "sums") == 2 * counts(24, 3 + 4)
        job.finish()


def test_the_launcher_replaces_a_worker(tmp_path):
    """`--restarts`: a worker that fails in the middle is started again, and the sums stay exact."""

    def fail_once(rounds):
        strategy = ps.ParameterServerStrategy()
        with strategy.scope():
            v = ps.Variable(np.zeros(2), name="v")
        first = float(v.read_value()[0]) == 0
        if not first:
            open_gate("go")
        while strategy.round < rounds:
            if ME == 1 and strategy.round == 5 and first:
                raise ValueError("an accident")
            strategy.run(lambda: add_all([(v, np.full(2, 100.0**ME))]))
            if not ME and strategy.round == 8:
                gate("go")
        say("sums", [float(v[0]), strategy.round])

    with ProcessCluster(
        fail_once, tmp_path, (20,), workers=2, chief="driver", restarts=1, gates=["go"], timeouts=QUICK
    ) as job:
        job.finish()
        total, _ = job.said(W0, "sums")[0]
        assert total % 100 == 20
        assert total // 100 >= 5
        assert "ValueError: an accident" in job.errors(W1)


@pytest.mark.soak  # test_bad_input has a script that raises in a cluster, and launch/test_cluster who is left
def test_a_worker_that_fails_ends_all(tmp_path):
    """Without restarts its code and its traceback are what the launcher shows, and nobody is left."""

    def fail(rounds):
        strategy = ps.ParameterServerStrategy()
        with strategy.scope():
            v = ps.Variable(np.zeros(2), name="v")
        while strategy.round < rounds:
            if ME == 1 and strategy.round == 5:
                raise ValueError("an accident")
            strategy.run(lambda: add_all([(v, np.ones(2))]))

    with ProcessCluster(fail, tmp_path, (20,), workers=2, chief="driver") as job:
        outcome = job.cluster.wait(SECONDS)
        assert (outcome.code, outcome.task) == (1, W1)
        assert outcome.report.endswith("ValueError: an accident")
        assert all(process.returncode is not None for process in job.cluster.processes.values())
