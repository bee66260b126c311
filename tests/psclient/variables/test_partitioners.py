"""Partitioners, and keys of dynamic tables: TensorFlow's numbers of shards, groups of keys, and mistakes."""

from __future__ import annotations

import math
import re
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import psclient as ps
from psclient._src.variables.keyed_slices import KeyedSlices
from psclient._src.variables.keys import CountedKeys, KeySpace, starts_of
from psclient._src.variables.partitioners import check_partitioner, shards_for
from psclient._src.variables.sharded import Sharding
from pswire.model.hashing import BUCKETS, buckets_of, hashes_of
from pswire.model.tables import ROWS, TableSpec
from pswire.model.tensor import DTYPES, TensorSpec
from tests.kit.strategies import refused

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
    """Those of its documents; strategies ask for the first axis alone, and another may be asked for."""
    for partitioner, shape, expected in (
        (P.FixedShardsPartitioner(num_shards=2), (10, 3), [2, 1]),
        (P.MinSizePartitioner(min_shard_bytes=4, max_shards=2), (6, 1), [2, 1]),
        (P.MinSizePartitioner(min_shard_bytes=4, max_shards=10), (6, 1), [6, 1]),
        (P.MinSizePartitioner(), (1024, 1024), [1, 1]),
        (P.MaxSizePartitioner(max_shard_bytes=4), (6, 1), [6, 1]),
        (P.MaxSizePartitioner(max_shard_bytes=4, max_shards=2), (6, 1), [2, 1]),
        (P.MaxSizePartitioner(max_shard_bytes=1024), (6, 1), [1, 1]),
        (V1.min_max_variable_partitioner(16), (1024, 1024), [16, 1]),
        (V1.variable_axis_size_partitioner(40, axis=1), (10, 3), [1, 3]),
    ):
        assert partitioner(shape, np.float32) == expected
    assert P.FixedShardsPartitioner(2)((10, 3), np.float32, axis=1) == [1, 2]
    refused(ValueError, "axis 2", lambda: V1.min_max_variable_partitioner(2, axis=2)((10, 3), np.float32))


def test_what_is_no_partitioner_is_refused():
    """Numbers below one; a class of them, which somebody has not called; its own class has no call."""
    atleast = partial(refused, ValueError, "at least 1")
    atleast(lambda: P.FixedShardsPartitioner(0), lambda: P.MinSizePartitioner(0), lambda: P.MinSizePartitioner(1, 0))
    atleast(lambda: P.MaxSizePartitioner(0), lambda: P.MaxSizePartitioner(1, -1))
    atleast(lambda: P.MinSizePartitioner(bytes_per_string=0), lambda: V1.fixed_size_partitioner(-1))
    for wrong in (P.FixedShardsPartitioner, 3, [2, 1], "two"):
        refused(TypeError, "variable_partitioner is", lambda wrong=wrong: check_partitioner(wrong))
    refused(NotImplementedError, re.escape("__call__(self, shape, dtype)"), lambda: P.Partitioner()((2,), np.float32))


def test_it_is_asked_with_shape_and_dtype():
    """Where there are rows; any sequence of whole numbers is taken."""
    told = []
    for shape, returned in (((9,), [2]), ((2, 9), (2, 1)), ((2, 9), np.array([2, 1])), ((2, 9), [np.int64(2), 1])):
        partitioner = lambda shape, dtype: told.append((shape, dtype)) or returned  # noqa: B023, E731
        assert shards_for(partitioner, "v", TensorSpec("bfloat16", shape), DTYPES["bfloat16"]) == 2
        assert told.pop() == (shape, DTYPES["bfloat16"])
    for shape in ((), (0, 3)):
        assert shards_for(partitioner, "v", TensorSpec("float32", shape), DTYPES["float32"]) == 1
    assert not told


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
    for word in ("'table'", "(4, 2)", "mine", repr(returned), "from 1 to 4", "must return 2 integers"):
        assert word in str(error.value)


@given(st.integers(1, 50).flatmap(lambda rows: st.tuples(st.just(rows), st.integers(1, rows))))
def test_rows_are_cut_as_div_cuts_them(sizes):
    """Each has the rows of `np.array_split`: the first rows mod shards have one more, as parts have of the buckets."""
    for parts in (1, 2, 3, 5, 1000, BUCKETS):
        assert np.diff(starts_of(parts)).tolist() == [len(part) for part in np.array_split(np.arange(BUCKETS), parts)]
    rows, shards = sizes
    sharding = Sharding(Sharding.starts_of(rows, shards), ((0,),) * shards)
    expected = np.array_split(np.arange(rows), shards)
    assert [list(range(rows))[b] for b in sharding.bounds] == [part.tolist() for part in expected]
    ids = np.arange(0, rows, 3)
    for number, (at, own) in enumerate(sharding.split_ids(ids)):
        np.testing.assert_array_equal(own + sharding.starts[number], ids[at])
        assert set(ids[at]) == set(ids) & set(expected[number])


WIDE = st.integers(-(1 << 63), (1 << 63) - 1)
NARROW = st.integers(-3, 40)
CLOSE = st.builds(lambda high, low: (high << 40) + low, st.integers(-4, 4), st.integers(0, 3))
"""Far apart, and close to each other: what is packed has no room for all their bits."""

KEYS = st.one_of(*(st.lists(kind, max_size=60) for kind in (WIDE, NARROW, CLOSE)))
PARTS = st.sampled_from([1, 2, 3, 7, BUCKETS])


def space(parts=1, key_dtype="int64"):
    return KeySpace("users", TableSpec((2,), key_dtype=key_dtype), starts_of(parts))


def part_of(keys, own):
    """The part of each key, by the buckets' definition."""
    buckets = buckets_of(hashes_of(np.array(keys, np.int64), own.spec.salt))
    return np.searchsorted(own.starts, buckets, side="right") - 1


@given(KEYS, PARTS)
def test_keys_are_grouped_by_part_and_by_themselves(keys, parts):
    """Rows of one key in their order; the parts are those of the keys' buckets."""
    own, given_keys = space(parts), np.array(keys, np.int64)
    order, starts = own.group(given_keys)
    groups = [order[a:b].tolist() for a, b in pairwise(starts)]
    placed = dict(zip(keys, part_of(keys, own).tolist(), strict=True))
    distinct = sorted(placed, key=lambda key: (placed[key], key))
    assert groups == [[place for place, key in enumerate(keys) if key == each] for each in distinct]
    assert [at.stop - at.start for at in own.cut(np.array(distinct, np.int64))] == [
        list(placed.values()).count(part) for part in range(parts)
    ]


@pytest.mark.parametrize("size", [4096, 100_000])
@pytest.mark.parametrize("parts", [1, 3])
def test_many_keys_are_grouped_alike(size, parts):
    """Of random bits; of runs of numbers far apart, whose bits in between are alike; and where no bits are alike."""
    rng = np.random.default_rng(size)
    wide = rng.integers(-(1 << 63), (1 << 63) - 100, size)
    far = rng.integers(-4, 4, size) * (1 << 60) + rng.integers(0, 50, size)
    close = rng.choice(wide[:100], size) + rng.integers(0, 50, size)
    for keys in (wide, far, close):
        order, starts = space(parts).group(keys)
        found = keys[order[starts[:-1]]]
        assert np.array_equal(np.unique(keys), np.sort(found))
        expected = np.lexsort((np.arange(size), keys, part_of(keys, space(parts))))
        assert np.array_equal(order, expected)


@pytest.mark.parametrize("key_dtype", ["int64", "uint64"])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint32", "int64", "uint64"])
def test_keys_of_every_dtype_of_integers(key_dtype, dtype):
    """The same number is the same key; users have keys in the table's dtype; what is none there is named."""
    own = space(key_dtype=key_dtype)
    wrong = np.array([1, 2, -3], np.int32) if key_dtype == "uint64" else np.array([1, 0, 1 << 63], np.uint64)
    said = f"here: key {wrong[2]} at position 2 is not a valid {key_dtype}"
    refused(ValueError, said, lambda: own.check(wrong, "here"))
    bits = own.check(np.array([3, 100], dtype), "here")
    assert bits.dtype == np.int64
    assert own.shown(bits).dtype == key_dtype
    assert own.shown(bits).tolist() == [3, 100]
    high = (1 << 64) - 1 if key_dtype == "uint64" else -1
    kept = own.check(np.array([high], key_dtype), "here")
    assert own.shown(kept).tolist() == [high]
    assert kept.tolist() == [-1]


@given(st.lists(st.lists(st.integers(0, 20), unique=True, max_size=8), min_size=1, max_size=4), st.sampled_from([1, 3]))
def test_rows_of_ranges_are_joined_as_if_they_were_grouped(some, parts):
    """In canonical order, with their counts and rows."""
    own, slices = space(parts), []
    for number, keys in enumerate(some):
        bits = np.array([100 * number + key for key in keys], np.int64)
        order, _ = own.group(bits)
        counted = CountedKeys(bits[order], bits[order] + 1)
        slices.append(KeyedSlices(own, counted, np.stack([bits[order]] * 2, axis=1) * 2.0, (ROWS, 2)))
    found = KeyedSlices.joined(slices)
    keys = np.concatenate([each.counted.keys for each in slices])
    order, _ = own.group(keys)
    assert found.counted.keys.tolist() == keys[order].tolist()
    assert found.counts.tolist() == (keys[order] + 1).tolist()
    assert found.values[:, 1].tolist() == (keys[order] * 2.0).tolist()
    assert [each.counted.keys.tolist() for each in found.cut()] == [
        keys[order][part_of(keys[order], own) == part].tolist() for part in range(parts)
    ]


def test_rows_by_keys_are_no_array():
    """They have no whole; what is computed with them keeps keys and counts."""
    own = space()
    slices = KeyedSlices(own, CountedKeys(np.array([4, 9]), np.array([1, 3])), np.ones((2, 2)), (ROWS, 2))
    refused(TypeError, "rows of table 'users' cannot be converted", lambda: np.asarray(slices))
    refused(ValueError, r"expected an array of shape \(9, 2\)", lambda: slices._with_shape((9, 2)))
    halved = -(slices * 0.5)
    assert isinstance(halved, KeyedSlices)
    assert halved.counts.tolist() == [1, 3]
    assert halved.values.tolist() == [[-0.5, -0.5]] * 2
    assert "keys=array([4, 9]) of table 'users'" in repr(slices)
