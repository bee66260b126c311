"""Members that leave: one checkpoint for all who are told to end at about the same time; a chief that is told, too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pswire.limits import Timeouts
from pswire.model.log import GenerationClosed, LogEntry
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
            if isinstance(entry, GenerationClosed) and entry.generation.save == entry.generation.number:
                self._ordered = now


class StepDown:
    """For how long a chief that was told to end drives on: members that were told so with it can leave by it alone.

    A plain state machine, without a clock.

    Args:
        timeouts: members told at the same time say so within a heartbeat; the whole takes no longer than the grace
            period.

    Attributes:
        told: True once it was told.
        over: True once it may end.
    """

    def __init__(self, timeouts: Timeouts) -> None:
        self.told = self.over = False
        self._timeouts = timeouts
        self._began: float | None = None  # when this was seen
        self._left = 0.0  # when the last member that leaves was seen

    def tell(self) -> None:
        """It is to end soon: others drive on. Any thread may say so."""
        self.told = True

    def look(self, sessions: Sequence[SessionState], now: float) -> bool:
        """Returns whether it may end: it was told to, and nobody leaves, nor is about to.

        Args:
            sessions: of those who take part in rounds, as they are now.
            now: monotonic seconds.
        """
        if not self.told:
            return False
        if self._began is None:
            self._began = self._left = now
        here = [session for session in sessions if session.state == "open"]
        if any(session.pace.leaving for session in here):
            self._left = now
        late = now - self._began >= self._timeouts.termination_grace
        self.over = late or not here or now - self._left >= self._timeouts.heartbeat_interval
        return self.over
