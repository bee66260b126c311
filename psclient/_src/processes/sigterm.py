"""SIGTERM: a worker that gets it finishes its step, and leaves its job where the next one begins, with exit code 0.

A chief drives on while workers leave that were told as well.

The handler only notes the signal. The thread that comes to the beginning of a step looks at the note, and ends the
process there by `Leaving`. A second signal ends the process at once, as one does where nothing is to be left; so does
the end of the grace period. A process that still closes some seconds later is ended without that. A third signal kills.
The launcher of a local cluster, which ends all of it, sends SIGHUP: it is as SIGTERM, and nothing is left before.
"""

from __future__ import annotations

import _thread
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

log = logging.getLogger("psclient")

LAST_SECONDS = 3.0
"""Seconds that a process may take to close after its grace period: less than what schedulers give beyond that."""


LEAVES = "leaves the job when its next step begins"
"""What a worker does at SIGTERM."""


class Leaving(SystemExit):
    """Ends a process that was told to end, where it leaves its job. The exit code is 0: nothing has failed."""

    def __init__(self) -> None:
        super().__init__(0)


class Notice:
    """What SIGTERM has told this process. Any thread may look at it.

    Attributes:
        saves: True if a checkpoint is to be saved before this process leaves.
    """

    def __init__(self) -> None:
        self.saves = False
        self._asked_at: float | None = None
        self._grace = 0.0
        self._does = LEAVES
        self._parts: list[Callable[[], object]] = []
        self._process = 0
        self._anywhere = False  # the main thread is where nothing is to be finished
        self._left = False
        self._ordinary = False
        self._installed = False
        self._at_once = False
        self._held = threading.local()  # the signals that the forking thread held before

    @property
    def leaving(self) -> bool:
        """True once this process was told to end, and leaves at the beginning of a step."""
        return self._asked_at is not None

    @property
    def late(self) -> bool:
        """True once half of the grace period is over: then it leaves, whether the others have taken that in or not."""
        return self._asked_at is not None and time.monotonic() > self._asked_at + self._grace / 2

    def take_part(self, told: Callable[[], object], grace: float, saves: bool, does: str = LEAVES) -> None:
        """This process has a part in a job, and leaves it before it ends.

        Under `python SCRIPT` the handler is set, unless the script has one of its own, or this is not the main thread.

        Args:
            told: called in a thread of its own when SIGTERM comes.
            grace: seconds from then on after which the process ends, wherever it is.
            saves: True if a checkpoint is to be saved before.
            does: what this process does then, for the log.
        """
        self._parts.append(told)
        self._does = does
        self._process, self._grace, self.saves = os.getpid(), grace, saves
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._handle)
            self._installed = True

    def has_left(self, told: Callable[[], object]) -> None:
        """This process has no part in that job any more."""
        if told in self._parts:
            self._parts.remove(told)
        in_main = threading.current_thread() is threading.main_thread()
        if self._installed and in_main and not (self._parts or self.leaving):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._installed = False

    def install(self, launched: bool = False) -> None:
        """Sets the handler. Where this process has no part in a job, SIGTERM is an ordinary exit with code 143.

        Args:
            launched: True if the launcher of a local cluster has started this process.
        """
        self._ordinary, self._process = True, os.getpid()
        signal.signal(signal.SIGTERM, self._handle)
        if launched:
            signal.signal(signal.SIGHUP, self._hang_up)

    def _hang_up(self, number: int, frame: FrameType | None) -> None:
        self._at_once = True
        os.kill(os.getpid(), signal.SIGTERM)  # by what handles it now, which may be the script's own

    def leave(self) -> None:
        """Ends this process, in the thread that has come to the beginning of a step; raises `Leaving`."""
        if threading.current_thread() is not threading.main_thread():
            self._left = True
            os.kill(os.getpid(), signal.SIGTERM)  # the end of another thread would not end the process
        raise Leaving

    @contextmanager
    def anywhere(self) -> Iterator[None]:
        """Within, the main thread waits, and nothing is to be finished: it leaves as soon as it is told to.

        Raises:
            Leaving: it was told to before.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._anywhere = True
        try:
            if self.leaving:
                self.leave()
            yield
        finally:
            self._anywhere = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            # A fork, whose script has a handler of its own that calls this one.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if self._left:
            raise Leaving
        if self._parts and self._asked_at is None and not self._at_once:
            self._asked_at = time.monotonic()
            # Nothing here may wait for a lock, which the interrupted code may hold.
            _thread.start_new_thread(self._count_down, ())
            if self._anywhere:
                raise Leaving
            return
        signal.signal(number, signal.SIG_DFL)
        if self._ordinary or self.leaving:
            raise SystemExit(128 + number)
        os.kill(os.getpid(), number)

    def _hold(self) -> None:
        """Holds signals back before a fork, which would lose those that come before its first line."""
        self._held.before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGHUP))

    def _release(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._held.before)

    def _forget(self) -> None:
        """In a fork of the process, which has no part in the job: signals end it where it is, as they do by default.

        The fork may be in code where no handler of Python's is ever called.
        """
        for number, own in ((signal.SIGTERM, self._handle), (signal.SIGHUP, self._hang_up)):
            if signal.getsignal(number) == own:
                signal.signal(number, signal.SIG_DFL)
        self._release()

    def _count_down(self) -> None:
        log.warning(
            "received SIGTERM: %s, within %g s; a second signal ends the process immediately",
            self._does,
            self._grace,
        )
        for told in [*self._parts]:
            try:
                told()
            except Exception:
                log.exception("other parts of this process could not be notified of SIGTERM")
        time.sleep(self._grace)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(LAST_SECONDS)
        # It still closes, since it waits for servers that are gone as well, or for another thread of the script.
        os._exit(128 + signal.SIGTERM)


NOTICE = Notice()
"""The notice of this process."""

os.register_at_fork(before=NOTICE._hold, after_in_parent=NOTICE._release, after_in_child=NOTICE._forget)
