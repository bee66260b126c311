"""Distributed values: select, regroup, local results."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from psclient._src import values
from psclient._src.arraylike import Mirrored
from psclient._src.values import Component, DistributedValues, PerReplica


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


def test_the_same_object_comes_back_itself() -> None:
    """What all replicas return as one object is merged to that object, lazy values untouched."""
    array, lazy = np.ones(2), Greedy()
    merged = values.regroup([{"a": array, "b": (None, lazy)}] * 2)
    assert merged["a"] is array
    assert merged["b"][0] is None
    assert merged["b"][1] is lazy


def test_equal_but_distinct_becomes_per_replica() -> None:
    """Identity decides, not equality."""
    a, b = np.ones(2), np.ones(2)
    merged = values.regroup([(a,), (b,)])
    assert isinstance(merged[0], PerReplica)
    assert merged[0].values[0] is a
    assert merged[0].values[1] is b


def test_two_lazy_values_become_per_replica_without_being_asked() -> None:
    """A merge asks nothing of an object."""
    assert isinstance(values.regroup([Greedy(), Greedy()]), PerReplica)


def test_components_of_one_variable_become_the_variable() -> None:
    """In the right order, and all of them; else they are just different values."""
    v, w = Copies(2), Copies(2)
    assert values.regroup([v.values[0], v.values[1]]) is v
    assert isinstance(values.regroup([v.values[1], v.values[0]]), PerReplica)
    assert isinstance(values.regroup([v.values[0], w.values[1]]), PerReplica)
    three = Copies(3)
    assert isinstance(values.regroup([three.values[0], three.values[1]]), PerReplica)


def test_one_replica_gives_the_bare_value() -> None:
    """With one local replica nothing is wrapped."""
    result = {"loss": np.float32(1)}
    assert values.regroup([result]) is result
    assert values.per_replica([3]) == 3


def test_replicas_must_return_the_same_structure() -> None:
    """A difference is an error that names the path."""
    with pytest.raises(ValueError, match=r"at \[0\]"):
        values.regroup([(1,), ((1, 2),)])


@pytest.mark.parametrize("kind", [PerReplica, Mirrored])
def test_select_gives_a_replica_its_component(kind: type[DistributedValues]) -> None:
    """Distributed leaves are unwrapped, all else stays the same object."""
    plain = object()
    nested = {"x": kind([1, 2]), "y": [plain]}
    assert values.select(nested, 1) == {"x": 2, "y": [plain]}
    with pytest.raises(ValueError, match="2 values has none for local replica 2"):
        values.select(nested, 2)


def test_python_numbers_that_replicas_return_merge_by_their_value() -> None:
    """Python shares small numbers, so that identity says nothing of them; a single replica's comes back bare."""
    for one, other in ((7, int("7")), (True, True), (1e9, float("1e9")), (1j, complex("1j"))):
        assert values.regroup_results([(one,), (other,)]) == (one,)
    for one, other in ((7, 8), (1, True), (1, 1.0), (math.nan, float("nan")), (np.float64(1), np.float64(1))):
        (merged,) = values.regroup_results([(one,), (other,)])
        assert all(leaf is own for leaf, own in zip(merged.values, (one, other), strict=True))
    shared = object()
    assert values.regroup_results([(shared, None), (shared, None)]) == (shared, None)
    assert values.regroup_results([7]) == 7


def test_select_undoes_regroup() -> None:
    """Each replica finds again what it returned."""
    own = [(np.arange(3) + i, {"k": i * 1000}) for i in range(3)]
    merged = values.regroup(own)
    for index, expected in enumerate(own):
        got = values.select(merged, index)
        assert got[0] is expected[0]
        assert got[1] == expected[1]


def test_local_results() -> None:
    """A distributed value gives its values, a single value itself, a nest one nest for each replica."""
    assert values.local_results(PerReplica([1, 2])) == (1, 2)
    assert values.local_results(7) == (7,)
    assert values.local_results({"a": 1}) == ({"a": 1},)
    assert values.local_results((PerReplica([1, 2]), 5)) == ((1, 5), (2, 5))
    copies = Copies(2)
    assert values.local_results(copies) == copies.values


def test_a_per_replica_value_is_no_array() -> None:
    """NumPy does not make an array of objects of it in silence; a mirrored value is as good as an array."""
    with pytest.raises(TypeError, match=r"strategy\.reduce"):
        np.sum(PerReplica([np.ones(2), np.ones(2)]))  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="experimental_local_results"):
        np.ones(2) + PerReplica([np.ones(2), np.ones(2)])  # type: ignore[operator]
    mirrored = Mirrored([np.ones(2), np.ones(2)])
    assert np.add(mirrored, 1).tolist() == [2, 2]
    assert np.asarray(mirrored, "float32").dtype == np.float32


def test_repr_shows_every_value() -> None:
    """One line for each replica."""
    assert repr(PerReplica([1, "b"])) == "PerReplica:{\n  0: 1,\n  1: 'b'\n}"
