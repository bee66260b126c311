"""Rows of tables in JAX: few shapes, the gradients of the whole, and no call of their own with a loader."""

from __future__ import annotations

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import psclient as ps
import psclient.jax as psj
from psclient.jax.rows import padded_size
from pstesting.in_process import InProcessCluster

SIZE, DIM = 50, 3


@pytest.fixture
def cluster():
    """Two servers, and one worker."""
    with InProcessCluster(2) as found:
        yield found


@pytest.fixture
def strategy(cluster):
    with ps.ParameterServerStrategy(cluster_resolver=cluster.resolver()) as found:
        yield found


def first():
    return np.arange(SIZE * DIM, dtype="f4").reshape(SIZE, DIM) / 100


def static(strategy):
    with strategy.scope():
        return ps.Variable(first(), name="table")


def create(strategy, tx, tables, params=None):
    given = {"w": np.ones(DIM, "f4")} if params is None else params
    return psj.TrainState.create(apply_fn=None, params=given, tx=tx, strategy=strategy, tables=tables)


@jax.jit
def gradients(params, values, inverse):
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
        np.testing.assert_array_equal(found(rows.values, rows.inverse), first()[np.array(ids)])
        assert not rows.values[rows.count :].any()
        assert rows.ids.tolist() == sorted(set(np.ravel(ids)))
    assert shapes == [(16, DIM)]
    rows = psj.lookup(table, jnp.array([3, 3]), pad=False)
    assert (rows.values.shape, rows.inverse.dtype, rows.inverse.tolist()) == ((1, DIM), "int32", [0, 0])


MAKE = {"adam": lambda: psj.optax.adam(0.1), "adagrad": lambda: ps.optimizers.Adagrad(0.5)}


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
                table, start = ps.Variable(first(), name="table"), first()
        state = create(strategy, MAKE[rule](), [table] if kind != "view" else [table.table])
        whole = create(strategy, MAKE[rule](), [], {"w": np.ones(DIM, "f4"), "t": start})
        for asked in ids:
            rows = psj.lookup(table, asked)
            value, (grads, d) = gradients(state.params, rows.values, rows.inverse)
            state = state.apply_gradients(grads=grads, rows={rows: d})
            expected, (grads, d) = gradients({"w": whole.params["w"]}, whole.params["t"], asked)
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
        for ids in psj.loader(data, lookups={table: lambda ids: ids}):
            before, begun = calls["pull"], strategy.waits
            rows = psj.lookup(table, ids)
            _, (grads, d) = gradients(state.params, rows.values, rows.inverse)
            pulls.append(calls["pull"] - before)
            state = state.apply_gradients(grads=grads, rows={rows: d})
            str(state.params["w"])
            waits.append(strategy.waits - begun)
        assert pulls[1:] == [0, 0, 0, 0]
        assert waits == [1] * 5
        assert state.step == 5


def test_only_tables_may_be_trained(strategy):
    """Without a dense parameter, and with slots that are there from the beginning."""
    table = static(strategy)
    state = create(strategy, psj.optax.adam(0.1), [table], {})
    assert {v.name for v in state.tx.variables} >= {"adam/table/mu", "adam/table/nu"}
    rows = psj.lookup(table, [1, 1])
    state = state.apply_gradients(grads={}, rows={rows: jnp.ones_like(rows.values)})
    assert (state.step, state.params) == (1, {})
    assert table.numpy()[1] == pytest.approx(first()[1] - 0.1, abs=1e-5)
    assert set(state.trackable_children()) == {"params", "tx", "tables"}


def test_bad_rows_are_refused(strategy):
    """With what to write, before anything is sent."""
    table = static(strategy)
    state = create(strategy, ps.optimizers.SGD(0.1), [table])
    rows = psj.lookup(table, [1, 2])
    dense, d = jax.tree.map(jnp.ones_like, state.params), jnp.ones_like(rows.values)
    with pytest.raises(TypeError, match=r"a key of rows is a ServerVariable; write rows=\{rows: d\}"):
        state.apply_gradients(grads=dense, rows={table: d})
    with pytest.raises(ValueError, match=r"gradient of rows of 'table' has shape \(2, 3\), and their values \(16, 3\)"):
        state.apply_gradients(grads=dense, rows={rows: d[:2]})
    with pytest.raises(ValueError, match="'table' was looked up twice for this step; look all ids up at once"):
        state.apply_gradients(grads=dense, rows={rows: d, psj.lookup(table, [3]): d})
    with pytest.raises(TypeError, match="rows are looked up in a variable or a table, and not in a ndarray"):
        psj.lookup(first(), [1])
    with pytest.raises(ValueError, match="id 50 at place 0 is no row of 50"):
        psj.lookup(table, [SIZE])
    assert state.step == 0
