"""Bags of rows: TensorFlow's values and gradients, each form of ids, and what is refused."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import psclient as ps

COMBINERS = ["mean", "sqrtn", "sum"]
INDICES = [[0, 0], [0, 1], [0, 2], [2, 0], [2, 3], [3, 1]]
IDS = [1, -1, 1, 3, 0, -2]
WEIGHTS = [0.5, 1.0, 2.0, -1.0, 4.0, 1.0]

TENSORFLOW = {
    ("mean", None, None): (
        [[3.0, 4.0], [0.0, 0.0], [1.0, 2.0], [0.0, 0.0]],
        [[4.0, 5.0], [0.0, 1.0], [0.0, 0.0], [0.0, 0.0]],
    ),
    ("mean", None, 5.0): (
        [[3.0, 4.0], [0.0, 0.0], [1.0, 2.0], [0.0, 0.0]],
        [[4.0, 5.0], [-0.48, 0.35999999999999993], [0.0, 0.0], [0.0, 0.0]],
    ),
    ("mean", 2, None): (
        [[3.0, 4.0], [5.0, 6.0], [1.0, 2.0], [5.0, 6.0]],
        [[4.0, 5.0], [0.0, 1.0], [8.0, 10.0], [0.0, 0.0]],
    ),
    ("mean", 2, 5.0): (
        [[3.0, 4.0], [3.2009219983223995, 3.8411063979868794], [1.0, 2.0], [3.2009219983223995, 3.8411063979868794]],
        [[4.0, 5.0], [-0.48, 0.35999999999999993], [-0.12593791468809634, 0.10494826224007792], [0.0, 0.0]],
    ),
    ("sqrtn", None, None): (
        [[3.6380343755449944, 4.85071250072666], [0.0, 0.0], [1.0, 2.0], [0.0, 0.0]],
        [[4.0, 5.0], [0.0, 1.212678125181665], [0.0, 0.0], [0.0, 0.0]],
    ),
    ("sqrtn", None, 5.0): (
        [[3.6380343755449944, 4.85071250072666], [0.0, 0.0], [1.0, 2.0], [0.0, 0.0]],
        [[4.0, 5.0], [-0.5820855000871992, 0.4365641250653993], [0.0, 0.0], [0.0, 0.0]],
    ),
    ("sqrtn", 2, None): (
        [[3.6380343755449944, 4.85071250072666], [5.0, 6.0], [1.0, 2.0], [5.0, 6.0]],
        [[4.0, 5.0], [0.0, 1.212678125181665], [8.0, 10.0], [0.0, 0.0]],
    ),
    ("sqrtn", 2, 5.0): (
        [
            [3.6380343755449944, 4.85071250072666],
            [3.2009219983223995, 3.8411063979868794],
            [1.0, 2.0],
            [3.2009219983223995, 3.8411063979868794],
        ],
        [
            [4.0, 5.0],
            [-0.5820855000871992, 0.4365641250653993],
            [-0.12593791468809634, 0.10494826224007792],
            [0.0, 0.0],
        ],
    ),
    ("sum", None, None): (
        [[7.5, 10.0], [0.0, 0.0], [-3.0, 0.0], [0.0, 0.0]],
        [[16.0, 20.0], [0.0, 2.5], [0.0, 0.0], [-4.0, -5.0]],
    ),
    ("sum", None, 5.0): (
        [[7.5, 10.0], [0.0, 0.0], [0.7074769606574098, 4.237116526465611], [0.0, 0.0]],
        [
            [16.0, 20.0],
            [-1.2000000000000002, 0.8999999999999999],
            [0.0, 0.0],
            [0.09989956124427524, -0.08741211608874178],
        ],
    ),
    ("sum", 2, None): (
        [[7.5, 10.0], [5.0, 6.0], [-3.0, 0.0], [5.0, 6.0]],
        [[16.0, 20.0], [0.0, 2.5], [8.0, 10.0], [-4.0, -5.0]],
    ),
    ("sum", 2, 5.0): (
        [
            [7.5, 10.0],
            [3.2009219983223995, 3.8411063979868794],
            [0.7074769606574098, 4.237116526465611],
            [3.2009219983223995, 3.8411063979868794],
        ],
        [
            [16.0, 20.0],
            [-1.2000000000000002, 0.8999999999999999],
            [-0.12593791468809457, 0.1049482622400788],
            [0.09989956124427568, -0.08741211608874133],
        ],
    ),
}
"""The bags of `safe_embedding_lookup_sparse` by combiner, default_id and max_norm, and the gradient by the variable
where that by the bags is 0, 1, 2, ...: TensorFlow 2.21.0. Row 1 has the norm 5, which is one of the bounds."""


def table(*shape, dtype="float64"):
    """A variable whose elements are 1, 2, 3, ..."""
    return ps.Variable((np.arange(np.prod(shape)).reshape(shape) + 1).astype(dtype), name="emb")


def upstream(bags):
    """A gradient by the bags: 0, 1, 2, ..."""
    return np.arange(np.prod(bags.shape), dtype="float64").reshape(bags.shape)


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


@pytest.mark.parametrize("combiner", COMBINERS)
@pytest.mark.parametrize("longest", [None, 4.0])
def test_the_gradient_is_the_difference_quotient(combiner, longest):
    """By each element of the variable, with weights of both signs, also through the clip."""
    start = np.random.default_rng(0).normal(size=(5, 3)) * 3
    v = ps.Variable(start, name="emb")
    look = lambda: ps.nn.embedding_lookup_sparse(  # noqa: E731
        v, [[0, 1, 0], [], [4, 2]], [[1.0, -0.5, 2.0], [], [0.3, 0.9]], combiner, longest
    )
    bags = look()
    gradient = np.asarray(bags.gradient(upstream(bags)))
    found = np.zeros_like(start)
    for place in np.ndindex(*start.shape):
        ends = []
        for step in (1e-5, -1e-5):
            moved = start.copy()
            moved[place] += step
            v.assign(moved)
            ends.append((np.asarray(look()) * upstream(bags)).sum())
        found[place] = (ends[0] - ends[1]) / 2e-5
    assert np.abs(gradient).max() > 1
    np.testing.assert_allclose(gradient, found, atol=1e-6)


def test_each_form_of_ids_is_the_same():
    """A sparse tensor in any order of its rows, lists, arrays in a list, a matrix."""
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


def test_empty_bags_are_zeros_also_at_the_end():
    """As many bags as the sparse tensor has rows, and as the list has items."""
    v = table(3, 2)
    for ids in ([[], [1], []], ps.SparseTensor([[1, 0]], [1], (3, 1)), [np.zeros(0, int), [1], []]):
        bags = ps.nn.embedding_lookup_sparse(v, ids, None)
        assert np.asarray(bags).tolist() == [[0, 0], [3, 4], [0, 0]]
        assert np.asarray(bags.gradient(np.ones((3, 2)))).tolist() == [[0, 0], [1, 1], [0, 0]]
    assert np.asarray(ps.nn.embedding_lookup_sparse(v, [], None)).shape == (0, 2)
    assert np.asarray(ps.nn.embedding_lookup_sparse(v, ps.SparseTensor([], [], (2, 0)), None)).tolist() == [[0, 0]] * 2


@pytest.mark.parametrize("combiner", ["mean", "sqrtn"])
def test_weights_of_0_are_no_division_by_0(combiner):
    """The bag is zeros, and so is its gradient."""
    v = table(3, 2)
    bags = ps.nn.embedding_lookup_sparse(v, [[0, 1]], [[0.0, 0.0]], combiner)
    with np.errstate(all="raise"):
        assert np.asarray(bags).tolist() == [[0, 0]]
        assert np.asarray(bags.gradient(np.ones((1, 2)))).tolist() == [[0, 0]] * 3


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_half_precision_is_summed_in_single(dtype):
    """A bag of 4096 ones is 4096, where a sum in its own dtype would stay behind; dtypes stay what they are."""
    v = ps.Variable(np.ones((2, 1)), dtype=dtype, name="emb")
    bags = ps.nn.embedding_lookup_sparse(v, [[1] * 4096], None, "sum")
    gradient = ps.nn.embedding_lookup_sparse(v, [[1]] * 4096, None, "sum").gradient(np.ones((4096, 1)))
    assert np.asarray(bags).tolist() == gradient.values.tolist() == [[4096.0]]
    assert bags.dtype == np.asarray(bags).dtype == gradient.dtype == dtype


@pytest.mark.parametrize("row", [(), (2, 3)])
def test_rows_of_bags_have_any_shape(row):
    """Numbers and matrices."""
    v = table(4, *row)
    bags = ps.nn.embedding_lookup_sparse(v, [[0, 3], [2]], [[1.0, 2.0], [4.0]], "sum", max_norm=100.0)
    np.testing.assert_allclose(bags, [v.numpy()[0] + 2 * v.numpy()[3], 4 * v.numpy()[2]])
    assert bags.gradient(np.ones((2, *row))).dense_shape == (4, *row)


def test_none_is_the_mean():
    """As in TensorFlow 2."""
    assert np.asarray(ps.nn.embedding_lookup_sparse(table(4, 1), [[0, 2]], None)).tolist() == [[2.0]]


@pytest.mark.parametrize(
    ("ids", "weights", "error", "words"),
    [
        ([1, 2], None, TypeError, "ps.SparseTensor, or a list with a sequence of ids"),
        (np.array([1, 2]), None, TypeError, "a sequence of ids for each example; not ndarray"),
        ("ab", None, TypeError, "a sequence of ids"),
        ([[1.5]], None, TypeError, "the ids of bags are integers, and not float64"),
        ([[1]], [["a"]], TypeError, "the weights of bags are numbers"),
        ([[1], [2]], [[1.0, 2.0], []], ValueError, "2 ids in 2 bags and 2 weights in 2"),
        ([[1]], [[1.0], [1.0]], ValueError, "1 ids in 1 bags and 2 weights in 2"),
        ([[1]], ps.SparseTensor([[0, 0]], [1.0], (1, 1)), ValueError, "in the same form"),
        (
            ps.SparseTensor([[0, 0]], [1], (1, 2)),
            ps.SparseTensor([[0, 1]], [1.0], (1, 2)),
            ValueError,
            "weights of bags are in other places",
        ),
        ([[0, 9]], None, ValueError, "variable 'emb': id 9 at place 1 is no row of 4"),
        ([[-1]], None, ValueError, "variable 'emb': id -1 at place 0 is no row of 4"),
    ],
)
def test_what_are_no_bags_is_refused(ids, weights, error, words):
    """In words."""
    with pytest.raises(error, match=words):
        ps.nn.embedding_lookup_sparse(table(4, 1), ids, weights)


def test_wrong_arguments_are_named():
    """The combiner, the dtype of the rows, the gradient's shape and dtype, the default."""
    v = table(4, 2)
    for lookup in (ps.nn.embedding_lookup_sparse, ps.nn.safe_embedding_lookup_sparse):
        with pytest.raises(ValueError, match="combiner is 'max'; known are 'mean', 'sqrtn', 'sum'"):
            lookup(v, [[0]], None, "max")
        with pytest.raises(ValueError, match=r"partition_strategy is 'mod'.*div"):
            lookup(v, [[0]], None, partition_strategy="mod")
        with pytest.raises(TypeError, match="variable 'emb' is of int64"):
            lookup(table(4, 1, dtype="int64"), [[0]], None)
    with pytest.raises(TypeError, match="integer"):
        ps.nn.safe_embedding_lookup_sparse(v, [[0]], default_id=1.5)
    with pytest.raises(ValueError, match="id 9 at place 0"):
        ps.nn.safe_embedding_lookup_sparse(v, [[]], default_id=9)
    bags = ps.nn.embedding_lookup_sparse(v, [[0, 1]], None)
    with pytest.raises(ValueError, match=r"gradient of bags of shape \(1, 2\) has shape \(2, 2\)"):
        bags.gradient(np.ones((2, 2)))
    with pytest.raises(TypeError, match="complex128 does not fit rows of float64"):
        bags.gradient(np.ones((1, 2), complex))


def test_safe_weights_count_where_they_are_above_0():
    """A weight that is no number is left out as well; the sum takes all, as in TensorFlow."""
    v, weights = table(3, 1), [[1.0, -1.0, np.nan]]
    found = ps.nn.safe_embedding_lookup_sparse(v, [[0, 1, 2]], weights)
    assert np.asarray(found).tolist() == [[1.0]]
    assert found.ids.tolist() == [0]
    assert ps.nn.safe_embedding_lookup_sparse(v, [[0, 1, 2]], weights, "sum").ids.tolist() == [0, 1, 2]
