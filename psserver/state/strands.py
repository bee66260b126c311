"""Strands of rounds: the rounds that gather contributions, the last complete one, and the answers that are kept.

In sync mode there is one strand, which all members make together; in async mode one for each task, whose rounds are of
that task alone.
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
"""Attempts at one contribution that are kept while its epoch is not known here."""

Waiter = tuple[Contribution, Future[RoundReply]]


@dataclass(frozen=True)
class Push:
    """One arrival of a contribution.

    Attributes:
        said: what its sender says.
        payload: operands, then contributions; it may still grow.
        since: when it came, in monotonic seconds.
        future: the answer that its sender waits for.
    """

    said: Contribution
    payload: Payload
    since: float
    future: Future[RoundReply]


@dataclass(frozen=True)
class Record:
    """What was answered to a round.

    Attributes:
        plan_id, epoch, more, left_out, positions: as in `RoundReply`.
        given: the plan's returned values of this server.
        warnings: as in `RoundReply`.
        sessions: whose contributions are in it; nobody else is answered.
        error: what everyone was told instead.
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
        """The answer to a round that has run: the arguments are those of `Rounds.complete`, and the newest epoch."""
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
    """Pushes labelled with an epoch that was not copied here yet: they are no rounds of this server so far."""

    def __init__(self) -> None:
        self._pushes: dict[int, list[Push]] = {}

    def put(self, push: Push) -> list[Effect]:
        """Keeps a push; of too many attempts the oldest is given up.

        Raises:
            InvalidRequest: its session waits in another round already.
        """
        round, parked = push.said.round, self._pushes.get(push.said.session, [])
        if any(other.said.round != round for other in parked):
            raise InvalidRequest(f"round {parked[0].said.round} of this session waits; it cannot begin {round}")
        effects: list[Effect] = []
        if len(parked) >= RESENDS:
            # Its sender, who sends again and again over a network that loses answers, listens to it no more.
            oldest, *parked = parked
            effects.append(Fail(oldest.future, InvalidRequest(f"round {round} was sent {RESENDS} times since")))
        self._pushes[push.said.session] = [*parked, push]
        return effects

    def take(self) -> list[Push]:
        """Gives all of them back, the attempts of a session in order."""
        pushes, self._pushes = self._pushes, {}
        return [push for each in pushes.values() for push in each]

    def fail_session(self, session: int, error: PSError) -> list[Effect]:
        """Tells one member that it waits in vain."""
        return [Fail(push.future, error) for push in self._pushes.pop(session, [])]

    @property
    def sessions(self) -> set[int]:
        """Who waits."""
        return set(self._pushes)

    @property
    def waiting(self) -> tuple[OpenRound, ...]:
        """The rounds that they are for, for people."""
        rounds = [push.said.round for push, *_ in self._pushes.values()]
        return tuple(
            OpenRound(round, "a section of an epoch that is not known here yet", (), False) for round in rounds
        )


@dataclass
class PendingRound:
    """A round that gathers its contributions.

    Attributes:
        plan_id: what it does.
        epoch: the number of the epoch that its members have said.
        members: who makes it.
        since: when its first contribution came, in monotonic seconds.
        parts: the contributions, by session.
        waiters: the answers that members wait for.
        error: why it has failed.
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
        """Where the datasets stand of who makes it."""
        return next((part.said.positions for part in self.parts.values() if part.said.positions), ())

    @property
    def sessions(self) -> set[int]:
        """Who waits for it."""
        return {said.session for said, _ in self.waiters} | {push.said.session for push in self.doubtful}

    def differs(self, said: Contribution) -> bool:
        """Returns whether a push is for something else than this round, which has not failed yet."""
        return self.error is None and (self.plan_id, self.epoch) != (said.plan_id, said.epoch)

    def missing(self, fenced: Set[int]) -> list[Member]:
        """Returns the members whose contribution is not there whole, but for those that are lost."""
        whole = {session for session, part in self.parts.items() if part.payload.whole}
        return [m for m in self.members if m.session not in whole | fenced]

    def usable(self, fenced: Set[int]) -> list[MemberShare]:
        """The contributions that count, in task order: what a member that is gone did not send whole does not."""
        parts = sorted(self.parts.values(), key=lambda part: part.member.task)
        return [part for part in parts if part.payload.whole or part.member.session not in fenced]

    def voters(self, plan: PreparedPlan) -> tuple[int, ...]:
        """Returns the servers that agree on whose contributions it has; none where each decides alone."""
        whole = len(plan.plan.servers) > 1 and all(member.mode == "whole" for member in self.members)
        return plan.plan.servers if whole else ()

    def streams(self, plan: PreparedPlan) -> bool:
        """Returns whether it may begin before its contributions are whole: not if it is small, or may fail."""
        together = all(member.mode != "async" for member in self.members)
        return together and plan.streams and not self.voters(plan)

    def awaits(self, plan: PreparedPlan | None, fenced: Set[int]) -> bool:
        """Returns whether it waits for its plan, or a member: until it is there whole, or has begun if it streams."""
        streams = plan is not None and self.streams(plan)
        for member in self.members:
            part = self.parts.get(member.session)
            if member.session not in fenced and (part is None or not (streams or part.payload.whole)):
                return True
        return plan is None

    def ready(
        self, number: int, plan: PreparedPlan, fenced: Set[int], section: Callable[[], str], key: Key
    ) -> ReadyRound:
        """This round, as it runs: its number, its plan and that in words, and its strand."""
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
        """Tells all who wait that it has failed."""
        self.error = error
        failed = [*(future for _, future in self.waiters), *(push.future for push in self.doubtful)]
        self.waiters.clear()
        self.doubtful.clear()
        return [Fail(future, error) for future in failed]

    def fail_session(self, session: int, error: PSError) -> list[Effect]:
        """Tells one member that it waits in vain."""
        failed = [push.future for push in self.doubtful if push.said.session == session]
        failed += [future for said, future in self.waiters if said.session == session]
        self.doubtful = [push for push in self.doubtful if push.said.session != session]
        self.waiters = [waiter for waiter in self.waiters if waiter[0].session != session]
        return [Fail(future, error) for future in failed]


@dataclass
class Strand:
    """Rounds that are made one after the other.

    Attributes:
        last: the last complete one, -1 before the first.
        settled: where the datasets stood of who made the last complete one.
        records: answers of the last rounds, for resends.
        open: rounds that wait.
    """

    last: int = -1
    settled: tuple[Position, ...] = ()
    records: dict[int, Record] = field(default_factory=dict)
    open: dict[int, PendingRound] = field(default_factory=dict)

    @property
    def newest(self) -> int:
        """The last round that somebody has contributed to, complete or not."""
        return max([self.last, *self.open])

    @property
    def positions(self) -> tuple[Position, ...]:
        """Where the datasets stand of who makes it, as the newest round says."""
        found = (self.open[number].positions for number in sorted(self.open, reverse=True))
        return next(filter(None, found), self.settled)

    def close(self, number: int, record: Record, kept: int) -> list[Waiter]:
        """A round is over.

        Args:
            number: which.
            record: its answer.
            kept: how many answers are kept.

        Returns:
            Who waits for it.
        """
        self.last = number
        self.records[number] = record
        for old in sorted(self.records)[:-kept]:
            del self.records[old]
        pending = self.open.pop(number)
        self.settled = pending.positions or self.settled
        return pending.waiters
