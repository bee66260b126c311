"""Dynamic tables with what tests alone do: rows are removed, states are compared, cut, joined and put back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np

from psserver.tables import saving, table
from psserver.tables.table import OpenedTable
from pswire.model.table_state import TableState, offsets_of

OF_BUCKETS = ("hands", "sketch", "halved", "since")
OF_ITEMS = {
    "offsets": ("keys", "count", "last", "changed"),
    "counted_offsets": ("counted_keys", "counted"),
    "deleted_offsets": ("deleted_keys",),
}


class State(TableState):
    """The state of some buckets."""

    def cut(self, buckets: range) -> State:
        """The state of some of the buckets."""
        first, end = buckets.start - self.buckets.start, buckets.stop - self.buckets.start
        found = {name: getattr(self, name)[first:end] for name in OF_BUCKETS}
        for offsets, names in OF_ITEMS.items():
            starts = getattr(self, offsets)
            items = slice(starts[first], starts[end])
            found |= {offsets: starts[first : end + 1] - starts[first]}
            found |= {name: getattr(self, name)[items] for name in names}
            if offsets == "offsets":
                found["tensors"] = tuple(tensor[items] for tensor in self.tensors)
        return replace(self, buckets=buckets, **found)

    def equals(self, other: TableState) -> bool:
        """Whether all is the same, to the last bit."""
        return all(_equal(getattr(self, f.name), getattr(other, f.name)) for f in fields(self))


def _equal(one: object, other: object) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.shape == other.shape and one.dtype == other.dtype and one.tobytes() == other.tobytes()
    return one == other


def state_of(frozen: saving.FrozenState) -> State:
    """The state that was frozen, as new arrays."""
    state = frozen.load()
    tensors = tuple(np.concatenate([*frozen.pieces(number)]) for number in range(frozen.rows.tensors))
    return State(**{f.name: getattr(state, f.name) for f in fields(state)} | {"tensors": tensors})


def joined(states: Sequence[State], buckets: range) -> State:
    """The state of a range of buckets, from states of one table that hold all of them, in any order."""
    parts, at = list[State](), buckets.start
    while at < buckets.stop:
        holder = next(state for state in states if state.buckets.start <= at < state.buckets.stop)
        end = min(holder.buckets.stop, buckets.stop)
        parts.append(holder.cut(range(at, end)))
        at = end
    one = parts[0]
    assert {(part.salt, part.round, part.expired) for part in parts} == {(one.salt, one.round, one.expired)}
    found = {name: np.concatenate([getattr(part, name) for part in parts]) for name in OF_BUCKETS}
    for offsets, names in OF_ITEMS.items():
        found[offsets] = offsets_of(np.concatenate([np.diff(getattr(part, offsets)) for part in parts]))
        found |= {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
    tensors = tuple(np.concatenate(each) for each in zip(*(part.tensors for part in parts), strict=True))
    return replace(one, buckets=buckets, tensors=tensors, **found)


class Opened(OpenedTable):
    """What a round finds."""

    @property
    def created(self) -> int:
        """Number of rows that were made."""
        return self.new.size

    @property
    def refused(self) -> int:
        """Number of keys, of those given, that are refused."""
        return int(np.count_nonzero(self.slots < 0))

    @property
    def touched(self) -> np.ndarray:
        """The slots of all keys that are not refused, each once, in increasing order."""
        return np.unique(self.slots[self.slots >= 0])


def remove(table: table.Table, round: int, keys: np.ndarray) -> int:
    """Drops the rows, and the counts, of some keys between two rounds; how many rows."""
    table._check_idle(round)
    hashes, entries = table._contents.find(keys)
    there = entries != 0
    hashes, at = np.unique(hashes[there], return_index=True)
    table._contents.round, before = round, len(table)
    table._contents.drop(hashes, entries[there][at])
    return before - len(table)


class Table(table.Table):
    """A table that can be compared."""

    def begin(self, *args, **more) -> Opened:
        opened = super().begin(*args, **more)
        return Opened(opened.slots, opened.new)

    def lookup(self, keys: np.ndarray, tensor: int = 0) -> np.ndarray:
        """Rows by keys."""
        return self.rows_at(self.find(keys), keys, tensor)

    def remove(self, round: int, keys: np.ndarray) -> int:
        """Drops the rows of some keys; how many."""
        return remove(self, round, keys)

    def state(self) -> State:
        """The state between two rounds."""
        return state_of(self.freeze())

    def delta(self, since: int) -> State:
        """What has changed after a round."""
        frozen = self.freeze(since)
        assert frozen.since == since
        return state_of(frozen)

    def restore(self, states: Sequence[State]) -> None:
        """Replaces everything by states of all buckets."""
        state = joined(states, self.buckets)
        for array, rows in zip(self.place(state), state.tensors, strict=True):
            array[...] = rows
