"""Datasets of arrays: order, batches, shards."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from psclient._src.arrays import nest
from psclient._src.data.adapters import source_of
from psclient._src.data.array_dataset import ArrayDataset
from psclient._src.options import ArraySpec
from tests.kit.strategies import refused


def test_a_shuffle_is_a_function_of_seed_and_epoch():
    """The same everywhere, another one in each data epoch, which iterating begins; each example comes once."""

    def orders(seed: int) -> list[list[int]]:
        data = ArrayDataset(np.arange(50)).shuffle(seed).batch(8)
        found = [np.concatenate(list(data.epoch(epoch))).tolist() for epoch in range(4)]
        assert found == [np.concatenate(list(data)).tolist() for _ in range(4)]
        assert all(sorted(order) == list(range(50)) for order in found)
        assert data.rows(2, 6, 1, 9).tolist() == found[2][49:]
        assert data.rows(2, 6, 3, 4).size == data.rows(2, 9, 0, 4).size == 0
        return found

    assert orders(0) == orders(0)
    assert len({tuple(order) for order in [*orders(0), *orders(7), list(range(50))]}) == 9


def test_batches_are_copies_of_stacked_lists():
    """A step that changes its batch does not change the data; tuples and dicts are nests."""
    array = np.zeros(4)
    for batch in ArrayDataset(array).batch(2).epoch(0):
        batch += 1
    assert array.tolist() == [0] * 4
    dataset = ArrayDataset({"x": np.arange(7), "y": (np.eye(7),)})
    assert next(iter(dataset))["y"][0].shape == (7,)
    assert [batch["y"][0].shape for batch in dataset.batch(3)] == [(3, 7), (3, 7), (1, 7)]
    assert ArrayDataset((np.arange(2), [np.zeros(3), np.ones(3)])).arrays[1].shape == (2, 3)
    assert (ArrayDataset([1, 2, 3]).size, ArrayDataset([np.ones(2)] * 3).arrays.shape) == (3, (3, 2))
    refused(ValueError, r"shapes \[\(3,\), \(4,\)\]; use a tuple", lambda: ArrayDataset([np.zeros(3), np.zeros(4)]))


def test_what_makes_no_dataset_is_refused():
    """With what to do; each method makes a new one."""
    plain = ArrayDataset(np.arange(6))
    sharded = plain.shard(2, 1)
    assert sharded.shuffle(1).batch(2).batch_size == 2
    assert (plain.batch_size, plain.seed, plain.size) == (None, None, 6)
    assert [b.tolist() for b in sharded.batch(2).epoch(0)] == [[1, 3], [5]]
    refused(ValueError, "differ in their first dimension", lambda: ArrayDataset((np.zeros(2), np.zeros(3))))
    for arrays in (np.float32(1), ()):
        refused(ValueError, "first dimension", lambda arrays=arrays: ArrayDataset(arrays))
    batched = ArrayDataset(np.zeros(4)).batch(2)
    refused(ValueError, "must be called before batch", batched.shuffle)
    for shards, index in ((2, 2), (2, -1), (0, 0)):
        with pytest.raises(ValueError, match=f"shard {index} of {shards}"):
            batched.shard(shards, index)
    refused(ValueError, "cannot be repeated -2 times", lambda: batched.repeat(-2))
    refused(ValueError, "the batch size is 0, and must be at least 1", lambda: ArrayDataset(np.zeros(4)).batch(0))
    refused(ValueError, r"call dataset.batch", lambda: ArrayDataset(np.zeros(4)).batches(0))


def plain(element: Any) -> Any:
    """A nest of arrays as lists."""
    return nest.map_structure(lambda array: np.asarray(array).tolist(), element)


def times_ten(x: Any) -> Any:
    return x * 10


# Each stage, and what it makes of a list of examples, or of a list of batches, which are lists of examples.
STAGES: dict[str, tuple[Callable[[ArrayDataset], ArrayDataset], Callable[[list[Any]], list[Any]], bool, bool]] = {
    "shard": (lambda d: d.shard(3, 1), lambda x: x[1::3], False, False),
    "repeat": (lambda d: d.repeat(2), lambda x: x * 2, False, False),
    "map": (lambda d: d.map(times_ten), lambda x: (np.asarray(x) * 10).tolist(), False, False),
    "batch": (lambda d: d.batch(4), lambda x: [x[i : i + 4] for i in range(0, len(x), 4)], False, True),
    "batch whole ones": (
        lambda d: d.batch(3, drop_remainder=True),
        lambda x: [x[i : i + 3] for i in range(0, len(x) - 2, 3)],
        False,
        True,
    ),
    "shard batches": (lambda d: d.shard(2, 1), lambda x: x[1::2], True, True),
    "repeat batches": (lambda d: d.repeat(3), lambda x: x * 3, True, True),
    "map batches": (lambda d: d.map(times_ten), lambda x: [[i * 10 for i in b] for b in x], True, True),
    "unbatch": (lambda d: d.unbatch(), lambda x: [i for b in x for i in b], True, False),
}


@example(count=6, names=["batch", "shard batches"])
@given(count=st.integers(0, 11), names=st.lists(st.sampled_from(sorted(STAGES)), max_size=5))
def test_any_chain_is_that_of_lists(count, names):
    """Whole, from any batch on, and any rows of a batch: what a position says is what comes."""
    dataset, expected, batched = ArrayDataset(np.arange(count)), list(range(count)), False
    for name in names:
        made, oracle, needs, gives = STAGES[name]
        if needs == batched and not (name == "map" and not expected):
            dataset, expected, batched = made(dataset), oracle(expected), gives
    assert [plain(element) for element in dataset.epoch(3)] == expected
    assert [plain(element) for element in dataset] == expected
    if not batched:
        assert dataset.size == len(expected)
        return
    assert (dataset.batches(0), dataset.size) == (len(expected), sum(map(len, expected)))
    for start in range(len(expected) + 1):
        for batch, whole in zip(source_of(dataset).batches(1, start), expected[start:], strict=True):
            assert (batch.examples, plain(batch.whole)) == (len(whole), whole)
            assert [plain(batch.rows(i, i + 2)) for i in range(0, 6, 2)] == [whole[i : i + 2] for i in range(0, 6, 2)]


ORDERED: dict[str, Callable[[ArrayDataset], ArrayDataset]] = {
    "repeat behind": lambda d: d.shuffle(3).repeat(3).batch(4),
    "repeat of batches": lambda d: d.shuffle(3).batch(4).repeat(3),
    "repeat before": lambda d: d.repeat(3).shuffle(3).batch(4),
    "shuffled again": lambda d: d.repeat(3).batch(5).unbatch().shuffle(1).batch(4),
    "sharded repeats": lambda d: d.repeat(6).shard(2, 1).shuffle(3).batch(4),
}


@pytest.mark.parametrize("name", ORDERED)
def test_shuffled_examples_come_as_often_as_they_are_repeated(name):
    """Each data epoch in another order, which is the same whenever it is made, and from whichever batch."""
    dataset, again = (ORDERED[name](ArrayDataset(np.arange(9))) for _ in range(2))
    orders = [[plain(batch) for batch in dataset.epoch(epoch)] for epoch in range(3)]
    for epoch, order in enumerate(orders):
        assert sorted([*itertools.chain(*order)]) == sorted([*range(9)] * 3)
        for start in reversed(range(len(order))):
            assert [plain(batch.whole) for batch in source_of(again).batches(epoch, start)] == order[start:]
    assert len({str(order) for order in orders}) == 3


def test_shards_and_repetitions_of_a_shuffle():
    """Shards have every example once, in each data epoch others; repetitions have the orders of as many epochs."""
    once = ArrayDataset(np.arange(9)).shuffle(3)
    orders = [[int(x) for x in once.epoch(epoch)] for epoch in range(6)]
    for epoch in range(2):
        assert [int(x) for x in once.repeat(3).epoch(epoch)] == [*itertools.chain(*orders[3 * epoch : 3 * epoch + 3])]
    shuffled = ArrayDataset(np.arange(10)).shuffle(5)
    for epoch in range(3):
        shards = [[int(x) for x in shuffled.shard(3, index).epoch(epoch)] for index in range(3)]
        assert sorted([*itertools.chain(*shards)]) == list(range(10))
        batches = [plain(b) for index in range(2) for b in shuffled.batch(3).shard(2, index).epoch(epoch)]
        assert sorted([*itertools.chain(*batches)]) == list(range(10))
    assert len({tuple(map(int, shuffled.shard(3, 0).epoch(epoch))) for epoch in range(3)}) == 3


def test_an_endless_dataset_has_no_end():
    """It is begun anywhere; what needs its end is refused."""
    for endless in (
        ArrayDataset(np.arange(5)).repeat().batch(2),
        ArrayDataset(np.arange(5)).repeat(-1).map(lambda x: x).shard(1, 0).batch(2).repeat(4),
        ArrayDataset(np.arange(10) % 5).batch(2).repeat(),
    ):
        assert [plain(b) for b in itertools.islice(endless, 6)] == [[0, 1], [2, 3], [4, 0], [1, 2], [3, 4], [0, 1]]
        assert plain(next(source_of(endless).batches(0, 10**9 + 1)).whole) == [2, 3]
        refused(ValueError, "repeats without end, so its examples", lambda endless=endless: endless.size)
        refused(ValueError, "unbatch must be called before repeat", lambda endless=endless: endless.unbatch())
    refused(ValueError, "shuffle must be called before repeat", lambda: ArrayDataset(np.arange(5)).repeat().shuffle())
    shuffled = ArrayDataset(np.arange(4)).shuffle(2).repeat()
    first, second = ([int(x) for x in itertools.islice(shuffled, 12)] for _ in range(2))
    assert [sorted(first[i : i + 4]) for i in (0, 4, 8)] == [[0, 1, 2, 3]] * 3
    assert len({tuple(order[i : i + 4]) for order in (first, second) for i in (0, 4, 8)}) > 3
    assert list(ArrayDataset(np.arange(0)).repeat()) == []


def test_a_function_is_called_with_what_an_example_is():
    """Of a tuple with its items, of a dict with itself; it may make another nest of it."""
    pairs = ArrayDataset((np.arange(4), np.arange(8.0).reshape(4, 2)))
    made = pairs.map(lambda x, y: {"sum": x + y.sum(), "y": y[::-1]})
    assert plain(next(iter(made))) == {"sum": 1.0, "y": [1.0, 0.0]}
    assert plain(next(iter(made.batch(2)))) == {"sum": [1.0, 6.0], "y": [[1.0, 0.0], [3.0, 2.0]]}
    assert plain(next(iter(made.batch(2).map(lambda b: (b["y"], b["sum"] > 2))))[1]) == [False, True]
    spec = source_of(made.batch(2)).spec()
    assert (spec["y"].shape, spec["sum"].dtype, spec["sum"].shape) == ((None, 2), np.float64, (None,))
    called: list[int] = []
    each = ArrayDataset(np.arange(100)).map(lambda x: called.append(int(x)) or x).batch(10)
    assert plain(next(source_of(each).batches(0, 3)).rows(2, 4)) == [32, 33]
    assert called == [32, 33]


def test_what_a_function_must_not_make_is_told():
    """Other numbers of examples of a batch, shapes that differ, and shapes of nothing."""
    dataset = ArrayDataset(np.arange(6))
    for wrong in (lambda b: b[:1], lambda b: b.sum()):
        with pytest.raises(ValueError, match=r"map after batch returned shapes .* but must keep the number"):
            list(dataset.batch(3).map(wrong))
    with pytest.raises(ValueError, match=r"map returned arrays of different shapes \[\(0,\), \(1,\), \(2,\)\]; return"):
        list(dataset.map(np.zeros).batch(3))
    with pytest.raises(ValueError, match="map needs at least one example to find out the shapes"):
        source_of(ArrayDataset(np.zeros(0)).map(lambda x: x).batch(3)).spec()


def test_examples_are_split_into_their_rows():
    """Where there are no batches: along the first dimension that all arrays of an example share."""
    dataset = ArrayDataset((np.arange(6).reshape(3, 2), np.arange(12).reshape(3, 2, 2)))
    assert [plain(x) for x in dataset.unbatch()] == [(i, [2 * i, 2 * i + 1]) for i in range(6)]
    assert [int(x) % 2 for x, _ in dataset.shuffle(1).unbatch()] == [0, 1] * 3
    for arrays in (np.arange(3), (np.zeros((3, 2)), np.zeros((3, 4)))):
        with pytest.raises(ValueError, match="unbatch needs arrays with the same first dimension"):
            ArrayDataset(arrays).unbatch()


def test_batches_are_batched_once_more():
    """As one more dimension, wherever a pass begins; a shorter last batch would be no row of it."""
    data = ArrayDataset(np.arange(16)).batch(2).batch(3)
    assert [plain(each) for each in data][1:] == [[[6, 7], [8, 9], [10, 11]], [[12, 13], [14, 15]]]
    assert [each.examples for each in source_of(data).batches(0, 1)] == [3, 2]
    assert [plain(each.rows(1, 2)) for each in source_of(data).batches(0, 1)] == [[[8, 9]], [[14, 15]]]
    assert data.spec() == ArraySpec((None, 2), np.dtype(int))
    with pytest.raises(ValueError, match=r"the last one has 1 examples; call batch\(3, drop_remainder=True\) before"):
        ArrayDataset(np.arange(16)).batch(3).batch(2)
    assert len([*ArrayDataset(np.arange(16)).batch(3, drop_remainder=True).batch(2)]) == 3
