"""One script, one to three workers, one to three servers: the same parameters."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from threading import Event

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import psclient as ps
import psclient.jax as psj
from pstesting.in_process import InProcessCluster

EXAMPLES, BATCH, STEPS = 100, 16, 30
rng = np.random.default_rng(3)
X = rng.normal(size=(EXAMPLES, 5)).astype("f4")
Y = np.sin(X[:, :2])


def start():
    made = np.random.default_rng(1)
    hidden = {"kernel": made.normal(size=(5, 8)).astype("f4"), "bias": made.normal(size=8).astype("f4")}
    return {"hidden": hidden, "out": made.normal(size=(8, 2)).astype("f4")}


def mean_loss(params, x, y):
    hidden = jnp.tanh(x @ params["hidden"]["kernel"] + params["hidden"]["bias"])
    return jnp.mean((hidden @ params["out"] - y) ** 2)


def share_of_loss(params, x, y):
    hidden = jnp.tanh(x @ params["hidden"]["kernel"] + params["hidden"]["bias"])
    return jnp.sum((hidden @ params["out"] - y) ** 2) / (2 * BATCH)


gradients = {fn: jax.jit(jax.value_and_grad(fn)) for fn in (mean_loss, share_of_loss)}


def work(cluster, script, index, **more):
    with ps.ParameterServerStrategy(cluster_resolver=cluster.resolver(index), **more) as strategy:
        return script(strategy, index)


def on_cluster(script, workers=1, servers=1, **more):
    """What each worker's script returns, given its strategy and its number."""
    with InProcessCluster(servers, workers) as cluster, ThreadPoolExecutor(workers) as pool:
        return list(pool.map(partial(work, cluster, script, **more), range(workers)))


def train(strategy, index, loss=mean_loss, data=None, steps=STEPS, **more):
    """A user's loop, of so many steps; the parameters at its end."""
    state = psj.TrainState.create(apply_fn=None, params=start(), tx=psj.optax.adam(1e-2), strategy=strategy, **more)
    examples = ps.ArrayDataset((X, Y)).shuffle(0).batch(BATCH) if data is None else data
    batches = psj.loader(examples, strategy=strategy)
    while state.step < steps:
        for x, y in batches:
            _, grads = gradients[loss](state.params, x, y)
            state = state.apply_gradients(grads=grads)
            if state.step == steps:
                break
    return jax.tree.map(np.asarray, state.params)


def assert_near(found, expected, relative=1e-6):
    def check(one, other):
        assert np.abs(one - other).max() <= relative * np.abs(other).max()

    jax.tree.map(check, found, expected)


def assert_equal(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.fixture(scope="module")
def alone():
    """The parameters that one worker and one server come to."""
    return on_cluster(train)[0]


@pytest.mark.parametrize("workers", [2, 3])
def test_one_worker_and_three_give_the_same(alone, workers):
    """With a loss that is a plain mean, though batches are cut into slices of different sizes, the last one too."""
    for found in on_cluster(train, workers):
        assert_near(found, alone)


@pytest.mark.parametrize("workers", [1, 2])
def test_sums_are_of_shares_of_a_loss(workers):
    """`reduction="sum"`, and a loss that is divided by the size of the global batch, where all batches are whole."""

    def script(strategy, index):
        whole = ps.ArrayDataset((X[:96], Y[:96])).shuffle(0).batch(BATCH)
        sums = train(strategy, index, share_of_loss, whole, 18, reduction="sum", name="sums")
        return sums, train(strategy, index, mean_loss, whole, 18, name="means")

    for sums, means in on_cluster(script, workers):
        assert_near(sums, means)


def test_the_number_of_servers_changes_no_bit():
    """Of three workers' training, on one, two and three servers."""
    expected = on_cluster(train, 3, 1, deterministic=True)[0]
    for servers in (2, 3):
        for found in on_cluster(train, 3, servers, deterministic=True):
            assert_equal(found, expected)


def test_batches_of_ones_own_count_alike():
    """Without a loader of the strategy each worker's gradient counts once, and the result is their mean."""

    def script(strategy, index):
        state = psj.TrainState.create(
            apply_fn=None, params={"w": np.zeros(2, "f4")}, tx=ps.optimizers.SGD(1.0), strategy=strategy
        )
        return state.apply_gradients(grads={"w": np.full(2, index, "f4")}).params["w"].tolist()

    assert on_cluster(script, 3) == [[-1.0, -1.0]] * 3


def test_the_parameters_of_the_first_worker_count():
    """Whatever the others have drawn."""

    def script(strategy, index):
        params = {"w": np.full(2, 7 + index, "f4")}
        state = psj.TrainState.create(apply_fn=None, params=params, tx=ps.optimizers.SGD(1.0), strategy=strategy)
        return state.params["w"].tolist()

    assert on_cluster(script, 3) == [[7.0, 7.0]] * 3


def test_asynchronous_workers_see_their_own_steps():
    """Each push is a step of its own gradient, whole; none waits for another."""

    def script(strategy, index):
        state = psj.TrainState.create(
            apply_fn=None, params={"w": np.zeros(1, "f4")}, tx=ps.optimizers.SGD(1.0), strategy=strategy
        )
        seen = []
        for _ in range(5):
            state = state.apply_gradients(grads={"w": np.ones(1, "f4")})
            seen.append(float(state.params["w"][0]))
        return seen

    both = on_cluster(script, 2, consistency=ps.Async())
    assert all(later <= earlier - 1 for seen in both for earlier, later in pairwise(seen))
    assert min(seen[-1] for seen in both) == -10


def test_a_step_waits_once():
    """With a loss that is reduced and shown, and an evaluation on the new parameters."""

    def script(strategy, index):
        state = psj.TrainState.create(apply_fn=None, params=start(), tx=psj.optax.adam(1e-2), strategy=strategy)
        found = []
        for epoch in range(2):
            strategy.backend.settle()
            waits, steps = strategy.waits, state.step
            for x, y in psj.loader(ps.ArrayDataset((X, Y)).batch(BATCH), strategy=strategy):
                value, grads = gradients[mean_loss](state.params, x, y)
                state = state.apply_gradients(grads=grads)
                str(strategy.reduce("mean", value, axis=None))
                str(mean_loss(state.params, X[:4], Y[:4]))
            found.append(((strategy.waits - waits) / (state.step - steps), epoch))
        return found[1]

    for found in on_cluster(script, 2):
        assert found == (1.0, 1)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"v": np.zeros(2, "f4")}, ["params/v", "params/w"]),
        ({"w": np.zeros(3, "f4")}, ["params/w", "float32[2]", "float32[3]"]),
    ],
)
def test_workers_with_other_parameters_are_told(params, words):
    """By name and shape, with both sides."""
    created, said = Event(), []

    def create(strategy, given):
        state = psj.TrainState.create(apply_fn=None, params=given, tx=ps.optimizers.SGD(1.0), strategy=strategy)
        return state.params

    def script(strategy, index):
        if index:
            assert created.wait(60)
            create(strategy, params)
        else:
            create(strategy, {"w": np.zeros(2, "f4")})
            created.set()
            strategy.reduce("sum", np.float32(1), axis=None)  # goes on alone, once the other has failed
            raise RuntimeError("over")  # else it waits for the other to come back

    with InProcessCluster(1, 2) as cluster, ThreadPoolExecutor(2) as pool:
        for one in [pool.submit(work, cluster, script, index) for index in range(2)]:
            said.append(one.exception())
    assert isinstance(said[1], ps.errors.VariableMismatch)
    assert [word for word in words if word not in str(said[1])] == [], said[1]
