"""Optimizers on every kind of strategy agree with plain NumPy."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import psclient as ps
from tests.kit import references
from tests.kit.strategies import by_replica, in_replicas, merged, replicas, variable

STEPS = 5


OPTIMIZERS = {
    "sgd": (lambda: ps.optimizers.SGD(0.1), references.descent(0.1)),
    "momentum": (lambda: ps.optimizers.SGD(0.1, momentum=0.9), references.momentum(0.1, 0.9)),
    "adam": (lambda: ps.optimizers.Adam(0.1), references.adam(0.1, 0.9, 0.999, 1e-7)),
}


def gradient(t, replica):
    """The gradient of one replica in one step."""
    return np.sin(np.arange(3.0) + t + 10 * replica)


def reference(rule, count, steps=STEPS):
    """What plain NumPy makes of the gradients of so many replicas."""
    w, state = np.array([1.0, -2.0, 3.0]), {}
    for t in range(1, steps + 1):
        w = rule(w, sum(gradient(t, replica) for replica in range(count)), state, t)
    return w


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_all_strategies_agree_with_numpy(strategy, name):
    """In replicas, in merge_call, in the scope and outside of it, with per-replica gradients: the same steps.

    Gradients are summed over the replicas, each step counts once, and all copies are equal.
    """
    make, rule = OPTIMIZERS[name]
    w = variable(strategy, np.array([1.0, -2.0, 3.0]))
    with strategy.scope():
        optimizer = make()

    def gradients(t):
        return by_replica(strategy, lambda replica: gradient(t, replica))

    optimizer.apply_gradients([(gradients(1), w)])
    with strategy.scope():
        optimizer.apply_gradients([(gradients(2), w)])
    merged(strategy, lambda s, g: optimizer.apply_gradients([(g, w)]), gradients(3))
    in_replicas(strategy, lambda _, own, g: optimizer.apply_gradients([(g, own)]), w, gradients(4))
    in_replicas(strategy, lambda replica: optimizer.apply_gradients([(gradient(5, replica), w)]))
    np.testing.assert_allclose(w.numpy(), reference(rule, replicas(strategy)), rtol=1e-12)
    assert int(optimizer.iterations) == STEPS
    assert len({tuple(np.asarray(copy)) for copy in strategy.experimental_local_results(w)}) == 1


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


def test_half_precision_has_the_same_bits_without_servers(shared):
    """Every optimizer rounds a step once, where it is assigned."""
    for number, (name, make) in enumerate(HALF.items()):
        dtype = (np.float16, ml_dtypes.bfloat16)[number % 2]
        found = [trained(shared(kind), make(), dtype) for kind in ("servers-1x1", "mirrored-1")]
        assert found[0] == found[1], name


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
    assert not any(x.trainable for x in both.variables)
