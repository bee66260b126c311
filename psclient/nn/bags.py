"""Bags of rows: of each example the sum or a mean of the rows of its ids."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt

from psclient._src.arraylike import read
from psclient._src.arrays.devices import (
    AnyArray,
    Value,
    as_array,
    device_of,
    device_scope,
    namespace,
    to_device,
    to_numpy,
)
from psclient._src.variables.indexed_slices import IndexedSlices
from psclient._src.variables.lookup import LookedUpRows
from psclient.nn.id_bags import IdBags
from psclient.nn.precision import computed_in, take_gradient
from psclient.nn.segments import sum_segments
from pswire.model.rows import Int64s, group
from pswire.model.tensor import Array

Combiner = Literal["mean", "sqrtn", "sum"]


NORMS: dict[str, tuple[Callable[[Array], Array], Callable[[Array], Array]] | None] = {
    "mean": (np.positive, np.positive),
    "sqrtn": (np.square, np.sqrt),
    "sum": None,
}
"""By which number a bag's sum is divided: what of each weight is summed, and what of that sum is taken."""


@dataclass(frozen=True, eq=False)
class Bags:
    """The combined rows of each example's ids. `np.asarray(bags)` is the result of `tf.nn.embedding_lookup_sparse`.

    Attributes:
        rows: the rows, each once; `rows.inverse` has for each id of the bags, one bag after another, its index in
            `values`.
        row_splits: int64[B + 1] on the host, the index of each bag's first id, and the end.
    """

    _nest_leaf: ClassVar[bool] = True

    rows: LookedUpRows
    row_splits: Int64s
    _weights: Array | None = field(repr=False)
    _norms: Array | None = field(repr=False)

    @classmethod
    def of(cls, rows: LookedUpRows, bags: IdBags, combiner: Combiner) -> Bags:
        """Makes bags from the rows of their ids."""
        dtype = computed_in(rows.dtype)
        weights = None if bags.weights is None else bags.weights.astype(dtype)
        return cls(rows, bags.splits, weights, _norms(bags, weights, combiner, dtype))

    @property
    def ids(self) -> Int64s:
        """int64[U] on the host, the indices of the rows in increasing order."""
        return self.rows.ids

    @property
    def values(self) -> AnyArray:
        """(U, *row shape), the rows, on the device of the replica that looked them up."""
        return self.rows.values

    @property
    def inverse(self) -> AnyArray:
        """Integers (n,): for each id of the bags its index in `values`."""
        return self.rows.inverse

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of bags, then the shape of a row."""
        return (len(self.row_splits) - 1, *self.rows.shape[1:])

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """NumPy dtype of the rows."""
        return self.rows.dtype

    def combine(self) -> AnyArray:
        """Returns the sum or mean of each bag, (B, *row shape), on the device of the values; zeros for an empty bag."""
        values = self.rows.values
        device = device_of(values)
        with device_scope(device):
            rows = values.astype(computed_in(self.dtype), copy=False)
            factors = None if self._weights is None else _beside(rows, self._weights)
            total = sum_segments(rows, self.rows.places, self.row_splits, factors)
            return self._divided(total).astype(self.dtype, copy=False)

    def numpy(self) -> Array:
        """The sum or mean of each bag, (B, *row shape), on the host."""
        return to_numpy(self.combine())

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> Array:
        return np.asarray(self.numpy(), dtype=dtype)

    def gradient(self, d: Value) -> IndexedSlices:
        """Returns the gradient of the variable, with each index once. In any context.

        Args:
            d: the gradient with respect to the bags, (B, *row shape).

        Raises:
            ValueError: `d` has another shape.
            TypeError: `d` is not an array of real numbers.
        """
        given = as_array(read(d))
        if tuple(given.shape) != self.shape:
            raise ValueError(f"the gradient of bags of shape {self.shape} has shape {tuple(given.shape)}")
        values = self.rows.values
        device = device_of(values)
        with device_scope(device):
            by_bag = self._divided(take_gradient(given, values.astype(computed_in(self.dtype), copy=False)))
            bag_of_each = np.repeat(np.arange(self.shape[0]), np.diff(self.row_splits))
            order, starts = group(self.rows.places)  # every row was asked for, so that each has a group
            factors = None if self._weights is None else _beside(by_bag, self._weights[order])
            by_row = sum_segments(by_bag, bag_of_each[order], starts, factors)
        return self.rows.gradient(by_row.astype(self.dtype, copy=False))

    def _divided(self, totals: AnyArray) -> AnyArray:
        """Returns totals of bags divided by their norms; zeros where a norm is 0."""
        if self._norms is None:
            return totals
        xp = namespace(device_of(totals))
        norms = _beside(totals, self._norms)
        return xp.where(norms == 0, 0, totals / xp.where(norms == 0, 1, norms))


def _norms(bags: IdBags, weights: Array | None, combiner: Combiner, dtype: np.dtype[np.generic]) -> Array | None:
    """Returns the number by which the sum of each bag is divided; None for 1."""
    how = NORMS[combiner]
    if how is None:
        return None
    of_weight, of_sum = how
    if weights is None:
        sums: Array = bags.lengths.astype(np.float64)
    else:
        sums = np.bincount(bags.bag_of_each, of_weight(weights.astype(np.float64)), len(bags))
    return of_sum(sums).astype(dtype)


def _beside(rows: AnyArray, numbers: Array) -> AnyArray:
    """Returns a number for each row, on the device of the rows, in their dtype and of as many dimensions."""
    return to_device(numbers.reshape(-1, *[1] * (rows.ndim - 1)), device_of(rows))
