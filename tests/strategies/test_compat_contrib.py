"""`ps.compat.contrib` on every kind of strategy: the names of r1.9, where replicas were towers."""

from __future__ import annotations

import inspect
import threading

import numpy as np
import pytest

import psclient as ps
from psclient.compat.contrib import DistributionStrategy, Mirrored, PerDevice, TowerContext, get_tower_context
from tests.kit.strategies import kind_of, replicas

SIGNATURES = {
    "batch_reduce": "method_string, value_destination_pairs",
    "broadcast": "tensor, destinations=None",
    "call_for_each_tower": "fn, *args, **kwargs",
    "colocate_vars_with": "colocate_with_variable",
    "configure": "session_config=None",
    "distribute_dataset": "dataset_fn",
    "fetch": "val, destination='/device:CPU:0', fn=",
    "group": "value, name=None",
    "non_slot_devices": "var_list",
    "reduce": "method_string, value, destinations=None",
    "scope": "",
    "tower_local_var_scope": "reduce_method",
    "unwrap": "value",
    "update": "var, fn, *args, **kwargs",
    "update_non_slot": "colocate_with, fn, *args, **kwargs",
}
"""The document's methods, with their parameters."""


@pytest.fixture(scope="module")
def distribution(strategy):
    return DistributionStrategy(strategy)


def towers(distribution, fn):
    """What a function of the tower's number returns, merged."""
    return distribution.call_for_each_tower(lambda: fn(get_tower_context().tower_id))


def lists(values):
    return [np.asarray(value).tolist() for value in values]


def shown(parameter):
    """A parameter as the document writes it; of a function only that it is a default."""
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        return ("*" if parameter.kind is parameter.VAR_POSITIONAL else "**") + parameter.name
    default = "" if callable(parameter.default) else repr(parameter.default)
    return parameter.name if parameter.default is parameter.empty else f"{parameter.name}={default}"


def test_every_method_of_the_document_is_there():
    """With its parameters."""
    for name, expected in SIGNATURES.items():
        parameters = list(inspect.signature(getattr(DistributionStrategy, name)).parameters.values())[1:]
        assert ", ".join(map(shown, parameters)) == expected


def test_what_a_distribution_is(distribution, strategy):
    """How many towers, and on which devices; both kinds as lists."""
    n = replicas(strategy)
    assert (distribution.num_towers, distribution.is_single_tower) == (n, n == 1)
    assert distribution.worker_devices == list(strategy.extended.worker_devices)
    assert distribution.parameter_devices == list(strategy.extended.parameter_devices)
    assert distribution.configure() is None
    assert distribution.configure(session_config=None) is None


def test_worker_device_index_gives_each_tower_its_device(distribution, strategy):
    """The document's example; with a single tower the integer 0."""
    seen = {}

    def fn(device_id):
        seen[device_id] = get_tower_context().device

    with distribution.scope():
        distribution.call_for_each_tower(fn, distribution.worker_device_index)
    assert sorted(seen) == list(range(replicas(strategy)))
    for number, device in seen.items():
        assert distribution.worker_devices[number].lower().endswith(device)
    assert replicas(strategy) > 1 or distribution.worker_device_index == 0


# ---- Towers ----


def test_towers_meet(distribution, strategy):
    """The document's example: a merge function sums over the towers, and each goes on with the sum."""

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


def test_arguments_go_by_position_and_name(distribution):
    """`run_concurrently` is for the call, and not for the function; so in merge_call, but for that."""

    def fn(a, b, *, c):
        return get_tower_context().merge_call(lambda d, x, *, y: (type(d).__name__, x, y), (a, b), y=c)

    found = distribution.call_for_each_tower(fn, "a", "b", c="c", run_concurrently=False)
    assert found == ("DistributionStrategy", ("a", "b"), "c")


def test_merging_as_the_document_says(distribution, strategy):
    """The same object stays, different ones are wrapped, the members of a variable are the variable."""
    shared = object()
    with distribution.scope():
        v = ps.Variable(1.0)
    x, a, whole = distribution.call_for_each_tower(lambda own: (shared, np.ones(1), own), v)
    assert x is shared
    assert len(distribution.unwrap(a)) == replicas(strategy)
    assert whole is v
    assert distribution.unwrap("alone") == ["alone"]
    assert len(distribution.unwrap(v)) == (replicas(strategy) if kind_of(strategy) == "mirrored" else 1)


def test_the_tower_context(distribution, strategy):
    """In a tower it says which; in cross-tower and update context there is none; outside there is the default one."""
    n = replicas(strategy)

    def fn():
        tower = get_tower_context()
        assert isinstance(tower, TowerContext)
        assert tower.distribution_strategy.strategy is strategy
        return [tower.tower_id, tower.num_towers, tower.is_single_tower]

    found = [distribution.unwrap(x) for x in distribution.call_for_each_tower(fn)]
    assert found[0] == list(range(n))
    with distribution.scope():
        v = ps.Variable(1.0)
        if kind_of(strategy) != "default":
            assert get_tower_context() is None
    seen = []
    distribution.update(v, lambda v: seen.append(get_tower_context()))
    assert set(seen) == {None}
    assert get_tower_context().is_single_tower
    assert (get_tower_context().tower_id, get_tower_context().num_towers) == (0, 1)
    assert get_tower_context().merge_call(lambda d, x: (d.num_towers, x), 5) == (1, 5)


def test_the_default_distribution_is_the_current_one(strategy):
    """Library code asks for it, in a scope and outside of every one."""
    assert DistributionStrategy().strategy is ps.get_strategy()
    with strategy.scope():
        assert DistributionStrategy().strategy is strategy
    assert DistributionStrategy().call_for_each_tower(lambda x: x + 1, 2) in (3, 3.0)


def test_a_scope_is_of_its_thread(distribution, strategy):
    """In it variables are the strategy's, and the context is cross-tower; other threads stay in the single tower."""
    seen = []

    def look():
        tower = get_tower_context()
        seen.append((DistributionStrategy().strategy, tower and tower.is_single_tower))

    with distribution.scope():
        look()
        v = ps.Variable(1.0)
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    look()
    alone = (ps.get_strategy(), True)
    assert seen == [(strategy, True if kind_of(strategy) == "default" else None), alone, alone]
    assert strategy.extended.variable_created_in_scope(v)


def test_group_waits_for_what_it_is_given(distribution, strategy):
    """Pending values of updates, per-tower values, nests; it returns nothing."""
    with distribution.scope():
        v = ps.Variable(np.zeros(3))
        returned = distribution.update(v, lambda v: v.assign_add(1.0) * 2.0)
        assert distribution.group(returned) is None
        assert distribution.group({"a": [v, towers(distribution, float), None]}, name="train") is None
    assert np.asarray(returned).tolist() == [2.0] * 3


# ---- Values ----


def test_reduce_takes_a_method_string(distribution, strategy):
    """To where the values are by default; to a device, a list of them, or a variable."""
    n = replicas(strategy)
    x = towers(distribution, lambda tower: np.full(2, tower + 1.0))
    total = n * (n + 1) / 2
    assert lists(distribution.unwrap(distribution.reduce("sum", x))) == [[total] * 2] * n
    assert lists(distribution.unwrap(distribution.reduce("mean", x))) == [[total / n] * 2] * n
    assert np.asarray(distribution.reduce("sum", x, "/device:CPU:0")).tolist() == [total] * 2
    assert len(distribution.unwrap(distribution.reduce("sum", x, distribution.worker_devices))) == n
    with distribution.scope():
        v = ps.Variable(np.zeros(2))
        distribution.update(v, lambda v, x: v.assign_add(x), distribution.reduce("sum", x, destinations=v))
    assert v.numpy().tolist() == [total] * 2


def test_batch_reduce_is_several_at_once(distribution, strategy):
    """Pairs of values and destinations, None for where the value is."""
    n = replicas(strategy)
    x = towers(distribution, lambda tower: np.full(2, tower + 1.0))
    with distribution.scope():
        v = ps.Variable(np.zeros(2))
        first, second, third = distribution.batch_reduce("mean", [(x, v), (x, None), (x, "cpu:0")])
        distribution.update(v, lambda v, x: v.assign(x), first)
    expected = [(n + 1) / 2] * 2
    assert lists([v, third]) == [expected] * 2
    assert lists(distribution.unwrap(second)) == [expected] * n


def test_a_method_is_sum_or_mean(distribution):
    """The error says so."""
    for wrong in ("SUM", "max", "", None, ps.ReduceOp.SUM):
        for attempt in (
            lambda wrong: distribution.reduce(wrong, 1.0),
            lambda wrong: distribution.batch_reduce(wrong, [(1.0, None)]),
            lambda wrong: distribution.tower_local_var_scope(wrong),
        ):
            with pytest.raises(ValueError, match="write 'sum' or 'mean'"):
                attempt(wrong)


def test_broadcast_goes_to_all_towers(distribution, strategy):
    """By default; else to a device, devices, or where a variable is."""
    n = replicas(strategy)
    assert lists(distribution.unwrap(distribution.broadcast(np.ones(2)))) == [[1.0, 1.0]] * n
    assert np.asarray(distribution.broadcast(3.0, "cpu:0")).tolist() == 3.0
    assert lists(distribution.unwrap(distribution.broadcast(3.0, distribution.worker_devices))) == [3.0] * n
    with distribution.scope():
        v = ps.Variable(np.zeros(2))
        distribution.update(v, lambda v, x: v.assign(x), distribution.broadcast(np.full(2, 4.0), v))
    assert v.numpy().tolist() == [4.0] * 2
    assert distribution.call_for_each_tower(float, distribution.broadcast(7.0)) == 7.0


def test_fetch_copies_a_value_to_a_device(distribution, strategy):
    """Mirrored values, variables, pending and plain ones; a function is applied before."""
    n = replicas(strategy)
    with distribution.scope():
        v = ps.Variable(np.array([1.0, 2.0]))
        assert distribution.fetch(v).tolist() == [1.0, 2.0]
        assert distribution.fetch(v, fn=lambda x: x * 10).tolist() == [10.0, 20.0]
        pending = distribution.update(v, lambda v: v.assign_add(1.0) + 1.0)
        assert distribution.fetch(pending).tolist() == [3.0, 4.0]
    assert distribution.fetch(distribution.reduce("sum", towers(distribution, float)), "/cpu:0") == n * (n - 1) / 2
    assert distribution.fetch(distribution.broadcast(np.ones(2)), "/device:CPU:0").tolist() == [1.0, 1.0]
    assert distribution.fetch(3.0) == 3.0
    with pytest.raises(ValueError, match="combine them with reduce first"):
        distribution.fetch(ps.PerReplica([1.0] * (n + 1)))
    with pytest.raises(ps.errors.ConfigError, match="is no device"):
        distribution.fetch(v, "nowhere")


def test_a_dataset_is_distributed(distribution, strategy):
    """The document's example: an iterator whose items are for `call_for_each_tower`."""
    calls = []

    def dataset_fn():
        calls.append(1)
        return [np.array([[1.0]])] * (2 * replicas(strategy))

    def tower_fn(x):
        return x.sum() + get_tower_context().tower_id

    n = replicas(strategy)
    with distribution.scope():
        distributed_dataset = distribution.distribute_dataset(dataset_fn)
        iterator = distributed_dataset.make_one_shot_iterator()
        for _ in range(2):
            results = distribution.call_for_each_tower(tower_fn, iterator.get_next())
            assert lists(distribution.unwrap(results)) == [1.0 + tower for tower in range(n)]
        with pytest.raises(StopIteration):
            iterator.get_next()
    again = distributed_dataset.make_initializable_iterator()
    assert again.initializer is None
    assert [len(distribution.unwrap(x)) for x in again] == [n] * 2
    assert [len(distribution.unwrap(x)) for x in distributed_dataset] == [n] * 2
    assert calls == [1]


def test_towers_all_reduce_on_their_way(distribution, strategy):
    """In a merge call, to no destination: each tower goes on with its own copy of the result."""
    n, seen = replicas(strategy), {}

    def fn():
        tower = get_tower_context()
        own = np.float32(tower.tower_id + 1)
        total = tower.merge_call(lambda d, x: d.reduce("sum", x), own)
        mean, again = tower.merge_call(lambda d, x: d.batch_reduce("mean", [(x, None), (x, None)]), own)
        seen[tower.tower_id] = [float(x) for x in (total, mean, again)]

    distribution.call_for_each_tower(fn)
    assert seen == {tower: [n * (n + 1) / 2, (n + 1) / 2, (n + 1) / 2] for tower in range(n)}


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
        distribution.update(v, lambda v, x: v.assign_add(x), distribution.update(v, lambda v: v * 2.0))
        where = distribution.non_slot_devices([v, w])
        with distribution.colocate_vars_with(where):
            count = ps.Variable(0.0)
        step = distribution.reduce("sum", towers(distribution, lambda tower: np.float32(tower + 1)), where)
        assert distribution.update_non_slot(where, lambda x: count.assign_add(x), step) is count
    after = 3 * (total + (n + 1) / 2 + 2)
    assert (v.numpy().tolist(), float(count)) == ([after] * 2, total)
    of_v = distribution.reduce("sum", of_towers, v)
    assert [distribution.fetch(x).tolist() for x in (of_v, mirrored, v)] == [[total] * 2, [1.0] * 2, [after] * 2]

    def in_tower(x, m, w):
        with distribution.colocate_vars_with(w):
            made = ps.Variable(0.0)
        return x + m + w.read_value(), made

    found, made = distribution.call_for_each_tower(in_tower, of_towers, mirrored, w)
    assert lists(distribution.unwrap(found)) == [[tower + 12.0] * 2 for tower in range(n)]
    assert made.devices == w.devices
    if n > 1:
        for args, keys in (((of_towers,), {}), ((), {"x": of_towers})):
            with pytest.raises(ValueError, match="no per-replica values; reduce them first"):
                distribution.update(v, lambda v, x: v.assign(x), *args, **keys)
    for attempt in (
        lambda: distribution.reduce("mean", 1.0),
        lambda: distribution.broadcast(1.0),
        lambda: distribution.update(v, lambda v: v.assign_add(1.0)),
        lambda: distribution.update_non_slot(where, lambda: count.assign_add(1.0)),
    ):
        with pytest.raises(RuntimeError, match="needs cross-replica context, and is called in replica context"):
            distribution.call_for_each_tower(lambda attempt=attempt: attempt())


# ---- Variables ----


@pytest.mark.parametrize("method", ["sum", "mean"])
def test_tower_local_variables(distribution, strategy, method):
    """Each tower has its own, from the first tower's value; they are not trained, and `fetch` combines them."""
    if kind_of(strategy) == "default":
        with distribution.scope(), distribution.tower_local_var_scope(method):
            alone = ps.Variable(1.0)
        assert distribution.fetch(alone) == 1.0
        return
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


def test_variables_are_colocated_and_updated(distribution):
    """The document's example: what is created beside a variable is there when it is updated."""
    with distribution.scope():
        var1 = ps.Variable(np.ones(2))
        with distribution.colocate_vars_with(var1):
            var2 = ps.Variable(np.full(2, 2.0))
            var3 = ps.Variable(np.full(2, 3.0))

        def fn(v1, v2, v3, extra):
            v1.assign(v2 * v3 + extra)

        distribution.update(var1, fn, var2, var3, extra=1.0)
        elsewhere = ps.Variable(np.ones(2))
        where = distribution.non_slot_devices([var1, elsewhere])
        assert set(where) == {*var1.devices, *elsewhere.devices}
        with distribution.colocate_vars_with(where):
            count = ps.Variable(np.int64(0))
        assert set(count.devices) == set(where)
        found = distribution.update_non_slot(where, lambda c, by: c.assign_add(by) * 10, count, by=2)
        assert np.asarray(found) == 20
    assert var1.numpy().tolist() == [7.0] * 2
    assert int(count) == 2


def test_the_standard_pattern(distribution, strategy):
    """Gradients in towers, `batch_reduce` to the variables, `update` of each."""
    n = replicas(strategy)
    with distribution.scope():
        variables = [ps.Variable(np.zeros(2)), ps.Variable(np.zeros(3))]

    def apply(distribution, gradients):
        reduced = distribution.batch_reduce("sum", list(zip(gradients, variables, strict=True)))
        for v, gradient in zip(variables, reduced, strict=True):
            distribution.update(v, lambda v, g, rate: v.assign_sub(rate * g), gradient, rate=0.5)

    def tower_fn():
        tower = get_tower_context()
        tower.merge_call(apply, [np.full(v.shape, tower.tower_id + 1.0) for v in variables])

    with distribution.scope():
        distribution.group(distribution.call_for_each_tower(tower_fn))
    expected = -0.5 * n * (n + 1) / 2
    assert lists(variables) == [[expected] * 2, [expected] * 3]


# ---- Values by device ----


def test_fetch_takes_a_towers_value_from_its_device(distribution, strategy):
    """Of a per-device value that of the destination, if a tower is there; else it has to be reduced."""
    n = replicas(strategy)
    value = towers(distribution, lambda tower: np.float32(tower + 1))
    if n == 1:
        assert distribution.fetch(value, "cpu:0", fn=lambda x: x * 10) == 10
        return
    for tower, device in enumerate(distribution.worker_devices):
        for name in (device, f"cpu:{tower}", f"/device:CPU:{tower}"):
            assert distribution.fetch(value, name, fn=lambda x: x * 10) == 10 * (tower + 1)
    with pytest.raises(ValueError, match="of which none is on cpu:9; combine them with reduce first"):
        distribution.fetch(value, "cpu:9")


def test_values_are_maps_from_device(distribution, strategy):
    """What towers return, datasets give, and reductions mirror; merged arguments too."""
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


def test_a_map_from_device_is_an_argument(distribution, strategy):
    """In the scope its order is the towers', whatever it was given in; each tower gets its device's value."""
    if kind_of(strategy) == "default":
        pytest.skip("the default strategy calls the function with what it was given")
    n, devices = replicas(strategy), distribution.worker_devices
    index = {f"/device:CPU:{tower}": np.float32(tower) for tower in reversed(range(n))}
    with distribution.scope():
        value = PerDevice(index)
        mirrored = Mirrored({device: np.float32(7.0) for device in reversed(devices)})
        told = distribution.call_for_each_tower(lambda x, m: np.float32(x + m), value, mirrored)
        assert lists(distribution.unwrap(told)) == [7.0 + tower for tower in range(n)]
        assert distribution.fetch(distribution.reduce("sum", value, devices[0])) == n * (n - 1) / 2
        assert distribution.fetch(mirrored) == 7.0


def test_what_is_no_map_from_device_is_told():
    """No device, one twice, none at all, and one that is not in it."""
    with pytest.raises(ps.errors.ConfigError, match="'x' is no device"):
        PerDevice({"x": 1})
    for index in ({}, {"cpu:0": 1, "/device:CPU:0": 2}):
        with pytest.raises(ValueError, match="needs devices that differ"):
            Mirrored(index)
    value = PerDevice({"cpu:3": 1, "cpu:5": 2})
    with pytest.raises(ValueError, match="device cpu:1 has no value here; these have one: cpu:3, cpu:5"):
        value.get("cpu:1")
    with ps.MirroredStrategy(["cpu:3", "cpu:5"]) as other, other.scope():
        with pytest.raises(ValueError, match="values may differ by device; name one of them"):
            value.get()
        assert Mirrored({"cpu:3": 1, "cpu:5": 1}).get() == 1


def test_a_dataset_itself_is_distributed(distribution, strategy):
    """As what a function without arguments returns: each tower takes a batch in each step."""
    n = replicas(strategy)
    data = distribution.distribute_dataset(ps.ArrayDataset(np.arange(4 * n)).batch(2))
    found = [[x.tolist() for x in distribution.unwrap(batch)] for batch in data]
    assert found == [[[2 * i, 2 * i + 1] for i in range(k * n, k * n + n)] for k in range(2)]
    with pytest.raises(TypeError, match="is no dataset"):
        distribution.distribute_dataset(np.arange(4))


def test_distributed_apply_is_a_step(distribution, strategy):
    """In cross-tower context, by all that towers have returned; a global step counts."""
    n = replicas(strategy)
    with distribution.scope():
        v, step = ps.Variable(1.0), ps.Variable(0, name="global_step", trainable=False)
        optimizer = ps.optimizers.SGD(0.5)
        for _ in range(2):
            grads = towers(distribution, lambda tower: np.float32(tower + 1))
            optimizer._distributed_apply(distribution, [(grads, v)], global_step=step, name="train")
        optimizer._distributed_apply(strategy, iter([(grads, v)]))
        assert (float(v), int(step), int(optimizer.iterations)) == (1.0 - 3 * 0.5 * n * (n + 1) / 2, 2, 3)


def test_distributed_apply_is_for_cross_tower_context(distribution, strategy):
    """Of one strategy; nothing is applied otherwise."""
    with distribution.scope():
        v, optimizer = ps.Variable(1.0), ps.optimizers.SGD(0.5)
    if kind_of(strategy) != "default":
        with pytest.raises(RuntimeError, match="_distributed_apply needs cross-replica context"):
            distribution.call_for_each_tower(lambda: optimizer._distributed_apply(distribution, [(np.float32(1), v)]))
    with ps.MirroredStrategy(["cpu:0"]) as other:
        with other.scope():
            foreign = ps.Variable(0, trainable=False)
        grads = towers(distribution, lambda tower: np.float32(tower + 1))
        for pairs, place, step in (([(grads, v)], other, None), ([(grads, v)], distribution, foreign)):
            with pytest.raises(ValueError, match="create it in this strategy's scope"):
                optimizer._distributed_apply(place, pairs, step)
    assert float(v) == 1.0
