"""Where variables lie: `Placement`, given sizes and limits; and the buffers of a process."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import psclient as ps
from psclient._src.arrays.devices import Device
from psclient._src.network.transport import Transport
from psclient._src.rounds.buffers import Buffers, pack
from psclient._src.rounds.placement import Placement, held_bytes
from pswire.errors import ConfigError
from pswire.model.plan import PlacedVariable, VariableSpec
from pswire.model.tables import SlotTensor, TablePart, TableSpec
from pswire.model.tensor import TensorSpec
from pswire.network.shared_memory import SharedArena
from tests.kit.shell import children
from tests.kit.strategies import refused

STRATEGIES = ("greedy", "round_robin")
SIZES = st.lists(st.integers(0, 1000), max_size=40)
SERVERS = st.integers(1, 5)


class Cluster:
    """What a client's placement makes of variables, and the bytes that servers then hold."""

    def __init__(self, ps_strategy, limits):
        self.placement = Placement(ps_strategy, limits)
        self.held = [0] * len(limits)

    def create(self, nbytes, beside=()):
        spec = VariableSpec("v", TensorSpec("int8", (nbytes,)))
        place = beside or self.placement.choose(spec)
        self.placement.created(PlacedVariable(0, spec, place), chosen=not beside)
        for server in place:
            self.held[server] += nbytes
        return place


@given(SERVERS, SIZES, st.lists(st.booleans(), min_size=40, max_size=40))
def test_round_robin_takes_the_servers_in_turn(count, sizes, colocated):
    """What is created beside another does not advance the turn; sizes do not matter."""
    cluster, turn = Cluster("round_robin", [0] * count), 0
    for size, beside in zip(sizes, colocated, strict=False):
        if beside:
            cluster.create(size, (count - 1,))
        else:
            assert cluster.create(size) == (turn % count,)
            turn += 1


@given(SERVERS, SIZES)
def test_greedy_takes_the_server_with_the_fewest_bytes(count, sizes):
    """The first of several: so no server holds more than its share and one variable, and variables of one size are
    placed as in turn, which is where TensorFlow's default puts them."""
    cluster = Cluster("greedy", [0] * count)
    for size in sizes:
        fewest = cluster.held.index(min(cluster.held))
        assert cluster.create(size) == (fewest,)


def test_slots_and_copies_of_non_slot_variables_weigh():
    """A server whose variables have slots gets the next variable later."""
    cluster = Cluster("greedy", [0, 0])
    assert [cluster.create(size) for size in (100, 101)] == [(0,), (1,)]
    for _ in range(2):
        cluster.create(100, (0,))
    cluster.create(8, (0, 1))
    assert [cluster.create(100) for _ in range(3)] == [(1,), (1,), (0,)]


@pytest.mark.parametrize("name", STRATEGIES)
@given(st.lists(st.integers(0, 2000), min_size=1, max_size=5), SIZES)
def test_no_limit_is_passed_while_a_server_has_room(name, limits, sizes):
    cluster = Cluster(name, limits)
    for size in sizes:
        room = [not limit or held + size <= limit for held, limit in zip(cluster.held, limits, strict=True)]
        (server,) = cluster.create(size)
        assert room[server] or not any(room)


@pytest.mark.parametrize(
    ("name", "hint"),
    [("gredy", "did you mean greedy"), ("roundrobin", "did you mean round_robin"), (None, "greedy, round_robin")],
)
def test_a_name_that_is_none_is_refused(name, hint):
    """With the one that may be meant, or all, and before any server is started."""
    before = children()
    refused(ConfigError, hint, lambda: ps.ParameterServerStrategy(ps_strategy=name))
    assert children() == before


def test_a_table_weighs_what_it_may_grow_to():
    """Its share of a memory limit; without one nothing, as what lies beside its rows."""
    limit, beside = 1 << 20, SlotTensor("m", "float32", (2,))
    for spec, slot, nbytes in (
        (TableSpec((2,)), None, 0),
        (TableSpec((2,), memory_limit=limit), None, limit // 4),
        (TableSpec((2,), memory_limit=limit), beside, 0),
    ):
        part = TablePart("users", spec, 512, 256, slot)
        assert held_bytes(VariableSpec("users/part_1", part.tensor, part=part)) == nbytes


@pytest.mark.parametrize("name", STRATEGIES)
def test_parts_of_a_table_lie_on_servers_of_their_own(name):
    """The first goes where a variable would go."""
    cluster = Cluster(name, [0, 0, 0])
    cluster.create(100)
    parts = [TablePart("users", TableSpec((2,)), first, 256) for first in (0, 256, 512)]
    specs = [VariableSpec(f"users/part_{n}", part.tensor, part=part) for n, part in enumerate(parts)]
    places = cluster.placement.in_turn(specs)
    assert places == [(1,), (2,), (0,)]
    for spec, place in zip(specs, places, strict=True):
        cluster.placement.created(PlacedVariable(0, spec, place), chosen=True)
    assert cluster.create(8) == (1,)


CPU = Device("cpu", 0)


class Memory(Transport):
    """A transport that only has memory."""

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
    buffers.hand_in(array).round = round


def place(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


@pytest.mark.parametrize("transport", [None, Memory(1 << 12)])
def test_the_older_round_is_waited_for(transport):
    """When its array comes again; never the last one."""
    answers = Answers()
    buffers, v = Buffers(lambda server: transport, answers), variable(1, 10)
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


def test_what_an_open_section_has_is_given_to_nobody():
    """It was handed in, and is in no round yet: there is a third array; also one that was handed in once more."""
    buffers, v = Buffers(lambda server: None, Answers()), variable(1, 10)
    given = [buffers.give(v, CPU)]
    for _ in range(3):
        buffers.hand_in(given[-1])
        given.append(buffers.give(v, CPU))
    assert len({place(array) for array in given}) == 4
    buffers, v = Buffers(lambda server: None, Answers()), variable(1, 10)
    first = buffers.give(v, CPU)
    sent(buffers, first, "a")
    second = buffers.give(v, CPU)
    buffers.hand_in(first)
    sent(buffers, second, "b")
    assert place(buffers.give(v, CPU)) not in (place(first), place(second))


def test_only_whole_buffers_are_handed_in():
    """Not a part of one, another array, nor a number; a view of all of it is."""
    buffers, v = Buffers(lambda server: None, Answers()), variable(1, 10)
    array = buffers.give(v, CPU)
    assert [buffers.hand_in(other) for other in (array[:5], array[::2], np.zeros(10), None)] == [None] * 4
    assert array.flags.writeable
    assert buffers.hand_in(array.reshape(2, 5)) is not None
    assert not array.flags.writeable


def test_a_new_transport_has_new_arrays():
    """Once they come again: the memory of a transport that broke is shared with nobody."""
    transports = [Memory(1 << 12)]
    buffers, v = Buffers(lambda server: transports[-1], Answers()), variable(1, 10)
    old = [buffers.give(v, CPU)]
    sent(buffers, old[0], "a")
    old.append(buffers.give(v, CPU))
    sent(buffers, old[1], "b")
    transports.append(Memory(1 << 12))
    new = buffers.give(v, CPU)
    assert place(new) not in {place(array) for array in old}
    assert buffers.hand_in(old[0]) is None
    assert buffers.hand_in(new) is not None


def test_a_transport_without_room_gives_way_to_memory_of_our_own():
    """For what has no room; two smaller ones still lie there."""
    memory = Memory(64 + 3 * 64)
    buffers = Buffers(lambda server: memory, Answers())
    arrays = [buffers.give(variable(number, size), CPU) for number, size in enumerate((100, 16, 16))]
    inside = [memory.arena.lend([memoryview(array).cast("B")]) for array in arrays]
    assert inside == [None, 64, 128]


def test_neighbours_travel_as_one():
    """Where they lie as they travel, with the gaps; not across another array, another transport or the other way
    round."""
    first, second = Memory(1 << 12), Memory(1 << 12)
    transports = {0: first, 1: second}
    buffers = Buffers(lambda server: transports[server], Answers())
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


def test_a_strategy_without_servers_has_ordinary_arrays():
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
    refused(ValueError, "another strategy", lambda: ps.MirroredStrategy(["cpu:0"]).buffer(v))
    refused(TypeError, "takes a variable, not ndarray", lambda: strategy.buffer(np.zeros(3)))
