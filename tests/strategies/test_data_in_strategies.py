"""Data through each strategy: what is distributed, run over and reduced gives what the whole data give."""

from __future__ import annotations

from collections import namedtuple

import numpy as np
import pytest

import psclient as ps
from psclient._src import nest
from tests.kit.strategies import in_replicas, kind_of, replicas, variable

here = ps.get_replica_context

Batch = namedtuple("Batch", "x y")


def shares(count, batch, n):
    """The examples that each replica gets, by batch: ceil(its size / n) of each, filled in order."""
    for start in range(0, count, batch):
        rows = list(range(start, min(start + batch, count)))
        size = -(-len(rows) // n)
        yield [rows[i * size : (i + 1) * size] for i in range(n)]


@pytest.mark.parametrize(("count", "batch"), [(7, 6), (9, 6), (16, 8), (5, 8), (13, 4), (3, 1)])
def test_a_batch_is_shared_in_order(strategy, count, batch):
    """Every replica a slice of the same size, of a short batch too, while there are examples; the rest get none."""
    data = strategy.experimental_make_numpy_dataset(np.arange(count)).batch(batch)
    found = [
        [x.tolist() for x in strategy.experimental_local_results(x)]
        for x in strategy.experimental_distribute_dataset(data)
    ]
    assert found == list(shares(count, batch, replicas(strategy)))


@pytest.mark.parametrize("count", [7, 12, 1])
def test_an_epoch_reduced_is_that_of_all_examples(strategy, count):
    """Whatever the last batch is: sums and means with axis=0, batch by batch."""
    values = np.arange(count, dtype="float64") ** 2
    data = strategy.experimental_distribute_dataset(strategy.experimental_make_numpy_dataset(values).batch(6))
    total = 0.0
    for number, x in enumerate(data):
        loss = strategy.run(lambda x: x * 2.0, args=(x,))
        whole = values[number * 6 : number * 6 + 6] * 2.0
        assert strategy.reduce(ps.ReduceOp.MEAN, loss, axis=0) == pytest.approx(whole.mean())
        total += strategy.reduce(ps.ReduceOp.SUM, loss, axis=0)
    assert total == pytest.approx(2.0 * values.sum())


def test_a_replica_without_examples_has_no_weight(strategy):
    """In a mean of what replicas compute from their parts; outside of the loop all count again."""
    n = replicas(strategy)
    data = strategy.experimental_distribute_dataset([np.arange(8.0), np.array([6.0])])
    means = []
    for x in data:
        part = strategy.run(lambda x: np.float64(x.sum()), args=(x,))
        means.append(float(strategy.reduce("mean", part, axis=None)))
        reduced = in_replicas(strategy, lambda i, p: float(here().all_reduce("mean", p)), part)
        assert reduced == (means[-1],) * n
    assert means == [np.arange(8.0).sum() / n, 6.0]
    ones = strategy.experimental_distribute_values_from_function(lambda context: 1.0)
    assert strategy.reduce("sum", ones, axis=None) == n


def test_what_a_replica_holds_back_counts_with_the_next_reduction(strategy):
    """Accumulated over steps without a reduction it is in the next one, even if the last batch has nothing for it."""
    n = replicas(strategy)
    held = strategy.experimental_distribute_values_from_function(lambda context: np.zeros(1))
    for x in strategy.experimental_distribute_dataset([np.ones(2 * n), np.ones(1)]):
        held = strategy.run(lambda held, x: held + x.sum(), args=(held, x))
    assert strategy.reduce("sum", held, axis=None) == 2 * n + 1
    data = iter(strategy.experimental_distribute_dataset([np.ones(2 * n), np.ones(1)]))
    next(data), next(data)
    assert strategy.reduce("sum", held, axis=None) == 2 * n + 1
    assert strategy.reduce("sum", held, axis=None) == np.asarray(strategy.experimental_local_results(held)[0])


def test_a_pass_that_is_broken_off_leaves_nothing(strategy):
    """By `break` or by an error, in a batch of which some replicas have no examples: afterwards all count again."""
    ones = strategy.experimental_distribute_values_from_function(lambda context: 1.0)
    even = [np.arange(8.0), np.array([6.0])]
    uneven = [np.ones(1)] * (replicas(strategy) + 1)
    for data in (
        strategy.experimental_distribute_dataset(even),
        strategy.experimental_distribute_datasets_from_function(lambda context: uneven),
    ):
        for number, _ in enumerate(data):
            total = strategy.reduce("sum", ones, axis=None)
            if number == 1:
                assert total == 1.0
                break
        assert strategy.reduce("sum", ones, axis=None) == replicas(strategy)
        outer = iter(strategy.experimental_distribute_dataset([np.array([1.0])]))
        next(outer)
        with pytest.raises(ZeroDivisionError):
            [1 / (1 - number) for number, _ in enumerate(data)]
        assert strategy.reduce("sum", ones, axis=None) == 1.0
        assert list(outer) == []
        assert strategy.reduce("sum", ones, axis=None) == replicas(strategy)


def test_an_iterator_that_is_dropped_late_ends_no_other_pass(strategy):
    """The next pass over the same data goes on as it was."""
    data = strategy.experimental_distribute_dataset([np.array([6.0]), np.array([7.0])])
    ones = strategy.experimental_distribute_values_from_function(lambda context: 1.0)
    first, second = iter(data), iter(data)
    next(first)
    next(second)
    del first
    assert strategy.reduce("sum", ones, axis=None) == 1.0
    assert strategy.reduce("sum", next(second), axis=0) == 7.0


def test_every_epoch_has_every_example_once(strategy):
    """Shuffled too; each in another order, which is the same whenever it is made."""
    seen = []
    for _ in range(2):
        data = strategy.experimental_make_numpy_dataset(np.arange(20)).shuffle(seed=3).batch(8)
        distributed = strategy.experimental_distribute_dataset(data)
        epochs = []
        for _ in range(3):
            parts = [part for x in distributed for part in strategy.experimental_local_results(x)]
            epochs.append(np.concatenate(parts).tolist())
        assert [sorted(epoch) for epoch in epochs] == [list(range(20))] * 3
        assert epochs[0] != epochs[1] != epochs[2]
        seen.append(epochs)
    assert seen[0] == seen[1]


def test_nests_are_shared_leaf_by_leaf(strategy):
    """Named tuples and dicts keep their form; each replica finds rows that belong together."""
    x = np.arange(12.0).reshape(6, 2)
    data = strategy.experimental_make_numpy_dataset(Batch(x, {"label": x[:, 0] * 10})).batch(4)
    rows = []
    for batch in strategy.experimental_distribute_dataset(data):
        assert type(batch) is Batch

        def fn(i, batch):
            assert type(batch) is Batch
            assert batch.y["label"].tolist() == (batch.x[:, 0] * 10).tolist()
            return batch.x

        rows += [row for part in in_replicas(strategy, fn, batch) for row in part.tolist()]
    assert rows == x.tolist()


def test_numpy_datasets_are_made_of_arrays(strategy):
    """An example for each row; a list is stacked; arrays of different lengths are refused."""
    stacked = strategy.experimental_make_numpy_dataset([np.zeros(3), np.ones(3)])
    assert stacked.size == 2
    through_extended = strategy.extended.experimental_make_numpy_dataset(np.ones(10, "float32"))
    assert through_extended.size == 10
    with pytest.raises(ValueError, match="same first dimension"):
        strategy.experimental_make_numpy_dataset((np.zeros(3), np.zeros(4)))


def test_data_without_batches_are_refused(strategy):
    """With what to call first."""
    with pytest.raises(ValueError, match=r"batch"):
        strategy.experimental_distribute_dataset(strategy.experimental_make_numpy_dataset(np.zeros(4)))
    with pytest.raises(TypeError):
        strategy.experimental_distribute_dataset(5)


def test_a_function_makes_this_workers_dataset(strategy):
    """It is called once, is told who asks, and gives batches of one replica each; missing ones are empty."""
    n, told = replicas(strategy), []

    def dataset_fn(context):
        told.append(context)
        size = context.get_per_replica_batch_size(4 * n)
        data = ps.ArrayDataset(np.arange(4 * (n + 1)))
        return data.shard(context.num_input_pipelines, context.input_pipeline_id).batch(size)

    distributed = strategy.experimental_distribute_datasets_from_function(dataset_fn)
    for _ in range(2):
        found = [[x.tolist() for x in strategy.experimental_local_results(step)] for step in distributed]
        batches = [list(range(4 * k, 4 * k + 4)) for k in range(n + 1)]
        padded = batches + [[]] * (-len(batches) % n)
        assert found == [padded[k : k + n] for k in range(0, len(padded), n)]
    assert told == [ps.InputContext(1, 0, n)]
    assert str(told[0]) == "ps.InputContext(input pipeline id 0, total: 1)"
    with pytest.raises(ValueError, match="cannot be shared equally"):
        ps.InputContext(1, 0, 2).get_per_replica_batch_size(5)


def test_iterators_are_pythons_and_tensorflows(strategy):
    """`next`, and the methods of older iterators; a pass that is broken off does no harm to the next."""
    data = strategy.experimental_distribute_dataset([np.arange(4), np.arange(4, 8)])
    assert not any(hasattr(data, name) for name in ("batch", "map", "repeat", "shard", "shuffle"))
    iterator = iter(data)
    first = strategy.reduce("sum", next(iterator), axis=0)
    assert (first, strategy.reduce("sum", iterator.get_next(), axis=0)) == (6, 22)
    with pytest.raises(StopIteration):
        next(iterator)
    for x in data:
        assert strategy.reduce("sum", x, axis=0) == 6
        break
    assert [int(strategy.reduce("sum", x, axis=0)) for x in data] == [6, 22]


def test_the_training_loop_of_the_documents(strategy):
    """Distribute, run, reduce: the variable ends where one process with all of the data ends."""
    x = np.random.default_rng(0).normal(size=(22, 3))
    y = x @ np.array([1.0, -2.0, 0.5])
    v = variable(strategy, np.zeros(3))
    optimizer = ps.optimizers.SGD(0.1)

    def replica_fn(batch):
        error = batch.x @ v.read_value() - batch.y
        optimizer.apply_gradients([(2.0 * batch.x.T @ error / 8, v)])
        return error**2

    expected, losses, wanted = np.zeros(3), [], []
    with strategy.scope():
        data = strategy.experimental_make_numpy_dataset(Batch(x, y)).batch(8)
        distributed = strategy.experimental_distribute_dataset(data)
        for _ in range(5):
            for batch in distributed:
                loss = strategy.run(replica_fn, args=(batch,), options=ps.RunOptions())
                losses.append(float(strategy.reduce(ps.ReduceOp.MEAN, loss, axis=0)))
    for _ in range(5):
        for start in range(0, 22, 8):
            rows = slice(start, start + 8)
            error = x[rows] @ expected - y[rows]
            wanted.append((error**2).mean())
            expected = expected - 0.1 * 2.0 * x[rows].T @ error / 8
    np.testing.assert_allclose(losses, wanted, rtol=1e-9)
    np.testing.assert_allclose(v.numpy(), expected, rtol=1e-9)
    assert int(optimizer.iterations) == 15


@pytest.mark.parametrize("policy", [ps.AutoShardPolicy.AUTO, ps.AutoShardPolicy.DATA, ps.AutoShardPolicy.OFF])
def test_one_worker_sees_all_data_under_every_policy(strategy, policy):
    """There is nobody to share them with; a batch is split among the replicas."""
    options = ps.InputOptions(auto_shard_policy=policy, experimental_prefetch_to_device=False)
    data = strategy.experimental_distribute_dataset([np.arange(8), np.arange(8, 13)], options)
    parts = [part for x in data for part in strategy.experimental_local_results(x)]
    assert np.concatenate(parts).tolist() == list(range(13))
    assert all(type(part) is np.ndarray for part in parts)


def test_steps_on_an_iterator(strategy):
    """The deprecated loop: each step gets the next batch; the last one's reduced outputs are kept."""
    data = strategy.experimental_distribute_dataset([np.arange(4.0), np.arange(4.0, 8.0), np.arange(8.0, 12.0)])

    def step(context, inputs):
        loss = strategy.extended.call_for_each_replica(lambda x: x.sum(), (inputs,))
        context.set_last_step_output("loss", loss, ps.ReduceOp.SUM)

    steps = strategy.extended.experimental_run_steps_on_iterator(step, iter(data), 2, {"loss": 0.0})
    assert steps.last_step_outputs["loss"] == 22.0
    with pytest.raises(StopIteration):
        strategy.extended.experimental_run_steps_on_iterator(step, iter(data), 4)
    assert kind_of(strategy) == "default" or strategy.reduce("mean", 1.0, axis=None) == 1.0


def test_the_next_batch_may_be_missing(strategy):
    """An optional says so, as often as it is asked for; batches come as by `next`."""
    n = replicas(strategy)
    for data in (
        strategy.experimental_distribute_dataset([np.arange(float(n))] * 2),
        strategy.experimental_distribute_datasets_from_function(lambda context: [np.ones(1)] * 2 * n),
    ):
        iterator, count = iter(data), 0
        assert isinstance(iterator, ps.DistributedIterator)
        while (optional := iterator.get_next_as_optional()).has_value():
            ones = strategy.run(np.ones_like, (optional.get_value(),))
            assert strategy.reduce("sum", ones, axis=0) == n
            assert optional.element_spec == data.element_spec
            count += 1
        assert count == 2
        for missing in (optional, iterator.get_next_as_optional()):
            assert not missing.has_value()
            assert missing.element_spec == data.element_spec
            with pytest.raises(ValueError, match="the pass over the dataset has ended, and there is no batch"):
                missing.get_value()


def test_datasets_of_all_stages_are_distributed(strategy):
    """Mapped, repeated, sharded, unbatched: a pass has what the dataset gives without a strategy, batch by batch."""
    n = replicas(strategy)
    rows = strategy.experimental_make_numpy_dataset((np.arange(10), np.arange(20.0).reshape(10, 2)))
    for data in (
        rows.shuffle(4).map(lambda x, y: {"x": x * 2, "y": y + x}).repeat(2).batch(6),
        rows.batch(4).map(lambda x, y: {"x": -x, "y": y * y}).repeat(2).shard(2, 1),
        rows.batch(3).unbatch().shard(2, 0).map(lambda x, y: {"x": x, "y": y}).batch(4),
    ):
        distributed = strategy.experimental_distribute_dataset(data)
        for epoch in range(2):
            found = [
                [np.concatenate([own[name] for own in strategy.experimental_local_results(batch)]) for name in "xy"]
                for batch in distributed
            ]
            assert plain(found) == plain([[batch["x"], batch["y"]] for batch in data.epoch(epoch)])
        assert len(nest.flatten(distributed.element_spec)) == 2
        own = strategy.distribute_datasets_from_function(lambda context, data=data: data)
        assert sum(len(x["x"]) for b in own for x in strategy.experimental_local_results(b)) == data.size
    endless = iter(strategy.experimental_distribute_dataset(rows.repeat().batch(2 * n)))
    total = sum(float(strategy.reduce("sum", next(endless)[0], axis=0)) for _ in range(5))
    assert total == 45.0 * n


def plain(found):
    """Arrays as lists."""
    return [[np.asarray(array).tolist() for array in row] for row in found]
