"""Functions that the text of kernels calls, for Numba, which is imported where something is compiled.

Numbers of half precision are computed with as float32, and rounded after every op; in memory they are uint16. A row is
summed as NumPy's `add.reduce` sums along an axis without gaps, bit for bit: by pairs of blocks, in each of which eight
sums go side by side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np

from psserver.programs.kernels import intrinsics

Function = Callable[..., Any]

BLOCK = 128
"""Most elements that NumPy sums as one block."""

DEPTH = 64
"""Elements behind a row that is summed: sums of blocks that wait for others."""


@cache
def functions() -> Mapping[str, Any]:
    """Returns the functions by their names in texts. Each is compiled once in a process."""
    numba: Any = import_module("numba")

    def compiled(made: Mapping[str, Function]) -> dict[str, Any]:
        return {name: numba.njit(function, error_model="numpy", forceinline=True) for name, function in made.items()}

    found: dict[str, Any] = {"sqrt": math.sqrt, "floor": np.floor, "ceil": np.ceil, "rint": np.rint}
    found |= {"watch": intrinsics.watching(), "fetch": intrinsics.prefetch(to_write=0, near=2)}
    found |= {"prepare": intrinsics.prefetch(to_write=1, near=3)}
    found |= {"from_half": intrinsics.from_half(), "to_half": intrinsics.to_half()}
    found |= compiled(_CHOICES)
    found |= compiled(_conversions())
    found |= compiled(_roundings(found))
    found |= compiled(_blocks(found))
    return found | compiled(_rows(found))


# ---- Choices ----


def _where(condition: Any, a: Any, b: Any) -> Any:
    return a if condition else b


def _maximum(a: Any, b: Any) -> Any:
    # Of equal values the second, as in NumPy: they may be zeros of different signs.
    return a if (a > b) | (a != a) else b


def _minimum(a: Any, b: Any) -> Any:
    return a if (a < b) | (a != a) else b


def _first_maximum(a: Any, b: Any) -> Any:
    # Of equal values the first, as in NumPy where they are float16.
    return a if (a >= b) | (a != a) else b


def _first_minimum(a: Any, b: Any) -> Any:
    return a if (a <= b) | (a != a) else b


def _sign(a: Any) -> Any:
    return 1 if a > 0 else -1 if a < 0 else 0 if a == 0 else a


def _add(a: Any, b: Any) -> Any:
    return a + b


_CHOICES: Mapping[str, Function] = {
    "add": _add,
    "where": _where,
    "maximum": _maximum,
    "minimum": _minimum,
    "first_maximum": _first_maximum,
    "first_minimum": _first_minimum,
    "sign": _sign,
}


# ---- Half precision ----


def _conversions() -> dict[str, Function]:
    """Returns conversions of bfloat16, to the nearest and the even one of two, and of float64 on its way to float16."""
    bits, real = intrinsics.bits(), intrinsics.real()

    def from_brain(stored: Any) -> Any:
        return real(np.int64(stored) << 16)

    def to_brain(number: Any) -> Any:
        whole = bits(number)
        rounded = (whole + 0x7FFF + (whole >> 16 & 1)) >> 16
        return np.uint16(0x7FC0 if whole & 0x7FFFFFFF > 0x7F800000 else rounded)

    def odd(number: Any) -> Any:
        # A float32 whose last bit is 1 where bits were lost: who rounds it once more has rounded once.
        near = np.float32(number)
        lost = (np.float64(near) != number) & (number == number)
        return real(bits(near) - (abs(np.float64(near)) > abs(number)) | 1) if lost else near

    return {"from_brain": from_brain, "to_brain": to_brain, "odd": odd}


def _roundings(known: Mapping[str, Any]) -> dict[str, Function]:
    """Returns functions that round a float32 to a number of half precision."""
    from_half, to_half = known["from_half"], known["to_half"]
    from_brain, to_brain = known["from_brain"], known["to_brain"]
    return {"half": lambda number: from_half(to_half(number)), "brain": lambda number: from_brain(to_brain(number))}


# ---- Along a row: the first `n` elements of an array, one at least ----


def _blocks(known: Mapping[str, Any]) -> dict[str, Function]:
    """Returns reductions that go eight side by side, then in pairs, and at the end one by one."""

    def reduction(op: intrinsics.Combined, combine: Any) -> Function:
        eights = intrinsics.eights(op)

        def reduced(x: Any, n: int) -> Any:
            found = eights(x, n) if n >= 8 else x[0]
            for i in range(n - n % 8 if n >= 8 else 1, n):
                found = combine(found, x[i])
            return found

        return reduced

    ops: Mapping[str, tuple[intrinsics.Combined, Any]] = {
        "block_sum": ("sum", known["add"]),
        "row_max": ("max", known["maximum"]),
        "row_min": ("min", known["minimum"]),
    }
    return {name: reduction(*op) for name, op in ops.items()}


def _rows(known: Mapping[str, Any]) -> dict[str, Function]:
    """Returns sums."""
    block_sum, brain = known["block_sum"], known["brain"]

    def row_sum(x: Any, n: int) -> Any:
        # A tree of halves, down to blocks. `turns` are the turns down to the one of now, 1 for a right half; sums of
        # left halves wait behind the row for those of right ones.
        turns, depth, waiting, first, size = 0, 0, 0, 0, n
        while True:
            while size > BLOCK:
                size = size // 2 - size // 2 % 8
                turns, depth = 2 * turns, depth + 1
            total = block_sum(x[first : first + size], size)
            while turns & 1:
                waiting -= 1
                total = x[n + waiting] + total
                turns, depth = turns // 2, depth - 1
            if depth == 0:
                return total
            x[n + waiting] = total
            waiting, turns, first, size = waiting + 1, turns + 1, 0, n
            for turn in range(depth - 1, -1, -1):
                half, right = size // 2 - size // 2 % 8, turns >> turn & 1
                first, size = first + right * half, size - half if right else half

    def brain_sum(x: Any, n: int) -> Any:
        # As bfloat16 is summed by who has brought it to NumPy: one by one, each sum rounded.
        total = x[0]
        for i in range(1, n):
            total = brain(total + x[i])
        return total

    def row_total(x: Any, n: int) -> Any:
        # Of integers, which wrap.
        total = np.uint64(0)
        for i in range(n):
            total += np.uint64(x[i])
        return total

    return {"row_sum": row_sum, "brain_sum": brain_sum, "row_total": row_total}
