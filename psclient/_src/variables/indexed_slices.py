"""Gradients of some rows of a variable: `ps.IndexedSlices`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from psclient._src.arrays.devices import (
    AnyArray,
    Device,
    as_array,
    to_device,
    to_numpy,
)
from psclient._src.arrays.rows import add_groups
from pswire.model.rows import Rows, check_ids, group
from pswire.model.tensor import Array


class IndexedSlices:
    """A sparse gradient: some rows of a variable's shape; all other rows are zero.

    Rows with the same index are summed. Reductions, updates and `apply_gradients` accept it wherever they accept an
    array. `np.asarray` makes the dense array.

    Source: `tf.IndexedSlices`.

    Args:
        values: (n, ...), the rows; an array of NumPy or CuPy.
        indices: integers (n,), the index of each row; may repeat, in any order. For a dynamic table the key of each
            row.
        dense_shape: shape of the dense array, (size, ...); None if it is not known, as for a gradient, which has the
            shape of its variable.

    Raises:
        TypeError: the values are not an array of numbers, or the indices not integers.
        ValueError: the shapes do not fit.

    Examples:
        >>> import numpy as np
        >>> import psclient as ps
        >>> table = ps.Variable(np.zeros((3, 2)))
        >>> gradient = ps.IndexedSlices(np.ones((2, 2)), indices=[0, 2])
        >>> ps.optimizers.SGD(0.5).apply_gradients([(gradient, table)])
        >>> table.numpy()
        array([[-0.5, -0.5],
               [ 0. ,  0. ],
               [-0.5, -0.5]])
    """

    def __init__(self, values: Any, indices: Any, dense_shape: Sequence[int] | None = None) -> None:
        self._values = as_array(values)
        self._indices = as_array(indices)
        if not (self._indices.size or hasattr(indices, "dtype")):
            self._indices = self._indices.astype(np.int64)  # NumPy makes floats of an empty list.
        self._shape = None if dense_shape is None else tuple(int(n) for n in to_numpy(as_array(dense_shape)).tolist())
        if self._values.dtype.kind in "OUSMm":
            raise TypeError(f"the values of IndexedSlices must be numbers, not {self._values.dtype}")
        if self._indices.dtype.kind not in "iu":
            raise TypeError(f"the indices of IndexedSlices must be integers, not {self._indices.dtype}")
        if self._indices.ndim != 1 or self._values.ndim < 1 or len(self._values) != len(self._indices):
            raise ValueError(
                f"values of shape {tuple(self._values.shape)} and indices of shape "
                f"{tuple(self._indices.shape)} do not match; IndexedSlices need one row for each index"
            )
        if self._shape is not None and (len(self._shape) < 1 or self._shape[1:] != tuple(self._values.shape[1:])):
            raise ValueError(
                f"rows of shape {tuple(self._values.shape[1:])} do not fit the shape {self._shape} of the whole array"
            )

    @classmethod
    def _of_rows(cls, rows: Rows, dense_shape: tuple[int, ...]) -> IndexedSlices:
        """Makes one of rows that have each place once, in increasing order."""
        made = cls(rows.values, rows.ids, dense_shape)
        made._grouped = rows
        return made

    _grouped: Rows | None = None

    @property
    def values(self) -> AnyArray:
        """The rows, (n, ...)."""
        return self._values

    @property
    def indices(self) -> AnyArray:
        """The index of each row, integers (n,)."""
        return self._indices

    @property
    def dense_shape(self) -> tuple[int, ...] | None:
        """Shape of the dense array; None if it is not known."""
        return self._shape

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the dense array; raises `ValueError` if it is not known."""
        if self._shape is None:
            raise ValueError("these IndexedSlices do not know the shape of the whole array; pass dense_shape")
        return self._shape

    @property
    def ndim(self) -> int:
        """Number of dimensions of the dense array."""
        return int(self._values.ndim)

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """NumPy dtype of the values."""
        found: np.dtype[np.generic] = self._values.dtype
        return found

    def _with_shape(self, shape: tuple[int, ...], where: Callable[[], str] = lambda: "IndexedSlices") -> IndexedSlices:
        """Returns the same rows of a whole of this shape, where the shape is not known.

        Args:
            shape: of the whole.
            where: returns what they belong to, for messages.

        Raises:
            ValueError: it is known to be another, or the rows do not fit.
        """
        if self._shape == shape:
            return self
        if (row := tuple(self._values.shape[1:])) != shape[1:]:
            raise ValueError(f"{where()}: each row has shape {row}, but must have {shape[1:]}")
        if self._shape is not None:
            raise ValueError(f"{where()}: dense_shape is {self._shape}, but must be {shape}; leave it out")
        made = IndexedSlices(self._values, self._indices, shape)
        made._grouped = self._grouped
        return made

    def rows(self, where: str = "IndexedSlices") -> Rows:
        """Returns its rows with each index once; rows with the same index are summed in their order.

        Args:
            where: the variable they belong to, for messages.

        Raises:
            ValueError: an index is not a row of the dense array.
        """
        if self._grouped is None:
            ids = check_ids(to_numpy(self._indices), self.shape[0], where)
            order, starts = group(ids)
            places = ids[order[starts[:-1]]]
            if len(places) == len(ids) and np.array_equal(places, ids):
                self._grouped = Rows(places, self._values)
            else:
                self._grouped = Rows(places, add_groups(self._values, order, starts))
        return self._grouped

    @property
    def _each_once(self) -> bool:
        """True if it is known that each place is there once, in increasing order."""
        return self._grouped is not None and self._grouped.values is self._values

    def _with_values(self, values: AnyArray) -> IndexedSlices:
        """Returns other rows in the same places, of which each is known to be there once."""
        return IndexedSlices._of_rows(Rows(self.rows().ids, values), self.shape)

    def _on(self, device: Device) -> IndexedSlices:
        """Returns the same with its rows on a device."""
        return self._with_values(to_device(self.rows().values, device))

    def _none(self) -> Rows:
        """Returns none of its rows."""
        return Rows(np.empty(0, np.int64), self._values[:0])

    def numpy(self) -> Array:
        """Returns the dense array on the host, with zeros in all other rows."""
        ids, values = self.rows()
        whole = np.zeros(self.shape, self.dtype)
        whole[ids] = to_numpy(values)
        return whole

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> Array:
        return np.asarray(self.numpy(), dtype=dtype)

    def __neg__(self) -> IndexedSlices:
        return self._like(-self._values)

    def __mul__(self, factor: Any) -> IndexedSlices:
        if np.ndim(factor) or not isinstance(factor, bool | int | float | complex | np.generic | np.ndarray):
            return NotImplemented
        return self._like((self._values * factor).astype(self._values.dtype, copy=False))

    __rmul__ = __mul__

    def _like(self, values: AnyArray) -> IndexedSlices:
        return IndexedSlices(values, self._indices, self._shape)

    def __repr__(self) -> str:
        return f"IndexedSlices(values={self._values!r}, indices={self._indices!r}, dense_shape={self._shape})"


def convert_to_tensor(value: Any, dtype: npt.DTypeLike | None = None) -> Array:
    """Returns a value as an array on the host; for `IndexedSlices` the dense array.

    Source: `tf.convert_to_tensor`.
    """
    return np.asarray(value.numpy() if hasattr(value, "numpy") else value, dtype)
