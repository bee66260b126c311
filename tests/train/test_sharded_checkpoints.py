"""Checkpoints of partitioned variables: into any number of shards, on any number of servers."""

from __future__ import annotations

import threading
from contextlib import chdir

import numpy as np
import pytest

import psclient as ps
from pstesting.in_process import InProcessCluster
from pswire.checkpoint import safetensors_stream
from tests.kit.cases import once
from tests.kit.internals import ApproveRequest, Created, RestoreRequest, ShardOf, TensorSpec, open_saved
from tests.kit.rig import SOON
from tests.kit.strategies import patient

P = ps.experimental.partitioners
FIRST = np.random.default_rng(3).normal(size=(10, 2)).astype("float32")


class Job:
    """A table in some shards on some servers, and what trains it."""

    def __init__(self, root, shards, servers, make=ps.optimizers.Nadam):
        self.cluster = InProcessCluster(servers, checkpoint_root=root)
        self.shards, self.make = shards, make

    def __enter__(self):
        resolver = patient(self.cluster.__enter__()).resolver()
        partitioner = P.FixedShardsPartitioner(self.shards)
        self.strategy = ps.ParameterServerStrategy(cluster_resolver=resolver, variable_partitioner=partitioner)
        return self

    def __exit__(self, *rest):
        self.strategy.close()
        self.cluster.__exit__(*rest)

    def build(self):
        with self.strategy.scope():
            self.table = ps.Variable(FIRST, name="table")
            self.bias = ps.Variable(np.ones((), "float32"), name="bias")
            self.optimizer = self.make(0.1, use_ema=True)
            self.optimizer.build([self.table, self.bias])
        self.checkpoint = ps.train.Checkpoint(table=self.table, bias=self.bias, optimizer=self.optimizer)
        return self

    def train(self, steps=1):
        def step():
            self.optimizer.apply_gradients([(np.sin(self.table.numpy()), self.table), (np.float32(1), self.bias)])

        for _ in range(steps):
            self.strategy.run(step)

    def save(self, name):
        self.checkpoint.save(f"{name}/ckpt")
        self.checkpoint.sync()

    def bits(self):
        return {v.name: v.numpy().tobytes() for v in (self.table, self.bias, *self.optimizer.variables)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints of one and the same state by numbers of shards and servers, and the state."""
    root = tmp_path_factory.mktemp("sharded")
    bits = {}
    for shards, servers in ((1, 1), (3, 2), (5, 3)):
        with Job(root, shards, servers) as job:
            job.build().train(3)
            job.save(f"{shards} on {servers}")
            bits[shards] = job.bits()
    assert bits[1] == bits[3] == bits[5]  # training goes the same way, too
    return root, bits[1]


@once(now=[(3, 2), (5, 3), (10, 2), (1, 1), (2, 1)], source=["1 on 1", "3 on 2", "5 on 3"])
def test_any_number_of_shards_restores_it(saved, source, now):
    """On any number of servers, bit for bit, with all that the optimizer keeps; and training goes on."""
    (root, bits), (shards, servers) = saved, now
    with Job(root, shards, servers) as job:
        job.build()
        job.checkpoint.restore(source).assert_consumed()
        assert job.bits() == bits
        job.train()
        assert job.bits() != bits


@pytest.mark.parametrize("source", ["1 on 1", "3 on 2"])
def test_variables_that_are_created_later_begin_with_it(saved, source):
    """Each of its servers reads its own rows."""
    root, bits = saved
    with Job(root, 4, 2) as job:
        with job.strategy.scope():
            counter = ps.Variable(0.0, name="counter")
            status = ps.train.Checkpoint(counter=counter).restore(source)
        job.build()
        assert job.bits() == bits
        status.expect_partial()


def test_strategies_that_cut_nothing_restore_it(saved):
    """Those without servers; and what these save is restored into shards."""
    root, bits = saved
    with chdir(root), ps.MirroredStrategy() as strategy, strategy.scope():
        table = ps.Variable(FIRST * 0, name="table")
        ps.train.Checkpoint(table=table).restore("5 on 3").expect_partial()
        assert table.numpy().tobytes() == bits["table"]
        ps.train.Checkpoint(table=table).save("mirrored/ckpt")
    with Job(root, 3, 2) as job:
        job.build()
        job.checkpoint.restore("mirrored").expect_partial()
        assert job.table.numpy().tobytes() == bits["table"]


def test_only_the_rows_that_are_needed_are_read(saved, calls_of):
    """But for the first rows, whose reader checks the sum of all."""
    root, bits = saved
    taken = calls_of("_fill", safetensors_stream)

    def read(first, rows):
        found = open_saved(str(root / "1 on 1"))
        taken.clear()
        (array,) = found.read([("table", TensorSpec("float32", (rows, 2)))], shards=[ShardOf("table", first, 10)])
        assert array.tobytes() == bits["table"][8 * first : 8 * (first + rows)]
        return sum(len(data) for _, data in taken[2:])  # behind the header

    assert read(3, 4) == 4 * 8
    assert read(9, 1) == 8
    assert read(0, 2) == 10 * 8


def hold_back(monkeypatch, core):
    """Keeps a server from being told of variables of others until it is asked to restore; returns the event."""
    asked, call = threading.Event(), core.call

    def late(request):
        if isinstance(request, ApproveRequest):
            created = (entry.variable for entry in request.entries if isinstance(entry, Created))
            if any(core.machine.server not in variable.servers for variable in created):
                assert asked.wait(SOON)
        try:
            return call(request)
        finally:
            if isinstance(request, RestoreRequest):
                asked.set()

    monkeypatch.setattr(core, "call", late)
    return asked


@pytest.mark.parametrize("kind", ["shards", "table"])
def test_each_server_restores_its_own_part(tmp_path, monkeypatch, kind):
    """Though the chief has not told it of the others, which partitioned variables and tables have."""
    rows, keys = np.arange(40, dtype="float32").reshape(20, 2) + 1, np.arange(20)

    def made():
        if kind == "table":
            return ps.dynamic_embedding.get_variable("w", 2)
        return ps.Variable(np.zeros((20, 2), "float32"), name="w")

    with Job(tmp_path, 3, 3) as job, job.strategy.scope():
        w = made()
        w.scatter_update(ps.IndexedSlices(rows, keys))
        ps.train.Checkpoint(w=w).save("run/ckpt")
    with Job(tmp_path, 3, 3) as job, job.strategy.scope():
        ps.Variable(0.0, name="first").assign(1.0)
        asked = [hold_back(monkeypatch, core) for core in job.cluster.cores[1:]]
        w = made()
        assert sorted(v.handle.servers for v in w.variables) == [(0,), (1,), (2,)]
        ps.train.Checkpoint(w=w).restore("run").assert_consumed()
        assert all(event.is_set() for event in asked)
        assert np.asarray(w.lookup(keys)).tolist() == rows.tolist()
