"""The servers that a job goes on with: which are gone, which one keeps the log, and which holds a variable."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from typing import TypeVar

from psclient._src.network.daemon_threads import Threads
from psclient._src.network.remote_server import RemoteServer, elsewhere, expect, follow_moves, look_again
from pswire.api import Opened, ParameterServer
from pswire.cluster import Task, server_of
from pswire.errors import PSError, ServerGone, ServerLost, Unreachable
from pswire.limits import Timeouts
from pswire.model.log import Gone, Return, in_order
from pswire.model.places import Moved
from pswire.model.status import ServerStatus, newest_of

log = logging.getLogger("psclient")

T = TypeVar("T")

LOOK_SECONDS = 1.0
"""Seconds that a server has to answer which may be back."""

PAUSE = 0.1
"""Seconds between two looks for servers that do not answer yet."""


class Hosting:
    """What this process knows of the job's servers. May be used by any thread.

    Every call to a server that the chief has declared gone fails at once, with `ServerGone`, until another process is
    readmitted in its place.

    Args:
        task: this process's task, for messages.
        servers: all servers of the job.

    Attributes:
        gone: the servers that are gone; replaced, never changed.
        live: the others, in the order of `in_order`: the first of them keeps the log and the sessions.
        losses: the servers that were lost, one after the other; those that have come back included.
        lives: the incarnations of servers that were gone before this process came.
        suspects: of the chief, the servers that it has found lost, with the reason of each.
        moves: addresses to which servers are about to move, or to come back, by their index; replaced, never changed.
        taking_hints: the servers of whose dynamic tables rows lie in files; replaced, never changed.
    """

    def __init__(self, task: Task, servers: Sequence[ParameterServer]) -> None:
        self._task = task
        self._servers = servers
        self._remote = {index: each for index, each in enumerate(servers) if isinstance(each, RemoteServer)}
        self._takes_back = threading.Lock()
        self._lock = threading.Lock()  # guards what follows
        self.gone: frozenset[int] = frozenset()
        self.live: tuple[int, ...] = tuple(range(len(servers)))
        self.losses: tuple[int, ...] = ()
        self.lives: dict[int, int] = {}
        self.suspects: dict[int, ServerLost] = {}
        self.moves: dict[int, str] = {}
        self.taking_hints: frozenset[int] = frozenset()
        self._looks: Future[None] | None = None
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
            raise ServerLost(
                "was lost together with the servers that had its copies; restart from a checkpoint",
                str(Task("ps", servers[0])),
            )
        return found

    def lose(self, losses: Sequence[Gone]) -> list[Gone]:
        """Notes which servers are gone; returns those that this process took for being there.

        A server that kept the log, and was lost, may have told of others before them of whom its successor tells.

        Args:
            losses: all that the log tells of, in order.
        """
        with self._lock:
            known, new = Counter(self.losses), list[Gone]()
            for entry in losses:
                if known[entry.server] > 0:
                    known[entry.server] -= 1
                else:
                    new.append(entry)
            told = [entry for entry in new if entry.server in self._coming or entry.server not in self.gone]
            self.losses = (*(entry.server for entry in losses), *known.elements())
            self._set(self.gone | {entry.server for entry in new})
        for entry in told:
            task = Task("ps", entry.server)
            log.warning("%s goes on without %s: %s", self._task, task, entry.reason)
            self._fail(entry.server, entry.reason)
        return told

    def life(self, server: int) -> int:
        """Returns which life of a server this is: how often it was lost before."""
        return self.losses.count(server)

    def note(self, opened: Opened) -> Opened:
        """Notes what a server says of itself when a session is opened there; returns the same."""
        server = {opened.server}
        with self._lock:
            self.taking_hints = self.taking_hints | server if opened.takes_hints else self.taking_hints - server
        return opened

    def left_by(self, server: int) -> Opened:
        """Returns what is known of a server that was gone before this process came."""
        return Opened(0, self.lives[server], 0, server, "cpu")

    def take_back(self, server: int, times: int, address: str, open: Callable[[], T]) -> T | None:
        """Goes on with another process in the place of a server that was gone.

        Args:
            server: its number.
            times: how often it was lost before.
            address: its address; "" for the same as before.
            open: opens the session there.

        Returns:
            What `open` did; None where the server is lost again, or was never gone for this process.
        """
        with self._takes_back:  # the script's thread and one that looks for it may find it back at the same time
            return self._take_back(server, times, address, open)

    def _take_back(self, server: int, times: int, address: str, open: Callable[[], T]) -> T | None:
        with self._lock:
            if server not in self.gone or self.losses.count(server) != times:
                return None
            self._coming.add(server)
            if there := self._remote.get(server):
                there.begin_anew(address)
                expect(there)  # the log says that it was there: for who decides it is lost once nothing listens
        opened: T | None = None
        try:
            with suppress(ServerGone):
                opened = open()
        finally:
            with self._lock:
                self._coming.discard(server)
                if self.losses.count(server) != times:
                    opened = None
                elif opened is not None:
                    self._set(self.gone - {server})
        if opened is not None:
            log.warning("%s uses %s again, which was readmitted", self._task, Task("ps", server))
        return opened

    def _set(self, gone: frozenset[int]) -> None:
        live = (server for server in range(len(self._servers)) if server not in gone)
        self.live = tuple(in_order(live, self.losses))
        self.gone = gone

    def _fail(self, server: int, reason: str) -> None:
        if there := self._remote.get(server):
            there.fail(ServerGone(f"is down: {reason}", str(Task("ps", server))))

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

    def overlook(self, error: ServerLost) -> bool:
        """Takes a server for gone that a chief has found lost before it knows the log, which it is to tell then.

        Returns False where it is none of those that are there, or nobody else is.
        """
        server = server_of(error)
        if server not in self.live or len(self.live) == 1:
            return False
        with self._lock:
            self._set(self.gone | {server})
        self.suspects[server] = error
        self._fail(server, error.message)
        return True

    @property
    def suspected(self) -> list[Future[None]]:
        """What is answered with the next suspect."""
        return [self._news]

    def look_around(self, threads: Threads, timeouts: Timeouts, job: str, decides: bool) -> None:
        """Finds out which servers are gone, or were, before this process opens its session.

        A running job may not know yet that one of its servers was lost: another process answers in its place, or none.
        That is no new job: this process takes the server for gone, as all will, once the chief knows it.

        Args:
            threads: for the calls.
            timeouts: how long to try, and how long a server of a running job may be silent.
            job: the identity of this process's job.
            decides: True if this process is the chief.

        Raises:
            Unreachable, ServerLost: a server does not answer, and no job goes on without it.
        """
        for server in self._remote.values():
            look_again(server)
        began = time.monotonic()
        asked: dict[int, Future[ServerStatus]] = {}
        known: dict[int, ServerStatus] = {}
        lost: dict[int, PSError] = {}
        while True:
            asked |= {i: threads.submit(server.status) for i, server in enumerate(self._servers) if i not in asked}
            wait(asked.values(), PAUSE)
            seconds = time.monotonic() - began
            for index in [index for index, future in asked.items() if future.done()]:
                future = asked.pop(index)
                error = future.exception()
                if isinstance(error, ServerLost | ServerGone):  # gone: another server has told of it meanwhile
                    lost[index] = error
                    known.pop(index, None)
                elif not isinstance(error, Unreachable) or seconds > timeouts.start_timeout:
                    known[index] = future.result()
                    lost.pop(index, None)
            moved = follow_moves(self._servers, _moved(known, job))
            for index in moved:
                for found in (asked, known, lost):
                    found.pop(index, None)
            if not moved and self._take_over(known, lost, job, decides, seconds > timeouts.session_timeout):
                return

    def _take_over(
        self, known: Mapping[int, ServerStatus], lost: Mapping[int, PSError], job: str, decides: bool, late: bool
    ) -> bool:
        """Takes in how a job goes on that runs; returns whether enough is known."""
        silent = set(range(len(self._servers))) - known.keys()
        running = [status for status in known.values() if status.incarnations and not status.over]
        newest = newest_of(running)
        goes_on = job in {status.job for status in running} and not any(status.broken for status in running)
        gone = set(newest.gone) if newest else set[int]()
        found: dict[int, str] = {}
        if newest and goes_on:
            if decides and late:
                # But for the one that keeps the log: another chief may be there with it, unless nothing listens there.
                found |= dict.fromkeys(silent - gone - {newest.keeper}, "does not answer")
                if newest.keeper in silent & self._remote.keys():
                    expect(self._remote[newest.keeper])
            found |= {server: error.message for server, error in lost.items()}
            replaced = (i for i, status in known.items() if status.incarnation != newest.incarnations[i])
            found |= dict.fromkeys(replaced, "was replaced by a new process")
        missing = silent - gone - found.keys()
        if missing & lost.keys():
            raise lost[min(missing & lost.keys())]
        if missing:
            return False
        if newest and (gone or goes_on):
            with self._lock:
                self.losses = newest.losses or newest.gone
                self._set(frozenset(gone | found.keys()))
            self.lives = dict(enumerate(newest.incarnations))
            for server in self.gone:
                self._fail(server, "it was lost before this process started")
            for server in self._remote.keys() & set(self.live):
                expect(self._remote[server])
            for server in found.keys() - gone if decides else ():
                self.suspects[server] = ServerLost(found[server], str(Task("ps", server)))
        return True

    # ---- Servers that are back, of which nobody is left who could tell this process ----

    def look_for_returns(self, threads: Threads, job: str, take_back: Callable[[Return, int], object]) -> None:
        """Looks for servers that are back, in a thread of its own; called while this process waits.

        A server that tells of another's return may be lost before it has told all. The job goes on, with the one that
        is back; who does not know that, waits for the lost one.

        Args:
            threads: for that.
            job: the identity of this process's job.
            take_back: goes on with a server that is back, and that was lost so often before.
        """
        if self.gone and (self._looks is None or self._looks.done()):
            self._looks = threads.submit(partial(self._look, job, take_back))

    def _look(self, job: str, take_back: Callable[[Return, int], object]) -> None:
        for server in sorted(self.gone & self._remote.keys()):
            address = self.moves.get(server, "")
            found = elsewhere(self._remote[server], address or self._remote[server].address, LOOK_SECONDS)
            try:
                status = found.status()
            except PSError as error:
                log.debug("%s has not returned: %s", Task("ps", server), error)
                continue
            finally:
                found.close()
            if status.takes_part and status.job == job and self._goes_on(status):
                back = Return(
                    server, status.incarnation, status.generation.number if status.generation else 0, address=address
                )
                take_back(back, status.losses.count(server))

    def _goes_on(self, status: ServerStatus) -> bool:
        """Returns whether the job goes on with a server, and without those that this process goes on with."""
        gone = frozenset(status.gone)
        return not (status.over or status.broken or status.server in gone) and gone >= set(self.live)


def _moved(known: Mapping[int, ServerStatus], job: str) -> tuple[Moved, ...]:
    """Returns the servers that have moved in a job that runs, as the one says that knows most of it."""
    newest = newest_of(status for status in known.values() if not status.over and status.job == job)
    return newest.moved if newest else ()
