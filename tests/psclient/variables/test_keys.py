"""Keys of dynamic tables: grouped as a slow way does it, cut by bucket, refused where they are none."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psclient._src.variables.keyed_slices import KeyedSlices
from psclient._src.variables.keys import CountedKeys, KeySpace, starts_of
from pswire.model.hashing import BUCKETS, buckets_of, hashes_of
from pswire.model.tables import ROWS, TableSpec

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
    """Of random bits, and of runs of numbers far apart, of which the low bits have no room."""
    rng = np.random.default_rng(size)
    far = rng.integers(-4, 4, size) * (1 << 60) + rng.integers(0, 50, size)
    for keys in (rng.integers(-(1 << 63), (1 << 63) - 1, size), far):
        order, starts = space(parts).group(keys)
        found = keys[order[starts[:-1]]]
        assert np.array_equal(np.unique(keys), np.sort(found))
        expected = np.lexsort((np.arange(size), keys, part_of(keys, space(parts))))
        assert np.array_equal(order, expected)


def test_parts_have_the_buckets_that_shards_have_rows():
    """The first parts have one bucket more."""
    for parts in (1, 2, 3, 5, 1000, BUCKETS):
        sizes = np.diff(starts_of(parts))
        assert sizes.sum() == BUCKETS
        assert sizes.tolist() == sorted(sizes.tolist(), reverse=True)
        assert sizes.max() - sizes.min() <= 1


@pytest.mark.parametrize(
    ("key_dtype", "keys", "named"),
    [
        ("int64", np.array([1, 1 << 63, 2], np.uint64), "key 9223372036854775808 at place 1 is no int64"),
        ("uint64", np.array([1, 2, -3], np.int32), "key -3 at place 2 is no uint64"),
    ],
)
def test_what_is_no_key_is_named(key_dtype, keys, named):
    """With its place."""
    with pytest.raises(ValueError, match=f"here: {named}"):
        space(key_dtype=key_dtype).check(keys, "here")


@pytest.mark.parametrize("key_dtype", ["int64", "uint64"])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint32", "int64", "uint64"])
def test_keys_of_every_dtype_of_integers(key_dtype, dtype):
    """The same number is the same key; users have keys in the table's dtype."""
    own = space(key_dtype=key_dtype)
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
    with pytest.raises(TypeError, match="table 'users', by keys"):
        np.asarray(slices)
    with pytest.raises(ValueError, match=r"shape \(9, 2\) is expected"):
        slices.with_shape((9, 2))
    halved = -(slices * 0.5)
    assert isinstance(halved, KeyedSlices)
    assert halved.counts.tolist() == [1, 3]
    assert halved.values.tolist() == [[-0.5, -0.5]] * 2
    assert "keys=array([4, 9]) of table 'users'" in repr(slices)
