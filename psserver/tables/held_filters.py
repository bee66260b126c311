"""What filters had counted when a table was held, read later: what is about to change is noted, and nothing copied.

A note says what was there before a change. Who reads takes what there is, part by part, and then undoes what was noted.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np

from psserver.tables.index import Index, bucket_bounds
from pswire.model.hashing import Hashes
from pswire.model.rows import Int64s
from pswire.model.tensor import Array

AT_ONCE = 16
"""Buckets that are read at a time: a round that wants to change something waits for no more."""


class Notes:
    """What was there before changes, from the oldest on.

    Attributes:
        lock: taken by whoever changes something, and notes that.
        list: places, and what was there.
        nbytes: bytes of these.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.list: list[tuple[Array, Array]] = []
        self.nbytes = 0
        self._is_read = False

    def add(self, places: Array, before: Array) -> None:
        """Notes what is about to change, under the lock: where, and what is there."""
        if not self._is_read:
            self.list.append((places, before))
            self.nbytes += places.nbytes + before.nbytes

    def end(self) -> Sequence[tuple[Array, Array]]:
        """Returns the notes; from now on none is taken."""
        with self.lock:
            self._is_read, self.nbytes, found, self.list = True, 0, self.list, []
        return found


class HeldCounts(Notes):
    """The keys that a table's index counted, and that had no row. Read once, by one thread.

    Args:
        index: the index.
        buckets: the buckets that it holds.
    """

    def __init__(self, index: Index, buckets: range) -> None:
        super().__init__()
        self._index = index
        self._buckets = buckets

    def load(self) -> tuple[Hashes, Int64s]:
        """Returns the hashes, in order, and their entries."""
        parts = [self._part(first) for first in range(self._buckets.start, self._buckets.stop, AT_ONCE)]
        hashes, entries = (np.concatenate(each) for each in zip(*parts, strict=True))
        notes = self.end()
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


class HeldCounters(Notes):
    """The counters of a Bloom filter. Read once, by one thread.

    Args:
        counters: uint8[buckets, width]. Places of changes are those in all of them, in order.
    """

    def __init__(self, counters: Array) -> None:
        super().__init__()
        self._counters = counters

    def load(self) -> Array:
        """Returns the counters."""
        found = np.empty_like(self._counters)
        for first in range(0, len(found), AT_ONCE):
            self._part(first, found)
        flat = found.reshape(-1)
        for places, before in reversed(self.end()):
            flat[places] = before
        return found

    def _part(self, first: int, found: Array) -> None:
        """Reads the counters of some buckets as they are now."""
        with self.lock:
            found[first : first + AT_ONCE] = self._counters[first : first + AT_ONCE]


class Holders:
    """Those who hold what changes. Used by the thread of the table."""

    def __init__(self) -> None:
        self._all: list[weakref.ref[Notes]] = []

    def __bool__(self) -> bool:
        return bool(self._all)

    def add(self, notes: Notes) -> None:
        """Adds one, as long as it lives."""
        self._all.append(weakref.ref(notes))

    @contextmanager
    def noting(self, places: Array, before: Array) -> Iterator[None]:
        """Around a change: notes what was there, and keeps them from reading meanwhile."""
        living = [notes for notes in (ref() for ref in self._all) if notes is not None]
        self._all = list(map(weakref.ref, living))
        with ExitStack() as stack:
            for notes in living:
                stack.enter_context(notes.lock)
                notes.add(places, before)
            yield
