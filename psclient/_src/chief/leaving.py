"""Members that leave: one checkpoint for all who are told to end at about the same time; a chief that is told with them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pswire.limits import Timeouts
from pswire.model.log import EpochClosed, LogEntry
from pswire.model.status import SessionState


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


class StepDown:
    """For how long a chief that was told to end drives on: members that were told so with it can leave by it alone.

    A plain state machine, without a clock.

    Args:
        timeouts: members told at the same time say so within a beat; the whole takes no longer than the grace period.
    """

    def __init__(self, timeouts: Timeouts) -> None:
        self._timeouts = timeouts
        self._told: float | None = None
        self._left = 0.0  # when the last of them was seen

    def may(self, sessions: Sequence[SessionState], now: float) -> bool:
        """Returns whether it may end: nobody leaves, nor is about to. Called once it was told, and then for each look.

        Args:
            sessions: of those who take part in rounds, as they are now.
            now: monotonic seconds.
        """
        if self._told is None:
            self._told = self._left = now
        here = [session for session in sessions if session.state == "open"]
        if any(session.pace.leaving for session in here):
            self._left = now
        late = now - self._told >= self._timeouts.grace
        return late or not here or now - self._left >= self._timeouts.beat
