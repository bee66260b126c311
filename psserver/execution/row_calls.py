"""Calls of some rows: one that updates them in place, and one that computes numbers of them, such as their norm.

If a later part of the round may fail, the old rows are kept until then, and put back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any

import numpy as np

from psserver.execution.contributions import Contributions
from psserver.plans.outline import Application, RowsUse
from psserver.programs import interpreter
from psserver.programs.kernels.kernels import Kernels
from psserver.programs.kernels.rows import RowUpdate, resized
from psserver.values.deferred import DeferredUpdates
from pswire.model.plan import Ref
from pswire.model.row_updates import table_shape
from pswire.model.rows import Int64s, Rows, row_specs
from pswire.model.tensor import DTYPES, Array, TensorSpec


class RowsCall:
    """An application that runs on rows, in one round.

    Args:
        number: number of the application, among those of the server.
        application: the application.
        use: the rows that it takes.
        kernels: run the program.
        contributions: have the rows.
        found: the rows by slots, and the number of all slots, where they are of a dynamic table; else None.
        on_trial: True if what it writes may come to nothing when all of the round has run.

    If its use has `tables`, it is given the deferred updates of these, and changes that and them in place.

    Attributes:
        use: the argument.
        numbers: as a range.
        assigned: numbers of the variables that it assigns.
        rows: the rows of all members, one behind another.
        reduction: number of the reduction that they are of.
    """

    width = 1

    def __init__(
        self,
        number: int,
        application: Application,
        use: RowsUse,
        kernels: Kernels,
        contributions: Contributions,
        found: tuple[Rows, int] | None = None,
        on_trial: bool = False,
    ) -> None:
        self.numbers = range(number, number + 1)
        self.assigned: Set[int] = frozenset(application.assigned)
        self.reduction = use.reduction
        size: int | None = None
        if found is not None:
            self.rows, size = found
        else:
            self.rows = behind_another(contributions.rows(use.reduction), contributions.spec(use.reduction))
        self._application = application
        self.use = use
        self._kernels = kernels
        self._total = contributions.total(use.reduction)
        self._update = RowUpdate(kernels, use.program, self.rows.ids, size)
        self._own: Set[int] = frozenset()
        self._new: dict[int, Any] = {}
        self._on_trial, self._keeps_old = on_trial, False
        self._old: list[tuple[Any, Any, Any]] = []
        self._noted: DeferredUpdates | None = None

    @property
    def refs(self) -> Sequence[Ref]:
        """What its program is given."""
        return self._application.apply.args

    @property
    def ids(self) -> Int64s:
        """The rows that it updates, each once."""
        return self._update.ids

    def reserve(self, own: Set[int], keeps_old: bool) -> None:
        """Decides where it writes; takes memory for the variables that it cannot write in place.

        Args:
            own: variables whose arrays nobody else holds.
            keeps_old: True if a later part of the round may fail.
        """
        self._own, self._keeps_old = own | set(self.use.tables), keeps_old or self._on_trial
        new = self.assigned - self._own
        if new:
            xp, variables = self._kernels.device.xp, self._application.variables
            with self._kernels.device.scope():
                self._new = {id: xp.empty(shape, dtype=dtype) for id, dtype, shape in variables if id in new}

    @property
    def may_fail(self) -> bool:
        """True if it may refuse a value, or fail for want of memory; then it has changed nothing."""
        return self._update.may_fail or self.use.program.may_refuse or bool(self.use.tables)

    def run(self, value: Callable[[Ref], Any], deferred: DeferredUpdates | None = None) -> dict[int, Array]:
        """Updates the rows, in place or in a copy.

        Args:
            value: returns a value of the round.
            deferred: notes the update; these rows lack none.

        Returns:
            The variables that it has assigned.
        """
        xp, refs = self._kernels.device.xp, self._application.apply.args
        written: dict[int, Any] = {}
        for id in self._application.assigned:
            array = value(Ref("variable", id))
            new = self._new.pop(id, None)
            if new is not None:
                new[...] = array
            written[id] = array if new is None else new
        inputs = [self._input(ref, value, written) for ref in refs]
        if len(self.use.program.inputs) > len(refs):
            inputs.append(xp.asarray(self._total, dtype=DTYPES[self.use.program.inputs[-1].spec.dtype]))
        if self._keeps_old:
            ids = xp.asarray(self.ids)
            self._old = [(array, ids, array[ids]) for id, array in written.items() if id in self._own]
        self._update.run(inputs)
        if deferred is not None:
            deferred.note(self._update.scalars, self.ids)
            self._noted = deferred
        return written

    def _input(self, ref: Ref, value: Callable[[Ref], Any], written: dict[int, Any]) -> Any:
        if ref == Ref("reduction", self.use.reduction):
            return self._kernels.device.put(self.rows.values)
        if ref.kind == "variable" and ref.index in written:
            return written[ref.index]
        found = value(ref)
        return self._kernels.device.xp.ascontiguousarray(found) if found.ndim else found

    def undo(self) -> None:
        """Puts the old rows back: a later part of the round has failed."""
        noted, self._noted = self._noted, None
        if noted is not None:
            noted.take_back(self.ids)
        old, self._old = self._old, []
        for array, ids, rows in old:
            array[ids] = rows


class RowsMeasurement:
    """An application that computes numbers of the rows of a gradient, in one round.

    Args:
        number: number of the application, among those of the server.
        application: the application.
        contributions: have the rows.

    Attributes:
        numbers: as a range.
    """

    width = 1
    assigned: Set[int] = frozenset()
    may_fail = True
    suspects: Set[int] = frozenset()
    unsure: Set[int] = frozenset()

    def __init__(self, number: int, application: Application, contributions: Contributions) -> None:
        self.numbers = range(number, number + 1)
        self._application = application
        self._contributions = contributions

    def run(self, value: Callable[[Ref], Any], xp: Any) -> tuple[dict[int, Array], list[Any]]:
        """Computes the numbers of the summed rows; all other rows are zero, and add nothing.

        Args:
            value: returns a value of the round.
            xp: the array namespace.

        Returns:
            Nothing assigned, and the numbers.
        """
        program, reduction = self._application.program, Ref("reduction", self._application.needs[0])
        rows = xp.asarray(self._contributions.reduced_rows(reduction.index).values)
        inputs = [rows if ref == reduction else value(ref) for ref in self._application.apply.args]
        assigned, numbers = interpreter.run(resized(program, table_shape(program), rows.shape), inputs, xp)
        return assigned, list(numbers)


def behind_another(found: Sequence[Rows], whole: TensorSpec) -> Rows:
    """Returns rows of an array of this dtype and shape as one, one behind another."""
    if len(found) == 1:
        return found[0]
    if not found:
        return Rows(*(np.empty(spec.shape, DTYPES[spec.dtype]) for spec in row_specs(whole, 0)))
    return Rows(*map(np.concatenate, zip(*found, strict=True)))


def undo(calls: Sequence[object]) -> None:
    """Puts back what calls have written in place, the last one first."""
    for call in reversed(calls):
        if isinstance(call, RowsCall):
            call.undo()
