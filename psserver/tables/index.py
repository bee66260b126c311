"""The index of a table: from hashes to entries, in the order of the hashes.

An entry says what a key has: 0 nothing; a positive one a row, in slot `entry - 1`; a negative one no row, and `-entry`
occurrences so far. There are two indexes with the same methods and the same results: `SortedIndex` here, of sorted
arrays, and `cells.CellIndex`, whose functions must be compiled before.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from pswire.model.hashing import BUCKETS, LOW_BITS, Hashes, buckets_of, hashes_of
from pswire.model.rows import Int64s
from pswire.model.tensor import Array

Rounds = npt.NDArray[np.uint32]


class Index(Protocol):
    """An index. Used by one thread at a time."""

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""

    @property
    def used(self) -> Int64s:
        """Number of entries of each bucket, int64[BUCKETS]."""

    def find(self, keys: Array) -> tuple[Hashes, Int64s]:
        """Returns the hash and the entry of each key, int64 or uint64 [n], contiguous."""

    def entries(self, hashes: Hashes) -> Int64s:
        """Returns the entry of each hash."""

    def put(self, hashes: Hashes, entries: Int64s) -> None:
        """Sets the entries of some hashes, each given once; makes those that are not there.

        Raises:
            MemoryError: there is no memory. Some of them are set then.
        """

    def remove(self, hashes: Hashes) -> None:
        """Removes the entries of some hashes; passes over those that have none."""

    def scan(self, lows: Hashes, highs: Hashes) -> tuple[Hashes, Int64s]:
        """Returns what lies in some intervals, in order.

        Args:
            lows, highs: the first and the last hash of each interval, both of one bucket.
        """

    def follow(self, starts: Hashes, width: int, sign: int, round: int, last: Rounds) -> tuple[Hashes, Int64s]:
        """Returns the next entries after some hashes, going round in the bucket of each.

        Args:
            starts: uint64[n], the hashes.
            width: number of entries for each.
            sign: 1 for entries with rows, without those whose slot has this round in `last`; -1 for those without.
            round: a round.
            last: a round for each slot; need not be contiguous.

        Returns:
            hashes: uint64[n, width].
            entries: int64[n, width], 0 behind the last one that there is.
        """

    def reserve(self, counts: Int64s) -> None:
        """Makes room for numbers of entries in each bucket, int64[BUCKETS], so that they come without growth.

        Raises:
            MemoryError: there is no memory.
        """
        return


def bucket_bounds(first: int, end: int) -> tuple[Hashes, Hashes]:
    """Returns the first and the last hash of each of a range of buckets."""
    lows = np.arange(first, end, dtype=np.uint64) << np.uint64(LOW_BITS)
    return lows, lows + np.uint64((1 << LOW_BITS) - 1)


class SortedIndex(Index):
    """An index of two sorted arrays. Takes no compiled function; a change takes as long as the table is large.

    Args:
        salt: of the hashes, see `hashes_of`.
    """

    def __init__(self, salt: int) -> None:
        self._salt = salt
        self._hashes: Hashes = np.empty(0, np.uint64)
        self._entries: Int64s = np.empty(0, np.int64)
        self._used: Int64s = np.zeros(BUCKETS, np.int64)

    @property
    def used(self) -> Int64s:
        return self._used

    @property
    def nbytes(self) -> int:
        return self._hashes.nbytes + self._entries.nbytes

    def find(self, keys: Array) -> tuple[Hashes, Int64s]:
        hashes = hashes_of(keys, self._salt)
        return hashes, self.entries(hashes)

    def entries(self, hashes: Hashes) -> Int64s:
        if not self._hashes.size:
            return np.zeros(hashes.size, np.int64)
        at = np.searchsorted(self._hashes, hashes)
        at[at == self._hashes.size] = 0
        return np.where(self._hashes[at] == hashes, self._entries[at], 0)

    def put(self, hashes: Hashes, entries: Int64s) -> None:
        order = np.argsort(hashes)
        hashes, entries = hashes[order], entries[order]
        at = np.searchsorted(self._hashes, hashes)
        is_known = at < self._hashes.size
        is_known[is_known] = self._hashes[at[is_known]] == hashes[is_known]
        self._entries[at[is_known]] = entries[is_known]
        if not is_known.all():
            new = hashes[~is_known]
            self._hashes = np.insert(self._hashes, at[~is_known], new)
            self._entries = np.insert(self._entries, at[~is_known], entries[~is_known])
            self._used += np.bincount(buckets_of(new), minlength=BUCKETS)

    def remove(self, hashes: Hashes) -> None:
        gone = np.isin(self._hashes, hashes)
        self._used -= np.bincount(buckets_of(self._hashes[gone]), minlength=BUCKETS)
        self._hashes, self._entries = self._hashes[~gone], self._entries[~gone]

    def scan(self, lows: Hashes, highs: Hashes) -> tuple[Hashes, Int64s]:
        begins = np.searchsorted(self._hashes, lows)
        counts = np.searchsorted(self._hashes, highs, "right") - begins
        at = np.repeat(begins - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
        return self._hashes[at], self._entries[at]

    def follow(self, starts: Hashes, width: int, sign: int, round: int, last: Rounds) -> tuple[Hashes, Int64s]:
        hashes, found = np.zeros((starts.size, width), np.uint64), np.zeros((starts.size, width), np.int64)
        buckets = buckets_of(starts)
        for bucket in np.unique(buckets):
            these = np.flatnonzero(buckets == bucket)
            inside, entries = self.scan(*bucket_bounds(bucket, bucket + 1))
            fit = entries < 0
            if sign > 0:
                fit = entries > 0
                fit[fit] = last[entries[fit] - 1] != round
            inside, entries = inside[fit], entries[fit]
            count = min(width, inside.size)
            if count:
                at = np.searchsorted(inside, starts[these])[:, None] + np.arange(count)
                hashes[these, :count], found[these, :count] = inside[at % inside.size], entries[at % inside.size]
        return hashes, found
