"""`update` and `update_non_slot` on every kind of strategy: one function's text means the same everywhere; and where
variables live: colocation, non-slot devices, and the devices' names."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import psclient as ps
from psclient._src.rounds.section import Section
from tests.kit.strategies import by_replica, copies, in_replicas, kind_of, merged, opened, refused, replicas, variable


def plain(value):
    """A result as numbers; a variable stays what it is."""
    return value if isinstance(value, ps.Variable) else np.asarray(value).tolist()


def test_values_are_brought_together(calls_of):
    """A section is told once of all that is wanted of it, and not once for each value."""
    told = calls_of("give_back", Section)
    with opened("servers-1x1") as strategy:
        v = variable(strategy)

        def merge(strategy):
            found = [strategy.extended.update(v, lambda v, k: v + k, (float(k),)) for k in range(20)]
            told.clear()
            arrays.extend(strategy.backend.bring([*found, np.zeros(3)]))
            assert len(told) == 1

        arrays = []
        merged(strategy, merge)
    assert [array[0] for array in arrays] == [*map(float, range(20)), 0.0]


def test_bringing_one_value_keeps_the_others(strategy):
    """Also in merge_call, where only what is looked at comes back."""
    w, n = variable(strategy), replicas(strategy)

    def merge(strategy, x):
        places = w, x, strategy.extended.worker_devices[0]
        first, second, third = strategy.extended.batch_reduce_to("sum", [(x, place) for place in places])
        strategy.extended.update(w, lambda v, y: v.assign(y), (first,))
        return [np.asarray(second).tolist(), third.tolist()]

    found = merged(strategy, merge, by_replica(strategy, lambda replica: np.ones(3, "float32")))
    assert found == [[n] * 3, [n] * 3]
    assert w.numpy().tolist() == [n] * 3


def test_what_the_function_returns_comes_back(strategy):
    """Nests of arrays, of the variable, of None and of what is no array at all; merged over the copies. It runs once
    for each copy, with its own one of a mirrored value, also from inside a nest; words, functions and None are handed
    on. An error comes out as it is, and nothing is left of it."""
    v, calls = variable(strategy, [1.0, 2.0, 3.0]), []
    u = variable(strategy, [4.0, 5.0, 6.0], beside=v)
    everywhere = ps.Mirrored([np.full(3, 2.0, "float32") for _ in range(replicas(strategy))])

    def fn(v, u, how, twice, given, *, named):
        calls.append(given["nothing"])
        old = v.value()
        getattr(v, how)(twice(given["x"]) - named[0] - 1.0)
        return {"sum": np.sum(v), "both": [old, v + u], "v": v, "u": u, "none": None, "word": "done"}

    given = {"x": everywhere, "nothing": None}
    found = strategy.extended.update(v, fn, (u, "assign_add", lambda x: x * 2, given), {"named": [everywhere]})
    assert calls == [None] * copies(strategy, v)
    assert plain(found["sum"]) == 9.0
    assert [plain(x) for x in found["both"]] == [[1.0, 2.0, 3.0], [6.0, 8.0, 10.0]]
    assert found["v"] is v
    assert found["u"] is u
    assert (found["none"], found["word"]) == (None, "done")
    assert strategy.extended.update(v, lambda v: None) is None
    refused(ZeroDivisionError, "", lambda: strategy.extended.update(v, lambda v: 1 / 0))
    strategy.extended.update(v, lambda v: v.assign_add(1.0))
    assert v.numpy().tolist() == [3.0, 4.0, 5.0]


def test_ungrouped_results_are_lists_of_the_copies_results(strategy):
    """A nest of lists, each with one item for each copy, or for each device of `update_non_slot`."""
    v = variable(strategy, [1.0, 2.0, 3.0])
    found = strategy.extended.update(
        v, lambda v, x: {"new": v.assign_add(x), "twice": [v * 2, None]}, (np.ones(3, "float32"),), group=False
    )
    count = copies(strategy, v)
    assert [plain(x) for x in found["twice"][0]] == [[4.0, 6.0, 8.0]] * count
    assert found["twice"][1] == [None] * count
    assert all(own is copy for own, copy in zip(found["new"], strategy.experimental_local_results(v), strict=True))
    assert [np.asarray(own).tolist() for own in found["new"]] == [[2.0, 3.0, 4.0]] * count
    made = [variable(strategy, beside=(device,)) for device in strategy.extended.parameter_devices]
    where = strategy.extended.non_slot_devices(made)
    assert where == strategy.extended.parameter_devices
    count = variable(strategy, 4.0, beside=where)
    found = strategy.extended.update_non_slot(
        where, lambda c: {"new": c.assign_add(1.0), "twice": [c * 2, "word"]}, (count,), group=False
    )
    assert [plain(x) for x in found["twice"][0]] == [10.0] * len(where)
    assert found["twice"][1] == ["word"] * len(where)
    assert [np.asarray(x).tolist() for x in found["new"]] == [5.0] * len(where)
    found = strategy.extended.update(count, lambda c: {"twice": c * 2}, group=False)
    assert [plain(x) for x in found["twice"]] == [10.0] * len(count.devices)


def test_the_standard_pattern(strategy):
    """The documents' four steps, of variables on every parameter device: they take one round, whatever the hints."""
    n, extended = replicas(strategy), strategy.extended
    variables = [variable(strategy, beside=(device,)) for device in extended.parameter_devices]
    variables.append(variable(strategy))
    updates = [by_replica(strategy, lambda i, k=k: np.full(3, 10.0 * k + i, "float32")) for k in range(len(variables))]

    def merge_fn(s, updates, variables):
        pairs = list(zip(updates, variables, strict=True))
        totals = s.extended.batch_reduce_to(ps.VariableAggregation.SUM, pairs, experimental_hints="none")
        for total, v in zip(totals, variables, strict=True):
            s.extended.update(v, lambda v, u: v.assign_sub(u), args=(total,))
        one = s.extended.reduce_to(ps.VariableAggregation.SUM, updates[0], variables[0], experimental_hints="none")
        s.extended.update(variables[0], lambda v, u: v.assign_add(u), args=(one,))

    before = getattr(strategy, "round", None)
    strategy.run(lambda u: ps.get_replica_context().merge_call(merge_fn, args=(u, variables)), args=(updates,))
    assert kind_of(strategy) != "embedded" or strategy.round == before + 1
    totals = [0.0, *(-(10.0 * k * n + n * (n - 1) / 2) for k in range(1, len(variables)))]
    assert [v.numpy().tolist() for v in variables] == [[total] * 3 for total in totals]


# ---- What goes in ----


def test_reduced_values_are_arguments(strategy):
    """Of reductions to the variable, to devices, and to the replicas; several of them in one update."""
    v, n = variable(strategy), replicas(strategy)
    x = by_replica(strategy, lambda replica: np.full(3, replica + 1.0, "float32"))

    def merge(s, x):
        to_device = s.extended.reduce_to("mean", x, s.extended.worker_devices[0])
        to_all = s.extended.reduce_to("sum", x, x)
        to_v = s.extended.reduce_to("sum", x, v)  # Last: what comes here ends a section, and this stays there.
        s.extended.update(v, lambda v, a, b, c: v.assign(a * 100 + b * 10 + c), (to_v, to_device, to_all))

    strategy.run(lambda own: ps.get_replica_context().merge_call(merge, (own,)), (x,))
    total = n * (n + 1) / 2
    assert v.numpy().tolist() == [total * 101 + total / n * 10] * 3


def test_arguments_are_one_value(strategy):
    """Per-replica values are refused, by position, by name, inside of a nest, with how to make one value of them. So
    are sync-on-read variables, except outside of every scope: the copies of what is updated would differ. Their value
    is one, and so is an update of their own."""
    v = variable(strategy, 0.0)
    local = variable(strategy, 1.0, synchronization="on_read", aggregation="sum")
    where = strategy.extended.non_slot_devices([v])
    differing = ps.PerReplica([np.zeros(3)] * max(2, replicas(strategy)))
    bad = [(differing, r"does not take per-replica values; reduce them first with reduce_to")]
    if kind_of(strategy) != "default":
        bad.append((local, f"'{local.name}' is an ON_READ variable.*read it before"))
    for value, says in bad:
        for attempt in (
            lambda x: strategy.extended.update(v, lambda v, x: v.assign(x), (x,)),
            lambda x: strategy.extended.update(v, lambda v, x: None, kwargs={"x": {"deep": [x]}}),
            lambda x: strategy.extended.update_non_slot(where, lambda x: None, (x,)),
        ):
            with pytest.raises(ValueError, match=says):
                attempt(value)
    if kind_of(strategy) == "default":
        return
    strategy.extended.update(v, lambda v, x: v.assign(x), (local.read_value(),))
    strategy.extended.update(local, lambda own, x, other: own.assign_add(x + other), (v, local))
    n = replicas(strategy)
    assert float(v) == n
    assert [float(x) for x in strategy.experimental_local_results(local)] == [2.0 + n] * n


def test_methods_of_variables_are_update_functions(strategy):
    """As the documents say: `fn` can be `assign_add`."""
    v = variable(strategy)
    w = variable(strategy, [1.0, 2.0, 3.0], beside=v)
    assert strategy.extended.update(v, ps.Variable.assign_add, (w,)) is v
    strategy.extended.update(v, ps.Variable.assign, (w,))
    for fn in (ps.Variable.assign_sub, ps.update_function(ps.Variable.assign_add)):
        strategy.extended.update(v, fn, kwargs={"delta": np.ones(3, "float32")})
    where = strategy.extended.non_slot_devices([v])
    strategy.extended.update_non_slot(where, v.assign_sub, (0.5,))
    assert v.numpy().tolist() == [0.5, 1.5, 2.5]
    with pytest.raises(TypeError, match=r"update takes a variable.*update_non_slot"):
        strategy.extended.update(where, lambda v: None)


# ---- Where variables live ----


def test_devices_have_full_names(strategy):
    """One for each replica; variables live on the replicas' devices, or on those of parameter servers."""
    extended, kind = strategy.extended, kind_of(strategy)
    job = "worker" if kind == "embedded" else "localhost"
    count = replicas(strategy)
    assert extended.worker_devices == tuple(f"/job:{job}/task:0/device:CPU:{index}" for index in range(count))
    servers = tuple(f"/job:ps/task:{server}/device:CPU:0" for server in range(len(extended.parameter_devices)))
    servers = servers if kind == "embedded" else extended.worker_devices
    assert extended.parameter_devices == servers
    for device in extended.parameter_devices:
        assert variable(strategy, beside=(device,)).devices == ((device,) if kind == "embedded" else servers)


def test_colocation_holds_in_replica_functions(strategy):
    """All replicas ask for it; with the variable as an argument, or by a closure. It ends with its block, also by an
    error, and is of one thread."""
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
    seen = []

    def fail():
        with strategy.scope(), extended.colocate_vars_with(first):
            seen.append(extended._colocation)
            thread = threading.Thread(target=lambda: seen.append(extended._colocation))
            thread.start()
            thread.join()
            raise ZeroDivisionError

    refused(ZeroDivisionError, "", fail)
    assert [*seen, extended._colocation] == [first.place, (), ()]


def test_only_variables_and_parameter_devices_are_places(strategy):
    """To be beside, or to be updated; the error says what to give. Non-slot devices are for a list of variables."""
    extended = strategy.extended
    for wrong in ("nowhere", "", (), None, ["nowhere"], 5, 1.5, np.ones(3)):
        said = "pass a variable, or the result of non_slot_devices"
        words = "variable" if isinstance(wrong, int | float | np.ndarray) else said
        with pytest.raises((TypeError, ValueError), match=words):
            extended.colocate_vars_with(wrong).__enter__()
        with pytest.raises((TypeError, ValueError), match=words):
            extended.update_non_slot(wrong, lambda: None)
        with pytest.raises((TypeError, ValueError), match="variable"):
            extended.update(wrong, lambda v: None)
    refused(TypeError, "takes a list of variables, not a ndarray", lambda: extended.non_slot_devices([np.ones(3)]))


def test_non_slot_variables_are_beside_all_that_is_trained(strategy):
    """On each parameter device that holds one of the list, and on no other: an update of any of them finds its copy.
    They are updated there, by a closure or as arguments. Of an empty list they are on all."""
    extended = strategy.extended
    trained = [variable(strategy, beside=(device,)) for device in extended.parameter_devices]
    assert set(extended.non_slot_devices(trained)) <= set(extended.parameter_devices)
    assert extended.non_slot_devices([]) == tuple(extended.parameter_devices)
    for some in (trained, trained[:1], trained[-1:], []):
        where = extended.non_slot_devices(some)
        assert where == tuple(d for d in extended.parameter_devices if any(d in v.devices for v in some or trained))
        with strategy.scope(), extended.colocate_vars_with(where):
            count = ps.Variable(0.0, trainable=False)
        assert count.devices == where
        merged_result = extended.update_non_slot(where, lambda by, c=count: c.assign_add(by) * 10.0, (2.0,))
        assert np.asarray(merged_result) == 20.0
        for v in some:
            extended.update(v, lambda v, c=count: v.assign(v * 0.0 + c))
            assert v.numpy().tolist() == [2.0] * 3
        extended.update_non_slot(where, lambda c, step: c.assign_add(step), (count,), {"step": 10.0})
        merged(strategy, lambda s, c=count, d=where: s.extended.update_non_slot(d, lambda: c.assign_add(100.0)))
        assert float(count) == 112.0


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
            refused(
                ps.errors.LocalityError,
                f"is used in an update on /job:ps/.*{remedy}.*read it first",
                lambda value=value: extended.update(here, lambda v, x: v.assign(x), (value,)),
                lambda value=value: extended.update(here, lambda v: v.assign(value)),
            )
        extended.update(there, lambda v, x, y: v.assign_add(x + y), (reduced, result))
    assert (here.numpy().tolist(), there.numpy().tolist()) == ([0.0] * 3, [4.0] * 3)
