"""Sync-on-read variables in checkpoints: the aggregate is saved, and shared out among the replicas of then."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import psclient as ps
from psclient.compat.contrib import DistributionStrategy
from tests.kit.strategies import in_replicas, opened

AGGREGATION = ps.VariableAggregation
ON_READ = ps.VariableSynchronization.ON_READ
KINDS = {aggregation.name.lower(): aggregation for aggregation in AGGREGATION}
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "complex64": np.complex64, "bool": np.bool_}
DTYPES |= {"float16": np.float16, "float64": np.float64}


@pytest.fixture(autouse=True, scope="module")
def _root(tmp_path_factory):
    """Servers of this process keep checkpoints below the directory in which they were started."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("checkpoints"))
        yield


@pytest.fixture(scope="module")
def four(_root):
    """A strategy of four replicas."""
    with opened("servers-1x4") as strategy:
        yield strategy


@pytest.fixture(scope="module")
def one(_root):
    """A strategy of one replica."""
    with opened("servers-1x1") as strategy:
        yield strategy


@pytest.fixture(scope="module")
def saved(_root):
    """The path of a checkpoint of variables of every aggregation and dtype, a plain one and a metric: of four replicas.

    Replica 0 has added 1 to each sum, replica 1 has added 2, and so on.
    """
    with opened("servers-1x4") as strategy:
        made = {name: create(strategy, name, aggregation) for name, aggregation in KINDS.items()}
        made["integers"] = create(strategy, "integers", AGGREGATION.SUM, np.int64(0))
        for v in made.values():
            count_up(strategy, v)
        for name, dtype in DTYPES.items():
            made[name] = v = create(strategy, name, *of_dtype(dtype))
            in_replicas(strategy, lambda _, v=v, dtype=dtype: v.assign(np.array([0, 1, 1], dtype)))
        with strategy.scope():
            made["plain"] = ps.Variable(8.0, name="plain")
            made["metric"] = metric = ps.metrics.Mean("loss")
        in_replicas(strategy, lambda replica: metric.update_state([[6.0], [1.0, 2.0], [], []][replica]))
        return tracking(strategy, made).save("run/ckpt")


def create(strategy, name, aggregation, value=0.0):
    with strategy.scope():
        return ps.Variable(value, name=name, synchronization=ON_READ, aggregation=aggregation)


def of_dtype(dtype):
    """How a variable of a dtype is aggregated, and what it begins with."""
    return AGGREGATION.ONLY_FIRST_REPLICA if dtype is np.bool_ else AGGREGATION.MEAN, np.zeros(3, dtype)


def of_replicas(strategy, v):
    return [np.asarray(x).tolist() for x in in_replicas(strategy, lambda _: v.read_value())]


def tracking(strategy, made=()):
    """A checkpoint of a variable or a dict of them."""
    with strategy.scope():
        return ps.train.Checkpoint(made=made)


def restored(strategy, path, name, made):
    """What a strategy has made, with what was saved by a name."""
    tracking(strategy, {name: made}).restore(path).assert_existing_objects_matched()
    return made


def count_up(strategy, v):
    """Replica 0 adds 1, replica 1 adds 2, and so on; returns the variable."""
    in_replicas(strategy, lambda replica: v.assign_add(np.asarray(replica + 1, v.dtype)))
    return v


@pytest.mark.parametrize("created", ["before the restore", "after the restore"])
def test_the_aggregate_is_shared_out_among_the_replicas_of_now(saved, created):
    """A sum in equal parts, a mean and a first replica's value whole; a variable without aggregation begins anew.

    A plain value is shared out as an aggregate.
    """
    with opened("servers-2x2") as strategy:
        if created == "after the restore":
            tracking(strategy).restore(saved)
        made = {name: create(strategy, name, aggregation, 50.0) for name, aggregation in KINDS.items()}
        made["plain"] = create(strategy, "plain", AGGREGATION.SUM)
        if created == "before the restore":
            tracking(strategy, made).restore(saved).assert_existing_objects_matched()
        expected = {"sum": [5.0] * 2, "mean": [2.5] * 2, "only_first_replica": [1.0] * 2, "none": [50.0] * 2}
        assert {name: of_replicas(strategy, v) for name, v in made.items()} == expected | {"plain": [4.0] * 2}
        assert [float(made[name]) for name in ("sum", "mean", "only_first_replica")] == [10.0, 2.5, 1.0]


def test_a_plain_value_is_a_mean_of_each_replica(four, saved):
    """What an ordinary variable has saved is each replica's value, whole."""
    v = restored(four, saved, "plain", create(four, "plain mean", AGGREGATION.MEAN))
    assert of_replicas(four, v) == [8.0] * 4


def test_integers_lose_nothing(four, saved):
    """A count of 10 over four replicas is 2 for each, and the first has what is left over; TensorFlow loses it."""
    v = restored(four, saved, "integers", create(four, "integers", AGGREGATION.SUM, np.int64(0)))
    assert of_replicas(four, v) == [4, 2, 2, 2]


def test_every_dtype_is_saved(four, saved):
    """Also those whose reductions are worked out in another one."""
    for name, dtype in DTYPES.items():
        v = restored(four, saved, name, create(four, name, *of_dtype(dtype)))
        assert v.numpy().dtype == dtype
        assert of_replicas(four, v) == [[0, 1, 1]] * 4


def test_copies_are_restored_into_a_plain_variable(one, saved):
    """It gets the aggregate."""
    with one.scope():
        v = ps.Variable(0.0, name="v")
    assert float(restored(one, saved, "sum", v)) == 10.0


def test_metrics_go_on_where_they_were(one, saved):
    """A mean over 3 values on several replicas goes on with a fourth on one."""
    with one.scope():
        mean = ps.metrics.Mean("loss")
    assert restored(one, saved, "metric", mean).result() == 3.0
    one.run(lambda: mean.update_state([7.0]))
    assert mean.result() == 4.0


def test_saving_changes_no_copy(four):
    """What was counted goes on to be counted where it was; the next checkpoint has it, saved in the scope or not."""
    v = create(four, "count", AGGREGATION.SUM)
    checkpoint = tracking(four, v)
    count_up(four, v)
    first = checkpoint.save("changes/ckpt")
    assert of_replicas(four, v) == [1.0, 2.0, 3.0, 4.0]
    count_up(four, v)
    with four.scope():
        second = checkpoint.save("changes/ckpt")
    for path, total in ((first, 10.0), (second, 20.0)):
        checkpoint.restore(path).assert_consumed()
        assert of_replicas(four, v) == [total / 4] * 4


@pytest.mark.parametrize("kind", ["servers-2x2", pytest.param("embedded-2", marks=pytest.mark.soak)])
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
        path = checkpoint.save("towers/ckpt")
        for v in made.values():
            v.assign(50.0)
        checkpoint.restore(path).assert_consumed()
        assert [float(distribution.fetch(v)) for v in made.values()] == [3.0, 1.5]
        assert [of_replicas(strategy, v) for v in made.values()] == [[1.5, 1.5], [1.5, 1.5]]
