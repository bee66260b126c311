"""A table as it was between two rounds, for a checkpoint that reads it while rounds go on writing its rows in place.

Whoever writes a row sets the old one aside first, unless that has been read. So a checkpoint copies no table, and a
round copies the rows that it writes.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from psserver.tables.reserved import ReservedArray
from psserver.tables.rows import CHANGED, HASH, WORDS, RowTensors
from psserver.tiers.mapped import Use
from pswire.model.hashing import Hashes
from pswire.model.rows import Int64s
from pswire.model.tensor import Array

PIECE_BYTES = 1 << 20
"""Bytes that are read at a time: a round that wants to set rows aside waits for no more."""

PIECE_SLOTS = 1 << 16
"""Slots that are looked at at a time."""

NEEDLESS = (1 << 32) - 1
"""In the place of a row that is set aside: nobody will read what the slot had."""

Settle = Callable[[list[Array], Int64s], list[Array]]
"""Makes up the updates that rows have missed: takes copies of some slots' rows, of all tensors, and the slots; returns
the rows as they are with all updates."""


class HeldRows:
    """The rows of a table as they were when this was made. They are read once, by one thread.

    `load` comes first, then each tensor is read, in any order.

    Args:
        rows: the rows. Whoever writes them calls `set_aside` of this before.
        since: rows that were changed after this round alone are read; -1 for all.
        settle: makes up what rows have missed; None where they have missed nothing.

    Attributes:
        tensors: number of the tensors.
        slots: after `load`, the slots of the rows in the order of their hashes.
    """

    def __init__(self, rows: RowTensors, since: int, settle: Settle | None) -> None:
        self.slots: Int64s = np.empty(0, np.int64)
        self._after = max(since, 0)
        self._settle = settle
        self._books: Array | None = rows.books
        self._tensors: list[ReservedArray | None] = list(rows.tensors)
        self._arrays: list[Array | None] = [tensor.array for tensor in rows.tensors]
        self.tensors = len(rows.tensors)
        self._shapes = [(array.shape[1:], array.dtype) for array in self._arrays if array is not None]
        self._places = np.zeros(len(rows.books), np.uint32)  # of rows that are set aside, from 1 on
        self._aside: list[ReservedArray | None] = [self._room(*each) for each in self._shapes]
        self._books_aside: ReservedArray | None = self._room((WORDS,), np.dtype(np.uint32))
        self._ranks: npt.NDArray[np.uint32] | None = None  # where each slot is among `slots`, once these are known
        self._read = [0] * len(self._arrays)  # rows of each tensor that are read
        self._settled: dict[int, Array] = {}
        self._count = 0
        self._expected = rows.used
        self._lock = threading.Lock()  # guards all of these

    def _room(self, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> ReservedArray:
        return ReservedArray(shape, dtype, len(self._places), huge=True)

    @property
    def aside(self) -> int:
        """Bytes of rows that are set aside."""
        with self._lock:
            left = (array.array.nbytes for array in (*self._aside, self._books_aside) if array is not None)
            return sum(left)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that are not read yet; of what has changed, at most, before `load`."""
        with self._lock:
            rows = self._expected if self._ranks is None else len(self.slots)
            left = zip(self._arrays, self._shapes, strict=True)
            return sum(rows * math.prod(shape) * dtype.itemsize for array, (shape, dtype) in left if array is not None)

    # ---- For those who write rows ----

    def set_aside(self, slots: Int64s) -> None:
        """Keeps rows that are going to be written, unless nobody will read them any more.

        Args:
            slots: int64[n], each once.
        """
        with self._lock:
            if not any(array is not None for array in self._arrays):
                return
            slots = slots[slots < len(self._places)]
            new = slots[self._places[slots] == 0]
            is_needed = self._needed(new)
            self._places[new[~is_needed]] = NEEDLESS
            new = new[is_needed]
            stop = self._count + len(new)
            for array, kept in zip((*self._arrays, self._books), (*self._aside, self._books_aside), strict=True):
                if array is not None and kept is not None:
                    kept.resize(stop)
                    np.take(array, new, axis=0, out=kept.array[self._count :], mode="clip")
            self._places[new] = np.arange(self._count + 1, stop + 1)
            self._count = stop

    def _needed(self, slots: Int64s) -> npt.NDArray[np.bool_]:
        """Returns for each of some slots, none of which was written since, if somebody will read its row."""
        if self._ranks is None:
            assert self._books is not None
            return np.asarray(self._books[slots, CHANGED] > self._after)
        left = [read for array, read in zip(self._arrays, self._read, strict=True) if array is not None]
        ranks = self._ranks[slots]
        return np.asarray((ranks != NEEDLESS) & (ranks >= min(left)))

    # ---- For the one who reads ----

    def load(self) -> tuple[Hashes, Array]:
        """Finds the rows, and what is known of each.

        Returns:
            hashes: uint64[n], in order.
            books: uint32[n, WORDS], of the same rows.
        """
        found = [self._load(first) for first in range(0, len(self._places), PIECE_SLOTS)]
        slots = np.concatenate([np.empty(0, np.int64), *(slots for slots, _ in found)])
        books = np.concatenate([np.empty((0, WORDS), np.uint32), *(books for _, books in found)])
        hashes = books[:, HASH].copy().view(np.uint64)[:, 0]
        order = np.argsort(hashes)
        ranks = np.full(len(self._places), NEEDLESS, np.uint32)
        self.slots = slots[order]
        ranks[self.slots] = np.arange(order.size)
        with self._lock:
            self._ranks = ranks
            self._books = self._books_aside = None
        return hashes[order], books[order]

    def _load(self, first: int) -> tuple[Int64s, Array]:
        """Returns the slots with rows, of some that follow one another, and their books."""
        with self._lock:
            assert self._books is not None
            assert self._books_aside is not None
            places, aside = self._places[first : first + PIECE_SLOTS], self._books_aside.array
            is_wanted = (self._books[first : first + PIECE_SLOTS, CHANGED] > self._after) & (places == 0)
            there, kept = np.flatnonzero(is_wanted), np.flatnonzero((places != 0) & (places != NEEDLESS))
            slots = np.concatenate([there, kept])
            return first + slots, np.concatenate([self._books[first + there], aside[places[kept] - 1]])

    def pieces(self, number: int) -> Iterator[Array]:
        """Yields a tensor's rows as they were, in the order of `slots`, as new arrays of some rows; lets go of them."""
        if number in self._settled:
            yield self._settled.pop(number)
            return
        numbers = [number] if self._settle is None else range(len(self._arrays))
        step = max(1, PIECE_BYTES // max(map(self._row_bytes, numbers)))
        for first in range(0, max(len(self.slots), 1), step):
            yield self._piece(number, first, step, numbers)
        with self._lock:
            for each in numbers:
                self._arrays[each] = self._aside[each] = self._tensors[each] = None

    def _row_bytes(self, number: int) -> int:
        shape, dtype = self._shapes[number]
        return math.prod(shape) * dtype.itemsize

    def _piece(self, number: int, first: int, step: int, numbers: Sequence[int]) -> Array:
        slots = self.slots[first : first + step]
        found = [self._take(each, first, slots) for each in numbers]
        if self._settle is None:
            return found[0]
        # All tensors are made up together. The others are kept until their turn: to make them up takes longer than to
        # read them.
        found = self._settle(found, slots)
        for each, rows in zip(numbers, found, strict=True):
            if each != number:
                shape = (len(self.slots), *rows.shape[1:])
                self._settled.setdefault(each, np.empty(shape, rows.dtype))[first : first + step] = rows
        return found[number]

    def _take(self, number: int, first: int, slots: Int64s) -> Array:
        if (tensor := self._tensors[number]) is not None:
            tensor.touch(slots, Use.PASS)
        with self._lock:
            array, kept = self._arrays[number], self._aside[number]
            if array is None or kept is None:
                raise ValueError("a held tensor can be read only once")
            found: Array = array.take(slots, axis=0, mode="clip")
            places = self._places[slots]
            there = np.flatnonzero(places)
            if there.size:
                found[there] = kept.array[places[there] - 1]
            self._read[number] = first + len(slots)
        return found
