"""Rows of variables that are changed by their places: what comes of rows for the same place, and what is refused."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import psclient as ps
from psclient._src.variables.scatter import SCATTERS, combine_rows

AT = {
    "scatter_add": np.add.at,
    "scatter_sub": np.subtract.at,
    "scatter_mul": np.multiply.at,
    "scatter_div": np.divide.at,
    "scatter_min": np.minimum.at,
    "scatter_max": np.maximum.at,
}
"""NumPy's functions that take one row after another."""
START = np.arange(1, 9, dtype="float64").reshape(4, 2)


def after(how, start, ids, rows):
    """What an array is after it."""
    expected = start.copy()
    if how in AT:
        AT[how](expected, ids, rows)
    for id, row in () if how in AT else zip(ids, rows, strict=True):
        expected[id] = row
    return expected


def test_each_method_is_in_the_table():
    """And each row of the table is a method, with the arguments of TensorFlow."""
    assert {*AT, "scatter_update"} == set(SCATTERS)
    for how in SCATTERS:
        arguments = getattr(ps.Variable, how).__code__.co_varnames[:4]
        assert arguments == ("self", "sparse_delta", "use_locking", "name")


@pytest.mark.parametrize("how", SCATTERS)
@given(data=st.data())
def test_a_scatter_takes_one_row_after_another(how, data):
    """Where ids repeat, in any order; powers of 2 are divided and multiplied without rounding."""
    ids = data.draw(st.lists(st.integers(0, 3), max_size=8))
    element = st.sampled_from([0.5, 1.0, -2.0, 4.0])
    rows = np.array(data.draw(st.lists(st.tuples(element, element), min_size=len(ids), max_size=len(ids))))
    rows = rows.reshape(len(ids), 2)
    v = ps.Variable(START, name="emb")
    slices = ps.IndexedSlices(rows, np.array(ids, int))
    before = v.numpy()
    assert getattr(v, how)(slices) is v
    np.testing.assert_array_equal(v.numpy(), after(how, START, ids, rows))
    np.testing.assert_array_equal(before, START)  # who has read it keeps that
    combined = combine_rows(how, v, slices, "here")
    assert combined.indices.tolist() == sorted(set(ids))
    assert combined.values.shape == (len(combined.indices), 2)


@pytest.mark.parametrize("how", SCATTERS)
def test_no_rows_change_nothing(how):
    """Also of an empty table."""
    for size in (0, 3):
        v = ps.Variable(np.ones((size, 2)), name="emb")
        getattr(v, how)(ps.IndexedSlices(np.zeros((0, 2)), np.zeros(0, int), (size, 2)))
        assert v.numpy().tolist() == [[1.0, 1.0]] * size


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.complex64, np.int8])
def test_dtypes_are_cast_within_their_kind(dtype):
    """As `assign_add` does; rows for one place are combined in the dtype of the result."""
    v = ps.Variable(np.array([[100], [1]]), dtype=dtype, name="emb")
    v.scatter_add(ps.IndexedSlices(np.array([[2], [1]], dtype), [1, 1]))
    assert v.numpy().tolist() == [[100], [4]]
    v.scatter_mul(ps.IndexedSlices(np.array([[2], [1]], dtype), [1, 1]))
    assert v.numpy().tolist() == [[100], [8]]
    assert v.dtype == dtype
    v.scatter_update(ps.IndexedSlices(np.array([[7]], v.dtype), [0]))
    assert v.numpy().tolist() == [[7], [8]]


def test_small_rows_are_summed_in_the_variable_s_dtype():
    """A sum of int8 that int8 cannot hold."""
    v = ps.Variable(np.zeros((2, 1), "int32"), name="emb")
    v.scatter_add(ps.IndexedSlices(np.array([[100], [100]], "int8"), [1, 1]))
    v.scatter_sub(ps.IndexedSlices(np.array([[100], [100], [1]], "int8"), [0, 0, 0]))
    assert v.numpy().tolist() == [[-201], [200]]


def test_rows_are_numbers_or_matrices():
    """Of tables of any rank."""
    v = ps.Variable(np.zeros(3), name="emb")
    v.scatter_add(ps.IndexedSlices([1.0, 2.0], [2, 2]))
    assert v.numpy().tolist() == [0, 0, 3]
    v = ps.Variable(np.zeros((2, 2, 2)), name="emb")
    v.scatter_max(ps.IndexedSlices(np.ones((1, 2, 2)), [1]))
    assert v.numpy().tolist() == [[[0, 0], [0, 0]], [[1, 1], [1, 1]]]


def slices(rows, ids, shape=None):
    """Rows of float64."""
    return ps.IndexedSlices(np.asarray(rows, "float64"), ids, shape)


@pytest.mark.parametrize("how", SCATTERS)
@pytest.mark.parametrize(
    ("delta", "error", "words"),
    [
        (np.ones((4, 2)), TypeError, "takes ps.IndexedSlices, and not ndarray"),
        (1.0, TypeError, "takes ps.IndexedSlices, and not float"),
        (slices([[1]], [0]), ValueError, r"variable 'emb': each row has shape \(1,\), and must have \(2,\)"),
        (slices([[1, 1]], [0], (5, 2)), ValueError, r"variable 'emb': dense_shape is \(5, 2\), and must be \(4, 2\)"),
        (slices([[1, 1]] * 2, [0, 4]), ValueError, "variable 'emb': id 4 at place 1 is no row of 4"),
        (slices([[1, 1]], [-1]), ValueError, "variable 'emb': id -1 at place 0 is no row of 4"),
        (ps.IndexedSlices(np.ones((1, 2), complex), [0]), TypeError, "complex128, which cannot be assigned to float64"),
    ],
)
def test_rows_that_do_not_fit_are_refused(how, delta, error, words):
    """With the name, and nothing is changed."""
    v = ps.Variable(START, name="emb")
    with pytest.raises(error, match=words):
        getattr(v, how)(delta)
    np.testing.assert_array_equal(v.numpy(), START)


@pytest.mark.parametrize(
    ("how", "dtype"), [("scatter_div", "int32"), ("scatter_add", "bool"), ("scatter_min", "complex64")]
)
def test_some_dtypes_have_no_such_scatter(how, dtype):
    """Whole numbers have no quotient, bools no sum, complex ones no order."""
    v = ps.Variable(np.ones((2, 1), dtype), name="emb")
    with pytest.raises(TypeError, match=f"{how} is not for variables of {dtype}, and 'emb' is one"):
        getattr(v, how)(ps.IndexedSlices(np.ones((1, 1), dtype), [0]))


def test_a_number_has_no_rows_to_change():
    """A variable without dimensions is refused."""
    with pytest.raises(ValueError, match="scatter_add of variable 'emb', which has no dimensions"):
        ps.Variable(1.0, name="emb").scatter_add(slices([1], [0]))
