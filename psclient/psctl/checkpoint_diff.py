"""Differences between two checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pswire.checkpoint.manifest import Manifest
from pswire.checkpoint.reader import SavedCheckpoint
from pswire.model.tensor import Array, TensorSpec

CHUNK = 1 << 20
"""Elements that are compared at a time."""


DIFFERENCES = ("variable", "A", "B", "elements that differ", "largest difference")


@dataclass(frozen=True)
class Difference:
    """One variable in two checkpoints.

    Attributes:
        name: name of the variable.
        a, b: dtype and shape in each; None where it is not there.
        count: elements that differ; two that are no number are the same. None where shape or dtype differ.
        largest: greatest absolute difference; infinite where only one is a number. None as above, and of bools.
    """

    name: str
    a: TensorSpec | None
    b: TensorSpec | None
    count: int | None = None
    largest: float | None = None

    @property
    def same(self) -> bool:
        """True if all elements are equal."""
        return self.count == 0

    def cells(self) -> tuple[str, ...]:
        """A row of a table with `DIFFERENCES` as headings; numbers are left out where they cannot be compared."""
        counted = "" if self.count is None or self.a is None else f"{self.count:,} of {self.a.size:,}"
        largest = "" if self.largest is None else f"{self.largest:.6g}"
        return self.name, str(self.a or "-"), str(self.b or "-"), counted, largest

    def report(self) -> dict[str, Any]:
        """As `psctl checkpoint diff --json` gives it; JSON has no infinity, which is a text there."""
        sides = {
            key: spec and {"dtype": spec.dtype, "shape": spec.shape} for key, spec in (("a", self.a), ("b", self.b))
        }
        largest = "inf" if self.largest == np.inf else self.largest
        return {"name": self.name, **sides, "count": self.count, "largest": largest}


def difference(a: SavedCheckpoint, b: SavedCheckpoint, name: str) -> Difference:
    """Compares one variable; raises `CheckpointError` where it cannot be read."""
    saved = [each.manifest.tensors.get(name) for each in (a, b)]
    x, y = (each.spec if each else None for each in saved)
    if x is None or x != y:
        return Difference(name, x, y)
    return Difference(name, x, y, *compare(a.tensor(name), b.tensor(name)))


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
    """Returns what differs beside the variables: some of "positions", "objects" and "state"."""
    return [name for name in ("positions", "objects", "state") if getattr(a, name) != getattr(b, name)]
