"""Dynamic tables in checkpoints: what is saved of a part of one, and a part made again of what was saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from psserver.tables.native import Native
from psserver.tables.saving import HeldState
from psserver.tables.table import Table
from pswire.checkpoint.reader import SavedCheckpoint
from pswire.checkpoint.table_layers import TableLayer, layers_of
from pswire.checkpoint.table_tensors import tensors_of
from pswire.checkpoint.writer import Column
from pswire.errors import CheckpointError, VariableMismatch
from pswire.model.hashing import buckets_of, hashes_of
from pswire.model.saved import PartOf, SavedTable
from pswire.model.table_state import offsets_of
from pswire.model.tables import SlotTensor, TableSpec
from pswire.model.tensor import DTYPES, Array, TensorSpec, spec_of

PIECE_BYTES = 8 << 20
"""Bytes of an array that are read or made at a time."""


class FrozenPart:
    """A part of a dynamic table right after a round; see `FrozenTable`.

    Args:
        name: the table's name.
        table: the part.
        held: its state.
        is_delta: True where changes alone were asked for.
        slots: the tensors beside the rows; those that have no place there have their first value in all rows.
    """

    def __init__(
        self, name: str, table: Table, held: HeldState, is_delta: bool, slots: Sequence[SlotTensor] = ()
    ) -> None:
        self._name = name
        self._spec = table.spec
        self._placed = table.tensors
        self._unplaced = [slot for slot in slots if slot not in table.tensors]
        self._buckets = table.buckets
        self._held = held
        self._is_delta = is_delta

    @property
    def saved(self) -> SavedTable:
        """See `FrozenTable.saved`."""
        slots = sorted((*self._placed, *self._unplaced), key=lambda slot: slot.name)
        return SavedTable(self._name, self._spec, tuple(slots), self._held.since, self._held.round)

    @property
    def aside(self) -> int:
        """Bytes of what was set aside for it."""
        return self._held.aside

    @property
    def nbytes(self) -> int:
        """Bytes of rows that are not written yet."""
        return self._held.rows.nbytes

    def columns(self) -> Iterator[Column]:
        """See `FrozenTable.columns`."""
        state = self._held.load()
        rows = [(self._name, self._spec.row), *((slot.name, slot.row) for slot in self._placed)]
        for number, (name, row) in enumerate(rows):
            yield self._column(name, row, state.keys.size, partial(self._held.pieces, number))
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
    if wanted.saved not in checkpoint.manifest.tables:
        _fill_from_array(checkpoint, wanted, table)
    else:
        _fill_from_layers(layers_of(checkpoint, wanted.saved, wanted.buckets), wanted, table)
    if native.tier is not None:
        native.tier.settle()
    return table


def _fill_from_layers(layers: Sequence[TableLayer], wanted: Wanted, table: Table) -> None:
    """Makes the rows of a saved table: what a whole one has, then the changes of each delta."""
    first, *others = layers
    _read(first, wanted, table.place(first.state(wanted.buckets)))
    for layer in others:
        state = layer.state(wanted.buckets)
        rows = [np.empty((state.keys.size, *row.shape), DTYPES[row.dtype]) for _, row, _ in wanted.sources]
        _read(layer, wanted, rows)
        table.apply([replace(state, tensors=tuple(rows))])


def _read(layer: TableLayer, wanted: Wanted, arrays: Sequence[Array]) -> None:
    """Reads all rows of a part into arrays, in the order of their keys; what a layer does not have is as at first."""
    straight = dict[str, Array]()
    for (name, _, value), array in zip(wanted.sources, arrays, strict=True):
        there = layer.saved.manifest.tensors.get(name or "")
        if name is None or there is None:
            array[...] = value
        elif there.spec.dtype == spec_of(array).dtype:
            straight[name] = array
        else:
            other = np.empty(array.shape, DTYPES[there.spec.dtype])
            layer.fill(wanted.buckets, {name: other})
            array[...] = other
    layer.fill(wanted.buckets, straight)


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


def _fill_from_array(checkpoint: SavedCheckpoint, wanted: Wanted, table: Table) -> None:
    """Makes rows of the keys 0 to n - 1, as if the first round had made them."""
    total = checkpoint.manifest.tensors[wanted.saved].spec.shape[0]
    numbers = np.arange(total)
    hashes = hashes_of(numbers, wanted.spec.salt)
    buckets = buckets_of(hashes)
    mine = np.flatnonzero((buckets >= wanted.buckets.start) & (buckets < wanted.buckets.stop))
    mine = mine[np.argsort(hashes[mine])]
    once = np.ones(mine.size, np.uint32)
    counts = np.bincount(buckets[mine] - wanted.buckets.start, minlength=len(wanted.buckets))
    state = replace(
        table.state(),
        offsets=offsets_of(counts),
        keys=numbers[mine].astype(wanted.spec.key_dtype),
        count=once.astype(np.float32),
        last=once,
        changed=once,
        round=1,
    )
    places = np.full(total, -1, np.int64)
    places[mine] = np.arange(mine.size)
    for (name, row, value), array in zip(wanted.sources, table.place(state), strict=True):
        if name is None:
            array[...] = value
            continue
        there = checkpoint.manifest.tensors[name].spec
        if there.shape[0] != total:
            raise VariableMismatch(
                f"the checkpoint {checkpoint.full} holds {name!r} as {there}, and {wanted.saved!r} with {total} rows"
            )
        step = max(1, PIECE_BYTES // row.nbytes)
        for first in range(0, total, step):
            rows = np.empty((min(step, total - first), *row.shape), DTYPES[there.dtype])
            checkpoint.fill([(name, first, rows)])
            to = places[first : first + step]
            array[to[to >= 0]] = rows[to >= 0]
