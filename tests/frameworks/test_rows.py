"""Rows of a table that a front end trains: what a step of them is, when they come, and which cannot be."""

from __future__ import annotations

import threading
import tracemalloc
from collections import Counter

import numpy as np
import pytest

import psclient as ps
from pstesting.in_process import InProcessCluster
from tests.kit.strategies import opened
from tests.kit.workers import PATIENT, in_threads, meet

SIZE, DIM = 50, 3
FIRST = np.arange(SIZE * DIM, dtype="f4").reshape(SIZE, DIM) / 100
IDS = np.random.default_rng(0).integers(0, SIZE, (40, 3))
RULES = {"adam": lambda: ps.optimizers.Adam(0.1), "adagrad": lambda: ps.optimizers.Adagrad(0.5)}


def whole(rule):
    """A table after steps with the dense gradients of all of it, in one replica without servers."""
    with opened("mirrored-1") as strategy:
        with strategy.scope():
            table, w = ps.Variable(FIRST, name="table"), ps.Variable(np.ones(DIM, "f4"), name="w")
            optimizer = RULES[rule]()
        for ids in IDS.reshape(5, 8, 3):
            rows, d_table = table.numpy()[ids], np.zeros_like(FIRST)
            d = rows * w.numpy() - 1  # twice that, of which two workers make the mean
            np.add.at(d_table, ids, d * w.numpy())
            pairs = [(d_table, table), ((d * rows).sum((0, 1)), w)]
            strategy.run(lambda pairs=pairs: optimizer.apply_gradients(pairs))
        return table.numpy()


@pytest.mark.parametrize(
    ("kind", "rule"),
    [("static", "adam"), ("sharded", "adagrad"), ("dynamic", "adam"), ("view", "adagrad")],
)
def test_a_step_of_rows_is_a_step_of_the_whole(rows_of, kind, rule):
    """Of two workers, and each kind of table, with dense parameters in the same round; repeated ids count together.
    A dynamic table has its rows by any numbers of 64 bits, one of a group by those of 48."""
    keys = np.arange(SIZE) * {"dynamic": 2**57, "view": 2**42}.get(kind, 1) - (2**62 if kind == "dynamic" else 0)

    def work(strategy, worker):
        with strategy.scope():
            if kind == "dynamic":
                table = ps.dynamic_embedding.get_variable("t", dim=DIM)
            elif kind == "view":
                table = ps.dynamic_embedding.group(["t", "u"], dim=DIM)["t"]
            else:
                table = ps.Variable(FIRST, name="table")
        if kind in ("dynamic", "view"):
            table.scatter_update(ps.IndexedSlices(FIRST, keys))
        model = rows_of(strategy, table, RULES[rule]())
        for ids in IDS.reshape(5, 8, 3):
            model.step(keys[ids[worker::2]])
        return table.lookup(keys).numpy()

    cut = {"variable_partitioner": ps.experimental.partitioners.FixedShardsPartitioner(2)} if kind == "sharded" else {}
    for found in in_threads(work, **cut):
        np.testing.assert_allclose(found, whole(rule), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("prefetch", "pulls"),
    [
        (lambda where: {where: lambda ids: ids}, [False] * 4),
        (lambda where: None, [True, False, False, False]),
        (lambda where: {}, [True] * 4),
    ],
    ids=["named", "found out", "none"],
)
def test_the_rows_of_the_next_batch_come_with_the_round(rows_of, prefetch, pulls):
    """A step waits once. Where a loader knows of lookups there is no pull behind its first batch, behind the second one
    where it finds them out; else each step has one."""
    calls = Counter()
    with InProcessCluster(2) as cluster:
        for core in cluster.cores:
            core.stimuli.record = lambda stimulus: calls.update([stimulus.name])
        with ps.ParameterServerStrategy(cluster_resolver=cluster.resolver()) as strategy:
            with strategy.scope():
                table = ps.Variable(FIRST, name="table")
            model, seen = rows_of(strategy, table, ps.optimizers.SGD(0.1)), []
            for ids in model.batches(ps.ArrayDataset(IDS).batch(8), prefetch):
                before = calls["pull"], strategy.blocking_waits
                model.step(ids)
                seen.append((calls["pull"] > before[0], strategy.blocking_waits - before[1]))
            assert seen[1:] == [(pulled, 1) for pulled in pulls]


# ---- Ids and rows that cannot be ----

GOOD = [[1, 2], [3, 1]]

FLOATS = (np.float32([1, 2]), TypeError, "the row ids of .* must be integers, not float32")
BOOLS = (np.array([True]), TypeError, "the row ids of .* must be integers, not bool")
ABOVE = np.array([1, 2**63], np.uint64)

BAD = {
    "static": [
        FLOATS,
        BOOLS,
        ([1, SIZE], ValueError, f"id {SIZE} at index 1 is not a row of {SIZE}"),
        ([-1], ValueError, f"id -1 at index 0 is not a row of {SIZE}"),
        (ABOVE, ValueError, f"id {2**63} at index 1 is not a row of {SIZE}"),
    ],
    "dynamic": [FLOATS, BOOLS, (ABOVE, ValueError, f"key {2**63} at position 1 is not a valid int64")],
    "view": [
        FLOATS,
        BOOLS,
        ([2**48], ValueError, rf"key {2**48} at position 0 is not from 0 to 2\*\*48 - 1"),
        ([1, -1], ValueError, r"key -1 at position 1 is not from 0 to 2\*\*48 - 1"),
        (ABOVE, ValueError, rf"key {2**63} at position 1 is not from 0 to 2\*\*48 - 1"),
    ],
}
"""For each kind of table ids that are none of it, the error, and its words."""


def create(kind, dim=DIM):
    if kind == "static":
        return ps.Variable(np.ones((SIZE, dim), "f4"), name="t")
    if kind == "dynamic":
        return ps.dynamic_embedding.get_variable("t", dim, initializer=1)
    return ps.dynamic_embedding.group(["t", "u"], dim, initializer=1)["t"]


@pytest.mark.parametrize("kind", BAD)
def test_bad_rows_lose_nothing(rows_of, kind):
    """Worker 1 has bad ids or NaN; it repeats the step with good ones, and the rows are those of a job without all
    that. The error names the table, and of NaN the worker."""

    def work(bad):
        def run(strategy, worker):
            with strategy.scope():
                table = create(kind)
            model = rows_of(strategy, table, ps.optimizers.Adagrad(0.5))
            for ids, error, words in BAD[kind]:
                if bad and worker:
                    with pytest.raises(error, match=words) as caught:
                        model.step(ids)
                    assert "'t'" in str(caught.value)
                model.step(GOOD[worker])
            if bad:
                with pytest.raises(ps.errors.NonfiniteError, match="/job:worker/task:1"):
                    model.step(GOOD[worker], np.nan if worker else 1.0)
            model.step(GOOD[worker])
            return table.lookup(np.arange(5)).numpy().tolist()

        return in_threads(run, consistency=ps.Sync(nonfinite="raise"))

    assert work(bad=True) == work(bad=False)


@pytest.mark.parametrize(("kind", "word"), [("static", "[50,{}]"), ("dynamic", "rows float32[{}]"), ("view", "[{}]")])
def test_a_table_has_one_dimension_in_all_workers(kind, word):
    """The worker that creates another one is told of both; started again it takes part, and nothing is lost."""
    created = threading.Event()

    def step(strategy):
        with strategy.scope():
            table = create(kind)
        created.set()
        ones = ps.IndexedSlices(np.ones((1, DIM), "f4"), [7])
        optimizer = ps.optimizers.SGD(1.0)
        strategy.run(lambda: optimizer.apply_gradients([(ones, table)]))
        return (table.lookup([7]).numpy() - table.lookup([8]).numpy()).tolist()

    with InProcessCluster(2, 2, timeouts=PATIENT) as cluster:

        def run(strategy, worker):
            if worker == 0:
                return step(strategy)
            meet(created)
            words = "Every process must create the same"
            with pytest.raises(ps.errors.VariableMismatch, match=words) as caught, strategy.scope():
                create(kind, DIM + 1)
            assert all(word.format(dim) in str(caught.value) for dim in (DIM, DIM + 1))
            strategy.close()
            with ps.ParameterServerStrategy(cluster_resolver=cluster.resolver(1), timeouts=PATIENT) as again:
                return step(again)

        _, late = in_threads(run, cluster=cluster)
        assert late == [[-2.0] * DIM]


@pytest.mark.parametrize("weighted", [False, True])
def test_a_batch_of_one_id_takes_no_memory_of_its_rows(weighted):
    """Ids are made unique first: many of one id in one bag take indices, and not a row each."""
    table, count = ps.Variable(np.ones((4, 256), "f4")), 1 << 17
    ids, weights = np.full((1, count), 3), np.full((1, count), 0.5, "f4") if weighted else None
    tracemalloc.start()
    try:
        bags = ps.nn.embedding_lookup_sparse(table, ids, weights, combiner="sum")
        assert np.asarray(bags)[0, 0] == count * (0.5 if weighted else 1)
        gradient = bags.gradient(np.ones((1, 256), "f4"))
        assert gradient.values.shape == (1, 256)
        assert tracemalloc.get_traced_memory()[1] < 0.25 * count * 4 * 256
    finally:
        tracemalloc.stop()
