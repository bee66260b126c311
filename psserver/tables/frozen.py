"""Copy-on-write views: rows as they were, for a checkpoint that reads them while rounds write them in place.

Whoever writes rows sets the old ones aside first, unless they have been read. So a checkpoint copies no table, and a
round copies the rows that it writes.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from math import prod
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from psserver.tables.reserved import ReservedArray
from pswire.model.rows import Int64s
from pswire.model.tensor import Array

PIECE_BYTES = 1 << 20
"""Bytes that are read at a time: a round that wants to set rows aside waits for no more."""

NEEDLESS = (1 << 32) - 1
"""In the place of a row that is set aside: nobody will read what it had."""

Bools = npt.NDArray[np.bool_]
View = TypeVar("View")


class RowSource(Protocol):
    """Has an array of rows, always the same."""

    @property
    def array(self) -> Array:
        """The rows."""


class Shown(NamedTuple):
    """An array of rows alone."""

    array: Array


class FrozenRows:
    """The rows of some arrays as they were when this was made. One thread reads each array once.

    Args:
        arrays: the arrays, all with as many rows. Whoever writes rows calls `set_aside` before.

    Attributes:
        count: number of the arrays.
    """

    def __init__(self, arrays: Sequence[RowSource]) -> None:
        self._arrays: list[RowSource | None] = list(arrays)
        self.count = len(self._arrays)
        self._shapes = [(each.array.shape[1:], each.array.dtype) for each in arrays]
        size = len(arrays[0].array)
        self._aside: list[ReservedArray | None] = [ReservedArray(*each, size, huge=True) for each in self._shapes]
        self._places = np.zeros(size, np.uint32)  # of rows that are set aside, from 1 on
        self._read = [0] * self.count  # up to which rank the rows of each array are read
        self._stop = 0
        self._lock = threading.Lock()  # guards all of these

    @property
    def aside(self) -> int:
        """Bytes of rows that are set aside."""
        with self._lock:
            return sum(kept.array.nbytes for kept in self._aside if kept is not None)

    @property
    def left(self) -> bool:
        """True while an array is still to be read."""
        return any(array is not None for array in self._arrays)

    def row_bytes(self, number: int) -> int:
        """Returns the bytes of a row of an array."""
        shape, dtype = self._shapes[number]
        return prod(shape) * dtype.itemsize

    def set_aside(self, rows: Int64s) -> None:
        """Keeps rows that are going to be written, unless nobody will read them any more.

        Args:
            rows: int64[n], each once.
        """
        with self._lock:
            left = [n for n, array in enumerate(self._arrays) if array is not None]
            if not left:
                return
            rows = rows[rows < len(self._places)]
            new = rows[self._places[rows] == 0]
            is_needed = self._is_needed(new, min(self._read[n] for n in left))
            self._places[new[~is_needed]] = NEEDLESS
            new = new[is_needed]
            first, self._stop = self._stop, self._stop + len(new)
            for array, kept in zip(self._arrays, self._aside, strict=True):
                if array is not None and kept is not None:
                    kept.resize(self._stop)
                    np.take(array.array, new, axis=0, out=kept.array[first:], mode="clip")
            self._places[new] = np.arange(first + 1, self._stop + 1)

    def _is_needed(self, rows: Int64s, read: int) -> Bools:
        """Returns for each of some rows, none of which was written since, if its rank is not below `read`."""
        return np.asarray(rows >= read)

    def take(self, number: int, rows: Int64s | slice, read: int) -> Array:
        """Returns rows of an array as they were, as a new array.

        Args:
            number: the array.
            rows: the rows.
            read: rows of a lower rank are not read from it any more; ranks are the rows' numbers, if nothing else is
                said.
        """
        with self._lock:
            source, kept = self._arrays[number], self._aside[number]
            if source is None or kept is None:
                raise ValueError("a frozen array can be read only once")
            array, places = source.array, self._places[rows]
            found = array[rows].copy() if isinstance(rows, slice) else array.take(rows, axis=0, mode="clip")
            there = np.flatnonzero(places)
            if there.size:
                found[there] = kept.array[places[there] - 1]
            self._read[number] = read
            return found

    def let_go(self, number: int) -> None:
        """An array is read, and is not held any more."""
        with self._lock:
            self._arrays[number] = self._aside[number] = None

    def pieces(self, number: int = 0) -> Iterator[Array]:
        """Yields an array as it was, in pieces of some rows."""
        size, step = len(self._places), max(1, PIECE_BYTES // max(self.row_bytes(number), 1))
        for first in range(0, max(size, 1), step):
            stop = min(first + step, size)
            yield self.take(number, slice(first, stop), stop)
        self.let_go(number)


class Views(Generic[View]):
    """The views of something that changes, as long as somebody reads them. Used by the thread that changes it."""

    def __init__(self) -> None:
        self._all: list[weakref.ref[View]] = []

    def __bool__(self) -> bool:
        return bool(self._all)

    def add(self, view: View) -> View:
        """Adds a view; returns it."""
        self._all.append(weakref.ref(view))
        return view

    def living(self) -> list[View]:
        """Returns the views that somebody reads."""
        found = [view for view in (ref() for ref in self._all) if view is not None]
        self._all = list(map(weakref.ref, found))
        return found
