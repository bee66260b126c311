"""Dynamic tables among a server's variables: what rounds and readers get in place of an array.

A part of a table is a variable, and so is each tensor beside its rows; all of them share one `Table`. Tables lie in
host memory, whatever the server's device is, and belong to the thread for array work, but for their sizes.

    StoredTable  a part of a table, and what its rows have missed
    TableTensor  one of its tensors, as the value of a variable
    KeyedRows    rows by keys, which a tensor takes when it gets its place
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from psserver.effects import Effect, Work
from psserver.state.missed import PIECE, MissedUpdates
from psserver.tables.native import Native
from psserver.tables.saving import HeldState
from psserver.tables.table import Table
from pswire.api import RowRead, TableRead
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


def reading_ahead(tensors: Mapping[int, TableTensor], reads: Sequence[RowRead], hint: bool = False) -> list[Effect]:
    """Returns the work that begins to read rows that are wanted after a round, of tables in a tier, from the disk.

    With `hint` they are wanted after the next round, and others first.
    """
    wanted = [(tensors[read.variable].stored, read) for read in reads if read.variable in tensors]
    wanted = [(stored, read) for stored, read in wanted if stored.table.tier is not None]
    return [Work("arrays", _read_ahead, (wanted, hint))] if wanted else []


def _read_ahead(wanted: Sequence[tuple[StoredTable, RowRead]], hint: bool) -> None:
    for stored, read in wanted:
        stored.table.read_ahead(stored.keys(read.numbers()), hint)


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
        missed: what its rows have missed; None for nothing.
    """

    def __init__(self, variable: PlacedVariable, part: TablePart, native: Native, task: Task) -> None:
        self.variable = variable
        self.name = variable.spec.name
        self.part = part
        self.table = Table(part.spec, buckets=part.buckets, native=native)
        self.tensors: dict[int, TableTensor] = {}
        self.missed: MissedUpdates | None = None
        self._task = task
        self._dtype = DTYPES[part.spec.key_dtype]

    @property
    def slots(self) -> tuple[SlotTensor, ...]:
        """The tensors beside its rows, also those that have no place yet."""
        return tuple(tensor.slot for tensor in self.tensors.values() if tensor.slot is not None)

    def put(self, variable: PlacedVariable, part: TablePart) -> TableTensor:
        """Makes a variable one of its tensors; its place beside the rows is taken when a round first needs it."""
        made = self.tensors[variable.id] = TableTensor(self, variable, part)
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
                str(self._task),
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
                str(self._task),
            )
        keys = self.table.keys(range(asked.first, asked.first + asked.count)).view(np.int64)
        return keys.size, [keys] if asked.what == "keys" else [keys, self.tensors[asked.variable].rows(keys)]

    # ---- Checkpoints; while the thread for arrays does nothing else ----

    def hold(self, since: int) -> HeldState:
        """Holds it as it is after a round, for one thread that reads it while rounds go on.

        Args:
            since: the round since which changes alone are wanted; -1 for all.

        Raises:
            MemoryLimit: there is no room for rows that a restored checkpoint has for a tensor beside them.
        """
        for tensor in self.tensors.values():
            if tensor.begins is not None:
                _ = tensor.number  # takes what it begins with
        if self.missed is None or not self.missed.behind:
            return self.table.hold(since)
        missed = self.missed.copy()
        places = [self.tensors[id].number for id in missed.tables]

        def settle(tensors: list[Array], slots: Int64s) -> list[Array]:
            found = [*tensors]
            for place, rows in zip(places, missed.settled([tensors[place] for place in places], slots), strict=True):
                found[place] = rows
            return found

        return self.table.hold(since, settle)

    def replace(self, table: Table) -> None:
        """Puts another table in place of what is there."""
        self.table, self.missed = table, None
        for tensor in self.tensors.values():
            tensor.begins = None

    # ---- Updates that rows have missed ----

    def arrays(self, ids: Sequence[int]) -> list[Array]:
        """Returns the tensors of variables, by slots; good until the next round of the table."""
        return [self.tensors[id].array for id in ids]

    def make_up(self, slots: Int64s) -> None:
        """Makes rows have all updates, in place; their slots are given once each."""
        missed = self.missed
        if missed is not None:
            self.table.set_aside(slots)
            missed.make_up(self.arrays(missed.tables), slots)

    def settle(self) -> None:
        """Makes all rows have all updates, as something else is about to update the table."""
        if self.missed is not None:
            size = len(self.missed.last)
            for first in range(0, size, PIECE):
                self.make_up(np.arange(first, min(first + PIECE, size)))
            self.missed = None


class TableTensor:
    """One tensor of a table, as the value of a variable.

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

    def __init__(self, stored: StoredTable, variable: PlacedVariable, part: TablePart) -> None:
        self.stored = stored
        self.slot = part.slot
        self.reserved = part.nbytes
        self.begins: KeyedRows | None = None
        self.dtype: np.dtype[Any] = DTYPES[variable.spec.tensor.dtype]
        self.shape = variable.spec.tensor.shape

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the table may have, without a tier's; 0 of a tensor beside the rows. For any thread."""
        return self.stored.table.in_memory if self.slot is None else 0

    @property
    def number(self) -> int:
        """The number of the tensor in its table, which gives it a place beside the rows where it has none yet."""
        if self.slot is None:
            return 0
        number = self.stored.table.put_beside(self.slot)
        if self.begins is not None:
            begins, self.begins = self.begins, None
            self.stored.settle()
            self.stored.table.assign(number, begins.keys, begins.rows)
        return number

    def take_place(self, room: int) -> None:
        """Takes a place beside the rows; raises `MemoryLimit` if that needs more bytes than `room`, -1 for no limit."""
        if self.slot is not None:
            self.stored.table.put_beside(self.slot, room)
        _ = self.number  # with the rows that it begins with

    @property
    def array(self) -> Array:
        """The tensor by slots; good until the next round of the table."""
        return self.stored.table.arrays[self.number]

    def begin(self, value: Table | KeyedRows) -> None:
        """Takes what a checkpoint has for it, before anybody uses it: as the rows a table, else rows by keys."""
        if isinstance(value, Table):
            self.stored.replace(value)
        else:
            self.begins = value

    def rows(self, bits: Int64s) -> Array:
        """Returns rows by keys, which travel as int64, as a new array; of a key without a row the first value."""
        table, keys = self.stored.table, self.stored.keys(bits)
        slots = table.find(keys)
        if self.stored.missed is not None:
            self.stored.make_up(np.unique(slots[slots >= 0]))
        if self.slot is not None and self.slot not in table.tensors and self.begins is None:
            return np.full((bits.size, *self.shape[1:]), self.slot.value, self.dtype)
        return table.rows_at(slots, keys, self.number)
