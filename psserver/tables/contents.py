"""All that a table has, and the steps that its rounds, checkpoints and deltas are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np

from psserver.tables.cells import CellIndex
from psserver.tables.deletions import Deletions
from psserver.tables.eviction import Hands, in_buckets
from psserver.tables.frozen import Views
from psserver.tables.frozen_counts import FrozenCounts
from psserver.tables.index import Index, SortedIndex, bucket_bounds
from psserver.tables.native import Native
from psserver.tables.policies import Judge, filter_of
from psserver.tables.rows import RowTensors
from psserver.tiers.mapped import DiskFull
from psserver.tiers.tier import Tier
from pswire.errors import InvalidRequest, MemoryLimit
from pswire.model.hashing import BUCKETS, Hashes, as_words, buckets_of, keys_of
from pswire.model.rows import Int64s
from pswire.model.tables import MAX_COUNT, SlotTensor, TableSpec
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
        tier: where the rows lie; None for memory.

    Attributes:
        index: from hashes to entries. What is not put or removed by this class is changed within `_noting`.
        rows: the rows.
        counts: int64[BUCKETS], the rows of each bucket.
        filter, judge, hands: who gets a row, who loses it, and where that was looked for last.
        deletions: the rows that were dropped lately.
        round: the last round that has ended.
        changes: grows whenever an entry of the index changes.
    """

    def __init__(
        self,
        spec: TableSpec,
        tensors: Sequence[SlotTensor],
        salt: int,
        buckets: range,
        expected: int,
        tier: Tier | None = None,
    ) -> None:
        self.spec = spec
        self.tensors = tuple(tensors)
        self.salt = salt
        self.buckets = buckets
        self.rows = RowTensors(spec, tensors, expected, tier)
        self.changes = 0
        self.clear()

    def clear(self) -> None:
        """Makes it as it was at first."""
        self.changes += 1
        self.rows.clear()
        self.index: Index = SortedIndex(self.salt)
        self._views = Views[FrozenCounts]()
        self.counts: Int64s = np.zeros(BUCKETS, np.int64)
        self.filter = filter_of(self.spec, self.buckets)
        self.judge = Judge(self.spec.eviction)
        self.hands = Hands(self.buckets)
        self.deletions = Deletions(MAX_DELETIONS)
        self.round = 0

    def put_beside(self, tensor: SlotTensor) -> None:
        """Puts a tensor beside the rows; raises `MemoryLimit` if there is no memory for it."""
        try:
            self.rows.put_beside(tensor)
        except MemoryError as error:
            raise _missing(error, f"{tensor.name!r} beside {self.rows.used} rows") from None
        self.tensors = (*self.tensors, tensor)

    def use_compiled(self, native: Native) -> None:
        """Moves the index into one of compiled functions, as soon as there are these."""
        functions = native.index() if isinstance(self.index, SortedIndex) else None
        if functions is not None:
            hashes, entries = self.all()
            index = CellIndex(functions, self.salt)
            index.reserve(in_buckets(hashes))
            index.put(hashes, entries)
            self.index = index

    def reserve(self, hashes: Hashes) -> None:
        """Makes room for the entries of hashes, before there are any; raises `MemoryLimit` if there is no memory."""
        try:
            self.index.reserve(in_buckets(hashes))
        except MemoryError:
            raise _no_keys(hashes) from None

    def find(self, keys: Array) -> tuple[Hashes, Int64s]:
        """Returns hashes and entries of keys.

        Raises:
            InvalidRequest: the keys are of another dtype or shape, or of a bucket that is not held.
        """
        if keys.ndim != 1 or keys.dtype != DTYPES[self.spec.key_dtype]:
            raise InvalidRequest(f"keys must be {self.spec.key_dtype}[n], not {keys.dtype}{list(keys.shape)}")
        hashes, entries = self.index.find(as_words(keys))
        if len(self.buckets) < BUCKETS and hashes.size:
            low, high = buckets_of(np.array([hashes.min(), hashes.max()]))
            if low < self.buckets.start or high >= self.buckets.stop:
                raise InvalidRequest(
                    f"a key is in bucket {low if low < self.buckets.start else high}, but this server has buckets "
                    f"{self.buckets.start} to {self.buckets.stop - 1}"
                )
        return hashes, entries

    def keys_of(self, hashes: Hashes) -> Array:
        """Returns the keys of hashes, of the table's dtype of keys."""
        return keys_of(hashes, self.salt, self.spec.key_dtype)

    def all(self) -> tuple[Hashes, Int64s]:
        """Returns all hashes, in order, and their entries."""
        return self.index.scan(*bucket_bounds(self.buckets.start, self.buckets.stop))

    @property
    def has_counted(self) -> bool:
        """True if keys without a row are counted in the index."""
        return int(self.index.used.sum()) > self.rows.used

    def freeze_counts(self) -> FrozenCounts | None:
        """Returns what reads the keys later that are counted now and have no row; None without such."""
        return self._views.add(FrozenCounts(self.index, self.buckets)) if self.has_counted else None

    @contextmanager
    def _noting(self, hashes: Hashes, before: Int64s) -> Iterator[None]:
        """Around a change of the index: notes what was there, and keeps others from reading meanwhile."""
        with ExitStack() as stack:
            for view in self._views.living() if self._views else ():
                stack.enter_context(view.lock)
                view.note(hashes, before)
            yield

    def rows_in_order(self) -> tuple[Hashes, Int64s]:
        """Returns the hashes that have rows, in order, and the slots of these."""
        hashes, entries = self.all()
        return hashes[entries > 0], entries[entries > 0] - 1

    def put(self, hashes: Hashes, entries: Int64s, before: Int64s) -> None:
        """Sets the entries of hashes, each given once, which were `before`."""
        if hashes.size:
            self.changes += 1
            with self._noting(hashes, before):
                self.index.put(hashes, entries)

    def remove(self, hashes: Hashes, before: Int64s) -> None:
        """Removes the entries of hashes, each given once, which were `before`."""
        if hashes.size:
            self.changes += 1
            with self._noting(hashes, before):
                self.index.remove(hashes)

    def create(self, hashes: Hashes, before: Int64s, begin: Callable[[Int64s], object] = lambda slots: None) -> Int64s:
        """Makes rows, in which their hashes are written, and what `begin` writes.

        Args:
            hashes: uint64[n], each once; none has a row.
            before: int64[n], their entries.
            begin: called with the slots.

        Returns:
            int64[n], the slots.

        Raises:
            MemoryLimit: there is no memory. Nothing has changed.
        """
        if self.rows.used + hashes.size > MAX_COUNT:
            raise MemoryLimit(f"a table can have at most {MAX_COUNT} rows on one server; add servers")
        if not hashes.size:
            return np.empty(0, np.int64)
        try:
            slots = self.rows.allocate(hashes.size)
        except MemoryError as error:
            raise _missing(error, f"{hashes.size} more rows of a table") from None
        self.counts += in_buckets(hashes)
        try:
            self.put(hashes, slots + 1, before)
            begin(slots)
        except MemoryError:
            self.uncreate(hashes, before, slots)
            raise _no_keys(hashes) from None
        self.rows.hashes[slots] = hashes
        return slots

    def uncreate(self, hashes: Hashes, before: Int64s, slots: Int64s) -> None:
        """Undoes `create`."""
        had = before != 0
        self.remove(hashes[~had], slots[~had] + 1)
        self.put(hashes[had], before[had], slots[had] + 1)
        self.rows.release(slots)
        self.counts -= in_buckets(hashes)

    def drop(self, hashes: Hashes, entries: Int64s) -> None:
        """Drops what hashes have, each given once, with its entry."""
        self.remove(hashes, entries)
        has_row = entries > 0
        gone = hashes[has_row]
        self.rows.release(entries[has_row] - 1)
        self.counts -= in_buckets(gone)
        self.deletions.add(self.round, gone)


def _no_keys(hashes: Hashes) -> MemoryLimit:
    return MemoryLimit(f"out of memory for {hashes.size} more keys of a table")


def _missing(error: MemoryError, what: str) -> MemoryLimit:
    """Returns the error for what there is no memory for, or no room on the disk of a tier."""
    if isinstance(error, DiskFull):
        return MemoryLimit(f"the disk has no space for {what}: {error}")
    return MemoryLimit(f"out of memory for {what}")
