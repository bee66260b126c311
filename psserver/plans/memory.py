"""How much memory a round takes on a server: what its plan keeps alive while it runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from psserver.programs.interpreter import peak_bytes
from psserver.programs.kernels.fusion import split
from pswire.model.plan import Apply, Plan, Ref
from pswire.model.program import Program

Span = tuple[int, int, int]
"""Bytes that are held while the applications of these numbers run: from the first to before the last."""


@dataclass(frozen=True)
class Need:
    """Bytes that one application of a program takes.

    Attributes:
        before: what its kernels write beside variables, which is reserved when the round begins.
        running: all that it takes while it runs.
    """

    before: int
    running: int

    @classmethod
    def of(cls, program: Program) -> Need:
        """Finds what a program takes; of a large one this takes a while."""
        kernels = [step.program for step in split(program) if step.shape is not None]
        before = sum(spec.nbytes for kernel in kernels for spec in kernel.output_specs)
        return cls(before, peak_bytes(program))


def plan_bytes(plan: Plan, server: int, needs: Sequence[Need]) -> int:
    """Memory that a round of a verified plan takes at most on a server, in bytes; `needs` are those of its programs.

    It is beside what the members sent, and beside the values of variables, of which each may be there twice: as it
    was and as it will be.
    """
    here = [apply for apply in plan.applies if server in apply.servers]
    changes = [0] * (len(here) + 2)
    for nbytes, first, end in (*_spans(plan, server, here), *_written(plan, server, here, needs)):
        changes[first] += nbytes
        changes[end] -= nbytes
    running = [*(needs[apply.program].running for apply in here), 0]
    operands = [operand.tensor.nbytes for operand in plan.operands if server in operand.servers]
    compared = sum(operands) + 2 * max(operands, default=0)
    return max(compared, *(held + more for held, more in zip(accumulate(changes), running, strict=False)))


def _spans(plan: Plan, server: int, here: list[Apply]) -> Iterator[Span]:
    """Returns what applications read: operands, and reductions from their first use to their last."""
    uses, end = _uses(here), len(here) + 1
    given = {ref for ref, _ in plan.given(server)}
    for operand in plan.operands:
        if server in operand.servers:
            yield operand.tensor.nbytes, 0, end
    for index, reduction in enumerate(plan.reductions):
        ref = Ref("reduction", index)
        if ref in given:
            yield reduction.tensor.nbytes, 0, end
        elif server in reduction.servers and ref in uses:
            first, last = uses[ref]
            yield reduction.tensor.nbytes, first, last + 1


def _written(plan: Plan, server: int, here: list[Apply], needs: Sequence[Need]) -> Iterator[Span]:
    """Returns what applications write, before and after they run; of variables what is written after the first time."""
    uses, end = _uses(here), len(here) + 1
    given = {ref for ref, _ in plan.given(server)}
    at = number = 0
    assigned = set[int]()
    for apply in plan.applies:
        program = plan.programs[apply.program]
        specs, first, number = program.output_specs, number, number + len(program.outputs)
        if server not in apply.servers:
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


def _uses(here: list[Apply]) -> dict[Ref, tuple[int, int]]:
    """The first and the last application that take a value, by number."""
    uses: dict[Ref, tuple[int, int]] = {}
    for at, apply in enumerate(here):
        for ref in apply.args:
            uses[ref] = uses.get(ref, (at, at))[0], at
    return uses
