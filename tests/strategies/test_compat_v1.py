"""`ps.compat.v1` on every kind of strategy: what only the older `StrategyExtended` has."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

import psclient as ps
from psclient.compat import v1
from tests.kit.strategies import kind_of, replicas, variable

ATTRIBUTES = (
    "experimental_between_graph",
    "experimental_require_static_shapes",
    "experimental_should_init",
    "parameter_devices",
    "should_checkpoint",
    "should_save_summary",
    "worker_devices",
)
"""Those of both documents; their methods are below, with the parameters as they are written there."""

SIGNATURES = {
    "batch_reduce_to": "reduce_op, value_destination_pairs, experimental_hints=None",
    "broadcast_to": "tensor, destinations",
    "call_for_each_replica": "fn, args=(), kwargs=None",
    "colocate_vars_with": "colocate_with_variable",
    "experimental_make_numpy_dataset": "numpy_input, session=None",
    "experimental_run_steps_on_iterator": "fn, iterator, iterations=1, initial_loop_values=None",
    "non_slot_devices": "var_list",
    "read_var": "v",
    "reduce_to": "reduce_op, value, destinations, experimental_hints=None",
    "update": "var, fn, args=(), kwargs=None, group=True",
    "update_non_slot": "colocate_with, fn, args=(), kwargs=None, group=True",
    "value_container": "value",
    "variable_created_in_scope": "v",
}


def shown(parameter):
    """A parameter as the documents write it."""
    return parameter.name if parameter.default is parameter.empty else f"{parameter.name}={parameter.default!r}"


def test_every_name_of_the_documents_is_there(strategy):
    """With the documents' parameters, and a docstring that says where it may be called."""
    for name in (*SIGNATURES, *ATTRIBUTES):
        found = getattr(v1.StrategyExtended, name)
        assert "context" in found.__doc__ or "In the scope" in found.__doc__, name
        if name in SIGNATURES:
            parameters = list(inspect.signature(found).parameters.values())[1:]
            assert ", ".join(map(shown, parameters)) == SIGNATURES[name]
        else:
            getattr(strategy.extended, name)


def test_a_strategy_s_extended_is_made_of_it(strategy):
    """`StrategyExtended(container_strategy)` gives a strategy's methods; all of them share their state."""
    assert isinstance(strategy.extended, v1.StrategyExtended)
    again = v1.StrategyExtended(strategy)
    assert again.worker_devices == strategy.extended.worker_devices
    assert again.experimental_between_graph is (kind_of(strategy) == "embedded")
    assert again.experimental_require_static_shapes is False
    assert (again.experimental_should_init, again.should_checkpoint, again.should_save_summary) == (True,) * 3
    v, last = variable(strategy), again.parameter_devices[-1]
    with strategy.scope(), again.colocate_vars_with((last,)):
        made = [ps.Variable(0.0, name=v.name) for _ in range(2)]
        assert again.colocation == strategy.extended.colocation
    if kind_of(strategy) == "embedded":
        assert [w.devices for w in made] == [(last,)] * 2
    if kind_of(strategy) != "default":
        assert [w.name for w in made] == [f"{v.name}_1", f"{v.name}_2"]
    again.update(v, lambda v: v.assign_add(1.0))
    again.call_for_each_replica(lambda: None)
    assert (v.numpy().tolist(), again.variable_created_in_scope(made[0])) == ([1.0] * 3, True)


def test_a_numpy_dataset_takes_a_session_and_has_no_use_for_it(strategy):
    """As `Strategy.experimental_make_numpy_dataset`; a list of arrays is stacked."""
    make = strategy.extended.experimental_make_numpy_dataset
    for dataset in (make(np.ones((10, 2), "float32"), None), make([np.ones(2)] * 10, session=None)):
        batches = list(strategy.experimental_distribute_dataset(dataset.batch(4)))
        sizes = [sum(len(x) for x in strategy.experimental_local_results(batch)) for batch in batches]
        assert sizes == [4, 4, 2]


# ---- Steps on an iterator ----


def distributed(strategy, rows=12, batch=4):
    """An iterator over the numbers from 0, in global batches."""
    dataset = strategy.experimental_make_numpy_dataset(np.arange(float(rows))).batch(batch)
    return iter(strategy.experimental_distribute_dataset(dataset))


def test_steps_run_on_the_iterator(strategy):
    """The function gets the context and the next batches, and the last step's outputs come back, reduced."""
    seen = []

    def fn(ctx, inputs):
        losses = strategy.extended.call_for_each_replica(lambda x: x.sum(), args=(inputs,))
        ctx.set_last_step_output("loss", losses, ps.ReduceOp.SUM)
        ctx.set_last_step_output("kept", inputs)
        ctx.set_non_tensor_output("word", ["any", "thing"])
        seen.append(sum(len(x) for x in strategy.experimental_local_results(inputs)))

    iterator = distributed(strategy)
    steps = strategy.extended.experimental_run_steps_on_iterator(fn, iterator, iterations=2)
    assert isinstance(steps, v1.MultiStepContext)
    assert seen == [4, 4]
    assert float(steps.last_step_outputs["loss"]) == 4 + 5 + 6 + 7
    rows = [float(x) for own in strategy.experimental_local_results(steps.last_step_outputs["kept"]) for x in own]
    assert rows == [4.0, 5.0, 6.0, 7.0]
    assert steps.non_tensor_outputs == {"word": ["any", "thing"]}
    assert steps.run_op is None
    assert float(strategy.extended.experimental_run_steps_on_iterator(fn, iterator).last_step_outputs["loss"]) == 38.0


def test_outputs_are_set_in_replicas(strategy):
    """With a reduction, since replicas differ; what is no array is kept for each replica."""
    n = replicas(strategy)

    def step(ctx, x):
        replica = ps.get_replica_context().replica_id_in_sync_group
        ctx.set_last_step_output("total", x.sum(), "sum")
        ctx.set_last_step_output("mean", np.float64(replica), ps.ReduceOp.MEAN)
        ctx.set_last_step_output("same", 1.0, "sum")
        ctx.set_non_tensor_output("who", f"replica {replica}")

    def fn(ctx, inputs):
        strategy.extended.call_for_each_replica(step, args=(ctx, inputs))

    steps = strategy.extended.experimental_run_steps_on_iterator(fn, distributed(strategy), 3)
    outputs = {name: float(value) for name, value in steps.last_step_outputs.items()}
    assert outputs == {"total": 8.0 + 9 + 10 + 11, "mean": (n - 1) / 2, "same": n}
    each = tuple(f"replica {replica}" for replica in range(n))
    assert steps.non_tensor_outputs["who"] == (each[0] if kind_of(strategy) == "default" else each)


def test_an_output_of_replicas_needs_a_reduction(strategy):
    """The error names the output; outside of every scope one replica has all there is."""

    def fn(ctx, inputs):
        strategy.run(lambda: ctx.set_last_step_output("loss", 1.0))

    if kind_of(strategy) == "default":
        assert strategy.extended.experimental_run_steps_on_iterator(fn, distributed(strategy)).last_step_outputs == {
            "loss": 1.0
        }
        return
    with pytest.raises(ValueError, match=r"'loss'.*give a reduce_op"):
        strategy.extended.experimental_run_steps_on_iterator(fn, distributed(strategy))


def test_initial_loop_values_are_what_is_there_before(strategy):
    """The first step sees them, and what no step sets stays; the caller's mapping is not touched."""
    initial, seen = {"loss": 0.5, "other": 1.0}, []

    def fn(ctx, inputs):
        seen.append(ctx.last_step_outputs["loss"])
        ctx.set_last_step_output("loss", len(seen))

    steps = strategy.extended.experimental_run_steps_on_iterator(fn, distributed(strategy), 2, initial)
    assert seen == [0.5, 1]
    assert steps.last_step_outputs == {"loss": 2, "other": 1.0}
    assert initial == {"loss": 0.5, "other": 1.0}


def test_the_end_of_the_iterator_is_told(strategy):
    """After the steps that it had batches for."""
    seen = []
    iterator = distributed(strategy, rows=8)
    with pytest.raises(StopIteration):
        strategy.extended.experimental_run_steps_on_iterator(lambda ctx, x: seen.append(1), iterator, 5)
    assert seen == [1, 1]
    assert not ps.has_strategy()
