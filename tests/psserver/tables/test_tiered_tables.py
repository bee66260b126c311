"""A table whose rows lie in a file is the table that it would be in memory, to the last bit, whatever is done to it."""

from __future__ import annotations

import threading
from copy import copy

import numpy as np
import pytest

from psserver.tables.native import Native
from psserver.tables.table import Table
from psserver.tiers import paging
from psserver.tiers.paging import PAGE
from psserver.tiers.tier import Tier
from pswire.model.tables import (
    LRU,
    MIN_CAPACITY,
    CBFFilter,
    CounterFilter,
    GlobalStepEvict,
    L2WeightEvict,
    Normal,
    SlotTensor,
    TableSpec,
)
from pswire.model.tensor import address_of
from tests.kit.storage import disk, on_small_disk
from tests.kit.tables import compiled

BOUND = 256 << 10
WIDTH = 75  # a row of 300 bytes lies across pages at times
SLOTS = (SlotTensor("momentum", "float64", (), 0.5), SlotTensor("sum", "float32", (WIDTH,)))
SPECS = {
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
        self.tables = [Table(spec, SLOTS[:1], native=each) for each in (native, below(native, tier))]
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
            self.each(lambda table: table.put_beside(SLOTS[1]))
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
            one, other = (table.hold(max(rounds - 3, 0)).whole() for table in self.tables)
            assert one.equals(other)
        if what == 7:
            self.each(lambda table: table.lookup(keys, int(seed % (len(table.tensors) + 1))))


@pytest.mark.parametrize("is_compiled", [True, False], ids=["compiled", "NumPy"])
@pytest.mark.parametrize("name", SPECS)
def test_it_is_the_table_that_it_would_be_in_memory(tier, name, is_compiled):
    """Rounds, rounds that are undone, evictions, removals, slots, assignments, restores, deltas and lookups."""
    twins = Twins(SPECS[name], tier, compiled() if is_compiled else Native())
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
    twins = Twins(SPECS["plain"], tier, compiled())
    for _ in range(20):
        twins.round()
    expected, held = twins.tables[0].state(), twins.tables[1].hold()
    found = []
    reader = threading.Thread(target=lambda: found.append(held.whole()))
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
from psserver.tables.table import Table
from psserver.tiers import mapped, tier
from pswire.errors import MemoryLimit
from pswire.model.tables import SlotTensor, TableSpec

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
    assert rows.startswith("there is no room on the disk for 6000 more rows of a table: 5.859 MiB more in ")
    assert rows.endswith("with another --tier-path, or give tables a capacity")
    assert slot.startswith("there is no room on the disk for 'more' beside 2000 rows: 15.26 MiB more in ")
    assert same == "True"
    assert after == f"8000 {7000 * 256.0}"
