"""Values of replicas: how arguments are taken apart, results merged, and variables found again from their copies; and
data: what is distributed, run over and reduced gives what the whole data give."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import psclient as ps
from psclient._src import values
from psclient._src.arrays import nest
from tests.kit.strategies import by_replica, in_replicas, kind_of, of_each, refused, replicas, variable

here, ON_READ = ps.get_replica_context, ps.VariableSynchronization.ON_READ

Pair = namedtuple("Pair", "x y")


@dataclass(frozen=True)
class Batch:
    features: Any
    label: Any = None


def numbered(strategy):
    """A per-replica value: of each replica an array with its number."""
    return of_each(strategy, [np.array(index) for index in range(replicas(strategy))])


def test_a_replica_is_given_its_copy_and_arrays_as_they_are(strategy):
    """Of a mirrored value the copy on its device; an array is handed on itself."""
    n, array = replicas(strategy), np.ones(3)
    total = strategy.extended.reduce_to("sum", by_replica(strategy, np.float32), numbered(strategy))
    assert isinstance(total, ps.Mirrored) == (n > 1)
    found = in_replicas(strategy, lambda i, x, own: (np.ndim(x), float(x), own is array), total, array)
    assert found == ((0, float(sum(range(n))), True),) * n


def test_arguments_are_a_tuple(strategy):
    """One that stands alone would be taken apart: the message says what to write. Values of other strategies are
    refused by their number, which is not that of the replicas."""
    for alone in (np.ones(3), numbered(strategy), 3, "text"):
        with pytest.raises(TypeError, match=r"run takes a tuple of arguments, but args is a .*; use args=\(x,\)"):
            strategy.run(lambda *x: None, args=alone)
        with pytest.raises(TypeError, match=r"merge_call takes a tuple of arguments.*; use args=\(x,\)"):
            strategy.run(lambda alone=alone: here().merge_call(lambda s, *x: None, args=alone))
    n = replicas(strategy)
    for count in (n - 1, n + 1) if kind_of(strategy) != "default" else ():
        with pytest.raises(ValueError, match=f"Mirrored with {count} values was passed to {n} local replicas"):
            strategy.run(lambda x: None, ({"x": ps.Mirrored([1.0] * count)},))
    assert in_replicas(strategy, lambda i: i) == tuple(range(replicas(strategy)))


def test_in_finds_a_value_in_its_container(strategy):
    """The documents' expression, of what `run` returned, of its parts, of variables and of their copies. A copy's
    container is its variable, in every context in which one gets hold of it."""
    extended, local = strategy.extended, strategy.experimental_local_results
    arrays = strategy.run(lambda x: x * 2.0, (numbered(strategy),))
    made = [variable(strategy), variable(strategy, synchronization=ON_READ)]
    wholes = [arrays, strategy.run(lambda: np.ones(3)), strategy.run(lambda: 5), {"a": arrays}, *made, "text", None]
    for whole in wholes:
        for value in (whole, *local(whole)):
            assert value in local(extended.value_container(value))
            is_copy = any(value is copy for v in made for copy in local(v) if copy is not v)
            assert (extended.value_container(value) is value) == (not is_copy)
    assert 3 not in local(np.arange(4))
    assert np.ones(3) not in local(np.ones(3))
    assert 5 in local(5)
    for v in made:
        values = [*local(v), *in_replicas(strategy, lambda i, w: w, v)]
        if kind_of(strategy) != "embedded" or v.synchronization is ON_READ:
            extended.update(v, values.append)
        assert all(extended.value_container(value) is v and any(value is x for x in local(v)) for value in values)


def test_a_function_gives_each_replica_its_value(strategy):
    """A constant, by the replica's number, by their count: the examples of the documents. It may return a nest of
    arrays or numbers, in which None stays None. An object that all replicas share is a value of each. By default a
    context is of one replica of one. Distributed values, and structures that differ, are refused."""
    n, numbers = replicas(strategy), np.array([3.0, 2.0, 1.0, 0.0])
    for value_fn, expected in (
        (lambda context: np.float32(1.0), [1.0] * n),
        (lambda context: numbers[context.replica_id_in_sync_group], [3.0, 2.0, 1.0, 0.0][:n]),
        (lambda context: context.num_replicas_in_sync, [n] * n),
    ):
        value = strategy.experimental_distribute_values_from_function(value_fn)
        assert strategy.experimental_local_results(value) == tuple(expected)
        assert in_replicas(strategy, lambda i, x: float(x), value) == tuple(expected)
        assert strategy.reduce("sum", value, axis=None) == sum(expected)
    made = strategy.experimental_distribute_values_from_function(
        lambda context: {"x": np.full(2, context.replica_id_in_sync_group), "y": (None,)}
    )
    found = strategy.experimental_local_results(made)
    assert [(int(value["x"][0]), value["y"]) for value in found] == [(i, (None,)) for i in range(n)]
    made = strategy.experimental_distribute_values_from_function(lambda context: numbers)
    assert strategy.reduce("sum", made, axis=None).tolist() == [3.0 * n, 2.0 * n, 1.0 * n, 0.0]
    assert str(ps.ValueContext(1, 4)) == "ps.ValueContext(replica id 1, total replicas in sync: 4)"
    assert (ps.ValueContext().replica_id_in_sync_group, ps.ValueContext().num_replicas_in_sync) == (0, 1)
    give = strategy.experimental_distribute_values_from_function
    for wrong in (ps.PerReplica([1, 2]), {"a": ps.Mirrored([1, 2])}):
        refused(ValueError, "the value of one replica", lambda wrong=wrong: give(lambda context: wrong))
    if n > 1:
        refused(ValueError, "structures differ", lambda: give(lambda context: [0] * context.replica_id_in_sync_group))


LEAVES = st.one_of(st.none(), st.text(max_size=2), st.binary(max_size=2), st.integers(), st.floats(allow_nan=False))


def containers(children):
    return st.one_of(
        st.lists(children, max_size=3),
        st.lists(children, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=2), children, max_size=3),
        st.dictionaries(st.integers(), children, max_size=2).map(OrderedDict),
        st.builds(Pair, children, children),
        st.builds(Batch, children, children),
    )


NESTS = st.recursive(LEAVES, containers, max_leaves=10)


@given(structure=NESTS)
def test_replicas_get_and_give_any_nest(strategy, structure):
    """Through `run` and through `merge_call`, by position and by name: what goes in comes out, each replica's own."""
    n = replicas(strategy)
    count = len(nest.flatten(structure))
    own = [nest.pack_sequence_as(structure, [np.array([replica, i]) for i in range(count)]) for replica in range(n)]
    given = values.regroup(own)

    def through(x, *, y):
        return here().merge_call(lambda s, x, *, y: (x, y), (x,), {"y": y})

    found = strategy.experimental_local_results(strategy.run(through, (given,), {"y": given}))
    for mine, expected in zip(found * (n // len(found)), own, strict=True):
        assert all(a is b for a, b in zip(nest.flatten(mine), nest.flatten((expected, expected)), strict=True))
        assert type(mine[0]) is type(expected)


# ---- Data ----

Rows = namedtuple("Rows", "x y")


def test_what_a_replica_holds_back_counts_with_the_next_reduction(strategy):
    """Accumulated over steps without a reduction it is in the next one, even if the last batch has nothing for it. In a
    mean of what replicas compute from their parts one without examples has no weight; outside of the loop it has."""
    n, means = replicas(strategy), []
    for x in strategy.experimental_distribute_dataset([np.arange(8.0), np.array([6.0])]):
        part = strategy.run(lambda x: np.float64(x.sum()), args=(x,))
        means.append(float(strategy.reduce("mean", part, axis=None)))
        reduced = in_replicas(strategy, lambda i, p: float(here().all_reduce("mean", p)), part)
        assert reduced == (means[-1],) * n
    assert means == [np.arange(8.0).sum() / n, 6.0]
    ones = strategy.experimental_distribute_values_from_function(lambda context: 1.0)
    assert strategy.reduce("sum", ones, axis=None) == n
    held = strategy.experimental_distribute_values_from_function(lambda context: np.zeros(1))
    for x in strategy.experimental_distribute_dataset([np.ones(2 * n), np.ones(1)]):
        held = strategy.run(lambda held, x: held + x.sum(), args=(held, x))
    assert strategy.reduce("sum", held, axis=None) == 2 * n + 1
    data = iter(strategy.experimental_distribute_dataset([np.ones(2 * n), np.ones(1)]))
    next(data), next(data)
    assert strategy.reduce("sum", held, axis=None) == 2 * n + 1
    assert strategy.reduce("sum", held, axis=None) == np.asarray(strategy.experimental_local_results(held)[0])


def test_a_pass_that_is_broken_off_leaves_nothing(strategy):
    """By `break` or by an error, in a batch of which some replicas have no examples: afterwards all count again. An
    iterator that is dropped late ends no other pass over the same data."""
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
    data = strategy.experimental_distribute_dataset([np.array([6.0]), np.array([7.0])])
    first, second = iter(data), iter(data)
    next(first)
    next(second)
    del first
    assert strategy.reduce("sum", ones, axis=None) == 1.0
    assert strategy.reduce("sum", next(second), axis=0) == 7.0


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
        data = strategy.experimental_make_numpy_dataset(Rows(x, y)).batch(8)
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


def test_the_next_batch_may_be_missing(strategy):
    """An optional says so, as often as it is asked for. What is distributed has none of a dataset's methods."""
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
            with pytest.raises(ValueError, match="the pass over the dataset has ended"):
                missing.get_value()
    assert not any(hasattr(data, name) for name in ("batch", "map", "repeat", "shard", "shuffle"))
