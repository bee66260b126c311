"""`DiLoCo` and `LocalSGD` with optimizers of optax; `tests/strategies/test_local_steps.py` has the rest."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import psclient as ps
import psclient.jax as psj
from tests.kit.workers import in_threads

FIRST = {"dense": {"b": np.zeros(2, "f4"), "w": np.ones((3, 2), "f4")}, "scale": np.float32(1.0) * np.ones((), "f4")}
INNER = optax.adam(0.05)


def examples(worker, step):
    source = np.random.default_rng([worker, step])
    return source.normal(size=(6, 3)).astype("f4"), source.normal(size=(6, 2)).astype("f4")


@jax.jit
def inner_step(params, opt_state, x, y):
    def loss(params):
        return jnp.mean((x @ params["dense"]["w"] * params["scale"] + params["dense"]["b"] - y) ** 2)

    updates, opt_state = INNER.update(jax.grad(loss)(params), opt_state)
    return optax.apply_updates(params, updates), opt_state


def trained(strategy, worker, count, functions, tokens=False):
    params, state = functions(strategy=strategy).init(FIRST)
    step = functions(strategy=strategy).step
    opt_state = INNER.init(params)
    for number in range(count):
        params, opt_state = inner_step(params, opt_state, *examples(worker, number))
        params, state = step(params, state, *([1.0 + worker] if tokens else []))
    return jax.tree.map(np.asarray, params), state


def simulated(workers, count, every, outer, tokens=False):
    """The outer parameters of a loop in one process, with optimizers of optax alone."""
    outer_params, outer_state = jax.tree.map(jnp.asarray, FIRST), outer.init(FIRST)
    own = [(outer_params, INNER.init(outer_params)) for _ in range(workers)]
    weights = [every * (1.0 + worker) if tokens else 1.0 for worker in range(workers)]
    for number in range(count):
        own = [inner_step(*each, *examples(worker, number)) for worker, each in enumerate(own)]
        if (number + 1) % every == 0:
            moved = [
                jax.tree.map(lambda o, p, w=weight: (o - p) * np.float32(w), outer_params, params)
                for weight, (params, _) in zip(weights, own, strict=True)
            ]
            mean = jax.tree.map(lambda *each: sum(each[1:], each[0]) / np.float32(sum(weights)), *moved)
            updates, outer_state = outer.update(mean, outer_state)
            outer_params = optax.apply_updates(outer_params, updates)
            own = [(outer_params, opt_state) for _, opt_state in own]
    return jax.tree.map(np.asarray, outer_params)


def close(found, expected):
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6), found, expected)


@pytest.mark.parametrize("tokens", [False, True])
def test_workers_do_what_one_process_of_optax_does(tokens):
    def work(strategy, worker):
        outer = psj.optimizers.sgd(0.7, momentum=0.9, nesterov=True)
        return trained(strategy, worker, 12, partial(psj.DiLoCo, outer, sync_every=4), tokens)[0]

    expected = simulated(2, 12, 4, optax.sgd(0.7, momentum=0.9, nesterov=True), tokens)
    for found in in_threads(work, 2, 2):
        close(found, expected)


def test_local_sgd_averages():
    found = in_threads(lambda strategy, worker: trained(strategy, worker, 6, partial(psj.LocalSGD, sync_every=3))[0])
    for each in found:
        close(each, simulated(2, 6, 3, optax.sgd(1.0)))


def test_fragments_overlap_and_are_mixed(strategy):
    """By the first part of their names; arguments stay as they are."""
    init, step = psj.DiLoCo(
        psj.optimizers.sgd(0.5), sync_every=4, fragments=["f/dense", "f/scale"], sync_delay=1, alpha=0.5, name="f",
        strategy=strategy,
    )  # fmt: skip
    params, state = init(FIRST)
    seen = []
    for _ in range(5):
        params = jax.tree.map(lambda p: p + 1.0, params)
        before = params
        params, state = step(params, state)
        seen.append((state.merged, float(params["dense"]["b"][0]), float(params["scale"])))
        assert before is not params
    # The scale: 1 after 2 steps is 3, sent with 0.5: outer 2; at step 3 it is (4 + 2) / 2 = 3. The rest: 4 at step 4 is
    # sent, outer 2; at step 5 it is (5 + 2) / 2.
    assert seen == [(False, 1, 2), (False, 2, 3), (True, 3, 3), (False, 4, 4), (True, 3.5, 5)]
    assert float(state.outer_params["scale"]) == 2


def test_a_checkpoint_continues_with_the_same_numbers(tmp_path):
    outer = partial(psj.optimizers.sgd, 0.7, momentum=0.9)

    def work(resumes, strategy, worker):
        init, step = psj.DiLoCo(outer(), sync_every=2, strategy=strategy)
        params, state = init(FIRST)
        checkpoint = ps.train.Checkpoint(outer=state)
        if resumes:
            checkpoint.restore("ckpt")
            state = state.newest()
            params = state.outer_params
            assert state.step == 4
        for number in range(4 if resumes else 0, 8):
            params = jax.tree.map(lambda p, n=number: p * 0.9 + 0.1 * n * (worker + 1), params)
            params, state = step(params, state)
            if not resumes and number == 3:
                checkpoint.save("ckpt/one")
                checkpoint.sync()
        return jax.tree.map(np.asarray, params)

    first, again = (in_threads(partial(work, resumes), 2, 2, root=tmp_path)[0] for resumes in (False, True))
    close(again, first)


def test_what_cannot_be_exchanged_is_refused(strategy):
    made = partial(psj.DiLoCo, psj.optimizers.sgd(0.5), strategy=strategy, name="r")
    with pytest.raises(ValueError, match="dynamic=True with 2 fragments"):
        made(sync_every=4, fragments=2, dynamic=True)
    for fragments, why in ((["r/dense"], "r/scale is in 0 fragments"), (["r", "x"], "begins with 'x'")):
        with pytest.raises(ValueError, match=why):
            made(fragments=fragments).init(FIRST)
    with pytest.raises(TypeError, match="optax transformation"):
        psj.DiLoCo(optax.sgd(0.5), strategy=strategy).init(FIRST)
    init, step = psj.LocalSGD(sync_every=2, name="old", strategy=strategy)
    params, state = init(FIRST)
    step(params, state)
    with pytest.raises(RuntimeError, match="use the state that step returned"):
        step(params, state)
    with pytest.raises(TypeError, match="traced"):
        jax.jit(lambda p: step(p, state.newest()))(params)
