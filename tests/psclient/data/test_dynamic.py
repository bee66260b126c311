"""Datasets whose batches server 0 hands out, in one process with a server beside it."""

from __future__ import annotations

import logging
import time
from concurrent import futures
from dataclasses import replace

import numpy as np
import pytest

import psclient as ps
from psclient._src.data import assigned as module
from pstesting.in_process import InProcessCluster
from pstesting.script import add
from pswire.model.chunks import ChunkAsk
from pswire.model.log import Examples, Position
from tests.kit.strategies import refused

logging.getLogger("absl").setLevel(logging.ERROR)  # grain warns at its import where JAX is not installed
import grain  # noqa: E402

DYNAMIC = ps.InputOptions(auto_shard_policy=ps.AutoShardPolicy.DYNAMIC)


class Job:
    """One asynchronous worker, and its server."""

    def __init__(self, cluster: InProcessCluster, strategy: ps.ParameterServerStrategy) -> None:
        self.cluster, self.strategy = cluster, strategy
        self.group = strategy.backend.group
        with strategy.scope():
            self.sum = ps.Variable(np.zeros(1), name="sum")

    def data(self, dataset, options=DYNAMIC):
        return self.strategy.experimental_distribute_dataset(dataset, options)

    def update(self, amount: float = 1.0) -> None:
        self.strategy.run(lambda: add(self.sum, np.full(1, amount)))

    def stands(self) -> tuple[Position, ...]:
        """What a checkpoint of now would have."""
        self.strategy.backend.settle()
        self.group.stand()
        assert all(each.source for each in self.group.positions)
        return tuple(replace(each, source=0) for each in self.group.positions)

    def restore(self, position: Position) -> None:
        """A checkpoint was restored that has this position, and a loop has asked for it."""
        self.group.restore((position,))
        self.group.go_on(position.dataset, position)

    def asked(self) -> list[ChunkAsk]:
        asked: list[ChunkAsk] = []

        def record(stimulus) -> None:
            if stimulus.name == "assign_batches":
                asked.append(stimulus.args[0].ask)

        self.cluster.cores[0].stimuli.record = record
        return asked


@pytest.fixture
def job(tmp_path):
    with InProcessCluster(checkpoint_root=tmp_path) as cluster:
        resolver = cluster.resolver()
        with ps.ParameterServerStrategy(cluster_resolver=resolver, consistency=ps.Async()) as strategy:
            yield Job(cluster, strategy)


def arrays(examples: int, size: int) -> ps.ArrayDataset:
    return ps.ArrayDataset(np.arange(examples)).shuffle(3).batch(size)


@pytest.mark.parametrize(
    ("dataset", "sizes"),
    [
        (arrays(11, 4), [4, 4, 3]),
        ([np.arange(i, i + 3) for i in range(0, 9, 3)], [3, 3, 3]),
        (grain.MapDataset.range(10).shuffle(seed=1).batch(4), [4, 4, 2]),
        (ps.ArrayDataset(np.arange(0)).batch(4), []),
    ],
    ids=["arrays", "a list", "a MapDataset", "nothing"],
)
def test_each_example_comes_once_in_each_pass(job, dataset, sizes):
    """In whole batches, and from every kind of dataset of which any batch can be read; one that never trains needs no
    rounds."""
    batches = job.data(dataset)
    for _ in range(2):
        seen = list(batches)
        assert [len(rows) for rows in seen] == sizes
        assert sorted(row for rows in seen for row in rows.tolist()) == list(range(sum(sizes)))
    assert job.stands() == (Position(0, 2, 0),)
    endless = iter(job.data(ps.ArrayDataset(np.arange(4)).batch(2).repeat()))
    assert [next(endless).tolist() for _ in range(5)] == [[0, 1], [2, 3], [0, 1], [2, 3], [0, 1]]


def test_local_replicas_share_a_batch():
    """Of one that is smaller than their number some get nothing."""
    with ps.ParameterServerStrategy(["cpu:0", "cpu:1"], consistency=ps.Async()) as strategy:
        data = ps.ArrayDataset(np.arange(6)).batch(5)
        seen = [batch.values for batch in strategy.experimental_distribute_dataset(data, DYNAMIC)]
    assert [[part.tolist() for part in parts] for parts in seen] == [[[0, 1, 2], [3, 4]], [[5], []]]


@pytest.mark.parametrize("strategy", [ps.ParameterServerStrategy, lambda: ps.MirroredStrategy(["cpu:0"])])
def test_synchronous_workers_are_refused(strategy):
    """Each has its part of every batch in every round anyway; the sentence says what to do."""
    with strategy() as sync, pytest.raises(ValueError, match=r"DYNAMIC assigns whole .* use AUTO, or consistency="):
        sync.experimental_distribute_dataset(arrays(4, 2), DYNAMIC)


def test_what_has_to_be_read_in_order_is_refused(job):
    """No worker could take a batch without those before it; an unbatched dataset is none at all."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: its DataLoader is not tested")
    for dataset in (torch.utils.data.DataLoader(range(4), batch_size=2), grain.MapDataset.range(4).to_iter_dataset()):
        refused(TypeError, r"a \w+ is read in order.*or use AUTO", lambda dataset=dataset: job.data(dataset))
    refused(ValueError, "global_batch_size", lambda: job.data(ps.ArrayDataset(np.arange(4))))


def test_a_step_waits_for_no_answer(job):
    """But for the first batches, and the last ones, of which nobody has more ahead than it will do."""
    asked = job.asked()
    for _ in job.data(arrays(60, 1)):
        time.sleep(2 * module.APART)
        job.update()
    assert sum(ask.needs for ask in asked) < 12
    assert len(asked) > 40


def test_quick_steps_ask_for_several_batches_at_a_time(job, monkeypatch):
    """As many as they need until the next answer; where each answer takes long, that is many."""
    plainly = module.AssignedBatches._note
    monkeypatch.setattr(module.AssignedBatches, "_note", lambda self, latency: plainly(self, latency + 1.0))
    asked = job.asked()
    for _ in job.data(arrays(300, 1)):
        job.update()
    assert job.sum.numpy() == 300
    assert max(ask.want for ask in asked) > 8
    assert len(asked) < 100


def test_a_batch_is_done_with_its_round_of_updates(job):
    """The one in use is not, and is in a checkpoint; what is ahead is, too."""
    batches = iter(job.data(arrays(40, 4)))
    next(batches)
    job.update()
    (position,) = job.stands()
    assert all(each.index > 0 for each in position.returned)
    next(batches)
    (position,) = job.stands()
    assert position.returned[0] == Examples(1, 0, 4)
    assert position.index == 1 + len(position.returned)
    job.update()
    assert Examples(1, 0, 4) not in job.stands()[0].returned


def test_batches_whose_gradients_are_accumulated_are_done_with_their_round(job):
    """Three of them before each; where none comes any more, at the end of the pass."""
    batches = iter(job.data(arrays(44, 4)))
    next(batches)
    job.update()
    for _ in range(3):
        next(batches)
    assert {1, 2, 3} <= {each.index for each in job.stands()[0].returned}
    job.update()
    assert not {1, 2, 3} & {each.index for each in job.stands()[0].returned}
    assert len(list(batches)) == 7
    assert job.stands() == (Position(0, 1, 0),)


def test_a_pass_that_is_broken_off_leaves_nothing_behind(job):
    """The next one has all batches, once each; what was ahead is given back, for workers that are still in it."""
    batches, asked = job.data(arrays(40, 4)), job.asked()
    for passes in range(2, 100, 2):
        for number, _ in enumerate(batches):
            job.update()
            if number == 3:
                break
        seen = sorted(row for rows in batches for row in rows.tolist())
        assert seen == list(range(40))
        assert job.stands() == (Position(0, passes, 0),)
        given = {chunk for ask in asked for chunk in ask.back}
        if given:  # else this worker was slow for a moment, and had nothing ahead
            break
    assert given
    assert not given & {chunk for ask in asked for chunk in ask.done}


class Reading(list):
    """Notes which batches are read."""

    def __init__(self, batches):
        super().__init__(batches)
        self.read = []

    def __getitem__(self, index):
        self.read.append(index)
        return super().__getitem__(index)


def test_rows_that_are_looked_up_come_with_the_round_before(job, monkeypatch):
    """The next batch is known while one is in use, so that a step reads no rows by itself; each is read once.

    Steps here take as long as server 0 needs to hand the next batches out.
    """
    asked, calls = [], job.group.chunk_calls
    ask = calls.ask
    monkeypatch.setattr(calls, "ask", lambda question: asked.append(ask(question)) or asked[-1])
    with job.strategy.scope():
        table = ps.Variable(np.ones((40, 2), "float32"), name="table")
    options = ps.InputOptions(auto_shard_policy=ps.AutoShardPolicy.DYNAMIC, prefetch={table: lambda rows: rows})
    optimizer = ps.optimizers.SGD(1.0)

    def step(rows):
        found = table.lookup(rows)
        optimizer.apply_gradients([(ps.IndexedSlices(found.numpy(), rows), table)])

    pulls, data = [], Reading(np.arange(40).reshape(40, 1))
    server = job.cluster.cores[0]
    server.stimuli.record = lambda stimulus: pulls.append(stimulus) if stimulus.name == "pull" else None
    for rows in job.data(data, options):
        futures.wait(asked)
        job.strategy.run(step, args=(rows,))
    assert not table.numpy().any()
    assert len(pulls) < 10  # those of the first batch, and the read above
    assert sorted(data.read) == list(range(40))


def test_a_restore_goes_back_to_what_was_done_then(job):
    """What was handed out since is nothing to it, whatever the worker has ahead."""
    checkpoint = ps.train.Checkpoint(sum=job.sum)
    batches, seen, path = job.data(arrays(40, 4)), list[list[list[int]]](), ""
    for go in range(2):
        if go:
            checkpoint.restore(path)
        for _ in batches.epochs(2):
            seen.append([])
            for rows in batches:
                seen[-1].append(rows.tolist())
                job.update()
                if not go and len(seen) == 1 and len(seen[0]) == 4:
                    path = checkpoint.save("run/ckpt")
                    checkpoint.sync()
    first, second, *again = seen
    assert again == [first[4:], second]
    assert job.sum.numpy() == 20


def test_a_checkpoint_says_what_was_not_done(job):
    """Parts of batches are handed out as they came back, as a job with backup workers has saved them, which is saved as
    here: synchronous workers go on with it. A batch that is none of this dataset is refused."""
    job.restore(Position(0, 1, 4, (Examples(0, 1, 3), Examples(2, 3, 9))))
    batches = job.data(ps.ArrayDataset(np.arange(20)).batch(4))
    assert [rows.tolist() for rows in batches] == []
    assert [rows.tolist() for rows in batches] == [[1, 2], [11], [16, 17, 18, 19]]
    job.restore(Position(1, 0, 3, (Examples(9, 0, 4),)))
    with pytest.raises(ValueError, match="batch 9 of pass 0 was unfinished, but dataset 1 has only 5 batches"):
        list(job.data(arrays(20, 4)))
    with ps.ParameterServerStrategy() as strategy:
        position = Position(0, 0, 3, (Examples(1, 0, 4),))
        strategy.backend.group.restore((position,))
        strategy.backend.group.go_on(0, position)
        seen = strategy.experimental_distribute_dataset(ps.ArrayDataset(np.arange(20)).batch(4))
        assert sorted(row for rows in seen for row in rows.tolist()) == [*range(4, 8), *range(12, 20)]
