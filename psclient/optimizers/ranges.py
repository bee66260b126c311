"""Which numbers optimizers, schedules and loss scales take."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np


class Range(NamedTuple):
    """Which numbers may be given; none that is not finite.

    Attributes:
        words: that say so.
        holds: whether a finite number is one of them.
    """

    words: str
    holds: Callable[[float], bool]


FINITE = Range("finite", lambda x: True)
AT_LEAST_0 = Range("at least 0", lambda x: x >= 0)
AT_LEAST_1 = Range("at least 1", lambda x: x >= 1)
AT_MOST_0 = Range("at most 0", lambda x: x <= 0)
MORE_THAN_0 = Range("more than 0", lambda x: x > 0)
FROM_0_TO_1 = Range("between 0 and 1", lambda x: 0 <= x <= 1)
LESS_THAN_1 = Range("at least 0 and less than 1", lambda x: 0 <= x < 1)


def is_number(value: Any) -> bool:
    """Returns whether a value is one real number, Python's or another library's; a bool is none."""
    has = hasattr(type(value), "__float__") and not isinstance(value, bool | np.bool_)
    return has and not np.ndim(value)


def is_finite(value: Any) -> bool:
    """Returns whether a number is neither infinite, nor NaN, nor a whole one beyond all floats."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def check_number(name: str, value: Any, range: Range = FINITE) -> float:
    """A number as it is kept: one of another type would be another kind of call, and so another program.

    Args:
        name: what it is for.
        value: whatever was given.
        range: which numbers it may be.

    Raises:
        TypeError: it is no number.
        ValueError: it is out of the range.
    """
    if not is_number(value):
        raise TypeError(f"{name} is {value!r}; give a number")
    if not is_finite(value):
        raise ValueError(f"{name} is {value!r}, and must be finite")
    if not range.holds(value):
        raise ValueError(f"{name} is {value!r}, and must be {range.words}")
    return float(value)


def check_count(name: str, count: Any, least: int, otherwise: str = "") -> int:
    """A whole number as it is kept.

    Args:
        name: what it is for.
        count: whatever was given.
        least: the least that it may be.
        otherwise: words for what else could be given.

    Raises:
        ValueError: it is no whole number, or less.
    """
    if not (isinstance(count, int) and not isinstance(count, bool) and count >= least):
        raise ValueError(f"{name} is {count!r}, and must be a whole number of at least {least}{otherwise}")
    return count
