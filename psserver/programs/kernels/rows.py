"""Applies a program to selected rows of a variable, and of variables colocated with it.

The program is the one that would update the whole variable with a gradient of its shape. Of that gradient only some
rows are given; rows for the same place are summed first, in order of arrival.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from psserver.programs import interpreter
from psserver.programs.kernels.fusion import Shape, Step
from psserver.programs.kernels.kernels import Kernel, Kernels
from psserver.programs.kernels.row_groups import Groups
from pswire.errors import ProgramError
from pswire.model.program import OPS, Input, Node, Program
from pswire.model.tensor import Array, TensorSpec, address_of, spec_of

RUN = 1024
"""Rows of a table that one thread takes at a time."""


def apply_rows(kernels: Kernels, program: Program, inputs: Sequence[Any], ids: Array) -> None:
    """Runs a program on rows of the variables that it assigns, in place.

    Args:
        kernels: the kernels of the tables' device.
        program: assigns variables of one shape (size, ...), by elementwise ops on them, on scalars, and on values of
            that shape; has no outputs.
        inputs: for each of the program's inputs a table, which must be contiguous, a scalar, or, for a value of the
            tables' shape, its rows (n, ...).
        ids: int64[n], the place of each row; on the host.

    Raises:
        ProgramError: the program or an input is of another kind. Nothing has changed then.
        InvalidRequest: an id is no row of the table.
    """
    shape = _table(program)
    groups = Groups.of(ids, shape[0], kernels.compiler.groups())
    _check_inputs(program, inputs, (len(groups.order), *shape[1:]))
    steps = kernels.steps(program)
    kernel = kernels.rows(steps[-1]) if kernels.device.gpu is None and _is_fused(steps, shape) else None
    if kernel is None:
        _interpret(kernels, program, inputs, groups, shape)
    else:
        _compute(kernels, kernel, steps, inputs, groups, shape)


def _table(program: Program) -> Shape:
    """Returns the shape of the tables; raises `ProgramError` for a program that cannot run on rows."""
    shapes = {spec.shape for spec in program.specs}
    shape = max(shapes, key=len, default=())
    if not shape or not shapes <= {shape, ()} or program.outputs:
        raise ProgramError(f"an update of rows has one shape of tables, beside scalars, and no results; not {shapes}")
    for node in program.nodes:
        if not OPS[node.op].elementwise:
            raise ProgramError(f"{node.op} is not elementwise, so an update that has it cannot be of rows")
    if any(item.kind == "operand" and item.spec.shape for item in program.inputs):
        raise ProgramError("an update of rows takes no array but tables and rows")
    if any(not program.specs[target].shape for target, _ in program.assigns):
        raise ProgramError("an update of rows assigns tables, and no scalar")
    return shape


def _check_inputs(program: Program, inputs: Sequence[Any], rows: Shape) -> None:
    """Checks dtypes, shapes and contiguity of the inputs, since kernels see addresses only."""
    for index, (item, array) in enumerate(zip(program.inputs, inputs, strict=True)):
        spec = replace(item.spec, shape=rows) if item.kind == "value" and item.spec.shape else item.spec
        if spec_of(array) != spec or not (array.flags.c_contiguous or item.kind != "variable"):
            raise ProgramError(
                f"input {index} of an update of rows is {spec}, contiguous, and {spec_of(array)} is given"
            )


def _is_fused(steps: Sequence[Step], shape: Shape) -> bool:
    """Returns True if the last step is a kernel, and all earlier ones compute scalars."""
    *before, last = steps
    return last.shape == shape and all(not spec.shape for step in before for spec in step.program.specs)


def _compute(
    kernels: Kernels, kernel: Kernel, steps: Sequence[Step], inputs: Sequence[Any], groups: Groups, shape: Shape
) -> None:
    values = dict(enumerate(inputs))
    *before, last = steps
    for step in before:
        _, results = interpreter.run(step.program, [values[number] for number in step.args], kernels.device.xp)
        values.update(zip(step.results, results, strict=True))
    arrays = [np.ascontiguousarray(values[last.args[p.value]]) for p in kernel.parameters]
    sums = [np.empty((len(groups.ids) // RUN + 1, *shape[1:]), p.dtype) for p in kernel.parameters if p.role == "part"]
    sizes = prod(shape[1:]), prod(shape), len(groups.order)
    ids, starts, *tables = (address_of(array) for array in (groups.ids, groups.starts, groups.order, *arrays))
    calls = [
        (min(RUN, len(groups.ids) - at), *sizes, ids + 8 * at, starts + 8 * at, *tables, *map(address_of, buffers))
        for at, *buffers in zip(range(0, len(groups.ids), RUN), *sums, strict=False)
    ]
    kernels.crew.run(kernel.function, calls)


def _interpret(kernels: Kernels, program: Program, inputs: Sequence[Any], groups: Groups, shape: Shape) -> None:
    """Gathers the rows, runs the program on them, and scatters the results."""
    xp = kernels.device.xp
    ids = xp.asarray(groups.ids)
    small = _resized(program, shape, (len(groups.ids), *shape[1:]))
    taken = [
        array if not item.spec.shape else groups.sum(array, xp) if item.kind == "value" else array[ids]
        for item, array in zip(program.inputs, inputs, strict=True)
    ]
    assigned, _ = interpreter.run(small, taken, xp)
    for target, rows in assigned.items():
        inputs[target][ids] = rows


def _resized(program: Program, shape: Shape, new: Shape) -> Program:
    """Returns an elementwise program for tables of another shape."""

    def resize(spec: TensorSpec) -> TensorSpec:
        return replace(spec, shape=new) if spec.shape == shape else spec

    inputs = tuple(Input(item.kind, resize(item.spec)) for item in program.inputs)
    nodes = tuple(
        Node(node.op, node.args, tuple((k, new if k == "shape" and v == shape else v) for k, v in node.attrs))
        for node in program.nodes
    )
    return Program(inputs, nodes, program.assigns, program.outputs)
