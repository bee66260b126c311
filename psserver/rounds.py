"""Rounds: who has contributed to which, when one is complete, and what was answered.

A plain state machine without clock, network or array work. It says which round can run; the core runs
it and says how it went.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from math import isfinite

from psserver.membership import diverged
from pswire.api import Contribution, OpenRound, RoundReply
from pswire.cluster import Task
from pswire.errors import Fenced, InvalidRequest, PSError
from pswire.spec import Epoch, Member, Plan, Position
from pswire.tensor import Array, Payload, TensorSpec, layout

Failure = tuple[Future[RoundReply], PSError]
_Push = tuple[Contribution, Payload, Future[RoundReply]]

RECORDS = 2
"""Rounds whose answers are kept for resends: a worker has one round under way, never two."""


@dataclass(frozen=True)
class Part:
    """One member's share of a round.

    Attributes:
        member: whose.
        said: what it said.
        payload: contributions, then operands.
    """

    member: Member
    said: Contribution
    payload: Payload


@dataclass(frozen=True)
class Job:
    """A round that can run.

    Attributes:
        round: which.
        plan: what it does.
        parts: what it does it with, in task order.
        left_out: members without a whole contribution.
        section: gives the plan in words.
    """

    round: int
    plan: Plan
    parts: tuple[Part, ...]
    left_out: tuple[Task, ...]
    section: Callable[[], str]


@dataclass
class _Open:
    plan_id: bytes
    epoch: int
    parts: dict[int, Part] = field(default_factory=dict)
    waiters: list[tuple[Contribution, Future[RoundReply]]] = field(default_factory=list)
    error: PSError | None = None


@dataclass(frozen=True)
class Record:
    """What was answered to a round.

    Attributes:
        plan_id, epoch, more, left_out, positions: as in `RoundReply`.
        given: the plan's returned values of this server.
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


class Rounds:
    """All rounds of one server. Guarded by the core's lock.

    Args:
        server: the number of this server.
        describe: a plan in words, approved or not, for messages.
    """

    def __init__(self, server: int, describe: Callable[[bytes], str]) -> None:
        self.server = server
        self._describe = describe
        self.clear()

    def clear(self) -> None:
        """Forgets everything, as at the start of a job."""
        self.plans: dict[bytes, Plan] = {}
        self.epoch: Epoch | None = None
        self.last = -1
        self.positions: tuple[Position, ...] = ()
        self.records: dict[int, Record] = {}
        self.fenced: set[int] = set()
        self.refused: dict[bytes, PSError] = {}
        self._epochs: dict[int, Epoch] = {}
        self._open: dict[int, _Open] = {}
        # Pushes labelled with an epoch that was not copied here yet, by session: they are no rounds of ours so far.
        self._parked: dict[int, list[_Push]] = {}
        self._failed: list[Failure] = []
        self._running = False

    def approve(self, plan: Plan) -> None:
        """A plan may run from now on."""
        self.plans[plan.id] = plan
        for waiting in self._open.values():
            if waiting.plan_id == plan.id:
                for part in list(waiting.parts.values()):
                    self._admit(waiting, part, plan)

    def refuse(self, plan: Plan, error: PSError) -> None:
        """A plan was approved that cannot run here: whoever pushes for it is told why."""
        self.refused[plan.id] = error
        for waiting in self._open.values():
            if waiting.plan_id == plan.id:
                waiting.error = error
                self._fail(waiting, error)

    def take_failed(self) -> list[Failure]:
        """Futures that are to be failed, since the last time; the caller does it without the lock."""
        failed, self._failed = self._failed, []
        return failed

    def close_epoch(self, epoch: Epoch) -> None:
        """A new epoch holds: members of older ones that are not in it are fenced."""
        before = {member.session for old in self._epochs.values() for member in old.members}
        members = {member.session for member in epoch.members}
        for waiting in self._open.values():
            # Whoever pushed for this epoch before it came, and is no member of it, is none of ours.
            strangers = waiting.parts.keys() - members if waiting.epoch == epoch.number else set()
            waiting.parts = {session: part for session, part in waiting.parts.items() if session not in strangers}
            before |= strangers
        self.fenced |= before - members
        self.epoch = self._epochs[epoch.number] = epoch
        parked, self._parked = self._parked, {}
        for said, payload, future in (push for pushes in parked.values() for push in pushes):
            try:
                self.push(said, payload, future)
            except PSError as error:
                self._failed.append((future, error))

    def check(self, session: int) -> None:
        """Raises `Fenced` for a session that an epoch ended."""
        if session in self.fenced:
            raise Fenced("this session was ended by a new epoch; restart the process to take part again")

    def push(self, said: Contribution, payload: Payload, future: Future[RoundReply]) -> None:
        """Takes a contribution; its future is answered when the round is over, or is among `take_failed`.

        Raises:
            PSError: why this contribution cannot be taken.
        """
        if said.round <= self.last:
            raise InvalidRequest(f"round {said.round} is over; this server is at {self.last}")
        if said.plan_id in self.refused:
            raise self.refused[said.plan_id]
        if any(not (isfinite(weight) and weight >= 0) or (weight and said.observes) for weight in said.weights):
            raise InvalidRequest(f"weights {said.weights} are no counts")
        epoch = self._epochs.get(said.epoch)
        if epoch is None:
            self._park(said, payload, future)
            return
        member = epoch.session(said.session)
        if member is None:
            raise Fenced(f"this session is no member of epoch {said.epoch}; restart the process")
        self._check_order(said, member)
        waiting = self._open.setdefault(said.round, _Open(said.plan_id, said.epoch))
        if waiting.error is None and (waiting.plan_id, waiting.epoch) != (said.plan_id, said.epoch):
            other = next(iter(waiting.parts.values()), None)
            positions = [(other.member.task, self._describe(waiting.plan_id))] if other else []
            waiting.error = diverged(said.round, [*positions, (member.task, self._describe(said.plan_id))])
        waiting.waiters.append((said, future))
        if waiting.error is not None:
            self._fail(waiting, waiting.error)
            return
        # A resend does not replace what is there: its arrays may already be in use.
        if said.session not in waiting.parts:
            part = Part(member, said, payload)
            waiting.parts[said.session] = part
            plan = self.plans.get(said.plan_id)
            if plan is not None:
                self._admit(waiting, part, plan)
            self.positions = said.positions or self.positions

    def _park(self, said: Contribution, payload: Payload, future: Future[RoundReply]) -> None:
        parked = self._parked.setdefault(said.session, [])
        if parked and parked[0][0].round != said.round:
            raise InvalidRequest(f"round {parked[0][0].round} of this session waits; it cannot begin {said.round}")
        parked.append((said, payload, future))

    def _check_order(self, said: Contribution, member: Member) -> None:
        """A worker makes one round after the other: it neither begins a second one nor leaves one out."""
        for number, waiting in self._open.items():
            if number != said.round and said.session in waiting.parts:
                raise InvalidRequest(f"round {number} of this session is under way; it cannot begin {said.round}")
            if number < said.round and waiting.error is None and member in self._missing(waiting):
                other = next(iter(waiting.parts.values()), None)
                positions = [(other.member.task, self._describe(waiting.plan_id))] if other else []
                waiting.error = diverged(number, [*positions, (member.task, "a later section; it made none here")])
                self._fail(waiting, waiting.error)
                raise waiting.error

    def _admit(self, waiting: _Open, part: Part, plan: Plan) -> None:
        """Refuses a contribution that does not fit its plan; its sender alone is told."""
        said = part.said
        expected = layout(sent(plan, self.server, said))[1]
        here = sum(self.server in reduction.servers for reduction in plan.reductions)
        if len(said.weights) == len(plan.reductions) and part.payload.size == expected:
            return
        del waiting.parts[said.session]
        error = InvalidRequest(
            f"a contribution of {part.payload.size} bytes and {len(said.weights)} weights does not fit a "
            f"section of {expected} bytes and {len(plan.reductions)} reductions, {here} of them here"
        )
        for one in [w for w in waiting.waiters if w[0].session == said.session]:
            waiting.waiters.remove(one)
            self._failed.append((one[1], error))

    def recorded(self, said: Contribution) -> Record | None:
        """The answer to a round that is over; None while it is not."""
        record = self.records.get(said.round)
        if record is None or record.error is not None:
            return record
        if record.plan_id != said.plan_id:
            raise InvalidRequest(f"round {said.round} had another plan")
        if said.session not in record.sessions:
            raise Fenced(f"round {said.round} was made without this session; restart the process")
        return record

    def next_job(self) -> Job | None:
        """The round that can run now, if any; it counts as running until `complete` or `fail`."""
        if self._running or not self._open:
            return None
        number = min(self._open)
        waiting = self._open[number]
        if waiting.error is not None:
            # Its members were told already, and nothing of it may be applied.
            self._close(number, Record(waiting.plan_id, error=waiting.error))
            return self.next_job()
        plan = self.plans.get(waiting.plan_id)
        epoch = self._epochs.get(waiting.epoch)
        if epoch is None or self._missing(waiting):
            return None
        if not waiting.parts:
            # All who could have been in it are gone, and left nothing; it must not stop those after it.
            del self._open[number]
            return self.next_job()
        if plan is None:
            return None
        self._running = True
        by_session = {member.session: member for member in epoch.members}
        parts = [Part(by_session[session], part.said, part.payload) for session, part in waiting.parts.items()]
        return Job(
            number,
            plan,
            tuple(sorted(parts, key=lambda part: part.member.task)),
            tuple(m.task for m in epoch.members if m.session not in waiting.parts),
            partial(self._describe, plan.id),
        )

    def complete(self, job: Job, given: Sequence[Array]) -> list[tuple[Contribution, Future[RoundReply]]]:
        """A round has run; returns who waits for its answer, which is now in `records`."""
        return self._close(
            job.round,
            Record(
                job.plan.id,
                frozenset(part.member.session for part in job.parts),
                self.epoch,
                any(part.said.more for part in job.parts),
                job.left_out,
                tuple(given),
            ),
        )

    def fail(self, job: Job, error: PSError) -> list[tuple[Contribution, Future[RoundReply]]]:
        """A round could not run: everyone is told the same, and nothing of it was applied."""
        return self._close(job.round, Record(job.plan.id, error=error))

    def _close(self, number: int, record: Record) -> list[tuple[Contribution, Future[RoundReply]]]:
        self._running = False
        self.last = number
        self.records[number] = record
        for old in sorted(self.records)[:-RECORDS]:
            del self.records[old]
        return self._open.pop(number).waiters

    def abandon(self, error: PSError) -> None:
        """Ends all that waits with one error."""
        for session in self.sessions():
            self.fail_session(session, error)

    def fail_session(self, session: int, error: PSError) -> None:
        """Ends what a session waits for."""
        for waiting in self._open.values():
            self._failed += [(future, error) for said, future in waiting.waiters if said.session == session]
            waiting.waiters = [w for w in waiting.waiters if w[0].session != session]
        self._failed += [(future, error) for *_, future in self._parked.pop(session, [])]

    def sessions(self) -> set[int]:
        """Who waits."""
        return {said.session for waiting in self._open.values() for said, _ in waiting.waiters} | set(self._parked)

    def waiting(self) -> tuple[OpenRound, ...]:
        """The open rounds, for people and for the chief."""
        return tuple(
            OpenRound(
                number,
                self._describe(w.plan_id),
                tuple(member.task for member in self._missing(w)),
                w.plan_id in self.plans,
            )
            for number, w in sorted(self._open.items())
        ) + tuple(
            OpenRound(said.round, "a section of an epoch that is not known here yet", (), False)
            for pushes in self._parked.values()
            for said, *_ in pushes[:1]
        )

    def _missing(self, waiting: _Open) -> list[Member]:
        epoch = self._epochs.get(waiting.epoch)
        if epoch is None:
            return []
        return [m for m in epoch.members if m.session not in waiting.parts and m.session not in self.fenced]

    def _fail(self, waiting: _Open, error: PSError) -> None:
        self._failed += [(future, error) for _, future in waiting.waiters]
        waiting.waiters.clear()


def sent(plan: Plan, server: int, said: Contribution) -> list[TensorSpec]:
    """What a payload to a server holds: contributions that count, then operands; nothing from who observes."""
    if said.observes:
        return []
    specs = [
        reduction.tensor
        for reduction, weight in zip(plan.reductions, said.weights, strict=False)
        if weight and server in reduction.servers
    ]
    return specs + [operand.tensor for operand in plan.operands if server in operand.servers]
