"""Whatever gives batches, as one thing: the batches of a data epoch, from any one on.

Every worker reads the same batches in the same order. Libraries of datasets are known by the names of their
classes, so that none needs to be there.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from psclient._src.arrays import nest
from psclient._src.arrays.conversions import is_torch
from psclient._src.arrays.devices import AnyArray, as_array, is_array, to_numpy
from psclient._src.arrays.nest import Nest
from psclient._src.data.array_dataset import ArrayDataset
from psclient._src.data.drawn import DrawnIndices
from psclient._src.interpreter.interrupts import waits
from psclient._src.options import ArraySpec


@dataclass(frozen=True)
class Batch:
    """One batch of a data epoch.

    Attributes:
        examples: number of examples that it has.
        rows: gives its examples from one number to another; fewer, or none, at its end.
        chosen: says which examples these are, as far as the dataset knows: the same words on every worker for the same
            examples. It may take as long as to read the indices.
    """

    examples: int
    rows: Callable[[int, int], Nest]
    chosen: Callable[[], str] = lambda: ""

    @property
    def whole(self) -> Nest:
        """All of its examples."""
        return self.rows(0, self.examples)


@dataclass(eq=False)
class GlobalBatch:
    """A global batch, of which each worker has its part.

    Attributes:
        epoch: the data epoch.
        index: its number there.
        batch: the batch.
    """

    epoch: int
    index: int
    batch: Batch

    @cached_property
    def words(self) -> str:
        """Which batch it is: the same words on every worker that reads the same one."""
        chosen = self.batch.chosen()
        has = f"batch {self.index} of epoch {self.epoch} has {self.batch.examples} examples"
        return f"{has} ({chosen})" if chosen else has

    @property
    def examples(self) -> int:
        """How many examples it has, for all workers together."""
        return self.batch.examples


class Description(NamedTuple):
    """The words that tell a dataset from others.

    Attributes:
        recipe: its kind and options, the same on workers that have different examples.
        content: its size, and samples of what it has.
    """

    recipe: str
    content: str


class Arrays:
    """The batches of an `ArrayDataset`, of which only the rows that are asked for are read.

    Args:
        dataset: a batched dataset.

    Raises:
        ValueError: the dataset is not batched.
    """

    order_is_own = False
    unfit = ""

    def __init__(self, dataset: ArrayDataset) -> None:
        if dataset.batch_size is None:
            raise ValueError("the dataset is not batched; call dataset.batch(global_batch_size) before distributing it")
        self._dataset = dataset

    def batches(self, epoch: int, start: int) -> Iterator[Batch]:
        """The batches of a data epoch; they share its order, and nothing is read before `rows` is called."""
        for index in range(start, self._dataset.batches(epoch)):
            yield self.batch(epoch, index)

    def count(self) -> int:
        """Returns how many batches a data epoch has."""
        return self._dataset.batches(0)

    def batch(self, epoch: int, index: int) -> Batch:
        """Returns one batch; nothing is read before its `rows` is called."""
        return Batch(self._dataset.examples(index), partial(self._dataset.rows, epoch, index), self._chosen)

    def _chosen(self) -> str:
        arrays, seed = nest.flatten(self._dataset.arrays), self._dataset.seed
        order = "in order" if seed is None else f"shuffled by seed {seed}"
        return f"{len(arrays[0])} rows {order}, in {self._dataset.batches(0)} batches"

    def spec(self) -> Nest:
        """From the arrays; nothing is read, but for one example or batch where a function makes others of them."""
        return self._dataset.spec()

    def described(self) -> Description:
        """The calls that have made it; samples of its arrays."""
        arrays = nest.flatten(self._dataset.arrays)
        return Description(f"ArrayDataset{self._dataset.recipe}", "; ".join(map(_sampled, arrays)))


class Iterated:
    """The batches of what can be iterated again and again; those before the first wanted one are passed over.

    Args:
        dataset: gives nests of arrays, in each pass from the beginning.
    """

    order_is_own = False
    unfit = ""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._spec: Nest | None = None

    @waits
    def batches(self, epoch: int, start: int) -> Iterator[Batch]:
        """The batches of a data epoch; each is read when it is asked for, and once."""
        for index, item in self._items(epoch, start):
            batch = self._described(item)
            if index >= start:
                yield Batch(len(nest.flatten(batch)[0]), partial(_rows, batch), self._chosen())

    def spec(self) -> Nest:
        """From a batch that was read before, or else from the first one of data epoch 0."""
        if self._spec is None:
            for _, item in islice(self._items(0, 0), 1):
                self._described(item)
        if self._spec is None:
            raise ValueError(
                f"the {type(self._dataset).__name__} has no batch that could be inspected; pass a dataset with "
                "at least one batch"
            )
        return self._spec

    def _chosen(self) -> Callable[[], str]:
        """Returns what says which examples the last item has."""
        return lambda: ""

    def described(self) -> Description:
        """Its class; how many batches it has, where it says so."""
        count = len(self._dataset) if isinstance(self._dataset, Sized) else "?"
        return Description(type(self._dataset).__name__, f"{count} batches")

    def _items(self, epoch: int, start: int) -> Iterator[tuple[int, Nest]]:
        """Yields all items from `start` on, and whichever come on the way; each with its number."""
        return enumerate(self._dataset)

    def _described(self, item: object) -> Nest:
        batch = _checked(item)
        if self._spec is None:
            self._spec = nest.map_structure(_spec_of, batch)
        return batch


class Listed(Iterated):
    """The batches of a list, the same in each data epoch."""

    def count(self) -> int:
        """Returns how many batches a data epoch has."""
        return len(self._dataset)

    def batch(self, epoch: int, index: int) -> Batch:
        """Reads one batch."""
        batch = self._described(self._item(epoch, index))
        return Batch(len(nest.flatten(batch)[0]), partial(_rows, batch), self._chosen())

    def _chosen(self) -> Callable[[], str]:
        return lambda: f"of {self.count()} batches"

    def _items(self, epoch: int, start: int) -> Iterator[tuple[int, Nest]]:
        for index in range(start, self.count()):
            yield index, self._item(epoch, index)

    def _item(self, epoch: int, index: int) -> Nest:
        return self._dataset[index]

    def described(self) -> Description:
        """Samples of its first and its last batch; of a class of its own, which may read them anew, their number."""
        ends = [self._dataset[0], self._dataset[-1]] if type(self._dataset) is list and self._dataset else []
        some = [leaf for item in ends for leaf in nest.flatten(item)]
        return Description("list", f"{self.count()} batches; {'; '.join(map(_sampled, some))}")


class Indexed(Listed):
    """The batches of a `MapDataset` of grain, which shuffles anew where the numbers go on beyond its length."""

    described = Iterated.described

    def _item(self, epoch: int, index: int) -> Nest:
        item = self._dataset[epoch * len(self._dataset) + index]
        if item is None:
            raise ValueError(
                "a MapDataset returned None for a batch that its filter drops; distribute dataset.to_iter_dataset()"
            )
        return item


class Loader(Iterated):
    """The batches of a `DataLoader` of PyTorch.

    A generator of its own is seeded for each data epoch, with its first seed and the data epoch's number, so that
    a process that resumes or joins sees the order that the others see. The indices that its sampler draws are noted,
    so that servers can compare the orders of all workers.
    """

    def __init__(self, dataset: Any) -> None:
        super().__init__(dataset)
        self._drawn = DrawnIndices(dataset)
        self._indices: object = None
        sampler = getattr(dataset.batch_sampler, "sampler", dataset.sampler)
        found = [getattr(owner, "generator", None) for owner in (sampler, dataset)]
        self._seeds = [(generator, generator.initial_seed()) for generator in found if generator is not None]
        self._sampler = type(sampler).__name__
        self.order_is_own = self._sampler in _SHUFFLING and found[0] is None
        samplers = (sampler, dataset.batch_sampler)
        shares = next((type(s).__name__ for s in samplers if getattr(s, "num_replicas", 1) > 1), "")
        unordered = dataset.num_workers > 1 and not getattr(dataset, "in_order", True)
        self.unfit = SHARED_TWICE.format(shares) if shares else UNORDERED if unordered else ""

    def _items(self, epoch: int, start: int) -> Iterator[tuple[int, Nest]]:
        for generator, seed in self._seeds:
            generator.manual_seed(seed + epoch)
        kept: object = getattr(self._dataset, "_iterator", None)
        if kept is not None and self._dataset.generator is not None:
            # Processes that are kept get their seed once, in the first pass: a number that is drawn before the order.
            torch: Any = sys.modules["torch"]
            torch.empty((), dtype=torch.int64).random_(generator=self._dataset.generator)
        for index, (item, indices) in enumerate(self._drawn.items()):
            self._indices = indices
            yield index, item

    def _chosen(self) -> Callable[[], str]:
        return partial(self._drawn.words, self._indices)

    def described(self) -> Description:
        """Its options and seeds; the class and size of its dataset, samples of the tensors of a `TensorDataset`."""
        loader, data = self._dataset, self._dataset.dataset
        seeds = [seed for _, seed in self._seeds]
        recipe = f"DataLoader({type(data).__name__}, {loader.batch_size}, {loader.drop_last}, {self._sampler}, {seeds})"
        tensors = getattr(data, "tensors", ())
        some = [_sampled(each) for each in tensors] if isinstance(tensors, tuple) else []
        count = len(data) if hasattr(data, "__len__") else "?"
        return Description(recipe, "; ".join([f"{count} examples", *some]))


BatchSource = Arrays | Iterated
"""A dataset of batches that can be begun at any data epoch and any batch.

`order_is_own` is True if each process shuffles for itself, so that no two see the same order. `unfit` is the reason why
no batch may be shared among workers, for people; "" if there is none.
"""

Indexable = Arrays | Listed
"""A source of which any batch can be read by its number, without those before it."""

SHARED_TWICE = (
    "the DataLoader has a {}. Each batch is split among the workers as well, so most of the data would not "
    "be seen. Leave the sampler out (shuffle=True, generator=torch.Generator().manual_seed(0)) and pass "
    "all workers the same global batches"
)
"""Says what is wrong with a sampler that shares data out."""

UNORDERED = (
    "the DataLoader has in_order=False, so workers would see the batches in different orders and split "
    "different ones; remove in_order=False"
)
"""Says what is wrong with a loader whose batches come as soon as they are read."""

_SHUFFLING = ("RandomSampler", "SubsetRandomSampler", "WeightedRandomSampler")

_KINDS: dict[tuple[str, str], Callable[[Any], BatchSource]] = {
    ("grain", "MapDataset"): Indexed,
    ("torch", "DataLoader"): Loader,
    ("builtins", "list"): Listed,
}
"""Datasets that are more than iterable, by the package and the name of their class."""


def source_of(dataset: object) -> BatchSource:
    """Wraps any dataset as a source of batches.

    Args:
        dataset: an `ArrayDataset`, batched; a `MapDataset` or `IterDataset` of grain; a `DataLoader` of PyTorch; a
            list, or anything else that can be iterated again and again, of nests of arrays. Their first dimension
            counts the examples. Arrays are not copied.

    Raises:
        TypeError: the dataset holds arrays and no batches, can be gone through only once, or cannot be iterated.
        ValueError: an `ArrayDataset` is not batched.
    """
    if isinstance(dataset, ArrayDataset):
        return Arrays(dataset)
    name = type(dataset).__name__
    if isinstance(dataset, Iterator):
        raise TypeError(
            f"a {name} can be iterated only once, but each epoch iterates the dataset again; pass a list, "
            "or an object whose __iter__ returns a new iterator"
        )
    if is_array(dataset) or isinstance(dataset, tuple | Mapping | str) or not isinstance(dataset, Iterable):
        raise TypeError(
            f"a {name} is not a dataset; use ps.ArrayDataset(arrays).batch(global_batch_size), or pass a "
            "list of batches"
        )
    names = [(kind.__module__.partition(".")[0], kind.__name__) for kind in type(dataset).__mro__]
    return next((_KINDS[name] for name in names if name in _KINDS), Iterated)(dataset)


def _checked(item: object) -> Nest:
    """A batch, its leaves NumPy or CuPy arrays; a list of texts is one of objects.

    Raises:
        ValueError: it is no batch.
        TypeError: a field is of what no array has.
    """
    leaves: list[AnyArray] = []
    for path, leaf in nest.paths(item, is_leaf=_is_texts):
        where = f" at {path}" if path else ""
        if _is_texts(leaf):
            leaves.append(np.array(leaf, object))
            continue
        try:
            has_examples = is_torch(leaf) or bool(getattr(leaf, "shape", None))
            array = as_array(leaf) if has_examples else np.empty(())
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"a batch cannot be split among the workers, because its field{where} is not an array: {error}"
            ) from error
        if not array.shape:
            raise ValueError(
                f"a batch contains{where} a {type(leaf).__name__} without a batch dimension; batch the "
                "dataset, so that the first dimension counts the examples"
            )
        leaves.append(array)
    if len({leaf.shape[0] for leaf in leaves}) != 1:
        raise ValueError(
            f"the arrays of a batch differ in their first dimension: {[tuple(x.shape) for x in leaves]}; "
            "batch the dataset first"
        )
    rest = iter(leaves)
    return nest.map_structure(lambda _: next(rest), item, is_leaf=_is_texts)


def _is_texts(value: object) -> bool:
    """Returns whether a value is a list with a text for each example, such as file names."""
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(each, str | bytes) for each in value)


def _rows(batch: Nest, start: int, stop: int) -> Nest:
    return nest.map_structure(lambda array: array[start:stop], batch)


SAMPLES = 64
"""Rows of an array by which it is told from others, and the most bytes of each."""


def _sampled(array: Any) -> str:
    """Returns the dtype and shape of an array, and a digest of some of its rows; of what is none its class alone."""
    if not is_array(array) or not array.shape:
        return type(array).__name__
    rows = len(array)
    where = np.unique(np.linspace(0, rows - 1, SAMPLES).astype(int)) if rows else ()
    found = hashlib.blake2b(digest_size=8)
    for row in where:
        sample = to_numpy(as_array(array[row]))
        said = repr(sample.tolist()).encode() if sample.dtype.hasobject else np.ascontiguousarray(sample).tobytes()
        found.update(said[:SAMPLES])
    return f"{array.dtype}{[*array.shape]} {found.hexdigest()}"


def _spec_of(array: AnyArray) -> ArraySpec:
    return ArraySpec((None, *array.shape[1:]), array.dtype)
