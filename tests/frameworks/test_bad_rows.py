"""Ids and rows that cannot be: each front end raises before anything is lost, and the job goes on."""

from __future__ import annotations

import threading
import tracemalloc

import numpy as np
import pytest

import psclient as ps
from pstesting.in_process import InProcessCluster
from tests.kit.workers import PATIENT, in_threads, meet

SIZE, DIM = 50, 3
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
    that. The error names the table, and of NaN the worker.
    """

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
