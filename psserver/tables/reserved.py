"""Arrays that grow without moving, in reserved address space.

The system gives memory to a page when it is first written, so that an array may have room for more rows than there is
memory. Where it refuses to reserve, or the room is full, an array that grows is copied into one of twice the size.

With a tier an array lies in a file that is mapped into memory, and has room for as much as the disk.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from math import prod
from typing import Any

import numpy as np

from psserver.tiers.mapped import DiskFull, MappedFile, Use
from psserver.tiers.paging import PAGE
from psserver.tiers.tier import Tier
from pswire.model.rows import Int64s
from pswire.model.tensor import Array

NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
"""Reserve address space alone. Python has had the name since 3.12; Linux has the number everywhere."""

CHUNK = 2 << 20
"""Bytes by which memory is given back: a huge page."""

ROOM = min(256 << 30, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
"""Most bytes of address space that one array reserves: it has no more memory than the machine."""

PIECE_BYTES = 4 << 20
"""Bytes of a file that are passed over at a time."""

FILE_ROOM = 1 << 40
"""Most bytes of address space that one array reserves in a file."""

ROOM_OF_ALL = 32 << 40
"""Most bytes of address space that all arrays of a process reserve: a quarter of what it has. Hundreds of tables would
take all of it, and nothing else could be allocated."""


class _AddressSpace:
    """What all arrays of a process reserve. May be used by any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken = 0  # guarded by the lock
        self._returned: deque[int] = deque()  # added to wherever an array ends, perhaps by a thread that has the lock

    def reserve(self, nbytes: int) -> mmap.mmap:
        """Reserves anonymous memory; raises as `take`.

        For tables no huge pages are asked for. With them rows of a gigabyte are read a third faster, but the round that
        first writes to one waits for all of it: 8 ms in a virtual machine whose host has no huge pages.
        """
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
        return self._take(nbytes, lambda: mmap.mmap(-1, nbytes, flags=flags))

    def map(self, nbytes: int, tier: Tier) -> MappedFile:
        """Reserves the memory of a new file; raises as `reserve`."""
        file = tier.map(nbytes)
        self._take(nbytes, lambda: file.memory)
        return file

    def _take(self, nbytes: int, make: Callable[[], mmap.mmap]) -> mmap.mmap:
        """Counts address space; raises `OSError` if the system refuses, or if so much is reserved already."""
        with self._lock:
            if self._now() + nbytes > ROOM_OF_ALL:
                raise OSError(f"{ROOM_OF_ALL} bytes of address space are reserved")
            memory = make()
            self._taken += nbytes
        weakref.finalize(memory, self._returned.append, nbytes).atexit = False
        return memory

    @property
    def taken(self) -> int:
        """Bytes that are reserved."""
        with self._lock:
            return self._now()

    def _now(self) -> int:
        while self._returned:
            self._taken -= self._returned.popleft()
        return self._taken


_space = _AddressSpace()


class ReservedArray:
    """An array that grows. Used by one thread at a time; its memory is given back when nobody holds a view of it.

    Args:
        shape: shape of one row.
        dtype: its dtype.
        rows: most rows that are expected; more need a copy.
        room: most bytes to reserve; 0 to reserve none.
        huge: True to ask for huge pages, for what is written from its beginning to its end.
        tier: where it lies; None for memory.

    Attributes:
        array: the rows (n, *shape), C-contiguous; rows that nobody wrote are zero. A view, which stays good while the
            array grows: it shows as many rows as when it was taken. After a move it shows memory that is no longer
            used.
        moves: number of copies that growth has made.
        tier: where it lies; None for memory.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        rows: int,
        room: int = ROOM,
        huge: bool = False,
        tier: Tier | None = None,
    ) -> None:
        self._shape, self._dtype, self._expected, self._most = shape, dtype, rows, room
        self._row = prod(shape) * dtype.itemsize
        self.tier = tier
        self.moves = 0
        self._reached = 0  # bytes from the beginning that may have memory
        self._file: MappedFile | None = None
        self._memory: mmap.mmap | None = None
        if tier is not None:
            room = min(FILE_ROOM, tier.room)
        room = min(rows * self._row, room) // self._row * self._row
        if room:
            try:
                self._reserve(room)
            except (OSError, ValueError, OverflowError):
                room = 0
        if self._memory is not None and tier is None:
            with suppress(OSError):  # the system has none
                if huge:
                    self._memory.madvise(mmap.MADV_HUGEPAGE)
                else:  # Where it gives them unasked, a table of one row would have a huge page.
                    self._memory.madvise(mmap.MADV_NOHUGEPAGE, 0, min(CHUNK, len(self._memory)))
        self._all = np.frombuffer(self._memory, dtype) if self._memory else np.empty(0, dtype)
        self._all = self._all.reshape(-1, *shape)
        self.array: Array = self._all[:0]

    def _reserve(self, nbytes: int) -> mmap.mmap:
        if self.tier is None:
            memory = _space.reserve(nbytes)
        else:
            self._file = _space.map(nbytes, self.tier)
            memory = self._file.memory
        self._memory = memory
        return memory

    def renewed(self) -> ReservedArray:
        """Returns an empty one of the same kind, with memory of its own."""
        return ReservedArray(self._shape, self._dtype, self._expected, self._most, tier=self.tier)

    @property
    def touched(self) -> int:
        """Bytes that may have memory, in whole pages; of a file what may take of the disk, in whole chunks."""
        if self._file is not None:
            return -(-self.array.nbytes // CHUNK) * CHUNK
        return -(-self._reached // PAGE) * PAGE

    def touch(self, rows: Int64s, use: Use, later: bool = False) -> None:
        """Rows are about to be used: begins to read those that lie on the disk alone.

        Args:
            rows: int64[n], their numbers, none negative; may repeat.
            use: what for.
            later: True if there is time until then.
        """
        if self._file is not None and self.tier is not None and rows.size:
            self.tier.touch(self._file, self._pages(rows), use, later)

    def hint(self, rows: Int64s) -> None:
        """Rows are going to be looked up, and there is time: reads those that lie on the disk alone if there is room.

        Args:
            rows: as of `touch`.
        """
        if self._file is not None and self.tier is not None and rows.size:
            self.tier.hint(self._file, self._pages(rows))

    def _pages(self, rows: Int64s) -> Int64s:
        """Returns the pages that rows lie in; some of them several times."""
        first = rows * self._row // PAGE
        last = (rows * self._row + self._row - 1) // PAGE
        most = int((last - first).max())
        pages = [first, *(np.minimum(first + n, last) for n in range(1, most + 1))]
        return np.concatenate(pages) if most else first

    def pieces(self) -> Iterator[slice]:
        """Yields all rows in pieces, for whoever passes over all of them: of a file they do not stay in memory."""
        step = max(1, PIECE_BYTES // self._row) if self.tier is not None else max(len(self.array), 1)
        for first in range(0, len(self.array), step):
            rows = slice(first, min(first + step, len(self.array)))
            self.touch(np.arange(rows.start, rows.stop), Use.PASS)
            yield rows

    def fill(self, value: float) -> None:
        """Writes a value to all rows."""
        for rows in self.pieces():
            self.array[rows] = value

    def resize(self, rows: int) -> None:
        """Shows more rows or fewer; gives the memory of rows that are not shown any more back to the system.

        Rows that come back are zero, but for those in the chunk where the array ended.

        Raises:
            MemoryError: there is no memory for the copy, or no room on the disk.
        """
        if rows > len(self._all):
            self._move(rows)
        elif rows < len(self.array):
            self._give_back(rows)
        elif self._file is not None:
            self._file.reserve(rows * self._row)
        self._reached = max(self._reached, rows * self._row)
        self.array = self._all[:rows]

    def _move(self, rows: int) -> None:
        """Copies the rows into memory for twice as many."""
        count, before = max(rows, 2 * len(self.array)), (self._file, self._memory)
        try:
            new = self._new(count, rows).reshape(-1, *self._shape)
        except MemoryError:
            self._file, self._memory = before
            raise
        new[: len(self.array)] = self.array
        self.moves += bool(len(self.array))
        self._all = new

    def _new(self, count: int, rows: int) -> Array:
        """Takes memory for some rows, zero, flat; of a file there is room for the first of them."""
        try:
            memory = self._reserve(count * self._row)
        except (OSError, ValueError, OverflowError) as error:
            if self.tier is not None:
                raise DiskFull(f"a file for {count} rows ({error})") from error
            self._memory = None
            return np.zeros(count * prod(self._shape), self._dtype)
        if self._file is not None:
            self._file.reserve(rows * self._row)
        return np.frombuffer(memory, self._dtype)

    def _give_back(self, rows: int) -> None:
        start = -(-rows * self._row // CHUNK) * CHUNK
        if self._file is not None:
            self._file.give_back(start)
            return
        end = min(self.touched, self._all.nbytes)
        if self._memory is not None and end > start:
            self._memory.madvise(mmap.MADV_DONTNEED, start, end - start)
            self._reached = start
