"""Rows of variables that are looked up: which, where each of them goes, the gradient, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import psclient as ps

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


@pytest.mark.parametrize("row", [(), (3,), (2, 3), (0,)])
def test_rows_have_any_shape(row):
    """Numbers, vectors, matrices, nothing."""
    v = table(4, *row)
    assert v.lookup([3, 1, 3]).values.shape == (2, *row)
    np.testing.assert_array_equal(v.sparse_read([3, 1, 3]), v.numpy()[[3, 1, 3]])
    np.testing.assert_array_equal(v.sparse_read(2), v.numpy()[2])


@pytest.mark.parametrize(("ids", "shape"), [([], (0,)), ([[], []], (2, 0)), (np.zeros((0, 4), int), (0, 4))])
@pytest.mark.parametrize("size", [0, 5])
def test_no_ids_are_no_rows(ids, shape, size):
    """Also of an empty table, and of Python's empty lists, which have no dtype."""
    rows = table(size, 3).lookup(ids)
    assert rows.values.shape == (0, 3)
    assert np.asarray(rows).shape == (*shape, 3)
    assert np.asarray(rows.gradient(rows.values)).tolist() == [[0.0] * 3] * size


def test_the_gradient_has_each_row_once():
    """It is what the whole gradient of `values[inverse]` is, and the array that was given is in it, not a copy."""
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


def test_a_gradient_of_another_shape_is_refused():
    """One by what was asked for would be read as one by the rows."""
    rows = table(5, 2).lookup([3, 3, 1])
    with pytest.raises(
        ValueError, match=r"2 rows of variable 'emb' has shape \(3, 2\).*make ps\.IndexedSlices\(d, ids"
    ):
        rows.gradient(np.ones((3, 2)))


def test_rows_are_as_of_the_lookup():
    """What is assigned later changes them not, and a change of them changes no variable."""
    v = table(3, 1)
    rows = v.lookup([2])
    v.assign_add(np.ones((3, 1)))
    assert np.asarray(rows).tolist() == [[2.0]]
    rows.values[:] = 9
    assert v.numpy().ravel().tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("ids", [[1.0], 2.0, [True], np.ones(2, bool), np.zeros(0, "float32"), ["a"], [None], [2**70]])
def test_ids_are_integers(ids):
    """A float that is whole is none, and a bool is none."""
    with pytest.raises(TypeError, match="the ids of rows of variable 'emb' are integers, and not"):
        table(3, 1).lookup(ids)


def test_bags_are_not_looked_up():
    """Lists of different lengths have no shape."""
    with pytest.raises(TypeError, match=r"different lengths.*embedding_lookup_sparse"):
        table(3, 1).lookup([[1], [1, 2]])


@pytest.mark.parametrize(("ids", "bad"), [([[0, 1], [-1, 9]], "-1 at place 2"), ([0, 3], "3 at place 1")])
def test_the_first_id_that_is_no_row_is_named(ids, bad):
    """With the variable, its size, and the flat place of the id."""
    with pytest.raises(ValueError, match=f"^variable 'emb': id {bad} is no row of 3$"):
        table(3, 1).lookup(ids)


def test_an_unsigned_id_does_not_wrap():
    """The message has the number that was given."""
    with pytest.raises(ValueError, match="id 18446744073709551615 at place 0 is no row"):
        table(3, 1).lookup(np.array([2**64 - 1], np.uint64))


def test_a_number_has_no_rows():
    """A variable without dimensions is refused."""
    with pytest.raises(ValueError, match="variable 'emb' has no dimensions"):
        ps.Variable(1.0, name="emb").lookup([0])


def test_ids_that_were_named_may_change():
    """A lookup of the same array takes the ids that are in it by then, as well as those that were named."""
    v, ids = table(7, 2), np.array([3, 1, 3])
    v.look_ahead(ids)
    assert v.lookup(ids).inverse.tolist() == [1, 0, 1]
    assert v.lookup(ids.reshape(3, 1)).inverse.tolist() == [[1], [0], [1]]
    ids[:] = [5, 5, 6]
    assert v.lookup(ids).ids.tolist() == [5, 6]
    np.testing.assert_array_equal(v.sparse_read(ids), v.numpy()[ids])
