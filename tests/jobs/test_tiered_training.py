"""Training with a table that is larger than the memory it may take, as real processes."""

from __future__ import annotations

import os

import numpy as np
import pytest

import psclient as ps
from pstesting.in_process import InProcessCluster
from pstesting.processes import PS0, W0, ProcessCluster
from pstesting.script import gate, say
from tests.kit.internals import ServerOptions
from tests.kit.rig import eventually
from tests.kit.storage import disk
from tests.kit.telemetry import Page, metrics_url
from tests.kit.workers import PATIENT, in_threads

de = ps.dynamic_embedding
MEMORY = 16 << 20
"""The least that a server's process takes."""
ROWS, STEPS = 5000, 12
"""Rows of 4 KiB, as many again beside them; and steps that look some of them up."""


def train(strategy, worker):
    """Steps of a table, its rows looked up ahead, with a checkpoint, a delta, a restore; returns what it comes to."""
    with strategy.scope():
        options = {"admission": de.CounterFilter(2), "eviction": de.GlobalStepEvict(9)}
        users = de.get_variable("users", dim=128, **options)
        optimizer = ps.optimizers.Adam(0.01)
        optimizer.build([users])
    manager = ps.train.CheckpointManager(ps.train.Checkpoint(users=users, optimizer=optimizer), "tier", 3, full_every=5)
    rng = np.random.default_rng(worker)

    def step(keys, after):
        rows = users.lookup(keys)
        users.look_ahead(after)
        optimizer.apply_gradients([(rows.gradient(np.sin(rows.values)), users)])

    after = rng.integers(0, 2500, 300)
    for number in range(8):
        keys, after = after, rng.integers(0, 2500, 300)
        strategy.run(step, args=(keys, after))
        if number in (3, 5):
            saved = manager.save()
            manager.sync()
    ps.train.Checkpoint(users=users, optimizer=optimizer).restore(saved)
    for _ in range(2):
        strategy.run(step, args=(after, after))
    keys, values = users.export()
    return len(keys), keys.tobytes(), values.tobytes()


def test_a_table_beyond_its_memory_is_trained_bit_for_bit(tmp_path):
    """Two servers with a tier compute what they compute without; each keeps its bound, and its files have no names."""
    first, second = expected = in_threads(train, root=tmp_path / "memory")
    assert first == second
    assert first[0] > 800
    bound = 1 << 20
    with (
        disk() as directory,
        InProcessCluster(2, 2, tmp_path / "tier", PATIENT, tier_path=str(directory), tier_memory=bound) as cluster,
    ):
        assert in_threads(train, cluster=cluster) == expected
        status = cluster.cores[0].status()
        assert status.tier_memory == bound
        assert status.tier_bytes > bound
        eventually(lambda: cluster.cores[0].status().tier_resident <= bound)
        assert os.listdir(directory) == []


def compute(many, steps):
    """Fills a table; then steps of a dataset that names its keys, each with time to compute; says what it comes to."""
    import hashlib
    import time

    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        users = ps.dynamic_embedding.get_variable("users", dim=1024)
        optimizer = ps.optimizers.Adagrad(0.1)
        optimizer.build([users])

    def step(keys, seconds):
        rows = users.lookup(keys)
        time.sleep(seconds)  # computes
        optimizer.apply_gradients([(rows.gradient(np.sin(rows.values) + 1), users)])

    for batch in strategy.experimental_distribute_dataset(ps.ArrayDataset(np.arange(many)).batch(500)):
        strategy.run(step, args=(batch, 0))
    optimizer.iterations.numpy()  # waits for all of it
    say("hints", users.takes_hints)
    gate("filled")
    keys = np.random.default_rng(0).integers(0, many, (steps, 300))
    options = ps.InputOptions(lookups={users: lambda batch: batch})
    for batch in strategy.experimental_distribute_dataset(list(keys), options):
        strategy.run(step, args=(batch, 0.1))
    say("trained", strategy.extended.read_var(optimizer.iterations).tolist())
    gate("read")
    keys, values = users.export()
    say("digest", hashlib.sha256(keys.tobytes() + values.tobytes()).hexdigest())
    gate("end")


def computed(directory, tiered, **options):
    """What it comes to with these options of the server, and the pages of its tier, by outcome."""
    directory.mkdir()
    server = ServerOptions(checkpoint_root=str(directory / "checkpoints"), **options)
    keys = {"ps": 1, "workers": 1, "metrics_port": 0, "gates": ["filled", "read", "end"]}
    with ProcessCluster(compute, directory, (ROWS, STEPS), server=server, **keys) as job:
        assert job.hear(W0, "hints") == tiered
        url, filled = metrics_url(job, PS0), ROWS * 1024 * 4 * 2
        if tiered:
            job.until(lambda: Page.at(url)("server_tier_moved_bytes_total", direction="out") > 0.9 * (filled - MEMORY))
        pages = [Page.at(url)]
        job.open("filled")
        assert job.hear(W0, "trained") == STEPS + ROWS // 500
        pages.append(Page.at(url))
        job.open("read")
        digest = job.hear(W0, "digest")
        job.open("end")
        job.finish()
    before, after = ({o: page("server_tier_pages_total", outcome=o) for o in OUTCOMES} for page in pages)
    return digest, {outcome: after[outcome] - before[outcome] for outcome in OUTCOMES}


OUTCOMES = "hinted", "hit", "waited"


@pytest.mark.ci  # a server's process takes 16 MiB at least; test_hints shows the same with one
def test_rows_that_are_hinted_at_are_there_when_they_are_needed(tmp_path):
    """While a worker computes its server reads what the batch after the next one looks up: few pages are waited for.

    In memory there is nothing to read, no hint, and the same values.
    """
    expected, none = computed(tmp_path / "memory", tiered=False)
    with disk() as directory:
        found, pages = computed(tmp_path / "tier", True, tier_path=str(directory), tier_memory="16MiB")
    assert found == expected
    assert none == dict.fromkeys(OUTCOMES, 0)
    assert pages["hit"] > STEPS // 2 * 300
    assert pages["waited"] < pages["hit"] / 2  # of the first two batches all
