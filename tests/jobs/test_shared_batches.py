"""Batches that workers share: each example counts once in a pass, whoever is slow, dies or comes late.

They are handed out, or belong to all, and rounds wait for no straggler because there are backup workers.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import pytest

import psclient as ps
from pstesting import faults
from pstesting.faults import Stall
from pstesting.processes import CALM, PS0, QUICK, W0, W1, W2, ProcessCluster
from pstesting.script import DIRECTORY, ME, add_all, gate, say
from tests.kit.internals import ServerOptions
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
            for now in (True, False):
                for at, name, before in stops.get(ME, ()):
                    if (at, before) == (count, now):
                        visits.numpy()  # the rounds before are answered
                        say("at", count)
                        gate(name)
                if now:
                    strategy.run(step, args=(rows,))
            count += 1
        say("ended", [epoch, time.monotonic()])
    say("done", count)
    gate("end")
    say("visits", visits.numpy().tolist())


def rows_of(job, *tasks):
    found = {}
    for task in tasks:
        for epoch, rows, _ in job.said(task, "took"):
            found[epoch] = sorted([*found.get(epoch, []), *rows])
    return found


@contextmanager
def training(directory, bound, epochs, paces, stops, *gates, servers=1, timeouts=QUICK):
    """A job of a chief and a worker for each pace, all of which have begun; and their tasks."""
    keys = {"ps": servers, "workers": len(paces), "chief": "driver", "timeouts": timeouts}
    with ProcessCluster(train, directory, (bound, epochs, paces, stops), gates=["go", "end", *gates], **keys) as job:
        tasks = (W0, W1, W2)[: len(paces)]
        for task in tasks:
            job.hear(task, "ready")
        job.open("go")
        yield job, tasks


def ends(job, epochs, *tasks):
    """All are done, and each example was visited once in each pass; how many batches each has taken."""
    counts = [job.hear(task, "done") for task in tasks]
    job.open("end")
    for task in tasks:
        assert job.hear(task, "visits") == [epochs] * EXAMPLES
    return counts


@pytest.mark.parametrize(("servers", "bound"), [(2, -1), pytest.param(1, 60, marks=pytest.mark.soak)])
def test_who_is_fast_does_more_and_the_end_waits_for_one_batch(tmp_path, servers, bound):
    """One worker is four times slower: each example once in each pass, whose end waits for one of its batches at most.

    With two servers the counts are on the second, whose rounds server 0 does not see.
    """
    with training(tmp_path, bound, 2, [0.1, 0.1, 0.4], {}, servers=servers, timeouts=CALM) as (job, tasks):
        counts = ends(job, 2, *tasks)
        job.finish()
        assert rows_of(job, *tasks) == {0: list(range(EXAMPLES)), 1: list(range(EXAMPLES))}
        assert sum(counts) == 2 * EXAMPLES // BATCH
        assert counts[2] < min(counts[:2])
        began = [at for _, _, at in job.said(W2, "took")]
        slowest = max(after - before for before, after in pairwise(began))
        for epoch in range(2):
            ended = [at for task in tasks for of, at in job.said(task, "ended") if of == epoch]
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
    with training(tmp_path, -1, 3, [0, 0, 0], stops, "on", "never") as (job, tasks):
        for task in tasks:
            job.hear(task, "at")
        job.kill(W2)
        with job.server(PS0) as server:
            job.until(lambda: W2 not in [one.task for one in server.status().generation.members])
        job.open("on")
        ends(job, 3, W0, W1)
        taken = [row for rows in rows_of(job, W0, W1).values() for row in rows]
        pushed = [rows for _, rows, _ in job.said(W2, "took")][: 3 if before else 4]
        assert sorted([*taken, *(row for rows in pushed for row in rows)]) == sorted(3 * list(range(EXAMPLES)))


def test_a_worker_that_dies_again_and_again_does_nothing_twice(tmp_path):
    """Whatever it was doing: a batch is done in the instant in which its update is."""
    with training(tmp_path, -1, 3, [0.05, 0.02], {}) as (job, tasks):
        for _ in range(2):
            for _ in range(5):
                job.hear(W1, "took")
            job.kill(W1)
            job.start(W1)
        ends(job, 3, *tasks)
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


def test_a_checkpoint_has_what_was_not_done(tmp_path):
    """Others hold batches while worker 0 saves, maybe of the pass before: a new job does these, and no others again."""
    holding, saved, ended = threading.Barrier(3), threading.Event(), threading.Barrier(2)

    def save(strategy, worker):
        passes = Passes(strategy)

        def hold(count):
            if count == (0, 0, 1)[worker]:  # before its first step a worker has one more ahead, later maybe all
                passes.visits.numpy()  # the rounds before it are answered
                holding.wait(SOON)
                if worker:
                    meet(saved)

        def keep(count):
            if (worker, count) == (0, 21):  # in the second pass
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


# ---- Backup workers ----

BATCHES = 9

ROWS = 9 * BATCHES
"""Three rows of each batch are for each of three workers."""

LARGE = 560_000
"""Elements of float64 that travel in more than one part."""


def visit(rows, way, passes, backup=1, elements=1, stops=-1):
    """Counts how often each row was visited, and adds as many ones to a variable of another server, if there is one.

    Worker 2 stands still with its second batch, or in the middle of that batch's push, until a gate is opened. After a
    number of steps all save, and end.
    """

    def stall():
        say("stalled", os.getpid())
        while True:
            time.sleep(1.0)

    first = (DIRECTORY / f"worker {ME} was here").exists()
    (DIRECTORY / f"worker {ME} was here").touch()
    stands = ME == 2 and not first
    if stands and way == "half a push":
        faults.use(Stall(lambda: strategy._session.waits[0] == 1, stall))
    strategy = ps.ParameterServerStrategy(consistency=ps.Sync(backup_workers=backup))
    with strategy.scope():
        visits = ps.Variable(np.zeros(rows), name="visits")
        other = ps.Variable(np.zeros(elements), name="other")
    checkpoint = ps.train.Checkpoint(visits=visits, other=other)
    if way == "resume":
        checkpoint.restore("run")
    if way == "own data":
        own = ps.ArrayDataset(np.arange(ME, rows, 3)).batch(3)
        data = strategy.experimental_distribute_datasets_from_function(lambda _: own)
    else:
        data = strategy.experimental_distribute_dataset(ps.ArrayDataset(np.arange(rows)).shuffle(3).batch(9))
    had, out = 0, set()
    for number in data.epochs(passes):
        for step, mine in enumerate(data):
            had += bool(len(mine))
            if ME < 2 and had == 5 and way in ("killed", "half a push"):
                gate("on")  # until the third one's next process waits to be taken in
            if stands and had == 2 and way != "half a push":
                stands = False
                say("at", strategy.round)
                gate("go2")
            seen = np.bincount(mine, minlength=rows).astype(float)
            strategy.run(lambda seen=seen: add_all([(visits, seen), (other, np.full(elements, seen.sum()))]))
            say("did", strategy.round - 1)
            out.update(strategy.last_round.excluded if strategy.last_round else ())
            if step == stops:
                checkpoint.save("run/ckpt")
                say("saved", visits.numpy().sum())
                return
        say("visits", visits.numpy().tolist())
        say("pass", [number, strategy.round])
    gate("end")
    say("total", float(strategy.reduce("sum", np.float64(1.0), None)))
    say("sums", [visits.numpy().tolist(), float(other.numpy()[0])])
    say("out", sorted(out))


def check(job, passes, *tasks):
    """All have the same, and each row was visited once in each pass."""
    job.open("end")
    for task in tasks:
        assert job.hear(task, "total") == len(tasks), "what is looked at is of all"
        visits, other = job.hear(task, "sums")
        assert set(visits) == {float(passes)}
        assert other == passes * ROWS
    job.finish()


@pytest.mark.parametrize("elements", [1, LARGE])
def test_the_others_go_on_without_a_straggler(tmp_path, elements):
    """While it stands still with its second batch they do its share too; then it catches up, and takes part again.

    If its late contributions are larger than a part, and sent from where they are, the rest of each is sent, and counts
    nowhere.
    """
    keys = {"ps": 2, "workers": 3, "gates": ["go2", "end"], "timeouts": CALM}
    with ProcessCluster(visit, tmp_path, (ROWS, "shared", 2, 1, elements), **keys) as job:
        job.hear(W2, "at", 1)
        if elements == LARGE:
            job.hear(W0, "did", BATCHES - 1)
        else:
            for task in (W0, W1):
                assert job.hear(task, "visits") == [1.0] * ROWS
                # All batches, then 8 slices of the straggler, three at a time, of which it has one again; at last two.
                assert job.hear(task, "pass") == [0, BATCHES + 3 + 1]
        job.open("go2")
        check(job, 2, W0, W1, W2)
        for task in (W0, W1, W2):
            assert str(W2) in job.hear(task, "out"), "no record names it"
            assert "is broken" not in job.errors(task), "a transport has not survived it"


def test_who_has_data_of_its_own_makes_them_up(tmp_path):
    """Nobody else can take them: the others go on as long as it has some, and wait for it at the end."""
    keys = {"ps": 2, "workers": 3, "gates": ["go2", "end"], "timeouts": CALM}
    with ProcessCluster(visit, tmp_path, (ROWS, "own data", 2), **keys) as job:
        job.hear(W2, "at", 1)
        for task in (W0, W1):
            job.hear(task, "did", BATCHES - 1)  # they have done theirs
        job.open("go2")
        check(job, 2, W0, W1, W2)
        assert str(W2) in job.hear(W0, "out")


@pytest.mark.ci
@pytest.mark.parametrize("way", ["half a push", pytest.param("killed", marks=pytest.mark.soak)])
def test_a_straggler_that_is_killed_takes_no_examples_along(tmp_path, way):
    """Its batch, which half of a push may have brought, is handed out again; its next process takes part again."""
    elements = 1 if way == "killed" else LARGE
    keys = {"ps": 2, "workers": 3, "chief": "driver", "gates": ["go2", "on", "end"], "timeouts": QUICK}
    with ProcessCluster(visit, tmp_path, (ROWS, way, 2, 1, elements), **keys) as job:
        job.hear(W2, *(("at", 1) if way == "killed" else ("stalled",)))
        job.hear(W0, "did", 3)
        job.kill(W2)
        job.start(W2)
        job.hear_error(W2, "waits until")
        job.open("on")
        check(job, 2, W0, W1, W2)
        assert str(W2) in job.hear(W0, "out")


@pytest.mark.ci
def test_a_checkpoint_has_what_is_to_be_handed_out_again(tmp_path):
    """All save amid a pass, in which one was left out; a job of two workers without backup workers visits the rest."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    options = ServerOptions(checkpoint_root=str(tmp_path / "checkpoints"))
    keys = {"ps": 2, "gates": ["go2", "end"], "timeouts": CALM, "server": options}
    with ProcessCluster(visit, tmp_path / "first", (ROWS, "shared", 1, 1, 1, 5), workers=3, **keys) as job:
        job.hear(W2, "at", 1)
        job.hear(W0, "did", 5)
        job.open("go2")
        seen = [job.hear(task, "saved") for task in (W0, W1, W2)]
        assert len(set(seen)) == 1
        job.finish()
    with ProcessCluster(visit, tmp_path / "second", (ROWS, "resume", 1, 0), workers=2, **keys) as job:
        check(job, 1, W0, W1)


def test_rounds_need_more_workers_than_they_may_leave_out():
    """Else they would wait for nobody: it is refused before anything is connected, as what needs all workers is."""
    with pytest.raises(ps.errors.ConfigError, match="needs more than 1 workers, but the cluster has 1; use a smaller"):
        ps.ParameterServerStrategy(consistency=ps.Sync(backup_workers=1))
    spec = ps.ClusterSpec({"ps": ["127.0.0.1:1"], "worker": ["a:1", "b:1"]})
    resolver = ps.SimpleClusterResolver(spec, task_type="worker", task_id=0)
    with pytest.raises(ps.errors.ConfigError, match="needs more than 2 workers, but the cluster has 2"):
        ps.ParameterServerStrategy(consistency=ps.Sync(backup_workers=2), cluster_resolver=resolver)
    with pytest.raises(ps.errors.ConfigError, match="with backup_workers the slowest are excluded"):
        ps.ParameterServerStrategy(consistency=ps.Sync(backup_workers=1), deterministic=True)


def test_parts_of_a_batch_of_different_sizes_are_refused_without_an_axis():
    """On all workers alike, and all go on; numbers, arrays of one shape, and a reduction along the axis are reduced."""

    def work(strategy, worker):
        batches = strategy.experimental_distribute_dataset(ps.ArrayDataset(np.arange(10.0)).batch(8))
        found = []
        for batch in batches:
            own = strategy.run(lambda x: {"x": x, "sum": x.sum(), "pair": np.ones(2)}, args=(batch,))
            try:
                found.append(strategy.reduce("sum", own, axis=None)["x"].tolist())
            except ValueError as error:
                found.append(str(error))
            found.append(float(strategy.reduce("sum", own["x"], axis=0)))
            found.append(float(strategy.reduce("sum", own["sum"], axis=None)))
            found.append(strategy.reduce("sum", own["pair"], axis=None).tolist())
        return found

    says = (
        "the replicas reduce arrays of shapes (1,), (1,), (0,), because the current batch has 2 examples for "
        "3 replicas; pass axis=0, or drop such batches: batch(..., drop_remainder=True)"
    )
    for found in in_threads(work, 3, 2):
        assert found[1:4] == [28.0, 28.0, [3.0, 3.0]]
        assert "(3,), (3,), (2,), because the current batch has 8 examples" in found[0]
        assert found[4:] == [says, 17.0, 17.0, [2.0, 2.0]]
