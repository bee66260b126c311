"""NaN and infinity in arrays on the host, of any dtype."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pswire.model.tensor import DTYPES, Array

CHUNK = 1 << 17
"""Elements that are tested together: the first chunk with such a value ends the search."""

SMALL = 1 << 13
"""Most elements for which a dot product with itself is the fastest test; for more it would start threads."""

EXPONENTS = {DTYPES["float16"]: 0x7C00, DTYPES["bfloat16"]: 0x7F80}
"""The exponent bits of half-precision dtypes, all set in a non-finite value; NumPy's own test of them is slow."""

NO_SIGN = 0x7FFF


def may_be_nonfinite(dtype: np.dtype[Any]) -> bool:
    """Returns True if a dtype has NaN and infinities."""
    return dtype.kind in "fc" or dtype in EXPONENTS


def is_finite(array: Array) -> bool:
    """Returns True if a contiguous array on the host, of any dtype and shape, has neither NaN nor infinities."""
    if not may_be_nonfinite(array.dtype):
        return True
    flat: Any = array.reshape(-1)
    exponent = EXPONENTS.get(flat.dtype)
    if exponent is None and flat.dtype.kind == "f" and flat.size <= SMALL and math.isfinite(np.vdot(flat, flat)):
        return True  # for large numbers the product is infinite and tells nothing
    if exponent is not None:
        flat = flat.view(np.uint16)
    for at in range(0, flat.size, CHUNK):
        chunk = flat[at : at + CHUNK]
        if not (np.isfinite(chunk).all() if exponent is None else (chunk & NO_SIGN).max() < exponent):
            return False
    return True
