"""One script, one to three workers and servers: the same parameters, and the same rows of tables."""

from __future__ import annotations

from collections import Counter
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
from psclient.jax.rows import padded_size
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
    with InProcessCluster(servers, workers) as cluster, ThreadPoolExecutor(workers) as pool:
        return list(pool.map(partial(work, cluster, script, **more), range(workers)))


def sgd(strategy, params):
    return psj.TrainState.create(apply_fn=None, params=params, tx=ps.optimizers.SGD(1.0), strategy=strategy)


def train(strategy, index, loss=mean_loss, data=None, steps=STEPS, **more):
    """A user's loop, of so many steps; the parameters at its end."""
    state = psj.TrainState.create(
        apply_fn=None, params=start(), tx=psj.optimizers.adam(1e-2), strategy=strategy, **more
    )
    examples = ps.ArrayDataset((X, Y)).shuffle(0).batch(BATCH) if data is None else data
    batches = psj.Loader(examples, strategy=strategy)
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


@pytest.fixture(scope="module")
def alone():
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
    expected = on_cluster(train, 3, 1, deterministic=True)[0]
    for servers in (2, 3):
        for found in on_cluster(train, 3, servers, deterministic=True):
            jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_batches_of_ones_own_count_alike():
    """Without a loader the result is the mean of gradients; the first worker's parameters count."""

    def script(strategy, index):
        state = sgd(strategy, {"w": np.full(2, 7 + index, "f4")})
        first = state.params["w"].tolist()
        return first, state.apply_gradients(grads={"w": np.full(2, index, "f4")}).params["w"].tolist()

    assert on_cluster(script, 3) == [([7.0, 7.0], [6.0, 6.0])] * 3


def test_asynchronous_workers_see_their_own_steps():
    """Each push is a step of its own gradient, whole; none waits for another."""

    def script(strategy, index):
        state, seen = sgd(strategy, {"w": np.zeros(1, "f4")}), []
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
        state = psj.TrainState.create(apply_fn=None, params=start(), tx=psj.optimizers.adam(1e-2), strategy=strategy)
        found = []
        for epoch in range(2):
            strategy.backend.settle()
            waits, steps = strategy.blocking_waits, state.step
            for x, y in psj.Loader(ps.ArrayDataset((X, Y)).batch(BATCH), strategy=strategy):
                value, grads = gradients[mean_loss](state.params, x, y)
                state = state.apply_gradients(grads=grads)
                str(strategy.reduce("mean", value, axis=None))
                str(mean_loss(state.params, X[:4], Y[:4]))
            found.append(((strategy.blocking_waits - waits) / (state.step - steps), epoch))
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

    def script(strategy, index):
        if index:
            assert created.wait(60)
            return sgd(strategy, params).params
        _ = sgd(strategy, {"w": np.zeros(2, "f4")}).params
        created.set()
        strategy.reduce("sum", np.float32(1), axis=None)  # goes on alone, once the other has failed
        raise RuntimeError("over")  # else it waits for the other to come back

    with InProcessCluster(1, 2) as cluster, ThreadPoolExecutor(2) as pool:
        for one in [pool.submit(work, cluster, script, index) for index in range(2)]:
            said.append(one.exception())
    assert isinstance(said[1], ps.errors.VariableMismatch)
    assert [word for word in words if word not in str(said[1])] == [], said[1]


SIZE, DIM = 50, 3


@pytest.fixture
def cluster():
    with InProcessCluster(2) as found:
        yield found


FIRST = np.arange(SIZE * DIM, dtype="f4").reshape(SIZE, DIM) / 100


def static(strategy):
    with strategy.scope():
        return ps.Variable(FIRST, name="table")


def create(strategy, tx, tables, params=None):
    given = {"w": np.ones(DIM, "f4")} if params is None else params
    return psj.TrainState.create(apply_fn=None, params=given, tx=tx, strategy=strategy, tables=tables)


@jax.jit
def row_gradients(params, values, inverse):
    """The loss, and its gradients by both, of examples with three ids each."""

    def loss(params, values):
        return jnp.mean(jnp.sum(values[inverse] * params["w"], axis=(1, 2)) ** 2)

    return jax.value_and_grad(loss, argnums=(0, 1))(params, values)


def test_sizes_grow_by_a_quarter():
    """No size beyond the first is more than 1.25 times the rows that it is for; two thousand counts are 23 sizes."""
    sizes = [padded_size(count) for count in range(1, 2000)]
    assert all(count <= size <= max(16, 1.25 * count + 1) for count, size in enumerate(sizes, 1))
    assert sizes == sorted(sizes)
    assert len(set(sizes)) == 23


def test_lookups_of_different_counts_are_one_compilation(strategy):
    """Rows that nobody asked for are zeros, and no place leads to them."""
    table, shapes = static(strategy), []

    @jax.jit
    def found(values, inverse):
        shapes.append(values.shape)
        return values[inverse]

    for ids in ([[4, 4], [1, 0]], [[9, 8], [7, 6]], [[2, 2], [2, 2]]):
        rows = psj.lookup(table, ids)
        np.testing.assert_array_equal(found(rows.values, rows.inverse), FIRST[np.array(ids)])
        assert not rows.values[rows.count :].any()
        assert rows.ids.tolist() == sorted(set(np.ravel(ids)))
    assert shapes == [(16, DIM)]
    rows = psj.lookup(table, jnp.array([3, 3]), pad=False)
    assert (rows.values.shape, rows.inverse.dtype, rows.inverse.tolist()) == ((1, DIM), "int32", [0, 0])


MAKE = {"adam": lambda: psj.optimizers.adam(0.1), "adagrad": lambda: ps.optimizers.Adagrad(0.5)}


@pytest.mark.parametrize(
    ("kind", "rule"),
    [("static", "adam"), ("static", "adagrad"), ("sharded", "adagrad"), ("dynamic", "adam"), ("view", "adagrad")],
)
def test_a_step_of_rows_is_a_step_of_the_whole(cluster, kind, rule):
    """Of each kind of table, with dense parameters in the same round; repeated ids count together."""
    partitioner = ps.experimental.partitioners.FixedShardsPartitioner(2) if kind == "sharded" else None
    ids = np.random.default_rng(0).integers(0, SIZE, (8, 4, 3))
    resolver = cluster.resolver()
    with ps.ParameterServerStrategy(cluster_resolver=resolver, variable_partitioner=partitioner) as strategy:
        with strategy.scope():
            if kind in ("dynamic", "view"):
                options = {"dim": DIM, "initializer": 0.25}
                de = ps.dynamic_embedding
                table = de.get_variable("t", **options) if kind == "dynamic" else de.group(["t", "u"], **options)["t"]
                start = np.full((SIZE, DIM), 0.25, "f4")
            else:
                table, start = ps.Variable(FIRST, name="table"), FIRST
        state = create(strategy, MAKE[rule](), [table] if kind != "view" else [table.table])
        whole = create(strategy, MAKE[rule](), [], {"w": np.ones(DIM, "f4"), "t": start})
        for asked in ids:
            rows = psj.lookup(table, asked)
            value, (grads, d) = row_gradients(state.params, rows.values, rows.inverse)
            state = state.apply_gradients(grads=grads, rows={rows: d})
            expected, (grads, d) = row_gradients({"w": whole.params["w"]}, whole.params["t"], asked)
            whole = whole.apply_gradients(grads={**grads, "t": d})
            assert float(value) == pytest.approx(float(expected), rel=1e-5)
        rows = psj.lookup(table, np.arange(SIZE), pad=False)
        np.testing.assert_allclose(rows.values[rows.inverse], whole.params["t"], rtol=1e-5, atol=1e-6)


def test_the_rows_of_the_next_batch_come_with_the_round(cluster):
    """With a loader that is told of lookups there is no pull but the first, and a step waits once."""
    calls = Counter()
    for core in cluster.cores:
        core.stimuli.record = lambda stimulus: calls.update([stimulus.name])
    data = ps.ArrayDataset(np.random.default_rng(0).integers(0, SIZE, (40, 3))).batch(8)
    with ps.ParameterServerStrategy(cluster_resolver=cluster.resolver()) as strategy:
        table = static(strategy)
        state = create(strategy, ps.optimizers.SGD(0.1), [table])
        pulls, waits = [], []
        for ids in psj.Loader(data, prefetch={table: lambda ids: ids}):
            before, begun = calls["pull"], strategy.blocking_waits
            rows = psj.lookup(table, ids)
            _, (grads, d) = row_gradients(state.params, rows.values, rows.inverse)
            pulls.append(calls["pull"] - before)
            state = state.apply_gradients(grads=grads, rows={rows: d})
            str(state.params["w"])
            waits.append(strategy.blocking_waits - begun)
        assert pulls[1:] == [0, 0, 0, 0]
        assert waits == [1] * 5
        assert state.step == 5


def test_only_tables_may_be_trained(strategy):
    """Without a dense parameter, and with slots that are there from the beginning."""
    table = static(strategy)
    state = create(strategy, psj.optimizers.adam(0.1), [table], {})
    slots = [v.name.partition("/")[2] for v in state.tx.variables]
    assert {f"{table.name}/mu", f"{table.name}/nu"} <= {*slots}
    rows = psj.lookup(table, [1, 1])
    state = state.apply_gradients(grads={}, rows={rows: jnp.ones_like(rows.values)})
    assert (state.step, state.params) == (1, {})
    assert table.numpy()[1] == pytest.approx(FIRST[1] - 0.1, abs=1e-5)
    assert set(state._trackable_children()) == {"params", "tx", "tables"}


@pytest.mark.parametrize(
    ("given", "error", "word"),
    [
        (lambda rows, d, t: {t: d}, TypeError, r"a key of rows is a ServerVariable; use rows=\{rows: d\}"),
        (lambda rows, d, t: {rows: d[:2]}, ValueError, r"of rows of 'table.*' has shape \(2, 3\), but .* \(16, 3\)"),
        (lambda rows, d, t: {rows: d, psj.lookup(t, [3]): d}, ValueError, "was looked up twice for this step; look"),
        (lambda rows, d, t: psj.lookup(FIRST, [1]), TypeError, "in a variable or a table, not in a ndarray"),
        (lambda rows, d, t: psj.lookup(t, [SIZE]), ValueError, "id 50 at index 0 is not a row of 50"),
    ],
)
def test_bad_rows_are_refused(strategy, given, error, word):
    """With what to write, before anything is sent."""
    table = static(strategy)
    state = create(strategy, ps.optimizers.SGD(0.1), [table])
    rows = psj.lookup(table, [1, 2])
    dense, d = jax.tree.map(jnp.ones_like, state.params), jnp.ones_like(rows.values)
    with pytest.raises(error, match=word):
        state.apply_gradients(grads=dense, rows=given(rows, d, table))
    assert state.step == 0
