"""What a chief counts seconds of: plain state machines, without a clock.

A job without live workers is given up, the oldest round is waited for, members that leave get a checkpoint, and a chief
that is told to end steps down.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

from pswire.cluster import Task
from pswire.errors import Abandoned
from pswire.limits import Timeouts
from pswire.model.log import GenerationClosed, LogEntry
from pswire.model.status import ServerStatus, SessionState

STEP = 2.0
"""Seconds between two looks that count at most: while the chief itself stood still it saw nobody."""


SILENT = {"open": "is silent"}
"""The word for an open session whose process sends no heartbeats."""


def is_here(session: SessionState, lease: float) -> bool:
    """Returns whether a session's process is heard. While server 0 hears nobody it ends nobody's session."""
    return session.state == "open" and session.silent <= lease


class AbandonmentTimer:
    """A chief's view of who is there. A plain state machine, without a clock.

    Args:
        expected: the tasks that begin the job together.
        timeouts: `no_workers_timeout` counts once all of these have connected, before that `first_worker_timeout`, if
            it is longer.
    """

    def __init__(self, expected: Set[Task], timeouts: Timeouts) -> None:
        self._expected = expected
        self._timeouts = timeouts
        self._looked: float | None = None
        self._silent = 0.0

    def look(self, sessions: Sequence[SessionState], now: float) -> Abandoned | None:
        """Returns why the job is given up, if for too long no look has shown an open session.

        Args:
            sessions: of those who take part in rounds, as they are now, in the order in which they were opened.
            now: monotonic seconds.
        """
        self._silent += min(now - self._looked, STEP) if self._looked is not None else 0.0
        self._looked = now
        ends = {session.member.task: session.state for session in sessions}
        if any(is_here(session, self._timeouts.session_timeout) for session in sessions):
            self._silent = 0.0
        limit, name = self._timeouts.no_workers_timeout, "PS_NO_WORKERS_TIMEOUT"
        if not self._expected <= ends.keys() and self._timeouts.first_worker_timeout > limit:
            limit, name = self._timeouts.first_worker_timeout, "PS_FIRST_WORKER_TIMEOUT"
        if self._silent < limit:
            return None
        ends = dict.fromkeys(self._expected, "never connected") | {
            t: SILENT.get(state, state) for t, state in ends.items()
        }
        told = ", ".join(f"{task} {ends[task]}" for task in sorted(ends))
        return Abandoned(
            f"no worker was connected for {self._silent:.0f} s ({name}): {told}. The job has ended; the "
            "workers' logs contain the cause. Restart the job to continue from a checkpoint"
        )


@dataclass(frozen=True)
class Stall:
    """A round that is waited for.

    Attributes:
        round: number of the round: the oldest that is open on any server.
        seconds: how long it has been waited for, as far as that counts.
        missing: the members that have not pushed, in task order; none where it waits for something else.
        expected: True if all of them compute, not much longer than they did in earlier rounds.
    """

    round: int
    seconds: float
    missing: tuple[Task, ...]
    expected: bool = False


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
        found = [waiting for waiting in rounds if waiting.round == oldest]
        missing = {task for waiting in found for task in waiting.missing}
        computing = {task for waiting in found for task in waiting.computing}
        return Stall(oldest, self._seconds, tuple(sorted(missing)), bool(missing) and missing <= computing)

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
