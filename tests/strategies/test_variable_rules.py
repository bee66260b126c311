"""Variables on every kind of strategy: how they come to be, what assigns them where, how they are used as arrays."""

from __future__ import annotations

import contextlib
import copy

import numpy as np
import pytest

import psclient as ps
from tests.kit.cases import once, pairwise
from tests.kit.strategies import USUAL, copies, in_replicas, kind_of, merged, refused, replicas, variable

AGGREGATION = ps.VariableAggregation
SYNCHRONIZATION = ps.VariableSynchronization
ON_READ, SUM = SYNCHRONIZATION.ON_READ, AGGREGATION.SUM
COMBINING = [SUM, AGGREGATION.MEAN, AGGREGATION.ONLY_FIRST_REPLICA]
WRONG_DTYPE = (TypeError, ps.errors.ProgramError)
"""What an assignment of another kind raises, here or in an update program."""


def each(replica):
    """A value of its own for each replica: 1, 2, 3, ..."""
    return np.full(3, replica + 1.0, "float32")


def shown(v):
    """A variable's value as a list."""
    return v.numpy().tolist()


def test_a_callable_initial_value_is_called_once(strategy):
    """For all copies, in cross-replica and in replica context; every copy begins with what it returned. Mirrored
    variables and sync-on-read ones have a copy for each replica; on servers, or without a strategy, a variable is one.
    All replicas get the one that they create together, and only the strategy knows it."""
    calls = []

    def initial():
        calls.append(1)
        return np.full(3, float(len(calls)), "float32")

    here = variable(strategy, initial)
    assert len(calls) == 1
    together = strategy.run(lambda: ps.Variable(initial, name=f"together {replicas(strategy)}"))
    assert len(calls) == 2
    for v, value in ((here, 1.0), (together, 2.0)):
        assert shown(v) == [value] * 3
        found = [np.asarray(copy).tolist() for copy in strategy.experimental_local_results(v)]
        assert found == [[value] * 3] * copies(strategy, v)
    assert copies(strategy, here) == {"mirrored": replicas(strategy)}.get(kind_of(strategy), 1)
    assert copies(strategy, variable(strategy, synchronization=ON_READ, aggregation=SUM)) == replicas(strategy)
    made = in_replicas(strategy, lambda replica: ps.Variable(np.float32(replica), name="of all"))
    assert {float(np.asarray(v)) for v in made} == {0.0}
    created = strategy.extended.variable_created_in_scope
    assert [created(v) for v in (here, together, np.ones(3))] == [True, True, False]
    assert all(in_replicas(strategy, lambda _, own: created(own), here))
    assert created(ps.Variable(1.0)) == (kind_of(strategy) == "default")


def test_synchronization_is_settled_at_creation(strategy):
    """AUTO is ON_WRITE, NONE is refused with what to take, and all else stays what was asked for. Variables are
    trained, sync-on-read ones are not; only of the first kind may one say otherwise. An integer variable holds no mean,
    nor a truth a sum: it is refused where it is created, with what to do instead."""
    assert variable(strategy).synchronization is SYNCHRONIZATION.ON_WRITE
    for asked in (SYNCHRONIZATION.ON_WRITE, ON_READ):
        v = variable(strategy, synchronization=asked, aggregation=AGGREGATION.MEAN)
        assert (v.synchronization, v.aggregation) == (asked, AGGREGATION.MEAN)
    with pytest.raises(ValueError, match=r"synchronization NONE.*use ON_READ"):
        variable(strategy, synchronization=SYNCHRONIZATION.NONE)
    on_read = {"synchronization": ON_READ, "aggregation": SUM}
    for options, trained in (({}, True), ({"trainable": False}, False), (on_read, False)):
        assert variable(strategy, **options).trainable is trained
    assert not variable(strategy, trainable=False, **on_read).trainable
    refused(ValueError, "cannot be trained", lambda: variable(strategy, trainable=True, **on_read))
    for how in (SYNCHRONIZATION.ON_WRITE, ON_READ):
        for dtype in (np.int64, np.int8, np.uint8, bool):
            with pytest.raises(ValueError, match="cannot hold a mean; use a floating dtype"):
                variable(strategy, np.zeros(3, dtype), synchronization=how, aggregation=AGGREGATION.MEAN)
        with pytest.raises(ValueError, match=r"bool cannot hold a sum; use an integer dtype"):
            variable(strategy, np.zeros(3, bool), synchronization=how, aggregation=SUM)


def test_a_repeated_name_gets_a_number(strategy):
    """In a strategy names are unique, in the order of creation; outside of every scope nobody counts. A name is a text;
    no name, and an empty one, get one. Python numbers are single precision, as in TensorFlow, and integers int64, as in
    NumPy; an array keeps its dtype, and a given dtype wins."""
    with strategy.scope():
        names = [ps.Variable(0.0, name="twin").name for _ in range(3)]
        names.append(ps.Variable(0.0, name="twin_1").name)
    assert names == (
        ["twin"] * 3 + ["twin_1"] if kind_of(strategy) == "default" else ["twin", "twin_1", "twin_2", "twin_1_1"]
    )
    with strategy.scope():
        for name in (1, b"w", ["w"]):
            with pytest.raises(TypeError, match="use a string, such as"):
                ps.Variable(0.0, name=name)
        assert [ps.Variable(0.0, name=none).name.startswith("Variable") for none in (None, "")] == [True] * 2
        given = (1.0, None), ([1.0], None), (1, None), (1, "float16"), (np.ones(2), None)
        found = [ps.Variable(value, dtype=dtype).dtype for value, dtype in given]
    assert found == [np.float32, np.float32, np.int64, np.float16, np.float64]


# ---- Assigning ----


@once(strategy=USUAL, aggregation=AGGREGATION)
def test_in_cross_replica_context_an_assignment_is_an_update(strategy, aggregation):
    """Whatever the aggregation is; it gives the variable back, and a scope is entered where there is none. A mirrored
    value and another variable are one value; a per-replica one is refused, with what makes one of it. Nor has it a say
    in an update function."""
    v = variable(strategy, [1.0, 1.0, 1.0], aggregation=aggregation)
    assert v.assign(np.full(3, 4.0)) is v
    with strategy.scope():
        assert v.assign_add([1.0, 2.0, 3.0]) is v
        assert v.assign_sub(0.5) is v
    assert shown(v) == [4.5, 5.5, 6.5]
    assert len({tuple(np.asarray(copy)) for copy in strategy.experimental_local_results(v)}) == 1
    assert strategy.extended.update(v, lambda v, x: v.assign(x).assign_sub(1.0), (each(2),)) is v
    assert shown(v) == [2.0] * 3
    v.assign(variable(strategy, [1.0, 2.0, 3.0]))
    assert shown(v) == [1.0, 2.0, 3.0]
    v.assign(ps.Mirrored([np.full(3, 5.0, "float32")] * replicas(strategy)))
    differing = ps.PerReplica([np.zeros(3)] * max(2, replicas(strategy)))
    refused((ValueError, TypeError), "reduce", lambda: v.assign(differing))
    assert shown(v) == [5.0] * 3


@pairwise(strategy=(*USUAL, "async-2x2"), aggregation=COMBINING, how=["assign", "assign_add", "assign_sub"])
def test_in_replica_context_values_are_aggregated_first(strategy, aggregation, how):
    """Then they are assigned once: each replica sees the same new value, and gets the variable back. What replicas
    share, a literal or an array, is used once; with SUM several are told that nobody knows how often it counts."""
    sign, n = {"assign": 0, "assign_add": 1, "assign_sub": -1}[how], replicas(strategy)
    v = variable(strategy, [10.0, 10.0, 10.0], aggregation=aggregation)
    values = range(1, n + 1)
    value = {SUM: sum(values), AGGREGATION.MEAN: sum(values) / n}.get(aggregation, 1.0)
    expected = 10.0 * abs(sign) + (sign or 1) * value
    seen = in_replicas(strategy, lambda replica: np.asarray(getattr(v, how)(each(replica))).tolist())
    assert seen == ([expected] * 3,) * n
    assert strategy.run(lambda: getattr(v, how)(each(0) * 0.0)) is v
    for shared in (1.5, np.full(3, 1.5, "float32")):
        w = variable(strategy, aggregation=aggregation)
        if aggregation is SUM and n > 1:
            with pytest.raises(ValueError, match=f"'{w.name}'.*same value from all {n} local replicas.*MEAN"):
                strategy.run(lambda w=w, shared=shared: getattr(w, how)(shared))
            assert shown(w) == [0.0] * 3
        else:
            strategy.run(lambda w=w, shared=shared: getattr(w, how)(shared))
            assert shown(w) == [1.5 * (sign or 1)] * 3


@pytest.mark.parametrize("how", ["assign", "assign_add", "assign_sub"])
def test_without_an_aggregation_a_replica_cannot_assign(strategy, how):
    """The error names the variable, and what to create it with; where there is one replica nothing is to combine."""
    v = variable(strategy)
    if replicas(strategy) == 1:
        strategy.run(lambda: getattr(v, how)(1.0))
        strategy.run(lambda: getattr(v, how)(np.full(3, 1.0, "float32")))
        assert shown(v) == {"assign": [1.0] * 3, "assign_add": [2.0] * 3, "assign_sub": [-2.0] * 3}[how]
        truth = variable(strategy, np.array([True, False]))
        assert strategy.run(lambda: truth.assign(np.array([False, True]))) is truth
        assert (shown(truth), truth.dtype) == ([False, True], np.dtype(bool))
        return
    said = f"'{v.name}' was assigned in replica context.*aggregation=.*SUM, MEAN or ONLY_FIRST"
    refused(ValueError, said, lambda: strategy.run(lambda: getattr(v, how)(1.0)))
    assert shown(v) == [0.0] * 3


@pytest.mark.parametrize("where", ["outside", "scope", "merge"])
def test_a_variable_is_assigned_from_one_that_lies_anywhere(strategy, where):
    """In cross-replica context, also from what was reduced to the other, and where both were just assigned."""
    devices = strategy.extended.parameter_devices
    v, first = (variable(strategy, [1.0, 2.0, 3.0], beside=(devices[place],)) for place in (0, -1))
    assert (v.place != first.place) == (kind_of(strategy) == "embedded" and len(devices) > 1)
    ones = strategy.experimental_distribute_values_from_function(lambda _: np.ones(3, "float32"))

    def assign(strategy):
        for _ in range(2):
            first.assign_add(v)
            v.assign(first)
        v.assign_sub(strategy.extended.reduce_to("mean", ones, first))
        first.assign(strategy.extended.update(v, lambda v: v * 10.0))

    if where == "merge":
        merged(strategy, assign)
    else:
        with strategy.scope() if where == "scope" else contextlib.nullcontext():
            assign(strategy)
    assert (shown(v), shown(first)) == ([3.0, 7.0, 11.0], [30.0, 70.0, 110.0])


MISFITS = [(value, TypeError) for value in (None, "text", object(), np.ones(3, "complex64"), 1j, np.array(["a"]))]
MISFITS += [(np.ones(4, "float32"), ValueError), (np.ones((2, 3), "float32"), ValueError)]
MISFITS += [([1.0, 2.0], ValueError), ([[1.0], [1.0, 2.0]], ValueError)]


@pytest.mark.parametrize("how", ["assign", "assign_add"])
def test_what_cannot_be_assigned(strategy, how):
    """The same class of error on every strategy, across replicas and within; in update functions one of it."""
    v = variable(strategy, [1.0, 2.0, 3.0], aggregation=AGGREGATION.MEAN)
    for value, error in MISFITS:
        for attempt in (
            lambda value: getattr(v, how)(value),
            lambda value: strategy.run(lambda: getattr(v, how)(value)),
        ):
            with pytest.raises((TypeError, ValueError), match=r".") as raised:
                attempt(value)
            assert raised.type is error, value
        with pytest.raises(error):
            strategy.extended.update(v, lambda v, x: getattr(v, how)(x), (value,))
    assert shown(v) == [1.0, 2.0, 3.0]
    count = variable(strategy, np.zeros(2, "int64"))
    getattr(v, how)(np.float64(2.0))  # values are broadcast and cast within their kind, as NumPy does in place
    getattr(count, how)(np.int8(3))
    says = rf"'{count.name}': float64 cannot be assigned to int64; use value\.astype"
    refused(WRONG_DTYPE, says, lambda: getattr(count, how)(np.ones(2)))
    refused((ValueError, ps.errors.ProgramError), f"'{v.name}'.*(3|4)", lambda: getattr(v, how)(np.ones(4, "float32")))
    assert (shown(v), shown(count)) == ([2.0] * 3 if how == "assign" else [3.0, 4.0, 5.0], [3, 3])


def test_a_variable_is_copied_deeply(strategy):
    """A new variable beside it, of the same value and traits, each replica's own value included."""
    n = replicas(strategy)
    v = variable(strategy, [1.0, 2.0, 3.0], trainable=False, aggregation=SUM)
    own = variable(strategy, 0.0, synchronization=ON_READ, aggregation=SUM)
    in_replicas(strategy, lambda i, w: w.assign(np.float32(i + 1.0)), own)
    new, again = copy.deepcopy({"v": [v, v]})["v"]
    assert new is again
    assert (new.trainable, new.aggregation, new.dtype, new.devices) == (False, SUM, v.dtype, v.devices)
    assert strategy.extended.variable_created_in_scope(new)
    v.assign_add(1.0)
    assert (shown(new), shown(v)) == ([1.0, 2.0, 3.0], [2.0, 3.0, 4.0])
    other = copy.deepcopy(own)
    in_replicas(strategy, lambda i, w: w.assign(np.float32(10.0)), own)
    found = [float(x) for x in strategy.experimental_local_results(other)]
    assert (other.synchronization, found) == (ON_READ, [i + 1.0 for i in range(n)])
    inside = in_replicas(strategy, lambda i, w: copy.deepcopy(w), own)
    assert [float(w) for w in inside] == [10.0] * n
    inside = in_replicas(strategy, lambda i, w: copy.deepcopy(w), v)
    assert len({id(strategy.extended.value_container(w)) for w in inside}) == 1
    assert [np.asarray(w).tolist() for w in inside] == [[2.0, 3.0, 4.0]] * n
    assert all(strategy.extended.value_container(w) is not v for w in inside)


def test_a_replica_is_given_what_is_as_good_as_the_variable(strategy):
    """As an argument: it has its name and traits, is read and assigned as it is, and comes back as the variable."""
    v = variable(strategy, aggregation=SUM)

    def look(_, own):
        traits = own.name, own.trainable, own.synchronization, own.aggregation, own.shape, own.dtype
        return (*traits, own.value().tolist())

    expected = (v.name, True, SYNCHRONIZATION.ON_WRITE, SUM, (3,), np.float32, [0.0] * 3)
    assert in_replicas(strategy, look, v) == (expected,) * replicas(strategy)
    assert strategy.run(lambda own: own.assign_add(each(0) * 1), (v,)) is v
    assert strategy.run(lambda own: {"v": [own, None]}, (v,)) == {"v": [v, None]}
    assert shown(v) == [replicas(strategy)] * 3


def test_arithmetic_goes_both_ways(strategy):
    """With numbers, arrays and other variables; the result is an array. So do products of matrices. Comparison is by
    element, and still a variable is a key: it is found in a dict by what it is."""
    v, w = variable(strategy, [1.0, 2.0, 3.0]), variable(strategy, [2.0, 2.0, 2.0])
    found = [v + 1, 1 + v, v - w, 6 / v, v**2, 2**v, v // 2, v % 2, -v, abs(-v), v * np.float32(2), np.ones(3) - v]
    expected = [[2, 3, 4], [2, 3, 4], [-1, 0, 1], [6, 3, 2], [1, 4, 9], [2, 4, 8], [0, 1, 1], [1, 0, 1]]
    expected += [[-1, -2, -3], [1, 2, 3], [2, 4, 6], [0, -1, -2]]
    found += [v < w, v == w, v <= 2]
    expected += [[True, False, False], [False, True, False], [True, True, False]]
    assert [np.asarray(x).tolist() for x in found] == expected
    assert not any(isinstance(x, ps.Variable) for x in found)
    assert {v: "v", w: "w"}[v] == "v"
    a, b = variable(strategy, np.arange(6.0).reshape(2, 3)), variable(strategy, np.ones((3, 2)))
    assert (a @ b).tolist() == [[3.0] * 2, [12.0] * 2]
    assert (np.ones((1, 2)) @ a).tolist() == [[3.0, 5.0, 7.0]]
    assert (a @ np.ones(3)).tolist() == np.matmul(a, np.ones(3)).tolist() == [3.0, 12.0]


def test_it_is_an_array_to_numpy(strategy):
    """In every context but an update function: functions, slices, iteration, conversions."""

    def look(_=None):
        v, k = vector, scalar
        found = [np.asarray(v).tolist(), np.array(v, dtype="int64").tolist(), v[1:].tolist(), float(v[-1])]
        found += [[float(x) for x in v], (len(v), v.shape, v.ndim, v.size)]
        found += [(float(k), int(k), complex(k), bool(k), f"{k:.1f}"), (np.exp(v) > 2).tolist()]
        return [*found, np.concatenate([v, [4.0]]).tolist(), float(np.sum(v))]

    vector, scalar = variable(strategy, [1.0, 2.0, 3.0]), variable(strategy, 2.5)
    expected = [[1.0, 2.0, 3.0], [1, 2, 3], [2.0, 3.0], 3.0, [1.0, 2.0, 3.0], (3, (3,), 1, 3)]
    expected += [(2.5, 2, 2.5 + 0j, True, "2.5"), [True, True, True], [1.0, 2.0, 3.0, 4.0], 6.0]
    assert look() == expected
    with strategy.scope():
        assert look() == expected
    assert in_replicas(strategy, look) == (expected,) * replicas(strategy)
    refused(TypeError, "no dimensions", lambda: len(scalar))


def test_nobody_changes_it_in_place(strategy):
    """Neither by an operator, with a word on what to write, nor through the array that was read."""
    v = variable(strategy, [1.0, 2.0, 3.0])
    says = rf"'{v.name}' in place.*w\.assign_add"
    refused(TypeError, says, lambda: v.__iadd__(1), lambda: v.__imatmul__(v), lambda: np.add(v, 1, out=v))
    read = v.read_value()
    with pytest.raises(ValueError, match="read-only"):
        read[0] = 7.0
    v.assign_add(1.0)
    assert (read.tolist(), shown(v)) == ([1.0, 2.0, 3.0], [2.0, 3.0, 4.0])


# ---- Of another strategy ----


@pytest.mark.parametrize("of", ["another strategy", "no scope"])
def test_another_strategy_s_variable_is_refused_everywhere(strategy, of):
    """By each method that takes one, by name, whichever kind of strategy made it; one of no scope too, except by the
    default strategy, whose it is. Anybody may read it."""
    v, extended = variable(strategy), strategy.extended
    with ps.MirroredStrategy(["cpu:0", "cpu:1"]) as other:
        foreign = ps.Variable([1.0, 2.0, 3.0]) if of == "no scope" else variable(other, [1.0, 2.0, 3.0])
        says = "created outside of every scope" if of == "no scope" else "created in the scope of another strategy"
        v.assign(foreign.read_value())
        attempts = [
            lambda: extended.update(foreign, lambda v: v.assign_add(1.0)),
            lambda: extended.update(v, lambda v, x: v.assign(x), (foreign,)),
            lambda: extended.update(v, lambda v, x: v.assign(x), kwargs={"x": foreign}),
            lambda: extended.update_non_slot(foreign, lambda: None),
            lambda: extended.update_non_slot(extended.non_slot_devices([v]), lambda x: x + 1, (foreign,)),
            lambda: extended.non_slot_devices([foreign]),
            lambda: extended.reduce_to("mean", 1.0, foreign),
            lambda: extended.batch_reduce_to("sum", [(1.0, foreign)]),
            lambda: extended.broadcast_to(1.0, foreign),
            lambda: extended.read_var(foreign),
            lambda: extended.colocate_vars_with(foreign).__enter__(),
            lambda: ps.optimizers.SGD().build([v, foreign]),
        ]
        for attempt in attempts if of != "no scope" or kind_of(strategy) != "default" else []:
            with pytest.raises(ValueError, match=f"'{foreign.name}' was {says}"):
                attempt()
        assert shown(v) == shown(foreign) == [1.0, 2.0, 3.0]


def test_outside_of_every_scope_a_sync_on_read_variable_has_one_value():
    """Whatever its aggregation is: library code with metrics runs unchanged."""
    for aggregation in AGGREGATION:
        v = ps.Variable(1.0, synchronization=ON_READ, aggregation=aggregation)
        assert v.assign_add(2.0) is v
        v.assign(0.9 * v + 0.1)
        assert float(v) == pytest.approx(2.8)
        assert v.synchronization is ON_READ


def test_a_variable_says_its_device(strategy):
    """One name of those in `devices`: of copies the replica's own, and across replicas the first."""
    on_read = ps.VariableSynchronization.ON_READ
    for v in (variable(strategy), variable(strategy, synchronization=on_read)):
        assert v.device == v.devices[0]
        known = set(strategy.extended.parameter_devices) | set(strategy.extended.worker_devices)
        assert v.device in known
        copied = len(v.devices) == replicas(strategy) > 1
        told = in_replicas(strategy, lambda i, own, v=v: (own.device, v.device), v)
        workers = strategy.extended.worker_devices
        assert told == tuple((workers[i],) * 2 if copied else (v.device,) * 2 for i in range(replicas(strategy)))
