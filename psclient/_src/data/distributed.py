"""Distributed datasets: the batches of datasets are shared among all replicas of all workers.

A global batch is a function of (seed, data epoch, index): every worker works out the same order and
reads its own slice of it, so that nothing has to be sent. A pass over a dataset is a *data epoch*.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import islice
from typing import Any, ClassVar

import numpy as np

from psclient._src.arrays import nest
from psclient._src.arrays.conversions import is_text
from psclient._src.arrays.devices import CPU, AnyArray, Device, to_device
from psclient._src.arrays.nest import Nest
from psclient._src.data.adapters import Batch, GlobalBatch, source_of
from psclient._src.data.group import Passes, ReplicaGroup
from psclient._src.data.iterators import DistributedIterator
from psclient._src.data.learned import LearnedLookups, prefetch_ahead
from psclient._src.interpreter.lifetimes import Unpicklable
from psclient._src.options import ArraySpec, AutoShardPolicy, InputContext, InputOptions, PerReplicaSpec
from psclient._src.values import PerReplica
from pswire.model.log import Examples, Position
from pswire.model.tensor import Array

log = logging.getLogger("psclient")


@dataclass(slots=True)
class DatasetStep:
    """A step of a pass as this worker makes it, and where the dataset stands after it.

    Attributes:
        epoch: the data epoch of the next batch.
        index: the number of the next batch.
        more: True if this worker has a batch after this step's.
        parts: the batches of the local replicas; empty where none is taken.
        ahead: the same of steps to come, as far as they were read.
        examples: number of examples of all workers' parts; 0 where it is not known.
        returned: examples that are to be assigned later.
        batch: the global batch, where all workers read the same one.
        dealt: the examples of each replica of all workers, where a round may leave out a worker.
    """

    epoch: int
    index: int
    more: bool
    parts: Sequence[Nest] = ()
    ahead: Iterable[Sequence[Nest]] = ()
    examples: int = 0
    returned: tuple[Examples, ...] = ()
    batch: GlobalBatch | None = None
    dealt: tuple[Examples, ...] = ()


class _Distributed(Unpicklable):
    """Counts passes, and keeps the group informed. Used by one thread at a time.

    Attributes:
        _saved_by_name_alone: a checkpoint has its state where it is given to it, and not where another object has it:
            an evaluator that is restored goes over all of its test set.
    """

    _saved_by_name_alone: ClassVar[bool] = True

    def __init__(
        self,
        dataset: object,
        group: ReplicaGroup,
        number: int,
        passes: Passes | None = None,
        options: InputOptions | None = None,
    ) -> None:
        self._source = source_of(dataset)
        self._group = group
        self._number = number
        self._passes = passes or Passes()
        self._options = options or InputOptions()
        self._learned = LearnedLookups()
        self._next = 0
        self._under_way = -1
        self._seen: Position | None = None
        self._told: Position | None = None
        self._known_digest = 0
        self._went_on: Position | None = None
        self._asks = False  # once a loop over `epochs` has asked where to go on
        self._saved: int | None = None  # its number in the checkpoint that the script has it in
        self._set_up(dataset)

    def _set_up(self, dataset: object) -> None:
        """Checks the dataset and the options."""

    def __iter__(self) -> DistributedIterator:
        """Begins the next data epoch; the iterator joins the group at its first batch."""
        if self._passes.from_group or self._saved is not None:
            self._position()
        epoch, self._next = self._next, self._next + 1
        return DistributedIterator(self._pass(epoch), self)

    @property
    def element_spec(self) -> Nest:
        """The shapes and dtypes of a batch: a nest of `ArraySpec`, with several local replicas of `PerReplicaSpec`.

        They are those of the first batch, which may have to be read; this does not affect a pass in progress. In any
        context.

        Raises:
            ValueError: the dataset has no batches.
        """
        count = len(self._group.devices)
        if count == 1:
            return self._source.spec()
        return nest.map_structure(lambda spec: PerReplicaSpec((spec,) * count), self._source.spec())

    def epochs(self, count: int) -> Iterator[int]:
        """Iterates over the remaining data epochs, so that a script that resumes or joins skips finished ones.

        After a checkpoint was restored, the dataset continues from its position there, if it has the same kind, size,
        options and examples. Otherwise it starts from the beginning, and logs that.

        Args:
            count: the number of all data epochs, finished ones included.

        Returns:
            The numbers of these epochs, up to `count - 1`; in each, iterate over the dataset once. A worker that joins
            a running job continues from the position of the others, also in the other datasets of the strategy.
        """
        self._asks = True
        at = self._position()
        self._passes.from_group = True
        first = (self._told or at).epoch
        if first >= count and at == self._went_on:
            log.warning(
                "the checkpoint was saved after all %d epochs of dataset %d, so no batches are left",
                count,
                self._number,
            )
        for epoch in range(first, count):
            self._next = epoch
            yield epoch

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for checkpoints: the dataset's number, by which they store its position."""
        return {"dataset": self._number}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues, in any loop, from the position in the checkpoint that was restored.

        Args:
            state: the result of `state_dict`.
        """
        self._saved = int(state["dataset"])

    def _pass(self, epoch: int) -> Iterator[Nest]:
        around = self._group.lookups  # of the pass in whose step this one stands
        try:
            index = self._enter(epoch)
            if index is None:
                return
            self._under_way = epoch
            yield from self._batches(epoch, index)
        except BaseException:
            # It is broken off, by the script, an interrupt, or an error of the dataset: which replicas have no
            # examples in its last batch is of no account from here on.
            if self._under_way == epoch:
                self._group.finish(self._number)
            raise
        finally:
            self._group.lookups = around
            self._group.meanwhile(None)

    def _batches(self, epoch: int, index: int) -> Iterator[Nest]:
        for step in self._steps(epoch, index):
            if self._learns:
                self._group.lookups = self._learned
                self._learned.begin_batch(step.parts)
            self._group.meanwhile(prefetch_ahead(self._wanted, iter(step.ahead)))
            self._tell(step)
            yield self._place(step.parts)
            self._group.meanwhile(None)
        self._tell(DatasetStep(epoch + 1, 0, False))
        self._group.finish(self._number)

    def _steps(self, epoch: int, index: int) -> Iterator[DatasetStep]:
        """Yields the steps of a pass, from a batch on; reads ahead before the rounds of the step before are over."""
        raise NotImplementedError

    def _going_on(self) -> Iterator[Nest]:
        """Yields the rest of the pass in which the checkpoint was saved."""
        epoch = self._position().epoch
        self._next = epoch + 1
        yield from self._pass(epoch)

    def _position(self) -> Position:
        self._group.join(self._number)
        self._go_on()
        at = self._standing()
        if at != self._seen:  # this process has just joined, or goes on from a checkpoint
            self._seen, self._told = at, None
            if self._passes.from_group or self._saved is not None:
                self._next = at.epoch
        return at

    def _go_on(self) -> None:
        """Goes on from where a checkpoint was restored, if the script asks for that, and it is the same dataset."""
        saved = self._number if self._saved is None and self._asks else self._saved
        found = None if saved is None else self._group.restored(saved, self._digest)
        if found is None:
            return
        if self._saved is None and found.source not in (0, self._digest):
            log.warning(
                "dataset %d starts from the beginning, because the checkpoint has the position of a "
                "dataset with other options or examples; to use that position, pass the dataset to the "
                "checkpoint: Checkpoint(data=dataset)",
                self._number,
            )
            self._group.forget(found)
            return
        self._group.go_on(self._number, found)
        self._seen = None
        self._went_on = self._group.position(self._number)
        log.info(
            "dataset %d continues with batch %d of pass %d, as saved in the checkpoint",
            self._number,
            found.index,
            found.epoch,
        )

    @property
    def _digest(self) -> int:
        """A digest of 64 bits that tells the dataset from others; not 0."""
        if not self._known_digest:
            said = "\n".join(self._described()).encode()
            self._known_digest = int.from_bytes(hashlib.blake2b(said, digest_size=8).digest(), "big") or 1
        return self._known_digest

    def _described(self) -> Sequence[str]:
        return self._source.described()

    def _standing(self) -> Position:
        """Where the group stood when this process joined, or where a checkpoint was restored to."""
        return self._group.position(self._number) or Position(self._number, 0, 0)

    def _enter(self, epoch: int) -> int | None:
        """The index at which a pass begins; None for a pass that the group has behind it."""
        at = self._position()
        if at.epoch > epoch:
            return None
        index = at.index if at.epoch == epoch else 0
        told = self._told or at
        if (told.epoch, told.index) != (epoch, index):
            # The pass before was broken off. Who joins at this batch must not be sent there.
            self._tell(DatasetStep(epoch, index, True))
        return index

    def _tell(self, step: DatasetStep) -> None:
        """Tells the group what was taken."""
        self._told = Position(self._number, step.epoch, step.index, (), self._digest)
        # Where no batch is taken yet, nobody has examples.
        sizes = [len(nest.flatten(part)[0]) for part in step.parts] or [0] * len(self._group.devices)
        empty = frozenset(i for i, size in enumerate(sizes) if not size)
        fraction = Fraction(sum(sizes), step.examples) if step.examples else None
        place = (self._number, step.epoch, step.index, step.more)
        self._group.advance(*place, empty, fraction, step.returned, step.batch, self._digest)
        if step.dealt:
            self._group.deal(self._number, step.dealt)

    def _uneven(self, epoch: int, index: int, items: Iterator[Sequence[Nest]]) -> Iterator[DatasetStep]:
        """Yields steps that the workers have different numbers of: all go on as long as any of them has one.

        Where this worker was left out of a step, it takes that step's batches once more.

        Args:
            epoch: the data epoch.
            index: the number of the first step.
            items: of this worker, from there on: a batch for each local replica, or for the first of them.
        """
        group, number = self._group, self._number
        last: Nest | None = None
        # One step is read ahead, since each tells whether another follows.
        waiting, taken = deque(islice(items, 1)), list[Nest]()
        while True:
            if taken and group.excluded(number):
                waiting.appendleft(taken)
            if not (waiting or group.any_more(number)):
                return
            self._read_ahead(waiting, items)
            group.boundary(number)
            taken = [] if not waiting or group.is_behind(number) else list(waiting.popleft())
            if taken:
                last = taken[-1]
            elif last is None:
                last = self._blank()
            spare = nest.map_structure(lambda array: array[:0], last)
            parts = [*taken, *[spare] * (len(group.devices) - len(taken))]
            index += 1
            yield (step := DatasetStep(epoch, index, bool(waiting), parts, iter(waiting)))
            if self._passes.make_round and self._untold():
                # A pass that was broken off within this step would take the answer for its own.
                self._tell(step)
                self._passes.make_round()

    def _untold(self) -> bool:
        alone = self._group.slice()[1] == len(self._group.devices)
        return not alone and not self._group.made_round(self._number)

    @property
    def _depth(self) -> int:
        """Batches that are read ahead of the one in use: two where ids are looked up that are known ahead, else one."""
        return 2 if self._wanted and self._group.has_servers else 1

    def _read_ahead(self, waiting: deque[Any], source: Iterator[Any]) -> None:
        """Reads the next batch, and those that are to be known behind it, as far as they do not wait already."""
        waiting.extend(islice(source, max(1 + self._depth - len(waiting), 0)))

    @property
    def _learns(self) -> bool:
        """True if the dataset finds out what is looked up."""
        return self._options.prefetch is None and self._group.has_servers

    @property
    def _wanted(self) -> Mapping[Any, Callable[[Nest], Any]]:
        """The ids of a batch that are looked up, by where: those that the script names, or those that were learned."""
        return self._learned.wanted if self._learns else self._options.prefetch or {}

    def _blank(self) -> Nest:
        def empty(spec: ArraySpec) -> Array:
            return np.empty([size or 0 for size in spec.shape], spec.dtype)

        return nest.map_structure(empty, self._source.spec())

    def _place(self, parts: Sequence[Nest]) -> Nest:
        """One nest for each local replica as one nest, on the replicas' devices or on the host."""
        on_host = not self._options.experimental_prefetch_to_device
        moved = [
            nest.map_structure(partial(_on, CPU if on_host else device), part)
            for part, device in zip(parts, self._group.devices, strict=True)
        ]
        if len(moved) == 1:
            return moved[0]
        return nest.map_structure(lambda *leaves: PerReplica(leaves), *moved)


class DistributedDataset(_Distributed):
    """A dataset whose global batches are shared among all replicas of all workers.

    A batch of B examples is cut into slices of ceil(B / R), assigned in the order of the R replicas; the last replicas
    may get fewer examples, or empty arrays. B is the batch's own size: a short batch at the end of the data is shared
    by all as well. Iterating returns nests of `PerReplica`, with one local replica nests of arrays: CuPy on a GPU,
    NumPy on a CPU.

    With the policy OFF every worker reads all data, in steps of L * ceil(B / R) examples of a batch, for its L local
    replicas.

    Args:
        dataset: a dataset of global batches, as `experimental_distribute_dataset` takes it; the same on every worker.
        group: the replicas of all workers.
        number: the dataset's number, in the order in which the script distributes its datasets.
        passes: shared by all datasets of a strategy.
        options: the device for batches, and how they are shared.

    Raises:
        TypeError: the kind of the dataset is not known, or it can be iterated only once.
        ValueError: the dataset is not batched; the policy is FILE or HINT. Batches of datasets other than
            `ArrayDataset` are checked when they are read.
    """

    _warned = False

    def _set_up(self, dataset: object) -> None:
        policy = self._options.auto_shard_policy
        if policy in (AutoShardPolicy.FILE, AutoShardPolicy.HINT):
            raise ValueError(
                f"AutoShardPolicy.{policy.name} cannot shard by files here; use AUTO, or "
                "experimental_distribute_datasets_from_function and select files by input_pipeline_id"
            )
        if self._source.unfit and policy is not AutoShardPolicy.OFF:
            raise ValueError(self._source.unfit)

    def _steps(self, epoch: int, index: int) -> Iterator[DatasetStep]:
        self._warn()
        if self._options.auto_shard_policy is AutoShardPolicy.OFF:
            return self._uneven(epoch, index, islice(self._pieces(epoch), index, None))
        if self._group.leaves_out or self._group.returned(self._number):
            return self._redealt(epoch, index)
        return self._even(epoch, index)

    def _even(self, epoch: int, index: int) -> Iterator[DatasetStep]:
        batches = self._source.batches(epoch, index)
        # One batch is read ahead, since each tells whether another follows.
        waiting = deque(islice(batches, 1))
        while waiting:
            self._read_ahead(waiting, batches)
            self._group.boundary(self._number)
            batch = waiting.popleft()
            told, index = GlobalBatch(epoch, index, batch), index + 1
            place = (epoch, index, True) if waiting else (epoch + 1, 0, False)
            yield DatasetStep(*place, self._slices(batch), map(self._slices, waiting), batch.examples, batch=told)

    def _redealt(self, epoch: int, index: int) -> Iterator[DatasetStep]:
        """Yields steps in which examples of workers that were left out of a round are assigned again, to all workers.

        All of them know the same rounds, and so the same examples. A step takes those that have come back once there
        are some for each replica, and at the end those that are left.
        """
        group, number, local = self._group, self._number, len(self._group.devices)
        batches, kept = self._source.batches(epoch, index), dict[int, Batch]()
        waiting = deque(islice(batches, 1))
        while True:
            self._read_ahead(waiting, batches)
            returned = group.returned(number)
            group.boundary(number)
            first, replicas = group.share()
            if returned and (not waiting or len(returned) >= replicas):
                dealt, returned = returned[:replicas], returned[replicas:]
            elif waiting:
                kept[index] = waiting.popleft()
                dealt, index = _cut_up(index, kept[index].examples, replicas), index + 1
            else:
                return
            wanted = {each.index for each in (*dealt, *returned)}
            kept = {at: kept.get(at) or self._batch(epoch, at) for at in sorted(wanted)}
            # Where the others are ahead, what this worker would compute counts no more.
            mine = () if group.is_behind(number) else dealt[first : first + local]
            parts = [kept[each.index].rows(each.first, each.stop) for each in mine]
            parts += [kept[dealt[0].index].rows(0, 0)] * (local - len(parts))
            ahead, examples = map(self._slices, waiting), sum(each.stop - each.first for each in dealt)
            out = dealt if group.leaves_out else ()
            yield DatasetStep(epoch, index, True, parts, ahead, examples, returned, dealt=out)

    def _batch(self, epoch: int, index: int) -> Batch:
        """Reads a batch anew of which some examples have come back."""
        found = next(self._source.batches(epoch, index), None)
        if found is None:
            raise ValueError(
                f"batch {index} of pass {epoch} must be reassigned, but dataset {self._number} does not "
                "have it; pass the dataset that was used when the checkpoint was saved"
            )
        return found

    def _slices(self, batch: Batch) -> list[Nest]:
        first, replicas = self._group.share()
        return cut(batch, first, len(self._group.devices), -(-batch.examples // replicas))

    def _pieces(self, epoch: int) -> Iterator[list[Nest]]:
        local = len(self._group.devices)
        for batch in self._source.batches(epoch, 0):
            size = max(1, -(-batch.examples // self._group.share()[1]))
            for first in range(0, -(-batch.examples // size), local):
                yield cut(batch, first, local, size)

    def _warn(self) -> None:
        if self._warned:
            return
        first, replicas = self._group.share()
        if first >= replicas and self._options.auto_shard_policy is not AutoShardPolicy.OFF:
            self._warned = True
            log.warning(
                "dataset %d is split among the asynchronous workers that started the job, and this worker "
                "joined later, so it gets no batches. To share batches, use "
                "ps.InputOptions(auto_shard_policy=ps.AutoShardPolicy.DYNAMIC)",
                self._number,
            )
        # Where all workers make each round together, servers compare what they read.
        elif self._source.order_is_own and (self._group.leaves_out or self._group.slice() != (first, replicas)):
            self._warned = True
            log.warning(
                "each process shuffles dataset %d differently, so some examples are seen twice and others "
                "not at all; give its DataLoader a generator: generator=torch.Generator().manual_seed(0)",
                self._number,
            )


class DistributedDatasetFromFunction(_Distributed):
    """A dataset of which every worker makes its own part.

    Each step takes one batch for each local replica. A worker whose data are used up gets empty batches
    for as long as any other worker has data.

    Args:
        dataset_fn: called with `input_context`, and once more where a coordinator's worker has another place than the
            script knew when it made the dataset; gives a dataset, see `source_of` for what it may be. Its
            batches are those of one replica.
        input_context: the argument of `dataset_fn`.
        group: the replicas of all workers.
        number: the dataset's number, in the order in which the script distributes its datasets.
        passes: shared by all datasets of a strategy.
        options: the device that batches are put on; the policy has no meaning here.

    Raises:
        TypeError: `dataset_fn` gives no dataset, or one that can be gone through only once.
        ValueError: the dataset is not batched.
    """

    def __init__(
        self,
        dataset_fn: Callable[[InputContext], object],
        input_context: InputContext,
        group: ReplicaGroup,
        number: int,
        passes: Passes | None = None,
        options: InputOptions | None = None,
    ) -> None:
        super().__init__(dataset_fn(input_context), group, number, passes, options)
        self._context, self._function = input_context, dataset_fn

    def _described(self) -> Sequence[str]:
        return "from a function", self._source.described().recipe  # each worker has examples of its own

    def _steps(self, epoch: int, index: int) -> Iterator[DatasetStep]:
        if self._group.coordinated:
            self._take_place()
        return self._uneven(epoch, index, self._own(epoch, index))

    def _take_place(self) -> None:
        """Makes it anew where the chief was taken for one of those that have a part, as it was above a coordinator."""
        place, count = self._group.pipeline
        context = replace(self._context, num_input_pipelines=count, input_pipeline_id=place)
        if context != self._context:
            self._context, self._source = context, source_of(self._function(context))

    def _own(self, epoch: int, index: int) -> Iterator[list[Nest]]:
        count = len(self._group.devices)
        batches = self._source.batches(epoch, index * count)
        while step := [batch.whole for batch in islice(batches, count)]:
            index += 1
            yield step
        if index == 0:
            raise ValueError(self._nothing(epoch))

    def _nothing(self, epoch: int) -> str:
        worker = f"input pipeline {self._context.input_pipeline_id} of {self._context.num_input_pipelines}"
        return (
            f"the dataset of {worker} has no batch in pass {epoch}; each worker needs at least one, and the "
            "dataset returned by dataset_fn must start again each time it is iterated"
        )


def _on(device: Device, array: AnyArray) -> AnyArray:
    """Returns an array of a batch on a device; texts stay on the host."""
    return array if isinstance(array, np.ndarray) and is_text(array) else to_device(array, device)


def _cut_up(index: int, examples: int, replicas: int) -> tuple[Examples, ...]:
    """Returns the slices of a batch for all replicas; the last may be empty."""
    size = -(-examples // replicas)
    ends = [min(number * size, examples) for number in range(replicas + 1)]
    return tuple(Examples(index, first, stop) for first, stop in itertools.pairwise(ends))


def cut(batch: Batch, first: int, count: int, size: int) -> list[Nest]:
    """Slices of a batch, `count` of them from number `first` on, each of `size` examples, or what is left."""
    return [batch.rows(number * size, (number + 1) * size) for number in range(first, first + count)]
