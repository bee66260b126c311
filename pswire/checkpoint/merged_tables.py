"""A dynamic table of a checkpoint and all deltas before it, as one: which layer has the row of each key."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from pswire.checkpoint.reader import PIECE_BYTES, SavedCheckpoint
from pswire.checkpoint.table_layers import ALL, TableLayer, layers_of
from pswire.checkpoint.table_tensors import BESIDE, beside, kinds_of
from pswire.model.hashing import Hashes, buckets_of, keys_of
from pswire.model.rows import Int64s
from pswire.model.table_state import TableState, offsets_of
from pswire.model.tables import SlotTensor, TableSpec
from pswire.model.tensor import DTYPES, Array, TensorSpec


class MergedTable:
    """The rows of some buckets of a table, in the order of their hashes, from several layers. Used by one thread.

    It takes 18 bytes of memory for each row. Each layer is read from front to back, and checked as it is read.

    Args:
        layers: as `layers_of` returns them.
        buckets: the buckets.

    Attributes:
        layers, buckets: the arguments.
        hashes: uint64[n], of all keys, in order.
        owners: the number of the layer that has each row.
        places: int64[n], the number of each row there.

    Raises:
        DamagedCheckpoint: a file is not as it was saved.
        CheckpointError: a file cannot be read.
    """

    def __init__(self, layers: Sequence[TableLayer], buckets: range = ALL) -> None:
        self.layers = layers
        self.buckets = buckets
        parts: list[tuple[Hashes, int, Int64s]] = []
        newer: Hashes = np.empty(0, np.uint64)  # those of which newer layers say all
        closed = np.zeros(len(buckets), np.bool_)
        for number, layer in reversed([*enumerate(layers)]):
            hashes, deleted = layer.hashes("row", buckets), layer.hashes("deleted", buckets)
            is_left = ~closed[buckets_of(hashes) - buckets.start] & ~_is_in(hashes, newer)
            first = int(layer.offsets("row")[buckets.start])
            parts.insert(0, (hashes[is_left], number, first + np.flatnonzero(is_left)))
            if number:
                newer = np.unique(np.concatenate([newer, hashes, deleted]))
                closed |= layer.read("since", buckets) < 0 if layer.is_delta else True
        found = np.concatenate([hashes for hashes, _, _ in parts])
        order = np.argsort(found, kind="stable")
        self.hashes: Hashes = found[order]
        self.owners = np.repeat(np.arange(len(parts), dtype=np.uint16), [len(part[0]) for part in parts])[order]
        self.places: Int64s = np.concatenate([places for _, _, places in parts])[order]

    @classmethod
    def of(cls, saved: SavedCheckpoint, name: str, buckets: range = ALL) -> MergedTable:
        """Makes one of a table of a checkpoint; raises as `layers_of`, too."""
        return cls(layers_of(saved, name, buckets), buckets)

    def __len__(self) -> int:
        return self.hashes.size

    @property
    def name(self) -> str:
        """The table's name."""
        return self.layers[-1].table.name

    @property
    def spec(self) -> TableSpec:
        """The table."""
        return self.layers[-1].table.spec

    @property
    def slots(self) -> tuple[SlotTensor, ...]:
        """The tensors beside the rows."""
        return self.layers[-1].table.slots

    @cached_property
    def keys(self) -> Array:
        """The keys [n]."""
        return keys_of(self.hashes, self.spec.salt, self.spec.key_dtype)

    @cached_property
    def offsets(self) -> Int64s:
        """Where the rows of each of all buckets begin, int64[BUCKETS + 1]."""
        return offsets_of(np.bincount(buckets_of(self.hashes), minlength=len(ALL)))

    @property
    def rows(self) -> dict[str, TensorSpec]:
        """What has a row for each key, by name: the rows, the tensors beside them, and what is known of each row."""
        found = {self.name: self.spec.row} | {slot.name: slot.row for slot in self.slots}
        for kind, each in BESIDE.items():
            if each.unit == "row":
                found[beside(self.name, kind)] = TensorSpec(each.dtype or self.spec.key_dtype, each.item)
        return {name: TensorSpec(row.dtype, (len(self), *row.shape)) for name, row in found.items()}

    def pieces(self, name: str, buckets: range | None = None, out: Array | None = None) -> Iterator[Array]:
        """Yields a tensor of `rows`, in pieces; raises as the class.

        Args:
            name: the tensor's name.
            buckets: some of the buckets; None for all.
            out: takes all of its rows, of which the pieces are views then.
        """
        buckets = buckets or self.buckets
        first, stop = int(self.offsets[buckets.start]), int(self.offsets[buckets.stop])
        spec = self.rows[name]
        if name == beside(self.name, "keys"):
            yield self.keys[first:stop]
            return
        step = max(1, PIECE_BYTES // max(1, spec.nbytes // max(len(self), 1)))
        layers = [_LayerRows(each, name, buckets, self.slots, each is self.layers[0]) for each in self.layers]
        for at in range(first, max(stop, first + 1), step):
            end = min(at + step, stop)
            owners, places = self.owners[at:end], self.places[at:end]
            found: Array = np.empty((end - at, *spec.shape[1:]), DTYPES[spec.dtype]) if out is None else out[at:end]
            for number, layer in enumerate(layers):
                mine = np.flatnonzero(owners == number)
                if mine.size:
                    layer.copy(places, mine, found)
            yield found
        for layer in layers:
            layer.end()

    def fill(self, name: str, out: Array) -> None:
        """Reads a tensor of `rows` into memory that is there, perhaps of another dtype; raises as the class."""
        layer, dtype, at = self.layers[0], DTYPES[self.rows[name].dtype], 0
        if len(self.layers) == 1 and out.dtype == dtype:
            layer.saved.fill([(name, int(layer.offsets("row")[self.buckets.start]), out)])
            return
        for piece in self.pieces(name, out=out if out.dtype == dtype else None):
            if out.dtype != dtype:
                out[at : at + len(piece)] = piece
            at += len(piece)

    def whole(self, name: str) -> Array:
        """Returns a tensor of `rows`, as a new array; raises as the class."""
        if name == beside(self.name, "keys"):
            return self.keys
        spec = self.rows[name]
        found: Array = np.empty(spec.shape, DTYPES[spec.dtype])
        self.fill(name, found)
        return found

    def state(self, blank: TableState) -> TableState:
        """Returns what is known of the table beside its `tensors`; raises as the class.

        Args:
            blank: the state of such a table without rows, of the same buckets.
        """
        newest, buckets = self.layers[-1], self.buckets
        newest.hashes("counted", buckets)  # raises where they are not in order
        found: dict[str, Any] = {}
        for kind in kinds_of(self.spec, is_delta=False):
            if BESIDE[kind].unit == "row":
                found[kind] = self.whole(beside(self.name, kind))
            elif hasattr(blank, kind):
                found[kind] = newest.read(kind, buckets)
        return replace(
            blank,
            offsets=self.offsets[buckets.start : buckets.stop + 1],
            counted_offsets=newest.offsets("counted", buckets),
            expired=int(newest.read("clock")[1]),
            round=newest.table.round,
            **found,
        )


class _LayerRows:
    """What one layer has of a tensor in some buckets, read from front to back.

    Args:
        layer: the layer; rows of a tensor that it does not have are as they are at first.
        name: the tensor's name.
        buckets: the buckets.
        slots: the tensors beside the rows.
        is_first: True for the first of all layers.
    """

    def __init__(
        self, layer: TableLayer, name: str, buckets: range, slots: Sequence[SlotTensor], is_first: bool
    ) -> None:
        first, stop = (int(layer.offsets("row")[at]) for at in (buckets.start, buckets.stop))
        is_there = name in layer.saved.manifest.tensors
        self._value = None if is_there else next(slot.value for slot in slots if slot.name == name)
        self._pieces = layer.saved.stream(name, first, stop) if is_there else iter(())
        self._is_first = is_first
        self._low, self._rows = first, cast(Array, np.empty(0))  # what was read last

    def copy(self, places: Int64s, mine: Int64s, out: Array) -> None:
        """Copies rows, which come after all that were copied before.

        Args:
            places: the place of each row of a piece, in whichever layer it is.
            mine: which of them are in this layer; at least one, in order.
            out: takes these. Of the first layer the others are overwritten, as the next layers do anyway.
        """
        if self._value is not None:
            out[mine] = self._value
            return
        low, stop = int(places[mine[0]]), int(places[mine[-1]]) + 1
        while self._low + len(self._rows) < stop:
            kept = self._rows[max(0, low - self._low) :]
            self._low += len(self._rows) - len(kept)
            more = next(self._pieces)
            self._rows = np.concatenate([kept, more]) if len(kept) else more
        if self._is_first:
            np.take(self._rows, places - self._low, 0, out, "clip")  # twice as fast as by the places of its own
        else:
            out[mine] = self._rows.take(places[mine] - self._low, 0)

    def end(self) -> None:
        """Reads what is left, so that it is checked."""
        for _ in self._pieces:
            pass


def _is_in(hashes: Hashes, some: Hashes) -> npt.NDArray[np.bool_]:
    """Returns which hashes are among others, which are in order."""
    if not some.size:
        return np.zeros(hashes.size, np.bool_)
    at = np.searchsorted(some, hashes)
    at[at == some.size] = 0
    return np.asarray(some[at] == hashes)
