"""Rounds: gathers contributions, finds the rounds that can run, and keeps their answers.

A plain state machine without clock, network or array work. It says which round can run; the core runs it and reports
the result. Methods return effects.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future
from dataclasses import replace

from psserver.effects import Effect, Fail, Run
from psserver.plans.policy import Policy
from psserver.plans.prepared import PreparedPlan
from psserver.plans.round import Key, MemberShare, ReadyRound, Record, ReturnedValues, SessionSequence
from psserver.rounds.backlog import Backlog
from psserver.rounds.changes import excluded, go_on
from psserver.rounds.clocks import Clocks
from psserver.rounds.closure_rounds import ClosuresOver, same_closure, take_over
from psserver.rounds.late_contributions import LateContributions
from psserver.rounds.pending_round import PendingRound, Push, Waiter, check_weights
from psserver.rounds.plan_errors import PlanErrors, different_batches, joins, only_newcomers
from psserver.rounds.sequences import (
    FairQueue,
    Parked,
    RoundSequence,
    check_window,
    forget_own,
    kept,
    places_of,
)
from psserver.rounds.sums import check_sum
from psserver.rounds.votes import Votes
from psserver.state.sessions import diverged
from pswire.api import Contribution, RoundReply
from pswire.cluster import Task
from pswire.errors import Fenced, InvalidRequest, PSError, PushAgain
from pswire.limits import CLOSURE_ROUNDS
from pswire.model.changes import change_of
from pswire.model.consistency import ASYNC
from pswire.model.log import Generation, Member, Position
from pswire.model.status import WorkerProgress
from pswire.network.payload import Payload
from pswire.servers.votes import Vote

ALONE = Policy()
"""That of a round whose plan is not known: no other server decides on it."""

Place = tuple[Generation | None, Member | None, Key]
"""Where a contribution belongs: its generation, None for one that is not known here; its sender as it makes the round,
None for no member of that; and its sequence."""

LATER = "a later step (it skipped this round)"
"""The section, in words, of a member that has left out a round."""


class Rounds:
    """All rounds of one server. Guarded by the core's lock.

    Args:
        describe: returns a plan in words, approved or not, for messages.
        votes: the votes by which the servers of a plan agree on the contributions of a round.
        applied: is told of each round that was applied.

    Attributes:
        backlog: rounds that are over here, and are made later.
        parked: pushes that wait until their generation is known here.
        last: the last complete round, -1 before the first; in asynchronous mode the number of complete rounds, less
            one.
        closed: number of rounds that are over, in asynchronous mode only of those that order a checkpoint.
        sequences: all sequences, with their rounds.
        generations: all of them that are known here, by number.
        clocks: how far the workers with bounded staleness are.
        late: contributions that are merged into the next round, with a quorum.
        now: the time of the last stimulus, in monotonic seconds.
    """

    def __init__(
        self, describe: Callable[[bytes], str], votes: Votes, applied: Callable[[ReadyRound], None] = lambda job: None
    ) -> None:
        self.describe = describe
        self._errors = PlanErrors(describe)
        self.votes = votes
        self.backlog = Backlog()
        self.plans: dict[bytes, PreparedPlan] = {}
        self.generation: Generation | None = None
        self.last, self.closed, self.now = -1, 0, 0.0
        self.sequences: dict[Key, RoundSequence] = {None: RoundSequence()}
        self.clocks = Clocks()
        self.fenced: set[int] = set()
        self.late = LateContributions(self.plans, self.sequences, self.fenced, votes)
        self.refused: dict[bytes, PSError] = {}
        self._declined: dict[bytes, PreparedPlan] = {}
        self.generations: dict[int, Generation] = {}
        self.parked = Parked()
        self._effects: list[Effect] = []  # of the running method, which returns them
        self._running: tuple[Key, int] | None = None
        self._turns = FairQueue()
        self._closures = ClosuresOver()
        self._applied = applied

    @property
    def positions(self) -> tuple[Position, ...]:
        """Positions of the synchronous members' datasets."""
        return self.sequences[None].positions

    @property
    def places(self) -> tuple[WorkerProgress, ...]:
        """Last round, dataset positions and clock of each task that makes rounds of its own, in task order."""
        return places_of(self.sequences, self.clocks.all)

    @property
    def in_flight(self) -> int:
        """Bytes of contributions that are held and not released."""
        sent = (part.payload for _, each in self._open() for part in each.sent)
        return self.late.nbytes + sum(payload.end - payload.begin for payload in sent)

    def approve(self, plan: PreparedPlan) -> list[Effect]:
        """Approves a plan: its rounds may run from now on."""
        plan_id = plan.plan.id
        self.plans[plan_id] = plan
        for _, pending in self._open():
            if pending.plan_id == plan_id:
                for part in pending.sent:
                    self._admit(pending, part, plan)
        return self._take_effects()

    def refuse(self, plan: PreparedPlan, error: PSError) -> list[Effect]:
        """Refuses an approved plan that cannot run here: every contribution to it fails with this error."""
        plan_id = plan.plan.id
        self.refused[plan_id], self._declined[plan_id] = error, plan
        return [effect for _, pending in self._open() if pending.plan_id == plan_id for effect in pending.fail(error)]

    def _take_effects(self) -> list[Effect]:
        self._effects, effects = [], self._effects
        return effects

    def close_generation(self, generation: Generation) -> list[Effect]:
        """Enters a new generation. Members of the previous one that are not in it, and do not leave by it, are fenced.

        One that begins with a change fences nobody: who is not in it waits to be taken in.
        """
        if (change := change_of(generation)) is not None:
            self._effects += go_on(self.sequences, self.generation, generation, self._running)
            self.last, self.clocks = change.round - 1, Clocks()
        self.fenced |= excluded(self.generation, generation)
        forget_own(self.sequences, self.fenced)
        self.clocks.close_generation(self.generation if change is None else None, generation)
        self.generation = self.generations[generation.number] = generation
        for push in self.parked.take():
            self._try(push)
        return self._take_effects()

    def push(
        self, said: Contribution, payload: Payload, future: Future[RoundReply], now: float, place: Place | None = None
    ) -> list[Effect]:
        """Takes a contribution at time `now`. Its future is answered when the round is over, or fails at once."""
        self._try(Push(said, payload, now, future), place)
        return self._take_effects()

    def _try(self, push: Push, place: Place | None = None) -> None:
        try:
            self._push(push, place or place_of(push.said, self.generations))
        except PSError as error:
            self._effects.append(Fail(push.future, error))

    def _push(self, push: Push, place: Place) -> None:
        """Takes a contribution.

        Raises:
            PSError: why it cannot be taken.
        """
        said, (generation, member, key) = push.said, place
        if said.plan_id in self.refused:
            raise self.refused[said.plan_id]
        check_weights(said)
        if generation is None:
            self._effects += self.parked.put(push)
            return
        if member is None:
            raise Fenced(f"this process is not a member of generation {said.generation}; restart it")
        if said.closure is not None:
            self._closures.check(said.closure, said, member, self.sequences)
        sequence = self.sequences.get(key) or self.sequences.setdefault(key, RoundSequence())
        if said.round <= sequence.last:
            raise sequence.refusal(said)
        runs = self._running == (key, said.round)
        if said.closure is not None and take_over(sequence, push, member, runs, self._effects):
            return
        senders = _senders(generation, said) if said.parts else [(said, member)]
        if (pending := sequence.open.get(said.round)) is None:
            members, behind = (member,) if key else generation.members, self.backlog.behind
            pending = PendingRound(said.plan_id, said.generation, members, push.since, whole=behind)
        if said.parts and (key or member.consistency.quorum or pending.differs(said) or _is_apart(said.parts, self)):
            raise PushAgain(f"round {said.round} accepts no sums; each worker must push by itself")
        if len(sequence.open) > (said.round in sequence.open):
            for part, each in senders:
                self._check_order(sequence, part, each)
        self._turns.come(key, sequence)
        sequence.open[said.round] = pending
        if pending.differs(said):
            if joins(said, self.generations) and only_newcomers(pending, self.generations):
                pending.doubtful.append(push)
                return
            self._refuse_or_evict(pending, said, member)
        if (said.batch or said.parts) and (differ := different_batches(pending, senders)) is not None:
            raise self._fail(pending, differ)
        for part, _ in senders:
            sequence.came(part, push.since)
        shares, effects = pending.take(push, senders, runs)
        self._effects += effects
        if (plan := self.plans.get(said.plan_id)) is not None:
            for share in shares:
                self._admit(pending, share, plan)
        if pending.doubtful and not joins(said, self.generations):
            self._settle(pending)

    def lacks(self, said: Contribution, place: Place) -> bool:
        """Returns True if the round of a contribution waits for others of its members, whatever else has happened."""
        generation, sequence = place[0], self.sequences.get(place[2])
        all_count = generation is not None and not (generation.leaves_out or self.fenced)
        return all_count and sequence is not None and sequence.lacks(said.round)

    def learn(self, version: int, newest: int, begun: Collection[int]) -> None:
        """Takes in which closures are over: the answers to their rounds are needed no more."""
        self._closures.learn(version, newest, begun)
        self._closures.forget(self.sequences)

    def _refuse_or_evict(self, pending: PendingRound, said: Contribution, member: Member) -> None:
        """Decides who is wrong where members of a round have different plans; a lone member's error is its own.

        Where newcomers in their first round and older members differ, the newcomers are wrong, whichever came first.
        """
        if pending.members == (member,):
            raise InvalidRequest(f"round {said.round} was already begun with another compiled step or generation")
        if joins(said, self.generations) and pending.parts:
            other = next(iter(pending.parts.values()))
            raise self._errors.refusal(said.round, member, said.plan_id, other.member, pending.plan_id)
        if only_newcomers(pending, self.generations):
            self._evict(pending, said, member)
            return
        raise self._fail(pending, self._errors.diverged(said.round, pending, member, self.describe(said.plan_id)))

    def _evict(self, pending: PendingRound, said: Contribution, member: Member) -> None:
        """Fails newcomers that came first, with another plan than an older member's."""
        for newcomer, future in pending.begin_anew(said.plan_id, said.generation):
            refusal = self._errors.refusal(said.round, newcomer, pending.plan_id, member, said.plan_id)
            self._effects.append(Fail(future, refusal))

    def _settle(self, pending: PendingRound) -> None:
        """Takes the doubtful pushes of newcomers again once an older member has pushed, which decides them."""
        doubtful, pending.doubtful = pending.doubtful, []
        for push in doubtful:
            self._try(push)

    def _check_order(self, sequence: RoundSequence, said: Contribution, member: Member) -> None:
        """Checks that a worker makes all rounds, and has not too many under way.

        Rounds arrive in any order, and each names the one before it: one in between, which others make, is left out.
        """
        check_window(sequence.under_way(said.session), said.round)
        before, here = max(said.previous, said.start - 1), self.generations[said.generation].members
        for number, pending in sequence.open.items():
            if before < number < said.round and pending.error is None and member in pending.missing(self.fenced):
                raise self._fail(pending, self._errors.diverged(number, pending, member, LATER))
            ahead = pending.passed(said.round, here, self.fenced) if number > said.round else []
            if ahead:
                section = self.describe(said.plan_id)
                raise self._fail(pending, diverged(said.round, [(ahead[0], LATER), (member.task, section)]))

    def _admit(self, pending: PendingRound, part: MemberShare, prepared: PreparedPlan) -> None:
        """Fails a contribution that does not fit its plan, for its sender alone; sets the window of a streamed one."""
        said = part.said
        try:
            sender = self.generations[said.generation].by_session.get(said.session)
            prepared.check(said, part.payload.size, sender)
        except InvalidRequest as error:
            for session in part.summed or (said.session,):
                del pending.parts[session]
                self._effects += pending.fail_session(session, error)
        else:
            if prepared.streams and not pending.whole and prepared.policy(pending.consistency).streams:
                part.payload.reader = prepared.layout(said).window

    def recorded(self, said: Contribution, place: Place | None = None) -> Record | None:
        """Returns the record of a round that is over; None while it is not.

        Args:
            said: a contribution to the round.
            place: where it belongs.

        Raises:
            InvalidRequest: the round had another plan.
            Diverged: so it had, and this session has only come late.
            Fenced: the round was completed without this session.
        """
        generation, member, key = place or place_of(said, self.generations)
        sequence = self.sequences.get(key) if generation else None
        record = sequence.record_of(said, member) if sequence else None
        if generation is None or sequence is None or record is None or record.error is not None:
            return record
        if same_closure(record.plan_id, said):
            return record
        if record.plan_id != said.plan_id:
            if said.session in record.late:
                raise self._errors.late(said, record, generation)
            raise InvalidRequest(f"round {said.round} was run with another compiled step")
        if not record.is_for(said.session):
            raise Fenced(f"round {said.round} was completed without this process; restart it")
        if not all(record.is_for(part.session) for part in said.parts):
            raise PushAgain(f"round {said.round} lacks some workers of the sum; each worker must push by itself")
        for part in said.parts or (said,):
            sequence.came(part, self.now)
        return record

    def next_job(self) -> ReadyRound | None:
        """Returns the round that can run now, if any. It counts as running until `complete` or `fail`."""
        return self.backlog.next(lambda: None if self._running else self._turns.first(self.sequences, self._first))

    def _first(self, key: Key, sequence: RoundSequence) -> ReadyRound | None:
        """Returns the first round of a sequence, if it can run."""
        while sequence.open:
            number, pending = min(sequence.open.items())
            plan = self.plans.get(pending.plan_id) or self._declined.get(pending.plan_id)
            pending.error = pending.error or self.refused.get(pending.plan_id)
            policy = plan.policy(pending.consistency) if plan else ALONE
            called = pending.voted is not None and self.votes.called(number, pending.attempt)
            if pending.error is not None and not policy.voters:
                # Its members have their answer already, and nothing of it may be applied.
                self._close(key, number, Record(pending.plan_id, error=pending.error))
            elif pending.error is None and (
                plan is None or pending.awaits(policy, self.fenced, sequence.last, sequence.is_near, called, self.now)
            ):
                return None
            elif key is not None and not self.clocks.begins(pending.members[0].session, number):
                return None  # its worker goes on without the answers that are held
            elif plan and (job := pending.ready(number, plan, policy, self.fenced, self.describe, key, sequence.last)):
                self._running = key, number
                return self.late.offer(job)
            else:
                # All its members are gone without a contribution; it must not block later rounds.
                del sequence.open[number]
        return None

    def open(self, vote: Vote, now: float) -> None:
        """Another server has a round of which this one may know nothing: all who make it may be gone.

        Once its plan is known here, by which this server takes part in it, or does not.
        """
        known, sequence = self.generations.get(vote.generation), self.sequences[None]
        if vote.round <= sequence.last or vote.round in sequence.open:
            return
        plan = self.plans.get(vote.plan_id) or self._declined.get(vote.plan_id)
        if plan is not None and plan.server in plan.plan.servers and known is not None:
            pending = PendingRound(vote.plan_id, vote.generation, known.members, now, whole=self.backlog.behind)
            self._turns.come(None, sequence)
            sequence.open[vote.round] = pending

    def complete(
        self, job: ReadyRound, given: ReturnedValues, dropped: Sequence[Task] = (), warnings: Sequence[str] = ()
    ) -> tuple[Record, list[Waiter]]:
        """Ends a round that has run; returns its record, which is kept, and its waiters.

        Args:
            job: the round.
            given: the plan's returned values of this server.
            dropped: members that were lost while it ran, before their contributions were whole.
            warnings: warnings for people.
        """
        record = Record.of(job, self.generation, given, dropped, warnings, self.now)
        self._applied(job)
        self.late.take_over(job, self.sequences[job.sequence].open[job.round], record)
        return record, self._close(job.sequence, job.round, record)

    def fail(self, job: ReadyRound, error: PSError) -> tuple[Record, list[Waiter]]:
        """Ends a round that could not run and applied nothing; returns its record and its waiters."""
        # A new error: the traceback of the old one holds the round's arrays.
        record = Record(job.plan.id, error=type(error)(error.message, error.task))
        self.late.over(job.merged)
        return record, self._close(job.sequence, job.round, record)

    def again(self, job: ReadyRound, attempt: int, agreed: Set[int] | None) -> list[Effect]:
        """A round that has run, of which nothing counts, waits for its contributions once more.

        Args:
            job: the round.
            attempt: the number of its next vote.
            agreed: the sessions that the votes so far have left; None where anybody may count.
        """
        self._running = None
        return self.sequences[job.sequence].open[job.round].again(attempt, agreed)

    def gather(self, job: ReadyRound, attempt: int) -> None:
        """A round whose servers have too few contributions in common waits for more.

        Args:
            job: the round, with what this server has voted for.
            attempt: the number of its next vote.
        """
        self._running, pending = None, self.sequences[job.sequence].open[job.round]
        pending.attempt, pending.voted = attempt, (job.sessions, frozenset(self.fenced))

    def unused(self, job: ReadyRound) -> list[Effect]:
        """Lets go of what late members have sent of a round that is over, unless it is merged: nobody will read it."""
        sent = self.sequences[job.sequence].open[job.round].sent if job.late else ()
        late = [part for part in sent if part.said.session not in job.sessions]
        return [Run(p.payload.discard) for p in late if not (p.has_examples and p.member.consistency.quorum)]

    def _close(self, key: Key, number: int, record: Record) -> list[Waiter]:
        self._running = None
        self.last = number if key is None else self.last + (not isinstance(key, SessionSequence))
        saves = (plan := self.plans.get(record.plan_id)) is not None and plan.plan.snapshot is not None
        self.closed += key is None or saves
        sequence = self.sequences[key]
        if key is None:
            self.votes.close(number)
        elif not isinstance(key, SessionSequence):
            self.clocks.over(sequence.open[number].members[0].session, number, saves)
        waiters = sequence.close(number, record, CLOSURE_ROUNDS if isinstance(key, int) else kept(self.generation))
        self._turns.over(key, sequence)
        return waiters

    def session_ended(self, session: int, error: PSError) -> list[Effect]:
        """Fails the calls of a session; nobody waits for its clock."""
        self.clocks.leave(session)
        effects = [effect for _, pending in self._open() for effect in pending.fail_session(session, error)]
        return [*effects, *self.parked.fail_session(session, error), *self.late.session_ended(session, error)]

    def contributes(self, session: int) -> bool:
        """Returns whether a session has contributed to a round that is open: it may still be applied."""
        return any(session in pending.parts for _, pending in self._open())

    def _open(self) -> Iterator[tuple[int, PendingRound]]:
        """Returns all open rounds, with their numbers."""
        return (item for sequence in self.sequences.values() for item in sequence.open.items())

    def runs(self, job: ReadyRound) -> bool:
        """Returns True if a round that has begun is not over yet."""
        return job.round in self.sequences[job.sequence].open

    def waiters(self, job: ReadyRound) -> list[Waiter]:
        """Returns the waiters of a running round."""
        return list(self.sequences[job.sequence].open[job.round].waiters)

    def _fail(self, pending: PendingRound, error: PSError) -> PSError:
        """Fails a round; returns the error."""
        self._effects += pending.fail(error)
        return error


def place_of(said: Contribution, generations: Mapping[int, Generation]) -> Place:
    """Returns where a contribution belongs, given the generations that are known."""
    generation = generations.get(said.generation)
    member = None if generation is None else generation.by_session.get(said.session)
    if said.alone:
        return generation, member and replace(member, consistency=ASYNC), SessionSequence(said.session)
    if member is None or not member.alone:
        return generation, member, None
    return generation, member, member.task if said.closure is None else said.closure.number


def _senders(generation: Generation, said: Contribution) -> list[tuple[Contribution, Member]]:
    """Returns the senders of the parts of a sum, each with what it says.

    Raises:
        InvalidRequest: it cannot be the sum of its parts.
        PushAgain: one of them is no member of the generation.
    """
    check_sum(said)
    for part in said.parts:
        check_weights(part)
    found = [(part, generation.session(part.session)) for part in said.parts]
    there = [(part, each) for part, each in found if each is not None]
    if len(there) < len(found):
        raise PushAgain(
            f"a sum contains the push of a process that is not a member of generation {said.generation}; each worker "
            "must push by itself"
        )
    return there


def _is_apart(parts: Iterable[Contribution], rounds: Rounds) -> bool:
    """Returns whether any contribution must come by itself: of one who joins, and may be wrong, or is left out."""
    return any(part.session in rounds.fenced or joins(part, rounds.generations) for part in parts)
