"""Rows of variables that are looked up or changed by their places, and what is refused."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import psclient as ps
from psclient._src.variables.scatter import SCATTERS, combine_rows
from tests.kit.strategies import refused

IDS = st.sampled_from(["int8", "int32", "int64", "uint16", "uint64"]).flatmap(
    lambda dtype: arrays.arrays(
        dtype, arrays.array_shapes(min_dims=0, max_dims=3, min_side=0), elements=st.integers(0, 6)
    )
)


def table(*shape, dtype="float32"):
    """A variable whose elements are 0, 1, 2, ..."""
    return ps.Variable(np.arange(np.prod(shape)).reshape(shape).astype(dtype), name="emb")


@given(ids=IDS)
def test_a_lookup_is_an_index(ids):
    """Each id's row, in the shape of the ids; each row is read once, in the order of the places."""
    v = table(7, 2)
    rows = v.lookup(ids)
    assert rows.ids.dtype == np.int64
    assert rows.ids.tolist() == sorted(set(ids.ravel().tolist()))
    assert rows.inverse.shape == ids.shape
    assert rows.shape == (*ids.shape, 2)
    np.testing.assert_array_equal(rows.values, v.numpy()[rows.ids])
    for found in (rows.values[rows.inverse], np.asarray(rows), rows.numpy(), v.sparse_read(ids), v.gather(ids)):
        assert found.dtype == rows.dtype == np.float32
        np.testing.assert_array_equal(found, v.numpy()[ids.astype(int)])


@pytest.mark.parametrize(("ids", "shape"), [([], (0,)), ([[], []], (2, 0)), (np.zeros((0, 4), int), (0, 4))])
@pytest.mark.parametrize("size", [0, 5])
def test_no_ids_are_no_rows(ids, shape, size):
    """Also of an empty table, and of Python's empty lists, which have no dtype; rows have any shape."""
    for row in ((), (3,), (2, 3), (0,)):
        v = table(4, *row)
        assert v.lookup([3, 1, 3]).values.shape == (2, *row)
        for some in ([3, 1, 3], 2):
            np.testing.assert_array_equal(v.sparse_read(some), v.numpy()[some])
    rows = table(size, 3).lookup(ids)
    assert rows.values.shape == (0, 3)
    assert np.asarray(rows).shape == (*shape, 3)
    assert np.asarray(rows.gradient(rows.values)).tolist() == [[0.0] * 3] * size


def test_who_changes_what_was_found_changes_no_later_lookup():
    """Of ids that were named ahead, which are grouped once."""
    v, ids = table(5, 2), np.array([4, 1, 4])
    v.prefetch(ids)
    for _ in range(2):
        rows = v.lookup(ids)
        assert rows.ids.tolist() == [1, 4]
        np.testing.assert_array_equal(rows, v.numpy()[ids])
        rows.ids[:], rows.places[:], rows.values[:] = 0, 0, 0


def test_the_gradient_has_each_row_once():
    """As the whole one of `values[inverse]` does, with the array given in it; rows stay as of the lookup."""
    v = table(5, 2)
    ids = np.array([[4, 1], [1, 0]])
    rows = v.lookup(ids)
    d = np.arange(8.0, dtype="float32").reshape(2, 2, 2)
    by_values = np.zeros_like(rows.values)
    np.add.at(by_values, rows.inverse, d)
    gradient = rows.gradient(by_values)
    expected = np.zeros((5, 2))
    np.add.at(expected, ids, d)
    np.testing.assert_array_equal(gradient, expected)
    assert gradient.dense_shape == (5, 2)
    assert gradient.values is by_values
    assert gradient.rows().values is by_values
    assert gradient.indices.tolist() == [0, 1, 4]
    v = table(3, 1)
    rows = v.lookup([2])
    v.assign_add(np.ones((3, 1)))
    assert np.asarray(rows).tolist() == [[2.0]]
    rows.values[:] = 9
    assert v.numpy().ravel().tolist() == [1.0, 2.0, 3.0]


NO_IDS = ([1.0], 2.0, [True], np.ones(2, bool), np.zeros(0, "float32"), ["a"], [None], [2**70])


@pytest.mark.parametrize(
    ("ids", "error", "said"),
    [
        *((ids, TypeError, "the row ids of variable 'emb' must be integers, not") for ids in NO_IDS),
        ([[1], [1, 2]], TypeError, r"different lengths.*embedding_lookup_sparse"),
        ([[0, 1], [-1, 9]], ValueError, "^variable 'emb': id -1 at index 2 is not a row of 3$"),
        ([0, 3], ValueError, "^variable 'emb': id 3 at index 1 is not a row of 3$"),
        (np.array([2**64 - 1], np.uint64), ValueError, "id 18446744073709551615 at index 0 is not a row of 3$"),
    ],
)
def test_what_are_no_ids_of_rows_is_refused(ids, error, said):
    """A whole float is none, nor a bool, nor bags, which have no shape; the first id that is no row is named. A
    variable without dimensions has no rows; a gradient by what was asked for would be read as one by the rows."""
    refused(error, said, lambda: table(3, 1).lookup(ids))
    refused(ValueError, "variable 'emb' has no dimensions", lambda: ps.Variable(1.0, name="emb").lookup([0]))
    rows, said = table(5, 2).lookup([3, 3, 1]), r"has shape \(3, 2\).*pass ps\.IndexedSlices\(d, ids"
    refused(ValueError, f"2 rows of variable 'emb' {said}", lambda: rows.gradient(np.ones((3, 2))))


def test_ids_that_were_named_may_change():
    """A lookup of the same array takes the ids that are in it by then, as well as those that were named."""
    v, ids = table(7, 2), np.array([3, 1, 3])
    v.prefetch(ids)
    assert v.lookup(ids).inverse.tolist() == [1, 0, 1]
    assert v.lookup(ids.reshape(3, 1)).inverse.tolist() == [[1], [0], [1]]
    ids[:] = [5, 5, 6]
    assert v.lookup(ids).ids.tolist() == [5, 6]
    np.testing.assert_array_equal(v.sparse_read(ids), v.numpy()[ids])


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


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.complex64, np.int8])
def test_dtypes_are_cast_within_their_kind(dtype):
    """As `assign_add` does; rows for one place are combined in the dtype of the result, as a sum that int8 cannot hold.
    Tables have any rank."""
    v = ps.Variable(np.zeros((2, 1), "int32"), name="emb")
    v.scatter_add(ps.IndexedSlices(np.array([[100], [100]], "int8"), [1, 1]))
    v.scatter_sub(ps.IndexedSlices(np.array([[100], [100], [1]], "int8"), [0, 0, 0]))
    assert v.numpy().tolist() == [[-201], [200]]
    for shape in ((3,), (3, 2, 2), (0, 2)):
        v = ps.Variable(np.zeros(shape), name="emb")
        ids = [2, 2][: len(v.numpy())]
        v.scatter_add(ps.IndexedSlices(np.ones((len(ids), *shape[1:])), ids, shape))
        assert v.numpy().sum() == 2 * np.prod(shape[1:]) * (shape[0] > 0)
    v = ps.Variable(np.array([[100], [1]]), dtype=dtype, name="emb")
    v.scatter_add(ps.IndexedSlices(np.array([[2], [1]], dtype), [1, 1]))
    assert v.numpy().tolist() == [[100], [4]]
    v.scatter_mul(ps.IndexedSlices(np.array([[2], [1]], dtype), [1, 1]))
    assert v.numpy().tolist() == [[100], [8]]
    assert v.dtype == dtype
    v.scatter_update(ps.IndexedSlices(np.array([[7]], v.dtype), [0]))
    assert v.numpy().tolist() == [[7], [8]]


def slices(rows, ids, shape=None):
    return ps.IndexedSlices(np.asarray(rows, "float64"), ids, shape)


@pytest.mark.parametrize("how", SCATTERS)
@pytest.mark.parametrize(
    ("delta", "error", "words"),
    [
        (np.ones((4, 2)), TypeError, "needs ps.IndexedSlices, not ndarray"),
        (1.0, TypeError, "needs ps.IndexedSlices, not float"),
        (slices([[1]], [0]), ValueError, r"variable 'emb': each row has shape \(1,\), but must have \(2,\)"),
        (slices([[1, 1]], [0], (5, 2)), ValueError, r"variable 'emb': dense_shape is \(5, 2\), but must be \(4, 2\)"),
        (slices([[1, 1]] * 2, [0, 4]), ValueError, "variable 'emb': id 4 at index 1 is not a row of 4"),
        (slices([[1, 1]], [-1]), ValueError, "variable 'emb': id -1 at index 0 is not a row of 4"),
        (ps.IndexedSlices(np.ones((1, 2), complex), [0]), TypeError, "complex128, which cannot be assigned to float64"),
    ],
)
def test_rows_that_do_not_fit_are_refused(how, delta, error, words):
    """With the name, and nothing is changed."""
    v = ps.Variable(START, name="emb")
    refused(error, words, lambda: getattr(v, how)(delta))
    np.testing.assert_array_equal(v.numpy(), START)


def test_what_has_no_such_scatter_is_refused():
    """Whole numbers have no quotient, bools no sum, complex ones no order, and a number has no rows."""
    one = ps.IndexedSlices(np.ones((1, 1)), [0])
    for how, dtype in (("scatter_div", "int32"), ("scatter_add", "bool"), ("scatter_min", "complex64")):
        v = ps.Variable(np.ones((2, 1), dtype), name="emb")
        with pytest.raises(TypeError, match=f"{how} does not support {dtype}, the dtype of variable 'emb'"):
            getattr(v, how)(ps.IndexedSlices(np.ones((1, 1), dtype), [0]))
    said = "scatter_add of variable 'emb', which has no dimensions"
    refused(ValueError, said, lambda: ps.Variable(1.0, name="emb").scatter_add(one))


@pytest.mark.parametrize(("values", "indices"), [(2, (2, 1)), ((), (1,)), ((2, 3), (3,)), ((1,), ())], ids=str)
def test_each_index_has_one_row(values, indices):
    with pytest.raises(ValueError, match="do not match; IndexedSlices need one row for each index"):
        ps.IndexedSlices(np.ones(values), np.zeros(indices, int))
