"""What workers say of the global batches that they read, by which servers compare these."""

from __future__ import annotations

import subprocess
import sys
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import psclient as ps
from psclient._src.data.array_dataset import ArrayDataset
from psclient._src.options import AutoShardPolicy, InputOptions
from tests.kit.strategies import refused
from tests.kit.workers import Worker, distributed, in_threads

torch = pytest.importorskip("torch", reason="PyTorch is not installed: its DataLoader is not tested")
data = torch.utils.data


def words(dataset: Any, epochs: int = 1, **options: Any) -> list[str | None]:
    """What a worker says of each of its batches."""
    worker, found = Worker(0, 1, 2), []
    batches = distributed(dataset, worker, **options)
    for _ in range(epochs):
        for _ in batches:
            found.append(None if worker.batch is None else worker.batch.words)
    return found


def seeded(seed: int) -> Any:
    return torch.Generator().manual_seed(seed)


class ByRank:
    """A batch sampler as those of other libraries are: its own lists, for one of two workers."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Any:
        return iter([list(range(i, i + 8)) for i in range(8 * self.rank, 48, 16)])


class Place:
    """An index that looks different in each process."""

    def __init__(self, number: int) -> None:
        self.number = number


class Places:
    """A dataset of numbers, by places."""

    def __getitem__(self, place: Place) -> int:
        return place.number

    def __len__(self) -> int:
        return 48


class Stream(data.IterableDataset):  # type: ignore[misc, name-defined]
    """Numbers, one by one."""

    def __iter__(self) -> Any:
        return iter(range(48))


class Pieces:
    """Batches of some sizes, anew each time."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = sizes

    def __iter__(self) -> Any:
        return (np.zeros(size) for size in self.sizes)


def weighted(worker: int) -> Any:
    return data.WeightedRandomSampler([1.0] * 48, 48, generator=seeded(worker))


def arrays() -> ArrayDataset:
    return ArrayDataset(np.arange(48))


DIFFERENT: dict[str, Callable[[int], Any]] = {
    "shuffle without a seed": lambda worker: data.DataLoader(range(48), 8, shuffle=True),
    "RandomSampler without a seed": lambda w: data.DataLoader(range(48), 8, sampler=data.RandomSampler(range(48))),
    "WeightedRandomSampler, another seed": lambda worker: data.DataLoader(range(48), 8, sampler=weighted(worker)),
    "another seed": lambda worker: data.DataLoader(range(48), 8, shuffle=True, generator=seeded(worker)),
    "another batch size": lambda worker: data.DataLoader(range(48), 8 + worker),
    "drop_last": lambda worker: data.DataLoader(range(47), 8, drop_last=bool(worker)),
    "a batch sampler": lambda worker: data.DataLoader(range(48), batch_sampler=ByRank(worker)),
    "a sampler of whole batches": lambda worker: data.DataLoader(
        [np.zeros(3)] * 4, None, sampler=data.RandomSampler(range(4), generator=seeded(worker + 2))
    ),
    "a stream": lambda worker: data.DataLoader(Stream(), 8 + worker),
    "more rows": lambda worker: ArrayDataset(np.arange(48 + worker)).batch(8),
    "another seed of arrays": lambda worker: arrays().shuffle(worker).batch(8),
    "shuffled by one": lambda worker: (arrays().shuffle(0) if worker else arrays()).batch(8),
    "more batches": lambda worker: [np.zeros(8)] * (6 + worker),
    "larger pieces": lambda worker: Pieces(8 + worker, 8),
}
"""Datasets of which each of two workers has another one: all words differ from the first batch on."""

ALIKE: dict[str, Callable[[], Any]] = {
    "in order": lambda: data.DataLoader(range(48), 8),
    "a seed": lambda: data.DataLoader(range(48), 8, shuffle=True, generator=seeded(0)),
    "weights": lambda: data.DataLoader(range(48), 8, sampler=weighted(0)),
    "a batch sampler": lambda: data.DataLoader(range(48), batch_sampler=ByRank(1)),
    "indices of arrays": lambda: data.DataLoader(range(48), batch_sampler=[np.arange(8), torch.arange(8)]),
    "pairs": lambda: data.DataLoader({(0, "a"): 1, (1, "b"): 2}, 2, sampler=[(0, "a"), (1, "b")]),
    "objects": lambda: data.DataLoader(Places(), 8, sampler=[Place(i) for i in range(48)]),
    "a stream": lambda: data.DataLoader(Stream(), 8),
    "arrays": lambda: ArrayDataset(np.arange(48)).shuffle(3).batch(8),
    "endless arrays": lambda: ArrayDataset(np.arange(8)).batch(4).repeat(2),
    "a list": lambda: [np.random.default_rng().random(8)] * 6,
    "pieces": lambda: Pieces(8, 8, 3),
}
"""Datasets that are equal on each worker, as far as that can be told."""


@pytest.mark.parametrize("kind", DIFFERENT)
def test_batches_that_differ_have_different_words(kind):
    """By the first of them a server knows, whatever makes them differ: the order, the size, or the data's length."""
    first, second = (words(DIFFERENT[kind](worker)) for worker in range(2))
    assert None not in first + second
    assert first[0] != second[0]


@pytest.mark.parametrize("kind", ALIKE)
def test_batches_that_are_equal_have_equal_words(kind):
    """In each epoch, and no two batches have the same."""
    first, second = (words(ALIKE[kind](), epochs=3) for _ in range(2))
    assert first == second
    assert len(set(first)) == len(first) > 0


def test_words_are_of_the_indices_that_were_drawn():
    """The same rows in another epoch, or of another sampler in the same order, have the same sum; none has a stream."""
    (first, _), (again, _), (_, other) = (
        [each.partition("(")[2] for each in words(data.DataLoader(range(16), 8, **given), epochs=1)]
        for given in ({}, {}, {"sampler": [*range(8, 16), *range(8)]})
    )
    assert first == again
    assert first.removeprefix("SequentialSampler") == other.removeprefix("list")
    assert words(data.DataLoader(Stream(), 24)) == [f"batch {i} of epoch 0 has 24 examples" for i in range(2)]


def read_in_processes() -> None:
    """The script of a process that has no threads, so that it can be forked at any time."""
    for options in ({}, {"persistent_workers": True, "prefetch_factor": 5}):
        loader = data.DataLoader(range(48), 8, shuffle=True, generator=seeded(0), num_workers=2, **options)
        worker = Worker()
        batches = distributed(loader, worker)
        for batch in (batch for _ in range(3) for batch in batches):
            assert f"{zlib.crc32(repr(batch.tolist()).encode()):08x}" in worker.batch.words


def test_indices_are_those_of_the_batch_where_processes_read():
    """They are drawn ahead, and the sum is of those that this batch has, in each epoch."""
    script = f"from {__name__} import read_in_processes; read_in_processes()"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_a_script_finds_its_own_sampler():
    """In the middle of a pass, after it, after one that was broken off, and after one that failed."""

    def fails(index: int) -> int:
        raise OSError(index)

    for given in ({"batch_size": 8, "sampler": data.RandomSampler(range(48))}, {"batch_sampler": ByRank(0)}):
        loader = data.DataLoader(range(48), **given)
        own = loader.sampler, loader.batch_sampler
        batches = distributed(loader, Worker())
        for _ in batches:
            assert (loader.sampler, loader.batch_sampler) == own
        next(iter(batches))
        assert (loader.sampler, loader.batch_sampler) == own
    broken = data.DataLoader(range(48), 8, collate_fn=fails)
    own = broken.batch_sampler
    refused(OSError, "0", lambda: next(iter(distributed(broken, Worker()))))
    assert broken.batch_sampler is own


def test_passes_within_passes_keep_their_indices():
    """Two passes over one loader, at different places, say what one by one says."""
    worker = Worker(0, 1, 2)
    batches = distributed(data.DataLoader(range(48), 8, sampler=list(range(48))), worker)
    found: list[list[str]] = [[], []]
    passes = [iter(batches), iter(batches)]
    for number in (0, 0, 1, 0, 1, 1, 0, 1):
        next(passes[number])
        found[number].append(worker.batch.words.partition(" has ")[2])
    assert found[0] == found[1]
    assert len(set(found[0])) == 4


@pytest.mark.parametrize("kind", ["more rows", "another batch size", "larger pieces"])
def test_a_round_over_different_batches_fails(kind):
    """Each worker hears of it in the first step, whatever the script computes with the batch."""

    def work(strategy: Any, worker: int) -> str:
        total = 0.0
        try:
            for x in strategy.experimental_distribute_dataset(DIFFERENT[kind](worker)):
                total += float(strategy.reduce("SUM", np.asarray(x).sum(), axis=None))
        except ps.errors.Diverged as error:
            return str(error)
        return f"no error, and a total of {total}"

    first, second = in_threads(work)
    assert first == second
    assert "/job:worker/task:0 and /job:worker/task:1 read different global batches: batch 0 of epoch 0 has 8" in first


def test_a_value_may_be_looked_at_in_another_step():
    """A worker that looks at a reduced value sends its round before the next batch, and the others behind that."""

    def work(strategy: Any, worker: int) -> float:
        with strategy.scope():
            v = ps.Variable(0.0, name="v", aggregation=ps.VariableAggregation.SUM)
            batches = strategy.experimental_distribute_dataset(ArrayDataset(np.arange(24.0)).batch(4))
            for x in batches:
                strategy.run(lambda x=x: v.assign_add(x.sum()))
                total = strategy.extended.reduce_to("SUM", strategy.run(x.sum), v)
                if worker:
                    float(total)
        return float(v.numpy())

    assert in_threads(work) == [276.0, 276.0]


def test_batches_that_each_worker_has_for_itself_are_not_compared():
    """Where each goes through all data, and where late examples are handed out again."""
    off = InputOptions(auto_shard_policy=AutoShardPolicy.OFF)
    assert set(words(data.DataLoader(range(48), 8), options=off)) == {None}
    worker = Worker(0, 1, 2)
    worker.leaves_out = True
    for _ in distributed(ArrayDataset(np.arange(48)).batch(8), worker):
        assert worker.batch is None


def test_batches_as_they_come_are_refused():
    """`in_order=False` gives each worker another order."""
    loader = data.DataLoader(range(48), 8, num_workers=2, in_order=False)
    refused(ValueError, r"remove in_order=False", lambda: distributed(loader, Worker()))
    distributed(data.DataLoader(range(48), 8, in_order=False), Worker())
    distributed(loader, Worker(), options=InputOptions(auto_shard_policy=AutoShardPolicy.OFF))
