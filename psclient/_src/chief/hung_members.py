"""Members that heartbeat, and all the same do not come to their push any more."""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future

from psclient._src.chief.decisions import cut_off
from psclient._src.chief.losses import Differences
from psclient._src.chief.timers import Stall, Stalls
from psclient._src.network.daemon_threads import Threads
from psclient._src.network.session import Session
from pswire.limits import Timeouts
from pswire.model.consistency import ASYNC
from pswire.model.log import Generation
from pswire.model.status import ServerStatus

log = logging.getLogger("psclient.chief")

SLACK = 0.5
"""Seconds beside a lease after which a server that others do not reach is lost, where variables have copies."""


class HungMembers:
    """The members that hold the job up for longer than a round may take. Used by the thread that drives.

    Args:
        session: the chief's, whose servers are asked from time to time.
        timeouts: of the cluster.
        period: seconds between two looks.
        threads: for calls, since a server may not answer.
        differences: the servers that have other values than others, which the same answers tell.

    Attributes:
        sessions: of those that were found so far.
    """

    def __init__(
        self, session: Session, timeouts: Timeouts, period: float, threads: Threads, differences: Differences
    ) -> None:
        self.sessions: set[int] = set()
        self._session = session
        self._timeouts = timeouts
        self._period = period
        self._threads = threads
        self._differences = differences
        self._stalls = Stalls(timeouts.session_timeout, period)
        self._asked: list[Future[ServerStatus]] = []
        self._ask_at = self._spoke = 0.0

    def look(self, generation: Generation | None) -> bool:
        """Looks from time to time whom the job's oldest open round waits for; says whether somebody is to go.

        While a server does not answer, no answer is looked at.

        Raises:
            ServerLost: two servers do not reach one another, or have other values, so that one is given up.
        """
        now = time.monotonic()
        if (
            generation is None
            or any(member.consistency == ASYNC for member in generation.members)
            or now < self._ask_at
        ):
            return False
        if not self._asked:
            self._asked = [self._threads.submit(server.status) for server in self._session.live]
        if not all(asked.done() for asked in self._asked):
            return False
        answers, self._asked = self._asked, []
        statuses = [asked.result() for asked in answers]
        self._ask_at = now + self._period
        lease = self._timeouts.session_timeout + SLACK
        limit = min(self._timeouts.server_timeout, lease) if self._session.copied else self._timeouts.server_timeout
        if (lost := cut_off(statuses, limit) or self._differences.look(statuses)) is not None:
            raise lost
        stall = self._stalls.look(statuses, now)
        if stall is None or not stall.missing:
            return False
        self._speak(stall, now)
        late = stall.seconds >= self._timeouts.round_timeout
        members = generation.everybody
        hung = {member.session for member in members if member.task in stall.missing} if late else set()
        new = hung - self.sessions
        self.sessions |= new
        return bool(new)

    def _speak(self, stall: Stall, now: float) -> None:
        """Names those who hold the job up, from a tenth of their time on, unless they compute as long as before."""
        if stall.expected:
            return
        if stall.seconds < self._timeouts.round_timeout / 10 or now - self._spoke < self._timeouts.report_interval:
            return
        self._spoke = now
        log.warning(
            "round %d has waited for %s for %.0f s; a worker that takes longer than %g s "
            "(PS_ROUND_TIMEOUT) is excluded",
            stall.round,
            ", ".join(map(str, stall.missing)),
            stall.seconds,
            self._timeouts.round_timeout,
        )
