"""Checkpoints of dynamic tables without servers: tables in parts, and the files that servers write of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from psserver.checkpoints.tables import FrozenPart, Wanted, restored
from psserver.tables.table import Table
from pswire.checkpoint.assembly import manifest_of
from pswire.checkpoint.reader import SavedCheckpoint
from pswire.checkpoint.storage import storage_at
from pswire.checkpoint.writer import Frozen, write_manifest, write_shard
from pswire.model.hashing import BUCKETS, buckets_of, hashes_of
from pswire.model.plan import SnapshotOrder
from pswire.model.table_state import TableState, joined
from pswire.model.tables import SlotTensor, TableSpec
from tests.kit.table_functions import compiled

NAME = "users"
SLOTS = (SlotTensor("adam/users/m", "float64", (), 0.5), SlotTensor("adam/users/v", "float32", (2,)))


def ranges(count: int) -> list[range]:
    """Buckets of each of so many servers."""
    ends = np.linspace(0, BUCKETS, count + 1).astype(int)
    return [range(first, stop) for first, stop in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)]


class Servers:
    """The parts of one table, as servers have them.

    Args:
        root: directory of the checkpoints.
        spec: the table.
        parts: the parts.
        values: variables beside the table, on the first server.
    """

    def __init__(self, root: Path, spec: TableSpec, parts: Sequence[Table], **values: np.ndarray) -> None:
        self.root, self.spec, self.parts, self.values = root, spec, list(parts), values
        self.rounds: dict[str, list[int]] = {}

    @classmethod
    def made(cls, root: Path, spec: TableSpec, count: int = 1, slots=SLOTS, **values: np.ndarray) -> Servers:
        """A table without rows, on so many servers."""
        return cls(root, spec, [Table(spec, slots, each, compiled()) for each in ranges(count)], **values)

    def step(self, keys: np.ndarray, value: float = 1.0) -> None:
        """Makes a round, which adds a number to rows."""
        keys = keys.astype(self.spec.key_dtype)
        buckets = buckets_of(hashes_of(keys, self.spec.salt))
        for part in self.parts:
            opened = part.begin(part.round + 1, keys[(buckets >= part.buckets.start) & (buckets < part.buckets.stop)])
            for array in part.arrays:
                array[opened.touched] += value
            part.commit(float(part.round + 1))

    def train(self, rng: np.random.Generator, rounds: int = 5, many: int = 5000, count: int = 800) -> None:
        """Makes some rounds, with keys of which some are frequent."""
        for _ in range(rounds):
            self.step((rng.pareto(0.7, count) * 30).astype(np.int64) % many, float(rng.integers(1, 9)))

    def save(self, name: str, base: str = "", objects=None) -> SavedCheckpoint:
        """Writes a checkpoint; with a base what has changed since."""
        since = self.rounds.get(base, [-1] * len(self.parts))
        order = SnapshotOrder(
            name, tuple(range(len(self.parts))), 0, json.dumps({"base": base, "objects": objects or {}})
        )
        place, shards = storage_at(self.root), []
        self.rounds[name] = [part.round for part in self.parts]
        for number, (part, round) in enumerate(zip(self.parts, since, strict=True)):
            held = FrozenPart(NAME, part, part.hold(round), bool(base))
            frozen = Frozen(order, number, 7, (), {} if number else {**self.values}, tables={NAME: held})
            shards.append(write_shard(place, frozen, lambda value: (value,), lambda name: None))
        write_manifest(place, frozen, manifest_of(shards, order).text())
        return self.opened(name)

    def opened(self, name: str) -> SavedCheckpoint:
        """Opens a checkpoint."""
        return SavedCheckpoint.at(storage_at(self.root), name)

    def restored(self, name: str, count: int, spec: TableSpec | None = None, **wanted) -> Servers:
        """Restores a checkpoint onto so many servers."""
        spec, slots = spec or self.spec, self.parts[0].tensors
        given = {"saved": NAME, "beside": {slot.name: slot.name for slot in slots}} | wanted
        saved = self.opened(name)
        parts = [restored(saved, Wanted(NAME, spec, slots, each, **given), compiled()) for each in ranges(count)]
        return Servers(self.root, spec, parts)

    def state(self) -> TableState:
        """The state of the whole."""
        return joined([part.state() for part in self.parts], range(BUCKETS))
