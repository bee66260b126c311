"""First values of rows: a hash of the table's seed, the key and the column.

So they are the same on each server, however often they are asked for, and no row has to be made for a lookup. They are
computed in two ways with equal bits, by NumPy and by a function for Numba. That is why normal values come from a table
of the normal distribution's quantiles, by additions and multiplications alone: logarithms differ between libraries.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from psserver.programs.kernels.compiler import NumbaKernel, Tools
from psserver.tables.hashing import GOLDEN, Hashes, as_words, combined, mixed, mixing
from pswire.model.tables import Constant, Normal, TableSpec, TruncatedNormal, Uniform
from pswire.model.tensor import DTYPES, Array, address_of

Float64s = npt.NDArray[np.float64]

COMPUTED = ("float32", "float64")
"""Dtypes in which random values are computed; narrower ones are rounded from float32."""

UNIFORM, NORMAL, TRUNCATED = 0, 1, 2

FINE = 6
"""Bits of a probability's mantissa by which its quantile is looked up; between them it is interpolated. The error is
less than 4e-5 of a standard deviation."""

OCTAVES = 33
"""The least probability is 2 to the minus this: more extreme values, one in 4e9, are as that one."""

_REST = 52 - FINE
_LEAST = 2.0**-OCTAVES
_BASE = int(np.array(_LEAST).view(np.int64)) >> _REST
_UNIT = 2.0**-53
_CUT = 0.022750131948179212
"""The probability of a normal value below -2."""

SETTLED = 2.0**32
"""Quantiles are rounded to the inverse of this, so that a last bit of another C library does not show."""


@cache
def quantiles() -> Float64s:
    """Returns the quantiles of probabilities from `_LEAST` to 1/2, with `1 << FINE` in each octave, and one more."""
    octaves = np.repeat(np.arange(-OCTAVES, -1), 1 << FINE)
    steps = np.tile(np.arange(1 << FINE), OCTAVES - 1)
    probabilities = np.ldexp(1 + steps / (1 << FINE), octaves)
    normal = NormalDist()
    found = np.array([*map(normal.inv_cdf, probabilities.tolist()), 0.0, 0.0])
    return np.round(found * SETTLED) / SETTLED


class FirstValues:
    """The first values of a table's rows. Used by one thread at a time.

    Args:
        spec: the table.
        compiled: returns `filling`, compiled for a dtype of `COMPUTED`; None while it is not.
    """

    def __init__(self, spec: TableSpec, compiled: Callable[[str], NumbaKernel | None] = lambda dtype: None) -> None:
        self._spec = spec
        self._compiled = compiled
        self._dtype = DTYPES[spec.dtype]
        self._seed = combined(spec.seed)
        self._random = _random(spec)

    def rows(self, keys: Array) -> Array:
        """Returns the first values of some keys' rows as a new array.

        Args:
            keys: int64 or uint64, [n].

        Returns:
            An array (n, *row shape) of the table's dtype.
        """
        shape = (keys.size, *self._spec.shape)
        if self._random is None:
            item = self._spec.initializer
            return np.full(shape, item.value if isinstance(item, Constant) else 0, self._dtype)
        dtype = self._spec.dtype if self._spec.dtype in COMPUTED else COMPUTED[0]
        words, width = as_words(keys), self._spec.row.size
        function = self._compiled(dtype)
        if function is None:
            found = computed(words, width, self._seed, *self._random).astype(dtype)
        else:
            kind, *numbers = self._random
            found = np.empty((words.size, width), dtype)
            given = np.array(numbers)
            seed = np.uint64(self._seed).astype(np.int64).item()
            addresses = map(address_of, (words, given, quantiles(), np.empty(width), found))
            function(words.size, width, kind, seed, *addresses)
        return found.astype(self._dtype, copy=False).reshape(shape)


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
        return np.asarray(one + other * (drawn.astype(np.float64) * _UNIT))
    p = (drawn.astype(np.float64) + 0.5) * _UNIT
    if kind == TRUNCATED:
        p = _CUT + (1.0 - 2.0 * _CUT) * p
    q = np.maximum(0.5 - np.abs(p - 0.5), _LEAST)
    bits, knots = q.view(np.int64), quantiles()
    at = (bits >> _REST) - _BASE
    found: Float64s = knots[at] + (knots[at + 1] - knots[at]) * ((bits & ((1 << _REST) - 1)) * 2.0**-_REST)
    found[p > 0.5] *= -1.0
    return one + other * found


def filling(tools: Tools) -> Callable[..., None]:
    """Returns `fill(n, width, kind, seed, words, numbers, quantiles, room, rows)` for Numba: the same as `computed`."""
    carray, mix, bits = tools.carray, mixing(tools), tools.bits
    golden, eleven, knot_count = np.uint64(GOLDEN), np.uint64(11), len(quantiles())
    mask, fine = (1 << _REST) - 1, 2.0**-_REST
    unit, cut, least, rest, base = _UNIT, _CUT, _LEAST, _REST, _BASE
    uniform, truncated = UNIFORM, TRUNCATED

    def fill(
        n: Any, width: Any, kind: Any, seed: Any, p_words: Any, p_numbers: Any, p_knots: Any, p_room: Any, p_rows: Any
    ) -> None:
        words, numbers = carray(p_words, n), carray(p_numbers, 2)
        knots, rows = carray(p_knots, knot_count), carray(p_rows, n * width)
        room = carray(p_room, width)
        salt, one, other = np.uint64(seed), numbers[0], numbers[1]
        shift, scale = (cut, 1.0 - 2.0 * cut) if kind == truncated else (0.0, 1.0)
        for i in range(n):
            start = mix(words[i] ^ salt)
            row = rows[i * width : (i + 1) * width]
            if kind == uniform:
                for c in range(width):
                    drawn = np.int64(mix(start + np.uint64(c + 1) * golden) >> eleven)
                    row[c] = one + other * (np.float64(drawn) * unit)
                continue
            for c in range(width):  # two loops: several elements at once in this one
                drawn = np.int64(mix(start + np.uint64(c + 1) * golden) >> eleven)
                room[c] = shift + scale * ((np.float64(drawn) + 0.5) * unit)
            for c in range(width):
                p = room[c]
                word = bits(max(0.5 - abs(p - 0.5), least))
                at = np.uint64((word >> rest) - base)
                low, high = knots[at], knots[at + np.uint64(1)]
                found = low + (high - low) * (np.float64(word & mask) * fine)
                row[c] = one + other * (-found if p > 0.5 else found)

    return fill
