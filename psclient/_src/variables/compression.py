"""How contributions are compressed, as a user says it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from pswire.model.compression import FLOATS, Codec, CodecKind


class Compression:
    """Base of the compressions; the same in each process of a job."""

    _kind: ClassVar[CodecKind]

    @property
    def _codec(self) -> Codec:
        """As it travels."""
        return Codec(self._kind)


@dataclass(frozen=True)
class Float16(Compression):
    """Sends each element as IEEE half precision, in 2 bytes.

    Finite elements beyond 65504 are sent as 65504, and the difference with the next contribution.
    """

    _kind = "float16"


@dataclass(frozen=True)
class BFloat16(Compression):
    """Sends each element as bfloat16, in 2 bytes: the range of float32, with three decimal digits."""

    _kind = "bfloat16"


@dataclass(frozen=True)
class Int8(Compression):
    """Sends each element as one of 255 steps, in 1 byte.

    The steps reach from minus the largest magnitude to the largest magnitude of a block: 256 consecutive elements of an
    array in C order, or one row of a row-wise contribution. A NaN or infinity makes its whole block NaN.
    """

    _kind = "int8"


@dataclass(frozen=True)
class Int4(Compression):
    """Sends each element as a sign and one of 8 magnitudes, in 4 bits: 0, 1/2, 1, 3/2, 2, 3, 4 and 6 sixths.

    The sixths are those of the largest magnitude of a block; blocks, and NaN or infinity, are as with `Int8`.

    Source: the 4-bit floating-point numbers E2M1 of "OCP Microscaling Formats (MX) Specification", 2023. Streaming
    DiLoCo (Douillard et al., 2025) sends pseudo-gradients in 4 bits.
    """

    _kind = "int4"


@dataclass(frozen=True)
class TopK(Compression):
    """Sends only the elements of the largest magnitude, uncompressed, each with its index; of equal ones the first.

    For row-wise contributions it sends the rows that contain the largest elements. Elements that are not sent are added
    to the next contribution.

    Source: Aji and Heafield, "Sparse Communication for Distributed Gradient Descent", 2017.

    Args:
        ratio: the fraction of all elements, or of a contribution's rows, that is sent; more than 0, at most 1. The
            number is rounded up. An element takes 4 bytes more than in an uncompressed array.

    Raises:
        TypeError: the ratio is not a number.
        ValueError: the ratio is not more than 0 and at most 1.
    """

    ratio: float

    def __post_init__(self) -> None:
        if isinstance(self.ratio, bool) or not isinstance(self.ratio, int | float | np.floating):
            raise TypeError(
                f"TopK(ratio={self.ratio!r}) is not a number; use a number above 0 and at most 1, such as 0.01"
            )
        if not 0 < self.ratio <= 1:
            raise ValueError(
                f"TopK(ratio={self.ratio}) is out of range; use a number above 0 and at most 1, such as 0.01 for 1 %"
            )

    @property
    def _codec(self) -> Codec:
        return Codec("topk", float(self.ratio))


Compressed = Compression | Literal[False] | None
"""How contributions to a variable are compressed: False for not at all, None for what the strategy says."""


def check_compression(given: object, where: str) -> Compressed:
    """Returns it; raises `TypeError` for what is no way to compress.

    Args:
        given: what the user gave.
        where: the call, for the message.
    """
    if given is None or given is False or isinstance(given, Compression):
        return given
    named = given.__name__ if isinstance(given, type) and issubclass(given, Compression) else "Int8"
    made = f"{named}({0.01 if given is TopK else ''})"
    raise TypeError(f"{where}: compression is {given!r}; pass an object such as ps.compression.{made}, or False")


def is_compressible(dtype: str) -> bool:
    """Returns whether contributions to a variable of a dtype can be compressed."""
    return dtype in FLOATS
