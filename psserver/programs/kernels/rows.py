"""Applies a program to selected rows of a variable, and of variables colocated with it.

The program is the one that would update the whole variable with a gradient of its shape. Of that gradient only some
rows are given; rows for the same place are summed first, in order of arrival.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from psserver.programs import interpreter
from psserver.programs.kernels.functions import DEPTH
from psserver.programs.kernels.fusion import Shape
from psserver.programs.kernels.kernels import Kernels, RowKernel
from psserver.programs.kernels.row_groups import RowGroups
from psserver.programs.kernels.row_steps import RowSteps
from pswire.errors import ProgramError
from pswire.model import row_updates
from pswire.model.program import Input, Node, Program
from pswire.model.tensor import DTYPES, Array, TensorSpec, address_of, spec_of

RUN = 1024
"""Rows of a table that one thread takes at a time."""


class RowUpdate:
    """An update of rows that is ready to run: the memory that it takes is there, if a kernel runs it.

    Args:
        kernels: the kernels of the tables' device.
        program: assigns variables of one shape (size, ...), or of one number for each row, by ops that are elementwise
            or along each row, on them, on scalars, and on values of that shape; has no outputs.
        ids: int64[n], the place of each row; on the host.
        size: rows of the tables; None for as many as the program has.

    Attributes:
        may_fail: True if it may fail for want of memory when it runs.
        ids: int64[k], the places, in increasing order, each once.
        scalars: once it has run, the scalars that the last of its steps takes, in order.

    Raises:
        ProgramError: the program is of another kind.
        InvalidRequest: an id is no row of the table.
    """

    def __init__(self, kernels: Kernels, program: Program, ids: Array, size: int | None = None) -> None:
        self._kernels, self._program = kernels, program
        self._steps = kernels.row_steps(program)
        shape = self._steps.shape
        self._shape = shape if size is None else (size, *shape[1:])
        self._groups = RowGroups.of(ids, self._shape[0], kernels.compiler.groups())
        self.ids = self._groups.ids
        self.scalars: list[Any] = []
        self._kernel = _kernel(kernels, self._steps)
        self.may_fail = self._kernel is None
        self._rooms = rooms_for(self._kernel, self._shape, -(-len(self.ids) // RUN)) if self._kernel else []

    def run(self, inputs: Sequence[Any]) -> None:
        """Runs the program, in place.

        Args:
            inputs: for each of the program's inputs a table, which must be contiguous, a scalar, or, for a value of the
                tables' shape, its rows (n, ...).

        Raises:
            ProgramError: an input is of another kind. Nothing has changed then.
        """
        _check_inputs(self._program, inputs, (len(self._groups.order), *self._shape[1:]), self._shape[0])
        values = dict(enumerate(inputs))
        for before in self._steps.numbers:
            _, results = interpreter.run(
                before.program, [values[number] for number in before.args], self._kernels.device.xp
            )
            values.update(zip(before.results, results, strict=True))
        self.scalars = [values[number] for number in self._steps.scalars]
        if self._kernel is None:
            _interpret(self._kernels, self._program, inputs, self._groups)
        else:
            self._compute(self._kernel, values)

    def _compute(self, kernel: RowKernel, values: Mapping[int, Any]) -> None:
        kernels, groups, shape, args = self._kernels, self._groups, self._shape, self._steps.last.args
        arrays = [np.ascontiguousarray(values[args[p.value]]) for p in kernel.parameters]
        sizes = prod(shape[1:]), prod(shape), len(groups.order)
        ids, starts, *tables = (address_of(array) for array in (groups.ids, groups.starts, groups.order, *arrays))
        calls = [
            (min(RUN, len(groups.ids) - at), *sizes, ids + 8 * at, starts + 8 * at, *tables, *map(address_of, own))
            for at, *own in zip(range(0, len(groups.ids), RUN), *self._rooms, strict=True)
        ]
        kernels.crew.run(kernel.function, calls)


def apply_rows(kernels: Kernels, program: Program, inputs: Sequence[Any], ids: Array) -> None:
    """Runs a program on rows of the variables that it assigns, in place: see `RowUpdate`."""
    RowUpdate(kernels, program, ids).run(inputs)


def kernel_of(kernels: Kernels, program: Program) -> RowKernel | None:
    """Returns the kernel that runs a program on rows; None if the interpreter does, maybe until it is compiled."""
    return _kernel(kernels, kernels.row_steps(program))


def _kernel(kernels: Kernels, steps: RowSteps) -> RowKernel | None:
    return kernels.rows(steps.last) if kernels.device.gpu is None and steps.last.shape is not None else None


def rooms_for(kernel: RowKernel, shape: Shape, calls: int, replayed: bool = False) -> list[Array]:
    """Returns the memory that calls of a kernel take for a row: for each of its rooms an array with a row for each."""
    size = prod(shape[1:]) + DEPTH
    rooms = kernel.form.replay_rooms if replayed else kernel.form.rooms
    return [np.empty((calls, size), DTYPES[p.dtype]) for p in rooms]


def is_settled(kernels: Kernels, program: Program) -> bool:
    """Returns True if a program that can run on rows runs in the same way from now on."""
    fused = kernels.device.gpu is None and kernels.row_steps(program).last.shape is not None
    return not fused or kernel_of(kernels, program) is not None


def divided(program: Program, value: int) -> Program:
    """Returns a program that divides one of its inputs, a sum of rows, by one more, a number, before all else."""
    spec = program.inputs[value].spec
    count = len(program.inputs)

    def moved(number: int) -> int:
        return count + 1 if number == value else number if number < count else number + 2

    nodes = (Node(node.op, tuple(map(moved, node.args)), node.attrs) for node in program.nodes)
    return Program(
        (*program.inputs, Input("operand", TensorSpec(spec.dtype, ()))),
        (Node("divide", (value, count)), *nodes),
        tuple((target, moved(number)) for target, number in program.assigns),
        tuple(map(moved, program.outputs)),
    )


def _check_inputs(program: Program, inputs: Sequence[Any], rows: Shape, size: int) -> None:
    """Checks dtypes, shapes and contiguity of the inputs, since kernels see addresses only."""
    for index, (item, array) in enumerate(zip(program.inputs, inputs, strict=True)):
        spec = item.spec
        table = (size, *spec.shape[1:]) if spec.shape else ()
        shape = rows if item.kind == "value" and table else table
        contiguous = array.flags.c_contiguous or item.kind != "variable"
        if array.dtype != DTYPES[spec.dtype] or array.shape != shape or not contiguous:
            wanted = TensorSpec(spec.dtype, shape)
            raise ProgramError(
                f"input {index} of an update of rows must be a contiguous {wanted}, but got {spec_of(array)}"
            )


def _interpret(kernels: Kernels, program: Program, inputs: Sequence[Any], groups: RowGroups) -> None:
    """Gathers the rows, runs the program on them, and scatters the results."""
    xp, shape = kernels.device.xp, row_updates.table_shape(program)
    ids = xp.asarray(groups.ids)
    small = resized(program, shape, (len(groups.ids), *shape[1:]))
    taken = [
        array if not item.spec.shape else groups.sum(array, xp) if item.kind == "value" else array[ids]
        for item, array in zip(program.inputs, inputs, strict=True)
    ]
    assigned, _ = interpreter.run(small, taken, xp)
    for target, rows in assigned.items():
        inputs[target][ids] = rows


def resized(program: Program, shape: Shape, new: Shape) -> Program:
    """Returns a program that can run on rows for tables of another shape; what is known of its values stays known."""
    shapes = {row_updates.row_shape(shape): row_updates.row_shape(new), shape: new}

    def resize(spec: TensorSpec) -> TensorSpec:
        return TensorSpec(spec.dtype, shapes[spec.shape]) if spec.shape in shapes else spec

    inputs = tuple(Input(item.kind, resize(item.spec)) for item in program.inputs)
    nodes = tuple(
        Node(
            node.op,
            node.args,
            tuple((k, shapes.get(v, v) if k == "shape" and isinstance(v, tuple) else v) for k, v in node.attrs),
        )
        for node in program.nodes
    )
    made = Program(inputs, nodes, program.assigns, program.outputs)
    # To infer them anew for each number of rows would take longer than to run it.
    vars(made)["specs"] = tuple(map(resize, program.specs))
    return made
