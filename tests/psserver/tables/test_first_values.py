"""First values: the same everywhere, and distributed as they say."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
import pytest

from pswire.model.first_values import FirstValues
from pswire.model.tables import Constant, Normal, TableSpec, TruncatedNormal, Uniform, Zeros
from tests.kit.tables import compiled

KEYS = np.concatenate([np.arange(-2000, 2000), np.arange(4000) << 40, [(1 << 63) - 1, -(1 << 63)]])
RANDOM = [Uniform(-0.5, 1.5), Normal(1.0, 2.0), TruncatedNormal(-1.0, 0.5)]


def rows(spec: TableSpec, keys=KEYS, is_compiled=True):
    return FirstValues(spec, compiled().first_values if is_compiled else lambda dtype: None).rows(keys)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("initializer", RANDOM, ids=lambda i: type(i).__name__)
def test_compiled_or_not_the_bits_are_the_same(initializer, dtype):
    """NumPy and the compiled function agree to the last bit; so do parts of the keys, in any order."""
    spec = TableSpec((3, 5), dtype, initializer=initializer, seed=-3)
    found = rows(spec)
    assert found.shape == (KEYS.size, 3, 5)
    assert found.dtype.name == dtype
    assert found.tobytes() == rows(spec, is_compiled=False).tobytes()
    order = np.random.default_rng(0).permutation(KEYS.size)[:777]
    assert found[order].tobytes() == rows(spec, KEYS[order]).tobytes()


@pytest.mark.parametrize(
    ("initializer", "mean", "deviation"),
    [
        (Uniform(-0.5, 1.5), 0.5, 2 / np.sqrt(12)),
        (Normal(1.0, 2.0), 1.0, 2.0),
        (TruncatedNormal(-1.0, 0.5), -1.0, 0.5 * 0.8796256610342398),
    ],
    ids=["uniform", "normal", "truncated"],
)
def test_moments_and_range(initializer, mean, deviation):
    """Mean, variance and range are those of the distribution, within five errors of half a million values."""
    found = rows(TableSpec((64,), "float64", initializer=initializer, seed=5))
    n, (low, high) = found.size, initializer.extremes
    assert abs(found.mean() - mean) < 5 * deviation / np.sqrt(n)
    assert abs(found.std() / deviation - 1) < 5 / np.sqrt(n)
    assert low <= found.min() < found.max() <= high
    assert len(np.unique(found)) > 0.999 * n


def test_normal_values_have_the_distribution_of_normal_values():
    """The share of values below each of some quantiles is its probability."""
    found = rows(TableSpec((64,), "float64", initializer=Normal(0, 1), seed=1)).reshape(-1)
    for p in (0.0001, 0.001, 0.01, 0.1, 0.3, 0.5, 0.8, 0.99, 0.9999):
        share = np.mean(found < NormalDist().inv_cdf(p))
        assert abs(share - p) < 5 * np.sqrt(p * (1 - p) / found.size), p


def test_nothing_is_correlated():
    """Columns, keys that follow one another, and seeds have nothing to do with each other."""
    found = rows(TableSpec((16,), "float64", initializer=Uniform(-1, 1)))
    other = rows(TableSpec((16,), "float64", initializer=Uniform(-1, 1), seed=1))
    bound = 5 / np.sqrt(len(found))
    between = np.corrcoef(found, rowvar=False)
    assert np.abs(between - np.eye(16)).max() < bound
    flat, size = found.reshape(-1), 5 / np.sqrt(found.size)
    assert abs(np.corrcoef(found[:-1].reshape(-1), found[1:].reshape(-1))[0, 1]) < size
    assert abs(np.corrcoef(flat[:-1], flat[1:])[0, 1]) < size
    assert abs(np.corrcoef(flat, other.reshape(-1))[0, 1]) < size


def test_values_that_are_not_random():
    """Zeros and constants have any dtype."""
    assert rows(TableSpec((2,), "int32", initializer=Constant(7)), KEYS[:2]).tolist() == [[7, 7]] * 2
    assert rows(TableSpec((), "bool", initializer=Zeros()), KEYS[:2]).tolist() == [False] * 2
    assert rows(TableSpec((2,), initializer=Uniform()), KEYS[:0]).shape == (0, 2)
