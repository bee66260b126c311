"""Values of replicas: how arguments are taken apart, results merged, and variables found again from their copies."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import psclient as ps
from psclient._src import nest, values
from tests.kit.strategies import by_replica, in_replicas, kind_of, merged, replicas, variable

here = ps.get_replica_context

Pair = namedtuple("Pair", "x y")


@dataclass(frozen=True)
class Batch:
    features: Any
    label: Any = None


def numbered(strategy):
    """A per-replica value: of each replica an array with its number."""
    return strategy.experimental_distribute_values_from_function(
        lambda context: np.array(context.replica_id_in_sync_group)
    )


# ---- Arguments are taken apart ----


def test_arguments_are_unwrapped_wherever_they_stand(strategy):
    """In tuples, lists, dicts, named tuples and dataclasses, by position and by name; all else stays itself."""
    x, plain = numbered(strategy), object()
    given = ((x, [x, plain]), {"a": x, "b": None}, Pair(x, Batch(x)), Batch([x], plain))

    def fn(*args, key):
        me = here().replica_id_in_sync_group
        (a, (b, same)), (c, nothing), (d, batch), other = args[0], args[1].values(), args[2], args[3]
        assert [int(v) for v in (a, b, c, d, batch.features, other.features[0], key[0])] == [me] * 7
        assert same is other.label is plain
        assert nothing is batch.label is None
        assert [type(arg) for arg in args] == [tuple, dict, Pair, Batch]
        return True

    assert set(strategy.experimental_local_results(strategy.run(fn, given, {"key": [x]}))) == {True}


def test_a_mirrored_value_is_unwrapped_too(strategy):
    """Each replica gets the copy on its device."""
    n = replicas(strategy)
    total = strategy.extended.reduce_to("sum", by_replica(strategy, np.float32), numbered(strategy))
    assert isinstance(total, ps.Mirrored) == (n > 1)
    assert in_replicas(strategy, lambda i, x: (np.ndim(x), float(x)), total) == ((0, float(sum(range(n)))),) * n


def test_an_array_is_handed_on_as_it_is(strategy):
    """The same object to every replica: nothing is copied."""
    array = np.ones(3)
    assert in_replicas(strategy, lambda i, x: x is array, array) == (True,) * replicas(strategy)


def test_arguments_are_a_tuple(strategy):
    """One that stands alone would be taken apart: the message says what to write."""
    for alone in (np.ones(3), numbered(strategy), 3, "text"):
        with pytest.raises(TypeError, match=r"run takes a tuple of arguments, and args is a .*; write args=\(x,\)"):
            strategy.run(lambda *x: None, args=alone)
        with pytest.raises(TypeError, match=r"merge_call takes a tuple of arguments.*; write args=\(x,\)"):
            strategy.run(lambda alone=alone: here().merge_call(lambda s, *x: None, args=alone))
    assert in_replicas(strategy, lambda i: i) == tuple(range(replicas(strategy)))


def test_values_of_other_strategies_are_refused(strategy):
    """By their number, which is not that of the replicas."""
    if kind_of(strategy) == "default":
        pytest.skip("the default strategy hands on whatever it is given")
    n = replicas(strategy)
    for count in (n - 1, n + 1):
        with pytest.raises(ValueError, match=f"Mirrored of {count} values is given to {n} local replicas"):
            strategy.run(lambda x: None, ({"x": ps.Mirrored([1.0] * count)},))


# ---- Results are merged ----


def test_the_same_object_comes_back_itself(strategy):
    """From all replicas one object: a string, None, an array, a class."""
    array = np.ones(2)
    result = strategy.run(lambda: {"a": array, "b": (None, "text"), "c": Pair(Pair, strategy)})
    assert result["a"] is array
    assert result["b"] == (None, "text")
    assert result["c"] == Pair(Pair, strategy)


def test_equal_arrays_that_are_not_one_stay_apart(strategy):
    """Identity decides; with one replica the bare value comes back."""
    result = strategy.run(lambda: [np.ones(2)])
    assert isinstance(result, list)
    assert isinstance(result[0], ps.PerReplica) == (replicas(strategy) > 1)
    found = strategy.experimental_local_results(result[0])
    assert [array.tolist() for array in found] == [[1.0, 1.0]] * replicas(strategy)
    assert len({id(array) for array in found}) == replicas(strategy)


@pytest.mark.parametrize("number", [7, True, 0.5, 1j])
def test_python_numbers_that_are_equal_are_one(strategy, number):
    """Whether Python shares a number says nothing: each replica makes its own. Those that differ stay apart."""
    result = strategy.run(lambda: type(number)(str(number)))
    assert (type(result), result) == (type(number), number)
    apart = by_replica(strategy, lambda replica: number if replica else -1)
    assert strategy.experimental_local_results(apart) == (-1, *[number] * (replicas(strategy) - 1))
    assert strategy.reduce("mean", result, axis=None) == number
    if replicas(strategy) > 1:
        with pytest.raises(ValueError, match=r"SUM of .*run makes one where all are equal, so return arrays"):
            strategy.reduce("sum", result, axis=None)


def test_what_replicas_see_of_a_variable_merges_to_it(strategy):
    """The variable itself, or its copies, given back as they were given: the result is the variable."""
    for v in (
        variable(strategy),
        variable(strategy, synchronization=ps.VariableSynchronization.ON_READ),
    ):
        assert strategy.run(lambda v=v: v) is v
        assert strategy.run(lambda w: w, (v,)) is v
        assert strategy.run(lambda w: {"a": [w]}, (v,))["a"][0] is v
        assert merged(strategy, lambda s, w: w, v) is v
        assert merged(strategy, lambda s, v=v: [v])[0] is v


def test_copies_of_different_variables_do_not_merge(strategy):
    """Nor do copies in another order."""
    if replicas(strategy) == 1:
        pytest.skip("one replica has one copy")
    on_read = ps.VariableSynchronization.ON_READ
    v, w = variable(strategy, synchronization=on_read), variable(strategy, synchronization=on_read)
    mixed = strategy.run(lambda a, b: a if here().replica_id_in_sync_group else b, (v, w))
    assert isinstance(mixed, ps.PerReplica)
    mine = strategy.experimental_local_results(v)
    turned = strategy.run(lambda: mine[-1 - here().replica_id_in_sync_group])
    assert isinstance(turned, ps.PerReplica)


def test_structures_must_not_differ_between_replicas(strategy):
    """The error names the path, and the strategy stays usable."""
    if replicas(strategy) == 1:
        pytest.skip("one replica returns one structure")
    for wrong, says in (
        (lambda i: {"a": (1,) * (i + 1)}, r"\['a'\]"),
        (lambda i: {"a": 1} if i else {"b": 1}, "keys"),
        (lambda i: [1] if i else (1,), "a tuple of 1 and a list of 1"),
        (lambda i: [None] if i else [[]], r"\[0\]: a list of 0 and None"),
    ):
        with pytest.raises(ValueError, match=f"structures differ.*{says}"):
            by_replica(strategy, wrong)
    assert in_replicas(strategy, lambda i: i) == tuple(range(replicas(strategy)))


def test_what_is_merged_may_be_given_again(strategy):
    """What one run returns is an argument of the next: each replica finds its own."""
    first = by_replica(strategy, lambda i: {"x": np.array(i), "y": [Pair(np.array(i + 10), None)]})

    def again(i, given):
        return int(given["x"]), int(given["y"][0].x), given["y"][0].y

    assert in_replicas(strategy, again, first) == tuple((i, i + 10, None) for i in range(replicas(strategy)))


# ---- Local results and containers ----


def test_local_results_are_a_tuple(strategy):
    """One for each local replica; of what is not distributed the value alone; of a nest one nest for each."""
    n = replicas(strategy)
    x = numbered(strategy)
    assert strategy.experimental_local_results(x) == tuple(range(n))
    assert strategy.experimental_local_results("text") == ("text",)
    assert strategy.experimental_local_results(None) == (None,)
    found = strategy.experimental_local_results({"a": x, "b": "same"})
    assert found == tuple({"a": i, "b": "same"} for i in range(n))


def test_a_value_is_among_those_of_its_container(strategy):
    """Of the copies of variables, in every context in which one gets hold of them, and of whatever else."""
    container = strategy.extended.value_container

    def holds(value):
        return any(value is x for x in strategy.experimental_local_results(container(value)))

    for value in (np.ones(3), "text", None, numbered(strategy)):
        assert container(value) is value
    assert all(map(holds, (np.ones(3), "text", None)))
    for v in (variable(strategy), variable(strategy, synchronization=ps.VariableSynchronization.ON_READ)):
        values = list(strategy.experimental_local_results(v))
        values += in_replicas(strategy, lambda i, w: w, v)
        if kind_of(strategy) != "embedded" or v.synchronization is ps.VariableSynchronization.ON_READ:
            strategy.extended.update(v, values.append)
        assert all(container(value) is v and holds(value) for value in values)


def test_in_finds_a_value_in_its_container(strategy):
    """The documents' expression, of what `run` returned, of its parts, of variables and of their copies."""
    extended = strategy.extended
    arrays = strategy.run(lambda x: x * 2.0, (numbered(strategy),))
    made = [variable(strategy), variable(strategy, synchronization=ps.VariableSynchronization.ON_READ)]
    wholes = [arrays, strategy.run(lambda: np.ones(3)), strategy.run(lambda: 5), {"a": arrays}, *made, "text", None]
    for whole in wholes:
        for value in (whole, *strategy.experimental_local_results(whole)):
            assert value in strategy.experimental_local_results(extended.value_container(value))
            assert (extended.value_container(value) is value) == (not any(value is c for v in made for c in parts(v)))
    assert 3 not in strategy.experimental_local_results(np.arange(4))
    assert np.ones(3) not in strategy.experimental_local_results(np.ones(3))
    assert 5 in strategy.experimental_local_results(5)


def parts(v):
    """The copies of a variable that are not the variable itself."""
    return [copy for copy in ps.get_strategy().experimental_local_results(v) if copy is not v]


# ---- Values from a function ----


def test_a_function_gives_each_replica_its_value(strategy):
    """A constant, by the replica's number, by their count: the examples of the documents."""
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


def test_a_function_may_return_a_nest(strategy):
    """Of arrays or numbers; None stays None in each."""
    made = strategy.experimental_distribute_values_from_function(
        lambda context: {"x": np.full(2, context.replica_id_in_sync_group), "y": (None,)}
    )
    found = strategy.experimental_local_results(made)
    assert [(int(value["x"][0]), value["y"]) for value in found] == [(i, (None,)) for i in range(replicas(strategy))]


def test_an_object_that_all_replicas_share_is_a_value_of_each(strategy):
    """So that a sum counts it once for each."""
    shared = np.ones(3)
    made = strategy.experimental_distribute_values_from_function(lambda context: shared)
    assert strategy.reduce("sum", made, axis=None).tolist() == [float(replicas(strategy))] * 3


def test_a_function_returns_values_of_one_replica(strategy):
    """Distributed values, and structures that differ, are refused."""
    for wrong in (ps.PerReplica([1, 2]), {"a": ps.Mirrored([1, 2])}):
        with pytest.raises(ValueError, match="the value of one replica"):
            strategy.experimental_distribute_values_from_function(lambda context, wrong=wrong: wrong)
    if replicas(strategy) > 1:
        with pytest.raises(ValueError, match="structures differ"):
            strategy.experimental_distribute_values_from_function(
                lambda context: [0] * context.replica_id_in_sync_group
            )


def test_a_value_context_says_what_it_is():
    """As in TensorFlow; by default one replica of one."""
    assert str(ps.ValueContext(1, 4)) == "ps.ValueContext(replica id 1, total replicas in sync: 4)"
    assert (ps.ValueContext().replica_id_in_sync_group, ps.ValueContext().num_replicas_in_sync) == (0, 1)


def test_what_is_shown_of_values(strategy):
    """One line for each replica, after the name of their kind."""
    for made in (by_replica(strategy, lambda i: i), strategy.extended.broadcast_to(5, numbered(strategy))):
        lines = repr(made).splitlines()
        if replicas(strategy) == 1:
            assert len(lines) == 1
        else:
            assert lines[0] in ("PerReplica:{", "Mirrored:{")
            assert [line.split(":")[0].strip() for line in lines[1:-1]] == [str(i) for i in range(replicas(strategy))]
            assert lines[-1] == "}"


def test_a_per_replica_value_is_no_array_in_cross_replica_context(strategy):
    """It says how to make one of it; a mirrored value is as good as an array."""
    if replicas(strategy) == 1:
        pytest.skip("with one replica it is an array")
    x = numbered(strategy)
    with pytest.raises(TypeError, match=r"strategy\.reduce"):
        np.add(x, 1)
    assert np.add(strategy.extended.broadcast_to(np.float32(2.0), x), 1.0) == 3.0


# ---- Random nests ----

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


def leaf_like(structure, replica):
    """A nest like the structure, with leaves that no other replica has."""
    leaves = nest.flatten(structure)
    return nest.pack_sequence_as(structure, [np.array([replica, i]) for i in range(len(leaves))])


@given(NESTS)
def test_packing_undoes_flattening(structure):
    """Whatever is put in place of the leaves is found there again, in order."""
    leaves = nest.flatten(structure)
    assert nest.pack_sequence_as(structure, leaves) == structure
    other = [object() for _ in leaves]
    packed = nest.pack_sequence_as(structure, other)
    assert type(packed) is type(structure) or len(leaves) == 1
    assert all(a is b for a, b in zip(nest.flatten(packed), other, strict=True))


@given(NESTS, st.integers(1, 4), st.data())
def test_selecting_undoes_merging(structure, count, data):
    """For 1 to 4 replicas: each finds what it gave, and what all shared is the same object before and after."""
    leaves = nest.flatten(structure)
    shared = [object() if data.draw(st.booleans()) else None for _ in leaves]
    given = [
        nest.pack_sequence_as(structure, [s or np.array([replica, i]) for i, s in enumerate(shared)])
        for replica in range(count)
    ]
    merge = values.regroup(given)
    for replica, own in enumerate(given):
        found = nest.flatten(values.select(merge, replica))
        assert all(a is b for a, b in zip(found, nest.flatten(own), strict=True))
    kept = [leaf for leaf, s in zip(nest.flatten(merge), shared, strict=True) if s]
    assert all(a is b for a, b in zip(kept, filter(None, shared), strict=True))


@given(NESTS, st.integers(1, 4))
def test_merging_undoes_selecting(structure, count):
    """What is taken apart for 1 to 4 replicas and merged has the same components in the same places."""
    leaves = [values.per_replica([np.array([r, i]) for r in range(count)]) for i in range(len(nest.flatten(structure)))]
    whole = nest.pack_sequence_as(structure, leaves)
    again = values.regroup([values.select(whole, replica) for replica in range(count)])
    for before, after in zip(leaves, nest.flatten(again), strict=True):
        components = zip(values.local_results(before), values.local_results(after), strict=True)
        assert all(a is b for a, b in components)


@given(structure=NESTS)
def test_replicas_get_and_give_any_nest(strategy, structure):
    """Through `run` and through `merge_call`: what goes in comes out, each replica's own."""
    n = replicas(strategy)
    own = [leaf_like(structure, replica) for replica in range(n)]
    given = values.regroup(own)

    def through(x):
        return here().merge_call(lambda s, y: y, (x,))

    found = strategy.experimental_local_results(strategy.run(through, (given,)))
    for mine, expected in zip(found * (n // len(found)), own, strict=True):
        assert all(a is b for a, b in zip(nest.flatten(mine), nest.flatten(expected), strict=True))


def test_merge_functions_may_return_per_replica_values(strategy):
    """Each replica gets its component, all else as it is."""
    x = numbered(strategy)

    def fn():
        mine, plain = here().merge_call(lambda s: (x, "plain"))
        return int(mine) == here().replica_id_in_sync_group and plain == "plain"

    assert set(strategy.experimental_local_results(strategy.run(fn))) == {True}
    assert strategy.experimental_local_results(merged(strategy, lambda s: x)) == tuple(range(replicas(strategy)))
