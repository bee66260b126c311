"""An index of compiled functions: buckets of open addressing, in the order of the hashes.

Each bucket is linear probing that keeps its cells sorted by their hashes, with homes in the same order (Amble and Knuth
1974). So a search for what is not there ends early, a removal shifts cells back and leaves no mark, a bucket grows by
one pass from beginning to end, and what lies in an interval is found without sorting. Where a cell is depends on
nothing but the bucket's size and its hashes.

A bucket grows by itself, half as large again. The first sizes of the buckets differ, so that they do not grow together.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import count

import numpy as np

from psserver.tables.index import Index, Rounds
from psserver.tables.index_functions import LOAD, PLACES
from psserver.tables.native import IndexFunctions
from pswire.model.hashing import BUCKETS, Hashes, buckets_of
from pswire.model.rows import Int64s
from pswire.model.tensor import Array, address_of

AHEAD_LOAD, AHEAD_BUCKETS = 0.57, 3
"""Load at which a bucket may grow ahead of time, and how many do so after a round."""

FIRST_HOMES = 16
"""Homes of the smallest bucket."""

GROWTH = 1.5
TURN = 0.6180339887498949
"""The golden ratio's fraction: its multiples are spread evenly, also those of any range of buckets."""

_ALL = np.arange(BUCKETS)

ANYWHERE = 0
"""The address of all memory."""


class CellIndex(Index):
    """An index of compiled functions; see `Index`.

    Args:
        functions: the functions.
        salt: of the hashes, see `hashes_of`.
        buckets: the buckets that it may hold.

    Attributes:
        growths: number of times a bucket grew.
    """

    def __init__(self, functions: IndexFunctions, salt: int, buckets: range) -> None:
        self._functions = functions
        self._salt = np.uint64(salt).astype(np.int64).item()
        self._places = np.zeros((BUCKETS, PLACES), np.uint64)
        self._used = np.zeros(BUCKETS, np.uint64)
        self._blocks = [_empty_block(2)] * BUCKETS  # of a bucket that is not held, one for all
        self._nbytes = 0
        self.growths = 0
        self._set_place(slice(None), self._blocks[0], 1)
        homes = _homes_after(0)
        for bucket in buckets:
            self._install(bucket, _empty_block(int(_cells(homes)[bucket])), int(homes[bucket]))

    @property
    def nbytes(self) -> int:
        return self._nbytes

    @property
    def used(self) -> Int64s:
        return self._used.view(np.int64)

    def find(self, keys: Array) -> tuple[Hashes, Int64s]:
        hashes = np.empty(keys.size, np.uint64)
        return hashes, self._find(True, address_of(keys), hashes)

    def entries(self, hashes: Hashes) -> Int64s:
        return self._find(False, ANYWHERE, np.ascontiguousarray(hashes))

    def _find(self, has_keys: bool, keys: int, hashes: Hashes) -> Int64s:
        found = np.empty(hashes.size, np.int64)
        self._functions.find(
            hashes.size, self._salt, has_keys, keys, address_of(hashes), self._table, ANYWHERE, ANYWHERE,
            address_of(found),
        )  # fmt: skip
        return found

    def put(self, hashes: Hashes, entries: Int64s) -> None:
        hashes, entries = np.ascontiguousarray(hashes), np.ascontiguousarray(entries)
        stopped = np.zeros(1, np.int64)
        while True:
            self._functions.put(
                hashes.size, int(stopped[0]), address_of(hashes), address_of(entries), self._table,
                address_of(self._used), ANYWHERE, ANYWHERE, address_of(stopped),
            )  # fmt: skip
            if stopped[0] == hashes.size:
                return
            self._grow(hashes[stopped[0] :])

    def remove(self, hashes: Hashes) -> None:
        hashes = np.ascontiguousarray(hashes)
        self._functions.remove(hashes.size, address_of(hashes), self._table, address_of(self._used), ANYWHERE, ANYWHERE)

    def scan(self, lows: Hashes, highs: Hashes) -> tuple[Hashes, Int64s]:
        lows, highs = np.ascontiguousarray(lows), np.ascontiguousarray(highs)
        total, room = np.zeros(1, np.int64), 0
        while True:
            hashes, found = np.empty(room, np.uint64), np.empty(room, np.int64)
            self._functions.scan(
                lows.size, room, address_of(lows), address_of(highs), self._table, ANYWHERE, ANYWHERE,
                address_of(hashes), address_of(found), address_of(total),
            )  # fmt: skip
            if total[0] <= room:
                return hashes, found
            room = int(total[0])

    def follow(self, starts: Hashes, width: int, sign: int, round: int, last: Rounds) -> tuple[Hashes, Int64s]:
        starts = np.ascontiguousarray(starts)
        hashes, found = np.zeros((starts.size, width), np.uint64), np.zeros((starts.size, width), np.int64)
        self._functions.follow(
            starts.size, width, sign, round, last.strides[0] // 4, address_of(starts), self._table, ANYWHERE, ANYWHERE,
            address_of(last), address_of(hashes), address_of(found),
        )  # fmt: skip
        return hashes, found

    def reserve(self, counts: Int64s) -> None:
        """Makes room for numbers of entries in each bucket, int64[BUCKETS], so that they come without growth."""
        homes = self._enough(counts)
        more = np.flatnonzero(homes > self._homes)
        self._rebuild(more, homes[more], _cells(homes[more]))

    def grow_ahead(self) -> None:
        loads = self.used / self._homes
        full = np.flatnonzero(loads > AHEAD_LOAD)
        if full.size:
            full = full[np.argsort(-loads[full])[:AHEAD_BUCKETS]]
            too_many = self._homes * LOAD[0] // LOAD[1] + 1
            homes = self._enough(np.where(np.isin(_ALL, full), too_many, 0))[full]
            with suppress(MemoryError):  # there is no need yet
                self._rebuild(full, homes, _cells(homes))
                self.growths += full.size

    @property
    def _table(self) -> int:
        return address_of(self._places)

    @property
    def _homes(self) -> Int64s:
        return self._places[:, 1].view(np.int64)

    def _enough(self, counts: Int64s) -> Int64s:
        """Returns the homes that buckets need for numbers of entries."""
        homes, (full, whole) = self._homes.copy(), LOAD
        for steps in count(1):
            short = counts * whole > full * homes
            if not short.any():
                break
            homes[short] = np.maximum(homes, _homes_after(steps))[short]
        return homes

    def _grow(self, hashes: Hashes) -> None:
        """Makes room for hashes, of which there is none for the first: all buckets at once that are too full for them.

        Raises:
            MemoryError: there is no memory. Nothing has changed then.
        """
        buckets = buckets_of(hashes)
        homes = self._enough(self.used + np.bincount(buckets, minlength=BUCKETS))
        more = np.flatnonzero(homes > self._homes)
        cells = _cells(homes[more])
        if buckets[0] not in more:  # it is full only behind the last home
            more = np.append(more, buckets[0])
            cells = np.append(cells, _longer(self._places[buckets[:1], 2].view(np.int64)))
        self._rebuild(more, homes[more], cells)
        self.growths += more.size

    def _rebuild(self, buckets: Int64s, homes: Int64s, cells: Int64s) -> None:
        """Moves buckets into new blocks of some homes and cells, or of more cells where these do not suffice."""
        while buckets.size:
            blocks = [np.empty(2 * count, np.uint64) for count in cells.tolist()]
            places = np.array([address_of(block) // 8 for block in blocks], np.uint64)
            old = self._places[buckets]
            jobs = np.column_stack([old[:, 0], old[:, 2], homes.view(np.uint64), cells.view(np.uint64), places])
            placed = np.empty(buckets.size, np.int64)
            self._functions.rebuild(buckets.size, address_of(jobs), ANYWHERE, ANYWHERE, address_of(placed))
            for at in np.flatnonzero(placed):
                self._nbytes -= self._blocks[buckets[at]].nbytes
                self._install(buckets[at], blocks[at], int(homes[at]))
            left = placed == 0
            buckets, homes, cells = buckets[left], homes[left], _longer(cells[left])

    def _install(self, bucket: int, block: Hashes, homes: int) -> None:
        self._blocks[bucket] = block
        self._nbytes += block.nbytes
        self._set_place(bucket, block, homes)

    def _set_place(self, bucket: int | slice, block: Hashes, homes: int) -> None:
        self._places[bucket] = address_of(block) // 8, homes, block.size // 2


def _homes_after(steps: int) -> Int64s:
    """Returns the homes of each bucket after steps of growth."""
    return (FIRST_HOMES * GROWTH ** (steps + np.arange(BUCKETS) * TURN % 1.0)).astype(np.int64)


def _cells(homes: Int64s) -> Int64s:
    """Returns the cells of blocks: homes, some for those that are displaced beyond the last home, and a last one."""
    return homes + 9 + np.minimum(homes // 4, 64)


def _longer(cells: Int64s) -> Int64s:
    return cells + (cells >> 1) + 1


def _empty_block(cells: int) -> Hashes:
    block = np.zeros(2 * cells, np.uint64)
    block[::2] = (1 << 64) - 1
    return block
