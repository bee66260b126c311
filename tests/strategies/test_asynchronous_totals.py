"""Metrics and ON_READ variables of asynchronous workers: everybody reads what all have made."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import psclient as ps
from pstesting.in_process import InProcessCluster
from pstesting.script import add_all
from tests.kit.strategies import opened
from tests.kit.workers import PATIENT, in_threads

AGGREGATION = ps.VariableAggregation
MODES = {"async": ps.Async(), "bounded": ps.BoundedStaleness(1)}
MODE = pytest.mark.parametrize("mode", MODES)


def on_read(name, aggregation, value=0.0):
    return ps.Variable(value, name=name, synchronization=ps.VariableSynchronization.ON_READ, aggregation=aggregation)


class Made:
    """What each worker creates, and how its replicas fill it.

    A copy of a worker that comes late begins with the mean that the others have made, so all meet `others` before.
    """

    def __init__(self, strategy, others=None):
        self.strategy = strategy
        with strategy.scope():
            self.v = ps.Variable(np.zeros(2), name="v")
            self.mean, self.precision = ps.metrics.Mean("mean"), ps.metrics.Precision(name="precision")
            self.total = on_read("total", AGGREGATION.SUM)
            self.count = on_read("count", AGGREGATION.SUM, np.int64(0))
            self.average = on_read("average", AGGREGATION.MEAN)
        if others is not None:
            self.meet(others)

    def step(self, x):
        """A step of training that fills all."""

        def replica():
            add_all([(self.v, np.ones(2))])
            self.mean.update_state(np.float32(x))
            self.precision.update_state([1, 0], [1, x > 10])
            self.total.assign_add(x)
            self.count.assign_add(1)
            self.average.assign(x)

        self.strategy.run(replica)

    def meet(self, others):
        """Waits until servers have what this worker has made, and for the others."""
        self.read()
        others.wait()

    def read(self):
        precision = self.precision.result()
        return self.mean.result(), precision, float(self.total.numpy()), int(self.count), float(self.average.numpy())


def own(made):
    """What the first replica has in its own copies."""
    strategy = made.strategy
    found = strategy.run(lambda: np.stack([v.numpy() for v in (made.total, made.average)]).astype(float))
    return strategy.experimental_local_results(found)[0].tolist()


@MODE
@pytest.mark.parametrize("replicas", [1, 2])
def test_all_read_what_all_have_made(mode, replicas):
    """A sum is of the copies of all replicas of all workers, a mean is their mean, and a replica reads its own copy.

    It costs no step: workers count the rounds of training alone, by which bounded staleness goes, too.
    """
    both = threading.Barrier(2)

    def work(strategy, worker):
        made = Made(strategy, both)
        for x in (1.0, 2.0, 3.0):
            made.step(x + 20 * worker)
        assert strategy.round == 3
        made.meet(both)
        found = made.read(), own(made)
        made.meet(both)
        return found

    sums = replicas * (6.0 + 66.0)
    expected = sums / 6 / replicas, 6 / 9, sums, 6 * replicas, (3.0 + 23.0) / 2
    devices = [f"cpu:{index}" for index in range(replicas)]
    first, second = in_threads(work, consistency=MODES[mode], devices=devices)
    assert first == (pytest.approx(expected), [6.0, 3.0])
    assert second == (pytest.approx(expected), [66.0, 23.0])


@MODE
def test_what_a_worker_has_made_stays_when_it_leaves(mode):
    """Also what it made in its last step, and in a run that an error ended."""
    both, left = threading.Barrier(2), threading.Event()

    def work(strategy, worker):
        made = Made(strategy, both)
        made.step(1.0 + worker)
        if worker:
            made.step(5.0)
            with pytest.raises(ZeroDivisionError):
                strategy.run(lambda: 1 / int(made.count.assign_add(10).numpy() - made.count.numpy()))
            strategy.close()
            left.set()
            return None
        assert left.wait(PATIENT.round_timeout)
        made.step(4.0)
        return made.read()

    found, _ = in_threads(work, consistency=MODES[mode])
    assert found == pytest.approx((3.0, 1.0, 12.0, 14, 4.5))


def test_totals_stay_where_the_consistency_changes():
    """From rounds of all to asynchronous ones, to bounded staleness, and back; also what one has assigned for all."""
    both = threading.Barrier(2)

    def work(strategy, worker):
        made, found = Made(strategy), []
        for consistency in (ps.Sync(), ps.Async(), ps.BoundedStaleness(0), ps.Sync(), ps.Async()):
            strategy.set_consistency(consistency)
            found.append(made.read())
            made.meet(both)  # a worker alone would be faster than the read of the other
            made.step(1.0 + 2 * worker)
            made.meet(both)
            if isinstance(consistency, ps.BoundedStaleness) and worker == 0:
                made.count.assign(1000)
            made.meet(both)
        found.append(made.read())
        made.meet(both)
        return found

    expected = [(0.0, 0.0, 0.0, 0, 0.0), *((2.0, 1.0, 4.0 * n, 2 * n + 994 * (n > 2), 2.0) for n in range(1, 6))]
    for found in in_threads(work):
        assert found == [pytest.approx(each) for each in expected]


def test_a_worker_that_comes_back_adds_to_what_there_is():
    """It begins with sums of its own that are empty, and with the mean of all; what it made before stays."""
    back = threading.Event()

    def work(strategy, worker):
        made = Made(strategy)
        made.step(2.0)
        if worker == 0:
            assert back.wait(PATIENT.round_timeout)
            return made.read()
        strategy.close()
        options = {"cluster_resolver": cluster.resolver(1), "consistency": ps.Async(), "timeouts": PATIENT}
        with ps.ParameterServerStrategy(**options) as again:
            made = Made(again)
            before, total = own(made), made.read()[2]
            made.step(5.0)
            made.read()  # servers have it
            back.set()
        return before, total

    with InProcessCluster(2, 2, timeouts=PATIENT) as cluster:
        found, (before, total) = in_threads(work, cluster=cluster, consistency=ps.Async())
    assert before == [0.0, total / 2]  # the other may not have made its step
    assert found == pytest.approx((3.0, 1.0, 9.0, 3, 2.0 + (5.0 - before[1]) / 2))


def test_a_thread_that_makes_no_rounds_reads_what_is_on_servers():
    """It waits for nothing, and hands in nothing that a replica is at work on: that is not lost."""
    with opened("async-2x1") as strategy, ThreadPoolExecutor(1) as pool:
        made = Made(strategy)
        made.step(1.0)

        def replica():
            made.total.assign_add(2.0)
            read = pool.submit(lambda: float(made.total.numpy())).result(PATIENT.round_timeout)
            made.total.assign_add(read + 1.0)

        strategy.run(replica)
        assert float(made.total.numpy()) == 1.0 + 2.0 + 1.0 + 1.0
