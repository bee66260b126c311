"""Forks of this process: values that they may look at stay as they are, and calls of a fork are refused."""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from pswire.errors import PSError


class Fork:
    """A fork, and all forks of it. Made before it.

    Whether they are still there is told by memory that they share with this process: each has it until it ends or
    runs another program, whatever files it closes, and the system seals no memory that somebody may write.

    Args:
        held: objects that the forks may look at; they are let go of with this object.

    Raises:
        OSError: the system gives no shared memory.
    """

    def __init__(self, held: Sequence[object]) -> None:
        self._held = held
        self._file = os.fdopen(os.memfd_create("fork", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "wb", 0)
        self._file.truncate(1)
        self._memory = mmap.mmap(self._file.fileno(), 1)

    def part(self) -> None:
        """Gives up this process's share of the memory after the fork: it belongs to the forks alone."""
        self._memory.close()

    @property
    def gone(self) -> bool:
        """True if none of the forks is there any more."""
        try:
            fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        except OSError:
            return False
        return True


_BEGUN: dict[int, Fork] = {}
"""The fork that each thread is making now."""

_THERE: list[Fork] = []
"""Forks that were alive when they were last checked."""

_FOR_GOOD: list[object] = []
"""Objects for forks of which the system cannot tell whether they are alive."""


class _Generation:
    """How many forks lie between this process and the first that imported the package: no system call tells it."""

    def __init__(self) -> None:
        self.forks = 0
        os.register_at_fork(after_in_child=self._count)

    def _count(self) -> None:
        self.forks += 1


_GENERATION = _Generation()


class Owner:
    """The process that has opened what no fork of it can use."""

    def __init__(self) -> None:
        self._generation = _GENERATION.forks

    def check(self) -> None:
        """Raises `PSError` in a fork of the process: it would wait for answers that never come."""
        if self._generation != _GENERATION.forks:
            raise PSError(
                "this process is a fork of the process that opened the strategy, so it cannot use its "
                "connections. Use servers only in that process (DataLoader: num_workers=0), or start this "
                "one with multiprocessing_context='spawn' and its own strategy"
            )


def watch(keep: Callable[[], Sequence[object]], forget: Callable[[], object]) -> None:
    """Keeps what forks may look at.

    Args:
        keep: gives it; called before each fork.
        forget: called in each fork.
    """
    os.register_at_fork(before=lambda: _begin(keep()), after_in_parent=_part, after_in_child=forget)


def _begin(held: Sequence[object]) -> None:
    release()
    if held:
        try:
            _BEGUN[threading.get_ident()] = Fork(held)
        except OSError:
            _FOR_GOOD.extend(held)


def _part() -> None:
    fork = _BEGUN.pop(threading.get_ident(), None)
    if fork is not None:
        fork.part()
        _THERE.append(fork)


def release() -> None:
    """Lets go of what only forks that are gone could look at. By any thread."""
    for fork in list(_THERE):
        if fork.gone:
            with suppress(ValueError):  # another thread has seen it, too
                _THERE.remove(fork)
