"""Datasets of arrays: order, batches, shards."""

from __future__ import annotations

import numpy as np
import pytest

from psclient._src.data.array_dataset import ArrayDataset


def test_batches_hold_every_example_once() -> None:
    """In order where nothing is shuffled; the last batch is smaller, or left out."""
    dataset = ArrayDataset({"x": np.arange(7), "y": (np.arange(14).reshape(7, 2),)}).batch(3)
    assert [b["x"].tolist() for b in dataset.epoch(0)] == [[0, 1, 2], [3, 4, 5], [6]]
    assert [b["y"][0].shape for b in dataset.epoch(0)] == [(3, 2), (3, 2), (1, 2)]
    assert ArrayDataset(np.arange(7)).batch(3, drop_remainder=True).batches(0) == 2
    assert ArrayDataset(np.arange(0)).batch(3).batches(0) == 0


@pytest.mark.parametrize("seed", [0, 7])
def test_a_shuffle_is_a_function_of_seed_and_epoch(seed: int) -> None:
    """The same everywhere, another one in each data epoch, each example once."""

    def order(dataset: ArrayDataset, epoch: int) -> list[int]:
        return np.concatenate(list(dataset.epoch(epoch))).tolist()  # type: ignore[no-any-return]

    one, other = (ArrayDataset(np.arange(50)).shuffle(seed).batch(8) for _ in range(2))
    orders = [order(one, epoch) for epoch in range(4)]
    assert orders == [order(other, epoch) for epoch in range(4)]
    assert order(one, 1) == orders[1]
    assert len({tuple(o) for o in [*orders, list(range(50))]}) == 5
    assert all(sorted(o) == list(range(50)) for o in orders)
    assert order(ArrayDataset(np.arange(50)).shuffle(seed + 1).batch(8), 0) != orders[0]


def test_rows_of_a_slice_are_the_rows_of_the_whole() -> None:
    """Slices of a batch are its rows; beyond the end there are none."""
    dataset = ArrayDataset(np.arange(10)).shuffle(3).batch(4)
    for index, whole in enumerate(dataset.epoch(2)):
        cut = [dataset.rows(2, index, start, start + 3) for start in (0, 3, 6)]
        assert np.concatenate(cut).tolist() == whole.tolist()
    assert dataset.rows(2, 2, 3, 4).shape == (0,)
    assert dataset.rows(2, 9, 0, 4).shape == (0,)


def test_batches_are_copies() -> None:
    """A step that changes its batch does not change the data."""
    array = np.zeros(4)
    for batch in ArrayDataset(array).batch(2).epoch(0):
        batch += 1
    assert array.tolist() == [0] * 4


def test_lists_are_stacked() -> None:
    """As everywhere in the API; tuples and dicts are nests."""
    dataset = ArrayDataset((np.arange(2), [np.zeros(3), np.ones(3)]))
    assert dataset.arrays[1].shape == (2, 3)
    assert ArrayDataset([1, 2, 3]).size == 3
    assert ArrayDataset([np.ones(2)] * 3).arrays.shape == (3, 2)
    with pytest.raises(ValueError, match=r"shapes \[\(3,\), \(4,\)\]; put several arrays into a tuple"):
        ArrayDataset([np.zeros(3), np.zeros(4)])


def test_datasets_are_immutable() -> None:
    """Each method makes a new one."""
    plain = ArrayDataset(np.arange(6))
    sharded = plain.shard(2, 1)
    assert sharded.shuffle(1).batch(2).batch_size == 2
    assert (plain.batch_size, plain.seed, plain.size) == (None, None, 6)
    assert [b.tolist() for b in sharded.batch(2).epoch(0)] == [[1, 3], [5]]


def test_what_makes_no_dataset_is_refused() -> None:
    """With what to do."""
    with pytest.raises(ValueError, match="same first dimension"):
        ArrayDataset((np.zeros(2), np.zeros(3)))
    for arrays in (np.float32(1), ()):
        with pytest.raises(ValueError, match="first dimension"):
            ArrayDataset(arrays)
    batched = ArrayDataset(np.zeros(4)).batch(2)
    for wrong in (lambda: batched.batch(2), batched.shuffle, lambda: batched.shard(2, 0)):
        with pytest.raises(ValueError, match="comes before batch"):
            wrong()
    with pytest.raises(ValueError, match="shard comes before shuffle"):
        ArrayDataset(np.zeros(4)).shuffle().shard(2, 0)
    with pytest.raises(ValueError, match="0 examples"):
        ArrayDataset(np.zeros(4)).batch(0)
    with pytest.raises(ValueError, match=r"call dataset.batch"):
        ArrayDataset(np.zeros(4)).batches(0)
