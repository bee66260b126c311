"""The rows that one checkpoint has of a table, mapped into memory and found by their hashes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pswire.checkpoint.table_layers import TableLayer
from pswire.checkpoint.table_tensors import beside
from pswire.model.hashing import LOW_BITS, Hashes, as_words, buckets_of, mixed
from pswire.model.rows import Int64s
from pswire.model.tensor import DTYPES, Array

NEAR = 6
"""Standard deviations by which a hash may lie beside its place, were all hashes of a bucket spread evenly."""

_LOW = np.uint64((1 << LOW_BITS) - 1)


class Pieces:
    """Arrays of rows, one behind another, as one. May be used by any thread.

    Args:
        arrays: the arrays; at least one.
    """

    def __init__(self, arrays: Sequence[Array]) -> None:
        self._arrays = [np.asarray(array) for array in arrays]
        self._starts = np.cumsum([0, *map(len, arrays)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def take(self, places: Int64s) -> Array:
        """Returns some rows, as a new array."""
        if len(self._arrays) == 1:
            found: Array = self._arrays[0][places]
            return found
        owners = np.searchsorted(self._starts, places, "right") - 1
        found = np.empty((places.size, *self._arrays[0].shape[1:]), self._arrays[0].dtype)
        for owner in np.unique(owners):
            mine = np.flatnonzero(owners == owner)
            found[mine] = self._arrays[owner][places[mine] - self._starts[owner]]
        return found

    def between(self, first: int, stop: int) -> Array:
        """Returns rows that follow one another, as a new array."""
        return self.take(np.arange(first, stop))


class MappedLayer:
    """The rows of one layer of a table. May be used by any thread.

    Args:
        layer: the layer, of a checkpoint of this machine.

    Attributes:
        offsets: where the rows of each bucket begin, int64[BUCKETS + 1].
        keys, rows: the keys, and their rows.
    """

    def __init__(self, layer: TableLayer) -> None:
        table, manifest = layer.table, layer.saved.manifest
        self.offsets = layer.offsets("row")
        self._salt = np.uint64(table.spec.salt)

        def pieces(name: str) -> Pieces:
            spec = manifest.tensors[name].spec
            return Pieces(layer.saved.mapped(name) or [np.empty((0, *spec.shape[1:]), DTYPES[spec.dtype])])

        self.keys, self.rows = pieces(beside(table.name, "keys")), pieces(table.name)

    def hashes(self, first: int, stop: int) -> Hashes:
        """Returns the hashes of rows that follow one another."""
        return self._hashes_of(self.keys.between(first, stop))

    def _hashes_of(self, keys: Array) -> Hashes:
        return mixed(as_words(keys) ^ self._salt)

    def find(self, hashes: Hashes) -> Int64s:
        """Returns the place of each hash, [n]; -1 of one that is not here.

        A hash is looked for near the place that it has if those of its bucket are spread evenly, as hashes are, and
        then, if it is not there, in all of the bucket. No hash is kept: those of keys on the way are computed.
        """
        buckets = buckets_of(hashes)
        low, stop = self.offsets[buckets], self.offsets[buckets + 1]
        sizes = stop - low
        guess = low + ((hashes & _LOW).astype(np.float64) * (sizes * 2.0**-LOW_BITS)).astype(np.int64)
        near = (NEAR * np.sqrt(sizes * 0.25)).astype(np.int64) + 2
        found = self._find_between(hashes, np.maximum(guess - near, low), np.minimum(guess + near, stop))
        missing = np.flatnonzero(found < 0)
        if missing.size:
            found[missing] = self._find_between(hashes[missing], low[missing], stop[missing])
        return found

    def _find_between(self, hashes: Hashes, low: Int64s, stop: Int64s) -> Int64s:
        """Finds hashes by bisection, each between two places."""
        if not len(self.keys):
            return np.full(hashes.size, -1, np.int64)
        last, end = len(self.keys) - 1, stop
        for _ in range(int((stop - low).max(initial=0)).bit_length()):
            middle = (low + stop) >> 1
            before = (self._hashes_of(self.keys.take(np.minimum(middle, last))) < hashes) & (low < stop)
            low, stop = np.where(before, middle + 1, low), np.where(before, stop, middle)
        is_here = (low < end) & (self._hashes_of(self.keys.take(np.minimum(low, last))) == hashes)
        return np.where(is_here, low, -1)
