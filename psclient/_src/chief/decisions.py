"""A chief's decisions: plain functions of what the log says and of who is there. No I/O, and no clock."""

from __future__ import annotations

from collections.abc import Sequence, Set

from psclient._src.chief.generations import Beginning, next_generations
from psclient._src.chief.job_state import JobState
from pswire.api import Watched
from pswire.cluster import Task
from pswire.errors import ServerLost
from pswire.model.log import Approved, Done, LogEntry, Return, Snapshotted
from pswire.model.status import ServerStatus, SessionState, held_up

Decision = LogEntry | Beginning
"""An entry for the log, or one for which the servers have to be asked."""


def decide(
    state: JobState,
    watched: Watched,
    expected: Set[Task],
    hung: Set[int] = frozenset(),
    saved: Sequence[Snapshotted] = (),
    may_save: bool = True,
    back: Return | None = None,
) -> list[Decision]:
    """Decides what is appended to a job's log, in order; the last entry is `Done` where the job is done.

    Args:
        state: the job's state, as the log tells it.
        watched: server 0's answer to `watch`.
        expected: the tasks that begin the job together.
        hung: sessions that hold a round up, and are to go.
        saved: checkpoints that are complete, or failed, and of which the log does not tell yet.
        may_save: False if no checkpoint is ordered for members that leave.
        back: as `next_generations` takes it.
    """
    decided: list[Decision] = [Approved(plan) for plan in watched.plans if plan.id not in state.approved]
    decided += saved
    decided += next_generations(state, watched.sessions, expected, hung, may_save, back)
    return [*decided, Done()] if is_done(state, watched.sessions, expected) else decided


def undone(sessions: Sequence[SessionState], expected: Set[Task]) -> dict[Task, str]:
    """The tasks that have not done their part, and what is known of each."""
    states = dict.fromkeys(expected, "never connected") | {s.member.task: s.state for s in sessions}
    return {task: "still connected" if state == "open" else state for task, state in states.items() if state != "left"}


def cut_off(statuses: Sequence[ServerStatus], limit: float) -> ServerLost | None:
    """Returns the error of two servers that cannot vote on their rounds since they do not reach one another.

    Args:
        statuses: the latest answers of all servers.
        limit: for how many seconds this is waited for.
    """
    longest = max(held_up(statuses), key=lambda each: each[1].seconds, default=None)
    if longest is None or longest[1].seconds <= limit:
        return None
    server, missed = longest
    one, other = Task("ps", server), Task("ps", missed.server)
    return ServerLost(
        f"{one} has not reached {other} for {missed.seconds:.0f} s ({missed.reason}), so the servers cannot "
        "agree on their rounds; allow connections between the servers, then restart from a checkpoint",
        str(max(one, other)),
    )


def is_done(state: JobState, sessions: Sequence[SessionState], expected: Set[Task]) -> bool:
    """Returns whether the tasks of the last generation that had members have left cleanly, and nobody else is here.

    A member may be gone, and another process of its task, which no generation took in any more, may have left for it.
    """
    if any(s.state == "open" for s in sessions) or not expected <= {s.member.task for s in sessions}:
        return False
    # Sessions are numbered in order, so that the newest one of a task stays.
    left = {s.member.task: s.member.session for s in sessions if s.state == "left"}
    last = next(
        (e.members for _, e in sorted(state.generations.items(), reverse=True) if e.members),
        tuple(s.member for s in sessions),
    )
    return all(left.get(member.task, -1) >= member.session for member in last)
