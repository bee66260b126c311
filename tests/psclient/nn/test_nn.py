"""Lookups of embeddings and bags of them: TensorFlow's values and gradients, each form of ids, and what is refused."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import psclient as ps
from psclient._src.arrays import nest
from psclient.nn.segments import sum_segments
from pswire.model.rows import group
from tests.kit.strategies import refused

COMBINERS = ["mean", "sqrtn", "sum"]
INDICES = [[0, 0], [0, 1], [0, 2], [2, 0], [2, 3], [3, 1]]
IDS = [1, -1, 1, 3, 0, -2]
WEIGHTS = [0.5, 1.0, 2.0, -1.0, 4.0, 1.0]

NONE, CLIPPED = [0.0, 0.0], [3.2009219983223995, 3.8411063979868794]
TENSORFLOW = {
    ("mean", None, None): ([[3, 4], NONE, [1, 2], NONE], [[4, 5], [0, 1], NONE, NONE]),
    ("mean", 2, 5.0): (
        [[3, 4], CLIPPED, [1, 2], CLIPPED],
        [[4, 5], [-0.48, 0.35999999999999993], [-0.12593791468809634, 0.10494826224007792], NONE],
    ),
    ("sqrtn", None, 5.0): (
        [[3.6380343755449944, 4.85071250072666], NONE, [1, 2], NONE],
        [[4, 5], [-0.5820855000871992, 0.4365641250653993], NONE, NONE],
    ),
    ("sqrtn", 2, None): (
        [[3.6380343755449944, 4.85071250072666], [5, 6], [1, 2], [5, 6]],
        [[4, 5], [0, 1.212678125181665], [8, 10], NONE],
    ),
    ("sum", None, None): ([[7.5, 10], NONE, [-3, 0], NONE], [[16, 20], [0, 2.5], NONE, [-4, -5]]),
    ("sum", 2, 5.0): (
        [[7.5, 10], CLIPPED, [0.7074769606574098, 4.237116526465611], CLIPPED],
        [
            [16, 20],
            [-1.2000000000000002, 0.8999999999999999],
            [-0.12593791468809457, 0.1049482622400788],
            [0.09989956124427568, -0.08741211608874133],
        ],
    ),
}
"""The bags of `safe_embedding_lookup_sparse` by combiner, default_id and max_norm, any two values of which meet; and
the gradient by the variable where that by the bags is 0, 1, 2, ...: TensorFlow 2.21.0. Row 1 has the norm 5, which is
one of the bounds."""


def table(*shape, dtype="float64"):
    """A variable whose elements are 1, 2, 3, ..."""
    return ps.Variable((np.arange(np.prod(shape)).reshape(shape) + 1).astype(dtype), name="emb")


def upstream(bags):
    """A gradient by the bags: 0, 1, 2, ..."""
    return np.arange(np.prod(bags.shape), dtype="float64").reshape(bags.shape)


def quotient(v, start, step, value):
    """The difference quotient of a number by each element of a variable."""
    found = np.zeros_like(start)
    for place in np.ndindex(*start.shape):
        ends = []
        for by in (step, -step):
            moved = start.copy()
            moved[place] += by
            v.assign(moved)
            ends.append(value())
        found[place] = (ends[0] - ends[1]) / (2 * step)
    return found


@pytest.mark.parametrize("case", TENSORFLOW, ids=str)
def test_bags_and_their_gradient_are_tensorflows(case):
    """Of ids below 0, weights below 0, empty bags, ids that come twice, and rows of exactly the greatest norm."""
    combiner, default, longest = case
    ids, weights = ps.SparseTensor(INDICES, IDS, (4, 4)), ps.SparseTensor(INDICES, WEIGHTS, (4, 4))
    bags = ps.nn.safe_embedding_lookup_sparse(table(4, 2), ids, weights, combiner, default, longest)
    values, gradient = TENSORFLOW[case]
    np.testing.assert_allclose(bags, values, rtol=1e-14)
    np.testing.assert_allclose(bags.gradient(upstream(bags)), gradient, rtol=1e-12, atol=1e-15)


def loop(w, ids, weights, combiner):
    """The bags, one after another; and how much each row counts in each."""
    shares = np.zeros((len(ids), len(w)))
    for bag, (own, by) in enumerate(zip(ids, weights, strict=True)):
        norm = {"mean": sum(by), "sqrtn": np.sqrt(sum(x * x for x in by)), "sum": 1.0}[combiner]
        for id, weight in zip(own, by, strict=True):
            shares[bag, id] += weight / norm
    return shares @ w, shares


BAGS = st.lists(st.lists(st.tuples(st.integers(0, 6), st.sampled_from([0.5, 1.0, 3.0])), max_size=5), max_size=6)


@given(bags=BAGS, combiner=st.sampled_from(COMBINERS), weighted=st.booleans())
def test_bags_are_combined_one_by_one(bags, combiner, weighted):
    """Whatever their lengths: the rows once each, the sum or mean of each bag, and the gradient by the rows."""
    v = table(7, 3)
    ids = [[id for id, _ in bag] for bag in bags]
    weights = [[weight if weighted else 1.0 for _, weight in bag] for bag in bags]
    found = ps.nn.embedding_lookup_sparse(v, ids, weights if weighted else None, combiner)
    flat = [id for bag in ids for id in bag]
    expected, shares = loop(v.numpy(), ids, weights, combiner)
    assert found.ids.tolist() == sorted(set(flat))
    np.testing.assert_array_equal(found.values[found.inverse], v.numpy()[np.array(flat, int)])
    assert np.diff(found.row_splits).tolist() == list(map(len, ids))
    assert found.shape == np.asarray(found).shape == (len(bags), 3)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    gradient = found.gradient(upstream(found))
    assert gradient.indices.tolist() == found.ids.tolist()
    np.testing.assert_allclose(gradient, shares.T @ upstream(found), rtol=1e-12, atol=1e-12)


def test_each_form_of_ids_is_the_same():
    """Sparse in any order of its rows, lists, arrays in a list, a matrix; empty bags are zeros, also at the end."""
    v = table(7, 2)
    expected = ps.nn.embedding_lookup_sparse(v, [[3, 1], [6, 6]], [[1.0, 2.0], [3.0, 4.0]])
    indices = [[1, 0], [0, 5], [1, 1], [0, 7]]
    sparse = ps.SparseTensor(indices, [6, 3, 6, 1], (2, 8)), ps.SparseTensor(indices, [3.0, 1.0, 4.0, 2.0], (2, 8))
    arrays = [np.array([3, 1]), np.array([6, 6])], [np.array([1.0, 2.0]), [3, 4]]
    matrix = np.array([[3, 1], [6, 6]]), np.array([[1, 2], [3, 4]], "float32")
    for ids, weights in (sparse, arrays, matrix):
        found = ps.nn.embedding_lookup_sparse(v, ids, weights)
        np.testing.assert_array_equal(found, expected)
        assert found.row_splits.tolist() == [0, 2, 4]
    v = table(3, 2)
    for ids in ([[], [1], []], ps.SparseTensor([[1, 0]], [1], (3, 1)), [np.zeros(0, int), [1], []]):
        bags = ps.nn.embedding_lookup_sparse(v, ids, None)
        assert np.asarray(bags).tolist() == [[0, 0], [3, 4], [0, 0]]
        assert np.asarray(bags.gradient(np.ones((3, 2)))).tolist() == [[0, 0], [1, 1], [0, 0]]
    assert np.asarray(ps.nn.embedding_lookup_sparse(v, [], None)).shape == (0, 2)
    assert np.asarray(ps.nn.embedding_lookup_sparse(v, ps.SparseTensor([], [], (2, 0)), None)).tolist() == [[0, 0]] * 2


def test_bags_of_odd_weights_and_rows():
    """Without a combiner they are means. Weights of 0 are no division by 0: the bag is zeros, and so is its gradient.
    In a safe lookup weights count above 0, for the sum all, as in TensorFlow; NaN is left out. Rows have any shape."""
    assert np.asarray(ps.nn.embedding_lookup_sparse(table(4, 1), [[0, 2]], None)).tolist() == [[2.0]]
    for combiner in ("mean", "sqrtn"):
        bags = ps.nn.embedding_lookup_sparse(table(3, 2), [[0, 1]], [[0.0, 0.0]], combiner)
        with np.errstate(all="raise"):
            assert np.asarray(bags).tolist() == [[0, 0]]
            assert np.asarray(bags.gradient(np.ones((1, 2)))).tolist() == [[0, 0]] * 3
    v, weights = table(3, 1), [[1.0, -1.0, np.nan]]
    found = ps.nn.safe_embedding_lookup_sparse(v, [[0, 1, 2]], weights)
    assert (np.asarray(found).tolist(), found.ids.tolist()) == ([[1.0]], [0])
    assert ps.nn.safe_embedding_lookup_sparse(v, [[0, 1, 2]], weights, "sum").ids.tolist() == [0, 1, 2]
    for row in ((), (2, 3)):
        v = table(4, *row)
        bags = ps.nn.embedding_lookup_sparse(v, [[0, 3], [2]], [[1.0, 2.0], [4.0]], "sum", max_norm=100.0)
        np.testing.assert_allclose(bags, [v.numpy()[0] + 2 * v.numpy()[3], 4 * v.numpy()[2]])
        assert bags.gradient(np.ones((2, *row))).dense_shape == (4, *row)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_half_precision_is_summed_in_single(dtype):
    """A bag of 4096 ones is 4096, where a sum in its own dtype would stay behind; dtypes stay what they are."""
    v = ps.Variable(np.ones((2, 1)), dtype=dtype, name="emb")
    bags = ps.nn.embedding_lookup_sparse(v, [[1] * 4096], None, "sum")
    gradient = ps.nn.embedding_lookup_sparse(v, [[1]] * 4096, None, "sum").gradient(np.ones((4096, 1)))
    assert np.asarray(bags).tolist() == gradient.values.tolist() == [[4096.0]]
    assert bags.dtype == np.asarray(bags).dtype == gradient.dtype == dtype


@pytest.mark.parametrize(
    ("ids", "weights", "error", "words"),
    [
        ([1, 2], None, TypeError, "ps.SparseTensor, or a list with a sequence of ids"),
        (np.array([1, 2]), None, TypeError, "a sequence of ids for each example, not ndarray"),
        ("ab", None, TypeError, "a sequence of ids"),
        ([[1.5]], None, TypeError, "the ids of bags must be integers, not float64"),
        ([[1]], [["a"]], TypeError, "the weights of bags must be numbers"),
        ([[1], [2]], [[1.0, 2.0], []], ValueError, "2 ids in 2 bags, but 2 weights in 2"),
        ([[1]], [[1.0], [1.0]], ValueError, "1 ids in 1 bags, but 2 weights in 2"),
        ([[1]], ps.SparseTensor([[0, 0]], [1.0], (1, 1)), ValueError, "in the same form"),
        (*(ps.SparseTensor([[0, n]], [1], (1, 2)) for n in (0, 1)), ValueError, "weights of bags have other indices"),
        ([[-1]], None, ValueError, "variable 'emb': id -1 at index 0 is not a row of 4"),
    ],
)
def test_what_are_no_bags_is_refused(ids, weights, error, words):
    refused(error, words, lambda: ps.nn.embedding_lookup_sparse(table(4, 1), ids, weights))


def test_wrong_arguments_are_named():
    """The combiner, the dtype of the rows, the gradient's shape and dtype, the default."""
    v = table(4, 2)
    for lookup in (ps.nn.embedding_lookup_sparse, ps.nn.safe_embedding_lookup_sparse):
        with pytest.raises(ValueError, match="combiner is 'max'; use one of 'mean', 'sqrtn', 'sum'"):
            lookup(v, [[0]], None, "max")
        with pytest.raises(ValueError, match=r"partition_strategy is 'mod'.*div"):
            lookup(v, [[0]], None, partition_strategy="mod")
        with pytest.raises(TypeError, match="variable 'emb' is of int64"):
            lookup(table(4, 1, dtype="int64"), [[0]], None)
    refused(TypeError, "integer", lambda: ps.nn.safe_embedding_lookup_sparse(v, [[0]], default_id=1.5))
    refused(ValueError, "id 9 at index 0", lambda: ps.nn.safe_embedding_lookup_sparse(v, [[]], default_id=9))
    bags = ps.nn.embedding_lookup_sparse(v, [[0, 1]], None)
    with pytest.raises(ValueError, match=r"gradient of bags of shape \(1, 2\) has shape \(2, 2\)"):
        bags.gradient(np.ones((2, 2)))
    refused(TypeError, "complex128 does not match rows of float64", lambda: bags.gradient(np.ones((1, 2), complex)))


def table_of(rows):
    return ps.Variable(np.asarray(rows, "float64"), name="emb")


def test_a_lookup_without_a_norm_is_the_variable_s():
    """The same rows, the gradient as it is given; a clipped one has the variable's dtype, computed in single."""
    v = table_of([[1, 2], [3, 4], [5, 6]])
    rows = ps.nn.embedding_lookup(v, [[2], [0]])
    assert np.asarray(rows).tolist() == [[[5, 6]], [[1, 2]]]
    d = np.ones((2, 2))
    assert rows.gradient(d).values is d
    assert np.asarray(ps.nn.embedding_lookup([v], 1)).tolist() == [3, 4]
    v = ps.Variable(np.array([[300.0, 400.0]]), dtype="float16", name="emb")  # whose squares float16 cannot hold
    rows = ps.nn.embedding_lookup(v, [0], max_norm=5)
    assert np.asarray(rows).tolist() == [[3.0, 4.0]]
    gradient = rows.gradient(np.array([[4.0, -3.0]]))
    assert rows.values.dtype == gradient.dtype == np.float16
    np.testing.assert_allclose(gradient.values.astype("float64"), [[0.04, -0.03]], rtol=1e-3)


@pytest.mark.parametrize("row", [(), (3,), (2, 2)])
def test_the_gradient_goes_through_the_clip(row):
    """It is the difference quotient, by each element; and in the form of the gradient of any lookup. Longer rows get
    the norm, shorter ones keep their bits, zeros stay, and have the gradient that is given."""
    start = np.random.default_rng(1).normal(size=(6, *row)) * 2
    v, ids = table_of(start), [5, 0, 3, 2]
    rows = ps.nn.embedding_lookup(v, ids, max_norm=1.5)
    d = np.random.default_rng(2).normal(size=rows.values.shape)
    lengths = np.sqrt((rows.values**2).reshape(4, -1).sum(axis=1))
    assert 0 < np.isclose(lengths, 1.5).sum() < 4  # both sides of the bound are tried
    gradient = rows.gradient(d)
    found = quotient(v, start, 1e-6, lambda: (ps.nn.embedding_lookup(v, ids, max_norm=1.5).values * d).sum())
    np.testing.assert_allclose(gradient, found, atol=1e-7)
    assert gradient.indices.tolist() == [0, 2, 3, 5]
    short = lengths < 1.5 - 1e-9
    np.testing.assert_array_equal(rows.values[short], start[rows.ids][short])
    with np.errstate(all="raise"):
        rows = ps.nn.embedding_lookup(table_of(np.zeros((2, 3))), [1], max_norm=1.0)
        assert rows.gradient(np.ones((1, 3))).values.tolist() == [[1, 1, 1]]


def test_what_is_no_table_is_refused():
    """Arrays, several variables, partitions that are not there, norms that are no positive numbers, as where TensorFlow
    1 had the partition strategy; rows of integers are looked up, and not clipped."""
    for norm in (0, -1.0, np.inf, np.nan):
        said = r"max_norm is .*use a positive number, or None"
        refused(ValueError, said, lambda norm=norm: ps.nn.embedding_lookup(table_of([[1]]), [0], norm))
    for norm in ("mod", True, np.ones(2)):
        said = "max_norm must be a number or None"
        refused(TypeError, said, lambda norm=norm: ps.nn.embedding_lookup(table_of([[1]]), [0], norm))
    v = ps.Variable(np.array([[1], [2]]), name="emb")
    assert np.asarray(ps.nn.embedding_lookup(v, [1])).tolist() == [[2]]
    with pytest.raises(TypeError, match="max_norm supports rows of floats, but variable 'emb' is of int64"):
        ps.nn.embedding_lookup(v, [1], 1.0)
    v = table_of([[1]])
    with pytest.raises(TypeError, match=r"params must be a variable, not ndarray; for an array use params\[ids\]"):
        ps.nn.embedding_lookup(np.ones((2, 2)), [0])
    refused(ValueError, "params are 2 variables", lambda: ps.nn.embedding_lookup([v, v], [0]))
    with pytest.raises(ValueError, match=r"partition_strategy is 'mod'.*div"):
        ps.nn.embedding_lookup(v, [0], partition_strategy="mod")
    assert np.asarray(ps.nn.embedding_lookup(v, [0], partition_strategy="div")).tolist() == [[1]]


@given(lengths=st.lists(st.sampled_from([0, 1, 2, 31, 32, 33, 64, 65, 1025, 1100]), max_size=6), seed=st.integers(0, 9))
def test_each_group_has_the_sum_of_its_rows(lengths, seed):
    """Zeros where it has none; in any order of the rows."""
    of_each = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(lengths)), lengths))
    rows = np.random.default_rng(seed + 1).integers(-9, 9, (len(of_each), 2))
    expected = np.zeros((len(lengths), 2), int)
    np.add.at(expected, of_each, rows)
    starts = np.append(0, np.cumsum(lengths)).astype(int)
    found = sum_segments(rows, np.argsort(of_each, kind="stable"), starts)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("repeats", [1, 1000, 40_000])
def test_a_group_may_have_every_row(repeats):
    """Sums in single precision stay near, as they are of pieces."""
    rows = np.full((repeats, 1), 0.1, "float32")
    (total,) = sum_segments(rows, *group(np.zeros(repeats, np.int64)))
    assert total == pytest.approx(repeats * 0.1, rel=1e-6)


def test_it_has_what_it_is_given():
    """Places and shape as int64, values in their dtype; a nest has it as one leaf; it may be empty."""
    sparse = ps.SparseTensor([[0, 1], [2, 0]], np.array([7, 8], "int32"), [3, 4])
    assert sparse.indices.dtype == sparse.dense_shape.dtype == np.int64
    assert (sparse.indices.tolist(), sparse.values.tolist(), sparse.shape) == ([[0, 1], [2, 0]], [7, 8], (3, 4))
    assert sparse.dtype == np.int32
    assert nest.flatten([sparse, 1]) == [sparse, 1]
    with pytest.raises(dataclasses.FrozenInstanceError):
        sparse.values = np.zeros(2)
    for indices in ([], np.zeros((0, 2), int)):
        assert ps.SparseTensor(indices, [], (0, 5)).indices.shape == (0, 2)


@pytest.mark.parametrize(
    ("indices", "values", "shape", "error", "words"),
    [
        ([[0, 0]], [1, 2], (1, 1), ValueError, "row and column of each value"),
        ([[0, 0, 0]], [1], (1, 1), ValueError, r"indices of shape \(1, 3\)"),
        ([0], [1], (1, 1), ValueError, "row and column of each value"),
        ([[0, 0]], [1], (1, 1, 1), ValueError, "must be .rows, columns., not"),
        ([[0, 0]], [1], (1, -1), ValueError, "must be .rows, columns., not"),
        ([[0, 0]], [1], (1.0, 1.0), TypeError, "the dense_shape of a SparseTensor must be integers"),
        ([[0.0, 0.0]], [1], (1, 1), TypeError, "the indices of a SparseTensor must be integers"),
        ([[0, 0], [1, 0]], [1, 2], (1, 1), ValueError, r"index \(1, 0\) at position 1 is outside of the shape \(1, 1"),
        ([[0, -1]], [1], (1, 1), ValueError, r"index \(0, -1\) at position 0 is outside"),
    ],
)
def test_what_does_not_fit_is_refused(indices, values, shape, error, words):
    refused(error, words, lambda: ps.SparseTensor(indices, values, shape))
