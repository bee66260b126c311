"""Servers that were gone and come back: looks for their new processes, and has one after the other read what it held.

The job goes on without a server that is gone. Where a new process answers in its place, the chief closes an epoch that
tells so. Its members save, where a step begins, what the server held, and wait; the server reads that, and the next
epoch tells that it is back. If that fails they go on without it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial

from psclient._src.chief.job_log import JobLog
from psclient._src.transport.daemon_threads import Threads
from psclient._src.transport.remote_server import RemoteServer, expect
from psclient._src.transport.session import Session
from pswire.cluster import Task
from pswire.errors import PSError
from pswire.model.log import Return, Snapshotted
from pswire.model.status import ServerStatus

log = logging.getLogger("psclient.chief")

LOOK_SECONDS = 1.0
"""Seconds between two looks for a new process in the place of a server."""


class Returns:
    """The servers that may come back. Used by the thread that drives.

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
        self._looks: dict[int, Future[ServerStatus]] = {}
        self._looked: dict[int, float] = {}
        self._failed: dict[int, float] = {}  # when it failed, by the life of the server
        self._reading: Future[object] | None = None

    def pending(self) -> list[Future[object]]:
        """What a server that comes back still reads."""
        return [] if self._reading is None else [self._reading]

    def due(self) -> bool:
        """Returns whether there may be something to decide: something was read, or it is time to look again."""
        if self._reading is not None:
            return self._reading.done()
        return bool(self._log.state.gone) and any(look.done() for look in self._looks.values())

    def look(self) -> Return | None:
        """Returns what `decide` needs to know: the server that may be taken back, or how its return stands."""
        epoch = self._log.state.epoch
        if epoch is None or not self._session.copied:
            return None
        if epoch.awaited is None:
            self._reading = None
            return self._find(epoch.number + 1)
        return self._proceed(epoch.awaited)

    def take_back(self) -> None:
        """Goes on with the servers of which the log tells that they are back."""
        state = self._log.state
        for server in sorted(self._session.hosting.gone - state.gone):
            if (back := state.returned.get(server)) is not None:
                self._session.take_back(back, state.losses.count(server))

    def end(self) -> None:
        """Tells the processes in the place of servers that are gone, which nobody has taken back, that all is over."""
        for server in self._log.state.gone:
            self._begin_to_look(server)
        wait(self._looks.values(), LOOK_SECONDS)
        for server, look in self._looks.items():
            if look.done() and look.exception() is None:
                try:
                    self._log.prepare(server)
                except PSError as error:
                    log.info("%s does not know of the end: %s", Task("ps", server), error)

    # ---- Before ----

    def _begin_to_look(self, server: int) -> None:
        if server not in self._looks:
            self._looked[server] = self._clock()
            self._servers[server].begin_anew()
            self._looks[server] = self._threads.submit(self._servers[server].status)

    def _find(self, number: int) -> Return | None:
        state, now = self._log.state, self._clock()
        for server in sorted(state.gone):
            look = self._looks.get(server)
            if look is None:
                if now - self._looked.setdefault(server, now) >= LOOK_SECONDS:
                    self._begin_to_look(server)
                continue
            if not look.done():
                continue
            del self._looks[server]
            if look.exception() is None and self._may_return(server, look.result(), now):
                log.warning("%s answers again, as a new process: it is taken back", Task("ps", server))
                return Return(server, look.result().incarnation, number)
        return None

    def _may_return(self, server: int, status: ServerStatus, now: float) -> bool:
        """Returns whether a process in the place of a server is a new one that holds nothing else, and all know how."""
        failed = self._failed.get(status.incarnation)
        if failed is not None and now - failed < 2 * self._session.timeouts.lease:
            return False
        free = status.log == 0 or server in status.gone
        is_new = status.incarnation not in self._session.incarnations
        return free and is_new and all(each.status().losses for each in self._session.live)

    # ---- Once members wait ----

    def _proceed(self, back: Return) -> Return | None:
        saved = self._log.state.handed_over.get(back.epoch)
        if saved is None:
            return back
        if saved.error:
            self._give_up(back, saved.error)
            return None
        if self._reading is None:
            self._servers[back.server].begin_anew()  # another chief may have begun it
            expect(self._servers[back.server])  # it is lost once nothing listens there any more
            self._reading = self._threads.submit(partial(self._read, back, saved))
        if not self._reading.done():
            return back
        error = self._reading.exception()
        if error is not None:
            self._give_up(back, str(error))
            return None
        return replace(back, ready=True, round=saved.round + 1)

    def _read(self, back: Return, saved: Snapshotted) -> object:
        self._log.prepare(back.server)
        return self._servers[back.server].snapshot(self._session.token, saved.plan_id, "").result()

    def _give_up(self, back: Return, why: str) -> None:
        task, seconds = Task("ps", back.server), 2 * self._session.timeouts.lease
        log.warning("the job goes on without %s, which could not be taken back: %s", task, why)
        log.warning("%s is asked again in %g s, or once it is started anew", task, seconds)
        self._failed[back.incarnation] = self._clock()
