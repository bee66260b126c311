"""Training with a table that is larger than the memory it may take, as real processes."""

from __future__ import annotations

import os

import numpy as np

import psclient as ps
from pstesting.processes import PS0, ProcessCluster
from pstesting.script import ME, gate, say
from pswire.cluster import Task
from pswire.server_options import ServerOptions
from tests.support.disks import disk
from tests.support.rig import eventually

MEMORY = 16 << 20


def train(steps):
    """Steps of a table, its rows looked up ahead, with a checkpoint, a delta, a restore; says what it comes to."""
    import hashlib

    de = ps.dynamic_embedding
    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        options = {"admission": de.CounterFilter(2), "eviction": de.GlobalStepEvict(9)}
        users = de.get_variable("users", dim=64, **options)
        optimizer = ps.optimizers.Adam(0.01)
        optimizer.build([users])
    manager = ps.train.CheckpointManager(ps.train.Checkpoint(users=users, optimizer=optimizer), "tier", 3, full_every=5)
    rng = np.random.default_rng(ME)

    def step(keys, after):
        rows = users.lookup(keys)
        users.look_ahead(after)
        optimizer.apply_gradients([(rows.gradient(np.sin(rows.values)), users)])

    after = rng.integers(0, 30_000, 8000)
    for number in range(steps):
        keys, after = after, rng.integers(0, 30_000, 8000)
        strategy.run(step, args=(keys, after))
        if number in (steps // 3, steps // 2):
            saved = manager.save()
            manager.sync()
    ps.train.Checkpoint(users=users, optimizer=optimizer).restore(saved)
    for _ in range(3):
        strategy.run(step, args=(after, after))
    keys, values = users.export()
    say("rows", len(keys))
    say("digest", hashlib.sha256(keys.tobytes() + values.tobytes()).hexdigest())
    gate("end")


def came_to(directory, look=lambda server: None, **options):
    """What training comes to with these options of the servers."""
    directory.mkdir()
    server = ServerOptions(checkpoint_root=str(directory / "checkpoints"), **options)
    with ProcessCluster(train, directory, (12,), workers=2, ps=2, server=server, gates=["end"]) as job:
        said = [[job.hear(Task("worker", n), what) for what in ("rows", "digest")] for n in range(2)]
        with job.server(PS0) as client:
            look(client)
        job.open("end")
        job.finish()
    assert said[0] == said[1]
    return said[0]


def test_a_table_beyond_its_memory_is_trained_bit_for_bit(tmp_path):
    """Two servers with a tier compute what they compute without; each keeps its bound, and its files have no names."""
    expected = came_to(tmp_path / "memory")

    def look(client):
        status = client.status()
        assert status.tier_memory == MEMORY
        assert status.tier_bytes > MEMORY
        eventually(lambda: client.status().tier_resident <= MEMORY)
        assert os.listdir(directory) == []

    with disk() as directory:
        found = came_to(tmp_path / "tier", look, tier_path=str(directory), tier_memory="16MiB")
        assert found == expected
        assert os.listdir(directory) == []
    assert expected[0] > 10_000
