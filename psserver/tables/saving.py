"""Freezes a table for a checkpoint, and makes one again of plain arrays: all, or what has changed since a round."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from psserver.tables.contents import Contents
from psserver.tables.eviction import in_buckets
from psserver.tables.frozen_tensors import Flush, FrozenTensors
from psserver.tables.native import Native
from psserver.tables.policies import Counter, Sketch
from psserver.tables.rows import COUNT, LAST
from pswire.errors import InvalidRequest
from pswire.model.hashing import Hashes, hashes_of
from pswire.model.rows import Int64s
from pswire.model.table_state import TableState, offsets_of
from pswire.model.tensor import Array


class FrozenState:
    """The state of a table as it was when this was made, or what had changed in it since a round.

    To make it copies nothing that grows with the table: see `FrozenRows` and `FrozenCounts`. One thread reads it:
    `load`, then `pieces` of each tensor.

    Args:
        contents: the table, between two rounds.
        since: the round since which changes alone are wanted; -1 for all.
        flush: see `FrozenTensors`.

    Attributes:
        since: the round; -1 if all is here, as deletions since the round are not known any more.
        round: the last round of the table.
        rows: reads the rows.
    """

    def __init__(self, contents: Contents, since: int, flush: Flush | None) -> None:
        self.since = since if contents.deletions.knows(since) and since <= contents.round else -1
        self.round = contents.round
        self._contents = contents
        self._deleted = contents.deletions.since(self.since) if self.since >= 0 else []
        self._hands = contents.hands.at.copy()
        self._filter = sketch = contents.filter if isinstance(contents.filter, Sketch) else None
        self._sketch = sketch.freeze() if sketch else None
        self._halved = sketch.halved if sketch else np.zeros(len(contents.buckets), np.int64)
        self._ticks = np.array(contents.judge.ticks, np.float64).reshape(-1, 2)
        self._expired = contents.judge.expired
        self._counted = contents.freeze_counts()
        self.rows = FrozenTensors(contents.rows, self.since, flush)
        contents.rows.views.add(self.rows)

    @property
    def aside(self) -> int:
        """Bytes of what was set aside for it."""
        counted, sketch = self._counted, self._sketch
        return self.rows.aside + (counted.nbytes if counted else 0) + (sketch.aside if sketch else 0)

    def load(self) -> TableState:
        """Returns all but the tensors, of which there is none in it."""
        contents, (hashes, books) = self._contents, self.rows.load()
        counted, entries = self._counted.load() if self._counted else (np.empty(0, np.uint64), np.empty(0, np.int64))
        sketch = np.empty((len(contents.buckets), 0), np.uint8)
        if self._filter is not None and self._sketch is not None:
            sketch = self._filter.counted(self._sketch)
        deleted = np.unique(np.concatenate([np.empty(0, np.uint64), *self._deleted]))
        return TableState(
            salt=contents.salt,
            buckets=contents.buckets,
            offsets=_offsets(contents, hashes),
            keys=contents.keys_of(hashes),
            tensors=(),
            count=books[:, COUNT].copy().view(np.float32),
            last=books[:, LAST].copy(),
            changed=books[:, LAST].copy(),
            counted_offsets=_offsets(contents, counted),
            counted_keys=contents.keys_of(counted),
            counted=-entries,
            hands=self._hands,
            sketch=sketch,
            halved=self._halved,
            ticks=self._ticks,
            expired=self._expired,
            round=self.round,
            since=np.full(len(contents.buckets), self.since, np.int64),
            deleted_offsets=_offsets(contents, deleted),
            deleted_keys=contents.keys_of(deleted),
        )

    def pieces(self, number: int) -> Iterator[Array]:
        """Yields a tensor, in pieces of some rows; 0 is the weights."""
        return self.rows.pieces(number)


def _offsets(contents: Contents, hashes: Hashes) -> Int64s:
    return offsets_of(in_buckets(hashes)[contents.buckets.start : contents.buckets.stop])


def place(contents: Contents, state: TableState, native: Native) -> Int64s:
    """Replaces all that is there by a state of the same buckets; what is in the tensors of its rows is not known then.

    Returns:
        int64[n], the slots of the rows, which are 0 to n - 1.

    Raises:
        InvalidRequest: the state is of a table with another seed, or has changes alone. Nothing has changed.
        MemoryLimit: there is no memory. Nothing is left then.
    """
    _check(contents, state)
    if not state.is_whole:
        raise InvalidRequest("the state contains only changes since a round, not the whole table")
    contents.clear()
    contents.use_compiled(native)
    hashes = hashes_of(state.keys, state.salt)
    contents.reserve(hashes)
    slots = contents.create(hashes, np.zeros(hashes.size, np.int64))
    _write_books(contents, slots, state)
    _put_rest(contents, state)
    contents.round = state.round
    contents.deletions.forget(state.round)
    return slots


def _check(contents: Contents, state: TableState) -> None:
    if state.salt != contents.salt or state.buckets != contents.buckets:
        raise InvalidRequest("the state belongs to a table with another seed, whose keys are in other buckets")


def _write_books(contents: Contents, slots: Int64s, state: TableState) -> None:
    contents.rows.count[slots], contents.rows.last[slots] = state.count, state.last  # which `changed` equals


def _put_rest(contents: Contents, state: TableState) -> None:
    """Puts what is not of a row: keys that are counted, of which there are none yet, and where all stands."""
    if isinstance(contents.filter, Counter):
        contents.put(hashes_of(state.counted_keys, state.salt), -state.counted, np.zeros_like(state.counted))
    contents.hands.at[:] = state.hands
    if isinstance(contents.filter, Sketch) and contents.filter.counters.shape == state.sketch.shape:
        contents.filter.replace(state.sketch, state.halved)
    contents.judge.ticks = [(int(round), float(seconds)) for round, seconds in state.ticks]
    contents.judge.expired = state.expired
