"""What a worker with bounded staleness says of its rounds in its heartbeats, so that no server waits for it in vain."""

from __future__ import annotations

import threading

from pswire.api import RESTS

HEARTBEATS = 2
"""Heartbeats without a pass under way after which a worker is at rest. One may come right behind the end of a pass."""


class WorkerClock:
    """The clock of a worker, of which each server is told what it cannot see. May be used by any thread.

    A server sees the rounds that come to it. It is told of those that do not, and when the worker has no data left.

    Args:
        servers: number of servers.
    """

    def __init__(self, servers: int) -> None:
        self._lock = threading.Lock()
        self._next = [0] * servers
        self._idle = [0] * servers  # heartbeats since the last pass has ended, plus one; 0 while there is one
        self._at_rest = [False] * servers  # as each server was told last

    def passed(self, server: int, next: int) -> None:
        """Notes the next round of which something may come to a server: what was before it does not."""
        with self._lock:
            self._next[server] = max(self._next[server], next)

    def end(self) -> None:
        """Notes that no pass is under way any more."""
        with self._lock:
            self._idle = [count or 1 for count in self._idle]

    def rest(self) -> None:
        """Notes that the worker makes no rounds until others come to where it is: nobody is to wait for it."""
        with self._lock:
            self._idle = [HEARTBEATS + 1] * len(self._idle)

    def begin(self) -> bool:
        """Notes that the worker goes on; returns True if a server takes it to be at rest."""
        with self._lock:
            self._idle = [0] * len(self._idle)
            return any(self._at_rest)

    def note_pass(self, under_way: bool) -> None:
        """Notes whether a pass over the worker's data is under way."""
        if under_way:
            self.begin()
        else:
            self.end()

    def come_late(self) -> None:
        """Notes that the servers take this worker, which has come to a running job, to be at rest."""
        with self._lock:
            self._at_rest = [True] * len(self._at_rest)

    def come_back(self, next: int) -> None:
        """Notes the round with which the worker goes on after its rest; every server has to be told."""
        with self._lock:
            self._idle = [0] * len(self._idle)
            self._next = [max(known, next) for known in self._next]

    def say(self, server: int, heartbeats: bool) -> int:
        """Returns what to tell a server now; `heartbeats` if it is told by a heartbeat that comes by itself."""
        with self._lock:
            if self._idle[server] and heartbeats:
                self._idle[server] += 1
            if self._at_rest[server] and heartbeats:
                return RESTS  # `come_back` alone ends it: it has to ask the servers where the others are
            self._at_rest[server] = self._idle[server] > HEARTBEATS
            return RESTS if self._at_rest[server] else self._next[server]
