"""Bags of looked-up rows: sums, means and maxima, as functions for `jax.jit`."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from psclient._src.options import check_word
from pswire.errors import InvalidArgument

PoolingMode = Literal["sum", "mean", "max", "sqrtn"]


def embedding(
    inverse: jax.Array, values: jax.Array, max_norm: float | None = None, norm_type: float = 2.0
) -> jax.Array:
    """Returns the row of each id: the shape of `inverse`, then that of a row. May be compiled.

    Args:
        inverse: `rows.inverse` of a lookup; of a group that of one of its tables.
        values: `rows.values` of the lookup.
        max_norm: longer rows become as long; None for rows as they are. The gradient is that through the shortening,
            as in `ps.nn.embedding_lookup`: rows on servers keep their norms.
        norm_type: the p of the norm.

    Raises:
        ValueError: a norm is not positive.
    """
    return _shortened(values, max_norm, norm_type)[inverse]


def embedding_bag(
    inverse: jax.Array,
    values: jax.Array,
    offsets: jax.Array | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    mode: PoolingMode = "mean",
    per_sample_weights: jax.Array | None = None,
    include_last_offset: bool = False,
) -> jax.Array:
    """Returns bags of rows, (B, dim), as `torch.nn.functional.embedding_bag`. May be compiled.

        rows = psj.lookup(users, batch["user"])                                    # ids (B, n)
        bags = psj.embedding_bag(rows.inverse, values, mode="sum")                 # in the compiled function

    Args:
        inverse: `rows.inverse` of a lookup: (B, n) for bags of n, or (N,) with offsets.
        values: `rows.values` of the lookup.
        offsets: (B,), the index in `inverse` at which each bag begins. The last bag goes on to the end of `inverse`.
        max_norm: as in `embedding`.
        norm_type: as in `embedding`.
        mode: "sum", "mean", "max" or "sqrtn"; zeros for an empty bag. "mean" divides by the number of ids, "sqrtn" by
            the root of the sum of squares of the weights.
        per_sample_weights: the weight of each id, of the shape of `inverse`; for "sum" and "sqrtn". A weight of 0
            leaves out an id that only fills up a bag.
        include_last_offset: True if the offsets include the end of the last bag.

    Raises:
        ValueError: another mode, weights with another mode or of another shape, or offsets that do not fit.
    """
    check_word("mode", mode, PoolingMode)
    if per_sample_weights is not None and (mode not in ("sum", "sqrtn") or per_sample_weights.shape != inverse.shape):
        raise InvalidArgument(
            f"per_sample_weights of shape {per_sample_weights.shape} with mode {mode!r}, for ids of shape "
            f'{inverse.shape}; use "sum" or "sqrtn", and one weight for each id'
        )
    if inverse.ndim != (2 if offsets is None else 1):
        raise InvalidArgument(
            f"ids of bags have shape {inverse.shape}; pass ids (B, n) without offsets, or ids (N,) with offsets"
        )
    rows = _shortened(values, max_norm, norm_type)[inverse.reshape(-1)]
    weights = None if per_sample_weights is None else per_sample_weights.reshape(-1).astype(rows.dtype)
    if offsets is None:
        bags, width = inverse.shape
        owner = jnp.repeat(jnp.arange(bags), width, total_repeat_length=inverse.size)
    else:
        bags = len(offsets) - include_last_offset
        owner = jnp.searchsorted(offsets[:bags], jnp.arange(inverse.size), side="right") - 1

    def summed(each: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(each, owner, bags, indices_are_sorted=True)

    if mode == "max":
        counts = summed(jnp.ones(inverse.size, jnp.int32))
        greatest = jax.ops.segment_max(rows, owner, bags, indices_are_sorted=True)
        return jnp.where(counts[:, None] > 0, greatest, 0)
    total = summed(rows if weights is None else rows * weights[:, None])
    if mode == "sum":
        return total
    sizes = summed(jnp.ones(inverse.size, rows.dtype) if weights is None else jnp.square(weights))
    divisor = sizes if mode == "mean" else jnp.sqrt(jnp.where(sizes == 0, 1, sizes))
    return total / jnp.where(sizes == 0, 1, divisor)[:, None]


def _shortened(values: jax.Array, max_norm: float | None, norm_type: float) -> jax.Array:
    if max_norm is None:
        return values
    if not (max_norm > 0 and norm_type > 0):
        raise InvalidArgument(f"max_norm is {max_norm!r} and norm_type {norm_type!r}; use positive numbers")
    # A row of zeros, as of padding, has a norm without a gradient.
    zero = (values == 0).all(axis=-1, keepdims=True)
    norms = jnp.linalg.norm(jnp.where(zero, 1, values), ord=norm_type, axis=-1, keepdims=True)
    return jnp.where((norms > max_norm) & ~zero, values * (max_norm / norms), values)
