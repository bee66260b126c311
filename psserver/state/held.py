"""Tables as they were at one time, for a checkpoint that reads them while rounds go on writing their rows in place.

Whoever writes rows sets the old ones aside first, those that are still to be read. So a checkpoint never copies a
table, and a round copies the rows that it writes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from pswire.model.rows import Int64s
from pswire.model.tensor import Array

PIECE_BYTES = 1 << 20
"""Bytes that are read at a time: a round that wants to set rows aside waits for no more."""


class HeldTable:
    """One table, in host memory. It is read once, from its first row to its last, by one thread.

    Args:
        array: the table, contiguous, of rank 1 or more.

    Attributes:
        array: the table as it is now; None once all of it has been read.
    """

    def __init__(self, array: Array) -> None:
        self.array: Array | None = array
        self.shape, self.dtype, self.nbytes = array.shape, array.dtype, array.nbytes
        # The system gives both memory where they are written, and not before.
        self._places = np.zeros(len(array), np.uint32)  # of rows that are set aside, from 1 on
        self._rows: Array | None = np.empty_like(array)
        self._count = self._read = 0
        self._lock = threading.Lock()  # guards all of these

    @contextmanager
    def looked_at(self) -> Iterator[bool]:
        """Says whether it holds its table, which it does until the end."""
        with self._lock:
            yield self.array is not None

    @property
    def aside(self) -> int:
        """Bytes of rows that are set aside."""
        return self._count * self.nbytes // max(len(self._places), 1)

    @property
    def step(self) -> int:
        """Rows that are read at a time."""
        return max(1, PIECE_BYTES * len(self._places) // max(self.nbytes, 1))

    def set_aside(self, array: Any, ids: Int64s) -> None:
        """Keeps rows that are going to be written, unless they have been read.

        Args:
            array: the array that is going to be written; nothing is kept if it is another one than this.
            ids: the rows, each once.
        """
        with self._lock:
            if array is not self.array or self._rows is None:
                return
            new = ids[(ids >= self._read) & (self._places[ids] == 0)]
            stop = self._count + len(new)
            self._rows[self._count : stop] = self.array[new]
            self._places[new] = np.arange(self._count + 1, stop + 1)
            self._count = stop

    def read(self, first: int, stop: int) -> Array:
        """Returns rows as they were, as a new array; those before are let go of."""
        with self._lock:
            if self.array is None or self._rows is None:
                raise ValueError("a held table can be read only once")
            found = self.array[first:stop].copy()
            places = self._places[first:stop]
            there = np.flatnonzero(places)
            if len(there):
                found[there] = self._rows[places[there] - 1]
            self._read = stop
            if stop >= len(self._places):
                self.array, self._rows, self._count = None, None, 0
            return found

    def pieces(self) -> Iterator[Array]:
        """Yields the rows as they were, in order."""
        for first in range(0, len(self._places), self.step):
            yield self.read(first, min(first + self.step, len(self._places)))


Held = Sequence[HeldTable]
"""Those of one variable."""
