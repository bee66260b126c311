"""Initial values of variables and of rows of dynamic tables, with the names and defaults of `keras.initializers`.

    init = ps.initializers.RandomNormal(stddev=0.1, seed=7)
    w = ps.Variable(init((300, 10)))                                       # in strategy.scope()
    users = ps.dynamic_embedding.get_variable("users", dim=64, initializer=init)

The same initializer gives the same values each time, on every machine. A row of a table is a function of the seed, the
key and the column; it does not depend on when and where it is created.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, SupportsIndex

import numpy as np
import numpy.typing as npt

from pswire.model import tables
from pswire.model.tensor import DTYPES, Array

__all__ = ["Constant", "Initializer", "Ones", "RandomNormal", "RandomUniform", "TruncatedNormal", "Zeros"]

Shape = SupportsIndex | Sequence[SupportsIndex]


class Initializer(Protocol):
    """Base of the initializers; a call returns an array of initial values."""

    @property
    def seed(self) -> int:
        """The seed of random values; 0 for other initializers."""
        ...

    def __call__(self, shape: Shape, dtype: npt.DTypeLike = "float32") -> Array:
        """Returns first values.

        Args:
            shape: their shape.
            dtype: their dtype.

        Raises:
            TypeError: random values of a dtype that is none of floats.
        """
        ...

    def _of_rows(self) -> tables.Initializer:
        """Returns what servers know it as, for the rows of a dynamic table."""
        ...


@dataclass(frozen=True)
class Zeros:
    """Fills with zeros.

    Source: `keras.initializers.Zeros`.
    """

    seed = 0

    def __call__(self, shape: Shape, dtype: npt.DTypeLike = "float32") -> Array:
        """Returns zeros, see `Initializer`."""
        return np.zeros(_sizes(shape), _dtype(dtype))

    def _of_rows(self) -> tables.Initializer:
        """Returns what servers know it as."""
        return tables.Zeros()


@dataclass(frozen=True)
class Ones:
    """Fills with ones.

    Source: `keras.initializers.Ones`.
    """

    seed = 0

    def __call__(self, shape: Shape, dtype: npt.DTypeLike = "float32") -> Array:
        """Returns ones, see `Initializer`."""
        return np.ones(_sizes(shape), _dtype(dtype))

    def _of_rows(self) -> tables.Initializer:
        """Returns what servers know it as."""
        return tables.Constant(1.0)


@dataclass(frozen=True)
class Constant:
    """Fills with one number.

    Source: `keras.initializers.Constant`.

    Args:
        value: the number, finite.

    Raises:
        ValueError: `value` is not a finite number.
    """

    value: float = 0.0

    seed = 0

    def __post_init__(self) -> None:
        self._of_rows().check()

    def __call__(self, shape: Shape, dtype: npt.DTypeLike = "float32") -> Array:
        """Returns the number in a shape, see `Initializer`."""
        return np.full(_sizes(shape), self.value, _dtype(dtype))

    def _of_rows(self) -> tables.Initializer:
        """Returns what servers know it as."""
        return tables.Constant(self.value)


@dataclass(frozen=True)
class RandomUniform:
    """Draws uniform values in [minval, maxval).

    Source: `keras.initializers.RandomUniform`.

    Args:
        minval: the lower bound.
        maxval: the upper bound.
        seed: an integer, at least 0; another seed gives other values.

    Raises:
        ValueError: a bound is not finite, they are not in order, or the seed is negative.
    """

    minval: float = -0.05
    maxval: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        _check(self)

    def __call__(self, shape: Shape, dtype: npt.DTypeLike = "float32") -> Array:
        """Returns uniform values, see `Initializer`."""
        found = np.random.default_rng(self.seed).uniform(self.minval, self.maxval, _sizes(shape))
        return found.astype(_floating(dtype))

    def _of_rows(self) -> tables.Initializer:
        """Returns what servers know it as."""
        return tables.Uniform(self.minval, self.maxval)


@dataclass(frozen=True)
class RandomNormal:
    """Draws normal values; those of a table's rows are cut off at 6 standard deviations.

    Source: `keras.initializers.RandomNormal`.

    Args:
        mean: the mean.
        stddev: the standard deviation.
        seed: an integer, at least 0; another seed gives other values.

    Raises:
        ValueError: a number is not finite, or `stddev` or the seed is negative.
    """

    mean: float = 0.0
    stddev: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        _check(self)

    def __call__(self, shape: Shape, dtype: npt.DTypeLike = "float32") -> Array:
        """Returns normal values, see `Initializer`."""
        found = np.random.default_rng(self.seed).normal(self.mean, self.stddev, _sizes(shape))
        return found.astype(_floating(dtype))

    def _of_rows(self) -> tables.Initializer:
        """Returns what servers know it as."""
        return tables.Normal(self.mean, self.stddev)


@dataclass(frozen=True)
class TruncatedNormal:
    """Draws normal values, again if a value is more than two standard deviations from the mean.

    Source: `keras.initializers.TruncatedNormal`.

    Args:
        mean: the mean before values are rejected.
        stddev: the standard deviation before values are rejected.
        seed: an integer, at least 0; another seed gives other values.

    Raises:
        ValueError: a number is not finite, or `stddev` or the seed is negative.
    """

    mean: float = 0.0
    stddev: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        _check(self)

    def __call__(self, shape: Shape, dtype: npt.DTypeLike = "float32") -> Array:
        """Returns truncated normal values, see `Initializer`."""
        rng, sizes = np.random.default_rng(self.seed), _sizes(shape)
        drawn = rng.standard_normal(sizes)
        while (beyond := np.abs(drawn) > 2).any():
            drawn[beyond] = rng.standard_normal(int(beyond.sum()))
        return (self.mean + self.stddev * drawn).astype(_floating(dtype))

    def _of_rows(self) -> tables.Initializer:
        """Returns what servers know it as."""
        return tables.TruncatedNormal(self.mean, self.stddev)


def _check(initializer: RandomUniform | RandomNormal | TruncatedNormal) -> None:
    initializer._of_rows().check()
    seed = initializer.seed
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 1 << 64:
        raise ValueError(f"seed of {type(initializer).__name__} is {seed!r}; use an integer from 0 to 2**64 - 1")


def _sizes(shape: Shape) -> tuple[int, ...]:
    sizes = shape if isinstance(shape, Sequence) else (shape,)
    return tuple(operator.index(size) for size in sizes)


def _dtype(dtype: npt.DTypeLike) -> np.dtype[np.generic]:
    name = np.dtype(dtype).name
    if name not in DTYPES:
        raise TypeError(f"dtype {name!r} is not supported for variables; use one of {', '.join(DTYPES)}")
    return DTYPES[name]


def _floating(dtype: npt.DTypeLike) -> np.dtype[np.generic]:
    found = _dtype(dtype)
    if found.name not in tables.RANDOM_DTYPES:
        raise TypeError(f"random values can have dtype {', '.join(tables.RANDOM_DTYPES)}, not {found}")
    return found
