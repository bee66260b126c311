"""Shapes and dtypes of what travels; ids of rows, which are grouped as a stable sort does, and summed in order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pswire.errors import InvalidRequest
from pswire.limits import MAX_NDIM
from pswire.model.rows import MANY, check_ids, group, row_specs, sum_groups
from pswire.model.tensor import DTYPES, TensorSpec, spec_of
from tests.kit.cases import search
from tests.kit.programs import same_bits

IMPOSSIBLE: list[tuple[str, tuple[int, ...]]] = [
    ("object", (1,)), ("float128", (1,)), ("", ()), ("float32", (-1,)), ("float32", (1 << 60,)),
    ("float32", (0, 1 << 60)), ("float32", (1 << 30, 0, 1 << 30)), ("int8", (1,) * (MAX_NDIM + 1)),
]  # fmt: skip


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
    with pytest.raises(InvalidRequest, match="are not supported"):
        spec_of(array)


# ---- Ids of rows ----


IDS = st.sampled_from([0, 1, 2, 5, 2**20, 2**31, 2**40])
KEYS = IDS | st.sampled_from([2**62, -1, -(2**63), 2**63 - 1])
"""Among keys are those that do not fit into 63 bits together with a place."""


@search(2)
@given(
    ids=st.lists(IDS, max_size=80) | st.lists(KEYS, max_size=80),
    many=st.sampled_from([0, 0, MANY - 1, MANY, MANY + 1, MANY + 2, 3 * MANY]),
    dtype=st.sampled_from(["float32", "bfloat16", "int64"]),
    seed=st.integers(0, 99),
)
def test_rows_are_grouped_and_summed_one_after_another(ids, many, dtype, seed):
    """As a stable sort and a loop do, to the last bit, also where many rows are for one place."""
    ids = [*ids[:1], *[3] * many, *ids[1:]]
    numbers = np.array(ids, np.int64)
    order, starts = group(numbers)
    assert order.tolist() == np.argsort(numbers, kind="stable").tolist()
    places = numbers[order[starts[:-1]]]
    assert places.tolist() == sorted(set(ids))
    assert starts[-1] == len(ids)
    rows = (np.random.default_rng(seed).normal(size=(len(ids), 2)) * 100).astype(DTYPES[dtype])
    total = {}
    for id, row in zip(ids, rows, strict=True):
        total[id] = total[id] + row if id in total else row
    found = sum_groups(rows, order, starts)
    assert found.shape == (len(total), 2)
    assert all(same_bits(row, total[id]) for id, row in zip(places.tolist(), found, strict=True))


@pytest.mark.parametrize("dtype", ["int8", "int32", "int64", "uint8", "uint64"])
def test_ids_become_numbers_of_one_kind(dtype):
    """Whatever integers they are; an empty list is none. With rows of the whole's dtype they are tensors."""
    found = check_ids(np.array([4, 0, 4], dtype), 5, "w")
    assert (found.dtype, found.tolist()) == (np.int64, [4, 0, 4])
    assert check_ids(np.array([], dtype), 0, "w").tolist() == []
    rows = TensorSpec("bfloat16", (4, 2, 3))
    assert row_specs(TensorSpec("bfloat16", (9, 2, 3)), 4) == (TensorSpec("int64", (4,)), rows)


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ([0, 5, -1], "id 5 at index 1"),
        ([0, -1, 5], "id -1 at index 1"),
        (np.array([1, 2**64 - 1], "uint64"), "id 18446744073709551615 at index 1"),
    ],
)
def test_the_first_id_that_is_no_row_is_named(ids, said):
    """With its place, the size, and what it belongs to."""
    with pytest.raises(ValueError, match=rf"^the table: {said} is not a row of 5$"):
        check_ids(np.asarray(ids), 5, "the table")
