"""A dynamic table's state in plain arrays, by buckets, in the order of the keys' hashes; or what changed since a round.

Two tables that have seen the same rounds have equal states, whatever happened to their memory, and on however many
servers they lie: the states of the parts, joined, are the state of the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from pswire.errors import InvalidRequest
from pswire.model.hashing import Hashes
from pswire.model.rows import Int64s
from pswire.model.tensor import Array


@dataclass(frozen=True, eq=False)
class TableState:
    """The state of a table, or of some buckets of it, or what has changed in them since a round.

    Attributes:
        salt: of the hashes by which keys are in buckets, and in order.
        buckets: the buckets, a range of step 1.
        offsets: int64[len(buckets) + 1], the first row of each bucket, and the end.
        keys: int64 or uint64 [n], in the order of their hashes.
        tensors: the weights (n, *row shape), then the tensors beside them.
        count: float32[n], numbers of gradients.
        last: uint32[n], rounds of the last gradient.
        changed: uint32[n], rounds of the last change.
        counted_offsets: int64[len(buckets) + 1], as `offsets`, of keys that are counted and have no row.
        counted_keys: those keys [m].
        counted: int64[m], how often each has come.
        hands: uint64[len(buckets)], where each bucket's hand stands.
        sketch: uint8[len(buckets), width], the counters of a Bloom filter; of width 0 without one.
        halved: int64[len(buckets)], the halvings of each bucket's counters.
        ticks: float64[t, 2], rounds and their seconds.
        expired: the last round of which rows are too old; -1 for none.
        round: the last round.
        since: int64[len(buckets)], the round of each bucket since which changes alone are here: its rows that were
            changed or made later, and its keys whose rows were dropped; -1 if all of it is here.
        deleted_offsets: int64[len(buckets) + 1], as `offsets`, of keys whose rows were dropped.
        deleted_keys: those keys [k], in the order of their hashes; some may have a row again.
    """

    salt: int
    buckets: range
    offsets: Int64s
    keys: Array
    tensors: tuple[Array, ...]
    count: Array
    last: Array
    changed: Array
    counted_offsets: Int64s
    counted_keys: Array
    counted: Int64s
    hands: Hashes
    sketch: Array
    halved: Int64s
    ticks: Array
    expired: int
    round: int
    since: Int64s
    deleted_offsets: Int64s
    deleted_keys: Array

    @property
    def is_whole(self) -> bool:
        """True if all of each bucket is here."""
        return bool((self.since < 0).all())

    def cut(self, buckets: range) -> TableState:
        """Returns the state of some of the buckets; its arrays are views."""
        first, end = buckets.start - self.buckets.start, buckets.stop - self.buckets.start
        rows = slice(self.offsets[first], self.offsets[end])
        counted = slice(self.counted_offsets[first], self.counted_offsets[end])
        deleted = slice(self.deleted_offsets[first], self.deleted_offsets[end])
        return replace(
            self,
            buckets=buckets,
            offsets=self.offsets[first : end + 1] - self.offsets[first],
            keys=self.keys[rows],
            tensors=tuple(tensor[rows] for tensor in self.tensors),
            count=self.count[rows],
            last=self.last[rows],
            changed=self.changed[rows],
            counted_offsets=self.counted_offsets[first : end + 1] - self.counted_offsets[first],
            counted_keys=self.counted_keys[counted],
            counted=self.counted[counted],
            hands=self.hands[first:end],
            sketch=self.sketch[first:end],
            halved=self.halved[first:end],
            since=self.since[first:end],
            deleted_offsets=self.deleted_offsets[first : end + 1] - self.deleted_offsets[first],
            deleted_keys=self.deleted_keys[deleted],
        )

    def equals(self, other: TableState) -> bool:
        """Returns True if all is the same, to the last bit."""
        return all(_equal(getattr(self, f.name), getattr(other, f.name)) for f in fields(self))


def _equal(one: object, other: object) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.shape == other.shape and one.dtype == other.dtype and one.tobytes() == other.tobytes()
    return one == other


def covering(parts: Sequence[TableState], buckets: range) -> list[tuple[TableState, range]]:
    """Returns parts of a table with the buckets that each gives, so that each bucket of a range is given once.

    Raises:
        InvalidRequest: a bucket is in none of them.
    """
    found = []
    at = buckets.start
    while at < buckets.stop:
        holder = next((part for part in parts if part.buckets.start <= at < part.buckets.stop), None)
        if holder is None:
            raise InvalidRequest(f"bucket {at} of the table is not in any of its {len(parts)} parts")
        end = min(holder.buckets.stop, buckets.stop)
        found.append((holder, range(at, end)))
        at = end
    return found


def joined(states: Sequence[TableState], buckets: range) -> TableState:
    """Returns the state of a range of buckets, from states that hold all of them.

    Args:
        states: states of one table at one round, in any order; buckets that several hold are taken from one of them.
        buckets: the range.

    Raises:
        InvalidRequest: a bucket is missing, or the states are of different tables or rounds.
    """
    parts = [state.cut(held) for state, held in covering(states, buckets)]
    one = parts[0]
    if len(parts) == 1:
        return one
    for part in parts[1:]:
        if (part.salt, part.round, part.expired) != (one.salt, one.round, one.expired):
            raise InvalidRequest("the parts of the table belong to different jobs or rounds")

    def together(name: str) -> Array:
        return np.concatenate([getattr(part, name) for part in parts])

    def offsets(name: str) -> Int64s:
        counts = np.concatenate([np.diff(getattr(part, name)) for part in parts])
        return offsets_of(counts)

    return replace(
        one,
        buckets=buckets,
        offsets=offsets("offsets"),
        keys=together("keys"),
        tensors=tuple(np.concatenate(each) for each in zip(*(part.tensors for part in parts), strict=True)),
        count=together("count"),
        last=together("last"),
        changed=together("changed"),
        counted_offsets=offsets("counted_offsets"),
        counted_keys=together("counted_keys"),
        counted=together("counted"),
        hands=together("hands"),
        sketch=together("sketch"),
        halved=together("halved"),
        since=together("since"),
        deleted_offsets=offsets("deleted_offsets"),
        deleted_keys=together("deleted_keys"),
    )


def offsets_of(counts: Int64s) -> Int64s:
    """Returns where each of some buckets begins, and the end, of their numbers of items."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
