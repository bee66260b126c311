"""Datasets of a coordinator's workers: each has all of its own, wherever it was made, and the chief has no part."""

from __future__ import annotations

import numpy as np
import pytest

import psclient as ps
from tests.kit.strategies import refused
from tests.kit.workers import coordinated, here

EXAMPLES = list(range(24))


def of(size):
    return ps.ArrayDataset(np.array(EXAMPLES)).batch(size)


def own(context):
    mine = EXAMPLES[context.input_pipeline_id :: context.num_input_pipelines]
    return ps.ArrayDataset(np.array(mine)).batch(2)


def make(kind):
    """A dataset of one of the kinds."""
    strategy = ps.get_strategy()
    if kind == "function":
        return strategy.distribute_datasets_from_function(own)
    policy = {"off": ps.AutoShardPolicy.OFF, "dynamic": ps.AutoShardPolicy.DYNAMIC}.get(kind, ps.AutoShardPolicy.AUTO)
    options = ps.InputOptions(auto_shard_policy=policy)
    return strategy.experimental_distribute_dataset(of(12 if kind in ("large", "off") else 1), options)


KINDS = "large", "small", "off", "function"


def at_the_top():
    """What a script makes before it knows of a coordinator."""
    return {"data": {kind: make(kind) for kind in (*KINDS, "dynamic")}}


def maker_of(kind):
    """A function that makes a dataset of one of the kinds, and has its name."""

    def maker():
        return make(kind)

    maker.__name__ = kind
    return maker


def listed(batches):
    """The worker's number, and the batches of a pass."""
    return ps.get_strategy().task.index, [np.asarray(batch).ravel().tolist() for batch in batches]


def top(kind):
    return listed(here().data[kind])


MAKERS = own, *map(maker_of, KINDS)


@pytest.fixture(scope="module")
def job():
    """A coordinator with two workers, and one dataset of each kind at the top of the script."""
    with coordinated(at_the_top, *MAKERS, listed, top, workers=2) as job:
        yield job


def passes(job, fn, *args):
    """What each of the two workers got in a pass."""
    with job.holding() as _:
        first = job.run(fn, *args)
        found = dict([first])
    while len(found) < 2:
        found |= dict(job.coordinator.fetch([job.coordinator.schedule(fn, args) for _ in range(4)]))
    return found


def joined(batches):
    return [each for batch in batches for each in batch]


def right(kind, worker, batches):
    """Whether a worker got what it should: all of the data, or the part that its function makes."""
    if kind in ("function", "own"):
        return joined(batches) == EXAMPLES[worker::2]
    size = 1 if kind == "small" else 12
    return batches == [EXAMPLES[at : at + size] for at in range(0, 24, size)]


@pytest.mark.parametrize("maker", MAKERS, ids=lambda fn: fn.__name__)
def test_each_worker_has_all_that_its_function_makes(job, maker):
    """Also of a dataset that is distributed there, with batches that are smaller than the cluster; none is empty."""
    dataset, found = job.coordinator.create_per_worker_dataset(maker), {}
    while len(found) < 2:
        waits = [job.coordinator.schedule(listed, (iter(dataset),)) for _ in range(4)]
        found |= dict(job.coordinator.fetch(waits))
    assert all(right(maker.__name__, worker, batches) for worker, batches in found.items()), found


@pytest.mark.parametrize("kind", KINDS)
def test_a_dataset_of_the_top_of_the_script_has_no_part_for_the_chief(job, kind):
    """Each worker goes over all of it, or the part of its place among the workers; and so does the coordinator."""
    found = passes(job, top, kind)
    assert all(right(kind, worker, batches) for worker, batches in found.items()), found
    with job.strategy.scope():
        assert sorted(joined(listed(job.mine.data[kind])[1])) == EXAMPLES


def test_batches_that_are_handed_out_go_to_one_worker_each(job):
    """With AutoShardPolicy.DYNAMIC the workers share a pass, whoever asks next."""
    waits = [job.coordinator.schedule(top, ("dynamic",)) for _ in range(2)]
    found = [batch for _, batches in job.coordinator.fetch(waits) for batch in batches if batch]
    assert sorted(found) == [[each] for each in EXAMPLES]


def test_a_per_worker_dataset_tells_its_element_spec(job):
    """So does its iterator; the function is called for it on the coordinator."""
    for maker in MAKERS:
        dataset = job.coordinator.create_per_worker_dataset(maker)
        for each in (dataset, iter(dataset)):
            assert (each.element_spec.shape, each.element_spec.dtype) == ((None,), np.dtype(int))


def test_data_are_not_sent(job):
    """Datasets and iterators in place of a function, or as arguments, are refused; the error says what to give."""
    made, strategy = of(12), job.strategy
    with strategy.scope():
        given = made, make("large"), [1, 2], iter(made)
    create, schedule = job.coordinator.create_per_worker_dataset, job.coordinator.schedule
    for each in given:
        says = f"create_per_worker_dataset takes a function, not {type(each).__name__}: data are"
        refused(TypeError, says, lambda each=each: create(each))
        says = "let a function with @ps.coordinator.function return the dataset"
        refused(TypeError, says, lambda each=each: schedule(each))
    says = r"args of listed\[0\]\[0\] is .*create_per_worker_dataset"
    for each in (made, given[1], given[3]):
        refused(TypeError, says, lambda each=each: schedule(listed, (each,)))
    refused(TypeError, "takes a function, not int$", lambda: create(3))
    refused(TypeError, "'of' is not registered", lambda: create(of))
