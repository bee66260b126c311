"""What checkpoints have of a dynamic table: a layer that is whole, and upon it those of deltas, with changes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np

from pswire.checkpoint.reader import SavedCheckpoint
from pswire.checkpoint.table_tensors import BESIDE, COUNTS, KEYS, Unit, beside, kinds_of
from pswire.errors import DamagedCheckpoint
from pswire.model.hashing import BUCKETS, Hashes, buckets_of, hashes_of
from pswire.model.rows import Int64s
from pswire.model.saved import SavedTable
from pswire.model.table_state import offsets_of
from pswire.model.tables import TableSpec
from pswire.model.tensor import DTYPES, Array

ALL = range(BUCKETS)


@dataclass(frozen=True)
class TableLayer:
    """What one checkpoint has of a table: all of it, or what has changed since its base. Used by one thread.

    Args:
        saved: the checkpoint.
        table: the table.

    Raises:
        DamagedCheckpoint: a tensor of it is not there, or of another shape than it has to be.
    """

    saved: SavedCheckpoint
    table: SavedTable
    _read: dict[str, Array] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        self._check()

    @property
    def is_delta(self) -> bool:
        """True if it may have changes alone, of some buckets at least."""
        return self.table.since >= 0

    @property
    def kinds(self) -> list[str]:
        """The tensors of `BESIDE` that are there."""
        return kinds_of(self.table.spec, self.is_delta)

    def offsets(self, unit: Unit, buckets: range = ALL) -> Int64s:
        """Returns where the items of each of some buckets begin, and end; of keys that are not saved, of none."""
        kind = COUNTS[unit]
        return offsets_of(self.read(kind, buckets) if kind in self.kinds else np.zeros(len(buckets), np.int64))

    def read(self, kind: str, buckets: range = ALL) -> Array:
        """Returns a tensor of `BESIDE`, or what is of some buckets in it; what has an item for each bucket is kept."""
        name, unit = beside(self.table.name, kind), BESIDE[kind].unit
        spec = self.saved.manifest.tensors[name].spec
        if unit == "table":
            return self.saved.tensor(name)
        if unit == "bucket":
            if name not in self._read:
                self._read[name] = self.saved.tensor(name)
            return self._read[name][buckets.start : buckets.stop]
        offsets = self.offsets(unit)
        first, end = int(offsets[buckets.start]), int(offsets[buckets.stop])
        found: Array = np.empty((end - first, *spec.shape[1:]), DTYPES[spec.dtype])
        self.saved.fill([(name, first, found)])
        return found

    def hashes(self, unit: Unit, buckets: range = ALL) -> Hashes:
        """Returns the hashes of keys of some buckets, in order: of those with rows, counted or deleted.

        Raises:
            DamagedCheckpoint: a file is not as it was saved, or keys are not where they have to be.
            CheckpointError: a file cannot be read.
        """
        kind = KEYS[unit]
        if kind not in self.kinds:
            return np.empty(0, np.uint64)
        hashes = hashes_of(self.read(kind, buckets), self.table.spec.salt)
        owners = np.repeat(np.arange(buckets.start, buckets.stop), np.diff(self.offsets(unit, buckets)))
        if (hashes[1:] <= hashes[:-1]).any() or (buckets_of(hashes) != owners).any():
            self._fail("its keys are not in the order of their hashes")
        return hashes

    # ---- Whether it can be ----

    def _check(self) -> None:
        """Raises `DamagedCheckpoint` unless each tensor is there, as long as the others say."""
        tensors, table, spec = self.saved.manifest.tensors, self.table, self.table.spec
        counts: dict[Unit, int] = {"bucket": BUCKETS}
        rows = [(table.name, spec.row), *((slot.name, slot.row) for slot in table.slots)]
        wanted = [(name, row.dtype, row.shape, BESIDE["keys"].unit) for name, row in rows]
        for kind, each in ((kind, BESIDE[kind]) for kind in self.kinds):
            wanted.append((beside(table.name, kind), each.dtype or spec.key_dtype, each.item, each.unit))
        for name, dtype, item, unit in wanted:
            if name not in tensors:
                self._fail(f"{name!r} is missing")
            found = tensors[name].spec
            fits = len(found.shape) == len(item) + (unit != "table") and found.dtype == dtype
            own = found.shape[len(found.shape) - len(item) :] if fits else ()
            if not fits or any(size not in (-1, there) for size, there in zip(item, own, strict=True)):
                self._fail(f"{name!r} is {found}")
            if unit != "table" and counts.setdefault(unit, found.shape[0]) != found.shape[0]:
                self._fail(f"{name!r} is {found}, but its other tensors have {counts[unit]} items")
        for unit, kind in COUNTS.items():
            if kind in self.kinds:
                items = self.read(kind)
                if items.min() < 0 or items.sum() != counts[unit]:
                    self._fail(f"{beside(self.table.name, kind)!r} do not match the {counts[unit]} of the table")

    def _fail(self, why: str) -> NoReturn:
        raise DamagedCheckpoint(f"{self.saved.full} has a damaged table {self.table.name!r}: {why}")


def kind_of(spec: TableSpec) -> tuple[object, ...]:
    """Returns what the keys and rows of all layers of a table have in common."""
    return spec.key_dtype, spec.hash_seed, spec.dtype, spec.shape


def layers_of(saved: SavedCheckpoint, name: str, buckets: range = ALL) -> list[TableLayer]:
    """Returns the layers of a table, from the last one of which all of some buckets is there, on to the newest.

    Args:
        saved: the checkpoint.
        name: the table.
        buckets: the buckets.

    Raises:
        DamagedCheckpoint: a layer is broken, or missing.
        CheckpointError: a manifest cannot be read.
    """
    layers = list[TableLayer]()
    for each in (saved, *saved.bases):
        if name not in each.manifest.tables:
            raise DamagedCheckpoint(f"{each.full} does not contain table {name!r}, whose changes are in {saved.full}")
        layers.insert(0, TableLayer(each, each.manifest.tables[name]))
        if kind_of(layers[0].table.spec) != kind_of(layers[-1].table.spec):
            raise DamagedCheckpoint(f"table {name!r} of {each.full} differs from that of {saved.full}")
        if not layers[0].is_delta or (layers[0].read("since", buckets) < 0).all():
            break
    return layers
