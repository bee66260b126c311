"""Dynamic tables in a restore: what is wanted of each, and what was read for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from psserver.checkpoints.tables import PIECE_BYTES, Wanted, check_keys, restored
from psserver.state.key_tables import KeyedRows, StoredTable
from psserver.tables.native import Native
from psserver.tables.table import Table
from pswire.api import RestoreOrder
from pswire.checkpoint.merged_tables import MergedTable
from pswire.checkpoint.reader import SavedCheckpoint
from pswire.errors import CheckpointError, VariableMismatch
from pswire.model.hashing import buckets_of, hashes_of
from pswire.model.tables import SlotTensor, TablePart
from pswire.model.tensor import DTYPES, Array


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
            found = {own: rows_of(saved, part, slots[own], name, self.order.cast) for own, name in beside.items()}
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


def first_of_part(saved: SavedCheckpoint, part: TablePart, cast: bool, native: Native) -> Table | KeyedRows:
    """Returns what a checkpoint has for a part of a table that is created later, by its name; raises as `restored`."""
    if part.slot is not None:
        return rows_of(saved, part, part.slot, part.slot.name, cast)
    return restored(saved, Wanted(part.table, part.spec, (), part.buckets, part.table, {}, cast), native)


def rows_of(saved: SavedCheckpoint, part: TablePart, slot: SlotTensor, name: str, cast: bool) -> KeyedRows:
    """Reads a tensor beside the rows of a table by keys, also one of an array, whose keys are 0 to n - 1.

    Args:
        saved: the checkpoint.
        part: the table, whose keys they are.
        slot: the tensor that takes it.
        name: name of the saved tensor.
        cast: True if it may be of another dtype.

    Raises:
        DamagedCheckpoint, CheckpointError, VariableMismatch: as of `tables.restored`.
    """
    if name not in saved.manifest.tensors:
        raise CheckpointError(f"the checkpoint {saved.full} has no variable {name!r}")
    there, row = saved.manifest.tensors[name].spec, slot.row
    if not there.shape or there.shape[1:] != row.shape or (there.dtype != row.dtype and not cast):
        raise VariableMismatch(
            f"the checkpoint {saved.full} holds {name!r} with rows of {there}, but {slot.name!r} has rows of {row}; "
            "create the table and its optimizer as they were saved"
        )
    owner = saved.manifest.owners.get(name)
    if owner is None:
        keys, rows = _of_array(saved, part, name)
    else:
        check_keys(saved, owner, part.table, part.spec)
        table = MergedTable.of(saved, owner, part.buckets)
        keys, rows = table.keys, np.concatenate([*table.pieces(name)])
    return KeyedRows(keys, rows.astype(DTYPES[row.dtype], copy=False))


def _of_array(saved: SavedCheckpoint, part: TablePart, name: str) -> tuple[Array, Array]:
    """Returns the keys of a part, and their rows."""
    spec = saved.manifest.tensors[name].spec
    buckets = buckets_of(hashes_of(np.arange(spec.shape[0]), part.spec.salt))
    mine = np.flatnonzero((buckets >= part.first) & (buckets < part.first + part.count))
    rows = np.empty((mine.size, *spec.shape[1:]), DTYPES[spec.dtype])
    step = max(1, PIECE_BYTES // max(1, spec.nbytes // max(spec.shape[0], 1)))
    for first in range(0, spec.shape[0], step):
        piece = np.empty((min(step, spec.shape[0] - first), *spec.shape[1:]), rows.dtype)
        saved.fill([(name, first, piece)])
        low, high = np.searchsorted(mine, [first, first + len(piece)])
        rows[low:high] = piece[mine[low:high] - first]
    return mine.astype(part.spec.key_dtype), rows
