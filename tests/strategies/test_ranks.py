"""Ranks, the main process and barriers; and what a strategy or an optimizer is printed as."""

from __future__ import annotations

import re
import threading

import numpy as np
import pytest

import psclient as ps
from pstesting.in_process import InProcessCluster
from tests.kit.strategies import refused
from tests.kit.workers import PATIENT, in_threads

MODES = {"sync": ps.Sync(), "async": ps.Async(), "bounded": ps.BoundedStaleness(1)}


def test_a_process_without_others_has_rank_0(strategy):
    """It is the main one, and waits for nobody."""
    strategy.barrier()
    assert (strategy.rank, strategy.world_size, strategy.local_rank, strategy.is_main_process) == (0, 1, 0, True)


@pytest.mark.parametrize("mode", MODES)
def test_each_process_has_its_rank(mode):
    """In task order, however its workers make rounds."""

    def ranks(strategy, worker):
        return strategy.rank, strategy.world_size, strategy.is_main_process

    found = in_threads(ranks, 3, consistency=MODES[mode])
    assert found == [(0, 3, True), (1, 3, False), (2, 3, False)]


@pytest.mark.parametrize("mode", MODES)
def test_nobody_passes_a_barrier_before_all_have_come(mode):
    """Again and again; the consistency stays as it was."""
    inside, passed = threading.Event(), threading.Event()

    def meet(strategy, worker):
        with strategy.scope():
            v = ps.Variable(np.zeros(1), aggregation=ps.VariableAggregation.SUM)
        if worker:
            assert inside.wait(PATIENT.round_timeout)
            assert not passed.wait(0.3)
        inside.set()
        strategy.barrier()
        passed.set()
        strategy.run(lambda: v.assign_add([1.0]))
        strategy.barrier()
        return v.numpy().tolist(), strategy.consistency

    assert in_threads(meet, consistency=MODES[mode]) == [([2.0], MODES[mode])] * 2


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_who_joins_has_the_barriers_behind_it(mode):
    """The script of a worker that comes back passes them, and waits for nobody."""
    back = threading.Event()

    def work(strategy, worker):
        strategy.barrier()
        if worker == 0:
            assert back.wait(PATIENT.round_timeout)
            return strategy.rank
        strategy.close()
        options = {"cluster_resolver": cluster.resolver(1), "consistency": MODES[mode], "timeouts": PATIENT}
        with ps.ParameterServerStrategy(**options) as again:
            again.barrier()
            back.set()
            return again.rank

    with InProcessCluster(1, 2, timeouts=PATIENT) as cluster:
        assert in_threads(work, cluster=cluster, consistency=MODES[mode]) == [0, 1]


def test_a_barrier_is_between_steps():
    """Not in a replica's function; and asynchronous workers do not meet amid a pass."""

    def work(strategy, worker):
        refused(RuntimeError, "barrier", lambda: strategy.run(strategy.barrier))
        data = strategy.experimental_distribute_dataset([np.zeros((2, 1))] * 2)
        for _ in data:
            refused(RuntimeError, "during a pass over a dataset.*before or after the loop", strategy.barrier)
            break

    in_threads(work, 1, consistency=ps.Async())


def test_a_strategy_is_printed_with_its_place_and_sizes():
    """Its task, the cluster, consistency and devices; of an optimizer where its state is."""

    def work(strategy, worker):
        before = repr(strategy)
        with strategy.scope():
            v, optimizer = ps.Variable(np.zeros(3), name="v"), ps.optimizers.Adam(0.01)
            unbuilt = repr(optimizer)
            optimizer.build([v])
            return before, unbuilt, repr(optimizer)

    (strategy, unbuilt, optimizer), _ = in_threads(work)
    place = r"/job:worker/task:0 of 2 ps, 2 worker"
    assert re.fullmatch(rf"ParameterServerStrategy\({place}, Sync\(.*\), devices=\['cpu:0'\]\)", strategy), strategy
    assert unbuilt == "Adam(learning_rate=0.01, name='adam', not built)"
    assert re.fullmatch(r"Adam\(learning_rate=0.01, name='adam', \d+ variables on /job:ps/.*\)", optimizer), optimizer
    assert repr(ps.MirroredStrategy(["cpu:0", "cpu:1"])).startswith("MirroredStrategy(devices=[")
