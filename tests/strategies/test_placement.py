"""Where variables live on every kind of strategy: colocation, non-slot devices, and the devices' names."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import psclient as ps
from tests.kit.strategies import in_replicas, kind_of, merged, replicas, variable


def test_devices_have_full_names(strategy):
    """One for each replica; variables live on the replicas' devices, or on those of parameter servers."""
    extended, kind = strategy.extended, kind_of(strategy)
    job = "worker" if kind == "embedded" else "localhost"
    assert extended.worker_devices == tuple(
        f"/job:{job}/task:0/device:CPU:{index}" for index in range(replicas(strategy))
    )
    servers = tuple(f"/job:ps/task:{server}/device:CPU:0" for server in range(len(extended.parameter_devices)))
    servers = servers if kind == "embedded" else extended.worker_devices
    assert extended.parameter_devices == servers
    for device in extended.parameter_devices:
        assert variable(strategy, beside=(device,)).devices == ((device,) if kind == "embedded" else servers)


def test_what_is_created_beside_a_variable_lives_where_it_does(strategy):
    """The documents' example: an update of the first reaches the others as well."""
    extended = strategy.extended
    with strategy.scope():
        var1 = ps.Variable(np.ones(3, "float32"))
        with extended.colocate_vars_with(var1):
            var2 = ps.Variable(np.full(3, 2.0, "float32"))
            var3 = ps.Variable(np.full(3, 3.0, "float32"))

        def fn(v1, v2, v3):
            v1.assign_add(v2 * v3)
            v2.assign(v3 + v1)

        assert extended.update(var1, fn, args=(var2, var3)) is None
    assert var1.devices == var2.devices == var3.devices
    assert [v.numpy().tolist() for v in (var1, var2, var3)] == [[7.0] * 3, [10.0] * 3, [3.0] * 3]


def test_colocation_holds_in_replica_functions(strategy):
    """All replicas ask for it; with the variable as an argument, or by a closure."""
    extended, first = strategy.extended, variable(strategy)

    def create(_, own):
        with extended.colocate_vars_with(own):
            by_argument = ps.Variable(1.0, name="by argument")
        with extended.colocate_vars_with(first):
            by_closure = ps.Variable(1.0, name="by closure")
        with extended.colocate_vars_with(extended.non_slot_devices([own])):
            non_slot = ps.Variable(1.0, name="non-slot")
        return by_argument, by_closure, non_slot

    for made in in_replicas(strategy, create, first):
        wholes = [extended.value_container(v) for v in made]
        assert [v.devices for v in wholes] == [first.devices] * 3


def test_colocation_ends_with_its_block(strategy):
    """Also by an error, and it is of one thread."""
    extended, v = strategy.extended, variable(strategy)
    seen = []

    def fail():
        with strategy.scope(), extended.colocate_vars_with(v):
            seen.append(extended.colocation)
            thread = threading.Thread(target=lambda: seen.append(extended.colocation))
            thread.start()
            thread.join()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert [*seen, extended.colocation] == [v.place, (), ()]


@pytest.mark.parametrize("wrong", ["nowhere", "", (), None, ["nowhere"]])
def test_only_variables_and_parameter_devices_are_colocated_with(strategy, wrong):
    """The error says what to give."""
    with pytest.raises(ValueError, match="give a variable or what non_slot_devices returned"):
        strategy.extended.colocate_vars_with(wrong).__enter__()
    with pytest.raises(ValueError, match="give a variable or what non_slot_devices returned"):
        strategy.extended.update_non_slot(wrong, lambda: None)


@pytest.mark.parametrize("wrong", [5, 1.5, np.ones(3)], ids=["int", "float", "array"])
def test_numbers_and_arrays_are_no_place(strategy, wrong):
    """Neither to be beside, nor to be updated."""
    for attempt in (
        lambda: strategy.extended.colocate_vars_with(wrong).__enter__(),
        lambda: strategy.extended.update_non_slot(wrong, lambda: None),
        lambda: strategy.extended.update(wrong, lambda v: None),
    ):
        with pytest.raises((TypeError, ValueError), match="variable"):
            attempt()


def test_a_device_is_updated_as_what_was_created_there(strategy):
    """Non-slot variables are created on the non-slot devices, and updated there, by a closure or as arguments."""
    extended, v = strategy.extended, variable(strategy)
    where = extended.non_slot_devices([v])
    assert set(where) <= set(extended.parameter_devices)
    with strategy.scope(), extended.colocate_vars_with(where):
        count = ps.Variable(np.int64(0), trainable=False)
    assert set(count.devices) == set(where)
    extended.update_non_slot(where, lambda: count.assign_add(1))
    extended.update_non_slot(where, lambda c, step: c.assign_add(step), (count,), {"step": 10})
    merged(strategy, lambda s: s.extended.update_non_slot(where, lambda: count.assign_add(100)))
    assert int(count) == 111


def test_non_slot_variables_are_beside_all_that_is_trained(strategy):
    """On each parameter device that holds one of the list, and on no other: an update of any of them finds its copy."""
    extended = strategy.extended
    trained = [variable(strategy, beside=(device,)) for device in extended.parameter_devices]
    for some in (trained, trained[:1], trained[-1:]):
        where = extended.non_slot_devices(some)
        assert where == tuple(d for d in extended.parameter_devices if any(d in v.devices for v in some))
        with strategy.scope(), extended.colocate_vars_with(where):
            count = ps.Variable(0.0, trainable=False)
        assert count.devices == where
        merged_result = extended.update_non_slot(where, lambda by, c=count: c.assign_add(by) * 10.0, (2.0,))
        assert np.asarray(merged_result) == 20.0
        for v in some:
            extended.update(v, lambda v, c=count: v.assign(v * 0.0 + c))
            assert v.numpy().tolist() == [2.0] * 3


def test_non_slot_devices_are_for_variables(strategy):
    """Of this strategy; a list of them."""
    with pytest.raises(TypeError, match="takes a list of variables, and not a ndarray"):
        strategy.extended.non_slot_devices([np.ones(3)])


def test_a_value_is_reduced_to_where_non_slot_variables_live(strategy):
    """For `update_non_slot`, as for `update` to a variable."""
    v = variable(strategy)
    extended = strategy.extended
    where = extended.non_slot_devices([v])
    with strategy.scope(), extended.colocate_vars_with(where):
        total = ps.Variable(0.0)
    ones = strategy.experimental_distribute_values_from_function(lambda _: np.float32(1))
    with strategy.scope():
        reduced = extended.reduce_to("sum", ones, where)
        extended.update_non_slot(where, lambda x: total.assign_add(x), (reduced,))
    assert float(total) == replicas(strategy)


def test_what_is_elsewhere_is_refused_where_it_is_used(shared):
    """A variable, a reduced value or a result of another server, as an argument or by a closure; what was recorded
    before is done."""
    strategy = shared("servers-2x2")
    extended = strategy.extended
    here, there = (variable(strategy, beside=(device,)) for device in extended.parameter_devices)
    with strategy.scope():
        extended.update(there, lambda v: v.assign_add(1.0))
        reduced = extended.reduce_to("mean", np.ones(3, "float32"), there)
        result = extended.update(there, lambda v: v * 2.0)
        for value, remedy in ((there, "create it there"), (reduced, "reduce it to"), (result, "reduce it to")):
            for attempt in (
                lambda value=value: extended.update(here, lambda v, x: v.assign(x), (value,)),
                lambda value=value: extended.update(here, lambda v: v.assign(value)),
            ):
                with pytest.raises(ps.errors.LocalityError, match=f"never crosses servers.*{remedy}.*read it first"):
                    attempt()
        extended.update(there, lambda v, x, y: v.assign_add(x + y), (reduced, result))
    assert (here.numpy().tolist(), there.numpy().tolist()) == ([0.0] * 3, [4.0] * 3)


def test_updates_are_for_variables(strategy):
    """A device is updated by `update_non_slot`, which the error says."""
    where = strategy.extended.non_slot_devices([variable(strategy)])
    with pytest.raises(TypeError, match=r"update takes a variable.*update_non_slot"):
        strategy.extended.update(where, lambda v: None)
