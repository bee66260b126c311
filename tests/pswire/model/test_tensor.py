"""Shapes and dtypes of what travels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pswire.errors import InvalidRequest
from pswire.limits import MAX_NDIM
from pswire.model.tensor import DTYPES, TensorSpec, spec_of

IMPOSSIBLE: list[tuple[str, tuple[int, ...]]] = [
    ("object", (1,)),
    ("float128", (1,)),
    ("", ()),
    ("float32", (-1,)),
    ("float32", (1 << 60,)),
    ("float32", (0, 1 << 60)),
    ("float32", (1 << 30, 0, 1 << 30)),
    ("int8", (1,) * (MAX_NDIM + 1)),
]


@pytest.mark.parametrize(("dtype", "shape"), IMPOSSIBLE)
def test_impossible_specs_are_refused(dtype: str, shape: tuple[int, ...]) -> None:
    """A spec that passes is one that NumPy can make; no other does."""
    with pytest.raises(InvalidRequest):
        TensorSpec(dtype, shape).check()


@given(hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=6), st.sampled_from(sorted(DTYPES)))
def test_possible_specs_pass(shape: tuple[int, ...], dtype: str) -> None:
    """Specs of real arrays pass, and say their size."""
    array = np.zeros(shape, DTYPES[dtype])
    spec = spec_of(array).check()
    assert (spec.size, spec.nbytes) == (array.size, array.nbytes)


@pytest.mark.parametrize("array", [np.array([None]), np.array(["x"]), np.zeros(1, "f4,i4"), np.zeros(1, "M8[s]")])
def test_arrays_that_do_not_travel_are_refused(array: Any) -> None:
    """Objects, strings, records and dates have no place on the wire."""
    with pytest.raises(InvalidRequest, match="cannot travel"):
        spec_of(array)
