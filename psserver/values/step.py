"""The values of one step of a round: as they were before it, and as it assigns them.

Deferred updates of rows are applied here, before something else reads or assigns them: in place where nobody sees it,
and else in copies that come to nothing if the round does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from typing import Any

import numpy as np

from psserver.plans.outline import RowsUse
from psserver.programs.kernels.kernels import Kernels
from psserver.programs.kernels.replay import Replay
from psserver.values.deferred import DeferredUpdates
from psserver.values.dense import Dense
from psserver.values.lazy import LazyGroup
from psserver.values.value import Value
from pswire.errors import ProgramError
from pswire.model.plan import Ref
from pswire.model.rows import Int64s
from pswire.model.tensor import TensorSpec


def deferred_by(use: RowsUse, kernels: Kernels, size: int, most: int = 0) -> DeferredUpdates:
    """Returns what notes updates of rows that are deferred for all others, of tables of `size` rows; none yet."""
    return DeferredUpdates(Replay(kernels, use.program, use.closed), use.program, use.tables, size, most)


class StepVariables:
    """The variables of one step. Used by one thread.

    Args:
        before: the variables that it reads, by number; None for those without a value.
        exclusive: variables that may be written in place.
        own_rows: variables of which rows may be written in place.
        is_lazy: False if updates of none of them are deferred.

    Attributes:
        before, exclusive, own_rows, is_lazy: the arguments.
        assigned: the values that it has assigned.
    """

    def __init__(
        self,
        before: Mapping[int, Any],
        exclusive: Set[int] = frozenset(),
        own_rows: Set[int] = frozenset(),
        is_lazy: bool = True,
    ) -> None:
        self.before = before
        self.exclusive = exclusive
        self.own_rows = own_rows
        self.is_lazy = is_lazy
        self.assigned: dict[int, Value] = {}
        self._flushed = set[int]()  # assigned with the values that they had before
        self._copied = set[int]()

    def now(self, id: int) -> Any:
        """Returns a variable as of now."""
        found = self.assigned.get(id)
        return self.before[id] if found is None else found

    def value(self, id: int) -> Any:
        """Returns a variable's array as of now."""
        return self.now(id).array

    def values(self, ids: Sequence[int]) -> list[Any]:
        """Returns several variables as of now."""
        values = {**self.before, **self.assigned} if self.assigned else self.before
        return list(map(values.__getitem__, ids))

    def check(self, expected: Iterable[tuple[int, np.dtype[Any], tuple[int, ...]]]) -> None:
        """Raises `ProgramError` unless variables are there, each of its dtype and shape."""
        for id, dtype, shape in expected:
            value = self.before.get(id)
            # To compare dtypes takes longer than all else here, and mostly they are the same object.
            if value is None or value.shape != shape or (value.dtype is not dtype and value.dtype != dtype):
                found = "none" if value is None else str(TensorSpec(value.dtype.name, value.shape))
                raise ProgramError(
                    f"variable {id} must have a value of {TensorSpec(dtype.name, shape)} here, but has {found}"
                )

    def assign(self, values: Mapping[int, Value]) -> None:
        """Takes new values."""
        self.assigned |= values
        if self._flushed:
            self._flushed -= values.keys()

    # ---- Rows ----

    def rows(self, id: int, ids: Int64s, after: bool, xp: Any) -> Any:
        """Returns rows of a variable, as a new array on its device.

        Args:
            id: the variable.
            ids: the rows, in any order, also several times; of a dynamic table keys.
            after: True for after the step, False for before it.
            xp: the device's array namespace.
        """
        value: Value = self.now(id) if after else self.before[id]
        if after and id in self.assigned:  # they are likely to be updated by the next round
            value.apply(ids if bool((ids[1:] > ids[:-1]).all()) else np.unique(ids))  # mostly they come in order
        return value.rows(ids, xp)

    def written(self, id: int, array: Any) -> Value:
        """Returns the new value of a variable, of an array that may be that of before."""
        now: Value = self.now(id)
        return now if now.array is array else now.replaced(array)

    def set_aside(self, ids: Collection[int], rows: Int64s) -> None:
        """Has rows, which are about to be written in place, set aside for frozen views."""
        for id in self.own_rows & set(ids):
            self.now(id).set_aside(rows)

    # ---- Deferred updates ----

    def flush(self, ids: Collection[int]) -> None:
        """Applies the deferred updates of variables, since something else is about to read or assign them."""
        for id in ids:
            group: LazyGroup | None = self.now(id).group
            if group is not None:
                if group.updates.behind:
                    group = self._own(group, self.exclusive)
                    group.updates.apply_all(group.apply)
                self._keep(dict(zip(group.updates.tables, group.parts, strict=True)))

    def defer(self, use: RowsUse, refs: Iterable[Ref], ids: Int64s, kernels: Kernels) -> DeferredUpdates | None:
        """Applies the deferred updates of rows that are about to be updated.

        Args:
            use: the update.
            refs: what its program is given.
            ids: the rows, each once.
            kernels: run it.

        Returns:
            What notes the update, which is deferred for all other rows; None if these are not to have it.
        """
        noted: LazyGroup | None = None
        if use.tables:
            noted = self.now(use.tables[0]).group
            if noted is None or not noted.updates.is_of(use.program, use.tables, use.closed):
                self.flush(use.tables)
                parts: list[Dense] = list(map(self.now, use.tables))
                noted = LazyGroup(deferred_by(use, kernels, parts[0].shape[0]), parts)
                self._keep(noted.values())
        groups: list[LazyGroup | None] = [self.now(ref.index).group for ref in refs if ref.kind == "variable"]
        for group in dict.fromkeys(filter(None, groups)):
            now = self._own(group, self.own_rows)
            turns = [ids]
            if group is noted:
                noted = now
                turns.append(now.updates.make_room())
            for rows in turns:
                now.apply(rows)
        return None if noted is None else noted.updates

    def _keep(self, values: Mapping[int, Value]) -> None:
        """Takes values that are those of before, in another form."""
        self._flushed |= values.keys() - self.assigned.keys()
        self.assigned |= values

    def _own(self, group: LazyGroup, own: Set[int]) -> LazyGroup:
        """Returns a group for a change in place; copies it where that must not be.

        Where updates are applied in place of others' values, no value changes, and it stays if the round fails. But
        updates of this round are applied in copies. `own` are the variables that may be changed in place.
        """
        ids = frozenset(group.updates.tables)
        if (ids <= own and self._flushed >= ids & self.assigned.keys()) or ids <= self._copied:
            return group
        group = group.copied()
        self.assign(group.values())
        self._copied |= ids
        return group
