"""Ids by example, as they are given: a matrix of which some elements are there, or a list for each example."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from psclient._src.arraylike import read
from psclient._src.arrays.devices import as_array, is_array, to_numpy
from psclient.nn.sparse_tensor import SparseTensor
from pswire.model.rows import Int64s
from pswire.model.tensor import Array

GivenBags = Any
"""Ids or weights by bag: what `IdBags.of` takes."""


@dataclass(frozen=True, eq=False)
class IdBags:
    """Ids and their weights, by bag. On the host.

    Attributes:
        ids: (n,), the ids of all bags, one bag after another.
        splits: int64[B + 1], the index of each bag's first id, and the end.
        weights: (n,), the weight of each id; None for 1 each.
    """

    ids: Array
    splits: Int64s
    weights: Array | None

    @classmethod
    def of(cls, ids: GivenBags, weights: GivenBags | None) -> IdBags:
        """Reads bags of ids, and weights that have the same form.

        Args:
            ids: a `SparseTensor`, whose rows are the bags; a list with a sequence of ids for each bag; or an array
                (B, m).
            weights: numbers in the same places; None for 1 each.

        Raises:
            TypeError: they are none of these; ids are no integers, or weights no real numbers.
            ValueError: there are not as many weights as ids, or not in the same places.
        """
        values, splits = _split("ids", ids)
        if values.dtype.kind not in "iu":
            raise TypeError(f"the ids of bags must be integers, not {values.dtype}")
        if weights is None:
            return cls(values, splits, None)
        found, others = _split("weights", weights)
        if found.dtype.kind not in "fiu" and found.dtype.name != "bfloat16":
            raise TypeError(f"the weights of bags must be numbers, not {found.dtype}")
        if isinstance(ids, SparseTensor) != isinstance(weights, SparseTensor) or not np.array_equal(others, splits):
            raise ValueError(
                f"bags of ids and weights do not match: {len(values)} ids in {len(splits) - 1} bags, but "
                f"{len(found)} weights in {len(others) - 1}; pass one weight for each id, in the same form"
            )
        both = isinstance(ids, SparseTensor) and isinstance(weights, SparseTensor)
        if both and not np.array_equal(ids.indices, weights.indices):
            raise ValueError("the weights of bags have other indices than the ids; use the same indices for both")
        return cls(values, splits, found)

    def __len__(self) -> int:
        return len(self.splits) - 1

    @property
    def lengths(self) -> Int64s:
        """int64[B], the number of ids in each bag."""
        return np.diff(self.splits)

    @property
    def bag_of_each(self) -> Int64s:
        """int64[n], the bag of each id."""
        return np.repeat(np.arange(len(self)), self.lengths)

    def keep(self, kept: npt.NDArray[np.bool_]) -> IdBags:
        """Returns bags of those ids alone for which `kept`, bool[n], is True."""
        before = np.append(0, np.cumsum(kept))
        return IdBags(self.ids[kept], before[self.splits], None if self.weights is None else self.weights[kept])

    def fill(self, default: int) -> IdBags:
        """Returns bags of which each that was empty has one id, of weight 1."""
        empty = np.flatnonzero(self.lengths == 0)
        at = self.splits[empty]
        grown = np.append(0, np.cumsum(np.maximum(self.lengths, 1)))
        weights = None if self.weights is None else np.insert(self.weights, at, 1)
        return IdBags(np.insert(self.ids.astype(np.int64), at, default), grown, weights)


def _split(what: str, given: Any) -> tuple[Array, Int64s]:
    """Returns the values of all bags, one bag after another, and their splits."""
    if isinstance(given, SparseTensor):
        rows = given.indices[:, 0]
        order = np.argsort(rows, kind="stable")
        return given.values[order], np.searchsorted(rows[order], np.arange(given.shape[0] + 1))
    given = read(given)
    if is_array(given):
        matrix = to_numpy(as_array(given))
        if matrix.ndim == 2:
            return matrix.ravel(), np.arange(len(matrix) + 1) * matrix.shape[1]
    elif isinstance(given, Sequence) and all(map(_is_bag, given)):
        lengths = np.fromiter(map(len, given), np.int64, len(given))
        filled = [to_numpy(as_array(bag)) for bag in given if len(bag)]  # Of an empty list NumPy makes floats.
        values = np.concatenate(filled) if filled else np.zeros(0, np.int64)
        if values.ndim == 1:
            return values, np.append(0, np.cumsum(lengths))
    raise TypeError(
        f"bags of {what} must be a ps.SparseTensor, or a list with a sequence of {what} for each example, "
        f"not {type(given).__name__}"
    )


def _is_bag(bag: Any) -> bool:
    return (isinstance(bag, Sequence) and not isinstance(bag, str)) or getattr(bag, "ndim", 0) == 1
