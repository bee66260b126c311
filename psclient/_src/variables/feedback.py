"""Error feedback: what compression has left over of this process's contributions to a variable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from psclient._src.variables.encoding import Encoded, encode, encode_rows
from pswire.model.compression import Codec, scale_dtype
from pswire.model.plan import Form, ReduceOp
from pswire.model.rows import Int64s
from pswire.model.tensor import DTYPES, Array, TensorSpec


class Feedback:
    """The compression of this process's contributions to a variable, or to a shard of one.

    Used by one thread at a time: the one that sends a round, or that ends a contribution which was promised.

    Args:
        codec: how they are compressed.
        saved: the variable on servers that has the sum of all processes' residuals as of the last checkpoint.
        first: returns the residual to begin with, when it is first needed; None for zeros.
    """

    def __init__(self, codec: Codec, saved: Any, first: Callable[[Feedback], Array | None]) -> None:
        self.codec = codec
        self.saved = saved
        self._first = first
        self._residual: Array | None = None

    @classmethod
    def spec_of(cls, variable: TensorSpec) -> TensorSpec:
        """Returns dtype and shape of the residuals of a variable."""
        return TensorSpec(scale_dtype(variable.dtype).name, variable.shape)

    def codec_for(self, op: ReduceOp, spec: TensorSpec, form: Form) -> Codec | None:
        """Returns how a contribution travels: compressed if it is of the variable's shape, and becomes smaller."""
        fits = op != "first" and form != "keys" and spec.shape == self.saved.spec.shape
        return self.codec if fits and self.codec.shrinks(spec, form == "rows") else None

    @property
    def residual(self) -> Array:
        """What is left over, float32, or float64; of the variable's shape."""
        if self._residual is None:
            first, spec = self._first(self), self.saved.spec
            self._residual = np.zeros(spec.shape, DTYPES[spec.dtype]) if first is None else first
        return self._residual

    def begin(self, residual: Array | None) -> None:
        """Goes on from a residual, whose memory becomes its own; from zeros for None."""
        self._first = lambda _: residual
        self._residual = None

    def encode(self, array: Array, spec: TensorSpec) -> Encoded:
        """Returns what is sent for an array, and keeps what is left over."""
        return encode(self.codec, array, spec, self.residual)

    def encode_rows(self, ids: Int64s, rows: Array, spec: TensorSpec) -> tuple[Int64s, Encoded]:
        """Returns what is sent for rows, and keeps what is left over; see `encode_rows`."""
        return encode_rows(self.codec, ids, rows, spec, self.residual)
