"""Modules of other libraries on JAX: Flax NNX in place, Flax Linen and Keras by their functions."""

from __future__ import annotations

import importlib
from collections import OrderedDict

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import psclient as ps
import psclient.jax as psj
from tests.kit.strategies import opened

STEPS = 20
rng = np.random.default_rng(0)
X = rng.normal(size=(32, 4)).astype("f4")
Y = np.sin(X[:, :1])


def make_net(nnx, seed=0):
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Linear(4, 8, use_bias=False, rngs=rngs), nnx.Linear(8, 1, rngs=rngs)])
            self.norm = nnx.BatchNorm(8, rngs=rngs)

        def __call__(self, x):
            return self.layers[1](nnx.relu(self.norm(self.layers[0](x))))

    return Net(nnx.Rngs(seed))


def test_a_module_of_nnx_is_trained_in_place(strategy):
    """As by `nnx.Optimizer`: parameters are those of the servers after each step, statistics are the module's own."""
    nnx, optax = pytest.importorskip("flax.nnx"), pytest.importorskip("optax")

    @nnx.jit
    def gradients(module, x, y):
        return nnx.value_and_grad(lambda module: jnp.mean((module(x) - y) ** 2))(module)

    bound, alone = make_net(nnx), make_net(nnx)
    ours = psj.Optimizer(bound, psj.optimizers.adam(1e-3), strategy=strategy)
    theirs = nnx.Optimizer(alone, optax.adam(1e-3), wrt=nnx.Param)
    assert ours.state.variables["layers"]["0"]["kernel"].name == "params/layers/0/kernel"
    for _ in range(STEPS):
        _, grads = gradients(bound, X, Y)
        ours.update(bound, grads)
        _, grads = gradients(alone, X, Y)
        theirs.update(alone, grads)
    assert ours.step == STEPS
    assert np.any(bound.norm.mean[...])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), nnx.state(bound), nnx.state(alone))
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(nnx.state(bound, nnx.Param)), ours.state.params)


def test_a_module_of_nnx_resumes(in_tmp_path):
    """What a checkpoint restores comes into the module when it is refreshed; another seed changes nothing."""
    nnx, saved = pytest.importorskip("flax.nnx"), []
    for seed in (0, 1):
        with opened("embedded-1") as strategy:
            module = make_net(nnx, seed)
            ours = psj.Optimizer(module, ps.optimizers.SGD(0.1), strategy=strategy)
            if seed:
                ps.train.Checkpoint(ours).restore("run").assert_consumed()
                ours.refresh(module)
            else:
                ours.update(module, nnx.state(module, nnx.Param))
                ps.train.Checkpoint(ours).save("run/ckpt")
            saved.append(module.layers[0].kernel[...])
            assert ours.step == 1
    np.testing.assert_array_equal(*saved)


def test_a_module_of_linen_is_its_function(strategy):
    """`apply_fn` is the module's, and the parameters its dicts."""
    linen = pytest.importorskip("flax.linen")
    model = linen.Dense(1)
    params = model.init(jax.random.key(0), X)["params"]
    state = psj.TrainState.create(apply_fn=model.apply, params=params, tx=ps.optimizers.SGD(0.1), strategy=strategy)

    @jax.jit
    def gradients(state):
        return jax.value_and_grad(lambda p: jnp.mean((state.apply_fn({"params": p}, X) - Y) ** 2))(state.params)

    losses = []
    for _ in range(STEPS):
        loss, grads = gradients(state)
        losses.append(float(loss))
        state = state.apply_gradients(grads=grads)
    assert losses[-1] < losses[0] / 2
    assert set(state.variables) == {"kernel", "bias"}


def test_a_model_of_keras_trains_by_its_stateless_call(strategy, environ):
    """Its trainable variables are the parameters; what it changes itself stays in the loop."""
    environ["KERAS_BACKEND"] = "jax"
    pytest.importorskip("keras")
    keras = importlib.import_module("keras")
    if keras.backend.backend() != "jax":
        pytest.skip("Keras was imported with another backend")
    model = keras.Sequential([keras.layers.Dense(8, "tanh"), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
    model.build((None, 4))

    def loss(trained, rest, x, y):
        predicted, rest = model.stateless_call(list(trained.values()), rest, x, training=True)
        return jnp.mean((predicted - y) ** 2), rest

    gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))
    params = OrderedDict((v.path, v.value) for v in model.trainable_variables)  # JAX sorts the keys of a plain dict
    state = psj.TrainState.create(apply_fn=None, params=params, tx=psj.optimizers.adam(0.01), strategy=strategy)
    rest, losses = [v.value for v in model.non_trainable_variables], []
    for _ in range(STEPS):
        (value, rest), grads = gradients(state.params, rest, X, Y)
        state = state.apply_gradients(grads=grads)
        losses.append(float(value))
    assert losses[-1] < losses[0]
    for v, value in zip(model.trainable_variables, state.params.values(), strict=True):
        v.assign(value)
    assert np.mean((model(X, training=True) - Y) ** 2) < losses[0]
