"""A round that can run: its plan, and what its members sent."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pswire.api import Contribution
from pswire.cluster import Task
from pswire.model.log import Member, Position
from pswire.model.plan import Apply, Plan, Ref
from pswire.model.program import Program
from pswire.model.tensor import DTYPES, align, layout
from pswire.transport.payload import Payload

Numbers = npt.NDArray[np.int64]

MAX_PLACES = 64
"""For how many kinds of contributions a plan remembers where their tensors lie; then it forgets all of them."""

Key = Task | None
"""Which strand: a task's own, or None for the one that all make together."""


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
        plan: what it does.
        parts: what it does it with, in task order.
        left_out: members without a whole contribution.
        section: gives the plan in words.
        strand: whose round it is.
        streams: whether it may begin before all contributions are whole.
        since: when its first contribution came, in monotonic seconds.
    """

    round: int
    plan: Plan
    parts: tuple[MemberShare, ...]
    left_out: tuple[Task, ...]
    section: Callable[[], str]
    strand: Key = None
    streams: bool = False
    since: float = 0.0

    @property
    def contributors(self) -> list[MemberShare]:
        """Those of its parts that do not only observe."""
        return [part for part in self.parts if not part.said.observes]

    @property
    def positions(self) -> tuple[Position, ...]:
        """Where its members' datasets stand after it."""
        return next((part.said.positions for part in self.parts if part.said.positions), ())


@dataclass(frozen=True)
class ContributionLayout:
    """Where the tensors of a contribution lie in its payload.

    Attributes:
        of: offset and end of each operand and of each contribution that counts, in bytes.
        operands: the end of the last operand.
        size: of the payload.
        starts, ends: of each contribution in bytes, by the reduction's number; 0 for what is not there.
        window: how much of it has to be held at once where it is used bit by bit.
    """

    of: Mapping[Ref, tuple[int, int]]
    operands: int
    size: int
    starts: Numbers
    ends: Numbers
    window: int


def places(plan: Plan, server: int, said: Contribution) -> ContributionLayout:
    """What a payload to a server holds: operands, then contributions that count; nothing from who observes.

    Remembered with the plan: in nearly every round it is the same for all.
    """
    known: Any = plan.remembered.setdefault("places", {})
    key = server, said.observes, tuple(map(bool, said.weights))
    found: ContributionLayout | None = known.get(key)
    if found is None:
        if len(known) >= MAX_PLACES:
            known.clear()
        found = known[key] = _places(plan, server, said)
    return found


def _places(plan: Plan, server: int, said: Contribution) -> ContributionLayout:
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
    bounds = np.zeros((2, len(plan.reductions)), np.int64)
    for ref, place in of.items():
        if ref.kind == "reduction":
            bounds[:, ref.index] = place
    return ContributionLayout(of, max(ends[:last], default=0), size, bounds[0], bounds[1], _window(plan, server, of))


@dataclass(frozen=True, eq=False)
class Application:
    """One application of a program, as a server makes it in each round.

    Attributes:
        apply: which.
        program: what it applies.
        first: the number of its first result.
        distinct: whether no two of its inputs are one value.
        variables: the variables among its inputs: number, dtype and shape.
        reduced: its inputs that are reductions.
        needs: the numbers of these reductions.
        assigned: the numbers of the variables that it assigns.
        alone: those of these inputs that nobody else in the plan needs, each with the reduction's number.
        read: its inputs that are results of others.
        made: its results.
    """

    apply: Apply
    program: Program
    first: int
    distinct: bool
    variables: tuple[tuple[int, np.dtype[Any], tuple[int, ...]], ...]
    reduced: tuple[int, ...]
    needs: tuple[int, ...]
    assigned: tuple[int, ...]
    alone: tuple[tuple[int, int], ...]
    read: tuple[Ref, ...]
    made: tuple[Ref, ...]


@dataclass(frozen=True, eq=False)
class Outline:
    """What a round of a plan does on a server.

    Attributes:
        applications: in order.
        given: returned values.
        uses: how often each reduction is needed.
        readers: how often each result is.
        last: of each variable that is assigned the number of the application that assigns it last.
        watched: reductions that reach a variable.
    """

    applications: tuple[Application, ...]
    given: tuple[Ref, ...]
    uses: Counter[int]
    readers: Counter[Ref]
    last: Mapping[int, int]
    watched: frozenset[int]

    @property
    def steps(self) -> tuple[Application | Ref, ...]:
        """What a round that runs bit by bit does, in order."""
        return self.applications + self.given


def outline(plan: Plan, server: int) -> Outline:
    """What a round of a plan does on a server; remembered with the plan."""
    key = "outline", server
    found = plan.remembered.get(key)
    if not isinstance(found, Outline):
        found = plan.remembered[key] = _outline(plan, server)
    return found


def _outline(plan: Plan, server: int) -> Outline:
    given = tuple(ref for ref, _ in plan.given(server))
    here = [(apply, first) for apply, first in _numbered(plan) if server in apply.servers]
    used = [ref for apply, _ in here for ref in apply.args] + list(given)
    uses = Counter(ref.index for ref in used if ref.kind == "reduction")
    readers = Counter(ref for ref in used if ref.kind == "result")
    applications = tuple(_application(plan, *item, uses) for item in here)
    last = {id: number for number, application in enumerate(applications) for id in application.assigned}
    watched = frozenset(index for application in applications for index in application.needs)
    return Outline(applications, given, uses, readers, last, watched)


def _numbered(plan: Plan) -> Iterator[tuple[Apply, int]]:
    """The applications of a plan, each with the number of its first result."""
    results = 0
    for apply in plan.applies:
        yield apply, results
        results += len(plan.programs[apply.program].outputs)


def _application(plan: Plan, apply: Apply, first: int, uses: Mapping[int, int]) -> Application:
    program, args = plan.programs[apply.program], apply.args
    specs = [item.spec for item in program.inputs]
    reduced = tuple(i for i, ref in enumerate(args) if ref.kind == "reduction")
    return Application(
        apply,
        program,
        first,
        len(set(args)) == len(args),
        tuple(
            (ref.index, DTYPES[spec.dtype], spec.shape)
            for ref, spec in zip(args, specs, strict=True)
            if ref.kind == "variable"
        ),
        reduced,
        tuple(args[i].index for i in reduced),
        tuple(args[target].index for target, _ in program.assigns),
        tuple((i, n) for i in reduced for n in [args[i].index] if uses[n] == 1 and plan.reductions[n].op != "first"),
        tuple(ref for ref in args if ref.kind == "result"),
        tuple(Ref("result", first + number) for number in range(len(program.outputs))),
    )


def needs(step: Application | Ref) -> Sequence[int]:
    """The numbers of the reductions that a step of a round needs."""
    if isinstance(step, Application):
        return step.needs
    return (step.index,) if step.kind == "reduction" else ()


def _window(plan: Plan, server: int, of: Mapping[Ref, tuple[int, int]]) -> int:
    """The most bytes between the first that somebody has still to read and the last that a step needs."""
    wanted = [
        [ref for index in needs(step) if (ref := Ref("reduction", index)) in of] for step in outline(plan, server).steps
    ]
    readers = Counter(ref for refs in wanted for ref in refs)
    left = deque(sorted((place, ref) for ref, place in of.items() if ref.kind == "reduction"))
    window = begin = 0
    for refs in wanted:
        window = max([window, *(of[ref][1] - begin for ref in refs)])
        readers.subtract(refs)
        while left and not readers[left[0][1]]:
            begin = align(left.popleft()[0][1])
    return window
