"""What of a section is of variables that each worker updates by itself, and the section cut in two by that.

All workers make the rest together. What each makes alone becomes a plan of its own, of which no worker waits for the
others. A section that is wholly of one kind stays one plan.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import TypeVar

from psclient._src.variables.kinds import ServerVariable
from pswire.model.plan import Plan, Ref, RefKind

T = TypeVar("T")

APART = "ps.Async()"
"""What variables have that each worker updates by itself, in words."""


class Marks:
    """What of one section each worker makes alone. Used by the thread that records the section.

    Attributes:
        reductions, applies, trims: the numbers of those.
    """

    def __init__(self) -> None:
        self.reductions: set[int] = set()
        self.applies: set[int] = set()
        self.trims: set[int] = set()
        self._results: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self.reductions or self.applies or self.trims)

    @property
    def key(self) -> tuple[frozenset[int], ...]:
        """The marks as a value."""
        return frozenset(self.reductions), frozenset(self.applies), frozenset(self.trims)

    def judge(
        self,
        number: int,
        refs: Sequence[Ref],
        targets: Iterable[int],
        variables: Mapping[int, ServerVariable],
        given: Set[int],
        results: Iterable[int],
    ) -> None:
        """Notes an update, if each worker makes it alone: where it assigns variables of that kind.

        One that assigns nothing is of the kind of what it takes.

        Args:
            number: the update's number.
            refs: what it takes.
            targets: numbers of the variables that it assigns.
            variables: those that it takes, by number.
            given: reductions of what updates were given as rows, which are of their updates' kind.
            results: numbers of its results.

        Raises:
            ValueError: it assigns or takes what is of the other kind, and may not be there for it.
        """
        assigned = [variables[id] for id in targets]
        apart = [variable for variable in assigned if variable.handle.spec.alone]
        if apart and len(apart) < len(assigned):
            other = next(variable for variable in assigned if not variable.handle.spec.alone)
            raise ValueError(
                f"an update assigns both {apart[0].name!r}, which has consistency={APART}, and "
                f"{other.name!r}, which all workers update together; use one update for each"
            )
        mine = {ref.index for ref in refs if ref.kind == "reduction" and ref.index in given}
        taken = [ref for ref in refs if ref.kind != "operand" and not (ref.kind == "reduction" and ref.index in mine)]
        alone = [ref for ref in taken if self._is_alone(ref, variables)]
        if not (apart if assigned else alone):
            if alone:
                raise ValueError(
                    f"the update of {_names(assigned)}, which all workers make together, uses "
                    f"{_said(alone[0], variables)}, which may differ between workers; reduce the value "
                    "computed from it, and pass the result"
                )
            return
        of_all = [ref for ref in taken if ref.kind != "variable" and ref not in alone]
        if of_all:
            raise ValueError(
                f"each worker updates {_names(assigned)} separately (consistency={APART}), but the update "
                f"uses {_said(of_all[0], variables)}, which waits for all workers; reduce it to that "
                "variable with reduce_to(op, value, variable), or read it first and pass its value"
            )
        self.reductions |= mine
        self.applies.add(number)
        self._results.update(results)

    def _is_alone(self, ref: Ref, variables: Mapping[int, ServerVariable]) -> bool:
        if ref.kind == "variable":
            return variables[ref.index].handle.spec.alone
        return ref.index in (self.reductions if ref.kind == "reduction" else self._results)


def _names(assigned: Sequence[ServerVariable]) -> str:
    return f"variable {assigned[0].name!r}" if assigned else "no variable"


def _said(ref: Ref, variables: Mapping[int, ServerVariable]) -> str:
    if ref.kind == "variable":
        return f"variable {variables[ref.index].name!r} with consistency={APART}"
    return "a reduced value" if ref.kind == "reduction" else "the result of an update"


@dataclass(frozen=True)
class PlanPart:
    """The part of a section's plan that is of one strand.

    Attributes:
        plan: what it does, as a plan of its own.
        alone: True if each worker makes it alone.
        reductions, operands: for each of its own the place in the whole plan.
        names: for each value that it returns the name in the whole plan.
    """

    plan: Plan
    alone: bool
    reductions: tuple[int, ...]
    operands: tuple[int, ...]
    names: Mapping[Ref, Ref]

    def of_reductions(self, values: Sequence[T]) -> tuple[T, ...]:
        """Returns of values for each reduction of the whole plan those of this part; of none none."""
        return tuple([values[place] for place in self.reductions]) if values else ()

    def of_operands(self, values: Sequence[T]) -> tuple[T, ...]:
        """Returns of values for each operand of the whole plan those of this part."""
        return tuple([values[place] for place in self.operands])


class PlanCutter:
    """Cuts plans in two, and keeps what came of those that come again. Used by one thread at a time."""

    def __init__(self) -> None:
        self._parts: dict[tuple[bytes, tuple[frozenset[int], ...]], tuple[PlanPart, ...]] = {}

    def cut(self, plan: Plan, marks: Marks) -> tuple[PlanPart, ...]:
        """Returns the parts of a plan: what all workers make together comes first, if there is any of it."""
        key = plan.id, marks.key
        if key not in self._parts:
            self._parts[key] = _cut(plan, marks)
        return self._parts[key]


def _cut(plan: Plan, marks: Marks) -> tuple[PlanPart, ...]:
    found = (_part(plan, marks, alone) for alone in (False, True))
    return tuple(part for part in found if part.plan.servers)


def _part(plan: Plan, marks: Marks, alone: bool) -> PlanPart:
    reductions = _places(len(plan.reductions), marks.reductions, alone)
    applies = _places(len(plan.applies), marks.applies, alone)
    used = {ref for place in applies for ref in plan.applies[place].args}
    operands = tuple(place for place in range(len(plan.operands)) if Ref("operand", place) in used)
    programs = tuple(dict.fromkeys(plan.applies[place].program for place in applies))
    results, first = list[int](), 0
    for place, apply in enumerate(plan.applies):
        count = len(plan.programs[apply.program].outputs)
        results += range(first, first + count) if place in applies else ()
        first += count
    own: dict[RefKind, Sequence[int]] = {"reduction": reductions, "operand": operands, "result": results}
    named = {Ref(kind, place): Ref(kind, number) for kind, some in own.items() for number, place in enumerate(some)}
    returned = [named[ref] for ref in plan.returned if ref in named]
    whole = {renamed: ref for ref, renamed in named.items()}
    made = Plan(
        tuple(plan.reductions[place] for place in reductions),
        tuple(plan.operands[place] for place in operands),
        tuple(plan.programs[place] for place in programs),
        tuple(
            replace(
                plan.applies[place],
                program=programs.index(plan.applies[place].program),
                args=tuple([named.get(ref, ref) for ref in plan.applies[place].args]),
            )
            for place in applies
        ),
        tuple(sorted(returned)),
        nonfinite=plan.nonfinite if applies else "apply",
        trims=tuple(plan.trims[place] for place in _places(len(plan.trims), marks.trims, alone)),
        copied=plan.copied,
    )
    return PlanPart(made, alone, reductions, operands, {ref: whole[ref] for ref in returned})


def _places(count: int, marked: Collection[int], alone: bool) -> tuple[int, ...]:
    return tuple(place for place in range(count) if (place in marked) == alone)
