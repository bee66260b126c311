"""Steps of partitioned variables: slots, averages, decay, and what needs the whole."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import psclient as ps
from pstesting.in_process import InProcessCluster
from tests.kit.references import O
from tests.kit.strategies import cut, in_replicas, kinds, replicas

SHAPE, STEPS = (7, 3), 4

pytestmark = kinds("sharded-2x2", soak=["sharded-1x1", "sharded-3x1"])


def rows(step, replica):
    """Rows of one replica in one step, of integers; some come twice."""
    rng = np.random.default_rng(10 * step + replica)
    count = 0 if (step, replica) == (1, 1) else 3
    ids = rng.integers(0, SHAPE[0], count)
    return ps.IndexedSlices(rng.integers(-3, 4, (count, SHAPE[1])).astype("float32"), ids)


def whole(step, replica):
    return np.random.default_rng(10 * step + replica).integers(-3, 4, SHAPE).astype("float32")


def trained(strategy, make, gradient, steps=STEPS):
    """A variable after some steps, and its optimizer."""
    with strategy.scope():
        table, optimizer = ps.Variable(np.ones(SHAPE, "float32"), name="table"), make()
    for step in range(steps):
        in_replicas(strategy, lambda replica, s=step: optimizer.apply_gradients([(gradient(s, replica), table)]))
    return table, optimizer


def test_what_needs_the_whole_is_refused(strategy):
    """Lamb's steps have lengths of whole variables; nothing is done."""
    with strategy.scope():
        table, optimizer = ps.Variable(np.ones(SHAPE, "float32")), O.Lamb(0.5)
    with pytest.raises(ValueError, match="Lamb needs all of a variable"):
        optimizer.apply_gradients([(np.ones(SHAPE), table)])
    np.testing.assert_array_equal(table, np.ones(SHAPE))


def test_slots_lie_beside_their_shards(strategy):
    """And have the names and shapes of a plain variable's."""
    table, optimizer = trained(strategy, partial(O.Nadam, 0.5), whole, steps=1)
    m, v, product = optimizer._state.of(table).slots
    for slot in (m, v):
        assert isinstance(slot, ps.ShardedVariable)
        assert [x.place for x in slot.variables] == [x.place for x in table.variables]
    assert [x.name.rpartition("/")[0] for x in (m, v, product)] == [f"nadam/{table.name}"] * 3
    assert product.shape == ()
    assert [x.place for x in product.variables] == [x.place for x in table.variables]
    assert len({float(x.numpy()) for x in product.variables}) == 1


def test_averages_are_of_the_whole(strategy):
    table, optimizer = trained(strategy, partial(O.SGD, 0.5, use_ema=True), whole)
    assert isinstance(optimizer.average(table), ps.ShardedVariable)
    expected = optimizer.average(table).numpy()
    optimizer.finalize_variable_values([table])
    np.testing.assert_array_equal(table, expected)
    assert not np.array_equal(expected, np.zeros(SHAPE))


def test_decay_is_left_out_by_the_name_of_the_whole(strategy):
    with strategy.scope():
        tables = [ps.Variable(np.ones(SHAPE, "float32"), name=f"excluded {n}") for n in range(3)]
        optimizer = O.SGD(0.5, weight_decay=0.1)
    optimizer.exclude_from_weight_decay([tables[0]], [f"{tables[1].name}$"])
    optimizer.apply_gradients(
        [(np.zeros(SHAPE, "float32"), v) for v in tables]
        if replicas(strategy) == 1
        else [(strategy.run(lambda: np.zeros(SHAPE, "float32")), v) for v in tables]
    )
    assert [float(v[0, 0]) == 1 for v in tables] == [True, True, False]


def test_a_shard_may_be_trained_alone(strategy):
    """Gradients by the shards, as TensorFlow's optimizers take them; bit for bit the same."""
    count = replicas(strategy)
    with strategy.scope():
        one, other = (ps.Variable(np.ones(SHAPE, "float32")) for _ in range(2))
        optimizer = O.Adam(0.5)

    def step(replica):
        gradient = whole(0, replica)
        parts = [gradient[rows] for rows in other.sharding.bounds]
        optimizer.apply_gradients([(gradient, one), *zip(parts, other.variables, strict=True)])

    in_replicas(strategy, step)
    np.testing.assert_array_equal(one, other)
    assert count == replicas(strategy)


def test_a_repeated_step_repeats(strategy, calls_of):
    """Its section is not recorded anew for each step."""
    with strategy.scope():
        table, optimizer = ps.Variable(np.ones(SHAPE, "float32")), O.Adam(0.5)
    recorded = calls_of("record", optimizer._driver)
    for step in range(6):
        in_replicas(strategy, lambda replica, step=step: optimizer.apply_gradients([(whole(step, replica), table)]))
    assert len(recorded) <= 2
    for step in range(6):
        in_replicas(strategy, lambda replica, step=step: optimizer.apply_gradients([(rows(step, replica), table)]))
    assert len(recorded) <= 4


def test_asynchronous_workers_are_told_what_they_cannot_have():
    """A norm of shards on several servers; all else they have."""
    with (
        InProcessCluster(2) as cluster,
        ps.ParameterServerStrategy(
            cluster_resolver=cluster.resolver(), consistency=ps.Async(), variable_partitioner=cut
        ) as strategy,
    ):
        with strategy.scope():
            table = ps.Variable(np.ones(SHAPE, "float32"))
            plain, clipping = O.SGD(0.5), O.SGD(0.5, clipnorm=1.0)
        with pytest.raises(ValueError, match="clipnorm needs all of the gradient"):
            clipping.apply_gradients([(np.ones(SHAPE), table)])
        strategy.run(lambda: plain.apply_gradients([(rows(0, 0), table)]))
        assert not np.array_equal(table.numpy(), np.ones(SHAPE))
