"""The round that holds a job up, for how long, and the members that it waits for: the chief's view of the servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pswire.cluster import Task
from pswire.model.status import ServerStatus


@dataclass(frozen=True)
class Stall:
    """A round that is waited for.

    Attributes:
        round: number of the round: the oldest that is open on any server.
        seconds: how long it has been waited for, as far as that counts.
        missing: the members that have not pushed, in task order; none where it waits for something else.
    """

    round: int
    seconds: float
    missing: tuple[Task, ...]


class Stalls:
    """Counts for how long the oldest open round has been waited for. A plain state machine, without a clock.

    It counts from the look that first shows the round. What passes between two looks that are far apart does not count,
    since a server, or the chief itself, stood still or was cut off; nor does the lease after that, in which all come
    back.

    Args:
        lease: of the sessions, in seconds.
        period: between two looks, in seconds.
    """

    def __init__(self, lease: float, period: float) -> None:
        self._lease = lease
        self._longest = period + lease / 2
        self._looked: float | None = None
        self._grace = 0.0
        self._round = -1
        self._seconds = 0.0

    def look(self, statuses: Sequence[ServerStatus], now: float) -> Stall | None:
        """Returns the round that is waited for; None where none is open.

        Args:
            statuses: the latest answers of all servers.
            now: the time, in monotonic seconds.
        """
        counted = self._counted(now)
        rounds = [waiting for status in statuses for waiting in status.waiting]
        oldest = min((waiting.round for waiting in rounds), default=-1)
        self._seconds = self._seconds + counted if oldest == self._round else 0.0
        self._round = oldest
        if oldest < 0:
            return None
        missing = {task for waiting in rounds if waiting.round == oldest for task in waiting.missing}
        return Stall(oldest, self._seconds, tuple(sorted(missing)))

    def _counted(self, now: float) -> float:
        """Returns how much of the time since the last look counts."""
        passed = now - self._looked if self._looked is not None else 0.0
        self._looked = now
        if passed > self._longest:
            self._grace = self._lease
            return 0.0
        grace = min(self._grace, passed)
        self._grace -= grace
        return passed - grace
