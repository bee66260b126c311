"""Datasets of arrays: shuffled, cut into batches, without anything besides NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from psclient._src import nest
from psclient._src.devices import to_numpy
from psclient._src.nest import Nest
from pswire.model.tensor import Array


@dataclass(frozen=True, eq=False)
class ArrayDataset:
    """Examples in NumPy arrays. Each method returns a new dataset.

    Args:
        arrays: a nest of arrays whose first dimension counts the examples. A list is stacked into
            one array; put several arrays into a tuple or a dict.

    Raises:
        ValueError: the arrays do not have the same number of examples, or those of a list differ in shape.
    """

    nest_leaf: ClassVar[bool] = True

    arrays: Nest
    seed: int | None = None
    batch_size: int | None = None
    drop_remainder: bool = False
    _order: dict[int, Array] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "arrays", nest.map_structure(_stacked, self.arrays, is_leaf=lambda v: isinstance(v, list))
        )
        sizes = {array.shape[:1] for array in nest.flatten(self.arrays)}
        if len(sizes) != 1 or sizes == {()}:
            shapes = [array.shape for array in nest.flatten(self.arrays)]
            raise ValueError(f"the arrays of a dataset need one and the same first dimension; theirs: {shapes}")

    @property
    def size(self) -> int:
        """Number of examples."""
        return int(nest.flatten(self.arrays)[0].shape[0])

    def shuffle(self, seed: int = 0) -> ArrayDataset:
        """Examples in an order of their own in each data epoch, the same for the same seed everywhere.

        Args:
            seed: not negative; the same on every worker.

        Raises:
            ValueError: the dataset is batched already.
        """
        self._require_unbatched("shuffle")
        return replace(self, seed=seed)

    def shard(self, num_shards: int, index: int) -> ArrayDataset:
        """Every `num_shards`-th example, from `index` on: one worker's part, for datasets from functions.

        Raises:
            ValueError: the dataset is batched or shuffled already.
        """
        self._require_unbatched("shard")
        if self.seed is not None:
            raise ValueError("shard comes before shuffle: dataset.shard(n, i).shuffle(seed).batch(size)")
        return replace(self, arrays=nest.map_structure(lambda array: array[index::num_shards], self.arrays))

    def batch(self, batch_size: int, drop_remainder: bool = False) -> ArrayDataset:
        """Examples in batches.

        Args:
            batch_size: examples of a batch over all replicas; of one replica's where a function makes
                the dataset.
            drop_remainder: leave out a last batch that is smaller.

        Raises:
            ValueError: the dataset is batched already.
        """
        self._require_unbatched("batch")
        if batch_size < 1:
            raise ValueError(f"a batch of {batch_size} examples is none")
        return replace(self, batch_size=batch_size, drop_remainder=drop_remainder)

    def batches(self, epoch: int) -> int:
        """Returns how many batches a data epoch has."""
        size = self._batched()
        return self.size // size if self.drop_remainder else -(-self.size // size)

    def rows(self, epoch: int, index: int, start: int, stop: int) -> Nest:
        """Copies of examples `start` to `stop` of a batch; fewer, or none, at its end."""
        size = self._batched()
        begin, end = index * size, min((index + 1) * size, self.size)
        chosen: slice | Array = slice(min(begin + start, end), min(begin + stop, end))
        if self.seed is not None:
            chosen = self._permutation(epoch, self.seed)[chosen]
        return nest.map_structure(lambda array: np.array(array[chosen]), self.arrays)

    def epoch(self, number: int) -> Iterator[Nest]:
        """The batches of one data epoch, whole."""
        for index in range(self.batches(number)):
            yield self.rows(number, index, 0, self._batched())

    def _permutation(self, epoch: int, seed: int) -> Array:
        order = self._order.get(epoch)
        if order is None:
            # Sorted raw bits: NumPy keeps these streams, but not its permutations, from version to version.
            bits = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(self.size)
            order = np.argsort(bits, kind="stable")
            self._order.clear()  # one data epoch at a time
            self._order[epoch] = order
        return order

    def _batched(self) -> int:
        if self.batch_size is None:
            raise ValueError("the dataset has no batches; call dataset.batch(batch_size) first")
        return self.batch_size

    def _require_unbatched(self, what: str) -> None:
        if self.batch_size is not None:
            raise ValueError(f"{what} comes before batch, and batch comes once")


def _stacked(leaf: Nest) -> Array:
    if not isinstance(leaf, list):
        return to_numpy(leaf)
    rows = [to_numpy(item) for item in leaf]
    if len({row.shape for row in rows}) > 1:
        raise ValueError(
            f"a list is stacked into one array, and its items have shapes {[row.shape for row in rows]}; "
            "put several arrays into a tuple or a dict"
        )
    return np.asarray(rows)
