"""Votes: the servers of a plan agree on whose contributions a round has, so that it has them on all servers or on none.

There is no coordinator. Each server says to each other, once for a round and an attempt, whose contributions are whole
on it, or why the round cannot run. The outcome is a function of these votes alone: an error fails the round everywhere;
else those count who are whole on all servers. Until all votes are there, nothing of the round is visible.

With backup workers each server may have others of its members. Where too few are whole on all servers, one votes again
once it has more, and the others with it, until enough are, or nothing has changed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from psserver.effects import Effect, Send
from pswire.api import Vote
from pswire.errors import InvalidRequest, PSError

MAX_HEARD = 1024
"""Votes of rounds that are not over here, beyond which none is kept: a server that works is one round ahead."""


@dataclass(frozen=True)
class Verdict:
    """The outcome of a vote.

    Attributes:
        whole: the sessions whose contributions count; empty where a round is void.
        error: why the round fails on all servers.
        unanimous: whether all servers had these, and no others.
        repeated: whether each server has said the same in the attempt before: to vote once more changes nothing.
    """

    whole: frozenset[int]
    error: PSError | None = None
    unanimous: bool = True
    repeated: bool = False


class Votes:
    """The votes of one server, and those that it has heard. Guarded by the core's lock.

    A vote never changes, and is kept until every peer of its round has closed that round.

    Args:
        server: the number of this server.

    Attributes:
        job: whose votes count.
    """

    def __init__(self, server: int) -> None:
        self._server = server
        self.job = 0
        self._cast: dict[tuple[int, int], tuple[Vote, tuple[int, ...]]] = {}
        self._heard: dict[tuple[int, int, int], dict[int, Vote]] = defaultdict(dict)  # by job, round and attempt
        self._closed: dict[int, int] = defaultdict(lambda: -1)

    def begin(self, job: int) -> None:
        """Another job begins: forgets what was said of others. Votes of it may have come before it is known here."""
        self.job = job
        self._cast.clear()
        self._closed.clear()
        for key in [key for key in self._heard if key[0] != job]:
            del self._heard[key]

    def cast(self, vote: Vote, servers: Sequence[int]) -> list[Effect]:
        """Says to all other servers of a plan what this one has of a round; it has not voted in this attempt before."""
        key = vote.round, vote.attempt
        if key in self._cast:
            raise ValueError(f"a second vote in round {vote.round}")
        others = tuple(server for server in servers if server != self._server)
        self._cast[key] = vote, others
        self._heard[vote.job, *key][self._server] = vote
        return [Send(server, vote) for server in others]

    def hear(self, server: int, vote: Vote, last: int) -> None:
        """Takes in another server's vote; `last` is the last round that is over here."""
        if vote.job != self.job or vote.round > last:
            if len(self._heard) >= MAX_HEARD:
                raise InvalidRequest(f"server {server} votes in round {vote.round}; no server is so far ahead")
            self._heard[vote.job, vote.round, vote.attempt][server] = vote
        if vote.job == self.job:
            self._closed[server] = max(self._closed[server], vote.closed)
            for key, (_, others) in list(self._cast.items()):
                if key[0] <= min(last, *(self._closed[other] for other in others)):
                    del self._cast[key]

    def repeat(self, server: int) -> list[Send]:
        """Says again to a server, whose connection was lost, what it may not have heard."""
        return [
            Send(server, vote)
            for vote, others in self._cast.values()
            if server in others and self._closed[server] < vote.round
        ]

    def kept(self, server: int) -> int:
        """Returns the newest round with a vote that a server may not have heard; -1 if it has heard all."""
        return max((effect.vote.round for effect in self.repeat(server)), default=-1)

    def verdict(self, round: int, attempt: int, servers: Sequence[int]) -> Verdict | None:
        """Returns the outcome; None while a vote is missing."""
        votes = self._heard[self.job, round, attempt]
        if not votes.keys() >= set(servers):
            return None
        ordered = [votes[server] for server in servers]
        error = next((vote.error for vote in ordered if vote.error is not None), None)
        whole = frozenset.intersection(*(vote.whole for vote in ordered))
        if error is not None:
            return Verdict(frozenset(), error)
        before = self._heard.get((self.job, round, attempt - 1), {})
        repeated = bool(before) and all(before[server].whole == votes[server].whole for server in servers)
        return Verdict(whole, unanimous=all(vote.whole == whole for vote in ordered), repeated=repeated)

    def called(self, round: int, attempt: int) -> bool:
        """Returns True if another server has voted in an attempt."""
        return bool(self._heard.get((self.job, round, attempt)))

    def unopened(self, last: int) -> Iterator[Vote]:
        """The votes of rounds of this job that are not over here; this server may know nothing of such a round."""
        for (job, round, _), votes in sorted(self._heard.items()):
            if job == self.job and round > last:
                yield from votes.values()

    def close(self, last: int) -> None:
        """Rounds up to one are over here."""
        for key in [key for key in self._heard if key[0] == self.job and key[1] <= last]:
            del self._heard[key]
