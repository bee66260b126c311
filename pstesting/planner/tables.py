"""Embedding tables, planned from a sample of their ids: how many rows they will have, of which kind, and together."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pstesting.planner.distinct import Estimate, distinct_at, distinct_in
from pswire.errors import ConfigError

INDEX_BYTES = 40
"""Memory of a row of a dynamic table beside its numbers and slots: its key in the index, and when it was changed."""

GROUP_KEYS = 1 << 48
"""Keys of the tables of a group are below that."""

SHARD_BYTES = 256 << 10
"""A smaller shard of a static table is not worth its part of each message."""


@dataclass(frozen=True)
class Sample:
    """Ids of some examples.

    Attributes:
        examples: number of examples.
        ids: for each table all ids of the examples, integers (n,).
    """

    examples: int
    ids: Mapping[str, npt.NDArray[np.integer[Any]]]

    @classmethod
    def read(cls, path: Path) -> Sample:
        """Reads a file: .npz, .npy or .csv.

        Raises:
            ConfigError: it is none of these, or has no ids, or not the same number of examples for all tables.
        """
        readers = {".npz": _npz, ".npy": _npy, ".csv": _csv}
        if path.suffix not in readers:
            raise ConfigError(f"--tables {path}: unknown format; use {', '.join(readers)}")
        try:
            found = readers[path.suffix](path)
        except (OSError, ValueError, csv.Error) as error:  # NumPy and csv name no file
            raise ConfigError(f"--tables {path} cannot be read: {error}") from error
        for name, (_, ids) in found.items():
            if ids.dtype.kind not in "iu":
                raise ConfigError(f"--tables {path}: ids of {name!r} are {ids.dtype}, not integers")
            if not ids.size:
                raise ConfigError(f"--tables {path}: {name!r} has no ids")
        if len(counts := {examples for examples, _ in found.values()}) != 1:
            raise ConfigError(
                f"--tables {path}: tables have {', '.join(map(str, sorted(counts))) or 'no'} examples; give all of "
                "them the same examples"
            )
        return cls(counts.pop(), {name: ids.ravel() for name, (_, ids) in found.items()})


_Read = dict[str, tuple[int, npt.NDArray[Any]]]
"""Examples and ids by table."""


def _npz(path: Path) -> _Read:
    with np.load(path, allow_pickle=False) as arrays:
        return {name: _counted(arrays[name]) for name in arrays.files}


def _npy(path: Path) -> _Read:
    columns = np.load(path, allow_pickle=False)
    if columns.ndim != 2:
        raise ValueError(f"an array of shape {columns.shape}, not (examples, tables)")
    return {str(number): _counted(column) for number, column in enumerate(columns.T)}


def _csv(path: Path) -> _Read:
    with path.open(newline="") as file:
        names, *rows = csv.reader(file)
    cells = zip(*rows, strict=True)
    return {
        name: (len(rows), np.array([int(id) for cell in column for id in cell.split()] or np.empty(0, int)))
        for name, column in zip(names, cells, strict=True)
    }


def _counted(ids: npt.NDArray[Any]) -> tuple[int, npt.NDArray[Any]]:
    if not ids.ndim:
        raise ValueError("an array without dimensions, not (examples,) or (examples, ids)")
    return len(ids), ids


@dataclass(frozen=True)
class PlannedTable:
    """A table as it is suggested.

    Attributes:
        name: its name.
        seen: different ids of the sample.
        rows: rows that it will have: different ids of all examples, or the size of a static table.
        expected: the different ids of all examples, with an interval of 95 %.
        checked: the relative error of the same estimate of `seen`, made from a tenth of the sample.
        kind: "static", with as many rows as `rows`, or "dynamic".
        batch: different ids of a worker's batch.
        held_bytes: of rows, slots, and the index of a dynamic table, on all servers.
        collection: the number of the collection that stores it together with others.
    """

    name: str
    seen: int
    rows: int
    expected: Estimate
    checked: float
    kind: str
    batch: float
    held_bytes: float
    collection: int


def plan_tables(sample: Sample, examples: float, batch: int, row_bytes: float) -> list[PlannedTable]:
    """Suggests what kind of table each is, and how large.

    Args:
        sample: examples that were drawn at random from those of the job.
        examples: number of examples of the job, each of which counts once however often it is trained on.
        batch: examples of a worker's batch.
        row_bytes: bytes of a row and its slots.
    """
    found, collections = [], dict[object, int]()
    for name, ids in sample.ids.items():
        keys, counts = np.unique(ids, return_counts=True)
        expected = distinct_at(counts, max(examples / sample.examples, 1.0))
        least, most = int(keys[0]), int(keys[-1])
        # With ids from 0 on the largest one of n different ids is about one n-th below the number of rows.
        size = most + 1 + (most + 1 - len(keys)) // len(keys)
        static = least >= 0 and size * row_bytes <= expected.value * (row_bytes + INDEX_BYTES)
        alone = not static and not 0 <= least <= most < GROUP_KEYS
        rows = size if static else round(expected.value)
        found.append(
            PlannedTable(
                name,
                len(keys),
                rows,
                expected,
                _error(ids, len(keys)),
                "static" if static else "dynamic",
                distinct_in(counts, batch / sample.examples),
                rows * (row_bytes + (0 if static else INDEX_BYTES)),
                collections.setdefault(name if alone else static, len(collections)),
            )
        )
    return found


def _error(ids: npt.NDArray[Any], seen: int) -> float:
    part = ids[: max(1, len(ids) // 10)]
    counts = np.unique(part, return_counts=True)[1]
    return distinct_at(counts, len(ids) / len(part)).value / seen - 1


@dataclass(frozen=True)
class Collection:
    """Tables that are stored together.

    Attributes:
        tables: their names.
        kind: "static" or "dynamic".
        rows: of all of them.
        held_bytes: of all of them, on all servers.
        shards: number of servers that have a part of it: all, unless it is static and small.
    """

    tables: tuple[str, ...]
    kind: str
    rows: int
    held_bytes: float
    shards: int


def collections_of(tables: Sequence[PlannedTable], servers: int) -> list[Collection]:
    """Returns the collections of some tables, in the order of their numbers, where there are so many servers."""
    members: dict[int, list[PlannedTable]] = {}
    for table in tables:
        members.setdefault(table.collection, []).append(table)
    found = []
    for _, own in sorted(members.items()):
        held, kind = sum(table.held_bytes for table in own), own[0].kind
        shards = servers if kind == "dynamic" else max(1, min(servers, int(held // SHARD_BYTES)))
        names = tuple(table.name for table in own)
        found.append(Collection(names, kind, sum(table.rows for table in own), held, shards))
    return found
