"""First values: the same each time, of the distributions that Keras's names say."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import psclient as ps
from pswire.model import tables

I = ps.initializers  # noqa: E741
RANDOM = [I.RandomUniform(), I.RandomNormal(), I.TruncatedNormal()]
ALL = [I.Zeros(), I.Ones(), I.Constant(0.5), *RANDOM]


@pytest.mark.parametrize("initializer", ALL, ids=repr)
@pytest.mark.parametrize("dtype", ["float32", np.float64, np.float16, ml_dtypes.bfloat16])
def test_values_are_the_same_each_time(initializer, dtype):
    """In each dtype of floats, as an ordinary array of their own."""
    first, second = initializer((3, 4), dtype), initializer((3, 4), dtype)
    assert first.dtype == dtype
    assert first.shape == (3, 4)
    assert first.tobytes() == second.tobytes()
    assert first.flags.writeable
    assert first is not second


@pytest.mark.parametrize("kind", [I.RandomUniform, I.RandomNormal, I.TruncatedNormal])
def test_another_seed_gives_other_values(kind):
    """And equal ones are equal initializers."""
    assert kind(seed=1)((9,)).tolist() != kind(seed=2)((9,)).tolist()
    assert kind(seed=1) == kind(seed=1)
    assert kind(seed=1) != kind(seed=2)


@pytest.mark.parametrize(
    ("initializer", "mean", "deviation", "least", "greatest"),
    [
        (I.RandomUniform(2, 4, 5), 3, 3**-0.5, 2, 4),
        (I.RandomNormal(1, 2, 5), 1, 2, -12, 14),
        (I.TruncatedNormal(1, 2, 5), 1, 2 * 0.8796, -3, 5),
    ],
    ids=repr,
)
def test_distributions(initializer, mean, deviation, least, greatest):
    """Of a hundred thousand values."""
    found = initializer((100, 1000), "float64")
    assert found.mean() == pytest.approx(mean, abs=0.03)
    assert found.std() == pytest.approx(deviation, rel=0.02)
    assert least <= found.min() < found.max() <= greatest


def test_defaults_are_keras():
    """Names and numbers."""
    assert I.RandomUniform() == I.RandomUniform(minval=-0.05, maxval=0.05, seed=0)
    assert I.RandomNormal() == I.RandomNormal(mean=0.0, stddev=0.05, seed=0)
    assert I.TruncatedNormal() == I.TruncatedNormal(mean=0.0, stddev=0.05, seed=0)
    assert I.Constant(value=2.0)(3).tolist() == [2.0] * 3
    assert I.Ones()((), "int8").tolist() == 1


@pytest.mark.parametrize(
    ("initializer", "wire"),
    [
        (I.Zeros(), tables.Zeros()),
        (I.Ones(), tables.Constant(1.0)),
        (I.Constant(3.0), tables.Constant(3.0)),
        (I.RandomUniform(-1, 1, 7), tables.Uniform(-1, 1)),
        (I.RandomNormal(1, 2, 7), tables.Normal(1, 2)),
        (I.TruncatedNormal(1, 2, 7), tables.TruncatedNormal(1, 2)),
    ],
    ids=repr,
)
def test_servers_know_each(initializer, wire):
    """As first values of rows."""
    assert initializer.of_rows() == wire


@pytest.mark.parametrize(
    "make",
    [
        lambda: I.Constant(float("nan")),
        lambda: I.RandomUniform(1, 0),
        lambda: I.RandomNormal(0, -1),
        lambda: I.TruncatedNormal(float("inf")),
        lambda: I.RandomUniform(seed=-1),
        lambda: I.RandomNormal(seed=1.5),
        lambda: I.TruncatedNormal(seed=True),
    ],
)
def test_numbers_that_cannot_be(make):
    """Are refused when it is made."""
    with pytest.raises(ValueError):
        make()


@pytest.mark.parametrize("initializer", RANDOM, ids=repr)
def test_random_values_are_floats(initializer):
    """Of other dtypes a constant is for the user to choose."""
    with pytest.raises(TypeError, match="float32"):
        initializer((2,), "int32")
    with pytest.raises(TypeError, match="no dtype"):
        initializer((2,), "datetime64[s]")


def test_a_variable_begins_with_them():
    """Given as an array, or as a function without arguments."""
    init = I.RandomNormal(seed=3)
    assert ps.Variable(init((2, 2))).numpy().tolist() == init((2, 2)).tolist()
    assert ps.Variable(lambda: init((2, 2))).numpy().tolist() == init((2, 2)).tolist()
