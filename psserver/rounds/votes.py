"""Votes: the servers of a plan agree on whose contributions a round has, so that it has them on all servers or on none.

There is no coordinator. Each server says to each other, once for a round and an attempt, whose contributions are whole
on it, or why the round cannot run. The outcome is a function of these votes alone: an error fails the round everywhere;
else those count who are whole on all servers. Until all votes are there, nothing of the round is visible.

With backup workers each server may have others of its members. Where too few are whole on all servers, one votes again
once it has more, and the others with it, until enough are, or nothing has changed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from psserver.effects import Effect, Send
from pswire.errors import InvalidRequest, PSError
from pswire.servers.votes import Digest, LateContribution, Testimony, Vote

MAX_HEARD = 1024
"""Votes of rounds that are not over here, beyond which none is kept: a server that works is one round ahead."""


ByServer = Mapping[int, Digest]
"""What is said with a vote, by the server to which it is said."""

NOTHING: ByServer = MappingProxyType({})


@dataclass(frozen=True)
class Verdict:
    """The outcome of a vote.

    Attributes:
        whole: the sessions whose contributions count; empty where a round is void.
        error: why the round fails on all servers.
        unanimous: whether all servers had these, and no others.
        repeated: whether each server has said the same in the attempt before: to vote once more changes nothing.
        torn: whether a server has a sum of contributions of which some count, and others do not: each is asked for.
    """

    whole: frozenset[int]
    error: PSError | None = None
    unanimous: bool = True
    repeated: bool = False
    torn: bool = False


class Votes:
    """The votes of one server, and those that it has heard. Guarded by the core's lock.

    A vote never changes, and is kept until every peer of its round has closed that round.

    Args:
        server: the number of this server.
        before: those of the job before, where other servers may have voted in this one already; None for none.

    Attributes:
        job: whose votes count.
    """

    def __init__(self, server: int, before: Votes | None = None) -> None:
        self._server = server
        self.job = 0
        self._gone: dict[int, set[int]] = {}  # servers that are gone, with those that have not said what they heard
        self._losses = Counter[int]()  # how often each was lost
        # Who has said it before it was known here, by the job, the server, and how often that was lost before.
        self._early: dict[tuple[int, int, int], set[int]] = before._early if before else defaultdict(set)
        self._testimonies: dict[int, Testimony] = {}  # what this server has said of them
        self._cast: dict[tuple[int, int], tuple[Vote, tuple[int, ...], ByServer]] = {}
        # By job, round and attempt.
        self._heard: dict[tuple[int, int, int], dict[int, Vote]] = before._heard if before else defaultdict(dict)
        self._closed: dict[int, int] = defaultdict(lambda: -1)

    def begin(self, job: int) -> None:
        """The job begins: forgets the votes of others. Some of its own may have come before it was known here."""
        self.job = job
        for key in [key for key in self._heard if key[0] != job]:
            del self._heard[key]

    def cast(self, vote: Vote, servers: Sequence[int], digests: ByServer = NOTHING) -> list[Effect]:
        """Says to all other servers of a plan what this one has of a round; it has not voted in this attempt before.

        Args:
            vote: what it has.
            servers: all servers of the plan.
            digests: what some of them are told with it.
        """
        key = vote.round, vote.attempt
        if key in self._cast:
            raise ValueError(f"a second vote in round {vote.round}")
        others = tuple([server for server in servers if server != self._server and server not in self._gone])
        self._cast[key] = vote, others, digests
        self._heard[vote.job, *key][self._server] = vote
        return [Send(server, _with(vote, digests.get(server))) for server in others]

    def hear(self, server: int, vote: Vote, last: int) -> None:
        """Takes in another server's vote; `last` is the last round that is over here."""
        if vote.job != self.job or vote.round > last:
            if len(self._heard) >= MAX_HEARD:
                raise InvalidRequest(f"server {server} votes in round {vote.round}, which is too far ahead")
            self._heard[vote.job, vote.round, vote.attempt][server] = vote
        if vote.job == self.job:
            self._closed[server] = max(self._closed[server], vote.closed)

    def _forget(self, last: int) -> None:
        """Forgets the votes that every peer of their round has used."""
        for key, (_, others, _) in list(self._cast.items()):
            closed = [self._closed[other] for other in others if other not in self._gone]
            if key[0] <= min([last, *closed]):
                del self._cast[key]

    def repeat(self, server: int) -> list[Send]:
        """Says again to a server, whose connection was lost, what it may not have heard."""
        if server in self._gone:
            return []
        said: list[Vote | Testimony] = [*self._testimonies.values(), *self._unheard(server)]
        return [Send(server, each) for each in said]

    def _unheard(self, server: int) -> list[Vote]:
        """Returns the votes that a server may not have heard."""
        if server in self._gone:
            return []
        unheard = (_with(vote, said.get(server)) for vote, others, said in self._cast.values() if server in others)
        return [vote for vote in unheard if self._closed[server] < vote.round]

    def kept(self, server: int) -> int:
        """Returns the newest round with a vote that a server may not have heard; -1 if it has heard all."""
        return max((vote.round for vote in self._unheard(server)), default=-1)

    def verdict(self, round: int, attempt: int, servers: Sequence[int]) -> Verdict | None:
        """Returns the outcome; None while a vote is missing."""
        votes = self._heard[self.job, round, attempt]
        awaited = [server for server in servers if server not in votes and self._gone.get(server, True)]
        if awaited:
            return None
        ordered = [votes[server] for server in servers if server in votes]
        whole, unanimous = ordered[0].whole, True
        for vote in ordered:
            if vote.error is not None:
                return Verdict(frozenset(), vote.error)
            unanimous &= vote.whole == whole
            whole &= vote.whole
        before = self._heard.get((self.job, round, attempt - 1), {})
        repeated = bool(before) and all(
            server in before and before[server].whole == votes[server].whole for server in servers if server in votes
        )
        torn = any(each & whole and not each <= whole for vote in ordered for each in vote.sums)
        return Verdict(whole, None, unanimous, repeated, torn)

    def late(self, round: int, attempt: int, servers: Sequence[int]) -> frozenset[LateContribution]:
        """Returns the late contributions that all of some servers have, once all have voted; see `verdict`."""
        votes = self._heard[self.job, round, attempt]
        found = [votes[server].late for server in servers if server in votes]
        return frozenset.intersection(*found) if found else frozenset()

    def called(self, round: int, attempt: int) -> bool:
        """Returns True if another server has voted in an attempt."""
        return bool(self._heard.get((self.job, round, attempt)))

    def unopened(self, last: int) -> Iterator[Vote]:
        """The votes of rounds of this job that are not over here; this server may know nothing of such a round."""
        for (job, round, _), votes in sorted(self._heard.items()):
            if job == self.job and round > last:
                yield from votes.values()

    def close(self, last: int) -> None:
        """Rounds up to one are over here. Their votes are kept where another server may have to be told of them.

        That is the last round that another one has had a part in, also if it is long ago.
        """
        if not self._heard:
            return
        self._forget(last)
        kept = {round for round, _ in self._cast}
        for key in [key for key in self._heard if key[0] == self.job and key[1] <= last and key[1] not in kept]:
            del self._heard[key]

    # ---- Servers that are gone ----

    def lose(self, server: int, others: Iterable[int], last: int) -> list[Effect]:
        """A server is gone, and votes no more. What was heard of it counts, once all have said what they have heard.

        So all others use the same votes of it: either one of them has heard a vote, and all are told, or none has.

        Args:
            server: the one that is gone.
            others: all servers of the job that are not, this one left out.
            last: the last round that is over here.
        """
        heard = [votes[server] for key, votes in sorted(self._heard.items()) if key[0] == self.job and server in votes]
        before = self._losses[server]
        testimony = self._testimonies[server] = Testimony(self.job, server, tuple(heard), before)
        self._losses[server] += 1
        for waiting in self._gone.values():
            waiting.discard(server)
        early = self._early.pop((self.job, server, before), set())
        self._gone[server] = set(others) - early
        self._forget(last)
        return [Send(other, testimony) for other in others]

    def testify(self, server: int, testimony: Testimony, last: int) -> None:
        """Takes in what another server has heard of one that is gone, which this one may not know of yet.

        `last` is the last round that is over here.
        """
        if len(testimony.votes) + len(self._heard) > 2 * MAX_HEARD:
            raise InvalidRequest(f"server {server} reports {len(testimony.votes)} votes, which is too far ahead")
        for vote in testimony.votes:
            if vote.job == testimony.job and (vote.job != self.job or vote.round > last):
                self._heard[vote.job, vote.round, vote.attempt].setdefault(testimony.gone, vote)
        known = self._losses[testimony.gone] if testimony.job == self.job else 0
        if testimony.before >= known:
            self._early[testimony.job, testimony.gone, testimony.before].add(server)
        elif testimony.before == known - 1 and testimony.gone in self._gone:
            self._gone[testimony.gone].discard(server)

    def take_back(self, server: int, last: int) -> None:
        """A server that was gone votes again, in the rounds after `last`; no round is under way."""
        self._gone.pop(server, None)
        self._testimonies.pop(server, None)
        self._closed[server] = last


def _with(vote: Vote, digest: Digest | None) -> Vote:
    return vote if digest is None else replace(vote, digest=digest)
