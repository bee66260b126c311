"""Modules of Flax NNX, whose parameters are attributes; `examples/keras_jax.py` has one of Keras."""

from __future__ import annotations

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


def test_a_module_of_nnx_is_trained_in_place(in_tmp_path):
    """As by `nnx.Optimizer`: parameters are those of the servers after each step, statistics are the module's own. What
    a checkpoint restores comes into a module, of any seed, when it is refreshed.
    """
    nnx, optax = pytest.importorskip("flax.nnx"), pytest.importorskip("optax")

    @nnx.jit
    def gradients(module, x, y):
        return nnx.value_and_grad(lambda module: jnp.mean((module(x) - y) ** 2))(module)

    bound, alone = make_net(nnx), make_net(nnx)
    with opened("embedded-1") as strategy:
        ours = psj.Optimizer(bound, psj.optimizers.adam(1e-3), strategy=strategy)
        theirs = nnx.Optimizer(alone, optax.adam(1e-3), wrt=nnx.Param)
        assert ours.state.variables["layers"]["0"]["kernel"].name == "params/layers/0/kernel"
        for _ in range(STEPS):
            for module, optimizer in ((bound, ours), (alone, theirs)):
                _, grads = gradients(module, X, Y)
                optimizer.update(module, grads)
        assert ours.step == STEPS
        assert np.any(bound.norm.mean[...])
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), nnx.state(bound), nnx.state(alone))
        jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(nnx.state(bound, nnx.Param)), ours.state.params)
        ps.train.Checkpoint(ours).save("run/ckpt")
    with opened("embedded-1") as strategy:
        module = make_net(nnx, seed=1)
        again = psj.Optimizer(module, psj.optimizers.adam(1e-3), strategy=strategy)
        ps.train.Checkpoint(again).restore("run").assert_consumed()
        again.refresh(module)
        assert again.step == STEPS
        np.testing.assert_array_equal(module.layers[0].kernel[...], bound.layers[0].kernel[...])
