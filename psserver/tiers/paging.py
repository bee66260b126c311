"""What the system is told, and asked, of pages that are mapped from a file.

Each call takes the addresses of many runs of pages, and releases the GIL.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from functools import cache

import numpy as np
import numpy.typing as npt

from pswire.model.rows import Int64s
from pswire.model.tensor import address_of

PAGE = mmap.PAGESIZE
"""Bytes of a page."""

MADV_WILLNEED = mmap.MADV_WILLNEED
"""Begin to read pages."""

MADV_PAGEOUT = 21
"""Take pages out of this process, and of memory if they are as on the disk. Linux has it since 5.4."""

MADV_POPULATE_WRITE = 23
"""Map pages, to be written, as if each were touched. Linux has it since 5.14."""

_PROCESS_MADVISE = 440
"""The number of the system call, the same on all machines; it takes many runs at once. Linux has it since 5.10."""

_RUNS = 1024
"""Most runs that it takes."""


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    libc.syscall.restype = ctypes.c_long
    return libc


@cache
def _own_process(pid: int) -> int:
    """Returns a descriptor of this process; -1 if the system does not give it, or does not know what it is for."""
    try:
        found = os.pidfd_open(pid)
    except OSError:
        return -1
    return found if _vectored(found, np.empty((0, 2), np.uint64), MADV_WILLNEED) else -1


def _vectored(process: int, runs: npt.NDArray[np.uint64], advice: int) -> bool:
    """Gives advice on some runs by one call; returns False if the system does not do so."""
    arguments = (_PROCESS_MADVISE, process, address_of(runs), len(runs), advice, 0)
    return bool(_libc().syscall(*map(ctypes.c_long, arguments)) >= 0)


def runs_of(pages: Int64s) -> tuple[Int64s, Int64s]:
    """Returns the first page, and the number of pages, of each run of pages that follow one another.

    Args:
        pages: int64[n], each once, in increasing order.
    """
    if not pages.size:
        return pages, pages
    begins = np.append(True, pages[1:] != pages[:-1] + 1)
    firsts = pages[begins]
    at = np.append(np.flatnonzero(begins), pages.size)
    return firsts, np.diff(at)


def advise(base: int, pages: Int64s, advice: int) -> None:
    """Gives the system advice on pages. It is free to do nothing.

    Args:
        base: address of page 0.
        pages: as of `runs_of`.
        advice: one of those above.
    """
    firsts, counts = runs_of(pages)
    runs = np.empty((firsts.size, 2), np.uint64)
    runs[:, 0], runs[:, 1] = base + firsts * PAGE, counts * PAGE
    process = _own_process(os.getpid())
    for at in range(0, len(runs), _RUNS):
        some = runs[at : at + _RUNS]
        if process < 0 or not _vectored(process, some, advice):
            for address, nbytes in some.tolist():
                _libc().madvise(address, nbytes, advice)


def drop(file: int, pages: Int64s) -> None:
    """Takes pages that no process maps out of memory; begins to write those that are not as on the disk.

    What is being written stays: call it once more.

    Args:
        file: the file's descriptor.
        pages: as of `runs_of`.
    """
    firsts, counts = runs_of(pages)
    for first, count in zip(firsts.tolist(), counts.tolist(), strict=True):
        os.posix_fadvise(file, first * PAGE, count * PAGE, os.POSIX_FADV_DONTNEED)


def are_resident(address: int, pages: int) -> npt.NDArray[np.bool_]:
    """Returns of pages that follow one another, from an address on, if each is in memory."""
    found = np.zeros(pages, np.uint8)
    if pages and _libc().mincore(address, pages * PAGE, address_of(found)) < 0:
        return np.ones(pages, np.bool_)  # the system does not say
    return (found & 1).astype(np.bool_)
