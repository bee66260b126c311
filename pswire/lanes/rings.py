"""Shared memory of the shm lane: one segment for each session and server, half of it for each direction.

A segment has no name: the client makes it and hands its file descriptor over a Unix socket. It is gone when both
ends are, however they die. It is sealed against shrinking: neither end can make the other read what is not there.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from collections.abc import Callable, Sequence

import numpy as np

from pswire.errors import InvalidRequest
from pswire.tensor import Array

SEGMENT_BYTES = 64 << 20
"""Of a segment, both directions together. Only what was once in use at a time takes memory."""

MAX_SEGMENT_BYTES = 1 << 30
"""What a server maps for one client at most."""

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
LINE = 64
"""Data begin at multiples of a cache line."""


class Segment:
    """Memory that two processes share.

    Args:
        fd: its file, which stays the caller's.
        size: in bytes.
    """

    def __init__(self, fd: int, size: int) -> None:
        self.size = size
        self._memory = mmap.mmap(fd, size)

    @classmethod
    def make(cls, size: int = SEGMENT_BYTES) -> tuple[Segment, int]:
        """A new segment, and its file, which the caller closes.

        Raises:
            OSError: the system gives none.
        """
        fd = os.memfd_create("paramserver", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
            return cls(fd, size), fd
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def take(cls, fd: int) -> Segment:
        """The segment of another process; raises `InvalidRequest` for a file that is none, or could shrink."""
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError:
            seals = 0
        size = os.fstat(fd).st_size
        if seals & SEALS != SEALS or not 0 < size <= MAX_SEGMENT_BYTES or size % (2 * mmap.PAGESIZE):
            raise InvalidRequest("what was handed over is no sealed segment of shared memory")
        return cls(fd, size)

    def half(self, number: int) -> memoryview:
        """The memory of one direction: 0 from client to server, 1 back."""
        half = self.size // 2
        return memoryview(self._memory)[number * half : (number + 1) * half]


class Ring:
    """The half of a segment that this end writes. Guarded by its channel.

    The lowest free place is taken, so that memory that the processor's caches still have is used again.

    Args:
        memory: where to write.
    """

    def __init__(self, memory: memoryview) -> None:
        self.size = len(memory)
        self._bytes = np.frombuffer(memory, np.uint8)
        self._used: dict[int, int] = {}

    def has(self, size: int) -> bool:
        """Whether there is room."""
        return self._find(size) is not None

    def put(self, buffers: Sequence[memoryview], size: int) -> int:
        """Copies buffers, one after another; returns their place. There must be room."""
        place = self._find(size)
        if place is None:
            raise ValueError(f"no room for {size} bytes of shared memory")
        self._used[place] = size
        at = place
        for buffer in buffers:
            np.copyto(self._bytes[at : at + len(buffer)], np.frombuffer(buffer, np.uint8))
            at += len(buffer)
        return place

    def free(self, place: int) -> None:
        """The other end has read it; raises `InvalidRequest` where nothing is."""
        if self._used.pop(place, None) is None:
            raise InvalidRequest(f"nothing was at place {place} of the shared memory")

    def _find(self, size: int) -> int | None:
        at = 0
        for place in sorted(self._used):
            if place - at >= size:
                return at
            at = place + -(-self._used[place] // LINE) * LINE
        return at if self.size - at >= size else None


class Mirror:
    """The half of a segment that the other end writes.

    Args:
        memory: what to read.
        freed: told a place, by any thread, when nobody looks at it any more.
    """

    def __init__(self, memory: memoryview, freed: Callable[[int], object]) -> None:
        self._memory = memory
        self._freed = freed
        self.size = len(memory)
        self._held: dict[int, tuple[int, weakref.ref[Array]]] = {}

    @property
    def borrowed(self) -> int:
        """Bytes that somebody looks at."""
        return sum(size for size, _ in list(self._held.values()))

    def look(self, place: int, size: int) -> memoryview:
        """Data where they are; they are freed when the view, and all that were made of it, are gone.

        Raises:
            InvalidRequest: they are not within the segment, or somebody looks at them.
        """
        if place + size > len(self._memory) or place % LINE or place in self._held:
            raise InvalidRequest(f"{size} bytes at {place} are no place in the shared memory")
        array = np.frombuffer(self._memory, np.uint8, size, place)
        array.flags.writeable = False

        def gone(_: object) -> None:
            self._held.pop(place, None)
            self._freed(place)

        self._held[place] = size, weakref.ref(array, gone)
        return array.data

    def copy(self, place: int, size: int) -> memoryview:
        """A copy of data, which are freed at once; raises `InvalidRequest` as `look` does."""
        found = np.empty(size, np.uint8)
        np.copyto(found, np.frombuffer(self.look(place, size), np.uint8))
        return found.data
