"""Hashes of keys, a bijection of 64 bits, the same in NumPy and compiled functions; the bytes that plans are hashed by.

A key's *hash* takes its place everywhere inside a table: hashes are spread evenly, whatever the keys are, and their
order is the canonical order of a table. The top bits of a hash are its bucket.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import cache
from json import JSONEncoder
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from pswire.model.tensor import Array

Hashes = npt.NDArray[np.uint64]

BUCKETS = 1024
"""Parts into which the keys of each table fall, for its life: the unit of placement, of checkpoints, and of limits."""

BUCKET_BITS = BUCKETS.bit_length() - 1
LOW_BITS = 64 - BUCKET_BITS
"""Bits of a hash below those of its bucket."""

GOLDEN = 0x9E3779B97F4A7C15
"""The step of splitmix64: 2**64 divided by the golden ratio."""

MULTIPLIERS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""The constants of splitmix64's finaliser (Steele, Lea and Flood 2014; Stafford's variant 13)."""

_INVERSES = tuple(pow(factor, -1, 1 << 64) for factor in MULTIPLIERS)
_WORD = (1 << 64) - 1


def mixed(numbers: Hashes) -> Hashes:
    """Returns splitmix64's finaliser of each number, uint64 of any shape, as a new array."""
    found = numbers ^ (numbers >> np.uint64(30))
    found *= np.uint64(MULTIPLIERS[0])
    found ^= found >> np.uint64(27)
    found *= np.uint64(MULTIPLIERS[1])
    found ^= found >> np.uint64(31)
    return found


def unmixed(numbers: Hashes) -> Hashes:
    """Returns what `mixed` was given, as a new array."""
    found = _unshifted(numbers, 31) * np.uint64(_INVERSES[1])
    found = _unshifted(found, 27) * np.uint64(_INVERSES[0])
    return _unshifted(found, 30)


def _unshifted(numbers: Hashes, bits: int) -> Hashes:
    """Undoes `x ^ (x >> bits)`, for bits of at least 22."""
    found = numbers ^ (numbers >> np.uint64(bits))
    return found ^ (numbers >> np.uint64(2 * bits)) if 2 * bits < 64 else found


def combined(*numbers: int) -> int:
    """Returns a hash of several integers; the order counts."""
    found = 0
    for number in numbers:
        found = (found + GOLDEN + (number & _WORD)) & _WORD
        found ^= found >> 30
        found = found * MULTIPLIERS[0] & _WORD
        found ^= found >> 27
        found = found * MULTIPLIERS[1] & _WORD
        found ^= found >> 31
    return found


def as_words(keys: Array) -> Hashes:
    """Returns keys, int64 or uint64, as their 64 bits; copies only what is not contiguous."""
    return np.ascontiguousarray(keys).view(np.uint64)


def hashes_of(keys: Array, salt: int) -> Hashes:
    """Returns the hash of each key.

    Args:
        keys: int64 or uint64, of any shape.
        salt: 64 bits that differ from job to job, so that nobody can choose keys that collide.
    """
    return mixed(as_words(keys) ^ np.uint64(salt))


def keys_of(hashes: Hashes, salt: int, dtype: str) -> Array:
    """Returns the key of each hash, of a dtype of keys."""
    return (unmixed(hashes) ^ np.uint64(salt)).view(dtype)


def buckets_of(hashes: Hashes) -> npt.NDArray[np.int64]:
    """Returns the bucket of each hash, int64."""
    return (hashes >> np.uint64(LOW_BITS)).view(np.int64)


def mixing(tools: Any) -> Any:
    """Returns `mixed` of one number, for functions for Numba."""
    u64, (one, other) = np.uint64, map(np.uint64, MULTIPLIERS)
    thirty, twenty_seven, thirty_one = u64(30), u64(27), u64(31)

    def mix(x):  # type: ignore[no-untyped-def]
        x = (x ^ (x >> thirty)) * one
        x = (x ^ (x >> twenty_seven)) * other
        return x ^ (x >> thirty_one)

    return tools.njit(mix)


def canonical(value: Any) -> bytes:
    """Returns the bytes from which a plan's id is made: JSON without spaces, of ASCII characters.

    A dataclass is the list of its fields in the order of their declaration, without those that are not compared. A
    float has the shortest digits that give it back, with a point or an exponent, so that 1.0 is not 1 and -0.0 is not
    0.0; every NaN is `NaN`.
    """
    return _CANONICAL.encode(value).encode()


@cache
def _compared(kind: type) -> Callable[[Any], tuple[Any, ...]]:
    """Returns what gives the compared fields of a dataclass."""
    names = [each.name for each in fields(kind) if each.compare]
    found = attrgetter(*names)
    return found if len(names) > 1 else lambda value: (found(value),)


_CANONICAL = JSONEncoder(
    check_circular=False, separators=(",", ":"), default=lambda value: _compared(value.__class__)(value)
)
