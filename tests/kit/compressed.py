"""Compression as a reader of its description would write it, element by element or in plain NumPy: a reference."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np

import psclient as ps

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
LARGEST = {"float16": np.float64(65504), "bfloat16": np.float64(ml_dtypes.finfo(BFLOAT16).max)}
DTYPES = {name: np.dtype(name) for name in ("float16", "float32", "float64")} | {"bfloat16": BFLOAT16}

CODECS = {
    "float16": ps.compression.Float16(),
    "bfloat16": ps.compression.BFloat16(),
    "int8": ps.compression.Int8(),
    "topk": ps.compression.TopK(0.1),
}


def arithmetic(dtype: Any) -> np.dtype[Any]:
    """In which residuals are kept."""
    return np.dtype("float64" if np.dtype(dtype) == np.float64 else "float32")


def shown(how: ps.compression.Compression, whole: np.ndarray, dtype: Any, rows: bool = False) -> np.ndarray:
    """What a server takes for a finite contribution, whose residual is added, in the contribution's dtype.

    Of rows with `TopK` those that are not sent are NaN.
    """
    match how:
        case ps.compression.Float16():
            return halves(whole, "float16").astype(dtype)
        case ps.compression.BFloat16():
            return halves(whole, "bfloat16").astype(dtype)
        case ps.compression.Int8():
            blocks = list(whole) if rows else [whole.reshape(-1)[at : at + 256] for at in range(0, whole.size, 256)]
            steps = [eighths(np.atleast_1d(block)).reshape(-1) for block in blocks]
            return np.concatenate(steps).reshape(whole.shape).astype(dtype)
        case ps.compression.TopK(ratio):
            if rows:
                found = np.full(whole.shape, np.nan, dtype)
                kept = first_largest([np.abs(row).max() for row in whole], ratio)
                found[kept] = saturated(whole[kept], dtype)
                return found
            found = np.zeros(whole.size, dtype)
            kept = first_largest(np.abs(whole.reshape(-1)), ratio)
            found[kept] = saturated(whole.reshape(-1)[kept], dtype) + np.zeros(1, dtype)
            return found.reshape(whole.shape)
    raise AssertionError(how)


def halves(whole: np.ndarray, name: str) -> np.ndarray:
    return saturated(whole, DTYPES[name])


def saturated(whole: np.ndarray, dtype: Any) -> np.ndarray:
    """In another dtype; what is too large for that is its largest number."""
    with np.errstate(over="ignore"):
        found = whole.reshape(-1).astype(dtype)
    for at in np.flatnonzero(np.isinf(found)):
        found[at] = math.copysign(float(LARGEST[np.dtype(dtype).name]), float(whole.reshape(-1)[at]))
    return found.reshape(whole.shape)


def eighths(block: np.ndarray) -> np.ndarray:
    """Multiples of a 127th of the largest magnitude."""
    scale = np.abs(block).max() / block.dtype.type(127)
    if scale == 0:
        return np.zeros_like(block)
    return np.clip(np.rint(block / scale), -127, 127).astype(np.int8).astype(block.dtype) * scale


def first_largest(magnitudes: Any, ratio: float) -> list[int]:
    """The places of the largest, the first of those that are equal, in increasing order."""
    order = sorted(range(len(magnitudes)), key=lambda place: (-float(magnitudes[place]), place))
    return sorted(order[: math.ceil(ratio * len(magnitudes))])


class Worker:
    """One process's contributions to a variable, compressed.

    Attributes:
        residual: what is left over.
    """

    def __init__(self, how: ps.compression.Compression, shape: tuple[int, ...], dtype: Any = "float32") -> None:
        self.how = how
        self.dtype = np.dtype(dtype)
        self.residual = np.zeros(shape, arithmetic(dtype))

    def send(self, contribution: np.ndarray) -> np.ndarray:
        """Returns what a server takes for an array."""
        whole = contribution.astype(self.residual.dtype) + self.residual
        sent = shown(self.how, whole, self.dtype)
        self.residual = whole - sent.astype(self.residual.dtype)
        return sent

    def send_rows(self, ids: Any, rows: np.ndarray) -> tuple[list[int], np.ndarray]:
        """Returns what a server takes for rows, each place once."""
        whole = rows.astype(self.residual.dtype) + self.residual[ids]
        sent = shown(self.how, whole, self.dtype, rows=True)
        there = ~np.isnan(sent.reshape(len(ids), -1)[:, 0].astype("float32"))
        left = whole.copy()
        left[there] -= sent[there].astype(left.dtype)
        self.residual[ids] = left
        return list(np.asarray(ids)[there]), sent[there]
