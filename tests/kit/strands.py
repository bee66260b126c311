"""Threads of which one runs at a time: so a test decides who goes on, and code that blocks can be interleaved."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable

SECONDS = 20.0
"""How long a strand may go on without a pause; it does so for a few milliseconds."""


class Crashed(BaseException):
    """The strand was killed where it stood. No error that the code may catch."""


class Strand:
    """Some work in a thread of its own, which stands still but within `resume`.

    Args:
        work: what it does; it calls `pause` wherever something else may happen.

    Attributes:
        over: whether the work has ended, or was killed.
    """

    def __init__(self, work: Callable[[], object]) -> None:
        self.over = False
        self._work = work
        self._killed = False
        self._error: BaseException | None = None
        self._turn, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def resume(self, times: int = 1) -> None:
        """Lets it go on until it pauses; raises what it raised."""
        for _ in range(times):
            if self.over:
                return
            self._turn.release()
            if not self._done.acquire(timeout=SECONDS):
                self.over = True  # it is lost, and must not hold up the end of the test
                raise AssertionError(f"a strand blocks:\n{self._where()}")
            if self._error:
                raise self._error

    def kill(self) -> None:
        """Ends it where it stands: nothing that it does on its way out has an effect if it pauses first."""
        self._killed = True
        if not self.over:
            self._turn.release()
            self._thread.join(SECONDS)
            self.over = True

    def _where(self) -> str:
        """Where it stands."""
        return "".join(traceback.format_stack(sys._current_frames()[self._thread.ident or 0]))

    def pause(self) -> None:
        """Within the work: something else may happen now. Of another thread's calls it knows nothing."""
        if threading.current_thread() is not self._thread:
            return
        if self._killed:
            raise Crashed
        self._done.release()
        self._turn.acquire()
        if self._killed:
            raise Crashed

    def _run(self) -> None:
        self._turn.acquire()
        try:
            if not self._killed:
                self._work()
        except Crashed:
            return
        except BaseException as error:  # raised where the test is
            self._error = error
        self.over = True
        self._done.release()
