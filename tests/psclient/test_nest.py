"""Nests of leaves."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import pytest

from psclient._src import nest

Point = namedtuple("Point", "x y")


@dataclass(frozen=True)
class Batch:
    images: object
    labels: object
    note: str = field(default="", init=False)


@dataclass(frozen=True)
class Atom:
    nest_leaf: ClassVar[bool] = True
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
def test_a_nest_is_rebuilt_from_its_leaves(value: object) -> None:
    """What `flatten` takes apart, `pack_sequence_as` puts together again."""
    rebuilt = nest.pack_sequence_as(value, nest.flatten(value))
    assert rebuilt == value
    assert type(rebuilt) is type(value)


def test_leaves_come_in_order() -> None:
    """Dicts keep their own order; None, arrays and strings are leaves."""
    array = np.zeros(3)
    assert nest.flatten({"b": (1, None), "a": "text", "c": [array]}) == [1, None, "text", array]


def test_dicts_match_by_key_in_the_order_of_the_first() -> None:
    """The order of the keys does not make structures differ."""
    result = nest.map_structure(lambda a, b: (a, b), {"x": 1, "y": 2}, {"y": 20, "x": 10})
    assert list(result.items()) == [("x", (1, 10)), ("y", (2, 20))]


def test_a_dict_subclass_keeps_what_it_carries() -> None:
    """A defaultdict comes back with its factory."""
    result = nest.map_structure(lambda a: a + 1, defaultdict(list, x=1))
    assert result == {"x": 2}
    assert result["new"] == []


def test_a_dataclass_may_be_a_leaf() -> None:
    """`nest_leaf = True` on the class keeps its objects whole."""
    atom = Atom(3)
    assert nest.flatten((atom,)) == [atom]
    assert nest.flatten(Batch(1, 2)) == [1, 2]


def test_containers_may_be_taken_as_leaves() -> None:
    """`is_leaf` stops at containers that it names."""
    assert nest.map_structure(len, {"a": [1, 2], "b": [3]}, is_leaf=lambda v: isinstance(v, list)) == {
        "a": 2,
        "b": 1,
    }


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
def test_structures_that_differ_are_told_with_the_path(first: object, second: object, message: str) -> None:
    """The message says where, and what is there."""
    with pytest.raises(ValueError, match=message):
        nest.map_structure(lambda a, b: None, first, second)


def test_a_wrong_number_of_leaves_is_refused() -> None:
    """Too few and too many leaves both raise."""
    for leaves in ([1], [1, 2, 3]):
        with pytest.raises(ValueError, match="do not fill a structure of 2"):
            nest.pack_sequence_as((0, 0), leaves)
