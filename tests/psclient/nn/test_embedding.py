"""Lookups of embeddings: clipped rows, the gradient through the clip, and what is no table."""

from __future__ import annotations

import numpy as np
import pytest

import psclient as ps


def table(rows):
    """A variable of these rows."""
    return ps.Variable(np.asarray(rows, "float64"), name="emb")


def test_a_lookup_without_a_norm_is_the_variable_s():
    """The same rows, and the gradient as it is given."""
    v = table([[1, 2], [3, 4], [5, 6]])
    rows = ps.nn.embedding_lookup(v, [[2], [0]])
    assert np.asarray(rows).tolist() == [[[5, 6]], [[1, 2]]]
    d = np.ones((2, 2))
    assert rows.gradient(d).values is d
    assert np.asarray(ps.nn.embedding_lookup([v], 1)).tolist() == [3, 4]


def test_rows_are_clipped_to_a_norm():
    """Longer ones get the norm, shorter ones stay bit for bit what they are, zeros stay zeros."""
    v = table([[3, 4], [0.1, 0.7], [0, 0], [-30, 40]])
    rows = ps.nn.embedding_lookup(v, [3, 0, 1, 2], max_norm=2.5)
    np.testing.assert_allclose(rows, [[-1.5, 2], [1.5, 2], [0.1, 0.7], [0, 0]])
    assert np.asarray(rows)[2:].tolist() == [[0.1, 0.7], [0, 0]]


@pytest.mark.parametrize("row", [(), (3,), (2, 2)])
def test_the_gradient_goes_through_the_clip(row):
    """It is the difference quotient, by each element; and in the form of the gradient of any lookup."""
    start = np.random.default_rng(1).normal(size=(6, *row)) * 2
    v, ids = table(start), [5, 0, 3, 2]
    rows = ps.nn.embedding_lookup(v, ids, max_norm=1.5)
    d = np.random.default_rng(2).normal(size=rows.values.shape)
    lengths = np.sqrt((rows.values**2).reshape(4, -1).sum(axis=1))
    assert 0 < np.isclose(lengths, 1.5).sum() < 4  # both sides of the bound are tried
    gradient = rows.gradient(d)
    found = np.zeros_like(start)
    for place in np.ndindex(*start.shape):
        ends = []
        for step in (1e-6, -1e-6):
            moved = start.copy()
            moved[place] += step
            v.assign(moved)
            ends.append((ps.nn.embedding_lookup(v, ids, max_norm=1.5).values * d).sum())
        found[place] = (ends[0] - ends[1]) / 2e-6
    np.testing.assert_allclose(gradient, found, atol=1e-7)
    assert gradient.indices.tolist() == [0, 2, 3, 5]


def test_zeros_have_the_gradient_that_is_given():
    """No division by their norm, which is 0."""
    with np.errstate(all="raise"):
        rows = ps.nn.embedding_lookup(table(np.zeros((2, 3))), [1], max_norm=1.0)
        assert rows.gradient(np.ones((1, 3))).values.tolist() == [[1, 1, 1]]


def test_a_clipped_gradient_has_the_variable_s_dtype():
    """Half precision is computed in single, as one of float64 is."""
    v = ps.Variable(np.array([[300.0, 400.0]]), dtype="float16", name="emb")  # whose squares float16 cannot hold
    rows = ps.nn.embedding_lookup(v, [0], max_norm=5)
    assert np.asarray(rows).tolist() == [[3.0, 4.0]]
    gradient = rows.gradient(np.array([[4.0, -3.0]]))
    assert rows.values.dtype == gradient.dtype == np.float16
    np.testing.assert_allclose(gradient.values.astype("float64"), [[0.04, -0.03]], rtol=1e-3)


@pytest.mark.parametrize("norm", [0, -1.0, np.inf, np.nan])
def test_a_norm_is_positive(norm):
    """And finite."""
    with pytest.raises(ValueError, match=r"max_norm is .*give a positive number, or None"):
        ps.nn.embedding_lookup(table([[1]]), [0], norm)


@pytest.mark.parametrize("norm", ["mod", True, np.ones(2)])
def test_a_norm_is_a_number(norm):
    """As it is not where TensorFlow 1 had the partition strategy."""
    with pytest.raises(TypeError, match="max_norm is a number or None"):
        ps.nn.embedding_lookup(table([[1]]), [0], norm)


def test_rows_of_integers_have_no_norm():
    """They are looked up, and not clipped."""
    v = ps.Variable(np.array([[1], [2]]), name="emb")
    assert np.asarray(ps.nn.embedding_lookup(v, [1])).tolist() == [[2]]
    with pytest.raises(TypeError, match="max_norm is for rows of floats, and variable 'emb' is of int64"):
        ps.nn.embedding_lookup(v, [1], 1.0)


def test_what_is_no_table_is_refused():
    """Arrays, several variables, partitions that are not there."""
    v = table([[1]])
    with pytest.raises(TypeError, match=r"params is a variable, and not ndarray; of an array take params\[ids\]"):
        ps.nn.embedding_lookup(np.ones((2, 2)), [0])
    with pytest.raises(ValueError, match="params are 2 variables"):
        ps.nn.embedding_lookup([v, v], [0])
    with pytest.raises(ValueError, match=r"partition_strategy is 'mod'.*div"):
        ps.nn.embedding_lookup(v, [0], partition_strategy="mod")
    assert np.asarray(ps.nn.embedding_lookup(v, [0], partition_strategy="div")).tolist() == [[1]]
