"""Datasets, and how their batches are shared among all replicas of all workers.

A global batch is a function of (seed, data epoch, index): every worker works out the same order and
reads its own slice of it, so that nothing has to be sent. A pass over a dataset is a *data epoch*.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, ClassVar, Protocol

import numpy as np

from psclient import nest
from psclient.arrays import Device, to_device, to_numpy
from psclient.nest import Nest
from psclient.values import PerReplica
from pswire.spec import Position
from pswire.tensor import Array


class GlobalBatches(Protocol):
    """A dataset whose global batches every worker can read in slices."""

    @property
    def batch_size(self) -> int | None:
        """Examples of a whole global batch; None if the dataset is not batched."""
        ...

    def batches(self, epoch: int) -> int:
        """How many global batches a data epoch has."""
        ...

    def rows(self, epoch: int, index: int, start: int, stop: int) -> Nest:
        """Examples `start` to `stop` of a global batch; fewer, or none, at its end."""
        ...


@dataclass(frozen=True, eq=False)
class ArrayDataset:
    """Examples in NumPy arrays. Each method returns a new dataset.

    Args:
        arrays: a nest of arrays whose first dimension counts the examples. A list is stacked into
            one array; put several arrays into a tuple or a dict.

    Raises:
        ValueError: the arrays do not have the same number of examples.
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
        """How many batches a data epoch has."""
        size = self._batched()
        return self.size // size if self.drop_remainder else -(-self.size // size)

    def rows(self, epoch: int, index: int, start: int, stop: int) -> Nest:
        """Copies of examples `start` to `stop` of a batch; fewer, or none, at its end."""
        size = self._batched()
        end = min((index + 1) * size, self.size)
        chosen: Any = slice(min(index * size + start, end), min(index * size + stop, end))
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


def _stacked(leaf: Any) -> Array:
    return np.asarray([to_numpy(item) for item in leaf]) if isinstance(leaf, list) else to_numpy(leaf)


@dataclass(frozen=True)
class InputContext:
    """What a function that makes one worker's dataset is told.

    Attributes:
        num_input_pipelines: how many workers make one.
        input_pipeline_id: which of them this is, from 0.
        num_replicas_in_sync: R, the replicas of all workers.
    """

    nest_leaf: ClassVar[bool] = True

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Examples for each replica; raises `ValueError` if they cannot be shared out equally."""
        if global_batch_size % self.num_replicas_in_sync:
            raise ValueError(
                f"a global batch of {global_batch_size} examples cannot be shared equally by "
                f"{self.num_replicas_in_sync} replicas"
            )
        return global_batch_size // self.num_replicas_in_sync


class Group(Protocol):
    """The workers that iterate together, as one of them sees it."""

    @property
    def devices(self) -> tuple[Device, ...]:
        """The local replicas' devices."""
        ...

    def join(self, dataset: int) -> None:
        """Takes part, if it does not yet; waits until it learns where the group stands."""
        ...

    def boundary(self, dataset: int) -> None:
        """Before each batch: takes in a newer epoch of membership."""
        ...

    def slice(self) -> tuple[int, int]:
        """The number of this process's first replica, and R, as of now."""
        ...

    def position(self, dataset: int) -> Position | None:
        """Where the group stood when this process joined, or what was restored; None at the beginning."""
        ...

    def advance(self, dataset: int, epoch: int, index: int, more: bool, empty: frozenset[int]) -> None:
        """Told what was taken: which batch is next, whether this worker has it, whose batch is empty."""
        ...

    def finish(self, dataset: int) -> None:
        """Told that a pass has ended; what was being iterated around it is in use again."""
        ...

    def any_more(self, dataset: int) -> bool:
        """Whether any worker had a further batch, as of the last round since `advance`; else False."""
        ...


@dataclass
class Passes:
    """What the datasets of one strategy share.

    Attributes:
        from_group: whether this process counts its passes from where the group stands; else it counts
            from 0, and the passes that the group has behind it give nothing.
    """

    from_group: bool = False


class _Distributed:
    """Counts passes, and keeps the group informed. Used by one thread at a time."""

    def __init__(self, group: Group, number: int, passes: Passes | None) -> None:
        self._group = group
        self._number = number
        self._passes = passes or Passes()
        self._next = 0
        self._seen: Position | None = None
        self._told: Position | None = None

    def __iter__(self) -> Iterator[Nest]:
        """Begins the next data epoch; the iterator joins the group at its first batch."""
        if self._passes.from_group:
            self._position()
        epoch, self._next = self._next, self._next + 1
        return self._pass(epoch)

    def epochs(self, count: int) -> Iterator[int]:
        """The data epochs that are still to be done, so that a script that resumes or joins skips the others.

        Args:
            count: of all data epochs, those included that are done.

        Returns:
            Their numbers, up to `count - 1`; in each, iterate over the dataset once. Other datasets of the
            strategy go on from where the group stands as well.
        """
        at = self._position()
        self._passes.from_group = True
        for epoch in range((self._told or at).epoch, count):
            self._next = epoch
            yield epoch

    def _pass(self, epoch: int) -> Iterator[Nest]:
        raise NotImplementedError

    def _position(self) -> Position:
        self._group.join(self._number)
        at = self._group.position(self._number) or Position(self._number, 0, 0)
        if at != self._seen:  # this process has just joined, or restored a checkpoint
            self._seen, self._told = at, None
            if self._passes.from_group:
                self._next = at.epoch
        return at

    def _enter(self, epoch: int) -> int | None:
        """The index at which a pass begins; None for a pass that the group has behind it."""
        at = self._position()
        if at.epoch > epoch:
            return None
        index = at.index if at.epoch == epoch else 0
        if (self._told or at) != Position(self._number, epoch, index):
            # The pass before was broken off. Who joins at this batch must not be sent there.
            self._tell(epoch, index, True)
        return index

    def _tell(self, epoch: int, index: int, more: bool, parts: Sequence[Nest] = ()) -> None:
        self._told = Position(self._number, epoch, index)
        empty = frozenset(i for i, part in enumerate(parts) if not len(nest.flatten(part)[0]))
        self._group.advance(self._number, epoch, index, more, empty)

    def _end(self, epoch: int) -> None:
        self._tell(epoch + 1, 0, False)
        self._group.finish(self._number)

    def _place(self, parts: Sequence[Nest]) -> Nest:
        """One nest for each local replica as one nest, on the replicas' devices."""
        moved = [
            nest.map_structure(partial(to_device, device=device), part)
            for part, device in zip(parts, self._group.devices, strict=True)
        ]
        if len(moved) == 1:
            return moved[0]
        return nest.map_structure(lambda *leaves: PerReplica(leaves), *moved)


class DistributedDataset(_Distributed):
    """A dataset whose global batches are shared among all replicas of all workers.

    A batch of B examples is cut into slices of ceil(B / R), handed out in the order of the replicas; at
    the end of the data the last replicas get fewer examples, or empty arrays. Iterating gives nests of
    `PerReplica`, with one local replica of arrays: CuPy on a GPU, NumPy on a CPU.

    Args:
        dataset: batched by the global batch size.
        group: the workers.
        number: the dataset's number, in the order in which the script distributes its datasets.
        passes: shared by all datasets of a strategy.

    Raises:
        ValueError: the dataset is not batched.
    """

    def __init__(self, dataset: GlobalBatches, group: Group, number: int, passes: Passes | None = None) -> None:
        super().__init__(group, number, passes)
        if not hasattr(dataset, "batch_size"):
            raise TypeError(
                f"a {type(dataset).__name__} is no dataset; write ps.ArrayDataset(arrays).batch(global_batch_size)"
            )
        if dataset.batch_size is None:
            raise ValueError("a dataset is distributed by batches; call dataset.batch(global_batch_size) first")
        self._dataset = dataset
        self._batch_size = dataset.batch_size

    def _pass(self, epoch: int) -> Iterator[Nest]:
        index, end = self._enter(epoch), self._dataset.batches(epoch)
        if index is None:
            return
        while index < end:
            self._group.boundary(self._number)
            parts = self._read(epoch, index)
            index += 1
            self._tell(*((epoch, index, True) if index < end else (epoch + 1, 0, False)), parts)
            yield self._place(parts)
        self._end(epoch)

    def _read(self, epoch: int, index: int) -> list[Nest]:
        first, replicas = self._group.slice()
        size = -(-self._batch_size // replicas)
        mine = range(first, first + len(self._group.devices))
        return [self._dataset.rows(epoch, index, i * size, (i + 1) * size) for i in mine]


class DistributedDatasetFromFunction(_Distributed):
    """A dataset of which every worker makes its own part.

    Each step takes one batch for each local replica. A worker whose data are used up gets empty batches
    for as long as any other worker has data.

    Args:
        dataset_fn: called once, with `input_context`; gives a dataset or another iterable of nests of
            arrays, which is iterated anew in each pass. Its batches are those of one replica.
        input_context: what `dataset_fn` is told.
        group: the workers.
        number: the dataset's number, in the order in which the script distributes its datasets.
        passes: shared by all datasets of a strategy.

    Raises:
        ValueError: the dataset is not batched.
    """

    def __init__(
        self,
        dataset_fn: Callable[[InputContext], ArrayDataset | Iterable[Nest]],
        input_context: InputContext,
        group: Group,
        number: int,
        passes: Passes | None = None,
    ) -> None:
        super().__init__(group, number, passes)
        self._context = input_context
        self._data = dataset_fn(input_context)
        if isinstance(self._data, ArrayDataset):
            self._data.batches(0)  # raises if it is not batched

    def _pass(self, epoch: int) -> Iterator[Nest]:
        index = self._enter(epoch)
        if index is None:
            return
        count = len(self._group.devices)
        data = self._data.epoch(epoch) if isinstance(self._data, ArrayDataset) else iter(self._data)
        last = deque(map(_checked, islice(data, index * count)), maxlen=1)  # steps that the group has behind it
        # One step is read ahead, since each tells whether another follows.
        ahead = [_checked(batch) for batch in islice(data, count)]
        if not ahead and not last:
            raise ValueError(self._nothing(epoch))
        while ahead or self._group.any_more(self._number):
            self._group.boundary(self._number)
            last.extend(ahead)
            spare = nest.map_structure(lambda array: array[:0], last[0])
            parts = [*ahead, *[spare] * (count - len(ahead))]
            ahead = [_checked(batch) for batch in islice(data, count)]
            index += 1
            self._tell(epoch, index, bool(ahead), parts)
            yield self._place(parts)
        self._end(epoch)

    def _nothing(self, epoch: int) -> str:
        worker = f"input pipeline {self._context.input_pipeline_id} of {self._context.num_input_pipelines}"
        return (
            f"the dataset of {worker} gives no batch in pass {epoch}; every worker needs at least one, and "
            "what dataset_fn returns must give its batches anew each time it is iterated"
        )


def _checked(batch: Nest) -> Nest:
    for leaf in nest.flatten(batch):
        if not getattr(leaf, "shape", ()):
            raise ValueError(
                f"a batch holds a {type(leaf).__name__} without a batch dimension; give arrays whose first "
                "dimension counts the examples"
            )
    return batch
