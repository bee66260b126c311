"""What is wanted of a checkpoint for the variables of a server, and what was read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from psserver.checkpoints.tables import Wanted, read_slot, restored
from psserver.state.variables import Store
from psserver.tables.native import Native
from psserver.tables.table import Table
from psserver.values.dense import Dense
from psserver.values.keyed import KeyedRows, StoredTable
from psserver.values.value import Value
from pswire.checkpoint.arrays_of_tables import read_arrays
from pswire.checkpoint.reader import SavedCheckpoint
from pswire.model.plan import PlacedVariable
from pswire.model.saved import RestoreOrder
from pswire.model.tables import SlotTensor, TablePart


@dataclass(frozen=True)
class WantedTable:
    """What a restore wants of one table.

    Attributes:
        stored: the table.
        slots: the tensors beside its rows.
        rows: name of the tensor that its rows take; None if they stay.
        beside: for tensors beside them, by their names, the names of those that they take.
        order: the order.
    """

    stored: StoredTable
    slots: tuple[SlotTensor, ...]
    rows: str | None
    beside: Mapping[str, str]
    order: RestoreOrder

    @classmethod
    def of(cls, stored: StoredTable, names: Mapping[int, str], order: RestoreOrder) -> WantedTable | None:
        """Makes one of the names that variables take, by the numbers of these; None if nothing is wanted of a table."""
        named = {tensor.slot: names[id] for id, tensor in stored.tensors.items() if id in names}
        if not named:
            return None
        beside = {slot.name: name for slot, name in named.items() if slot is not None}
        return cls(stored, stored.slots, named.get(None), beside, order)

    def restored(self, saved: SavedCheckpoint, native: Native) -> RestoredTable:
        """Reads it; raises as `tables.restored`."""
        part, beside = self.stored.part, dict(self.beside)
        if self.order.names is None:
            beside = {own: name for own, name in beside.items() if name in saved.manifest.tensors}
        if self.rows is None:
            slots = {slot.name: slot for slot in self.slots}
            found = {own: read_slot(saved, part, slots[own], name, self.order.cast) for own, name in beside.items()}
            return RestoredTable(self.stored, None, found, False)
        wanted = Wanted(part.table, part.spec, self.slots, part.buckets, self.rows, beside, self.order.cast)
        return RestoredTable(self.stored, restored(saved, wanted, native), {}, self._is_base(saved, beside))

    def _is_base(self, saved: SavedCheckpoint, beside: Mapping[str, str]) -> bool:
        """Returns True if the table is, by its names, what the checkpoint has: then changes to it can be saved."""
        table = saved.manifest.tables.get(self.stored.part.table)
        if table is None or self.rows != table.name or self.order.cast:
            return False
        own = {slot.name for slot in self.slots}
        return all(beside.get(slot.name) == slot.name if slot.name in own else self.order.late for slot in table.slots)


@dataclass(frozen=True)
class RestoredTable:
    """What was read for one table.

    Attributes:
        stored: the table.
        table: takes its place; None if its rows stay.
        rows: what tensors beside its rows take, by their names, if these stay.
        is_base: True if changes to the checkpoint can be saved.
    """

    stored: StoredTable
    table: Table | None
    rows: Mapping[str, KeyedRows]
    is_base: bool

    @property
    def key(self) -> str:
        """Tells the part of a table that it is from all others."""
        return self.stored.part.key

    @property
    def round(self) -> int:
        """The round of the table."""
        return self.stored.table.round

    def put(self) -> None:
        """Makes the table what was read; while the thread for arrays does nothing else."""
        if self.table is not None:
            self.stored.replace(self.table)
        for tensor in self.stored.tensors.values():
            if tensor.slot is not None and tensor.slot.name in self.rows:
                tensor.begins = self.rows[tensor.slot.name]  # which it takes when it is used


@dataclass(frozen=True)
class RestoredValues:
    """What was read for the variables of one server.

    Attributes:
        arrays: on the device, by the numbers of their variables.
        tables: parts of dynamic tables.
    """

    arrays: Mapping[int, Value]
    tables: list[RestoredTable]


@dataclass(frozen=True)
class WantedValues:
    """What is to be read for the variables of one server.

    Attributes:
        arrays: by variable the name of the tensor that it takes.
        tables: the dynamic tables.
    """

    arrays: Mapping[PlacedVariable, str]
    tables: Sequence[WantedTable]

    @classmethod
    def of(cls, store: Store, names: Mapping[int, str], order: RestoreOrder) -> WantedValues:
        """Makes one of the names that variables of this server take, by their numbers."""
        arrays = {store.variables[id]: name for id, name in names.items() if store.variables[id].spec.part is None}
        tables = (WantedTable.of(stored, names, order) for stored in store.tables())
        return cls(arrays, [table for table in tables if table is not None])

    def read(self, saved: SavedCheckpoint, store: Store, cast: bool = False, sharded: bool = True) -> RestoredValues:
        """Reads them; in the thread for files.

        Args:
            saved: the checkpoint.
            store: the variables.
            cast: True if tensors may be of another dtype.
            sharded: True if the tensor of a partitioned variable has the rows of all its shards.

        Raises:
            DamagedCheckpoint, CheckpointError, VariableMismatch, MemoryLimit: as of `read_arrays`, and `restored`.
        """
        shards = [variable.spec.shard if sharded else None for variable in self.arrays]
        arrays = read_arrays(saved, [(name, v.spec.tensor) for v, name in self.arrays.items()], cast, shards)
        tables = [table.restored(saved, store.native) for table in self.tables]
        put = store.device.put
        return RestoredValues({v.id: Dense(put(array)) for v, array in zip(self.arrays, arrays, strict=True)}, tables)


def first_of_part(saved: SavedCheckpoint, part: TablePart, cast: bool, native: Native) -> Table | KeyedRows:
    """Returns what a checkpoint has for a part of a table that is created later, by its name; raises as `restored`."""
    if part.slot is not None:
        return read_slot(saved, part, part.slot, part.slot.name, cast)
    return restored(saved, Wanted(part.table, part.spec, (), part.buckets, part.table, {}, cast), native)
