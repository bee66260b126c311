"""Other servers of a job, as far as rounds depend on them: what they vote, and which of them this one reaches."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace

from psserver.effects import Outcome
from psserver.registry import Registry
from psserver.rounds.digests import Digests
from psserver.rounds.rounds import Rounds
from psserver.services.log import Log
from psserver.services.service import Service
from psserver.state.counters import ServerCounters
from psserver.state.variables import Store
from pswire.cluster import Task
from pswire.errors import InvalidRequest, ServerGone, Unreachable
from pswire.model.status import MissedPeer
from pswire.servers.votes import Testimony, Vote

log = logging.getLogger("psserver")


@dataclass
class _Missed:
    """A server that is not reached: which life of it, since when, why, and whether the log says so."""

    life: int
    since: float
    reason: str
    told: bool = False


class VotingPeers(Service):
    """What other servers say, and the connections on which this server votes.

    Args:
        store: the variables.
        log: the log of the job, which tells of servers that are gone.
        rounds: the rounds, with the votes that other servers may not have heard.
        digests: compares what rounds have made.
        registry: has the incarnations of servers beside the sessions.
        tally: counts votes.
    """

    verbs = frozenset(("introduce", "hear", "testify", "meet", "miss"))

    def __init__(
        self, store: Store, log: Log, rounds: Rounds, digests: Digests, registry: Registry, tally: ServerCounters
    ) -> None:
        self._store = store
        self._log = log
        self._rounds = rounds
        self._digests = digests
        self._registry = registry
        self._tally = tally
        self._missed: dict[int, _Missed] = {}

    def introduce(self, now: float, server: int, incarnation: int) -> Outcome[None]:
        """Lets another server vote here: its incarnation names it as a session names a client.

        A process in the place of one that is gone may know before this server that the job has taken it back.
        """
        if incarnation in self._log.lost_incarnations:
            self._check_there(server)
            raise ServerGone("another process has replaced this server in the job", str(Task("ps", server)))
        if server in self._log.gone:
            raise Unreachable(f"it does not know yet that {Task('ps', server)} was readmitted", str(self._store.task))
        if server == self._store.server:
            raise InvalidRequest(
                f"another server introduces itself as {self._store.task}, which is this server", str(self._store.task)
            )
        self._registry.enter(incarnation, Task("ps", server))
        return None, []

    def hear(self, now: float, server: int, vote: Vote) -> Outcome[None]:
        """Another server has voted."""
        self._check_there(server)
        self._tally.votes["received"] += 1
        if vote.digest is not None:
            if vote.job == self._rounds.votes.job:
                self._digests.hear(server, vote.digest)
            vote = replace(vote, digest=None)  # it is no part of what is kept
        self._rounds.votes.hear(server, vote, self._rounds.sequences[None].last)
        self._open((vote,), now)
        return None, []

    def testify(self, now: float, server: int, testimony: Testimony) -> Outcome[None]:
        """Another server has said what it has heard of one that is gone."""
        self._rounds.votes.testify(server, testimony, self._rounds.sequences[None].last)
        self._open(testimony.votes, now)
        return None, []

    def _open(self, votes: Iterable[Vote], now: float) -> None:
        """Opens the rounds that others have voted in, where they are of this job."""
        for vote in votes:
            if vote.job == self._rounds.votes.job:
                self._rounds.open(vote, now)

    def _check_there(self, server: int) -> None:
        """Raises `ServerGone` for a server without which the job goes on."""
        if server in self._log.gone:
            raise ServerGone(
                f"the job goes on without this server, because it {self._log.gone[server]}", str(Task("ps", server))
            )

    def meet(self, now: float, server: int) -> Outcome[None]:
        """Another server is connected anew: says again what it may not have heard."""
        self._missed.pop(server, None)
        return None, [*self._rounds.votes.repeat(server)]

    def miss(self, now: float, server: int, reason: str) -> Outcome[None]:
        """Another server is not connected; the server's log says so once if a round waits for it."""
        missed = self._missed.get(server)
        if missed is None or missed.life != self._life(server):
            missed = self._missed[server] = _Missed(self._life(server), now, reason)
        missed.reason = reason
        if not missed.told and self._rounds.votes.kept(server) > self._rounds.sequences[None].last:
            missed.told = True
            log.warning("rounds wait, because %s cannot reach %s (%s)", self._store.task, Task("ps", server), reason)
        return None, []

    def missed(self, now: float) -> tuple[MissedPeer, ...]:
        """Returns the servers for which there are votes and no connection; not one that has just come back."""
        return tuple(
            MissedPeer(server, round, now - missed.since, missed.reason)
            for server, missed in sorted(self._missed.items())
            if missed.life == self._life(server) and (round := self._rounds.votes.kept(server)) >= 0
        )

    def _life(self, server: int) -> int:
        """Returns the incarnation of a server of the job; 0 if it is not known."""
        lives = self._log.incarnations
        return lives[server] if server < len(lives) else 0
