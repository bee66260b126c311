"""The variables of one server: what it may hold, and that values never change."""

from __future__ import annotations

import numpy as np
import pytest

from psserver.devices import Device, owned
from psserver.state.variables import Store
from pswire.errors import InvalidRequest, MemoryLimit, VariableMismatch
from pswire.model.plan import PlacedVariable, VariableSpec
from pswire.model.tensor import TensorSpec


def variable(id: int, size: int, servers: tuple[int, ...] = (1,)) -> PlacedVariable:
    return PlacedVariable(id, VariableSpec(f"v{id}", TensorSpec("int8", (size,))), servers)


def store(limit: int = 0) -> Store:
    return Store(1, Device(), limit)


def test_what_fits_exactly_is_held():
    """And not a byte more; a refused variable leaves no trace."""
    held = store(100)
    held.declare(variable(0, 60))
    held.declare(variable(1, 40))
    with pytest.raises(MemoryLimit, match=r"'v2' int8\[1\] needs 1 bytes.*holds 100 bytes.*limit of 100 bytes"):
        held.declare(variable(2, 1))
    assert (held.nbytes, sorted(held.variables)) == (100, [0, 1])


def test_another_server_is_advised_only_where_it_would_help():
    """A variable that alone is more than the limit fits on no server."""
    held = store(100)
    held.declare(variable(0, 60))
    for size, ways in ((100, "raise --memory-limit or add a server"), (101, "raise --memory-limit")):
        with pytest.raises(MemoryLimit, match=f"; {ways}$"):
            held.declare(variable(1, size))


def test_a_variable_counts_once():
    """However often it is declared."""
    held = store(100)
    for _ in range(3):
        held.declare(variable(0, 60))
    assert held.nbytes == 60


def test_what_lives_elsewhere_costs_nothing():
    """It is known, and has no value here."""
    held = store(10)
    held.declare(variable(0, 1000, (0, 2)))
    held.declare(variable(1, 0))
    assert held.nbytes == 0
    with pytest.raises(InvalidRequest, match="'v0' does not live on this server"):
        held.initialize(0, np.zeros(1000, "int8"))


def test_without_a_limit_everything_is_held():
    """Declared, that is: memory is taken by values."""
    held = store()
    held.declare(variable(0, 1 << 40))
    assert held.nbytes == 1 << 40


def test_a_number_stands_for_one_variable():
    """Another shape, name or place under it is refused."""
    held = store()
    held.declare(variable(0, 3))
    for other in (
        variable(0, 4),
        variable(0, 3, (0, 1)),
        PlacedVariable(0, VariableSpec("w", TensorSpec("int8", (3,))), (1,)),
    ):
        with pytest.raises(VariableMismatch):
            held.declare(other)


@pytest.mark.parametrize("spec", [VariableSpec("", TensorSpec("int8", ())), VariableSpec("v", TensorSpec("text", ()))])
def test_what_cannot_be_is_refused(spec):
    """Before anything is computed with it."""
    with pytest.raises(InvalidRequest):
        store().declare(PlacedVariable(0, spec, (1,)))


def test_the_first_value_stays_until_a_round():
    """Later first values are ignored; what a round assigns replaces it."""
    held = store()
    held.declare(variable(0, 2))
    assert not held.initialized(0)
    with pytest.raises(InvalidRequest, match="'v0' has no value"):
        held.value(0)
    first = np.array([1, 2], "int8")
    held.initialize(0, first)
    held.initialize(0, np.array([3, 4], "int8"))
    assert held.value(0) is first
    before = held.values()
    held.commit({0: np.array([5, 6], "int8")})
    assert held.value(0).tolist() == [5, 6]
    assert before[0] is first


def test_an_unknown_number_has_no_value():
    """With the number, for want of a name."""
    with pytest.raises(InvalidRequest, match="variable 7 has no value"):
        store().value(7)


def test_a_new_job_begins_empty():
    """Memory and numbers are free again."""
    held = store(10)
    held.declare(variable(0, 10))
    held.initialize(0, np.zeros(10, "int8"))
    held.clear()
    held.declare(variable(0, 9))
    assert (held.nbytes, held.initialized(0)) == (9, False)


def test_what_is_kept_keeps_no_message_alive():
    """Views and other orders are copied; an array of its own is not."""
    message = np.frombuffer(bytes(64), "float64")
    assert owned(message).flags.owndata
    assert owned(np.zeros((2, 3)).T).flags.c_contiguous
    assert owned(np.zeros((4, 3))[1:]).base is None
    mine = np.zeros(3)
    assert owned(mine) is mine


@pytest.mark.parametrize(("next_round", "kept"), [((0,), True), ((1,), False)], ids=["the same", "of others"])
def test_what_was_replaced_is_kept_for_the_next_such_round(next_round, kept):
    """For that of the same variables: beside second arrays of others the memory limit has no room for it."""
    held = store()
    for id in (0, 1):
        held.declare(variable(id, 2))
        held.initialize(id, np.full(2, id, "int8"))
    held.lend([0], exchanges=True)
    held.exchange({0: np.full(2, 5, "int8")})
    held.lend([1], exchanges=False)  # a round that writes in place, or is small
    held.lend(next_round, exchanges=True)
    spare = held.take_spare(0)
    assert (spare is not None) == kept
    assert held.take_spare(0) is None
