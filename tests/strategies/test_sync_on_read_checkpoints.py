"""Sync-on-read variables in checkpoints: the aggregate is saved, and shared out among the replicas of then."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import psclient as ps
from psclient.compat.contrib import DistributionStrategy
from tests.kit.strategies import in_replicas, opened, replicas

AGGREGATION = ps.VariableAggregation
ON_READ = ps.VariableSynchronization.ON_READ


@pytest.fixture(autouse=True)
def _root(tmp_path, monkeypatch):
    """Servers of this process's own keep checkpoints below the directory in which they were started."""
    monkeypatch.chdir(tmp_path)


def create(strategy, name, aggregation, value=0.0):
    with strategy.scope():
        return ps.Variable(value, name=name, synchronization=ON_READ, aggregation=aggregation)


def of_replicas(strategy, v):
    return [np.asarray(x).tolist() for x in in_replicas(strategy, lambda _: v.read_value())]


def save(kind, fill):
    """What `fill(strategy)` has made, a variable or a dict of them, in a checkpoint; returns its path."""
    with opened(kind) as strategy:
        return tracking(strategy, fill(strategy)).save("run/ckpt")


def tracking(strategy, made=()):
    """A checkpoint of a variable or a dict of them."""
    with strategy.scope():
        return ps.train.Checkpoint(made=made)


def count_up(strategy, v):
    """Replica 0 adds 1, replica 1 adds 2, and so on; returns the variable."""
    in_replicas(strategy, lambda replica: v.assign_add(np.asarray(replica + 1, v.dtype)))
    return v


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("embedded-2", "embedded-4"),
        ("servers-2x2", "servers-2x2"),
        pytest.param("embedded-4", "embedded-1", marks=pytest.mark.soak),
    ],
)
@pytest.mark.parametrize("created", ["before the restore", "after the restore"])
def test_the_aggregate_is_shared_out_among_the_replicas_of_now(before, after, created):
    """A sum in equal parts, a mean and a first replica's value whole; a variable without aggregation begins anew."""
    kinds = {aggregation.name.lower(): aggregation for aggregation in AGGREGATION}

    def fill(strategy):
        made = {name: create(strategy, name, aggregation) for name, aggregation in kinds.items()}
        for v in made.values():
            count_up(strategy, v)
        return made

    path = save(before, fill)
    old = int(before[-1])
    with opened(after) as strategy:
        new = replicas(strategy)
        if created == "after the restore":
            tracking(strategy).restore(path)
        made = {name: create(strategy, name, aggregation, 50.0) for name, aggregation in kinds.items()}
        if created == "before the restore":
            tracking(strategy, made).restore(path).assert_consumed()
        total = old * (old + 1) / 2
        assert of_replicas(strategy, made["sum"]) == [total / new] * new
        assert of_replicas(strategy, made["mean"]) == [total / old] * new
        assert of_replicas(strategy, made["only_first_replica"]) == [1.0] * new
        assert of_replicas(strategy, made["none"]) == [50.0] * new
        assert [float(made[name]) for name in ("sum", "mean", "only_first_replica")] == [total, total / old, 1.0]


@pytest.mark.parametrize("kind", ["embedded-2", "servers-2x2"])
def test_tower_local_variables_are_saved_as_they_are_reduced(kind):
    """By the first names: a sum is divided among the towers of now, a mean is each one's; on one server and on two."""
    with opened(kind) as strategy:
        distribution, made = DistributionStrategy(strategy), {}
        with distribution.scope():
            for method in ("sum", "mean"):
                with distribution.tower_local_var_scope(method):
                    made[method] = ps.Variable(0.0, name=method)
        for v in made.values():
            count_up(strategy, v)
        checkpoint = tracking(strategy, made)
        path = checkpoint.save("run/ckpt")
        for v in made.values():
            v.assign(50.0)
        checkpoint.restore(path).assert_consumed()
        assert [float(distribution.fetch(v)) for v in made.values()] == [3.0, 1.5]
        assert [of_replicas(strategy, v) for v in made.values()] == [[1.5, 1.5], [1.5, 1.5]]


def test_saving_changes_no_copy():
    """What was counted goes on to be counted where it was; the next checkpoint has it, saved in the scope or not."""
    with opened("servers-1x2") as strategy:
        v = create(strategy, "count", AGGREGATION.SUM)
        checkpoint = tracking(strategy, v)
        count_up(strategy, v)
        first = checkpoint.save("run/ckpt")
        assert of_replicas(strategy, v) == [1.0, 2.0]
        count_up(strategy, v)
        with strategy.scope():
            second = checkpoint.save("run/ckpt")
        for path, total in ((first, 3.0), (second, 6.0)):
            checkpoint.restore(path).assert_consumed()
            assert of_replicas(strategy, v) == [total / 2] * 2


def test_integers_lose_nothing():
    """A count of 10 over four replicas is 2 for each, and the first has what is left over; TensorFlow loses it."""
    path = save("servers-1x4", lambda strategy: count_up(strategy, create(strategy, "n", AGGREGATION.SUM, np.int64(0))))
    with opened("servers-1x4") as strategy:
        v = create(strategy, "n", AGGREGATION.SUM, np.int64(0))
        tracking(strategy, v).restore(path).assert_consumed()
        assert of_replicas(strategy, v) == [4, 2, 2, 2]


@pytest.mark.parametrize(
    "dtype",
    [
        ml_dtypes.bfloat16,
        np.complex64,
        np.bool_,
        *(pytest.param(kind, marks=pytest.mark.soak) for kind in (np.float16, np.float64)),
    ],
)
def test_every_dtype_is_saved(dtype):
    """Also those whose reductions are worked out in another one."""
    how = AGGREGATION.ONLY_FIRST_REPLICA if dtype is np.bool_ else AGGREGATION.MEAN

    def fill(strategy):
        v = create(strategy, "v", how, np.zeros(3, dtype))
        in_replicas(strategy, lambda _: v.assign(np.array([0, 1, 1], dtype)))
        return v

    path = save("servers-1x2", fill)
    with opened("servers-1x2") as strategy:
        v = create(strategy, "v", how, np.zeros(3, dtype))
        tracking(strategy, v).restore(path).assert_consumed()
        assert v.numpy().dtype == dtype
        assert of_replicas(strategy, v) == [[0, 1, 1]] * 2


@pytest.mark.parametrize("created", ["before the restore", "after the restore"])
@pytest.mark.parametrize("aggregation", [AGGREGATION.SUM, pytest.param(AGGREGATION.MEAN, marks=pytest.mark.soak)])
def test_a_plain_value_is_restored_into_copies(aggregation, created):
    """What an ordinary variable of the same name saved is shared out as an aggregate."""

    def fill(strategy):
        with strategy.scope():
            return ps.Variable(8.0, name="v")

    path = save("servers-1x1", fill)
    with opened("servers-1x2") as strategy:
        if created == "after the restore":
            tracking(strategy).restore(path)
        v = create(strategy, "v", aggregation)
        if created == "before the restore":
            tracking(strategy, v).restore(path).assert_consumed()
        assert of_replicas(strategy, v) == [4.0 if aggregation is AGGREGATION.SUM else 8.0] * 2


def test_copies_are_restored_into_a_plain_variable():
    """It gets the aggregate."""
    path = save("servers-1x2", lambda strategy: count_up(strategy, create(strategy, "v", AGGREGATION.SUM)))
    with opened("servers-1x1") as strategy:
        with strategy.scope():
            v = ps.Variable(0.0, name="v")
        tracking(strategy, v).restore(path).assert_consumed()
        assert float(v) == 3.0


def test_metrics_go_on_where_they_were():
    """A mean over 3 values on two replicas goes on with a fourth on one."""

    def fill(strategy):
        with strategy.scope():
            mean = ps.metrics.Mean("loss")
        in_replicas(strategy, lambda replica: mean.update_state([1.0, 2.0] if replica else [6.0]))
        return mean

    path = save("servers-1x2", fill)
    with opened("servers-1x1") as strategy:
        with strategy.scope():
            mean = ps.metrics.Mean("loss")
        tracking(strategy, mean).restore(path).assert_consumed()
        assert mean.result() == 3.0
        strategy.run(lambda: mean.update_state([7.0]))
        assert mean.result() == 4.0
