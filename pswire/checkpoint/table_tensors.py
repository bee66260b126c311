"""The tensors of a dynamic table in a checkpoint: the rows, the tensors beside them, and what is known of each row.

All are in the order of the hashes of the keys, so that each range of buckets is a range of each tensor. In a file they
have the names that they have as a whole: the table's for its rows, `users`; their own for the tensors beside them; and
those of `BESIDE` behind the table's, such as `users/keys`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from pswire.model.saved import PartOf
from pswire.model.table_state import TableState
from pswire.model.tables import CBFFilter, CounterFilter, TableSpec, TimeToLive
from pswire.model.tensor import Array

Unit = Literal["row", "bucket", "counted", "deleted", "table"]
"""What a tensor has an item for: each row, each bucket, each key that is counted and has no row, each key whose row was
dropped; or it is of the whole table."""


@dataclass(frozen=True)
class TableMetadata:
    """A tensor beside the rows that tells what is known of a table.

    Attributes:
        unit: what it has an item for.
        dtype: its dtype; "" for that of the keys.
        item: shape of an item; -1 for a size that depends on the table.
    """

    unit: Unit
    dtype: str
    item: tuple[int, ...] = ()


BESIDE = {
    "keys": TableMetadata("row", ""),
    "count": TableMetadata("row", "float32"),
    "last": TableMetadata("row", "uint32"),
    "changed": TableMetadata("row", "uint32"),
    "rows": TableMetadata("bucket", "int64"),
    "hands": TableMetadata("bucket", "uint64"),
    "counted_keys": TableMetadata("counted", ""),
    "counted": TableMetadata("counted", "int64"),
    "counted_rows": TableMetadata("bucket", "int64"),
    "sketch": TableMetadata("bucket", "uint8", (-1,)),
    "halved": TableMetadata("bucket", "int64"),
    "deleted_keys": TableMetadata("deleted", ""),
    "deleted_rows": TableMetadata("bucket", "int64"),
    "since": TableMetadata("bucket", "int64"),
    "clock": TableMetadata("table", "int64", (2,)),
    "ticks": TableMetadata("table", "float64", (-1, 2)),
}
"""All of them. The first six and `clock` are always there; the rest where the table, or a delta, needs it."""

CHANGES = ("since", "deleted_keys", "deleted_rows")
"""Those of a delta alone."""

COUNTS: dict[Unit, str] = {"row": "rows", "counted": "counted_rows", "deleted": "deleted_rows"}
"""For each unit that is in a bucket the tensor that says how many of them each bucket has."""

KEYS: dict[Unit, str] = {"row": "keys", "counted": "counted_keys", "deleted": "deleted_keys"}
"""For each the tensor of the keys."""


def beside(table: str, kind: str) -> str:
    """Returns the name of a tensor of `BESIDE`."""
    return f"{table}/{kind}"


def kinds_of(spec: TableSpec, is_delta: bool) -> list[str]:
    """Returns which tensors of `BESIDE` a checkpoint has of a table."""
    needless: set[str] = set() if is_delta else {*CHANGES}
    if not isinstance(spec.admission, CounterFilter):
        needless |= {"counted_keys", "counted", "counted_rows"}
    if not isinstance(spec.admission, CBFFilter):
        needless |= {"sketch", "halved"}
    if not isinstance(spec.eviction, TimeToLive):
        needless |= {"ticks"}
    return [kind for kind in BESIDE if kind not in needless]


def tensors_of(table: str, spec: TableSpec, state: TableState, is_delta: bool) -> Iterator[tuple[str, Array, PartOf]]:
    """Returns what is saved of a table beside its rows and the tensors beside these.

    Args:
        table: the table's name.
        spec: the table.
        state: its state, or that of a part; its tensors are not looked at.
        is_delta: True for what has changed.

    Yields:
        The name of a tensor, the tensor, and which part it is. What is of the whole table is of its first part.
    """
    found = {
        **{kind: getattr(state, kind) for kind in BESIDE if hasattr(state, kind)},
        "rows": np.diff(state.offsets),
        "counted_rows": np.diff(state.counted_offsets),
        "deleted_rows": np.diff(state.deleted_offsets),
        "clock": np.array([state.round, state.expired]),
    }
    for kind in kinds_of(spec, is_delta):
        if BESIDE[kind].unit != "table" or state.buckets.start == 0:
            name = beside(table, kind)
            yield name, found[kind], PartOf(name, state.buckets.start)
