"""Ranges of numbers for optimizers, schedules and loss scales."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np


class Range(NamedTuple):
    """A range of finite numbers.

    Attributes:
        words: the words for it in messages.
        holds: returns True for a finite number in it.
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
    """Returns a number as it is kept: one of another type would be another kind of call, and so another program.

    Args:
        name: name of the argument, for messages.
        value: the given value.
        range: the numbers that are allowed.

    Raises:
        TypeError: the value is no number.
        ValueError: the value is out of the range.
    """
    if not is_number(value):
        raise TypeError(f"{name} is {value!r}; use a number")
    if not is_finite(value):
        raise ValueError(f"{name} is {value!r}, and must be finite")
    if not range.holds(value):
        raise ValueError(f"{name} is {value!r}, and must be {range.words}")
    return float(value)


def check_count(name: str, count: Any, least: int, otherwise: str = "") -> int:
    """Checks a whole number, and returns it.

    Args:
        name: name of the argument, for messages.
        count: the given value.
        least: the smallest allowed value.
        otherwise: words for other allowed values.

    Raises:
        ValueError: the value is no whole number, or less than `least`.
    """
    if not (isinstance(count, int) and not isinstance(count, bool) and count >= least):
        raise ValueError(f"{name} is {count!r}, and must be a whole number of at least {least}{otherwise}")
    return count
