"""For how long nobody has been there who would finish a job: when its chief gives it up."""

from __future__ import annotations

from collections.abc import Sequence, Set

from pswire.cluster import Task
from pswire.errors import Abandoned
from pswire.limits import Timeouts
from pswire.model.status import SessionState

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
