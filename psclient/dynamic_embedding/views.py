"""The rows of a table as a checkpoint has them: a layer that is whole, and those of deltas upon it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from psclient.dynamic_embedding.mapped import MappedLayer
from pswire.checkpoint.table_layers import ALL, TableLayer
from pswire.model.first_values import RowInitializer
from pswire.model.hashing import Hashes, buckets_of, keys_of, mixed
from pswire.model.rows import Int64s
from pswire.model.saved import SavedTable
from pswire.model.tensor import DTYPES, Array

GONE = -1
"""The place of a row that was dropped."""


@dataclass(frozen=True, eq=False)
class Found:
    """Where rows are.

    Attributes:
        layers: int64[n], the number of the layer of each; -1 for a key without a row.
        places: int64[n], the number of the row there.
    """

    layers: Int64s
    places: Int64s


@dataclass(frozen=True, eq=False)
class TableView:
    """The rows of a table. Nothing of it changes, so that any thread may use it.

    Attributes:
        table: the table, as the newest layer says.
        layers: its layers, from the first on.
        whole: uint16[BUCKETS], the layer that has all of each bucket; later ones have changes.
        hashes: uint64[m], of rows that layers have changed or dropped since, in order.
        owners: int64[m], the newest layer that has each.
        places: int64[m], the row there; `GONE` of one that was dropped.
        size: number of rows.
    """

    table: SavedTable
    layers: tuple[MappedLayer, ...]
    whole: npt.NDArray[np.uint16]
    hashes: Hashes
    owners: Int64s
    places: Int64s
    size: int

    @classmethod
    def of(cls, layers: Sequence[TableLayer]) -> TableView:
        """Makes one of layers, of which the first is whole; raises `DamagedCheckpoint` or `CheckpointError`."""
        first, *others = layers
        mapped, none = MappedLayer(first), np.empty(0, np.int64)
        whole = np.zeros(len(ALL), np.uint16)
        found = cls(first.table, (mapped,), whole, np.empty(0, np.uint64), none, none, int(mapped.offsets[-1]))
        for layer in others:
            found = found.followed_by(layer)
        return found

    def followed_by(self, layer: TableLayer) -> TableView:
        """Returns the rows with the changes of one more layer; raises as `of`."""
        number, mapped = len(self.layers), MappedLayer(layer)
        is_whole = layer.read("since") < 0 if layer.is_delta else np.ones(len(ALL), np.bool_)
        hashes, dropped = mapped.hashes(0, len(mapped.keys)), layer.hashes("deleted")
        keep = ~is_whole[buckets_of(hashes)]
        hashes, places = hashes[keep], np.flatnonzero(keep)
        dropped = dropped[~np.isin(dropped, hashes)]
        new = np.concatenate([hashes, dropped])
        stays = ~is_whole[buckets_of(self.hashes)] & ~np.isin(self.hashes, new)
        all_hashes = np.concatenate([self.hashes[stays], new])
        order = np.argsort(all_hashes)
        owners = np.concatenate([self.owners[stays], np.full(new.size, number)])[order]
        places = np.concatenate([self.places[stays], places, np.full(dropped.size, GONE)])[order]
        whole = np.where(is_whole, number, self.whole).astype(np.uint16)
        view = TableView(layer.table, (*self.layers, mapped), whole, all_hashes[order], owners, places, 0)
        return view._counted()

    def _counted(self) -> TableView:
        """Returns the same with the number of its rows."""
        size = sum(int(np.diff(layer.offsets)[self.whole == number].sum()) for number, layer in enumerate(self.layers))
        is_below, is_there = self._below(self.hashes).places >= 0, self.places != GONE
        size += int((is_there & ~is_below).sum()) - int((is_below & ~is_there).sum())
        return TableView(self.table, self.layers, self.whole, self.hashes, self.owners, self.places, size)

    # ---- Rows ----

    def find(self, words: Hashes) -> Found:
        """Finds keys, given as their 64 bits [n]."""
        hashes = mixed(words ^ np.uint64(self.table.spec.salt))
        if not self.hashes.size:
            return self._below(hashes)
        at = np.searchsorted(self.hashes, hashes)
        at[at == self.hashes.size] = 0
        is_here = self.hashes[at] == hashes
        layers = np.where(is_here & (self.places[at] != GONE), self.owners[at], -1)
        places = self.places[at]
        others = np.flatnonzero(~is_here)
        if others.size:
            below = self._below(hashes[others])
            layers[others], places[others] = below.layers, below.places
        return Found(layers, places)

    def _below(self, hashes: Hashes) -> Found:
        """Finds hashes in the layers that have all of a bucket."""
        owners = self.whole[buckets_of(hashes)].astype(np.int64)
        places = np.full(hashes.size, -1, np.int64)
        for number in map(int, np.unique(owners)):
            mine = np.flatnonzero(owners == number)
            places[mine] = self.layers[number].find(hashes[mine])
        return Found(np.where(places >= 0, owners, -1), places)

    def rows(self, words: Hashes) -> Array:
        """Returns the rows of keys, given as their 64 bits [n], as a new array; see `TableReader.lookup`."""
        spec, found = self.table.spec, self.find(words)
        rows: Array = np.empty((words.size, *spec.shape), DTYPES[spec.dtype])
        for number in map(int, np.unique(found.layers)):
            mine = np.flatnonzero(found.layers == number)
            if number < 0:
                rows[mine] = RowInitializer(spec).unknown(words[mine].view(spec.key_dtype))
            elif mine.size == words.size:
                return self.layers[number].rows.take(found.places)
            else:
                rows[mine] = self.layers[number].rows.take(found.places[mine])
        return rows

    def keys(self) -> Array:
        """Returns all keys, in the order of their hashes."""
        parts = [self.hashes[self.places != GONE]]
        for number, layer in enumerate(self.layers):
            mine = np.flatnonzero(self.whole == number)
            for run in np.split(mine, np.flatnonzero(np.diff(mine) > 1) + 1) if mine.size else ():
                hashes = layer.hashes(int(layer.offsets[run[0]]), int(layer.offsets[run[-1] + 1]))
                parts.append(hashes[~np.isin(hashes, self.hashes)])
        found: Hashes = np.sort(np.concatenate(parts))
        return keys_of(found, self.table.spec.salt, self.table.spec.key_dtype)
