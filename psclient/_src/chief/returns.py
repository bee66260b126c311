"""Servers that come back, and those that move: has a process read what a server held, and take its place.

The job goes on without a server that is gone. Where a new process answers in its place, the chief closes a generation
that tells so. Its members make a round, where a step begins, that saves what the server held, and wait until all
servers have it. The next generation tells that it is back: it votes in rounds, and makes them once the others have
written, and it has read, what was saved. If that fails it is lost as any other. A process that waits for a place
(`psserver --join`) gets that of a server that stays away, or of one that is to move: then that one serves until the
last of these generations. Where it alone has a variable, members wait until that is read.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from psclient._src.chief.job_log import JobLog
from psclient._src.chief.losses import farewell
from psclient._src.network.daemon_threads import Threads
from psclient._src.network.remote_server import RemoteServer, elsewhere, expect
from psclient._src.network.session import Session
from pswire.cluster import Task
from pswire.errors import PSError
from pswire.model.log import GenerationClosed, Gone, JobStarted, LogEntry, Return, Snapshotted
from pswire.model.places import NOWHERE, Standby
from pswire.model.status import ServerStatus

log = logging.getLogger("psclient.chief")

LOOK_SECONDS = 1.0
"""Seconds between two looks for a new process in the place of a server."""


POLL_SECONDS = 0.005
"""Seconds between two looks whether all servers have made a round, for which all members wait."""


@dataclass(frozen=True)
class _Look:
    """A question to a process that may be a server from now on.

    Attributes:
        server: which.
        there: the connection to the process.
        answer: what it says of itself.
    """

    server: int
    there: RemoteServer
    answer: Future[ServerStatus]


class Returns:
    """The servers that may come back, or move. Used by the thread that drives.

    Args:
        servers: connections to all servers.
        session: the chief's session.
        job_log: the log.
        threads: for calls that wait.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        servers: Sequence[RemoteServer],
        session: Session,
        job_log: JobLog,
        threads: Threads,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._servers = servers
        self._session = session
        self._log = job_log
        self._threads = threads
        self._clock = clock
        self._homes = [server.address for server in servers]  # where they were when this chief came
        self._elsewhere: dict[tuple[int, str], RemoteServer] = {}
        self._looks: dict[tuple[int, str], _Look] = {}
        self._looked: dict[tuple[int, str], float] = {}
        self._asked: Future[ServerStatus] | None = None  # for the processes that wait
        self._asked_at = -math.inf
        self._standbys: tuple[Standby, ...] = ()
        self._away: dict[int, float] = {}  # since when a server is gone
        self._failed: dict[int, float] = {}  # when it failed, by the life of the server
        self._readying: Future[int] | None = None

    def pending(self) -> list[Future[int]]:
        """What is waited for before a server is back."""
        return [] if self._readying is None else [self._readying]

    def due(self) -> bool:
        """Returns whether there may be something to decide: something was read, or it is time to look again."""
        if self._readying is not None:
            return self._readying.done()
        return any(look.answer.done() for look in self._looks.values())

    def look(self) -> Return | None:
        """Returns what `decide` needs to know: the server that may be readmitted, or how its return stands."""
        generation = self._log.state.generation
        if generation is None or not self._session.copied:
            return None
        if generation.awaited is None:
            self._readying = None
            return self._find(generation.number + 1)
        return self._proceed(generation.awaited)

    def leaving(self, entries: Sequence[LogEntry]) -> list[Gone]:
        """Returns the servers that are there, and move by a generation among these entries."""
        ready = (
            e.generation.returns
            for e in entries
            if isinstance(e, GenerationClosed) and e.generation.returns is not None
        )
        gone = self._log.state.gone
        return [Gone(b.server, f"it moved to {b.address}") for b in ready if b.ready and b.server not in gone]

    def farewell(self, server: int) -> Callable[[], object]:
        """Returns what tells the process that is a server now that it has moved, for when the job goes on elsewhere."""
        here, token = self._servers[server], self._session.token
        return farewell(here, lambda there: there.move(server, here.address, token), "has moved")

    def take_back(self) -> None:
        """Goes on with the servers of which the log tells that they are back."""
        state = self._log.state
        for server in sorted(self._session.hosting.gone - state.gone):
            if (back := state.returned.get(server)) is not None:
                self._session.take_back(back, state.losses.count(server))
                self._log.take_back(server)

    def end(self) -> None:
        """Tells processes that were started as servers, and that nobody has readmitted, that all is over.

        They are where a server was that is gone, or that has moved.
        """
        for server, there in enumerate(self._servers):
            here = {there.address} if server in self._log.state.gone else set()
            for address in sorted(here | self._homes_of(server) - {there.address}):
                self._begin_to_look(server, address)
        wait([look.answer for look in self._looks.values()], LOOK_SECONDS)
        gone = self._log.state.gone
        living = {own for server, own in enumerate(self._session.incarnations) if server not in gone}
        for look in self._looks.values():
            if look.answer.done() and look.answer.exception() is None:
                if look.answer.result().incarnation in living:
                    continue  # another server by now
                try:
                    self._log.prepare(look.there)
                except PSError as error:
                    log.info("%s could not be notified that the job has ended: %s", Task("ps", look.server), error)

    def _homes_of(self, server: int) -> set[str]:
        """Returns where a server was before it moved."""
        begun = next(iter(self._log.state.log), None)
        first = begun.addresses[server : server + 1] if isinstance(begun, JobStarted) else ()
        return {self._homes[server], *first}

    def close(self) -> None:
        """Closes the connections to processes that are no server."""
        for there in self._elsewhere.values():
            there.close()
        self._elsewhere.clear()

    # ---- Before ----

    def _at(self, server: int, address: str) -> RemoteServer:
        """Returns a connection to a process that is to be a server, and is none yet."""
        there = self._servers[server]
        if address in ("", there.address) and server in self._log.state.gone:
            there.begin_anew()
            return there
        key = server, address or there.address
        if key not in self._elsewhere:
            self._elsewhere[key] = elsewhere(there, key[1])
        return self._elsewhere[key]

    def _begin_to_look(self, server: int, address: str) -> None:
        key = server, address
        if key not in self._looks:
            self._looked[key] = self._clock()
            there = self._at(server, address)
            self._looks[key] = _Look(server, there, self._threads.submit(there.status))

    def _find(self, number: int) -> Return | None:
        now = self._clock()
        self._ask_for_standbys(now)
        self._give_places(now)
        for server, address in self._places():
            key = server, address
            look = self._looks.get(key)
            if look is None:
                first = now if address == self._servers[server].address else now - LOOK_SECONDS
                if now - self._looked.setdefault(key, first) >= LOOK_SECONDS:
                    self._begin_to_look(server, address)
                continue
            if not look.answer.done():
                continue
            del self._looks[key]
            if look.answer.exception() is None and self._may_return(server, address, look.answer.result(), now):
                moves = address != self._servers[server].address
                text = f"moves to {address}" if moves else "has restarted and is readmitted"
                log.warning("%s %s", Task("ps", server), text)
                return Return(server, look.answer.result().incarnation, number, address=address if moves else "")
        return None

    def _ask_for_standbys(self, now: float) -> None:
        """Reads about once a second which processes wait for a place."""
        if self._asked is not None and self._asked.done():
            if self._asked.exception() is None:
                self._standbys = self._asked.result().standbys
            self._asked = None
        if self._asked is None and now - self._asked_at >= LOOK_SECONDS:
            self._asked_at = now
            self._asked = self._threads.submit(self._servers[self._session.hosting.keeper].status)

    def _give_places(self, now: float) -> None:
        """Gives the place of a server that has stayed away for a lease to a process that waits."""
        gone = self._log.state.gone
        self._away = {server: self._away.get(server, now) for server in gone}
        given = {standby.place for standby in self._standbys}
        for server, since in self._away.items():
            if now - since >= self._session.timeouts.session_timeout and server not in given and NOWHERE in given:
                self._away[server] = now  # else it is asked for again at once
                with suppress(PSError):  # somebody else was faster
                    self._servers[self._session.hosting.keeper].move(server, self._choose(server))

    def _choose(self, server: int) -> str:
        """Returns the address of a process that waits, if possible of one that does not fail with the server's copy."""
        free = [standby for standby in self._standbys if standby.place == NOWHERE]
        near = {self._session.domains[other] for other in self._log.state.beside(server)}
        return next((standby.address for standby in free if standby.domain not in near), free[0].address)

    def _places(self) -> list[tuple[int, str]]:
        """Returns where processes may be that are to be servers, by their indices."""
        found = list[tuple[int, str]]()
        for server in sorted(self._log.state.gone):
            found += dict.fromkeys([(server, self._servers[server].address), (server, self._homes[server])])
        count = len(self._servers)
        found += [(s.place, s.address) for s in self._standbys if 0 <= s.place < count and not self._serves(s)]
        return list(dict.fromkeys(found))

    def _serves(self, standby: Standby) -> bool:
        """Returns whether a process is the server already whose place it has got."""
        return standby.place not in self._log.state.gone and self._servers[standby.place].address == standby.address

    def _may_return(self, server: int, address: str, status: ServerStatus, now: float) -> bool:
        """Returns whether a process in the place of a server is a new one that holds nothing else, and all know how."""
        failed = self._failed.get(status.incarnation)
        if failed is not None and now - failed < 2 * self._session.timeouts.session_timeout:
            return False
        free = status.log == 0 or server in status.gone or not status.takes_part
        is_new = status.incarnation not in self._session.incarnations
        if not (free and is_new):
            return False
        statuses = [each.status() for each in self._session.live]
        # Who catches up has copies of nothing yet, and would have to be waited for.
        return all(self._knows(each, server, address) and not each.recovering for each in statuses)

    def _knows(self, status: ServerStatus, server: int, address: str) -> bool:
        """Returns whether a server is of a version that knows how others come back, or move."""
        moves = server not in self._log.state.gone or address != self._servers[server].address
        return any(standby.address == address for standby in status.standbys) if moves else bool(status.losses)

    # ---- Once members wait ----

    def moving(self, generation: int) -> frozenset[int]:
        """Returns the server that is to move, or to come back, by a generation, if others have all that it has."""
        back = self._log.state.generations[generation].returns if generation in self._log.state.generations else None
        return frozenset() if back is None or not self._is_standby(back.server) else frozenset({back.server})

    def _is_standby(self, server: int) -> bool:
        """Returns whether the other servers have all variables."""
        return self._log.state.survives(self._log.state.gone | {server})

    def _proceed(self, back: Return) -> Return | None:
        saved = self._log.state.handed_over.get(back.generation)
        if saved is not None and saved.error:
            self._give_up(back, saved.error)
            return None
        if self._readying is None:
            there, alone = self._at(back.server, back.address), not self._is_standby(back.server)
            if alone and saved is None:
                return back
            expect(there)  # it is lost once nothing listens there any more
            ready = partial(self._read, there, saved) if alone and saved else partial(self._prepare, there, back)
            self._readying = self._threads.submit(ready)
        if not self._readying.done():
            return back
        error = self._readying.exception()
        if error is not None:
            self._give_up(back, str(error))
            return None
        return replace(back, ready=True, round=self._readying.result() + 1)

    def _read(self, there: RemoteServer, saved: Snapshotted) -> int:
        """Has a process read what is saved; returns the round in which that was."""
        self._log.prepare(there)
        there.snapshot(self._session.token, saved.plan_id, "").result()
        return saved.round

    def _prepare(self, there: RemoteServer, back: Return) -> int:
        """Tells a process of the job, and waits until all servers hold what is saved; returns the round of that."""
        self._log.prepare(there)
        path, state = back.path, self._log.state
        while (
            state.generation is not None
            and state.generation.awaited is not None
            and state.generation.awaited.generation == back.generation
        ):
            if (saved := state.handed_over.get(back.generation)) is not None:
                return saved.round
            statuses = [server.status() for server in self._session.live]
            found = [saving.round for status in statuses for saving in status.saving if saving.path == path]
            if found and all(status.round >= found[0] for status in statuses):
                there.status()  # it is there still
                return found[0]
            time.sleep(POLL_SECONDS)
        raise PSError("the members continued without it")

    def _give_up(self, back: Return, why: str) -> None:
        task, seconds = Task("ps", back.server), 2 * self._session.timeouts.session_timeout
        if back.server in self._log.state.gone:
            log.warning("the job continues without %s, which could not be readmitted: %s", task, why)
        else:
            log.warning("%s could not be moved to %s: %s", task, back.address, why)
        log.warning("the next attempt with %s is in %g s, or when it is restarted", back.address or task, seconds)
        self._failed[back.incarnation] = self._clock()
