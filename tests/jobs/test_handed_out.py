"""Batches that are handed out to real processes: each example once in a pass, whoever is slow, dies or comes late."""

from __future__ import annotations

import threading
import time
from itertools import pairwise

import numpy as np
import pytest

import psclient as ps
from pstesting.processes import CALM, PS0, QUICK, W0, W1, W2, ProcessCluster
from pstesting.script import ME, add_all, gate, say
from tests.kit.rig import SOON
from tests.kit.workers import in_threads, meet

EXAMPLES, BATCH = 120, 3
SOME = 60
"""Examples of workers in threads."""


def train(bound, epochs, paces, stops):
    """Counts in a variable how often each example was visited. Says what it takes, and when it has ended a pass.

    Args:
        bound: of staleness; -1 for none.
        epochs: passes.
        paces: seconds that a step of each worker takes.
        stops: for each worker (batches that it has taken before, gate, whether the gate is before the round).
    """
    how = ps.Async() if bound < 0 else ps.BoundedStaleness(bound)
    strategy = ps.ParameterServerStrategy(consistency=how)
    with strategy.scope():
        ps.Variable(np.zeros(1), name="other")
        visits = ps.Variable(np.zeros(120, "int64"), name="visits")
    dynamic = ps.InputOptions(auto_shard_policy=ps.AutoShardPolicy.DYNAMIC)
    data = ps.ArrayDataset(np.arange(120)).shuffle(7).batch(3)
    batches = strategy.experimental_distribute_dataset(data, dynamic)

    def step(rows):
        mine = np.zeros(120, "int64")
        mine[rows] = 1
        add_all([(visits, mine)])

    say("ready")
    gate("go")
    count = 0
    for epoch in batches.epochs(epochs):
        for rows in batches:
            say("took", [epoch, rows, time.monotonic()])
            time.sleep(paces[ME])
            for at, name, before in stops.get(ME, ()):
                if at == count and before:
                    visits.numpy()  # the rounds before it are answered
                    say("at", count)
                    gate(name)
            strategy.run(step, args=(rows,))
            count += 1
            for at, name, before in stops.get(ME, ()):
                if at == count - 1 and not before:
                    visits.numpy()  # the round is answered
                    say("at", count - 1)
                    gate(name)
        say("ended", [epoch, time.monotonic()])
    say("done", count)
    gate("end")
    say("visits", visits.numpy().tolist())


def rows_of(job, *tasks):
    """The examples that were taken in each pass, in order."""
    found = {}
    for task in tasks:
        for epoch, rows, _ in job.said(task, "took"):
            found[epoch] = sorted([*found.get(epoch, []), *rows])
    return found


@pytest.mark.parametrize(("servers", "bound"), [(2, -1), pytest.param(1, 60, marks=pytest.mark.soak)])
def test_who_is_fast_does_more_and_the_end_waits_for_one_batch(tmp_path, servers, bound):
    """One worker is four times slower: each example once in each pass, whose end waits for one of its batches at most.

    With two servers the counts are on the second, whose rounds server 0 does not see.
    """
    keys = {"ps": servers, "workers": 3, "chief": "driver", "gates": ["go", "end"], "timeouts": CALM}
    with ProcessCluster(train, tmp_path, (bound, 2, [0.1, 0.1, 0.4], {}), **keys) as job:
        for task in (W0, W1, W2):
            job.hear(task, "ready")
        job.open("go")
        counts = [job.hear(task, "done") for task in (W0, W1, W2)]
        job.open("end")
        for task in (W0, W1, W2):
            assert job.hear(task, "visits") == [2] * EXAMPLES
        job.finish()
        assert rows_of(job, W0, W1, W2) == {0: list(range(EXAMPLES)), 1: list(range(EXAMPLES))}
        assert sum(counts) == 2 * EXAMPLES // BATCH
        assert counts[2] < min(counts[:2])
        began = [at for _, _, at in job.said(W2, "took")]
        slowest = max(after - before for before, after in pairwise(began))
        for epoch in range(2):
            ended = [at for task in (W0, W1, W2) for of, at in job.said(task, "ended") if of == epoch]
            assert max(ended) < min(ended) + slowest + 0.3  # it would be 0.4, were one more in its hands


@pytest.mark.parametrize(
    ("before", "at"),
    [
        pytest.param(True, 4, id="before its round, in the same pass", marks=pytest.mark.soak),
        pytest.param(False, 45, id="after its round, in the next pass"),
        pytest.param(True, 45, id="before its round, in the next pass", marks=pytest.mark.soak),
        pytest.param(False, 4, id="after its round, in the same pass", marks=pytest.mark.soak),
    ],
)
def test_what_a_killed_worker_had_is_handed_out_again(tmp_path, before, at):
    """Each example counts once in each pass; of what it had pushed nothing is done again."""
    stops = {0: [(at, "on", True)], 1: [(at, "on", True)], 2: [(3, "never", before)]}
    keys = {"ps": 1, "workers": 3, "chief": "driver", "gates": ["go", "on", "never", "end"], "timeouts": QUICK}
    with ProcessCluster(train, tmp_path, (-1, 3, [0, 0, 0], stops), **keys) as job:
        for task in (W0, W1, W2):
            job.hear(task, "ready")
        job.open("go")
        for task in (W0, W1, W2):
            job.hear(task, "at")
        job.kill(W2)
        with job.server(PS0) as server:
            job.until(lambda: W2 not in [one.task for one in server.status().epoch.members])
        job.open("on")
        for task in (W0, W1):
            job.hear(task, "done")
        job.open("end")
        assert job.hear(W0, "visits") == [3] * EXAMPLES
        taken = [row for rows in rows_of(job, W0, W1).values() for row in rows]
        lost = [rows for _, rows, _ in job.said(W2, "took")]
        pushed = lost[: 3 if before else 4]
        assert sorted([*taken, *(row for rows in pushed for row in rows)]) == sorted(3 * list(range(EXAMPLES)))


def test_who_comes_late_gets_work_at_once(tmp_path):
    """A worker that was killed and started again begins where the others are, and not with what was done."""
    stops = {0: [(30, "on", True)], 1: [(30, "on", True)], 2: [(3, "never", True)]}
    keys = {"ps": 1, "workers": 3, "chief": "driver", "gates": ["go", "on", "never", "end"], "timeouts": QUICK}
    with ProcessCluster(train, tmp_path, (-1, 4, [0, 0, 0.01], stops), **keys) as job:
        for task in (W0, W1, W2):
            job.hear(task, "ready")
        job.open("go")
        for task in (W0, W1, W2):
            job.hear(task, "at")
        job.kill(W2)
        job.start(W2)
        job.hear(W2, "ready")
        job.hear(W2, "took")
        job.hear(W2, "took")
        job.open("never")  # it comes to the same stop again
        job.open("on")
        for task in (W0, W1, W2):
            job.hear(task, "done")
        job.open("end")
        assert job.hear(W2, "visits") == [4] * EXAMPLES
        job.finish()


def test_who_dies_after_the_end_of_the_others_does_its_batch_when_it_comes_back(tmp_path):
    """They have nothing left, and wait for nobody; what it had done counts once."""
    stops = {2: [(3, "never", True)]}
    keys = {"ps": 1, "workers": 3, "chief": "driver", "gates": ["go", "never", "end"], "timeouts": QUICK}
    with ProcessCluster(train, tmp_path, (-1, 2, [0, 0, 0], stops), **keys) as job:
        for task in (W0, W1, W2):
            job.hear(task, "ready")
        job.open("go")
        job.hear(W2, "at")
        for task in (W0, W1):
            job.hear(task, "done")
        before = job.said(W2, "took")
        job.kill(W2)
        job.open("never")  # of its batches it may have had several, and come to the same place again
        job.start(W2)
        job.hear(W2, "done")
        after = job.said(W2, "took")[len(before) :]
        assert before[3][1] in [rows for _, rows, _ in after]
        assert not {tuple(rows) for _, rows, _ in before[:3]} & {tuple(rows) for _, rows, _ in after}
        job.open("end")
        assert job.hear(W2, "visits") == [2] * EXAMPLES
        job.finish()


def test_a_worker_that_dies_again_and_again_does_nothing_twice(tmp_path):
    """Whatever it was doing: a batch is done in the instant in which its update is."""
    keys = {"ps": 1, "workers": 2, "chief": "driver", "gates": ["go", "end"], "timeouts": QUICK}
    with ProcessCluster(train, tmp_path, (-1, 4, [0.1, 0.02], {}), **keys) as job:
        job.open("go")
        for _ in range(2):
            for _ in range(5):
                job.hear(W1, "took")
            job.kill(W1)
            job.start(W1)
        for task in (W0, W1):
            job.hear(task, "done")
        job.open("end")
        for task in (W0, W1):
            assert job.hear(task, "visits") == [4] * EXAMPLES
        job.finish()


class Passes:
    """Passes of workers in threads, which count in a variable how often each example was visited."""

    def __init__(self, strategy, path=""):
        self.strategy = strategy
        with strategy.scope():
            self.other = ps.Variable(np.zeros(1), name="other")
            self.visits = ps.Variable(np.zeros(SOME, "int64"), name="visits")
        self.checkpoint = ps.train.Checkpoint(visits=self.visits, other=self.other)
        if path:
            self.checkpoint.restore(path)
        dynamic = ps.InputOptions(auto_shard_policy=ps.AutoShardPolicy.DYNAMIC)
        data = ps.ArrayDataset(np.arange(SOME)).shuffle(7).batch(BATCH)
        self.batches = strategy.experimental_distribute_dataset(data, dynamic)

    def make(self, epochs, before=lambda count: None, after=lambda count: None):
        """Makes passes; returns the examples of each batch. Functions are called before and after each round."""
        taken = []
        for _ in self.batches.epochs(epochs):
            for rows in self.batches:
                before(len(taken))
                mine = np.bincount(rows, minlength=SOME)
                self.strategy.run(lambda mine=mine: add_all([(self.visits, mine)]))
                taken.append(rows.tolist())
                after(len(taken))
        return taken


def test_a_checkpoint_of_one_worker_goes_on_with_the_next_batch(tmp_path):
    """In the middle of a pass, with the batches and the order of a job that was not interrupted."""

    def save(strategy, worker):
        passes = Passes(strategy)
        taken = passes.make(2, after=lambda count: count == 17 and passes.checkpoint.save("run/ckpt"))
        passes.checkpoint.sync()
        return taken, passes.visits.numpy().tolist()

    def go_on(strategy, worker):
        passes = Passes(strategy, "run")
        return passes.make(2), passes.visits.numpy().tolist()

    keys = {"workers": 1, "servers": 1, "root": tmp_path, "consistency": ps.Async()}
    ((whole, visits),) = in_threads(save, **keys)
    assert visits == [2] * SOME
    assert in_threads(go_on, **keys) == [(whole[17:], visits)]


@pytest.mark.parametrize("at", [8, 28], ids=["in one pass", "in two passes"])
def test_a_checkpoint_has_what_was_not_done(tmp_path, at):
    """Others hold batches while worker 0 saves, maybe of the pass before: a new job does these, and no others again."""
    holding, saved, ended = threading.Barrier(3), threading.Event(), threading.Barrier(2)

    def save(strategy, worker):
        passes = Passes(strategy)

        def hold(count):
            if count == (at, 3, 4)[worker]:
                passes.visits.numpy()  # the rounds before it are answered
                holding.wait(SOON)
                if worker:
                    meet(saved)

        def keep(count):
            if (worker, count) == (0, at + 1):
                passes.checkpoint.save("run/ckpt")
                passes.checkpoint.sync()
                saved.set()

        passes.make(2, hold, keep)

    def go_on(strategy, worker):
        passes = Passes(strategy, "run")
        passes.make(2)  # who has nothing left does not wait for the other's last batch
        ended.wait(SOON)
        return passes.visits.numpy().tolist()

    keys = {"servers": 1, "root": tmp_path, "consistency": ps.Async()}
    in_threads(save, 3, **keys)
    assert in_threads(go_on, 2, **keys) == [[2] * SOME] * 2
