"""Bags of looked-up rows, and rows of a group of tables, in compiled functions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import psclient as ps
import psclient.jax as psj

SIZE, DIM = 9, 3
FIRST = np.random.default_rng(1).normal(size=(SIZE, DIM)).astype("f4")
IDS = np.array([[1, 2, 1], [8, 0, 3]])
WEIGHTS = np.array([[1.0, 0.5, 2.0], [0.0, 3.0, 1.0]], "f4")
RAGGED, OFFSETS = np.array([4, 4, 7, 2, 1]), np.array([0, 2, 2])
BAGS = [RAGGED[:2], RAGGED[2:2], RAGGED[2:]]


def table_of(strategy, name="table"):
    with strategy.scope():
        return ps.Variable(FIRST, name=name)


@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize(
    ("mode", "weighted"), [("sum", False), ("sum", True), ("mean", False), ("sqrtn", False), ("sqrtn", True)]
)
def test_bags_are_those_of_lookups(strategy, mode, weighted, max_norm):
    """Values and gradients, in a compiled function; with bags of one size, and with offsets and an empty bag."""
    table = table_of(strategy)
    d = np.arange(3.0 * DIM, dtype="f4").reshape(3, DIM)
    given = [
        (IDS, None, WEIGHTS if weighted else None, [*IDS], [*WEIGHTS]),
        (RAGGED, OFFSETS, WEIGHTS.ravel()[:5] if weighted else None, BAGS, np.split(WEIGHTS.ravel()[:5], [2, 2])),
    ]
    for ids, offsets, weights, bags, own in given:

        @jax.jit
        def pooled(values, inverse, offsets=offsets, weights=weights):
            options = {"max_norm": max_norm, "mode": mode, "per_sample_weights": weights}
            return psj.embedding_bag(inverse, values, None if offsets is None else jnp.asarray(offsets), **options)

        rows = psj.lookup(table, ids)
        theirs = ps.nn.embedding_lookup_sparse(table, bags, own if weighted else None, mode, max_norm)
        found, backward = jax.vjp(lambda values, rows=rows, pooled=pooled: pooled(values, rows.inverse), rows.values)
        np.testing.assert_allclose(found, np.asarray(theirs), rtol=1e-5, atol=1e-6)
        gradient, expected = rows.gradient(backward(d[: len(bags)])[0]), theirs.gradient(d[: len(bags)])
        assert gradient.indices.tolist() == expected.indices.tolist()
        np.testing.assert_allclose(gradient.values, expected.values, rtol=1e-5, atol=1e-6)


def test_the_greatest_of_a_bag(strategy):
    """Zeros for an empty one; the offsets may have the end."""
    rows = psj.lookup(table_of(strategy), RAGGED)
    for offsets, last in ((OFFSETS, False), (np.array([0, 2, 2, 5]), True)):
        found = psj.embedding_bag(rows.inverse, rows.values, jnp.asarray(offsets), mode="max", include_last_offset=last)
        expected = [FIRST[own].max(axis=0) if len(own) else np.zeros(DIM) for own in BAGS]
        np.testing.assert_allclose(found, np.array(expected), rtol=1e-6)


def test_rows_of_a_norm_and_of_zeros_have_gradients(strategy):
    """Padding is zeros, whose norm has no gradient."""
    rows = psj.lookup(table_of(strategy), IDS)
    found, d = jax.value_and_grad(lambda values: psj.embedding(rows.inverse, values, 1.0, 1.0).sum())(rows.values)
    norms = np.abs(FIRST[IDS]).sum(-1, keepdims=True)
    np.testing.assert_allclose(found, (FIRST[IDS] / np.maximum(norms, 1)).sum(), rtol=1e-5)
    assert np.isfinite(np.asarray(d)).all()


def test_tables_of_a_group_are_looked_up_together(strategy):
    """One array of rows to differentiate by, with the places of each table's ids, and one gradient for the step."""
    with strategy.scope():
        tables = ps.dynamic_embedding.group(["user", "item", "other"], DIM, initializer=1.0)
    params, tx = {"w": np.ones(DIM, "f4")}, psj.optimizers.sgd(1.0)
    state = psj.TrainState.create(apply_fn=None, params=params, tx=tx, strategy=strategy, tables=[*tables.values()])
    ids = {"item": np.array([[5, 5], [2**48 - 1, 0]]), "user": jnp.array([5])}

    @jax.jit
    def gradients(params, values, inverse):
        def loss(params, values):
            items = psj.embedding_bag(inverse["item"], values, mode="sum")
            return ((items + psj.embedding(inverse["user"], values)) * params["w"]).sum()

        return jax.grad(loss, argnums=(0, 1))(params, values)

    tables.prefetch({name: np.asarray(own) for name, own in ids.items()})
    for _ in range(2):
        rows = psj.lookup(tables, ids)
        assert rows.count == 4
        assert {name: own.shape for name, own in rows.inverse.items()} == {"item": (2, 2), "user": (1,)}
        grads, d = gradients(params, rows.values, rows.inverse)
        state = state.apply_gradients(grads=grads, rows={rows: d})
    found = {name: table.gather([0, 5, 2**48 - 1])[:, 0].tolist() for name, table in tables.items()}
    assert found == {"user": [1, -3, 1], "item": [-1, -3, -1], "other": [1, 1, 1]}
    assert psj.lookup(tables, {}).count == 0
