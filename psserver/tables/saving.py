"""Saves a table as plain arrays, and makes one of them again; whole, or what has changed since a round."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from psserver.tables.contents import Contents
from psserver.tables.eviction import in_buckets
from psserver.tables.hashing import Hashes, buckets_of, hashes_of
from psserver.tables.policies import Sketch
from psserver.tables.state import TableDelta, TableState, covering
from pswire.errors import InvalidRequest
from pswire.model.rows import Int64s
from pswire.model.tensor import Array


def state_of(contents: Contents) -> TableState:
    """Returns the state, as new arrays."""
    hashes, entries = contents.all()
    has_row = entries > 0
    slots, rows, judge = entries[has_row] - 1, contents.rows, contents.judge
    sketch = contents.filter if isinstance(contents.filter, Sketch) else None
    count = len(contents.buckets)
    return TableState(
        salt=contents.salt,
        buckets=contents.buckets,
        offsets=_offsets(contents, hashes[has_row]),
        keys=contents.keys_of(hashes[has_row]),
        tensors=tuple(tensor.array[slots] for tensor in rows.tensors),
        count=rows.count[slots],
        last=rows.last[slots],
        changed=rows.changed[slots],
        counted_offsets=_offsets(contents, hashes[~has_row]),
        counted_keys=contents.keys_of(hashes[~has_row]),
        counted=-entries[~has_row],
        hands=contents.hands.at.copy(),
        sketch=sketch.counters.copy() if sketch else np.zeros((count, 0), np.uint8),
        halved=sketch.halved.copy() if sketch else np.zeros(count, np.int64),
        ticks=np.array(judge.ticks, np.float64).reshape(-1, 2),
        expired=judge.expired,
        round=contents.round,
    )


def _offsets(contents: Contents, hashes: Hashes) -> Int64s:
    counts = in_buckets(hashes)[contents.buckets.start : contents.buckets.stop]
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])


def restore_into(contents: Contents, state: TableState) -> None:
    """Replaces all that is there by a state of the same buckets.

    Raises:
        InvalidRequest: the state is of a table of another kind. Nothing has changed.
        MemoryLimit: there is no memory. Nothing is left then.
    """
    if state.salt != contents.salt:
        raise InvalidRequest("the state is of a table with another seed, whose keys are in other buckets")
    _check_rows(contents, state.tensors)
    contents.clear()
    hashes = hashes_of(state.keys, state.salt)
    slots = contents.create(hashes, np.zeros(hashes.size, np.int64))
    _write(contents, slots, state)
    contents.index.put(hashes_of(state.counted_keys, state.salt), -state.counted)
    contents.hands.at[:] = state.hands
    if isinstance(contents.filter, Sketch) and contents.filter.counters.shape == state.sketch.shape:
        contents.filter.counters[:] = state.sketch
        contents.filter.halved[:] = state.halved
    contents.judge.ticks = [(int(round), float(seconds)) for round, seconds in state.ticks]
    contents.judge.expired = state.expired
    contents.round = state.round
    contents.deletions.forget(state.round)


def delta_of(contents: Contents, since: int) -> TableDelta:
    """Returns what has changed after a round.

    Raises:
        InvalidRequest: the round is to come, or deletions since then are not known any more.
    """
    if since > contents.round:
        raise InvalidRequest(f"nothing has changed since round {since}: the table is of round {contents.round}")
    deleted, rows = contents.deletions.since(since), contents.rows
    slots = np.flatnonzero(rows.changed > since)
    hashes = rows.hashes[slots]
    order = np.argsort(hashes)
    hashes, slots = hashes[order], slots[order]
    return TableDelta(
        salt=contents.salt,
        buckets=contents.buckets,
        since=since,
        round=contents.round,
        deleted=contents.keys_of(deleted),
        keys=contents.keys_of(hashes),
        tensors=tuple(tensor.array[slots] for tensor in rows.tensors),
        count=rows.count[slots],
        last=rows.last[slots],
        changed=rows.changed[slots],
        hands=contents.hands.at.copy(),
    )


def apply_to(contents: Contents, deltas: Sequence[TableDelta]) -> None:
    """Makes the changes of deltas, to what is as of the round since which they are, or of a later one before their end.

    Args:
        contents: of any buckets.
        deltas: of one table and one time, which hold all of these buckets; they may hold more.

    Raises:
        InvalidRequest: a bucket is missing, there is something between the two, or the deltas are of different times or
            of another table. Nothing has changed.
        MemoryLimit: there is no memory. Only some of the changes are made then.
    """
    parts = covering(deltas, contents.buckets)
    one = parts[0][0]
    for delta, _ in parts:
        if (delta.salt, delta.since, delta.round) != (contents.salt, one.since, one.round):
            raise InvalidRequest("the deltas are of different rounds, or of a table with another seed")
        _check_rows(contents, delta.tensors)
    if not one.since <= contents.round <= one.round:
        raise InvalidRequest(
            f"a delta of rounds {one.since} to {one.round} does not follow a table of round {contents.round}"
        )
    contents.round = one.round
    for delta, buckets in parts:
        hashes = _within(hashes_of(delta.deleted, delta.salt), buckets)[0]
        entries = contents.index.entries(hashes)
        contents.drop(hashes[entries > 0], entries[entries > 0])
        hashes, rows = _within(hashes_of(delta.keys, delta.salt), buckets)
        entries = contents.index.entries(hashes)
        is_new = entries <= 0
        entries[is_new] = contents.create(hashes[is_new], entries[is_new]) + 1
        _write(contents, entries - 1, delta, rows)
        first = buckets.start - contents.buckets.start
        hands = delta.hands[buckets.start - delta.buckets.start : buckets.stop - delta.buckets.start]
        contents.hands.at[first : first + len(buckets)] = hands


def _within(hashes: Hashes, buckets: range) -> tuple[Hashes, slice]:
    """Returns the hashes in some buckets, of all in order, and where they are."""
    owners = buckets_of(hashes)
    places = slice(*np.searchsorted(owners, [buckets.start, buckets.stop]).tolist())
    return hashes[places], places


def _check_rows(contents: Contents, tensors: tuple[Array, ...]) -> None:
    own = [tensor.array for tensor in contents.rows.tensors]
    given = [(tensor.dtype, tensor.shape[1:]) for tensor in tensors]
    if given != [(array.dtype, array.shape[1:]) for array in own]:
        raise InvalidRequest(f"rows of {given} do not fit into a table of {[(a.dtype, a.shape[1:]) for a in own]}")


def _write(contents: Contents, slots: Int64s, given: TableState | TableDelta, rows: slice = slice(None)) -> None:
    """Writes some of the rows that are given, and what is known of them."""
    for tensor, values in zip(contents.rows.tensors, given.tensors, strict=True):
        tensor.array[slots] = values[rows]
    contents.rows.count[slots] = given.count[rows]
    contents.rows.last[slots], contents.rows.changed[slots] = given.last[rows], given.changed[rows]
