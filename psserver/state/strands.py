"""Strands: open rounds that gather contributions, the last complete round, and the answers that are kept.

In synchronous mode all members share one strand. In asynchronous mode each task has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass, field

from psserver.effects import Effect, Fail
from psserver.plans.prepared import PreparedPlan
from psserver.plans.round import Commit, Key, MemberShare, ReadyRound
from pswire.api import Contribution, RoundReply
from pswire.cluster import Task
from pswire.errors import InvalidRequest, PSError
from pswire.model.log import Epoch, Member, Position
from pswire.model.status import OpenRound
from pswire.model.tensor import Array
from pswire.transport.payload import Payload

RESENDS = 8
"""Most attempts at one contribution that are kept while its epoch is not known here."""

Waiter = tuple[Contribution, Future[RoundReply]]


@dataclass(frozen=True)
class Push:
    """One arrival of a contribution.

    Attributes:
        said: the contribution, without the payload.
        payload: operands, then contributions; it may still grow.
        since: the time of arrival, in monotonic seconds.
        future: its answer.
    """

    said: Contribution
    payload: Payload
    since: float
    future: Future[RoundReply]


@dataclass(frozen=True)
class Record:
    """The answer to a round.

    Attributes:
        plan_id, epoch, more, left_out, positions: as in `RoundReply`.
        given: the plan's returned values of this server.
        warnings: as in `RoundReply`.
        sessions: sessions whose contributions are in it; no other gets the answer.
        error: the error of a failed round; None otherwise.
    """

    plan_id: bytes
    sessions: frozenset[int] = frozenset()
    epoch: Epoch | None = None
    more: bool = False
    left_out: tuple[Task, ...] = ()
    given: tuple[Array, ...] = ()
    error: PSError | None = None
    warnings: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        job: ReadyRound,
        epoch: Epoch | None,
        given: Sequence[Array],
        dropped: Sequence[Task],
        warnings: Sequence[str],
    ) -> Record:
        """Makes the record of a round that has run; arguments as of `Rounds.complete`, and the newest epoch."""
        return cls(
            job.plan.id,
            frozenset(part.member.session for part in job.parts),
            epoch,
            any(part.said.more for part in job.parts),
            tuple(sorted((*job.left_out, *dropped))),
            tuple(given),
            warnings=tuple(warnings),
        )


class Parked:
    """Pushes for an epoch that is not known here yet. They belong to no round of this server so far."""

    def __init__(self) -> None:
        self._pushes: dict[int, list[Push]] = {}

    def put(self, push: Push) -> list[Effect]:
        """Keeps a push; fails the oldest of too many attempts.

        Raises:
            InvalidRequest: its session waits in another round already.
        """
        round, parked = push.said.round, self._pushes.get(push.said.session, [])
        if any(other.said.round != round for other in parked):
            raise InvalidRequest(f"round {parked[0].said.round} of this session waits; it cannot begin {round}")
        effects: list[Effect] = []
        if len(parked) >= RESENDS:
            # Its sender, on a network that loses answers, has sent it again and waits for later attempts.
            oldest, *parked = parked
            effects.append(Fail(oldest.future, InvalidRequest(f"round {round} was sent {RESENDS} times since")))
        self._pushes[push.said.session] = [*parked, push]
        return effects

    def take(self) -> list[Push]:
        """Removes and returns all pushes, the attempts of a session in order."""
        pushes, self._pushes = self._pushes, {}
        return [push for each in pushes.values() for push in each]

    def fail_session(self, session: int, error: PSError) -> list[Effect]:
        """Fails the pushes of one session."""
        return [Fail(push.future, error) for push in self._pushes.pop(session, [])]

    @property
    def sessions(self) -> set[int]:
        """The sessions that wait."""
        return set(self._pushes)

    @property
    def waiting(self) -> tuple[OpenRound, ...]:
        """The rounds of the pushes, for people."""
        rounds = [push.said.round for push, *_ in self._pushes.values()]
        return tuple(
            OpenRound(round, "a section of an epoch that is not known here yet", (), False) for round in rounds
        )


@dataclass
class PendingRound:
    """A round that gathers its contributions.

    Attributes:
        plan_id: the id of its plan.
        epoch: the number of the epoch that its members named.
        members: the members that make it.
        since: the time of its first contribution, in monotonic seconds.
        parts: the contributions, by session.
        waiters: the answers that members wait for.
        error: the error of a failed round; None otherwise.
        doubtful: pushes of newcomers that differ from it, before an older member has pushed.
    """

    plan_id: bytes
    epoch: int
    members: tuple[Member, ...]
    since: float
    parts: dict[int, MemberShare] = field(default_factory=dict)
    waiters: list[Waiter] = field(default_factory=list)
    error: PSError | None = None
    doubtful: list[Push] = field(default_factory=list)

    @property
    def positions(self) -> tuple[Position, ...]:
        """Positions of its members' datasets."""
        return next((part.said.positions for part in self.parts.values() if part.said.positions), ())

    @property
    def sessions(self) -> set[int]:
        """The sessions that wait for it."""
        return {said.session for said, _ in self.waiters} | {push.said.session for push in self.doubtful}

    def differs(self, said: Contribution) -> bool:
        """Returns True if a contribution has another plan or epoch than this round, which has not failed."""
        return self.error is None and (self.plan_id, self.epoch) != (said.plan_id, said.epoch)

    def missing(self, fenced: Set[int]) -> list[Member]:
        """Returns the members, without fenced ones, whose contributions are not whole."""
        whole = {session for session, part in self.parts.items() if part.payload.whole}
        return [m for m in self.members if m.session not in whole | fenced]

    def usable(self, fenced: Set[int]) -> list[MemberShare]:
        """Returns the contributions that count, in task order; an incomplete one of a fenced member does not."""
        parts = sorted(self.parts.values(), key=lambda part: part.member.task)
        return [part for part in parts if part.payload.whole or part.member.session not in fenced]

    def voters(self, plan: PreparedPlan) -> tuple[int, ...]:
        """Returns the servers that agree on whose contributions it has; none where each decides alone."""
        whole = len(plan.plan.servers) > 1 and all(member.mode == "whole" for member in self.members)
        return plan.plan.servers if whole else ()

    def streams(self, plan: PreparedPlan) -> bool:
        """Returns True if it may begin before its contributions are whole: not if it is small, or may fail."""
        together = all(member.mode != "async" for member in self.members)
        return together and plan.streams and not self.voters(plan)

    def awaits(self, plan: PreparedPlan | None, fenced: Set[int]) -> bool:
        """Returns True if it waits for its plan, or for a contribution to be whole, or, if it streams, to begin."""
        streams = plan is not None and self.streams(plan)
        for member in self.members:
            part = self.parts.get(member.session)
            if member.session not in fenced and (part is None or not (streams or part.payload.whole)):
                return True
        return plan is None

    def ready(
        self, number: int, plan: PreparedPlan, fenced: Set[int], section: Callable[[], str], key: Key
    ) -> ReadyRound:
        """Returns this round ready to run, given its number, its plan and that in words, and its strand."""
        parts = self.usable(fenced)
        there = {part.member.session for part in parts}
        streams = self.streams(plan) and not all(part.said.observes for part in parts)
        left_out = tuple(member.task for member in self.members if member.session not in there)
        commit = Commit.PROGRESSIVE if streams else Commit.ATOMIC
        voters, error = self.voters(plan), self.error
        return ReadyRound(
            number, plan, tuple(parts), left_out, section, key, commit, self.since, self.epoch, voters, error
        )

    def fail(self, error: PSError) -> list[Effect]:
        """Fails the round for all its waiters."""
        self.error = error
        failed = [*(future for _, future in self.waiters), *(push.future for push in self.doubtful)]
        self.waiters.clear()
        self.doubtful.clear()
        return [Fail(future, error) for future in failed]

    def fail_session(self, session: int, error: PSError) -> list[Effect]:
        """Fails the calls of one session."""
        failed = [push.future for push in self.doubtful if push.said.session == session]
        failed += [future for said, future in self.waiters if said.session == session]
        self.doubtful = [push for push in self.doubtful if push.said.session != session]
        self.waiters = [waiter for waiter in self.waiters if waiter[0].session != session]
        return [Fail(future, error) for future in failed]


@dataclass
class Strand:
    """A sequence of rounds, one after the other.

    Attributes:
        last: the last complete round, -1 before the first.
        settled: positions of the members' datasets after the last complete round.
        records: answers of the last rounds, by number, for resends.
        open: open rounds, by number.
    """

    last: int = -1
    settled: tuple[Position, ...] = ()
    records: dict[int, Record] = field(default_factory=dict)
    open: dict[int, PendingRound] = field(default_factory=dict)

    @property
    def newest(self) -> int:
        """The last round with a contribution, complete or not."""
        return max([self.last, *self.open])

    @property
    def positions(self) -> tuple[Position, ...]:
        """Positions of its members' datasets, from the newest round that has some."""
        found = (self.open[number].positions for number in sorted(self.open, reverse=True))
        return next(filter(None, found), self.settled)

    def close(self, number: int, record: Record, kept: int) -> list[Waiter]:
        """Ends a round; returns its waiters.

        Args:
            number: the number of the round.
            record: its answer.
            kept: number of answers to keep.
        """
        self.last = number
        self.records[number] = record
        for old in sorted(self.records)[:-kept]:
            del self.records[old]
        pending = self.open.pop(number)
        self.settled = pending.positions or self.settled
        return pending.waiters
