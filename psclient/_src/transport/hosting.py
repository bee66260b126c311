"""The servers that a job goes on with: which are gone, which one keeps the log, and which holds a variable."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import TypeVar

from psclient._src.transport.daemon_threads import Threads
from psclient._src.transport.remote_server import RemoteServer
from pswire.api import Opened, ParameterServer
from pswire.cluster import Task
from pswire.errors import PSError, ServerGone, ServerLost, Unreachable
from pswire.model.log import Gone, in_order
from pswire.model.status import ServerStatus

log = logging.getLogger("psclient")

T = TypeVar("T")

PAUSE = 0.1
"""Seconds between two looks for servers that do not answer yet."""


class Hosting:
    """What this process knows of the job's servers. May be used by any thread.

    Every call to a server that the chief has declared gone fails at once, with `ServerGone`, until another process is
    taken back in its place.

    Args:
        task: this process's task, for messages.
        servers: all servers of the job.

    Attributes:
        gone: the servers that are gone; replaced, never changed.
        live: the others, in the order of `in_order`: the first of them keeps the log and the sessions.
        losses: the servers that were lost, one after the other; those that have come back included.
        lives: the incarnations of servers that were gone before this process came.
        suspects: of the chief, the servers that it has found lost, with the reason of each.
    """

    def __init__(self, task: Task, servers: Sequence[ParameterServer]) -> None:
        self._task = task
        self._servers = servers
        self._lock = threading.Lock()  # guards what follows
        self.gone: frozenset[int] = frozenset()
        self.live: tuple[int, ...] = tuple(range(len(servers)))
        self.losses: tuple[int, ...] = ()
        self.lives: dict[int, int] = {}
        self.suspects: dict[int, ServerLost] = {}
        self._news: Future[None] = Future()
        self._coming: set[int] = set()  # those at which this process opens its session anew

    @property
    def keeper(self) -> int:
        """The server that keeps the log and the sessions."""
        return self.live[0]

    def home(self, servers: Sequence[int]) -> int:
        """Returns which of the servers that hold a variable is asked for it: the first that is not gone.

        Raises:
            ServerLost: all of them are gone.
        """
        if not self.gone:
            return servers[0]
        found = next((server for server in servers if server not in self.gone), None)
        if found is None:
            raise ServerLost("was lost, and so were its copies; restart from a checkpoint", str(Task("ps", servers[0])))
        return found

    def lose(self, losses: Sequence[Gone], first: int) -> list[Gone]:
        """Notes which servers are gone; returns those that this process took for being there.

        Args:
            losses: in their order.
            first: how many there were before.
        """
        with self._lock:
            new = losses[max(len(self.losses) - first, 0) :]
            told = [entry for entry in new if entry.server in self._coming or entry.server not in self.gone]
            self.losses += tuple(entry.server for entry in new)
            self._set(self.gone | {entry.server for entry in new})
        for entry in told:
            task = Task("ps", entry.server)
            log.warning("%s goes on without %s: %s", self._task, task, entry.reason)
            self._fail(entry.server, entry.reason)
        return told

    def left_by(self, server: int) -> Opened:
        """Returns what is known of a server that was gone before this process came."""
        return Opened(0, self.lives[server], 0, server, "cpu")

    def take_back(self, server: int, times: int, open: Callable[[], T]) -> T | None:
        """Goes on with another process in the place of a server that was gone.

        Args:
            server: its number.
            times: how often it was lost before.
            open: opens the session there.

        Returns:
            What `open` did; None where the server is lost again, or was never gone for this process.
        """
        there = self._servers[server]
        with self._lock:
            if server not in self.gone or self.losses.count(server) != times:
                return None
            self._coming.add(server)
            if isinstance(there, RemoteServer):
                there.begin_anew()
        opened = None
        try:
            opened = open()
        except ServerGone:
            return None
        finally:
            with self._lock:
                self._coming.discard(server)
                is_back = opened is not None and self.losses.count(server) == times
                if is_back:
                    self._set(self.gone - {server})
        if not is_back:
            return None
        log.warning("%s goes on with %s, which is back", self._task, Task("ps", server))
        return opened

    def _set(self, gone: frozenset[int]) -> None:
        live = (server for server in range(len(self._servers)) if server not in gone)
        self.live = tuple(in_order(live, self.losses))
        self.gone = gone

    def _fail(self, server: int, reason: str) -> None:
        there = self._servers[server]
        if isinstance(there, RemoteServer):
            there.fail(ServerGone(f"is gone: {reason}", str(Task("ps", server))))

    def suspect(self, server: int, error: PSError, decides: bool) -> bool:
        """Notes that a server was found lost; returns whether somebody decides what becomes of that.

        Args:
            server: its number.
            error: how it was found.
            decides: True if this process is the chief.
        """
        if not decides or not isinstance(error, ServerLost):
            return False
        self.suspects.setdefault(server, error)
        with self._lock:
            news, self._news = self._news, Future()
        news.set_result(None)
        return True

    def check(self, refuse: Callable[..., None], *what: str) -> None:
        """Raises `ConfigError` if one of the servers does not know what is needed; as `RemoteServer.check`."""
        for server in self._servers:
            if isinstance(server, RemoteServer):
                server.check(refuse, *what)

    @property
    def suspected(self) -> list[Future[None]]:
        """What is answered with the next suspect."""
        return [self._news]

    def look_around(self, threads: Threads, seconds: float) -> None:
        """Finds out which servers are gone, before this process opens its session.

        Returns once all answer, or one of those that do holds a job that goes on without others.

        Args:
            threads: for the calls.
            seconds: how long to try.

        Raises:
            Unreachable: a server does not answer, and no other says that it is gone.
        """
        until = time.monotonic() + seconds
        asked: dict[int, Future[ServerStatus]] = {}
        known: dict[int, ServerStatus] = {}
        while len(known) < len(self._servers):
            for index, server in enumerate(self._servers):
                if index not in known and index not in asked:
                    asked[index] = threads.submit(server.status)
            wait(asked.values(), PAUSE, FIRST_COMPLETED)
            for index in [index for index, future in asked.items() if future.done()]:
                future = asked.pop(index)
                # Of one that an earlier session of this process has found gone the others tell it again.
                if isinstance(future.exception(), Unreachable | ServerGone) and time.monotonic() < until:
                    continue
                known[index] = future.result()
            if self._take_over(known):
                return

    def _take_over(self, known: Mapping[int, ServerStatus]) -> bool:
        running = [status for status in known.values() if status.incarnations and not status.over]
        newest = max(running, key=lambda status: status.log, default=None)
        if newest is None or not newest.gone:
            return False
        with self._lock:
            self.losses = newest.losses or newest.gone
            self._set(frozenset(newest.gone))
        self.lives = dict(enumerate(newest.incarnations))
        for server in newest.gone:
            self._fail(server, "it was lost before this process came")
        return True
