"""Hosts of a simulation: processors that processes share, and links that messages share."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from pstesting.simulation.scheduler import Scheduler

Job = tuple[float, Callable[..., object], tuple[Any, ...]]


class Strand:
    """One thread of Python of a process: does one piece of work at a time, in order, where its host has a core free.

    Args:
        host: where it runs.
        process: of which it is one thread; None for one of its own.

    Attributes:
        busy: seconds of work done so far.
        slow: by how much it takes longer than it should.
        alive: False once its process has ended.
        host, process: as above.
    """

    def __init__(self, host: Host, process: object = None) -> None:
        self.process = process or self
        self.busy = 0.0
        self.slow = 1.0
        self.alive = True
        self.host = host
        self._shares = host.crowded
        self._queue: deque[Job] = deque()
        self._runs = False  # or waits for a core

    def do(self, seconds: float, then: Callable[..., object], *args: Any) -> None:
        """Works for some seconds once what was asked for before is done; then calls a function."""
        if not self.alive:
            return
        self._queue.append((seconds * self.slow, then, args))
        if self._runs:
            return
        self._runs = True
        if self._shares:
            self.host.enter(self)
        else:
            self.begin()

    def begin(self, more: float = 0.0) -> None:
        """A core is free: does the next piece, which takes so many seconds more."""
        seconds, then, args = self._queue.popleft()
        seconds += more
        self.busy += seconds
        self.host.scheduler.after(seconds, self._end, then, args)

    def _end(self, then: Callable[..., object], args: tuple[Any, ...]) -> None:
        if self.alive:
            then(*args)
        if not self._queue:
            self._runs = False
            if self._shares:
                self.host.leave()
        elif self._shares:
            self.host.again(self)
        else:
            self.begin()

    def stop(self) -> None:
        """Its process ends: what it has not done is never done."""
        self.alive = False
        self._queue.clear()


class Link:
    """One direction of a host's network interface: messages one after the other, at a rate.

    Args:
        rate: bytes per second; infinite for what is not limited.

    Attributes:
        busy: seconds in which something passed.
        free: the time at which the last message that was sent has passed.
    """

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.busy = 0.0
        self.free = 0.0

    def pass_(self, seconds: float, from_: float, until: float) -> float:
        """Passes a message.

        Args:
            seconds: what it takes by itself.
            from_: when its first byte is here.
            until: when its last byte is here.

        Returns:
            When its last byte has passed.
        """
        self.busy += seconds
        passed = (self.free if self.free > from_ else from_) + seconds
        self.free = passed = passed if passed > until else until
        return passed


class Host:
    """A host.

    Args:
        scheduler: the simulation's.
        cores: its processors; 0 for as many as are needed.
        rate: bytes per second of its network, each way.
        switch: seconds that a core takes to come to a process other than its last: its caches have nothing of that one.

    Attributes:
        crowded: True if a strand may have to wait for a core.
    """

    def __init__(self, scheduler: Scheduler, cores: int = 0, rate: float = float("inf"), switch: float = 0.0) -> None:
        self.scheduler = scheduler
        self.out, self.into = Link(rate), Link(rate)
        self.crowded = cores > 0
        self._switch = switch
        self._free = cores
        self._warm: deque[object] = deque(maxlen=cores)  # the processes of which cores did something last
        self._waiting: deque[Strand] = deque()

    def enter(self, strand: Strand) -> None:
        """A strand has work: begins it if a core is free."""
        if self._free:
            self._free -= 1
            self._come_to(strand)
        else:
            self._waiting.append(strand)

    def again(self, strand: Strand) -> None:
        """A strand has more work: it begins it, unless others wait for a core."""
        if self._waiting:
            self._waiting.append(strand)
            self._come_to(self._waiting.popleft())
        else:
            strand.begin()

    def leave(self) -> None:
        """A strand has no more work."""
        if self._waiting:
            self._come_to(self._waiting.popleft())
        else:
            self._free += 1

    def _come_to(self, strand: Strand) -> None:
        cold = self._switch > 0 and strand.process not in self._warm
        if cold:
            self._warm.append(strand.process)
        strand.begin(self._switch if cold else 0.0)


def travel(scheduler: Scheduler, source: Host, sink: Host, nbytes: float, latency: float) -> float:
    """Sends a message between hosts now; returns when its last byte is there. On one host it needs the latency."""
    if source is sink:
        return scheduler.now + latency
    now, link = scheduler.now, source.out
    seconds = nbytes / link.rate
    left = link.pass_(seconds, now, now)
    return sink.into.pass_(nbytes / sink.into.rate, left - seconds + latency, left + latency)
