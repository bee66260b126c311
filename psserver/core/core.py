"""One parameter server without its network: the `ParameterServer` of a process.

The core holds the one lock. It passes stimuli to the state machine, one at a time, and carries out the returned effects
without the lock: it answers futures, and puts work into the queues for arrays and for files. A small round has no
thread of its own: it runs in the one that takes the last contribution, and its answers leave from there.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from psserver.config import ServerConfig
from psserver.core.machine import UNCHANGED, Machine, Outcome
from psserver.core.stimuli import Stimuli, told
from psserver.core.waiting import Asked
from psserver.devices import ServerDevice
from psserver.effects import Await, Effect, Fail, Know, Others, Reply, Run, Send, Submit, Work, attempt, settle
from psserver.execution.array_queue import ArrayQueue
from psserver.plans.prepared import PreparedPlan
from psserver.programs.kernels.kernels import Kernels
from psserver.state.sessions import DRAWN
from psserver.state.variables import FirstValue
from pswire.api import (
    ALL,
    Begun,
    Contribution,
    CreateBatchReply,
    Enlisted,
    Opened,
    PullReply,
    RestoreOrder,
    RestoreReply,
    RoundReply,
    RowRead,
    TableRead,
    Watched,
)
from pswire.cluster import Task
from pswire.errors import PSError, ServerGone
from pswire.model.chunks import ChunkAsk, Chunks
from pswire.model.closures import ClosureOrder, ClosureQueue, ClosureResult, Fetched, Taken
from pswire.model.consistency import SYNC, Consistency
from pswire.model.log import Approved, LogEntry, Member, Start
from pswire.model.places import Offered, Standby
from pswire.model.plan import PlacedVariable, Plan, Turn
from pswire.model.saved import Shard
from pswire.model.status import STILL, Happened, Pace, ServerStatus
from pswire.network.payload import Payload
from pswire.servers.votes import Testimony, Vote

T = TypeVar("T")


class Core:
    """The verbs of a server. May be called from any thread.

    Args:
        config: the server's configuration.
        incarnation: this process's incarnation, 64 random bits: no clock can give one twice.
        clock: monotonic seconds.
        arrays: runs array work, one piece after another.
        files: runs work on files, one piece after another, beside the array work; None to use `arrays`.

    Attributes:
        machine: the state. Guarded by the lock.
        registry, tally, done: the machine's; may be used without the lock.
        stimuli: the last stimuli. Guarded by the lock.
        kernels: run update programs.
    """

    address = ""  # nobody needs the network to reach it here

    def __init__(
        self,
        config: ServerConfig,
        incarnation: int,
        clock: Callable[[], float],
        arrays: Submit,
        files: Submit | None = None,
    ) -> None:
        self.config, self.task, self.server = config, config.task, config.task.index
        self.device = ServerDevice.parse(config.device)
        self.kernels = Kernels(self.device, config.threads, folder=config.kernel_cache)
        self.incarnation = incarnation
        self.machine = machine = Machine(config, incarnation, self.kernels, clock)
        self.registry, self.tally, self.done = machine.registry, machine.tally, machine.done
        self.stimuli = Stimuli()
        self._clock = clock
        self._arrays = ArrayQueue(arrays)
        self._files = files or (lambda piece: self._arrays.run(piece, False))
        self._lock = threading.Lock()
        self.others: Others | None = None
        """The other servers of the job; None for a server that reaches none."""

    # ---- Stimuli and effects ----

    def _enter(self, stimulus: Callable[..., Outcome[T]], *args: Any) -> T:
        """Passes one stimulus to the machine, and carries out the effects.

        Args:
            stimulus: a method of the machine.
            args: its arguments after the time.

        Returns:
            The stimulus's answer.

        Raises:
            PSError: why the stimulus was refused; then it has no effects.
        """
        answer, effects = self._let_in(stimulus, *args)
        self._carry_out(effects)
        return answer

    def _let_in(self, stimulus: Callable[..., Outcome[T]], *args: Any) -> Outcome[T]:
        """Passes one stimulus to the machine; returns its answer, and the effects, which are not carried out yet."""
        with self._lock:
            now = self._clock()
            name = stimulus.__name__
            self.stimuli.note(now, name, args)
            try:
                answer, effects = stimulus(now, *args)
            except PSError as error:
                self.stimuli.refused(now, name, args, error)
                raise
            if (refusal := _refusal(answer, effects, args)) is not None:
                self.stimuli.refused(now, name, args, refusal)
            return answer, [] if effects is UNCHANGED else effects + self.machine.progress(now)

    def _carry_out(self, effects: list[Effect]) -> Work | None:
        """Carries out effects in order, and drops them; returns the work that the calling thread continues with."""
        next = None
        effects.reverse()
        # A round writes in place only what nobody else holds: an answer must not hold values any longer than it takes.
        while effects:
            effect = effects.pop()
            if isinstance(effect, Reply):
                settle(effect.future, effect.value)
            elif isinstance(effect, Run):
                effect.call(*effect.args)
            elif isinstance(effect, Fail):
                settle(effect.future, None, effect.error)
            elif isinstance(effect, Await):
                effect.payload.reach(effect.offset, partial(self._enter, self.machine.look))
            elif isinstance(effect, Send):
                if self.others is not None:
                    self.others.say(effect.server, effect.said)
            elif isinstance(effect, Know):
                if self.others is not None:
                    self.others.know(effect.servers)
            elif effect.follows:
                next = effect
            else:
                queue, brief, piece = effect.queue, effect.brief, partial(self._begin, [effect])
                del effect
                if queue == "arrays":
                    self._arrays.run(piece, brief)
                else:
                    self._files(piece)
        return next

    def _begin(self, work: list[Work]) -> None:
        """Runs work, which nobody else holds from now on: what it has used is let go of before anybody is answered."""
        self._work(work.pop())

    def _work(self, work: Work | None) -> None:
        """Runs work, and the work that follows it, in a queue's thread, or where it is brief in the calling one."""
        while work is not None:
            ask = () if work.asks is None else (partial(self._ask, work),)
            result, error = attempt(partial(work.call, *work.args, *ask))
            effects: list[Effect] = []
            if work.then is not None:
                _, effects = self._let_in(self.machine.worked, work, result, error)
            elif error is not None or self.stimuli.record is not None:
                with self._lock:
                    self.stimuli.made(self._clock(), work, result, error)
            future, work = work.future, None
            if future is None:
                result = None  # answers come before the next contributions, which write what it holds
            work = self._carry_out(effects)
            if future is not None:
                settle(future, result, error)

    def _ask(self, work: Work, *args: object) -> object:
        """Answers a question of running work."""
        with self._lock:
            now = self._clock()
            self.stimuli.note(now, "asked", (work, *args))
            answer, effects = self.machine.asked(now, work, *args)
        self._carry_out(effects)
        return answer

    # ---- Sessions ----

    def open(
        self,
        task: Task,
        replicas: int,
        session: int,
        drives: bool,
        consistency: Consistency = SYNC,
        job: str = "",
        term: int = 0,
    ) -> Opened:
        drawn, opens = secrets.randbits(DRAWN), Member(task, 0, replicas, consistency)
        return self._enter(self.machine.open, opens, session, drives, job, term, drawn)

    def enlist(self, task: Task | None, key: int) -> Enlisted:
        return self._enter(self.machine.enlist, task, key)

    def heartbeat(self, session: int, round: int, plan_id: bytes, pace: Pace | None = STILL, clock: int = 0) -> bool:
        error, drives = self._enter(self.machine.heartbeat, session, round, plan_id, pace, clock)
        _raise(error)
        return drives

    def leave(self, session: int, error: str) -> None:
        self._enter(self.machine.leave, session, error)

    def tick(self) -> None:
        """Ends the sessions whose lease is over. Must be called a few times per lease."""
        self._enter(self.machine.tick)

    def seen(self, look: Callable[[float], T]) -> T:
        """Returns what a look at the machine shows now, such as `machine.leaving`; it changes nothing."""
        with self._lock:
            return look(self._clock())

    def well(self) -> bool:
        """Returns True if the server is healthy: leases are checked in time, and no round has failed halfway."""
        return self.machine.well(self._clock())

    # ---- Variables ----

    def create_batch(self, session: int, variables: Sequence[PlacedVariable]) -> CreateBatchReply:
        batch = tuple(variables)
        reply, needing, job = self._enter(self.machine.create_batch, session, batch)
        found, error = batch[: reply.count], reply.error
        saved: dict[int, FirstValue] = {}
        for variable in needing:
            try:
                # Without the lock: this may read a file.
                value = self.machine.restores.first_value(variable)
            except PSError as failure:
                found, error = found[: found.index(variable)], failure
                break
            if value is not None:
                saved[variable.id] = value
        if not saved and error is reply.error:
            return reply
        return self._enter(self.machine.initialize_batch, found, job, saved, error)

    def pull(
        self,
        session: int,
        variables: Sequence[int],
        after: int,
        rows: Sequence[RowRead] = (),
        tables: Sequence[TableRead] = (),
    ) -> Future[PullReply]:
        future: Future[PullReply] = Future()
        self._enter(self.machine.pull, session, Asked(tuple(variables), after, tuple(rows), tuple(tables)), future)
        return future

    # ---- The log ----

    def propose(self, session: int, plan: Plan | None, join_point: str, start: Start | None, trace: str = "") -> None:
        prepared = None if plan is None else self._prepared(plan)
        _raise(self._enter(self.machine.propose, session, prepared, join_point, start, trace))

    def _prepared(self, plan: Plan) -> PreparedPlan:
        """Prepares a plan for this server; without the lock, as it takes long."""
        return PreparedPlan(plan, self.server, self.config.memory_limit > 0)

    def watch(self, session: int, after: int, version: int) -> Future[Watched]:
        future: Future[Watched] = Future()
        self._enter(self.machine.watch, session, after, version, future)
        future.add_done_callback(partial(self._part, session))
        return future

    def _part(self, session: int, watch: Future[Watched]) -> None:
        if watch.cancelled():
            self._enter(self.machine.part, session)

    def approve(self, token: int, index: int, entries: Sequence[LogEntry]) -> int:
        self._enter(self.machine.holds, token)  # before plans are prepared: that takes long
        prepared = {entry.plan.id: self._prepared(entry.plan) for entry in entries if isinstance(entry, Approved)}
        return self._enter(self.machine.approve, token, index, list(entries), prepared)

    # ---- Rounds ----

    def push(self, contribution: Contribution, payload: Payload, begun: Begun | None = None) -> Future[RoundReply]:
        future: Future[RoundReply] = Future()
        self._enter(self.machine.push, contribution, payload, begun, future)
        return future

    # ---- Other servers ----

    def introduce(self, server: int, incarnation: int) -> None:
        """Lets another server vote here."""
        self._enter(self.machine.introduce, server, incarnation)

    def hear(self, server: int, said: Vote | Testimony) -> None:
        """Takes in a vote or a testimony of another server."""
        self._enter(self.machine.hear if isinstance(said, Vote) else self.machine.testify, server, said)

    def meet(self, server: int) -> None:
        """Another server is connected, for the first time or anew."""
        self._enter(self.machine.meet, server)

    def outlive(self, error: ServerGone) -> None:
        """Another server says that the job goes on without this one."""
        self._enter(self.machine.outlive, error)

    def miss(self, server: int, reason: str) -> None:
        """Another server is not connected, or no more."""
        self._enter(self.machine.miss, server, reason)

    # ---- Checkpoints ----

    def snapshot(self, token: int, plan_id: bytes, manifest: str) -> Future[Shard]:
        future: Future[Shard] = Future()
        self._enter(self.machine.snapshot, token, plan_id, manifest, future)
        return future

    def restore(self, session: int, path: str, turn: Turn, order: RestoreOrder = ALL) -> Future[RestoreReply]:
        return self._enter(self.machine.restore, session, path, turn, order, Future())

    # ---- Closures, batches that are handed out, and places ----

    def schedule(self, session: int, order: ClosureOrder) -> Future[ClosureQueue]:
        future: Future[ClosureQueue] = Future()
        self._enter(self.machine.schedule, session, order, future)
        return future

    def take(
        self, session: int, functions: Sequence[str], result: ClosureResult | None = None, offset: int = 0
    ) -> Future[Taken]:
        future: Future[Taken] = Future()
        self._enter(self.machine.take, session, tuple(functions), result, offset, future)
        return future

    def fetch(self, session: int, number: int, offset: int) -> Future[Fetched]:
        future: Future[Fetched] = Future()
        self._enter(self.machine.fetch, session, number, offset, future)
        return future

    def assign_batches(self, session: int, ask: ChunkAsk) -> Future[Chunks]:
        answer: Future[Chunks] = Future()
        answer.set_result(self._enter(self.machine.assign_batches, session, ask))
        return answer

    def offer(self, standby: Standby) -> Offered:
        return self._enter(self.machine.offer, standby)

    def move(self, server: int, address: str = "", token: int = 0) -> str:
        return self._enter(self.machine.move, server, address, token)

    # ---- What is there, and the end ----

    def status(self) -> ServerStatus:
        return self.seen(self.machine.status)

    def events(self) -> tuple[Happened, ...]:
        """Returns the last stimuli in words, the oldest first, without heartbeats and ticks of the clock."""
        with self._lock:
            now, last = self._clock(), self.stimuli.last()
        return told(last, now, self.registry)

    @property
    def in_flight(self) -> int:
        """Bytes of contributions that are held and not used yet."""
        return self.seen(lambda now: self.machine.rounds.in_flight)

    def close(self) -> None:
        """Fails all calls that wait, and closes the kernels. Answered calls lose nothing."""
        self._enter(self.machine.close)
        self.kernels.close()


def _refusal(answer: object, effects: Sequence[Effect], args: Sequence[object]) -> PSError | None:
    """Returns why a stimulus that raised nothing was refused: it answers so, or its caller's future is told so."""
    said = answer[0] if isinstance(answer, tuple) and answer else answer
    if isinstance(said, CreateBatchReply):
        said = said.error
    if isinstance(said, PSError):
        return said
    for effect in effects:
        if isinstance(effect, Fail) and any(effect.future is arg for arg in args):
            return effect.error
    return None


def _raise(error: PSError | None) -> None:
    if error is not None:
        raise error
