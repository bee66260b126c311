"""Compressed contributions: their codecs, the bytes of each, and the numbers that these bytes stand for.

| codec | an array of n elements | rows, each of m elements |
|---|---|---|
| `float16`, `bfloat16` | each element in 2 bytes | the same |
| `int8` | for each 256 elements a scale, then each element in 1 byte | for each row a scale, then 1 byte an element |
| `int4` | for each 256 elements a scale, then 2 elements a byte | for each row a scale, then 2 elements a byte |
| `topk` | k places, uint32 in increasing order, then the k elements there | the k rows, as they are |

A scale is a float32, of float64 a float64; k is the ratio of n, or of the number of rows, rounded up. The ids of rows
travel as ever. A byte of `int4` has the first element in its low bits, and each row begins with a byte of its own. An
element is a sign, the bit of 8, and the place of its magnitude in `LEVELS`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from pswire.errors import InvalidRequest
from pswire.model.rows import row_bytes
from pswire.model.tensor import DTYPES, Array, TensorSpec

CodecKind = Literal["float16", "bfloat16", "int8", "int4", "topk"]

FLOATS = ("float16", "bfloat16", "float32", "float64")
"""The dtypes of contributions that may be compressed."""

BLOCK = 256
"""Elements of an array that share a scale."""

LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The magnitudes of "int4", in units of the scale: those of 4-bit floating-point numbers (E2M1).

Their relative error on numbers of a normal distribution is 0.11 in blocks of 256, where that of -7..7 is 0.13, and that
of powers of two (E3M0) 0.20; heavy tails add less to it than to that of -7..7.
"""

PIECE = 1 << 16
"""About how many elements are encoded, or decoded, at a time, so that they stay in the processor's caches."""

PLACE = np.dtype(np.uint32)
"""The dtype of a place in an array."""


@dataclass(frozen=True)
class Codec:
    """A way to compress contributions.

    Attributes:
        kind: see the table of the module.
        ratio: of "topk" the part of all elements, or rows, that is sent, above 0 and at most 1; else 1.
    """

    kind: CodecKind
    ratio: float = 1.0

    def __str__(self) -> str:
        return f"{self.kind}({self.ratio})" if self.kind == "topk" else self.kind

    def check(self) -> Codec:
        """Returns itself; raises `InvalidRequest` for a ratio that cannot be."""
        if not 0 < self.ratio <= 1 or (self.kind != "topk" and self.ratio != 1):
            raise InvalidRequest(f"{self.kind} with a ratio of {self.ratio} is not a codec")
        return self

    def kept(self, count: int) -> int:
        """Returns how many of so many elements, or rows, "topk" sends."""
        return min(math.ceil(self.ratio * count), count)

    def nbytes(self, spec: TensorSpec) -> int:
        """Returns the bytes that stand for an array."""
        if self.kind == "topk":
            return self.kept(spec.size) * (PLACE.itemsize + DTYPES[spec.dtype].itemsize)
        if self.kind in SCALED:
            return -(-spec.size // BLOCK) * scale_dtype(spec.dtype).itemsize + number_bytes(self.kind, spec.size)
        return spec.size * DTYPES[self.kind].itemsize

    def row_bytes(self, whole: TensorSpec) -> int:
        """Returns the bytes that stand for one row of an array, without its id."""
        if self.kind == "topk":
            return row_bytes(whole)
        elements = math.prod(whole.shape[1:])
        if self.kind in SCALED:
            return scale_dtype(whole.dtype).itemsize + number_bytes(self.kind, elements)
        return elements * DTYPES[self.kind].itemsize

    def shrinks(self, spec: TensorSpec, rows: bool) -> bool:
        """Returns whether contributions become smaller; "topk" of places that no uint32 holds is not there.

        Args:
            spec: dtype and shape of a contribution as a whole.
            rows: True if contributions are rows.
        """
        if spec.dtype not in FLOATS or not spec.size:
            return False
        if rows:
            return self.kind == "topk" or self.row_bytes(spec) < row_bytes(spec)
        return self.nbytes(spec) < spec.nbytes and (self.kind != "topk" or spec.size <= 1 << 32)


def scale_dtype(dtype: str) -> np.dtype[Any]:
    """Returns the dtype of scales, and of the arithmetic with what was not sent, for contributions of a dtype."""
    return np.dtype(np.float64 if dtype == "float64" else np.float32)


_SIGNED = np.array([*LEVELS, 0, *(-level for level in LEVELS[1:])])
_PAIRS = {
    np.dtype(each): np.array([(_SIGNED[byte & 15], _SIGNED[byte >> 4]) for byte in range(256)], each)
    for each in (np.float32, np.float64)
}
"""Of each byte of "int4" its two elements, in units of the scale."""

SCALED = ("int8", "int4")
"""The codecs whose blocks have scales."""


def number_bytes(kind: CodecKind, elements: int) -> int:
    """Returns the bytes of so many elements of a block, or of whole blocks of an array, without their scales."""
    return -(-elements // 2) if kind == "int4" else elements


def step_of(block: int) -> int:
    """Returns how many elements are encoded, or decoded, at a time: a multiple of those that share a scale."""
    return max(PIECE // block, 1) * block


def split_scales(data: Array, size: int, block: int, dtype: str) -> tuple[Array, Array]:
    """Returns the scales, and the bytes of the numbers, as views.

    Args:
        data: uint8, the bytes.
        size: number of elements.
        block: elements that share a scale.
        dtype: that of the contribution.
    """
    scale = scale_dtype(dtype)
    end = -(-size // block) * scale.itemsize
    return data[:end].view(scale), data[end:]


def split_places(data: Array, kept: int, dtype: str) -> tuple[Array, Array]:
    """Returns the places and the elements of "topk", as views; as `split_scales` takes them."""
    end = kept * PLACE.itemsize
    return data[:end].view(PLACE), data[end:].view(DTYPES[dtype])


def scaled(kind: CodecKind, numbers: Array, scales: Array, block: int, size: int, dtype: str) -> Array:
    """Returns the elements that numbers stand for, in a contribution's dtype.

    Args:
        kind: how they are written, one of `SCALED`.
        numbers: uint8, their bytes, from the beginning of a block on.
        scales: of their blocks.
        block: elements that share a scale.
        size: number of elements.
        dtype: that of the result.
    """
    found: Array
    if kind == "int4":
        pairs = _PAIRS[scales.dtype].take(numbers, axis=0)
        found = (pairs.reshape(scales.size, -1)[:, :block] if block % 2 else pairs).reshape(-1)[:size]
    else:
        found = numbers.view(np.int8).astype(scales.dtype)
    if found.size == scales.size * block:
        by_block = found.reshape(-1, block)
        np.multiply(by_block, scales[:, None], out=by_block)
    else:
        np.multiply(found, np.repeat(scales, block)[: found.size], out=found)
    return found.astype(DTYPES[dtype], copy=False)
