"""A round that can run: its plan, and what its members sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pswire.api import Contribution
from pswire.cluster import Task
from pswire.payload import Payload
from pswire.spec import Member, Plan, Position
from pswire.tensor import TensorSpec

Key = Task | None
"""Which strand: a task's own, or None for the one that all make together."""


@dataclass(frozen=True)
class Part:
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
class Job:
    """A round that can run.

    Attributes:
        round: which.
        plan: what it does.
        parts: what it does it with, in task order.
        left_out: members without a whole contribution.
        section: gives the plan in words.
        strand: whose round it is.
        streams: whether it may begin before all contributions are whole.
    """

    round: int
    plan: Plan
    parts: tuple[Part, ...]
    left_out: tuple[Task, ...]
    section: Callable[[], str]
    strand: Key = None
    streams: bool = False

    @property
    def positions(self) -> tuple[Position, ...]:
        """Where its members' datasets stand after it."""
        return next((part.said.positions for part in self.parts if part.said.positions), ())


def sent(plan: Plan, server: int, said: Contribution) -> list[TensorSpec]:
    """What a payload to a server holds: operands, then contributions that count; nothing from who observes."""
    if said.observes:
        return []
    specs = [operand.tensor for operand in plan.operands if server in operand.servers]
    return specs + [
        reduction.tensor
        for reduction, weight in zip(plan.reductions, said.weights, strict=False)
        if weight and server in reduction.servers
    ]
