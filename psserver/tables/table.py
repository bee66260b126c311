"""A dynamic table, or the part of one that lies on this server.

What a table does in a round is a function of its state and of the round: no clock, no random number, no order of
arrival beyond the keys' own, and no difference between functions that are compiled and those that are not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from psserver.tables.contents import Contents
from psserver.tables.eviction import above, condemned, in_buckets
from psserver.tables.frozen_tensors import Flush
from psserver.tables.index import bucket_bounds
from psserver.tables.located import LocatedKeys
from psserver.tables.marks import mark
from psserver.tables.native import Native
from psserver.tables.new_keys import each_once
from psserver.tables.policies import INDEX_BYTES, Sketch, checked_limit, shares_of
from psserver.tables.saving import FrozenState, place
from psserver.tiers.mapped import Use
from pswire.errors import InvalidRequest, MemoryLimit
from pswire.model.first_values import RowInitializer
from pswire.model.hashing import BUCKETS, Hashes, buckets_of
from pswire.model.rows import Int64s
from pswire.model.table_state import TableState
from pswire.model.tables import MAX_COUNT, SlotTensor, TableSpec
from pswire.model.tensor import Array

MAX_ROUND = (1 << 32) - 1
ALL = range(BUCKETS)


@dataclass(frozen=True, eq=False)
class OpenedTable:
    """What a round finds in a table.

    Attributes:
        slots: int64[n], the slot of each key that was given; -1 for a key that is refused.
        new: int64[m], the slots of rows that were made.
    """

    slots: Int64s
    new: Int64s


@dataclass(frozen=True, eq=False)
class _Made:
    """The rows that a round has made.

    Attributes:
        hashes, before, slots: hashes whose rows were made, the entries that they had, and their slots.
        counted, counted_entries, counted_before: hashes that are counted, their entries from now on, and before.
        refused: number of gradients, as often as their keys came, that are dropped.
    """

    hashes: Hashes
    before: Int64s
    slots: Int64s
    counted: Hashes
    counted_entries: Int64s
    counted_before: Int64s
    refused: int


_NO_HASHES, _NO_SLOTS = np.empty(0, np.uint64), np.empty(0, np.int64)
_NOTHING = _Made(_NO_HASHES, _NO_SLOTS, _NO_SLOTS, _NO_HASHES, _NO_SLOTS, _NO_SLOTS, 0)


@dataclass(frozen=True, eq=False)
class _Round:
    """A round that has begun: what it takes to end it, or to undo it.

    Attributes:
        number: the round.
        made: the rows that it has made.
        known: slots of the rows that were there.
        books: what was known of these.
    """

    number: int
    made: _Made
    known: Int64s
    books: Array


class Table:
    """The rows of some buckets of a dynamic table. Used by one thread at a time.

    A round is `begin`, the update of the rows by the caller, then `commit`, or `undo`. All parts of a table make each
    round, with no keys if none of them is theirs: hands move, and what is too old leaves.

    Args:
        spec: the table.
        tensors: tensors beside the rows.
        buckets: the buckets that are held, a range of step 1.
        native: compiled functions, without which the same is done by NumPy, and where the rows lie.

    Attributes:
        evicted: number of rows that were evicted so far.
        tier: where the rows and the tensors beside them lie; None for memory.
        refusals: number of gradients that were dropped so far, as often as their keys came: a filter refused these.

    Raises:
        InvalidRequest: the spec or the range is not valid, or the memory limit has no room for `MIN_CAPACITY` rows.
    """

    def __init__(
        self,
        spec: TableSpec,
        tensors: Sequence[SlotTensor] = (),
        buckets: range = ALL,
        native: Native | None = None,
    ) -> None:
        spec.check()
        if buckets.step != 1 or not 0 <= buckets.start < buckets.stop <= BUCKETS:
            raise InvalidRequest(f"{buckets} is not a range of the {BUCKETS} buckets of a table")
        for tensor in tensors:
            tensor.check()
        self.spec, self.tensors, self.buckets = spec, tuple(tensors), buckets
        self.evicted = self.refusals = 0
        self._native = native or Native()
        self.tier = self._native.tier
        self._set_limit()
        self._first = RowInitializer(spec, self._native.first_values)
        self._contents = Contents(spec, tensors, spec.salt, buckets, self._limit if self.limited else 0, self.tier)
        self._located = LocatedKeys(self._contents)
        self._running: _Round | None = None

    @property
    def limited(self) -> bool:
        """True if the table may have no more than a number of rows."""
        return bool(self.spec.capacity or self.spec.memory_limit)

    def _set_limit(self) -> None:
        limit = checked_limit(self.spec, self.tensors)
        self._shares = shares_of(limit) if limit else np.full(BUCKETS, MAX_COUNT)
        held = self._shares[self.buckets.start : self.buckets.stop]
        self._limit = int(held.sum()) if limit else MAX_COUNT

    def put_beside(self, tensor: SlotTensor, room: int = -1) -> int:
        """Puts a tensor beside the rows, which all have its first value; returns its number, counted from 1.

        One that is there already changes nothing.

        Args:
            tensor: the tensor.
            room: as `begin` has it.

        Raises:
            InvalidRequest: it is not valid, or another one has its name, or the memory limit has no room for it.
            MemoryLimit: there is no room, or no memory. Nothing has changed.
        """
        known = {one.name: number for number, one in enumerate(self.tensors, 1)}
        if tensor.name in known:
            if self.tensors[known[tensor.name] - 1] != tensor:
                raise InvalidRequest(f"{tensor.name!r} is {self.tensors[known[tensor.name] - 1]}, not {tensor}")
            return known[tensor.name]
        self._check_idle(self.round)
        tensor.check()
        _check_room(
            f"{tensor.name!r} beside", len(self._contents.rows.books), 0 if self.tier else tensor.row.nbytes, room
        )
        before, self.tensors = self.tensors, (*self.tensors, tensor)
        try:
            self._set_limit()
            self._contents.put_beside(tensor)
        except BaseException:
            self.tensors = before
            self._set_limit()
            raise
        return len(self.tensors)

    def __len__(self) -> int:
        """Returns the number of rows."""
        return self._contents.rows.used

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
        """Bytes that the table may have, of memory and of a tier's disk: rows, index, and filter."""
        return self.in_memory + self._contents.rows.touched - self._contents.rows.in_memory

    @property
    def in_memory(self) -> int:
        """Bytes of memory that the table may have, without the rows that a tier bounds for all tables."""
        sketch = self._contents.filter
        counters = sketch.counters.nbytes if isinstance(sketch, Sketch) else 0
        return self._contents.rows.in_memory + self._contents.index.nbytes + counters

    @property
    def arrays(self) -> list[Array]:
        """The weights (slots, *row shape), then the tensors beside them, to be read and written by slot.

        Good until the next `begin`, `restrict` or `place`.
        """
        return [tensor.array for tensor in self._contents.rows.tensors]

    def find(self, keys: Array) -> Int64s:
        """Returns the slot of each of some keys, [n]; -1 for a key without a row.

        Raises:
            InvalidRequest: the keys are of another dtype or shape, or of a bucket that is not held.
        """
        return np.maximum(self._located.look_up(keys), 0) - 1

    def rows_at(self, slots: Int64s, keys: Array, tensor: int = 0) -> Array:
        """Returns the rows of some keys, as a new array. Nothing changes.

        Args:
            slots: int64[n], as `find` has returned them.
            keys: [n], of the dtype of keys; one may be given several times.
            tensor: 0 for the weights, or the number of a tensor beside them, counted from 1.

        Returns:
            (n, *row shape). A key without a row has its first value; zeros if the spec says so and has a filter.
        """
        if tensor > len(self.tensors):
            raise InvalidRequest(f"tensor {tensor} does not belong to the rows yet")
        self._contents.rows.touch(slots, Use.LOOKUP)
        table = self._contents.rows.tensors[tensor].array
        found = np.empty((keys.size, *table.shape[1:]), table.dtype)
        if len(table):
            table.take(slots, axis=0, out=found, mode="clip")  # without a row, any
        unknown = np.flatnonzero(slots < 0)
        if unknown.size:
            found[unknown] = self.tensors[tensor - 1].value if tensor else self._first.unknown(keys[unknown])
        return found

    def read_ahead(self, keys: Array, hint: bool = False) -> None:
        """Begins to read the rows of keys that are going to be looked up, as far as they lie on a disk alone.

        With `hint` others are looked up before: rows are read while the tier has nothing else to do, and has room.
        """
        self._contents.rows.read_ahead(self._contents.find(keys)[1] - 1, hint)

    def begin(
        self, round: int, keys: Array, times: Int64s | None = None, room: int = -1, sizes: Sequence[int] = ()
    ) -> OpenedTable:
        """Begins a round: decides which keys get a row, and makes their rows.

        A key is admitted or refused for the whole round: all its gradients count, or none.

        Args:
            round: the round, not before the last one.
            keys: [n], the keys of all members' gradients, in task order; may repeat.
            times: int64[n], how often each has come; None for once.
            room: bytes by which the table may grow; -1 without a limit.
            sizes: number of the keys of each contribution, one behind another; empty if it is not known.

        Raises:
            InvalidRequest: the keys are of another dtype or shape, or of a bucket that is not held, or the round is
                before the last one.
            MemoryLimit: the rows that it touches are more than the limit, or there is no memory. Nothing has changed.
        """
        self._check_idle(round)
        contents, rows = self._contents, self._contents.rows
        contents.use_compiled(self._native)
        hashes, entries = self._located.locate(keys, sizes)
        is_known = entries > 0
        if times is None:
            times = np.ones(keys.size, np.int64)
        if is_known.all():
            known = slots = entries - 1
            often, made = times, _NOTHING
            self._check_limit(known, 0)
        else:
            known, often = entries[is_known] - 1, times[is_known]
            made = self._make(round, keys, times, hashes, entries, np.flatnonzero(~is_known), known, room)
            slots = np.maximum(entries, 0) - 1
        rows.touch(known, Use.UPDATE)
        rows.set_aside(known)
        if contents.judge.decay != 1:
            books = rows.books.take(known, axis=0)
            rows.count[known] = contents.judge.decayed(round, known, rows)
            mark(rows.books, round, known, often)
        else:
            books = mark(rows.books, round, known, often, self._native.mark())
        self._running = _Round(round, made, known, books)
        return OpenedTable(slots, made.slots)

    def _make(
        self,
        round: int,
        keys: Array,
        times: Int64s,
        hashes: Hashes,
        entries: Int64s,
        unknown: Int64s,
        known: Int64s,
        room: int,
    ) -> _Made:
        """Makes the rows of keys that are admitted.

        Args:
            round, keys, times, room: as of `begin`.
            hashes, entries: of the keys; the entries of those that are admitted are written.
            unknown: int64[m], the places of keys without a row.
            known: slots of the rows of the others.
        """
        contents, rows = self._contents, self._contents.rows
        first, counts, numbers = each_once(hashes[unknown], times[unknown], self._native.count())
        first = unknown[first]
        new, old = hashes[first], entries[first]
        decision = contents.filter.decide(round, new, old, counts)
        admitted, kept = decision.admitted, ~decision.admitted & (decision.entries != old)
        self._check_limit(known, int(np.count_nonzero(admitted)))
        row = rows.row_bytes + INDEX_BYTES
        _check_room("a round that makes", int(np.count_nonzero(admitted | kept)), row, room)
        keys = keys[first[admitted]]
        slots = contents.create(
            new[admitted],
            old[admitted],
            lambda slots: rows.begin(slots, lambda into: self._first.rows(keys, into)),
        )
        rows.last[slots], rows.count[slots] = round, decision.counts[admitted]
        given = np.zeros(new.size, np.int64)
        given[admitted] = slots + 1
        entries[unknown] = given[numbers]
        counted = new[kept], decision.entries[kept], old[kept]
        return _Made(new[admitted], old[admitted], slots, *counted, int(counts[~admitted].sum()))

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
                    f"a round uses {touched} rows of a table that can have {self._limit} on this server; raise its "
                    "capacity or memory_limit, or use smaller batches"
                )

    def undo(self) -> None:
        """Undoes what `begin` did, as a later part of the round has failed. The caller puts old rows back before."""
        running, rows = self._end(), self._contents.rows
        rows.books[running.known] = running.books
        self._contents.uncreate(running.made.hashes, running.made.before, running.made.slots)

    def commit(self, seconds: float = 0.0, settle: Callable[[Int64s], object] = lambda slots: None) -> int:
        """Ends a round whose rows are updated: evicts what the policy and the limit say; returns how many rows.

        Args:
            seconds: the time, from any beginning, for `TimeToLive`; the same on all servers; 0 if it is not known.
            settle: called with the slots, each once, of rows whose values a policy is about to judge.
        """
        running, contents = self._end(), self._contents
        made = running.made
        contents.round = running.number
        self.refusals += made.refused
        if seconds:
            contents.judge.tick(running.number, seconds)
        contents.filter.commit()
        contents.put(made.counted, made.counted_entries, made.counted_before)
        before = len(self)
        if contents.judge.condemns:
            of = contents.index, contents.rows, contents.judge, running.number, contents.hands
            contents.drop(*condemned(*of, in_buckets(made.hashes), settle))
        if self.limited:
            self._shrink(1)
        if self.limited and self.counted:
            self._shrink(-1)
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

    def restrict(self, round: int, rows: int) -> int:
        """Drops rows until no bucket has more than its share of a number; the worst by the policy go first.

        Args:
            round: the round after which they are gone, not before the last one; deltas know it.
            rows: the number, of the whole table.

        Returns:
            How many rows were dropped.
        """
        self._check_idle(round)
        contents = self._contents
        hashes, slots = contents.rows_in_order()
        contents.round = round
        owners = buckets_of(hashes)
        order = np.lexsort((contents.judge.scores(round, slots, contents.rows), owners))  # the worst of each first
        have = in_buckets(hashes)
        place = np.arange(hashes.size) - np.repeat(np.cumsum(have) - have, have)
        worst = order[place < (have - shares_of(rows))[owners[order]]]
        contents.drop(hashes[worst], slots[worst] + 1)
        return worst.size

    def keys(self, buckets: range = ALL) -> Array:
        """Returns the keys with rows, of some buckets, in the order of their hashes."""
        contents = self._contents
        hashes, entries = contents.index.scan(*bucket_bounds(buckets.start, buckets.stop))
        return contents.keys_of(hashes[entries > 0])

    # ---- Checkpoints ----

    def assign(self, tensor: int, keys: Array, rows: Array) -> None:
        """Writes a tensor between two rounds; in all other rows it has its first value then.

        Whoever has frozen the table gets a copy of all rows, unless the tensor was put beside them later.

        Args:
            tensor: the number of a tensor beside the rows, counted from 1.
            keys: [n], of the dtype of keys, each once; one without a row is passed over.
            rows: (n, *row shape).

        Raises:
            InvalidRequest: as of `find`.
        """
        self._check_idle(self.round)
        slots, array = np.maximum(self._contents.find(keys)[1], 0) - 1, self.arrays[tensor]
        self._contents.rows.set_aside(np.arange(len(array)), tensor)
        self._contents.rows.tensors[tensor].fill(self.tensors[tensor - 1].value)
        self._contents.rows.touch(slots, Use.PASS)
        array[slots[slots >= 0]] = rows[slots >= 0]
        self.forget_deletions(self.round)

    def set_aside(self, slots: Int64s) -> None:
        """Has to be called before rows are written in place, with their slots; `begin` does it for its own."""
        self._contents.rows.touch(slots, Use.PASS)
        self._contents.rows.set_aside(slots)

    def freeze(self, since: int = -1, flush: Flush | None = None) -> FrozenState:
        """Freezes the state between two rounds, for one thread that reads it while rounds go on. Copies no row.

        Args:
            since: the round since which changes alone are wanted; -1 for all.
            flush: applies the updates of rows that are deferred, in the thread that reads; None where there are none.

        Returns:
            The state; its `since` is -1 if all of it has to be saved, as what has changed is not known any more.
        """
        self._check_idle(self.round)
        return FrozenState(self._contents, since, flush)

    def place(self, state: TableState) -> list[Array]:
        """Replaces everything by a state of the same buckets, whose tensors the caller has to write then.

        Args:
            state: whole; its tensors are not looked at.

        Returns:
            The weights (n, *row shape), then the tensors beside them, in the order of the state's keys.

        Raises:
            InvalidRequest: the state is of another table, or has changes alone.
            MemoryLimit: there is no memory. The table is empty then.
        """
        self._check_idle(self.round)
        place(self._contents, state, self._native)
        return self.arrays

    def forget_deletions(self, round: int) -> None:
        """Forgets what was dropped up to a round: changes since an earlier one will not be asked for.

        It is called, too, by an update of a round that changes rows which it does not name, at once or when they are
        made up: then a checkpoint has all rows, not only those that have changed since an earlier round.
        """
        self._contents.deletions.forget(round)


def _check_room(what: str, rows: int, nbytes: int, room: int) -> None:
    """Raises `MemoryLimit` if there is no room for so many rows of so many bytes."""
    if 0 <= room < rows * nbytes:
        raise MemoryLimit(
            f"{what} {rows} rows needs up to {rows * nbytes} bytes, and the server's memory limit leaves {room}; "
            "raise --memory-limit, or give the table a capacity"
        )
