"""Rows that are clipped to a norm, and the gradient through that."""

from __future__ import annotations

import numbers

from psclient._src.arrays.devices import AnyArray, device_of, device_scope, namespace
from psclient._src.variables.lookup import LookedUpRows
from psclient.nn.precision import check_floating, computed_in, take_gradient


def clip_rows(rows: LookedUpRows, max_norm: float | None) -> LookedUpRows:
    """Returns rows of which none is longer than a norm; None leaves them as they are.

    A longer row x becomes `x * max_norm / |x|`, over all dimensions of a row.

    Source: `tf.clip_by_norm`, and its gradient.

    Args:
        rows: of a variable of floats.
        max_norm: a positive number.

    Raises:
        TypeError: it is no number, or the rows are no floats.
        ValueError: it is not positive and finite.
    """
    if max_norm is None:
        return rows
    if isinstance(max_norm, bool) or not isinstance(max_norm, numbers.Real):
        raise TypeError(f"max_norm must be a number or None, not {max_norm!r}")
    longest = float(max_norm)
    if not 0 < longest < float("inf"):
        raise ValueError(f"max_norm is {max_norm!r}; use a positive number, or None for rows without clipping")
    check_floating(rows, "max_norm")
    device = device_of(rows.values)
    with device_scope(device):
        xp = namespace(device)
        x = rows.values.astype(computed_in(rows.dtype), copy=False)
        norms = xp.sqrt(_sum_over_row(x * x))
        # As in TensorFlow, the gradient of a row of exactly this norm is that of a longer one.
        clipped = norms >= longest
        divisor = xp.where(clipped, norms, 1)
        unit = x / divisor
        values = xp.where(clipped, unit * longest, x).astype(rows.dtype, copy=False)

    def backward(d: AnyArray) -> AnyArray:
        with device_scope(device):
            d = take_gradient(d, x)
            along = unit * _sum_over_row(unit * d)
            return xp.where(clipped, (d - along) * (longest / divisor), d).astype(rows.dtype, copy=False)

    return rows.changed(values, backward)


def _sum_over_row(x: AnyArray) -> AnyArray:
    """Returns the sum over all dimensions but the first, which stay as 1."""
    return x.sum(axis=tuple(range(1, x.ndim)), keepdims=True) if x.ndim > 1 else x
