"""Rounds: who has contributed to which, when one is complete, and what was answered.

A plain state machine without clock, network or array work. It says which round can run; the core runs
it and says how it went. Each method returns what is to be done as effects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from math import isfinite

from psserver.effects import Effect, Fail, Run
from psserver.plans.prepared import PreparedPlan
from psserver.plans.round import Key, MemberShare, ReadyRound
from psserver.state.sessions import diverged, newcomer_diverged
from psserver.state.strands import Parked, PendingRound, Push, Record, Strand, Waiter
from pswire.api import Contribution, RoundReply
from pswire.cluster import Task
from pswire.errors import Diverged, Fenced, InvalidRequest, PSError
from pswire.model.log import Epoch, Member, Position
from pswire.model.status import OpenRound, WorkerProgress
from pswire.model.tensor import Array
from pswire.transport.payload import Payload

LATER = "a later section; it made none here"
"""What a member is at that has left a round out."""

RECORDS = 2
"""Rounds whose answers are kept for resends: a worker has one round under way, never two."""


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
        self._parked = Parked()
        self._effects: list[Effect] = []  # of the method that is called, which returns them
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

    @property
    def in_flight(self) -> int:
        """Bytes of contributions that are here and were not let go of."""
        payloads = [part.payload for _, pending in self._open() for part in pending.parts.values()]
        return sum(payload.end - payload.begin for payload in payloads)

    def approve(self, plan: PreparedPlan) -> list[Effect]:
        """A plan may run from now on."""
        plan_id = plan.plan.id
        self.plans[plan_id] = plan
        for _, pending in self._open():
            if pending.plan_id == plan_id:
                for part in list(pending.parts.values()):
                    self._admit(pending, part, plan)
        return self._take_effects()

    def refuse(self, plan_id: bytes, error: PSError) -> list[Effect]:
        """A plan was approved that cannot run here: whoever pushes for it is told why."""
        self.refused[plan_id] = error
        return [effect for _, pending in self._open() if pending.plan_id == plan_id for effect in pending.fail(error)]

    def _take_effects(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects

    def close_epoch(self, epoch: Epoch) -> list[Effect]:
        """A new epoch holds: members of the one before that are not in it are fenced."""
        if self.epoch is not None:
            self.fenced |= {m.session for m in self.epoch.members} - {m.session for m in epoch.members}
        self.epoch = self._epochs[epoch.number] = epoch
        for push in self._parked.take():
            self._try(push)
        return self._take_effects()

    def check(self, session: int) -> None:
        """Raises `Fenced` for a session that an epoch ended."""
        if session in self.fenced:
            raise Fenced("this session was ended by a new epoch; restart the process to take part again")

    def push(self, said: Contribution, payload: Payload, future: Future[RoundReply], now: float) -> list[Effect]:
        """Takes a contribution, now; its future is answered when the round is over, or with the reason now."""
        self._try(Push(said, payload, now, future))
        return self._take_effects()

    def _try(self, push: Push) -> None:
        try:
            self._push(push)
        except PSError as error:
            self._effects.append(Fail(push.future, error))

    def _push(self, push: Push) -> None:
        """Takes a contribution; raises why it cannot be taken."""
        said = push.said
        if said.plan_id in self.refused:
            raise self.refused[said.plan_id]
        if said.weights and not (isfinite(sum(said.weights)) and min(said.weights) >= 0):
            raise InvalidRequest(f"weights {said.weights} are no counts")
        if said.observes and any(said.weights):
            raise InvalidRequest("who observes contributes nothing")
        epoch = self._epochs.get(said.epoch)
        if epoch is None:
            self._effects += self._parked.put(push)
            return
        member = epoch.session(said.session)
        if member is None:
            raise Fenced(f"this session is no member of epoch {said.epoch}; restart the process")
        strand = self.strands.setdefault(_key(member), Strand())
        if said.round <= strand.last:
            raise InvalidRequest(f"round {said.round} is over; this server is at {strand.last}")
        self._check_order(strand, said, member)
        members = (member,) if _key(member) else epoch.members
        pending = strand.open.setdefault(said.round, PendingRound(said.plan_id, said.epoch, members, push.since))
        if pending.differs(said) and self._joins(said) and self._only_newcomers(pending):
            pending.doubtful.append(push)
            return
        self._check_plan(pending, said, member)
        self._take(pending, push, member)
        if pending.doubtful and not self._joins(said):
            self._settle(pending)

    def _take(self, pending: PendingRound, push: Push, member: Member) -> None:
        """Adds a push to its round."""
        said, payload = push.said, push.payload
        found = pending.parts.get(said.session)
        if pending.error is not None:
            raise pending.error
        if found is not None and (found.said.weights, found.payload.size) != (said.weights, payload.size):
            raise InvalidRequest(f"round {said.round} of this session is sent again with another payload")
        pending.waiters.append((said, push.future))
        if found is not None:
            # A resend does not replace what is there: its arrays may already be in use. It brings what is not.
            if found.payload is not payload:
                self._effects.append(Run(found.payload.follow, (payload,)))
        else:
            part = MemberShare(member, said, payload)
            pending.parts[said.session] = part
            if plan := self.plans.get(said.plan_id):
                self._admit(pending, part, plan)

    def _check_plan(self, pending: PendingRound, said: Contribution, member: Member) -> None:
        """All who make a round have one plan for it; one that is alone in it does not disagree with others.

        Of a newcomer in its first round, and those who were there before, the newcomer is wrong, whoever came first.
        """
        if not pending.differs(said):
            return
        if pending.members == (member,):
            raise InvalidRequest(f"round {said.round} of this session has another plan, or another epoch")
        if self._joins(said):
            other = next(iter(pending.parts.values()))
            raise self._refusal(said.round, member, said.plan_id, other.member, pending.plan_id)
        if self._only_newcomers(pending):
            self._evict(pending, said, member)
            return
        raise self._fail(pending, self._diverged(said.round, pending, member, self._describe(said.plan_id)))

    def _joins(self, said: Contribution) -> bool:
        """Whether it is the first round of a process that came to others, and did not begin together with all."""
        start = self._epochs[said.epoch].start
        return said.start == said.round and (start is None or start.round != said.round)

    def _only_newcomers(self, pending: PendingRound) -> bool:
        """Returns whether none has pushed yet who was there before."""
        return bool(pending.parts) and all(self._joins(part.said) for part in pending.parts.values())

    def _refusal(self, round: int, member: Member, plan_id: bytes, other: Member, others: bytes) -> PSError:
        positions = [(other.task, self._describe(others)), (member.task, self._describe(plan_id))]
        return newcomer_diverged(member.task, round, positions)

    def _evict(self, pending: PendingRound, said: Contribution, member: Member) -> None:
        """Newcomers came first, with another plan than a member who was there before them."""
        for one, future in pending.waiters:
            newcomer = pending.parts[one.session].member
            refusal = self._refusal(said.round, newcomer, pending.plan_id, member, said.plan_id)
            self._effects.append(Fail(future, refusal))
        pending.parts.clear()
        pending.waiters.clear()
        pending.plan_id, pending.epoch = said.plan_id, said.epoch

    def _settle(self, pending: PendingRound) -> None:
        """A member who was there before has pushed: newcomers who differed from each other are right, or wrong."""
        doubtful, pending.doubtful = pending.doubtful, []
        for push in doubtful:
            self._try(push)

    def members(self, number: int) -> tuple[Member, ...]:
        """The members of an epoch that is known here."""
        return self._epochs[number].members

    def _diverged(self, round: int, pending: PendingRound, member: Member, section: str) -> Diverged:
        other = next(iter(pending.parts.values()), None)
        positions = [(other.member.task, self._describe(pending.plan_id))] if other else []
        return diverged(round, [*positions, (member.task, section)])

    def _check_order(self, strand: Strand, said: Contribution, member: Member) -> None:
        """A worker makes one round after the other: it neither begins a second one nor leaves one out."""
        for number, pending in strand.open.items():
            if number != said.round and said.session in pending.parts:
                raise InvalidRequest(f"round {number} of this session is under way; it cannot begin {said.round}")
            if number < said.round and pending.error is None and member in pending.missing(self.fenced):
                raise self._fail(pending, self._diverged(number, pending, member, LATER))
            if number > said.round and pending.error is None:
                here = self._epochs[said.epoch].members
                ahead = [m.task for m in here if m.session in pending.parts.keys() - self.fenced]
                if ahead:
                    section = self._describe(said.plan_id)
                    raise self._fail(pending, diverged(said.round, [(ahead[0], LATER), (member.task, section)]))

    def _admit(self, pending: PendingRound, part: MemberShare, prepared: PreparedPlan) -> None:
        """Refuses a contribution that does not fit its plan; its sender alone is told."""
        said, reductions = part.said, prepared.plan.reductions
        layout = prepared.layout(said)
        if len(said.weights) == len(reductions) and part.payload.size == layout.size:
            if pending.streams(prepared):
                part.payload.reader = layout.window
            return
        del pending.parts[said.session]
        here = sum(prepared.server in reduction.servers for reduction in reductions)
        error = InvalidRequest(
            f"a contribution of {part.payload.size} bytes and {len(said.weights)} weights does not fit a "
            f"section of {layout.size} bytes and {len(reductions)} reductions, {here} of them here"
        )
        for one in [w for w in pending.waiters if w[0].session == said.session]:
            pending.waiters.remove(one)
            self._effects.append(Fail(one[1], error))

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
            pending = strand.open[number]
            if pending.error is not None:
                # Its members were told already, and nothing of it may be applied.
                self._close(key, number, Record(pending.plan_id, error=pending.error))
            elif pending.awaits(plan := self.plans.get(pending.plan_id), self.fenced) or plan is None:
                return None
            elif not pending.usable(self.fenced):
                # All who could have been in it are gone, and left nothing; it must not stop those after it.
                del strand.open[number]
            else:
                self._running = True
                section = partial(self._describe, pending.plan_id)
                return pending.ready(number, plan, self.fenced, section, key)
        return None

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
        record = Record.of(job, self.epoch, given, dropped, warnings)
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
        return strand.close(number, record, RECORDS)

    def abandon(self, error: PSError) -> list[Effect]:
        """Ends all that waits with one error."""
        return [effect for session in self.sessions() for effect in self.fail_session(session, error)]

    def fail_session(self, session: int, error: PSError) -> list[Effect]:
        """Ends what a session waits for."""
        effects = [effect for _, pending in self._open() for effect in pending.fail_session(session, error)]
        return effects + self._parked.fail_session(session, error)

    def sessions(self) -> set[int]:
        """Returns who waits."""
        return self._parked.sessions.union(*(pending.sessions for _, pending in self._open()))

    def waiting(self) -> tuple[OpenRound, ...]:
        """The open rounds, for people and for the chief."""
        return (
            tuple(
                OpenRound(
                    number,
                    self._describe(w.plan_id),
                    tuple(member.task for member in w.missing(self.fenced)),
                    w.plan_id in self.plans,
                )
                for number, w in sorted(self._open(), key=lambda item: item[0])
            )
            + self._parked.waiting
        )

    def _open(self) -> Iterator[tuple[int, PendingRound]]:
        """All rounds that wait."""
        return (item for strand in self.strands.values() for item in strand.open.items())

    def runs(self, job: ReadyRound) -> bool:
        """Returns whether a round that was begun is not over yet."""
        return job.round in self.strands[job.strand].open

    def waiters(self, job: ReadyRound) -> list[Waiter]:
        """Returns who waits for a round that runs."""
        return list(self.strands[job.strand].open[job.round].waiters)

    def _fail(self, pending: PendingRound, error: PSError) -> PSError:
        """Fails a round; returns the error."""
        self._effects += pending.fail(error)
        return error


def _key(member: Member | None) -> Key:
    return member.task if member and member.mode == "async" else None
