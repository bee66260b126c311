"""A restore right after variables were created: servers need not know yet what lies on others."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import numpy as np
import pytest

import psclient as ps
from pstesting.in_process import InProcessCluster
from tests.kit.internals import Created
from tests.kit.rig import SOON


@pytest.mark.parametrize("kind", ["shards", "table"])
def test_each_server_restores_its_own_part(tmp_path, monkeypatch, kind):
    """Though the chief has not told it of the others, which partitioned variables and tables have."""
    rows, keys = np.arange(40, dtype="float32").reshape(20, 2) + 1, np.arange(20)
    partitioner = ps.experimental.partitioners.FixedShardsPartitioner(3)

    def made():
        if kind == "table":
            return ps.dynamic_embedding.get_variable("w", 2)
        return ps.Variable(np.zeros((20, 2), "float32"), name="w")

    with job(tmp_path, partitioner) as (strategy, _):
        with strategy.scope():
            w = made()
        w.scatter_update(ps.IndexedSlices(rows, keys))
        ps.train.Checkpoint(w=w).save("run/ckpt")
    with job(tmp_path, partitioner) as (strategy, cluster):
        with strategy.scope():
            ps.Variable(0.0, name="first").assign(1.0)
        asked = [hold_back(monkeypatch, core) for core in cluster.cores[1:]]
        with strategy.scope():
            w = made()
        assert sorted(v.handle.servers for v in w.variables) == [(0,), (1,), (2,)]
        ps.train.Checkpoint(w=w).restore("run").assert_consumed()
        assert all(event.is_set() for event in asked)
        assert np.asarray(w.lookup(keys)).tolist() == rows.tolist()


@contextmanager
def job(root, partitioner):
    with InProcessCluster(3, checkpoint_root=root) as cluster:
        resolver = cluster.resolver()
        with ps.ParameterServerStrategy(cluster_resolver=resolver, variable_partitioner=partitioner) as strategy:
            yield strategy, cluster


def hold_back(monkeypatch, core):
    """Keeps a server from being told of variables of others until it is asked to restore; returns the event."""
    asked, approve, restore = threading.Event(), core.approve, core.restore

    def late(token, index, entries):
        created = (entry.variable for entry in entries if isinstance(entry, Created))
        if any(core.machine.server not in variable.servers for variable in created):
            assert asked.wait(SOON)
        return approve(token, index, entries)

    def prepare(session, path, turn, order):
        try:
            return restore(session, path, turn, order)
        finally:
            asked.set()

    monkeypatch.setattr(core, "approve", late)
    monkeypatch.setattr(core, "restore", prepare)
    return asked
