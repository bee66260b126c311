"""The keys that a filter had counted when a table was frozen: what is about to change is noted, and nothing copied."""

from __future__ import annotations

import threading

import numpy as np

from psserver.tables.index import Index, bucket_bounds
from pswire.model.hashing import Hashes
from pswire.model.rows import Int64s

AT_ONCE = 16
"""Buckets that are read at a time: a round that wants to change something waits for no more."""


class FrozenCounts:
    """The keys that a table's index counted, and that had no row. Read once, by one thread.

    It reads what there is, part by part, and then undoes what was noted.

    Args:
        index: the index.
        buckets: the buckets that it holds.

    Attributes:
        lock: taken by whoever changes the index, and notes that.
        nbytes: bytes of what was noted.
    """

    def __init__(self, index: Index, buckets: range) -> None:
        self.lock = threading.Lock()
        self.nbytes = 0
        self._notes: list[tuple[Hashes, Int64s]] | None = []  # None once they are read
        self._index = index
        self._buckets = buckets

    def note(self, hashes: Hashes, before: Int64s) -> None:
        """Notes which entries are about to change, under the lock, and what they are."""
        if self._notes is not None:
            self._notes.append((hashes, before))
            self.nbytes += hashes.nbytes + before.nbytes

    def load(self) -> tuple[Hashes, Int64s]:
        """Returns the hashes, in order, and their entries."""
        parts = [self._part(first) for first in range(self._buckets.start, self._buckets.stop, AT_ONCE)]
        hashes, entries = (np.concatenate(each) for each in zip(*parts, strict=True))
        with self.lock:
            notes, self._notes, self.nbytes = self._notes, None, 0
        if not notes:
            return hashes, entries
        changed, before = (np.concatenate(each) for each in zip(*notes, strict=True))
        changed, at = np.unique(changed, return_index=True)  # the first note of each
        before, stays = before[at], ~np.isin(hashes, changed)
        hashes = np.concatenate([hashes[stays], changed[before < 0]])
        entries = np.concatenate([entries[stays], before[before < 0]])
        order = np.argsort(hashes)
        return hashes[order], entries[order]

    def _part(self, first: int) -> tuple[Hashes, Int64s]:
        """Returns what some buckets have now."""
        with self.lock:
            hashes, entries = self._index.scan(*bucket_bounds(first, min(first + AT_ONCE, self._buckets.stop)))
        return hashes[entries < 0], entries[entries < 0]
