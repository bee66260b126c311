"""Synchronous training on many workers gives the weights of one process without servers, whatever the servers.

Workers that do not run the same program are told so, all of them, with both positions; none hangs.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time

import numpy as np
import pytest

import psclient as ps
from pstesting.in_process import InProcessCluster
from pstesting.processes import W0, W1, W2
from pstesting.script import add
from tests.kit.workers import in_threads

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


def train(strategy, worker):
    found = {}
    for case, (kind, dtype, rounds, integers) in CASES.items():
        with strategy.scope():
            weights = [ps.Variable(value, name=f"{case}/{name}") for name, value in first_weights(dtype).items()]
            sgd = kind == "sgd"
            optimizer = ps.optimizers.SGD(0.25, 0.5, name=case) if sgd else ps.optimizers.Adam(0.01, name=case)

        def step(batch, weights=weights, optimizer=optimizer, integers=integers):
            x, y = batch
            grads = gradients([w.read_value() for w in weights], x, y, integers, BATCH)
            optimizer.apply_gradients(zip(grads, weights, strict=True))

        arrays = ps.ArrayDataset(data(dtype, integers)).shuffle(seed=5).batch(BATCH)
        batches = strategy.experimental_distribute_dataset(arrays)
        taken = 0
        while taken < rounds:
            for batch in batches:
                strategy.run(step, args=(batch,))
                taken += 1
                if taken == rounds:
                    break
        found[case] = [w.numpy() for w in weights]
    return found


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


def test_many_workers_give_the_weights_of_one():
    """Integer gradients bit by bit, float64 within 1e-10 over 20 rounds, float32 within 1e-5 over 5."""
    for found in in_threads(train):
        for case, (_, dtype, _, integers) in CASES.items():
            atol = 0 if integers else TOLERANCE[dtype]
            moved = zip(found[case], alone(case), first_weights(dtype).values(), strict=True)
            for value, expected, first in moved:
                np.testing.assert_allclose(value, expected, rtol=0, atol=atol, err_msg=case)
                assert np.abs(value - first).max() > 1e-3


# ---- Steps that have to know all gradients, of variables on several servers: two rounds ----


def learn(strategy, worker):
    with strategy.scope():
        variables = [ps.Variable(np.ones(n, "float32"), name=f"w{n}") for n in (2, 3, 4)]
        options = {"global_clipnorm": 1.0, "use_ema": True, "gradient_accumulation_steps": 2}
        options["loss_scale_factor"] = ps.optimizers.DynamicLossScale(4.0, 2)
        optimizer = ps.optimizers.Adam(ps.optimizers.schedules.CosineDecay(0.1, 20), **options)
    first = strategy.extended.should_checkpoint  # One worker alone may see what is not finite.
    for step in range(6):
        grads = [np.sin(np.arange(v.size) + step + 7 * worker).astype("float32") * 4 for v in variables]
        if step == 2 and first:
            grads[2][1] = np.inf
        strategy.run(lambda g: optimizer.apply_gradients(zip(g, variables, strict=True)), (grads,))
    values = [v.numpy().tolist() for v in [*variables, *(optimizer.average(v) for v in variables)]]
    return values, int(optimizer.iterations), int(optimizer.skipped_steps)


def test_two_servers_make_the_steps_of_one():
    """Norm and finiteness are those of all gradients: weights, averages and counts are equal to the bit."""
    found = [in_threads(learn, servers=servers) for servers in (1, 2)]
    assert found == [[found[0][0]] * 2] * 2
    assert found[0][0][1:] == (2, 1)


def test_asynchronous_workers_do_not_mix_their_norms():
    """On several servers what a norm is taken of could be another worker's by the second round."""
    with (
        InProcessCluster(2) as cluster,
        ps.ParameterServerStrategy(cluster_resolver=cluster.resolver(), consistency=ps.Async()) as strategy,
    ):
        with strategy.scope():
            pairs = [(np.full(n, 3.0), ps.Variable(np.ones(n), name=f"w{n}")) for n in (2, 3)]
        with pytest.raises(ValueError, match="asynchronous workers update several servers"):
            strategy.run(lambda: ps.optimizers.SGD(1.0, global_clipnorm=1.0).apply_gradients(pairs))


# ---- Other programs ----

QUICKLY = 30.0
"""Seconds within which everyone knows: a few heartbeats; less than a lease, on a machine that others use."""

FIRST = ("'first'", "'second'")


@pytest.mark.parametrize(
    ("kind", "servers", "words"),
    [
        pytest.param("sections", 2, FIRST, id="on different servers, so that only heartbeats can tell"),
        pytest.param("operands", 1, ("update variable 'first'", "[0 0 0]", "[1 1 1]"), id="operands that differ"),
        pytest.param("variable", 2, ("'extra'", "'second'"), id="a variable that others lack"),
        pytest.param("reductions", 1, ("float64[2]", "float64[3]"), id="other shapes"),
        pytest.param("functions", 1, ("'first'", "= add(#", "= subtract(#"), id="other functions"),
    ],
)
def test_everyone_is_told_where_the_others_are(kind, servers, words):
    """Each process gets `Diverged` within a few heartbeats; it names two processes, and what each of them does.

    A script that catches it, and ends, ends its process: nobody waits for a job that cannot go on.
    """
    alike = threading.Barrier(3)

    def diverge(strategy, worker):
        with strategy.scope():
            v, u = (ps.Variable(np.zeros(3), name=name) for name in ("first", "second"))
            extra = ps.Variable(np.zeros(2), name="extra") if kind == "variable" and not worker else u
        for _ in range(2):
            strategy.run(lambda: add(v, np.ones(3)))
        assert v.numpy()[0] == 6
        alike.wait()  # else a slow worker would hear of it where all still do the same
        sections = {
            "sections": lambda: strategy.run(lambda: add(u if worker == 1 else v, np.ones(3))),
            "variable": lambda: strategy.run(lambda: add(extra, np.ones(extra.shape))),
            "reductions": lambda: strategy.reduce("sum", np.ones(2 if worker == 1 else 3), None),
            "functions": lambda: v.assign_add(1.0) if worker == 1 else v.assign_sub(1.0),
            "operands": lambda: v.assign_add(np.full(3, worker)),
        }

        def make():
            sections[kind]()
            v.numpy(), u.numpy()  # a round is told of where its values are looked at

        began = time.monotonic()
        with pytest.raises(ps.errors.Diverged) as told:
            make()
        text, odd = str(told.value), W0 if kind == "variable" else W1
        assert str(odd) in text
        assert any(str(other) in text for other in (W0, W1, W2) if other != odd)
        assert all(word in text for word in words), text
        assert time.monotonic() - began < QUICKLY
        with contextlib.suppress(ps.errors.Diverged):  # the round of which it was told, or one that it did not wait for
            strategy.close()

    in_threads(diverge, 3, servers)
