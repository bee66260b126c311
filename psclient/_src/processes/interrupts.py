"""SIGINT, which waits where something must not be left halfway: a round that is sent, a context that changes."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any


class Interrupts:
    """Holds SIGINT back in the main thread, which is the one that it interrupts.

    `with HELD:` holds it until the end of the block, where it is raised. Blocks may stand within each other. A second
    one, while the first is held, is raised at once, wherever that is.

    Handlers of others are respected: Jupyter sets one for each cell. Ours stands in front of the one that is there.
    """

    def __init__(self) -> None:
        self._main = threading.main_thread().ident
        self._depth = 0
        self._came = 0
        self._theirs: Any = None

    def __enter__(self) -> None:
        if threading.get_ident() == self._main:
            if not self._depth and signal.getsignal(signal.SIGINT) != self._handle:
                self._stand_in_front()
            self._depth += 1

    def __exit__(self, *error: object) -> None:
        if threading.get_ident() == self._main:
            self._depth -= 1
            if self._came and not self._depth:
                self._came = 0
                self._theirs(signal.SIGINT, None)

    def _stand_in_front(self) -> None:
        theirs = signal.getsignal(signal.SIGINT)
        if callable(theirs):  # else SIGINT ends the process, or is ignored
            self._theirs = theirs
            signal.signal(signal.SIGINT, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._came += 1
        if self._depth and self._came == 1:
            return
        self._came = 0
        self._theirs(number, frame)

    def _forget(self) -> None:
        """In a fork of the process: nothing that it holds is its own."""
        self._main, self._depth, self._came = threading.get_ident(), 0, 0


HELD = Interrupts()
"""Those of this process."""

os.register_at_fork(after_in_child=HELD._forget)
