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
from psserver.execution import executor
from psserver.execution.executor import Outcome
from psserver.execution.nonfinite import Found, NonfiniteVariables
from psserver.execution.stream import Stream
from psserver.plans.round import ReadyRound
from psserver.programs.kernels.kernels import Kernels
from psserver.state.counters import Counters
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
        tally: Counters,
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
        self._life = 0
        self._stream: Stream | None = None
        self._held: ReadyRound | None = None
        self._deliveries: dict[tuple[int, ...], Delivery] = {}
        self._begun: WeakKeyDictionary[Future[RoundReply], Begun] = WeakKeyDictionary()
        self.broken: PSError | None = None

    def clear(self) -> None:
        """Forgets the round that runs: what comes of it is thrown away."""
        self._life += 1
        self._tally.forget()
        self._nonfinite.clear()
        self.broken = None
        self._stream = self._held = None
        self._deliveries = {}

    def listen(self, said: Contribution, future: Future[RoundReply], begun: Begun) -> list[Answer]:
        """Who is answered by a future wants to be told of an answer that begins to grow."""
        delivery = self._deliveries.get(said.want)
        if delivery is None or self._stream is None or self._stream.job.round != said.round:
            self._begun[future] = begun
            return []
        payload = delivery.payload
        return [lambda: begun(payload)]

    def next(self) -> list[Answer]:
        """Begins the round that can run now, if there is one; tells the one that runs who is lost."""
        if self._stream is not None:
            return self._drop(self._stream)
        job = self._held or self._rounds.next_job()
        if job is None or self._holds(job):
            return []
        self._tally.round = job.round
        life, run = self._life, self._begin if job.streams else self._execute
        return [lambda: self._submit(lambda: self._guarded(run, job, life))]

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

    def _guarded(self, run: Callable[[ReadyRound, int], None], job: ReadyRound, life: int) -> None:
        """A bug of ours must reach the members as an error, not as silence."""
        try:
            run(job, life)
        except Exception as error:
            log.exception("round %d failed", job.round)
            with self._lock:
                if life != self._life or not self._rounds.runs(job):
                    return
                self._stream, self._deliveries = None, {}
                self._store.end_loan()
                self.broken = _halfway(job, PSError(f"internal error: {error!r}; see the server's log"))
                record, waiters = self._failed(job, self.broken)
                self._count(job, record, 0.0)
                answers = self.replies(record, waiters) + self._progress()
            do(answers)

    # ---- All or nothing ----

    def _execute(self, job: ReadyRound, life: int) -> None:
        with self._lock:
            if life != self._life:
                return  # everyone who waited was told when the job was started anew
            written = job.prepared.writes
            self._store.lend(written)
            alone = self._store.alone(written)
            values = self._store.values()
        error: PSError | None = None
        began = self._tally.clock()
        outcome = Outcome({}, (), {})
        restored: dict[int, Array] = {}
        try:
            outcome = executor.run(job, self._kernels, values, alone)
            restored = self._restores.values(job)
        except PSError as caught:
            error = caught
        with self._lock:
            if life != self._life:
                return
            self._store.end_loan()
            if error is None:
                self._store.commit(outcome.assigned)
                self._store.commit(restored)
                self._nonfinite.restore(restored)
                warnings = self._judge(job, outcome.found)
                record, waiters = self._rounds.complete(job, outcome.given, warnings=warnings)
                answers = self._restores.ran(job)  # first: who is answered may look at the files
                self._snapshots.freeze(job)
            else:
                answers = []
                record, waiters = self._failed(job, error)
            over = self._count(job, record, self._tally.clock() - began)
            answers += self.replies(record, waiters, outcome.wanted) + self._progress()
        do(answers)
        self._tally.answering.observe(self._tally.clock() - over)

    def _count(self, job: ReadyRound, record: Record, ran: float) -> float:
        """A round is over, after so many seconds of work; says when that was."""
        now = self._tally.clock()
        self._tally.over(job, record, self._rounds.last, ran, now)
        return now

    def _judge(self, job: ReadyRound, found: Found) -> tuple[str, ...]:
        """Counts what is NaN or infinite after a round; returns what its members are told of it."""
        warnings = self._nonfinite.over(job, found)
        self._tally.nonfinite_contributions += len(found.contributions)
        self._tally.nonfinite_variables = len(self._nonfinite.ids)
        return warnings

    def _failed(self, job: ReadyRound, error: PSError) -> tuple[Record, list[Waiter]]:
        log.warning("round %d failed: %s", job.round, error)
        return self._rounds.fail(job, error)

    def replies(
        self,
        record: Record,
        waiters: Sequence[Waiter],
        wanted: Mapping[int, Array] | None = None,
        delivered: Mapping[tuple[int, ...], Delivery] | None = None,
    ) -> list[Answer]:
        """The answers to members; their wanted variables are as they are now, which is before the next round.

        Args:
            record: what came of the round.
            waiters: who is answered.
            wanted: values that are on the host already.
            delivered: payloads that are on their way already, by what they have.
        """
        fresh = dict(wanted or {})
        payloads = {want: delivery.payload for want, delivery in (delivered or {}).items()}
        answers = []
        for said, future in waiters:
            try:
                if error := record.error or self.broken:
                    raise error
                if said.want not in payloads:
                    here = {id: self._store.value(id) for id in said.want if id not in fresh}
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
        self, said: Contribution, future: Future[RoundReply], record: Record, values: Mapping[int, Array]
    ) -> Answer:
        """The answer to a member that wants what is not on the host: it is brought there outside of the lock."""

        def fetch() -> RoundReply:
            wanted = [self._store.device.get(values[id]) for id in said.want]
            return _reply(said, record, Payload.pack([*wanted, *record.given]))

        return lambda: self._submit(working(future, fetch))

    # ---- Bit by bit ----

    def _begin(self, job: ReadyRound, life: int) -> None:
        stream = Stream(job, self._kernels)
        with self._lock:
            if life != self._life:
                return
            self._stream = stream
            # Nobody reads half a round.
            self._store.lend(job.prepared.writes)
            answers = [self._tell(stream, *waiter) for waiter in self._rounds.waiters(job)]
            answers += self._drop(stream)
        do(answers)
        self._advance(stream)

    def _tell(self, stream: Stream, said: Contribution, future: Future[RoundReply]) -> Answer:
        """Tells a member of its payload; one that wants what is not here is told at the end."""
        begun, variables = self._begun.pop(future, None), self._store.variables
        if begun is None or not all(self._store.initialized(id) for id in said.want):
            return lambda: None
        delivery = self._deliveries.get(said.want)
        if delivery is None:
            given = stream.job.prepared.given
            specs = [*(variables[id].spec.tensor for id in said.want), *(spec for _, spec in given)]
            delivery = self._deliveries[said.want] = Delivery(said.want, [ref for ref, _ in given], specs)
            others = set(said.want).difference(stream.job.prepared.writes)
            values = {id: self._store.value(id) for id in others}
            return lambda: self._open(delivery, values, begun)
        payload = delivery.payload
        return lambda: begun(payload)

    def _open(self, delivery: Delivery, values: Mapping[int, Array], begun: Begun) -> None:
        """Begins an answer with what the round does not change; called without the lock, before its first step."""
        begun(delivery.payload)
        delivery.put({id: self._store.device.get(value) for id, value in values.items()})

    def _drop(self, stream: Stream) -> list[Answer]:
        """Lets a stream wait no more for members that are lost."""
        if not stream.drop(self._rounds.fenced):
            return []
        return [lambda: self._submit(lambda: self._advance(stream))]

    def _advance(self, stream: Stream) -> None:
        """Makes all steps that can be made; the last one ends the round."""
        try:
            while not stream.done:
                if stream.awaits(lambda: self._submit(lambda: self._advance(stream))):
                    return
                began = self._tally.clock()
                if not self._step(stream):
                    return
                stream.ran += self._tally.clock() - began
        except PSError as error:
            self._end(stream, error)
        except Exception as error:  # a bug of ours must reach the members as an error, not as silence
            log.exception("round %d failed", stream.job.round)
            self._end(stream, PSError(f"internal error: {error!r}; see the server's log"))
        else:
            self._end(stream, None)

    def _step(self, stream: Stream) -> bool:
        """Makes one step; False if the round is another's by now."""
        with self._lock:
            if stream is not self._stream:
                return False
            reads = stream.reads()
            alone = self._store.alone(reads)  # before there is one who holds them
            values = {id: self._store.value(id) for id in reads}
        assigned, ready = stream.step(values, alone)
        values.clear()
        with self._lock:
            if stream is not self._stream:
                return False
            self._store.commit(assigned)
            deliveries = list(self._deliveries.values())
        for delivery in deliveries:
            delivery.put(ready)
        return True

    def _end(self, stream: Stream, error: PSError | None) -> None:
        job = stream.job
        with self._lock:
            if stream is not self._stream:
                return
            deliveries = self._deliveries
            self._stream, self._deliveries = None, {}
            self._store.end_loan()
            if error is None:
                warnings = self._judge(job, stream.found)
                record, waiters = self._rounds.complete(job, stream.given, sorted(stream.dropped), warnings)
                self._restores.ran(job)
                self._snapshots.freeze(job)
            else:
                if stream.has_written and not stream.abandoned:
                    error = self.broken = _halfway(job, error)
                record, waiters = self._failed(job, error)
            over = self._count(job, record, stream.ran)
            answers = self.replies(record, waiters, None, deliveries) + self._progress()
        stream.close()
        do(answers)
        self._tally.answering.observe(self._tally.clock() - over)


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
