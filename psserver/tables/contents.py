"""All that a table has, and the steps that its rounds, checkpoints and deltas are made of."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from psserver.tables.cells import CellIndex
from psserver.tables.eviction import Hands, in_buckets
from psserver.tables.hashing import Hashes, as_words, buckets_of, keys_of
from psserver.tables.index import Index, SortedIndex, bucket_bounds
from psserver.tables.native import Native
from psserver.tables.policies import Judge, filter_of
from psserver.tables.rows import Rows
from psserver.tables.state import Deletions
from pswire.errors import InvalidRequest, MemoryLimit
from pswire.model.rows import Int64s
from pswire.model.tables import BUCKETS, MAX_COUNT, SlotTensor, TableSpec
from pswire.model.tensor import DTYPES, Array

MAX_DELETIONS = 1 << 20
"""Deletions that are remembered for deltas; a table that has more since its last checkpoint is saved whole."""


class Contents:
    """All that a part of a table has. Used by one thread at a time.

    Args:
        spec: the table.
        tensors: tensors beside the rows.
        salt: of the hashes.
        buckets: the buckets that are held.
        expected: most rows that are expected, 0 for no limit.

    Attributes:
        index: from hashes to entries.
        rows: the rows.
        counts: int64[BUCKETS], the rows of each bucket.
        filter, judge, hands: who gets a row, who loses it, and where that was looked for last.
        deletions: the rows that were dropped lately.
        round: the last round that has ended.
    """

    def __init__(
        self, spec: TableSpec, tensors: Sequence[SlotTensor], salt: int, buckets: range, expected: int
    ) -> None:
        self.spec = spec
        self.tensors = tuple(tensors)
        self.salt = salt
        self.buckets = buckets
        self.rows = Rows(spec, tensors, expected)
        self.clear()

    def clear(self) -> None:
        """Makes it as it was at first."""
        self.rows.clear()
        self.index: Index = SortedIndex(self.salt)
        self.counts: Int64s = np.zeros(BUCKETS, np.int64)
        self.filter = filter_of(self.spec, self.buckets)
        self.judge = Judge(self.spec.eviction)
        self.hands = Hands(self.buckets)
        self.deletions = Deletions(MAX_DELETIONS)
        self.round = 0

    def use_compiled(self, native: Native) -> None:
        """Moves the index into one of compiled functions, as soon as there are these."""
        functions = native.index() if isinstance(self.index, SortedIndex) else None
        if functions is not None:
            hashes, entries = self.all()
            index = CellIndex(functions, self.salt, self.buckets)
            index.reserve(in_buckets(hashes))
            index.put(hashes, entries)
            self.index = index

    def find(self, keys: Array) -> tuple[Hashes, Int64s]:
        """Returns hashes and entries of keys.

        Raises:
            InvalidRequest: the keys are of another dtype or shape, or of a bucket that is not held.
        """
        if keys.ndim != 1 or keys.dtype != DTYPES[self.spec.key_dtype]:
            raise InvalidRequest(f"keys are {self.spec.key_dtype}[n], not {keys.dtype}{list(keys.shape)}")
        hashes, entries = self.index.find(as_words(keys))
        if len(self.buckets) < BUCKETS and hashes.size:
            low, high = buckets_of(np.array([hashes.min(), hashes.max()]))
            if low < self.buckets.start or high >= self.buckets.stop:
                raise InvalidRequest(
                    f"a key is of bucket {low if low < self.buckets.start else high}, and this server has "
                    f"{self.buckets.start} to {self.buckets.stop - 1}"
                )
        return hashes, entries

    def keys_of(self, hashes: Hashes) -> Array:
        """Returns the keys of hashes, of the table's dtype of keys."""
        return keys_of(hashes, self.salt, self.spec.key_dtype)

    def all(self) -> tuple[Hashes, Int64s]:
        """Returns all hashes, in order, and their entries."""
        return self.index.scan(*bucket_bounds(self.buckets.start, self.buckets.stop))

    def rows_in_order(self) -> tuple[Hashes, Int64s]:
        """Returns the hashes that have rows, in order, and the slots of these."""
        hashes, entries = self.all()
        return hashes[entries > 0], entries[entries > 0] - 1

    def create(self, hashes: Hashes, before: Int64s) -> Int64s:
        """Makes rows, in which nothing is written but their hashes.

        Args:
            hashes: uint64[n], each once; none has a row.
            before: int64[n], their entries.

        Returns:
            int64[n], the slots.

        Raises:
            MemoryLimit: there is no memory. Nothing has changed.
        """
        if self.rows.used + hashes.size > MAX_COUNT:
            raise MemoryLimit(f"a part of a table has at most {MAX_COUNT} rows; add servers")
        if not hashes.size:
            return np.empty(0, np.int64)
        try:
            slots = self.rows.allocate(hashes.size)
        except MemoryError:
            raise MemoryLimit(f"there is no memory for {hashes.size} more rows of a table") from None
        self.counts += in_buckets(hashes)
        try:
            self.index.put(hashes, slots + 1)
        except MemoryError:
            self.uncreate(hashes, before, slots)
            raise MemoryLimit(f"there is no memory for {hashes.size} more keys of a table") from None
        self.rows.hashes[slots] = hashes
        return slots

    def uncreate(self, hashes: Hashes, before: Int64s, slots: Int64s) -> None:
        """Undoes `create`."""
        had = before != 0
        self.index.remove(hashes[~had])
        self.index.put(hashes[had], before[had])
        self.rows.release(slots)
        self.counts -= in_buckets(hashes)

    def drop(self, hashes: Hashes, entries: Int64s) -> None:
        """Drops what hashes have, each given once, with its entry."""
        self.index.remove(hashes)
        has_row = entries > 0
        gone = hashes[has_row]
        self.rows.release(entries[has_row] - 1)
        self.counts -= in_buckets(gone)
        self.deletions.add(self.round, gone)
