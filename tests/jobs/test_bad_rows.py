"""Rows that cannot be: of two workers one gives them, and nothing of it is applied, on no server."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import psclient as ps
from pstesting.in_process import InProcessCluster

SIZE, WIDTH = 6, 2
BAD = {
    "an id too large": (np.ones((1, WIDTH), "float32"), [SIZE], "id 6 at place 0 is no row of 6"),
    "an id below 0": (np.ones((1, WIDTH), "float32"), [-1], "id -1 at place 0 is no row of 6"),
    "a row too wide": (np.ones((1, 3), "float32"), [1], r"each row has shape \(3,\), and must have \(2,\)"),
}
EMPTY = ps.IndexedSlices(np.empty((0, WIDTH), "float32"), [])


def in_workers(make, **options):
    """Runs `make(strategy, worker)` in two workers of a cluster of two servers; returns what each returns."""

    def work(cluster, index):
        with ps.ParameterServerStrategy(cluster_resolver=cluster.resolver(index), **options) as strategy:
            return make(strategy, index)

    with InProcessCluster(2, 2) as cluster, ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda index: work(cluster, index), range(2)))


def tables_of(strategy):
    """A variable, and a table without a size."""
    with strategy.scope():
        emb = ps.Variable(np.zeros((SIZE, WIDTH), "float32"), name="emb")
        users = ps.dynamic_embedding.get_variable("users", dim=WIDTH, initializer=0)
        return emb, users, ps.optimizers.SGD(1.0)


def rows(value=1.0, ids=(1, 1)):
    """Rows with an id twice."""
    return ps.IndexedSlices(np.full((len(ids), WIDTH), value, "float32"), list(ids))


@pytest.mark.parametrize("bad", BAD)
def test_the_worker_is_told_and_the_round_has_what_it_gives_then(bad):
    """The error names the variable and the worker; whoever gives right rows afterwards has missed nothing."""
    values, ids, words = BAD[bad]

    def make(strategy, worker):
        emb, users, optimizer = tables_of(strategy)

        def step(some):
            optimizer.apply_gradients([(rows(ids=[0]), users), (some, emb)])

        if worker == 1:
            with pytest.raises(ValueError, match=rf"'emb' on /job:worker/task:1.*{words}"):
                strategy.run(lambda: step(ps.IndexedSlices(values, ids)))
        strategy.run(lambda: step(rows()))
        return emb.numpy(), users.lookup([0]).numpy(), int(optimizer.iterations)

    for emb, users, count in in_workers(make):
        assert emb[1].tolist() == [-4.0, -4.0]
        assert not emb[[0, 2, 3, 4, 5]].any()
        assert users.tolist() == [[-2.0, -2.0]]
        assert count == 1


@pytest.mark.parametrize("which", ["emb", "users"])
def test_rows_that_are_nan_are_refused_for_all(which):
    """With nonfinite="raise": both workers are told whose rows they are, and no row, key or count changes."""

    def make(strategy, worker):
        emb, users, optimizer = tables_of(strategy)
        given = {"emb": rows(), "users": rows(ids=[7])}
        if worker == 1:
            given[which] = rows(np.nan, [3])
        with pytest.raises(ps.errors.NonfiniteError, match=r"/job:worker/task:1.*" + which):
            strategy.run(lambda: optimizer.apply_gradients([(given[v.name], v) for v in (emb, users)]))
        assert not emb.numpy().any()
        return users.size(), int(optimizer.iterations)

    assert in_workers(make, consistency=ps.Sync(nonfinite="raise")) == [(0, 0)] * 2


def test_empty_rows_are_fine():
    """As an empty list of ids is; repeated and unsorted ids count each time."""

    def make(strategy, worker):
        emb, users, optimizer = tables_of(strategy)
        some = EMPTY if worker else rows(ids=[5, 0, 5])
        strategy.run(lambda: optimizer.apply_gradients([(some, emb), (some, users)]))
        return emb.numpy()[:, 0].tolist(), users.lookup([0, 5]).numpy()[:, 0].tolist()

    assert in_workers(make) == [([-1.0, 0, 0, 0, 0, -2.0], [-1.0, -2.0])] * 2
