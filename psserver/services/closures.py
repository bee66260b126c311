"""Closures: what a coordinator schedules, which worker runs it, and what came of it. Server 0 keeps them.

A plain state machine without clock, network or array work; arguments and results are bytes that it does not read. A
worker has one closure at a time. Where its session ends, the closure goes back into the queue, to its old place.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from math import inf
from typing import Literal

from psserver.calls import Call, Calls
from psserver.effects import Effect, Fail, Reply
from psserver.services.service import Service
from pswire.cluster import Task
from pswire.errors import ConfigError, InvalidRequest, MemoryLimit, PSError
from pswire.limits import CLOSURE_BYTES, CLOSURE_LOSSES, MAX_FUNCTIONS, MAX_NAME, MAX_QUEUED, PIECE_BYTES
from pswire.model.closures import (
    ClosureName,
    ClosureOrder,
    ClosureQueue,
    ClosureResult,
    ClosureState,
    Failure,
    Fetched,
    Piece,
    Taken,
)
from pswire.servers.closures import FetchRequest, ScheduleRequest, TakeRequest
from pswire.sizes import human

MAX_TEXT = 20_000
"""Characters that are kept of an error's text."""

State = Literal["coming", "queued", "running", "done", "failed", "cancelled"]
OVER: dict[str, ClosureState] = {"done": "done", "failed": "failed", "cancelled": "cancelled"}
"""The states in which a closure is over."""


@dataclass
class _Content:
    """Arguments or a result, as far as they have come."""

    size: int = 0
    data: bytearray = field(default_factory=bytearray)

    @property
    def whole(self) -> bool:
        return len(self.data) == self.size

    def differs(self, piece: Piece) -> bool:
        """Returns True for the first piece of something else."""
        return piece.offset == 0 and (piece.size != self.size or not self.data.startswith(piece.data))

    def add(self, piece: Piece) -> None:
        """Adds a piece; one that is here already changes nothing."""
        if piece.offset == 0 and not self.data:
            self.size = piece.size
        end = piece.offset + len(piece.data)
        if piece.size != self.size or piece.offset > len(self.data) or end > self.size:
            raise InvalidRequest(
                f"a piece of {len(piece.data)} bytes at {piece.offset} of {piece.size} follows {len(self.data)} bytes "
                f"of {self.size}"
            )
        self.data += piece.data[len(self.data) - piece.offset :]

    def piece(self, offset: int) -> Piece:
        if offset > self.size:
            raise InvalidRequest(f"offset {offset} is not within the {self.size} bytes")
        return Piece(self.size, offset, bytes(memoryview(self.data)[offset : offset + PIECE_BYTES]))


@dataclass
class _Closure:
    """One closure.

    Attributes:
        number, function, needs: as in `ClosureOrder`.
        arguments, result: what has come of them.
        state: what has become of it.
        holder: the session that runs it.
        version: the version in which that has got it.
        losses: workers that were lost while they ran it.
        failure: why it has failed, or was cancelled.
        wanted: False once nobody will ask for its result.
    """

    number: int
    function: str
    needs: tuple[int, ...]
    arguments: _Content = field(default_factory=_Content)
    result: _Content = field(default_factory=_Content)
    state: State = "coming"
    holder: int = 0
    version: int = 0
    losses: int = 0
    failure: Failure | None = None
    wanted: bool = True


@dataclass
class _Worker:
    """A worker that has asked for closures.

    Attributes:
        task, functions: who it is, and what it has registered.
        waits: its call that waits for a closure, and the offset of the arguments that it wants; None while it runs one.
        closure: the number of the closure that it has; 0 for none.
    """

    task: Task
    functions: tuple[str, ...]
    waits: Future[Taken] | None = None
    closure: int = 0


@dataclass(frozen=True)
class _Coordinator:
    session: int
    task: Task
    functions: tuple[str, ...]


class Closures(Service):
    """All closures of a job.

    Args:
        learn: is told which closures are over: the version, the newest that was assigned, and those under way.
    """

    verbs = frozenset(("schedule", "take", "fetch"))
    for_sessions = "schedules closures"

    def __init__(self, learn: Callable[[int, int, frozenset[int]], None]) -> None:
        self._learn = learn
        self._coordinator: _Coordinator | None = None
        self._over = False
        self._workers: dict[int, _Worker] = {}
        self._known: set[Task] = set()  # tasks with the functions of a coordinator
        self._closures: dict[int, _Closure] = {}
        self._queue: list[int] = []
        self._running: set[int] = set()
        self._begun: set[int] = set()  # those that a worker has had, and that are not over
        self._open: set[int] = set()  # those of the coordinator that are not over
        self._number = self._newest = self._version = 0
        self._failures = self._nbytes = 0
        self._failure: Failure | None = None
        self._refusal: ConfigError | None = None
        self._scheduling: Calls[ClosureOrder] = Calls(inf)  # its coordinator bounds what it schedules
        self._fetching: Calls[tuple[int, int]] = Calls()

    # ---- The coordinator ----

    def schedule(self, task: Task, asked: ScheduleRequest, future: Future[ClosureQueue]) -> list[Effect]:
        """Takes what a coordinator schedules; its future is answered as `ParameterServer.schedule` says.

        Raises:
            PSError: why the order is refused.
        """
        session, order = asked.session, asked.order
        if task.job != "chief":
            raise InvalidRequest(f"{task} cannot schedule closures; only the chief can, and it runs the script")
        if order.functions:
            return self._begin(_Coordinator(session, task, _checked(order.functions)), future)
        if self._coordinator is None or self._coordinator.session != session:
            raise InvalidRequest(f"{task} has not registered as the coordinator")
        if order.told > self._failures:
            raise InvalidRequest(f"{task} acknowledges {order.told} failures, but there were {self._failures}")
        if order.told == self._failures:
            self._failure = None
        for closure in filter(None, map(self._closures.get, order.dropped)):
            self._drop(closure)
        if order.number:
            _check_order(order, self._number)
        self._scheduling.add(session, order, future)
        return self._answers()

    def _begin(self, coordinator: _Coordinator, future: Future[ClosureQueue]) -> list[Effect]:
        """A coordinator begins; what is left of another is dropped."""
        effects: list[Effect] = []
        if self._coordinator is not None and self._coordinator.session != coordinator.session:
            effects += self._forsake(PSError("another coordinator has started; restart this process"))
        if self._coordinator is None:
            self._known.clear()
            self._failures, self._failure = 0, None
        self._coordinator, self._over, self._refusal = coordinator, False, None
        for session, worker in list(self._workers.items()):
            if worker.waits is not None and (error := self._differs(worker)) is not None:
                effects.append(Fail(worker.waits, error))
                del self._workers[session]
        self._scheduling.add(coordinator.session, ClosureOrder(), future)
        return effects + self._answers()

    def _drop(self, closure: _Closure) -> None:
        """Nobody will ask for the result of a closure; one that has not come whole is given up."""
        closure.wanted = False
        if closure.state == "coming":
            self._settle(closure, "cancelled", None)
        elif closure.state in OVER:
            self._forget(closure)

    def _forget(self, closure: _Closure) -> None:
        self._nbytes -= closure.arguments.size + closure.result.size
        del self._closures[closure.number]

    def _take_in(self, order: ClosureOrder) -> bool:
        """Takes an order that waits into the queue; returns True once it can be answered."""
        if not order.number:
            return not (order.joins and self._open)
        if order.number <= self._number and order.number not in self._closures:
            return True  # a resend: it is over, and dropped
        if (closure := self._closures.get(order.number)) is None:
            if self._failure is not None:
                return True  # not taken: the coordinator has to be told first
            if self._nbytes + order.arguments.size > CLOSURE_BYTES and not self._open:
                raise MemoryLimit(
                    f"results of closures take {human(self._nbytes)}, and the limit of server 0 is "
                    f"{human(CLOSURE_BYTES)}; fetch their RemoteValues, and drop these"
                )
            if len(self._queue) >= MAX_QUEUED or self._nbytes + order.arguments.size > CLOSURE_BYTES:
                return False
            closure = self._closures[order.number] = _Closure(order.number, order.function, order.needs)
            closure.arguments.size = order.arguments.size
            self._nbytes += order.arguments.size
            self._number = order.number
            self._open.add(order.number)
        if closure.state == "coming":
            if closure.arguments.differs(order.arguments):  # the call that sent what is here was interrupted
                self._nbytes += order.arguments.size - closure.arguments.size
                closure.function, closure.needs, closure.arguments = order.function, order.needs, _Content()
            closure.arguments.add(order.arguments)
            if closure.arguments.whole:
                closure.state = "queued"
                insort(self._queue, closure.number)
        return True

    def _state(self) -> ClosureQueue:
        return ClosureQueue(
            self._number,
            len(self._open) - len(self._running & self._open),
            len(self._running & self._open),
            len(self._workers),
            min(self._open, default=self._number + 1),
            self._failures,
            self._failure,
        )

    # ---- Workers ----

    def take(self, task: Task, asked: TakeRequest, future: Future[Taken]) -> list[Effect]:
        """Takes what a worker says of its closure; its future is answered once there is another.

        Raises:
            PSError: why it is refused.
        """
        session, result, offset = asked.session, asked.result, asked.offset
        if task.job != "worker":
            raise InvalidRequest(f"{task} is not a worker, so it cannot run closures")
        checked = _checked(asked.functions)
        worker = self._workers.pop(session, None) or _Worker(task, ())  # to the end of the line
        worker.functions = checked
        self._workers[session] = worker
        if self._coordinator is not None and (error := self._differs(worker)) is not None:
            return [Fail(future, error), *self.session_ended(session, error)]
        held = self._closures.get(worker.closure)
        if result is not None and held is not None and held.number == result.number:
            if not self._finished(worker, held, result):
                return [Reply(future, Taken())]
        elif held is not None:
            return [Reply(future, self._given(held, offset))]
        effects: list[Effect] = []
        if worker.waits is not None:
            effects.append(Fail(worker.waits, InvalidRequest(f"{task} has sent a newer request")))
        worker.waits = future
        return effects + self._answers()

    def _differs(self, worker: _Worker) -> ConfigError | None:
        """Returns the error of a worker that has other functions than the coordinator.

        The coordinator is told as well, unless the task was right before: then that is alone in being of another kind.
        """
        assert self._coordinator is not None
        if worker.functions == self._coordinator.functions:
            self._known.add(worker.task)
            return None
        error = _registries(worker, self._coordinator)
        if worker.task not in self._known:
            self._refusal = error
        return error

    def _given(self, closure: _Closure, offset: int) -> Taken:
        """Returns a piece of a closure for the worker that has it."""
        name = ClosureName(closure.number, closure.version, self._newest, tuple(sorted(self._begun)))
        coordinator = self._coordinator.session if self._coordinator else 0
        return Taken(name, closure.function, coordinator, closure.arguments.piece(offset))

    def _finished(self, worker: _Worker, closure: _Closure, told: ClosureResult) -> bool:
        """Takes what a worker says of the closure that it has; returns True once it has said all."""
        if closure.result.size != told.result.size and not closure.result.data:
            told = _bounded(told, self._nbytes - closure.arguments.size)  # of these nobody has any need any more
            self._nbytes += told.result.size
        closure.result.add(told.result)
        if not closure.result.whole:
            return False
        worker.closure = 0
        self._end(closure, Failure(closure.function, told.kind, told.text[:MAX_TEXT], str(worker.task)))
        return True

    def _end(self, closure: _Closure, told: Failure) -> None:
        """A closure is over; one that has failed ends all that wait."""
        self._running.discard(closure.number)
        if not told.kind:
            self._settle(closure, "done", None)
            return
        if closure.number in self._open and self._failure is None:
            self._failures += 1
            self._failure = told
        self._settle(closure, "failed", told)
        if self._failure is not None:
            self._cancel(self._failure)

    def _cancel(self, failure: Failure | None) -> None:
        """Cancels what is not begun, or waits to be run again."""
        for number in [number for number in self._open if number not in self._running]:
            self._settle(self._closures[number], "cancelled", failure)
        self._queue.clear()

    def _settle(self, closure: _Closure, state: State, failure: Failure | None) -> None:
        closure.state, closure.failure = state, failure
        self._nbytes -= closure.arguments.size
        closure.arguments = _Content()
        self._open.discard(closure.number)
        if closure.number in self._begun:
            self._begun.remove(closure.number)
            self._version += 1
        if not closure.wanted:
            self._forget(closure)

    # ---- Results ----

    def fetch(self, task: Task, asked: FetchRequest, future: Future[Fetched]) -> list[Effect]:
        """Waits for a result.

        Raises:
            InvalidRequest: there is none.
        """
        number = asked.number
        if number not in self._closures:
            raise InvalidRequest(f"closure {number} has no result: it was dropped, or its coordinator was lost")
        return self._fetching.add(asked.session, (number, asked.offset), future) + self._answers()

    # ---- Ends ----

    def session_ended(self, session: int, error: PSError) -> list[Effect]:
        """What a session ran is run by another, and what it scheduled is dropped."""
        effects: list[Effect] = []
        worker = self._workers.pop(session, None)
        if worker is not None:
            if worker.waits is not None:
                effects.append(Fail(worker.waits, error))
            if (closure := self._closures.get(worker.closure)) is not None:
                self._lose(closure, worker.task)
        effects += self._scheduling.session_ended(session, error)
        effects += self._fetching.session_ended(session, error)
        if self._coordinator is not None and self._coordinator.session == session:
            effects += self._forsake(error)
        return effects + self._answers()

    def _lose(self, closure: _Closure, task: Task) -> None:
        """The worker of a closure is lost."""
        closure.losses += 1
        self._nbytes -= closure.result.size
        closure.result, closure.holder = _Content(), 0
        if closure.number not in self._open or self._failure is not None:
            self._running.discard(closure.number)
            self._settle(closure, "cancelled", self._failure)
        elif closure.losses >= CLOSURE_LOSSES:
            text = f"{closure.losses} workers were lost while they ran it; this one was the last"
            self._end(closure, Failure(closure.function, "WorkerLost", text, str(task)))
        else:
            self._running.discard(closure.number)
            closure.state = "queued"
            insort(self._queue, closure.number)

    def _forsake(self, error: PSError) -> list[Effect]:
        """The coordinator is gone: nobody will ask for its results. What is run now is run to its end."""
        self._coordinator, self._refusal = None, None
        self._cancel(None)
        for closure in list(self._closures.values()):
            self._drop(closure)
        self._open.clear()
        return self._fetching.fail_all(error) + self._scheduling.fail_all(error)

    def task_left(self, task: Task) -> list[Effect]:
        """After a chief there will be no closures any more."""
        self._over = self._over or task.job == "chief"
        return self._answers()

    # ---- What can be answered now ----

    def _answers(self) -> list[Effect]:
        """Returns the answers that have become possible."""
        effects: list[Effect] = []
        before = -1
        while before != len(effects):  # what one answer makes room for another takes
            before = len(effects)
            effects += self._assign_batches()
            effects += self._scheduling.serve(self._answer_order)
        self._learn(self._version, self._newest, frozenset(self._begun))
        return effects + self._fetching.serve(self._fetched)

    def _answer_order(self, call: Call[ClosureOrder]) -> Sequence[Effect] | None:
        if self._refusal is not None:
            raise self._refusal
        return [Reply(call.future, self._state())] if self._take_in(call.asked) else None

    def _fetched(self, call: Call[tuple[int, int]]) -> Sequence[Effect] | None:
        number, offset = call.asked
        closure = self._closures.get(number)
        if closure is None:
            raise InvalidRequest(f"the result of closure {number} was dropped")
        if (state := OVER.get(closure.state)) is None:
            return None
        return [Reply(call.future, Fetched(state, closure.result.piece(offset), closure.failure))]

    def _assign_batches(self) -> list[Effect]:
        effects: list[Effect] = []
        for session, worker in self._workers.items():
            if worker.waits is None:
                continue
            closure = _first_ready(self._queue, self._closures)
            if closure is not None:
                self._queue.remove(closure.number)
                self._version += 1
                self._newest = max(self._newest, closure.number)
                self._running.add(closure.number)
                self._begun.add(closure.number)
                closure.state, closure.holder, closure.version = "running", session, self._version
                worker.closure = closure.number
                taken = self._given(closure, 0)
            elif self._over:
                taken = Taken(over=True)
            else:
                break
            effects.append(Reply(worker.waits, taken))
            worker.waits = None
        return effects


def _first_ready(queue: Sequence[int], closures: Mapping[int, _Closure]) -> _Closure | None:
    """Returns the first closure in a queue whose needs are over; a need that was dropped is over as well."""
    for number in queue:
        closure = closures[number]
        needs = (closures.get(need) for need in closure.needs)
        if all(need is None or need.state in OVER for need in needs):
            return closure
    return None


def _bounded(told: ClosureResult, held: int) -> ClosureResult:
    """Returns what a worker says; a failure where there is no room for its result beside some bytes."""
    if told.kind or held + told.result.size <= CLOSURE_BYTES:
        return told
    text = (
        f"its result has {human(told.result.size)}, and server 0 holds at most {human(CLOSURE_BYTES)} of results; "
        "drop RemoteValues, or keep large results in variables"
    )
    return ClosureResult(told.number, kind="MemoryLimit", text=text)


def _checked(functions: Sequence[str]) -> tuple[str, ...]:
    if len(functions) > MAX_FUNCTIONS or any(len(name) > 2 * MAX_NAME for name in functions):
        raise InvalidRequest(
            f"a coordinator can register at most {MAX_FUNCTIONS} functions, with names of at most {MAX_NAME} characters"
        )
    return tuple(functions)


def _check_order(order: ClosureOrder, last: int) -> None:
    """Raises `PSError` for a closure that cannot be scheduled whatever waits; `last` is the last that was."""
    piece = order.arguments
    if order.number > last + 1:
        raise InvalidRequest(f"closure {order.number} was scheduled after closure {last}")
    if len(order.function) > MAX_NAME or len(piece.data) > PIECE_BYTES or len(order.needs) > MAX_QUEUED:
        raise InvalidRequest(
            "the name of the closure is too long, its data is too large, or it depends on too many others"
        )
    if any(not 0 < number < order.number for number in order.needs):
        raise InvalidRequest(f"closure {order.number} depends on {order.needs[:8]}, which are not earlier closures")
    if piece.size > CLOSURE_BYTES:
        raise MemoryLimit(
            f"the arguments of {order.function} have {human(piece.size)}, and the limit is {human(CLOSURE_BYTES)}; "
            "put them into variables, or let workers load them"
        )


def _registries(worker: _Worker, coordinator: _Coordinator) -> ConfigError:
    """Returns the error of a worker whose functions are not those of the coordinator; both are named."""
    mine, theirs = set(worker.functions), set(coordinator.functions)

    sides = ((worker.task, mine - theirs), (coordinator.task, theirs - mine))
    told = "; ".join(f"only {task} has {', '.join(sorted(only)[:8])}" for task, only in sides if only)
    return ConfigError(
        f"{worker.task} and the coordinator {coordinator.task} have registered different functions: {told}. Import "
        "the same modules in both"
    )
