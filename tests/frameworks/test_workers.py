"""One script, one to three workers and servers: what they compute together is what one process computes alone; also
where they go on from a checkpoint."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest

import psclient as ps
from pstesting.processes import W0, W1
from tests.kit.strategies import opened
from tests.kit.workers import in_threads

rng = np.random.default_rng(3)
X = rng.normal(size=(48, 5)).astype("f4")
Y = np.sin(X[:, :3])
EPOCHS = 3

frameworks = pytest.mark.parametrize("front_end", ["torch", "jax"], indirect=True)
"""For promises of which tests of NumPy are elsewhere."""


def near(found, expected, limit=1e-6):
    return all(np.abs(found[name] - own).max() <= limit * np.abs(own).max() for name, own in expected.items())


def same(found, expected):
    return all(found[name].tobytes() == own.tobytes() for name, own in expected.items())


RULES = {
    "descent": lambda: ps.optimizers.SGD(0.1, momentum=0.5),
    "a schedule": lambda: ps.optimizers.SGD(ps.optimizers.schedules.CosineDecay(0.1, 8)),
    "clipped": lambda: ps.optimizers.SGD(0.1, global_clipnorm=0.1),
}


@pytest.fixture(scope="module")
def alone(front_ends):
    """What one replica without servers makes of whole batches: a function of the rule, the data and the batch size."""

    def trained(rule, count, size):
        with opened("mirrored-1") as strategy:
            model = front_ends["numpy"](strategy, RULES[rule]())
            for _ in range(EPOCHS):
                for at in range(0, count, size):
                    model.step(X[at : min(at + size, count)], Y[at : min(at + size, count)])
            return model.values()

    return trained


@pytest.mark.parametrize(
    ("front_end", "rule", "reduction", "count", "size", "last"),
    [
        ("torch", "descent", "mean", 45, 16, [5, 5, 3]),
        ("jax", "descent", "mean", 45, 16, [5, 5, 3]),
        # In torch, who has no example computes a batch again, which counts nothing.
        ("torch", "clipped", "mean", 45, 22, [1, 8, 6]),
        ("jax", "clipped", "mean", 45, 22, [1, 0, 0]),
        ("numpy", "a schedule", "sum", 48, 16, [6, 6, 4]),
        ("torch", "a schedule", "sum", 48, 16, [6, 6, 4]),
        ("jax", "a schedule", "sum", 48, 16, [6, 6, 4]),
    ],
    indirect=["front_end"],
)
def test_parts_of_batches_count_by_their_examples(alone, front_end, rule, reduction, count, size, last):
    """Workers with parts of different sizes, or none, compute what one computes, and have the same bits: by means over
    their own examples, or by sums that a script has divided by the size of the whole batch. All begin as the first."""
    of = (size,) if reduction == "sum" else ()

    def work(strategy, worker):
        model, seen = front_end(strategy, RULES[rule](), worker, reduction=reduction), []
        batches = model.batches(ps.ArrayDataset((X[:count], Y[:count])).batch(size))
        for _ in batches.epochs(EPOCHS):
            for x, y in batches:
                seen.append(len(x))
                model.step(x, y, *of)
        return seen[-1], model.values()

    for workers in (1, 2, 3):
        found = in_threads(work, workers)
        assert near(found[0][1], alone(rule, count, size))
        assert all(same(own, found[0][1]) for _, own in found)
    assert [own for own, _ in found] == last


@pytest.mark.parametrize(
    ("front_end", "clipped"), [("numpy", None), ("torch", 0.5), ("jax", 0.5)], indirect=["front_end"]
)
def test_the_number_of_servers_changes_no_bit(front_end, clipped):
    """With `deterministic=True`, in any run, though three workers push in any order."""

    def work(strategy, worker):
        model = front_end(strategy, ps.optimizers.Adam(0.01, global_clipnorm=clipped))
        for at in range(0, 24, 3):
            model.step(X[at + worker :: 3], Y[at + worker :: 3], 48)
        return model.values()

    expected, *_ = in_threads(work, 3, 1, deterministic=True)
    assert all(same(found, expected) for n in (2, 3) for found in in_threads(work, 3, n, deterministic=True))


@pytest.mark.parametrize(
    ("front_end", "reduction", "transport"),
    [
        ("numpy", "sum", "shm"),
        ("torch", "sum", "tcp"),
        ("torch", "mean", "shm"),
        ("jax", "sum", "grpc"),
        ("jax", "mean", "tcp"),
    ],
    indirect=["front_end"],
)
def test_gradients_are_summed_or_averaged(front_end, reduction, transport):
    """Exactly, over any transport; without a loader all workers count alike."""

    def work(strategy, worker):
        model = front_end(strategy, ps.optimizers.SGD(1.0), worker, reduction=reduction)
        first, moved = model.values(), []
        for _ in range(3):
            model.step()
            moved.append(model.values())
        return first, moved

    for first, moved in in_threads(work, 2, transport=transport):
        for found in moved:
            first = {name: value - np.float32(2 if reduction == "sum" else 1) for name, value in first.items()}
            assert same(found, first)


def test_an_asynchronous_worker_waits_for_nobody(front_end):
    """Each of its steps is a round of its own gradient, whole; each has its part of every batch."""

    def work(strategy, worker):
        model, sizes = front_end(strategy, ps.optimizers.SGD(1.0)), []
        before = model.values()["b"][0]
        for x, _ in model.batches(ps.ArrayDataset((X[:45], Y[:45])).batch(16)):
            sizes.append(len(x))
            model.step()
        seen = [before, model.values()["b"][0]]
        for _ in range(0 if worker else 4):
            model.step()
            seen.append(model.values()["b"][0])
        assert all(later <= earlier - 1 for earlier, later in pairwise(seen))
        return sizes, seen[-1]

    (mine, one), (others, other) = in_threads(work, 2, consistency=ps.Async())
    assert (mine, others) == ([8, 8, 7], [8, 8, 6])
    assert min(one, other) == -10


@pytest.mark.parametrize("choice", ["skip", "raise"])
def test_a_step_that_is_not_finite_is_one_of_all(front_end, choice):
    """One worker's NaN: the step changes nothing anywhere, or ends the job of all."""

    def work(strategy, worker):
        model = front_end(strategy, ps.optimizers.SGD(1.0), reduction="sum")
        before = model.values()
        model.step(np.full((2, 5), np.nan if worker else 1, "f4"), Y[:2], 4)
        assert same(model.values(), before)
        model.step()
        return model.values()["b"].tolist()

    with pytest.raises(ps.errors.NonfiniteError) if choice == "raise" else nullcontext():
        assert in_threads(work, 2, consistency=ps.Sync(nonfinite=choice)) == [[-2.0] * 3] * 2


def test_a_step_waits_once(front_end):
    """In a loop that evaluates, looks at the parameters, and, where a step does not wait itself, reduces a loss."""

    def work(strategy, worker):
        model = front_end(strategy, ps.optimizers.Adam(0.01))
        model.step()
        model.values()
        before = strategy.blocking_waits
        for _ in range(20):
            model.step(X[worker::2], Y[worker::2], 48)
            if not model.waits:
                str(strategy.reduce("mean", np.float32(1), axis=None))
            model.values()
        return strategy.blocking_waits - before

    assert in_threads(work, 2) == [20, 20]


@frameworks
def test_large_parameters_may_be_in_shards(front_end):
    """A partitioner of the strategy cuts them, and no bit is another."""

    def work(strategy, worker):
        model = front_end(strategy, ps.optimizers.Adam(0.01))
        for _ in range(3):
            model.step(X, Y)
        return isinstance(model.variables()["w"], ps.ShardedVariable), model.values()

    partitioner = ps.experimental.partitioners.FixedShardsPartitioner(2)
    ((cut, found),) = in_threads(work, 1, variable_partitioner=partitioner)
    ((whole, expected),) = in_threads(work, 1)
    assert (cut, whole) == (True, False)
    assert same(found, expected)


@frameworks
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_parameters_keep_their_dtype(front_end, dtype):
    """Slots are at least float32: a step is that of the parameter in their precision, and then rounded, once."""
    made = np.dtype(getattr(ml_dtypes, dtype, dtype))
    wide = np.promote_types("f4", dtype).type if dtype != "bfloat16" else np.float32
    with front_end.doubled(dtype == "float64"), opened("embedded-1") as strategy:
        model = front_end(strategy, ps.optimizers.SGD(0.1, momentum=0.9), 1 / 3, made)
        values, velocity = model.values()["w"], wide(0)
        assert same({"w": values}, {"w": model.first["w"]})
        for _ in range(3):
            model.step()
            velocity = wide(0.9) * velocity - wide(0.1)
            values = (values.astype(wide) + velocity).astype(made)
            assert same(model.values(), {"w": values})


@frameworks
@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"w": np.zeros((5, 4), "f4")}, ["w' float32[5,3]", "w' float32[5,4]"]),
        ({"w": np.zeros((5, 3), "f2")}, ["w' float32[5,3]", "w' float16[5,3]"]),
        ({"v": np.zeros((5, 3), "f4")}, ["w' float32[5,3]", "v' float32[5,3]"]),
    ],
)
def test_workers_with_other_parameters_are_told(front_end, other, words):
    """By name, shape and dtype: whose they are, and where they were created."""

    def work(strategy, worker):
        try:
            front_end(strategy, ps.optimizers.SGD(1.0), params=other if worker else {"w": X[:5, :3]})
            strategy.backend.settle()
        except ps.errors.VariableMismatch as error:
            return str(error)
        return ""

    told = max(in_threads(work))
    assert [word for word in (*words, str(W0), str(W1), "conftest.py") if word not in told] == [], told


# ---- Checkpoints ----


@frameworks
@pytest.mark.parametrize(("workers", "servers"), [(2, 3), (1, 1)])
def test_a_job_goes_on_where_it_stood(tmp_path, front_end, workers, servers):
    """In the middle of an epoch, on other servers to the last bit; with another number of workers to 1e-6."""
    inputs = np.random.default_rng(7).normal(size=(60, 5)).astype("f4")
    data = inputs, inputs[:, :3] * inputs[:, 1:4]

    def trained(strategy, restores=False, stop=None):
        model = front_end(strategy, ps.optimizers.Adam(0.01, epsilon=1e-3))
        batches, checkpoint, count = model.batches(ps.ArrayDataset(data).shuffle(0).batch(12)), model.checkpoint(), 0
        if restores:
            checkpoint.restore("run").assert_existing_objects_matched()
        for _ in batches.epochs(EPOCHS):
            for x, y in batches:
                model.step(x, y)
                count += 1
                if count == stop:
                    checkpoint.save("run/ckpt")
                    checkpoint.sync()
                    return model.values()
        return model.values()

    expected = in_threads(lambda strategy, worker: trained(strategy), root=tmp_path)[0]
    in_threads(lambda strategy, worker: trained(strategy, stop=8), root=tmp_path)
    for found in in_threads(lambda strategy, worker: trained(strategy, restores=True), workers, servers, root=tmp_path):
        for name, own in expected.items():
            np.testing.assert_allclose(found[name], own, rtol=0 if workers == 2 else 1e-6, atol=0)
