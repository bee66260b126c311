"""Shared memory of the shm transport: values without a copy in a socket.

Each client has a segment into which it writes what it pushes: copies, and behind them arrays that are sent from where
they are. A server has one, into which it writes what it answers, once for all clients that want the same.

Segments have no names: their file descriptors are handed over a Unix socket. They are gone when both ends are, however
they die. They are sealed against shrinking, so that neither end can make the other read what is not there, and against
writing by others.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from pswire.errors import InvalidRequest
from pswire.limits import ALIGN
from pswire.model.tensor import Array, address_of, align

CLIENT_BYTES = 64 << 20
"""Of a client's segment, for copies. Of each segment only what was once in use at a time takes memory."""

MAX_SEGMENT_BYTES = 1 << 40
"""Greatest segment of another process that is mapped."""

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
FUTURE_WRITE = 0x10
"""F_SEAL_FUTURE_WRITE: whoever maps it from now on only reads."""

LINE = 64
"""Data begin at multiples of a cache line."""


SMALL_COPY = 1 << 16
"""Bytes from which on other threads run while they are copied: to arrange that takes as long as to copy these."""


class Segment:
    """Memory that processes share.

    Args:
        fd: file descriptor, which stays the caller's.
        size: size in bytes.
        write: True if this process writes it.
    """

    def __init__(self, fd: int, size: int, write: bool) -> None:
        self.size = size
        access = mmap.PROT_READ | (mmap.PROT_WRITE if write else 0)
        self.memory = memoryview(mmap.mmap(fd, size, mmap.MAP_SHARED, access))

    @classmethod
    def make(cls, size: int) -> tuple[Segment, int]:
        """A new segment, which only this process writes, and its file, which the caller closes.

        Raises:
            OSError: the system gives none.
        """
        fd = os.memfd_create("paramserver", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            made = cls(fd, size, True)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
            try:
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, FUTURE_WRITE)
            except OSError:  # before Linux 5.1
                pass
        except BaseException:
            os.close(fd)
            raise
        return made, fd

    @classmethod
    def take(cls, fd: int, at_most: int = MAX_SEGMENT_BYTES) -> Segment:
        """The segment of another process, to read.

        Args:
            fd: its file, which stays the caller's.
            at_most: the bytes that the other process may have any use for.

        Raises:
            InvalidRequest: the file is none, is larger than it may be, or could shrink.
        """
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError:
            seals = 0
        size = os.fstat(fd).st_size
        if seals & SEALS != SEALS or not 0 < size <= at_most:
            raise InvalidRequest("the received file is not a sealed segment of shared memory")
        return cls(fd, size, False)


@dataclass
class _Extent:
    """An allocation in an arena.

    Attributes:
        size: size in bytes.
        holders: number of readers that have still to read it.
        key: the caller's name for the data.
    """

    size: int
    holders: int
    key: Hashable


class SharedArena:
    """A segment that this process writes. May be used by any thread.

    Of the ring the lowest free place is taken, so that memory that the processor's caches still have is used again.
    What lies behind the ring is reserved once, for arrays that are sent again and again from where they are.

    Args:
        memory: memory of the segment.
        ring: bytes at its beginning that are for copies; None for all of it.

    Attributes:
        size: size of the ring, in bytes.
    """

    def __init__(self, memory: memoryview, ring: int | None = None) -> None:
        self.size = len(memory) if ring is None else min(ring, len(memory))
        self._memory, self._bytes = memory, np.frombuffer(memory, np.uint8)
        self._address = address_of(self._bytes)
        self._lock = threading.Lock()
        self._entries: dict[int, _Extent] = {}
        self._places: dict[Hashable, int] = {}
        self._reserved = self.size  # up to where memory is reserved
        self._lent: set[int] = set()  # places behind the ring that have still to be read

    def put(self, buffers: Sequence[memoryview], size: int, key: Hashable = None) -> int | None:
        """Copies buffers, one after another, for one more who reads them.

        Args:
            buffers: the data to write.
            size: total size of the buffers, in bytes.
            key: name of the data; data under a known key are not written again. None for no name.

        Returns:
            Offset of the data; None where there is no room.
        """
        with self._lock:
            known = self._places.get(key)
            if known is not None:
                self._entries[known].holders += 1
                return known
            place = self._find(size)
            if place is None:
                return None
            at = place
            for buffer in buffers:
                end = at + len(buffer)
                if end - at < SMALL_COPY:
                    self._memory[at:end] = buffer
                else:
                    np.copyto(self._bytes[at:end], np.frombuffer(buffer, np.uint8))
                at = end
            self._entries[place] = _Extent(size, 1, key)
            if key is not None:
                self._places[key] = place
            return place

    def reserve(self, size: int) -> tuple[memoryview, int] | None:
        """Reserves memory behind the ring, for good, right behind what was reserved before.

        Args:
            size: size in bytes.

        Returns:
            The memory of the segment, and the offset of the reserved bytes, which are 0; None where there is no room.
        """
        with self._lock:
            place, end = self._reserved, align(self._reserved + size)
            if end > len(self._memory):
                return None
            self._reserved = end
            return self._memory, place

    def lend(self, buffers: Sequence[memoryview]) -> int | None:
        """Returns where a buffer lies that is in reserved memory, for one who reads it there.

        Args:
            buffers: the buffer, and perhaps the padding to the next tensor.

        Returns:
            Its offset; None where it lies elsewhere, or still has to be read there.
        """
        if self._reserved == self.size or len(buffers) > 1 + (len(buffers[-1]) < ALIGN):
            return None
        place = address_of(np.frombuffer(buffers[0], np.uint8)) - self._address
        with self._lock:
            if place in self._lent or not self.size <= place < self._reserved or place % ALIGN:
                return None
            self._lent.add(place)
            return place

    def free(self, place: int) -> None:
        """One of the readers needs it no more."""
        with self._lock:
            if place >= self.size:
                self._lent.discard(place)
                return
            entry = self._entries[place]
            entry.holders -= 1
            if not entry.holders:
                del self._entries[place]
                self._places.pop(entry.key, None)

    def _find(self, size: int) -> int | None:
        at = 0
        for place in sorted(self._entries):
            if place - at >= size:
                return at
            at = place + -(-self._entries[place].size // LINE) * LINE
        return at if self.size - at >= size else None


class SlotHold:
    """A place is in use as long as this object is there.

    Args:
        free: called at the end, by any thread.
    """

    def __init__(self, free: Callable[[], object]) -> None:
        self._free = free

    def __del__(self) -> None:
        self._free()


class SharedView:
    """A segment that another process writes. May be used by any thread.

    Args:
        memory: memory of the segment.
        freed: called with a place and the bytes of the ring that it takes, by any thread, when nobody here looks at it
            any more.
        ring: bytes at its beginning that the other end needs for the next copies; None for all of it.

    Attributes:
        size: size of the ring, in bytes.
    """

    def __init__(self, memory: memoryview, freed: Callable[[int, int], object], ring: int | None = None) -> None:
        self.size = len(memory) if ring is None else min(ring, len(memory))
        self._memory = memory
        self._freed = freed
        self._taken: dict[int, int] = {}
        self._held: dict[int, tuple[SlotHold, weakref.ref[Array]]] = {}

    def read(self, place: int, size: int, reader: int = 0) -> memoryview:
        """Returns data: where they are, or a copy while half of the ring is in use, so that more can come.

        Data in place are freed when the view, and all that were made of it, are gone; data that were copied at once.

        Args:
            place, size: offset and size of the data, in bytes.
            reader: bytes that a reader takes at once if it lets go of what it has read, or 0. If all that fits, nothing
                is copied: the other end waits for that reader.

        Raises:
            InvalidRequest: the data are not within the segment, or are being looked at.
        """
        array, half = self._look(place, size), self.size // 2
        if place >= self.size or 0 < reader <= half or sum(list(self._taken.values())) <= half:
            return array.data
        found = np.empty(size, np.uint8)
        np.copyto(found, array)
        return found.data

    @property
    def looked_at(self) -> bool:
        """True if anybody holds a view of data in place."""
        return bool(self._taken)

    def keep(self) -> list[SlotHold]:
        """Returns guards: data now in view are not freed before them. A fork has the same memory, and frees nothing."""
        return [hold for hold, _ in list(self._held.values())]

    def _look(self, place: int, size: int) -> Array:
        in_ring = place < self.size
        end, step = (self.size, LINE) if in_ring else (len(self._memory), ALIGN)
        if place + size > end or place % step or place in self._taken:
            raise InvalidRequest(f"{size} bytes at {place} are not within the shared memory")
        array = np.frombuffer(self._memory, np.uint8, size, place)
        array.flags.writeable = False
        self._taken[place] = size * in_ring
        self._held[place] = (
            SlotHold(lambda: self._free(place)),
            weakref.ref(array, lambda _: self._held.pop(place, None)),
        )
        return array

    def _free(self, place: int) -> None:
        self._freed(place, self._taken.pop(place))
