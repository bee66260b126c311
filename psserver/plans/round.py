"""A round that can run: its plan and its members' contributions; and the record of one that is over."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from operator import attrgetter
from typing import NamedTuple

from psserver.plans.prepared import PreparedPlan
from psserver.programs.kernels.kernels import Kernels
from pswire.api import Contribution
from pswire.cluster import Task
from pswire.errors import PSError
from pswire.model.log import Generation, Member, Position
from pswire.model.plan import Plan
from pswire.model.tensor import Array
from pswire.network.payload import Payload
from pswire.servers.votes import LateContribution, Vote

BRIEF_BYTES = 1 << 25
"""Most bytes that a synchronous round may take and compute for an event loop to run it: a few milliseconds, in which
nobody has anything to send, since all wait for it."""

BRIEF_ALONE_BYTES = 1 << 21
"""The same of an asynchronous worker's round, beside which the others push."""

BRIEF_INTERPRETED_BYTES = 1 << 18
"""The same where the interpreter runs some of its programs: of some ops a byte takes long."""


class SessionSequence(NamedTuple):
    """The key of the rounds of one session alone, in a job whose members make rounds together.

    They update variables that are `alone`. The sequence is the session's and no task's: a process that comes back
    begins another one, from 0, and nobody has to be asked how far the one before it had come.
    """

    session: int


Key = Task | int | SessionSequence | None
"""The key of a sequence: the task of an asynchronous worker, or the number of the closure that it runs, or the session
of a synchronous member for its own rounds; None for the sequence of all synchronous members."""


_SESSION = attrgetter("said.session")


class Commit(Enum):
    """The time at which assigned values become the variables' values, and so the time at which a round may begin.

    Attributes:
        ATOMIC: all at the end, or none. All contributions are there when the round begins.
        PROGRESSIVE: step by step, while contributions arrive. Nothing can refuse such a round halfway.
    """

    ATOMIC = "atomic"
    PROGRESSIVE = "progressive"


@dataclass(frozen=True)
class MemberShare:
    """One member's share of a round.

    Attributes:
        member: the member.
        said: its contribution, without the payload.
        payload: operands, then contributions; it may still grow.
        within: the share whose payload has this one's contribution in a sum; None for one with a payload of its own.
        late: True if it is merged into a later round than its own; see `psserver.rounds.late_contributions`.
    """

    member: Member
    said: Contribution
    payload: Payload
    within: MemberShare | None = None
    late: bool = False

    @property
    def name(self) -> LateContribution:
        """Its name, should it come late."""
        return LateContribution(self.said.session, self.said.round)

    @property
    def whole(self) -> bool:
        """True if all bytes of its contribution are there."""
        payload = (self.within or self).payload
        return payload.end == payload.size

    @property
    def summed(self) -> frozenset[int]:
        """The sessions whose contributions are in one sum with it, its own included; empty for one that is in none."""
        share = self.within or self
        return frozenset(part.session for part in share.said.parts)

    @property
    def has_examples(self) -> bool:
        """True if it contributes to any reduction: a worker without data takes part with nothing."""
        return any(self.said.weights)


@dataclass(frozen=True)
class ReadyRound:
    """A round that can run.

    Attributes:
        round: the number of the round.
        prepared: the plan.
        parts: the members' contributions, in task order.
        excluded: members without a whole contribution.
        section: returns the plan in words.
        sequence: the key of its sequence.
        commit: the time at which assigned values become readable.
        since: the time of its first contribution, in monotonic seconds.
        generation: the number of the generation in its contributions.
        voters: the servers that agree on its contributions, this one included; empty if this one decides alone.
        error: the reason why it cannot run; None if it can.
        attempt: how many votes of it there were before.
        needs: contributions of examples that it has at least if it is made without the last of its members; 0 if it
            waits for all of them.
        late: sessions of members whose contributions have not come in time; they go on with what it has made.
        put_off: True if it is over for its members, and made later; see `Backlog`.
        merged: contributions that came late to earlier rounds, and count in this one. Those of other plans are applied
            before it, in a round that hands variables over to a server.
    """

    round: int
    prepared: PreparedPlan
    parts: tuple[MemberShare, ...]
    excluded: tuple[Task, ...]
    section: Callable[[], str]
    sequence: Key = None
    commit: Commit = Commit.ATOMIC
    since: float = 0.0
    generation: int = 0
    voters: tuple[int, ...] = ()
    error: PSError | None = None
    attempt: int = 0
    needs: int = 0
    late: frozenset[int] = frozenset()
    put_off: bool = False
    merged: tuple[MemberShare, ...] = ()

    @property
    def tries(self) -> bool:
        """True if it runs before its servers vote, since it may refuse a value, or runs as its contributions come."""
        return self.prepared.may_refuse or self.commit is Commit.PROGRESSIVE

    @property
    def shares(self) -> tuple[MemberShare, ...]:
        """The contributions of its members, and those that are merged into it."""
        return (*self.parts, *self.merged) if self.merged else self.parts

    @property
    def nbytes(self) -> int:
        """Bytes of all contributions."""
        return sum([share.payload.size for share in self.shares])

    @cached_property
    def sessions(self) -> frozenset[int]:
        """Whose contributions it has."""
        return frozenset(map(_SESSION, self.parts))

    def is_of(self, said: Contribution) -> bool:
        """Returns whether a contribution is one to this round; numbers alone are of one sequence."""
        return (self.round, self.plan.id) == (said.round, said.plan_id)

    def only(self, sessions: Set[int]) -> ReadyRound:
        """Returns the same round with the contributions of some sessions; the other members are left out."""
        if sessions >= self.sessions:
            return self
        parts = tuple(part for part in self.parts if part.said.session in sessions)
        out = [part.member for part in self.parts if part.said.session not in sessions]
        excluded = tuple(sorted((*self.excluded, *(member.task for member in out))))
        late = self.late | {member.session for member in out} if self.needs else self.late
        return replace(self, parts=parts, excluded=excluded, late=late)

    @property
    def is_short(self) -> bool:
        """True if fewer members contribute examples to it than it needs."""
        return self.needs > 0 and sum(part.has_examples for part in self.parts) < self.needs

    def vote(self, chief: int, attempt: int, closed: int) -> Vote:
        """Returns this server's vote in it.

        Args:
            chief: the session of the chief that began the job.
            attempt: how many votes of it there were before.
            closed: the last round that is over here.
        """
        whole = self.sessions if self.error is None else frozenset[int]()
        sums = tuple([part.summed for part in self.parts if part.said.parts])
        round, late = self.round, frozenset([share.name for share in self.merged])
        return Vote(
            chief, round, self.plan.id, self.generation, attempt, whole, self.error, closed, sums=sums, late=late
        )

    @cached_property
    def accused(self) -> tuple[tuple[int, Task], ...]:
        """Contributions with NaN or infinity, where the plan does not apply them: the reduction, and whose it is."""
        if self.plan.nonfinite == "apply":
            return ()
        senders = (part for part in self.shares if not part.said.observes)
        return tuple((index, part.member.task) for part in senders for index in part.said.nonfinite)

    def is_brief(self, kernels: Kernels) -> bool:
        """Returns True if it takes so little time that an event loop may run it, and asks nobody for anything."""
        if self.commit is not Commit.ATOMIC or self.plan.restore is not None or self.plan.snapshot is not None:
            return False
        if self.prepared.makes_up:
            return False
        settled = self.prepared.settled(kernels, len(self.parts if self.is_plain else self.contributors))
        if settled is None:
            return False
        most = BRIEF_BYTES if self.sequence is None else BRIEF_ALONE_BYTES
        most = BRIEF_INTERPRETED_BYTES if settled.interpreted else most
        return self.prepared.computed + self.nbytes <= most

    @cached_property
    def is_plain(self) -> bool:
        """True if each member contributes by itself, with examples, and asks for no rows."""
        if self.merged:
            return False
        for part in self.parts:
            said = part.said
            if said.observes or said.lookups or said.parts or said.host or part.within:
                return False
        return True

    @cached_property
    def skipped(self) -> bool:
        """True if nothing of it is applied, though it is over as any other."""
        return self.plan.nonfinite == "skip" and bool(self.accused)

    @cached_property
    def plan(self) -> Plan:
        """The plan, as the members know it."""
        return self.prepared.plan

    @cached_property
    def contributors(self) -> list[MemberShare]:
        """The contributions, without those of observers; of several that came as a sum the one that has it.

        Late ones of its plan come last.
        """
        here = [part for part in self.parts if not part.said.observes and part.within is None]
        return [*here, *(part for part in self.merged if part.said.plan_id == self.plan.id)]

    @property
    def positions(self) -> tuple[Position, ...]:
        """Positions of its members' datasets after the round."""
        return next((part.said.positions for part in self.parts if part.said.positions), ())


class ReturnedValues(NamedTuple):
    """The values that a round gives back to every member.

    Attributes:
        arrays: the plan's returned values of this server, on the host; of rows, which come last, ids and rows.
        rows: of each of these, how many rows there are.
    """

    arrays: Sequence[Array] = ()
    rows: Sequence[int] = ()


@dataclass(frozen=True)
class Record:
    """The answer to a round.

    Attributes:
        plan_id, generation, more, excluded, observers: as in `RoundReply`.
        given: the plan's returned values of this server; of rows, which come last, ids and rows.
        rows: of each of these, how many rows there are.
        warnings: as in `RoundReply`.
        sessions: sessions whose contributions are in it; no other gets the answer, but for those that were late.
        late: sessions of members that were left out since they were late, and go on with this answer.
        error: the error of a failed round; None otherwise.
        over: the time at which it ended, in monotonic seconds.
        merged: the contributions that came late to earlier rounds, and are in it.
    """

    plan_id: bytes
    sessions: frozenset[int] = frozenset()
    generation: Generation | None = None
    more: bool = False
    excluded: tuple[Task, ...] = ()
    given: tuple[Array, ...] = ()
    error: PSError | None = None
    warnings: tuple[str, ...] = ()
    observers: tuple[Task, ...] = ()
    rows: tuple[int, ...] = ()
    late: frozenset[int] = frozenset()
    over: float = 0.0
    merged: tuple[LateContribution, ...] = ()

    def is_for(self, session: int) -> bool:
        """Returns whether a session gets this answer."""
        return session in self.sessions or session in self.late

    @classmethod
    def of(
        cls,
        job: ReadyRound,
        generation: Generation | None,
        given: ReturnedValues,
        dropped: Sequence[Task],
        warnings: Sequence[str],
        now: float,
    ) -> Record:
        """Makes the record of a round that has run.

        Args:
            job, given, dropped, warnings: as of `Rounds.complete`.
            generation: the newest one.
            now: the time, in monotonic seconds.
        """
        return cls(
            job.plan.id,
            job.sessions,
            generation,
            True in [part.said.more for part in job.parts],
            tuple(sorted((*job.excluded, *dropped))),
            tuple(given.arrays),
            warnings=tuple(warnings),
            observers=tuple([part.member.task for part in job.parts if part.said.observes]),
            rows=tuple(given.rows),
            late=job.late,
            over=now,
            merged=tuple([share.name for share in job.merged]),
        )
