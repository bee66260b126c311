"""A file without a name that is mapped into memory, and what is known of its pages."""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import threading
import weakref
from contextlib import suppress
from enum import Enum, auto

import numpy as np
import numpy.typing as npt

from psserver.tiers import paging
from psserver.tiers.paging import PAGE
from pswire.model.rows import Int64s
from pswire.model.tensor import address_of
from pswire.sizes import human

STEP = 16 << 20
"""Bytes of the disk that are reserved at a time."""

MOST = 255
"""Most updates of a page that are counted."""


class Use(Enum):
    """What rows are touched for.

    Attributes:
        UPDATE: by a round. A page that rounds touch often stays.
        LOOKUP: to be looked up: most likely a round updates them soon.
        PASS: with all others, once.
    """

    UPDATE = auto()
    LOOKUP = auto()
    PASS = auto()


class DiskFull(MemoryError):
    """The disk below dynamic tables has no room."""


class MappedFile:
    """A file without a name, so that nothing is left of it when this process ends, however it does.

    Its pages are read when they are touched. Room on the disk is reserved before: to touch a page for which there is
    none would kill the process. One thread at a time reserves and gives back; the rest is for any thread.

    Args:
        directory: where it lies.
        room: bytes of address space; none of the disk.

    Attributes:
        memory: all of it, mapped.
        reserved: bytes that have room on the disk; no more may be touched.
        resident: number of pages that are in memory, as far as is known.
    """

    def __init__(self, directory: str, room: int) -> None:
        self._directory = directory
        self._file = _opened(directory)
        self._room = -(-room // PAGE) * PAGE  # its last page is a whole one, also where less of it is mapped
        try:
            os.ftruncate(self._file, self._room)
            self.memory = mmap.mmap(self._file, room, flags=mmap.MAP_SHARED)
        except BaseException:
            os.close(self._file)
            raise
        weakref.finalize(self.memory, os.close, self._file).atexit = False
        self._base = address_of(np.frombuffer(self.memory, np.uint8))
        with suppress(OSError):
            self.memory.madvise(mmap.MADV_RANDOM)  # a page alone: what is beside it is not asked for
        self.reserved = self.resident = 0
        self._lock = threading.Lock()  # guards the number of pages in memory, and these
        self._here: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)  # pages that are in memory, as far as is known
        self._counts: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)  # updates of late, also of pages on the disk alone
        self._wanted: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)  # pages that were looked up, and not updated since
        self._known: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)  # pages that were touched before
        self._leaving: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)  # pages that are being written, to leave then
        self._hinted: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)  # pages that a hint brought, not looked up since

    def reserve(self, nbytes: int) -> None:
        """Reserves room on the disk for the first bytes of it.

        Raises:
            DiskFull: there is none. Nothing has changed.
        """
        if nbytes <= self.reserved:
            return
        exact = -(-nbytes // PAGE) * PAGE
        try:
            end = self._allocated(min(-(-nbytes // STEP) * STEP, self._room), exact)
        except OSError as error:
            raise DiskFull(
                f"{human(exact - self.reserved)} more in {self._directory} ({error.strerror}); free disk space "
                "there, start the server with another --tier-path, or give tables a capacity"
            ) from error
        with self._lock:
            more = end // PAGE - len(self._here)
            if more > 0:
                more = max(more, len(self._here) // 2)
                self._here = np.concatenate([self._here, np.zeros(more, np.bool_)])
                self._counts = np.concatenate([self._counts, np.zeros(more, np.uint8)])
                self._wanted = np.concatenate([self._wanted, np.zeros(more, np.bool_)])
                self._known = np.concatenate([self._known, np.zeros(more, np.bool_)])
                self._leaving = np.concatenate([self._leaving, np.zeros(more, np.bool_)])
                self._hinted = np.concatenate([self._hinted, np.zeros(more, np.bool_)])
        self.reserved = end

    def _allocated(self, wanted: int, exact: int) -> int:
        """Reserves up to the wanted end, or the exact one where there is no room for that; returns the end."""
        try:
            os.posix_fallocate(self._file, self.reserved, wanted - self.reserved)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or wanted <= exact:
                raise
            os.posix_fallocate(self._file, self.reserved, exact - self.reserved)
            return exact
        return wanted

    def give_back(self, start: int) -> None:
        """Gives the disk, and the memory, of what lies behind `start` back; it is zero when it comes back.

        Args:
            start: bytes, a multiple of the size of a page.
        """
        if start >= self.reserved:
            return
        self.memory.madvise(mmap.MADV_REMOVE, start, self.reserved - start)
        with self._lock:
            gone = slice(start // PAGE, None)
            self.resident -= int(np.count_nonzero(self._here[gone]))
            self._here[gone] = self._wanted[gone] = self._leaving[gone] = self._hinted[gone] = False
            self._known[gone] = False
            self._counts[gone] = 0
        self.reserved = start

    # ---- Pages ----

    @property
    def pages(self) -> int:
        """Number of pages that it has."""
        return self.reserved // PAGE

    def touch(self, pages: Int64s, use: Use) -> tuple[Int64s, int, int, int]:
        """Notes that pages are about to be touched.

        Args:
            pages: int64[n], may repeat, in any order.
            use: what for.

        Returns:
            Those that are not in memory, each once, in order; of those that are, if this is a lookup, how many a hint
            had brought there; how many are needed, as often as they are given: not by an update of what was looked up
            before, nor by a pass; and how many of these had left memory.
        """
        with self._lock:
            here, hits = self._here[pages], 0
            needed = ~self._wanted[pages] if use is Use.UPDATE else np.full(pages.size, use is Use.LOOKUP)
            used, back = int(np.count_nonzero(needed)), int(np.count_nonzero(needed & ~here & self._known[pages]))
            missing = np.unique(pages[~here])
            self._here[missing] = self._known[missing] = True
            self.resident += missing.size
            if use is Use.LOOKUP:
                hits = np.unique(pages[here & self._hinted[pages]]).size
                self._hinted[pages] = False
                self._wanted[pages] = True
            if use is Use.UPDATE:
                counts = self._counts[pages]
                self._counts[pages] = counts + (counts < MOST)
                self._wanted[pages] = False
        return missing, hits, used, back

    def take_hint(self, pages: Int64s, room: int) -> Int64s:
        """Keeps pages that are going to be looked up where they are in memory, and reads the others, which takes time.

        Others may touch the same pages meanwhile: of those that are being read nothing is said before they are there.

        Args:
            pages: as of `touch`.
            room: most pages of them that it keeps or reads.

        Returns:
            Those that it has read, each once, in order.
        """
        with self._lock:
            pages = np.unique(pages[pages < self.pages])
            here = self._here[pages]
            missing = pages[~here][: max(room, 0)]
            self._wanted[pages[here][: max(room - missing.size, 0)]] = True
        self.read_and_map(missing)
        with self._lock:
            came = missing[~self._here[missing] & (missing < self.pages)]
            self._here[came] = self._wanted[came] = self._hinted[came] = True
            self.resident += came.size
        return came

    @property
    def wanted(self) -> int:
        """Number of pages that are kept for a lookup, or for the update behind it."""
        with self._lock:
            return int(np.count_nonzero(self._wanted))

    def read(self, pages: Int64s) -> None:
        """Begins to read pages, each given once, in order."""
        paging.advise(self._base, pages, paging.MADV_WILLNEED)

    def read_and_map(self, pages: Int64s) -> None:
        """Reads pages, given as to `read`, and waits for them; nobody who updates them then has to fault them in."""
        self.read(pages)
        paging.advise(self._base, pages, paging.MADV_POPULATE_WRITE)

    def leaves(self) -> tuple[Int64s, npt.NDArray[np.uint8]]:
        """Returns the pages in memory that may leave it, int64[n], and how often each was updated lately.

        Without those that leave already.
        """
        with self._lock:
            pages = np.flatnonzero(self._here & ~(self._wanted | self._leaving))
            return pages, self._counts[pages]

    def age(self) -> None:
        """Halves all counts, and waits no longer for updates of what was looked up."""
        with self._lock:
            self._counts >>= 1
            self._wanted[:] = False

    def page_out(self, pages: Int64s) -> Int64s:
        """Takes pages out of memory. Those that were changed have to be written before, which is begun.

        Args:
            pages: int64[n], not empty, each once, in increasing order.

        Returns:
            Those that are in memory still: call it again with them. Without those that were looked up meanwhile.
        """
        with self._lock:
            stay = self._wanted[pages]
            self._leaving[pages[stay]] = False
        pages = pages[~stay]
        if not pages.size:
            return pages
        paging.advise(self._base, pages, paging.MADV_PAGEOUT)
        paging.drop(self._file, pages)
        self.look(int(pages[0]), int(pages[-1] - pages[0]) + 1)
        with self._lock:
            left = pages[self._here[pages] & ~self._wanted[pages]]
            self._leaving[pages] = False
            self._leaving[left] = True
        return left

    def look(self, first: int, count: int) -> None:
        """Finds out which of some pages that follow one another are in memory."""
        count = max(min(count, self.pages - first), 0)
        found = paging.are_resident(self._base + first * PAGE, count)
        with self._lock:
            here = self._here[first : first + count]
            found |= here & self._wanted[first : first + count]  # which may be under way
            self.resident += int(np.count_nonzero(found)) - int(np.count_nonzero(here))
            here[:] = found


def _opened(directory: str) -> int:
    """Opens a new file without a name; returns its descriptor. Raises `OSError`."""
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:  # a file system that has no such files
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
    file, path = tempfile.mkstemp(prefix="paramserver-", dir=directory)
    os.unlink(path)
    return file
