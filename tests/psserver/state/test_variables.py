"""The variables of one server: values, tables that a checkpoint reads beside rounds, and parts of dynamic tables."""

from __future__ import annotations

import gc
from dataclasses import replace

import numpy as np
import pytest

from psserver.devices import ServerDevice
from psserver.state.variables import Store
from psserver.tables import frozen as module
from psserver.tables import policies
from psserver.tables.native import Native
from psserver.tiers.paging import PAGE
from psserver.values.dense import Dense, FrozenDense
from pswire.api import TableRead
from pswire.errors import InvalidRequest, MemoryLimit
from pswire.limits import MAX_BESIDE, MAX_PARTS
from pswire.model.hashing import BUCKETS
from pswire.model.plan import PlacedVariable, VariableSpec
from pswire.model.tables import LRU, MIN_CAPACITY, CBFFilter, Constant, SlotTensor, TableSpec
from pswire.model.tensor import TensorSpec
from tests.kit.contributions import part_of
from tests.kit.tables import compiled


def variable(id: int, size: int, servers: tuple[int, ...] = (1,)) -> PlacedVariable:
    return PlacedVariable(id, VariableSpec(f"v{id}", TensorSpec("int8", (size,))), servers)


def test_what_fits_exactly_is_held():
    """And not a byte more, each variable once; a refused one leaves no trace. A variable that alone is more than the
    limit fits on no server: another one is advised only where it would help."""
    held = store_of(100, 1)
    for _ in range(3):
        held.declare(variable(0, 60))
    for size, ways in ((100, "raise --memory-limit or add a server"), (101, "raise --memory-limit")):
        with pytest.raises(MemoryLimit, match=f"; {ways}$"):
            held.declare(variable(1, size))
    held.declare(variable(1, 40))
    with pytest.raises(MemoryLimit, match=r"'v2' int8\[1\] needs 1 bytes.*holds 100 bytes.*limit of 100 bytes"):
        held.declare(variable(2, 1))
    assert (held.nbytes, sorted(held.variables)) == (100, [0, 1])
    unlimited = store_of(0, 1)
    unlimited.declare(variable(0, 1 << 40))  # memory is taken by values
    assert unlimited.nbytes == 1 << 40


SHAPE = (1000, 3)


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(module, "PIECE_BYTES", 12 * 64)


def rows():
    return np.arange(3000, dtype="float32").reshape(SHAPE).copy()


def frozen(table):
    return table.freeze(True, {})


def read(frozen):
    return np.concatenate(list(frozen.pieces()))


def write(table, ids):
    table.set_aside(ids)
    table.array[ids] += 1


@pytest.mark.parametrize("seed", range(5))
def test_what_is_read_is_what_was_there(seed):
    """Whatever is written meanwhile, before and behind the place that is read, also several times."""
    rng, table = np.random.default_rng(seed), Dense(rows())
    found = []
    for piece in frozen(table).pieces():
        found.append(piece)
        for _ in range(rng.integers(0, 3)):
            write(table, rng.choice(1000, rng.integers(0, 200), replace=False))
    np.testing.assert_array_equal(np.concatenate(found), rows())
    assert (table.array != rows()).any()


def test_two_checkpoints_read_one_table():
    """Each has its own time, and what is set aside for one is let go of as it is read."""
    table = Dense(rows())
    first = frozen(table)
    write(table, np.array([1, 500]))
    later, second = table.array.copy(), frozen(table)
    table.set_aside(np.array([500, 700]))
    table.array[[500, 700]] = -1
    assert sorted(first.memory().values()) == [12 * 3, table.nbytes]
    for held, expected in ((first, rows()), (second, later)):
        assert table.is_frozen
        np.testing.assert_array_equal(read(held), expected)
        assert list(held.memory().values()) == [0]
    assert not table.is_frozen


def test_only_tables_are_held_so():
    """Others never change while they are held; and a reader beside a checkpoint makes a round copy the table."""
    store = store_of()
    for id in range(2):
        store.declare(PlacedVariable(id, VariableSpec(f"v{id}", TensorSpec("float32", SHAPE), True), (0,)))
        store.initialize(id, rows())
    store.note_tables([1])

    def borrowed():
        found = store.borrow({0, 1}, True, {})
        return found.exclusive, found.own_rows

    assert borrowed() == ({0, 1}, {0, 1})
    values = store.freeze([0, 1])
    assert [type(value) for value in values] == [Dense, FrozenDense]
    assert borrowed() == (set(), {1})
    reader = store.find(1).array
    assert borrowed() == (set(), set())
    del reader
    second = store.freeze([1])
    assert borrowed() == (set(), {1})
    store.commit({1: Dense(rows())})  # a round that replaces it
    assert borrowed() == ({1}, {1})
    np.testing.assert_array_equal(read(second[0]), rows())
    store.freeze([1])  # of which nobody is told any more
    del values, second
    gc.collect()
    assert borrowed() == ({0, 1}, {0, 1})


SPEC = TableSpec((2,), initializer=Constant(1.0))
SLOT = SlotTensor("m", "float32", (2,), 0.5)
HALF = range(BUCKETS // 2)
REST = range(BUCKETS // 2, BUCKETS)


def store_of(limit: int = 0, server: int = 0, native: Native | None = None) -> Store:
    return Store(server, ServerDevice(), limit, native)


def counting(keys: int) -> TableSpec:
    """A table whose filter takes 9.6 bytes for each key."""
    return replace(SPEC, admission=CBFFilter(2, keys))


@pytest.mark.parametrize("keys", [1 << 20, 1 << 36])
def test_a_filter_that_does_not_fit_is_refused(keys, monkeypatch):
    """Before anything is allocated for it; another server has no more room, so only the limit helps."""
    monkeypatch.setattr(policies, "_counters", lambda *size: pytest.fail("it was allocated"))
    held = store_of(1 << 20)
    with pytest.raises(
        MemoryLimit, match=r"'users' .* needs .* for its filter, .* limit of 1 MiB; raise --memory-limit$"
    ):
        held.declare(part_of(0, counting(keys)))
    assert (held.nbytes, held.variables) == (0, {})
    held.declare(part_of(0, counting(keys), server=1))  # which has to say for itself


@pytest.mark.parametrize("is_compiled", [True, False])
def test_small_tables_take_what_their_rows_take(is_compiled):
    """Not what is reserved for them to grow: a hundred of one row, with a slot, and then a large one of the rest. What
    has no room is refused; filters and a tier's memory are counted from the beginning, and the error says so."""
    held = store_of(80 << 20, native=compiled() if is_compiled else None)
    for n in range(0, 200, 2):
        held.declare(part_of(n, SPEC, name=f"t{n}", table=f"t{n}"))
        held.declare(part_of(n + 1, SPEC, slot=replace(SLOT, name=f"m{n}"), table=f"t{n}"))
    for stored in held.tables():
        stored.tensors[max(stored.tensors)].take_place(held.room())
        stored.table.begin(1, np.arange(1), room=held.room())
        stored.table.commit()
    rows = sum(stored.table._contents.rows.in_memory for stored in held.tables())
    assert rows == len(held.tables()) * 3 * PAGE  # rows, slots and what is known of them
    assert rows < held.nbytes < 2 << 20
    table = held.tables()[-1].table
    with pytest.raises(MemoryLimit, match="the server's memory limit leaves"):
        table.begin(2, np.arange(1 << 21), room=held.room())
    table.begin(2, np.arange(30_000), room=held.room())
    table.commit()
    assert table.in_memory > 30_000 * table._contents.rows.row_bytes
    held.declare(part_of(1000, counting(80_000), name="filtered", table="filtered"))
    held.memory_limit = held.nbytes - 1
    with pytest.raises(MemoryLimit, match=r"has no room, and .* KiB of these reserved for filters and --tier-memory;"):
        held.declare(part_of(1001, SPEC, name="more", table="more"))


def test_a_filter_for_which_there_is_no_memory(monkeypatch):
    """Where no limit is given the system refuses: the table is refused in words, and may be declared otherwise."""
    monkeypatch.setattr(np, "zeros", lambda *args: (_ for _ in ()).throw(MemoryError))
    with pytest.raises(
        MemoryLimit, match=("out of memory for the 1024 bytes of a CBFFilter; lower its max_element_size")
    ):
        policies._counters(1, 1024)
    monkeypatch.undo()
    monkeypatch.setattr(policies, "_counters", lambda *size: (_ for _ in ()).throw(MemoryLimit("no memory")))
    held = store_of()
    with pytest.raises(MemoryLimit, match=r"variable 'users' .*: no memory") as error:
        held.declare(part_of(0, counting(1 << 10)))
    assert error.value.task == "/job:ps/task:0"
    held.declare(part_of(0, SPEC))


KNOWN = part_of(0, SPEC, buckets=HALF)
REFUSED: dict[str, tuple[PlacedVariable, str]] = {
    "the same buckets": (part_of(1, SPEC, buckets=HALF, name="b"), "'b' .* has buckets 0 to 511 of 'users'"),
    "some of them": (part_of(1, SPEC, buckets=range(511, 600), name="b"), "'users' has some of them"),
    "another table of the name": (part_of(1, counting(9), buckets=REST, name="b"), "or is another table"),
    "on two servers": (replace(part_of(1, SPEC, buckets=REST, name="b"), servers=(0, 1)), "must be on one server"),
    "no room for its rows": (
        part_of(1, replace(SPEC, memory_limit=1000, eviction=LRU()), table="t", name="b"),
        r"'b' .* does not fit: .* allows \d+ rows; the minimum is 16384",
    ),
    "beside no table": (part_of(1, SPEC, buckets=HALF, slot=SLOT, table="t"), "but this server has no such part"),
    "beside other buckets": (part_of(1, SPEC, buckets=REST, slot=SLOT), "but this server has no such part"),
    "beside another table": (part_of(1, counting(9), buckets=HALF, slot=SLOT), "but this server has no such part"),
    "on another server": (part_of(1, SPEC, 1, HALF, SLOT), "but this server has no such part"),
}


@pytest.mark.parametrize("server", [0, 2], ids=["here", "elsewhere"])
@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_go_with_what_is_declared(case, server):
    """It is refused with its name, also where a server has none of it itself, and the first one goes on."""
    held = store_of(server=server)
    held.declare(KNOWN)
    wrong, told = REFUSED[case]
    with pytest.raises(InvalidRequest, match=told):
        held.declare(wrong)
    assert held.variables == {0: KNOWN}
    held.declare(part_of(1, SPEC, buckets=REST, name="b"))
    held.declare(part_of(2, SPEC, buckets=HALF, slot=SLOT))


def test_a_tensor_lies_beside_a_table_once():
    """Two variables of one name there would be one tensor; and the table's limit has to have room for all of them."""
    spec = replace(SPEC, memory_limit=MIN_CAPACITY * 100)
    held = store_of()
    held.declare(part_of(0, spec))
    held.declare(part_of(1, spec, slot=SLOT))
    with pytest.raises(InvalidRequest, match="'m' has some of them"):
        held.declare(part_of(2, spec, slot=replace(SLOT, value=0.25)))
    with pytest.raises(InvalidRequest, match=r"allows \d+ rows; the minimum is 16384"):
        held.declare(part_of(2, spec, slot=SlotTensor("n", "float64", (64,))))


def test_parts_and_what_lies_beside_them_are_bounded(monkeypatch):
    """Each costs those that come after it some time under the lock; on every server so many."""
    held = store_of()
    for number in range(2 * MAX_PARTS):
        held.declare(part_of(number, SPEC, number % 2 + 1, table=f"t{number}"))
    with pytest.raises(InvalidRequest, match=f"the limit of {MAX_PARTS} tables on server 1; group tables"):
        held.declare(part_of(1 << 16, SPEC, 1))
    for number in range(MAX_BESIDE):
        held.declare(part_of((1 << 16) + number, SPEC, 1, slot=replace(SLOT, name=f"m{number}"), table="t0"))
    with pytest.raises(InvalidRequest, match=f"the limit of {MAX_BESIDE} slot variables of table 't0'"):
        held.declare(part_of(1 << 17, SPEC, 1, slot=SLOT, table="t0"))


def test_what_is_forgotten_takes_what_lies_beside_it_along():
    """So that both may be declared anew, otherwise. A part has no value: neither is it given one, nor is it read."""
    held = store_of()
    held.declare(KNOWN)
    with pytest.raises(InvalidRequest, match="'users' is a part of a dynamic table, which begins empty"):
        held.initialize(0, np.zeros((1 << 24, 2), "float32"))
    with pytest.raises(InvalidRequest, match="has no size; look its rows up"):
        held.find(0).whole()
    held.declare(part_of(1, SPEC, buckets=HALF, slot=SLOT))
    assert held.rivals(part_of(2, SPEC)) == [0]
    assert held.rivals(part_of(2, SPEC, buckets=HALF, slot=SLOT)) == [1]
    assert held.rivals(replace(KNOWN, servers=(1,))) == [0]
    assert held.rivals(KNOWN) == []
    held.forget(0)
    assert (held.variables, held.tables()) == ({}, [])
    held.declare(part_of(2, counting(9)))
    held.declare(part_of(1, counting(9), slot=SLOT))
    assert [len(table.tensors) for table in held.tables()] == [2]


def test_what_lies_beside_many_rows_is_not_made_for_an_answer():
    """A tensor that no round has used has no memory, and would have more in an answer than the server may have."""
    held = store_of(512 << 20)
    held.declare(part_of(0, SPEC))
    held.declare(part_of(1, SPEC, slot=SlotTensor("wide", "float32", (1 << 18,))))
    table = held.tables()[0].table
    table.begin(1, np.arange(1000))
    table.commit()
    (_,) = held.ask([TableRead(1, "keys", 0, BUCKETS)])
    with pytest.raises(MemoryLimit, match="take 1000 MiB, and the limit is 512 MiB"):
        held.ask([TableRead(1, "rows", 0, BUCKETS)])
