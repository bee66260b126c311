"""Metrics and ON_READ variables that scheduled functions fill: the coordinator reads, resets and saves those of all."""

from __future__ import annotations

import numpy as np
import pytest

import psclient as ps
from psclient.coordinator.worker import Worker
from tests.kit.workers import coordinated, here, hold

AGGREGATION = ps.VariableAggregation
LABELS, SCORES = np.array([0, 0, 1, 1]), np.array([0.0, 0.5, 0.3, 0.9], "float32")


def on_read(name, aggregation, value=0.0):
    return ps.Variable(value, name=name, synchronization=ps.VariableSynchronization.ON_READ, aggregation=aggregation)


def metrics():
    made = {"mean": ps.metrics.Mean("m"), "sum": ps.metrics.Sum("s"), "auc": ps.metrics.AUC(name="auc")}
    kept = {
        "total": on_read("total", AGGREGATION.SUM),
        "count": on_read("count", AGGREGATION.SUM, np.int64(0)),
        "average": on_read("average", AGGREGATION.MEAN, np.float32([1, 1])),
        "first": on_read("first", AGGREGATION.ONLY_FIRST_REPLICA),
    }
    return made | kept


def update(x):
    def step():
        here().mean.update_state(np.float32(x))
        here().sum.update_state([x, x])
        here().auc.update_state(LABELS, SCORES)
        here().total.assign_add(x)
        here().count.assign_add(1)

    ps.get_strategy().run(step)
    return ps.get_strategy().task.index


def fails_behind(x):
    update(x)
    raise LookupError(x)


def seen():
    """What a function reads across replicas, and what its replica has of its own."""
    strategy = ps.get_strategy()
    return here().mean.result(), here().total.numpy(), strategy.run(lambda: here().total.read_value())


def set_to(name, value):
    ps.get_strategy().run(lambda: getattr(here(), name).assign(value))


def set_and_wait(name, value):
    set_to(name, value)
    hold()


def move(rate):
    """A moving average, as of BatchNorm: towards 11."""
    v = here().average
    ps.get_strategy().run(lambda: v.assign_sub((v.read_value() - np.float32(11)) * np.float32(rate)))


def reset(where):
    if where == "in a function":
        here().mean.reset_state()
    else:
        ps.get_strategy().run(here().mean.reset_state)


FUNCTIONS = update, fails_behind, seen, set_to, set_and_wait, move, reset


@pytest.fixture(scope="module")
def opened():
    """A coordinator with two workers, and variables on two servers."""
    with coordinated(metrics, *FUNCTIONS, workers=2, servers=2) as job:
        yield job


@pytest.fixture
def job(opened):
    """The same, with metrics that are empty."""
    with opened.strategy.scope():
        for name in ("mean", "sum", "auc"):
            getattr(opened.mine, name).reset_state()
        for name in ("total", "count"):
            getattr(opened.mine, name).assign(0)
    return opened


def by_both(job, values):
    """Updates by both workers, one of which is busy for the first of them."""
    with job.holding():
        found = {job.run(update, values[0])}
    with job.holding():
        found |= {job.run(update, values[1])}
    waits = [job.coordinator.schedule(update, (x,)) for x in values[2:]]
    job.coordinator.join()
    return found | set(job.coordinator.fetch(waits))


def test_the_coordinator_reads_what_all_workers_have_added(job):
    """Of several metrics, of ON_READ sums of each dtype, in the scope or not; and so does a function on any worker."""
    values = [float(x) for x in range(1, 25)]
    while by_both(job, values) != {0, 1}:
        values += values
    mine, count = job.mine, len(values)
    assert (mine.mean.result(), mine.sum.result()) == (np.mean(values), 2 * sum(values))
    assert mine.auc.result() == pytest.approx(0.75)
    assert (float(mine.total.read_value()), int(mine.count.numpy())) == (sum(values), count)
    with job.strategy.scope():
        assert (float(mine.total), mine.count.numpy().dtype) == (sum(values), np.int64)
    assert job.run(seen) == (np.mean(values), sum(values), 0.0)  # a replica's own is of this function


def test_what_others_add_counts_too(job):
    """The coordinator's own replicas, which are replicas as all others; and as in TensorFlow a function that failed
    after it had added."""
    job.run(update, 1.0)
    with job.strategy.scope():
        job.strategy.run(lambda: job.mine.mean.update_state([4.0, 4.0]))
        job.strategy.run(lambda: job.mine.total.assign_add(2.0))
    assert (job.mine.mean.result(), float(job.mine.total.numpy())) == job.run(seen)[:2] == (3.0, 3.0)
    job.coordinator.schedule(fails_behind, (7.0,))
    with pytest.raises(ps.errors.ClosureError, match="LookupError"):
        job.coordinator.join()
    assert (job.mine.mean.result(), float(job.mine.total.numpy())) == (4.0, 10.0)


@pytest.mark.parametrize("where", ["on the coordinator", "in a function"])
def test_a_reset_is_of_all(job, where):
    """On the coordinator or across replicas in a function; what comes later counts from nothing."""
    by_both(job, [3.0] * 12)
    if where == "on the coordinator":
        job.mine.mean.reset_state()
    else:
        job.run(reset, where)
    assert job.mine.mean.result() == 0.0
    by_both(job, [1.0, 2.0, 3.0])
    assert job.mine.mean.result() == 2.0
    job.run(reset, "in replicas")  # which have added nothing in this function
    assert job.mine.mean.result() == 2.0


def test_there_is_one_mean_and_one_first_value(job):
    """A function begins with what the one before, or the coordinator, has left, on whichever worker; as TensorFlow."""
    average, first = job.mine.average, job.mine.first
    average.assign(np.float32([3, 3]))
    for expected in (7.0, 9.0, 10.0):
        with job.holding():  # now on this worker, now on that
            job.run(move, 0.5)
        assert average.numpy().tolist() == [expected] * 2
    average.assign_add(np.float32(1))
    job.run(set_to, "first", 4.0)
    assert (average.numpy().tolist(), float(first.numpy())) == ([11.0] * 2, 4.0)
    with job.holding(set_and_wait, "average", np.float32([7, 8])):
        job.run(set_to, "average", np.float32([9, 9]))
        assert average.numpy().tolist() == [9.0] * 2
    assert average.numpy().tolist() == [7.0, 8.0]  # of two at the same time the last one counts


def test_a_checkpoint_has_what_all_have_added(tmp_path):
    """The coordinator saves and restores totals; a later job goes on with them, asynchronous or in rounds of all."""
    with coordinated(metrics, *FUNCTIONS, workers=2, servers=2, root=tmp_path) as job:
        names = ("mean", "auc", "total", "count", "average")
        saved = ps.train.Checkpoint(**{name: getattr(job.mine, name) for name in names})
        by_both(job, [1.0, 2.0, 3.0, 4.0])
        job.run(move, 0.5)
        path = saved.save("run/ckpt")
        by_both(job, [100.0] * 4)
        saved.restore(path).assert_consumed()
        assert (job.mine.mean.result(), float(job.mine.total.numpy())) == (2.5, 10.0)
        by_both(job, [5.0, 5.0])
        assert (job.mine.mean.result(), float(job.mine.total.numpy()), int(job.mine.count)) == (20 / 6, 20.0, 6)
    with coordinated(metrics, *FUNCTIONS, root=tmp_path) as job:
        ps.train.Checkpoint(**{name: getattr(job.mine, name) for name in names}).restore(path).assert_consumed()
        assert job.mine.auc.result() == pytest.approx(0.75)
        assert (job.mine.mean.result(), job.mine.average.numpy().tolist()) == (2.5, [6.0] * 2)
        job.run(update, 2.5)
        job.run(move, 0.5)
        assert (job.mine.mean.result(), job.mine.average.numpy().tolist()) == (2.5, [8.5] * 2)
        assert (float(job.mine.total.numpy()), int(job.mine.count)) == (12.5, 5)


def test_what_a_lost_worker_has_handed_in_counts_once(monkeypatch):
    """Its function is run again by another worker, which finds what the first has handed in."""
    tell, lost = Worker._tell, []

    def dies(worker, taken, *said):
        if taken.function == "update" and not lost:
            lost.append(worker)
            raise ps.errors.RoundTimeout("it dies before it has told what came of the function")
        return tell(worker, taken, *said)

    monkeypatch.setattr(Worker, "_tell", dies)
    with coordinated(metrics, *FUNCTIONS, workers=2, servers=2) as job:
        job.run(update, 3.0)
        job.lose()
        assert len(lost) == 1
        job.run(update, 5.0)
        assert (job.mine.mean.result(), job.mine.sum.result(), int(job.mine.count)) == (4.0, 16.0, 2)
