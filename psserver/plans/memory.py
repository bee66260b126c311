"""The memory of a round: bounds of the values that its plan keeps alive on a server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from psserver.programs.interpreter import peak_bytes
from psserver.programs.kernels.fusion import split
from pswire.model.plan import Apply, Plan, Ref
from pswire.model.program import Program

Span = tuple[int, int, int]
"""Bytes held, the first application that they are held for, and the number after the last."""


@dataclass(frozen=True)
class Need:
    """The memory of one application of a program, in bytes.

    Attributes:
        before: outputs of its kernels beside variables, reserved when the round begins.
        running: all memory that it takes while it runs.
    """

    before: int
    running: int

    @classmethod
    def of(cls, program: Program) -> Need:
        """Computes the need of a program; slow for a large one."""
        kernels = [step.program for step in split(program) if step.shape is not None]
        before = sum(spec.nbytes for kernel in kernels for spec in kernel.output_specs)
        return cls(before, peak_bytes(program))


def plan_bytes(plan: Plan, server: int, needs: Sequence[Need]) -> int:
    """Returns the most memory that a round of a verified plan takes on a server, in bytes.

    It comes on top of the contributions, and of the variables, each of which may be there twice: its old and its new
    value.

    Args:
        plan, server: the plan, and the number of the server.
        needs: the needs of the plan's programs.
    """
    here = [apply for apply in plan.applies if server in apply.servers]
    changes = [0] * (len(here) + 2)
    for nbytes, first, end in (*_spans(plan, server, here), *_written(plan, server, here, needs)):
        changes[first] += nbytes
        changes[end] -= nbytes
    whole = set(map(id, _whole(plan)))
    running = [*(needs[apply.program].running if id(apply) in whole else 0 for apply in here), 0]
    operands = [operand.tensor.nbytes for operand in plan.operands if server in operand.servers]
    compared = sum(operands) + 2 * max(operands, default=0)
    return max(compared, *(held + more for held, more in zip(accumulate(changes), running, strict=False)))


def _spans(plan: Plan, server: int, here: list[Apply]) -> Iterator[Span]:
    """Yields the spans of values that applications read: operands, and reductions from first to last use."""
    uses, end = _uses(here), len(here) + 1
    made = {ref for apply in _whole(plan) for ref in apply.args}  # of rows nothing is made that only rows take
    given = {ref for ref, _ in plan.given(server)}
    for operand in plan.operands:
        if server in operand.servers:
            yield operand.tensor.nbytes, 0, end
    for index, reduction in enumerate(plan.reductions):
        ref = Ref("reduction", index)
        if ref in given:
            yield reduction.tensor.nbytes, 0, end
        elif server in reduction.servers and ref in uses and (reduction.form == "dense" or ref in made):
            first, last = uses[ref]
            yield reduction.tensor.nbytes, first, last + 1


def _written(plan: Plan, server: int, here: list[Apply], needs: Sequence[Need]) -> Iterator[Span]:
    """Yields the spans of values that applications write; of a variable those after its first assignment."""
    uses, end = _uses(here), len(here) + 1
    given = {ref for ref, _ in plan.given(server)}
    at = number = 0
    assigned = set[int]()
    for place, apply in enumerate(plan.applies):
        program = plan.programs[apply.program]
        specs, first, number = program.output_specs, number, number + len(program.outputs)
        if server not in apply.servers:
            continue
        if plan.by_rows[place] is not None or plan.measured[place] is not None:  # in place, a few rows; or numbers
            at += 1
            continue
        yield needs[apply.program].before, 0, at
        for ref, spec in zip((Ref("result", n) for n in range(first, number)), specs, strict=True):
            yield spec.nbytes, at + 1, end if ref in given else uses.get(ref, (at, at))[1] + 1
        for target, _ in program.assigns:
            id = apply.args[target].index
            if id in assigned:
                yield program.inputs[target].spec.nbytes, 0, at
            assigned.add(id)
        at += 1


def _whole(plan: Plan) -> list[Apply]:
    """Returns the applications that run on whole arrays."""
    every = zip(plan.applies, plan.by_rows, plan.measured, strict=True)
    return [apply for apply, rows, measured in every if rows is None and measured is None]


def _uses(here: list[Apply]) -> dict[Ref, tuple[int, int]]:
    """Maps each value to the numbers of the first and the last application that take it."""
    uses: dict[Ref, tuple[int, int]] = {}
    for at, apply in enumerate(here):
        for ref in apply.args:
            uses[ref] = uses.get(ref, (at, at))[0], at
    return uses
