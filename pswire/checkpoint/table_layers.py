"""What checkpoints have of a dynamic table: a layer that is whole, and upon it those of deltas, with changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NoReturn

import numpy as np

from pswire.checkpoint.reader import SavedCheckpoint
from pswire.checkpoint.table_tensors import BESIDE, COUNTS, KEYS, Unit, beside, kinds_of
from pswire.errors import DamagedCheckpoint
from pswire.model.hashing import BUCKETS, Hashes, buckets_of, hashes_of
from pswire.model.rows import Int64s
from pswire.model.saved import SavedTable
from pswire.model.table_state import TableState, offsets_of
from pswire.model.tables import TableSpec
from pswire.model.tensor import DTYPES, Array, TensorSpec

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

    @cached_property
    def rows(self) -> Mapping[str, TensorSpec]:
        """Dtype and shape of the rows, by the table's name, and of the tensors beside them, by theirs."""
        tensors = {self.table.name: self.table.spec.row} | {slot.name: slot.row for slot in self.table.slots}
        count = self.saved.manifest.tensors[beside(self.table.name, "keys")].spec.shape[:1]
        return {name: TensorSpec(row.dtype, (*count, *row.shape)) for name, row in tensors.items()}

    def offsets(self, unit: Unit) -> Int64s:
        """Returns where the items of each bucket begin, int64[BUCKETS + 1]; of keys that are not saved, of none."""
        kind = COUNTS[unit]
        return offsets_of(self.read(kind) if kind in self.kinds else np.zeros(BUCKETS, np.int64))

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

    def state(self, buckets: range = ALL) -> TableState:
        """Returns all that it has of some buckets but the rows themselves; its `tensors` are none.

        Raises:
            DamagedCheckpoint: a file is not as it was saved, or keys are not where they have to be.
            CheckpointError: a file cannot be read.
        """
        found = {kind: self.read(kind, buckets) for kind in self.kinds}
        no_keys, zeros = found["keys"][:0], np.zeros(len(buckets), np.int64)
        salt, clock = self.table.spec.salt, found["clock"]
        state = TableState(
            salt=salt,
            buckets=buckets,
            offsets=offsets_of(found["rows"]),
            keys=found["keys"],
            tensors=(),
            count=found["count"],
            last=found["last"],
            changed=found["changed"],
            counted_offsets=offsets_of(found.get("counted_rows", zeros)),
            counted_keys=found.get("counted_keys", no_keys),
            counted=found.get("counted", zeros[:0]),
            hands=found["hands"],
            sketch=found.get("sketch", np.zeros((len(buckets), 0), np.uint8)),
            halved=found.get("halved", zeros),
            ticks=found.get("ticks", np.zeros((0, 2))),
            expired=int(clock[1]),
            round=self.table.round,
            since=found.get("since", zeros - 1),
            deleted_offsets=offsets_of(found.get("deleted_rows", zeros)),
            deleted_keys=found.get("deleted_keys", no_keys),
        )
        for keys, offsets in (
            (state.keys, state.offsets),
            (state.counted_keys, state.counted_offsets),
            (state.deleted_keys, state.deleted_offsets),
        ):
            self._hashes(keys, offsets, buckets)
        return state

    def hashes(self, unit: Unit, buckets: range = ALL) -> Hashes:
        """Returns the hashes of keys of some buckets, in order: of those with rows, counted or deleted.

        Raises:
            DamagedCheckpoint, CheckpointError: as of `state`.
        """
        kind = KEYS[unit]
        if kind not in self.kinds:
            return np.empty(0, np.uint64)
        offsets = self.offsets(unit)[buckets.start : buckets.stop + 1]
        return self._hashes(self.read(kind, buckets), offsets, buckets)

    def fill(self, buckets: range, arrays: Mapping[str, Array]) -> None:
        """Reads rows of some buckets into memory that is there; by the names of `rows`."""
        first = int(self.offsets("row")[buckets.start])
        self.saved.fill([(name, first, out) for name, out in arrays.items()])

    # ---- Whether it can be ----

    def _check(self) -> None:
        """Raises `DamagedCheckpoint` unless each tensor is there, as long as the others say."""
        tensors, spec = self.saved.manifest.tensors, self.table.spec
        counts: dict[Unit, int] = {"bucket": BUCKETS}
        rows = self._rows_if_there().items()
        wanted: list[tuple[str, str, tuple[int, ...], Unit]] = [
            (name, row.dtype, row.shape[1:], "row") for name, row in rows
        ]
        for kind in self.kinds:
            each = BESIDE[kind]
            wanted.append((beside(self.table.name, kind), each.dtype or spec.key_dtype, each.item, each.unit))
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

    def _rows_if_there(self) -> Mapping[str, TensorSpec]:
        name = beside(self.table.name, "keys")
        if name not in self.saved.manifest.tensors or not self.saved.manifest.tensors[name].spec.shape:
            self._fail(f"{name!r} is missing")
        return self.rows

    def _hashes(self, keys: Array, offsets: Int64s, buckets: range) -> Hashes:
        """Returns hashes; raises `DamagedCheckpoint` unless keys are in their order, and each in its bucket."""
        hashes = hashes_of(keys, self.table.spec.salt)
        owners = np.repeat(np.arange(buckets.start, buckets.stop), np.diff(offsets))
        if (hashes[1:] <= hashes[:-1]).any() or (buckets_of(hashes) != owners).any():
            self._fail("its keys are not in the order of their hashes")
        return hashes

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
