"""Holds a table for a checkpoint, and makes one again of plain arrays: all of it, or what has changed since a round."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from psserver.tables.contents import Contents
from psserver.tables.eviction import in_buckets
from psserver.tables.held import HeldRows, Settle
from psserver.tables.native import Native
from psserver.tables.policies import Counter, Sketch
from psserver.tables.reserved import PIECE_BYTES
from psserver.tables.rows import CHANGED, COUNT, LAST
from psserver.tiers.mapped import Use
from pswire.errors import InvalidRequest
from pswire.model.hashing import Hashes, hashes_of
from pswire.model.rows import Int64s
from pswire.model.table_state import TableState, offsets_of
from pswire.model.tensor import Array


class HeldState:
    """The state of a table as it was when this was made, or what had changed in it since a round.

    To make it copies nothing that grows with the table: see `HeldRows`, `HeldCounts` and `HeldCounters`. One thread
    reads it: `load`, then `pieces` of each tensor.

    Args:
        contents: the table, between two rounds.
        since: the round since which changes alone are wanted; -1 for all.
        settle: see `HeldRows`.

    Attributes:
        since: the round; -1 if all is here, as deletions since the round are not known any more.
        round: the last round of the table.
        rows: reads the rows.
    """

    def __init__(self, contents: Contents, since: int, settle: Settle | None) -> None:
        self.since = since if contents.deletions.knows(since) and since <= contents.round else -1
        self.round = contents.round
        self._contents = contents
        self._deleted = contents.deletions.since(self.since) if self.since >= 0 else []
        self._hands = contents.hands.at.copy()
        sketch = contents.filter if isinstance(contents.filter, Sketch) else None
        self._sketch = sketch.hold() if sketch else None
        self._halved = sketch.halved if sketch else np.zeros(len(contents.buckets), np.int64)
        self._ticks = np.array(contents.judge.ticks, np.float64).reshape(-1, 2)
        self._expired = contents.judge.expired
        self._counted = contents.hold_counts()
        self.rows = HeldRows(contents.rows, self.since, settle)
        contents.rows.hold(self.rows)

    @property
    def aside(self) -> int:
        """Bytes of what was set aside for it."""
        return self.rows.aside + sum(notes.nbytes for notes in (self._counted, self._sketch) if notes)

    def load(self) -> TableState:
        """Returns all but the tensors, of which there is none in it."""
        contents, (hashes, books) = self._contents, self.rows.load()
        counted, entries = self._counted.load() if self._counted else (np.empty(0, np.uint64), np.empty(0, np.int64))
        sketch = self._sketch.load() if self._sketch else np.empty((len(contents.buckets), 0), np.uint8)
        deleted = np.unique(np.concatenate([np.empty(0, np.uint64), *self._deleted]))
        return TableState(
            salt=contents.salt,
            buckets=contents.buckets,
            offsets=_offsets(contents, hashes),
            keys=contents.keys_of(hashes),
            tensors=(),
            count=books[:, COUNT].copy().view(np.float32),
            last=books[:, LAST].copy(),
            changed=books[:, CHANGED].copy(),
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

    def whole(self) -> TableState:
        """Returns all, as new arrays."""
        state = self.load()
        tensors = (np.concatenate([*self.pieces(number)]) for number in range(self.rows.tensors))
        return replace(state, tensors=tuple(tensors))


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
    slots = contents.create(hashes, np.zeros(hashes.size, np.int64))
    _write_books(contents, slots, state)
    _put_rest(contents, state)
    contents.round = state.round
    contents.deletions.forget(state.round)
    return slots


def restore_into(contents: Contents, state: TableState, native: Native) -> None:
    """Replaces all that is there by a state of the same buckets, with its tensors.

    Raises:
        InvalidRequest, MemoryLimit: as of `place`; the first also if the tensors do not fit.
    """
    _check_rows(contents, state.tensors)
    _write_rows(contents, place(contents, state, native), state.tensors)


def _check(contents: Contents, state: TableState) -> None:
    if state.salt != contents.salt or state.buckets != contents.buckets:
        raise InvalidRequest("the state belongs to a table with another seed, whose keys are in other buckets")


def _check_rows(contents: Contents, tensors: tuple[Array, ...]) -> None:
    own = [tensor.array for tensor in contents.rows.tensors]
    given = [(tensor.dtype, tensor.shape[1:]) for tensor in tensors]
    if given != [(array.dtype, array.shape[1:]) for array in own]:
        raise InvalidRequest(f"rows of {given} do not fit into a table of {[(a.dtype, a.shape[1:]) for a in own]}")


def _write_rows(contents: Contents, slots: Int64s, tensors: tuple[Array, ...]) -> None:
    for tensor, values in zip(contents.rows.tensors, tensors, strict=True):
        step = max(1, PIECE_BYTES // max(values[:1].nbytes, 1))
        for first in range(0, len(slots), step):
            some = slots[first : first + step]
            tensor.touch(some, Use.PASS)
            tensor.array[some] = values[first : first + step]


def _write_books(contents: Contents, slots: Int64s, state: TableState) -> None:
    contents.rows.count[slots] = state.count
    contents.rows.last[slots], contents.rows.changed[slots] = state.last, state.changed


def _put_rest(contents: Contents, state: TableState) -> None:
    """Puts what is not of a row: keys that are counted, of which there are none yet, and where all stands."""
    if isinstance(contents.filter, Counter):
        contents.put(hashes_of(state.counted_keys, state.salt), -state.counted, np.zeros_like(state.counted))
    contents.hands.at[:] = state.hands
    if isinstance(contents.filter, Sketch) and contents.filter.counters.shape == state.sketch.shape:
        contents.filter.replace(state.sketch, state.halved)
    contents.judge.ticks = [(int(round), float(seconds)) for round, seconds in state.ticks]
    contents.judge.expired = state.expired
