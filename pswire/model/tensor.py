"""Tensors as they travel: dtypes, shapes, and where each lies in a payload."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from pswire.errors import InvalidRequest
from pswire.limits import ALIGN, MAX_NDIM, MAX_TENSOR_BYTES

Array = npt.NDArray[Any]

DTYPES: dict[str, np.dtype[np.generic]] = {
    name: np.dtype(name)
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
} | {"bfloat16": np.dtype(ml_dtypes.bfloat16)}
"""Every dtype that a variable may have, little-endian, by name."""


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor.

    Attributes:
        dtype: a key of `DTYPES`.
        shape: sizes of the dimensions.
    """

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"

    @cached_property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @cached_property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.size * DTYPES[self.dtype].itemsize

    def check(self) -> TensorSpec:
        """Returns itself; raises `InvalidRequest` for an unknown dtype or an impossible shape."""
        if self.dtype not in DTYPES:
            raise InvalidRequest(f"unknown dtype {self.dtype[:80]!r}; known are {', '.join(DTYPES)}")
        # First: the product of many numbers takes hours.
        if len(self.shape) > MAX_NDIM:
            raise InvalidRequest(f"a shape has {len(self.shape)} dimensions; at most {MAX_NDIM} are allowed")
        # An empty tensor is bounded by its other dimensions: NumPy refuses to make a larger one.
        extent = math.prod(n for n in self.shape if n) * DTYPES[self.dtype].itemsize
        if any(n < 0 for n in self.shape) or extent > MAX_TENSOR_BYTES:
            raise InvalidRequest(f"invalid shape {self.shape}")
        return self


def spec_of(array: Array) -> TensorSpec:
    """The spec of an array; raises `InvalidRequest` for a dtype that does not travel (objects, strings)."""
    # NumPy makes a dtype's name anew each time, which costs more than all else here.
    name = _NAMES.get(array.dtype) or array.dtype.name
    if name not in DTYPES:
        raise InvalidRequest(f"arrays of dtype {array.dtype} are not supported; known are {', '.join(DTYPES)}")
    return TensorSpec(name, array.shape)


_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def can_travel(dtype: np.dtype[Any]) -> bool:
    """Returns whether arrays of a dtype, in this machine's byte order, are what variables may have."""
    return dtype in _NAMES


def address_of(array: Array) -> int:
    """Returns the address of an array's first byte."""
    address: int = array.__array_interface__["data"][0]
    return address


def portable(array: npt.ArrayLike) -> Array:
    """The array as it travels: C order, little-endian; copied only where it is not so already."""
    result = np.asarray(array)
    if result.dtype.byteorder == ">" or not result.dtype.isnative:
        result = result.astype(result.dtype.newbyteorder("="))
    return result if result.flags.c_contiguous else np.ascontiguousarray(result).reshape(result.shape)


BUFFERS = frozenset("?bBhHiIlLqQfd")
"""The dtypes whose arrays give their memory as bytes at once; to make other views of them first takes several times as
long."""


def align(offset: int) -> int:
    """The next multiple of `ALIGN`."""
    return -(-offset // ALIGN) * ALIGN


def layout(specs: Iterable[TensorSpec]) -> tuple[list[int], int]:
    """The offset of each tensor in a payload, and the size of the payload, in bytes."""
    offsets, end = [], 0
    for spec in specs:
        start = -(-end // ALIGN) * ALIGN if spec.nbytes else end  # as `align`: a round may have thousands of tensors
        offsets.append(start)
        end = start + spec.nbytes
    return offsets, end


def as_bytes(array: Array) -> memoryview:
    """The bytes of a contiguous array, not copied."""
    if array.size and array.dtype.char in BUFFERS:
        return array.data.cast("B")
    return array.reshape(-1).view(np.uint8).data


def join(pieces: Sequence[Array], spec: TensorSpec) -> Array:
    """The pieces of one tensor as an array of its shape: a view if there is one piece, else a copy."""
    if len(pieces) == 1:
        return pieces[0].reshape(spec.shape)
    return np.concatenate([np.empty(0, DTYPES[spec.dtype]), *pieces]).reshape(spec.shape)
