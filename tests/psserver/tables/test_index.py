"""Both indexes hold what a dict holds, in the order of the hashes, and give the same."""

from __future__ import annotations

import os
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psserver.devices import ServerDevice
from psserver.programs.kernels.compiler import Compiler
from psserver.tables.cells import CellIndex
from psserver.tables.index import Index, SortedIndex, bucket_bounds
from psserver.tables.native import FIRST_VALUES, INDEX, Native
from pswire.model.hashing import BUCKETS, LOW_BITS, buckets_of, hashes_of, keys_of, mixed, unmixed
from tests.conftest import KERNELS
from tests.kit.cases import search
from tests.kit.tables import compiled

SALT = 0x1234567890ABCDEF
LAST = (1 << 64) - 1
FEW = [0, 1, LAST, LAST - 1, 1 << 63, 7 << LOW_BITS, (8 << LOW_BITS) - 1, (7 << LOW_BITS) + 5, 1023 << LOW_BITS]


def indexes() -> list[Index]:
    functions = compiled().index()
    assert functions is not None
    return [SortedIndex(SALT), CellIndex(functions, SALT)]


def u64(values: object) -> np.ndarray:
    return np.array(values, np.uint64)


def everything(index: Index) -> dict[int, int]:
    hashes, entries = index.scan(*bucket_bounds(0, BUCKETS))
    assert (hashes[1:] > hashes[:-1]).all()
    return dict(zip(hashes.tolist(), entries.tolist(), strict=True))


# Crafted: all in few buckets, side by side, and at both ends.
HASHES = st.one_of(
    st.sampled_from(FEW),
    st.integers(0, 40).map(lambda n: (7 << LOW_BITS) + n),
    st.integers(0, 40).map(lambda n: LAST - n),
    st.integers(0, LAST),
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.dictionaries(HASHES, st.integers(-9, 99).filter(bool), max_size=60)),
        st.tuples(st.just("remove"), st.sets(HASHES, max_size=40)),
    ),
    max_size=12,
)


@given(STEPS)
@search(0.6)
def test_an_index_is_a_dict_in_order(steps):
    """Puts, changes and removals, also of crafted hashes: found is what a dict has; all of it comes sorted."""
    for index in indexes():
        oracle: dict[int, int] = {}
        for what, given_ in steps:
            hashes = u64(list(given_))
            if what == "put":
                index.put(hashes, np.array(list(given_.values()), np.int64))
                oracle |= given_
            else:
                index.remove(hashes)
                oracle = {h: e for h, e in oracle.items() if h not in given_}
            asked = u64([*FEW, *given_, *oracle])
            assert index.entries(asked).tolist() == [oracle.get(h, 0) for h in asked.tolist()]
        assert everything(index) == oracle
        assert index.used.tolist() == np.bincount(buckets_of(u64(list(oracle))), minlength=BUCKETS).tolist()


def test_growth_keeps_all_and_takes_little():
    """100,000 keys in batches: all are found, in both; the compiled one grows by buckets, and takes few bytes a key."""
    plain, cells = indexes()
    keys = np.random.default_rng(0).integers(-(1 << 63), (1 << 63) - 1, 100_000)
    for at in range(0, keys.size, 10_000):
        some = keys[at : at + 10_000]
        for index in (plain, cells):
            hashes, before = index.find(some)
            assert not before.any()
            index.put(hashes, np.arange(at, at + some.size) + 1)
    for index in (plain, cells):
        assert (index.find(keys)[1] == np.arange(keys.size) + 1).all()
        assert not index.find(keys + 1)[1].any()
    assert everything(plain) == everything(cells)
    assert isinstance(cells, CellIndex)
    assert cells.growths > BUCKETS
    assert cells.nbytes / keys.size < 30
    for index in (plain, cells):
        index.remove(hashes_of(keys[::2], SALT))
        assert (index.find(keys)[1] > 0).tolist() == [False, True] * (keys.size // 2)


def test_colliding_hashes_cost_time_and_not_memory():
    """Hashes that nobody can make without the salt, 3,000 with one home: all are found, in room for some times as
    many."""
    *_, cells = indexes()
    hashes = u64((5 << LOW_BITS) + 12345) + np.arange(3000, dtype=np.uint64)
    cells.put(hashes, np.arange(3000) + 1)
    assert (cells.entries(hashes) == np.arange(3000) + 1).all()
    cells.remove(hashes[::3])
    assert (cells.entries(hashes) == np.where(np.arange(3000) % 3, np.arange(3000) + 1, 0)).all()
    assert cells.nbytes < 16 * 20_000 + 16 * 40 * BUCKETS


def test_room_that_is_reserved_needs_no_growth():
    """A restore says how many keys come to each bucket. What has no entries finds nothing, and takes no memory."""
    *_, cells = indexes()
    assert isinstance(cells, CellIndex)
    hashes = np.random.default_rng(1).integers(0, LAST, 50_000, dtype=np.uint64)
    cells.reserve(np.bincount(buckets_of(hashes), minlength=BUCKETS))
    cells.put(hashes, np.ones(hashes.size, np.int64))
    assert cells.growths == 0
    part = CellIndex(compiled().index(), SALT)
    assert part.nbytes == 0
    part.put(u64([15 << LOW_BITS]), np.array([3]))
    assert part.entries(u64([15 << LOW_BITS, 0, 500 << LOW_BITS, LAST])).tolist() == [3, 0, 0, 0]


def test_intervals_and_followers_are_the_same():
    """What lies in intervals, and what follows a hash in its bucket: equal in both, with rows, without, and around."""
    rng = np.random.default_rng(2)
    plain, cells = indexes()
    hashes = np.unique(rng.integers(0, LAST, 6000, dtype=np.uint64))
    hashes[::3] |= np.uint64(0x3FF << LOW_BITS)  # many in the last bucket
    hashes = np.unique(hashes)
    entries = np.where(rng.random(hashes.size) < 0.7, np.arange(hashes.size) + 1, -1 - np.arange(hashes.size))
    last = rng.integers(0, 2, hashes.size).astype(np.uint32)
    for index in (plain, cells):
        index.put(hashes, entries)
    starts = np.concatenate([rng.integers(0, LAST, 300, dtype=np.uint64), hashes[::50], u64([0, LAST])])
    lows = np.sort(starts)
    highs = lows | np.uint64((1 << 50) - 1)
    for one, other in zip(plain.scan(lows, highs), cells.scan(lows, highs), strict=True):
        assert one.tolist() == other.tolist()
    for sign in (1, -1):
        one = plain.follow(starts, 8, sign, 1, last)
        other = cells.follow(starts, 8, sign, 1, last)
        assert (one[1] == other[1]).all()
        assert (one[0] == other[0])[one[1] != 0].all()
        found = one[1][one[1] != 0]
        assert ((found > 0) == (sign > 0)).all()
        assert sign < 0 or (last[found - 1] == 0).all()


@pytest.mark.parametrize("dtype", ["int64", "uint64"])
def test_a_hash_is_a_key(dtype):
    """Each key has one hash, and each hash one key; equal bits, equal hashes."""
    keys = np.array([0, 1, 2, 1 << 62, (1 << 63) - 1], np.int64)
    keys = np.concatenate([keys, -keys, ~keys]).view(dtype)
    assert (keys_of(hashes_of(keys, SALT), SALT, dtype) == keys).all()
    words = np.random.default_rng(0).integers(0, LAST, 1000, dtype=np.uint64)
    assert (unmixed(mixed(words)) == words).all()
    # splitmix64's first number of seed 0, as published
    assert mixed(u64([0x9E3779B97F4A7C15]))[0] == 0xE220A8397B1DCDAF


def test_another_process_loads_what_one_has_compiled():
    """All functions are machine code that needs neither Numba nor Python, so that they can be kept."""
    counts = []
    for _ in range(2):
        compiler = Compiler(ServerDevice(), 1, os.environ[KERNELS])
        native = Native(compiler)
        native.index()
        native.mark()
        native.count()
        for dtype in FIRST_VALUES:
            native.first_values(dtype)
        compiler.wait()
        assert native.index() is not None
        counts.append((compiler.compiled, compiler.loaded, compiler.failed))
        compiler.close()
    many = len(INDEX) + len(FIRST_VALUES) + 2
    (made, loaded, failed), again = counts
    assert (made + loaded, failed) == (many, 0)  # another process of the run may have compiled some
    assert again == (0, many, 0)


def test_without_a_compiler_there_are_none():
    """Nor on a GPU, where these functions do not run."""
    assert Native().index() is None
    assert Native().first_values("float32") is None
    on_gpu = Compiler(SimpleNamespace(gpu=0), 1)
    assert Native(on_gpu).index() is None
    assert compiled().index() is compiled().index()
