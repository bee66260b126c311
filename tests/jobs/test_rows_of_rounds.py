"""Rows through whole clusters: sums of several processes, the rows of the next batch, and what it costs in calls."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import psclient as ps
from pstesting.in_process import InProcessCluster
from tests.kit.workers import in_threads

SHAPE = (50, 4)


def counting(cluster: InProcessCluster) -> Counter[str]:
    """How often the servers are asked for what."""
    counted: Counter[str] = Counter()
    for core in cluster.cores:
        core.stimuli.record = lambda stimulus: counted.update([stimulus.name])
    return counted


@pytest.mark.parametrize("lane", ["shm", "tcp", "grpc"])
def test_a_step_is_one_round_trip(environ, lane):
    """Lookup and push: the rows of a batch come with the round before, as they are after it."""
    environ["PS_LANE"] = lane
    users = np.arange(60) * 7 % 50
    data = ps.ArrayDataset({"user": users}).batch(10)
    with InProcessCluster(2) as cluster, ps.ParameterServerStrategy(cluster_resolver=cluster.resolver()) as strategy:
        with strategy.scope():
            table = ps.Variable(np.zeros(SHAPE, "float32"), name="users")
            optimizer = ps.optimizers.SGD(0.5)
        expected = np.zeros(SHAPE, "float32")
        counted = counting(cluster)

        def step(batch):
            rows = table.lookup(batch["user"])
            assert np.array_equal(rows.values, expected[rows.ids])
            optimizer.apply_gradients([(rows.gradient(np.ones_like(rows.values)), table)])
            expected[rows.ids] -= 0.5

        options = ps.InputOptions(lookups={table: lambda batch: batch["user"]})
        for number, batch in enumerate(strategy.experimental_distribute_dataset(data, options)):
            strategy.run(step, args=(batch,))
            if number == 2:
                counted.clear()
        assert counted["pull"] == 0
        assert np.array_equal(table.numpy(), expected)


def test_ids_that_are_no_rows_are_refused_by_servers_too():
    """A client that does not check them."""
    with InProcessCluster(1) as cluster, ps.ParameterServerStrategy(cluster_resolver=cluster.resolver()) as strategy:
        with strategy.scope():
            table = ps.Variable(np.zeros(SHAPE, "float32"), name="table")
        table.assign_add(np.ones(SHAPE))
        with pytest.raises(ps.errors.InvalidRequest, match="id 50 is no row of variable 'table'"):
            strategy.backend.reader.read_rows(table.handle, np.array([3, 50]))


@pytest.mark.parametrize("lane", ["shm", "grpc"])
def test_two_processes_add_up_repeated_rows(lane):
    """Exactly, and both see the same: each worker adds to some rows, some of which the other one has as well."""
    steps = 8

    def add_rows(strategy, worker):
        with strategy.scope():
            table = ps.Variable(np.zeros((50, 4), "float32"), name="table")
            optimizer = ps.optimizers.SGD(1.0)

        def step(number):
            ids = np.array([number, number + worker, number, 7])
            table.look_ahead(ids)
            optimizer.apply_gradients([(ps.IndexedSlices(np.full((4, 4), worker + 1, "float32"), ids), table)])
            rows = table.lookup(ids)
            assert rows.values.shape == (len(rows.ids), 4)

        for number in range(steps):
            strategy.run(step, args=(number,))
        return table.numpy().sum(axis=1).tolist()

    expected = np.zeros(50)
    for number, me in np.ndindex(steps, 2):
        for id in (number, number + me, number, 7):
            expected[id] -= 4 * (me + 1)
    assert in_threads(add_rows, servers=1, lane=lane) == [expected.tolist()] * 2
