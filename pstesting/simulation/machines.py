"""Hosts of a simulation: processors that processes share, and links that messages share."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, inf
from typing import Any

from pstesting.simulation.scheduler import Scheduler

PACKET = 1 << 18
"""Most bytes that one end sends in its turn."""

Job = tuple[float, Callable[..., object], tuple[Any, ...]]
Work = tuple[float, Callable[..., object], tuple[Any, ...], bool]


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
        self._paused = False
        self._held: Work | None = None  # what had ended while it was paused
        self.slow = 1.0
        self.alive = True
        self.host = host
        self._shares = host.crowded
        self._queue: deque[Work] = deque()
        self._runs = False  # or waits for a core

    def do(self, seconds: float, then: Callable[..., object], *args: Any) -> None:
        """Works for some seconds once what was asked for before is done; then calls a function."""
        self._do(seconds, then, args, False)

    def do_part(self, seconds: float, then: Callable[..., object], *args: Any) -> None:
        """As `do`, for a part of a message: no other process comes to its core before the next part, if that is there.

        A process that sends or takes in what streams waits for nothing in between, and so the system lets it go on.
        """
        self._do(seconds, then, args, True)

    def _do(self, seconds: float, then: Callable[..., object], args: tuple[Any, ...], is_part: bool) -> None:
        if not self.alive:
            return
        self._queue.append((seconds * self.slow, then, args, is_part))
        if self._runs:
            return
        self._runs = True
        if self._shares:
            self.host.enter(self)
        else:
            self.begin()

    def begin(self, more: float = 0.0) -> None:
        """A core is free: does the next piece, which takes so many seconds more."""
        seconds, then, args, is_part = self._queue.popleft()
        seconds += more
        self.busy += seconds
        self.host.scheduler.after(seconds, self._end, then, args, is_part)

    def _end(self, then: Callable[..., object], args: tuple[Any, ...], is_part: bool) -> None:
        if self._paused:
            self._held = 0.0, then, args, is_part
            return
        if self.alive:
            then(*args)
        if not self._queue:
            self._runs = False
            if self._shares:
                self.host.leave()
        elif self._shares and not is_part:
            self.host.again(self)
        else:
            self.begin()

    def pause(self) -> None:
        """Its process stands still."""
        self._paused = True

    def resume(self) -> None:
        """Its process goes on: what had come meanwhile is done now."""
        self._paused, held, self._held = False, self._held, None
        if held is not None:
            self._end(*held[1:])

    def stop(self) -> None:
        """Its process ends: what it has not done is never done."""
        self.alive = False
        self._queue.clear()


class Link:
    """One direction of a host's network interface: messages at a rate, of all hosts at the other end in turns.

    Args:
        scheduler: the simulation's.
        rate: bytes per second; infinite for what is not limited.

    Attributes:
        busy: seconds in which something passed.
    """

    def __init__(self, scheduler: Scheduler, rate: float) -> None:
        self.rate = rate
        self.busy = 0.0
        self._scheduler = scheduler
        self._free = 0.0  # when it is free again
        self._waiting: dict[Host, deque[Job]] = {}  # by the other end; the next one's turn is the first's

    def pass_(self, other: Host, seconds: float, begins: Callable[..., object], *args: Any) -> None:
        """Passes a message.

        Args:
            other: the host at the other end.
            seconds: what the message takes.
            begins: called when its first byte passes.
            args: of that call.
        """
        if not self._waiting and self._free <= self._scheduler.now:
            self._begin(seconds, begins, args)
            return
        if not self._waiting:
            self._scheduler.at(self._free, self._next)
        self._waiting.setdefault(other, deque()).append((seconds, begins, args))

    def _begin(self, seconds: float, begins: Callable[..., object], args: tuple[Any, ...]) -> None:
        self.busy += seconds
        self._free = self._scheduler.now + seconds
        begins(*args)

    def _next(self) -> None:
        other = next(iter(self._waiting))
        queue = self._waiting.pop(other)
        seconds, begins, args = queue.popleft()
        if queue:
            self._waiting[other] = queue  # behind the others
        self._begin(seconds, begins, args)
        if self._waiting:
            self._scheduler.at(self._free, self._next)


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
        self.out, self.into = Link(scheduler, rate), Link(scheduler, rate)
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


@dataclass(frozen=True, slots=True)
class Packet:
    """A part of a message between two hosts, which others may overtake.

    Attributes:
        scheduler: the simulation's.
        source, sink: the hosts.
        nbytes: its size.
        latency: seconds that it needs beside what links take.
    """

    scheduler: Scheduler
    source: Host
    sink: Host
    nbytes: float
    latency: float

    def leave(self, seconds: float, call: Callable[..., object], args: tuple[Any, ...]) -> None:
        """Its first byte leaves, and the last one so many seconds later; calls a function once that is there."""
        ends = self.scheduler.now + seconds + self.latency
        if self.sink.into.rate == inf:
            self.scheduler.at(ends, call, *args)
        else:
            self.scheduler.after(self.latency, self._arrive, ends, call, args)

    def _arrive(self, ends: float, call: Callable[..., object], args: tuple[Any, ...]) -> None:
        seconds = self.nbytes / self.sink.into.rate
        self.sink.into.pass_(self.source, seconds, self._enter, seconds, ends, call, args)

    def _enter(self, seconds: float, ends: float, call: Callable[..., object], args: tuple[Any, ...]) -> None:
        self.scheduler.at(max(self.scheduler.now + seconds, ends), call, *args)


def travel(
    scheduler: Scheduler,
    source: Host,
    sink: Host,
    nbytes: float,
    latency: float,
    call: Callable[..., object],
    *args: Any,
) -> None:
    """Sends a message between hosts; calls a function once its last byte is there. On one host it needs the latency."""
    if source is sink or source.out.rate == sink.into.rate == inf:
        scheduler.after(latency, call, *args)
        return
    packets = ceil(nbytes / PACKET) or 1
    packet, seconds = Packet(scheduler, source, sink, nbytes / packets, latency), nbytes / packets / source.out.rate
    for _ in range(packets - 1):
        source.out.pass_(sink, seconds, packet.leave, seconds, nothing, ())
    source.out.pass_(sink, seconds, packet.leave, seconds, call, args)


def nothing() -> None:
    """Does nothing: a message is there, and is used, with its last part."""
