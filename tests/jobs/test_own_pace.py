"""Workers of their own pace: asynchronous ones wait for nobody, with bounded staleness none is too far ahead.

Every push counts once, whoever dies.
"""

from __future__ import annotations

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

import psclient as ps
from pstesting.in_process import InProcessCluster
from pstesting.processes import MARGIN, PS0, PS1, QUICK, W0, W1, ProcessCluster
from pstesting.script import ME, add_all, gate, say
from tests.kit import references
from tests.kit.rig import SOON
from tests.kit.workers import PATIENT, in_threads, learn, meet, total

# ---- Asynchronous ----


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
        ProcessCluster(learn, tmp_path, (20, "ps.Async()", stops), **keys) as job,
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
        job.pause(W1)
        job.open("on")
        job.hear(W0, "done", 20)
        for server in (first, second):  # the chief tells the second, a moment after the first knows
            job.until(lambda server=server: [one.task for one in server.status().generation.members] == [W0])
        job.open("paused")
        job.resume(W1)
        assert job.exited(W1) == 1
        assert "this process was removed from the job" in job.errors(W1)
        job.open("end")
        assert job.hear(W0, "sums") == total(20, 10)
        assert "is complete without" not in job.errors(W0)
        assert job.exited(W0) == 0


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
        alone = replace(PATIENT, first_worker_timeout=0.5, no_workers_timeout=0.5)  # the other never comes
        first = pool.submit(in_threads, begin, 1, cluster=cluster, consistency=eval(one), timeouts=alone)
        meet(opened)
        words = f"{W1} runs with {other}, but {W0} with {one}; give every process of the job the same consist"
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


# ---- Rows: a row misses updates by the count that its table keeps of all ----

ROWS, WIDTH, STEPS = 12, 2, 12


def given(worker, number):
    """The rows that a worker gives in one of its steps, few of them."""
    rng = np.random.default_rng([worker, number])
    return rng.choice(ROWS, 2, replace=False), rng.normal(size=(2, WIDTH)).astype("float32")


def learn_rows(strategy, worker, kind, name, half, ended):
    """Steps of one table, each worker's in its own pace; returns as which of all of them each was applied, and rows."""
    with strategy.scope():
        if kind == "dynamic":
            table = ps.dynamic_embedding.get_variable("table", dim=2, initializer=1)
        else:
            table = ps.Variable(np.ones((ROWS, WIDTH), "float32"), name="table")
        count = ps.Variable(np.int64(0), trainable=False, name="count")
        optimizer = getattr(ps.optimizers, name)(0.1)

    def apply(s, slices):
        optimizer.apply_gradients([(slices, table)])
        return s.extended.update(count, lambda count: count.assign_add(1).value())

    def step(number):
        ids, values = given(worker, number)
        return int(ps.get_replica_context().merge_call(apply, args=(ps.IndexedSlices(values, ids),)))

    order = []
    for number in range(STEPS):
        if number == STEPS // 2:
            half.wait(SOON)
        order.append(int(strategy.run(step, (number,))))
    ended.wait(SOON)
    own = [table, *(slot for slot in optimizer._state.of(table).slots if slot.ndim)]
    assert int(optimizer.iterations) == STEPS * half.parties
    return order, [np.asarray(each.lookup(np.arange(ROWS)).numpy()) for each in own]


RULES = {"Adam": references.adam(0.1, 0.9, 0.999, 1e-7), "Nadam": references.nadam(0.1, 0.9, 0.999, 1e-7)}


@pytest.mark.parametrize(
    ("kind", "workers", "name"),
    [("static", 2, "Adam"), ("dynamic", 3, "Adam"), pytest.param("dynamic", 2, "Nadam", marks=pytest.mark.soak)],
)
def test_rows_have_the_steps_that_others_made(kind, workers, name):
    """Each row is what whole gradients make of it, in the order in which the table had the pushes of all workers."""
    meetings = threading.Barrier(workers), threading.Barrier(workers)
    found = in_threads(lambda *one: learn_rows(*one, kind, name, *meetings), workers, 1, consistency=ps.Async())
    applied = {place: (n, number) for n, (order, _) in enumerate(found) for number, place in enumerate(order)}
    assert sorted(applied) == list(range(1, STEPS * workers + 1))
    # Nobody has made all steps before another began: the first halves of all come first.
    assert {number < STEPS // 2 for place, (_, number) in applied.items() if place <= STEPS * workers // 2} == {True}
    w, slots = np.ones((ROWS, WIDTH)), {}
    for t in sorted(applied):
        ids, values = given(*applied[t])
        g = np.zeros((ROWS, WIDTH))
        g[ids] = values
        w = RULES[name](w, g, slots, t)
    for _, own in found:
        for one, other in zip(own, (w, slots["m"], slots["v"]), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


# ---- Bounded staleness ----


@pytest.mark.parametrize(
    ("k", "rounds"),
    [(2, 40), (0, 15), pytest.param(3, 3334, marks=pytest.mark.soak)],
)
def test_the_history_never_shows_a_greater_gap(k, rounds):
    """Of three workers one is slow, and each counts its pushes in an element of its own; with k = 0 all keep step.

    Nobody computes from what lacks a push of more than k rounds ago. The soak looks at 10,000 rounds.
    """
    ended = threading.Barrier(3)

    def push(strategy, worker):
        with strategy.scope():
            v = ps.Variable(np.zeros(3, "int64"), name="v")
        mine, worst, ahead = np.eye(3, dtype="int64")[worker], 0, 0

        def step():
            seen = v.numpy()
            add_all([(v, mine)])
            return seen

        while strategy.round < rounds:
            if worker == 2:
                time.sleep(0.005)
            number = strategy.round
            seen = strategy.run(step)
            worst = max(worst, number - int(seen.min()))
            ahead = max(ahead, int(seen.max()) - int(seen.min()))
        ended.wait()
        return worst, ahead, v.numpy().tolist()

    found = in_threads(push, 3, 1, consistency=ps.BoundedStaleness(k))
    for worst, ahead, sums in found:
        assert worst <= k
        assert ahead <= k + 1  # one push more is applied, and its answer held
        assert sums == [rounds] * 3
    assert found[0][0] == k  # the bound was met: it is no accident that nobody went further


def test_a_killed_straggler_releases_the_others_and_comes_back(tmp_path):
    """The others stand k rounds ahead of it, go on within its lease, and its next process begins where they are."""
    keys = {"ps": 2, "workers": 2, "chief": "driver", "gates": ["go0", "go1", "end"], "timeouts": QUICK}
    stops = [[1, 4, "go1"], [0, 15, "go0"]]
    with (
        ProcessCluster(learn, tmp_path, (25, "ps.BoundedStaleness(2)", stops), **keys) as job,
        job.server(PS0) as first,
    ):
        job.hear(W1, "at", 4)
        job.hear(W0, "did", 5)
        job.until(lambda: any(one.missing == (W1,) for one in first.status().waiting))
        assert job.said(W0, "did") == list(range(6))
        assert first.status().gap == 3  # one push more is applied, whose answer is held
        began = time.monotonic()
        job.kill(W1)
        job.hear(W0, "at", 15)
        assert time.monotonic() - began < 2 * QUICK.session_timeout + MARGIN
        job.open("go1")
        job.start(W1)
        # It begins where the other is, and gets two rounds ahead of it.
        job.hear(W1, "did", 16)
        assert job.said(W1, "did") == [*range(4), 15, 16]
        job.open("go0")
        job.hear(W0, "done", 25)
        job.hear(W1, "done", 25)
        job.open("end")
        for task in (W0, W1):
            assert job.hear(task, "sums") == total(25, 4 + 10)
        job.finish()


def test_workers_on_different_servers_keep_step():
    """A server that a worker's rounds do not touch is told of each: at once, and not with the next heartbeat."""
    ended = threading.Barrier(2)

    def push(strategy, worker):
        with strategy.scope():
            both = [ps.Variable(np.zeros(2), name=f"v{server}") for server in (0, 1)]
        for _ in range(10):
            strategy.run(lambda: add_all([(both[worker], np.ones(2))]))
        ended.wait()
        return [v.numpy().tolist() for v in both]

    rare = replace(
        PATIENT, heartbeat_interval=PATIENT.session_timeout / 3
    )  # a test that waits for heartbeats takes minutes
    options = {"consistency": ps.BoundedStaleness(0), "ps_strategy": "round_robin", "timeouts": rare}
    began = time.monotonic()
    assert in_threads(push, **options) == [[[10.0] * 2] * 2] * 2
    assert time.monotonic() - began < 2 * rare.heartbeat_interval


def test_who_has_no_data_left_is_not_waited_for():
    """It rests until its next round, which is one of those that the others are at."""
    ended, over = threading.Barrier(2), threading.Barrier(2)

    def push(strategy, worker):
        with strategy.scope():
            v = ps.Variable(np.zeros(()), name="v")
        mine = ps.ArrayDataset(np.ones((30, 4)[worker])).batch(1)
        for batch in strategy.distribute_datasets_from_function(lambda context: mine):
            strategy.run(lambda batch=batch: add_all([(v, batch.sum())]))
        assert strategy.round == (30, 4)[worker]
        ended.wait()
        strategy.run(lambda: add_all([(v, 100.0)]))
        over.wait()
        return strategy.round, float(v.numpy())

    (first, one), (second, other) = in_threads(push, servers=1, consistency=ps.BoundedStaleness(1))
    assert (first, one, other) == (31, 234.0, 234.0)
    assert second >= 30


@pytest.mark.soak
def test_who_hangs_is_excluded(tmp_path):
    """It holds the others up for as long as a round may take, and no longer."""
    timeouts = replace(QUICK, session_timeout=2.0, round_timeout=6.0)
    keys = {"workers": 2, "chief": "driver", "gates": ["go1", "end"], "timeouts": timeouts}
    with ProcessCluster(learn, tmp_path, (10, "ps.BoundedStaleness(1)", [[1, 1, "go1"]]), **keys) as job:
        job.hear(W0, "done", 10)
        job.open("go1")
        job.open("end")
        assert job.exited(W1) == 1
        assert "held up a round for longer than PS_ROUND_TIMEOUT" in job.errors(W1)
        assert job.exited(W0) == 0
