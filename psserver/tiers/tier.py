"""The files of a server's dynamic tables, and the bound of their pages in memory.

A hand goes round all pages. A page that was updated since the hand has passed it last stays; each pass takes one update
back, so that pages that are updated often stay longer (generalised CLOCK, Smith 1978). Pages leave in a thread of their
own: rounds wait for it only if they touch new pages faster than the disk takes old ones.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

from psserver.tiers.mapped import HOTTEST, DiskFull, MappedFile, Use
from psserver.tiers.paging import PAGE
from pswire.errors import ConfigError
from pswire.model.rows import Int64s

TRIAL = 16 << 20
"""Bytes that a disk must have room for at the beginning."""

WINDOW = 1 << 14
"""Pages that the hand passes at a time."""

IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs")
"""File systems whose files are memory."""

LOW, HIGH = 15 / 16, 9 / 8
"""Shares of the bound down to which pages leave, and at which a round waits for that."""

PATROL, PATROL_SECONDS = 16, 1.0
"""Windows that are looked at for pages that nobody has told of, and how often, where nothing else is to be done."""

PAUSE = 0.005
"""Seconds to wait where the disk is still writing all that could leave."""

PATIENCE = 200
"""Pauses of a round that waits for pages to leave; a disk that takes longer does not stop it for good."""


class Tier:
    """The tier of a server's dynamic tables below memory. For any thread.

    Args:
        directory: where its files lie.
        memory: bytes of them that may stay in memory.

    Attributes:
        memory: the bound.

    Raises:
        ConfigError: the directory is missing, cannot be written to, lies in memory itself, or its disk is full.
    """

    def __init__(self, directory: str, memory: int) -> None:
        _check(directory)
        self.memory = memory
        self._directory = directory
        self._bound = memory // PAGE
        self._files: list[weakref.ref[MappedFile]] = []
        self._left = 0  # pages
        self._lock = threading.Lock()  # guards the list of files
        self._paging = threading.Lock()  # held by who takes pages out
        self._hand = 0
        self._leaving: list[tuple[MappedFile, Int64s]] = []  # guarded by `_paging`, and so is the hand
        self._full = threading.Event()
        self._reader = ThreadPoolExecutor(1, "tier")  # to begin to read takes as long as the disk's queue is full
        self._thread: threading.Thread | None = None
        self._closed = False

    def map(self, room: int) -> MappedFile:
        """Returns a new file with room for so many bytes, of which none is reserved on the disk yet.

        Raises:
            OSError: there is no such address space, or no file.
        """
        file = MappedFile(self._directory, room)
        with self._lock:
            self._files = [*(ref for ref in self._files if ref() is not None), weakref.ref(file)]
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=_page_out, args=(weakref.ref(self), self._full), daemon=True)
                self._thread.start()
        return file

    def files(self) -> list[MappedFile]:
        """Returns the files that somebody uses."""
        return [file for file in (ref() for ref in self._files) if file is not None]

    @property
    def resident(self) -> int:
        """Bytes of the files that are in memory, as far as is known."""
        return PAGE * sum(file.resident for file in self.files())

    @property
    def nbytes(self) -> int:
        """Bytes that the files take on the disk."""
        return sum(file.reserved for file in self.files())

    @property
    def came(self) -> int:
        """Bytes that have come into memory so far, of the files that are in use, as far as is known."""
        return PAGE * sum(file.came for file in self.files())

    @property
    def left(self) -> int:
        """Bytes that were taken out of memory so far."""
        return PAGE * self._left

    @property
    def room(self) -> int:
        """Bytes of the whole disk: no file needs more address space."""
        found = os.statvfs(self._directory)
        return found.f_blocks * found.f_frsize

    def touch(self, file: MappedFile, pages: Int64s, use: Use, later: bool) -> None:
        """Pages of a file are about to be touched: begins to read those that are missing, and has others leave.

        It waits for that if there are far too many.

        Args:
            file, pages, use: see `MappedFile.touch`.
            later: True if there is time until then.
        """
        missing = file.touch(pages, use)
        if missing.size:
            if later:
                self._reader.submit(file.read, missing)
            else:
                file.read(missing)
            self._check()

    def _check(self) -> None:
        if self.resident // PAGE > self._bound:
            self._full.set()
        for _ in range(PATIENCE):
            if self.resident // PAGE <= HIGH * self._bound:
                return
            if not self.shrink():
                time.sleep(PAUSE)

    def settle(self) -> None:
        """Keeps the bound again after rows were written that nobody has told of; waits for the disk."""
        for file in self.files():
            for first in range(0, file.pages, WINDOW):
                file.look(first, WINDOW)
        while not self.shrink():
            time.sleep(PAUSE)

    def patrol(self) -> None:
        """Looks at some pages, for those that have come or gone unnoticed: the system may take any of them out."""
        with self._paging:
            for file, first, count in islice(self._windows(), PATROL):
                file.look(first, count)
        self._check()

    def shrink(self) -> bool:
        """Takes pages out of memory until the bound is kept; returns False if the disk has to write first.

        It may take a few calls: what was changed leaves once it is written.
        """
        with self._paging:
            again, self._leaving = self._leaving, []
            for file, pages in again:
                self._page_out(file, pages)
            surplus = self.resident // PAGE - sum(left.size for _, left in self._leaving) - int(LOW * self._bound)
            for file, first, count in self._windows() if surplus > 0 else ():
                cold = file.cool(first, count)
                self._page_out(file, cold)
                self._left += cold.size
                surplus -= cold.size
                if surplus <= 0:
                    break
            return not self._leaving

    def _page_out(self, file: MappedFile, pages: Int64s) -> None:
        left = file.page_out(pages) if pages.size else pages
        if left.size:
            self._leaving.append((file, left))

    def _windows(self) -> Iterator[tuple[MappedFile, int, int]]:
        """Yields what the hand passes, until each page has lost all its touches: a file, a page, and how many."""
        files = [(file, first) for file in self.files() for first in range(0, file.pages, WINDOW)]
        for _ in range((HOTTEST + 1) * len(files)):
            self._hand = (self._hand + 1) % len(files)
            file, first = files[self._hand]
            yield file, first, min(WINDOW, file.pages - first)

    def close(self) -> None:
        """Ends its thread; files go with the arrays in them."""
        with self._lock:
            self._closed, thread = True, self._thread
        self._full.set()
        self._reader.shutdown(cancel_futures=True)
        if thread is not None:
            thread.join()

    @property
    def closed(self) -> bool:
        """True once it is closed."""
        return self._closed


def _page_out(tier: weakref.ref[Tier], full: threading.Event) -> None:
    """Takes pages out of memory whenever there are too many, until the tier is closed or gone."""
    while True:
        full.wait(PATROL_SECONDS)
        found = tier()
        if found is None or found.closed:
            return
        if not full.is_set():
            found.patrol()
            continue
        full.clear()
        if not found.shrink():
            del found
            time.sleep(PAUSE)
            full.set()


def _check(directory: str) -> None:
    """Raises `ConfigError` unless files of a directory can hold rows."""
    if not os.path.isdir(directory):
        raise ConfigError(f"--tier-path {directory} is no directory; make it, on a fast local disk")
    kind = _file_system(directory)
    if kind in IN_MEMORY:
        raise ConfigError(
            f"--tier-path {directory} lies in memory itself ({kind}); name a directory on a disk, or leave it out"
        )
    try:
        file = MappedFile(directory, TRIAL)
        file.reserve(TRIAL)
    except DiskFull as error:
        raise ConfigError(f"--tier-path has no room: {error}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--tier-path {directory} takes no file that can be mapped ({error}); let this user write there, or name "
            "another directory"
        ) from error


def _file_system(directory: str) -> str:
    """Returns the kind of the file system that a directory lies in; "" if it is not known."""
    device = os.stat(directory).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    for words in map(str.split, lines):
        if words[2] == wanted and "-" in words:
            return words[words.index("-") + 1]
    return ""
