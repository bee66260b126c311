"""Dynamic tables in checkpoints: what is saved of a part of one, and a part made again of what was saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from psserver.tables.native import Native
from psserver.tables.saving import FrozenState
from psserver.tables.table import Table
from psserver.values.keyed import KeyedRows
from pswire.checkpoint.merged_tables import MergedTable
from pswire.checkpoint.reader import PIECE_BYTES, SavedCheckpoint
from pswire.checkpoint.table_tensors import tensors_of
from pswire.checkpoint.writer import Column
from pswire.errors import CheckpointError, VariableMismatch
from pswire.model.hashing import buckets_of, hashes_of
from pswire.model.saved import PartOf, SavedTable
from pswire.model.table_state import TableState, offsets_of
from pswire.model.tables import SlotTensor, TablePart, TableSpec
from pswire.model.tensor import DTYPES, Array, TensorSpec, spec_of


class FrozenPart:
    """A part of a dynamic table right after a round; see `FrozenTable`.

    Args:
        name: the table's name.
        table: the part.
        frozen: its state.
        is_delta: True where changes alone were asked for.
        slots: the tensors beside the rows; those that have no place there have their first value in all rows.
    """

    def __init__(
        self, name: str, table: Table, frozen: FrozenState, is_delta: bool, slots: Sequence[SlotTensor] = ()
    ) -> None:
        self._name = name
        self._spec = table.spec
        self._placed = table.tensors
        self._unplaced = [slot for slot in slots if slot not in table.tensors]
        self._buckets = table.buckets
        self._frozen = frozen
        self._is_delta = is_delta

    @property
    def saved(self) -> SavedTable:
        """See `FrozenTable.saved`."""
        slots = sorted((*self._placed, *self._unplaced), key=lambda slot: slot.name)
        return SavedTable(self._name, self._spec, tuple(slots), self._frozen.since, self._frozen.round)

    @property
    def aside(self) -> int:
        """Bytes of what was set aside for it."""
        return self._frozen.aside

    @property
    def nbytes(self) -> int:
        """Bytes of rows that are not written yet."""
        return self._frozen.rows.nbytes

    def columns(self) -> Iterator[Column]:
        """See `FrozenTable.columns`."""
        state = self._frozen.load()
        rows = [(self._name, self._spec.row), *((slot.name, slot.row) for slot in self._placed)]
        for number, (name, row) in enumerate(rows):
            yield self._column(name, row, state.keys.size, partial(self._frozen.pieces, number))
        for slot in self._unplaced:
            yield self._column(slot.name, slot.row, state.keys.size, partial(_constants, slot, state.keys.size))
        for name, array, part in tensors_of(self._name, self._spec, state, self._is_delta):
            yield Column(name, spec_of(array), partial(iter, (array,)), part=part)

    def _column(self, name: str, row: TensorSpec, rows: int, pieces: Callable[[], Iterator[Array]]) -> Column:
        spec = TensorSpec(row.dtype, (rows, *row.shape))
        return Column(name, spec, pieces, part=PartOf(name, self._buckets.start))


def _constants(slot: SlotTensor, rows: int) -> Iterator[Array]:
    """Yields rows that have their first value, in pieces."""
    step = max(1, PIECE_BYTES // slot.row.nbytes)
    for first in range(0, rows, step):
        yield np.full((min(step, rows - first), *slot.row.shape), slot.value, DTYPES[slot.row.dtype])


@dataclass(frozen=True)
class Wanted:
    """A part of a dynamic table that is to be made of what was saved.

    Attributes:
        name: the table's name, for messages.
        spec: the table.
        slots: the tensors beside its rows.
        buckets: its buckets.
        saved: name of the tensor that its rows take.
        beside: for tensors beside them, by their names, the names of those that they take; others begin anew.
        cast: True if tensors may be of another dtype.
    """

    name: str
    spec: TableSpec
    slots: tuple[SlotTensor, ...]
    buckets: range
    saved: str
    beside: Mapping[str, str]
    cast: bool = False

    @property
    def sources(self) -> list[tuple[str | None, TensorSpec, float]]:
        """The saved name, the row and the first value of each tensor; for the rows 0."""
        rows = [(self.saved, self.spec.row, 0.0)]
        return [*rows, *((self.beside.get(slot.name), slot.row, slot.value) for slot in self.slots)]


class _ArrayRows:
    """An array of n rows in a checkpoint as a table: its keys are 0 to n - 1, as if the first round had made its rows.

    Args:
        saved: the checkpoint.
        name: the array's name.
        spec: the table.
        buckets: the buckets that are wanted.

    Attributes:
        keys: the keys of these, in the order of their hashes.
    """

    def __init__(self, saved: SavedCheckpoint, name: str, spec: TableSpec, buckets: range) -> None:
        self._saved = saved
        self._name = name
        self._places = np.full(saved.manifest.tensors[name].spec.shape[0], -1, np.int64)  # of each row here
        hashes = hashes_of(np.arange(self._places.size), spec.salt)
        owners = buckets_of(hashes)
        mine = np.flatnonzero((owners >= buckets.start) & (owners < buckets.stop))
        mine = mine[np.argsort(hashes[mine])]
        self._places[mine] = np.arange(mine.size)
        self._offsets = offsets_of(np.bincount(owners[mine] - buckets.start, minlength=len(buckets)))
        self.keys = mine.astype(spec.key_dtype)

    def state(self, blank: TableState) -> TableState:
        """See `MergedTable.state`."""
        once = np.ones(self.keys.size, np.uint32)
        rows = replace(blank, offsets=self._offsets, keys=self.keys, round=1)
        return replace(rows, count=once.astype(np.float32), last=once, changed=once)

    def fill(self, name: str, out: Array) -> None:
        """See `MergedTable.fill`; raises `VariableMismatch` where a tensor has another number of rows."""
        there, total = self._saved.manifest.tensors[name].spec, self._places.size
        if there.shape[0] != total:
            raise VariableMismatch(
                f"the checkpoint {self._saved.full} holds {name!r} as {there}, and {self._name!r} with {total} rows"
            )
        at = 0
        for rows in self._saved.stream(name, 0, total):
            places = self._places[at : at + len(rows)]
            out[places[places >= 0]] = rows[places >= 0]
            at += len(rows)


def _rows_of(saved: SavedCheckpoint, name: str, spec: TableSpec, buckets: range) -> MergedTable | _ArrayRows:
    """Returns what a checkpoint has of a table, deltas included, or of an array, in some buckets."""
    is_table = name in saved.manifest.tables
    return MergedTable.of(saved, name, buckets) if is_table else _ArrayRows(saved, name, spec, buckets)


def restored(checkpoint: SavedCheckpoint, wanted: Wanted, native: Native) -> Table:
    """Makes a part of a table again of what a checkpoint has of it, deltas included, or of an array.

    Of an array of n rows it has the keys 0 to n - 1.

    Args:
        checkpoint: the checkpoint.
        wanted: the part.
        native: compiled functions of tables.

    Raises:
        DamagedCheckpoint: a file is not as it was saved.
        CheckpointError: a file cannot be read, or the checkpoint has no tensor of such a name.
        VariableMismatch: a tensor is of another shape or dtype, or the table of other keys.
        MemoryLimit: there is no memory.
    """
    _check(checkpoint, wanted)
    table = Table(wanted.spec, wanted.slots, wanted.buckets, native)
    rows = _rows_of(checkpoint, wanted.saved, wanted.spec, wanted.buckets)
    for (name, _, value), array in zip(wanted.sources, table.place(rows.state(table.freeze().load())), strict=True):
        if name is None:
            array[...] = value
        else:
            rows.fill(name, array)
    if native.tier is not None:
        native.tier.settle()
    return table


def read_slot(saved: SavedCheckpoint, part: TablePart, slot: SlotTensor, name: str, cast: bool) -> KeyedRows:
    """Reads a tensor beside the rows of a table by keys, also one of an array, whose keys are 0 to n - 1.

    Args:
        saved: the checkpoint.
        part: the table, whose keys they are.
        slot: the tensor that takes it.
        name: name of the saved tensor.
        cast: True if it may be of another dtype.

    Raises:
        DamagedCheckpoint, CheckpointError, VariableMismatch: as of `restored`.
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
    if owner is not None:
        check_keys(saved, owner, part.table, part.spec)
    rows = _rows_of(saved, owner or name, part.spec, part.buckets)
    found: Array = np.empty((rows.keys.size, *row.shape), DTYPES[row.dtype])
    rows.fill(name, found)
    return KeyedRows(rows.keys, found)


def _check(checkpoint: SavedCheckpoint, wanted: Wanted) -> None:
    """Raises `VariableMismatch` unless the tensors fit, and keys are in the buckets in which they are here."""
    manifest, full, owners = checkpoint.manifest, checkpoint.full, checkpoint.manifest.owners
    table = manifest.tables.get(wanted.saved)
    for name, row, _ in wanted.sources:
        if name is None:
            continue
        if name not in manifest.tensors:
            names = ", ".join(sorted(manifest.variables)[:8])
            raise CheckpointError(f"the checkpoint {full} has no variable {name!r}; it has {names}")
        there = manifest.tensors[name].spec
        fits = bool(there.shape) and there.shape[1:] == row.shape
        if not fits or (there.dtype != row.dtype and not wanted.cast):
            wish = "restore it with CheckpointOptions(cast=True)" if fits else "create the table as it was saved"
            raise VariableMismatch(
                f"the checkpoint {full} holds {name!r} as {there}, but table {wanted.name!r} has rows of {row}; {wish}"
            )
        if owners.get(name) != (wanted.saved if table else None):
            raise VariableMismatch(
                f"the checkpoint {full} does not contain {name!r}, which belongs to {wanted.saved!r}; restore a "
                "table together with its slot variables"
            )
    if table is not None:
        check_keys(checkpoint, table.name, wanted.name, wanted.spec)


def check_keys(checkpoint: SavedCheckpoint, saved: str, name: str, spec: TableSpec) -> None:
    """Raises `VariableMismatch` unless the keys of a saved table are in the same buckets of another one.

    Args:
        checkpoint: the checkpoint.
        saved: name of its table.
        name, spec: the other table.
    """
    for what in ("key_dtype", "hash_seed"):
        ours, theirs = getattr(spec, what), getattr(checkpoint.manifest.tables[saved].spec, what)
        if ours != theirs:
            raise VariableMismatch(
                f"the checkpoint {checkpoint.full} holds table {saved!r} with {what} {theirs!r}, but table {name!r} "
                f"has {ours!r}; create the table as it was saved"
            )
