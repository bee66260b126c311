"""What a table does is a function of its state and the round."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from psserver.tables.native import Native
from psserver.tables.table import Table
from pswire.model.hashing import BUCKETS, buckets_of, hashes_of
from pswire.model.table_state import TableState, joined
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
from tests.kit.tables import compiled

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

    def state(self) -> TableState:
        return joined([part.state() for part in self.parts], range(BUCKETS))


def keys_of(rng: np.random.Generator, many: int, count: int) -> np.ndarray:
    return np.where(
        rng.random(count) < 0.7, (rng.pareto(0.7, count) * 50).astype(np.int64) % many, rng.integers(0, many, count)
    )


SPECS = {
    "lru": TableSpec((2,), capacity=MIN_CAPACITY, eviction=LRU()),
    "lfu": TableSpec((2,), capacity=MIN_CAPACITY, eviction=LFU(0.95), admission=ProbabilityFilter(0.7)),
    "counter, lfu": TableSpec((2,), capacity=MIN_CAPACITY, admission=CounterFilter(2), eviction=LFU(0.99)),
    "counter, steps": TableSpec(
        (2,), capacity=MIN_CAPACITY, admission=CounterFilter(2), eviction=GlobalStepEvict(9), initializer=Normal()
    ),
    "bloom, time": TableSpec((2,), admission=CBFFilter(2, 50_000, 0.05, decay=13), eviction=TimeToLive(80.0)),
    "norm": TableSpec((2,), eviction=L2WeightEvict(0.01), capacity=MIN_CAPACITY),
}


@pytest.mark.parametrize("rounds", [61, pytest.param(2000, marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", SPECS)
def test_a_table_is_a_function_of_its_rounds(name, rounds):
    """Compiled or not, with rounds that are sent again, restores, and other cuts over servers: equal states."""
    spec = SPECS[name]
    rng = np.random.default_rng(0)
    one, other = Parts(spec, compiled()), Parts(spec, compiled(), CUTS)
    plain = Parts(spec, None)
    for round in range(1, rounds):
        keys = keys_of(rng, 40_000, 1500)
        one.step(round, keys)
        other.step(round, keys, again=round % 3 == 0)
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


def test_the_order_of_arrival_makes_no_difference_to_the_rest():
    """Keys of one round in another order: the same state."""
    rng = np.random.default_rng(2)
    one, other = Parts(SPECS["lru"], compiled()), Parts(SPECS["lru"], compiled())
    for round in range(1, 30):
        keys = keys_of(rng, 30_000, 2000)
        one.step(round, keys)
        other.step(round, rng.permutation(keys))
    assert one.state().equals(other.state())


@pytest.mark.parametrize(
    ("name", "cuts"), [*((name, CUTS) for name in SPECS), *((name, (range(BUCKETS),)) for name in ("lru", "norm"))]
)
def test_a_full_state_and_deltas_are_the_last_state(name, cuts):
    """A restore of the base, and then of deltas in order, is the table as it is now, and goes on as it does; also where
    base and deltas are of other parts."""
    rng = np.random.default_rng(3)
    table, follower = Parts(SPECS[name], compiled(), CUTS), Parts(SPECS[name], compiled(), cuts)
    for round in range(1, 15):
        table.step(round, keys_of(rng, 40_000, 2000))
    for part in follower.parts:
        part.restore([part.state() for part in table.parts])
    for last in (20, 33, 45):
        for round in range(table.state().round + 1, last):
            table.step(round, keys_of(rng, 40_000, 2000))
        deltas = [part.delta(follower.state().round) for part in table.parts]
        for part in follower.parts:
            part.apply(deltas[::-1])
        assert follower.state().equals(table.state())
        assert sum(delta.keys.size for delta in deltas) > 0 < sum(delta.deleted_keys.size for delta in deltas)
    for round in range(45, 50):
        keys = keys_of(rng, 40_000, 2000)
        table.step(round, keys)
        follower.step(round, keys)
    assert follower.state().equals(table.state())
