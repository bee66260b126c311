"""Arguments and results of scheduled functions as bytes, and the registry of functions."""

from __future__ import annotations

import pickle

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import psclient as ps
from psclient.coordinator import functions
from psclient.coordinator.content import decode, encode
from psclient.coordinator.pieces import joined, pieces_of
from psclient.coordinator.values import LIVING, PerWorkerValues
from psclient.coordinator.worker import WorkerValues
from pswire.errors import InvalidRequest
from pswire.limits import PIECE_BYTES
from tests.kit.strategies import refused

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(max_size=20)
KEYS = st.integers() | st.text(max_size=5) | st.booleans() | st.none()
NESTS = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=12,
)


LOOP: list[object] = []
LOOP.append(LOOP)


def same(one, other):
    """Equal, and of the same types all the way down."""
    if type(one) is not type(other):
        return False
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return same(list(one.items()), list(other.items()))
    return one == other


@given(NESTS)
def test_a_nest_comes_back_as_it_was(nest):
    """Types, order of keys, infinite numbers and long integers included."""
    assert same(decode(encode(nest, "args")), nest)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6).reshape(2, 3),
        np.zeros((0, 4), np.float32),
        np.array(3.5),
        np.arange(6, dtype=">i4")[::2],
        np.ones((3, 2), ml_dtypes.bfloat16).T,
        np.array([True, False]),
    ],
)
def test_an_array_comes_back_as_it_was(array):
    """Of each kind; it may be written, and is nobody else's."""
    found = decode(encode({"x": [array, array]}, "args"))["x"]
    for each in found:
        np.testing.assert_array_equal(each, array)
        assert each.dtype == array.dtype.newbyteorder("=")
        each[...] = 0
    np.testing.assert_array_equal(decode(encode(np.float32(1.5), "args")), np.float32(1.5))
    assert type(decode(encode(np.int8(3), "args"))) is np.int8


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (print, "args is the function print, which cannot be sent"),
        ((1, [lambda: 1]), r"args\[1\]\[0\] is the function <lambda>"),
        ({"a": object()}, r"args\['a'\] is a object"),
        ({(1, 2): 3}, "args has keys that are not strings or numbers"),
        (np.array([print]), "args: arrays of dtype object are not supported"),
        (np.array(["a"]), "are not supported"),
        (ps.ReduceOp.SUM, "args is a ReduceOp"),
        ({1, 2}, "args is a set"),
        (LOOP, "too deep"),
    ],
)
def test_code_does_not_travel(value, said):
    """Nor anything that only one process knows, whose place is named; what holds itself is not sent for ever."""
    refused(TypeError, said, lambda: encode(value, "args"))


@given(st.binary(max_size=60) | st.just(pickle.dumps(print)), st.integers(0, 60))
def test_bytes_that_are_no_content_are_refused(data, cut):
    """Whatever they are, also cut short; nothing of them is run."""
    whole = encode((1, np.arange(5)), "args")
    for content in (data, whole[:cut]):
        refused(InvalidRequest, "", lambda content=content: decode(content))


def test_contents_travel_in_pieces():
    """Of a bounded size, an empty one as one."""
    content = bytes(range(256)) * (PIECE_BYTES // 128)
    pieces = {piece.offset: piece for piece in pieces_of(content)}
    assert {len(piece.data) for piece in pieces.values()} == {PIECE_BYTES}
    assert joined(pieces[0], pieces.__getitem__) == content
    assert [len(piece.data) for piece in pieces_of(b"")] == [0]


def test_functions_are_registered_by_name(monkeypatch):
    """Each name is one place of the program; all processes have to have the same names and parameters."""
    monkeypatch.setattr(functions, "_registered", {})

    @ps.coordinator.function
    def step(x, *more, key=1, **others):
        return x

    named = ps.coordinator.function(name="another")(lambda x: x)
    assert functions.registry() == ("another(x)", "step(x, *more, key, **others)")
    assert functions.name_of(named) == "another"
    assert functions.named("step") is step
    ps.coordinator.function(step)  # a module may be imported again
    refused(ValueError, "two functions are registered as 'step'", lambda: ps.coordinator.function(name="step")(print))
    refused(TypeError, "has no name that is the same in every process", lambda: ps.coordinator.function(lambda: 1))
    refused(TypeError, "takes a function, not int", lambda: ps.coordinator.function(3))
    refused(TypeError, "'print' is not registered", lambda: functions.name_of(print))
    refused(TypeError, "takes a function, not str", lambda: functions.name_of("step"))


def test_values_of_workers_live_as_long_as_the_coordinator_refers_to_them(monkeypatch):
    """A worker makes each once, and forgets what is gone; never what is newer than what it was told."""
    monkeypatch.setattr(functions, "_registered", {})
    made = []
    ps.coordinator.function(name="numbers")(lambda: made.append(1) or range(3))
    here = WorkerValues(None)
    here.of(7)
    dataset = PerWorkerValues("dataset", "numbers")
    first, second = iter(dataset), iter(dataset)
    assert iter(first) is first
    assert [next(here.find(each._reference())) for each in (first, first, second)] == [0, 1, 0]
    assert len(made) == 1
    told, gone = LIVING.told(), first.number
    del first
    newer = iter(dataset)
    here.find(newer._reference())
    here.forget(told)
    assert gone in here._made
    here.forget(LIVING.told() | {"next": newer.number})
    assert gone not in here._made
    assert {second.number, newer.number} <= set(here._made)
    refused(TypeError, "exist only on workers", lambda: next(second))
    here.of(8)  # another coordinator, which counts anew
    assert not here._made
