"""Sections in words, for messages: their content, and the first difference of two of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest

from pswire.model.plan import Apply, PlacedVariable, Plan, Reduction, describe_ref
from pswire.model.program import Node, Program

LONG = 160
"""Most characters of a section in a message."""


class PlanText(str):
    """A section in words. Long ones are cut; `parts` has the whole plan.

    Args:
        plan: the section's plan.
        variables: the existing variables, by number.
    """

    _plan: Plan
    _variables: Mapping[int, PlacedVariable]

    def __new__(cls, plan: Plan, variables: Mapping[int, PlacedVariable]) -> PlanText:
        words = plan.describe(variables)
        made = super().__new__(cls, words if len(words) <= LONG else f"{words[:LONG]} ...")
        made._plan, made._variables = plan, variables
        return made

    def parts(self) -> Iterator[list[list[str]]]:
        """Yields reductions, updates, operands, returned values and checkpoints, each as a list of lines.

        Different sections have different lines.
        """
        plan, variables = self._plan, self._variables
        yield [[_reduction(index, reduction)] for index, reduction in enumerate(plan.reductions)]
        yield [
            list(_update(index, apply, plan.programs[apply.program], variables))
            for index, apply in enumerate(plan.applies)
        ]
        operands = enumerate(plan.operands)
        yield [[f"operand {i}{_in_brackets(one.label)} is {one.tensor}{_places(one.servers)}"] for i, one in operands]
        yield [[f"{describe_ref(ref, variables)} is returned"] for ref in plan.returned]
        made = plan.snapshot
        yield [[f"a checkpoint {made.path!r} of round {made.round} is made"]] if made else []
        yield [[f"nonfinite is {plan.nonfinite!r}"]] if plan.nonfinite != "apply" else []
        read = plan.restore
        yield [[f"{read.path!r} is restored, {read.turn}, choice {read.choice}"]] if read else []


def _in_brackets(label: str) -> str:
    return f" ({label})" if label else ""


def _places(servers: Sequence[int]) -> str:
    return f" on {', '.join(f'/job:ps/task:{server}' for server in servers)}"


def _reduction(index: int, reduction: Reduction) -> str:
    about = f" for {reduction.target}" if reduction.target else ""
    how = "" if reduction.codec is None else f", compressed as {reduction.codec}"
    return f"reduction {index} is {reduction.op} {reduction.tensor}{about}{_places(reduction.servers)}{how}"


def _update(index: int, apply: Apply, program: Program, variables: Mapping[int, PlacedVariable]) -> Iterator[str]:
    """Yields the lines of one application: inputs, ops, assigned variables and outputs."""
    written = [describe_ref(apply.args[target], variables) for target, _ in program.assigns]
    name = f"update {index}" + (f" of {' and '.join(written)}" if written else "") + _places(apply.servers)
    specs = program.specs
    for number, ref in enumerate(apply.args):
        yield f"{name} takes {describe_ref(ref, variables)}, {specs[number]}, as #{number}"
    for number, node in enumerate(program.nodes, len(program.inputs)):
        yield f"{name} computes #{number} = {_computed(node, program)}"
    for target, value in program.assigns:
        yield f"{name} assigns #{value} to {describe_ref(apply.args[target], variables)}"
    for value in program.outputs:
        yield f"{name} returns #{value}"


def _computed(node: Node, program: Program) -> str:
    args = [f"#{arg} {program.specs[arg]}" for arg in node.args]
    return f"{node.op}({', '.join([*args, *(f'{name}={value!r}' for name, value in node.attrs)])})"


def compared(sections: Sequence[str]) -> list[str]:
    """Returns sections in words; if all are `PlanText`s, each with its line where they first differ."""
    known = [section for section in sections if isinstance(section, PlanText)]
    if len(known) < len(sections) or len(known) < 2:
        return list(sections)
    first = next(_differences(known), None)
    if first is None:
        return list(sections)
    return [f"{section} [first difference: {line}]" for section, line in zip(known, first, strict=True)]


def _differences(sections: Sequence[PlanText]) -> Iterator[tuple[str, ...]]:
    """Yields the lines in which sections differ. Reductions, updates and so on are compared by number."""
    for parts in zip(*(section.parts() for section in sections), strict=True):
        for ones in zip_longest(*parts, fillvalue=()):
            for lines in zip_longest(*ones, fillvalue="nothing"):
                if len(set(lines)) > 1:
                    yield lines
