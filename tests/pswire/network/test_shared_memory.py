"""Shared memory: places never overlap, are freed exactly once, and stay what they were while somebody looks at them."""

from __future__ import annotations

import fcntl
import gc
import itertools
import mmap
import os
from typing import Any

import numpy as np
import pytest
from hypothesis import given, stateful
from hypothesis import strategies as st

from pswire.errors import InvalidRequest
from pswire.limits import ALIGN
from pswire.network.shared_memory import LINE, SEALS, Segment, SharedArena, SharedView
from tests.kit.cases import search

SIZE = 64 * LINE
"""Bytes of the segments of these tests."""


def segment() -> tuple[Segment, Segment]:
    """The two ends of one."""
    ours, file = Segment.make(SIZE)
    try:
        return ours, Segment.take(file)
    finally:
        os.close(file)


def content(number: int, size: int) -> bytes:
    """Bytes that tell which ones they are."""
    return bytes((number * 31 + at) % 251 for at in range(size))


def shared(ring: int | None = None) -> tuple[SharedArena, SharedView, list[int], memoryview]:
    """The ends of one segment, the places that the reader has freed, and its memory as the writer has it."""
    ours, theirs = segment()
    freed: list[int] = []
    more = () if ring is None else (ring,)
    view = SharedView(theirs.memory, lambda place, size: freed.append(place), *more)
    return SharedArena(ours.memory, *more), view, freed, ours.memory


# ---- Segments ----


def test_what_one_end_writes_the_other_reads() -> None:
    """It cannot write there, nor change the size. The memory is there as long as somebody looks at it."""
    ours, theirs = segment()
    ours.memory[100] = 7
    assert theirs.memory[100] == 7
    with pytest.raises(TypeError):
        theirs.memory[100] = 8
    del ours
    gc.collect()
    assert theirs.memory[100] == 7


def test_a_segment_is_sealed() -> None:
    """Against growing, shrinking, holes, and other writers."""
    _, file = Segment.make(SIZE)
    try:
        assert fcntl.fcntl(file, fcntl.F_GET_SEALS) & SEALS == SEALS
        for size in (0, SIZE + 1):
            with pytest.raises(PermissionError):
                os.ftruncate(file, size)
        with pytest.raises(PermissionError):
            mmap.mmap(file, SIZE)
        with pytest.raises(OSError):
            os.pwrite(file, b"x", 0)
    finally:
        os.close(file)


@pytest.mark.parametrize(("size", "at_most"), [(4096, 4095), (1, 0)])
def test_more_than_is_of_use_is_not_mapped(size: int, at_most: int) -> None:
    """Address space is memory, too."""
    _, file = Segment.make(size)
    try:
        with pytest.raises(InvalidRequest):
            Segment.take(file, at_most)
        assert Segment.take(file, size).size == size
    finally:
        os.close(file)


# ---- Rings and mirrors ----

SIZES = st.integers(1, SIZE // 3) | st.sampled_from([SIZE, SIZE + 1])


class Sharing(stateful.RuleBasedStateMachine):
    """Two processes with one segment: what is put is read, by one or several, and freed, in any order."""

    places = stateful.Bundle("places")
    views = stateful.Bundle("views")

    def __init__(self) -> None:
        super().__init__()
        self.ring, self.mirror, self.freed, _ = shared()
        self.known: dict[int, tuple[bytes, int]] = {}  # by place: what is there, and how many have still to free it
        self.keys: dict[str, int] = {}
        self.count = 0

    def teardown(self) -> None:
        self.free_what_is_told()

    @stateful.rule(target=places, size=SIZES, cuts=st.lists(st.integers(0, SIZE), max_size=3))
    def put(self, size: int, cuts: list[int]) -> Any:
        """Something new; in several buffers."""
        return self._put(size, cuts, None)

    @stateful.rule(target=places, size=st.integers(1, SIZE // 8), key=st.sampled_from("ab"))
    def put_known(self, size: int, key: str) -> Any:
        """Something that several have to read."""
        if key in self.keys:
            size = len(self.known[self.keys[key]][0])
        return self._put(size, [], key)

    def _put(self, size: int, cuts: list[int], key: str | None) -> Any:
        self.count += 1
        data = content(self.count, size)
        at = sorted({0, size, *(cut for cut in cuts if cut < size)})
        buffers = [memoryview(data[low:high]) for low, high in itertools.pairwise(at)]
        place = self.ring.put(buffers, size, key)
        if key in self.keys:
            assert place == self.keys[key]
            self.known[place] = self.known[place][0], self.known[place][1] + 1
            return stateful.multiple()
        assert place == self._lowest(size)
        if place is None:
            return stateful.multiple()
        if key is not None:
            self.keys[key] = place
        self.known[place] = data, 1
        return place

    def _lowest(self, size: int) -> int | None:
        """The lowest place where so many bytes have room."""
        taken = sorted((place, place + len(data)) for place, (data, _) in self.known.items())
        for place in range(0, SIZE - size + 1, LINE):
            if all(end <= place or begin >= place + size for begin, end in taken):
                return place
        return None

    @stateful.rule(target=views, place=stateful.consumes(places), reader=st.sampled_from([0, 1, SIZE]))
    def read(self, place: int, reader: int) -> Any:
        """Looks at a place; nobody else does meanwhile."""
        data, _ = self.known[place]
        view = self.mirror.read(place, len(data), reader)
        assert view.readonly or place in self.freed  # a copy is the reader's own
        array = np.frombuffer(view, np.uint8)
        return array[len(array) // 2 :], array.tobytes(), data

    @stateful.rule(view=stateful.consumes(views))
    def let_go(self, view: Any) -> None:
        """What was looked at was what was put there, up to the end."""
        half, whole, data = view
        assert whole == data
        assert half.tobytes() == data[len(data) // 2 :]

    @stateful.rule()
    def free_what_is_told(self) -> None:
        """The places that the reader needs no more."""
        while self.freed:
            place = self.freed.pop()
            data, holders = self.known[place]
            self.ring.free(place)
            if holders > 1:
                self.known[place] = data, holders - 1
                continue
            del self.known[place]
            self.keys = {key: where for key, where in self.keys.items() if where != place}

    @stateful.invariant()
    def nothing_is_freed_twice(self) -> None:
        """Nor while somebody looks at it."""
        assert len(set(self.freed)) == len(self.freed)
        assert not set(self.freed) & self.mirror._taken.keys()


def test_processes_share_a_segment() -> None:
    """What is put is read as it was, by one or several, and its place is free when the last of them has freed it. What
    has no room has no place, until something is freed."""
    stateful.run_state_machine_as_test(Sharing, settings=search(0.6, steps=0.6))  # type: ignore[no-untyped-call]


def test_several_readers_free_one_place() -> None:
    """It is written once, and used again when the last of them needs it no more; its key then means something new."""
    ring, _, _, memory = shared()
    first, second = (memoryview(content(number, 100)) for number in (1, 2))
    assert [ring.put([first], 100, "key") for _ in range(3)] == [0] * 3
    for _ in range(2):
        ring.free(0)
        assert ring.put([second], 100) not in (0, None)
    ring.free(0)
    assert ring.put([second], 100, "key") == 0
    assert bytes(memory[:100]) == second


@pytest.mark.parametrize("held", [0, SIZE // 2])
def test_a_crowded_memory_is_read_by_copies(held: int) -> None:
    """While half of it is held, more is copied and free at once; who lets go of what was read gets it where it is."""
    _, mirror, freed, _ = shared()
    kept = mirror.read(0, held) if held else None
    place, size = SIZE // 2, SIZE // 4
    view = mirror.read(place, size)
    assert freed == ([place] if held else [])
    del view
    assert freed == [place]
    here = mirror.read(place, size, reader=size)
    assert freed == [place]
    del here
    assert freed == [place] * 2
    del kept
    assert freed == [place] * 2 + ([0] if held else [])


RING = SIZE // 2


@given(st.integers(-1, SIZE + LINE), st.integers(1, SIZE + LINE))
def test_nothing_outside_is_looked_at(place: int, size: int) -> None:
    """Nor between lines, nor where somebody looks already; nor across the end of the ring, or between places there."""
    _, mirror, *_ = shared(RING)
    for wrong in ((RING - LINE, 2 * LINE), (RING + 1, 1), (SIZE - ALIGN, 2 * ALIGN)):
        with pytest.raises(InvalidRequest):
            mirror.read(*wrong)
    _, mirror, freed, _ = shared()
    if place >= 0 and place % LINE == 0 and place + size <= SIZE:
        view = mirror.read(place, size)
        assert len(view) == size
        if not freed:
            with pytest.raises(InvalidRequest):
                mirror.read(place, size)
    else:
        with pytest.raises(InvalidRequest):
            mirror.read(place, size)


def test_what_is_reserved_is_read_where_it_is() -> None:
    """Behind the ring, one after another, once at a time; it takes no room of the ring, and is never copied."""
    ours, theirs = segment()
    ring, freed = SharedArena(ours.memory, RING), []
    mirror = SharedView(theirs.memory, lambda place, size: freed.append((place, size)), RING)
    (memory, first), (_, second) = (ring.reserve(size) for size in (ALIGN + 1, RING // 2))
    assert (first, second) == (RING, RING + 2 * ALIGN)
    assert ring.reserve(RING // 2) is None
    buffer = memory[second : second + RING // 2]
    buffer[:] = content(1, len(buffer))
    assert ring.lend([buffer, memoryview(bytes(ALIGN - 1))]) == second
    assert ring.lend([buffer]) is None  # it is not read yet
    kept = mirror.read(0, RING // 2)  # from now on the ring is read by copies
    view = mirror.read(second, len(buffer))
    assert bytes(view) == content(1, len(buffer))
    with pytest.raises(InvalidRequest):
        mirror.read(second, 1)
    del view
    assert freed == [(second, 0)]
    ring.free(second)
    assert ring.lend([buffer]) == second
    assert ring.put([memoryview(bytes(RING))], RING) == 0
    del kept
    assert freed[-1] == (0, RING // 2)


def test_what_is_not_reserved_is_not_lent() -> None:
    """What lies elsewhere, in the ring, in two places, or between the places that the other end takes."""
    ring, _, _, memory = shared(RING)
    assert ring.lend([memory[RING : RING + ALIGN]]) is None
    memory, place = ring.reserve(4 * ALIGN) or pytest.fail("there is no room")
    whole = memory[place : place + ALIGN]
    others = [memoryview(bytes(ALIGN)), memory[:ALIGN], memory[place + 1 : place + ALIGN], memory[place + RING // 2 :]]
    for other in others:
        assert ring.lend([other]) is None
    assert ring.lend([whole, memory[place + 2 * ALIGN : place + 3 * ALIGN]]) is None
    assert ring.lend([whole]) == place


def test_what_a_fork_may_look_at_is_not_freed() -> None:
    """Until what was kept for it is let go of; what is read afterwards, and what nobody looks at any more, is."""
    _, mirror, freed, _ = shared()
    before = mirror.read(0, LINE)
    kept = mirror.keep()
    after = mirror.read(LINE, LINE)
    del before, after
    assert freed == [LINE]
    assert mirror.looked_at
    with pytest.raises(InvalidRequest):
        mirror.read(0, LINE)
    assert not mirror.keep()
    kept.clear()
    assert freed == [LINE, 0]
    assert not mirror.looked_at
