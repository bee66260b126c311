"""Rounds: who has contributed to which, when one is complete, and what was answered.

A plain state machine without clock, network or array work. It says which round can run; the core runs
it and says how it went. Rounds form strands: in sync mode one, which all members make together; in async mode
one for each task, whose rounds are of that task alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from math import isfinite

from psserver.plans.prepared import PreparedPlan
from psserver.plans.round import Commit, Key, MemberShare, ReadyRound
from psserver.state.sessions import diverged, newcomer_diverged
from pswire.api import Contribution, RoundReply
from pswire.cluster import Task
from pswire.errors import Diverged, Fenced, InvalidRequest, PSError
from pswire.model.log import Epoch, Member, Position
from pswire.model.status import OpenRound, WorkerProgress
from pswire.model.tensor import Array
from pswire.transport.payload import Payload

Failure = tuple[Future[RoundReply], PSError]
Waiter = tuple[Contribution, Future[RoundReply]]
_Push = tuple[Contribution, Payload, float, Future[RoundReply]]

RESENDS = 8
"""Attempts at one contribution that are kept while its epoch is not known here."""

LATER = "a later section; it made none here"
"""What a member is at that has left a round out."""

RECORDS = 2
"""Rounds whose answers are kept for resends: a worker has one round under way, never two."""


@dataclass
class _Open:
    plan_id: bytes
    epoch: int
    members: tuple[Member, ...]
    since: float
    parts: dict[int, MemberShare] = field(default_factory=dict)
    waiters: list[Waiter] = field(default_factory=list)
    error: PSError | None = None
    doubtful: list[_Push] = field(default_factory=list)  # newcomers' that differ, before an older member has pushed

    @property
    def positions(self) -> tuple[Position, ...]:
        """Where the datasets stand of who makes it."""
        return next((part.said.positions for part in self.parts.values() if part.said.positions), ())


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
    open: dict[int, _Open] = field(default_factory=dict)

    @property
    def newest(self) -> int:
        """The last round that somebody has contributed to, complete or not."""
        return max([self.last, *self.open])

    @property
    def positions(self) -> tuple[Position, ...]:
        """Where the datasets stand of who makes it, as the newest round says."""
        found = (self.open[number].positions for number in sorted(self.open, reverse=True))
        return next(filter(None, found), self.settled)


class Rounds:
    """All rounds of one server. Guarded by the core's lock.

    Args:
        describe: a plan in words, approved or not, for messages.

    Attributes:
        last: the last complete round, -1 before the first; in async mode the number of complete ones, less one.
        closed: how many rounds are over that a checkpoint may be ordered in: all; in async mode, where one task alone
            saves, those in which one was.
        strands: all rounds; the strand whose turn it is comes first.
    """

    def __init__(self, describe: Callable[[bytes], str]) -> None:
        self._describe = describe
        self.clear()

    def clear(self) -> None:
        """Forgets everything, as at the start of a job."""
        self.plans: dict[bytes, PreparedPlan] = {}
        self.epoch: Epoch | None = None
        self.last = -1
        self.closed = 0
        self.strands: dict[Key, Strand] = {None: Strand()}
        self.fenced: set[int] = set()
        self.refused: dict[bytes, PSError] = {}
        self._epochs: dict[int, Epoch] = {}
        # Pushes labelled with an epoch that was not copied here yet, by session: they are no rounds of ours so far.
        self._parked: dict[int, list[_Push]] = {}
        self._failed: list[Failure] = []
        self._followed: list[tuple[Payload, Payload]] = []
        self._running = False

    @property
    def positions(self) -> tuple[Position, ...]:
        """Where the datasets stand of those who make rounds together."""
        return self.strands[None].positions

    @property
    def places(self) -> tuple[WorkerProgress, ...]:
        """Where each task stands that makes rounds of its own, in task order."""
        own = sorted((key, strand) for key, strand in self.strands.items() if key)
        return tuple(WorkerProgress(task, strand.newest, strand.positions) for task, strand in own)

    def approve(self, plan: PreparedPlan) -> None:
        """A plan may run from now on."""
        plan_id = plan.plan.id
        self.plans[plan_id] = plan
        for _, waiting in self._open():
            if waiting.plan_id == plan_id:
                for part in list(waiting.parts.values()):
                    self._admit(waiting, part, plan)

    def refuse(self, plan_id: bytes, error: PSError) -> None:
        """A plan was approved that cannot run here: whoever pushes for it is told why."""
        self.refused[plan_id] = error
        for _, waiting in self._open():
            if waiting.plan_id == plan_id:
                waiting.error = error
                self._fail(waiting, error)

    def take_failed(self) -> list[Failure]:
        """Futures that are to be failed, since the last time; the caller does it without the lock."""
        failed, self._failed = self._failed, []
        return failed

    def take_followed(self) -> list[tuple[Payload, Payload]]:
        """Contributions, and what was sent again of each, since the last time; to be joined without the lock."""
        followed, self._followed = self._followed, []
        return followed

    def close_epoch(self, epoch: Epoch) -> None:
        """A new epoch holds: members of the one before that are not in it are fenced."""
        if self.epoch is not None:
            self.fenced |= {m.session for m in self.epoch.members} - {m.session for m in epoch.members}
        self.epoch = self._epochs[epoch.number] = epoch
        parked, self._parked = self._parked, {}
        for said, payload, since, future in (push for pushes in parked.values() for push in pushes):
            try:
                self.push(said, payload, future, since)
            except PSError as error:
                self._failed.append((future, error))

    def check(self, session: int) -> None:
        """Raises `Fenced` for a session that an epoch ended."""
        if session in self.fenced:
            raise Fenced("this session was ended by a new epoch; restart the process to take part again")

    def push(self, said: Contribution, payload: Payload, future: Future[RoundReply], now: float) -> None:
        """Takes a contribution, now; its future is answered when the round is over, or is among `take_failed`.

        Raises:
            PSError: why this contribution cannot be taken.
        """
        if said.plan_id in self.refused:
            raise self.refused[said.plan_id]
        if said.weights and not (isfinite(sum(said.weights)) and min(said.weights) >= 0):
            raise InvalidRequest(f"weights {said.weights} are no counts")
        if said.observes and any(said.weights):
            raise InvalidRequest("who observes contributes nothing")
        epoch = self._epochs.get(said.epoch)
        if epoch is None:
            self._park(said, payload, now, future)
            return
        member = epoch.session(said.session)
        if member is None:
            raise Fenced(f"this session is no member of epoch {said.epoch}; restart the process")
        strand = self.strands.setdefault(_key(member), Strand())
        if said.round <= strand.last:
            raise InvalidRequest(f"round {said.round} is over; this server is at {strand.last}")
        self._check_order(strand, said, member)
        members = (member,) if _key(member) else epoch.members
        waiting = strand.open.setdefault(said.round, _Open(said.plan_id, said.epoch, members, now))
        if self._differs(waiting, said) and self._joins(said) and self._only_newcomers(waiting):
            waiting.doubtful.append((said, payload, now, future))
            return
        self._check_plan(waiting, said, member)
        self._take(waiting, said, member, payload, future)
        if waiting.doubtful and not self._joins(said):
            self._settle(waiting)

    def _take(
        self, waiting: _Open, said: Contribution, member: Member, payload: Payload, future: Future[RoundReply]
    ) -> None:
        """Adds a push to its round."""
        found = waiting.parts.get(said.session)
        if waiting.error is not None:
            waiting.waiters.append((said, future))
            self._fail(waiting, waiting.error)
            return
        if found is not None and (found.said.weights, found.payload.size) != (said.weights, payload.size):
            raise InvalidRequest(f"round {said.round} of this session is sent again with another payload")
        waiting.waiters.append((said, future))
        if found is not None:
            # A resend does not replace what is there: its arrays may already be in use. It brings what is not.
            if found.payload is not payload:
                self._followed.append((found.payload, payload))
        else:
            part = MemberShare(member, said, payload)
            waiting.parts[said.session] = part
            if plan := self.plans.get(said.plan_id):
                self._admit(waiting, part, plan)

    def _check_plan(self, waiting: _Open, said: Contribution, member: Member) -> None:
        """All who make a round have one plan for it; one that is alone in it does not disagree with others.

        Of a newcomer in its first round, and those who were there before, the newcomer is wrong, whoever came first.
        """
        if not self._differs(waiting, said):
            return
        if waiting.members == (member,):
            raise InvalidRequest(f"round {said.round} of this session has another plan, or another epoch")
        if self._joins(said):
            other = next(iter(waiting.parts.values()))
            raise self._refusal(said.round, member, said.plan_id, other.member, waiting.plan_id)
        if self._only_newcomers(waiting):
            self._evict(waiting, said, member)
            return
        waiting.error = self._diverged(said.round, waiting, member, self._describe(said.plan_id))

    @staticmethod
    def _differs(waiting: _Open, said: Contribution) -> bool:
        """Returns whether a push is for something else than its round, which has not failed yet."""
        return waiting.error is None and (waiting.plan_id, waiting.epoch) != (said.plan_id, said.epoch)

    def _joins(self, said: Contribution) -> bool:
        """Whether it is the first round of a process that came to others, and did not begin together with all."""
        start = self._epochs[said.epoch].start
        return said.start == said.round and (start is None or start.round != said.round)

    def _only_newcomers(self, waiting: _Open) -> bool:
        """Returns whether none has pushed yet who was there before."""
        return bool(waiting.parts) and all(self._joins(part.said) for part in waiting.parts.values())

    def _refusal(self, round: int, member: Member, plan_id: bytes, other: Member, others: bytes) -> PSError:
        positions = [(other.task, self._describe(others)), (member.task, self._describe(plan_id))]
        return newcomer_diverged(member.task, round, positions)

    def _evict(self, waiting: _Open, said: Contribution, member: Member) -> None:
        """Newcomers came first, with another plan than a member who was there before them."""
        for one, future in waiting.waiters:
            newcomer = waiting.parts[one.session].member
            self._failed.append((future, self._refusal(said.round, newcomer, waiting.plan_id, member, said.plan_id)))
        waiting.parts.clear()
        waiting.waiters.clear()
        waiting.plan_id, waiting.epoch = said.plan_id, said.epoch

    def _settle(self, waiting: _Open) -> None:
        """A member who was there before has pushed: newcomers who differed from each other are right, or wrong."""
        doubtful, waiting.doubtful = waiting.doubtful, []
        for said, payload, since, future in doubtful:
            try:
                self.push(said, payload, future, since)
            except PSError as error:
                self._failed.append((future, error))

    def members(self, number: int) -> tuple[Member, ...]:
        """The members of an epoch that is known here."""
        return self._epochs[number].members

    def _diverged(self, round: int, waiting: _Open, member: Member, section: str) -> Diverged:
        other = next(iter(waiting.parts.values()), None)
        positions = [(other.member.task, self._describe(waiting.plan_id))] if other else []
        return diverged(round, [*positions, (member.task, section)])

    def _park(self, said: Contribution, payload: Payload, now: float, future: Future[RoundReply]) -> None:
        parked = self._parked.get(said.session, [])
        if any(other.round != said.round for other, *_ in parked):
            raise InvalidRequest(f"round {parked[0][0].round} of this session waits; it cannot begin {said.round}")
        if len(parked) >= RESENDS:
            # Its sender, who sends again and again over a network that loses answers, listens to it no more.
            (*_, oldest), *parked = parked
            self._failed.append((oldest, InvalidRequest(f"round {said.round} was sent {RESENDS} times since")))
        self._parked[said.session] = [*parked, (said, payload, now, future)]

    def _check_order(self, strand: Strand, said: Contribution, member: Member) -> None:
        """A worker makes one round after the other: it neither begins a second one nor leaves one out."""
        for number, waiting in strand.open.items():
            if number != said.round and said.session in waiting.parts:
                raise InvalidRequest(f"round {number} of this session is under way; it cannot begin {said.round}")
            if number < said.round and waiting.error is None and member in self._missing(waiting):
                waiting.error = self._diverged(number, waiting, member, LATER)
                self._fail(waiting, waiting.error)
                raise waiting.error
            if number > said.round and waiting.error is None:
                here = self._epochs[said.epoch].members
                ahead = [m.task for m in here if m.session in waiting.parts.keys() - self.fenced]
                if ahead:
                    section = self._describe(said.plan_id)
                    waiting.error = diverged(said.round, [(ahead[0], LATER), (member.task, section)])
                    self._fail(waiting, waiting.error)
                    raise waiting.error

    def _admit(self, waiting: _Open, part: MemberShare, prepared: PreparedPlan) -> None:
        """Refuses a contribution that does not fit its plan; its sender alone is told."""
        said, reductions = part.said, prepared.plan.reductions
        layout = prepared.layout(said)
        if len(said.weights) == len(reductions) and part.payload.size == layout.size:
            if self._streams(prepared, waiting):
                part.payload.reader = layout.window
            return
        del waiting.parts[said.session]
        here = sum(prepared.server in reduction.servers for reduction in reductions)
        error = InvalidRequest(
            f"a contribution of {part.payload.size} bytes and {len(said.weights)} weights does not fit a "
            f"section of {layout.size} bytes and {len(reductions)} reductions, {here} of them here"
        )
        for one in [w for w in waiting.waiters if w[0].session == said.session]:
            waiting.waiters.remove(one)
            self._failed.append((one[1], error))

    def recorded(self, said: Contribution) -> Record | None:
        """The answer to a round that is over; None while it is not."""
        epoch = self._epochs.get(said.epoch)
        member = epoch.session(said.session) if epoch else None
        strand = self.strands.get(_key(member)) if epoch else None
        record = strand.records.get(said.round) if strand else None
        if record is None or record.error is not None:
            return record
        if record.plan_id != said.plan_id:
            raise InvalidRequest(f"round {said.round} had another plan")
        if said.session not in record.sessions:
            raise Fenced(f"round {said.round} was made without this session; restart the process")
        return record

    def next_job(self) -> ReadyRound | None:
        """The round that can run now, if any; it counts as running until `complete` or `fail`."""
        if self._running:
            return None
        found = (self._first(key, strand) for key, strand in list(self.strands.items()))
        return next((job for job in found if job), None)

    def _first(self, key: Key, strand: Strand) -> ReadyRound | None:
        """The first round of a strand, if it can run."""
        while strand.open:
            number = min(strand.open)
            waiting = strand.open[number]
            if waiting.error is not None:
                # Its members were told already, and nothing of it may be applied.
                self._close(key, number, Record(waiting.plan_id, error=waiting.error))
            elif self._awaited(waiting):
                return None
            elif not self._usable(waiting):
                # All who could have been in it are gone, and left nothing; it must not stop those after it.
                del strand.open[number]
            else:
                return self._job(key, number, waiting)
        return None

    def _awaited(self, waiting: _Open) -> bool:
        """Whether a round has to wait for a member: until it is there whole, or has begun where the round streams."""
        plan = self.plans.get(waiting.plan_id)
        streams = plan is not None and self._streams(plan, waiting)
        for member in waiting.members:
            part = waiting.parts.get(member.session)
            if member.session not in self.fenced and (part is None or not (streams or part.payload.whole)):
                return True
        return plan is None

    def _usable(self, waiting: _Open) -> list[MemberShare]:
        """The contributions that count, in task order: what a member that is gone did not send whole does not."""
        parts = sorted(waiting.parts.values(), key=lambda part: part.member.task)
        return [part for part in parts if part.payload.whole or part.member.session not in self.fenced]

    def _streams(self, plan: PreparedPlan, waiting: _Open) -> bool:
        """Whether a round begins before its contributions are whole. One that is small, or that may fail, does not."""
        together = all(member.mode == "sync" for member in waiting.members)
        return together and plan.streams

    def _job(self, key: Key, number: int, waiting: _Open) -> ReadyRound:
        plan = self.plans[waiting.plan_id]
        self._running = True
        parts = self._usable(waiting)
        there = {part.member.session for part in parts}
        streams = self._streams(plan, waiting) and not all(part.said.observes for part in parts)
        return ReadyRound(
            number,
            plan,
            tuple(parts),
            tuple(m.task for m in waiting.members if m.session not in there),
            partial(self._describe, waiting.plan_id),
            key,
            Commit.PROGRESSIVE if streams else Commit.ATOMIC,
            waiting.since,
        )

    def complete(
        self, job: ReadyRound, given: Sequence[Array], dropped: Sequence[Task] = (), warnings: Sequence[str] = ()
    ) -> tuple[Record, list[Waiter]]:
        """A round has run; returns its answer, which is kept, and who waits for it.

        Args:
            job: the round.
            given: the plan's returned values of this server.
            dropped: members that were lost while it ran, before their contributions were whole.
            warnings: what people are told of it.
        """
        record = Record(
            job.plan.id,
            frozenset(part.member.session for part in job.parts),
            self.epoch,
            any(part.said.more for part in job.parts),
            tuple(sorted((*job.left_out, *dropped))),
            tuple(given),
            warnings=tuple(warnings),
        )
        return record, self._close(job.strand, job.round, record)

    def fail(self, job: ReadyRound, error: PSError) -> tuple[Record, list[Waiter]]:
        """A round could not run: everyone is told the same, and nothing of it was applied."""
        # A new one: the traceback of the old one holds all that the round had.
        record = Record(job.plan.id, error=type(error)(error.message, error.task))
        return record, self._close(job.strand, job.round, record)

    def _close(self, key: Key, number: int, record: Record) -> list[Waiter]:
        self._running = False
        self.last = self.last + 1 if key else number
        plan = self.plans.get(record.plan_id)
        self.closed += key is None or (plan is not None and plan.plan.snapshot is not None)
        # To the end of the line: who pushes fast must not keep the others from their turn.
        strand = self.strands[key] = self.strands.pop(key)
        strand.last = number
        strand.records[number] = record
        for old in sorted(strand.records)[:-RECORDS]:
            del strand.records[old]
        waiting = strand.open.pop(number)
        strand.settled = waiting.positions or strand.settled
        return waiting.waiters

    def abandon(self, error: PSError) -> None:
        """Ends all that waits with one error."""
        for session in self.sessions():
            self.fail_session(session, error)

    def fail_session(self, session: int, error: PSError) -> None:
        """Ends what a session waits for."""
        for _, waiting in self._open():
            self._failed += [(push[-1], error) for push in waiting.doubtful if push[0].session == session]
            waiting.doubtful = [push for push in waiting.doubtful if push[0].session != session]
            self._failed += [(future, error) for said, future in waiting.waiters if said.session == session]
            waiting.waiters = [w for w in waiting.waiters if w[0].session != session]
        self._failed += [(future, error) for *_, future in self._parked.pop(session, [])]

    def sessions(self) -> set[int]:
        """Returns who waits."""
        waiting = [waiting for _, waiting in self._open()]
        found = {said.session for one in waiting for said, _ in one.waiters}
        return found | {push[0].session for one in waiting for push in one.doubtful} | set(self._parked)

    def waiting(self) -> tuple[OpenRound, ...]:
        """The open rounds, for people and for the chief."""
        return tuple(
            OpenRound(
                number,
                self._describe(w.plan_id),
                tuple(member.task for member in self._missing(w)),
                w.plan_id in self.plans,
            )
            for number, w in sorted(self._open(), key=lambda item: item[0])
        ) + tuple(
            OpenRound(said.round, "a section of an epoch that is not known here yet", (), False)
            for (said, *_), *_ in self._parked.values()
        )

    def _open(self) -> Iterator[tuple[int, _Open]]:
        """All rounds that wait."""
        return (item for strand in self.strands.values() for item in strand.open.items())

    def runs(self, job: ReadyRound) -> bool:
        """Returns whether a round that was begun is not over yet."""
        return self._running and job.round in self.strands[job.strand].open

    def waiters(self, job: ReadyRound) -> list[Waiter]:
        """Returns who waits for a round that runs."""
        return list(self.strands[job.strand].open[job.round].waiters)

    def _missing(self, waiting: _Open) -> list[Member]:
        """Members whose contribution is not there whole."""
        whole = {session for session, part in waiting.parts.items() if part.payload.whole}
        return [m for m in waiting.members if m.session not in whole | self.fenced]

    def _fail(self, waiting: _Open, error: PSError) -> None:
        self._failed += [(future, error) for _, future in waiting.waiters]
        self._failed += [(push[-1], error) for push in waiting.doubtful]
        waiting.waiters.clear()
        waiting.doubtful.clear()


def _key(member: Member | None) -> Key:
    return member.task if member and member.mode == "async" else None
