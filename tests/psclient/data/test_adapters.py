"""Whatever gives batches: lists, iterables, datasets of grain, loaders of PyTorch."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psclient._src import values
from psclient._src.data.adapters import source_of
from psclient._src.data.array_dataset import ArrayDataset
from psclient._src.options import ArraySpec, PerReplicaSpec
from pswire.model.log import Position
from tests.kit.strategies import refused
from tests.kit.workers import Apart, Worker, distributed, from_batches, rows, team

logging.getLogger("absl").setLevel(logging.ERROR)  # grain warns at its import where JAX is not installed
import grain  # noqa: E402


def in_list(examples: int, size: int) -> Any:
    return [{"x": np.arange(i, min(i + size, examples))} for i in range(0, examples, size)]


class Again:
    """Iterable, and no more."""

    def __init__(self, examples: int, size: int) -> None:
        self.made = (examples, size)

    def __iter__(self) -> Iterator[Any]:
        return iter(in_list(*self.made))


def of_grain(examples: int, size: int, seed: int | None = None) -> Any:
    numbers = grain.MapDataset.range(examples)
    ordered = numbers if seed is None else numbers.shuffle(seed=seed)
    return ordered.batch(size).map(lambda rows: {"x": rows})


def of_torch(examples: int, size: int) -> Any:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: its DataLoader is not tested")
    generator = torch.Generator().manual_seed(4)
    data = [{"x": i} for i in range(examples)]
    return torch.utils.data.DataLoader(data, batch_size=size, shuffle=examples > 0, generator=generator)


KINDS: dict[str, Callable[[int, int], Any]] = {
    "arrays": lambda examples, size: ArrayDataset({"x": np.arange(examples)}).shuffle(2).batch(size),
    "list": in_list,
    "iterable": Again,
    "grain map": of_grain,
    "grain shuffled": lambda examples, size: of_grain(examples, size, seed=3),
    "grain iter": lambda examples, size: of_grain(examples, size).to_iter_dataset(grain.ReadOptions(0, 0)),
    "torch": of_torch,
}
each_kind = pytest.mark.parametrize("kind", KINDS)
# Grain's shuffle takes milliseconds for each example of a small dataset: not for a search.
each_quick_kind = pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"grain shuffled"}))


def whole(dataset: Any, epoch: int) -> list[list[int]]:
    """The global batches of a data epoch, by the shortest way."""
    return [batch.whole["x"].tolist() for batch in source_of(dataset).batches(epoch, 0)]


def parts_of(batches: Any) -> list[Any]:
    return [part["x"].tolist() for batch in batches for part in values.local_results(batch)]


def joined(lists: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(lists))


SPLITS = st.lists(st.integers(1, 3), min_size=1, max_size=4)


@each_quick_kind
@given(split=SPLITS, size=st.integers(1, 9), examples=st.integers(0, 25), epochs=st.integers(1, 2))
def test_the_slices_of_all_workers_are_the_examples_once(kind, split, size, examples, epochs):
    """In the order of the data, ceil(B / R) at a time, for each kind of dataset and each split of the replicas."""
    sources = [distributed(KINDS[kind](examples, size), worker) for worker in team(split)]
    for epoch in range(epochs):
        taken = [parts_of(batches) for batches in zip(*sources, strict=True)]
        assert [joined(parts) for parts in taken] == whole(KINDS[kind](examples, size), epoch)
        assert sorted(joined(joined(parts) for parts in taken)) == list(range(examples))
        for parts in taken:
            share = -(-len(joined(parts)) // sum(split))
            wanted = [min(share, max(0, len(joined(parts)) - share * i)) for i in range(sum(split))]
            assert [len(part) for part in parts] == wanted


@each_quick_kind
@given(before=SPLITS, after=SPLITS, at=st.integers(0, 6), epoch=st.integers(0, 2))
def test_a_change_of_the_group_between_batches_loses_nothing(kind, before, after, at, epoch):
    """Whoever stays is given new slices, whoever joins begins at that batch; also in the last, smaller batch."""

    def make() -> Any:
        return KINDS[kind](31, 5)

    old, new = team(before), team(after)
    for worker in old:
        worker.at = Position(0, epoch, 0)
    passes = [distributed(make(), worker) for worker in old]
    begun = [[iter(source) for _ in range(epoch + 1)][-1] for source in passes]
    seen = [joined(parts_of([next(one) for one in begun])) for _ in range(at)]
    stay = min(len(old), len(new))
    for worker, told in zip(old, new, strict=False):
        worker.where, worker.devices = told.where, told.devices
    for worker in new[stay:]:
        worker.at = Position(0, epoch, at)
        begun.append([iter(source) for source in [distributed(make(), worker)] for _ in range(epoch + 1)][-1])
    rest = begun[:stay] + begun[len(old) :]
    seen += [joined(parts_of(batches)) for batches in zip(*rest, strict=True)]
    assert seen == whole(make(), epoch)


def test_arrays_are_not_copied():
    """A slice of a batch is a view of what the dataset gave; batches may have more examples than the first."""
    batches = [np.arange(2), np.arange(2, 9), np.arange(9, 10)]
    sources = [distributed(batches, worker) for worker in team((1, 1))]
    assert [[rows(batch) for batch in source] for source in sources] == [
        [[[0]], [[2, 3, 4, 5]], [[9]]],
        [[[1]], [[6, 7, 8]], [[]]],
    ]
    array = np.zeros((4, 2))
    for batch in distributed([array], Worker(1, 1, 2)):
        assert np.shares_memory(batch, array)


@each_kind
@pytest.mark.parametrize("stop", [1, 3, 4, 6])
def test_a_resumed_run_sees_what_an_unbroken_one_does(kind, stop):
    """From every place within and between passes, for each kind of dataset, by a new object of it."""
    first, seen = Worker(), []
    source = distributed(KINDS[kind](10, 4), first)
    for _ in source.epochs(3):
        for batch in source:
            seen.append(batch["x"].tolist())
            if len(seen) == stop:
                break
        if len(seen) == stop:
            break
    source = distributed(KINDS[kind](10, 4), Worker(at=first.next[0]))
    for _ in source.epochs(3):
        seen += [batch["x"].tolist() for batch in source]
    assert seen == [batch for epoch in range(3) for batch in whole(KINDS[kind](10, 4), epoch)]


@each_kind
def test_functions_may_return_any_kind(kind):
    """Each local replica takes a batch, in each pass from the beginning; a late worker skips whole steps."""
    for at, passes in ((None, [0, 1]), (Position(0, 1, 1), [1])):
        source = from_batches(KINDS[kind](10, 3), Worker(local=2, replicas=2, at=at))
        taken = [parts_of(source) for _ in range(2)]
        want = [whole(KINDS[kind](10, 3), epoch) for epoch in passes]
        if at:
            want = [[], want[0][2:]]
        assert taken == want


class Counting:
    """Counts how often each row is read."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.read: Counter[int] = Counter()

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: Any) -> Any:
        self.read[int(index)] += 1
        return np.array([index, index])


def test_each_batch_is_read_once():
    """By each worker, however many replicas share it, and one ahead of an endless dataset; none before its pass."""
    counting = Counting(12)
    dataset = grain.MapDataset.source(counting).batch(4)
    for _ in distributed(dataset, Worker(2, 3, 6)):
        pass
    assert counting.read == dict.fromkeys(range(12), 1)
    counting.read.clear()
    assert len(list(distributed(dataset, Worker(2, 3, 6, at=Position(0, 0, 2))))) == 1
    assert counting.read == dict.fromkeys([8, 9, 10, 11], 1)
    counting = Counting(6)
    source = distributed(grain.MapDataset.source(counting).repeat().batch(2), Worker())
    iterator = iter(source)
    assert [next(iterator)[0].tolist() for _ in range(4)] == [[0, 0], [2, 2], [4, 4], [0, 0]]
    assert sum(counting.read.values()) == 5 * 2


def test_tensors_become_arrays_without_copies():
    """Of a batch that the loader did not make from several examples, the memory is the user's."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: its DataLoader is not tested")
    tensor = torch.zeros((4, 2))
    loader = torch.utils.data.DataLoader([(tensor, torch.ones(4, dtype=torch.int32))], batch_size=None)
    ((x, y),) = distributed(loader, Worker())
    assert (type(x), x.dtype, y.dtype) == (np.ndarray, np.float32, np.int32)
    x += 1
    assert tensor.sum() == 8


def test_who_shuffles_alone_is_warned(caplog):
    """Once, where there are several processes whose batches no server compares, and with what to write."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: its DataLoader is not tested")
    data = torch.utils.data
    own = {"generator": torch.Generator().manual_seed(0)}
    sampler, late = data.RandomSampler(range(4)), Worker(0, 1, 2)
    late.leaves_out = True
    for loader, worker, lines in (
        (data.DataLoader(range(4), batch_size=2, shuffle=True), Apart(0, 1, 2), 1),
        (data.DataLoader(range(4), batch_sampler=data.BatchSampler(sampler, 2, False)), Apart(0, 1, 2), 1),
        (data.DataLoader(range(4), batch_size=2, shuffle=True), Worker(0, 1, 2), 0),
        (data.DataLoader(range(4), batch_size=2, shuffle=True), late, 1),
        (data.DataLoader(range(4), batch_size=2, shuffle=True), Apart(0, 2, 2), 0),
        (data.DataLoader(range(4), batch_size=2, shuffle=True, **own), Apart(0, 1, 2), 0),
        (data.DataLoader(range(4), batch_size=2, sampler=data.RandomSampler(range(4), **own)), Apart(0, 1, 2), 0),
        (data.DataLoader(range(4), batch_size=2), Apart(0, 1, 2), 0),
    ):
        source = distributed(loader, worker)
        for _ in range(2):
            assert len(list(source)) == 2
        said = [record.message for record in caplog.records if record.name == "psclient"]
        assert len(said) == lines
        assert all("generator=torch.Generator().manual_seed(0)" in line for line in said)
        caplog.clear()


@each_kind
def test_element_spec_disturbs_no_iteration(kind):
    """The first dimension is open; asked for before, in and after a pass, and of its iterator. Of several replicas it
    has one `ArraySpec` for each, at each leaf, also of datasets from functions."""
    spec, worker = ArraySpec((None,), np.dtype("int64")), Worker(local=2, replicas=4)
    several = PerReplicaSpec((spec, spec))
    made = KINDS[kind](10, 4)
    assert distributed(made, worker).element_spec == from_batches(made, worker).element_spec == {"x": several}
    refused(ValueError, "the list has no batch", lambda: distributed([], worker).element_spec)
    source = distributed(KINDS[kind](10, 4), Worker())
    spec = {"x": ArraySpec((None,), np.dtype("int64"))}
    assert source.element_spec == spec
    seen = []
    iterator = iter(source)
    for batch in iterator:
        seen.append(batch["x"].tolist())
        assert source.element_spec == iterator.element_spec == spec
    assert seen == whole(KINDS[kind](10, 4), 0)


def test_what_is_no_dataset_is_refused():
    """Arrays and nests of them; what can be gone through once; what cannot be gone through. All with the remedy."""
    x = np.ones((4, 2))
    for arrays in (x, (x, x), {"x": x}, "x", 3, None, object()):
        with pytest.raises(TypeError, match=r"is not a dataset; use ps\.ArrayDataset\(arrays\)\.batch"):
            distributed(arrays, Worker())
    for once in (iter([x]), (x for _ in range(2)), zip([x], [x], strict=True), iter(of_grain(4, 2))):
        for kind in (distributed, from_batches):
            refused(TypeError, r"only once.*pass a list", lambda kind=kind, once=once: kind(once, Worker()))


def test_unbatched_elements_are_refused():
    """Numbers, scalars, None, unequal lengths, nothing at all; batches that a filter leaves out of a `MapDataset`."""
    for batch in ([1, 2], np.float32(1), (np.zeros(1), np.zeros(())), (np.zeros(2), None), "x"):
        for kind in (distributed, from_batches):
            with pytest.raises(ValueError, match=r"without a batch dimension.*; batch the dataset"):
                next(iter(kind([batch], Worker())))
    for batch in ((np.zeros((28, 28)), np.zeros(10)), ()):
        with pytest.raises(ValueError, match=r"differ in their first dimension.*batch the dataset first"):
            next(iter(distributed([batch], Worker())))
    filtered = grain.MapDataset.range(6).batch(2).filter(lambda batch: batch[0] != 2)
    refused(ValueError, "to_iter_dataset", lambda: list(distributed(filtered, Worker())))
    assert [batch.tolist() for batch in distributed(filtered.to_iter_dataset(), Worker())] == [[0, 1], [4, 5]]
