"""Differences between two checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from pswire.checkpoint.manifest import Manifest
from pswire.checkpoint.merged_tables import MergedTable
from pswire.checkpoint.reader import SavedCheckpoint
from pswire.checkpoint.table_layers import kind_of
from pswire.model.tensor import Array, TensorSpec
from pswire.telemetry.views.columns import column

CHUNK = 1 << 20
"""Elements that are compared at a time."""


@dataclass(frozen=True)
class VariableDifference:
    """One variable in two checkpoints. Rows of a dynamic table are compared by their keys.

    Attributes:
        name: name of the variable.
        a, b: dtype and shape in each; None where it is not there.
        count: elements that differ; two that are no number are the same. None where shape or dtype differ. Of a table
            those of rows whose key one of both does not have count as well.
        largest: greatest absolute difference; infinite where only one is a number. None as above, and of bools.
        elements: of a table, elements of the rows that any of both has; None of others.
    """

    name: str = column("variable")
    a: TensorSpec | None = column("A", lambda v: str(v.a or "-"))
    b: TensorSpec | None = column("B", lambda v: str(v.b or "-"))
    count: int | None = column(
        "elements that differ", lambda v: "" if v.count is None or v.a is None else f"{v.count:,} of {v.total:,}", None
    )
    largest: float | None = column(
        "largest difference", lambda v: "" if v.largest is None else f"{v.largest:.6g}", None
    )
    elements: int | None = None

    @property
    def total(self) -> int:
        """Elements that were compared."""
        return self.elements if self.elements is not None else self.a.size if self.a else 0

    @property
    def same(self) -> bool:
        """True if all elements are equal."""
        return self.count == 0

    def report(self) -> dict[str, Any]:
        """As `psctl checkpoint diff --json` gives it; JSON has no infinity, which is a text there."""
        sides = {
            key: spec and {"dtype": spec.dtype, "shape": spec.shape} for key, spec in (("a", self.a), ("b", self.b))
        }
        largest = "inf" if self.largest == np.inf else self.largest
        return {"name": self.name, **sides, "count": self.count, "largest": largest}


def difference(a: SavedCheckpoint, b: SavedCheckpoint, name: str) -> VariableDifference:
    """Compares one variable; raises `CheckpointError` where it cannot be read."""
    saved = [each.manifest.tensors.get(name) for each in (a, b)]
    x, y = (each.spec if each else None for each in saved)
    if x is None or x != y:
        return VariableDifference(name, x, y)
    return VariableDifference(name, x, y, *compare(a.tensor(name), b.tensor(name)))


def differences(a: SavedCheckpoint, b: SavedCheckpoint) -> Iterator[VariableDifference]:
    """Compares all variables, by name; of a dynamic table in both, deltas included, what is saved beside its rows, too.

    Raises:
        CheckpointError: something cannot be read.
    """
    both = {
        name: table
        for name, table in a.manifest.tables.items()
        if name in b.manifest.tables and kind_of(table.spec) == kind_of(b.manifest.tables[name].spec)
    }
    owned = {tensor for each in (a, b) for tensor, table in each.manifest.owners.items() if table in both}
    names = {*a.manifest.tensors, *b.manifest.tensors} - owned
    tables = {name: (MergedTable.of(a, name), MergedTable.of(b, name)) for name in both}
    names |= {tensor for pair in tables.values() for one in pair for tensor in one.rows}
    owners = {tensor: pair for pair in tables.values() for one in pair for tensor in one.rows}
    for name in sorted(names):
        yield _of_tables(name, *owners[name]) if name in owners else difference(a, b, name)


def _of_tables(name: str, a: MergedTable, b: MergedTable) -> VariableDifference:
    """Compares what one tensor has for the same keys."""
    x, y = a.rows.get(name), b.rows.get(name)
    if x is None or y is None or (x.dtype, x.shape[1:]) != (y.dtype, y.shape[1:]):
        return VariableDifference(name, x, y)
    row = TensorSpec(x.dtype, x.shape[1:]).size
    _, at, to = np.intersect1d(a.hashes, b.hashes, assume_unique=True, return_indices=True)
    alone = len(a) + len(b) - 2 * at.size
    count, largest = alone * row, None
    if name.removeprefix(f"{a.name}/") != "keys":
        one, other = (np.concatenate([*each.pieces(name)])[rows] for each, rows in ((a, at), (b, to)))
        differing, largest = compare(one, other)
        count += differing
    return VariableDifference(name, x, y, count, largest, (at.size + alone) * row)


def compare(a: Array, b: Array) -> tuple[int, float | None]:
    """Returns how many elements differ, and the largest absolute difference, of arrays of one shape and dtype."""
    flat = a.reshape(-1), b.reshape(-1)
    count, largest = 0, 0.0
    for begin in range(0, a.size, CHUNK):
        x, y = (each[begin : begin + CHUNK] for each in flat)
        differs = (x != y) & ~((x != x) & (y != y))
        count += int(differs.sum())
        if a.dtype != np.bool_ and differs.any():
            largest = max(largest, _largest(x[differs], y[differs]))
    return count, None if a.dtype == np.bool_ else largest


def _largest(x: Array, y: Array) -> float:
    wide = np.complex128 if np.iscomplexobj(x) else np.longdouble
    with np.errstate(invalid="ignore", over="ignore"):
        gaps = np.abs(x.astype(wide) - y.astype(wide))
    return float(np.nan_to_num(gaps, nan=np.inf, posinf=np.inf).max())


def other_differences(a: Manifest, b: Manifest) -> list[str]:
    """Returns what differs beside the variables: some of "positions", "objects", "state" and "tables"."""
    found = [name for name in ("positions", "objects", "state") if getattr(a, name) != getattr(b, name)]
    specs = [{name: (table.spec, table.slots) for name, table in each.tables.items()} for each in (a, b)]
    return found + ["tables"] * (specs[0] != specs[1])
