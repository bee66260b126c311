"""The older names, on every kind of strategy: `ps.compat.contrib`, of r1.9, where replicas were towers; what only the
`StrategyExtended` of `ps.compat.v1` has; and the optimizers of `ps.compat.v1.train`, with slots and the global step."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

import psclient as ps
from psclient.compat import v1
from psclient.compat.contrib import DistributionStrategy, Mirrored, PerDevice, TowerContext, get_tower_context
from psclient.compat.v1 import train
from tests.kit.references import START, trained
from tests.kit.strategies import by_replica, in_replicas, kind_of, kinds, merged, refused, replicas, variable

SIGNATURES = {
    DistributionStrategy: """
batch_reduce(method_string, value_destination_pairs)
broadcast(tensor, destinations=None)
call_for_each_tower(fn, *args, **kwargs)
colocate_vars_with(colocate_with_variable)
configure(session_config=None)
distribute_dataset(dataset_fn)
fetch(val, destination='/device:CPU:0', fn=)
group(value, name=None)
non_slot_devices(var_list)
reduce(method_string, value, destinations=None)
scope()
tower_local_var_scope(reduce_method)
unwrap(value)
update(var, fn, *args, **kwargs)
update_non_slot(colocate_with, fn, *args, **kwargs)""",
    v1.StrategyExtended: """
batch_reduce_to(reduce_op, value_destination_pairs, experimental_hints=None)
broadcast_to(tensor, destinations)
call_for_each_replica(fn, args=(), kwargs=None)
colocate_vars_with(colocate_with_variable)
experimental_make_numpy_dataset(numpy_input, session=None)
experimental_run_steps_on_iterator(fn, iterator, iterations=1, initial_loop_values=None)
non_slot_devices(var_list)
read_var(v)
reduce_to(reduce_op, value, destinations, experimental_hints=None)
update(var, fn, args=(), kwargs=None, group=True)
update_non_slot(colocate_with, fn, args=(), kwargs=None, group=True)
value_container(value)
variable_created_in_scope(v)""",
    train.Optimizer: "apply_gradients(grads_and_vars, global_step=None, name=None)",
    train: """
GradientDescentOptimizer(learning_rate, use_locking=False, name='GradientDescent')
MomentumOptimizer(learning_rate, momentum, use_locking=False, name='Momentum', use_nesterov=False)
AdamOptimizer(learning_rate=0.001, beta1=0.9, beta2=0.999, epsilon=1e-08, use_locking=False, name='Adam')
AdagradOptimizer(learning_rate, initial_accumulator_value=0.1, use_locking=False, name='Adagrad')
RMSPropOptimizer(learning_rate, decay=0.9, momentum=0.0, epsilon=1e-10, use_locking=False, centered=False, \
name='RMSProp')
AdadeltaOptimizer(learning_rate=0.001, rho=0.95, epsilon=1e-08, use_locking=False, name='Adadelta')
FtrlOptimizer(learning_rate, learning_rate_power=-0.5, initial_accumulator_value=0.1, \
l1_regularization_strength=0.0, l2_regularization_strength=0.0, use_locking=False, name='Ftrl', accum_name=None, \
linear_name=None, l2_shrinkage_regularization_strength=0.0, beta=None)
ProximalGradientDescentOptimizer(learning_rate, l1_regularization_strength=0.0, l2_regularization_strength=0.0, \
use_locking=False, name='ProximalGradientDescent')
ProximalAdagradOptimizer(learning_rate, initial_accumulator_value=0.1, l1_regularization_strength=0.0, \
l2_regularization_strength=0.0, use_locking=False, name='ProximalAdagrad')""",
}
"""As the documents have them, and TensorFlow 2.21.0 its optimizers, but for the last argument of Adam's, which is of
the graph. A function that is a default is not shown."""


def shown(parameter):
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    default = "" if callable(parameter.default) else repr(parameter.default)
    return stars + parameter.name if parameter.default is parameter.empty else f"{parameter.name}={default}"


@pytest.mark.parametrize("owner", SIGNATURES, ids=lambda owner: owner.__name__.rpartition(".")[2])
def test_names_and_parameters_are_those_of_the_documents(owner):
    """In their order, with their defaults; the docstring of a method of `StrategyExtended` says where it may be called.
    A name that is given is the optimizer's, and locking is taken."""
    for line in SIGNATURES[owner].strip().splitlines():
        name = line.partition("(")[0]
        found = getattr(owner, name)
        parameters = [p for p in inspect.signature(found).parameters.values() if p.name != "self"]
        assert f"{name}({', '.join(map(shown, parameters))})" == line
        assert owner is not v1.StrategyExtended or "context" in found.__doc__ or "In the scope" in found.__doc__, name
        if owner is train:
            rest = {"momentum": 0.5} if name == "MomentumOptimizer" else {}
            assert found(learning_rate=0.1, **rest).get_name() == name.removesuffix("Optimizer")
            assert found(learning_rate=0.1, use_locking=True, name="mine", **rest).get_name() == "mine"


@pytest.fixture(scope="module")
def distribution(strategy):
    return DistributionStrategy(strategy)


def towers(distribution, fn):
    """What a function of the tower's number returns, merged."""
    return distribution.call_for_each_tower(lambda: fn(get_tower_context().tower_id))


def lists(values):
    return [np.asarray(value).tolist() for value in values]


def test_what_a_distribution_is(distribution, strategy):
    """How many towers, and on which devices, both kinds as lists; `worker_device_index` gives each tower its device."""
    n, seen = replicas(strategy), {}
    assert (distribution.num_towers, distribution.is_single_tower) == (n, n == 1)
    assert distribution.worker_devices == list(strategy.extended.worker_devices)
    assert distribution.parameter_devices == list(strategy.extended.parameter_devices)
    assert distribution.configure() is distribution.configure(session_config=None) is None

    def fn(device_id):
        seen[device_id] = get_tower_context().device

    with distribution.scope():
        distribution.call_for_each_tower(fn, distribution.worker_device_index)
    assert sorted(seen) == list(range(n))
    for number, device in seen.items():
        assert distribution.worker_devices[number].lower().endswith(device)
    assert n > 1 or distribution.worker_device_index == 0


def test_towers_meet(distribution, strategy):
    """The document's example: a merge function sums over the towers, and each goes on with the sum. Arguments go by
    position and name, and `run_concurrently` is for the call."""

    def merge_fn(distribution, three_plus_tower_id):
        return sum(distribution.unwrap(three_plus_tower_id))

    def fn(three):
        tower_ctx = get_tower_context()
        v = three + tower_ctx.tower_id
        s = tower_ctx.merge_call(merge_fn, v)
        return s + v

    n = replicas(strategy)
    with distribution.scope():
        merged_results = distribution.call_for_each_tower(fn, 3)
    total = 3 * n + n * (n - 1) // 2
    assert distribution.unwrap(merged_results) == [total + 3 + tower for tower in range(n)]

    def named(a, b, *, c):
        return get_tower_context().merge_call(lambda d, x, *, y: (type(d).__name__, x, y), (a, b), y=c)

    found = distribution.call_for_each_tower(named, "a", "b", c="c", run_concurrently=False)
    assert found == ("DistributionStrategy", ("a", "b"), "c")


def test_the_tower_context(distribution, strategy):
    """In a tower it says which; in cross-tower and update context there is none; outside there is the default one.
    Results are merged: the same object stays, different ones are wrapped, the members of a variable are the
    variable."""
    n, shared = replicas(strategy), object()

    def fn(own):
        tower = get_tower_context()
        assert isinstance(tower, TowerContext)
        assert tower.distribution_strategy.strategy is strategy
        return tower.tower_id, tower.num_towers, tower.is_single_tower, shared, np.ones(1), own

    with distribution.scope():
        v = ps.Variable(1.0)
        assert kind_of(strategy) == "default" or get_tower_context() is None
        assert DistributionStrategy().strategy is strategy
    ids, count, single, same, apart, whole = distribution.call_for_each_tower(fn, v)
    assert (distribution.unwrap(ids), count, single) == (list(range(n)), n, n == 1)
    assert (same is shared, whole is v, len(distribution.unwrap(apart))) == (True, True, n)
    assert distribution.unwrap("alone") == ["alone"]
    assert len(distribution.unwrap(v)) == (n if kind_of(strategy) == "mirrored" else 1)
    seen = []
    distribution.update(v, lambda v: seen.append(get_tower_context()))
    assert set(seen) == {None}
    outside = get_tower_context()
    assert (outside.is_single_tower, outside.tower_id, outside.num_towers) == (True, 0, 1)
    assert outside.merge_call(lambda d, x: (d.num_towers, x), 5) == (1, 5)
    assert DistributionStrategy().strategy is ps.get_strategy()


def test_values_are_reduced_and_broadcast(distribution, strategy):
    """By a method string; to where the values are by default, to a device, a list of them, or a variable."""
    n = replicas(strategy)
    x = towers(distribution, lambda tower: np.full(2, tower + 1.0))
    total, mean = [n * (n + 1) / 2] * 2, [(n + 1) / 2] * 2
    assert lists(distribution.unwrap(distribution.reduce("sum", x))) == [total] * n
    assert lists(distribution.unwrap(distribution.reduce("mean", x))) == [mean] * n
    assert np.asarray(distribution.reduce("sum", x, "/device:CPU:0")).tolist() == total
    assert lists(distribution.unwrap(distribution.reduce("sum", x, distribution.worker_devices))) == [total] * n
    assert lists(distribution.unwrap(distribution.broadcast(np.ones(2)))) == [[1.0, 1.0]] * n
    assert np.asarray(distribution.broadcast(3.0, "cpu:0")).tolist() == 3.0
    assert lists(distribution.unwrap(distribution.broadcast(3.0, distribution.worker_devices))) == [3.0] * n
    assert distribution.call_for_each_tower(float, distribution.broadcast(7.0)) == 7.0
    with distribution.scope():
        v = ps.Variable(np.zeros(2))
        first, second, third = distribution.batch_reduce("mean", [(x, v), (x, None), (x, "cpu:0")])
        distribution.update(v, lambda v, x: v.assign(x), first)
        assert lists([v, third, *distribution.unwrap(second)]) == [mean] * (2 + n)
    for wrong in ("SUM", "max", "", None, ps.ReduceOp.SUM):
        for attempt in (
            lambda wrong: distribution.reduce(wrong, 1.0),
            lambda wrong: distribution.batch_reduce(wrong, [(1.0, None)]),
            lambda wrong: distribution.tower_local_var_scope(wrong),
        ):
            with pytest.raises(ValueError, match="use 'sum' or 'mean'"):
                attempt(wrong)


def test_fetch_copies_a_value_to_a_device(distribution, strategy):
    """Mirrored values, variables, pending and plain ones; a function is applied before. Of a per-device value that of
    the destination, if a tower is there; else it has to be reduced. `group` waits for pending values, per-tower values
    and nests, and returns nothing."""
    n = replicas(strategy)
    with distribution.scope():
        v = ps.Variable(np.array([1.0, 2.0]))
        assert distribution.fetch(v).tolist() == [1.0, 2.0]
        assert distribution.fetch(v, fn=lambda x: x * 10).tolist() == [10.0, 20.0]
        pending = distribution.update(v, lambda v: v.assign_add(1.0) + 1.0)
        assert distribution.fetch(pending).tolist() == [3.0, 4.0]
        returned = distribution.update(v, lambda v: v.assign_add(1.0) * 2.0)
        assert distribution.group(returned) is None
        assert distribution.group({"a": [v, towers(distribution, float), None]}, name="train") is None
    assert np.asarray(returned).tolist() == [6.0, 8.0]
    assert distribution.fetch(distribution.reduce("sum", towers(distribution, float)), "/cpu:0") == n * (n - 1) / 2
    assert distribution.fetch(distribution.broadcast(np.ones(2)), "/device:CPU:0").tolist() == [1.0, 1.0]
    assert distribution.fetch(3.0) == 3.0
    refused(ValueError, "combine them with reduce", lambda: distribution.fetch(ps.PerReplica([1.0] * (n + 1))))
    refused(ps.errors.ConfigError, "is not a device", lambda: distribution.fetch(v, "nowhere"))
    value = towers(distribution, lambda tower: np.float32(tower + 1))
    for tower, device in enumerate(distribution.worker_devices):
        for name in (device, f"cpu:{tower}", f"/device:CPU:{tower}") if n > 1 else ["cpu:0"]:
            assert distribution.fetch(value, name, fn=lambda x: x * 10) == 10 * (tower + 1)
    if n > 1:
        with pytest.raises(ValueError, match="none of which is on cpu:9; combine them with reduce"):
            distribution.fetch(value, "cpu:9")


def test_a_dataset_is_distributed(distribution, strategy):
    """The document's example: an iterator whose items are for `call_for_each_tower`; a dataset itself is taken too."""
    n, calls = replicas(strategy), []

    def dataset_fn():
        calls.append(1)
        return [np.array([[1.0]])] * (2 * n)

    with distribution.scope():
        distributed_dataset = distribution.distribute_dataset(dataset_fn)
        iterator = distributed_dataset.make_one_shot_iterator()
        for _ in range(2):
            results = distribution.call_for_each_tower(
                lambda x: x.sum() + get_tower_context().tower_id, iterator.get_next()
            )
            assert lists(distribution.unwrap(results)) == [1.0 + tower for tower in range(n)]
        refused(StopIteration, "", iterator.get_next)
    again = distributed_dataset.make_initializable_iterator()
    assert again.initializer is None
    assert [len(distribution.unwrap(x)) for x in again] == [n] * 2
    assert [len(distribution.unwrap(x)) for x in distributed_dataset] == [n] * 2
    assert calls == [1]
    data = distribution.distribute_dataset(ps.ArrayDataset(np.arange(4 * n)).batch(2))
    found = [[x.tolist() for x in distribution.unwrap(batch)] for batch in data]
    assert found == [[[2 * i, 2 * i + 1] for i in range(k * n, k * n + n)] for k in range(2)]
    refused(TypeError, "is not a dataset", lambda: distribution.distribute_dataset(np.arange(4)))


def test_what_has_which_locality(distribution, strategy):
    """The document's rules: of towers (T), mirrored (M), of a variable (V), of the non-slot devices (N)."""
    n = replicas(strategy)
    total = n * (n + 1) / 2
    of_towers = towers(distribution, lambda tower: np.full(2, tower + 1.0))
    with distribution.scope():
        v, w = ps.Variable(np.zeros(2)), ps.Variable(np.full(2, 10.0))
        mirrored = distribution.broadcast(np.ones(2))
        beside = [distribution.broadcast(np.ones(2), v), distribution.reduce("sum", of_towers, v)]
        beside += distribution.batch_reduce("mean", [(of_towers, v)])
        assert distribution.update(v, lambda v, a, b, c, m: v.assign(a + b + c + m), *beside, m=mirrored) is v
        where = distribution.non_slot_devices([v, w])
        assert set(where) == {*v.devices, *w.devices}
        with distribution.colocate_vars_with(where):
            count = ps.Variable(0.0)
        step = distribution.reduce("sum", towers(distribution, lambda tower: np.float32(tower + 1)), where)
        assert distribution.update_non_slot(where, lambda x, by: count.assign_add(x + by), step, by=2) is count
    after = total + (n + 1) / 2 + 2
    assert (v.numpy().tolist(), float(count)) == ([after] * 2, total + 2)
    found = distribution.call_for_each_tower(lambda x, m, w: x + m + w.read_value(), of_towers, mirrored, w)
    assert lists(distribution.unwrap(found)) == [[tower + 12.0] * 2 for tower in range(n)]
    for attempt in (lambda: distribution.reduce("mean", 1.0), lambda: distribution.update(v, print)):
        with pytest.raises(RuntimeError, match="needs cross-replica context but was called in replica context"):
            distribution.call_for_each_tower(attempt)


def test_values_are_maps_from_device(distribution, strategy):
    """What towers return, datasets give, and reductions mirror; merged arguments too. As an argument, in the scope, its
    order is the towers', whatever it was given in; each tower gets its device's value."""
    n, devices = replicas(strategy), distribution.worker_devices
    if n == 1:
        pytest.skip("a single tower has bare values")
    item = next(iter(distribution.distribute_dataset([np.ones(2)] * n)))
    found = [towers(distribution, float), item, distribution.worker_device_index]
    found += [towers(distribution, lambda tower: [float(tower)])[0]]

    def merge(distribution, x):
        found.append(x)

    distribution.call_for_each_tower(lambda x: get_tower_context().merge_call(merge, x), found[0])
    for value in found:
        assert isinstance(value, PerDevice)
        assert value.devices == devices
        assert [value.get(device) is own for device, own in zip(devices, value.values, strict=True)] == [True] * n
        assert (value.on_device("cpu:1"), value.on_device("/device:GPU:3")) == (True, False)
    total = distribution.reduce("sum", found[0])
    for mirrored in (total, distribution.batch_reduce("sum", [(found[0], None)])[0], distribution.broadcast(1.0)):
        assert isinstance(mirrored, Mirrored)
        assert mirrored.devices == devices
        assert float(mirrored.get()) == float(mirrored.get("cpu:1")) == float(mirrored)
    assert distribution.broadcast(1.0, devices[:2]).devices == devices[:2]
    own = distribution.call_for_each_tower(lambda: found[0].get())
    assert lists(distribution.unwrap(own)) == [float(tower) for tower in range(n)]
    with distribution.scope():
        value = PerDevice({f"/device:CPU:{tower}": np.float32(tower) for tower in reversed(range(n))})
        mirrored = Mirrored({device: np.float32(7.0) for device in reversed(devices)})
        told = distribution.call_for_each_tower(lambda x, m: np.float32(x + m), value, mirrored)
        assert lists(distribution.unwrap(told)) == [7.0 + tower for tower in range(n)]
        assert distribution.fetch(distribution.reduce("sum", value, devices[0])) == n * (n - 1) / 2
        assert distribution.fetch(mirrored) == 7.0


def test_what_is_no_map_from_device_is_told():
    """No device, one twice, none at all, and one that is not in it."""
    refused(ps.errors.ConfigError, "'x' is not a device", lambda: PerDevice({"x": 1}))
    for index in ({}, {"cpu:0": 1, "/device:CPU:0": 2}):
        with pytest.raises(ValueError, match="needs different devices"):
            Mirrored(index)
    value = PerDevice({"cpu:3": 1, "cpu:5": 2})
    refused(ValueError, "device cpu:1 has no value; use one of cpu:3, cpu:5", lambda: value.get("cpu:1"))
    with ps.MirroredStrategy(["cpu:3", "cpu:5"]) as other, other.scope():
        refused(ValueError, "values may differ by device; pass a device", value.get)
        assert Mirrored({"cpu:3": 1, "cpu:5": 1}).get() == 1


@kinds("mirrored-2", "servers-2x2")
@pytest.mark.parametrize("method", ["sum", "mean"])
def test_tower_local_variables(distribution, strategy, method):
    """Each tower has its own, from the first tower's value; they are not trained, and `fetch` combines them."""
    n = replicas(strategy)

    def create():
        with distribution.tower_local_var_scope(method):
            number = get_tower_context().tower_id  # Of the towers' expressions that of the first counts.
            return ps.Variable(lambda: np.float32(5.0 + number))

    with distribution.scope(), distribution.tower_local_var_scope(method):
        v = ps.Variable(5.0)
    for local in (v, distribution.call_for_each_tower(create)):
        assert not local.trainable
        assert len(distribution.unwrap(local)) == n
        distribution.call_for_each_tower(lambda own: own.assign_add(float(get_tower_context().tower_id)), local)
        assert lists(distribution.unwrap(local)) == [5.0 + tower for tower in range(n)]
        total = 5.0 * n + n * (n - 1) / 2
        assert distribution.fetch(local) == (total if method == "sum" else total / n)
    with distribution.scope():
        assert ps.Variable(1.0).trainable


def test_distributed_apply_is_a_step(distribution, strategy):
    """In cross-tower context of one strategy, by all that towers have returned; a global step counts."""
    n = replicas(strategy)
    with distribution.scope():
        v, step = ps.Variable(1.0), ps.Variable(0, name="global_step", trainable=False)
        optimizer = ps.optimizers.SGD(0.5)
        for _ in range(2):
            grads = towers(distribution, lambda tower: np.float32(tower + 1))
            optimizer._distributed_apply(distribution, [(grads, v)], global_step=step, name="train")
        optimizer._distributed_apply(strategy, iter([(grads, v)]))
    expected = (1.0 - 3 * 0.5 * n * (n + 1) / 2, 2, 3)
    assert (float(v), int(step), int(optimizer.iterations)) == expected
    if kind_of(strategy) != "default":
        with pytest.raises(RuntimeError, match="_distributed_apply needs cross-replica context"):
            distribution.call_for_each_tower(lambda: optimizer._distributed_apply(distribution, [(np.float32(1), v)]))
    with ps.MirroredStrategy(["cpu:0"]) as other:
        with other.scope():
            foreign = ps.Variable(0, trainable=False)
        for place, step_ in ((other, None), (distribution, foreign)):
            with pytest.raises(ValueError, match="create it in this strategy's scope"):
                optimizer._distributed_apply(place, [(grads, v)], step_)
    assert (float(v), int(step), int(optimizer.iterations)) == expected


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
        assert again._colocation == strategy.extended._colocation
    if kind_of(strategy) == "embedded":
        assert [w.devices for w in made] == [(last,)] * 2
    if kind_of(strategy) != "default":
        assert [w.name for w in made] == [f"{v.name}_1", f"{v.name}_2"]
    again.update(v, lambda v: v.assign_add(1.0))
    again.call_for_each_replica(lambda: None)
    assert (v.numpy().tolist(), again.variable_created_in_scope(made[0])) == ([1.0] * 3, True)


def distributed(strategy, rows=12, batch=4):
    """An iterator over the numbers from 0, in global batches."""
    dataset = strategy.extended.experimental_make_numpy_dataset(np.arange(float(rows)), session=None).batch(batch)
    return iter(strategy.experimental_distribute_dataset(dataset))


def test_steps_run_on_the_iterator(strategy):
    """The function gets the context and the next batches, and the last step's outputs come back, reduced. The first
    step sees the initial values, what no step sets stays, and the caller's mapping is not touched. The end of the
    iterator is told after the steps that it had batches for."""
    run, seen, initial = strategy.extended.experimental_run_steps_on_iterator, [], {"loss": 0.5, "other": 1.0}

    def fn(ctx, inputs):
        losses = strategy.extended.call_for_each_replica(lambda x: x.sum(), args=(inputs,))
        seen.append(float(ctx.last_step_outputs.get("loss", -1)))
        ctx.set_last_step_output("loss", losses, ps.ReduceOp.SUM)
        ctx.set_last_step_output("kept", inputs)
        ctx.set_non_tensor_output("word", ["any", "thing"])

    iterator = distributed(strategy)
    steps = run(fn, iterator, iterations=2)
    assert isinstance(steps, v1.MultiStepContext)
    assert seen == [-1, 0 + 1 + 2 + 3]
    assert float(steps.last_step_outputs["loss"]) == 4 + 5 + 6 + 7
    rows = [float(x) for own in strategy.experimental_local_results(steps.last_step_outputs["kept"]) for x in own]
    assert rows == [4.0, 5.0, 6.0, 7.0]
    assert (steps.non_tensor_outputs, steps.run_op) == ({"word": ["any", "thing"]}, None)
    steps = run(fn, iterator, initial_loop_values=initial)
    assert (float(steps.last_step_outputs["loss"]), steps.last_step_outputs["other"], seen[2]) == (38.0, 1.0, 0.5)
    assert initial == {"loss": 0.5, "other": 1.0}
    iterator = distributed(strategy, rows=8)
    refused(StopIteration, "", lambda: run(fn, iterator, 5))
    assert len(seen) == 5
    assert not ps.has_strategy()


def test_outputs_are_set_in_replicas(strategy):
    """With a reduction, since replicas differ, or the error names the output; what is no array is kept for each."""
    n, run = replicas(strategy), strategy.extended.experimental_run_steps_on_iterator

    def step(ctx, x):
        replica = ps.get_replica_context().replica_id_in_sync_group
        ctx.set_last_step_output("total", x.sum(), "sum")
        ctx.set_last_step_output("mean", np.float64(replica), ps.ReduceOp.MEAN)
        ctx.set_last_step_output("same", 1.0, "sum")
        ctx.set_non_tensor_output("who", f"replica {replica}")

    def fn(ctx, inputs):
        strategy.extended.call_for_each_replica(step, args=(ctx, inputs))

    steps = run(fn, distributed(strategy), 3)
    outputs = {name: float(value) for name, value in steps.last_step_outputs.items()}
    assert outputs == {"total": 8.0 + 9 + 10 + 11, "mean": (n - 1) / 2, "same": n}
    each = tuple(f"replica {replica}" for replica in range(n))
    assert steps.non_tensor_outputs["who"] == (each[0] if kind_of(strategy) == "default" else each)

    def without(ctx, inputs):
        strategy.run(lambda: ctx.set_last_step_output("loss", 1.0))

    if kind_of(strategy) == "default":
        assert run(without, distributed(strategy)).last_step_outputs == {"loss": 1.0}
        return
    refused(ValueError, r"'loss'.*pass a reduce_op", lambda: run(without, distributed(strategy)))


# ---- ps.compat.v1.train ----

ONE = np.ones(3, "float32")


def test_a_new_rate_holds_for_gradients_of_before(strategy):
    """Momentum holds gradients and not steps, where Keras's formula has another result. There is no slot before the
    first step, nor one of another variable or by another name after it."""
    w, rate, n = variable(strategy), [1.0], replicas(strategy)
    optimizer = train.MomentumOptimizer(lambda: rate[0], 0.5)
    assert (optimizer.get_slot(w, "momentum"), optimizer.get_slot_names(), optimizer.variables()) == (None, [], [])
    for number in (1.0, 0.5):
        rate[0] = number
        strategy.run(lambda: optimizer.apply_gradients([(ONE, w)]))
    assert w.numpy().tolist() == [-(1.0 + 0.5 * 1.5) * n] * 3
    slot = optimizer.get_slot(w, "momentum")
    assert (optimizer.get_slot(variable(strategy), "momentum"), optimizer.get_slot(w, "m")) == (None, None)
    assert (any(slot is x for x in optimizer.variables()), slot.trainable, slot.shape) == (True, False, (3,))
    assert in_replicas(strategy, lambda _, own: optimizer.get_slot(own, "momentum") is slot, w) == (True,) * n


@kinds("mirrored-2", "servers-2x2", soak=["embedded-2"])
def test_a_checkpoint_goes_on(strategy, in_tmp_path):
    """With the slots and the count: the restored optimizer makes the steps that the saved one would make."""
    w, optimizer = variable(strategy, START), train.AdamOptimizer(0.125, 0.75, 0.9375)
    checkpoint = ps.train.Checkpoint(w=w, optimizer=optimizer)
    trained(strategy, optimizer, w, steps=3)
    saved = checkpoint.write(str(in_tmp_path / "at3") if kind_of(strategy) == "mirrored" else "v1-at3")
    after = trained(strategy, optimizer, w, steps=2)
    checkpoint.restore(saved).assert_existing_objects_matched()
    np.testing.assert_array_equal(trained(strategy, optimizer, w, steps=2), after)
    for slot in ("m", "v"):
        assert optimizer.get_slot(w, slot).numpy().any()


def test_the_global_step_counts_once(strategy):
    """In every context, whatever the number of replicas; together with the step, in one round."""
    w, step = variable(strategy), variable(strategy, np.int64(4), trainable=False)
    optimizer = train.GradientDescentOptimizer(0.5)
    in_replicas(strategy, lambda _: optimizer.apply_gradients([(ONE, w)], step))
    before = getattr(strategy, "round", 0)
    in_replicas(strategy, lambda _, v, s: optimizer.apply_gradients([(ONE, v)], global_step=s, name="train"), w, step)
    assert getattr(strategy, "round", 0) == before + (kind_of(strategy) == "embedded")
    gradients = by_replica(strategy, lambda replica: np.full(3, replica, "float32"))
    optimizer.apply_gradients([(gradients, w)], step)
    with strategy.scope():
        optimizer.apply_gradients([(gradients, w)], step)
    merged(strategy, lambda s, g: optimizer.apply_gradients([(g, w)], step), gradients)
    n = replicas(strategy)
    assert int(step) == 4 + 5
    assert w.numpy().tolist() == [-0.5 * (2 * n + 3 * n * (n - 1) / 2)] * 3


def test_a_step_that_fails_is_not_counted(strategy):
    """Nor does a step train anything that is no variable of one integer, or another strategy's. Pairs without a
    gradient are left out, unless there is no other: then the error names the variables."""
    w, idle, step = variable(strategy), variable(strategy), variable(strategy, np.int64(0), trainable=False)
    optimizer = train.GradientDescentOptimizer(0.5)
    with ps.MirroredStrategy(["cpu:0"]) as other:
        whole = "global_step .*{}.*pass a variable with one integer"
        vector = variable(strategy, np.zeros(2, "int64"), trainable=False)
        for pairs, given, error, says in (
            ([(np.ones(2, "float32"), w)], step, ValueError, r"has shape \(2,\)"),
            ([(ONE, w)], variable(strategy, np.float32(0)), ValueError, whole.format("float32")),
            ([(ONE, w)], vector, ValueError, whole.format(r"shape \(2,\)")),
            ([(ONE, w)], 0, TypeError, "global_step is a int; pass an integer variable, or None"),
            ([(ONE, w)], variable(other, np.int64(0), trainable=False), ValueError, "strategy"),
            ([(None, idle)], step, ValueError, f"none of the variables.*{idle.name}"),
            ([], step, ValueError, "none of the variables"),
            ([(np.ones(3), np.ones(3))], step, TypeError, r"pass \(gradient, variable\) pairs"),
        ):
            with pytest.raises(error, match=says):
                strategy.run(optimizer.apply_gradients, (pairs, given))
    assert (int(step), w.numpy().tolist()) == (0, [0.0] * 3)
    for given in (None, step):
        strategy.run(lambda given=given: optimizer.apply_gradients([(None, idle), (ONE, w)], given))
    assert (w.numpy().tolist(), idle.numpy().tolist()) == ([-1.0 * replicas(strategy)] * 3, [0.0] * 3)


@pytest.mark.parametrize("method", ["minimize", "compute_gradients"])
def test_there_is_no_differentiation(method):
    """What would need it says so, and what to do."""
    optimizer = train.GradientDescentOptimizer(0.5)
    said = f"{method} needs automatic differentiation.*pass them to apply_gradients"
    refused(NotImplementedError, said, lambda: getattr(optimizer, method)(lambda: 0.0, var_list=[]))
