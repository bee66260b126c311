"""One parameter server without its network: the `ParameterServer` of a process.

The core holds the one lock. It passes stimuli to the state machine, one at a time, and carries out the returned effects
without the lock: it answers futures, and puts work into the queues for arrays and for files. A small round has no
thread of its own: it runs in the one that takes the last contribution, and its answers leave from there.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from psserver.config import ServerConfig
from psserver.core.machine import UNCHANGED, Machine
from psserver.core.stimuli import Stimuli, told
from psserver.devices import ServerDevice
from psserver.effects import Await, Effect, Fail, Know, Others, Outcome, Reply, Run, Send, Submit, Work, attempt, settle
from psserver.execution.array_queue import ArrayQueue
from psserver.plans.prepared import PreparedPlan
from psserver.programs.kernels.kernels import Kernels
from psserver.state.sessions import DRAWN
from psserver.state.variables import FirstValue
from pswire.api import (
    ApproveRequest,
    Begun,
    Contribution,
    CreateBatchReply,
    CreateBatchRequest,
    EventsRequest,
    Opened,
    OpenRequest,
    ParameterServer,
    ProposeRequest,
    RoundReply,
    StatusRequest,
    Watched,
    WatchRequest,
)
from pswire.errors import PSError, ServerGone
from pswire.model.log import Approved
from pswire.model.plan import Plan
from pswire.model.status import Happened, ServerStatus
from pswire.network.futures import LeanFuture
from pswire.network.payload import Payload
from pswire.servers.requests import ServerRequest
from pswire.servers.votes import Testimony, Vote

R = TypeVar("R")
T = TypeVar("T")


class Core(ParameterServer):
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
        self._own: Mapping[type[ServerRequest[Any]], Callable[[Any], Any]] = {
            OpenRequest: self._open,
            CreateBatchRequest: self._create_batch,
            ProposeRequest: self._propose,
            WatchRequest: self._watch,
            ApproveRequest: self._approve,
            StatusRequest: self._status,
            EventsRequest: self._events,
        }
        """What is done for a request beside letting the machine take it."""
        self.others: Others | None = None
        """The other servers of the job; None for a server that reaches none."""

    # ---- Stimuli and effects ----

    def _enter(self, stimulus: Callable[..., Outcome[T | PSError]], *args: Any) -> T:
        """Passes one stimulus to the machine, and carries out the effects.

        Args:
            stimulus: a method of the machine.
            args: its arguments after the time.

        Returns:
            The stimulus's answer.

        Raises:
            PSError: why the stimulus was refused. One that the machine raises has no effects; one that it answers with
                has had some.
        """
        answer, effects = self._let_in(stimulus, *args)
        self._carry_out(effects)
        if isinstance(answer, PSError):
            raise answer
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

    # ---- Requests ----

    def call(self, request: ServerRequest[R]) -> R:
        """Lets the machine take a request by its method of the verb's name; see `ParameterServer`."""
        own: Any = self._own.get(type(request))
        if own is None:
            own = partial(self._await if request.waits else self._enter, self.machine.verb(request.method))
        answer: R = own(request)
        return answer

    def _await(self, take: Callable[..., Outcome[Any]], request: ServerRequest[Any]) -> Future[Any]:
        """Passes on a request whose answer may come late; returns a new future, or the one that the machine names."""
        future: Future[Any] = Future()
        return self._enter(take, request, future) or future

    def _open(self, request: OpenRequest) -> Opened:
        return self._enter(self.machine.open, request, secrets.randbits(DRAWN))

    def _create_batch(self, request: CreateBatchRequest) -> CreateBatchReply:
        batch = tuple(request.variables)
        reply, needing, job = self._enter(self.machine.create_batch, replace(request, variables=batch))
        found, error = batch[: reply.count], reply.error
        saved: dict[int, FirstValue] = {}
        for variable in needing:
            try:
                # Without the lock: this may read a file.
                value = self.machine.job.restores.first_value(variable)
            except PSError as failure:
                found, error = found[: found.index(variable)], failure
                break
            if value is not None:
                saved[variable.id] = value
        if not saved and error is reply.error:
            return reply
        return self._enter(self.machine.initialize_batch, found, job, saved, error)

    def _propose(self, request: ProposeRequest) -> None:
        self._enter(self.machine.propose, request, None if request.plan is None else self._prepared(request.plan))

    def _prepared(self, plan: Plan) -> PreparedPlan:
        """Prepares a plan for this server; without the lock, as it takes long."""
        return PreparedPlan(plan, self.server, self.config.memory_limit > 0)

    def _watch(self, request: WatchRequest) -> Future[Watched]:
        future = self._await(self.machine.watch, request)
        future.add_done_callback(partial(self._part, request.session))
        return future

    def _part(self, session: int, watch: Future[Watched]) -> None:
        if watch.cancelled():
            self._enter(self.machine.part, session)

    def _approve(self, request: ApproveRequest) -> int:
        self._enter(self.machine.holds, request.token)  # before plans are prepared: that takes long
        entries = tuple(request.entries)
        prepared = {entry.plan.id: self._prepared(entry.plan) for entry in entries if isinstance(entry, Approved)}
        return self._enter(self.machine.approve, replace(request, entries=entries), prepared)

    def _status(self, _: StatusRequest) -> ServerStatus:
        return self.seen(self.machine.status)

    def _events(self, _: EventsRequest) -> tuple[Happened, ...]:
        with self._lock:
            now, last = self._clock(), self.stimuli.last()
        return told(last, now, self.registry)

    def push(self, contribution: Contribution, payload: Payload, begun: Begun | None = None) -> Future[RoundReply]:
        future: Future[RoundReply] = LeanFuture()
        self._enter(self.machine.push, contribution, payload, begun, future)
        return future

    # ---- Time ----

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

    # ---- Other servers ----

    def introduce(self, server: int, incarnation: int) -> None:
        """Lets another server vote here."""
        self._enter(self.machine.verb("introduce"), server, incarnation)

    def hear(self, server: int, said: Vote | Testimony) -> None:
        """Takes in a vote or a testimony of another server."""
        self._enter(self.machine.verb("hear" if isinstance(said, Vote) else "testify"), server, said)

    def meet(self, server: int) -> None:
        """Another server is connected, for the first time or anew."""
        self._enter(self.machine.verb("meet"), server)

    def outlive(self, error: ServerGone) -> None:
        """Another server says that the job goes on without this one."""
        self._enter(self.machine.outlive, error)

    def miss(self, server: int, reason: str) -> None:
        """Another server is not connected, or no more."""
        self._enter(self.machine.verb("miss"), server, reason)

    # ---- What is there, and the end ----

    @property
    def in_flight(self) -> int:
        """Bytes of contributions that are held and not used yet."""
        return self.seen(lambda now: self.machine.job.rounds.in_flight)

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
