"""Links: which other servers this one reaches, as far as rounds depend on it."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from psserver.effects import Effect
from psserver.rounds.rounds import Rounds
from pswire.cluster import Task
from pswire.model.status import MissedPeer

log = logging.getLogger("psserver")


@dataclass
class _Missed:
    """A server that is not reached: since when, why, and whether the log says so."""

    since: float
    reason: str
    told: bool = False


class Links:
    """The connections on which this server votes. Guarded by the core's lock.

    Args:
        task: this server.
        rounds: the rounds, with the votes that other servers may not have heard.
    """

    def __init__(self, task: Task, rounds: Rounds) -> None:
        self._task = task
        self._rounds = rounds
        self._missed: dict[int, _Missed] = {}

    def clear(self) -> None:
        """Forgets all, as at the start of a job."""
        self._missed.clear()

    def meet(self, server: int) -> list[Effect]:
        """A server is connected anew: says again what it may not have heard."""
        self._missed.pop(server, None)
        return [*self._rounds.votes.repeat(server)]

    def miss(self, server: int, reason: str, now: float) -> None:
        """A server is not connected; the log says so once if a round waits for it."""
        missed = self._missed.setdefault(server, _Missed(now, reason))
        missed.reason = reason
        if not missed.told and self._rounds.votes.kept(server) > self._rounds.strands[None].last:
            missed.told = True
            log.warning("rounds wait, because %s cannot reach %s (%s)", self._task, Task("ps", server), reason)

    def missed(self, now: float) -> tuple[MissedPeer, ...]:
        """Returns the servers for which there are votes and no connection."""
        return tuple(
            MissedPeer(server, round, now - missed.since, missed.reason)
            for server, missed in sorted(self._missed.items())
            if (round := self._rounds.votes.kept(server)) >= 0
        )
