"""Asynchronous workers: nobody waits, every push counts once, whoever dies."""

from __future__ import annotations

import re
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

import psclient as ps
from pstesting.in_process import InProcessCluster
from pstesting.processes import PS0, PS1, QUICK, W0, W1, ProcessCluster
from pstesting.script import ME, add_all, gate, say
from tests.kit.workers import PATIENT, in_threads, learn, meet, total

ASYNC = "ps.Async()"


def test_the_slow_do_not_hold_up_the_fast():
    """One does all its rounds while the other stands; at the end every push of both has been counted once."""
    ahead, ended = threading.Event(), threading.Barrier(2)

    def push(strategy, worker):
        assert strategy.num_replicas_in_sync == 1
        with strategy.scope():
            v, u = (ps.Variable(np.zeros(4), name=name) for name in "vu")
        for number in range(20):
            if (worker, number) == (1, 5):
                meet(ahead)
            mine = np.full(4, 1000.0**worker)
            strategy.run(lambda mine=mine: add_all([(v, mine), (u, mine)]))
            if worker == 0:
                assert (v.numpy() % 1000 == number + 1).all()
        ahead.set()
        ended.wait()
        return [v.numpy().tolist(), u.numpy().tolist()]

    assert in_threads(push, consistency=ps.Async()) == [total(20, 20)] * 2


def test_who_is_killed_goes_on_where_it_was_and_who_was_thought_dead_is_told(tmp_path):
    """The other does not notice; started again, a worker makes the rounds that it had left, and no other twice.

    Of a paused one what it sends after its lease has ended does not count; what was answered before does.
    """
    keys = {"ps": 2, "workers": 2, "chief": "driver", "gates": ["killed", "on", "paused", "end"], "timeouts": QUICK}
    stops = [[1, 7, "killed"], [0, 15, "on"], [1, 10, "paused"]]
    with (
        ProcessCluster(learn, tmp_path, (20, ASYNC, stops), **keys) as job,
        job.server(PS0) as first,
        job.server(PS1) as second,
    ):
        job.hear(W1, "at", 7)
        job.hear(W0, "at", 15)
        job.kill(W1)
        job.open("killed")  # it may come to the same stop again
        job.start(W1)
        job.hear(W1, "at", 10)
        assert job.said(W1, "did") == list(range(10))
        job.kill(W1, signal.SIGSTOP)
        job.open("on")
        job.hear(W0, "done", 20)
        for server in (first, second):  # the chief tells the second, a moment after the first knows
            job.until(lambda server=server: [one.task for one in server.status().epoch.members] == [W0])
        job.open("paused")
        job.kill(W1, signal.SIGCONT)
        assert job.exited(W1) == 1
        assert "this session was ended" in job.errors(W1)
        job.open("end")
        assert job.hear(W0, "sums") == total(20, 10)
        assert "is complete without" not in job.errors(W0)
        assert job.exited(W0) == 0


@pytest.mark.soak
def test_a_worker_dies_again_and_again(tmp_path):
    """What was answered counts once; of what was under way at a death each server counts all or nothing."""
    keys = {"ps": 2, "workers": 2, "chief": "driver", "gates": ["end"], "timeouts": QUICK}
    with ProcessCluster(learn, tmp_path, (600, ASYNC), **keys) as job:
        for round in (40, 200, 360):
            job.hear(W1, "did", round)
            job.kill(W1)
            job.start(W1)
        job.hear(W1, "done", 600)
        job.hear(W0, "done", 600)
        job.open("end")
        sums = job.hear(W0, "sums")
        job.finish()
        answered = job.said(W1, "did")
        assert len(set(answered)) == len(answered)
        for value, *others in sums:
            assert others == [value] * 3
            assert value % 1000 == 600
            assert len(answered) <= value // 1000 <= 600
        assert len(answered) >= 597


def learn_alone(rows, batch, stops):
    """Adds up all rows of a dataset that the workers share; says which it took."""
    strategy = ps.ParameterServerStrategy(consistency=ps.Async())
    with strategy.scope():
        v = ps.Variable(np.zeros(()), name="v")
    dataset = ps.ArrayDataset(np.arange(float(rows))).shuffle(3).batch(batch)
    for mine in strategy.experimental_distribute_dataset(dataset):
        if [ME, strategy.round] in stops:
            say("at", strategy.round)
            gate(f"go{ME}")
        strategy.run(lambda mine=mine: add_all([(v, mine.sum())]))
        say("took", mine)
    say("done", strategy.round)
    gate("end")
    say("sum", float(v.numpy()))


def test_every_example_counts_once(tmp_path):
    """Also where a worker dies with a batch in its hands: started again, it takes that batch first."""
    keys = {"workers": 2, "chief": "driver", "gates": ["go1", "end"], "timeouts": QUICK}
    with ProcessCluster(learn_alone, tmp_path, (60, 6, [[1, 3]]), **keys) as job:
        job.hear(W1, "at", 3)
        job.kill(W1)
        job.hear(W0, "done", 10)
        job.start(W1)
        job.open("go1")
        job.hear(W1, "done", 10)
        job.open("end")
        for task in (W0, W1):
            assert job.hear(task, "sum") == sum(range(60))
        taken = [row for task in (W0, W1) for rows in job.said(task, "took") for row in rows]
        assert sorted(taken) == list(range(60))
        job.finish()


def test_who_restores_late_undoes_nothing(tmp_path):
    """The first process says whether there was a checkpoint; what it has pushed since stays."""
    pushed, ended = threading.Event(), threading.Barrier(2)

    def push(strategy, worker):
        with strategy.scope():
            v = ps.Variable(np.zeros(()), name="v")
        checkpoint = ps.train.Checkpoint(v=v)
        if worker:
            meet(pushed)
        with pytest.raises(ps.errors.NoCheckpoint):
            checkpoint.restore("run")
        strategy.run(lambda: add_all([(v, 10.0**worker)]))
        assert float(v.numpy()) == [1.0, 11.0][worker]
        pushed.set()
        ended.wait()
        return float(v.numpy())

    assert in_threads(push, root=tmp_path, consistency=ps.Async()) == [11.0] * 2


@pytest.mark.parametrize(
    ("one", "other"), [("ps.Sync()", "ps.Async()"), ("ps.BoundedStaleness(2)", "ps.BoundedStaleness(3)")]
)
def test_all_processes_have_one_consistency(one, other):
    """Who has another is told so, with both tasks, and does not begin."""
    opened, told = threading.Event(), threading.Event()

    def begin(strategy, worker):
        opened.set()
        meet(told)

    with InProcessCluster(1, 2, timeouts=PATIENT) as cluster, ThreadPoolExecutor(1) as pool:
        alone = replace(PATIENT, first=0.5, alone=0.5)  # the other never comes
        first = pool.submit(in_threads, begin, 1, cluster=cluster, consistency=eval(one), timeouts=alone)
        meet(opened)
        words = f"{W1} runs with {other}, and {W0} with {one}; give every process of the job the same consist"
        with pytest.raises(ps.errors.ConfigError, match=re.escape(words)):
            ps.ParameterServerStrategy(cluster_resolver=cluster.resolver(1), consistency=eval(other), timeouts=PATIENT)
        told.set()
        first.result()


def test_local_replicas_make_a_push_together():
    """In one process: replicas are counted from 0, a mean is over theirs, and reads see what was pushed."""
    with ps.ParameterServerStrategy(["cpu:0", "cpu:1"], consistency=ps.Async()) as strategy:
        with strategy.scope():
            v = ps.Variable(np.zeros(2), name="v")

        def step():
            context = ps.get_replica_context()
            seen = v.numpy()
            add_all([(v, np.full(2, 1.0 + context.replica_id_in_sync_group))])
            return seen, v.numpy()

        assert strategy.num_replicas_in_sync == 2
        for turn in range(3):
            before, after = strategy.run(step)
            for seen in strategy.experimental_local_results(before):
                assert seen.tolist() == [3.0 * turn] * 2
            for seen in strategy.experimental_local_results(after):
                assert seen.tolist() == [3.0 * turn + 3.0] * 2
        ids = strategy.run(lambda: np.float64(ps.get_replica_context().replica_id_in_sync_group))
        assert float(strategy.reduce("mean", ids, None)) == 0.5
