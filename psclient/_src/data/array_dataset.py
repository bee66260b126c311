"""Datasets of arrays: shuffled, mapped, repeated, cut into batches, without anything besides NumPy."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import ClassVar

import numpy as np

from psclient._src.arrays import nest
from psclient._src.arrays.devices import to_numpy
from psclient._src.arrays.nest import Nest
from psclient._src.data import stages
from psclient._src.data.stages import ENDLESS, Batches, OrderedExamples
from psclient._src.options import ArraySpec
from pswire.model.tensor import Array


class ArrayDataset:
    """A dataset of examples in NumPy arrays. Each method returns a new dataset.

    Iterating returns the examples, or batches after `batch`; each iteration is the next data epoch, shuffled again. No
    strategy is needed; the passes of a strategy over the dataset are counted separately.

    Args:
        arrays: a nest of arrays whose first dimension counts the examples. A list is stacked into one array; put
            several arrays into a tuple or a dict.

    Attributes:
        arrays: the arrays.
        seed: the seed of the last `shuffle`; None before the first.
        batch_size: number of examples in a batch; None without batches.
        recipe: the calls that made it from the arrays, the same on all workers.

    Raises:
        ValueError: the arrays do not have the same number of examples, or those of a list differ in shape.

    Examples:
        >>> import numpy as np
        >>> import psclient as ps
        >>> dataset = ps.ArrayDataset({"x": np.arange(4), "y": np.array([0, 1, 0, 1])})
        >>> for batch in dataset.shuffle(seed=1).batch(2):
        ...     print(batch["x"].shape, batch["y"].shape)
        (2,) (2,)
        (2,) (2,)
    """

    _nest_leaf: ClassVar[bool] = True

    def __init__(self, arrays: Nest) -> None:
        found = iter(nest.map_leaves(_stacked, arrays, is_leaf=_is_list))
        self.arrays = nest.map_structure(lambda _: next(found), arrays, is_leaf=_is_list)
        sizes = {array.shape[:1] for array in nest.flatten(self.arrays)}
        if len(sizes) != 1 or sizes == {()}:
            shapes = [array.shape for array in nest.flatten(self.arrays)]
            raise ValueError(
                f"the arrays of a dataset differ in their first dimension: {shapes}; pass the same number of "
                "rows in each"
            )
        self.seed: int | None = None
        self.batch_size: int | None = None
        self.recipe = ""
        self._begin(stages.RowStage(self.arrays), None)

    def _begin(self, examples: OrderedExamples | None, batches: Batches | None) -> None:
        self._examples, self._batches = examples, batches
        self._passes = itertools.count()

    def _with(
        self,
        step: str,
        examples: OrderedExamples | None = None,
        batches: Batches | None = None,
        seed: int | None = None,
        batch_size: int | None = None,
    ) -> ArrayDataset:
        made = object.__new__(ArrayDataset)
        made.arrays = self.arrays
        made.recipe = f"{self.recipe}.{step}"
        made.seed = self.seed if seed is None else seed
        made.batch_size = None if batches is None else batch_size or self.batch_size
        made._begin(examples, batches)
        return made

    @property
    def size(self) -> int:
        """Number of examples in a data epoch.

        Raises:
            ValueError: the examples do not end.
        """
        if self._endless:
            raise ValueError("the dataset repeats without end, so its examples cannot be counted; use repeat(count)")
        if self._examples is not None:
            return self._examples.size
        return sum(map(self.examples, range(self.batches(0))))

    # ---- Stages ----

    def shuffle(self, seed: int = 0) -> ArrayDataset:
        """Shuffles the examples in each data epoch, in the same order everywhere for the same seed.

        Args:
            seed: not negative; the same on every worker.

        Raises:
            ValueError: the dataset is batched already, or repeated without end.
        """
        examples = self._unbatched("shuffle")
        self._check_end("shuffle")
        return self._with(f"shuffle({seed})", stages.Shuffled(examples, seed), seed=seed)

    def shard(self, num_shards: int, index: int) -> ArrayDataset:
        """Keeps every `num_shards`-th example or batch from `index` on: one worker's part, for datasets from functions.

        After `shuffle` the shards of all workers together have every example once in each data epoch, if all use the
        same seed. Before `shuffle` each worker shuffles its own part.

        Args:
            num_shards: the number of shards.
            index: the shard, from 0.

        Raises:
            ValueError: `index` is not from 0 to `num_shards - 1`.
        """
        if not 0 <= index < num_shards:
            raise ValueError(f"shard {index} of {num_shards} does not exist; shards are numbered from 0")
        if self._examples is not None:
            return self._with("shard", stages.Sharded(self._examples, num_shards, index))
        return self._with("shard", batches=stages.ShardedBatches(self._batched, num_shards, index))

    def repeat(self, count: int | None = None) -> ArrayDataset:
        """Repeats the examples or batches; if they were shuffled before, each time in another order.

        Before `batch`, a batch may have the last examples of one repetition and the first ones of the next.

        Args:
            count: number of repetitions; None or -1 without end: then a data epoch does not end.

        Raises:
            ValueError: `count` is less than -1.
        """
        if count is not None and count < -1:
            raise ValueError(f"a dataset cannot be repeated {count} times; use None or -1 to repeat without end")
        times = None if count == -1 else count
        if self._examples is not None:
            return self._with(f"repeat({times})", stages.Repeated(self._examples, times))
        return self._with(f"repeat({times})", batches=stages.RepeatedBatches(self._batched, times))

    def map(self, map_func: Callable[..., Nest]) -> ArrayDataset:
        """Applies a function to each example, or to each batch.

        Each worker calls it for the examples that it reads. After `batch` every worker calls it for the whole batch.

        Args:
            map_func: takes an example or a batch, a tuple's items as separate arguments; returns a nest of arrays or
                numbers: always the same for the same input, with the same shapes for all examples. For a batch it keeps
                the number of examples. Otherwise reading raises `ValueError`.
        """
        if self._examples is not None:
            return self._with("map", stages.Mapped(self._examples, map_func))
        return self._with("map", batches=stages.MappedBatches(self._batched, map_func))

    def batch(self, batch_size: int, drop_remainder: bool = False) -> ArrayDataset:
        """Groups examples into batches; groups batches by one more dimension, for example for several steps at once.

        Args:
            batch_size: number of examples in a batch over all replicas; in a dataset from a function those of one
                replica.
            drop_remainder: True to leave out a last batch that is smaller.

        Raises:
            ValueError: batches are to be grouped, and the last one is smaller than the others.
        """
        examples = stages.Whole(self._batched) if self._examples is None else self._examples
        if batch_size < 1:
            raise ValueError(f"the batch size is {batch_size}, and must be at least 1")
        return self._with(
            f"batch({batch_size}, {bool(drop_remainder)})",
            batches=stages.Batched(examples, batch_size, drop_remainder),
            batch_size=batch_size,
        )

    def unbatch(self) -> ArrayDataset:
        """Splits batches into examples, without those that `drop_remainder` left out; they can be batched again.

        For a dataset without batches: the rows of each example.

        Raises:
            ValueError: batches are repeated without end, or examples without batches have no common first dimension.
        """
        self._check_end("unbatch")
        if self._examples is not None:
            return self._with("unbatch", stages.Split(self._examples))
        return self._with("unbatch", stages.Unbatched(self._batched))

    # ---- What it gives ----

    def __iter__(self) -> Iterator[Nest]:
        """The examples or batches of the next data epoch; the first time those of number 0."""
        return self.epoch(next(self._passes))

    def epoch(self, number: int) -> Iterator[Nest]:
        """Iterates over the examples of one data epoch, or its batches, not divided among workers."""
        if self._examples is None:
            for index in range(self._batched.count):
                yield self.rows(number, index, 0, self.examples(index))
            return
        for index in range(self._examples.size):
            (example,) = _each(self._examples.take(number, np.arange(index, index + 1)), 1)
            yield example

    def batches(self, epoch: int) -> int:
        """Returns the number of batches in a data epoch."""
        return self._batched.count

    def examples(self, index: int) -> int:
        """Returns the number of examples in a batch."""
        return self._batched.examples(index)

    def rows(self, epoch: int, index: int, start: int, stop: int) -> Nest:
        """Copies examples `start` to `stop` of a batch; fewer, or none, at its end."""
        return self._batched.rows(epoch, index, start, stop)

    def spec(self) -> Nest:
        """Returns an `ArraySpec` for each array of a batch.

        Raises:
            ValueError: there is no batch, and the result of a `map` function is not known.
        """
        return nest.map_structure(lambda a: ArraySpec((None, *a.shape[1:]), a.dtype), self.rows(0, 0, 0, 0))

    @property
    def _batched(self) -> Batches:
        if self._batches is None:
            raise ValueError("the dataset has no batches; call dataset.batch(batch_size) first")
        return self._batches

    def _unbatched(self, what: str) -> OrderedExamples:
        if self._examples is None:
            raise ValueError(f"{what} must be called before batch, or after unbatch")
        return self._examples

    @property
    def _endless(self) -> bool:
        return (self._batched.count if self._examples is None else self._examples.size) >= ENDLESS

    def _check_end(self, what: str) -> None:
        if self._endless:
            raise ValueError(
                f"{what} must be called before repeat() without a count, because a dataset without end has no "
                "fixed order"
            )


def _each(rows: Nest, count: int) -> Iterator[Nest]:
    return (nest.map_structure(lambda array, i=i: array[i], rows) for i in range(count))


def _is_list(value: object) -> bool:
    return isinstance(value, list)


def _stacked(leaf: Nest) -> Array:
    if not isinstance(leaf, list):
        return to_numpy(leaf)
    rows = [to_numpy(item) for item in leaf]
    if len({row.shape for row in rows}) > 1:
        raise ValueError(
            f"a list is stacked into one array, but its items have shapes {[row.shape for row in rows]}; "
            "use a tuple or a dict for several arrays"
        )
    return np.asarray(rows)
