"""First values of rows: a hash of the table's seed, the key and the column.

So they are the same on each server and for each reader of a checkpoint, however often they are asked for, and no row
has to be made for a lookup. They are computed by NumPy, or by a function of the server for Numba, with equal bits. That
is why normal values come from a table of the normal distribution's quantiles, by additions and multiplications alone:
logarithms differ between libraries.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from pswire.model.hashing import GOLDEN, Hashes, as_words, combined, mixed
from pswire.model.tables import Constant, Normal, TableSpec, TruncatedNormal, Uniform
from pswire.model.tensor import DTYPES, Array, address_of

Float64s = npt.NDArray[np.float64]
Compiled = Callable[..., object]

COMPUTED = ("float32", "float64")
"""Dtypes in which random values are computed; narrower ones are rounded from float32."""

UNIFORM, NORMAL, TRUNCATED = 0, 1, 2

FINE = 6
"""Bits of a probability's mantissa by which its quantile is looked up; between them it is interpolated. The error is
less than 4e-5 of a standard deviation."""

OCTAVES = 33
"""The least probability is 2 to the minus this: more extreme values, one in 4e9, are as that one."""

REST = 52 - FINE
LEAST = 2.0**-OCTAVES
BASE = int(np.array(LEAST).view(np.int64)) >> REST
UNIT = 2.0**-53
CUT = 0.022750131948179212
"""The probability of a normal value below -2."""

SETTLED = 2.0**32
"""Quantiles are rounded to the inverse of this, so that a last bit of another C library does not show."""


@cache
def quantiles() -> Float64s:
    """Returns the quantiles of probabilities from `LEAST` to 1/2, with `1 << FINE` in each octave, and one more."""
    octaves = np.repeat(np.arange(-OCTAVES, -1), 1 << FINE)
    steps = np.tile(np.arange(1 << FINE), OCTAVES - 1)
    probabilities = np.ldexp(1 + steps / (1 << FINE), octaves)
    normal = NormalDist()
    found = np.array([*map(normal.inv_cdf, probabilities.tolist()), 0.0, 0.0])
    return np.round(found * SETTLED) / SETTLED


class RowInitializer:
    """The first values of a table's rows. Used by one thread at a time.

    Args:
        spec: the table.
        compiled: returns a compiled function that does as `computed`, for a dtype of `COMPUTED`; None while there is
            none. It takes the numbers of keys and of columns, the kind and the seed, then the addresses of the keys'
            bits, of two numbers, of `quantiles`, of room for a row of float64, and of the rows that it writes.
    """

    def __init__(self, spec: TableSpec, compiled: Callable[[str], Compiled | None] = lambda dtype: None) -> None:
        self._spec = spec
        self._compiled = compiled
        self._dtype = DTYPES[spec.dtype]
        self._seed = combined(spec.seed)
        self._random = _random(spec)

    def rows(self, keys: Array, into: Array | None = None) -> Array:
        """Returns the first values of some keys' rows.

        Args:
            keys: int64 or uint64, [n].
            into: an array of what is returned, contiguous, in which they are written; None for a new one.

        Returns:
            An array (n, *row shape) of the table's dtype.
        """
        if into is None:
            into = np.empty((keys.size, *self._spec.shape), self._dtype)
        if self._random is None:
            item = self._spec.initializer
            into[...] = item.value if isinstance(item, Constant) else 0
            return into
        dtype = self._spec.dtype if self._spec.dtype in COMPUTED else COMPUTED[0]
        words, width = as_words(keys), self._spec.row.size
        function = self._compiled(dtype)
        if function is None:
            found = computed(words, width, self._seed, *self._random).astype(dtype)
        else:
            kind, *numbers = self._random
            found = into if self._dtype == dtype else np.empty((words.size, width), dtype)
            given = np.array(numbers)
            seed = np.uint64(self._seed).astype(np.int64).item()
            addresses = map(address_of, (words, given, quantiles(), np.empty(width), found))
            function(words.size, width, kind, seed, *addresses)
        if found is not into:
            into[...] = found.reshape(into.shape)
        return into

    def unknown(self, keys: Array) -> Array:
        """Returns what a lookup of keys without a row gives, as `rows` does: zeros if the spec says so."""
        if self._spec.refused == "zeros" and self._spec.admission is not None:
            return np.zeros((keys.size, *self._spec.shape), self._dtype)
        return self.rows(keys)


def _random(spec: TableSpec) -> tuple[int, float, float] | None:
    """Returns the kind of random values and their two numbers; None for values that are not random."""
    match spec.initializer:
        case Uniform(low=low, high=high):
            return UNIFORM, float(low), float(high) - float(low)
        case Normal(mean=mean, stddev=stddev):
            return NORMAL, float(mean), float(stddev)
        case TruncatedNormal(mean=mean, stddev=stddev):
            return TRUNCATED, float(mean), float(stddev)
    return None


def computed(words: Hashes, width: int, seed: int, kind: int, one: float, other: float) -> Float64s:
    """Returns first values, by NumPy.

    Args:
        words: uint64[n], the bits of the keys.
        width: elements of a row.
        seed: 64 bits.
        kind: `UNIFORM`, `NORMAL` or `TRUNCATED`.
        one, other: the lower bound and the range, or mean and standard deviation.

    Returns:
        float64[n, width].
    """
    steps = np.arange(1, width + 1, dtype=np.uint64) * np.uint64(GOLDEN)
    drawn = mixed(mixed(words ^ np.uint64(seed))[:, None] + steps) >> np.uint64(11)
    if kind == UNIFORM:
        return np.asarray(one + other * (drawn.astype(np.float64) * UNIT))
    p = (drawn.astype(np.float64) + 0.5) * UNIT
    if kind == TRUNCATED:
        p = CUT + (1.0 - 2.0 * CUT) * p
    q = np.maximum(0.5 - np.abs(p - 0.5), LEAST)
    bits, knots = q.view(np.int64), quantiles()
    at = (bits >> REST) - BASE
    found: Float64s = knots[at] + (knots[at + 1] - knots[at]) * ((bits & ((1 << REST) - 1)) * 2.0**-REST)
    found[p > 0.5] *= -1.0
    return one + other * found
