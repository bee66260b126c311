"""What a table does is a function of its state and the round: compiled or not, cut or whole, held for a checkpoint, and
with rows that lie in a file."""

from __future__ import annotations

import gc
import threading
from collections.abc import Sequence
from copy import copy

import numpy as np
import pytest

from psserver.tables import frozen, frozen_tensors
from psserver.tables.frozen import FrozenRows
from psserver.tables.frozen_counts import FrozenCounts
from psserver.tables.frozen_tensors import FrozenTensors
from psserver.tables.native import Native
from psserver.tables.rows import BOOK_BYTES
from psserver.tables.saving import FrozenState
from psserver.tiers import paging
from psserver.tiers.paging import PAGE
from psserver.tiers.tier import Tier
from pswire.model.hashing import BUCKETS, buckets_of, hashes_of
from pswire.model.tables import (
    LFU,
    LRU,
    MIN_CAPACITY,
    CBFFilter,
    CounterFilter,
    GlobalStepEvict,
    L2WeightEvict,
    Normal,
    ProbabilityFilter,
    SlotTensor,
    TableSpec,
    TimeToLive,
)
from pswire.model.tensor import address_of
from tests.kit.storage import disk, on_small_disk
from tests.kit.tables import State, Table, compiled, joined, state_of

TENSORS = (SlotTensor("accumulator", "float32", (2,), 0.1),)
CUTS = (range(300), range(300, 301), range(301, BUCKETS))


class Parts:
    """One table, or its parts on several servers, which can be restored with other cuts."""

    def __init__(self, spec: TableSpec, native: Native | None, cuts: Sequence[range] = (range(BUCKETS),)) -> None:
        self.spec, self.native = spec, native
        self.parts = self.made(cuts)
        self.evicted = self.refused = 0

    def made(self, cuts: Sequence[range]) -> list[Table]:
        return [Table(self.spec, TENSORS, cut, self.native) for cut in cuts]

    def step(self, round: int, keys: np.ndarray, again: bool = False) -> None:
        """Makes a round; `again` with a first attempt that is undone, as when a later part of the round has failed."""
        owners = buckets_of(hashes_of(keys, self.spec.salt))
        for part in self.parts:
            mine = keys[(owners >= part.buckets.start) & (owners < part.buckets.stop)]
            if again:
                part.begin(round, mine)
                part.undo()
            opened = part.begin(round, mine)
            weights, accumulators = part.arrays
            gradient = np.float32(round % 7 - 3) / 100
            accumulators[opened.touched] += gradient * gradient
            weights[opened.touched] -= gradient / np.sqrt(accumulators[opened.touched])
            self.evicted += part.commit(10.0 * round)
            self.refused += opened.refused

    def restore(self, cuts: Sequence[range]) -> None:
        states = [part.state() for part in self.parts]
        self.parts = self.made(cuts)
        for part in self.parts:
            part.restore(states[::-1])

    def state(self) -> State:
        return joined([part.state() for part in self.parts], range(BUCKETS))


def keys_of(rng: np.random.Generator, many: int, count: int) -> np.ndarray:
    return np.where(
        rng.random(count) < 0.7, (rng.pareto(0.7, count) * 50).astype(np.int64) % many, rng.integers(0, many, count)
    )


SPECS = {
    "lru": TableSpec((2,), capacity=MIN_CAPACITY, eviction=LRU()),
    "lfu": TableSpec((2,), capacity=MIN_CAPACITY, eviction=LFU(0.95), admission=ProbabilityFilter(0.7)),
    "counter, steps": TableSpec(
        (2,), capacity=MIN_CAPACITY, admission=CounterFilter(2), eviction=GlobalStepEvict(9), initializer=Normal()
    ),
    "bloom, time": TableSpec((2,), admission=CBFFilter(2, 50_000, 0.05, decay=13), eviction=TimeToLive(80.0)),
    "norm": TableSpec((2,), eviction=L2WeightEvict(0.01), capacity=MIN_CAPACITY),
}


@pytest.mark.parametrize("rounds", [61, pytest.param(2000, marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", SPECS)
def test_a_table_is_a_function_of_its_rounds(name, rounds):
    """Compiled or not, with keys that arrive in another order, rounds that are sent again, restores, and other cuts
    over servers: equal states."""
    spec, rng = SPECS[name], np.random.default_rng(0)
    one, other = Parts(spec, compiled()), Parts(spec, compiled(), CUTS)
    plain = Parts(spec, None)
    for round in range(1, rounds):
        keys = keys_of(rng, 40_000, 1500)
        one.step(round, keys)
        other.step(round, rng.permutation(keys), again=round % 3 == 0)
        if round % 13 == 0:
            other.restore((range(BUCKETS),) if round % 2 else CUTS)
        if round <= 30:
            plain.step(round, keys)
        if round == 30:
            assert plain.state().equals(one.state())
        if round % 20 == 0:
            assert one.state().equals(other.state())
    assert one.evicted > 1000
    assert (one.refused > 0) == (spec.admission is not None)
    assert (one.evicted, one.refused) == (other.evicted, other.refused)


@pytest.mark.parametrize("policy", [GlobalStepEvict(3), L2WeightEvict(0.1)], ids=["steps", "norm"])
def test_a_backlog_leaves_alike(policy):
    """As many rows in each round, and the same ones: compiled or not, on one server or several, also after a restore
    between two rounds."""
    spec = TableSpec((2,), eviction=policy, initializer=Normal(stddev=0.1))
    one, other, plain = Parts(spec, compiled()), Parts(spec, compiled(), CUTS), Parts(spec, None)
    for round in range(1, 26):
        keys = np.arange(200_000) if round == 1 else np.arange(round % 4 * 1000, round % 4 * 1000 + 500)
        for parts in (one, other, plain):
            parts.step(round, keys)
        if round in (8, 15):
            other.restore((range(BUCKETS),) if round == 8 else CUTS)
        assert one.evicted == other.evicted == plain.evicted
    assert one.evicted > 5000
    assert one.state().equals(other.state())
    assert one.state().equals(plain.state())


SLOTS = (SlotTensor("momentum", "float64", (), 0.5), SlotTensor("sum", "float32", (2,)))
HELD = {
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


def read_beside(monkeypatch: pytest.MonkeyPatch, held: FrozenState, between: object) -> object:
    """Reads what is held, with something else before each piece."""
    for owner, name in ((FrozenTensors, "_load"), (FrozenRows, "take"), (FrozenCounts, "_part")):
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda self, *args, real=real: (between(), real(self, *args))[1])
    monkeypatch.setattr(frozen_tensors, "PIECE_SLOTS", 500)
    for module in (frozen, frozen_tensors):
        monkeypatch.setattr(module, "PIECE_BYTES", 4000)
    try:
        return state_of(held)
    finally:
        monkeypatch.undo()


@pytest.mark.parametrize("changes", [False, True], ids=["all", "what has changed"])
@pytest.mark.parametrize("name", HELD)
def test_it_is_read_as_it_was(monkeypatch, name, changes):
    """Rounds, evictions, removals, undone rounds and rows made up in place go on before and between the pieces."""
    job = Job(made(HELD[name]))
    for _ in range(15):
        job.step()
    base = job.table.round
    for _ in range(5):
        job.step()
    since = base if changes else -1
    expected, held = state_of(job.table.freeze(since)), job.table.freeze(since)
    assert held.since == since
    for _ in range(3):
        job.step()
    turns = iter(range(200))
    found = read_beside(monkeypatch, held, lambda: next(turns) % 4 or job.step())
    assert next(turns) > 10
    assert found.equals(expected)
    assert not job.table.state().equals(expected)


def test_the_index_changes_between_two_reads_of_a_checkpoint(monkeypatch):
    """Each change of it waits for the lock under which a checkpoint's thread reads counted keys."""
    table = made(HELD["evicting"])
    table.begin(1, np.arange(100))
    table.commit()
    contents, locked = table._contents, []
    view = contents.freeze_counts()
    for name in ("put", "remove"):
        real = getattr(contents.index, name)
        monkeypatch.setattr(contents.index, name, lambda *args, f=real: (locked.append(view.lock.locked()), f(*args)))
    table.begin(2, np.arange(50, 150))
    table.commit()
    table.remove(3, np.arange(60))
    assert set(locked) == {True}


def test_a_round_sets_its_own_rows_aside_alone(monkeypatch):
    """Each once; none that was made since, none that is read already, and none of what is not to be read."""
    monkeypatch.setattr(frozen_tensors, "PIECE_BYTES", 20_000)
    table = made(HELD["plain"])
    row = 8 + 8 + 8
    table.begin(1, np.arange(10_000))
    table.commit()
    table.begin(2, np.arange(100))
    table.commit()
    whole, changes = table.freeze(), table.freeze(1)
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
    with pytest.raises(ValueError, match="read only once"):
        next(whole.pieces(2))


def test_who_has_let_go_costs_nothing():
    """A holder that is gone is told of no row. A table without rows is held as any other, also by who wants changes."""
    table = made(HELD["plain"])
    table.begin(1, np.arange(1000))
    table.commit()
    held = table.freeze()
    table.set_aside(np.arange(10))
    assert held.rows.aside > 0
    del held
    gc.collect()
    table.set_aside(np.arange(10))
    assert not table._contents.rows.views
    table = made(HELD["evicting"])
    held = table.freeze()
    table.begin(1, np.arange(5).repeat(2))
    table.commit()
    assert state_of(held).equals(made(HELD["evicting"]).state())
    changes = state_of(table.freeze(1))
    assert (changes.keys.size, changes.is_whole) == (0, False)


def test_memory_that_is_given_back_or_left_was_read_before():
    """Rows are dropped down to a few, and all is replaced by another state: what is held stays."""
    table = Table(TableSpec((64,)), native=compiled())
    table.begin(1, np.arange(60_000))
    table.commit()
    expected, held, again = table.state(), table.freeze(), table.freeze()
    table.remove(2, np.arange(500, 60_000))
    assert len(table.arrays[0]) < 60_000
    table.begin(3, np.arange(100_000, 160_000))
    table.commit()
    assert state_of(held).equals(expected)
    table.restore([table.state()])
    table.begin(4, np.arange(60_000))
    table.commit()
    assert state_of(again).equals(expected)


def test_updates_that_were_missed_are_made_up_in_copies():
    """All tensors of some rows together, once, with the slots that they have."""
    table = made(HELD["plain"])
    table.begin(1, np.arange(5000))
    table.commit()
    calls = []

    def flush(tensors, slots):
        calls.append(slots)
        return [tensors[0] + slots[:, None].astype("f4"), tensors[1] + slots, tensors[2] + tensors[0]]

    expected = table.state()
    slots = table.find(expected.keys)
    found = state_of(table.freeze(flush=flush))
    assert found.tensors[0].tolist() == (expected.tensors[0] + slots[:, None].astype("f4")).tolist()
    assert found.tensors[1].tolist() == (expected.tensors[1] + slots).tolist()
    assert found.tensors[2].tolist() == (expected.tensors[2] + expected.tensors[0]).tolist()
    assert np.concatenate(calls).tolist() == slots.tolist()
    assert table.state().equals(expected)


def test_what_changes_all_rows_leaves_no_changes_alone():
    """After it a checkpoint has the whole, until it is based on a later round."""
    job = Job(made(HELD["plain"]))
    for _ in range(3):
        job.step()
    base = job.table.round
    assert job.table.freeze(base).since == base
    job.step()
    job.table.forget_deletions(job.table.round)
    assert job.table.freeze(base).since == -1
    assert job.table.freeze(job.table.round).since == job.table.round
    assert job.table.freeze(job.table.round + 1).since == -1


BOUND = 256 << 10
WIDTH = 75  # a row of 300 bytes lies across pages at times
BESIDE = (SlotTensor("momentum", "float64", (), 0.5), SlotTensor("sum", "float32", (WIDTH,)))
TIERED = {
    "plain": TableSpec((WIDTH,), initializer=Normal()),
    "evicting": TableSpec((WIDTH,), capacity=MIN_CAPACITY, eviction=LRU(), admission=CounterFilter(2)),
    "forgetting": TableSpec((WIDTH,), eviction=GlobalStepEvict(6), admission=CBFFilter(2, 50_000, 0.05)),
    "light": TableSpec((WIDTH,), eviction=L2WeightEvict(0.1), initializer=Normal()),
}


@pytest.fixture
def tier():
    with disk() as directory:
        made = Tier(str(directory), BOUND)
        yield made
        made.close()


def below(native: Native, tier: Tier) -> Native:
    found = copy(native)
    found.tier = tier
    return found


class Twins:
    """A table in memory, and one in a file, to which the same is done."""

    def __init__(self, spec: TableSpec, tier: Tier, native: Native, seed: int = 0) -> None:
        self.tables = [Table(spec, BESIDE[:1], native=each) for each in (native, below(native, tier))]
        self.rng = np.random.default_rng(seed)
        self.bases = [table.state() for table in self.tables]

    def keys(self, count: int = 3000, many: int = 40_000) -> np.ndarray:
        return (self.rng.pareto(0.7, count) * 30).astype(np.int64) % many

    def each(self, do: object) -> None:
        """Does something to both; what is returned is the same."""
        one, other = (do(table) for table in self.tables)
        assert one is other or np.asarray(one).tobytes() == np.asarray(other).tobytes()

    def round(self) -> None:
        keys, fails, ahead, behind = self.keys(), self.rng.integers(0, 6) == 0, self.keys(), self.keys()

        def make(table: Table) -> np.ndarray:
            table.read_ahead(ahead)
            table.read_ahead(behind, hint=True)
            opened = table.begin(table.round + 1, keys)
            kept = [array[opened.touched] for array in table.arrays]
            for array, rows in zip(table.arrays, kept, strict=True):
                array[opened.touched] = 0.9 * rows + np.float32(table.round % 7)
            if fails:
                for array, rows in zip(table.arrays, kept, strict=True):
                    array[opened.touched] = rows
                table.undo()
            else:
                table.commit(float(table.round + 1))
            return table.lookup(ahead)

        self.each(make)

    def anything(self) -> None:
        what, keys, seed = self.rng.integers(0, 8), self.keys(500), int(self.rng.integers(0, 100))
        if what == 0:
            self.each(lambda table: table.remove(table.round + 1, keys))
        if what == 1:
            self.each(lambda table: table.restrict(table.round + 1, max(len(table) - 3000, 0)))
        if what == 2:
            self.each(lambda table: table.put_beside(BESIDE[1]))
        if what == 3:
            unique = np.unique(keys)
            self.each(lambda table: table.assign(1, unique, np.sin(unique + seed)))
        if what == 4:
            self.bases = [table.state() for table in self.tables]
            assert self.bases[0].equals(self.bases[1])
        if what == 5 and len(self.bases[0].tensors) == len(self.tables[0].tensors) + 1:
            for table, base in zip(self.tables, self.bases, strict=True):
                table.restore([base])
        if what == 6:
            rounds = self.tables[0].round
            for table in self.tables:
                table.forget_deletions(0)
            one, other = (state_of(table.freeze(max(rounds - 3, 0))) for table in self.tables)
            assert one.equals(other)
        if what == 7:
            self.each(lambda table: table.lookup(keys, int(seed % (len(table.tensors) + 1))))


@pytest.mark.parametrize("is_compiled", [True, False], ids=["compiled", "NumPy"])
@pytest.mark.parametrize("name", TIERED)
def test_it_is_the_table_that_it_would_be_in_memory(tier, name, is_compiled):
    """Rounds, rounds that are undone, evictions, removals, slots, assignments, restores, deltas and lookups."""
    twins = Twins(TIERED[name], tier, compiled() if is_compiled else Native())
    for _ in range(16 if is_compiled else 8):
        twins.round()
        twins.anything()
    one, other = (table.state() for table in twins.tables)
    assert one.equals(other)
    assert twins.tables[1].evicted == twins.tables[0].evicted
    assert tier.left > 0
    tier.settle()
    assert tier.resident <= BOUND


def test_it_is_held_while_rounds_go_on(tier):
    """What is read for a checkpoint beside rounds is as it was, and does not stay in memory."""
    twins = Twins(TIERED["plain"], tier, compiled())
    for _ in range(20):
        twins.round()
    expected, held = twins.tables[0].state(), twins.tables[1].freeze()
    found = []
    reader = threading.Thread(target=lambda: found.append(state_of(held)))
    reader.start()
    for _ in range(10):
        twins.round()
    reader.join()
    assert found[0].equals(expected)
    assert tier.nbytes > 4 * BOUND
    tier.settle()
    array = twins.tables[1].arrays[0]
    assert PAGE * paging.are_resident(address_of(array), array.nbytes // PAGE).sum() <= 1.1 * BOUND


FULL = """
import os, sys
import numpy as np
from psserver.tables.native import Native
from psserver.tiers import mapped, tier
from pswire.errors import MemoryLimit
from pswire.model.tables import SlotTensor, TableSpec
from tests.kit.tables import Table

tier.IN_MEMORY = ()  # a small file system of memory stands for a small disk
tier.TRIAL = 1 << 20
mapped.STEP = 4096
with open(sys.argv[1] + "/other", "wb") as other:
    other.write(bytes(20 << 20))
below = tier.Tier(sys.argv[1], 1 << 20)
table = Table(TableSpec((256,)), (SlotTensor("sum", "float32", (256,)),), native=Native(tier=below))
table.begin(1, np.arange(2000))
table.commit()
before = table.state()
try:
    table.begin(2, np.arange(1000, 8000))
except MemoryLimit as error:
    print(error.message)
try:
    table.put_beside(SlotTensor("more", "float32", (2000,)))
except MemoryLimit as error:
    print(error.message)
print(table.state().equals(before))
os.unlink(sys.argv[1] + "/other")
opened = table.begin(2, np.arange(1000, 8000))
for array in table.arrays:
    array[opened.touched] += 1
table.commit()
print(len(table), float(table.lookup(np.arange(8000), 1).sum()))
"""


@pytest.mark.ci
def test_what_the_disk_has_no_room_for_changes_nothing(tmp_path):
    """A round that cannot make its rows is refused, with what to do, and so is a slot; the table is as before."""
    rows, slot, same, after = on_small_disk(FULL, tmp_path, "28m")
    assert rows.startswith("the disk has no space for 6000 more rows of a table: 5.859 MiB more in ")
    assert rows.endswith("with another --tier-path, or give tables a capacity")
    assert slot.startswith("the disk has no space for 'more' beside 2000 rows: 15.26 MiB more in ")
    assert same == "True"
    assert after == f"8000 {7000 * 256.0}"
