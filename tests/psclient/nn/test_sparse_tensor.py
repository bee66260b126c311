"""`ps.SparseTensor`: what it takes, and what does not fit."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import psclient as ps
from psclient._src import nest


def test_it_has_what_it_is_given():
    """Places and shape as int64, values in their dtype; a nest has it as one leaf; nobody changes it."""
    sparse = ps.SparseTensor([[0, 1], [2, 0]], np.array([7, 8], "int32"), [3, 4])
    assert sparse.indices.dtype == sparse.dense_shape.dtype == np.int64
    assert (sparse.indices.tolist(), sparse.values.tolist(), sparse.shape) == ([[0, 1], [2, 0]], [7, 8], (3, 4))
    assert sparse.dtype == np.int32
    assert nest.flatten([sparse, 1]) == [sparse, 1]
    with pytest.raises(dataclasses.FrozenInstanceError):
        sparse.values = np.zeros(2)  # type: ignore[misc]


def test_it_may_be_empty():
    """Of Python's lists, which have no dtype, and of arrays."""
    for indices in ([], np.zeros((0, 2), int)):
        assert ps.SparseTensor(indices, [], (0, 5)).indices.shape == (0, 2)


@pytest.mark.parametrize(
    ("indices", "values", "shape", "error", "words"),
    [
        ([[0, 0]], [1, 2], (1, 1), ValueError, "row and column of each value"),
        ([[0, 0, 0]], [1], (1, 1), ValueError, r"indices of shape \(1, 3\)"),
        ([0], [1], (1, 1), ValueError, "row and column of each value"),
        ([[0, 0]], [1], (1, 1, 1), ValueError, "is .rows, columns., and not"),
        ([[0, 0]], [1], (1, -1), ValueError, "is .rows, columns., and not"),
        ([[0, 0]], [1], (1.0, 1.0), TypeError, "the dense_shape of a SparseTensor are integers"),
        ([[0.0, 0.0]], [1], (1, 1), TypeError, "the indices of a SparseTensor are integers"),
        ([[0, 0], [1, 0]], [1, 2], (1, 1), ValueError, r"index \(1, 0\) at place 1 is outside of the shape \(1, 1\)"),
        ([[0, -1]], [1], (1, 1), ValueError, r"index \(0, -1\) at place 0 is outside"),
    ],
)
def test_what_does_not_fit_is_refused(indices, values, shape, error, words):
    """In words."""
    with pytest.raises(error, match=words):
        ps.SparseTensor(indices, values, shape)
