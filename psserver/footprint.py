"""How much memory a round takes on a server: what its plan keeps alive while it runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate

from psserver.interpreter import peak_bytes
from pswire.spec import Apply, Plan, Ref

Span = tuple[int, int, int]
"""Bytes that are held while the applications of these numbers run: from the first to before the last."""


def plan_bytes(plan: Plan, server: int) -> int:
    """Memory that a round of a verified plan takes at most on a server, in bytes.

    It is beside what the members sent, and beside the values of variables, of which each may be there twice: as it
    was and as it will be. What kernels write counts from the beginning, since its memory is reserved there.
    """
    here = [apply for apply in plan.applies if server in apply.servers]
    peaks = {number: peak_bytes(plan.programs[number]) for number in {apply.program for apply in here}}
    changes = [0] * (len(here) + 2)
    for nbytes, first, end in _spans(plan, server, here):
        changes[first] += nbytes
        changes[end] -= nbytes
    own = [*(peaks[apply.program] for apply in here), 0]
    operands = [operand.tensor.nbytes for operand in plan.operands if server in operand.servers]
    compared = sum(operands) + 2 * max(operands, default=0)
    return max(compared, *(held + more for held, more in zip(accumulate(changes), own, strict=False)))


def _spans(plan: Plan, server: int, here: list[Apply]) -> Iterator[Span]:
    """All that is held, but for what an application has while it runs itself."""
    uses = _uses(here)
    end = len(here) + 1
    given = {ref for ref, _ in plan.given(server)}
    for operand in plan.operands:
        if server in operand.servers:
            yield operand.tensor.nbytes, 0, end
    for index, reduction in enumerate(plan.reductions):
        ref = Ref("reduction", index)
        if ref in given or (server in reduction.servers and ref in uses):
            first, last = uses.get(ref, (0, 0))
            yield reduction.tensor.nbytes, 0 if ref in given else first, end if ref in given else last + 1
    yield from _written(plan, server, uses, given, end)


def _written(plan: Plan, server: int, uses: Mapping[Ref, tuple[int, int]], given: set[Ref], end: int) -> Iterator[Span]:
    """What applications write before and after they run: results, and new values of what was assigned before."""
    at = number = 0
    assigned = set[int]()
    for apply in plan.applies:
        program = plan.programs[apply.program]
        refs = [Ref("result", n) for n in range(number, number + len(program.outputs))]
        number += len(refs)
        if server not in apply.servers:
            continue
        for ref, spec in zip(refs, program.output_specs, strict=True):
            yield spec.nbytes, 0, at
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
