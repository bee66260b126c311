"""Sections in words, for messages: what they do, and where two of them differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest

from pswire.program import Node, Program
from pswire.spec import Apply, Plan, Variable, describe_ref

LONG = 400
"""Characters of a section in a message."""


class Section(str):
    """A section in words. Long ones are cut; `lines` has all that a plan says.

    Args:
        plan: the section.
        variables: those that exist, by id.
    """

    _plan: Plan
    _variables: Mapping[int, Variable]

    def __new__(cls, plan: Plan, variables: Mapping[int, Variable]) -> Section:
        words = plan.describe(variables)
        made = super().__new__(cls, words if len(words) <= LONG else f"{words[:LONG]} ...")
        made._plan, made._variables = plan, variables
        return made

    def lines(self) -> Iterator[str]:
        """What the section does, one thing after another: different sections have different lines."""
        plan, variables = self._plan, self._variables
        for index, reduction in enumerate(plan.reductions):
            about = f" for {reduction.target}" if reduction.target else ""
            where = _places(reduction.servers)
            yield f"reduction {index} is {reduction.op} {reduction.tensor}{about}{where}"
        for index, operand in enumerate(plan.operands):
            yield f"operand {index} is {operand.tensor}{_places(operand.servers)}"
        for index, apply in enumerate(plan.applies):
            yield from _update(index, apply, plan.programs[apply.program], variables)
        for ref in plan.returned:
            yield f"{describe_ref(ref, variables)} comes back"
        if plan.snapshot:
            yield f"a checkpoint {plan.snapshot.path!r} of round {plan.snapshot.round} is made"


def _places(servers: Sequence[int]) -> str:
    return f" on {', '.join(f'/job:ps/task:{server}' for server in servers)}"


def _update(index: int, apply: Apply, program: Program, variables: Mapping[int, Variable]) -> Iterator[str]:
    """One application: what it takes, each op, what it assigns and gives back."""
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
        yield f"{name} gives back #{value}"


def _computed(node: Node, program: Program) -> str:
    args = [f"#{arg} {program.specs[arg]}" for arg in node.args]
    return f"{node.op}({', '.join([*args, *(f'{name}={value!r}' for name, value in node.attrs)])})"


def compared(sections: Sequence[str]) -> list[str]:
    """The words of some sections; if all are known, each with what it does where they first differ."""
    known = [section for section in sections if isinstance(section, Section)]
    if len(known) < len(sections) or len(known) < 2:
        return list(sections)
    for lines in zip_longest(*(section.lines() for section in known), fillvalue="nothing more"):
        if len(set(lines)) > 1:
            return [f"{section} [where they first differ: {line}]" for section, line in zip(known, lines, strict=True)]
    return list(sections)
