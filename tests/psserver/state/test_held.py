"""Tables that a checkpoint reads while rounds write their rows: it finds what was there, and rounds copy no table."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest

from psserver.devices import Device
from psserver.state import held as module
from psserver.state.held import HeldTable
from psserver.state.variables import Store
from pswire.model.plan import PlacedVariable, VariableSpec
from pswire.model.tensor import TensorSpec

SHAPE = (1000, 3)


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(module, "PIECE_BYTES", 12 * 64)


def table():
    return np.arange(3000, dtype="float32").reshape(SHAPE).copy()


def write(held, array, ids):
    held.set_aside(array, ids)
    array[ids] += 1


@pytest.mark.parametrize("seed", range(5))
def test_what_is_read_is_what_was_there(seed):
    """Whatever is written meanwhile, before and behind the place that is read, also several times."""
    rng, array = np.random.default_rng(seed), table()
    held, found = HeldTable(array), []
    for piece in held.pieces():
        found.append(piece)
        for _ in range(rng.integers(0, 3)):
            write(held, array, rng.choice(1000, rng.integers(0, 200), replace=False))
    np.testing.assert_array_equal(np.concatenate(found), table())
    assert (array != table()).any()


def test_two_checkpoints_read_one_table():
    """Each has its own time, and what is set aside for one is let go of as it is read."""
    array = table()
    first = HeldTable(array)
    write(first, array, np.array([1, 500]))
    later, second = array.copy(), HeldTable(array)
    for held in (first, second):
        held.set_aside(array, np.array([500, 700]))
    array[[500, 700]] = -1
    assert first.aside == 12 * 3
    for held, expected in ((first, table()), (second, later)):
        np.testing.assert_array_equal(np.concatenate(list(held.pieces())), expected)
        assert (held.array, held.aside) == (None, 0)


def test_rows_are_set_aside_by_another_thread():
    """A round that writes and a checkpoint that reads do not meet halfway."""
    array, stop = table(), threading.Event()
    held, rng = HeldTable(array), np.random.default_rng(0)

    def rounds():
        while not stop.is_set():
            write(held, array, rng.choice(1000, 100, replace=False))

    thread = threading.Thread(target=rounds)
    thread.start()
    try:
        found = np.concatenate(list(held.pieces()))
    finally:
        stop.set()
        thread.join()
    np.testing.assert_array_equal(found, table())


def test_only_tables_are_held_so():
    """Others never change while they are held; and a reader beside a checkpoint makes a round copy the table."""
    store = Store(0, Device(), 0)
    for id in range(2):
        store.declare(PlacedVariable(id, VariableSpec(f"v{id}", TensorSpec("float32", SHAPE), True), (0,)))
        store.initialize(id, table())
    store.note_tables([1])
    values = store.hold([0, 1])
    assert values[0] is store.value(0)
    assert isinstance(values[1], HeldTable)
    assert store.held_of({0, 1}, frozenset()).keys() == {1}
    reader = store.value(1)
    assert not store.held_of({0, 1}, frozenset())
    del reader
    second = store.hold([1])
    assert [len(found) for found in store.held_of({0, 1}, frozenset()).values()] == [2]
    store.commit({1: table()})  # a round that replaces it
    assert not store.held_of({0, 1}, frozenset())
    np.testing.assert_array_equal(np.concatenate(list(second[0].pieces())), table())
    del values, second
    gc.collect()
    assert not store.held_of({0, 1}, frozenset())
