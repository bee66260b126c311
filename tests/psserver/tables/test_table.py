"""A table does what a dict of rows does; what fails changes nothing; what is saved comes back."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from psserver.tables.cells import CellIndex
from psserver.tables.native import Native
from pswire.errors import InvalidRequest, MemoryLimit
from pswire.model.first_values import RowInitializer
from pswire.model.hashing import BUCKETS, buckets_of, combined, hashes_of
from pswire.model.table_state import TableState
from pswire.model.tables import LRU, MIN_CAPACITY, CounterFilter, Normal, ProbabilityFilter, SlotTensor, TableSpec
from tests.kit.cases import search
from tests.kit.tables import Table, compiled

SPEC = TableSpec((2,), initializer=Normal())
MOMENTUM = (SlotTensor("momentum", "float64", (), 0.5),)
HUGE = [0, 1, -1, (1 << 63) - 1, -(1 << 63)]


def i64(values: object) -> np.ndarray:
    return np.array(values, np.int64)


def trained(table: Table, round: int, keys: np.ndarray, add: int = 1) -> None:
    """Makes a round that adds its number, or nothing, to the rows of keys."""
    opened = table.begin(round, keys)
    for array in table.arrays:
        array[opened.touched] += round * add
    table.commit()


def rows_in(state: TableState) -> dict[int, tuple[object, ...]]:
    """What a state, or a delta, has of each row, by its key."""
    columns = *state.tensors, state.count, state.last, state.changed
    return dict(zip(state.keys.tolist(), zip(*(column.tolist() for column in columns), strict=True), strict=True))


class Dicts(RuleBasedStateMachine):
    """A table with an exact filter beside a dict of rows and one of counts."""

    keys = st.lists(st.one_of(st.sampled_from(HUGE), st.integers(0, 60)), max_size=40).map(i64)

    @initialize(is_compiled=st.booleans(), k=st.integers(1, 4))
    def start(self, is_compiled: bool, k: int) -> None:
        self.k, self.round = k, 0
        self.native = compiled() if is_compiled else Native()
        self.table = self.empty()
        self.rows: dict[int, tuple[list[float], float]] = {}
        self.counts: dict[int, int] = {}
        self.base = self.table.state()

    def empty(self) -> Table:
        spec = TableSpec((2,), "float64", admission=CounterFilter(self.k))
        return Table(spec, MOMENTUM, native=self.native)

    def first(self, keys: np.ndarray) -> np.ndarray:
        return RowInitializer(self.table.spec).rows(keys)

    @rule(keys=keys, fails=st.booleans())
    def step(self, keys: np.ndarray, fails: bool) -> None:
        self.round += 1
        if fails:
            old = self.table.state()
            self.table.begin(self.round, keys)
            self.table.undo()
            assert old.equals(self.table.state())
        opened = self.table.begin(self.round, keys)
        for key in keys.tolist():
            if key not in self.rows:
                self.counts[key] = self.counts.get(key, 0) + 1
        for key in set(keys.tolist()) & self.counts.keys():
            if self.counts[key] >= self.k:
                del self.counts[key]
                self.rows[key] = self.first(i64([key]))[0].tolist(), 0.5
        for key in set(keys.tolist()) & self.rows.keys():
            values, momentum = self.rows[key]
            self.rows[key] = [value + self.round for value in values], momentum + self.round
        assert [slot >= 0 for slot in opened.slots.tolist()] == [key in self.rows for key in keys.tolist()]
        assert opened.refused == sum(key not in self.rows for key in keys.tolist())
        for array in self.table.arrays:
            array[opened.touched] += self.round
        assert self.table.commit() == 0

    @rule(keys=keys)
    def remove(self, keys: np.ndarray) -> None:
        self.round += 1
        gone = {key for key in keys.tolist() if self.rows.pop(key, None)}
        self.counts = {key: n for key, n in self.counts.items() if key not in keys}
        assert self.table.remove(self.round, keys) == len(gone)

    @rule()
    def restart(self) -> None:
        state = self.table.state()
        self.table = self.empty()
        self.table.restore([state])
        assert self.table.state().equals(state)
        self.base = state

    @rule()
    def follow_by_a_delta(self) -> None:
        """What it has takes the place of what the base has; keys whose rows were dropped are named."""
        delta = self.table.delta(self.base.round)
        rows = rows_in(self.base)
        for key in delta.deleted_keys.tolist():
            rows.pop(key, None)
        assert rows | rows_in(delta) == rows_in(self.table.state())

    @invariant()
    def holds_what_the_dicts_hold(self) -> None:
        table = self.table
        assert (len(table), table.counted) == (len(self.rows), len(self.counts))
        keys = table.keys()
        assert sorted(keys.tolist()) == sorted(self.rows)
        asked = i64([*HUGE, *range(61)])
        found, momenta = table.lookup(asked), table.lookup(asked, 1)
        for key, values, momentum, first in zip(asked.tolist(), found, momenta, self.first(asked), strict=True):
            assert (values.tolist(), momentum) == self.rows.get(key, (first.tolist(), 0.5))
        hashes = hashes_of(keys, combined(0))
        assert (hashes[1:] > hashes[:-1]).all()


def test_a_table_is_a_dict_of_rows():
    """Whatever rounds, removals, failures, restores and deltas do."""
    run_state_machine_as_test(Dicts, settings=search(0.25, steps=0.25))


def test_the_index_is_compiled_in_the_middle():
    """A table that begins with NumPy goes on with compiled functions, and nothing can be seen of it."""

    class Late(Native):
        is_there = False

        def index(self):
            return compiled().index() if self.is_there else None

    native = Late()
    tables = Table(SPEC, native=native), Table(SPEC)
    rng = np.random.default_rng(0)
    for round in range(1, 20):
        native.is_there = round > 9
        keys = rng.integers(0, 9000, 1000)
        for table in tables:
            trained(table, round, keys)
    assert tables[0].state().equals(tables[1].state())
    assert type(tables[0]._contents.index) is not type(tables[1]._contents.index)


@pytest.mark.parametrize("refused", ["initial", "zeros"])
def test_lookups_of_what_is_not_there(refused):
    """They give the first value, also zeros behind a filter, and make no row; the row begins with the first value."""
    filtered = TableSpec((2,), initializer=Normal(), admission=CounterFilter(2), refused=refused)
    table, plain = Table(filtered), Table(TableSpec((2,), initializer=Normal(), refused=refused))
    keys = i64([5, 7, 5])
    first = RowInitializer(SPEC).rows(keys)
    assert plain.lookup(keys).tolist() == first.tolist()
    assert table.lookup(keys).tolist() == (first if refused == "initial" else 0 * first).tolist()
    assert len(table) == 0
    assert table.state().equals(Table(filtered).state())
    opened = table.begin(1, keys)  # 5 has come twice
    table.commit()
    assert (opened.slots >= 0).tolist() == [True, False, True]
    assert (opened.refused, opened.created, opened.touched.size) == (1, 1, 1)
    assert table.lookup(i64([5])).tolist() == first[:1].tolist()
    assert (table.find(keys) >= 0).tolist() == [True, False, True]


def test_keys_of_another_kind_are_refused():
    """Dtype, shape, bucket and round are checked before anything happens."""
    table = Table(SPEC, buckets=range(10))
    inside = np.arange(3000)[buckets_of(hashes_of(np.arange(3000), combined(0))) < 10]
    for keys, told in (
        (inside.astype(np.uint64), "int64"),
        (inside.reshape(1, -1), "int64"),
        (np.arange(3000), "bucket"),
    ):
        for work in (table.lookup, lambda keys: table.begin(3, keys), lambda keys: table.remove(3, keys)):
            with pytest.raises(InvalidRequest, match=told):
                work(keys)
    trained(table, 3, inside)
    with pytest.raises(InvalidRequest, match="round 2 of a table follows round 3"):
        table.begin(2, inside)
    table.begin(4, inside)
    with pytest.raises(RuntimeError, match="round 4"):
        table.begin(5, inside)
    with pytest.raises(RuntimeError, match="round 4"):
        table.state()
    table.undo()
    with pytest.raises(RuntimeError, match="has begun"):
        table.commit()


@pytest.mark.parametrize("is_compiled", [True, False])
def test_a_table_keeps_to_its_capacity(is_compiled):
    """Above it rows leave that were not touched for longest, about, and never one of the round."""
    spec = TableSpec((1,), capacity=MIN_CAPACITY, eviction=LRU())
    table = Table(spec, native=compiled() if is_compiled else None)
    for round in range(1, 13):
        keys = np.arange(3000 * round, 3000 * round + 3000)
        opened = table.begin(round, keys)
        table.commit()
        assert opened.refused == 0
        assert (table.find(keys) >= 0).all()
        assert len(table) <= MIN_CAPACITY
    assert len(table) > 0.95 * MIN_CAPACITY
    assert table.evicted == 36_000 - len(table)
    assert np.mean(table.find(np.arange(30_000, 33_000)) >= 0) > 0.9 > 0.2 > np.mean(table.find(np.arange(6000)) >= 0)
    last = table.state().last
    assert np.median(last) >= 8


def test_a_round_that_touches_too_much_is_refused_whole():
    """`MemoryLimit` before anything has changed; a smaller round goes on."""
    table = Table(TableSpec((1,), capacity=MIN_CAPACITY), native=compiled())
    trained(table, 1, np.arange(10_000))
    old = table.state()
    with pytest.raises(MemoryLimit, match=rf"20000 rows .* can have {MIN_CAPACITY}"):
        table.begin(2, np.arange(20_000))
    assert table.state().equals(old)
    opened = table.begin(2, np.concatenate([np.arange(10_000), np.arange(10_000)]))  # each twice: not too many
    assert opened.touched.size == 10_000
    table.commit()
    trained(table, 3, np.arange(20_000, 34_000))  # a bucket that has nothing else keeps all of them
    assert len(table) < 1.1 * MIN_CAPACITY
    trained(table, 4, np.arange(5))
    assert len(table) <= MIN_CAPACITY


def test_a_memory_limit_holds_what_memory_is_taken():
    """Rows, slots and index stay below it, but for what is counted in chunks."""
    limit = 8 << 20
    spec = TableSpec((32,), memory_limit=limit)
    table = Table(spec, (SlotTensor("accumulator", "float32", (32,)),), native=compiled())
    for round in range(1, 40):
        trained(table, round, np.arange(2000 * round, 2000 * round + 2000))
    assert len(table) > MIN_CAPACITY
    assert table.nbytes < limit + 7 * (2 << 20)
    with pytest.raises(InvalidRequest, match="memory limit of 1000 bytes allows 5 rows"):
        Table(TableSpec((32,), memory_limit=1000))


def test_counted_keys_are_limited_as_rows_are():
    """Keys that came once do not fill the memory of a table that has a limit."""
    spec = TableSpec((1,), capacity=MIN_CAPACITY, admission=CounterFilter(3), eviction=LRU())
    table = Table(spec, native=compiled())
    often = np.repeat(np.arange(-500, 0), 2)  # they come twice in each of two rounds
    for round in range(1, 16):
        trained(table, round, np.concatenate([np.arange(2000 * round, 2000 * round + 2000), often]))
        assert table.counted <= MIN_CAPACITY
    assert table.keys().max() < 0
    assert len(table) == 500


def test_a_state_says_what_it_is_of():
    """States of other seeds, rounds or rows are refused; nothing has changed then."""
    table = Table(SPEC)
    trained(table, 1, np.arange(100))
    state = table.state()
    other = Table(replace(SPEC, hash_seed=2))
    trained(other, 1, np.arange(5))
    with pytest.raises(InvalidRequest, match="seed"):
        other.place(state)
    assert len(other) == 5
    trained(table, 2, np.arange(100))
    later = table.state()
    table.restore([later])
    assert table.freeze(1).since == -1
    for buckets in (range(5, 5), range(0, 10, 2), range(BUCKETS + 1)):
        with pytest.raises(InvalidRequest, match="is not a range of the 1024 buckets"):
            Table(SPEC, buckets=buckets)
    with pytest.raises(InvalidRequest, match="only changes since a round"):
        table.place(table.delta(2))
    assert table.freeze(7).since == -1


def test_deletions_are_forgotten_when_nobody_needs_them():
    """A delta since before what was forgotten is refused; since later it is right."""
    table = Table(SPEC)
    trained(table, 1, np.arange(100))
    table.remove(2, np.arange(10))
    table.remove(3, np.arange(20))
    assert sorted(table.delta(1).deleted_keys.tolist()) == list(range(20))
    assert sorted(table.delta(2).deleted_keys.tolist()) == list(range(10, 20))
    table.forget_deletions(2)
    assert sorted(table.delta(2).deleted_keys.tolist()) == list(range(10, 20))
    assert table.freeze(1).since == -1


def test_restrict_keeps_the_best():
    """Of each bucket those rows stay that were touched last; what is asked for by key is what is saved."""
    table = Table(SPEC, native=compiled())
    trained(table, 1, np.arange(40_000))
    trained(table, 2, np.arange(20_000))
    before = [set(table.keys(range(bucket, bucket + 1)).tolist()) for bucket in range(BUCKETS)]
    dropped = table.restrict(2, 10 * BUCKETS)
    assert len(table) == 10 * BUCKETS == 40_000 - dropped
    for bucket in range(BUCKETS):
        kept = set(table.keys(range(bucket, bucket + 1)).tolist())
        recent = {key for key in before[bucket] if key < 20_000}
        assert kept <= recent if len(recent) >= 10 else recent <= kept
    state = table.state()
    assert (table.lookup(state.keys) == state.tensors[0]).all()
    by_bucket = [table.keys(range(bucket, bucket + 1)) for bucket in range(BUCKETS)]
    assert table.keys().tolist() == np.concatenate(by_bucket).tolist()
    assert table.restrict(3, 10 * BUCKETS) == 0


def test_memory_that_is_not_there(monkeypatch):
    """A table without memory for more rows, for more keys, or for a tensor beside them, which its limit may have no
    room for either, refuses them, and has all that it had."""
    spec = TableSpec((2,), admission=ProbabilityFilter(1.0), memory_limit=MIN_CAPACITY * 1000)
    table = Table(spec, native=compiled())
    trained(table, 1, np.arange(100))
    old = table.state()

    def fails(*args: object) -> None:
        raise MemoryError

    contents = table._contents
    index = contents.index
    assert isinstance(index, CellIndex)

    def fails_halfway(hashes: np.ndarray, entries: np.ndarray) -> None:
        CellIndex.put(index, hashes[:20_000], entries[:20_000])
        if hashes.size > 20_000:
            raise MemoryError

    beside = SlotTensor("large", "float32", ())

    def many() -> None:
        table.begin(2, np.arange(50_000))

    for owner, name, fault, work, told in (
        (contents.rows.tensors[0], "resize", fails, many, r"out of memory for \d+ more rows"),
        (index, "put", fails_halfway, many, r"out of memory for \d+ more keys"),
        (contents.rows, "begin", fails, many, r"out of memory for \d+ more keys"),
        (contents.rows, "put_beside", fails, lambda: table.put_beside(beside), "large"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fault)
            with pytest.raises(MemoryLimit, match=told):
                work()
        assert table.state().equals(old)
    with pytest.raises(InvalidRequest, match=r"memory limit of \d+ bytes allows \d+ rows; the minimum"):
        table.put_beside(SlotTensor("large", "float64", (640,)))
    assert (table.tensors, len(table.arrays)) == ((), 1)
    trained(table, 2, np.arange(50_000))
    assert len(table) == 50_000


def test_a_tensor_that_joins_later():
    """A tensor that is put beside rows has its first value in all of them, and is there once."""
    table = Table(SPEC, native=compiled())
    trained(table, 1, np.arange(100), 0)
    late = SlotTensor("late", "float32", (3,), 0.25)
    assert table.put_beside(late) == table.put_beside(late) == 1
    trained(table, 2, np.arange(50, 200), 0)
    assert (table.lookup(np.arange(300), 1) == np.full((300, 3), 0.25, "float32")).all()
    whole = Table(SPEC, (late,), native=compiled())
    trained(whole, 1, np.arange(100), 0)
    trained(whole, 2, np.arange(50, 200), 0)
    assert table.state().equals(whole.state())
    with pytest.raises(InvalidRequest, match="late"):
        table.put_beside(replace(late, value=0.5))


def test_keys_that_were_looked_up_are_found_where_they_were():
    """Until an entry changes: rows that have left since are made anew, and those that came are known."""
    one, other = Table(SPEC, native=compiled()), Table(SPEC, native=compiled())
    rng = np.random.default_rng(0)
    for round in range(1, 60):
        parts = [rng.integers(0, 300, rng.integers(0, 40)) for _ in range(3)]
        keys = np.concatenate(parts)
        for part in parts[: rng.integers(0, 4)]:
            one.find(part)
        if rng.random() < 0.3:
            gone = rng.integers(0, 300, 20)
            assert one.remove(one.round, gone) == other.remove(other.round, gone)
        found = one.begin(round, keys, sizes=[len(part) for part in parts]), other.begin(round, keys)
        assert found[0].created == found[1].created
        for table in (one, other):
            if round % 5:
                table.commit()
            else:
                table.undo()
        assert one.state().equals(other.state())
