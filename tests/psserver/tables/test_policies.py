"""What a table's spec says: each filter admits, each policy evicts, and first values are distributed, as they say."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
import pytest

from psserver.tables import eviction
from psserver.tables.policies import limit_of, shares_of
from pswire.model import tables
from pswire.model.first_values import RowInitializer
from pswire.model.hashing import BUCKETS
from tests.kit.tables import Table, compiled

NONE = np.zeros(0, np.int64)


def table_of(**kwargs) -> Table:
    return Table(tables.TableSpec((2,), **kwargs), native=compiled())


def touch(table: Table, round: int, keys: np.ndarray, seconds: float = 0.0, times: np.ndarray | None = None) -> int:
    """Makes a round that changes nothing; returns how many keys were refused."""
    opened = table.begin(round, keys, times)
    table.commit(seconds)
    return opened.refused


@pytest.mark.parametrize(
    "admission", [tables.CounterFilter(3), tables.CBFFilter(3, 100_000, 0.001)], ids=["counter", "bloom"]
)
def test_a_filter_admits_at_the_third_time(admission):
    """Each time that a key is given counts, also twice in one round, or said to be so many times; what is admitted
    stays. The state of an exact counter names each key that has no row yet, with its count."""
    table, other = table_of(admission=admission), table_of(admission=admission)
    once, twice = np.arange(500), np.arange(500, 1000)
    both = np.concatenate([once, twice, twice])
    assert touch(table, 1, both) == both.size
    touch(other, 1, np.arange(1000), times=np.repeat([1, 2], 500))
    assert table.state().equals(other.state())
    if isinstance(admission, tables.CounterFilter):
        state = table.state()
        counts = dict(zip(state.counted_keys.tolist(), state.counted.tolist(), strict=True))
        assert counts == {key: 1 if key < 500 else 2 for key in range(1000)}
    assert touch(table, 2, both) == once.size
    assert set(table.keys().tolist()) == set(twice.tolist())
    assert touch(table, 3, both) == 0
    assert table.state().count.tolist() == [3 if key < 500 else 6 for key in table.keys().tolist()]


def test_a_bloom_filter_errs_as_seldom_as_it_says():
    """With as many keys as it is made for, few come in too early, none too late; one counter for each key will do."""
    table = table_of(admission=tables.CBFFilter(2, 20_000, 0.01))
    for round, part in enumerate(np.arange(20_000).reshape(10, -1), 1):
        touch(table, round, part)
    assert len(table) < 0.01 * 20_000
    assert touch(table, 11, np.arange(20_000)) == 0
    coarse = table_of(admission=tables.CBFFilter(2, 1000, 0.5))
    assert [touch(coarse, round, np.arange(10)) for round in (1, 2)] == [10, 0]


def test_a_bloom_filter_forgets():
    """Counts are halved every so many rounds, whether a bucket was used meanwhile or not."""
    rare = table_of(admission=tables.CBFFilter(4, 100_000, 0.001, decay=10))
    keys = np.arange(1000)
    touch(rare, 1, np.repeat(keys, 2))
    touch(rare, 2, keys)
    assert touch(rare, 42, keys) == 1000  # 3 >> 4 is 0
    assert touch(rare, 43, np.repeat(keys, 3)) < 2000
    never = table_of(admission=tables.CBFFilter(4, 100_000, 0.001))
    touch(never, 1, np.repeat(keys, 3))
    assert touch(never, 1000, keys) == 0


def test_a_probability_is_a_share():
    """In each round about this share of the unknown keys comes in; those that were refused may come in later."""
    table = table_of(admission=tables.ProbabilityFilter(0.25))
    keys = np.arange(10_000)
    assert abs(touch(table, 1, keys) - 7500) < 250
    assert abs(touch(table, 2, keys) - 5625) < 250
    for p, refused in ((0.0, 10_000), (1.0, 0)):
        assert touch(table_of(admission=tables.ProbabilityFilter(p)), 1, keys) == refused


@pytest.mark.parametrize(
    "eviction",
    [tables.GlobalStepEvict(20), tables.TimeToLive(199.0), tables.L2WeightEvict(1.0)],
    ids=["steps", "time", "norm"],
)
def test_what_is_condemned_leaves_in_time(eviction):
    """Of 3,000 rows those that are still used, or large, stay; the others are gone after the hand has gone round."""
    table = table_of(eviction=eviction, initializer=tables.Constant(0.5))
    kept = np.arange(1000)
    touch(table, 1, np.arange(3000))
    opened = table.begin(1, kept)
    table.arrays[0][opened.touched] = 2.0
    table.commit()
    for round in range(2, 600):
        used = kept if round % 10 == 0 and not isinstance(eviction, tables.L2WeightEvict) else NONE
        touch(table, round, used, 10.0 * round)
        if round == 19 and not isinstance(eviction, tables.L2WeightEvict):
            assert len(table) == 3000
    assert sorted(table.keys().tolist()) == kept.tolist()
    assert table.evicted == 2000


@pytest.mark.parametrize("rows", [20_000, 200_000])
@pytest.mark.parametrize(("share", "rounds"), [(1.0, 200), (0.1, 300)])
def test_a_backlog_leaves_in_as_many_rounds_whatever_its_size(rows, share, rounds):
    """Also where most rows stay: three quarters of it are gone after these rounds, which mostly have one key."""
    table, old = table_of(eviction=tables.GlobalStepEvict(100)), int(rows * share)
    touch(table, 1, np.arange(rows))
    for round in range(100, 100 + rounds):
        touch(table, round, np.arange(old, rows + 1) if round % 100 == 0 else np.array([rows]))
    left = table.keys()
    assert np.count_nonzero(left < old) < old / 4
    assert np.count_nonzero(left >= old) == rows - old + 1


@pytest.mark.parametrize("policy", [tables.TimeToLive(50.0), tables.L2WeightEvict(1.0)], ids=["time", "norm"])
def test_a_round_evicts_so_many_rows_at_most(policy, monkeypatch):
    """Whatever the backlog: here about 1,024 rows, 64 in each of 16 buckets; and it goes on until all is gone."""
    monkeypatch.setattr(eviction, "MOST", 64)
    table = table_of(eviction=policy, initializer=tables.Constant(0.5))
    touch(table, 1, np.arange(500_000), 1.0)
    evicted = []
    for round in range(2, 150):
        opened = table.begin(round, np.array([0]))
        table.arrays[0][opened.touched] = 2.0
        evicted.append(table.commit(1000.0 + round))
    assert max(evicted) < 1300
    assert np.mean(evicted) > 900


def test_creation_pays_for_the_hand():
    """A table of which each key comes once does not grow: the hand passes two rows for each new one."""
    table = table_of(eviction=tables.GlobalStepEvict(5))
    for round in range(1, 60):
        touch(table, round, np.arange(2000 * round, 2000 * round + 2000))
    assert len(table) < 2000 * 25


def test_the_rare_leave_before_the_frequent():
    """LFU keeps rows that came often, although others came later; with a decay also they leave in the end."""
    for decay, share in ((1.0, 0.9), (0.5, 0.3)):
        table = table_of(eviction=tables.LFU(decay), capacity=tables.MIN_CAPACITY)
        often = np.arange(4000)
        for round in range(1, 9):
            touch(table, round, often)
        for round in range(20, 36):
            touch(table, round, np.arange(2000 * round, 2000 * round + 2000))
        found = (table.find(often) >= 0).mean()
        assert found > share if decay == 1 else found < share


def test_limits_are_divided_among_buckets():
    """Shares differ by one at most, and add up; slots, index and filter count as memory."""
    for limit in (tables.MIN_CAPACITY, 1_000_003):
        shares = shares_of(limit)
        assert shares.sum() == limit
        assert np.ptp(shares) <= 1
        assert len(shares) == BUCKETS
    spec = tables.TableSpec((8,), memory_limit=1 << 30)
    plain = limit_of(spec, ())
    assert plain == (1 << 30) // (32 + 16 + 28)
    assert limit_of(spec, (tables.SlotTensor("a", "float32", (8,)),)) == (1 << 30) // (64 + 16 + 28)
    counted = tables.TableSpec((8,), memory_limit=1 << 30, admission=tables.CounterFilter(2))
    assert limit_of(counted, ()) == (1 << 30) // (32 + 16 + 56)
    bloom = tables.TableSpec((8,), memory_limit=1 << 30, admission=tables.CBFFilter(2))
    assert limit_of(bloom, ()) < 0.9 * plain
    assert limit_of(tables.TableSpec((8,), capacity=20_000, memory_limit=1 << 30, eviction=tables.LRU()), ()) == 20_000
    assert limit_of(tables.TableSpec((8,)), ()) == 0


KEYS = np.concatenate([np.arange(-2000, 2000), np.arange(4000) << 40, [(1 << 63) - 1, -(1 << 63)]])
RANDOM = [tables.Uniform(-0.5, 1.5), tables.Normal(1.0, 2.0), tables.TruncatedNormal(-1.0, 0.5)]


def rows(spec: tables.TableSpec, keys=KEYS, is_compiled=True):
    return RowInitializer(spec, compiled().first_values if is_compiled else lambda dtype: None).rows(keys)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("initializer", RANDOM, ids=lambda i: type(i).__name__)
def test_compiled_or_not_the_bits_are_the_same(initializer, dtype):
    """NumPy and the compiled function agree to the last bit; so do parts of the keys, in any order."""
    spec = tables.TableSpec((3, 5), dtype, initializer=initializer, seed=-3)
    found = rows(spec)
    assert found.shape == (KEYS.size, 3, 5)
    assert found.dtype.name == dtype
    assert found.tobytes() == rows(spec, is_compiled=False).tobytes()
    order = np.random.default_rng(0).permutation(KEYS.size)[:777]
    assert found[order].tobytes() == rows(spec, KEYS[order]).tobytes()


@pytest.mark.parametrize(
    ("initializer", "mean", "deviation"),
    [
        (tables.Uniform(-0.5, 1.5), 0.5, 2 / np.sqrt(12)),
        (tables.Normal(1.0, 2.0), 1.0, 2.0),
        (tables.TruncatedNormal(-1.0, 0.5), -1.0, 0.5 * 0.8796256610342398),
    ],
    ids=["uniform", "normal", "truncated"],
)
def test_moments_and_range(initializer, mean, deviation):
    """Mean, variance and range are those of the distribution, within five errors of half a million values."""
    found = rows(tables.TableSpec((64,), "float64", initializer=initializer, seed=5))
    n, (low, high) = found.size, initializer.extremes
    assert abs(found.mean() - mean) < 5 * deviation / np.sqrt(n)
    assert abs(found.std() / deviation - 1) < 5 / np.sqrt(n)
    assert low <= found.min() < found.max() <= high
    assert len(np.unique(found)) > 0.999 * n


def test_normal_values_have_the_distribution_of_normal_values():
    """The share of values below each of some quantiles is its probability."""
    found = rows(tables.TableSpec((64,), "float64", initializer=tables.Normal(0, 1), seed=1)).reshape(-1)
    for p in (0.0001, 0.001, 0.01, 0.1, 0.3, 0.5, 0.8, 0.99, 0.9999):
        share = np.mean(found < NormalDist().inv_cdf(p))
        assert abs(share - p) < 5 * np.sqrt(p * (1 - p) / found.size), p


def test_nothing_is_correlated():
    """Columns, keys that follow one another, and seeds have nothing to do with each other."""
    found = rows(tables.TableSpec((16,), "float64", initializer=tables.Uniform(-1, 1)))
    other = rows(tables.TableSpec((16,), "float64", initializer=tables.Uniform(-1, 1), seed=1))
    bound = 5 / np.sqrt(len(found))
    between = np.corrcoef(found, rowvar=False)
    assert np.abs(between - np.eye(16)).max() < bound
    flat, size = found.reshape(-1), 5 / np.sqrt(found.size)
    assert abs(np.corrcoef(found[:-1].reshape(-1), found[1:].reshape(-1))[0, 1]) < size
    assert abs(np.corrcoef(flat[:-1], flat[1:])[0, 1]) < size
    assert abs(np.corrcoef(flat, other.reshape(-1))[0, 1]) < size


def test_values_that_are_not_random():
    """Zeros and constants have any dtype."""
    assert rows(tables.TableSpec((2,), "int32", initializer=tables.Constant(7)), KEYS[:2]).tolist() == [[7, 7]] * 2
    assert rows(tables.TableSpec((), "bool", initializer=tables.Zeros()), KEYS[:2]).tolist() == [False] * 2
    assert rows(tables.TableSpec((2,), initializer=tables.Uniform()), KEYS[:0]).shape == (0, 2)
