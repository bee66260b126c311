"""A round that can run: its plan, and what its members sent."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass, replace
from enum import Enum

from psserver.plans.prepared import PreparedPlan
from pswire.api import Contribution
from pswire.cluster import Task
from pswire.errors import PSError
from pswire.model.log import Member, Position
from pswire.model.plan import Plan
from pswire.transport.payload import Payload

Key = Task | None
"""Which strand: a task's own, or None for the one that all make together."""


class Commit(Enum):
    """When what a round assigns becomes the variables' values, and so when it may begin.

    Attributes:
        ATOMIC: all at the end, or nothing. All contributions are there when the round begins.
        PROGRESSIVE: step by step, while contributions come. Nothing of such a round can be refused halfway.
    """

    ATOMIC = "atomic"
    PROGRESSIVE = "progressive"


@dataclass(frozen=True)
class MemberShare:
    """One member's share of a round.

    Attributes:
        member: whose.
        said: what it said.
        payload: operands, then contributions; it may still grow.
    """

    member: Member
    said: Contribution
    payload: Payload


@dataclass(frozen=True)
class ReadyRound:
    """A round that can run.

    Attributes:
        round: which.
        prepared: what it does.
        parts: what it does it with, in task order.
        left_out: members without a whole contribution.
        section: gives the plan in words.
        strand: whose round it is.
        commit: when what it assigns can be read; how it runs.
        since: when its first contribution came, in monotonic seconds.
        epoch: the epoch that its members have said.
        voters: the servers that agree on its contributions, this one included; empty where this one decides alone.
        error: why it cannot run.
    """

    round: int
    prepared: PreparedPlan
    parts: tuple[MemberShare, ...]
    left_out: tuple[Task, ...]
    section: Callable[[], str]
    strand: Key = None
    commit: Commit = Commit.ATOMIC
    since: float = 0.0
    epoch: int = 0
    voters: tuple[int, ...] = ()
    error: PSError | None = None

    @property
    def sessions(self) -> frozenset[int]:
        """Whose contributions it has."""
        return frozenset(part.said.session for part in self.parts)

    def only(self, sessions: Set[int]) -> ReadyRound:
        """Returns the same round with the contributions of some sessions; the other members are left out."""
        parts = tuple(part for part in self.parts if part.said.session in sessions)
        out = (part.member.task for part in self.parts if part.said.session not in sessions)
        return replace(self, parts=parts, left_out=tuple(sorted((*self.left_out, *out))))

    @property
    def plan(self) -> Plan:
        """What it does, as the members know it."""
        return self.prepared.plan

    @property
    def contributors(self) -> list[MemberShare]:
        """Those of its parts that do not only observe."""
        return [part for part in self.parts if not part.said.observes]

    @property
    def positions(self) -> tuple[Position, ...]:
        """Where its members' datasets stand after it."""
        return next((part.said.positions for part in self.parts if part.said.positions), ())
