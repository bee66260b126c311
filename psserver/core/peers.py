"""The stimuli of other servers: what they vote, and which of them are gone."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace

from psserver.core.links import Links
from psserver.core.log import Log
from psserver.effects import Effect, Outcome, Reply
from psserver.registry import Registry
from psserver.rounds.digests import Digests
from psserver.rounds.rounds import Rounds
from psserver.rounds.runner import Runner
from psserver.state.counters import ServerCounters
from pswire.cluster import Task
from pswire.errors import InvalidRequest, PSError, ServerGone, ServerLost, Unreachable
from pswire.model.log import Gone, LogEntry
from pswire.servers.votes import Testimony, Vote

log = logging.getLogger("psserver")


class PeerStimuli:
    """The part of a server's state machine that other servers concern.

    Attributes:
        outlived: why the job goes on without this server; None if it does not.
    """

    task: Task
    server: int
    registry: Registry
    rounds: Rounds
    log: Log
    runner: Runner
    digests: Digests
    tally: ServerCounters
    done: Future[None]
    left: Future[None]
    outlived: ServerLost | None = None
    _links: Links

    def introduce(self, now: float, server: int, incarnation: int) -> Outcome[None]:
        """Lets another server vote here: its incarnation names it as a session names a client.

        A process in the place of one that is gone may know before this server that the job has taken it back.
        """
        if incarnation in self.log.lost_incarnations:
            self._check_there(server)
            raise ServerGone("another process has replaced this server in the job", str(Task("ps", server)))
        if server in self.log.gone:
            raise Unreachable(f"it does not know yet that {Task('ps', server)} was readmitted", str(self.task))
        if server == self.server:
            raise InvalidRequest(
                f"another server introduces itself as {self.task}, which is this server", str(self.task)
            )
        self.registry.enter(incarnation, Task("ps", server))
        return None, []

    def hear(self, now: float, server: int, vote: Vote) -> Outcome[None]:
        """Another server has voted."""
        self._check_there(server)
        self.tally.votes["received"] += 1
        if vote.digest is not None:
            if vote.job == self.rounds.votes.job:
                self.digests.hear(server, vote.digest)
            vote = replace(vote, digest=None)  # it is no part of what is kept
        self.rounds.votes.hear(server, vote, self.rounds.strands[None].last)
        self._open((vote,), now)
        return None, []

    def testify(self, now: float, server: int, testimony: Testimony) -> Outcome[None]:
        """Another server has said what it has heard of one that is gone."""
        self.rounds.votes.testify(server, testimony, self.rounds.strands[None].last)
        self._open(testimony.votes, now)
        return None, []

    def _open(self, votes: Iterable[Vote], now: float) -> None:
        """Opens the rounds that others have voted in, where they are of this job."""
        for vote in votes:
            if vote.job == self.rounds.votes.job:
                self.rounds.open(vote, now)

    def _check_there(self, server: int) -> None:
        """Raises `ServerGone` for a server without which the job goes on."""
        if server in self.log.gone:
            raise ServerGone(
                f"the job goes on without this server, because it {self.log.gone[server]}", str(Task("ps", server))
            )

    def outlive(self, now: float, error: ServerGone) -> Outcome[None]:
        """The job goes on without this server, which was paused, or cut off: nothing that it has is of use."""
        log.error("%s ends: %s", self.task, error.message)
        self.outlived = self.runner.broken = ServerLost(error.message, str(self.task))
        return None, [Reply(self.left, None), Reply(self.done, None)]

    def _cannot_read(self, now: float, error: PSError) -> list[Effect]:
        """Ends this server, which the others count on, and which could not read its variables."""
        why = f"it could not read its variables: {error.message}"
        return self.outlive(now, ServerGone(why, str(self.task)))[1]

    def _left_behind(self, now: float, index: int, entries: Sequence[LogEntry]) -> list[Effect]:
        """Takes entries of the log from `index` on that say that this server, as it is, is gone; it ends then.

        So the chief tells one that answers still.
        """

        def gone(log: Sequence[LogEntry]) -> list[Gone]:
            return [entry for entry in log if isinstance(entry, Gone) and entry.server == self.server]

        new = gone(entries)[len(gone(self.log.entries[index:])) :]
        if not new or not self.log.incarnations or self.log.away:
            return []  # it is a new process, and the log tells of those before
        return self.outlive(
            now, ServerGone(f"the job goes on without this server, because it {new[-1].reason}", str(self.task))
        )[1]

    def meet(self, now: float, server: int) -> Outcome[None]:
        """Another server is connected anew: what was said to it may be lost."""
        return None, self._links.meet(server)

    def miss(self, now: float, server: int, reason: str) -> Outcome[None]:
        """Another server is not connected."""
        self._links.miss(server, reason, now)
        return None, []
