"""Steps of partitioned variables: those of plain ones, bit for bit."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest

import psclient as ps
from pstesting.in_process import InProcessCluster
from tests.kit.strategies import in_replicas, replicas

O = ps.optimizers  # noqa: E741
T = ps.compat.v1.train
P = ps.experimental.partitioners
SHAPE, STEPS = (7, 3), 4

OPTIMIZERS = {
    "SGD": partial(O.SGD, 0.5),
    "SGD, momentum": partial(O.SGD, 0.5, momentum=0.5),
    "SGD, clipped by value": partial(O.SGD, 0.5, clipvalue=2.0),
    "SGD, scaled": partial(O.SGD, 0.5, loss_scale_factor=4.0),
    "SGD, accumulated": partial(O.SGD, 0.5, gradient_accumulation_steps=2),
    "SGD, averaged": partial(O.SGD, 0.5, use_ema=True, ema_overwrite_frequency=2),
    "SGD, decayed": partial(O.SGD, 0.5, weight_decay=0.1),
    "SGD, by a schedule": lambda: O.SGD(O.schedules.ExponentialDecay(0.5, 2, 0.5)),
    "Adagrad": partial(O.Adagrad, 0.5),
    "Adadelta": partial(O.Adadelta, 0.5),
    "RMSprop": partial(O.RMSprop, 0.5, momentum=0.5, centered=True),
    "Ftrl": partial(O.Ftrl, 0.5, l1_regularization_strength=0.1),
    "Adam": partial(O.Adam, 0.5),
    "Adam, lazy": partial(O.Adam, 0.5, sparse="lazy"),
    "Adam, dense": partial(O.Adam, 0.5, sparse="dense"),
    "Adam, AMSGrad": partial(O.Adam, 0.5, amsgrad=True),
    "Adam, dynamically scaled": lambda: O.Adam(0.5, loss_scale_factor=O.DynamicLossScale(4.0, 2)),
    "AdamW": partial(O.AdamW, 0.5),
    "Adamax": partial(O.Adamax, 0.5),
    "Nadam": partial(O.Nadam, 0.5),
    "Lion": partial(O.Lion, 0.5),
    "LazyAdam": partial(O.LazyAdam, 0.5),
    "RowwiseAdagrad": partial(O.RowwiseAdagrad, 0.5),
    "v1 SGD": partial(T.GradientDescentOptimizer, 0.5),
    "v1 momentum": partial(T.MomentumOptimizer, 0.5, 0.5),
    "v1 Adagrad": partial(T.AdagradOptimizer, 0.5),
    "v1 Adadelta": partial(T.AdadeltaOptimizer, 0.5),
    "v1 Adam": partial(T.AdamOptimizer, 0.5),
    "v1 Ftrl": partial(T.FtrlOptimizer, 0.5),
    "v1 RMSprop": partial(T.RMSPropOptimizer, 0.5, momentum=0.5, centered=True),
    "v1 proximal": partial(T.ProximalGradientDescentOptimizer, 0.5),
    "v1 proximal Adagrad": partial(T.ProximalAdagradOptimizer, 0.5),
}
"""Every optimizer but Lamb, and each thing that is done to gradients around it."""

BY_NORM = {
    "clipped by its norm": partial(O.SGD, 0.5, momentum=0.5, clipnorm=2.0),
    "clipped by its norm, accumulated": partial(O.SGD, 0.5, clipnorm=2.0, gradient_accumulation_steps=2),
    "clipped by its norm, scaled": lambda: O.SGD(0.5, clipnorm=2.0, loss_scale_factor=O.DynamicLossScale(4.0, 2)),
    "clipped by that of all": partial(O.SGD, 0.5, global_clipnorm=2.0),
}
"""Sums of shards' sums of squares are rounded otherwise than one sum."""


def few(shape, dtype):
    """Variables of seven rows are cut into three shards."""
    return [3 if shape[0] == SHAPE[0] else 1] + [1] * (len(shape) - 1)


@pytest.fixture(
    scope="module",
    params=[pytest.param((1, 1), marks=pytest.mark.soak), (2, 2), pytest.param((3, 1), marks=pytest.mark.soak)],
    ids=lambda n: f"{n[0]} servers, {n[1]} replicas",
)
def strategy(request):
    servers, local = request.param
    with (
        InProcessCluster(servers) as cluster,
        ps.ParameterServerStrategy(
            [f"cpu:{n}" for n in range(local)], cluster_resolver=cluster.resolver(), variable_partitioner=few
        ) as made,
    ):
        yield made


def rows(step, replica):
    """Rows of one replica in one step, of integers; some come twice."""
    rng = np.random.default_rng(10 * step + replica)
    count = 0 if (step, replica) == (1, 1) else 3
    ids = rng.integers(0, SHAPE[0], count)
    return ps.IndexedSlices(rng.integers(-3, 4, (count, SHAPE[1])).astype("float32"), ids)


def whole(step, replica):
    return np.random.default_rng(10 * step + replica).integers(-3, 4, SHAPE).astype("float32")


GRADIENTS = {"rows": rows, "whole": whole}


def trained(strategy, make, gradient, steps=STEPS):
    """Variables after some steps, and all that the optimizer keeps, by name."""
    start = np.random.default_rng(0).integers(1, 9, SHAPE).astype("float32")
    with strategy.scope():
        tables = [ps.Variable(start + n, name=f"table {n}") for n in range(2)]
        bias = ps.Variable(np.ones(2, "float32"), name="bias")
        optimizer = make()
    for step in range(steps):

        def replica_fn(replica, step=step):
            pairs = [(gradient(step + 5 * n, replica), v) for n, v in enumerate(tables)]
            optimizer.apply_gradients([*pairs, (np.full(2, replica + 1.0, "float32"), bias)])

        in_replicas(strategy, replica_fn)
    kept = optimizer.variables() if isinstance(optimizer, T.Optimizer) else optimizer.variables
    scratch = [v for v in kept if not v.name.endswith(("_staged", ".copy"))]
    return tables, [v.numpy() for v in (*tables, bias, *sorted(scratch, key=lambda v: len(v.shape)))], optimizer


@functools.cache
def locally(make, count, gradient):
    """What so many replicas of this process make of plain variables."""
    with ps.MirroredStrategy(devices=[f"cpu:{n}" for n in range(count)]) as strategy:
        return trained(strategy, make, gradient)[1]


# Optimizers of v1 make their steps as those of their names do.
AGAIN = [name for name in OPTIMIZERS if name.startswith("v1 ") and name != "v1 Adam" and "proximal" not in name]


@pytest.mark.parametrize("form", GRADIENTS)
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.soak] * (n in AGAIN)) for n in OPTIMIZERS])
def test_shards_make_the_steps_of_the_whole(strategy, name, form):
    """Bit for bit, on variables and all that the optimizer keeps; beside a plain variable."""
    tables, found, _ = trained(strategy, OPTIMIZERS[name], GRADIENTS[form])
    assert all(len(v.variables) == 3 for v in tables)
    expected = locally(OPTIMIZERS[name], replicas(strategy), GRADIENTS[form])
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("form", GRADIENTS)
@pytest.mark.parametrize("name", BY_NORM)
def test_norms_are_those_of_the_whole(strategy, name, form):
    """Not of a shard."""
    _, found, _ = trained(strategy, BY_NORM[name], GRADIENTS[form])
    expected = locally(BY_NORM[name], replicas(strategy), GRADIENTS[form])
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, 1e-6)


def test_what_needs_the_whole_is_refused(strategy):
    """Lamb's steps have lengths of whole variables; nothing is done."""
    with strategy.scope():
        table, optimizer = ps.Variable(np.ones(SHAPE, "float32")), O.Lamb(0.5)
    with pytest.raises(ValueError, match="Lamb needs all of a variable"):
        optimizer.apply_gradients([(np.ones(SHAPE), table)])
    np.testing.assert_array_equal(table, np.ones(SHAPE))


def test_slots_lie_beside_their_shards(strategy):
    """And have the names and shapes of a plain variable's."""
    (table, *_), _, optimizer = trained(strategy, partial(O.Nadam, 0.5), whole, steps=1)
    m, v, product = optimizer._state.of(table).slots
    for slot in (m, v):
        assert isinstance(slot, ps.ShardedVariable)
        assert [x.place for x in slot.variables] == [x.place for x in table.variables]
    assert [x.name.rpartition("/")[0] for x in (m, v, product)] == [f"nadam/{table.name}"] * 3
    assert product.shape == ()
    assert [x.place for x in product.variables] == [x.place for x in table.variables]
    assert len({float(x.numpy()) for x in product.variables}) == 1


def test_averages_are_of_the_whole(strategy):
    (table, *_), _, optimizer = trained(strategy, partial(O.SGD, 0.5, use_ema=True), whole)
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


def test_a_repeated_step_repeats(strategy, monkeypatch):
    """Its section is not recorded anew for each step."""
    with strategy.scope():
        table, optimizer = ps.Variable(np.ones(SHAPE, "float32")), O.Adam(0.5)
    recorded = []
    record = optimizer._driver.record
    monkeypatch.setattr(optimizer._driver, "record", lambda *args: recorded.append(1) or record(*args))
    for step in range(6):
        in_replicas(strategy, lambda replica, step=step: optimizer.apply_gradients([(whole(step, replica), table)]))
    assert len(recorded) <= 2
    for step in range(6):
        in_replicas(strategy, lambda replica, step=step: optimizer.apply_gradients([(rows(step, replica), table)]))
    assert len(recorded) <= 4


@pytest.mark.parametrize("form", GRADIENTS)
def test_workers_make_the_steps_of_one_process(form):
    """Two of them, with two replicas each, on two servers."""

    def train(cluster, index):
        devices = ["cpu:0", "cpu:1"]
        with ps.ParameterServerStrategy(
            devices, cluster_resolver=cluster.resolver(index), variable_partitioner=few
        ) as strategy:
            with strategy.scope():
                table = ps.Variable(np.ones(SHAPE, "float32"), name="table")
                optimizer = O.Adagrad(0.5)
            for step in range(STEPS):

                def replica_fn(step=step):
                    replica = ps.get_replica_context().replica_id_in_sync_group
                    optimizer.apply_gradients([(GRADIENTS[form](step, replica), table)])

                strategy.run(replica_fn)
            return table.numpy()

    with InProcessCluster(2, 2) as cluster, ThreadPoolExecutor(2) as pool:
        found = list(pool.map(partial(train, cluster), range(2)))
    with ps.MirroredStrategy(devices=[f"cpu:{n}" for n in range(4)]) as strategy:
        with strategy.scope():
            table, optimizer = ps.Variable(np.ones(SHAPE, "float32")), O.Adagrad(0.5)
        for step in range(STEPS):
            in_replicas(
                strategy,
                lambda replica, step=step: optimizer.apply_gradients([(GRADIENTS[form](step, replica), table)]),
            )
        for one in found:
            np.testing.assert_array_equal(one, table)


def test_asynchronous_workers_are_told_what_they_cannot_have():
    """A norm of shards on several servers; all else they have."""
    with (
        InProcessCluster(2) as cluster,
        ps.ParameterServerStrategy(
            cluster_resolver=cluster.resolver(), consistency=ps.Async(), variable_partitioner=few
        ) as strategy,
    ):
        with strategy.scope():
            table = ps.Variable(np.ones(SHAPE, "float32"))
            plain, clipping = O.Adam(0.5), O.SGD(0.5, clipnorm=1.0)
        with pytest.raises(ValueError, match="clipnorm needs all of the gradient"):
            clipping.apply_gradients([(np.ones(SHAPE), table)])
        strategy.run(lambda: plain.apply_gradients([(rows(0, 0), table)]))
        assert not np.array_equal(table.numpy(), np.ones(SHAPE))
