"""The line that a waiting loop logs from time to time, and for whom it waits."""

from __future__ import annotations

import time
from collections.abc import Callable


class Reminder:
    """Calls a function every so many seconds of a wait. Used by the thread that waits.

    Args:
        seconds: from the beginning to the first call, and from one call to the next.
        say: names whom the thread waits for.
    """

    def __init__(self, seconds: float, say: Callable[[], object]) -> None:
        self._seconds = seconds
        self._say = say
        self.begin()

    def begin(self) -> None:
        """The wait begins now, or begins again."""
        self._due = time.monotonic() + self._seconds

    def look(self) -> None:
        """Says it, if it is time to; called again and again."""
        if time.monotonic() >= self._due:
            self._say()
            self.begin()
