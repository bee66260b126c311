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
        aside: bytes of rows that are set aside.
    """

    def __init__(self, array: Array) -> None:
        self.array: Array | None = array
        self.shape, self.dtype, self.nbytes = array.shape, array.dtype, array.nbytes
        self.aside = 0
        self._known = np.zeros(len(array), bool)  # rows that are set aside
        self._rows: list[tuple[Int64s, Array]] = []
        self._read = 0
        self._lock = threading.Lock()  # guards all of these

    @contextmanager
    def looked_at(self) -> Iterator[bool]:
        """Says whether it holds its table, which it does until the end."""
        with self._lock:
            yield self.array is not None

    @property
    def step(self) -> int:
        """Rows that are read at a time."""
        return max(1, PIECE_BYTES * len(self._known) // max(self.nbytes, 1))

    def set_aside(self, array: Any, ids: Int64s) -> None:
        """Keeps rows that are going to be written, unless they have been read.

        Args:
            array: the array that is going to be written; nothing is kept if it is another one than this.
            ids: the rows, each once.
        """
        with self._lock:
            if array is not self.array:
                return
            new = ids[(ids >= self._read) & ~self._known[ids]]
            if len(new):
                rows = self.array[new]
                self._known[new] = True
                self._rows.append((new, rows))
                self.aside += rows.nbytes

    def read(self, first: int, stop: int) -> Array:
        """Returns rows as they were, as a new array; those before are let go of."""
        with self._lock:
            if self.array is None:
                raise ValueError("a held table is read once")
            found = self.array[first:stop].copy()
            if self._known[first:stop].any():
                for ids, rows in self._rows:
                    here = (ids >= first) & (ids < stop)
                    found[ids[here] - first] = rows[here]
            self._read = stop
            if stop >= len(self._known):
                self.array, self._rows, self.aside = None, [], 0
            return found

    def pieces(self) -> Iterator[Array]:
        """Yields the rows as they were, in order."""
        for first in range(0, len(self._known), self.step):
            yield self.read(first, min(first + self.step, len(self._known)))


Held = Sequence[HeldTable]
"""Those of one variable."""
