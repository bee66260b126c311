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
from tests.kit.rig import SOON
from tests.kit.workers import in_threads, meet

ALL = (W0, W1, W2)
EXAMPLES, BATCH = 120, 3
SOME = 60
"""Examples of workers in threads."""


def train(epochs, paces, stops):
    """Counts in a variable how often each example was visited. Says what it takes, and when it has ended a pass.

    Args:
        epochs: passes.
        paces: seconds that a step of each worker takes.
        stops: for each worker the number of batches after which it waits at a gate, and the gate.
    """
    strategy = ps.ParameterServerStrategy(consistency=ps.Async())
    with strategy.scope():
        ps.Variable(np.zeros(1), name="other")
        visits = ps.Variable(np.zeros(120, "int64"), name="visits")
    dynamic = ps.InputOptions(auto_shard_policy=ps.AutoShardPolicy.DYNAMIC)
    data = ps.ArrayDataset(np.arange(120)).shuffle(7).batch(3)
    batches = strategy.experimental_distribute_dataset(data, dynamic)
    say("ready")
    gate("go")
    count = 0
    for epoch in batches.epochs(epochs):
        for rows in batches:
            say("took", [epoch, rows, time.monotonic()])
            time.sleep(paces[ME])
            strategy.run(lambda rows: add_all([(visits, np.bincount(rows, minlength=120))]), args=(rows,))
            count += 1
            if stops.get(ME, [0])[0] == count:
                visits.numpy()  # the rounds before are answered
                say("at", count)
                gate(stops[ME][1])
        say("ended", [epoch, time.monotonic()])
    say("done", count)
    gate("end")
    say("visits", visits.numpy().tolist())


@contextmanager
def training(directory, epochs, paces, stops, *gates, servers=1, timeouts=QUICK):
    """A job of a chief and three workers, all of which have begun."""
    keys = {"ps": servers, "workers": 3, "chief": "driver", "timeouts": timeouts}
    with ProcessCluster(train, directory, (epochs, paces, stops), gates=["go", "end", *gates], **keys) as job:
        for task in ALL:
            job.hear(task, "ready")
        job.open("go")
        yield job


def ends(job, epochs):
    """Each example was taken and visited once in each pass; how many batches each worker has taken since it began."""
    counts = [job.hear(task, "done") for task in ALL]
    job.open("end")
    for task in ALL:
        assert job.hear(task, "visits") == [epochs] * EXAMPLES
    taken = [row for task in ALL for _, rows, _ in job.said(task, "took") for row in rows]
    assert sorted(taken) == sorted(epochs * list(range(EXAMPLES)))
    job.finish()
    return counts


def test_who_is_fast_does_more_and_the_end_waits_for_one_batch(tmp_path):
    """One worker is four times slower: each example once in each pass, whose end waits for one of its batches at most.

    The counts are on the second server, whose rounds server 0 does not see.
    """
    with training(tmp_path, 2, [0.1, 0.1, 0.4], {}, servers=2, timeouts=CALM) as job:
        counts = ends(job, 2)
        assert counts[2] < min(counts[:2])
        began = [at for _, _, at in job.said(W2, "took")]
        slowest = max(after - before for before, after in pairwise(began))
        for epoch in range(2):
            ended = [at for task in ALL for of, at in job.said(task, "ended") if of == epoch]
            assert max(ended) < min(ended) + slowest + 0.3  # it would be 0.4, were one more in its hands


def test_what_a_killed_worker_had_is_handed_out_again(tmp_path):
    """Each example counts once in each pass: of what it had pushed nothing is done again, and it may come back."""
    stops = {0: [45, "on"], 1: [45, "on"], 2: [4, "killed"]}
    with training(tmp_path, 3, [0, 0, 0], stops, "on", "killed") as job:
        for task in ALL:
            job.hear(task, "at")
        job.kill(W2)
        with job.server(PS0) as server:
            job.until(lambda: W2 not in [one.task for one in server.status().generation.members])
        job.open("killed")  # it may come to the same stop again
        job.start(W2)
        job.hear(W2, "ready")
        job.open("on")
        ends(job, 3)


def test_a_checkpoint_has_what_was_not_done(tmp_path):
    """Others hold batches while worker 0 saves, maybe of the pass before: a new job does these, and no others again."""
    holding, saved, ended = threading.Barrier(3), threading.Event(), threading.Barrier(2)

    def passes(strategy, worker, saves):
        with strategy.scope():
            other = ps.Variable(np.zeros(1), name="other")
            visits = ps.Variable(np.zeros(SOME, "int64"), name="visits")
        checkpoint, count = ps.train.Checkpoint(visits=visits, other=other), 0
        if not saves:
            checkpoint.restore("run")
        dynamic = ps.InputOptions(auto_shard_policy=ps.AutoShardPolicy.DYNAMIC)
        data = ps.ArrayDataset(np.arange(SOME)).shuffle(7).batch(BATCH)
        batches = strategy.experimental_distribute_dataset(data, dynamic)
        for _ in batches.epochs(2):
            for rows in batches:
                if saves and count == (0, 0, 1)[worker]:  # before its first step a worker has one more, later maybe all
                    visits.numpy()  # the rounds before it are answered
                    holding.wait(SOON)
                    if worker:
                        meet(saved)
                mine = np.bincount(rows, minlength=SOME)
                strategy.run(lambda mine=mine: add_all([(visits, mine)]))
                count += 1
                if (saves, worker, count) == (True, 0, 21):  # in the second pass
                    checkpoint.save("run/ckpt")
                    checkpoint.sync()
                    saved.set()
        if saves:
            return []
        ended.wait(SOON)  # who has nothing left does not wait for the other's last batch
        return visits.numpy().tolist()

    keys = {"servers": 1, "root": tmp_path, "consistency": ps.Async()}
    in_threads(lambda *one: passes(*one, True), 3, **keys)
    assert in_threads(lambda *one: passes(*one, False), 2, **keys) == [[2] * SOME] * 2


# ---- Backup workers ----

BATCHES = 9

ROWS = 9 * BATCHES
"""Three rows of each batch are for each of three workers."""

LARGE = 560_000
"""Elements of float64 that travel in more than one part."""


def visit(rows, dies, passes, elements):
    """Counts how often each row was visited, and adds as many ones to a variable of another server, if there is one.

    Worker 2 stands still with its second batch until a gate is opened, or, where it dies, amid the push of that batch.
    """

    def stall():
        say("stalled", os.getpid())
        while True:
            time.sleep(1.0)

    first = (DIRECTORY / f"worker {ME} was here").exists()
    (DIRECTORY / f"worker {ME} was here").touch()
    stands = ME == 2 and not first
    if stands and dies:
        faults.use(Stall(lambda: strategy._session.waits[0] >= 1, stall))
    strategy = ps.ParameterServerStrategy(consistency=ps.Sync(backup_workers=1))
    with strategy.scope():
        visits = ps.Variable(np.zeros(rows), name="visits")
        other = ps.Variable(np.zeros(elements), name="other")
    data = strategy.experimental_distribute_dataset(ps.ArrayDataset(np.arange(rows)).shuffle(3).batch(9))
    had, out = 0, set()
    for number in data.epochs(passes):
        for mine in data:
            had += bool(len(mine))
            if ME < 2 and had == 5 and dies:
                gate("on")  # until the third one's next process waits to be taken in
            if stands and had == 2 and not dies:
                stands = False
                say("at", strategy.round)
                gate("go2")
            seen = np.bincount(mine, minlength=rows).astype(float)
            strategy.run(lambda seen=seen: add_all([(visits, seen), (other, np.full(elements, seen.sum()))]))
            say("did", strategy.round - 1)
            out.update(strategy.last_round.excluded if strategy.last_round else ())
        say("visits", visits.numpy().tolist())
        say("pass", [number, strategy.round])
    gate("end")
    say("total", float(strategy.reduce("sum", np.float64(1.0), None)))
    say("sums", [visits.numpy().tolist(), float(other.numpy()[0])])
    say("out", sorted(out))


def check(job):
    """All have the same, and each row was visited once in each of two passes."""
    job.open("end")
    for task in ALL:
        assert job.hear(task, "total") == 3, "what is looked at is of all"
        visits, other = job.hear(task, "sums")
        assert set(visits) == {2.0}
        assert other == 2 * ROWS
    job.finish()


@pytest.mark.parametrize("elements", [1, LARGE])
def test_the_others_go_on_without_a_straggler(tmp_path, elements):
    """While it stands still with its second batch they do its share too; then it catches up, and takes part again.

    If its late contributions are larger than a part, and sent from where they are, the rest of each is sent, and counts
    nowhere.
    """
    keys = {"ps": 2, "workers": 3, "gates": ["go2", "end"], "timeouts": CALM}
    with ProcessCluster(visit, tmp_path, (ROWS, False, 2, elements), **keys) as job:
        job.hear(W2, "at", 1)
        if elements == LARGE:
            job.hear(W0, "did", BATCHES - 1)
        else:
            for task in (W0, W1):
                assert job.hear(task, "visits") == [1.0] * ROWS
                # All batches, then 8 slices of the straggler, three at a time, of which it has one again; at last two.
                assert job.hear(task, "pass") == [0, BATCHES + 3 + 1]
        job.open("go2")
        check(job)
        for task in ALL:
            assert str(W2) in job.hear(task, "out"), "no record names it"
            assert "is broken" not in job.errors(task), "a transport has not survived it"


@pytest.mark.ci
def test_a_straggler_that_is_killed_takes_no_examples_along(tmp_path):
    """Its batch, which half of a push may have brought, is handed out again; its next process takes part again."""
    keys = {"ps": 2, "workers": 3, "chief": "driver", "gates": ["go2", "on", "end"], "timeouts": QUICK}
    with ProcessCluster(visit, tmp_path, (ROWS, True, 2, LARGE), **keys) as job:
        job.hear(W2, "stalled")
        job.hear(W0, "did", 3)
        job.kill(W2)
        job.start(W2)
        job.hear_error(W2, "waits until")
        job.open("on")
        check(job)
        assert str(W2) in job.hear(W0, "out")


def test_parts_of_a_batch_of_different_sizes_are_refused_without_an_axis():
    """On all workers alike, and all go on; a reduction along the axis, and one of numbers, have all examples."""

    def work(strategy, worker):
        found = []
        for batch in strategy.experimental_distribute_dataset(ps.ArrayDataset(np.arange(2.0)).batch(2)):
            own, sums = strategy.run(lambda x: (x, x.sum()), args=(batch,))
            with pytest.raises(ValueError) as refused:
                strategy.reduce("sum", own, axis=None)
            found += [str(refused.value), float(strategy.reduce("sum", own, axis=0))]
            found.append(float(strategy.reduce("sum", sums, axis=None)))
        return found

    says = (
        "the replicas reduce arrays of shapes (1,), (1,), (0,), because the current batch has 2 examples for "
        "3 replicas; pass axis=0, or drop such batches: batch(..., drop_remainder=True)"
    )
    assert in_threads(work, 3, 2) == [[says, 1.0, 1.0]] * 3
