"""A chief's decisions: plain functions of what the log says and of who is there. No I/O, and no clock.

The next generation: members that joined, members that are gone, and where new members begin. Approvals, and the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace

from psclient._src.chief.job_log import JobState
from pswire.api import Watched
from pswire.cluster import Task
from pswire.errors import ServerLost
from pswire.model.changes import Change
from pswire.model.log import (
    STEP,
    Approved,
    Done,
    Generation,
    GenerationClosed,
    LogEntry,
    Member,
    Position,
    Return,
    Snapshotted,
    Start,
)
from pswire.model.status import ServerStatus, SessionState, held_up

WAYS = {"lost": "is lost", "failed": "has failed", "hung": "has held up a round for longer than PS_ROUND_TIMEOUT"}
"""How a member may go that did not leave, in words."""


@dataclass(frozen=True)
class Beginning:
    """A generation whose new members begin where the servers stand; these have to be asked first.

    Attributes:
        number: the generation's number.
        members: the generation's members, in task order.
        task: the asynchronous worker that is new, and goes on where its task was; None where all members begin
            together.
        since: place from which the job's last change of consistency holds: nobody begins before it. None for no change.
        change: the change of consistency with which the generation begins; None for none. `members` are as they were
            before.
    """

    number: int
    members: tuple[Member, ...]
    task: Task | None = None
    since: Start | None = None
    change: Change | None = None

    def closed(self, statuses: Sequence[ServerStatus]) -> GenerationClosed:
        """The generation, now that all servers have said where they stand."""
        if self.change is not None:
            return self._changed(statuses, self.change)
        start = self._together(statuses) if self.task is None else self._alone(statuses)
        return GenerationClosed(Generation(self.number, self.members, start=start))

    def _together(self, statuses: Sequence[ServerStatus]) -> Start:
        """Members begin after the last round that any server knows."""
        round = -1
        positions: tuple[Position, ...] = ()
        for status in statuses:
            newest = max([status.round, *(waiting.round for waiting in status.waiting)])
            if newest > round:
                round, positions = newest, status.positions
        return Start(self.number, round + 1, positions)

    def _alone(self, statuses: Sequence[ServerStatus]) -> Start:
        """An asynchronous worker goes on after the last push of its task that reached any server."""
        places = [place for status in statuses for place in status.places if place.task == self.task]
        last = max(places, key=lambda place: place.round, default=None)
        found = Start(self.number, last.round + 1, last.positions) if last else Start(self.number, 0)
        since = self.since
        return found if since is None or found.round >= since.round else replace(since, generation=self.number)

    def _changed(self, statuses: Sequence[ServerStatus], change: Change) -> GenerationClosed:
        """All members go on with one round, after all that any of them, or any server, knows."""
        places = [place for status in statuses for place in status.places]
        waiting = [open.round for status in statuses for open in status.waiting]
        alone = any(member.alone for member in self.members)
        counted = [] if alone else [status.round for status in statuses]  # of rounds of their own it is the number
        round = max(change.round, *(number + 1 for number in (*counted, *waiting, *(p.round for p in places))), 0)
        positions = self._together(statuses).positions
        if alone:
            positions = max(places, key=lambda place: place.round).positions if places else ()
        start, here = Start(self.number, round, positions), str(replace(change, round=round))
        return GenerationClosed(Generation(self.number, tuple(map(change.moved, self.members)), here, start))


def came(sessions: Sequence[SessionState]) -> set[Task]:
    """The tasks that are here, or have done their part."""
    return {session.member.task for session in sessions if session.state in ("open", "left")}


def next_generations(
    state: JobState,
    sessions: Sequence[SessionState],
    expected: Set[Task],
    hung: Set[int],
    may_save: bool = True,
    back: Return | None = None,
) -> Sequence[GenerationClosed | Beginning]:
    """Returns who takes part from now on; nothing if that does not change.

    Args:
        state: the job's state, as the log tells it.
        sessions: all sessions.
        expected: the tasks that begin the job together.
        hung: sessions that hold a round up, and are to go.
        may_save: False if who leaves is not to have a checkpoint saved, since one was a moment ago.
        back: a server that may be readmitted; where that has begun, how it stands; None where it does not come back.
    """
    here = {s.member.session: _as_all(s, state) for s in sessions if s.state == "open" and s.member.session not in hung}
    members = [s.member for s in here.values()]
    current = state.generation
    if current is None:
        return [Beginning(1, _ordered(members))] if here and expected <= came(sessions) else []
    left = {s.member.session for s in sessions if s.state == "left"}
    change = _change(state, current, here, left)
    if change is not None:
        return [change]
    if any(member.alone for member in members):
        return _alone(current, members, state.changed)
    if current.awaited is not None:
        return _with(current, members, back)
    generations = _together(current, here, left, state.started, may_save)
    if generations or back is None or not _can_wait(current, here, state.started):
        return generations
    begun = Generation(current.number + 1, current.members, STEP, save=current.save, returns=back)
    return [GenerationClosed(begun)]


def _with(current: Generation, here: Sequence[Member], back: Return | None) -> Sequence[GenerationClosed]:
    """While a server is readmitted nobody is let in or go, and who is gone is fenced; then all go on."""
    stay = [member for member in current.members if member in here]
    dead = len(stay) < len(current.members)
    if not dead and back is not None and not back.ready:
        return []
    if not stay:
        return [_closed(current, stay)]
    # Where it is not over yet, members that have not come to the step yet find this one there.
    return [GenerationClosed(Generation(current.number + 1, _ordered(stay), STEP, save=current.save, returns=back))]


def _can_wait(current: Generation, here: Mapping[int, SessionState], started: Set[int]) -> bool:
    """Returns whether members may be asked to wait for a server: nobody is on the way in or out."""
    if not current.members or any(member.session in here for member in current.leaving):
        return False
    return all(member.session in started for member in current.members)


def _as_all(session: SessionState, state: JobState) -> SessionState:
    """Returns a session whose member makes its rounds as the job does by now: it may have been told of before."""
    return (
        session
        if state.model is None
        else replace(session, member=replace(session.member, consistency=state.model.consistency))
    )


def _change(state: JobState, current: Generation, here: Mapping[int, SessionState], left: Set[int]) -> Beginning | None:
    """Returns the generation of another consistency, once all members have come to the place and ask for it.

    Lost members are fenced before. A process that waits to be taken in makes no rounds: it is not waited for, and goes
    on waiting.
    """
    everybody = [*current.members, *(member for member in current.leaving if member.session not in left)]
    if any(member.session not in here for member in everybody):
        return None
    members = [member for member in everybody if member.session in state.started]
    asked = [Change.parse(here[member.session].join_point) for member in members]
    changes = [change for change in asked if change is not None and change.number == state.changes]
    if not changes or len(changes) < len(members) or not all(map(changes[0].same, changes)):
        return None
    change = replace(changes[0], round=max(change.round for change in changes))
    return Beginning(current.number + 1, _ordered(members), change=change)


def _alone(
    current: Generation, here: Sequence[Member], since: Start | None = None
) -> Sequence[GenerationClosed | Beginning]:
    """Asynchronous workers come and go at once: each begins where its task was."""
    stay = [member for member in current.members if member in here]
    if len(stay) < len(current.members):
        # First who is gone is fenced on all servers, so that nothing it sent arrives after they were asked.
        return [_closed(current, stay)]
    new = [member for member in here if member not in current.members]
    return [
        Beginning(current.number + count, _ordered([*stay, *new[:count]]), member.task, since)
        for count, member in enumerate(new, 1)
    ]


def _together(
    current: Generation, here: Mapping[int, SessionState], left: Set[int], started: Set[int], may_save: bool
) -> Sequence[GenerationClosed | Beginning]:
    """Synchronous members take new ones in at a join point, and let go of those who leave where a step begins."""
    stay = [m for m in current.members if m.session in here]
    waiting = [m for m in stay if m.session not in started]
    # A member that has left a generation by its join point is done with it. A lost one is waited for until it is
    # fenced.
    leaving = [m for m in current.leaving if m.session in here]
    dead = [m for m in current.leaving if m.session not in here and m.session not in left]
    gone = len(stay) < len(current.members) or bool(dead)
    asking = [] if waiting else [m for m in stay if here[m.session].pace.leaving]
    if leaving or asking:
        # New members wait until those who leave have: they would begin amid rounds that these still make.
        return _let_go(current, stay, leaving, asking, may_save, here) if gone or asking else []
    members = frozenset(stay)
    new = [s for s in here.values() if s.member not in members]
    if len(waiting) == len(stay):
        # No member can say where the group stands, but the servers know it: once lost members are fenced on all of
        # them, so that nothing they sent arrives after the servers were asked.
        if gone:
            return [_closed(current, stay)]
        return [Beginning(current.number + 1, _ordered([s.member for s in here.values()]))] if here else []
    join_point = current.join_point if waiting else next((s.join_point for s in new if s.join_point), "")
    taken = [s.member for s in new if s.join_point and s.join_point == join_point]
    if not (gone or taken):
        return []
    return [_closed(current, [*stay, *taken], join_point)]


def _let_go(
    current: Generation,
    stay: Sequence[Member],
    leaving: Sequence[Member],
    asking: Sequence[Member],
    may_save: bool,
    here: Mapping[int, SessionState],
) -> list[GenerationClosed]:
    """Closes the generation that some members leave; whether a checkpoint is saved before they do is said in it.

    No member may have taken in the current generation yet. Members take in the newest alone, so the new one repeats
    what the current one said.
    """
    number = current.number + 1
    save = current.save
    if may_save and any(here[m.session].pace.saving for m in asking):
        save = number
    members = [m for m in stay if m not in asking]
    return [GenerationClosed(Generation(number, _ordered(members), STEP, None, _ordered([*leaving, *asking]), save))]


def _closed(current: Generation, members: Sequence[Member], join_point: str = "") -> GenerationClosed:
    return GenerationClosed(Generation(current.number + 1, _ordered(members), join_point))


def _ordered(members: Sequence[Member]) -> tuple[Member, ...]:
    return tuple(sorted(members, key=lambda member: member.task))


def told_of(state: JobState, generation: Generation, sessions: Sequence[SessionState]) -> list[str]:
    """Returns log lines for the members that are lost and those that are back in a generation about to be closed."""
    if state.generation is None or not generation.everybody:  # with no member left, the job does not go on
        return []
    before, now = ({m.session: m.task for m in each.everybody} for each in (state.generation, generation))
    ends = {session.member.session: session.state for session in sessions}
    lost = [(task, ends.get(number, "lost")) for number, task in before.items() if number not in now]
    lines = [f"goes on without {task}, which {WAYS[end]}" for task, end in lost if end in WAYS]
    earlier = {member.task for each in state.generations.values() for member in each.members}
    back = [task for number, task in now.items() if number not in before and task in earlier]
    return lines + [f"{task} has reconnected and takes part again" for task in back]


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
