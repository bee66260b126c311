"""The dtypes in which embeddings are computed."""

from __future__ import annotations

import numpy as np

from psclient._src.arraylike import read
from psclient._src.arrays.devices import AnyArray, Value, as_array, device_of, to_device
from psclient._src.variables.lookup import LookedUpRows


def computed_in(dtype: np.dtype[np.generic]) -> np.dtype[np.generic]:
    """Returns the dtype in which rows are summed: of half precision float32, else their own."""
    return np.dtype(np.float32) if dtype.name in ("float16", "bfloat16") else dtype


def check_floating(rows: LookedUpRows, what: str) -> None:
    """Raises `TypeError` unless rows are of floats.

    Args:
        rows: the rows.
        what: what needs that, for the message.
    """
    if computed_in(rows.dtype).kind != "f":
        raise TypeError(f"{what} supports rows of floats, but variable {rows.variable.name!r} is of {rows.dtype}")


def take_gradient(d: Value, beside: AnyArray) -> AnyArray:
    """Returns a gradient in the dtype of an array, on its device; raises `TypeError` if it is no real numbers."""
    given = as_array(read(d))
    if not np.can_cast(given.dtype, beside.dtype, "same_kind"):
        raise TypeError(f"a gradient of {given.dtype} does not match rows of {beside.dtype}")
    return to_device(given, device_of(beside)).astype(beside.dtype, copy=False)
