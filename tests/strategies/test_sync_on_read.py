"""Sync-on-read variables on every kind of strategy: each replica has a copy, combined when it is read across them."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import psclient as ps
from tests.kit.strategies import KINDS, in_replicas, kinds, merged, replicas, variable

AGGREGATION = ps.VariableAggregation
ON_READ = ps.VariableSynchronization.ON_READ
COMBINING = [AGGREGATION.SUM, AGGREGATION.MEAN, AGGREGATION.ONLY_FIRST_REPLICA]


pytestmark = kinds("mirrored-1", "mirrored-2", "servers-2x2", soak=KINDS[1:])
"""Outside of every scope there are no copies: `test_variable_rules` has what is then."""


def on_read(strategy, aggregation=AGGREGATION.SUM, value=0.0, **options):
    return variable(strategy, value, synchronization=ON_READ, aggregation=aggregation, **options)


def fill(strategy, v):
    """Replica 0 gets 1, replica 1 gets 2, and so on."""
    in_replicas(strategy, lambda replica: v.assign(np.float32(replica + 1)))


def of_replicas(strategy, v):
    """What each replica reads."""
    return [float(x) for x in in_replicas(strategy, lambda _: float(v))]


def read_across(aggregation, copies):
    """What is read across replicas that hold these values."""
    combined = {"sum": sum(copies), "mean": sum(copies) / len(copies), "only_first_replica": copies[0]}
    return combined[aggregation.name.lower()]


@pytest.mark.parametrize("aggregation", COMBINING)
def test_a_replica_reads_its_own_copy_and_all_else_the_aggregate(strategy, aggregation):
    """In a replica function, in merge_call, in the scope, outside of it, and in any form of reading."""
    n, v = replicas(strategy), on_read(strategy, aggregation)
    fill(strategy, v)
    own = [float(replica + 1) for replica in range(n)]
    expected = read_across(aggregation, own)
    assert of_replicas(strategy, v) == own
    assert [float(copy) for copy in strategy.experimental_local_results(v)] == own
    across = []
    merged(strategy, lambda s: across.append(float(v)))
    assert across == [expected]
    with strategy.scope():
        assert float(v) == expected
    assert [float(v), float(v.numpy()), float(v + 0), float(np.asarray(v)), float(strategy.extended.read_var(v))] == (
        [expected] * 5
    )


def test_without_an_aggregation_it_is_only_read_by_replicas(strategy):
    """The error says how to create it, and how to have its copies."""
    v = on_read(strategy, AGGREGATION.NONE)
    fill(strategy, v)
    for attempt in (lambda: float(v), v.read_value, lambda: v.assign(1.0), lambda: strategy.extended.read_var(v)):
        with pytest.raises(ValueError, match=rf"'{v.name}' is (read|assigned) in cross-replica context.*local_results"):
            attempt()
    assert of_replicas(strategy, v) == [replica + 1.0 for replica in range(replicas(strategy))]


def test_every_copy_begins_with_the_initial_value(strategy):
    """So a sum that begins with 1 reads R, and a mean 1."""
    n = replicas(strategy)
    assert float(on_read(strategy, AGGREGATION.SUM, 1.0)) == n
    assert float(on_read(strategy, AGGREGATION.MEAN, 1.0)) == 1.0
    assert float(on_read(strategy, AGGREGATION.ONLY_FIRST_REPLICA, 1.0)) == 1.0


def test_replicas_assign_their_own_copies(strategy):
    """The documents' `v = 0.9*v + 0.1*update`: nothing is combined, and literals are each replica's own."""
    n, v = replicas(strategy), on_read(strategy, AGGREGATION.MEAN, 10.0)
    in_replicas(strategy, lambda replica: v.assign(0.9 * v + 0.1 * replica))
    assert of_replicas(strategy, v) == pytest.approx([9.0 + 0.1 * replica for replica in range(n)])
    in_replicas(strategy, lambda _: v.assign(1.0))
    in_replicas(strategy, lambda replica: v.assign_add(replica).assign_sub(0.5))
    assert of_replicas(strategy, v) == [0.5 + replica for replica in range(n)]


def test_replicas_assign_what_they_are_given(strategy):
    """As an argument a replica gets its own copy; a merge of all the copies is the variable."""
    n, v = replicas(strategy), on_read(strategy)
    merged_back = strategy.run(lambda own: own.assign_add(2.0), (v,))
    assert merged_back is v
    assert strategy.run(lambda: v.assign_add(0.0)) is v
    assert strategy.run(lambda own: (own, None), (v,)) == (v, None)
    assert of_replicas(strategy, v) == [2.0] * n
    found = []
    in_replicas(strategy, lambda _, own: ps.get_replica_context().merge_call(lambda s, w: found.append(w), (own,)), v)
    assert found == [v]


def test_a_copy_knows_its_variable(strategy):
    """`value_container` gives it, and its copy is among the variable's local results."""
    extended, v = strategy.extended, on_read(strategy)
    for copy in strategy.experimental_local_results(v):
        assert extended.value_container(copy) is v
        assert copy in strategy.experimental_local_results(extended.value_container(copy))
        assert (copy.name, copy.trainable, copy.synchronization, copy.aggregation) == (
            (v.name, False, ON_READ, AGGREGATION.SUM)
        )


@pytest.mark.parametrize("aggregation", COMBINING)
def test_across_replicas_one_value_is_shared_out(strategy, aggregation):
    """A sum in equal parts, so that it reads the same again; all else whole."""
    n, v = replicas(strategy), on_read(strategy, aggregation)
    fill(strategy, v)
    assert v.assign(12.0) is v
    assert of_replicas(strategy, v) == [12.0 / n if aggregation is AGGREGATION.SUM else 12.0] * n
    assert float(v) == 12.0
    v.assign(variable(strategy, 8.0))
    assert float(v) == 8.0
    v.assign(ps.Mirrored([np.float32(4.0)] * n))
    assert float(v) == 4.0


def test_what_is_shared_out_fits(strategy):
    """An integer into a sum of floats has its fraction; a float is no integer, and another shape none of its own."""
    n, v, count = replicas(strategy), on_read(strategy), on_read(strategy, AGGREGATION.SUM, np.int64(0))
    v.assign(1)
    assert of_replicas(strategy, v) == [1 / n] * n
    with pytest.raises(TypeError, match=f"'{count.name}': float64 cannot be assigned to int64"):
        count.assign(1.5)
    with pytest.raises(ValueError, match=rf"'{v.name}' has shape \(\); a value of shape \(2,\)"):
        v.assign(np.ones(2))
    assert (float(v), int(count)) == (1.0, 0)


def test_integers_are_cut_off_when_they_are_shared_out(strategy):
    """As in TensorFlow: 7 over two replicas is 3 for each, -7 is -3."""
    n = replicas(strategy)
    v = on_read(strategy, AGGREGATION.SUM, np.int64(0))
    for value in (7, -7):
        v.assign(value)
        assert v.numpy().dtype == np.int64
        assert of_replicas(strategy, v) == [int(value / n)] * n
        assert int(v) == int(value / n) * n


def test_large_integers_are_shared_out_exactly(strategy):
    """A count beyond what a double can hold is not rounded."""
    n, whole = replicas(strategy), (2**53 + 1) * 4
    v = on_read(strategy, AGGREGATION.SUM, np.int64(0))
    v.assign(np.int64(whole))
    assert v.numpy() == whole
    assert in_replicas(strategy, lambda _: int(v)) == (whole // n,) * n


@pytest.mark.parametrize("aggregation", [AGGREGATION.SUM, AGGREGATION.NONE])
def test_across_replicas_nothing_is_added_to_a_sum(strategy, aggregation):
    """Nor where there is no aggregation; the error says where to do it."""
    v = on_read(strategy, aggregation)
    for how in ("assign_add", "assign_sub"):
        with pytest.raises(ValueError, match=f"{how} of '{v.name}' in cross-replica context.*strategy.run"):
            getattr(v, how)(1.0)
    assert of_replicas(strategy, v) == [0.0] * replicas(strategy)


@pytest.mark.parametrize("aggregation", [AGGREGATION.MEAN, AGGREGATION.ONLY_FIRST_REPLICA])
def test_across_replicas_each_copy_is_added_to(strategy, aggregation):
    """As in TensorFlow, of the other aggregations: what is read changes by as much."""
    n, v = replicas(strategy), on_read(strategy, aggregation)
    in_replicas(strategy, lambda replica: v.assign(np.float32(replica)))
    before = float(v)
    assert v.assign_add(3.0) is v
    v.assign_sub(1.0)
    assert float(v) == before + 2.0
    assert of_replicas(strategy, v) == [i + 2.0 for i in range(n)]


def test_across_replicas_it_is_assigned_no_per_replica_value(strategy):
    """It says so before anything has changed."""
    v = on_read(strategy)
    values = ps.PerReplica([np.float32(1.0)] * max(2, replicas(strategy)))
    with pytest.raises(ValueError, match=f"'{v.name}' is assigned a per-replica value"):
        v.assign(values)
    assert float(v) == 0.0


@pytest.mark.parametrize("aggregation", COMBINING)
def test_a_read_has_the_variable_s_dtype(strategy, aggregation):
    """Also where a mean is worked out in another one."""
    for dtype in (np.float16, ml_dtypes.bfloat16, np.float64, np.complex64):
        v = on_read(strategy, aggregation, np.ones(2, dtype))
        v.assign(np.full(2, 4, dtype))
        assert (v.numpy().dtype, v.numpy().tolist()) == (np.dtype(dtype), [4, 4])
        assert {value.dtype for value in in_replicas(strategy, lambda _, v=v: v.read_value())} == {np.dtype(dtype)}


def test_truth_values_are_those_of_the_first_replica(strategy):
    """Or differ by replica without an aggregation."""
    v = on_read(strategy, AGGREGATION.ONLY_FIRST_REPLICA, np.zeros(2, bool))
    in_replicas(strategy, lambda replica: v.assign(np.array([replica == 0, replica == 1])))
    assert (v.numpy().dtype, v.numpy().tolist()) == (np.bool_, [True, False])


def test_it_is_reduced_as_a_per_replica_value(strategy):
    """By `reduce` and `reduce_to`, with any operation: its copies count, whatever its aggregation is."""
    n, v = replicas(strategy), on_read(strategy, AGGREGATION.ONLY_FIRST_REPLICA)
    w = variable(strategy, 0.0)
    fill(strategy, v)
    total = n * (n + 1) / 2
    assert float(strategy.reduce("sum", v, None)) == total
    assert float(strategy.reduce("mean", v, None)) == total / n
    with strategy.scope():
        here = strategy.extended.reduce_to("sum", v, strategy.extended.worker_devices[0])
        reduced = strategy.extended.reduce_to("sum", v, w)
        strategy.extended.update(w, lambda w, x: w.assign(x), (reduced,))
    assert (float(here), float(w)) == (total, total)


def test_it_is_a_destination_on_the_replicas_devices(strategy):
    """A value with its locality has one for each copy."""
    n, v = replicas(strategy), on_read(strategy)
    found = strategy.extended.reduce_to("mean", 3.0, v)
    assert [float(x) for x in strategy.experimental_local_results(found)] == [3.0] * n


def test_an_update_changes_every_copy(strategy):
    """It runs once for each, with its own value, and gives the variable back."""
    n, v = replicas(strategy), on_read(strategy)
    fill(strategy, v)
    assert strategy.extended.update(v, lambda v, x: v.assign(v * 2 + x), (1.0,)) is v
    assert of_replicas(strategy, v) == [2.0 * (replica + 1) + 1.0 for replica in range(n)]


def test_it_is_created_in_a_replica_function(strategy):
    """All replicas get the one variable, each its own copy of it."""
    box = {}

    def step():
        if not box:
            made = ps.Variable(0.0, name="in step", synchronization=ON_READ, aggregation=AGGREGATION.SUM)
            ps.get_replica_context().merge_call(lambda s, v: box.update(v=s.extended.value_container(v)), (made,))
        box["v"].assign_add(1.0)

    strategy.run(step)
    strategy.run(step)
    assert float(box["v"]) == 2.0 * replicas(strategy)


def test_another_strategy_cannot_combine_it(strategy):
    """Its replicas are another's: the error says that two strategies are mixed."""
    v = on_read(strategy)
    with (
        ps.MirroredStrategy(["cpu:0"]) as other,
        other.scope(),
        pytest.raises(RuntimeError, match="strategies are mixed"),
    ):
        float(v)
