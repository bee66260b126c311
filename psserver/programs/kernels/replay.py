"""Makes up the updates that rows of tables have missed: the same program, with a gradient of zeros, row by row.

Elementwise programs do not mix rows. So a row that is updated later, by the numbers that were each update's own, has
the same bits as if it had been updated with all others. Where these need not be the same, and the program has a closed
form, many updates are made as one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from psserver.programs import interpreter
from psserver.programs.kernels import closed_forms
from psserver.programs.kernels.closed_forms import closed_form, recurring
from psserver.programs.kernels.fusion import Step
from psserver.programs.kernels.kernels import Kernels, RowKernel
from psserver.programs.kernels.row_codegen import bits
from psserver.programs.kernels.row_steps import split_rows
from psserver.programs.kernels.rows import resized, rooms_for
from pswire.model.program import Program
from pswire.model.row_updates import row_shape
from pswire.model.rows import Int64s
from pswire.model.tensor import DTYPES, Array, address_of

TURN = 1 << 9
"""Rows that one thread takes at a time: some have missed one update, others thousands."""

GATHERED = 1 << 14
"""Rows that are copied at a time where no kernel runs."""

MANY = 3
"""Fewest updates that are made as one: fewer cost less one by one."""

Run = Callable[[Any, Sequence[Sequence[int]]], object]
"""Runs calls of a kernel."""


class Replay:
    """The missed updates of one program. May be used by any thread.

    Args:
        kernels: the kernels of the tables' device.
        program: as for `RowUpdate`; it reads no table that it does not assign.
        closed: True if updates may be made up by a closed form, if the program has one.

    Attributes:
        tables: the program's inputs that are tables, in order.
        closed: the argument.
        xp: the array namespace of the tables' device.
    """

    def __init__(self, kernels: Kernels, program: Program, closed: bool = False) -> None:
        self._kernels, self.closed = kernels, closed
        self.xp = kernels.device.xp
        steps = kernels.row_steps(program)
        shape, step = steps.shape, steps.last
        inputs = list(enumerate(step.program.inputs))
        own = [n for n, item in inputs if item.kind == "variable" and item.spec.shape]
        own.sort(key=lambda n: step.args[n])
        self.tables = tuple(step.args[n] for n in own)
        self._each = _Updates(kernels, step, shape, own)
        rows = [n for n, item in inputs if item.kind == "value" and item.spec.shape]
        self._form = closed_form(step.program, rows, own) if closed else None
        if self._form:
            self._many = _Updates(kernels, split_rows(self._form.program)[-1], shape, range(len(own)), once=True)

    def run(self, tables: Sequence[Any], scalars: Sequence[Array], ids: Int64s, first: Int64s, count: int) -> None:
        """Updates rows, in place, as often as they have missed it.

        Args:
            tables: the tables, contiguous, in the order of `tables`.
            scalars: for each scalar that `RowUpdate.scalars` has its value in each update, (kept,) with kept >= count.
            ids: int64[n], the rows, each once; on the host.
            first: int64[n], the first update that each row has missed.
            count: the number after the last one.
        """
        self._make_up(tables, scalars, ids, first, count, self._kernels.crew.run)

    def rows(
        self, tables: Sequence[Any], scalars: Sequence[Array], ids: Int64s, first: Int64s, count: int
    ) -> list[Any]:
        """Returns rows of all tables as they are with the updates that they have missed; the tables stay.

        Takes arguments as `run`. May run beside it, in another thread.
        """
        with self._kernels.device.scope():
            taken = [self.xp.take(table, self.xp.asarray(ids), axis=0) for table in tables]
            self._make_up(taken, scalars, np.arange(len(ids)), first, count, _run_here)
        return taken

    def _make_up(
        self, tables: Sequence[Any], scalars: Sequence[Array], ids: Int64s, first: Int64s, count: int, run: Run
    ) -> None:
        far = np.flatnonzero(first <= count - MANY) if self._form else ids[:0]
        if self._form and far.size:
            function = self._kernels.compiler.function(recurring, 1, ("float64",) * 3, (closed_forms,))
            numbers, known = self._form.numbers_of(scalars, first[far], count, function)
            far = far[known]
            self._many.make(tables, [each[known] for each in numbers], ids[far], np.arange(far.size), far.size, run)
            left = np.ones(len(ids), bool)
            left[far] = False
            ids, first = ids[left], first[left]
        self._each.make(tables, scalars, ids, first, count, run)


class _Updates:
    """Updates by one program, of rows that need them.

    Args:
        kernels: the kernels of the tables' device.
        step: the program.
        shape: shape of its tables.
        own: its inputs that are tables, in the order in which these are given.
        once: True if each row has one update, by numbers of its own; else it has all from `first` to `count`.
    """

    def __init__(
        self, kernels: Kernels, step: Step, shape: tuple[int, ...], own: Sequence[int], once: bool = False
    ) -> None:
        self._kernels, self._step, self._shape, self._once = kernels, step, shape, once
        self._places = {n: place for place, n in enumerate(own)}
        scalars = (n for n, item in enumerate(step.program.inputs) if not item.spec.shape)
        self._scalars = {n: place for place, n in enumerate(scalars)}

    def make(
        self, tables: Sequence[Any], scalars: Sequence[Array], ids: Int64s, first: Int64s, count: int, run: Run
    ) -> None:
        """Updates rows, in place: see `Replay.run`."""
        kernel = self._kernel()
        if kernel is not None:
            self._compute(kernel, tables, scalars, ids, first, count, run)
            return
        interpret = self._interpret_once if self._once else self._interpret
        for at in range(0, len(ids), GATHERED):
            interpret(tables, scalars, ids[at : at + GATHERED], first[at : at + GATHERED], count)

    def _kernel(self) -> RowKernel | None:
        if self._step.shape is None or self._kernels.device.gpu is not None:
            return None
        return self._kernels.once(self._step) if self._once else self._kernels.replay(self._step)

    def _compute(
        self,
        kernel: RowKernel,
        tables: Sequence[Any],
        scalars: Sequence[Array],
        ids: Int64s,
        first: Int64s,
        count: int,
        run: Run,
    ) -> None:
        form = kernel.form
        taken = [p for p in kernel.parameters if p.role != "part"]
        arrays = [scalars[self._scalars[p.value]] if p.single else tables[self._places[p.value]] for p in taken]
        zeros = [tables[self._places[p.value]] for p in bits(form)]
        numbers, missed = np.ascontiguousarray(ids, np.int64), np.ascontiguousarray(first, np.int64)
        kept = len(scalars[0]) if scalars else 0
        width, starts = prod(self._shape[1:]), range(0, len(numbers), TURN)
        sizes = width, len(tables[0]) * width, count, kept
        rooms = rooms_for(kernel, self._shape, len(starts), replayed=True)
        one, other = address_of(numbers), address_of(missed)
        given, zero = (list(map(address_of, each)) for each in (arrays, zeros))
        calls = [
            (min(TURN, len(ids) - at), *sizes, one + 8 * at, other + 8 * at, *given, *map(address_of, own), *zero)
            for at, *own in zip(starts, *rooms, strict=True)
        ]
        run(kernel.function, calls)

    def _interpret(
        self, tables: Sequence[Any], scalars: Sequence[Array], ids: Int64s, first: Int64s, count: int
    ) -> None:
        """Updates rows by the interpreter, in copies: those that have missed most come first, and all at the end."""
        xp, program = self._kernels.device.xp, self._step.program
        order = np.argsort(first, kind="stable")
        places, missed = xp.asarray(ids[order]), first[order]
        rows = [xp.take(table, places, axis=0) for table in tables]
        small, size = program, -1
        for k in range(int(missed[0]) if len(missed) else count, count):
            now = int(np.searchsorted(missed, k, side="right"))
            if now != size:
                small, size = resized(program, self._shape, (now, *self._shape[1:])), now
            inputs = [self._input(n, k, now, rows, scalars, small, xp) for n in range(len(program.inputs))]
            assigned, _ = interpreter.run(small, inputs, xp)
            for target, new in assigned.items():
                rows[self._places[target]][:now] = new
        for table, made in zip(tables, rows, strict=True):
            table[places] = made

    def _input(
        self, n: int, k: int, now: int, rows: Sequence[Any], scalars: Sequence[Array], program: Program, xp: Any
    ) -> Any:
        if n in self._places:
            return rows[self._places[n]][:now]
        if n in self._scalars:
            return xp.asarray(scalars[self._scalars[n]][k])
        spec = program.inputs[n].spec
        return xp.zeros(spec.shape, dtype=DTYPES[spec.dtype])

    def _interpret_once(
        self, tables: Sequence[Any], scalars: Sequence[Array], ids: Int64s, first: Int64s, count: int
    ) -> None:
        """Updates rows by the interpreter, in copies: numbers are columns beside the rows."""
        xp, shape = self._kernels.device.xp, (len(ids), *self._shape[1:])
        small, column = resized(self._step.program, self._shape, shape), row_shape(shape)
        inputs = tuple(
            item if item.spec.shape else replace(item, spec=replace(item.spec, shape=column)) for item in small.inputs
        )
        places = xp.asarray(ids)
        given = [
            xp.take(tables[self._places[n]], places, axis=0)
            if n in self._places
            else xp.asarray(scalars[self._scalars[n]][first].reshape(column))
            for n in range(len(inputs))
        ]
        assigned, _ = interpreter.run(replace(small, inputs=inputs), given, xp)
        for target, rows in assigned.items():
            tables[self._places[target]][places] = rows


def _run_here(function: Any, calls: Sequence[Sequence[int]]) -> None:
    for call in calls:
        function(*call)
