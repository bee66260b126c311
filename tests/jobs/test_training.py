"""Synchronous training on many processes gives the weights of one process without servers."""

from __future__ import annotations

import functools

import numpy as np
import pytest

import psclient as ps
from pstesting.processes import CHIEF, ProcessCluster
from pstesting.script import say

EXAMPLES, BATCH = 50, 12

CASES = {
    "integers, float32": ("sgd", "float32", 20, True),
    "integers, float64": ("sgd", "float64", 20, True),
    "sgd, float64": ("sgd", "float64", 20, False),
    "sgd, float32": ("sgd", "float32", 5, False),
    "adam, float64": ("adam", "float64", 20, False),
    "adam, float32": ("adam", "float32", 5, False),
}
"""Optimizer, dtype, rounds, and whether gradients are integers."""

TOLERANCE = {"float64": 1e-10, "float32": 1e-5}

FLEETS = {
    "one worker": {"workers": 1},
    "two workers, a chief that drives": {"workers": 2, "chief": "driver"},
    "three workers": {"workers": 3},
    "a worker and a chief that runs the script": {"workers": 1, "chief": "script"},
    "two workers of two replicas": {"workers": 2, "replicas": 2},
}


def data(dtype, integers):
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(50, 6)), rng.integers(0, 3, size=50)
    return (np.rint(8 * x) if integers else x).astype(dtype), y


def first_weights(dtype):
    rng = np.random.default_rng(4)
    shapes = {"w1": (6, 5), "b1": (5,), "w2": (5, 3), "b2": (3,)}
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


def gradients(weights, x, y, integers, total):
    """Of the cross-entropy of a network with one hidden layer; or sums of rows, which are integers."""
    w1, b1, w2, b2 = weights
    if integers:
        return [
            np.resize(x.sum(axis=0), w.shape) * (index + 1) + y.sum().astype(x.dtype) for index, w in enumerate(weights)
        ]
    h = np.tanh(x @ w1 + b1)
    z = h @ w2 + b2
    p = np.exp(z - z.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    p[np.arange(len(y)), y] -= 1
    p /= x.dtype.type(total)
    back = (p @ w2.T) * (1 - h * h)
    return [x.T @ back, back.sum(axis=0), h.T @ p, p.sum(axis=0)]


def train(cases, replicas):
    strategy = ps.ParameterServerStrategy(devices=[f"cpu:{index}" for index in range(replicas)])
    for case, (kind, dtype, rounds, integers) in cases.items():
        with strategy.scope():
            weights = [ps.Variable(value, name=f"{case}/{name}") for name, value in first_weights(dtype).items()]
            chosen = {"sgd": (ps.optimizers.SGD, 0.25, 0.5), "adam": (ps.optimizers.Adam, 0.01)}
            make, *arguments = chosen[kind]
            optimizer = make(*arguments, name=case)

        def step(batch, weights=weights, optimizer=optimizer, integers=integers):
            x, y = batch
            found = gradients([w.read_value() for w in weights], x, y, integers, 12)
            optimizer.apply_gradients(zip(found, weights, strict=True))

        arrays = ps.ArrayDataset(data(dtype, integers)).shuffle(seed=5).batch(12)
        batches = strategy.experimental_distribute_dataset(arrays)
        taken = 0
        while taken < rounds:
            for batch in batches:
                strategy.run(step, args=(batch,))
                taken += 1
                if taken == rounds:
                    break
        say(case, [w.numpy() for w in weights])
    say("R", strategy.num_replicas_in_sync)


@functools.cache
def alone(case):
    """The weights that plain NumPy gives, in one process."""
    kind, dtype, rounds, integers = CASES[case]
    x, y = data(dtype, integers)
    weights = list(first_weights(dtype).values())
    numbers = ps.ArrayDataset(np.arange(EXAMPLES)).shuffle(seed=5).batch(BATCH)
    m, s = ([np.zeros_like(w) for w in weights] for _ in range(2))
    for taken in range(rounds):
        epoch, index = divmod(taken, -(-EXAMPLES // BATCH))
        rows = numbers.rows(epoch, index, 0, BATCH)
        for i, g in enumerate(gradients(weights, x[rows], y[rows], integers, BATCH)):
            if kind == "sgd":
                m[i] = m[i] * 0.5 - g * 0.25
                weights[i] = weights[i] + m[i]
            else:
                t = taken + 1
                m[i] = 0.9 * m[i] + (1 - 0.9) * g
                s[i] = 0.999 * s[i] + (1 - 0.999) * g * g
                rate = 0.01 * np.sqrt(1 - 0.999**t) / (1 - 0.9**t)
                weights[i] = weights[i] - (rate * m[i] / (np.sqrt(s[i]) + 1e-7)).astype(dtype)
    return weights


OTHERS = ("one worker", "three workers", "two workers of two replicas", "a worker and a chief that runs the script")
"""Fleets that differ from the others in their number only, or in what others have together."""


@pytest.fixture(
    params=[
        pytest.param(keys, id=name, marks=pytest.mark.soak if name in OTHERS else ()) for name, keys in FLEETS.items()
    ]
)
def trained(request, tmp_path):
    """A fleet's weights for each case, as each of its processes sees them."""
    keys = dict(request.param)
    replicas = keys.pop("replicas", 1)
    helpers = (data, first_weights, gradients)
    with ProcessCluster(train, tmp_path, (CASES, replicas), helpers, ps=2, **keys) as job:
        job.finish()
    runners = job.runners
    assert {job.said(task, "R")[0] for task in runners} == {len(runners) * replicas}
    assert (CHIEF in runners) == (keys.get("chief") == "script")
    return {case: [job.said(task, case)[0] for task in runners] for case in CASES}


def test_many_processes_give_the_weights_of_one(trained):
    """Integer gradients bit by bit, float64 within 1e-10 over 20 rounds, float32 within 1e-5 over 5."""
    for case, (_, dtype, _, integers) in CASES.items():
        for weights in trained[case]:
            assert weights == trained[case][0], case
            for found, expected in zip(weights, alone(case), strict=True):
                atol = 0 if integers else TOLERANCE[dtype]
                np.testing.assert_allclose(np.asarray(found, dtype), expected, rtol=0, atol=atol, err_msg=case)


def test_the_weights_move():
    """What the tests above compare is far from where it began."""
    for case in CASES:
        before = first_weights(CASES[case][1]).values()
        assert all(np.abs(a - b).max() > 1e-3 for a, b in zip(alone(case), before, strict=True))
