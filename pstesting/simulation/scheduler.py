"""Simulated time: events in order, and processes that stand still until theirs has come.

A process is a greenlet: code that blocks, such as a client's or a chief's, runs unchanged, and one goes on at a time.
So a run depends on nothing but what it was given, and two runs of the same are equal.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from itertools import count
from typing import Any, NamedTuple

from greenlet import GreenletExit, getcurrent, greenlet


class Waited(NamedTuple):
    """What `concurrent.futures.wait` returns.

    Attributes:
        done: futures that are answered.
        not_done: the others.
    """

    done: set[Future[Any]]
    not_done: set[Future[Any]]


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

    def resume(self, turn: int) -> None:
        """Goes on, if it still stands in that wait."""
        if turn == self._turn and not self.over:
            self._turn += 1
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
        if until is not None:
            scheduler.at(until, self.resume, turn)
        scheduler.hub.switch()


class Scheduler:
    """The clock, the events to come, and the processes.

    Attributes:
        now: the simulated time in seconds.
        events: number of events so far.
        hub: runs the events; the parent of all processes.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self.hub = getcurrent()
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
        heap = self._heap
        while not until():
            if not heap or heap[0][0] > limit:
                why = "nothing is left that could happen" if not heap else f"{limit:g} s have passed"
                raise RuntimeError(f"the simulation does not end: {why}")
            self.now, _, call, args = heapq.heappop(heap)
            self.events += 1
            call(*args)

    # ---- Processes ----

    def spawn(self, work: Callable[[], object]) -> Process:
        """Begins some work at once, as soon as whoever calls stands still; within it `sleep` and `wait` may be used."""
        process = Process(self, work)
        self.after(0.0, process.resume, 0)
        return process

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
