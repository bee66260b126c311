"""Tensors of which most elements are not there: `ps.SparseTensor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from psclient._src.arrays.devices import as_array, to_numpy
from pswire.model.rows import Int64s
from pswire.model.tensor import Array


@dataclass(frozen=True, eq=False)
class SparseTensor:
    """A sparse matrix: ids or weights by example, any number for each.

    Source: `tf.SparseTensor`, of two dimensions.

    Args:
        indices: integers (n, 2), row and column of each element.
        values: (n,), the elements.
        dense_shape: the numbers of rows and columns.

    Attributes:
        indices: int64[n, 2], on the host.
        values: (n,), on the host.
        dense_shape: int64[2], on the host.

    Raises:
        TypeError: indices or shape are not integers.
        ValueError: the shapes do not fit, or an index is outside.
    """

    _nest_leaf: ClassVar[bool] = True

    indices: Int64s
    values: Array
    dense_shape: Int64s

    def __post_init__(self) -> None:
        shape = _integers("dense_shape", self.dense_shape).ravel()
        if len(shape) != 2 or int(shape.min()) < 0:
            raise ValueError(f"the dense_shape of a SparseTensor must be (rows, columns), not {tuple(shape.tolist())}")
        indices, values = _integers("indices", self.indices), to_numpy(as_array(self.values))
        if not values.size and not hasattr(self.values, "dtype"):
            values = values.astype(np.int64)  # NumPy makes floats of an empty list, which would be no ids.
        indices = indices.reshape(-1, 2) if not indices.size else indices
        if indices.ndim != 2 or indices.shape[1] != 2 or values.shape != indices.shape[:1]:
            raise ValueError(
                f"indices of shape {indices.shape} and values of shape {values.shape} do not match; a "
                "SparseTensor needs the row and column of each value"
            )
        outside = np.flatnonzero(((indices < 0) | (indices >= shape)).any(axis=1))
        if len(outside):
            first = tuple(indices[outside[0]].tolist())
            raise ValueError(f"index {first} at position {outside[0]} is outside of the shape {tuple(shape.tolist())}")
        for name, value in (("indices", indices), ("values", values), ("dense_shape", shape)):
            object.__setattr__(self, name, value)

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of rows and columns."""
        rows, columns = self.dense_shape.tolist()
        return rows, columns

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """Dtype of the values."""
        return self.values.dtype


def _integers(what: str, given: Any) -> Int64s:
    found = to_numpy(as_array(given))
    if found.size and found.dtype.kind not in "iu":
        raise TypeError(f"the {what} of a SparseTensor must be integers, not {found.dtype}")
    return found.astype(np.int64)
