"""Where `Placement` puts new variables, given sizes, limits, and what is created beside others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import psclient as ps
from psclient._src.rounds.placement import Placement, held_bytes
from pswire.errors import ConfigError
from pswire.model.plan import PlacedVariable, VariableSpec
from pswire.model.tables import SlotTensor, TablePart, TableSpec
from pswire.model.tensor import TensorSpec
from tests.kit.shell import children

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
    """The first of equals."""
    cluster = Cluster("greedy", [0] * count)
    for size in sizes:
        fewest = cluster.held.index(min(cluster.held))
        assert cluster.create(size) == (fewest,)


@given(SERVERS, SIZES)
def test_greedy_differs_from_a_fair_share_by_one_variable_at_most(count, sizes):
    """No server holds more than its share and one variable, in whatever order they come."""
    cluster = Cluster("greedy", [0] * count)
    for size in sizes:
        cluster.create(size)
    assert max(cluster.held) <= sum(sizes) / count + max(sizes, default=0)


@given(SERVERS, st.integers(1, 9), st.integers(0, 20))
def test_variables_of_one_size_are_placed_alike_by_both(count, size, number):
    """Such a model lives where TensorFlow's default puts it."""
    first, second = (Cluster(name, [0] * count) for name in STRATEGIES)
    assert [first.create(size) for _ in range(number)] == [second.create(size) for _ in range(number)]


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
    """A full server is passed over."""
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
    with pytest.raises(ConfigError, match=hint):
        ps.ParameterServerStrategy(ps_strategy=name)
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
