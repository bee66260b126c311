"""Servers that are lost: the chief tells the others, so that the job goes on where copies of all that lay there are."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Sequence

from psclient._src.chief.job_log import JobLog
from psclient._src.network.remote_server import RemoteServer
from psclient._src.network.session import Session
from pswire.cluster import server_of
from pswire.errors import PSError, ServerGone, ServerLost
from pswire.model.log import Gone, Lost

log = logging.getLogger("psclient.chief")


class Losses:
    """The servers that are lost. Used by the thread that drives.

    Args:
        servers: connections to all servers.
        session: the chief's session.
        job_log: the log.
    """

    def __init__(self, servers: Sequence[RemoteServer], session: Session, job_log: JobLog) -> None:
        self._servers = servers
        self._session = session
        self._log = job_log

    def go_on_without(self, error: ServerGone | ServerLost) -> None:
        """Goes on where all that lies on a server that is lost lies on others as well; raises the error where not."""
        losses = list[Gone]()
        # A server that is to be told of losses may be found lost itself: then the next one is told of all.
        while losses := self._untold(losses, error):
            gone = self._log.state.gone | {entry.server for entry in losses}
            if len(gone) == len(self._servers):
                raise error
            lives = self._log.state.survives(gone)
            ends = (
                []
                if lives
                else [Lost(losses[0].server, f"{losses[0].reason}; the server with its copies was lost too")]
            )
            try:
                self._log.lose(losses, ends, self._session.timeouts.call_timeout)
            except (ServerGone, ServerLost) as another:
                error = another
            else:
                if not lives:
                    raise error
                return

    def announce(self, error: ServerLost) -> None:
        """Writes to the log that a server is lost, so that the job ends: by that all processes know it at once."""
        lost = server_of(error)
        if not lost:
            return  # server 0 keeps the log: each process sees for itself
        try:
            self._log.insist(Lost(lost, error.message), self._session.timeouts.call_timeout)
        except (PSError, TimeoutError) as failure:
            log.warning("the chief could not announce that %s is lost: %s", error.task, failure)

    def _untold(self, losses: Sequence[Gone], error: ServerGone | ServerLost) -> list[Gone]:
        """Returns the servers that are lost and of which the log does not tell; raises the error if it is of none.

        Those come first of which a server may have told somebody before it was lost itself: all processes are to hear
        of losses in one order.

        Args:
            losses: those that such a server was to be told of, in order.
            error: how one was found now.
        """
        hosting, state = self._session.hosting, self._log.state
        found = server_of(error)
        if not self._session.copied or found is None:
            raise error
        suspects: dict[int, PSError] = {index: hosting.suspects.pop(index) for index in list(hosting.suspects)}
        # Else it is news of a loss that the log tells of, maybe of one before its return.
        if isinstance(error, ServerLost):
            suspects[found] = error
        reasons = {entry.server: entry.reason for entry in losses}
        for server in Counter(hosting.losses) - Counter(state.losses):
            reasons.setdefault(server, "was lost")
        for server in sorted(suspects):
            reasons.setdefault(server, _how(suspects[server]))
        return [Gone(server, reason) for server, reason in reasons.items() if server not in state.gone]


def _how(error: PSError) -> str:
    """Returns how a server was lost, without what that would mean were there no copies."""
    return re.split("; (?:its variables are|restart from)", error.message)[0]
