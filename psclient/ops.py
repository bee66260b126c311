"""The operations of update functions, by their names in the Python array API standard.

They work in the same way on tracers, NumPy arrays and CuPy arrays. In update functions NumPy's own functions do the
same; use these where NumPy and CuPy have no common name, or to find all operations in one place. The functions that
clip gradients have TensorFlow's names and are in `psclient` as well.
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
    op.__doc__ = f"Returns `numpy.{OPS[name].numpy}` of each element."
    return op


def _binary(name: str) -> Callable[[Value, Value], Value]:
    function = getattr(np, OPS[name].numpy)

    def op(x1: Value, x2: Value, /) -> Value:
        return function(x1, x2)

    op.__name__ = op.__qualname__ = name
    op.__doc__ = f"Returns `numpy.{OPS[name].numpy}` of two arrays or numbers, with broadcasting."
    return op


def _reduction(name: str) -> Callable[..., Value]:
    function = getattr(np, OPS[name].numpy)

    def op(x: Value, /, *, axis: Axis = None, keepdims: bool = False) -> Value:
        return function(x, axis=axis, keepdims=keepdims)

    op.__name__ = op.__qualname__ = name
    op.__doc__ = f"Returns `numpy.{OPS[name].numpy}` over `axis`, or over all elements."
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
    """`x1` where the condition is true, else `x2`, broadcast; replaces `if` in update functions."""
    return np.where(condition, x1, x2)


def astype(x: Value, dtype: npt.DTypeLike, /) -> Value:
    """Returns the array in another dtype; also "bfloat16"."""
    return x.astype(np.dtype(dtype))


def broadcast_to(x: Value, /, shape: Sequence[int]) -> Value:
    """Returns the array in another shape, with repeated elements."""
    return np.broadcast_to(x, tuple(shape))


def clip(x: Value, /, min: Value | None = None, max: Value | None = None) -> Value:
    """Limits the elements to bounds; None for no bound."""
    return np.clip(x, min, max)


def vector_norm(x: Value, /, *, axis: Axis = None, keepdims: bool = False, ord: float = 2) -> Value:
    """Returns the norm of all elements, or over `axis`; as `numpy.linalg.vector_norm`."""
    axes: Any = tuple(axis) if isinstance(axis, Sequence) else axis
    return np.linalg.vector_norm(x, axis=axes, keepdims=keepdims, ord=ord)


# ---- Clipping, as TensorFlow does it ----


def clip_by_value(t: Value, clip_value_min: Value, clip_value_max: Value) -> Value:
    """Limits the elements to bounds: smaller ones become the lower bound, larger ones the upper. In any context.

    Source: `tf.clip_by_value`: `maximum(minimum(t, clip_value_max), clip_value_min)`.

    Args:
        t: an array or number; for `IndexedSlices` the values are clipped.
        clip_value_min: the lower bound: a number, or an array that can be broadcast to the shape of `t`.
        clip_value_max: the upper bound, likewise.

    Returns:
        An array of the shape of `t`.

    Raises:
        ValueError: a bound cannot be broadcast to the shape of `t`.
    """
    if _is_slices(t):
        return _with_values(t, clip_by_value(t.values, clip_value_min, clip_value_max))
    t = _array(t)
    clipped = np.maximum(np.minimum(t, clip_value_max), clip_value_min)
    if clipped.shape != t.shape:
        raise ValueError(f"the bounds have shape {clipped.shape}, which cannot clip an array of shape {t.shape}")
    return clipped


def clip_by_norm(t: Value, clip_norm: Value, axes: Axis = None) -> Value:
    """Scales an array down if its norm is more than `clip_norm`. In any context.

    Source: `tf.clip_by_norm`: `t * clip_norm / max(norm, clip_norm)`.

    Args:
        t: an array of floats; for `IndexedSlices` the values are clipped.
        clip_norm: largest norm, more than 0.
        axes: dimensions over which a norm is computed; None for all of them.

    Returns:
        An array of the shape of `t`.
    """
    if _is_slices(t):
        return _with_values(t, clip_by_norm(t.values, clip_norm, axes))
    t = _array(t)
    squares = np.sum(np.square(t), axis=tuple(axes) if isinstance(axes, Sequence) else axes, keepdims=True)
    known = squares > 0
    norm = np.where(known, np.sqrt(np.where(known, squares, np.ones_like(squares))), squares)
    return ((t * clip_norm) / np.maximum(norm, clip_norm)).astype(t.dtype)


def global_norm(t_list: Sequence[Value | None]) -> Value:
    """Returns the norm of all elements of several arrays: the root of the sum of their squares. In any context.

    Source: `tf.linalg.global_norm`.

    Args:
        t_list: arrays of floats, on one device; None is ignored; `IndexedSlices` count by their values. Half precision
            is summed in float32.

    Returns:
        A number.

    Raises:
        TypeError: `t_list` is not a list.
        ValueError: `t_list` has no array.
    """
    listed = [t for t in _listed("global_norm", t_list) if t is not None]
    given = [_single(_array(t.values if _is_slices(t) else t)) for t in listed]
    if not given:
        raise ValueError("global_norm got no arrays; pass at least one that is not None")
    squares = [np.sum(np.square(t)) for t in given]
    total = squares[0]
    for square in squares[1:]:
        total = total + square
    return np.sqrt(total)


def clip_by_global_norm(
    t_list: Sequence[Value | None], clip_norm: Value, use_norm: Value | None = None
) -> tuple[list[Value | None], Value]:
    """Scales several arrays down by one factor if their common norm is more than `clip_norm`. In any context.

    Source: `tf.clip_by_global_norm`; Pascanu et al., "On the difficulty of training Recurrent Neural Networks", 2012.

    Args:
        t_list: arrays of floats, on one device; None stays None, and `IndexedSlices` stay `IndexedSlices`.
        clip_norm: largest norm, more than 0.
        use_norm: the norm of the arrays if it is known; None to compute `global_norm`.

    Returns:
        A list of the arrays, and their norm before. If the norm is not finite, all elements are NaN.

    Raises:
        TypeError: as `global_norm`.
        ValueError: as `global_norm`.
    """
    given = list(_listed("clip_by_global_norm", t_list))
    norm = _array(global_norm(given) if use_norm is None else use_norm)
    with np.errstate(divide="ignore", invalid="ignore"):
        factor = clip_norm * np.minimum(1.0 / norm, np.ones_like(norm) / clip_norm) + (norm - norm)

    def scaled(t: Value | None) -> Value | None:
        if t is None:
            return None
        if _is_slices(t):
            return _with_values(t, scaled(t.values))
        return (_array(t) * factor).astype(_array(t).dtype)

    return list(map(scaled, given)), norm


def _is_slices(t: Value) -> bool:
    """Returns whether it is `IndexedSlices`, which this room does not know."""
    return hasattr(t, "indices") and hasattr(t, "dense_shape")


def _with_values(t: Value, values: Value) -> Value:
    return type(t)(values, t.indices, t.dense_shape)


def _listed(what: str, arrays: Sequence[Value]) -> Sequence[Value]:
    if not isinstance(arrays, list | tuple):
        raise TypeError(f"{what} takes a list of arrays, not a {type(arrays).__name__}; use [x]")
    return arrays


def _array(t: Value) -> Value:
    if hasattr(t, "dtype"):
        return t
    array = np.asarray(t)
    return array.astype(np.float32) if array.dtype == np.float64 else array  # Python's floats, as in variables


def _single(t: Value) -> Value:
    return t.astype(np.float32) if t.dtype.name in ("float16", "bfloat16") else t


__all__ = [
    "abs",
    "add",
    "all",
    "any",
    "astype",
    "broadcast_to",
    "ceil",
    "clip",
    "clip_by_global_norm",
    "clip_by_norm",
    "clip_by_value",
    "cos",
    "divide",
    "equal",
    "exp",
    "expm1",
    "floor",
    "floor_divide",
    "global_norm",
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
