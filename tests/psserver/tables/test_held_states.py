"""A table that is held for a checkpoint is read as it was, whatever rounds do to it meanwhile, and copied by nobody."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest

from psserver.tables import held as module
from psserver.tables.held import HeldRows
from psserver.tables.held_filters import HeldCounters, HeldCounts
from psserver.tables.rows import BOOK_BYTES
from psserver.tables.saving import HeldState
from psserver.tables.table import Table
from pswire.model.tables import (
    LRU,
    MIN_CAPACITY,
    CBFFilter,
    CounterFilter,
    GlobalStepEvict,
    Normal,
    SlotTensor,
    TableSpec,
    TimeToLive,
)
from tests.kit.tables import compiled

SLOTS = (SlotTensor("momentum", "float64", (), 0.5), SlotTensor("sum", "float32", (2,)))
SPECS = {
    "plain": TableSpec((2,)),
    "evicting": TableSpec((2,), capacity=MIN_CAPACITY, eviction=LRU(), admission=CounterFilter(2)),
    "forgetting": TableSpec((2,), eviction=GlobalStepEvict(3), initializer=Normal()),
    "filtered": TableSpec((2,), admission=CBFFilter(2, 50_000, 0.05, decay=7), eviction=TimeToLive(5.0)),
}


def made(spec: TableSpec) -> Table:
    return Table(spec, SLOTS, native=compiled())


class Job:
    """Trains a table, and does all else that writes rows."""

    def __init__(self, table: Table, seed: int = 0) -> None:
        self.table = table
        self.rng = np.random.default_rng(seed)

    def step(self, many: int = 30_000, count: int = 3000) -> None:
        table, rng = self.table, self.rng
        keys = (rng.pareto(0.7, count) * 30).astype(np.int64) % many
        what = rng.integers(0, 8)
        if what == 0:
            table.remove(table.round + 1, rng.integers(0, many, 1000))
        if what == 1:
            table.begin(table.round + 1, keys)
            table.undo()
        if what == 2 and len(table) > 3000:
            table.restrict(table.round + 1, len(table) - 500)
        opened = table.begin(table.round + 1, keys)
        others = np.setdiff1d(rng.integers(0, len(table.arrays[0]), 50), opened.touched)
        table.set_aside(others)  # rows that are made up in place
        for array in table.arrays:
            array[opened.touched] += 1
            array[others] -= 1
        table.commit(float(table.round + 1))


def read_beside(monkeypatch: pytest.MonkeyPatch, held: HeldState, between: object) -> object:
    """Reads what is held, with something else before each piece."""
    for owner, name in ((HeldRows, "_load"), (HeldRows, "_take"), (HeldCounts, "_part"), (HeldCounters, "_part")):
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda self, *args, real=real: (between(), real(self, *args))[1])
    monkeypatch.setattr(module, "PIECE_SLOTS", 500)
    monkeypatch.setattr(module, "PIECE_BYTES", 4000)
    try:
        return held.whole()
    finally:
        monkeypatch.undo()


@pytest.mark.parametrize("changes", [False, True], ids=["all", "what has changed"])
@pytest.mark.parametrize("name", SPECS)
def test_it_is_read_as_it_was(monkeypatch, name, changes):
    """Rounds, evictions, removals, undone rounds and rows made up in place go on before and between the pieces."""
    job = Job(made(SPECS[name]))
    for _ in range(15):
        job.step()
    base = job.table.round
    for _ in range(5):
        job.step()
    since = base if changes else -1
    expected, held = job.table.hold(since).whole(), job.table.hold(since)
    assert held.since == since
    for _ in range(3):
        job.step()
    turns = iter(range(200))
    found = read_beside(monkeypatch, held, lambda: next(turns) % 4 or job.step())
    assert next(turns) > 10
    assert found.equals(expected)
    assert not job.table.state().equals(expected)


@pytest.mark.parametrize("name", ["evicting", "filtered"])
def test_rounds_go_on_in_a_thread_of_their_own(name):
    """What is read at the same time is as it was; two holders of two rounds do not disturb each other."""
    job = Job(made(SPECS[name]))
    for _ in range(10):
        job.step()
    holds = []
    for _ in range(2):
        holds.append((job.table.state(), job.table.hold()))
        job.step()
    ended = threading.Event()

    def train() -> None:
        while not ended.is_set():
            job.step()

    thread = threading.Thread(target=train)
    thread.start()
    try:
        for expected, held in holds:
            assert held.whole().equals(expected)
    finally:
        ended.set()
        thread.join()


def test_a_round_sets_its_own_rows_aside_alone(monkeypatch):
    """Each once; none that was made since, none that is read already, and none of what is not to be read."""
    monkeypatch.setattr(module, "PIECE_BYTES", 20_000)
    table = made(SPECS["plain"])
    row = 8 + 8 + 8
    table.begin(1, np.arange(10_000))
    table.commit()
    table.begin(2, np.arange(100))
    table.commit()
    whole, changes = table.hold(), table.hold(1)
    for _ in range(2):
        table.begin(table.round + 1, np.arange(50, 250))
        table.commit()
        table.begin(table.round + 1, np.arange(10_000, 11_000))
        table.commit()
    assert whole.rows.aside == 200 * (row + BOOK_BYTES)
    assert changes.rows.aside == 50 * (row + BOOK_BYTES)
    assert whole.load().keys.size == 10_000
    assert (whole.rows.aside, whole.rows.nbytes) == (200 * row, 10_000 * row)
    for number in range(2):
        assert sum(map(len, whole.pieces(number))) == 10_000
    assert (whole.rows.aside, whole.rows.nbytes) == (200 * 8, 10_000 * 8)
    last, unread = whole.pieces(2), np.arange(250, 10_000)
    next(last)
    first = whole.rows.slots[:2500]
    table.begin(table.round + 1, unread[np.isin(table.find(unread), first)])
    table.commit()
    assert whole.rows.aside == 200 * 8
    table.begin(table.round + 1, unread[~np.isin(table.find(unread), first)][:10])
    table.commit()
    assert whole.rows.aside == 210 * 8
    assert [*last]
    assert whole.rows.aside == 0
    with pytest.raises(ValueError, match="read once"):
        next(whole.pieces(2))


def test_who_has_let_go_costs_nothing():
    """A holder that is gone is told of no row."""
    table = made(SPECS["plain"])
    table.begin(1, np.arange(1000))
    table.commit()
    held = table.hold()
    table.set_aside(np.arange(10))
    assert held.rows.aside > 0
    del held
    gc.collect()
    table.set_aside(np.arange(10))
    assert table._contents.rows._holders == []


def test_memory_that_is_given_back_or_left_was_read_before():
    """Rows are dropped down to a few, and all is replaced by another state: what is held stays."""
    table = Table(TableSpec((64,)), native=compiled())
    table.begin(1, np.arange(60_000))
    table.commit()
    expected, held, again = table.state(), table.hold(), table.hold()
    table.remove(2, np.arange(500, 60_000))
    assert len(table.arrays[0]) < 60_000
    table.begin(3, np.arange(100_000, 160_000))
    table.commit()
    assert held.whole().equals(expected)
    table.restore([table.state()])
    table.begin(4, np.arange(60_000))
    table.commit()
    assert again.whole().equals(expected)


def test_a_table_without_rows():
    """It is read as any other, also by who wants changes."""
    table = made(SPECS["evicting"])
    held = table.hold()
    table.begin(1, np.arange(5).repeat(2))
    table.commit()
    assert held.whole().equals(made(SPECS["evicting"]).state())
    changes = table.hold(1).whole()
    assert (changes.keys.size, changes.is_whole) == (0, False)


def test_updates_that_were_missed_are_made_up_in_copies():
    """All tensors of some rows together, once, with the slots that they have."""
    table = made(SPECS["plain"])
    table.begin(1, np.arange(5000))
    table.commit()
    calls = []

    def settle(tensors, slots):
        calls.append(slots)
        return [tensors[0] + slots[:, None].astype("f4"), tensors[1] + slots, tensors[2] + tensors[0]]

    expected = table.state()
    slots = table.find(expected.keys)
    found = table.hold(settle=settle).whole()
    assert found.tensors[0].tolist() == (expected.tensors[0] + slots[:, None].astype("f4")).tolist()
    assert found.tensors[1].tolist() == (expected.tensors[1] + slots).tolist()
    assert found.tensors[2].tolist() == (expected.tensors[2] + expected.tensors[0]).tolist()
    assert np.concatenate(calls).tolist() == slots.tolist()
    assert table.state().equals(expected)


def test_what_changes_all_rows_leaves_no_changes_alone():
    """After it a checkpoint has the whole, until it is based on a later round."""
    job = Job(made(SPECS["plain"]))
    for _ in range(3):
        job.step()
    base = job.table.round
    assert job.table.hold(base).since == base
    job.step()
    job.table.forget_deletions(job.table.round)
    assert job.table.hold(base).since == -1
    assert job.table.hold(job.table.round).since == job.table.round
    assert job.table.hold(job.table.round + 1).since == -1
