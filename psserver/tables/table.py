"""A dynamic table, or the part of one that lies on this server.

What a table does in a round is a function of its state and of the round: no clock, no random number, no order of
arrival beyond the keys' own, and no difference between functions that are compiled and those that are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count

import numpy as np

from psserver.tables.contents import Contents
from psserver.tables.eviction import above, condemned, in_buckets
from psserver.tables.first_values import FirstValues
from psserver.tables.hashing import Hashes, combined
from psserver.tables.index import bucket_bounds
from psserver.tables.native import Native
from psserver.tables.policies import Bools, Sketch, limit_of, shares_of
from psserver.tables.saving import apply_to, delta_of, restore_into, state_of
from psserver.tables.state import TableDelta, TableState, joined
from pswire.errors import InvalidRequest, MemoryLimit
from pswire.model.rows import Int64s
from pswire.model.tables import BUCKETS, MAX_COUNT, MIN_CAPACITY, SlotTensor, TableSpec
from pswire.model.tensor import Array

MAX_ROUND = (1 << 32) - 1
ALL = range(BUCKETS)


@dataclass(frozen=True, eq=False)
class Opened:
    """What a round finds in a table.

    Attributes:
        slots: int64[n], the slot of each key that was given; -1 for a key that is refused.
        created: number of rows that were made.
    """

    slots: Int64s
    created: int

    @cached_property
    def refused(self) -> int:
        """Number of keys, of those given, that are refused: their gradients are to be dropped."""
        return int(np.count_nonzero(self.slots < 0))

    @cached_property
    def touched(self) -> Int64s:
        """The slots of all keys that are not refused, each once, in increasing order."""
        found = np.unique(self.slots)
        return found[found >= 0]


@dataclass(frozen=True, eq=False)
class _Round:
    """A round that has begun: what it takes to end it, or to undo it.

    Attributes:
        number: the round.
        created, before, slots: hashes whose rows were made, the entries that they had, and their slots.
        counted, counted_entries: hashes that are counted, and their entries from now on.
        known: slots of the rows that were there.
        books: what was known of these.
    """

    number: int
    created: Hashes
    before: Int64s
    slots: Int64s
    counted: Hashes
    counted_entries: Int64s
    known: Int64s
    books: Array


class Table:
    """The rows of some buckets of a dynamic table. Used by one thread at a time.

    A round is `begin`, the update of the rows by the caller, then `commit`, or `undo`. All parts of a table make each
    round, with no keys if none of them is theirs: hands move, and what is too old leaves.

    Args:
        spec: the table.
        seed: of the hashes by which keys are spread; differs from job to job, and is the same on all servers.
        tensors: tensors beside the rows.
        buckets: the buckets that are held, a range of step 1.
        native: compiled functions; without them the same is done by NumPy.

    Attributes:
        evicted: number of rows that were evicted so far.

    Raises:
        InvalidRequest: the spec or the range is not valid, or the memory limit has no room for `MIN_CAPACITY` rows.
    """

    def __init__(
        self,
        spec: TableSpec,
        seed: int,
        tensors: Sequence[SlotTensor] = (),
        buckets: range = ALL,
        native: Native | None = None,
    ) -> None:
        spec.check()
        if buckets.step != 1 or not 0 <= buckets.start < buckets.stop <= BUCKETS:
            raise InvalidRequest(f"{buckets} is no range of the {BUCKETS} buckets of a table")
        for tensor in tensors:
            tensor.check()
        limit = limit_of(spec, tensors)
        if (spec.capacity or spec.memory_limit) and limit < MIN_CAPACITY:
            raise InvalidRequest(
                f"a memory limit of {spec.memory_limit} bytes has room for {limit} rows; the least is {MIN_CAPACITY}"
            )
        self.spec = spec
        self.tensors = tuple(tensors)
        self.buckets = buckets
        self.evicted = 0
        self._native = native or Native()
        self._shares = shares_of(limit) if limit else np.full(BUCKETS, MAX_COUNT)
        self._limit = int(self._shares[buckets.start : buckets.stop].sum()) if limit else MAX_COUNT
        self._first = FirstValues(spec, self._native.first_values)
        self._contents = Contents(spec, tensors, combined(seed), buckets, self._limit if limit else 0)
        self._running: _Round | None = None

    def __len__(self) -> int:
        """Returns the number of rows."""
        return self._contents.rows.used

    def size(self) -> int:
        """Returns the number of rows."""
        return len(self)

    @property
    def round(self) -> int:
        """The last round that was committed, or after which rows were removed."""
        return self._contents.round

    @property
    def counted(self) -> int:
        """Number of keys that a `CounterFilter` counts, and that have no row."""
        return int(self._contents.index.used.sum()) - len(self)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the table may have: rows in whole chunks, index, and filter."""
        sketch = self._contents.filter
        counters = sketch.counters.nbytes if isinstance(sketch, Sketch) else 0
        return self._contents.rows.touched + self._contents.index.nbytes + counters

    @property
    def arrays(self) -> list[Array]:
        """The weights (slots, *row shape), then the tensors beside them, to be read and written by slot.

        Good until the next `begin`, `remove`, `restrict` or `restore`.
        """
        return [tensor.array for tensor in self._contents.rows.tensors]

    def lookup(self, keys: Array, tensor: int = 0, out: Array | None = None) -> Array:
        """Returns the rows of some keys. Nothing changes.

        Args:
            keys: [n], of the dtype of keys; one may be given several times.
            tensor: 0 for the weights, or the number of a tensor beside them, counted from 1.
            out: the array to write them to, C-contiguous; None for a new one.

        Returns:
            (n, *row shape). A key without a row has its first value; zeros if the spec says so and has a filter.

        Raises:
            InvalidRequest: the keys are of another dtype or shape, or of a bucket that is not held.
        """
        _, entries = self._contents.find(keys)
        table = self._contents.rows.tensors[tensor].array
        found = np.empty((keys.size, *table.shape[1:]), table.dtype) if out is None else out
        if len(table):
            table.take(entries - 1, axis=0, out=found, mode="clip")  # without a row, any
        unknown = np.flatnonzero(entries <= 0)
        if unknown.size:
            found[unknown] = self.tensors[tensor - 1].value if tensor else self._unknown(keys[unknown])
        return found

    def _unknown(self, keys: Array) -> Array | int:
        is_zero = self.spec.refused == "zeros" and self.spec.admission is not None
        return 0 if is_zero else self._first.rows(keys)

    def contains(self, keys: Array) -> Bools:
        """Returns for each of some keys, [n] of the dtype of keys, if it has a row."""
        return np.asarray(self._contents.find(keys)[1] > 0)

    def begin(self, round: int, keys: Array) -> Opened:
        """Begins a round: decides which keys get a row, and makes their rows.

        A key is admitted or refused for the whole round: all its gradients count, or none.

        Args:
            round: the round, not before the last one.
            keys: [n], the keys of all members' gradients, in task order; each time that a key is given counts.

        Raises:
            InvalidRequest: the keys are of another dtype or shape, or of a bucket that is not held, or the round is
                before the last one.
            MemoryLimit: the rows that it touches are more than the limit, or there is no memory. Nothing has changed.
        """
        self._check_idle(round)
        contents, rows = self._contents, self._contents.rows
        contents.use_compiled(self._native)
        hashes, entries = contents.find(keys)
        unknown = np.flatnonzero(entries <= 0)
        known = np.delete(entries, unknown) - 1
        new, at, inverse, counts = np.unique(hashes[unknown], True, True, True)
        old = entries[unknown][at]
        decision = contents.filter.decide(round, new, old, counts)
        admitted, kept = decision.admitted, ~decision.admitted & (decision.entries != old)
        self._check_limit(known, int(np.count_nonzero(admitted)))
        books = rows.books.take(known, axis=0)
        values = self._first.rows(keys[unknown][at][admitted])
        slots = contents.create(new[admitted], old[admitted])
        rows.begin(slots, values)
        rows.last[slots] = rows.changed[slots] = round
        rows.count[slots] = decision.counts[admitted]
        given = np.zeros(new.size, np.int64)
        given[admitted] = slots + 1
        entries[unknown] = given[inverse]
        self._running = _Round(
            round, new[admitted], old[admitted], slots, new[kept], decision.entries[kept], known, books
        )
        self._touch(round, known)
        return Opened(entries - 1, slots.size)

    def _check_idle(self, round: int) -> None:
        if self._running is not None:
            raise RuntimeError(f"round {self._running.number} of the table has not ended")
        if not self.round <= round <= MAX_ROUND:
            raise InvalidRequest(f"round {round} of a table follows round {self.round}")

    def _check_limit(self, known: Int64s, created: int) -> None:
        """Raises `MemoryLimit` if a round touches more rows than there may be."""
        if known.size + created > self._limit:
            touched = np.unique(known).size + created
            if touched > self._limit:
                raise MemoryLimit(
                    f"a round touches {touched} rows of a table that may have {self._limit} on this server; "
                    "raise its capacity or memory_limit, or use smaller batches"
                )

    def _touch(self, round: int, slots: Int64s) -> None:
        """Marks rows that were there before the round; each time that a slot is given counts."""
        rows, judge = self._contents.rows, self._contents.judge
        if judge.decay != 1:
            rows.count[slots] = judge.decayed(round, slots, rows)
        np.add.at(rows.count, slots, np.float32(1))
        rows.last[slots] = rows.changed[slots] = round

    def undo(self) -> None:
        """Undoes what `begin` did, as a later part of the round has failed. The caller puts old rows back before."""
        running, rows = self._end(), self._contents.rows
        rows.books[running.known] = running.books
        self._contents.uncreate(running.created, running.before, running.slots)

    def commit(self) -> int:
        """Ends a round whose rows are updated: evicts what the policy and the limit say; returns how many rows."""
        running, contents = self._end(), self._contents
        contents.round = running.number
        contents.filter.commit()
        contents.index.put(running.counted, running.counted_entries)
        before = len(self)
        if contents.judge.condemns:
            passed = contents.hands.pass_over(running.number, in_buckets(running.created), contents.index.used)
            contents.drop(*condemned(contents.index, contents.rows, contents.judge, running.number, passed))
        self._shrink(1)
        if self.counted:
            self._shrink(-1)
        if running.slots.size:
            contents.index.grow_ahead()
        evicted = before - len(self)
        self.evicted += evicted
        return evicted

    def _end(self) -> _Round:
        if self._running is None:
            raise RuntimeError("no round of the table has begun")
        running, self._running = self._running, None
        return running

    def _shrink(self, sign: int) -> None:
        """Drops rows, or keys that are counted, until no bucket has more than its share; none that are in use."""
        contents, left = self._contents, np.ones(BUCKETS, np.bool_)

        def scores(entries: Int64s) -> Array:
            if sign < 0:
                return -entries.astype(np.float64)
            return contents.judge.scores(contents.round, entries - 1, contents.rows)

        for salt in count():
            have = contents.counts if sign > 0 else contents.index.used - contents.counts
            excess = np.where(left, have - self._shares, 0)
            if not (excess > 0).any():
                return
            hashes, entries = above(contents.index, contents.rows, contents.round, sign, excess, scores, salt)
            left = in_buckets(hashes) > 0
            contents.drop(hashes, entries)

    def tick(self, round: int, seconds: float) -> None:
        """Tells the time at a round, in seconds from any beginning, for `TimeToLive`; the same on all servers."""
        self._contents.judge.tick(round, seconds)

    def remove(self, round: int, keys: Array) -> int:
        """Drops the rows, and the counts, of some keys between two rounds; returns how many rows.

        Args:
            round: the round after which they are gone, not before the last one; deltas know it.
            keys: [n], of the dtype of keys; one without a row is passed over.

        Raises:
            InvalidRequest: as of `begin`.
        """
        self._check_idle(round)
        hashes, entries = self._contents.find(keys)
        there = entries != 0
        hashes, at = np.unique(hashes[there], return_index=True)
        self._contents.round, before = round, len(self)
        self._contents.drop(hashes, entries[there][at])
        return before - len(self)

    def restrict(self, round: int, rows: int) -> int:
        """Drops rows until at most a number are left here, the worst by the policy first; returns how many.

        Args:
            round: as of `remove`.
            rows: the number.
        """
        self._check_idle(round)
        contents = self._contents
        hashes, slots = contents.rows_in_order()
        contents.round, many = round, max(hashes.size - rows, 0)
        worst = np.argsort(contents.judge.scores(round, slots, contents.rows), kind="stable")[:many]
        contents.drop(hashes[worst], slots[worst] + 1)
        return many

    def keys(self, bucket: int | None = None) -> Array:
        """Returns the keys with rows, of one bucket or of all, in the order of their hashes."""
        contents = self._contents
        if bucket is None:
            return contents.keys_of(contents.rows_in_order()[0])
        hashes, entries = contents.index.scan(*bucket_bounds(bucket, bucket + 1))
        return contents.keys_of(hashes[entries > 0])

    def export(self) -> tuple[Array, Array]:
        """Returns all keys [n] in the order of their hashes, and their rows (n, *row shape), as new arrays."""
        hashes, slots = self._contents.rows_in_order()
        return self._contents.keys_of(hashes), self.arrays[0][slots]

    def state(self) -> TableState:
        """Returns the state between two rounds, as new arrays."""
        self._check_idle(self.round)
        return state_of(self._contents)

    def restore(self, states: Sequence[TableState]) -> None:
        """Replaces everything by states that were taken of this table, whatever buckets each of them has.

        Args:
            states: of one round, which hold all buckets of this part; they may hold more.

        Raises:
            InvalidRequest: a bucket is missing, or the states are of different rounds or of another table.
            MemoryLimit: there is no memory. The table is empty then.
        """
        self._check_idle(self.round)
        restore_into(self._contents, joined(states, self.buckets))
        self._contents.use_compiled(self._native)

    def delta(self, since: int) -> TableDelta:
        """Returns what has changed in rows after a round, between two rounds. Counts of a filter are not in it.

        Raises:
            InvalidRequest: deletions since then are not known any more: it is before a restore, or too long ago.
        """
        self._check_idle(self.round)
        return delta_of(self._contents, since)

    def apply(self, deltas: Sequence[TableDelta]) -> None:
        """Makes the changes of deltas, on the state since which they are, whatever buckets each of them has.

        Args:
            deltas: of one time, which hold all buckets of this part; they may hold more.

        Raises:
            InvalidRequest: a bucket is missing, something is missing between the two, or the deltas are of different
                times or of another table. Nothing has changed.
            MemoryLimit: there is no memory. The table has to be restored then.
        """
        self._check_idle(self.round)
        self._contents.use_compiled(self._native)
        apply_to(self._contents, deltas)

    def forget_deletions(self, round: int) -> None:
        """Forgets the deletions up to a round: no delta will be asked for since an earlier one."""
        self._contents.deletions.forget(round)
