"""A round that can run: its plan, and what its members sent."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pswire.api import Contribution
from pswire.cluster import Task
from pswire.log import Member, Position
from pswire.payload import Payload
from pswire.spec import Apply, Plan, Ref
from pswire.tensor import align, layout

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


@dataclass(frozen=True)
class Places:
    """Where the tensors of a contribution lie in its payload.

    Attributes:
        of: offset and end of each operand and of each contribution that counts, in bytes.
        operands: the end of the last operand.
        size: of the payload.
        window: how much of it has to be held at once where it is used bit by bit.
    """

    of: Mapping[Ref, tuple[int, int]]
    operands: int
    size: int
    window: int


def places(plan: Plan, server: int, said: Contribution) -> Places:
    """What a payload to a server holds: operands, then contributions that count; nothing from who observes.

    Remembered with the plan: in every round it is the same for all.
    """
    key = server, said.observes, tuple(map(bool, said.weights))
    found = plan.remembered.get(key)
    if not isinstance(found, Places):
        found = plan.remembered[key] = _places(plan, server, said)
    return found


def _places(plan: Plan, server: int, said: Contribution) -> Places:
    operands = [] if said.observes else list(enumerate(plan.operands))
    reductions = [] if said.observes else list(zip(range(len(said.weights)), plan.reductions, strict=False))
    tensors = {Ref("operand", index): item.tensor for index, item in operands if server in item.servers}
    last = len(tensors)
    tensors |= {
        Ref("reduction", index): item.tensor
        for index, item in reductions
        if said.weights[index] and server in item.servers
    }
    offsets, size = layout(tensors.values())
    ends = [offset + spec.nbytes for offset, spec in zip(offsets, tensors.values(), strict=True)]
    of = dict(zip(tensors, zip(offsets, ends, strict=True), strict=True))
    return Places(of, max(ends[:last], default=0), size, _window(plan, server, of))


def refs(step: Apply | Ref) -> Sequence[Ref]:
    """What a step of a round needs."""
    return step.args if isinstance(step, Apply) else (step,)


def steps(plan: Plan, server: int) -> list[Apply | Ref]:
    """What a round that runs bit by bit does on a server, in order: applications, then returned values."""
    return [*(apply for apply in plan.applies if server in apply.servers), *(ref for ref, _ in plan.given(server))]


def _window(plan: Plan, server: int, of: Mapping[Ref, tuple[int, int]]) -> int:
    """The most bytes between the first that somebody has still to read and the last that a step needs."""
    needs = [[ref for ref in refs(step) if ref in of and ref.kind == "reduction"] for step in steps(plan, server)]
    readers = Counter(ref for need in needs for ref in need)
    left = deque(sorted((place, ref) for ref, place in of.items() if ref.kind == "reduction"))
    window = begin = 0
    for need in needs:
        window = max([window, *(of[ref][1] - begin for ref in need)])
        readers.subtract(need)
        while left and not readers[left[0][1]]:
            begin = align(left.popleft()[0][1])
    return window
