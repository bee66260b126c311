"""Parts of dynamic tables among a server's variables: what may be declared beside what, and what that takes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from psserver.devices import Device
from psserver.state.variables import Store
from psserver.tables import policies
from pswire.api import TableRead
from pswire.errors import InvalidRequest, MemoryLimit
from pswire.limits import MAX_BESIDE, MAX_PARTS
from pswire.model.hashing import BUCKETS
from pswire.model.plan import PlacedVariable
from pswire.model.tables import LRU, MIN_CAPACITY, CBFFilter, Constant, SlotTensor, TableSpec
from tests.kit.contributions import part_of

SPEC = TableSpec((2,), initializer=Constant(1.0))
SLOT = SlotTensor("m", "float32", (2,), 0.5)
HALF = range(BUCKETS // 2)
REST = range(BUCKETS // 2, BUCKETS)


def store(limit: int = 0, server: int = 0) -> Store:
    return Store(server, Device(), limit)


def counting(keys: int) -> TableSpec:
    """A table whose filter takes 9.6 bytes for each key."""
    return replace(SPEC, admission=CBFFilter(2, keys))


def test_an_empty_table_takes_what_its_filter_takes():
    """Its counters are there from the beginning: those of its buckets, once, and no tensor beside it has any."""
    held = store(1 << 20)
    half = part_of(0, counting(1 << 16), buckets=HALF)
    held.declare(half)
    held.declare(part_of(1, counting(1 << 16), buckets=HALF, slot=SLOT))
    assert 300_000 < held.nbytes == half.spec.nbytes < 330_000
    held.forget(0)
    assert held.nbytes == 0


@pytest.mark.parametrize("keys", [1 << 20, 1 << 36])
def test_a_filter_that_does_not_fit_is_refused(keys, monkeypatch):
    """Before anything is allocated for it; another server has no more room, so only the limit helps."""
    monkeypatch.setattr(policies, "_counters", lambda *size: pytest.fail("it was allocated"))
    held = store(1 << 20)
    with pytest.raises(
        MemoryLimit, match=r"'users' .* needs .* for its filter, .* limit of 1 MiB; raise --memory-limit$"
    ):
        held.declare(part_of(0, counting(keys)))
    assert (held.nbytes, held.variables) == (0, {})
    held.declare(part_of(0, counting(keys), server=1))  # which has to say for itself


def test_a_filter_for_which_there_is_no_memory(monkeypatch):
    """Where no limit is given the system refuses: the table is refused in words, and may be declared otherwise."""
    monkeypatch.setattr(np, "zeros", lambda *args: (_ for _ in ()).throw(MemoryError))
    with pytest.raises(MemoryLimit, match="no memory for the 1024 bytes of a CBFFilter; lower its max_element_size"):
        policies._counters(1, 1024)
    monkeypatch.undo()
    monkeypatch.setattr(policies, "_counters", lambda *size: (_ for _ in ()).throw(MemoryLimit("no memory")))
    held = store()
    with pytest.raises(MemoryLimit, match=r"variable 'users' .*: no memory") as error:
        held.declare(part_of(0, counting(1 << 10)))
    assert error.value.task == "/job:ps/task:0"
    held.declare(part_of(0, SPEC))


KNOWN = part_of(0, SPEC, buckets=HALF)
REFUSED: dict[str, tuple[PlacedVariable, str]] = {
    "the same buckets": (part_of(1, SPEC, buckets=HALF, name="b"), "'b' .* has buckets 0 to 511 of 'users'"),
    "some of them": (part_of(1, SPEC, buckets=range(511, 600), name="b"), "'users' has some of them"),
    "another table of the name": (part_of(1, counting(9), buckets=REST, name="b"), "or is of another table"),
    "on two servers": (replace(part_of(1, SPEC, buckets=REST, name="b"), servers=(0, 1)), "is on one server"),
    "no room for its rows": (
        part_of(1, replace(SPEC, memory_limit=1000, eviction=LRU()), table="t", name="b"),
        r"'b' .* does not fit: .* has room for \d+ rows; the least is 16384",
    ),
    "beside no table": (part_of(1, SPEC, buckets=HALF, slot=SLOT, table="t"), "of which no such part is there"),
    "beside other buckets": (part_of(1, SPEC, buckets=REST, slot=SLOT), "of which no such part is there"),
    "beside another table": (part_of(1, counting(9), buckets=HALF, slot=SLOT), "of which no such part is there"),
    "on another server": (part_of(1, SPEC, 1, HALF, SLOT), "of which no such part is there"),
}


@pytest.mark.parametrize("server", [0, 2], ids=["here", "elsewhere"])
@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_go_with_what_is_declared(case, server):
    """It is refused with its name, also where a server has none of it itself, and the first one goes on."""
    held = store(server=server)
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
    held = store()
    held.declare(part_of(0, spec))
    held.declare(part_of(1, spec, slot=SLOT))
    with pytest.raises(InvalidRequest, match="'m' has some of them"):
        held.declare(part_of(2, spec, slot=replace(SLOT, value=0.25)))
    with pytest.raises(InvalidRequest, match=r"has room for \d+ rows; the least is 16384"):
        held.declare(part_of(2, spec, slot=SlotTensor("n", "float64", (64,))))


def test_parts_and_what_lies_beside_them_are_bounded(monkeypatch):
    """Each costs those that come after it some time under the lock; on every server so many."""
    held = store()
    for number in range(MAX_PARTS):
        held.declare(part_of(number, SPEC, number % 2 + 1, table=f"t{number}"))
    for number in range(MAX_PARTS, 2 * MAX_PARTS):
        held.declare(part_of(number, SPEC, number % 2 + 1, table=f"t{number}"))
    with pytest.raises(InvalidRequest, match=f"too many on server 1, which has {MAX_PARTS}; group tables"):
        held.declare(part_of(1 << 16, SPEC, 1))
    for number in range(MAX_BESIDE):
        held.declare(part_of((1 << 16) + number, SPEC, 1, slot=replace(SLOT, name=f"m{number}"), table="t0"))
    with pytest.raises(InvalidRequest, match=f"beside the table 't0', which has {MAX_BESIDE}"):
        held.declare(part_of(1 << 17, SPEC, 1, slot=SLOT, table="t0"))


def test_what_is_forgotten_takes_what_lies_beside_it_along():
    """So that both may be declared anew, otherwise."""
    held = store()
    held.declare(KNOWN)
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
    held.clear()
    held.declare(KNOWN)


def test_a_part_has_no_value():
    """Neither is it given one, nor is it read as a whole."""
    held = store()
    held.declare(KNOWN)
    with pytest.raises(InvalidRequest, match="'users' is a part of a dynamic table; it begins empty"):
        held.initialize(0, np.zeros((1 << 24, 2), "float32"))
    with pytest.raises(InvalidRequest, match="has no size; look its rows up"):
        held.value(0)


def test_what_lies_beside_many_rows_is_not_made_for_an_answer():
    """A tensor that no round has used has no memory, and would have more in an answer than the server may have."""
    held = store(512 << 20)
    held.declare(part_of(0, SPEC))
    held.declare(part_of(1, SPEC, slot=SlotTensor("wide", "float32", (1 << 18,))))
    table = held.tables_of([0])[0].stored.table
    table.begin(1, np.arange(1000))
    table.commit()
    (_,) = held.ask([TableRead(1, "keys", 0, BUCKETS)])
    with pytest.raises(MemoryLimit, match="take 1000 MiB, and the limit is 512 MiB"):
        held.ask([TableRead(1, "rows", 0, BUCKETS)])
