"""Rows of a table that a front end trains: what a step of them is, and when they come."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import psclient as ps
from pstesting.in_process import InProcessCluster
from tests.kit.strategies import opened
from tests.kit.workers import in_threads

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
    A dynamic table has its rows by any numbers of 64 bits, one of a group by those of 48.
    """
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
