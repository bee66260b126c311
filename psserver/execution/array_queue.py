"""The array work of a server: one piece after another, whichever thread runs it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

from psserver.effects import Submit


class ArrayQueue:
    """Runs array work, one piece after another. May be used by any thread.

    A brief piece runs in the thread that asks for it where nothing is ahead of it: to hand it to another thread and
    to wait for the processor there takes longer than the work. Nothing ever waits here: what is asked for while such a
    piece runs goes to the thread for arrays after it.

    Args:
        submit: puts work into the queue of the thread for arrays.
    """

    def __init__(self, submit: Submit) -> None:
        self._submit = submit
        self._lock = threading.Lock()  # guards all below
        self._ahead = 0  # pieces that were handed to the thread and are not over
        self._here = False  # a piece runs in the thread that asked for it
        self._later: list[Callable[[], object]] = []  # what was asked for meanwhile

    def run(self, piece: Callable[[], object], brief: bool) -> None:
        """Runs a piece of work: at once if it is brief and nothing else is under way, else in the thread for arrays."""
        with self._lock:
            if self._here:
                self._later.append(piece)
                return
            here = self._here = brief and not self._ahead
            self._ahead += not here
        if not here:
            self._submit(partial(self._run, piece))
            return
        try:
            piece()
        finally:
            with self._lock:
                self._here = False
                later, self._later = self._later, []
                self._ahead += len(later)
            for each in later:
                self._submit(partial(self._run, each))

    def _run(self, piece: Callable[[], object]) -> None:
        try:
            piece()
        finally:
            with self._lock:
                self._ahead -= 1
