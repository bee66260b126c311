"""The distribution of datasets over workers and local replicas."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fractions import Fraction
from functools import partial
from random import Random
from typing import Any

import numpy as np
import pytest

from psclient._src import values
from psclient._src.arrays.devices import Device
from psclient._src.data.array_dataset import ArrayDataset
from psclient._src.data.distributed import DistributedDataset, DistributedDatasetFromFunction
from psclient._src.data.group import Passes
from psclient._src.data.progress import Progress
from psclient._src.options import AutoShardPolicy, InputContext, InputOptions
from pswire.model.log import Examples, Position
from tests.kit.strategies import refused
from tests.kit.workers import Apart, Worker, distributed, do_round, from_batches, rows, team

# ---- Global batches over workers and replicas ----


@pytest.mark.parametrize("split", [(1,), (1, 1), (1, 2), (3, 1, 2)])
def test_each_worker_knows_its_fraction_of_a_batch(split):
    """It is that of the examples, also of a short batch; outside of a batch, and of unshared ones, it is not known."""
    workers, dataset = team(split), ArrayDataset(np.arange(29)).batch(12)
    sources = [distributed(dataset, worker) for worker in workers]
    for batches, whole in zip(zip(*sources, strict=True), dataset.epoch(0), strict=True):
        for worker, batch in zip(workers, batches, strict=True):
            own = sum(len(part) for part in values.local_results(batch))
            assert worker.fraction == Fraction(own, len(whole))
    assert [worker.fraction for worker in workers] == [None] * len(workers)
    next(iter(distributed(dataset, workers[0], options=InputOptions(auto_shard_policy=AutoShardPolicy.OFF))))
    assert workers[0].fraction is None


@pytest.mark.parametrize("policy", [AutoShardPolicy.AUTO, AutoShardPolicy.DATA])
@pytest.mark.parametrize("kind", [Worker, Apart])
def test_workers_share_by_data(kind, policy):
    """Without prefetching batches are NumPy arrays, whatever the replica's device is."""
    worker, options = kind(1, 1, 2), InputOptions(False, policy)
    worker.devices = (Device("gpu", 0),)
    source = distributed(ArrayDataset(np.arange(8)).batch(8), worker, options=options)
    assert [rows(batch) for batch in source] == [[[4, 5, 6, 7]]]


def test_an_unbatched_dataset_is_refused():
    """When it is distributed, not when it is used."""
    refused(ValueError, "global_batch_size", lambda: distributed(ArrayDataset(np.arange(4)), Worker()))
    refused(ValueError, "call dataset.batch", lambda: from_batches(ArrayDataset(np.arange(4)), Worker()))


# ---- Where a pass begins ----


def test_epochs_begin_where_the_group_stands():
    """`epochs` names what is still to be done; a pass that is counted from 0 gives nothing up to there. With `epochs`
    other datasets begin there, too: a test set that the group has gone through twice gives all of its third pass."""
    worker = Worker(at=Position(0, 2, 1))
    dataset = ArrayDataset(np.arange(6)).shuffle(1).batch(2)
    source = distributed(dataset, worker)
    whole = [[b.tolist() for b in dataset.epoch(epoch)] for epoch in range(4)]
    assert [[b.tolist() for b in source] for _ in range(4)] == [[], [], whole[2][1:], whole[3]]
    worker = Worker(at=Position(0, 2, 1))
    source = distributed(dataset, worker)
    got = [(epoch, [b.tolist() for b in source]) for epoch in source.epochs(4)]
    assert got == [(2, whole[2][1:]), (3, whole[3])]
    assert list(source.epochs(4)) == []
    assert list(source.epochs(5)) == [4]

    class Both(Worker):
        def position(self, dataset: int) -> Position | None:
            return (Position(0, 2, 0), Position(1, 2, 0))[dataset]

    worker, passes = Both(), Passes()
    train = DistributedDataset(ArrayDataset(np.arange(2)).batch(2), worker, 0, passes)
    test = DistributedDataset(ArrayDataset(np.arange(3)).batch(3), worker, 1, passes)
    assert [(epoch, len(list(train)), len(list(test))) for epoch in train.epochs(4)] == [(2, 1, 1), (3, 1, 1)]
    assert worker.next[1] == Position(1, 4, 0)


def test_a_restored_position_counts_from_then_on():
    """Also in a process that has gone further already."""
    worker, dataset = Worker(), ArrayDataset(np.arange(4)).batch(2)
    source = distributed(dataset, worker)
    for _ in source.epochs(2):
        assert len(list(source)) == 2
    worker.at = Position(0, 1, 1)
    got = [(epoch, [b.tolist() for b in source]) for epoch in source.epochs(3)]
    assert got == [(1, [[2, 3]]), (2, [[0, 1], [2, 3]])]


def test_the_place_that_is_told_is_the_next_batch():
    """After the last batch of a pass that is the first of the next one; whoever resumes there misses nothing. After a
    pass that was broken off the next one is told before its first batch."""
    told: list[Position] = []

    class Noting(Worker):
        def boundary(self, dataset: int) -> None:
            told.append(self.next.get(dataset, Position(dataset, 0, 0)))

    worker = Noting()
    source = distributed(ArrayDataset(np.arange(4)).batch(2), worker)
    found = [(worker.next[0].epoch, worker.next[0].index, worker.more) for _ in source]
    assert found == [(0, 1, True), (1, 0, False)]
    told.clear()
    for _ in range(2):
        for _ in source:
            break
    assert told == [Position(0, 1, 0), Position(0, 2, 0)]


# ---- Datasets from functions ----


def test_the_function_is_called_once_with_its_context():
    calls: list[InputContext] = []

    def make(context: InputContext) -> ArrayDataset:
        calls.append(context)
        return ArrayDataset(np.arange(6)).shard(context.num_input_pipelines, context.input_pipeline_id).batch(2)

    told = InputContext(2, 1, 2)
    source = DistributedDatasetFromFunction(make, told, Worker(), 0)
    assert [[b.tolist() for b in source] for _ in range(2)] == [[[1, 3], [5]]] * 2
    assert calls == [told]


def test_each_replica_takes_one_batch_a_step():
    """Missing ones are empty, with the structure and dtype of the others; also if all of a late worker's are."""
    worker = Worker(local=2, replicas=2)
    batches = [(np.full(2, i, "float32"), {"y": np.full((2, 3), i)}) for i in range(3)]
    steps = [(rows(x), [v.shape for v in y["y"].values], worker.empty) for x, y in from_batches(batches, worker)]
    assert steps == [([[0, 0], [1, 1]], [(2, 3), (2, 3)], set()), ([[2, 2], []], [(2, 3), (0, 3)], {1})]
    worker = Worker(local=2, replicas=4, at=Position(0, 0, 5))
    worker.others_more = True
    first = next(iter(from_batches([np.zeros((2, 3), "int8")], worker)))
    assert [(part.shape, part.dtype) for part in first.values] == [((0, 3), np.int8)] * 2


class Forever:
    """Endless batches, as a function may give."""

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield np.zeros(1)


def test_batches_are_looked_for_one_step_ahead():
    """Whether another follows is told with each batch; of an endless dataset nothing is read but what is needed."""
    worker, read = Worker(), []

    class Source:
        def __iter__(self) -> Iterator[Any]:
            for index in range(3):
                read.append(index)
                yield np.zeros(1)

    told = [(len(read), worker.more) for _ in from_batches(Source(), worker)]
    assert told == [(2, True), (3, True), (3, False)]
    worker = Worker(local=2, replicas=2)
    for step, _ in enumerate(from_batches(Forever(), worker)):
        assert worker.more
        if step == 10:
            break


def test_a_worker_without_any_batch_is_told_so():
    """And so is one whose data turn out to be there only once."""

    class Once:
        def __init__(self) -> None:
            self.left = iter([np.zeros(1)])

        def __iter__(self) -> Iterator[Any]:
            return self.left

    with pytest.raises(ValueError, match="input pipeline 1 of 2 has no batch in pass 0"):
        next(iter(from_batches([], Worker(), InputContext(2, 1, 2))))
    once = from_batches(Once(), Worker())
    assert len(list(once)) == 1
    refused(ValueError, r"no batch in pass 1.*must start again each time", lambda: list(once))


def test_a_worker_that_joins_asynchronous_ones_is_told_that_it_gets_no_batches(caplog):
    """Those of the beginning have their shares; the log says how all could share them."""
    late = distributed(ArrayDataset(np.arange(8)).batch(4), Apart(4, 1, 4))
    assert [rows(batch) for batch in late] == [[[]], [[]]]
    assert "gets no batches. To share batches, use ps.InputOptions(auto_shard_policy=ps.AutoShard" in caplog.text


@pytest.mark.parametrize("every", [1, 2, 3, 4, 100])
@pytest.mark.parametrize("lengths", [(1, 4), (3, 4), (4, 4), (6, 1)])
def test_workers_end_together_however_seldom_rounds_are(every, lengths):
    """After a step without a round one is made, so that nobody ends while another has data, and nobody goes on alone.
    Who makes rounds alone is not asked.

    `every`: of so many steps one makes a round, as where gradients are accumulated. 100: none does.
    """

    def refuse() -> None:
        raise AssertionError("a round was made")

    three, unasked = [np.zeros(2)] * 3, Passes(make_round=refuse)
    for alone in (Worker(), Apart(1, 1, 4)):
        assert len(list(from_batches(three, alone, passes=unasked))) == 3
    workers = team((1, 1))
    barrier = threading.Barrier(2, lambda: do_round(*workers), timeout=10)
    made = [0, 0]

    def train(me: int) -> list[list[int]]:
        def make_round() -> None:
            made[me] += 1
            barrier.wait()

        batches = [np.full(2, step) for step in range(lengths[me])]
        source = from_batches(batches, workers[me], InputContext(2, me, 2), passes=Passes(make_round=make_round))
        passes = []
        for _ in range(2):
            passes.append([])
            for step, batch in enumerate(source, 1):
                passes[-1].append(len(batch))
                if step % every == 0:
                    barrier.wait()
        return passes

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(train, range(2)))
    longest = max(lengths)
    assert found == [[[2] * length + [0] * (longest - length)] * 2 for length in lengths]
    assert made == [2 * (longest - longest // every)] * 2


def test_a_pass_that_was_broken_off_within_a_step_does_not_speak_for_it():
    """The round that is made after the step says whether the outer dataset has more, not the inner one."""
    workers, said = team((1, 1)), []

    def make_round() -> None:
        said.append((workers[0].more, workers[0].next[0]))
        do_round(*workers)

    outer = from_batches([np.zeros(1)], workers[0], InputContext(2, 0, 2), passes=Passes(make_round=make_round))
    inner = DistributedDataset([np.zeros(2)] * 3, workers[0], 1)
    for _ in outer:
        for _ in inner:
            assert workers[0].more
            break
    assert said == [(False, Position(0, 0, 1))]


# ---- Options ----


def test_a_policy_that_needs_files_is_refused():
    """With what to use instead; a dataset from a function is not sharded anyway."""
    for policy in (AutoShardPolicy.FILE, AutoShardPolicy.HINT):
        options = InputOptions(auto_shard_policy=policy)
        with pytest.raises(ValueError, match=rf"{policy.name}.*datasets_from_function.*input_pipeline_id"):
            distributed(ArrayDataset(np.arange(2)).batch(2), Worker(), options=options)
        assert len(list(from_batches([np.zeros(1)], Worker(), options=options))) == 1


def test_without_sharding_each_worker_sees_all_in_smaller_steps():
    """Ten examples in batches of 6 over four replicas, two of them here: slices of two, then of one, twice."""
    worker = Worker(2, 2, 4)
    source = distributed(ArrayDataset(np.arange(10)).batch(6), worker, options=InputOptions(True, AutoShardPolicy.OFF))
    taken = [(rows(batch), sorted(worker.empty), worker.next[0].index) for batch in source]
    assert taken == [([[0, 1], [2, 3]], [], 1), ([[4, 5], []], [1], 2), ([[6], [7]], [], 3), ([[8], [9]], [], 4)]
    late = Worker(2, 2, 4, at=Position(0, 0, 2))
    source = distributed(ArrayDataset(np.arange(10)).batch(6), late, options=InputOptions(True, AutoShardPolicy.OFF))
    assert [rows(batch) for batch in source] == [[[6], [7]], [[8], [9]]]
    assert list(distributed(ArrayDataset(np.arange(0)).batch(6), worker, options=InputOptions(True, -1))) == []


# ---- Iterators ----


def test_an_iterator_gives_its_batches_by_three_names():
    """The process joins at its first one; `StopIteration` at the end, also when it is asked again."""
    iterator = iter(distributed(ArrayDataset(np.arange(3)).batch(1), Worker()))
    assert iter(iterator) is iterator
    assert [int(take()[0]) for take in (iterator.get_next, iterator.next, partial(next, iterator))] == [0, 1, 2]
    for _ in range(2):
        refused(StopIteration, "", iterator.get_next)
    worker = Worker()
    iterator = iter(distributed(ArrayDataset(np.arange(3)).batch(1), worker))
    assert worker.events == []
    iterator.get_next()
    assert worker.events == ["join 0", "boundary 0"]


# ---- Workers that are left out of rounds ----


def out(workers: list[Worker], late: set[int]) -> None:
    """A round of updates was made without some of the workers: all know what has come back."""
    for worker in workers:
        at = worker.next[0]
        places = [slice(workers[i].where[0], workers[i].where[0] + len(workers[i].devices)) for i in sorted(late)]
        came = [e for place in places for e in workers[0].dealt[place] if e.first < e.stop]
        worker.next[0] = replace(at, returned=(*at.returned, *came))


@pytest.mark.parametrize("split", [(1, 1, 1), (2, 1), (1, 2, 3)])
@pytest.mark.parametrize("seed", range(4))
def test_examples_of_who_was_excluded_are_handed_out_again(split, seed):
    """Each counts once in a pass, whoever is late and however often; all workers have the same number of steps."""
    workers, luck = team(split), Random(seed)
    dataset = ArrayDataset(np.arange(29)).shuffle(5).batch(7)
    for worker in workers:
        worker.leaves_out = True
    sources = [distributed(dataset, worker) for worker in workers]
    for epoch in range(2):
        counted: list[int] = []
        for batches in zip(*sources, strict=True):
            some = [sum(map(len, rows(batch))) for batch in batches]
            assert sum(worker.fraction or 0.0 for worker in workers) == pytest.approx(1.0)
            # As servers do it: who suffices has examples.
            late = {luck.randrange(len(split))} if luck.randrange(3) and all(some) else set()
            out(workers, late)
            counted += [x for i, batch in enumerate(batches) if i not in late for part in rows(batch) for x in part]
        assert sorted(counted) == list(range(29))
        assert {worker.next[0] for worker in workers} == {Position(0, epoch + 1, 0)}


def test_who_is_behind_gets_nothing_until_it_has_caught_up():
    """What it would have had in those steps comes back to all."""
    workers = team((1, 1))
    for worker in workers:
        worker.leaves_out = True
    first, second = (iter(distributed(ArrayDataset(np.arange(8)).batch(4), worker)) for worker in workers)
    workers[1].behind = True
    assert [rows(next(first)), rows(next(second))] == [[[0, 1]], [[]]]
    out(workers, {1})
    assert [rows(next(first)), rows(next(second))] == [[[4, 5]], [[]]]
    out(workers, {1})
    workers[1].behind = False
    assert [rows(next(first)), rows(next(second))] == [[[2, 3]], [[6, 7]]]
    assert [next(first, None), next(second, None)] == [None, None]


def test_a_pass_goes_on_with_what_had_come_back():
    """Of a restored position: the batches are read anew; one that is not there is refused."""
    at = Position(0, 0, 2, (Examples(0, 1, 3), Examples(1, 0, 1)))
    source = distributed(ArrayDataset(np.arange(12)).batch(4), Worker(at=at))
    assert [rows(batch) for batch in source] == [[[1, 2]], [[4]], [[8, 9, 10, 11]]]
    lost = Worker(at=Position(0, 0, 0, (Examples(9, 0, 1),)))
    with pytest.raises(ValueError, match="batch 9 of pass 0 must be reassigned, but dataset 0 does not have it"):
        list(distributed(ArrayDataset(np.arange(12)).batch(4), lost))


def test_who_was_excluded_takes_its_own_batch_once_more():
    """Data that are a worker's own nobody else can take; while it is behind, it takes none."""
    worker = Worker()
    worker.leaves_out = True
    batches = iter(from_batches(ArrayDataset(np.arange(4)).batch(2), worker))
    assert rows(next(batches)) == [[0, 1]]
    worker.late = worker.behind = True
    assert rows(next(batches)) == [[]]
    worker.late = worker.behind = False
    assert (rows(next(batches)), worker.more) == ([[0, 1]], True)
    assert (rows(next(batches)), worker.more) == ([[2, 3]], False)
    worker.late = True
    assert rows(next(batches)) == [[2, 3]]
    worker.late = False
    assert next(batches, None) is None


@pytest.mark.parametrize("in_use", [False, True])
def test_who_joins_is_as_the_others_are(in_use):
    """What was restored goes along as such: all begin anew, or go on, by their loops, which are the same. A dataset in
    use stays where it is: its loop goes on, and asks for nothing."""
    position = Position(0, 1, 2, (), 7)
    one, joins = Progress(1), Progress(1)
    if in_use:
        one.advance(0, 3, 4, True, frozenset(), source=7)
    one.restore((position,))
    joins.begin_at(one.positions)
    if in_use:
        assert joins.position(0) == Position(0, 3, 4, (), 7)
        return
    assert joins.position(0) is None
    for each in (one, joins):
        each.go_on(0, position)
        assert each.position(0) == position
    joins.begin_at(one.positions)
    assert joins.position(0) == position
