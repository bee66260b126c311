"""Servers that die while they write a delta: a new job restores the checkpoint before it, with all its tables."""

from __future__ import annotations

import json
from functools import partial

import numpy as np
import pytest

import psclient as ps
from tests.jobs.test_checkpoint_faults import files, processes, whole
from tests.kit.contributions import by_keys, create_part, keyed, part_of
from tests.kit.internals import BUCKETS, Contribution, Payload, TableSpec, buckets_of, hashes_of, joined, manifest_of
from tests.kit.rig import SOON, WORKERS, Job, checkpoint, serving, together
from tests.kit.workers import in_threads

SPEC = TableSpec((2,))


def job_on(servers):
    """A job with a table in as many parts as there are servers; and what trains it."""
    job, count = Job(servers), len(servers.verbs)
    (worker,) = job.join(WORKERS[0])
    ends = np.linspace(0, BUCKETS, count + 1).astype(int).tolist()
    parts = [
        create_part(job, worker, part_of(n, SPEC, n, range(ends[n], ends[n + 1]), name=f"users/part_{n}"))
        for n in range(count)
    ]
    plan = job.approve(by_keys(*parts), worker)

    def train(keys, value):
        owners = np.searchsorted(ends, buckets_of(hashes_of(np.array(keys), SPEC.salt)), "right") - 1
        mine = [np.array(keys)[owners == n].tolist() for n in range(count)]
        rows = tuple(map(len, mine))
        said = Contribution(worker.session, worker.epoch, worker.round, plan.id, (1.0,) * count, rows=rows)
        together(*(job.verbs[n].push(said, Payload.pack(keyed(mine[n], value))) for n in range(count)))
        worker.round += 1

    return job, worker, train


@pytest.mark.parametrize(("task", "point"), [(0, "naming the manifest"), (1, "in a shard")])
def test_a_server_that_dies_in_a_delta(tmp_path, task, point):
    """Nothing of the base is touched, and the next save cleans up."""
    root = str(tmp_path)
    with serving("core", 2, root) as servers:
        job, worker, train = job_on(servers)
        train(range(300), 1.0)
        train(range(100), 2.0)
        job.save(worker, "run/ckpt-1")
        expected = joined([core.machine.store.tables()[0].table.state() for core in servers.cores], range(BUCKETS))
    with processes(root, {task: point}) as (servers, started):
        job, worker, train = job_on(servers)
        job.restore(worker, "run")
        train(range(50, 400), 3.0)
        plan = job.approve(checkpoint("run/ckpt-2", (0, 1), json.dumps({"base": "ckpt-1"}), worker.round), worker)
        for server in (0, 1):
            worker.push(plan, server=server)
        if "manifest" in point:
            shards = [server.snapshot(job.token, plan.id, "").result(SOON) for server in job.verbs]
            assert [shard.tables[0].since for shard in shards] == [2, 2]
            job.verbs[0].snapshot(job.token, plan.id, manifest_of(shards, plan.snapshot).text())
        assert started[task].wait(SOON) == -9
        for server in servers.verbs:
            server.fail(ps.errors.ServerLost("a server is gone"))
    with serving("core", 1, root) as servers:
        job, worker, train = job_on(servers)
        assert job.restore(worker, "run").path == "run/ckpt-1"
        assert servers.cores[0].machine.store.tables()[0].table.state().equals(expected)
        job.save(worker, "run/ckpt-3")
    assert files(root) == whole(1) | whole(3, 1)


def train(strategy, worker, resume, stop):
    """Trains to a number of steps, and saves behind each, mostly deltas."""
    de = ps.dynamic_embedding
    with strategy.scope():
        table = de.get_variable("users", 2, admission=de.CounterFilter(2), eviction=de.GlobalStepEvict(5))
        optimizer = ps.optimizers.Adagrad(0.1)
        optimizer.build([table])
    checkpoint = ps.train.Checkpoint(table=table, optimizer=optimizer)
    manager = ps.train.CheckpointManager(
        checkpoint, "run", 1, step_counter=optimizer.iterations, delta_interval=1, full_every=4
    )
    if resume:
        manager.restore_or_initialize()
    data = strategy.experimental_distribute_dataset(ps.ArrayDataset(np.arange(120) ** 2 % 37).batch(12))

    def step(keys):
        rows = table.lookup(keys)
        optimizer.apply_gradients([(rows.gradient(np.cos(rows.values)), table)])

    for keys in data:
        if int(optimizer.iterations) == stop:
            break
        strategy.run(step, args=(keys,))
        manager.save()
        manager.sync()
    keys, rows = table.export()
    return keys.tolist(), rows.tobytes(), int(optimizer.iterations), len(manager.checkpoints)


@pytest.mark.ci
def test_a_job_goes_on_from_a_delta(tmp_path):
    """Two workers, one server more after six of nine steps; bit for bit as the job that was not stopped."""

    def trained(name, resume, stop, servers=2):
        make = partial(train, resume=resume, stop=stop)
        found, other = in_threads(make, servers=servers, root=tmp_path / name, deterministic=True)
        assert found == other
        return found

    expected = trained("whole", False, 9)
    (*_, steps, kept) = trained("cut", False, 6)
    assert (steps, kept) == (6, 2)  # a whole one after four, and a delta
    assert trained("cut", True, 9, servers=3) == expected
