"""Distributed values, nests of leaves, and the contexts in which they are seen."""

from __future__ import annotations

import contextlib
import math
import threading
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import pytest

import psclient as ps
from psclient._src import context, values
from psclient._src.arraylike import Mirrored
from psclient._src.arrays import nest
from psclient._src.arrays.devices import CPU, as_array
from psclient._src.context import ReplicaContext
from psclient._src.values import Component, DistributedValues, PerReplica
from tests.kit.strategies import refused


class Part(Component):
    def __init__(self, whole: Copies) -> None:
        self.distributed_container = whole


class Copies(DistributedValues):
    """A variable with one component for each replica."""

    def __init__(self, count: int) -> None:
        super().__init__([Part(self) for _ in range(count)])


class Greedy:
    """Computes whatever it is asked for, as a lazy value may."""

    def __getattr__(self, name: str) -> Any:
        if name != "__class__":  # isinstance asks for that, and means no harm
            raise AssertionError(f"asked for {name}")
        raise AttributeError


def test_regroup_goes_by_identity():
    """The same object comes back itself, lazy values untouched; equal but distinct ones become per replica."""
    array, lazy = np.ones(2), Greedy()
    merged = values.regroup([{"a": array, "b": (None, lazy)}] * 2)
    assert merged["a"] is array
    assert merged["b"][0] is None
    assert merged["b"][1] is lazy
    a, b = np.ones(2), np.ones(2)
    merged = values.regroup([(a,), (b,)])
    assert isinstance(merged[0], PerReplica)
    assert merged[0].values[0] is a
    assert merged[0].values[1] is b
    assert isinstance(values.regroup([Greedy(), Greedy()]), PerReplica)


def test_components_of_one_variable_become_the_variable():
    """In the right order, and all of them; else they are just different values."""
    v, w = Copies(2), Copies(2)
    assert values.regroup([v.values[0], v.values[1]]) is v
    assert isinstance(values.regroup([v.values[1], v.values[0]]), PerReplica)
    assert isinstance(values.regroup([v.values[0], w.values[1]]), PerReplica)
    three = Copies(3)
    assert isinstance(values.regroup([three.values[0], three.values[1]]), PerReplica)


def test_regroup_needs_one_structure_and_wraps_nothing_of_one_replica():
    """A difference is an error that names the path; each replica finds again what it returned."""
    result = {"loss": np.float32(1)}
    assert values.regroup([result]) is result
    assert values.per_replica([3]) == 3
    refused(ValueError, r"at \[0\]", lambda: values.regroup([(1,), ((1, 2),)]))
    own = [(np.arange(3) + i, {"k": i * 1000}) for i in range(3)]
    merged = values.regroup(own)
    for index, expected in enumerate(own):
        got = values.select(merged, index)
        assert got[0] is expected[0]
        assert got[1] == expected[1]


@pytest.mark.parametrize("kind", [PerReplica, Mirrored])
def test_select_gives_a_replica_its_component(kind):
    """Distributed leaves are unwrapped, all else stays the same object."""
    plain = object()
    nested = {"x": kind([1, 2]), "y": [plain]}
    assert values.select(nested, 1) == {"x": 2, "y": [plain]}
    refused(ValueError, "2 values has no value for local replica 2", lambda: values.select(nested, 2))


def test_python_numbers_that_replicas_return_merge_by_their_value():
    """Python shares small numbers, so that identity says nothing of them; a single replica's comes back bare."""
    for one, other in ((7, int("7")), (True, True), (1e9, float("1e9")), (1j, complex("1j"))):
        assert values.regroup_results([(one,), (other,)]) == (one,)
    for one, other in ((7, 8), (1, True), (1, 1.0), (math.nan, float("nan")), (np.float64(1), np.float64(1))):
        (merged,) = values.regroup_results([(one,), (other,)])
        assert all(leaf is own for leaf, own in zip(merged.values, (one, other), strict=True))
    shared = object()
    assert values.regroup_results([(shared, None), (shared, None)]) == (shared, None)
    assert values.regroup_results([7]) == 7


def test_local_results():
    """A distributed value gives its values, a single value itself, a nest one nest for each replica."""
    assert values.local_results(PerReplica([1, 2])) == (1, 2)
    assert values.local_results(7) == (7,)
    assert values.local_results({"a": 1}) == ({"a": 1},)
    assert values.local_results((PerReplica([1, 2]), 5)) == ((1, 5), (2, 5))
    copies = Copies(2)
    assert values.local_results(copies) == copies.values


def test_a_per_replica_value_is_no_array():
    """NumPy makes none of it in silence; a mirrored value is as good as one; `repr` shows every value."""
    refused(TypeError, r"strategy\.reduce", lambda: np.sum(PerReplica([np.ones(2), np.ones(2)])))
    refused(TypeError, "experimental_local_results", lambda: np.ones(2) + PerReplica([np.ones(2), np.ones(2)]))
    mirrored = Mirrored([np.ones(2), np.ones(2)])
    assert np.add(mirrored, 1).tolist() == [2, 2]
    assert np.asarray(mirrored, "float32").dtype == np.float32
    assert repr(PerReplica([1, "b"])) == "PerReplica:{\n  0: 1,\n  1: 'b'\n}"


Point = namedtuple("Point", "x y")


@dataclass(frozen=True)
class Batch:
    images: object
    labels: object
    note: str = field(default="", init=False)


@dataclass(frozen=True)
class Atom:
    _nest_leaf: ClassVar[bool] = True
    inside: int = 0


NESTS = [
    5,
    None,
    (),
    (1, (2, [3, None])),
    {"b": 1, "a": {"c": (2,)}},
    Point(1, [2, 3]),
    Batch((1, 2), {"y": 3}),
    OrderedDict(z=1, a=[2]),
]


@pytest.mark.parametrize("value", NESTS, ids=repr)
def test_a_nest_is_rebuilt_from_its_leaves(value):
    """What `flatten` takes apart, `pack_sequence_as` puts together again."""
    rebuilt = nest.pack_sequence_as(value, nest.flatten(value))
    assert rebuilt == value
    assert type(rebuilt) is type(value)


def test_dicts_and_dataclasses_are_nests():
    """Dicts keep their own order and match by key; None, arrays, strings and classes with `_nest_leaf` are leaves."""
    array = np.zeros(3)
    assert nest.flatten({"b": (1, None), "a": "text", "c": [array]}) == [1, None, "text", array]
    result = nest.map_structure(lambda a, b: (a, b), {"x": 1, "y": 2}, {"y": 20, "x": 10})
    assert list(result.items()) == [("x", (1, 10)), ("y", (2, 20))]
    result = nest.map_structure(lambda a: a + 1, defaultdict(list, x=1))
    assert result == {"x": 2}
    assert result["new"] == []
    atom = Atom(3)
    assert nest.flatten((atom,)) == [atom]
    assert nest.flatten(Batch(1, 2)) == [1, 2]
    assert nest.map_structure(len, {"a": [1, 2], "b": [3]}, is_leaf=lambda v: isinstance(v, list)) == {"a": 2, "b": 1}


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ((1, 2), (1, 2, 3), "structures differ: a tuple of 2 and a tuple of 3"),
        ({"x": (1, [2])}, {"x": (1, 2)}, r"at \['x'\]\[1\]: a list of 1 and a leaf \(int\)"),
        ([1, {"a": 1}], [1, {"b": 1}], r"at \[1\]: a dict with keys \['a'\] and a dict with keys \['b'\]"),
        ((1,), [1], "a tuple of 1 and a list of 1"),
        (Batch(1, 2), Batch(1, (2, 3)), r"at \.labels: a leaf \(int\) and a tuple of 2"),
        (Point(1, 2), (1, 2), "a Point of 2 and a tuple of 2"),
        ({"loss": None}, {"loss": (1,)}, r"at \['loss'\]: None and a tuple of 1"),
    ],
)
def test_structures_that_differ_are_told_with_the_path(first, second, message):
    refused(ValueError, message, lambda: nest.map_structure(lambda a, b: None, first, second))


def test_a_wrong_number_of_leaves_is_refused():
    for leaves in ([1], [1, 2, 3]):
        with pytest.raises(ValueError, match="values were passed"):
            nest.pack_sequence_as((0, 0), leaves)


class Strategy:
    pass


def replica_of(strategy: Any) -> ReplicaContext:
    return ReplicaContext(strategy, 1, CPU, lambda fn, args, kwargs: fn(strategy, *args, **kwargs), lambda: (2, 5))


def state() -> tuple[Any, bool, bool, bool, bool]:
    return (
        context.get_strategy(),
        context.has_strategy(),
        context.get_replica_context() is not None,
        context.in_cross_replica_context(),
        context.in_merge_call(),
    )


DEFAULT = (ps.get_strategy(), False, True, False, False)


def test_each_context_says_what_it_is():
    """Entering and leaving: default, cross-replica, replica, cross-replica again, update."""
    s = Strategy()
    assert state() == DEFAULT
    with context.enter_strategy_scope(s):
        assert state() == (s, True, False, True, False)
        with context.enter_replica(replica_of(s)):
            assert state() == (s, True, True, False, False)
            with context.enter_cross_replica(s):
                assert state() == (s, True, False, True, True)
                with context.enter_strategy_scope(s):
                    assert state() == (s, True, False, True, True)
                with context.enter_update(s):
                    assert state() == (s, True, False, True, False)
                    assert not context.crosses_replicas()
            assert state() == (s, True, True, False, False)
    assert state() == DEFAULT


def test_contexts_are_left():
    """In order, also after an error; an outer one that is left first is told, and does not stay behind."""
    with pytest.raises(KeyError), context.enter_strategy_scope(Strategy()):
        raise KeyError
    assert state() == DEFAULT
    s = Strategy()
    outer, inner = context.enter_strategy_scope(s), context.enter_update(s)
    outer.__enter__()
    inner.__enter__()
    refused(RuntimeError, "left before", lambda: outer.__exit__(None, None, None))
    inner.__exit__(None, None, None)
    assert state() == DEFAULT


def test_strategies_do_not_mix():
    """Another strategy's scope or method raises; the same one's nests, and a scope is of the moment it is entered."""
    s = Strategy()
    with context.enter_strategy_scope(s), context.enter_strategy_scope(s):
        assert context.in_cross_replica_context()
    inner = replica_of(s)
    with context.enter_replica(inner), context.enter_strategy_scope(s):
        assert context.get_replica_context() is inner
    assert state() == DEFAULT
    s, other = Strategy(), Strategy()
    with context.enter_strategy_scope(s):
        with pytest.raises(RuntimeError, match="in the scope of another strategy"), context.enter_strategy_scope(other):
            pass
        refused(RuntimeError, "scope of another strategy", lambda: context.require_cross_replica(other, "reduce"))
        assert context.get_strategy() is s
    with context.enter_strategy_scope(s):
        made = context.enter_strategy_scope(s)
    with made:
        assert state() == (s, True, False, True, False)


def test_scopes_are_per_thread():
    seen: list[Any] = []
    with context.enter_strategy_scope(Strategy()):
        thread = threading.Thread(target=lambda: seen.append(state()))
        thread.start()
        thread.join()
    assert seen == [DEFAULT]


@pytest.mark.parametrize(
    ("enter", "message"),
    [
        (
            lambda s: context.enter_replica(replica_of(s)),
            "in replica context; .*outside of strategy.run, or .*merge_call",
        ),
        (lambda s: context.enter_update(s), "in update context; .*passed to update"),
        (lambda s: contextlib.nullcontext(), "in default context; .*with strategy.scope"),
    ],
)
def test_wrong_contexts_name_the_remedy(enter, message):
    """A cross-replica method in any other context says what to do."""
    s = Strategy()
    with enter(s), pytest.raises(RuntimeError, match=f"reduce needs cross-replica context but .*{message}"):
        context.require_cross_replica(s, "reduce")


def test_what_needs_a_replica_says_so():
    """In cross-replica and update context there is none; the default context is one."""
    s = Strategy()
    for entered in (context.enter_strategy_scope(s), context.enter_update(s)):
        with entered, pytest.raises(RuntimeError, match=r"all_gather needs replica context.*strategy.run"):
            context.require_replica("all_gather")
    assert context.require_replica("all_gather").num_replicas_in_sync == 1


def test_a_replica_context_is_of_now():
    """Its numbers change with the generation; it is of use in its own thread, while its function runs."""
    where = [(2, 5)]
    replica = ReplicaContext(Strategy(), 1, CPU, lambda *_: None, lambda: where[0])
    assert (replica.replica_id_in_sync_group, replica.num_replicas_in_sync) == (3, 5)
    where[0] = (0, 2)
    assert (replica.replica_id_in_sync_group, replica.num_replicas_in_sync) == (1, 2)
    assert replica.devices == ("cpu:0",)
    s = Strategy()
    replica = replica_of(s)
    for entered in (context.enter_strategy_scope(s), context.enter_replica(replica_of(s))):
        with entered, pytest.raises(RuntimeError, match="a replica context that is not current"):
            replica.merge_call(lambda strategy: None)
    with context.enter_replica(replica):
        assert replica.merge_call(lambda strategy, a, b: (strategy, a, b), (1,), {"b": 2}) == (s, 1, 2)


def test_the_default_context_is_one_replica():
    """Its `merge_call` runs at once, in cross-replica context, with the default strategy."""
    replica, default = context.get_replica_context(), ps.get_strategy()
    assert replica is not None
    assert (replica.replica_id_in_sync_group, replica.num_replicas_in_sync, replica.strategy) == (0, 1, default)
    merged = replica.merge_call(lambda strategy, x: (strategy, x, context.in_cross_replica_context()), (3,))
    assert merged == (default, 3, True)
    assert replica.all_reduce("sum", {"a": 1}) == {"a": 1}
    given = object()
    assert replica.all_reduce("sum", given) is given


class Frozen(Mapping):
    """A mapping that cannot be changed, and is made of a dict."""

    def __init__(self, of):
        self._of = dict(of)

    def __getitem__(self, key):
        return self._of[key]

    def __iter__(self):
        return iter(self._of)

    def __len__(self):
        return len(self._of)


def test_mappings_are_nests():
    """Of any kind, which they keep, with what else they carry; each leaf has a path."""
    user = UserDict(a=1, b=(2, 3))
    user.name = "kept"
    for given in (user, Frozen(user), MappingProxyType(dict(user)), dict(user)):
        made = nest.map_structure(lambda x: -x, given)
        assert type(made) is type(given)
        assert {**made} == {"a": -1, "b": (-2, -3)}
        assert [*nest.paths({"x": given})] == [("['x']['a']", 1), ("['x']['b'][0]", 2), ("['x']['b'][1]", 3)]
        assert nest.map_structure(lambda x, y: x + y, given, {"b": (10, 20), "a": 30})["b"] == (12, 23)
    assert nest.map_structure(lambda x: x, user).name == "kept"
    assert user == {"a": 1, "b": (2, 3)}


def test_arrays_of_other_libraries():
    """In this machine's byte order; what NumPy has no array for is told with the remedy."""
    swapped = as_array(np.arange(3, dtype=">f4"))
    assert (swapped.dtype.isnative, swapped.tolist()) == (True, [0, 1, 2])
    plain = np.arange(3.0)
    assert as_array(plain) is plain
    assert as_array(np.ma.masked_array(plain, [False] * 3)).tolist() == [0, 1, 2]
    refused(TypeError, r"masked.*x\.filled", lambda: as_array(np.ma.masked_array(plain, [True, False, False])))
    sparse = pytest.importorskip("scipy.sparse")
    for matrix in (sparse.eye(2).tocsr(), sparse.coo_array(np.eye(2))):
        refused(TypeError, r"is sparse.*x\.toarray\(\)", lambda matrix=matrix: as_array(matrix))


def test_a_leaf_that_is_refused_is_named():
    """By its path in a nest; a nest that is a leaf has none. What a variable begins with is named by the variable."""
    fields = {"a": [1, {"b": np.ma.masked_array([1], [True])}]}
    refused(TypeError, r"^at \['a'\]\[1\]\['b'\]: an array has masked", lambda: nest.map_leaves(as_array, fields))
    refused(TypeError, "^an array has masked", lambda: nest.map_leaves(as_array, fields["a"][1]["b"]))
    assert nest.map_leaves(len, {"a": [1, 2], "b": "c"}, is_leaf=lambda value: isinstance(value, list)) == [2, 1]
    for value, error in ((np.array(["a"]), ps.PSError), (fields["a"][1]["b"], TypeError)):
        refused(
            error,
            "the initial value of variable 'first' is not an array",
            lambda value=value: ps.Variable(value, name="first"),
        )
