"""`update` and `update_non_slot` on every kind of strategy: one function's text means the same everywhere."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

import psclient as ps
from psclient._src.rounds.section import Section
from tests.kit.cases import pairwise, search
from tests.kit.strategies import USUAL, by_replica, copies, in_replicas, kind_of, merged, opened, replicas, variable


def plain(value):
    """A result as numbers; a variable stays what it is."""
    return value if isinstance(value, ps.Variable) else np.asarray(value).tolist()


# ---- What comes back ----


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
        strategy.run(lambda: ps.get_replica_context().merge_call(merge))
    assert [array[0] for array in arrays] == [*map(float, range(20)), 0.0]


def test_the_documents_example(strategy):
    """`v.assign(1.0)` comes back as the variable, whose components are all 1."""
    with strategy.scope():
        v = ps.Variable(5.0, aggregation=ps.VariableAggregation.SUM)

    def update_fn(v):
        return v.assign(1.0)

    result = strategy.extended.update(v, update_fn)
    assert result is v
    assert [float(x) for x in strategy.experimental_local_results(result)] == [1.0] * copies(strategy, v)


def test_what_the_function_returns_comes_back(strategy):
    """Nests of arrays, of the variable, of None and of what is no array at all; merged over the copies."""
    v = variable(strategy, [1.0, 2.0, 3.0])
    u = variable(strategy, [4.0, 5.0, 6.0], beside=v)

    def fn(v, u, x):
        old = v.value()
        v.assign_add(x)
        return {"sum": np.sum(v), "both": [old, v + u], "v": v, "u": u, "none": None, "word": "done"}

    found = strategy.extended.update(v, fn, (u, 1.0))
    assert plain(found["sum"]) == 9.0
    assert [plain(x) for x in found["both"]] == [[1.0, 2.0, 3.0], [6.0, 8.0, 10.0]]
    assert found["v"] is v
    assert found["u"] is u
    assert (found["none"], found["word"]) == (None, "done")
    assert strategy.extended.update(v, lambda v: None) is None


def test_ungrouped_results_are_lists_of_the_copies_results(strategy):
    """A nest of lists, each with one item for each copy; the copies of the variable are a list as well."""
    v = variable(strategy, [1.0, 2.0, 3.0])
    found = strategy.extended.update(
        v, lambda v, x: {"new": v.assign_add(x), "twice": [v * 2, None]}, (np.ones(3, "float32"),), group=False
    )
    count = copies(strategy, v)
    assert [plain(x) for x in found["twice"][0]] == [[4.0, 6.0, 8.0]] * count
    assert found["twice"][1] == [None] * count
    assert all(own is copy for own, copy in zip(found["new"], strategy.experimental_local_results(v), strict=True))
    assert [np.asarray(own).tolist() for own in found["new"]] == [[2.0, 3.0, 4.0]] * count


def test_ungrouped_results_of_devices_are_lists_of_each_device_s(strategy):
    """Of `update_non_slot` with `group=False`, and of `update` of what lives on several: an entry for each device."""
    devices = strategy.extended.parameter_devices
    made = [variable(strategy, beside=(device,)) for device in devices]
    where = strategy.extended.non_slot_devices(made)
    assert where == devices
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
        for reduced, v in zip(
            s.extended.batch_reduce_to(ps.VariableAggregation.SUM, pairs, experimental_hints="none"),
            variables,
            strict=True,
        ):
            s.extended.update(v, lambda v, u: v.assign_sub(u), args=(reduced,))
        one = s.extended.reduce_to(ps.VariableAggregation.SUM, updates[0], variables[0], experimental_hints="none")
        s.extended.update(variables[0], lambda v, u: v.assign_add(u), args=(one,))

    before = getattr(strategy, "round", None)
    strategy.run(lambda u: ps.get_replica_context().merge_call(merge_fn, args=(u, variables)), args=(updates,))
    assert kind_of(strategy) != "embedded" or strategy.round == before + 1
    totals = [0.0, *(-(10.0 * k * n + n * (n - 1) / 2) for k in range(1, len(variables)))]
    assert [v.numpy().tolist() for v in variables] == [[total] * 3 for total in totals]


def test_the_function_runs_once_for_each_copy(strategy):
    """On servers a variable has one."""
    v, calls = variable(strategy), []
    strategy.extended.update(v, lambda v: calls.append(ps.in_cross_replica_context()))
    assert calls == [False] * copies(strategy, v)


def test_an_update_function_is_in_update_context(strategy):
    """Neither in replica nor in cross-replica context; its strategy is the current one, and nothing may be begun."""
    v, seen = variable(strategy), []

    def fn(v):
        seen.append((ps.get_strategy() is strategy, ps.get_replica_context(), ps.in_cross_replica_context()))
        for attempt in (
            lambda: strategy.run(lambda: None),
            lambda: strategy.reduce("sum", 1.0, None),
            lambda: strategy.extended.reduce_to("sum", 1.0, v),
            lambda: strategy.extended.update(v, lambda v: None),
            lambda: strategy.extended.update_non_slot(v, lambda: None),
        ):
            with pytest.raises((RuntimeError, TypeError), match="update"):
                attempt()
        with pytest.raises(RuntimeError, match="cannot create variables"):
            ps.Variable(1.0)

    strategy.extended.update(v, fn)
    assert seen == [(True, None, False)] * copies(strategy, v)


# ---- What goes in ----


def test_mirrored_arguments_are_unwrapped(strategy):
    """The function gets the copy that is there, also from inside a nest and by a closure."""
    v, n = variable(strategy), replicas(strategy)
    everywhere = ps.Mirrored([np.full(3, 2.0, "float32") for _ in range(n)])

    def fn(v, given, named):
        return v.assign(given["x"] + named[0])

    strategy.extended.update(v, fn, ({"x": everywhere},), {"named": [everywhere]})
    assert v.numpy().tolist() == [4.0] * 3


def test_per_replica_arguments_are_refused(strategy):
    """By position, by name, inside of a nest; the error says how to make one value of them."""
    v = variable(strategy)
    where = strategy.extended.non_slot_devices([v])
    differing = ps.PerReplica([np.zeros(3)] * max(2, replicas(strategy)))
    for attempt in (
        lambda: strategy.extended.update(v, lambda v, x: v.assign(x), (differing,)),
        lambda: strategy.extended.update(v, lambda v, x: None, kwargs={"x": {"deep": [differing]}}),
        lambda: strategy.extended.update_non_slot(where, lambda x: None, (differing,)),
    ):
        with pytest.raises(ValueError, match=r"no per-replica values; reduce them first with reduce_to"):
            attempt()


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


def test_results_of_updates_are_arguments(strategy):
    """What one update returned goes into the next, in the same stretch of cross-replica code."""
    v, w = variable(strategy, [1.0, 2.0, 3.0]), None
    with strategy.scope(), strategy.extended.colocate_vars_with(v):
        w = ps.Variable(np.zeros(3, "float32"))
    with strategy.scope():
        returned = strategy.extended.update(v, lambda v: v.assign_add(1.0) * 10.0)
        strategy.extended.update(w, lambda w, x: w.assign(x + 1.0), (returned,))
    assert w.numpy().tolist() == [21.0, 31.0, 41.0]


def test_sync_on_read_variables_are_no_arguments(strategy):
    """The copies of what is updated would differ; their value is one, and so is an update of their own."""
    if kind_of(strategy) == "default":
        pytest.skip("outside of every scope they have one value")
    v = variable(strategy, 0.0)
    local = variable(
        strategy, 1.0, synchronization=ps.VariableSynchronization.ON_READ, aggregation=ps.VariableAggregation.SUM
    )
    where = strategy.extended.non_slot_devices([v])
    for attempt in (
        lambda: strategy.extended.update(v, lambda v, x: v.assign(x), (local,)),
        lambda: strategy.extended.update(v, lambda v, x: v.assign(x), kwargs={"x": local}),
        lambda: strategy.extended.update_non_slot(where, lambda x: v.assign(x), (local,)),
    ):
        with pytest.raises(ValueError, match=f"'{local.name}' is an ON_READ variable.*read it before"):
            attempt()
    strategy.extended.update(v, lambda v, x: v.assign(x), (local.read_value(),))
    strategy.extended.update(local, lambda own, x, other: own.assign_add(x + other), (v, local))
    n = replicas(strategy)
    assert float(v) == n
    assert [float(x) for x in strategy.experimental_local_results(local)] == [2.0 + n] * n


def test_arguments_that_are_no_arrays_are_handed_on(strategy):
    """Words, functions, None: the function may decide by them."""
    v = variable(strategy)

    def fn(v, how, twice, nothing):
        assert nothing is None
        getattr(v, how)(twice(2.0))

    strategy.extended.update(v, fn, ("assign_add", lambda x: x * 2, None))
    assert v.numpy().tolist() == [4.0] * 3


def test_several_variables_are_assigned(strategy):
    """Arguments and by closures; each once for every copy, and each sees what was assigned before it."""
    v = variable(strategy, [1.0, 2.0, 3.0])
    u, w = (variable(strategy, [1.0, 2.0, 3.0], beside=v) for _ in range(2))

    def fn(v, u):
        v.assign(u + w)
        u.assign_sub(v)
        w.assign_add(u * 2.0)

    for _ in range(2):
        strategy.extended.update(v, fn, (u,))
    assert [x.numpy().tolist() for x in (v, u, w)] == [[-2.0, -4.0, -6.0], [1.0, 2.0, 3.0], [1.0, 2.0, 3.0]]
    for x in (v, u, w):
        assert len({tuple(np.asarray(copy)) for copy in strategy.experimental_local_results(x)}) == 1


@pairwise(strategy=USUAL, dtype=["float16", "bfloat16", "float32"], how=["assign_add", "assign_sub"])
def test_what_is_added_is_rounded_once(strategy, how, dtype):
    """The sum is NumPy's, in its dtype; only that is cast to the variable's, wherever the variable lives."""
    first = np.array([1000.0, -0.1, 3.0]).astype(dtype)
    plain = {"assign_add": operator.add, "assign_sub": operator.sub}[how]
    for delta in (np.array([-1000.3, 0.3, 1e-3]), np.float32([1000.3, 7.7, 1e-4]), np.array(0.3), 0.3, 2):
        v = variable(strategy, first)
        strategy.extended.update(v, lambda v, x: getattr(v, how)(x), (delta,))
        assert v.numpy().tolist() == plain(first, delta).astype(dtype).tolist()
    with pytest.raises(ValueError, match=f"variable '{v.name}'"):
        strategy.extended.update(v, lambda v: getattr(v, how)(np.ones(2, dtype)))


def test_updates_are_made_in_their_order(strategy):
    """In one merge call, with a read in between."""
    v = variable(strategy)

    def merge(s):
        s.extended.update(v, lambda v: v.assign_add(1.0))
        s.extended.update(v, lambda v: v.assign(v * 3.0))
        seen.append(v.numpy().tolist())
        s.extended.update(v, lambda v, x: v.assign_sub(x), (1.0,))

    seen: list[Any] = []
    merged(strategy, merge)
    assert (seen, v.numpy().tolist()) == ([[3.0] * 3], [2.0] * 3)
    assert in_replicas(strategy, lambda _: v.numpy().tolist()) == ([2.0] * 3,) * replicas(strategy)


def test_an_error_in_the_function_leaves_the_variable(strategy):
    """It comes out as it is, and the strategy is usable afterwards."""
    v = variable(strategy)

    def fn(v):
        raise ZeroDivisionError("in the update")

    with pytest.raises(ZeroDivisionError, match="in the update"):
        strategy.extended.update(v, fn)
    strategy.extended.update(v, lambda v: v.assign_add(1.0))
    assert v.numpy().tolist() == [1.0] * 3


def test_methods_of_variables_are_update_functions(strategy):
    """As the documents say: `fn` can be `assign_add`."""
    v = variable(strategy)
    w = variable(strategy, [1.0, 2.0, 3.0], beside=v)
    assert strategy.extended.update(v, ps.Variable.assign_add, (w,)) is v
    strategy.extended.update(v, ps.Variable.assign, (w,))
    for fn in (ps.Variable.assign_sub, ps.update_function(ps.Variable.assign_add)):
        strategy.extended.update(v, fn, kwargs={"delta": np.ones(3, "float32")})
    strategy.extended.update_non_slot(strategy.extended.non_slot_devices([v]), v.assign_sub, (0.5,))
    assert v.numpy().tolist() == [0.5, 1.5, 2.5]


# ---- The same everywhere ----


@dataclass(frozen=True)
class Expression:
    """A random elementwise expression; a leaf for `nest`, and a word for hypothesis to show."""

    nest_leaf = True
    text: str
    compute: Any


def _leaf(name: str) -> Expression:
    return Expression(name, lambda env: env[name])


def _unary(name: str, fn: Any) -> Any:
    return lambda a: Expression(f"{name}({a.text})", lambda env: fn(a.compute(env)))


def _binary(name: str, fn: Any) -> Any:
    return lambda a, b: Expression(f"{name}({a.text}, {b.text})", lambda env: fn(a.compute(env), b.compute(env)))


def _choose(c: Expression, a: Expression, b: Expression) -> Expression:
    return Expression(
        f"where({c.text} > 0, {a.text}, {b.text})",
        lambda env: np.where(c.compute(env) > 0, a.compute(env), b.compute(env)),
    )


_UNARY = {
    "negative": operator.neg,
    "abs": np.abs,
    "tanh": np.tanh,
    "square": np.square,
    "sqrt(abs)": lambda a: np.sqrt(np.abs(a)),
    "exp(minimum 3)": lambda a: np.exp(np.minimum(a, 3.0)),
    "sign": np.sign,
    "times": lambda a: 0.7 * a,
}
_BINARY = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "divide": lambda a, b: a / (1.0 + b * b),
}


def _grown(children: Any) -> Any:
    return st.one_of(
        *(st.builds(_unary(name, fn), children) for name, fn in _UNARY.items()),
        *(st.builds(_binary(name, fn), children, children) for name, fn in _BINARY.items()),
        st.builds(_choose, children, children, children),
    )


EXPRESSIONS = st.recursive(st.sampled_from(["v", "u", "x", "k"]).map(_leaf), _grown, max_leaves=8)


@pytest.fixture(scope="module")
def three_kinds(shared):
    found = []
    for strategy in (shared("mirrored-2"), shared("servers-1x2"), shared("default")):
        v = variable(strategy, np.zeros(5, "float32"))
        with strategy.scope(), strategy.extended.colocate_vars_with(v):
            found.append((strategy, v, ps.Variable(np.zeros(5, "float32"))))
    return found


@search(0.6, suppress=(HealthCheck.function_scoped_fixture,))
@given(
    new_v=EXPRESSIONS,
    new_u=EXPRESSIONS,
    result=EXPRESSIONS,
    seed=st.integers(0, 1000),
    k=st.floats(-2, 2, width=32),
)
def test_a_function_means_the_same_everywhere(three_kinds, new_v, new_u, result, seed, k):
    """Random elementwise functions of two variables, a reduced array and a number: as on plain NumPy arrays."""
    rng = np.random.default_rng(seed)
    v0, u0, x0 = (rng.normal(size=5).astype("float32") for _ in range(3))
    with np.errstate(all="ignore"):
        plain_v = np.asarray(new_v.compute({"v": v0, "u": u0, "x": x0, "k": k}), "float32") * np.ones(5, "float32")
        after = {"v": plain_v, "u": u0, "x": x0, "k": k}
        plain_u = u0 + np.asarray(new_u.compute(after), "float32")
        plain_result = np.asarray(result.compute({**after, "u": plain_u}))

    def fn(v, u, x, k):
        v.assign(new_v.compute({"v": v, "u": u, "x": x, "k": k}))
        u.assign_add(new_u.compute({"v": v, "u": u, "x": x, "k": k}))
        return result.compute({"v": v, "u": u, "x": x, "k": k}) + v * 0.0

    for strategy, v, u in three_kinds:
        v.assign(v0)
        u.assign(u0)
        with strategy.scope():
            x = strategy.extended.reduce_to("mean", x0, v)
            returned = strategy.extended.update(v, fn, (u, x, k))
        for found, expected in ((v, plain_v), (u, plain_u), (returned, plain_result + plain_v * 0.0)):
            np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-5, atol=1e-5, err_msg=str(strategy))
