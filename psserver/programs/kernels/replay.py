"""Makes up the updates that rows of tables have missed: the same program, with a gradient of zeros, row by row.

Elementwise programs do not mix rows. So a row that is updated later, by the numbers that were each update's own, has
the same bits as if it had been updated with all others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

from psserver.programs import interpreter
from psserver.programs.kernels.kernels import Kernels, RowKernel
from psserver.programs.kernels.row_codegen import bits
from psserver.programs.kernels.rows import resized, rooms_for, row_step, table_shape
from pswire.model.program import Program
from pswire.model.rows import Int64s
from pswire.model.tensor import Array, address_of

TURN = 1 << 9
"""Rows that one thread takes at a time: some have missed one update, others thousands."""

GATHERED = 1 << 14
"""Rows that are copied at a time where no kernel runs."""


class Replay:
    """The missed updates of one program. May be used by any thread.

    Args:
        kernels: the kernels of the tables' device.
        program: as for `RowUpdate`; it reads no table that it does not assign.

    Attributes:
        tables: the program's inputs that are tables, in order.
        xp: the array namespace of the tables' device.
    """

    def __init__(self, kernels: Kernels, program: Program) -> None:
        self._kernels = kernels
        self.xp = kernels.device.xp
        self._step = step = row_step(kernels, program)
        self._shape = table_shape(program)
        inputs = list(enumerate(step.program.inputs))
        own = [n for n, item in inputs if item.kind == "variable" and item.spec.shape]
        self.tables = tuple(sorted(step.args[n] for n in own))
        self._places = {n: self.tables.index(step.args[n]) for n in own}
        self._scalars = {n: place for place, n in enumerate(n for n, item in inputs if not item.spec.shape)}

    def run(self, tables: Sequence[Any], scalars: Sequence[Array], ids: Int64s, first: Int64s, count: int) -> None:
        """Updates rows, in place, as often as they have missed it.

        Args:
            tables: the tables, contiguous, in the order of `tables`.
            scalars: for each scalar that `RowUpdate.scalars` has its value in each update, (kept,) with kept >= count.
            ids: int64[n], the rows, each once; on the host.
            first: int64[n], the first update that each row has missed.
            count: the number after the last one.
        """
        kernel = self._kernel()
        if kernel is None:
            for at in range(0, len(ids), GATHERED):
                self._interpret(tables, scalars, ids[at : at + GATHERED], first[at : at + GATHERED], count)
        else:
            self._compute(kernel, tables, scalars, ids, first, count, self._kernels.crew.run)

    def rows(
        self, tables: Sequence[Any], scalars: Sequence[Array], ids: Int64s, first: Int64s, count: int
    ) -> list[Any]:
        """Returns rows of all tables as they are with the updates that they have missed; the tables stay.

        Takes arguments as `run`. May run beside it, in another thread.
        """
        with self._kernels.device.scope():
            taken = [self.xp.take(table, self.xp.asarray(ids), axis=0) for table in tables]
            places, kernel = np.arange(len(ids)), self._kernel()
            if kernel is None:
                for at in range(0, len(ids), GATHERED):
                    self._interpret(taken, scalars, places[at : at + GATHERED], first[at : at + GATHERED], count)
            else:
                self._compute(kernel, taken, scalars, places, first, count, _run_here)
        return taken

    def _kernel(self) -> RowKernel | None:
        fused = self._step.shape is not None and self._kernels.device.gpu is None
        return self._kernels.replay(self._step) if fused else None

    def _compute(
        self,
        kernel: RowKernel,
        tables: Sequence[Any],
        scalars: Sequence[Array],
        ids: Int64s,
        first: Int64s,
        count: int,
        run: Callable[[Any, Sequence[Sequence[int]]], object],
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
        xp, program = self.xp, self._step.program
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
        return xp.zeros(spec.shape, spec.dtype)


def _run_here(function: Any, calls: Sequence[Sequence[int]]) -> None:
    for call in calls:
        function(*call)
