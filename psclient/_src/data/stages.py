"""Stages of a dataset of arrays: each can be begun at any example of any data epoch.

    Examples    Rows, Shuffled, Sharded, Repeated, Mapped, Unbatched, Split
    Batches     Batched, ShardedBatches, RepeatedBatches, MappedBatches

A stage knows how many examples or batches it has without reading any, and which ones of the stage before these are;
so the position of a checkpoint is a number, and a worker reads the rows that are its own, and no others.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Protocol

import numpy as np

from psclient._src.arrays import nest
from psclient._src.arrays.devices import to_numpy
from psclient._src.arrays.nest import Nest
from pswire.model.tensor import Array

ENDLESS = 1 << 62
"""As many examples as an endless repetition has, and more."""

_ORDERS = 2
"""Orders that are kept: a batch may have the end of one repetition, and the beginning of the next."""


class OrderedExamples(Protocol):
    """Examples, in an order that may differ by data epoch."""

    size: int
    """Number of examples of a data epoch."""

    def take(self, epoch: int, chosen: Array) -> Nest:
        """Copies of examples of a data epoch, by numbers [n]; arrays whose first dimension counts them."""


class Batches(Protocol):
    """Batches of examples, in an order that may differ by data epoch."""

    count: int
    """Number of batches of a data epoch."""

    def examples(self, index: int) -> int:
        """Returns how many examples a batch has; in all data epochs as many."""

    def rows(self, epoch: int, index: int, start: int, stop: int) -> Nest:
        """Copies of examples `start` to `stop` of a batch; fewer, or none, at its end."""


# ---- Examples ----


class RowStage(OrderedExamples):
    """The rows of arrays.

    Args:
        arrays: a nest of arrays of one first dimension.
    """

    def __init__(self, arrays: Nest) -> None:
        self._arrays = arrays
        self.size = int(nest.flatten(arrays)[0].shape[0])

    def take(self, epoch: int, chosen: Array) -> Nest:
        return nest.map_structure(lambda array: array[chosen], self._arrays)


class Shuffled(OrderedExamples):
    """Examples in an order of their own in each data epoch.

    Args:
        before: the examples.
        seed: not negative.
    """

    def __init__(self, before: OrderedExamples, seed: int) -> None:
        self._before, self._seed = before, seed
        self.size = before.size
        self._orders: dict[int, Array] = {}

    def take(self, epoch: int, chosen: Array) -> Nest:
        return self._before.take(epoch, self._order(epoch)[chosen])

    def _order(self, epoch: int) -> Array:
        order = self._orders.get(epoch)
        if order is None:
            # Sorted raw bits: NumPy keeps these streams, but not its permutations, from version to version.
            bits = np.random.PCG64(np.random.SeedSequence([self._seed, epoch])).random_raw(self.size)
            order = np.argsort(bits, kind="stable")
            for old in list(self._orders)[: 1 - _ORDERS]:
                self._orders.pop(old, None)
            self._orders[epoch] = order
        return order


class Sharded(OrderedExamples):
    """Every `shards`-th example, from `index` on."""

    def __init__(self, before: OrderedExamples, shards: int, index: int) -> None:
        self._before, self._shards, self._index = before, shards, index
        self.size = part(before.size, shards, index)

    def take(self, epoch: int, chosen: Array) -> Nest:
        return self._before.take(epoch, chosen * self._shards + self._index)


class Repeated(OrderedExamples):
    """Examples several times, each time as of another data epoch.

    Args:
        before: the examples.
        times: how often; None for ever.
    """

    def __init__(self, before: OrderedExamples, times: int | None) -> None:
        self._before, self._times = before, times
        self.size = many(before.size, times)

    def take(self, epoch: int, chosen: Array) -> Nest:
        size = self._before.size
        if not len(chosen):
            return self._before.take(epoch, chosen)
        again, places = np.divmod(chosen, size)
        return _by_group(again, places, lambda p, own: self._before.take(inner(epoch, self._times, p), own))


class Mapped(OrderedExamples):
    """What a function makes of each example.

    Args:
        before: the examples.
        fn: gets an example, of a tuple its items one by one; returns a nest of arrays or numbers, always the same for
            the same example, and of the same shapes for all.
    """

    def __init__(self, before: OrderedExamples, fn: Callable[..., Nest]) -> None:
        self._before, self._fn = before, fn
        self.size = before.size

    def take(self, epoch: int, chosen: Array) -> Nest:
        if not len(chosen):
            return self._none
        given = self._before.take(epoch, chosen)
        made = [self._one(nest.map_structure(lambda array, i=i: array[i], given)) for i in range(len(chosen))]
        return nest.map_structure(_stacked, *made)

    def _one(self, example: Nest) -> Nest:
        return nest.map_structure(to_numpy, called(self._fn, example))

    @cached_property
    def _none(self) -> Nest:
        if not self.size:
            raise ValueError(
                "map needs at least one example to find out the shapes of its results, but the dataset is empty"
            )
        return nest.map_structure(lambda array: array[:0], self.take(0, np.arange(1)))


class Unbatched(OrderedExamples):
    """The examples of batches, one by one.

    Args:
        before: the batches; not endless.
    """

    def __init__(self, before: Batches) -> None:
        self._before = before
        self._ends = np.cumsum([before.examples(index) for index in range(before.count)], dtype=np.int64)
        self.size = int(self._ends[-1]) if before.count else 0

    def take(self, epoch: int, chosen: Array) -> Nest:
        if not len(chosen):
            return self._before.rows(epoch, 0, 0, 0)
        batches = np.searchsorted(self._ends, chosen, side="right")
        begins = np.concatenate([[0], self._ends])[batches]
        return _by_group(batches, chosen - begins, lambda index, own: self._rows(epoch, index, own))

    def _rows(self, epoch: int, index: int, own: Array) -> Nest:
        first = int(own.min())
        rows = self._before.rows(epoch, index, first, int(own.max()) + 1)
        return nest.map_structure(lambda array: array[own - first], rows)


class Whole(OrderedExamples):
    """Batches, each of them one example: what is batched once more.

    Args:
        before: the batches.

    Raises:
        ValueError: the last one has fewer examples.
    """

    def __init__(self, before: Batches) -> None:
        self._before = before
        self.size = before.count
        self._each = before.examples(0)
        endless = before.count >= ENDLESS
        if before.count and not endless and before.examples(before.count - 1) != self._each:
            raise ValueError(
                f"batches of {self._each} cannot be batched again, because the last one has "
                f"{before.examples(before.count - 1)} examples; call batch({self._each}, "
                "drop_remainder=True) before"
            )

    def take(self, epoch: int, chosen: Array) -> Nest:
        taken = [self._before.rows(epoch, int(index), 0, self._each) for index in chosen]
        if not taken:
            blank = self._before.rows(epoch, 0, 0, 0)
            return nest.map_structure(lambda array: np.empty((0, self._each, *array.shape[1:]), array.dtype), blank)
        return nest.map_structure(lambda *arrays: np.stack(arrays), *taken)


class Split(OrderedExamples):
    """The parts of examples that are arrays of one first dimension, one by one.

    Args:
        before: the examples.

    Raises:
        ValueError: the examples are no such arrays.
    """

    def __init__(self, before: OrderedExamples) -> None:
        self._before = before
        shapes = [array.shape[1:] for array in nest.flatten(before.take(0, np.arange(0)))]
        if len({shape[:1] for shape in shapes}) != 1 or not shapes[0]:
            raise ValueError(f"unbatch needs arrays with the same first dimension, but they have shapes {shapes}")
        self._parts = shapes[0][0]
        self.size = before.size * self._parts

    def take(self, epoch: int, chosen: Array) -> Nest:
        whole = self._before.take(epoch, chosen // max(self._parts, 1))
        places = (np.arange(len(chosen)), chosen % max(self._parts, 1))
        return nest.map_structure(lambda array: array[places], whole)


# ---- Batches ----


class Batched(Batches):
    """Examples in batches.

    Args:
        before: the examples.
        size: of a batch.
        drop: leaves out a last batch that is smaller.
    """

    def __init__(self, before: OrderedExamples, size: int, drop: bool) -> None:
        self._before, self._size = before, size
        whole = before.size // size if drop else -(-before.size // size)
        self.count = ENDLESS if before.size >= ENDLESS else whole

    def examples(self, index: int) -> int:
        return max(0, min(self._size, self._before.size - index * self._size))

    def rows(self, epoch: int, index: int, start: int, stop: int) -> Nest:
        begin, end = index * self._size, min((index + 1) * self._size, self._before.size)
        return self._before.take(epoch, np.arange(min(begin + start, end), min(begin + stop, end)))


class ShardedBatches(Batches):
    """Every `shards`-th batch, from `index` on."""

    def __init__(self, before: Batches, shards: int, index: int) -> None:
        self._before, self._shards, self._index = before, shards, index
        self.count = part(before.count, shards, index)

    def examples(self, index: int) -> int:
        return self._before.examples(index * self._shards + self._index)

    def rows(self, epoch: int, index: int, start: int, stop: int) -> Nest:
        return self._before.rows(epoch, index * self._shards + self._index, start, stop)


class RepeatedBatches(Batches):
    """Batches several times, each time as of another data epoch; None for ever."""

    def __init__(self, before: Batches, times: int | None) -> None:
        self._before, self._times = before, times
        self.count = many(before.count, times)

    def examples(self, index: int) -> int:
        return self._before.examples(index % self._before.count)

    def rows(self, epoch: int, index: int, start: int, stop: int) -> Nest:
        again, own = divmod(index, max(self._before.count, 1))
        return self._before.rows(inner(epoch, self._times, again), own, start, stop)


class MappedBatches(Batches):
    """What a function makes of each batch.

    Args:
        before: the batches.
        fn: gets a batch, of a tuple its items one by one; returns a nest of arrays of as many examples, always the same
            for the same batch.
    """

    def __init__(self, before: Batches, fn: Callable[..., Nest]) -> None:
        self._before, self._fn = before, fn
        self.count = before.count
        self._last: tuple[tuple[int, int], Nest] | None = None

    def examples(self, index: int) -> int:
        return self._before.examples(index)

    def rows(self, epoch: int, index: int, start: int, stop: int) -> Nest:
        last = self._last
        if last is None or last[0] != (epoch, index):
            # The replicas of a process take their parts of one batch, one after the other.
            last = self._last = (epoch, index), self._whole(epoch, index)
        return nest.map_structure(lambda array: np.array(array[start:stop]), last[1])

    def _whole(self, epoch: int, index: int) -> Nest:
        count = self.examples(index)
        made = nest.map_structure(to_numpy, called(self._fn, self._before.rows(epoch, index, 0, count)))
        shapes = [array.shape for array in nest.flatten(made)]
        if any(shape[:1] != (count,) for shape in shapes):
            raise ValueError(
                f"map after batch returned shapes {shapes} for a batch of {count} examples, but must keep "
                "the number of examples; call map before batch"
            )
        return made


# ---- What they have in common ----


def part(count: int, shards: int, index: int) -> int:
    """Returns how many of so many items every `shards`-th is, from `index` on."""
    return count if count >= ENDLESS else max(0, -(-(count - index) // shards))


def many(count: int, times: int | None) -> int:
    """Returns how many items there are when these are repeated; None for ever."""
    endless = times is None or count >= ENDLESS
    return ENDLESS if endless and count and times != 0 else 0 if endless else count * (times or 0)


def inner(epoch: int, times: int | None, again: int) -> int:
    """Returns the data epoch of one repetition within a data epoch."""
    return (epoch << 32) + again if times is None else epoch * times + again


def called(fn: Callable[..., Nest], element: Nest) -> Nest:
    """Calls a function of `map` with an example or a batch: of a tuple with its items."""
    return fn(*element) if isinstance(element, tuple) and not hasattr(element, "_fields") else fn(element)


def _by_group(groups: Array, places: Array, take: Callable[[int, Array], Nest]) -> Nest:
    """What `take` gives for each group's number and its places, in the order in which the places were given."""
    taken = [take(int(group), places[groups == group]) for group in np.unique(groups)]
    if len(taken) == 1:
        return taken[0]
    back = np.argsort(np.argsort(groups, kind="stable"), kind="stable")
    return nest.map_structure(lambda *arrays: np.concatenate(arrays)[back], *taken)


def _stacked(*rows: Array) -> Array:
    if len({row.shape for row in rows}) > 1:
        raise ValueError(
            f"map returned arrays of different shapes {sorted({row.shape for row in rows})}; return the same "
            "shape for each example"
        )
    return np.stack(rows)
