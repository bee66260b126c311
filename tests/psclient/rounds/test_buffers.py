"""Buffers of one process: over cores in process, with a chief that the test plays."""

from __future__ import annotations

import numpy as np
import pytest

import psclient as ps
from psclient._src.devices import Device
from psclient._src.rounds.buffers import Buffers, pack
from psclient._src.transport.lane import Lane
from pswire.model.plan import PlacedVariable, VariableSpec
from pswire.model.tensor import TensorSpec
from pswire.transport.shared_memory import SharedArena

CPU = Device("cpu", 0)


class Memory(Lane):
    """A lane that only has memory."""

    def __init__(self, size: int) -> None:
        self.arena = SharedArena(memoryview(bytearray(size)), 64)

    def reserve(self, size: int) -> tuple[memoryview, int] | None:
        return self.arena.reserve(size)


def variable(number: int, size: int) -> PlacedVariable:
    return PlacedVariable(number, VariableSpec(f"v{number}", TensorSpec("float32", (size,))), (0,))


class Answers:
    """Answers every round at once; notes them."""

    def __init__(self) -> None:
        self.taken: list[object] = []

    def __call__(self, round: object) -> None:
        self.taken.append(round)


def sent(buffers: Buffers, array: np.ndarray, round: object) -> None:
    buffer = buffers.hand_in(array)
    assert buffer is not None
    buffer.round = round  # type: ignore[assignment]


def place(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


@pytest.mark.parametrize("lane", [None, Memory(1 << 12)])
def test_the_older_round_is_waited_for(lane: Lane | None) -> None:
    """When its array comes again; never the last one."""
    answers = Answers()
    buffers, v = Buffers(lambda server: lane, answers), variable(1, 10)
    given = []
    for round in "abcd":
        given.append(buffers.give(v, CPU))
        assert buffers.give(v, CPU) is given[-1]
        sent(buffers, given[-1], round)
        assert not given[-1].flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            given[-1][0] = 1
    assert answers.taken == ["a", "b"]
    assert place(given[0]) == place(given[2]) != place(given[1]) == place(given[3])


def test_what_is_in_an_open_section_is_given_to_nobody() -> None:
    """It was handed in, and is in no round yet: there is a third array."""
    buffers, v = Buffers(lambda server: None, Answers()), variable(1, 10)
    given = [buffers.give(v, CPU)]
    for _ in range(3):
        buffers.hand_in(given[-1])
        given.append(buffers.give(v, CPU))
    assert len({place(array) for array in given}) == 4


def test_what_is_handed_in_once_more_is_given_to_nobody() -> None:
    """The round that sent it before is answered, and the section that has it now is not sent."""
    buffers, v = Buffers(lambda server: None, Answers()), variable(1, 10)
    first = buffers.give(v, CPU)
    sent(buffers, first, "a")
    second = buffers.give(v, CPU)
    buffers.hand_in(first)
    sent(buffers, second, "b")
    assert place(buffers.give(v, CPU)) not in (place(first), place(second))


def test_only_whole_buffers_are_handed_in() -> None:
    """Not a part of one, another array, nor a number; a view of all of it is."""
    buffers, v = Buffers(lambda server: None, Answers()), variable(1, 10)
    array = buffers.give(v, CPU)
    assert [buffers.hand_in(other) for other in (array[:5], array[::2], np.zeros(10), None)] == [None] * 4
    assert array.flags.writeable
    assert buffers.hand_in(array.reshape(2, 5)) is not None
    assert not array.flags.writeable


def test_a_new_lane_has_new_arrays() -> None:
    """Once they come again: the memory of a lane that broke is shared with nobody."""
    lanes = [Memory(1 << 12)]
    buffers, v = Buffers(lambda server: lanes[-1], Answers()), variable(1, 10)
    old = [buffers.give(v, CPU)]
    sent(buffers, old[0], "a")
    old.append(buffers.give(v, CPU))
    sent(buffers, old[1], "b")
    lanes.append(Memory(1 << 12))
    new = buffers.give(v, CPU)
    assert place(new) not in {place(array) for array in old}
    assert buffers.hand_in(old[0]) is None
    assert buffers.hand_in(new) is not None


def test_a_lane_without_room_gives_way_to_memory_of_our_own() -> None:
    """For what has no room; two smaller ones still lie there."""
    memory = Memory(64 + 3 * 64)
    buffers = Buffers(lambda server: memory, Answers())
    arrays = [buffers.give(variable(number, size), CPU) for number, size in enumerate((100, 16, 16))]
    inside = [memory.arena.lend([memoryview(array).cast("B")]) for array in arrays]
    assert inside == [None, 64, 128]


def test_neighbours_travel_as_one() -> None:
    """Where they lie as they travel, with the gaps; not across another array, another lane or the other way round."""
    first, second = Memory(1 << 12), Memory(1 << 12)
    lanes = {0: first, 1: second}
    buffers = Buffers(lambda server: lanes[server], Answers())
    a, b, c = (buffers.give(variable(number, 5), CPU) for number in range(3))
    d = buffers.give(PlacedVariable(9, VariableSpec("d", TensorSpec("float32", (5,))), (1,)), CPU)
    for number, array in enumerate((a, b, c, d)):
        array[:] = number
    other = np.full(3, 7, np.float32)

    def chunks(*arrays: np.ndarray) -> list[tuple[int, int]]:
        payload = pack(arrays, buffers.among(arrays))
        specs = [TensorSpec("float32", array.shape) for array in arrays]
        for array, read in zip(arrays, payload.tensors(specs), strict=True):
            assert array.tolist() == read.tolist()
        return [(offset, len(chunk)) for offset, chunk in payload.chunks]

    assert chunks(a, b, c) == [(0, 84)]
    assert chunks(other, b, c, d) == [(0, 12), (16, 52), (80, 20)]
    assert chunks(b, a, c) == [(0, 20), (32, 20), (64, 20)]
    assert chunks(a, other, b) == [(0, 20), (32, 12), (48, 20)]


def test_a_strategy_without_servers_has_ordinary_arrays() -> None:
    """One for each replica, as the variable is; others' variables, and what is none, are refused."""
    strategy = ps.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        v = ps.Variable(np.zeros(3, np.float32), name="v")
    optimizer = ps.optimizers.SGD(1.0)

    def step() -> None:
        buffer = strategy.buffer(v)
        assert (buffer.dtype, buffer.shape) == (np.float32, (3,))
        buffer[:] = -1.0
        optimizer.apply_gradients([(buffer, v)])

    for _ in range(3):
        strategy.run(step)
    assert v.numpy().tolist() == [6.0] * 3
    with strategy.scope():
        assert isinstance(strategy.buffer(v), ps.DistributedValues)
    with pytest.raises(ValueError, match="another strategy"):
        ps.MirroredStrategy(["cpu:0"]).buffer(v)
    with pytest.raises(TypeError, match="no ndarray"):
        strategy.buffer(np.zeros(3))
