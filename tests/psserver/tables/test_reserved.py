"""Arrays that grow without moving."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest

from psserver.tables import reserved
from psserver.tables.reserved import CHUNK, ReservedArray
from pswire.model.tensor import address_of


def status(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) << 10


def test_growth_moves_nothing_and_reserves_no_memory():
    """Room for 256 GiB costs none of it; an old view sees what is written through a new one."""
    before = status("VmRSS")
    array = ReservedArray((64,), np.dtype(np.float32), 1 << 40, 256 << 30)
    array.resize(10)
    first = array.array
    first[:] = 1
    array.resize(100_000)
    assert address_of(array.array) == address_of(first)
    array.array[5] = 2
    assert first[5].tolist() == [2] * 64
    assert not array.array[10:].any()
    assert array.moves == 0
    assert array.touched == -(-100_000 * 256 // CHUNK) * CHUNK
    assert status("VmRSS") - before < 100_000 * 256 + (64 << 20)


def test_the_tail_is_given_back():
    """Memory of rows that are not shown any more returns to the system, and they are zero afterwards."""
    array = ReservedArray((1024,), np.dtype(np.float64), 1 << 30)
    array.resize(10_000)
    array.array[:] = 1
    full = status("VmRSS")
    array.resize(100)
    assert full - status("VmRSS") > 70 << 20
    assert array.touched == CHUNK
    array.resize(10_000)
    assert array.array[:100].all()
    assert not array.array[256:].any()


def test_it_is_released_with_its_last_view():
    """Address space is given back as soon as nobody holds a view."""
    gc.collect()
    before = status("VmSize")
    array = ReservedArray((), np.dtype(np.uint32), 1 << 40, 256 << 30)
    array.resize(5)
    view = array.array
    view[:] = 3
    del array
    gc.collect()
    assert status("VmSize") - before > 200 << 30
    assert view.tolist() == [3] * 5
    del view
    gc.collect()
    assert status("VmSize") - before < 1 << 30


def test_hundreds_of_arrays_leave_address_space_for_others(monkeypatch):
    """What they reserve together has a bound; those beyond it reserve nothing until some are gone."""
    room = 1 << 30
    monkeypatch.setattr(reserved, "ROOM_OF_ALL", reserved._space.taken + 3 * room + CHUNK)
    before = status("VmSize")
    arrays = [ReservedArray((2,), np.dtype(np.float32), 1 << 40, room) for _ in range(300)]
    assert status("VmSize") - before < 4 * room
    for array in arrays[::100]:
        array.resize(100)
        array.array[:] = 7
        array.resize(200_000)
        assert array.array[:100].tolist() == [[7, 7]] * 100
    assert [array.moves for array in arrays[::100]] == [0, 1, 1]
    del array, arrays
    gc.collect()
    late = ReservedArray((2,), np.dtype(np.float32), 1 << 40, room)
    late.resize(100)
    late.resize(200_000)
    assert late.moves == 0


@pytest.mark.parametrize("refuses", [True, False])
def test_without_room_it_is_copied_into_twice_as_much(monkeypatch, refuses):
    """Where the system reserves nothing, or too little was reserved, all values stay."""

    def refused(nbytes: int):
        raise OSError

    if refuses:
        monkeypatch.setattr(reserved._space, "reserve", refused)
    array = ReservedArray((2,), np.dtype(np.int16), 8)
    expected = np.zeros((0, 2), np.int16)
    for size in (3, 9, 20, 21, 500, 400, 900):
        new = np.full((max(size - len(expected), 0), 2), size, np.int16)
        expected = np.concatenate([expected, new])[:size]
        array.resize(size)
        array.array[size - len(new) : size] = new
        assert array.array.tolist() == expected.tolist()
    assert 3 <= array.moves <= 6
