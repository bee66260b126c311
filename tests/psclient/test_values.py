"""Distributed values, nests of leaves, and the contexts in which they are seen."""

from __future__ import annotations

import math
import threading
from collections import UserDict, defaultdict, namedtuple
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
from psclient._src.values import PerReplica
from tests.kit.strategies import merged, opened, refused, variable


class Lazy:
    """Computes whatever it is asked for, as a lazy value may."""

    def __getattr__(self, name: str) -> Any:
        if name != "__class__":  # isinstance asks for that, and means no harm
            raise AssertionError(f"asked for {name}")
        raise AttributeError


def test_regroup_goes_by_identity():
    """The same object comes back itself, lazy values untouched; equal but distinct ones become per replica, of which
    each replica finds its own again. One replica's stay bare. Structures that differ are refused, with the path."""
    array, lazy = np.ones(2), Lazy()
    same = values.regroup([{"a": array, "b": (None, lazy), "c": [Lazy, "text"]}] * 2)
    assert same["a"] is array
    assert same["b"][1] is lazy
    assert (same["b"][0], same["c"]) == (None, [Lazy, "text"])
    assert isinstance(values.regroup([Lazy(), Lazy()]), PerReplica)
    own = [(np.ones(2), {"k": i * 1000}) for i in range(3)]
    apart = values.regroup(own)
    assert isinstance(apart[0], PerReplica)
    for index, (array, more) in enumerate(own):
        found = values.select(apart, index)
        assert found[0] is array
        assert found[1] == more
    assert values.regroup(own[:1]) is own[0]
    assert values.per_replica([3]) == 3
    refused(ValueError, r"at \[0\]", lambda: values.regroup([(1,), ((1, 2),)]))


def test_components_of_one_variable_become_the_variable():
    """In the right order, and all of them; else they are just different values. So it is for what `run` and
    `merge_call` return."""
    with opened("mirrored-4") as strategy:
        v, w = (variable(strategy, synchronization=ps.VariableSynchronization.ON_READ) for _ in range(2))
        mine, others = (strategy.experimental_local_results(each) for each in (v, w))
        assert values.regroup(list(mine)) is v
        for wrong in (mine[::-1], [*mine[:3], others[3]], mine[:2]):
            assert isinstance(values.regroup(list(wrong)), PerReplica)
        for each in (v, variable(strategy)):
            assert strategy.run(lambda x: {"a": [x]}, (each,))["a"][0] is each
            assert merged(strategy, lambda s, x: [x], each)[0] is each


def test_python_numbers_that_replicas_return_merge_by_their_value():
    """Python shares small numbers, so that identity says nothing of them. Numbers of two types, NaN, and NumPy's
    arrays stay per replica."""
    for one, other in ((7, int("7")), (True, True), (1e9, float("1e9")), (1j, complex("1j"))):
        assert values.regroup_results([(one,), (other,)]) == (one,)
    for one, other in ((7, 8), (1, True), (1, 1.0), (math.nan, float("nan")), (np.float64(1), np.float64(1))):
        (apart,) = values.regroup_results([(one,), (other,)])
        assert all(leaf is own for leaf, own in zip(apart.values, (one, other), strict=True))
    assert values.regroup_results([7]) == 7


def test_a_per_replica_value_is_no_array():
    """NumPy makes none of it in silence; a mirrored value is as good as one; `repr` shows every value. Local results
    are a tuple: of a distributed value its values, of a single one itself, of a nest one nest for each replica."""
    apart, mirrored = PerReplica([np.ones(2), np.ones(2)]), Mirrored([np.ones(2), np.ones(2)])
    refused(TypeError, r"strategy\.reduce", lambda: np.sum(apart))
    refused(TypeError, "experimental_local_results", lambda: np.ones(2) + apart)
    assert np.add(mirrored, 1).tolist() == [2, 2]
    assert np.asarray(mirrored, "float32").dtype == np.float32
    assert repr(PerReplica([1, "b"])) == "PerReplica:{\n  0: 1,\n  1: 'b'\n}"
    assert values.local_results(PerReplica([1, 2])) == (1, 2)
    assert [values.local_results(single) for single in (7, None, {"a": 1})] == [(7,), (None,), ({"a": 1},)]
    assert values.local_results((PerReplica([1, 2]), 5)) == ((1, 5), (2, 5))


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
        refused(ValueError, "values were passed", lambda leaves=leaves: nest.pack_sequence_as((0, 0), leaves))


class Strategy:
    pass


def test_an_outer_context_that_is_left_first_is_told():
    """And does not stay behind."""
    s, before = Strategy(), context.get_strategy()
    outer, inner = context.enter_cross_replica(s), context.enter_update(s)
    outer.__enter__()
    inner.__enter__()
    refused(RuntimeError, "left before", lambda: outer.__exit__(None, None, None))
    inner.__exit__(None, None, None)
    assert (context.get_strategy(), context.has_strategy()) == (before, False)


def test_a_scope_is_of_the_moment_when_it_is_entered():
    """Where it was made does not count."""
    with opened("mirrored-1") as s:
        with context.enter_cross_replica(s):
            made = s.scope()
        with made:
            assert (context.get_strategy(), context.in_merge_call()) == (s, False)


def test_scopes_are_per_thread():
    """Another thread is outside of every scope; of one that threads share each enters and leaves it for itself, in any
    order."""
    entered, leave, seen = threading.Event(), threading.Event(), []

    def other(scope):
        seen.append(context.has_strategy())
        with scope:
            seen.append(context.get_strategy())
            entered.set()
            leave.wait(30)
        seen.append(context.has_strategy())

    with opened("mirrored-1") as strategy:
        scope = strategy.scope()
        thread = threading.Thread(target=other, args=(scope,))
        with strategy.scope():
            with scope:
                thread.start()
                assert entered.wait(30)
            assert context.get_strategy() is strategy
            leave.set()
            thread.join()
        assert not context.has_strategy()
        assert seen == [False, strategy, False]


def test_the_default_context_is_one_replica():
    """Its `merge_call` runs at once, with the default strategy; there is nothing to reduce, and values stay the
    same."""
    replica, default, given = context.get_replica_context(), ps.get_strategy(), object()
    assert (replica.replica_id_in_sync_group, replica.num_replicas_in_sync, replica.strategy) == (0, 1, default)
    merged = replica.merge_call(lambda strategy, x: (strategy, x, context.in_cross_replica_context()), (3,))
    assert merged == (default, 3, True)
    assert replica.all_reduce("sum", given) is given


def test_a_replica_context_is_of_now():
    """Its numbers change with the generation; it is of no use while another replica's function runs."""
    where, s = [(2, 5)], Strategy()
    replica, other = (ReplicaContext(s, 1, CPU, lambda *_: None, lambda: where[0]) for _ in range(2))
    assert (replica.replica_id_in_sync_group, replica.num_replicas_in_sync) == (3, 5)
    where[0] = (0, 2)
    assert (replica.replica_id_in_sync_group, replica.num_replicas_in_sync) == (1, 2)
    with context.enter_replica(other), pytest.raises(RuntimeError, match="a replica context that is not current"):
        replica.merge_call(lambda strategy: None)


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
        with pytest.raises(error, match="the initial value of variable 'first' is not an array"):
            ps.Variable(value, name="first")
