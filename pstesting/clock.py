"""Time that a test decides about."""

from __future__ import annotations


class Clock:
    """A clock that only a test turns. May be read by any thread.

    Attributes:
        now: in seconds.
    """

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        """Returns the seconds of the clock."""
        return self.now
