"""Updates are put off in rows that a gradient does not have; whoever looks finds the bits of the whole update."""

from __future__ import annotations

import functools

import numpy as np
import pytest

import psclient as ps
from tests.strategies.test_rows_of_optimizers import OPTIMIZERS
from tests.support.strategies import in_replicas, merged, replicas, variable

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
