"""The runner: runs rounds, one after the other, and answers their members.

A small round runs once all contributions are whole, and commits all or nothing. A large round streams: each variable is
updated, and its value sent back, once all contributions to it are there, while others are still on their way in both
directions.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from weakref import WeakKeyDictionary

from psserver.checkpoints.restores import Restores
from psserver.checkpoints.snapshots import Snapshots
from psserver.effects import Await, Effect, Fail, Reply, Run, Work
from psserver.execution.execution import Execution
from psserver.execution.nonfinite import NonfiniteValues, NonfiniteVariables
from psserver.plans.round import Commit, ReadyRound
from psserver.programs.kernels.kernels import Kernels
from psserver.state.counters import ServerCounters
from psserver.state.pending_round import Waiter
from psserver.state.rounds import Rounds
from psserver.state.strands import Record
from psserver.state.variables import Store
from pswire.api import Begun, Contribution, RoundReply, Vote
from pswire.errors import Fenced, PSError, ServerLost
from pswire.model.plan import Ref
from pswire.model.status import OpenRound
from pswire.model.tensor import Array, TensorSpec, as_bytes, layout
from pswire.transport.payload import Payload

log = logging.getLogger("psserver")


class GrowingAnswer:
    """An answer's payload that grows as values become ready. Members that want the same variables share it.

    Args:
        want: numbers of the wanted variables, which come first, in order.
        given: returned values that come after them.
        specs: the tensors of all these, in order.
    """

    def __init__(self, want: Sequence[int], given: Sequence[Ref], specs: Sequence[TensorSpec]) -> None:
        offsets, size = layout(specs)
        self.payload = Payload((), size)
        self._order: list[tuple[int | Ref, int]] = list(zip((*want, *given), offsets, strict=True))
        self._order.reverse()
        self._wanted = {*want, *given}
        self._early: dict[int | Ref, Array] = {}

    def put(self, values: Mapping[int, Array] | Mapping[int | Ref, Array]) -> None:
        """Adds values that are ready, on the host."""
        self._early.update({name: value for name, value in values.items() if name in self._wanted})
        while self._order and self._order[-1][0] in self._early:
            name, offset = self._order.pop()
            array = self._early.pop(name)
            if array.nbytes:
                self.payload.add(offset, as_bytes(array))


@dataclass(frozen=True)
class _Trial:
    """A run whose results are not visible.

    Attributes:
        execution: what ran.
        assigned: the new values of variables.
        ready: values that are on the host already.
    """

    execution: Execution
    assigned: Mapping[int, Array]
    ready: Mapping[int | Ref, Array]


@dataclass(frozen=True)
class _Ballot:
    """A round that several servers have to agree on.

    Attributes:
        job: the round, with the contributions that are whole here, less those that earlier votes have left out.
        attempt: how many votes there were before.
        trial: its run; None where it runs once it is decided.
    """

    job: ReadyRound
    attempt: int = 0
    trial: _Trial | None = None


class Runner:
    """The running round. Guarded by the core's lock, but for the methods that run in the thread for arrays.

    Args:
        store, rounds, snapshots, restores: the state that a round reads and changes.
        kernels: run its programs.
        tally: counts rounds.

    Attributes:
        broken: the error of a round that failed halfway and left variables unusable; None until then, and in a new job.
    """

    def __init__(
        self,
        store: Store,
        rounds: Rounds,
        snapshots: Snapshots,
        restores: Restores,
        kernels: Kernels,
        tally: ServerCounters,
    ) -> None:
        self._store = store
        self._rounds = rounds
        self._snapshots = snapshots
        self._restores = restores
        self._kernels = kernels
        self._tally = tally
        self._nonfinite = NonfiniteVariables(store)
        self._execution: Execution | None = None
        self._awaits: Await | None = None  # the payload that the running round waits for
        self._held: ReadyRound | None = None
        self._ballot: _Ballot | None = None  # of the round that is not decided
        self._deliveries: dict[tuple[int, ...], GrowingAnswer] = {}
        self._begun: WeakKeyDictionary[Future[RoundReply], Begun] = WeakKeyDictionary()
        self.broken: PSError | None = None

    def clear(self) -> None:
        """Forgets the running round; its results are dropped."""
        self._tally.forget()
        self._nonfinite.clear()
        self.broken = None
        self._execution = self._held = self._awaits = self._ballot = None
        self._deliveries = {}

    def listen(self, said: Contribution, future: Future[RoundReply], begun: Begun) -> list[Effect]:
        """Registers a callback for when the answer to a contribution begins to stream."""
        delivery = self._deliveries.get(said.want)
        if delivery is None or self._execution is None or self._execution.job.round != said.round:
            self._begun[future] = begun
            return []
        return [Run(begun, (delivery.payload,))]

    def next(self) -> list[Effect]:
        """Begins the next round that can run, or continues the running one once its data has arrived."""
        if self._execution is not None:
            self._execution.contributions.drop(self._rounds.fenced)
            if self._awaits is None or self._awaits == self._execution.awaits():
                return []
            return self._go_on(self._execution)
        if self._ballot is not None:
            return self._count(self._ballot)
        job = self._held or self._rounds.next_job()
        if job is None or self._holds(job):
            return []
        self._tally.round = job.round
        return self._elect(_Ballot(job)) if job.voters else self._start(job)

    def _start(self, job: ReadyRound) -> list[Effect]:
        """Begins a round of which it is known whose contributions it has, or which this server decides alone."""
        execution = self._execution = Execution(job, self._kernels)
        if job.commit is Commit.ATOMIC:
            return self._go_on(execution)
        begins = [begin for waiter in self._rounds.waiters(job) for begin in self._begin(execution, *waiter)]
        return [Work("arrays", self._tell, (begins,), then=partial(self._told, execution))]

    # ---- Rounds of several servers ----

    def _elect(self, ballot: _Ballot) -> list[Effect]:
        """Votes in a round, once it is known whether it can run: if it may refuse a value, after a trial run."""
        job = ballot.job
        self._ballot = ballot
        if job.error is None and job.prepared.may_refuse and ballot.trial is None:
            return self._start(job)
        whole = job.sessions if job.error is None else frozenset[int]()
        vote = Vote(
            self._rounds.votes.job,
            job.round,
            job.plan.id,
            job.epoch,
            ballot.attempt,
            whole,
            job.error,
            self._rounds.last,
        )
        return self._rounds.votes.cast(vote, job.voters) + self._count(ballot)

    def _count(self, ballot: _Ballot) -> list[Effect]:
        """Goes on with a round once all servers have voted; until then nothing of it is visible."""
        job = ballot.job
        verdict = self._rounds.votes.verdict(job.round, ballot.attempt, job.voters)
        if verdict is None:
            return []
        self._ballot = None
        trial, agreed = ballot.trial, job.only(verdict.whole)
        if verdict.error is not None:
            return self._close(job, *self._rounds.fail(job, verdict.error))
        if not agreed.parts:
            return self._close(agreed, *self._rounds.complete(agreed, ()))
        if trial is None:
            return self._start(agreed)
        if not verdict.unanimous:  # somebody has to try again, and may then fail
            again = None if agreed.parts != job.parts else trial
            return self._elect(_Ballot(agreed, ballot.attempt + 1, again))
        self._store.commit(trial.assigned)
        return self._end(trial.execution, trial.ready, None, self._tally.clock())

    def _close(self, job: ReadyRound, record: Record, waiters: Sequence[Waiter]) -> list[Effect]:
        """A round is over that has changed nothing."""
        self._store.end_loan()
        self._tally.over(job, record, self._rounds.last, 0.0, self._tally.clock())
        return self.replies(record, waiters)

    def explain(self, waiting: Sequence[OpenRound]) -> tuple[OpenRound, ...]:
        """Adds to the round that waits for a checkpoint, if there is one, that it does."""
        held, why = self._held.round if self._held else None, "waits until more of a checkpoint is written"
        return tuple(replace(w, section=f"{w.section}; {why}") if w.round == held else w for w in waiting)

    def _holds(self, job: ReadyRound) -> bool:
        """Returns True if a round must wait: it would leave too many old values to a checkpoint."""
        held = job if self._snapshots.blocks(job.prepared.writes) else None
        if held and not self._held:
            log.info("round %d waits until more of a checkpoint is written (--snapshot-limit)", job.round)
        self._held = held
        return held is not None

    def _go_on(self, execution: Execution, follows: bool = False) -> list[Effect]:
        """Returns the next step of the running round, or the payload it has to wait for."""
        self._awaits = execution.awaits()
        if self._awaits is not None:
            return [self._awaits]
        if not execution.begun:
            self._store.lend(execution.job.prepared.writes)  # nobody reads half a round
        reads = execution.reads()
        # Before there is one who holds them; and what may come to nothing writes nowhere.
        alone = self._store.alone(reads) if self._ballot is None else frozenset[int]()
        step = execution, self._store.values_of(reads), alone
        return [Work("arrays", self._step, step, then=partial(self._commit, execution), follows=follows)]

    # ---- In the thread for arrays, without the lock ----

    def _tell(self, begins: Sequence[Run]) -> None:
        """Hands the payloads of their answers to members, before the first step."""
        for begin in begins:
            begin.call(*begin.args)

    def _step(
        self, execution: Execution, values: dict[int, Array | None], alone: frozenset[int]
    ) -> tuple[dict[int, Array], dict[int | Ref, Array]]:
        """Runs one step. Drops the values afterwards, so that the next step may write in place."""
        began = self._tally.clock()
        try:
            return execution.step(values, alone)
        finally:
            values.clear()
            execution.ran += self._tally.clock() - began

    # ---- What came of it ----

    def _told(self, execution: Execution, _: None, error: PSError | None, now: float) -> list[Effect]:
        if execution is not self._execution:
            return []  # all calls failed when the job was started anew
        return self._go_on(execution, follows=True) if error is None else self._break(execution, error, now)

    def _commit(
        self,
        execution: Execution,
        made: tuple[Mapping[int, Array], Mapping[int | Ref, Array]] | None,
        error: PSError | None,
        now: float,
    ) -> list[Effect]:
        """Takes the results of a step. The last step ends the round, and so does a failed one."""
        if execution is not self._execution:
            return []
        try:
            return self._take(execution, *(made or ({}, {})), error, now)
        except Exception as bug:  # our bug: it must reach the members as an error, not as silence
            log.exception("round %d failed", execution.job.round)
            return self._break(execution, PSError(f"internal error: {bug!r}; see the server's log"), now)

    def _take(
        self,
        execution: Execution,
        assigned: Mapping[int, Array],
        ready: Mapping[int | Ref, Array],
        error: PSError | None,
        now: float,
    ) -> list[Effect]:
        over = error is not None or execution.done
        if over and error is None:
            assigned, error = self._restored(execution.job, assigned)
        if self._ballot is not None:
            return self._try(self._ballot, execution, assigned, ready, error)
        self._store.commit(assigned)
        if execution.job.plan.restore is not None:
            self._nonfinite.restore(assigned)
        effects: list[Effect] = [Run(delivery.put, (ready,)) for delivery in self._deliveries.values()]
        if not over:
            return effects + self._go_on(execution, follows=True)
        return [*effects, Run(execution.close), *self._end(execution, ready, error, now)]

    def _try(
        self,
        ballot: _Ballot,
        execution: Execution,
        assigned: Mapping[int, Array],
        ready: Mapping[int | Ref, Array],
        error: PSError | None,
    ) -> list[Effect]:
        """A trial run is over, which has changed nothing: now this server can vote."""
        self._execution = None
        trial = _Trial(execution, assigned, ready)
        return self._elect(_Ballot(replace(ballot.job, error=error), ballot.attempt, trial))

    def _restored(self, job: ReadyRound, assigned: Mapping[int, Array]) -> tuple[Mapping[int, Array], PSError | None]:
        """Adds a round's restored values to those it assigns; returns nothing and the error if that fails."""
        try:
            return {**assigned, **self._restores.values(job)}, None
        except PSError as error:
            return {}, error

    def _break(self, execution: Execution, error: PSError, now: float) -> list[Effect]:
        """Ends a round after a bug: it is unknown how far it came."""
        self._deliveries = {}
        if not self._rounds.runs(execution.job):
            self._execution = None
            return []
        self.broken = _halfway(execution.job, error)
        return self._end(execution, {}, self.broken, now)

    def _end(
        self, execution: Execution, ready: Mapping[int | Ref, Array], error: PSError | None, now: float
    ) -> list[Effect]:
        """Ends the round; `ready` are values that are on the host already."""
        job, effects = execution.job, list[Effect]()
        self._store.end_loan()
        if error is None:
            warnings = self._judge(job, execution.found)
            dropped = sorted(execution.contributions.dropped)
            record, waiters = self._rounds.complete(job, execution.given, dropped, warnings)
            effects += self._restores.ran(job)  # first: members that are answered may look at the files
            effects += self._snapshots.freeze(job)
        else:
            # Of what several servers have agreed on, none may do otherwise.
            if (execution.halfway or job.voters) and self.broken is None:
                error = self.broken = _halfway(job, error)
            log.warning("round %d failed: %s", job.round, error)
            record, waiters = self._rounds.fail(job, error)
        self._tally.over(job, record, self._rounds.last, execution.ran, now)
        delivered, self._deliveries, self._execution = self._deliveries, {}, None
        return [*effects, *self.replies(record, waiters, ready, delivered), Run(self._tally.answered, (now,))]

    def _judge(self, job: ReadyRound, found: NonfiniteValues) -> tuple[str, ...]:
        """Counts NaN and infinite values after a round; returns the warnings for its members."""
        warnings = self._nonfinite.over(job, found)
        self._tally.nonfinite_contributions += len(found.contributions)
        self._tally.nonfinite_variables = len(self._nonfinite.ids)
        return warnings

    # ---- Answers ----

    def _begin(self, execution: Execution, said: Contribution, future: Future[RoundReply]) -> list[Run]:
        """Hands a member the payload of its answer; a member that wants variables not known here gets it at the end."""
        begun, prepared = self._begun.pop(future, None), execution.job.prepared
        known = execution.wanted.issuperset(said.want) and all(map(self._store.initialized, said.want))
        if begun is None or not known:
            return []
        if (delivery := self._deliveries.get(said.want)) is not None:
            return [Run(begun, (delivery.payload,))]
        given, variables = prepared.given, self._store.variables
        specs = [*(variables[id].spec.tensor for id in said.want), *(spec for _, spec in given)]
        delivery = self._deliveries[said.want] = GrowingAnswer(said.want, [ref for ref, _ in given], specs)
        unchanged = {id: self._store.value(id) for id in set(said.want).difference(prepared.writes)}
        return [Run(begun, (delivery.payload,)), Run(self._put, (delivery, unchanged))]

    def _put(self, delivery: GrowingAnswer, values: Mapping[int, Array]) -> None:
        """Begins an answer with the values that the round does not change."""
        delivery.put({id: self._store.device.get(value) for id, value in values.items()})

    def replies(
        self,
        record: Record,
        waiters: Sequence[Waiter],
        ready: Mapping[int | Ref, Array] | None = None,
        delivered: Mapping[tuple[int, ...], GrowingAnswer] | None = None,
    ) -> list[Effect]:
        """Returns the answers to members, with the wanted variables as they are now, before the next round.

        Args:
            record: the round's record.
            waiters: the contributions to answer, with their futures.
            ready: values that are on the host already.
            delivered: payloads that are already being sent, by the variables they hold.
        """
        fresh: dict[int | Ref, Array] = dict(ready or {})
        payloads = {want: delivery.payload for want, delivery in (delivered or {}).items()}
        answers: list[Effect] = []
        for said, future in waiters:
            try:
                if error := record.error or self.broken:
                    raise error
                if said.session not in record.sessions:
                    raise Fenced(f"round {said.round} was made without this session; restart the process")
                if said.want not in payloads:
                    here: dict[int | Ref, Array] = {id: self._store.value(id) for id in said.want if id not in fresh}
                    if here and self._store.device.gpu is not None:
                        wanted = [(fresh | here)[id] for id in said.want]
                        answers.append(Work("arrays", self._fetch, (said, record, wanted), future=future))
                        continue
                    fresh |= here
                    payloads[said.want] = Payload.pack([*(fresh[id] for id in said.want), *record.given])
                answers.append(Reply(future, _reply(said, record, payloads[said.want])))
            except PSError as error:
                answers.append(Fail(future, error))
        return answers

    def _fetch(self, said: Contribution, record: Record, wanted: Sequence[Array]) -> RoundReply:
        """Copies a member's wanted values to the host, for its answer; in the thread for arrays."""
        return _reply(said, record, Payload.pack([*map(self._store.device.get, wanted), *record.given]))


def _halfway(job: ReadyRound, error: PSError) -> PSError:
    return ServerLost(
        f"round {job.round} failed halfway, so that some variables have its update and others have not ({error}); "
        "restart from a checkpoint",
        error.task,
    )


def _reply(said: Contribution, record: Record, payload: Payload) -> RoundReply:
    if record.epoch is None:
        raise PSError("a round without an epoch")
    return RoundReply(said.round, record.epoch, record.more, record.left_out, payload, record.warnings)
