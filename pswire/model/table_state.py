"""A dynamic table's state in plain arrays, by buckets, in the order of the keys' hashes; or what changed since a round.

Two tables that have seen the same rounds have equal states, whatever happened to their memory, and on however many
servers they lie: the states of the parts, joined, are the state of the whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

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


def offsets_of(counts: Int64s) -> Int64s:
    """Returns where each of some buckets begins, and the end, of their numbers of items."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
