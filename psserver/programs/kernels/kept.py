"""Machine code of kernels, kept in a folder for the next process of this user on this host.

Whoever can write to the folder can run code in a server. So it is used only if it, and each file, belongs to this user
and nobody else may write there; and it is used by its descriptor, so that nobody can put another one in its place.
A file that is damaged, or of other versions, is passed over: its name is a hash of all that its code depends on, and
its first bytes are a hash of the rest.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import re
import stat
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

log = logging.getLogger("psserver")

MAX_BYTES = 32 << 20
"""Most bytes that are kept, some thousands of kernels; beyond it those are removed that were not used for longest."""

LOCK_SECONDS = 20.0
"""Seconds that a process waits for another one that makes the same code; then it makes that itself."""

LOCK_PAUSE = 0.05
"""Seconds between two looks at the other process."""

ABANDONED_SECONDS = 3600.0
"""Age at which what a killed process has left, an unfinished file or a lock, is removed."""

MAX_FILE = 4 << 20
"""Most bytes of a file that is read."""

_OURS = re.compile(r"[0-9a-f]{64}\.(kernel|lock|\d+)")
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class KeptCode:
    """A folder of machine code by name. May be called from any thread, and used by several processes at once.

    Args:
        folder: its absolute path; it is made, for this user alone, with what is missing above it.

    Raises:
        OSError: there is no such folder and it cannot be made.
        PermissionError: somebody else may write there; the error says what to do.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        with suppress(FileExistsError):
            os.makedirs(os.path.dirname(folder), exist_ok=True)
            os.mkdir(folder, 0o700)
        try:
            self._place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError as error:
            if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                raise
            raise PermissionError(f"{folder} is not a directory; name a directory") from None
        # Not closed by hand: a compilation that a server's end has left behind may still use it.
        weakref.finalize(self, os.close, self._place)
        _check_ours(os.fstat(self._place), folder)

    def read(self, name: str) -> bytes | None:
        """Returns the code of this name, a hash in hexadecimal digits; None if there is none that is sound."""
        try:
            with open(self._open(f"{name}.kernel", os.O_RDONLY), "rb") as file:
                _check_ours(os.fstat(file.fileno()), f"{self._folder}/{name}.kernel")
                data = file.read(MAX_FILE)
                os.utime(file.fileno())  # it was used
        except OSError:
            return None
        digest, code = data[:32], data[32:]
        return code if hashlib.sha256(code).digest() == digest else None

    def write(self, name: str, code: bytes) -> None:
        """Keeps code under a name, and removes what was not used for longest; a disk that is full keeps nothing."""
        unfinished = f"{name}.{os.getpid()}"
        with suppress(OSError):
            try:
                with open(self._open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
                    file.write(hashlib.sha256(code).digest() + code)
                os.rename(unfinished, f"{name}.kernel", src_dir_fd=self._place, dst_dir_fd=self._place)
            except OSError:
                self._remove(unfinished)
                raise
            self._make_room()

    @contextmanager
    def locked(self, name: str, is_closed: Callable[[], bool]) -> Iterator[None]:
        """Returns a context in which no other process makes the code of this name, if it does not take too long.

        Args:
            name: as in `write`.
            is_closed: returns True if nobody needs the code any more.
        """
        lock = f"{name}.lock"
        try:
            held = self._open(lock, os.O_RDWR | os.O_CREAT)
        except OSError:
            held = None
        try:
            if held is not None:
                _lock(held, is_closed)
            yield
        finally:
            if held is not None:
                self._remove(lock)  # who waits for it finds the code; without it two make the same, which is no harm
                os.close(held)

    def _open(self, name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600, dir_fd=self._place)

    def _remove(self, name: str) -> None:
        with suppress(OSError):
            os.unlink(name, dir_fd=self._place)

    def _make_room(self) -> None:
        """Removes what a killed process has left, and then the oldest code, until all fits. Others' files stay."""
        found = []
        for name in filter(_OURS.fullmatch, os.listdir(self._place)):
            with suppress(FileNotFoundError):
                seen = os.stat(name, dir_fd=self._place, follow_symlinks=False)
                found.append((seen.st_mtime, seen.st_size, name))
        found.sort(reverse=True)
        now, total = max((each[0] for each in found), default=0.0), 0
        for changed, size, name in found:
            total += size
            left = not name.endswith(".kernel") and changed < now - ABANDONED_SECONDS
            if left or total > MAX_BYTES:
                self._remove(name)


def kept_in(folder: str) -> KeptCode | None:
    """Opens a folder for machine code; returns None, and says why, if it cannot be used, and None for no folder."""
    if not folder:
        return None
    off = "PS_KERNEL_CACHE=0 switches the cache off"
    try:
        return KeptCode(folder)
    except PermissionError as error:
        if error.errno is None:  # not the system's word but ours
            log.warning("compiled kernels are not cached: %s; %s", error, off)
            return None
        log.info("compiled kernels are not cached: %s cannot be used (%s)", folder, error.strerror)
    except OSError as error:
        log.info("compiled kernels are not cached: %s cannot be used (%s)", folder, error.strerror)
    return None


def _check_ours(seen: os.stat_result, path: str) -> None:
    """Raises `PermissionError` if anybody but this user may write there."""
    if seen.st_uid != os.geteuid():
        raise PermissionError(f"{path} belongs to user {seen.st_uid}, who could change code that this server runs")
    if seen.st_mode & _OTHERS_WRITE:
        raise PermissionError(
            f"other users can write to {path}, and so change code that this server runs; run chmod go-w {path}"
        )


def _lock(held: int, is_closed: Callable[[], bool]) -> None:
    """Locks a file; gives up after `LOCK_SECONDS`, or where the file system knows no locks."""
    end = time.monotonic() + LOCK_SECONDS
    while time.monotonic() < end and not is_closed():
        try:
            return fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(LOCK_PAUSE)
        except OSError:
            return None
    return None
