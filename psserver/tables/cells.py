"""An index of compiled functions: buckets of open addressing, in the order of the hashes.

Each bucket is linear probing that keeps its cells sorted by their hashes, with homes in the same order (Amble and Knuth
1974). So a search for what is not there ends early, a removal shifts cells back and leaves no mark, a bucket grows by
one pass from beginning to end, and what lies in an interval is found without sorting. Where a cell is depends on
nothing but the bucket's size and its hashes.

A bucket grows by itself, a quarter as large again. The first sizes of the buckets differ, so that they do not grow
together. Their memory is taken and freed by the functions.
"""

from __future__ import annotations

import weakref

import numpy as np

from psserver.tables.index import Index, Rounds
from psserver.tables.index_functions import END, PLACES, STATE
from psserver.tables.native import IndexFunctions
from pswire.model.hashing import BUCKETS, Hashes
from pswire.model.rows import Int64s
from pswire.model.tensor import Array, address_of

ANYWHERE = 0
"""The address of all memory."""

_EMPTY = np.array([(1 << 64) - 1, 0] * END, np.uint64)
"""The block of buckets without entries."""


class CellIndex(Index):
    """An index of compiled functions; see `Index`.

    Args:
        functions: the functions.
        salt: of the hashes, see `hashes_of`.
    """

    def __init__(self, functions: IndexFunctions, salt: int) -> None:
        self._functions = functions
        self._salt = np.uint64(salt).astype(np.int64).item()
        self._places = np.empty((BUCKETS, PLACES), np.uint64)
        self._places[:] = address_of(_EMPTY) // 8, 1, END
        self._used = np.zeros(BUCKETS, np.uint64)
        self._state = np.zeros(STATE, np.uint64)
        self._table, self._uses, self._told = map(address_of, (self._places, self._used, self._state))
        weakref.finalize(self, _release, functions, self._places).atexit = False

    @property
    def nbytes(self) -> int:
        return int(self._state[1])

    @property
    def growths(self) -> int:
        """Number of times that a bucket grew."""
        return int(self._state[2])

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
        self._functions.put(
            hashes.size, address_of(hashes), address_of(entries), self._table, self._uses, ANYWHERE, ANYWHERE,
            self._told,
        )  # fmt: skip
        self._check_memory(hashes.size)

    def remove(self, hashes: Hashes) -> None:
        hashes = np.ascontiguousarray(hashes)
        self._functions.remove(hashes.size, address_of(hashes), self._table, self._uses, ANYWHERE, ANYWHERE)

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
        counts = counts.astype(np.uint64)
        self._functions.reserve(BUCKETS, address_of(counts), self._table, ANYWHERE, ANYWHERE, self._told)
        self._check_memory(BUCKETS)

    def _check_memory(self, asked: int) -> None:
        if self._state[0] < asked:
            raise MemoryError


def _release(functions: IndexFunctions, places: Hashes) -> None:
    functions.release(BUCKETS, address_of(places))
