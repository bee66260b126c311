"""Checkpoints that members ask for before they leave: one for all who are told to end at about the same time."""

from __future__ import annotations

from collections.abc import Iterable

from pswire.model.log import EpochClosed, LogEntry


class LeaveSaves:
    """When the last such checkpoint was ordered. A plain state machine, without a clock.

    Args:
        lease: seconds after an order in which none follows.
    """

    def __init__(self, lease: float) -> None:
        self._lease = lease
        self._ordered = -float("inf")

    def may(self, now: float) -> bool:
        """Returns whether one may be ordered, at a time in monotonic seconds."""
        return now - self._ordered > self._lease

    def decided(self, entries: Iterable[LogEntry], now: float) -> None:
        """Told what was appended to the log."""
        for entry in entries:
            if isinstance(entry, EpochClosed) and entry.epoch.save == entry.epoch.number:
                self._ordered = now
