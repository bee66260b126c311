"""Who gets a row, and who loses it: the policies of a table, as functions of its state and the round.

Nothing here depends on slots, on the order in which rows were made, or on which buckets are held beside a key's own.
Numbers are computed by additions and multiplications alone, which are the same on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from psserver.tables.frozen import FrozenRows, Shown, Views
from psserver.tables.rows import BOOK_BYTES, RowTensors
from pswire.errors import InvalidRequest, MemoryLimit
from pswire.model.hashing import BUCKETS, GOLDEN, Hashes, buckets_of, combined, mixed
from pswire.model.rows import Int64s
from pswire.model.tables import (
    LFU,
    MAX_COUNT,
    MIN_CAPACITY,
    CBFFilter,
    CounterFilter,
    Eviction,
    GlobalStepEvict,
    L2WeightEvict,
    ProbabilityFilter,
    SlotTensor,
    TableSpec,
    TimeToLive,
)
from pswire.model.tensor import Array

Bools = npt.NDArray[np.bool_]

FINENESS = 1024
"""Steps in which a time to live is measured."""

LINE = 64
"""Counters of a `CBFFilter` that are set aside together."""

INDEX_BYTES = 28
"""Most bytes of the index for each entry, as a bucket has them after it has grown."""


def limit_of(spec: TableSpec, tensors: Sequence[SlotTensor]) -> int:
    """Returns the most rows of a whole table by its capacity and its memory limit; 0 for no limit.

    The memory limit is divided by what a row takes at most. What a table really takes depends on its past, and
    evictions must not.
    """
    limits = [spec.capacity] if spec.capacity else []
    if spec.memory_limit:
        index = INDEX_BYTES * (2 if isinstance(spec.admission, CounterFilter) else 1)
        row = spec.row.nbytes + sum(tensor.row.nbytes for tensor in tensors) + BOOK_BYTES + index
        sketch = spec.admission.width * BUCKETS if isinstance(spec.admission, CBFFilter) else 0
        limits.append(max(spec.memory_limit - sketch, 0) // row)
    return min(limits, default=0)


def checked_limit(spec: TableSpec, tensors: Sequence[SlotTensor]) -> int:
    """Returns the same; raises `InvalidRequest` if the memory limit has no room for `MIN_CAPACITY` rows."""
    limit = limit_of(spec, tensors)
    if limit < MIN_CAPACITY and (spec.capacity or spec.memory_limit):
        raise InvalidRequest(
            f"a memory limit of {spec.memory_limit} bytes allows {limit} rows; the minimum is {MIN_CAPACITY}"
        )
    return limit


def shares_of(limit: int) -> Int64s:
    """Returns the most rows of each bucket, int64[BUCKETS]; their sum is the limit of the table."""
    return np.diff(np.arange(BUCKETS + 1) * limit // BUCKETS)


@dataclass(frozen=True)
class Decision:
    """A filter's word on keys without a row, each given once.

    Attributes:
        admitted: bool[n], those that get a row.
        counts: int64[n], how often each has come, as far as the filter knows.
        entries: int64[n], the entries of those that are refused, 0 for none.
    """

    admitted: Bools
    counts: Int64s
    entries: Int64s


class Filter:
    """A filter before a table; this one admits all. `decide` changes nothing; `commit` keeps what it has seen last."""

    def decide(self, round: int, hashes: Hashes, entries: Int64s, counts: Int64s) -> Decision:
        """Decides which keys get a row.

        Args:
            round: the round.
            hashes: uint64[n], the keys, each once.
            entries: int64[n], their entries, none positive.
            counts: int64[n], how often each came in the round.
        """
        return Decision(np.ones(hashes.size, np.bool_), counts - entries, np.zeros_like(entries))

    def commit(self) -> None:
        """Makes the last decision part of the filter's state."""


class Counter(Filter):
    """Counts in the index: see `CounterFilter`."""

    def __init__(self, spec: CounterFilter) -> None:
        self._k = spec.k

    def decide(self, round: int, hashes: Hashes, entries: Int64s, counts: Int64s) -> Decision:
        total = np.minimum(counts - entries, MAX_COUNT)
        return Decision(total >= self._k, total, -total)


class Probability(Filter):
    """Throws a die that is a hash: see `ProbabilityFilter`."""

    def __init__(self, spec: ProbabilityFilter, seed: int) -> None:
        self._below = int(spec.p * 2**53)
        self._seed = seed

    def decide(self, round: int, hashes: Hashes, entries: Int64s, counts: Int64s) -> Decision:
        thrown = mixed(hashes ^ np.uint64(combined(self._seed, round))) >> np.uint64(11)
        return Decision(thrown < np.uint64(self._below), counts, np.zeros_like(entries))


class Sketch(Filter):
    """Counts in a counting Bloom filter, one for each bucket: see `CBFFilter`.

    All keys of a round are measured by what was counted before it. Counts are halved in another round in each bucket;
    this is made up for when a bucket is used.

    Args:
        spec: the filter.
        buckets: the buckets that the table holds.

    Attributes:
        counters: uint8[buckets, width]; 255 stands for more, too.
        halved: int64[buckets], the number of halvings of each bucket's counters; replaced as a whole.
    """

    def __init__(self, spec: CBFFilter, buckets: range) -> None:
        self._spec = spec
        self._buckets = buckets
        self._begin()
        self.halved: Int64s = np.zeros(len(buckets), np.int64)
        self._pending: tuple[Int64s, Int64s, Int64s, Int64s] | None = None

    def _begin(self) -> None:
        size, width = len(self._buckets), self._spec.width
        self._lines = Shown(_counters(size, width))
        self.counters = self._lines.array.reshape(-1)[: size * width].reshape(size, width)
        self._views = Views[FrozenRows]()

    def decide(self, round: int, hashes: Hashes, entries: Int64s, counts: Int64s) -> Decision:
        buckets = buckets_of(hashes)
        owners = buckets - self._buckets.start
        due = self._due(round, buckets)
        steps = np.arange(1, self._spec.hashes + 1, dtype=np.uint64) * np.uint64(GOLDEN)
        spread = mixed(hashes[:, None] + steps) >> np.uint64(32)
        at = (spread * np.uint64(self._spec.width) >> np.uint64(32)).view(np.int64) + owners[:, None] * self._spec.width
        halvings = np.clip(due - self.halved[owners], 0, 8)
        seen = (self.counters.reshape(-1)[at] >> halvings[:, None]).min(axis=1).astype(np.int64)
        self._pending = owners, due, at, counts
        return Decision(seen + counts >= self._spec.k, seen + counts, np.zeros_like(entries))

    def commit(self) -> None:
        if self._pending is None:
            return
        (owners, due, at, counts), self._pending = self._pending, None
        self.halved, old = self.halved.copy(), self.halved
        self.halved[owners] = np.maximum(due, old[owners])
        halved, width = np.flatnonzero(self.halved != old), self._spec.width
        if halved.size:
            self._set_aside((halved[:, None] * width + np.arange(width)).reshape(-1))
            for owner in halved:
                self.counters[owner] >>= min(int(self.halved[owner] - old[owner]), 8)
        flat = self.counters.reshape(-1)
        places, inverse = np.unique(at, return_inverse=True)
        added = np.bincount(inverse.reshape(-1), np.repeat(counts, at.shape[1]), places.size).astype(np.int64)
        self._set_aside(places)
        flat[places] = np.minimum(flat[places] + added, 255)

    def freeze(self) -> FrozenRows:
        """Returns what reads the counters later as they are now, in lines."""
        return self._views.add(FrozenRows([self._lines]))

    def counted(self, frozen: FrozenRows) -> Array:
        """Returns the counters as they were when they were frozen."""
        flat = np.concatenate([*frozen.pieces()]).reshape(-1)
        return flat[: self.counters.size].reshape(self.counters.shape)

    def replace(self, counters: Array, halved: Int64s) -> None:
        """Takes over copies of other counters and numbers of halvings."""
        self._begin()
        self.counters[...], self.halved = counters, halved.copy()

    def _set_aside(self, places: Int64s) -> None:
        """Called before counters are written, with their places among all of them, in order."""
        if self._views:
            lines = places // LINE
            lines = lines[np.append(True, lines[1:] != lines[:-1])[: lines.size]]
            for view in self._views.living():
                view.set_aside(lines)

    def _due(self, round: int, buckets: Int64s) -> Int64s:
        decay = self._spec.decay
        return (round + buckets * decay // BUCKETS) // decay if decay else np.zeros_like(buckets)


def _counters(buckets: int, width: int) -> Array:
    try:
        return np.zeros((-(-buckets * width // LINE), LINE), np.uint8)
    except MemoryError:
        raise MemoryLimit(
            f"out of memory for the {buckets * width} bytes of a CBFFilter; lower its max_element_size, or add servers"
        ) from None


def filter_of(spec: TableSpec, buckets: range) -> Filter:
    """Returns the filter before a table, for the buckets that are held."""
    match spec.admission:
        case CounterFilter() as counter:
            return Counter(counter)
        case CBFFilter() as sketch:
            return Sketch(sketch, buckets)
        case ProbabilityFilter() as probability:
            return Probability(probability, spec.seed)
    return Filter()


class Judge:
    """Says which rows must go, and which of several is the worst. Used by one thread at a time.

    Args:
        policy: the policy; None for the age alone.

    Attributes:
        ticks: the rounds with a known time that are not too old, in order, each with its seconds.
        expired: for a time to live, the round whose rows, and all that were not updated since, must go; -1 for none.
    """

    def __init__(self, policy: Eviction | None) -> None:
        self._policy = policy
        self.ticks: list[tuple[int, float]] = []
        self.expired = -1

    @property
    def condemns(self) -> bool:
        """True if rows may have to go although there is room."""
        return isinstance(self._policy, GlobalStepEvict | L2WeightEvict | TimeToLive)

    @property
    def looks_at_values(self) -> bool:
        """True if values of rows decide."""
        return isinstance(self._policy, L2WeightEvict)

    @property
    def decay(self) -> float:
        """The factor by which counts shrink in a round."""
        return self._policy.decay if isinstance(self._policy, LFU) else 1.0

    def tick(self, round: int, seconds: float) -> None:
        """Learns the time at a round, in seconds from any beginning; a time that goes back changes nothing.

        Of the rounds one is kept for each `FINENESS` of the time to live: by so much a row may live longer.
        """
        if not isinstance(self._policy, TimeToLive):
            return
        step = self._policy.seconds / FINENESS
        if not self.ticks or (round > self.ticks[-1][0] and seconds > self.ticks[-1][1] + step):
            self.ticks.append((round, seconds))
        while self.ticks and seconds - self.ticks[0][1] > self._policy.seconds:
            self.expired = self.ticks.pop(0)[0]

    def condemned(self, round: int, slots: Int64s, rows: RowTensors) -> Bools:
        """Returns for each of some slots, int64[n], if its row must go."""
        match self._policy:
            case GlobalStepEvict(steps_to_live=steps):
                return round - rows.last[slots].astype(np.int64) > steps
            case TimeToLive():
                return rows.last[slots].astype(np.int64) <= self.expired
            case L2WeightEvict(threshold=threshold):
                values: Any = rows.tensors[0].array[slots]
                values = values.reshape(slots.size, math.prod(values.shape[1:]))
                wide = values.astype(np.complex128 if values.dtype.kind == "c" else np.float64)
                below: Bools = (wide * wide.conj()).real.sum(axis=1) < threshold * threshold
                return below
        return np.zeros(slots.size, np.bool_)

    def scores(self, round: int, slots: Int64s, rows: RowTensors) -> Array:
        """Returns a number for each of some slots, of any shape; the lowest is the worst."""
        if isinstance(self._policy, LFU):
            return self.decayed(round, slots, rows)
        return rows.last[slots].astype(np.float64)

    def decayed(self, round: int, slots: Int64s, rows: RowTensors) -> Array:
        """Returns the counts of some slots as they are in a round, float64."""
        counts = rows.count[slots].astype(np.float64)
        if self.decay == 1:
            return counts
        return counts * powers(self.decay, round - rows.last[slots].astype(np.int64))


def powers(base: float, exponents: Int64s) -> Array:
    """Returns powers, float64, by squaring: the library's differ in the last bit from machine to machine."""
    found = np.ones(exponents.shape)
    left = exponents.copy()
    while left.any():
        found = np.where(left & 1, found * base, found)
        base, left = base * base, left >> 1
    return found
