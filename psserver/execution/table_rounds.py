"""The dynamic tables of one round: keys become slots before its first update, and rows are evicted after the last.

A round of a table begins with the keys of all contributions to it, and is committed, or undone. It is committed once
nothing of the round may fail any more; where several servers have to agree, after their verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from psserver.execution.contributions import Contributions
from psserver.execution.row_calls import RowsCall, behind_another, undo
from psserver.plans.outline import Application, RowsUse
from psserver.plans.prepared import PreparedPlan
from psserver.programs.kernels.kernels import Kernels
from psserver.values.deferred import DeferredUpdates
from psserver.values.keyed import Keyed, StoredTable
from psserver.values.step import deferred_by
from pswire.model.plan import Ref
from pswire.model.rows import Int64s, Rows
from pswire.model.tables import MAX_COUNT
from pswire.model.tensor import Array


class TableRounds:
    """The rounds of the dynamic tables that a plan updates or cuts here. Used by the thread for arrays.

    Args:
        prepared: the plan.
        tensors: the variables, tensors of dynamic tables, that it has to do with.
        contributions: have the keys.
        kernels: of host memory.
        on_trial: True if it may come to nothing when all of it has run: then old rows are kept.
    """

    def __init__(
        self,
        prepared: PreparedPlan,
        tensors: Mapping[int, Keyed],
        contributions: Contributions,
        kernels: Kernels,
        on_trial: bool,
    ) -> None:
        self._on_trial = on_trial
        self._prepared = prepared
        self._tensors = tensors
        self._contributions = contributions
        self._kernels = kernels
        self._begun: list[StoredTable] = []
        self._slots: dict[int, tuple[StoredTable, Int64s]] = {}  # by reduction: of all its keys, in task order
        self._keys: dict[StoredTable, Int64s] = {}
        self._calls: list[RowsCall] = []

    def begin(self, room: int) -> None:
        """Begins the rounds of all tables: makes the rows of keys that are admitted.

        Args:
            room: bytes by which tables may grow; -1 without a limit.

        Raises:
            MemoryLimit: a table would exceed its limit, or the server's. Nothing has changed.
            InvalidRequest: a key is of a bucket that is not here. Nothing has changed.
        """
        reductions: dict[StoredTable, dict[int, None]] = {}
        for application in self._prepared.outline.applications:
            if application.rows is not None and application.rows.keyed:
                reductions.setdefault(self._table(application), {})[application.rows.reduction] = None
        try:
            for stored, needs in reductions.items():
                before = 0 if room < 0 else stored.table.in_memory
                self._begin(stored, list(needs), room)
                room = room if room < 0 else max(room + before - stored.table.in_memory, 0)
        except BaseException:
            self.end(applied=False)
            raise

    def _table(self, application: Application) -> StoredTable:
        return next(self._tensors[id].stored for id, *_ in application.variables if id in self._tensors)

    def _begin(self, stored: StoredTable, reductions: Sequence[int], room: int) -> None:
        for tensor in self._tensors.values():
            if tensor.stored is stored:
                tensor.take_place(room)
        parts = [self._contributions.keys(index) for index in reductions]
        keys, times = np.concatenate([np.empty((2, 0), np.int64), *(each for part in parts for each in part)], axis=1)
        table, self._keys[stored] = stored.table, keys
        sizes = [each.shape[1] for part in parts for each in part]
        opened = table.begin(table.round + 1, stored.keys(keys), times, room, sizes)
        self._begun.append(stored)
        at = 0
        for number, part in zip(reductions, parts, strict=True):
            count = sum([each.shape[1] for each in part])
            self._slots[number] = stored, opened.slots[at : at + count]
            at += count
        if stored.deferred is not None:
            stored.deferred.begin(opened.new, len(table.arrays[0]))

    # ---- Calls ----

    def call(self, number: int, application: Application, use: RowsUse) -> RowsCall:
        """Returns the call of an application; the rows of keys that are refused are left out.

        Args:
            number: number of the application, among those of the server.
            application: the application.
            use: the rows that it takes.
        """
        rows = behind_another(self._contributions.rows(use.reduction), self._contributions.spec(use.reduction))
        stored, slots = self._slots[use.reduction]
        values = rows.values
        if slots.size and slots.min() < 0:
            kept = slots >= 0
            slots, values = slots[kept], values[kept]
        found = Rows(slots, values), len(stored.table.arrays[0])
        return RowsCall(number, application, use, self._kernels, self._contributions, found, self._on_trial)

    def run(self, call: RowsCall, value: Callable[[Ref], Any]) -> tuple[dict[int, Array], Int64s]:
        """Updates the rows of a call, in place.

        Returns:
            The tensors that it has assigned, by slots, and all keys that the round has for their table, as int64, each
            maybe several times.
        """
        deferred = self._defer(call)
        self._calls.append(call)
        return call.run(value, deferred), self._keys[next(self._tensors[id].stored for id in call.assigned)]

    def _defer(self, call: RowsCall) -> DeferredUpdates | None:
        """Applies the deferred updates of a call's rows; returns what notes the call, None if it is not deferred."""
        stored, use = next(self._tensors[id].stored for id in call.assigned), call.use
        deferred = stored.deferred
        if use.tables and (deferred is None or not deferred.is_of(use.program, use.tables, use.closed)):
            stored.flush()
            deferred = stored.deferred = deferred_by(use, self._kernels, len(stored.table.arrays[0]), MAX_COUNT)
        stored.apply(call.ids)
        if deferred is not None and use.tables:
            stored.apply(deferred.make_room())
            stored.table.forget_deletions(stored.table.round + 1)  # all rows change, most of them later
        stored.table.set_aside(call.ids)
        return deferred if use.tables else None

    def end(self, applied: bool) -> None:
        """Ends the rounds.

        Args:
            applied: True to commit them, which evicts rows, and to cut the tables that the plan cuts; False to leave
                all as it was before `begin`.
        """
        begun, self._begun = self._begun, []
        calls, self._calls = self._calls, []
        if not applied:
            undo(calls)
            for stored in reversed(begun):
                stored.table.undo()
            return
        for stored in begun:
            stored.table.commit(self._contributions.seconds, stored.apply)
        for trim in self._prepared.trims:
            table = self._tensors[trim.variable].stored.table
            table.restrict(table.round + 1, trim.rows)
