"""The ops of update functions, by their names in the Python array API standard.

They work alike on tracers, NumPy arrays and CuPy arrays; a test holds that there is one for each row of
`pswire.model.program.OPS`, beside `clip` and `vector_norm`, which are made of several. NumPy's own functions do the
same in update functions; these are for what has no NumPy name that CuPy shares, and for those who like one place to
look.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pswire.model.program import OPS

Axis = int | Sequence[int] | None

Value = Any
"""An array of NumPy or CuPy, a number, a variable, or the tracer that stands for one in an update function."""


def _unary(name: str) -> Callable[[Value], Value]:
    function = getattr(np, OPS[name].numpy)

    def op(x: Value, /) -> Value:
        return function(x)

    op.__name__ = op.__qualname__ = name
    op.__doc__ = f"`{name}` of each element; as `numpy.{OPS[name].numpy}`."
    return op


def _binary(name: str) -> Callable[[Value, Value], Value]:
    function = getattr(np, OPS[name].numpy)

    def op(x1: Value, x2: Value, /) -> Value:
        return function(x1, x2)

    op.__name__ = op.__qualname__ = name
    op.__doc__ = f"`{name}` element by element, broadcast; as `numpy.{OPS[name].numpy}`."
    return op


def _reduction(name: str) -> Callable[..., Value]:
    function = getattr(np, OPS[name].numpy)

    def op(x: Value, /, *, axis: Axis = None, keepdims: bool = False) -> Value:
        return function(x, axis=axis, keepdims=keepdims)

    op.__name__ = op.__qualname__ = name
    op.__doc__ = f"`{name}` over `axis`, or over all; as `numpy.{OPS[name].numpy}`."
    return op


abs = _unary("abs")
negative = _unary("negative")
positive = _unary("positive")
sqrt = _unary("sqrt")
square = _unary("square")
exp = _unary("exp")
expm1 = _unary("expm1")
log = _unary("log")
log1p = _unary("log1p")
sin = _unary("sin")
cos = _unary("cos")
tanh = _unary("tanh")
sign = _unary("sign")
floor = _unary("floor")
ceil = _unary("ceil")
round = _unary("round")
isfinite = _unary("isfinite")
isnan = _unary("isnan")
logical_not = _unary("logical_not")

add = _binary("add")
subtract = _binary("subtract")
multiply = _binary("multiply")
divide = _binary("divide")
floor_divide = _binary("floor_divide")
remainder = _binary("remainder")
pow = _binary("pow")
maximum = _binary("maximum")
minimum = _binary("minimum")
equal = _binary("equal")
not_equal = _binary("not_equal")
less = _binary("less")
less_equal = _binary("less_equal")
greater = _binary("greater")
greater_equal = _binary("greater_equal")
logical_and = _binary("logical_and")
logical_or = _binary("logical_or")
matmul = _binary("matmul")

sum = _reduction("sum")
mean = _reduction("mean")
max = _reduction("max")
min = _reduction("min")
all = _reduction("all")
any = _reduction("any")


def where(condition: Value, x1: Value, x2: Value, /) -> Value:
    """`x1` where the condition holds, `x2` elsewhere, broadcast; instead of `if` in update functions."""
    return np.where(condition, x1, x2)


def astype(x: Value, dtype: npt.DTypeLike, /) -> Value:
    """The array in another dtype; "bfloat16" is one."""
    return x.astype(np.dtype(dtype))


def broadcast_to(x: Value, /, shape: Sequence[int]) -> Value:
    """The array in another shape, its elements repeated."""
    return np.broadcast_to(x, tuple(shape))


def clip(x: Value, /, min: Value | None = None, max: Value | None = None) -> Value:
    """The array within bounds; None for no bound."""
    return np.clip(x, min, max)


def vector_norm(x: Value, /, *, axis: Axis = None, keepdims: bool = False, ord: float = 2) -> Value:
    """The norm of all elements, or over `axis`, for clipping and trust ratios; as `numpy.linalg.vector_norm`."""
    axes: Any = tuple(axis) if isinstance(axis, Sequence) else axis
    return np.linalg.vector_norm(x, axis=axes, keepdims=keepdims, ord=ord)


__all__ = [
    "abs",
    "add",
    "all",
    "any",
    "astype",
    "broadcast_to",
    "ceil",
    "clip",
    "cos",
    "divide",
    "equal",
    "exp",
    "expm1",
    "floor",
    "floor_divide",
    "greater",
    "greater_equal",
    "isfinite",
    "isnan",
    "less",
    "less_equal",
    "log",
    "log1p",
    "logical_and",
    "logical_not",
    "logical_or",
    "matmul",
    "max",
    "maximum",
    "mean",
    "min",
    "minimum",
    "multiply",
    "negative",
    "not_equal",
    "positive",
    "pow",
    "remainder",
    "round",
    "sign",
    "sin",
    "sqrt",
    "square",
    "subtract",
    "sum",
    "tanh",
    "vector_norm",
    "where",
]
