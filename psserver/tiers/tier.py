"""The files of a server's dynamic tables, and the bound of their pages in memory.

Updates are counted for each page, also where it is on the disk alone, and all counts are halved now and then: the pages
that were updated least often lately leave first (as TinyLFU does, Einziger, Friedman and Manes 2017). A page that was
looked up stays until its update, which comes with the next round. Pages leave in a thread of their own: rounds wait for
it only if they touch new pages faster than the disk takes old ones.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import cycle, islice
from pathlib import Path

import numpy as np

from psserver.tiers.mapped import MOST, DiskFull, MappedFile, Use
from psserver.tiers.paging import PAGE
from pswire.errors import ConfigError
from pswire.model.rows import Int64s
from pswire.sizes import human

log = logging.getLogger("psserver")

TRIAL = 16 << 20
"""Bytes that a disk must have room for at the beginning."""

WINDOW = 1 << 14
"""Pages that are looked at at a time."""

MEMORY_OF_COUNTS = 16
"""Counts are halved after this many updates of a page for each page that may be in memory."""

IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs")
"""File systems whose files are memory."""

HINTED = 1 / 2
"""Share of the bound that pages may take that are kept for lookups, up to which hints are followed."""

LOW, HIGH = 15 / 16, 9 / 8
"""Shares of the bound down to which pages leave, and at which a round waits for that."""

PATROL, PATROL_SECONDS = 16, 1.0
"""Windows that are looked at for pages that nobody has told of, and how often, where nothing else is to be done."""

REST, MOST_UNREST = 0.003, 0.03
"""Seconds without a round that touches pages, after which hints are followed, and for how long they wait for that."""

WATCHED, FEWEST_WATCHED = 4, 1 << 12
"""The hit rate is taken of so many pages that rounds need for each that may stay in memory; and of so many at least."""

THRASHES = 0.5
"""It is told if the hit rate is below this."""

PAUSE = 0.005
"""Seconds to wait where the disk is still writing all that could leave."""

PATIENCE = 200
"""Most pauses of whoever waits for pages to leave; a disk that takes longer does not stop it for good."""


class Tier:
    """The tier of a server's dynamic tables below memory. For any thread.

    Args:
        directory: where its files lie.
        memory: bytes of them that may stay in memory.

    Attributes:
        memory: the bound.
        hit_rate: of the pages that rounds needed lately, each as often as it was needed, the share that was in memory,
            or is new.

    Raises:
        ConfigError: the directory is missing, cannot be written to, lies in memory itself, or its disk is full.
    """

    def __init__(self, directory: str, memory: int) -> None:
        _check(directory)
        self.memory = memory
        self._directory = directory
        self._bound = memory // PAGE
        self._files: list[weakref.ref[MappedFile]] = []
        self.hit_rate = 1.0
        self._used = self._back = 0  # pages that rounds needed since the hit rate was taken, and that had left memory
        self._told = False
        self._came = self._left = self._hinted = self._hit = self._waited = 0  # pages
        self._lock = threading.Lock()  # guards the list of files, what has come, and the hints
        self._paging = threading.Lock()  # held by who takes pages out
        self._hand = self._turn = self._updates = 0
        self._leaving: list[tuple[MappedFile, Int64s]] = []  # guarded by `_paging`, and so are the hand and the turn
        self._full = threading.Event()
        self._reader = ThreadPoolExecutor(1, "tier")  # reads ahead, while others compute
        self._asked: Future[None] = self._reader.submit(_nothing)
        self._hints = ThreadPoolExecutor(1, "tier-hints")  # reads what is hinted at, which nobody waits for
        self._touched = 0.0  # when a round did so last
        self._untaken = 0  # pages of hints that nothing was read of yet
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
                self._thread = threading.Thread(
                    target=_page_out, args=(weakref.ref(self), self._full), daemon=True, name="tier"
                )
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
        """Bytes that have come into memory so far, as far as is known; new rows count."""
        return PAGE * self._came

    @property
    def left(self) -> int:
        """Bytes that were taken out of memory so far."""
        return PAGE * self._left

    @property
    def outcomes(self) -> dict[str, int]:
        """Returns numbers of pages so far.

        hinted: brought into memory by hints; hit: looked up of those; waited: missing when a round needed them, new
        ones included.
        """
        return {"hinted": self._hinted, "hit": self._hit, "waited": self._waited}

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
        self._touched = time.monotonic()
        missing, hits, used, back = file.touch(pages, use)
        self._hit += hits
        self._watch(used, back)
        if use is Use.UPDATE:
            self._updates += pages.size
            if self._updates > MEMORY_OF_COUNTS * self._bound:
                self._updates = 0
                for each in self.files():
                    each.age()
        if missing.size:
            with self._lock:
                self._came += missing.size
                self._waited += missing.size * (use is not Use.PASS)
            if later and not self._closed:
                self._asked = self._reader.submit(file.read_and_map, missing)
            else:
                file.read(missing)
            self._check()
        if not later:
            wait([self._asked])  # to fault pages in one by one takes longer than all together

    def _watch(self, used: int, back: int) -> None:
        """Takes the hit rate now and then; says once that rounds need more pages than there is memory for."""
        self._used += used
        self._back += back
        if self._used < max(WATCHED * self._bound, FEWEST_WATCHED):
            return
        self.hit_rate, back, used = 1 - self._back / self._used, self._back, self._used
        self._used = self._back = 0
        if self.hit_rate < THRASHES and not self._told:
            self._told = True
            log.warning(
                "rows of dynamic tables are read from disk too often: %d of the last %d pages were read again from "
                "%s. Rounds need more memory than --tier-memory, %s; raise it, or add servers (metric "
                "paramserver_server_tier_hit_ratio)",
                *(back, used, self._directory, human(self.memory)),
            )

    def hint(self, file: MappedFile, pages: Int64s) -> None:
        """Pages of a file are going to be looked up: a thread reads them, and keeps them until then, if there is room.

        Nobody waits for it. What rounds look up first stays: a hint has what room they leave in a share of the bound.

        Args:
            file, pages: see `MappedFile.touch`.
        """
        with self._lock:
            if self._closed or self._untaken > HINTED * self._bound:
                return  # the disk is slower than the rounds: this would come too late
            self._untaken += pages.size
            self._hints.submit(self._take_hint, file, pages)

    def _take_hint(self, file: MappedFile, pages: Int64s) -> None:
        self._wait_for_rest()
        self._wait_for_room(1.0)  # here, so that no round has to
        wanted, resident = sum(each.wanted for each in self.files()), self.resident // PAGE
        room = int(min(HINTED * self._bound - wanted, HIGH * self._bound - resident))  # above which a round waits
        came = file.take_hint(pages, room).size
        with self._lock:
            self._untaken -= pages.size
            self._came += came
            self._hinted += came
        if self.resident // PAGE > self._bound:
            self._full.set()

    def _wait_for_rest(self) -> None:
        """Waits until the round is over in which a hint came, which would take processors and the disk from it."""
        began = time.monotonic()
        while (left := min(self._touched + REST, began + MOST_UNREST) - time.monotonic()) > 0:
            time.sleep(left)

    def _check(self) -> None:
        if self.resident // PAGE > self._bound:
            self._full.set()
        self._wait_for_room(HIGH)

    def _wait_for_room(self, share: float) -> None:
        """Takes pages out of memory until at most a share of the bound is there; it gives up after a while."""
        for _ in range(PATIENCE):
            if self.resident // PAGE <= share * self._bound:
                return
            if not self.shrink():
                time.sleep(PAUSE)

    def settle(self) -> None:
        """Keeps the bound again after rows were written that nobody has told of; waits for the disk."""
        for file in self.files():
            for first in range(0, file.pages, WINDOW):
                file.look(first, WINDOW)
        for _ in range(PATIENCE):
            if self.shrink():
                return
            time.sleep(PAUSE)

    def patrol(self) -> None:
        """Looks at some pages, for those that have come or gone unnoticed: the system may take any of them out."""
        with self._paging:
            windows = [(file, first) for file in self.files() for first in range(0, file.pages, WINDOW)]
            for file, first in islice(cycle(windows), self._hand, self._hand + min(PATROL, len(windows))):
                file.look(first, WINDOW)
            self._hand = (self._hand + PATROL) % max(len(windows), 1)
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
            for file, pages in self._coldest(surplus) if surplus > 0 else ():
                surplus -= pages.size
                self._left += pages.size
                self._page_out(file, pages)
            if surplus > 0:  # all others were looked up: more than there is memory for
                for file in self.files():
                    file.age()
            return surplus <= 0 and not self._leaving

    def _coldest(self, count: int) -> list[tuple[MappedFile, Int64s]]:
        """Returns pages of each file, those that were updated least often lately; fewer where others may not leave."""
        found = [(file, *file.leaves()) for file in self.files()]
        numbers = sum((np.bincount(counts, minlength=MOST + 1) for *_, counts in found), np.zeros(MOST + 1, np.int64))
        limit = int(np.searchsorted(np.cumsum(numbers), count))  # those below it leave, and some that have it
        some = count - int(numbers[:limit].sum())
        chosen = []
        for file, pages, counts in found:
            equal = np.flatnonzero(counts == limit)
            equal = np.roll(equal, self._turn % max(equal.size, 1))[:some]
            some -= equal.size
            chosen.append((file, pages[np.union1d(np.flatnonzero(counts < limit), equal)]))
        self._turn += count
        return chosen

    def _page_out(self, file: MappedFile, pages: Int64s) -> None:
        left = file.page_out(pages) if pages.size else pages
        if left.size:
            self._leaving.append((file, left))

    def close(self) -> None:
        """Ends its thread; files go with the arrays in them."""
        with self._lock:
            self._closed, thread = True, self._thread
        self._full.set()
        self._hints.shutdown(cancel_futures=True)
        self._reader.shutdown()
        if thread is not None:
            thread.join()

    @property
    def closed(self) -> bool:
        """True once it is closed."""
        return self._closed


def _nothing() -> None:
    """Is over before anything was asked for."""


def _page_out(tier: weakref.ref[Tier], full: threading.Event) -> None:
    """Takes pages out of memory whenever there are too many, until the tier is closed or gone."""
    while _has_looked(tier, full):
        full.wait(PATROL_SECONDS)


def _has_looked(tier: weakref.ref[Tier], full: threading.Event) -> bool:
    """Does what is to be done now; returns False if the tier is closed or gone, which a thread that waits keeps not."""
    found = tier()
    if found is None or found.closed:
        return False
    if not full.is_set():
        found.patrol()
        return True
    full.clear()
    if not found.shrink():
        time.sleep(PAUSE)
        full.set()
    return True


def _check(directory: str) -> None:
    """Raises `ConfigError` unless files of a directory can hold rows."""
    if not os.path.isdir(directory):
        raise ConfigError(f"--tier-path {directory} is not a directory; create it on a fast local disk")
    kind = _file_system(directory)
    if kind in IN_MEMORY:
        raise ConfigError(f"--tier-path {directory} is in memory ({kind}); name a directory on a disk, or leave it out")
    try:
        file = MappedFile(directory, TRIAL)
        file.reserve(TRIAL)
    except DiskFull as error:
        raise ConfigError(f"--tier-path has no space: {error}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--tier-path {directory} cannot hold memory-mapped files ({error}); check its permissions, or name "
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
