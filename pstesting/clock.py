"""Time that a test decides about."""

from __future__ import annotations


class Clock:
    """A clock that only a test advances. Any thread may read it.

    Attributes:
        now: the time in seconds.
    """

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        """Returns the seconds of the clock."""
        return self.now
