"""What servers say to each other of rounds: their votes, and what they have heard of a server that is gone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pswire.errors import PSError


@dataclass(frozen=True)
class Digest:
    """Hashes of variables on one server, as they were after a `round`: 64 bits for each of `variables`, by number."""

    round: int
    variables: tuple[int, ...]
    hashes: tuple[int, ...]


class LateContribution(NamedTuple):
    """The name of a contribution that came late to its round: its session, and the round that it was for."""

    session: int
    round: int


@dataclass(frozen=True)
class Vote:
    """What one server says to the others of a plan about a round, so that all count the same contributions.

    Attributes:
        job: the session of the chief that began the job.
        round, plan_id, generation: which round, as in its contributions.
        attempt: how many votes of this round there were before.
        whole: the sessions whose contributions are whole on this server.
        error: why the round cannot run on this server; then it fails on all.
        closed: the last round that is over on this server.
        digest: what earlier rounds have made of the variables that both servers hold; None but in some rounds.
        sums: of each sum of contributions that this server has whose they are: it counts as a whole, or not at all.
        late: contributions that came late to earlier rounds, and that this server could merge into this one.
    """

    job: int
    round: int
    plan_id: bytes
    generation: int
    attempt: int = 0
    whole: frozenset[int] = frozenset()
    error: PSError | None = None
    closed: int = -1
    digest: Digest | None = None
    sums: tuple[frozenset[int], ...] = ()
    late: frozenset[LateContribution] = frozenset()


@dataclass(frozen=True)
class Testimony:
    """What one server says to the others of one that is gone: all of its votes that count.

    Attributes:
        job: the session of the chief that began the job.
        gone: the server that is gone.
        votes: its votes that were heard, of rounds that are not over everywhere; no later one is heard.
        before: how often it was gone before.
    """

    job: int
    gone: int
    votes: tuple[Vote, ...] = ()
    before: int = 0
