"""Datasets, and their distribution over workers and local replicas."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from psclient import nest, values
from psclient.arrays import Device
from psclient.data import (
    ArrayDataset,
    DistributedDataset,
    DistributedDatasetFromFunction,
    InputContext,
    Passes,
)
from psclient.values import PerReplica
from pswire.spec import Position


class Worker:
    """One worker of a group in this process; `round` is what a round of all workers does."""

    def __init__(self, first: int = 0, local: int = 1, replicas: int = 1, at: Position | None = None) -> None:
        self.devices = tuple(Device("cpu", index) for index in range(local))
        self.where = (first, replicas)
        self.at = at
        self.more = self.others_more = False
        self.empty: frozenset[int] = frozenset()
        self.next: dict[int, Position] = {}
        self.events: list[str] = []

    def join(self, dataset: int) -> None:
        self.events.append(f"join {dataset}")

    def boundary(self, dataset: int) -> None:
        self.events.append(f"boundary {dataset}")

    def slice(self) -> tuple[int, int]:
        return self.where

    def position(self, dataset: int) -> Position | None:
        return self.at if self.at and self.at.dataset == dataset else None

    def advance(self, dataset: int, epoch: int, index: int, more: bool, empty: frozenset[int]) -> None:
        self.next[dataset] = Position(dataset, epoch, index)
        self.more, self.empty, self.others_more = more, empty, False

    def finish(self, dataset: int) -> None:
        self.empty = frozenset()

    def any_more(self, dataset: int) -> bool:
        return self.others_more


def do_round(*workers: Worker) -> None:
    more = any(worker.more for worker in workers)
    for worker in workers:
        worker.others_more = more


def rows(batch: Any) -> list[list[Any]]:
    return [part.tolist() for part in values.local_results(batch)]


def distributed(dataset: ArrayDataset, worker: Worker, **options: Any) -> DistributedDataset:
    return DistributedDataset(dataset, worker, 0, **options)


# ---- Datasets ----


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


def test_an_input_context_shares_out_a_batch() -> None:
    """Equally, or not at all."""
    assert InputContext(2, 1, 4).get_per_replica_batch_size(8) == 2
    with pytest.raises(ValueError, match="cannot be shared equally by 4 replicas"):
        InputContext(2, 1, 4).get_per_replica_batch_size(6)


# ---- Global batches over workers and replicas ----


def test_the_tail_gets_empty_arrays() -> None:
    """Seven examples in batches of 6 over two replicas: three and three, then one and none."""
    worker = Worker(local=2, replicas=2)
    taken = []
    for batch in distributed(ArrayDataset(np.arange(7)).batch(6), worker):
        assert isinstance(batch, PerReplica)
        taken.append((rows(batch), sorted(worker.empty), worker.more))
    assert taken == [([[0, 1, 2], [3, 4, 5]], [], True), ([[6], []], [1], False)]
    assert worker.empty == frozenset()


@pytest.mark.parametrize("split", [(1,), (2,), (1, 1), (1, 2), (3, 1, 2)])
@pytest.mark.parametrize("size", [1, 4, 5, 12])
def test_each_example_is_visited_once_per_epoch(split: tuple[int, ...], size: int) -> None:
    """However the replicas lie over the workers, they see the same slices of the same batches."""
    replicas = sum(split)
    dataset = ArrayDataset({"x": np.arange(29), "y": np.arange(29) * 2}).shuffle(5).batch(size)
    workers = [Worker(sum(split[:i]), local, replicas) for i, local in enumerate(split)]
    sources = [distributed(dataset, worker) for worker in workers]
    for epoch in range(2):
        for batches, whole in zip(zip(*sources, strict=True), dataset.epoch(epoch), strict=True):
            parts = [part for batch in batches for part in values.local_results(batch)]
            assert np.concatenate([part["x"] for part in parts]).tolist() == whole["x"].tolist()
            assert all((part["y"] == part["x"] * 2).all() for part in parts)
            assert all(len(part["x"]) <= -(-size // replicas) for part in parts)
            sizes = [len(part["x"]) for part in parts]
            assert all(a == -(-size // replicas) or b == 0 for a, b in pairwise(sizes))


def test_one_local_replica_gets_bare_arrays() -> None:
    """Nests keep their structure, and their leaves are what is per replica."""
    data = (np.arange(4), {"y": np.arange(4.0)})
    x, more = next(iter(distributed(ArrayDataset(data).batch(2), Worker())))
    assert (x.tolist(), more["y"].tolist()) == ([0, 1], [0, 1])
    x, more = next(iter(distributed(ArrayDataset(data).batch(2), Worker(local=2, replicas=2))))
    assert [type(leaf) for leaf in nest.flatten((x, more))] == [PerReplica, PerReplica]
    assert rows(more["y"]) == [[0], [1]]


def test_a_newer_epoch_of_membership_changes_the_slices() -> None:
    """Asked for before each batch; the batch after it is cut anew."""
    worker = Worker(replicas=2)
    batches = iter(distributed(ArrayDataset(np.arange(12)).batch(4), worker))
    assert rows(next(batches)) == [[0, 1]]
    worker.where = (0, 1)
    assert rows(next(batches)) == [[4, 5, 6, 7]]
    assert worker.events == ["join 0", "boundary 0", "boundary 0"]


def test_an_unbatched_dataset_is_refused() -> None:
    """When it is distributed, not when it is used."""
    with pytest.raises(ValueError, match="global_batch_size"):
        distributed(ArrayDataset(np.arange(4)), Worker())
    with pytest.raises(ValueError, match=r"call dataset.batch"):
        DistributedDatasetFromFunction(lambda _: ArrayDataset(np.arange(4)), InputContext(), Worker(), 0)


# ---- Where a pass begins ----


def test_passes_behind_the_group_give_nothing() -> None:
    """A process that comes late counts its passes from 0, and begins where the group stands."""
    worker = Worker(at=Position(0, 2, 1))
    dataset = ArrayDataset(np.arange(6)).shuffle(1).batch(2)
    source = distributed(dataset, worker)
    whole = [[b.tolist() for b in dataset.epoch(epoch)] for epoch in range(4)]
    assert [[b.tolist() for b in source] for _ in range(4)] == [[], [], whole[2][1:], whole[3]]


def test_epochs_begin_where_the_group_stands() -> None:
    """`epochs` names what is still to be done; iterating in it gives that data epoch."""
    worker = Worker(at=Position(0, 2, 1))
    dataset = ArrayDataset(np.arange(6)).shuffle(1).batch(2)
    source = distributed(dataset, worker)
    got = [(epoch, [b.tolist() for b in source]) for epoch in source.epochs(4)]
    whole = [[b.tolist() for b in dataset.epoch(epoch)] for epoch in range(4)]
    assert got == [(2, whole[2][1:]), (3, whole[3])]
    assert list(source.epochs(4)) == []
    assert list(source.epochs(5)) == [4]


def test_with_epochs_the_other_datasets_begin_there_too() -> None:
    """A test set that the group has gone through twice is at its third pass, and gives all of it."""

    class Both(Worker):
        def position(self, dataset: int) -> Position | None:
            return (Position(0, 2, 0), Position(1, 2, 0))[dataset]

    worker, passes = Both(), Passes()
    train = DistributedDataset(ArrayDataset(np.arange(2)).batch(2), worker, 0, passes)
    test = DistributedDataset(ArrayDataset(np.arange(3)).batch(3), worker, 1, passes)
    seen = [(epoch, len(list(train)), len(list(test))) for epoch in train.epochs(4)]
    assert seen == [(2, 1, 1), (3, 1, 1)]
    assert worker.next[1] == Position(1, 4, 0)


def test_a_restored_position_counts_from_then_on() -> None:
    """Also in a process that has gone further already."""
    worker, dataset = Worker(), ArrayDataset(np.arange(4)).batch(2)
    source = distributed(dataset, worker)
    for _ in source.epochs(2):
        assert len(list(source)) == 2
    worker.at = Position(0, 1, 1)
    assert [(epoch, [b.tolist() for b in source]) for epoch in source.epochs(3)] == [
        (1, [[2, 3]]),
        (2, [[0, 1], [2, 3]]),
    ]


def test_the_place_that_is_told_is_the_next_batch() -> None:
    """After the last batch of a pass that is the first of the next one; whoever resumes there misses nothing."""
    worker = Worker()
    source = distributed(ArrayDataset(np.arange(4)).batch(2), worker)
    told = [(worker.next[0].epoch, worker.next[0].index, worker.more) for _ in source]
    assert told == [(0, 1, True), (1, 0, False)]


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_a_resumed_run_sees_what_an_unbroken_one_does(stop: int) -> None:
    """From every place within and between passes."""
    dataset = ArrayDataset(np.arange(6)).shuffle(2).batch(2)
    first = Worker()
    source = distributed(dataset, first)
    seen: list[Any] = []
    for _ in source.epochs(1):
        for batch in source:
            seen.append(batch.tolist())
            if len(seen) == stop:
                break
    second = Worker(at=first.next[0])
    source = distributed(dataset, second)
    for _ in source.epochs(2):
        seen += [batch.tolist() for batch in source]
    assert seen == [batch.tolist() for epoch in range(2) for batch in dataset.epoch(epoch)]


def test_after_a_pass_that_was_broken_off_the_next_one_is_told_before_its_first_batch() -> None:
    """Who joins at that batch must not be sent to the middle of the pass before."""
    worker = Worker()
    told: list[Position] = []

    class Noting(Worker):
        def boundary(self, dataset: int) -> None:
            told.append(self.next.get(dataset, Position(dataset, 0, 0)))

    worker = Noting()
    source = distributed(ArrayDataset(np.arange(8)).batch(2), worker)
    for _ in range(2):
        for _ in source:
            break
    assert told == [Position(0, 0, 0), Position(0, 1, 0)]


# ---- Datasets from functions ----


def from_batches(batches: Any, worker: Worker, context: InputContext | None = None) -> Any:
    return DistributedDatasetFromFunction(lambda _: batches, context or InputContext(), worker, 0)


def test_the_function_is_called_once_with_its_context() -> None:
    """Not once for each pass."""
    calls: list[InputContext] = []

    def make(context: InputContext) -> ArrayDataset:
        calls.append(context)
        return ArrayDataset(np.arange(6)).shard(context.num_input_pipelines, context.input_pipeline_id).batch(2)

    told = InputContext(2, 1, 2)
    source = DistributedDatasetFromFunction(make, told, Worker(), 0)
    assert [[b.tolist() for b in source] for _ in range(2)] == [[[1, 3], [5]]] * 2
    assert calls == [told]


def test_each_replica_takes_one_batch_a_step() -> None:
    """Missing ones are empty, with the structure and dtype of the others."""
    worker = Worker(local=2, replicas=2)
    batches = [(np.full(2, i, "float32"), {"y": np.full((2, 3), i)}) for i in range(3)]
    steps = [(rows(x), [v.shape for v in y["y"].values], worker.empty) for x, y in from_batches(batches, worker)]
    assert steps == [
        ([[0, 0], [1, 1]], [(2, 3), (2, 3)], frozenset()),
        ([[2, 2], []], [(2, 3), (0, 3)], frozenset({1})),
    ]


def test_a_worker_whose_data_are_used_up_goes_on_with_empty_batches() -> None:
    """For as long as another one has data; both then end in the same step, and begin the next pass anew."""
    short, long = Worker(), Worker(1, 1, 2)
    one = from_batches([np.arange(2)], short)
    other = from_batches([np.arange(2), np.arange(3), np.arange(1)], long)
    for _ in range(2):
        sizes = []
        for a, b in zip(one, other, strict=True):
            sizes.append((len(a), len(b), sorted(short.empty)))
            do_round(short, long)
        assert sizes == [(2, 2, []), (0, 3, [0]), (0, 1, [0])]


def test_batches_are_looked_for_one_step_ahead() -> None:
    """Whether another follows is told with each batch."""
    worker, read = Worker(), []

    class Source:
        def __iter__(self) -> Iterator[Any]:
            for index in range(3):
                read.append(index)
                yield np.zeros(1)

    told = [(len(read), worker.more) for _ in from_batches(Source(), worker)]
    assert told == [(2, True), (3, True), (3, False)]


def test_a_late_worker_skips_what_the_group_has_behind_it() -> None:
    """By steps of one batch for each local replica."""
    batches = [np.full(1, i) for i in range(7)]
    source = from_batches(batches, Worker(local=2, replicas=2, at=Position(0, 1, 2)))
    assert [rows(b) for b in source] == []
    assert [rows(b) for b in source] == [[[4], [5]], [[6], []]]


def test_a_late_worker_whose_data_are_used_up_gets_empty_batches() -> None:
    """If the group that takes it in has more."""
    worker = Worker(at=Position(0, 0, 5))
    worker.others_more = True
    first = next(iter(from_batches([np.zeros((2, 3), "int8")], worker)))
    assert (first.shape, first.dtype) == ((0, 3), np.int8)


def test_a_worker_without_any_batch_is_told_so() -> None:
    """And so is one whose data can be gone through only once."""
    with pytest.raises(ValueError, match="input pipeline 1 of 2 gives no batch in pass 0"):
        next(iter(from_batches([], Worker(), InputContext(2, 1, 2))))
    once = from_batches(iter([np.zeros(1)]), Worker())
    assert len(list(once)) == 1
    with pytest.raises(ValueError, match=r"no batch in pass 1.*anew"):
        list(once)


def test_batches_need_a_batch_dimension() -> None:
    """Lists of numbers and scalars have none."""
    for batch in ([1, 2], np.float32(1), (np.zeros(1), np.zeros(()))):
        with pytest.raises(ValueError, match="without a batch dimension"):
            next(iter(from_batches([batch], Worker())))


def test_endless_datasets_are_no_trouble() -> None:
    """Nothing is read but what is needed."""

    class Endless:
        def __iter__(self) -> Iterator[Any]:
            while True:
                yield np.zeros(1)

    worker = Worker(local=2, replicas=2)
    for step, _ in enumerate(from_batches(Endless(), worker)):
        assert worker.more
        if step == 10:
            break


def test_arrays_are_no_dataset() -> None:
    """The error says how to make one of them."""
    with pytest.raises(TypeError, match="ArrayDataset"):
        distributed(np.ones((4, 2)), Worker())  # type: ignore[arg-type]
