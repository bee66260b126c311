"""An ON_READ sum is saved as one value, and shared out among the replicas of whoever restores it: nothing is lost."""

from __future__ import annotations

import numpy as np
import pytest

import psclient as ps
from pstesting.processes import W0, W1, ProcessCluster
from pstesting.script import ME, say
from tests.kit.strategies import in_replicas, opened

pytestmark = pytest.mark.usefixtures("in_tmp_path")

KINDS = pytest.mark.parametrize("kind", ["default", "mirrored-1", "mirrored-2", "mirrored-4", "embedded-4"])


def counter(strategy, dtype="int64"):
    with strategy.scope():
        return ps.Variable(
            np.zeros(2, dtype),
            name="count",
            synchronization=ps.VariableSynchronization.ON_READ,
            aggregation=ps.VariableAggregation.SUM,
        )


def another(strategy):
    with strategy.scope():
        return ps.Variable(0.0, name="other")


def of_first(strategy, count, value):
    """One replica has all of it."""
    in_replicas(strategy, lambda replica: count.assign(np.asarray(value) * (replica == 0)))


@KINDS
@pytest.mark.parametrize(
    ("dtype", "sums"),
    [
        ("int64", [7, -7]),
        *(pytest.param(*case, marks=pytest.mark.soak) for case in (("int8", [-128, 127]), ("uint8", [255, 3]))),
    ],
)
def test_an_integer_sum_is_whole_again(kind, dtype, sums):
    """Replica 0 has what its division by the number of replicas leaves over; also where it is created later."""
    sums = np.array(sums, dtype)
    with opened(kind) as strategy:
        count = counter(strategy, dtype)
        of_first(strategy, count, sums)
        checkpoint = ps.train.Checkpoint(count=count)
        path = checkpoint.save("run/ckpt")
        checkpoint.sync()
        of_first(strategy, count, np.zeros(2, dtype))
        checkpoint.restore(path).assert_consumed()
        assert count.numpy().tolist() == sums.tolist()
    if kind == "default":
        return
    with opened(kind) as strategy:
        ps.train.Checkpoint(other=another(strategy)).restore(path)
        assert counter(strategy, dtype).numpy().tolist() == sums.tolist()


def test_what_is_assigned_is_cut_off():
    """As in TensorFlow: that is no restore."""
    with opened("mirrored-2") as strategy:
        count = counter(strategy)
        count.assign(np.array([7, -7]))
        assert count.numpy().tolist() == [6, -6]


def restored():
    """Two workers with a replica each."""
    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        count = ps.Variable(
            0,
            name="count",
            synchronization=ps.VariableSynchronization.ON_READ,
            aggregation=ps.VariableAggregation.SUM,
        )
    checkpoint = ps.train.Checkpoint(count=count)
    strategy.run(lambda: count.assign(7 * ME))
    path = checkpoint.save("run/ckpt")
    strategy.run(lambda: count.assign(0))
    checkpoint.restore(path)
    (mine,) = strategy.experimental_local_results(count)
    say("mine", int(mine.numpy()))
    say("sum", int(count))


def test_of_several_processes_one_has_the_rest(tmp_path):
    """That with replica 0 of all."""
    with ProcessCluster(restored, tmp_path, workers=2) as job:
        job.finish()
    assert [job.said(task, "mine") for task in (W0, W1)] == [[4], [3]]
    assert [job.said(task, "sum") for task in (W0, W1)] == [[7], [7]]
