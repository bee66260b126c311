"""A job's log as a chief has it: read from server 0, appended to there, and copied to the other servers."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from psclient._src.chief.job_state import JobState
from psclient._src.transport.session import Session
from pswire.api import ParameterServer, Watched
from pswire.errors import Fenced, ServerLost, Unreachable
from pswire.model.log import Done, JobStarted, LogEntry, Lost

log = logging.getLogger("psclient.chief")


class JobLog:
    """The log of a job, for its chief. Used by the thread that drives.

    Args:
        servers: all of them; server 0 has the log.
        session: the chief's session, opened before anything else is done here.
        takes_over: see below.

    Attributes:
        state: the job's state, as far as the log was read.
        takes_over: True for a chief that only goes on with a job that is there.
    """

    def __init__(self, servers: Sequence[ParameterServer], session: Session, takes_over: bool = False) -> None:
        self.state = JobState()
        self.takes_over = takes_over
        self._servers = servers
        self._session = session
        self._copied = [0] * len(servers)

    def attach(self) -> None:
        """Begins a job, or goes on with the one that the servers hold.

        Raises:
            Fenced: there is none to go on with, and none is to be begun.
        """
        session = self._session
        entries: list[LogEntry] = []
        # A long log comes in several answers.
        while len(entries) < self._servers[0].status().log:
            entries += session.look(len(entries)).entries
        first = entries[0] if entries else None
        over = any(isinstance(entry, Done | Lost) for entry in entries)
        mine = (session.incarnations, session.job)
        same = isinstance(first, JobStarted) and (first.incarnations, first.name) == mine
        if same and not over:
            self.state.take(entries)
            log.info("goes on with job %s at entry %d", first, len(entries))
        elif self.takes_over:
            raise Fenced("the job is over, or the servers hold another one: there is nothing to take over")
        else:
            addresses = tuple(server.address for server in self._servers)
            begin = JobStarted(session.number, session.incarnations, session.job, addresses)
            # Server 0 last: once it has the job, clients create variables, which another server that began
            # the job only then would drop.
            for server in reversed(self._servers):
                server.approve(session.token, 0, [begin])
            self.state.take([begin])
        self.copy()

    def take(self, watched: Watched) -> None:
        """Takes in news; what this chief appended in the meantime comes back to it."""
        self.state.take(watched.entries[len(self.state.log) - watched.start :])

    def append(self, entries: Sequence[LogEntry]) -> bool:
        """Appends to server 0's log, if nothing else was appended in between."""
        index = len(self.state.log)
        agreed = self._servers[0].approve(self._session.token, index, entries)
        if agreed != index + len(entries):
            return False
        self.state.take(entries)
        return True

    def insist(self, entry: LogEntry, seconds: float) -> None:
        """Appends to server 0's log, whatever else is appended; raises TimeoutError if news take so long."""
        while not self.append([entry]):
            self.take(self._servers[0].watch(0, len(self.state.log), 0).result(seconds))

    def copy(self) -> None:
        """Copies the log to the servers that lack its end."""
        entries = self.state.log
        for number, server in enumerate(self._servers[1:], 1):
            try:
                while self._copied[number] < len(entries):
                    index = self._copied[number]
                    self._copied[number] = server.approve(self._session.token, index, entries[index:])
            except (Unreachable, ServerLost) as error:
                if not isinstance(entries[-1], Done):
                    raise
                # It ends by this very entry, so that a lost answer cannot be asked for again.
                log.info("server %d did not say that it knows of the end: %s", number, error)
