"""Simulated time: events in order, and processes that stand still until theirs has come.

A process is a greenlet: code that blocks, such as a client's or a chief's, runs unchanged, and one goes on at a time.
So a run depends on nothing but what it was given, and two runs of the same are equal.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future, InvalidStateError
from itertools import count
from typing import Any, NamedTuple, TypeVar, cast

from greenlet import GreenletExit, getcurrent, greenlet

T = TypeVar("T")


class Waited(NamedTuple):
    """What `concurrent.futures.wait` returns.

    Attributes:
        done: futures that are answered.
        not_done: the others.
    """

    done: set[Future[Any]]
    not_done: set[Future[Any]]


class UnlockedFuture(Future[T]):
    """A future of one thread: it has no lock, which takes most of a future's time. Only processes wait for it."""

    def __init__(self) -> None:
        self._answer: Any = None
        self._error: BaseException | None = None
        self._over = self._dropped = False
        self._calls: list[Callable[[Future[T]], object]] = []

    def cancel(self) -> bool:
        """As `Future.cancel`."""
        if not self._over:
            self._dropped = True
            self._settle()
        return self._dropped

    def cancelled(self) -> bool:
        """As `Future.cancelled`."""
        return self._dropped

    def set_running_or_notify_cancel(self) -> bool:
        """As `Future.set_running_or_notify_cancel`."""
        return not self._dropped

    def done(self) -> bool:
        """As `Future.done`."""
        return self._over

    def add_done_callback(self, fn: Callable[[Future[T]], object]) -> None:
        """As `Future.add_done_callback`; what a callback raises is raised where the future is answered."""
        if self._over:
            fn(self)
        else:
            self._calls.append(fn)

    def result(self, timeout: float | None = None) -> T:
        """As `Future.result`; a process stands still until the future is answered."""
        if (error := self.exception(timeout)) is not None:
            raise error
        return cast(T, self._answer)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """As `Future.exception`; a process stands still until the future is answered."""
        if not self._over and isinstance(process := getcurrent(), Process):
            process.wait_for(self, timeout)
        if not self._over:
            raise RuntimeError("a process has to wait for it first")
        if self._dropped:
            raise CancelledError
        return self._error

    def set_result(self, result: T) -> None:
        """As `Future.set_result`."""
        if self._over:
            raise InvalidStateError("the future is already done")
        self._answer = result
        self._settle()

    def set_exception(self, exception: BaseException | None) -> None:
        """As `Future.set_exception`."""
        if self._over:
            raise InvalidStateError("the future is already done")
        self._error = exception
        self._settle()

    def _settle(self) -> None:
        self._over = True
        calls, self._calls = self._calls, []
        for call in calls:
            call(self)


class Process(greenlet):
    """Some work that may stand still; see `Scheduler.spawn`.

    Attributes:
        over: True once the work has ended, or was killed.
    """

    def __init__(self, scheduler: Scheduler, work: Callable[[], object]) -> None:
        super().__init__(self._run, scheduler.hub)
        self.over = False
        self._scheduler = scheduler
        self._work = work
        self._turn = 0  # counts its waits: an event of an earlier one does not wake it
        self._until: float | None = None  # when it goes on by itself
        self._alarm: float | None = None  # when it looks at that

    def kill(self) -> None:
        """Ends it where it stands."""
        if not self.over:
            self.over = True
            self.throw(GreenletExit)

    def _run(self) -> None:
        try:
            self._work()
        finally:
            self.over = True
            self._scheduler.processes.discard(self)

    def resume(self, turn: int) -> None:
        """Goes on, if it still stands in that wait."""
        if turn == self._turn and not self.over:
            self._turn += 1
            self._until = None
            self.switch()

    def wake(self) -> None:
        """Goes on, wherever it stands."""
        self._scheduler.after(0.0, self.resume, self._turn)

    def stand(self, until: float | None, futures: Iterable[Future[Any]]) -> None:
        """Stands still until a time, or until one of some futures is answered; called within it."""
        scheduler, turn = self._scheduler, self._turn

        def answered(_: Future[Any]) -> None:
            scheduler.after(0.0, self.resume, turn)

        for future in futures:
            future.add_done_callback(answered)
        self._until = until
        if until is not None and (self._alarm is None or until < self._alarm):
            self._set_alarm(until)
        scheduler.hub.switch()

    def wait_for(self, future: Future[Any], timeout: float | None) -> None:
        """Stands still until a future is answered; raises `TimeoutError` after some seconds."""
        if not self._scheduler.wait((future,), timeout).done:
            raise TimeoutError

    def _set_alarm(self, time: float) -> None:
        """One for all its waits: most end long before, and each would leave an event to come."""
        self._alarm = time
        self._scheduler.at(time, self._ring, time)

    def _ring(self, time: float) -> None:
        if time != self._alarm or self.over:
            return
        self._alarm = None
        if self._until is None:
            return
        if self._until <= time:
            self.resume(self._turn)
        else:
            self._set_alarm(self._until)


class Scheduler:
    """The clock, the events to come, and the processes.

    Attributes:
        now: the simulated time in seconds.
        events: number of events so far.
        hub: runs the events; the parent of all processes.
        processes: those that are not over.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self.hub = getcurrent()
        self.processes: set[Process] = set()
        self._order = count()
        self._heap: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []

    def at(self, time: float, call: Callable[..., object], *args: Any) -> None:
        """Calls a function at a time; what is due at the same time comes in the order in which it was asked for."""
        heapq.heappush(self._heap, (max(time, self.now), next(self._order), call, args))

    def after(self, seconds: float, call: Callable[..., object], *args: Any) -> None:
        """Calls a function some seconds from now."""
        heapq.heappush(self._heap, (self.now + seconds, next(self._order), call, args))

    def run(self, until: Callable[[], bool], limit: float = float("inf")) -> None:
        """Lets time pass until something is true; raises what a process or an event raises.

        Args:
            until: looked at after each event.
            limit: the simulated time in seconds after which it fails.

        Raises:
            RuntimeError: nothing is left that could happen, or the limit has come.
        """
        heap, pop = self._heap, heapq.heappop
        while not until():
            if not heap or heap[0][0] > limit:
                why = "nothing is left that could happen" if not heap else f"{limit:g} s have passed"
                raise RuntimeError(f"the simulation does not end: {why}")
            self.now, _, call, args = pop(heap)
            self.events += 1
            call(*args)

    def close(self) -> None:
        """Ends all processes: Python does not find the cycles of one that stands still, and keeps all of the job."""
        for process in list(self.processes):
            process.kill()
        self.processes.clear()
        self._heap.clear()

    # ---- Processes ----

    def spawn(self, work: Callable[[], object]) -> Process:
        """Begins some work at once, as soon as whoever calls stands still; within it `sleep` and `wait` may be used."""
        process = Process(self, work)
        self.processes.add(process)
        self.after(0.0, process.resume, 0)
        return process

    @property
    def runs(self) -> bool:
        """True within a process."""
        return isinstance(getcurrent(), Process)

    @property
    def current(self) -> Process:
        """The process that calls; raises `RuntimeError` where none does."""
        process = getcurrent()
        if not isinstance(process, Process):
            raise RuntimeError("only a process of the simulation may wait")
        return process

    def sleep(self, seconds: float) -> None:
        """Stands still for some seconds; within a process."""
        self.current.stand(self.now + seconds, ())

    def wait(
        self, futures: Iterable[Future[Any]], timeout: float | None = None, return_when: str = "ALL_COMPLETED"
    ) -> Waited:
        """Waits as `concurrent.futures.wait`; within a process, in simulated seconds."""
        asked = list(futures)
        until = None if timeout is None else self.now + timeout
        while True:
            left = [future for future in asked if not future.done()]
            enough = not left or (return_when == "FIRST_COMPLETED" and len(left) < len(asked))
            if enough or (until is not None and self.now >= until):
                return Waited(set(asked) - set(left), set(left))
            self.current.stand(until, left)
