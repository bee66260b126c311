"""Updates are put off in rows that a gradient does not have; whoever looks finds the bits of the whole update."""

from __future__ import annotations

import functools

import numpy as np
import pytest

import psclient as ps
from pstesting.in_process import InProcessCluster
from tests.strategies.test_rows_of_optimizers import OPTIMIZERS
from tests.support.strategies import in_replicas, merged, opened, replicas, variable

O = ps.optimizers  # noqa: E741
SHAPE = (23, 5)
STEPS = 40

EXACT = [name for name in OPTIMIZERS if "norm" not in name and "by all" not in name]


@pytest.fixture(scope="module", params=["servers-2x2"])
def strategy(request, shared):
    return shared(request.param)


def gradient(step, replica):
    """Few rows, mostly the same ones, so that some are missed for long; in some steps none."""
    rng = np.random.default_rng(1000 * step + replica)
    ids = np.minimum(rng.geometric(0.25, rng.integers(0, 4)) - 1, SHAPE[0] - 1)
    return ps.IndexedSlices(rng.normal(size=(len(ids), SHAPE[1])).astype("float32"), ids)


def story(strategy, make, seed, whole=False):
    """All that is looked at while a table is trained, and other things are done to it.

    Args:
        strategy: where.
        make: makes the optimizer.
        seed: says what happens.
        whole: True to give gradients as whole arrays.
    """
    start = np.random.default_rng(0).normal(size=SHAPE).astype("float32")
    v, rng, seen = variable(strategy, start), np.random.default_rng(seed), []
    with strategy.scope():
        optimizer, other = make(), O.SGD(0.1, momentum=0.9)
    for step in range(STEPS):
        what = rng.choice(["nothing"] * 4 + ["read", "slot", "rows", "scatter", "assign", "other", "twice"])

        def replica_fn(replica, step=step, what=what):
            rows = gradient(step, replica)
            optimizer.apply_gradients([(np.asarray(rows.with_shape(SHAPE)) if whole else rows, v)])
            if what == "other":
                other.apply_gradients([(gradient(step, replica), v)])
            if what == "rows" and replica == 0:
                seen.append(np.asarray(v.sparse_read([3, 1, step % SHAPE[0], 3])))

        in_replicas(strategy, replica_fn)
        own = optimizer._state.of(v).slots
        if what == "read":
            seen.append(v.numpy())
        elif what == "slot" and own:
            seen.append(own[rng.integers(len(own))].numpy())
        elif what == "scatter":
            v.scatter_add(ps.IndexedSlices(np.ones((2, SHAPE[1]), "float32"), [step % 7, 20]))
        elif what == "assign":
            v.assign(v * 0.5)
        elif what == "twice":
            merged(strategy, lambda s, v=v: s.extended.update(v, lambda v: v.assign_add(v * v)))
    return [*seen, v.numpy(), *(slot.numpy() for slot in optimizer._state.of(v).slots)]


@functools.cache
def locally(name, count, seed):
    """The same where each gradient is a whole array, in this process."""
    with ps.MirroredStrategy(devices=[f"cpu:{n}" for n in range(count)]) as strategy:
        return story(strategy, OPTIMIZERS[name], seed, whole=True)


@pytest.mark.parametrize("name", EXACT)
def test_what_is_seen_has_the_bits_of_whole_updates(strategy, name):
    """Reads of tables and slots, of rows, other updates, assignments, another optimizer in between."""
    for seed in range(2):
        found = story(strategy, OPTIMIZERS[name], seed)
        expected = locally(name, replicas(strategy), seed)
        assert len(found) == len(expected)
        for place, (one, other) in enumerate(zip(found, expected, strict=True)):
            np.testing.assert_array_equal(one, other, err_msg=f"seed {seed}, look {place}")


# ---- Checkpoints ----


def job(strategy, sparse, path=""):
    """A table that is trained by Adam, from a checkpoint if there is one."""
    with strategy.scope():
        v = ps.Variable(np.random.default_rng(0).normal(size=SHAPE).astype("float32"), name="v")
        optimizer = O.Adam(0.1, sparse=sparse)
        optimizer.build([v])
    checkpoint = ps.train.Checkpoint(v=v, optimizer=optimizer)
    if path:
        checkpoint.restore(path).assert_consumed()

    def steps(first, stop):
        for step in range(first, stop):
            strategy.run(lambda step=step: optimizer.apply_gradients([(gradient(step, 0), v)]))
        return [x.numpy() for x in (v, *optimizer.variables)]

    return checkpoint, steps


@pytest.mark.parametrize(("before", "after"), [("servers-1x1", "servers-2x1"), ("servers-2x1", "default")])
def test_a_checkpoint_has_the_values_of_whole_updates(before, after, tmp_path, monkeypatch):
    """Rows that are behind are saved as they would be; the steps after the save change nothing of it."""
    monkeypatch.chdir(tmp_path)
    with opened(before) as strategy:
        checkpoint, steps = job(strategy, "exact")
        steps(0, 12)
        path = checkpoint.save("ckpt")
        expected = steps(12, 20)
    with opened(after) as strategy:
        _, steps = job(strategy, "dense", str(tmp_path / "runs" / path) if after == "default" else path)
        found = steps(12, 20)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


# ---- What the rounds of several servers and of one worker do with them ----


def test_a_skipped_round_changes_nothing_of_them(tmp_path):
    """Servers that vote run it on trial; what rows have missed is as if it had never been."""
    bad = 5

    def given(step):
        rows = gradient(step, 0)
        return rows if step != bad else ps.IndexedSlices(np.full((1, SHAPE[1]), np.nan, "float32"), [2])

    def train(strategy, skip):
        with strategy.scope():
            tables = [ps.Variable(np.ones(SHAPE, "float32"), name=f"table {n}") for n in range(2)]
            optimizer = O.Adam(0.1)
        for step in range(12):
            if not skip or step != bad:
                strategy.run(lambda step=step: optimizer.apply_gradients([(given(step), v) for v in tables]))
        slots = [slot for v in tables for slot in optimizer._state.of(v).slots]
        return [x.numpy() for x in (*tables, *slots)]

    with InProcessCluster(2, 1) as cluster:
        consistency = ps.Sync(nonfinite="skip")
        with ps.ParameterServerStrategy(cluster_resolver=cluster.resolver(0), consistency=consistency) as strategy:
            found = train(strategy, skip=False)
    with ps.MirroredStrategy(devices=["cpu:0"]) as strategy:
        expected = train(strategy, skip=True)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_an_asynchronous_worker_makes_up_by_applied_updates():
    """One alone makes the steps that it makes with others in step."""

    def train(strategy):
        with strategy.scope():
            v, optimizer = ps.Variable(np.ones(SHAPE, "float32"), name="v"), O.RMSprop(0.1, momentum=0.9)
        for step in range(15):
            strategy.run(lambda step=step: optimizer.apply_gradients([(gradient(step, 0), v)]))
        return [x.numpy() for x in (v, *optimizer._state.of(v).slots)]

    with InProcessCluster(1, 1) as cluster:
        resolver = cluster.resolver(0)
        with ps.ParameterServerStrategy(cluster_resolver=resolver, consistency=ps.Async()) as strategy:
            found = train(strategy)
    with ps.MirroredStrategy(devices=["cpu:0"]) as strategy:
        expected = train(strategy)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
