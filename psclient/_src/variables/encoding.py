"""Contributions, encoded with what was left over before; see `pswire.model.compression` for the bytes."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from pswire.model.compression import (
    BLOCK,
    LEVELS,
    SCALED,
    Codec,
    number_bytes,
    scaled,
    split_places,
    split_scales,
    step_of,
)
from pswire.model.finite import is_finite
from pswire.model.rows import Int64s
from pswire.model.tensor import DTYPES, Array, TensorSpec

STEPS = 127
"""The steps of "int8" above zero, and below it."""


class Encoded(NamedTuple):
    """An encoded contribution.

    Attributes:
        data: what is sent: uint8, the bytes; of rows that are sent as they are the rows.
        finite: False if NaN or infinity is among what it stands for.
    """

    data: Array
    finite: bool


def encode(codec: Codec, array: Array, spec: TensorSpec, residual: Array) -> Encoded:
    """Encodes an array and its residual; the residual becomes what is left over.

    An array with NaN or infinity is encoded alone, and leaves the residual as it was.

    Args:
        codec: how.
        array: of `spec`.
        spec: dtype and shape of the contribution.
        residual: of that shape, contiguous, float32, or float64.
    """
    data = np.empty(codec.nbytes(spec), np.uint8)
    flat, left = array.reshape(-1), residual.reshape(-1)
    if codec.kind == "topk":
        return Encoded(data, _choose(codec, flat, spec, left, data))
    return Encoded(data, _quantize(codec, flat, spec, left, BLOCK, data))


def encode_rows(codec: Codec, ids: Int64s, rows: Array, spec: TensorSpec, residual: Array) -> tuple[Int64s, Encoded]:
    """Encodes rows with their residuals, as `encode`; returns the ids of those that are sent, and what is sent.

    The residuals of other rows stay as they are.

    Args:
        codec: how.
        ids: int64[n], places, in increasing order.
        rows: (n, ...), of the contribution's dtype.
        spec: dtype and shape of the whole.
        residual: of the whole, as of `encode`.
    """
    left = residual[ids]
    if codec.kind == "topk":
        return _choose_rows(codec, ids, rows, residual, left)
    data = np.empty(codec.row_bytes(spec) * len(ids), np.uint8)
    finite = True
    if len(ids):
        block = rows.size // len(ids)
        finite = _quantize(codec, rows.reshape(-1), TensorSpec(spec.dtype, rows.shape), left.reshape(-1), block, data)
        residual[ids] = left
    return ids, Encoded(data, finite)


def _quantize(codec: Codec, flat: Array, spec: TensorSpec, left: Array, block: int, data: Array) -> bool:
    """Writes the bytes, and what is left over of each element; returns whether all is finite."""
    finite = keeps = is_finite(flat)
    step = step_of(block)
    with np.errstate(all="ignore"):
        for first in range(0, flat.size, step):
            at = slice(first, min(first + step, flat.size))
            whole = flat[at].astype(left.dtype)
            if keeps:
                whole += left[at]
            sent = _write(codec, whole, spec, block, first, data)
            if keeps:
                whole -= sent
                finite &= _settle(whole)
                left[at] = whole
    return finite


def _settle(left: Array) -> bool:
    """Takes out of what is left over what is not finite: a sum was too large. Returns whether there was nothing."""
    if is_finite(left):
        return True
    left[~np.isfinite(left)] = 0
    return False


def _write(codec: Codec, whole: Array, spec: TensorSpec, block: int, first: int, data: Array) -> Array:
    """Writes the bytes of some elements; returns what they stand for, in the contribution's dtype."""
    if codec.kind == "float16" and whole.dtype == np.float32 and is_finite(whole):
        bits, rounded = half(whole)
        data.view(np.uint16)[first : first + whole.size] = bits
        return rounded.astype(DTYPES[spec.dtype], copy=False)
    if codec.kind not in SCALED:
        halves = narrow(whole, DTYPES[codec.kind])
        data.view(halves.dtype)[first : first + whole.size] = halves
        return halves.astype(DTYPES[spec.dtype], copy=False)
    all_scales, all_numbers = split_scales(data, spec.size, block, spec.dtype)
    own, width = slice(first // block, -(-(first + whole.size) // block)), number_bytes(codec.kind, block)
    scales, numbers = all_scales[own], all_numbers[own.start * width : own.stop * width]
    full = scales.size * block == whole.size
    rows = (whole if full else np.append(whole, np.zeros(scales.size * block - whole.size, whole.dtype))).reshape(
        -1, block
    )
    largest = LEVELS[-1] if codec.kind == "int4" else STEPS
    np.divide(np.maximum(rows.max(axis=1), -rows.min(axis=1)), whole.dtype.type(largest), out=scales)
    scales[~np.isfinite(scales)] = np.nan
    divisors = np.where(scales > 0, scales, 1)
    found = rows / divisors[:, None]
    found[np.isnan(scales)] = 0
    written = _pairs(found) if codec.kind == "int4" else np.clip(np.rint(found), -STEPS, STEPS).astype(np.int8)
    numbers[:] = written.view(np.uint8).reshape(-1)[: numbers.size]
    return scaled(codec.kind, numbers, scales, block, whole.size, spec.dtype)


def _pairs(rows: Array) -> Array:
    """Returns numbers in units of their scales as bytes of "int4": rows of two elements a byte."""
    if rows.shape[1] % 2:
        rows = np.append(rows, np.zeros((len(rows), 1), rows.dtype), axis=1)
    quarters = np.clip(rows * 4, -_QUARTERS, _QUARTERS).astype(np.int8)  # towards zero: a tie is the larger magnitude
    codes: Array = _CODES[quarters + np.int8(_QUARTERS)]
    found: Array = codes[:, ::2] | codes[:, 1::2] << 4
    return found


_QUARTERS = int(4 * LEVELS[-1])
_MIDDLES = 4 * (np.array(LEVELS[1:]) + np.array(LEVELS[:-1])) / 2
_CODES = np.array(
    [
        np.searchsorted(_MIDDLES, abs(quarters), "right") + 8 * (quarters <= -_MIDDLES[0])
        for quarters in range(-_QUARTERS, _QUARTERS + 1)
    ],
    np.uint8,
)
"""Of numbers in quarters of the scale, from the least on: the sign and the place in `LEVELS` that is nearest."""


def half(whole: Array) -> tuple[Array, Array]:
    """Returns finite float32 numbers in half precision, and what they have become.

    As `narrow`, bit for bit; NumPy's own conversion takes three times as long where the processor has none for vectors.

    Returns:
        bits: uint16, of float16.
        rounded: float32.
    """
    size = np.minimum(np.abs(whole), np.float32(LARGEST[DTYPES["float16"]]))
    exponents = size.view(np.uint32) & _EXPONENT
    np.maximum(exponents, _LEAST_NORMAL, out=exponents)  # below it all steps are as large as there
    # A number 2**13 times as large as that with the exponent alone: added, the processor rounds to the steps of halves.
    magic = exponents + _THIRTEEN
    size += magic.view(np.float32)
    bits = size.view(np.uint32) - magic
    size -= magic.view(np.float32)
    bits += exponents >> _SHIFT
    bits -= _BIAS
    bits |= whole.view(np.uint32) >> np.uint32(16) & np.uint32(0x8000)
    return bits.astype(np.uint16), np.copysign(size, whole, out=size)


_EXPONENT, _SHIFT = np.uint32(0x7F800000), np.uint32(13)
_LEAST_NORMAL, _THIRTEEN = np.uint32(113 << 23), np.uint32(13 << 23)
_BIAS = np.uint32(113 << 10)
"""The exponents of 1 in float32, less those of float16, and the step that the exponent's own bit is."""


def narrow(whole: Array, dtype: np.dtype[Any]) -> Array:
    """Returns an array in another dtype of floating-point numbers: what is finite stays so."""
    found = whole.astype(dtype)
    if not is_finite(found):
        too_large = np.isinf(found) & np.isfinite(whole)
        found[too_large] = np.copysign(LARGEST[dtype], whole[too_large]).astype(dtype)
    return found


LARGEST = {
    DTYPES["float16"]: 65504.0,
    DTYPES["bfloat16"]: 3.3895313892515355e38,
    DTYPES["float32"]: float(np.finfo(np.float32).max),
    DTYPES["float64"]: float(np.finfo(np.float64).max),
}
"""The largest finite number of each dtype."""


def _choose(codec: Codec, flat: Array, spec: TensorSpec, left: Array, data: Array) -> bool:
    """As `_quantize`, of the elements of the largest magnitude."""
    finite = keeps = is_finite(flat)
    places, elements = split_places(data, codec.kept(flat.size), spec.dtype)
    with np.errstate(all="ignore"):
        whole = left if keeps else flat.astype(left.dtype)
        if keeps:
            whole += flat.astype(left.dtype, copy=False)
        places[:] = largest(np.abs(whole), places.size)
        chosen = whole[places]
        elements[:] = narrow(chosen, elements.dtype) + elements.dtype.type(0)  # no zero is negative
        if keeps:
            chosen -= elements.astype(left.dtype, copy=False)
            left[places] = chosen
            finite = _settle(left)
    return finite


def _choose_rows(codec: Codec, ids: Int64s, rows: Array, residual: Array, left: Array) -> tuple[Int64s, Encoded]:
    """As `encode_rows`, of the rows with the elements of the largest magnitude."""
    if not len(ids):
        return ids, Encoded(rows, True)
    finite = keeps = is_finite(rows)
    with np.errstate(all="ignore"):
        whole = rows.astype(left.dtype)
        if keeps:
            whole += left
        magnitudes = np.abs(whole).reshape(len(ids), -1).max(axis=1, initial=0)
        chosen = largest(magnitudes, codec.kept(len(ids)))
        sent = narrow(whole[chosen], rows.dtype)
        if keeps:
            whole[chosen] -= sent.astype(left.dtype, copy=False)
            finite = _settle(whole)
            residual[ids] = whole
    return ids[chosen], Encoded(sent, finite)


def largest(magnitudes: Array, count: int) -> Int64s:
    """Returns the places of the largest magnitudes, in increasing order; of equal ones the first, NaN is infinite."""
    if count >= magnitudes.size:
        return np.arange(magnitudes.size)
    magnitudes[np.isnan(magnitudes)] = np.inf
    edge = np.partition(magnitudes, magnitudes.size - count)[magnitudes.size - count]
    above = np.flatnonzero(magnitudes > edge)
    equal = np.flatnonzero(magnitudes == edge)[: count - above.size]
    return np.sort(np.concatenate([above, equal]))
