"""Compressed contributions, decoded: as arrays, and summed piece by piece in the order given.

A sum decodes a piece of one contribution after another and adds it, so that what is decoded is never there as a whole
beside the sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np

from pswire.model.compression import (
    BLOCK,
    PLACE,
    SCALED,
    Codec,
    number_bytes,
    scaled,
    split_places,
    split_scales,
    step_of,
)
from pswire.model.rows import row_specs
from pswire.model.tensor import DTYPES, Array, TensorSpec

Decoded = Iterator[tuple[slice, Array]]
"""Pieces of a decoded array: where each is, and its elements."""


def decode(codec: Codec, data: Array, spec: TensorSpec) -> Array:
    """Returns the array that bytes stand for.

    Args:
        codec: how they were encoded.
        data: uint8, the bytes, `codec.nbytes(spec)` of them.
        spec: dtype and shape of the array.
    """
    return total(codec, [data], spec)


def decode_rows(codec: Codec, data: Array, whole: TensorSpec, count: int) -> Array:
    """Returns the rows that bytes stand for.

    Args:
        codec, data: as of `decode`; `codec.row_bytes(whole)` for each row.
        whole: dtype and shape of the array that they are rows of.
        count: number of rows.
    """
    spec = row_specs(whole, count)[1]
    if codec.kind == "topk":
        return data.view(DTYPES[spec.dtype]).reshape(spec.shape)
    found = np.empty(spec.size, DTYPES[spec.dtype])
    with np.errstate(all="ignore"):
        for at, piece in _pieces(codec, data, spec, max(spec.size // max(count, 1), 1)):
            found[at] = piece
    return found.reshape(spec.shape)


def total(codec: Codec, contributions: Sequence[Array], spec: TensorSpec) -> Array:
    """Returns the sum of what contributions stand for, one after another; zeros where there are none.

    Args:
        codec, spec: as of `decode`.
        contributions: uint8, the bytes of each.
    """
    found = np.zeros(spec.size, DTYPES[spec.dtype])
    with np.errstate(all="ignore"):
        for number, data in enumerate(contributions):
            _add(codec, data, spec, found, first=not number)
    return found.reshape(spec.shape)


def _add(codec: Codec, data: Array, spec: TensorSpec, found: Array, first: bool) -> None:
    if codec.kind == "topk":
        places, elements = split_places(data, codec.kept(spec.size), spec.dtype)
        found[places] = elements if first else found[places] + elements
        return
    for at, piece in _pieces(codec, data, spec, BLOCK):
        if first:
            found[at] = piece
        else:
            np.add(found[at], piece, out=found[at])


def are_places(codec: Codec, data: Array, spec: TensorSpec) -> bool:
    """Returns whether the places of "topk" are some of an array, in increasing order; as `decode` takes them."""
    places = data[: codec.kept(spec.size) * PLACE.itemsize].view(PLACE)
    return not places.size or (int(places[-1]) < spec.size and bool((places[1:] > places[:-1]).all()))


def _pieces(codec: Codec, data: Array, spec: TensorSpec, block: int) -> Decoded:
    step = step_of(block)
    if codec.kind in SCALED:
        scales, numbers = split_scales(data, spec.size, block, spec.dtype)
        width = number_bytes(codec.kind, block)
        for first in range(0, scales.size, step // block):
            last = min(first + step // block, scales.size)
            start, end = first * block, min(last * block, spec.size)
            some = numbers[first * width : last * width]
            yield slice(start, end), scaled(codec.kind, some, scales[first:last], block, end - start, spec.dtype)
        return
    halves = data.view(DTYPES[codec.kind])
    single = codec.kind == "float16" and spec.dtype == "float32"
    for at in range(0, spec.size, step):
        own = halves[at : at + step]
        yield slice(at, at + step), _in_single(own) if single else own.astype(DTYPES[spec.dtype])


def _in_single(halves: Array) -> Array:
    """Returns float16 numbers in float32; NumPy converts each by itself, and a table takes a third of that."""
    return np.take(_single(), halves.view(np.uint16), mode="clip")


@cache
def _single() -> Array:
    return np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
