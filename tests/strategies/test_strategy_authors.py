"""A strategy of one's own, as the documents tell its author: all logic is in a subclass of `StrategyExtended`."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

import psclient as ps
from tests.kit.strategies import by_replica, copies, kind_of, replicas, variable

here = ps.get_replica_context


class Noted(ps.compat.v1.StrategyExtended):
    """Notes what it is asked for."""

    def __init__(self, container_strategy, backend=None):
        super().__init__(container_strategy, backend)
        self.asked = []

    def call_for_each_replica(self, fn, args=(), kwargs=None):
        self.asked.append("call_for_each_replica")
        return super().call_for_each_replica(fn, args, kwargs)

    def reduce(self, op, value, axis):
        self.asked.append("reduce")
        return super().reduce(op, value, axis)

    def batch_reduce_to(self, reduce_op, value_destination_pairs, experimental_hints=None):
        self.asked.append("batch_reduce_to")
        return super().batch_reduce_to(reduce_op, value_destination_pairs, experimental_hints)

    def update(self, var, fn, args=(), kwargs=None, group=True):
        self.asked.append("update")
        return super().update(var, fn, args, kwargs, group)


class Mine(ps.Strategy):
    """Only makes its own `extended`."""

    def __init__(self, backend=None):
        super().__init__(Noted(self, backend))


def test_an_author_writes_a_subclass_of_extended(strategy):
    """The strategy's own methods, its contexts and its variables go through it, wherever its variables live."""
    mine, n = Mine(strategy.backend), replicas(strategy)
    variables = []
    for device in mine.extended.parameter_devices:  # in turn they go where others have left room
        with mine.scope(), mine.extended.colocate_vars_with([device]):
            variables.append(variable(mine, aggregation=ps.VariableAggregation.SUM))
    assert {device for v in variables for device in v.devices} == set(mine.extended.parameter_devices)
    found = mine.run(lambda: here().all_reduce("sum", np.ones(3, "float32")))
    mine.run(lambda: variables[-1].assign_add(np.ones(3, "float32")))
    assert mine.reduce("mean", found, axis=0) == n
    variables[-1].assign_sub(0.5)
    assert variables[-1].numpy().tolist() == [n - 0.5] * 3
    asked = ["call_for_each_replica", "batch_reduce_to", "call_for_each_replica", "update", "reduce", "update"]
    assert mine.extended.asked == asked
    with mine.scope():
        assert ps.get_strategy() is mine is variables[0].strategy
    mine.extended.shared.runner.close()


def test_without_a_backend_an_author_s_variables_live_here():
    """On one CPU, or all GPUs; at its end the strategy is closed."""
    with Mine() as strategy:
        v = variable(strategy)
        assert v.devices == strategy.extended.worker_devices
        assert strategy.run(lambda: v.assign_add(1.0)) is v
    with pytest.raises(RuntimeError, match="closed"):
        strategy.run(lambda: None)


def test_a_strategy_is_made_of_an_extended(strategy):
    """`Strategy(extended)` of another strategy is a second face of it: what either creates is in both."""
    again = ps.Strategy(strategy.extended)
    n = replicas(strategy)
    assert again.extended is strategy.extended
    assert again.num_replicas_in_sync == strategy.num_replicas_in_sync
    with again.scope() if kind_of(strategy) != "default" else contextlib.nullcontext():
        v = ps.Variable(np.zeros(3, "float32"), aggregation=ps.VariableAggregation.MEAN)
        assert ps.get_strategy() is strategy
    assert again.extended.variable_created_in_scope(v)
    assert copies(again, v) == copies(strategy, v)
    again.run(lambda: v.assign_add(1.0))
    strategy.run(lambda: v.assign_add(1.0))
    assert v.numpy().tolist() == [2.0] * 3
    assert again.reduce("sum", by_replica(again, lambda i: np.float32(i)), axis=None) == sum(range(n))
    dataset = ps.ArrayDataset(np.arange(8.0)).batch(4)
    seen = [
        [x for part in s.experimental_local_results(batch) for x in part]
        for s in (again, strategy)
        for batch in s.experimental_distribute_dataset(dataset)
    ]
    assert seen == [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]] * 2
    values = again.experimental_distribute_values_from_function(lambda context: context.replica_id_in_sync_group)
    assert again.experimental_local_results(values) == tuple(range(n))


@pytest.mark.parametrize("kind", [ps.VariableAggregation, ps.VariableSynchronization, ps.ReduceOp])
def test_enums_have_tensorflow_s_values(kind):
    """As numbers, or as the words of reductions."""
    expected = {
        "VariableAggregation": {"NONE": 0, "SUM": 1, "MEAN": 2, "ONLY_FIRST_REPLICA": 3},
        "VariableSynchronization": {"AUTO": 0, "NONE": 1, "ON_WRITE": 2, "ON_READ": 3},
        "ReduceOp": {"SUM": "SUM", "MEAN": "MEAN"},
    }[kind.__name__]
    assert {member.name: member.value for member in kind} == expected
    assert all(kind(value) is kind[name] for name, value in expected.items())


def test_only_servers_have_other_processes_for_the_same_script(strategy):
    """`experimental_between_graph` is a constant of the kind of strategy."""
    assert strategy.extended.experimental_between_graph is (kind_of(strategy) == "embedded")
