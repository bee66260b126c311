"""Steps of a program that updates rows of tables: numbers are computed first, then one kernel goes row by row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from psserver.programs.kernels.codegen import HALVES
from psserver.programs.kernels.fusion import KERNEL_DTYPES, MAX_FUSED, Shape, Step, whole
from pswire.errors import ProgramError
from pswire.model.program import OPS, Input, Node, Program
from pswire.model.row_updates import ALONG_ROWS, refusal, table_shape
from pswire.model.tensor import DTYPES

ROW_DTYPES = KERNEL_DTYPES | frozenset(HALVES)
"""Dtypes that kernels on rows compute with."""

REDUCED = {"sum": "biufV", "mean": "fV", "max": "iufV", "min": "iufV"}
"""Kinds of dtypes that kernels reduce along rows. NumPy makes the mean of integers of pieces, as float64."""


@dataclass(frozen=True)
class RowSteps:
    """An update of rows, as it is split.

    Attributes:
        shape: shape of the tables.
        numbers: the steps before the last one.
        last: the step that takes rows: the last one if a kernel can run it, else the whole program.
        scalars: numbers of the values that the last step takes as scalars.
    """

    shape: Shape
    numbers: tuple[Step, ...]
    last: Step
    scalars: tuple[int, ...]

    @classmethod
    def of(cls, program: Program) -> RowSteps:
        """Splits a program; raises `ProgramError` for one that cannot run on rows."""
        why = refusal(program, [number for number, item in enumerate(program.inputs) if item.kind == "value"])
        if why is not None:
            raise ProgramError(why)
        *numbers, last = split_rows(program)
        taken = zip(last.args, last.program.inputs, strict=True)
        scalars = tuple(number for number, item in taken if not item.spec.shape)
        return cls(table_shape(program), tuple(numbers), last, scalars)


def split_rows(program: Program) -> tuple[Step, ...]:
    """Splits an update of rows into the step that computes numbers, if there are any, and the step of a kernel.

    Args:
        program: as for `rows.RowUpdate`.

    Returns:
        The steps; the last one has the tables' shape, or None where no kernel can run the program, or would have
        nothing to do: then it is whole.
    """
    specs, nodes = program.specs, list(enumerate(program.nodes, len(program.inputs)))
    numbers = [(n, node) for n, node in nodes if not specs[n].shape]
    rows = [(n, node) for n, node in nodes if specs[n].shape]
    dtypes = {spec.dtype for spec in specs if spec.shape}
    has_kernels = dtypes <= ROW_DTYPES and all(_has_kernel(node, program) for _, node in rows)
    if not program.assigns or len(rows) > MAX_FUSED or not has_kernels:
        return (whole(program),)
    read = {arg for _, node in rows for arg in node.args}
    made = tuple(n for n, _ in numbers if n in read)
    first = [_step(program, numbers, (), made, None)] if made else []
    return (*first, _step(program, rows, program.assigns, (), table_shape(program)))


def _step(
    program: Program,
    nodes: Sequence[tuple[int, Node]],
    assigns: Sequence[tuple[int, int]],
    results: tuple[int, ...],
    shape: Shape | None,
) -> Step:
    """Returns some nodes, with their numbers, as a step."""
    own = [number for number, _ in nodes]
    read = {*(arg for _, node in nodes for arg in node.args), *(number for pair in assigns for number in pair)}
    args = tuple(sorted(read.difference(own)))
    place = {number: index for index, number in enumerate((*args, *own))}
    inputs, specs = program.inputs, program.specs
    made = Program(
        tuple(inputs[n] if n < len(inputs) else Input("value", specs[n]) for n in args),
        tuple(Node(node.op, tuple(place[arg] for arg in node.args), node.attrs) for _, node in nodes),
        tuple((place[target], place[value]) for target, value in assigns),
        tuple(place[number] for number in results),
    )
    return Step(made, args, results, shape)


def _has_kernel(node: Node, program: Program) -> bool:
    """Returns True if kernels on rows can have a node of such dtypes."""
    given = [program.specs[arg] for arg in node.args]
    if node.op in ALONG_ROWS:
        return DTYPES[given[0].dtype].kind in REDUCED[node.op]
    row = OPS[node.op]
    loop = row.loop(given, dict(node.attrs)) if row.kernel else ()
    return bool(loop) and ROW_DTYPES.issuperset((*loop, *(spec.dtype for spec in given)))
