"""A dynamic table of a checkpoint and all deltas before it, as one: which layer has the row of each key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from pswire.checkpoint.reader import SavedCheckpoint
from pswire.checkpoint.table_layers import ALL, TableLayer, layers_of
from pswire.checkpoint.table_tensors import BESIDE, beside
from pswire.model.hashing import Hashes, buckets_of, keys_of
from pswire.model.rows import Int64s
from pswire.model.table_state import offsets_of
from pswire.model.tables import SlotTensor, TableSpec
from pswire.model.tensor import DTYPES, Array, TensorSpec

PIECE_BYTES = 8 << 20
"""Bytes of rows that are read at a time."""


class MergedTable:
    """The rows of some buckets of a table, in the order of their hashes, from several layers. Used by one thread.

    It takes 18 bytes of memory for each row, and what deltas have of one tensor while that is read.

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

    def pieces(self, name: str, first: int = 0, stop: int | None = None) -> Iterator[Array]:
        """Yields a tensor of `rows`, from one row to another, in pieces."""
        stop = len(self) if stop is None else stop
        spec = self.rows[name]
        step = max(1, PIECE_BYTES // max(1, spec.nbytes // max(len(self), 1)))
        if name == beside(self.name, "keys"):
            yield self.keys[first:stop]
            return
        deltas = {
            number: self._read(name, number, first, stop) for number in range(1, len(self.layers)) if stop > first
        }
        for at in range(first, max(stop, first + 1), step):
            yield self._piece(name, at, min(at + step, stop), deltas)

    def _piece(self, name: str, first: int, stop: int, deltas: Mapping[int, _Window]) -> Array:
        spec, owners, places = self.rows[name], self.owners[first:stop], self.places[first:stop]
        found: Array = np.empty((stop - first, *spec.shape[1:]), DTYPES[spec.dtype])
        for number in range(len(self.layers)):
            mine = np.flatnonzero(owners == number)
            if mine.size:
                window = deltas[number] if number else self._read(name, number, first, stop)
                found[mine] = window.take(places[mine])
        return found

    def _read(self, name: str, number: int, first: int, stop: int) -> _Window:
        """Reads what one layer has between two rows; what it has nothing of is as it is at first."""
        saved, places = self.layers[number].saved, self.places[first:stop][self.owners[first:stop] == number]
        if name not in saved.manifest.tensors:
            return _Window(0, None, next(slot.value for slot in self.slots if slot.name == name))
        low, high = (int(places[0]), int(places[-1]) + 1) if places.size else (0, 0)
        spec = saved.manifest.tensors[name].spec
        rows: Array = np.empty((high - low, *spec.shape[1:]), DTYPES[spec.dtype])
        saved.fill([(name, low, rows)])
        return _Window(low, rows)


@dataclass(frozen=True, eq=False)
class _Window:
    """Rows of a tensor that follow one another.

    Attributes:
        low: number of the first.
        rows: the rows; None where there is no tensor.
        value: the value of all elements there.
    """

    low: int
    rows: Array | None
    value: float = 0.0

    def take(self, places: Int64s) -> Array | float:
        """Returns some rows."""
        if self.rows is None:
            return self.value
        found: Array = self.rows[places - self.low]
        return found


def _is_in(hashes: Hashes, some: Hashes) -> npt.NDArray[np.bool_]:
    """Returns which hashes are among others, which are in order."""
    if not some.size:
        return np.zeros(hashes.size, np.bool_)
    at = np.searchsorted(some, hashes)
    at[at == some.size] = 0
    return np.asarray(some[at] == hashes)
