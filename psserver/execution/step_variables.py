"""The variables of one step of a round: as they were before it, and as it assigns them.

Rows of tables may have missed updates. These are made up here, before something else reads or assigns them, in place
where nobody sees it, and else in copies that come to nothing if the round does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any

import numpy as np

from psserver.execution.row_calls import RowsCall
from psserver.programs.kernels.kernels import Kernels
from psserver.programs.kernels.replay import Replay
from psserver.state.held import Held
from psserver.state.key_tables import TableTensor
from psserver.state.missed import MissedUpdates
from psserver.state.variables import take_rows
from pswire.errors import ProgramError
from pswire.model.rows import Int64s
from pswire.model.tensor import Array, TensorSpec


class StepVariables:
    """The variables of one step. Used by one thread.

    Args:
        before: the variables that it reads, by number.
        alone: variables whose arrays nobody else holds.
        missed: what rows of these variables have missed.
        held: who holds variables that nobody else holds, and has rows set aside before they are written.
        tables: those that are tensors of dynamic tables.

    Attributes:
        tables: these.
        assigned: the values that it has assigned.
        changed: what rows of variables have missed, where the step has changed that; None for nothing.
    """

    def __init__(
        self,
        before: Mapping[int, Any],
        alone: Set[int],
        missed: Mapping[int, MissedUpdates],
        held: Mapping[int, Held],
        tables: Mapping[int, TableTensor] = MappingProxyType({}),
    ) -> None:
        self.before = before
        self.alone = alone
        self.tables = tables
        self.assigned: dict[int, Array] = {}
        self.changed: dict[int, MissedUpdates | None] = {}
        self._missed = missed
        self._held = held
        self._copied: Set[int] = frozenset()

    def value(self, id: int) -> Any:
        """Returns a variable's array as of now."""
        if id in self.tables:
            return self.tables[id].array
        assigned = self.assigned.get(id)
        return self.before[id] if assigned is None else assigned

    def values(self, ids: Sequence[int]) -> list[Array]:
        """Returns arrays of variables as of now."""
        values = {**self.before, **self.assigned} if self.assigned else self.before
        return list(map(values.__getitem__, ids))

    def check(self, expected: Iterable[tuple[int, np.dtype[Any], tuple[int, ...]]]) -> None:
        """Raises `ProgramError` unless variables are there, each of its dtype and shape."""
        for id, dtype, shape in expected:
            value = self.before.get(id)
            if value is None:
                value = self.tables.get(id)
            # To compare dtypes takes longer than all else here, and mostly they are the same object.
            if value is None or value.shape != shape or (value.dtype is not dtype and value.dtype != dtype):
                found = "none" if value is None else str(TensorSpec(value.dtype.name, value.shape))
                raise ProgramError(
                    f"variable {id} must have a value of {TensorSpec(dtype.name, shape)} here, but has {found}"
                )

    @property
    def own_rows(self) -> Set[int]:
        """Variables of which rows may be written in place."""
        own = self.alone | self._held.keys() if self._held else self.alone
        return own | self.tables.keys() if self.tables else own

    @property
    def any_missed(self) -> bool:
        """True if rows of some variable may have missed updates."""
        return bool(self._missed or self.changed)

    def missing(self, id: int) -> MissedUpdates | None:
        """Returns what rows of a variable have missed, as of now."""
        return self.changed[id] if id in self.changed else self._missed.get(id)

    # ---- Rows ----

    def rows(self, id: int, ids: Int64s, after: bool, xp: Any) -> Any:
        """Returns rows of a variable, as a new array on its device.

        Args:
            id: the variable.
            ids: the rows, in any order, also several times; of a dynamic table keys.
            after: True for after the step, False for before it.
            xp: the device's array namespace.
        """
        if id in self.tables:
            return self.tables[id].rows(ids)
        missed, value = (self.missing(id), self.value) if after else (self._missed.get(id), self.before.__getitem__)
        if missed is None:
            return take_rows(value(id), ids, xp)
        tables = list(map(value, missed.tables))
        if not (after and self.assigned.keys() >= set(missed.tables)):
            return missed.rows(tables, missed.tables.index(id), ids)
        # They are likely to be updated by the next round, and would be made up again.
        places = ids if bool((ids[1:] > ids[:-1]).all()) else np.unique(ids)  # mostly they come so
        self.set_aside(missed.tables, places)
        missed.make_up(tables, places)
        return take_rows(value(id), ids, xp)

    def set_aside(self, ids: Collection[int], rows: Int64s) -> None:
        """Has rows, which are about to be written in place, set aside by those who hold the variables."""
        for id in self._held.keys() & set(ids):
            for held in self._held[id]:
                held.set_aside(self.value(id), rows)

    # ---- Updates that rows have missed ----

    def settle(self, ids: Collection[int] | None = None) -> None:
        """Makes all rows of variables have all updates, since something else is about to read or assign them.

        Without `ids` of all variables.
        """
        for id in self._missed if ids is None else ids:
            missed = self.missing(id)
            if missed is not None:
                if missed.behind:
                    missed, tables = self._owned(missed, self.alone)
                    missed.make_up_all(tables)
                self.changed |= dict.fromkeys(missed.tables)

    def make_up(self, call: RowsCall, kernels: Kernels) -> MissedUpdates | None:
        """Makes the rows of a call have all updates before it; returns what it has to note itself in."""
        same = self.missing(call.tables[0]) if call.tables else None
        if call.tables and (same is None or not same.is_of(call.program, call.tables, call.closed)):
            self.settle(call.tables)
            replay, size = Replay(kernels, call.program, call.closed), len(self.value(call.tables[0]))
            same = MissedUpdates(replay, call.program, call.tables, size)
            self.changed |= dict.fromkeys(call.tables, same)
        touched = (self.missing(ref.index) for ref in call.refs if ref.kind == "variable")
        for missed in dict.fromkeys(found for found in touched if found is not None):
            now, tables = self._owned(missed, self.own_rows)
            turns = [call.ids]
            if missed is same:
                same = now
                turns.append(now.make_room())
            for ids in turns:
                self.set_aside(now.tables, ids)
                now.make_up(tables, ids)
        return same

    def _owned(self, missed: MissedUpdates, own: Set[int]) -> tuple[MissedUpdates, list[Any]]:
        """Returns what rows have missed, and the tables, for a change in place; copies them where that must not be.

        Where updates are made up in place of others' values, no value changes, and it stays if the round fails. But
        updates of this round are made up in copies. `own` are the variables that may be changed in place.
        """
        tables = frozenset(missed.tables)
        in_place = tables <= own and not tables & self.assigned.keys()
        if not in_place and not tables <= self._copied:
            missed = missed.copy()
            self.changed |= dict.fromkeys(missed.tables, missed)
            self.assigned |= {id: self.value(id).copy() for id in missed.tables}
            self._copied |= tables
        return missed, list(map(self.value, missed.tables))
