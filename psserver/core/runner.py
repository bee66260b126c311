"""Runs rounds, one after the other, and answers their members.

A small round runs when all of it is there: all of it or nothing. A large one streams: each variable is updated, and
its value sent back, as soon as all contributions to it are there, while others are on their way in both directions.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from weakref import WeakKeyDictionary

from psserver.checkpoints.restores import Restores
from psserver.checkpoints.snapshots import Snapshots
from psserver.effects import Answer, Submit, answering, do, failing, working
from psserver.execution.execution import Execution
from psserver.execution.nonfinite import NonfiniteValues, NonfiniteVariables
from psserver.plans.round import Commit, ReadyRound
from psserver.programs.kernels.kernels import Kernels
from psserver.state.counters import ServerCounters
from psserver.state.rounds import Record, Rounds, Waiter
from psserver.state.variables import Store
from pswire.api import Begun, Contribution, RoundReply
from pswire.errors import PSError, ServerLost
from pswire.model.plan import Ref
from pswire.model.status import OpenRound
from pswire.model.tensor import Array, TensorSpec, as_bytes, layout
from pswire.transport.payload import Payload

log = logging.getLogger("psserver")


class Delivery:
    """The payload of an answer, which grows as values come to be. Members that want the same share it.

    Args:
        want: numbers of the variables that come first, in order.
        given: returned values that come after them.
        specs: of all these.
    """

    def __init__(self, want: Sequence[int], given: Sequence[Ref], specs: Sequence[TensorSpec]) -> None:
        offsets, size = layout(specs)
        self.payload = Payload((), size)
        self._order: list[tuple[int | Ref, int]] = list(zip((*want, *given), offsets, strict=True))
        self._order.reverse()
        self._wanted = {*want, *given}
        self._early: dict[int | Ref, Array] = {}

    def put(self, values: Mapping[int, Array] | Mapping[int | Ref, Array]) -> None:
        """More values are there, on the host."""
        self._early.update({name: value for name, value in values.items() if name in self._wanted})
        while self._order and self._order[-1][0] in self._early:
            name, offset = self._order.pop()
            array = self._early.pop(name)
            if array.nbytes:
                self.payload.add(offset, as_bytes(array))


class Runner:
    """The round that runs. Its methods are called under the core's lock.

    Args:
        lock: the core's.
        store, rounds, snapshots, restores: what a round reads and changes.
        kernels: run its programs.
        submit: runs array work, one piece after another.
        progress: what can be answered or run after a change; called under the lock.
        tally: counts rounds.

    Attributes:
        broken: why the variables are of no use any more, until the job begins anew: a round has failed halfway.
    """

    def __init__(
        self,
        lock: threading.Lock,
        store: Store,
        rounds: Rounds,
        snapshots: Snapshots,
        restores: Restores,
        kernels: Kernels,
        submit: Submit,
        progress: Callable[[], list[Answer]],
        tally: ServerCounters,
    ) -> None:
        self._lock = lock
        self._store = store
        self._rounds = rounds
        self._snapshots = snapshots
        self._restores = restores
        self._kernels = kernels
        self._submit = submit
        self._progress = progress
        self._tally = tally
        self._nonfinite = NonfiniteVariables(store)
        self._execution: Execution | None = None
        self._held: ReadyRound | None = None
        self._deliveries: dict[tuple[int, ...], Delivery] = {}
        self._begun: WeakKeyDictionary[Future[RoundReply], Begun] = WeakKeyDictionary()
        self.broken: PSError | None = None

    def clear(self) -> None:
        """Forgets the round that runs: what comes of it is thrown away."""
        self._tally.forget()
        self._nonfinite.clear()
        self.broken = None
        self._execution = self._held = None
        self._deliveries = {}

    def listen(self, said: Contribution, future: Future[RoundReply], begun: Begun) -> list[Answer]:
        """Registers who is to be told when the answer to a contribution begins to grow."""
        delivery = self._deliveries.get(said.want)
        if delivery is None or self._execution is None or self._execution.job.round != said.round:
            self._begun[future] = begun
            return []
        payload = delivery.payload
        return [lambda: begun(payload)]

    def next(self) -> list[Answer]:
        """Begins the round that can run now, if there is one; tells the one that runs who is lost."""
        if self._execution is not None:
            return self._drop(self._execution)
        job = self._held or self._rounds.next_job()
        if job is None or self._holds(job):
            return []
        self._tally.round = job.round
        execution = self._execution = Execution(job, self._kernels)
        return [lambda: self._submit(lambda: self._advance(execution))]

    def explain(self, waiting: Sequence[OpenRound]) -> tuple[OpenRound, ...]:
        """Says of the round that waits for a checkpoint, if one does, that it does."""
        held, why = self._held.round if self._held else None, "waits until more of a checkpoint is written"
        return tuple(replace(w, section=f"{w.section}; {why}") if w.round == held else w for w in waiting)

    def _holds(self, job: ReadyRound) -> bool:
        """Whether a round has to wait: the old values that it would leave to a checkpoint are more than may be."""
        held = job if self._snapshots.blocks(job.prepared.writes) else None
        if held and not self._held:
            log.info("round %d waits until more of a checkpoint is written (--snapshot-limit)", job.round)
        self._held = held
        return held is not None

    def _drop(self, execution: Execution) -> list[Answer]:
        """Lets a round wait no more for members that are lost."""
        if not execution.contributions.drop(self._rounds.fenced):
            return []
        return [lambda: self._submit(lambda: self._advance(execution))]

    # ---- The round that runs, on the thread for array work ----

    def _advance(self, execution: Execution) -> None:
        """Makes all steps that can be made, the last of which ends the round."""
        try:
            if execution.job.commit is Commit.PROGRESSIVE and not execution.told:
                self._tell(execution)
            while self._step(execution):
                pass
        except Exception as error:  # a bug of ours must reach the members as an error, not as silence
            log.exception("round %d failed", execution.job.round)
            with self._lock:
                if execution is not self._execution:
                    return
                self._execution, self._deliveries = None, {}
                if not self._rounds.runs(execution.job):
                    return
                self.broken = _halfway(execution.job, PSError(f"internal error: {error!r}; see the server's log"))
                answers = self._end(execution, {}, self.broken)
            do(answers)

    def _step(self, execution: Execution) -> bool:
        """Makes one step; returns whether there may be another one now."""
        if execution.awaits(lambda: self._submit(lambda: self._advance(execution))):
            return False
        began = self._tally.clock()
        with self._lock:
            if execution is not self._execution:
                return False  # everyone who waited was told when the job was started anew
            if not execution.begun:
                self._store.lend(execution.job.prepared.writes)  # Nobody reads half a round.
            reads = execution.reads()
            alone = self._store.alone(reads)  # before there is one who holds them
            values = self._store.values_of(reads)
        try:
            assigned, ready = execution.step(values, alone)
            if execution.done:
                assigned |= self._restores.values(execution.job)
        except PSError as error:
            return self._commit(execution, began, {}, {}, error)
        values.clear()
        return self._commit(execution, began, assigned, ready)

    def _commit(
        self,
        execution: Execution,
        began: float,
        assigned: Mapping[int, Array],
        ready: Mapping[int | Ref, Array],
        error: PSError | None = None,
    ) -> bool:
        """Takes in what a step has made; the last one, and one that failed, end the round. Returns as `_step`."""
        over = error is not None or execution.done
        execution.ran += self._tally.clock() - began
        with self._lock:
            if execution is not self._execution:
                return False
            self._store.commit(assigned)
            if execution.job.plan.restore is not None:
                self._nonfinite.restore(assigned)
            growing = list(self._deliveries.values())
            answers = self._end(execution, ready, error) if over else []
        for delivery in growing:
            delivery.put(ready)
        if over:
            execution.close()
        do(answers)
        return not over

    def _end(self, execution: Execution, ready: Mapping[int | Ref, Array], error: PSError | None) -> list[Answer]:
        """The round is over; `ready` are values that are on the host already."""
        job, answers = execution.job, list[Answer]()
        self._store.end_loan()
        if error is None:
            warnings = self._judge(job, execution.found)
            dropped = sorted(execution.contributions.dropped)
            record, waiters = self._rounds.complete(job, execution.given, dropped, warnings)
            answers += self._restores.ran(job)  # first: who is answered may look at the files
            self._snapshots.freeze(job)
        else:
            if execution.halfway and self.broken is None:
                error = self.broken = _halfway(job, error)
            log.warning("round %d failed: %s", job.round, error)
            record, waiters = self._rounds.fail(job, error)
        over = self._tally.clock()
        self._tally.over(job, record, self._rounds.last, execution.ran, over)
        delivered, self._deliveries, self._execution = self._deliveries, {}, None
        answers += self.replies(record, waiters, ready, delivered) + self._progress()
        return [*answers, lambda: self._tally.answering.observe(self._tally.clock() - over)]

    def _judge(self, job: ReadyRound, found: NonfiniteValues) -> tuple[str, ...]:
        """Counts what is NaN or infinite after a round; returns what its members are told of it."""
        warnings = self._nonfinite.over(job, found)
        self._tally.nonfinite_contributions += len(found.contributions)
        self._tally.nonfinite_variables = len(self._nonfinite.ids)
        return warnings

    # ---- Answers ----

    def _tell(self, execution: Execution) -> None:
        """Tells members of the payloads of their answers, before the first step."""
        with self._lock:
            if execution is not self._execution:
                return
            execution.told = True
            answers = [self._telling(execution, *waiter) for waiter in self._rounds.waiters(execution.job)]
            answers += self._drop(execution)
        do(answers)

    def _telling(self, execution: Execution, said: Contribution, future: Future[RoundReply]) -> Answer:
        """Tells a member of its payload; one that wants what is not here is told at the end."""
        begun, prepared = self._begun.pop(future, None), execution.job.prepared
        known = execution.wanted.issuperset(said.want) and all(map(self._store.initialized, said.want))
        if begun is None or not known:
            return lambda: None
        delivery = self._deliveries.get(said.want)
        if delivery is None:
            given, variables = prepared.given, self._store.variables
            specs = [*(variables[id].spec.tensor for id in said.want), *(spec for _, spec in given)]
            delivery = self._deliveries[said.want] = Delivery(said.want, [ref for ref, _ in given], specs)
            others = set(said.want).difference(prepared.writes)
            values = {id: self._store.value(id) for id in others}
            return lambda: self._open(delivery, values, begun)
        payload = delivery.payload
        return lambda: begun(payload)

    def _open(self, delivery: Delivery, values: Mapping[int, Array], begun: Begun) -> None:
        """Begins an answer with what the round does not change; called without the lock, before its first step."""
        begun(delivery.payload)
        delivery.put({id: self._store.device.get(value) for id, value in values.items()})

    def replies(
        self,
        record: Record,
        waiters: Sequence[Waiter],
        ready: Mapping[int | Ref, Array] | None = None,
        delivered: Mapping[tuple[int, ...], Delivery] | None = None,
    ) -> list[Answer]:
        """The answers to members; their wanted variables are as they are now, which is before the next round.

        Args:
            record: what came of the round.
            waiters: who is answered.
            ready: values that are on the host already.
            delivered: payloads that are on their way already, by what they have.
        """
        fresh: dict[int | Ref, Array] = dict(ready or {})
        payloads = {want: delivery.payload for want, delivery in (delivered or {}).items()}
        answers = []
        for said, future in waiters:
            try:
                if error := record.error or self.broken:
                    raise error
                if said.want not in payloads:
                    here: dict[int | Ref, Array] = {id: self._store.value(id) for id in said.want if id not in fresh}
                    if here and self._store.device.gpu is not None:
                        answers.append(self._fetching(said, future, record, fresh | here))
                        continue
                    fresh |= here
                    payloads[said.want] = Payload.pack([*(fresh[id] for id in said.want), *record.given])
                answers.append(answering(future, _reply(said, record, payloads[said.want])))
            except PSError as error:
                answers.append(failing(future, error))
        return answers

    def _fetching(
        self, said: Contribution, future: Future[RoundReply], record: Record, values: Mapping[int | Ref, Array]
    ) -> Answer:
        """The answer to a member that wants what is not on the host: it is brought there outside of the lock."""

        def fetch() -> RoundReply:
            wanted = [self._store.device.get(values[id]) for id in said.want]
            return _reply(said, record, Payload.pack([*wanted, *record.given]))

        return lambda: self._submit(working(future, fetch))


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
