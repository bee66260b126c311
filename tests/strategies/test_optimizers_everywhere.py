"""Optimizers on every kind of strategy agree with plain NumPy."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import psclient as ps
from tests.kit.strategies import by_replica, in_replicas, merged, opened, replicas, variable

STEPS = 5


def sgd(g, state, t):
    return -0.1 * g


def momentum(g, state, t):
    state["m"] = 0.9 * state.get("m", 0.0) - 0.1 * g
    return state["m"]


def adam(g, state, t):
    state["m"] = 0.9 * state.get("m", 0.0) + 0.1 * g
    state["s"] = 0.999 * state.get("s", 0.0) + 0.001 * g * g
    rate = 0.1 * np.sqrt(1 - 0.999**t) / (1 - 0.9**t)
    return -rate * state["m"] / (np.sqrt(state["s"]) + 1e-7)


OPTIMIZERS = {
    "sgd": (lambda: ps.optimizers.SGD(0.1), sgd),
    "momentum": (lambda: ps.optimizers.SGD(0.1, momentum=0.9), momentum),
    "adam": (lambda: ps.optimizers.Adam(0.1), adam),
}


def gradient(t, replica, dtype="float64"):
    """The gradient of one replica in one step."""
    return np.asarray(np.sin(np.arange(3.0) + t + 10 * replica), dtype)


def reference(rule, count, steps=STEPS):
    """What plain NumPy makes of the gradients of so many replicas."""
    w, state = np.array([1.0, -2.0, 3.0]), {}
    for t in range(1, steps + 1):
        w = w + rule(sum(gradient(t, replica) for replica in range(count)), state, t)
    return w


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_all_strategies_agree_with_numpy(strategy, name):
    """Gradients are summed over the replicas, and each step counts once."""
    make, rule = OPTIMIZERS[name]
    w = variable(strategy, np.array([1.0, -2.0, 3.0]))
    with strategy.scope():
        optimizer = make()
    for t in range(1, STEPS + 1):
        in_replicas(strategy, lambda replica, t=t: optimizer.apply_gradients([(gradient(t, replica), w)]))
    np.testing.assert_allclose(w.numpy(), reference(rule, replicas(strategy)), rtol=1e-12)
    assert int(optimizer.iterations) == STEPS
    assert len({tuple(np.asarray(copy)) for copy in strategy.experimental_local_results(w)}) == 1


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_context_makes_no_difference(strategy, name):
    """In merge_call, in the scope and outside of it, with per-replica gradients: the same steps."""
    make, rule = OPTIMIZERS[name]
    w, optimizer = variable(strategy, np.array([1.0, -2.0, 3.0])), make()

    def gradients(t):
        return by_replica(strategy, lambda replica: gradient(t, replica))

    optimizer.apply_gradients([(gradients(1), w)])
    with strategy.scope():
        optimizer.apply_gradients([(gradients(2), w)])
    merged(strategy, lambda s, g: optimizer.apply_gradients([(g, w)]), gradients(3))
    in_replicas(strategy, lambda _, own, g: optimizer.apply_gradients([(g, own)]), w, gradients(4))
    optimizer.apply_gradients([(gradients(5), w)])
    np.testing.assert_allclose(w.numpy(), reference(rule, replicas(strategy)), rtol=1e-12)


def test_a_learning_rate_may_change_between_steps(strategy):
    """The next step has it."""
    w, optimizer = variable(strategy), ps.optimizers.SGD(1.0)
    for rate in (1.0, 0.5):
        optimizer.learning_rate = rate
        strategy.run(lambda: optimizer.apply_gradients([(np.ones(3, "float32"), w)]))
    assert w.numpy().tolist() == [-1.5 * replicas(strategy)] * 3


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_floating_dtypes_are_trained(strategy, name, dtype):
    """State and variable keep the dtype, and the steps are right within it."""
    make, rule = OPTIMIZERS[name]
    w, optimizer = variable(strategy, np.array([1.0, -2.0, 3.0], dtype)), make()
    for t in range(1, STEPS + 1):
        in_replicas(strategy, lambda replica, t=t: optimizer.apply_gradients([(gradient(t, replica, dtype), w)]))
    assert w.numpy().dtype == dtype
    room = STEPS * 8 * float(ml_dtypes.finfo(dtype).eps)
    np.testing.assert_allclose(w.numpy().astype(float), reference(rule, replicas(strategy)), rtol=room, atol=room)


HALF = {
    "SGD": lambda: ps.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "Adam": lambda: ps.optimizers.Adam(0.1, amsgrad=True),
    "AdamW": lambda: ps.optimizers.AdamW(0.1, use_ema=True, ema_overwrite_frequency=3),
    "Nadam": lambda: ps.optimizers.Nadam(0.1),
    "Lamb": lambda: ps.optimizers.Lamb(0.1),
    "Ftrl": lambda: ps.optimizers.Ftrl(0.1, l1_regularization_strength=0.01, learning_rate_power=-0.7),
    "RMSprop": lambda: ps.optimizers.RMSprop(
        ps.optimizers.schedules.CosineDecayRestarts(0.1, 3), momentum=0.9, centered=True
    ),
    "accumulated": lambda: ps.optimizers.Adam(0.1, gradient_accumulation_steps=2, clipnorm=0.5),
    "scaled": lambda: ps.optimizers.Adam(0.1, loss_scale_factor=ps.optimizers.DynamicLossScale(4.0, 2)),
    "clipped": lambda: ps.optimizers.SGD(0.1, global_clipnorm=0.3, weight_decay=0.1),
}


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_has_the_same_bits_without_servers(dtype):
    """Every optimizer rounds a step once, where it is assigned."""
    found = []
    for kind in ("embedded-1", "mirrored-1"):
        with opened(kind) as strategy:
            found.append({name: trained(strategy, make(), dtype) for name, make in HALF.items()})
    assert [name for name in HALF if found[0][name] != found[1][name]] == []


def trained(strategy, optimizer, dtype):
    """The bytes of a variable after some steps."""
    w = variable(strategy, np.linspace(-1, 1, 50).astype(dtype))
    for t in range(STEPS):
        g = np.random.default_rng(t).normal(size=50).astype(dtype)
        strategy.run(lambda g=g: optimizer.apply_gradients([(g, w)]))
    return w.numpy().tobytes()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_integers_are_not_trained(strategy, name):
    """Steps are fractions: the error names the variable and its dtype before anything is made for it."""
    w, optimizer = variable(strategy, np.zeros(3, "int64")), OPTIMIZERS[name][0]()
    with pytest.raises(ValueError, match=f"'{w.name}' is of int64.*floating dtype"):
        strategy.run(lambda: optimizer.apply_gradients([(np.ones(3, "int64"), w)]))
    with pytest.raises(RuntimeError, match="no state yet"):
        _ = optimizer.iterations


def test_several_variables_and_one_that_comes_late(strategy):
    """Each has slots of its own; the count is of steps, whenever a variable came."""
    first, second = variable(strategy, np.ones(3)), variable(strategy, np.ones((2, 2)))
    optimizer = ps.optimizers.SGD(0.1, momentum=0.9)
    strategy.run(lambda: optimizer.apply_gradients([(np.ones(3), first)]))
    strategy.run(lambda: optimizer.apply_gradients([(np.ones(3), first), (np.ones((2, 2)), second)]))
    n = replicas(strategy)
    np.testing.assert_allclose(first.numpy(), 1 - 0.1 * n - (0.9 * 0.1 * n + 0.1 * n))
    np.testing.assert_allclose(second.numpy(), 1 - 0.1 * n)
    assert int(optimizer.iterations) == 2


def test_a_new_optimizer_is_a_few_lines(strategy):
    """A subclass with its slots and an update function runs everywhere."""

    class Adagrad(ps.optimizers.Optimizer):
        slots = ("sum",)

        def update(self, v, gradient, iterations, total):
            total.assign_add(gradient * gradient)
            v.assign_sub(self.learning_rate * gradient / np.sqrt(total))

    w = variable(strategy, np.zeros(3))
    optimizer = Adagrad(1.0)
    for _ in range(2):
        strategy.run(lambda: optimizer.apply_gradients([(np.full(3, 2.0), w)]))
    np.testing.assert_allclose(w.numpy(), -(1 + 1 / np.sqrt(2)) * np.ones(3))


def test_what_is_built_is_used(strategy):
    """By `build`, before the first step; in a replica function with the variable as an argument too.

    Slots are where their variable is, and the count of the steps is on the non-slot devices.
    """
    w, u = variable(strategy, np.zeros(3)), variable(strategy, np.zeros(3))
    optimizer = ps.optimizers.Adam()
    optimizer.build([w])
    assert int(optimizer.iterations) == 0
    strategy.run(lambda own: optimizer.build([own]), (u,))
    count = optimizer.iterations
    strategy.run(lambda: optimizer.apply_gradients([(np.ones(3), w), (np.ones(3), u)]))
    assert optimizer.iterations is count
    assert int(count) == 1
    both = ps.optimizers.Adam()
    both.build([w, u])
    assert [x.devices for x in both.variables if x is not both.iterations] == [w.devices] * 2 + [u.devices] * 2
    assert both.iterations.devices == strategy.extended.non_slot_devices([w, u])
