"""Dynamic tables among a server's variables, whose rows are found by keys.

A part of a table is a variable, and so is each tensor beside its rows; all of them share one `Table`. Tables lie in
host memory, whatever the server's device is, and belong to the thread for array work, but for their sizes.

    StoredTable  a part of a table, and the updates that its rows lack
    Keyed        one of its tensors, as the value of a variable
    KeyedRows    rows by keys, which a tensor takes when it gets its place
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from psserver.tables.native import Native
from psserver.tables.saving import FrozenState
from psserver.tables.table import Table
from psserver.values.deferred import DeferredUpdates
from psserver.values.value import Memo, Value
from pswire.api import TableRead
from pswire.cluster import Task
from pswire.errors import InvalidRequest
from pswire.model.hashing import BUCKETS, buckets_of, hashes_of
from pswire.model.plan import PlacedVariable
from pswire.model.rows import Int64s
from pswire.model.tables import SlotTensor, TablePart
from pswire.model.tensor import DTYPES, Array


@dataclass(frozen=True, eq=False)
class KeyedRows:
    """Rows of a tensor beside those of a table, as a checkpoint has them.

    Attributes:
        keys: [n], of the table's dtype of keys, each once.
        rows: (n, *row shape).
    """

    keys: Array
    rows: Array


class StoredTable:
    """A part of a dynamic table on this server.

    Args:
        variable: the one that is its rows.
        part: what it is.
        native: compiled functions of tables.
        task: this server's task.

    Attributes:
        name: the variable's name, for messages.
        table: its rows.
        tensors: its tensors, by the numbers of their variables.
        deferred: the updates that its rows lack; None for none.
        task: this server's task, for messages.
    """

    def __init__(self, variable: PlacedVariable, part: TablePart, native: Native, task: Task) -> None:
        self.variable = variable
        self.name = variable.spec.name
        self.part = part
        self.table = Table(part.spec, buckets=part.buckets, native=native)
        self.tensors: dict[int, Keyed] = {}
        self.deferred: DeferredUpdates | None = None
        self.task = str(task)
        self._dtype = DTYPES[part.spec.key_dtype]

    @property
    def slots(self) -> tuple[SlotTensor, ...]:
        """The tensors beside its rows, also those that have no place yet."""
        return tuple(tensor.slot for tensor in self.tensors.values() if tensor.slot is not None)

    def put(self, variable: PlacedVariable, part: TablePart) -> Keyed:
        """Makes a variable one of its tensors; its place beside the rows is taken when a round first needs it."""
        made = self.tensors[variable.id] = Keyed(self, variable, part)
        return made

    # ---- Keys ----

    def keys(self, bits: Int64s) -> Array:
        """Returns keys, which travel as int64, in their own dtype."""
        return bits.view(self._dtype)

    def check_keys(self, bits: Int64s) -> None:
        """Raises `InvalidRequest` if a key is of a bucket that is not here. For any thread."""
        held = self.part.buckets
        if len(held) == BUCKETS or not bits.size:
            return
        buckets = buckets_of(hashes_of(bits, self.part.spec.salt))
        bad = np.flatnonzero((buckets < held.start) | (buckets >= held.stop))
        if bad.size:
            raise InvalidRequest(
                f"key {self.keys(bits)[bad[0]]} of table {self.part.table!r} is in bucket {buckets[bad[0]]}, but "
                f"{self.name!r} has buckets {held.start} to {held.stop - 1}",
                self.task,
            )

    def answer(self, asked: TableRead) -> tuple[int, list[Array]]:
        """Answers a question; returns a number of rows, and the keys, as int64, and rows that are asked for.

        Raises:
            InvalidRequest: a bucket is not here.
        """
        if asked.what == "size":
            return len(self.table), []
        held = self.part.buckets
        if not held.start <= asked.first < asked.first + asked.count <= held.stop:
            raise InvalidRequest(
                f"{asked.count} buckets from {asked.first} on are not all in {self.name!r}, which has buckets "
                f"{held.start} to {held.stop - 1}",
                self.task,
            )
        keys = self.table.keys(range(asked.first, asked.first + asked.count)).view(np.int64)
        return keys.size, [keys] if asked.what == "keys" else [keys, self.tensors[asked.variable].rows(keys, np)]

    # ---- Checkpoints; while the thread for arrays does nothing else ----

    def freeze(self, since: int) -> FrozenState:
        """Freezes it as it is after a round, for one thread that reads it while rounds go on.

        Args:
            since: the round since which changes alone are wanted; -1 for all.

        Raises:
            MemoryLimit: there is no room for rows that a restored checkpoint has for a tensor beside them.
        """
        for tensor in self.tensors.values():
            if tensor.begins is not None:
                _ = tensor.number  # takes what it begins with
        if self.deferred is None or not self.deferred.behind:
            return self.table.freeze(since)
        deferred = self.deferred.copy()
        places = [self.tensors[id].number for id in deferred.tables]

        def flush(tensors: list[Array], slots: Int64s) -> list[Array]:
            found = [*tensors]
            for place, rows in zip(places, deferred.applied([tensors[place] for place in places], slots), strict=True):
                found[place] = rows
            return found

        return self.table.freeze(since, flush)

    def replace(self, table: Table) -> None:
        """Puts another table in place of what is there."""
        self.table, self.deferred = table, None
        for tensor in self.tensors.values():
            tensor.begins = None

    # ---- Deferred updates ----

    def arrays(self, ids: Sequence[int]) -> list[Array]:
        """Returns the tensors of variables, by slots; good until the next round of the table."""
        return [self.tensors[id].array for id in ids]

    def apply(self, slots: Int64s) -> None:
        """Applies the deferred updates of rows, in place; their slots are given once each."""
        if self.deferred is not None:
            self.table.set_aside(slots)
            self.deferred.apply(self.arrays(self.deferred.tables), slots)

    def flush(self) -> None:
        """Applies all deferred updates, as something else is about to update the table."""
        if self.deferred is not None:
            self.deferred.apply_all(self.apply)
            self.deferred = None


class Keyed(Value):
    """One tensor of a table; see `Value`. It is its own view: a read has the rows as they are then.

    Args:
        stored: the table.
        variable: the variable.
        part: its part of the table.

    Attributes:
        stored: the table.
        slot: the tensor beside the rows that it is; None for the rows.
        reserved: bytes that its filter takes, used or not; 0 of a tensor beside the rows.
        begins: rows that it takes together with its place; None for its first value alone.
        dtype, shape: as programs have them: a table has no size.
    """

    is_plain = False

    def __init__(self, stored: StoredTable, variable: PlacedVariable, part: TablePart) -> None:
        self.stored = stored
        self.slot = part.slot
        self.reserved = part.nbytes
        self.begins: KeyedRows | None = None
        self.dtype = DTYPES[variable.spec.tensor.dtype]
        self.shape = variable.spec.tensor.shape
        self._name = variable.spec.name

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the table may have, without a tier's; 0 of a tensor beside the rows. For any thread."""
        return self.stored.table.in_memory if self.slot is None else 0

    @property
    def number(self) -> int:
        """The number of the tensor in its table, which gives it a place beside the rows where it has none yet."""
        return self.take_place(-1)

    def take_place(self, room: int) -> int:
        """Returns the same; raises `MemoryLimit` if its place needs more bytes than `room`, -1 for no limit."""
        if self.slot is None:
            return 0
        number = self.stored.table.put_beside(self.slot, room)
        if self.begins is not None:
            begins, self.begins = self.begins, None
            self.stored.flush()
            self.stored.table.assign(number, begins.keys, begins.rows)
        return number

    @property
    def array(self) -> Array:
        return self.stored.table.arrays[self.number]

    def begin(self, first: Any) -> bool:
        """Takes what a checkpoint has for it, before anybody uses it: as the rows a table, else rows by keys."""
        if isinstance(first, Table):
            self.stored.replace(first)
        elif isinstance(first, KeyedRows):
            self.begins = first
        else:
            raise InvalidRequest(f"variable {self._name!r} is a part of a dynamic table, which begins empty")
        return True

    def whole(self) -> NoReturn:
        raise InvalidRequest(
            f"variable {self._name!r} is a part of a dynamic table, which has no size; look its rows up",
            self.stored.task,
        )

    def check_rows(self, ids: Int64s, name: str, task: str) -> None:
        self.stored.check_keys(ids)

    def read_ahead(self, ids: Int64s, hint: bool) -> None:
        self.stored.table.read_ahead(self.stored.keys(ids), hint)

    def view(self, memo: Memo) -> Keyed:
        return self

    def rows(self, ids: Int64s, xp: Any) -> Array:
        """See `Value.rows`; of a key without a row the first value."""
        table, keys = self.stored.table, self.stored.keys(ids)
        slots = table.find(keys)
        if self.stored.deferred is not None:
            self.stored.apply(np.unique(slots[slots >= 0]))
        if self.slot is not None and self.slot not in table.tensors and self.begins is None:
            return np.full((ids.size, *self.shape[1:]), self.slot.value, self.dtype)
        return table.rows_at(slots, keys, self.number)

    def freeze(self, by_rows: bool, memo: Memo) -> NoReturn:
        self.whole()  # a table is frozen as such, with all its tensors
