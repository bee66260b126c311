"""Contributions in, one value out: sums and means over received parts, where they lie."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pswire.model.plan import ReduceOp
from pswire.model.tensor import DTYPES, Array, TensorSpec, join


def reduce(op: ReduceOp, spec: TensorSpec, contributions: Sequence[tuple[float, Sequence[Array]]]) -> Array:
    """Combines contributions in the order given, which is task order, so that sums are reproducible.

    Args:
        op: "sum"; "mean": the sum over the sum of the weights; "first": the first that is there.
        spec: dtype and shape of each contribution and of the value.
        contributions: weight and pieces of each; the pieces of a weight of 0 are not looked at.

    Returns:
        The value, of `spec`; zeros where nothing contributes to a sum, NaN where nothing to a mean. It
        may be a view of a received part.
    """
    present = [pieces for weight, pieces in contributions if weight][: 1 if op == "first" else None]
    with np.errstate(all="ignore"):
        value = _sum(spec, present)
        if op == "mean":
            # One contribution is its sender's memory, which is only read; a sum is ours.
            out = value if len(present) > 1 else np.empty_like(value)
            # Half precision has no room for many elements' weights.
            total = np.asarray(sum(weight for weight, _ in contributions), np.result_type(value.dtype, np.float32))
            np.divide(value, total, out=out, casting="same_kind")
            value = out
    return value


def _sum(spec: TensorSpec, contributions: Sequence[Sequence[Array]]) -> Array:
    if not contributions:
        return np.zeros(spec.shape, DTYPES[spec.dtype])
    first, *others = contributions
    if not others:
        return join(first, spec)
    whole = np.empty(spec.shape, DTYPES[spec.dtype])
    total = whole.reshape(-1)
    if all([len(p) for p in first] == [len(p) for p in other] for other in others):
        # Everybody cut the payload alike, so one pass adds the first two and nothing is copied.
        at = 0
        for pieces in zip(first, *others, strict=True):
            segment = total[at : at + len(pieces[0])]
            np.add(pieces[0], pieces[1], out=segment)
            for piece in pieces[2:]:
                np.add(segment, piece, out=segment)
            at += len(segment)
        return whole
    total[:] = join(first, spec).reshape(-1)
    for other in others:
        at = 0
        for piece in other:
            total[at : at + len(piece)] += piece
            at += len(piece)
    return whole
