"""Partitioners: TensorFlow's numbers of shards, and what is no partitioner."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import psclient as ps
from psclient._src.variables.partitioners import check_partitioner, shards_for
from psclient._src.variables.sharded import Sharding
from pswire.model.tensor import DTYPES, TensorSpec

P = ps.experimental.partitioners
V1 = ps.compat.v1

SHAPES = [(1,), (6, 1), (10, 3), (7, 64), (1000,), (1024, 1024), (3, 0), (5, 2, 2)]
SIZES = [1, 4, 5, 256, 1000, 256 << 10, 1 << 22]


def tf_fixed(shape, dtype, shards, axis=0):
    """`tf.compat.v1.fixed_size_partitioner`."""
    found = [1] * len(shape)
    found[axis] = min(shards, shape[axis])
    return found


def tf_min_max(shape, dtype, most, least, axis=0):
    """`tf.compat.v1.min_max_variable_partitioner`."""
    partitions = math.prod(shape) * np.dtype(dtype).itemsize / least
    found = [1] * len(shape)
    found[axis] = max(1, min(shape[axis], most, math.ceil(partitions)))
    return found


def tf_axis_size(shape, dtype, largest, most, axis=0):
    """`tf.compat.v1.variable_axis_size_partitioner`."""
    per_slice = 1.0 * (math.prod(shape) / shape[axis]) * np.dtype(dtype).itemsize
    slices_per_shard = max(1, math.floor(largest / per_slice))
    shards = math.ceil(1.0 * shape[axis] / slices_per_shard)
    found = [1] * len(shape)
    found[axis] = min(most, shards) if most else shards
    return found


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "int8"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_numbers_are_tensorflows(shape, dtype):
    """By the formulas of its source, of the classes and of the functions of v1."""
    kind = DTYPES[dtype]
    for most in (1, 2, 3, 16, 10_000):
        assert P.FixedShardsPartitioner(most)(shape, kind) == tf_fixed(shape, kind, most)
        assert V1.fixed_size_partitioner(most)(shape, kind) == tf_fixed(shape, kind, most)
        for size in SIZES:
            assert P.MinSizePartitioner(size, most)(shape, kind) == tf_min_max(shape, kind, most, size)
            assert V1.min_max_variable_partitioner(most, 0, size)(shape, kind) == tf_min_max(shape, kind, most, size)
            if math.prod(shape):
                expected = tf_axis_size(shape, kind, size, most)
                assert P.MaxSizePartitioner(size, most)(shape, kind) == expected
                assert V1.variable_axis_size_partitioner(size, 0, 16, most)(shape, kind) == expected
                assert P.MaxSizePartitioner(size)(shape, kind) == tf_axis_size(shape, kind, size, None)


def test_the_examples_are_tensorflows():
    """Those of its documents."""
    shape, dtype = (6, 1), np.float32
    assert P.FixedShardsPartitioner(num_shards=2)((10, 3), dtype) == [2, 1]
    assert P.MinSizePartitioner(min_shard_bytes=4, max_shards=2)(shape, dtype) == [2, 1]
    assert P.MinSizePartitioner(min_shard_bytes=4, max_shards=10)(shape, dtype) == [6, 1]
    assert P.MinSizePartitioner()((1024, 1024), dtype) == [1, 1]
    assert P.MaxSizePartitioner(max_shard_bytes=4)(shape, dtype) == [6, 1]
    assert P.MaxSizePartitioner(max_shard_bytes=4, max_shards=2)(shape, dtype) == [2, 1]
    assert P.MaxSizePartitioner(max_shard_bytes=1024)(shape, dtype) == [1, 1]
    assert V1.min_max_variable_partitioner(16)((1024, 1024), dtype) == [16, 1]


def test_another_axis_may_be_asked_for():
    """As in TensorFlow; strategies ask for the first alone."""
    assert P.FixedShardsPartitioner(2)((10, 3), np.float32, axis=1) == [1, 2]
    assert V1.variable_axis_size_partitioner(40, axis=1)((10, 3), np.float32) == [1, 3]
    with pytest.raises(ValueError, match="axis 2"):
        V1.min_max_variable_partitioner(2, axis=2)((10, 3), np.float32)


@pytest.mark.parametrize(
    "make",
    [
        lambda: P.FixedShardsPartitioner(0),
        lambda: P.MinSizePartitioner(0),
        lambda: P.MinSizePartitioner(1, 0),
        lambda: P.MaxSizePartitioner(0),
        lambda: P.MaxSizePartitioner(1, -1),
        lambda: P.MinSizePartitioner(bytes_per_string=0),
        lambda: V1.fixed_size_partitioner(-1),
    ],
)
def test_numbers_below_one_are_refused(make):
    """When it is made, and not at the first variable."""
    with pytest.raises(ValueError, match="at least 1"):
        make()


@pytest.mark.parametrize("given", [P.FixedShardsPartitioner, 3, [2, 1], "two"])
def test_what_is_no_partitioner_is_refused(given):
    """A class of them, which somebody has not called, too."""
    with pytest.raises(TypeError, match="variable_partitioner is"):
        check_partitioner(given)


@pytest.mark.parametrize(
    "returned",
    [None, 2, [2], [2, 1, 1], [0, 1], [-1, 1], [5, 1], [1, 2], [2, 2], [2.0, 1], [True, 1], "21", [], [2, None]],
    ids=str,
)
def test_nonsense_is_told(returned):
    """With the variable, the partitioner, what it returned, and what it should."""

    def mine(shape, dtype):
        return returned

    with pytest.raises(ValueError) as error:
        shards_for(mine, "table", TensorSpec("float32", (4, 2)), DTYPES["float32"])
    for word in ("'table'", "(4, 2)", "mine", repr(returned), "from 1 to 4", "a list of 2"):
        assert word in str(error.value)


@pytest.mark.parametrize("returned", [(2, 1), np.array([2, 1]), [np.int64(2), 1]])
def test_any_sequence_of_whole_numbers_is_taken(returned):
    assert shards_for(lambda shape, dtype: returned, "v", TensorSpec("int8", (2, 9)), DTYPES["int8"]) == 2


def test_it_is_told_dtype_and_shape():
    told = []
    partitioner = lambda shape, dtype: told.append((shape, dtype)) or [1]  # noqa: E731
    assert shards_for(partitioner, "v", TensorSpec("bfloat16", (9,)), DTYPES["bfloat16"]) == 1
    assert told == [((9,), DTYPES["bfloat16"])]


@pytest.mark.parametrize("shape", [(), (0, 3)])
def test_what_has_no_rows_is_not_cut(shape):
    """And no partitioner is asked."""

    def never(shape, dtype):
        raise AssertionError(shape)

    assert shards_for(never, "v", TensorSpec("float32", shape), DTYPES["float32"]) == 1


def test_the_base_says_what_is_missing():
    with pytest.raises(NotImplementedError, match=re.escape("__call__(self, shape, dtype)")):
        P.Partitioner()((2,), np.float32)


@given(st.integers(1, 50).flatmap(lambda rows: st.tuples(st.just(rows), st.integers(1, rows))))
def test_rows_are_cut_as_div_cuts_them(sizes):
    """Each has the rows of `np.array_split`: the first rows mod shards have one more."""
    rows, shards = sizes
    sharding = Sharding(Sharding.starts_of(rows, shards), ((0,),) * shards)
    expected = np.array_split(np.arange(rows), shards)
    assert [list(range(rows))[b] for b in sharding.bounds] == [part.tolist() for part in expected]
    ids = np.arange(0, rows, 3)
    for number, (at, own) in enumerate(sharding.split_ids(ids)):
        np.testing.assert_array_equal(own + sharding.starts[number], ids[at])
        assert set(ids[at]) == set(ids) & set(expected[number])
