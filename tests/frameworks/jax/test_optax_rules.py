"""The optimizers of `psj.optimizers` against optax alone, over 30 steps of a small network."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import psclient as ps
import psclient.jax as psj
from tests.kit.strategies import refused

optax = pytest.importorskip("optax", reason="optax is not installed; no extra brings it")

STEPS = 30
TOLERANCE = 1e-6
"""Of the largest element of each parameter."""

rng = np.random.default_rng(0)
X = rng.normal(size=(64, 6)).astype("f4")
Y = np.sin(X[:, :2])
PARAMS = {
    "dense": {"kernel": rng.normal(size=(6, 8)).astype("f4"), "bias": rng.normal(size=8).astype("f4")},
    "out": rng.normal(size=(8, 2)).astype("f4"),
}


def loss(params, x, y):
    hidden = jnp.tanh(x @ params["dense"]["kernel"] + params["dense"]["bias"])
    return jnp.mean((hidden @ params["out"] - y) ** 2)


gradients = jax.jit(jax.grad(loss))


def alone(tx):
    params = jax.tree.map(jnp.asarray, PARAMS)
    state = tx.init(params)
    for _ in range(STEPS):
        updates, state = tx.update(gradients(params, X, Y), state, params)
        params = optax.apply_updates(params, updates)
    return params


def on_servers(strategy, tx):
    state = psj.TrainState.create(apply_fn=None, params=PARAMS, tx=tx, strategy=strategy)
    for _ in range(STEPS):
        state = state.apply_gradients(grads=gradients(state.params, X, Y))
    assert state.step == STEPS
    return state.params


def assert_near(found, expected):
    def check(one, other):
        assert np.abs(np.asarray(one) - other).max() <= TOLERANCE * np.abs(other).max()

    jax.tree.map(check, found, expected)


def decays(params):
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


CASES = [
    ("sgd", {"learning_rate": 0.1}),
    ("sgd", {"learning_rate": 0.02, "momentum": 0.9, "nesterov": True}),
    ("adam", {"learning_rate": 0.01, "b1": 0.8, "b2": 0.95, "eps": 1e-3, "eps_root": 1e-4}),
    ("adamw", {"learning_rate": 1e-3, "nesterov": True}),
    ("adamw", {"learning_rate": 1e-3, "weight_decay": 0.5, "mask": decays}),
    ("adamw", {"learning_rate": 1e-3, "weight_decay": 0.5, "mask": decays(PARAMS)}),
    ("nadam", {"learning_rate": 0.01}),
    ("radam", {"learning_rate": 0.01, "b1": 0.8, "b2": 0.95, "eps_root": 1e-4, "threshold": 6.0, "nesterov": True}),
    ("adamax", {"learning_rate": 0.01}),
    ("adadelta", {"learning_rate": 1.0}),
    ("adadelta", {"learning_rate": 1.0, "rho": 0.8, "weight_decay": 0.1, "weight_decay_mask": decays}),
    ("adagrad", {"learning_rate": 0.05}),
    ("adagrad", {"learning_rate": 0.05, "initial_accumulator_value": 0.0, "eps": 0.0}),
]
"""What a script gives by optax's names; the formulas themselves are tested with those of all front ends."""


@pytest.mark.parametrize(("name", "arguments"), CASES)
def test_steps_are_those_of_optax(strategy, name, arguments):
    """A mask may be a function, or a tree."""
    ours, theirs = (getattr(module, name)(**arguments) for module in (psj.optimizers, optax))
    assert_near(on_servers(strategy, ours), alone(theirs))


SCHEDULES = {
    "cosine": optax.cosine_decay_schedule(0.1, 24, alpha=0.1),
    "warm-up": optax.warmup_cosine_decay_schedule(0.0, 0.1, 5, 30),
    "steps": optax.piecewise_constant_schedule(0.1, {10: 0.5, 20: 0.1}),
    "own": lambda step: 0.1 / (1 + step),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_are_functions_of_the_step(strategy, name):
    """Optax's, or the user's: workers compute the rate for the round; and Keras's cosine, which servers compute."""
    schedule = SCHEDULES[name]
    ours = ps.optimizers.schedules.CosineDecay(0.1, 24, alpha=0.1) if name == "cosine" else schedule
    expected = alone(optax.sgd(schedule, momentum=0.5))
    for rate in {schedule, ours}:
        assert_near(on_servers(strategy, psj.optimizers.sgd(rate, momentum=0.5)), expected)


def test_clipping_is_an_option_and_chains_are_refused(strategy):
    """`global_clipnorm` stands for a chain with `clip_by_global_norm`; a mask has the parameters' structure."""
    expected = alone(optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)))
    assert_near(on_servers(strategy, psj.optimizers.adam(1e-2, global_clipnorm=0.1)), expected)
    mask = psj.optimizers.adamw(1e-3, mask={"dense": decays(PARAMS)["dense"]})
    refused(ValueError, "the leaves of mask lack params/out", lambda: on_servers(strategy, mask))
    words = r"is an optax transformation.*use psj\.optimizers\.adadelta.*psj\.optimizers\.sgd with"
    refused(TypeError, words, lambda: on_servers(strategy, optax.adam(1e-3)))


def test_names_and_defaults_are_those_of_optax():
    """So that a script changes its import; what is more are options that servers know."""
    for name in psj.optimizers.NAMES:
        ours, theirs = (inspect.signature(getattr(module, name)).parameters for module in (psj.optimizers, optax))
        assert [(p.name, p.default, p.kind) for p in ours.values()][:-1] == [
            (p.name, p.default, p.kind) for p in theirs.values()
        ]
