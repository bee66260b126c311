"""Rounds are sent without a wait, and only a look waits: the rules of the window."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

import psclient as ps
from pstesting.processes import W0, W1, ProcessCluster
from pstesting.script import ME, add, gate, say
from tests.kit.internals import WINDOW
from tests.kit.rig import SOON
from tests.kit.workers import in_threads, meet

STEPS = 4
"""Steps of a loop that count, after as many in which plans are new."""


def loops(steps):
    """Loops as users write them, each over the same data; says of each its waits and rounds per step."""
    strategy = ps.ParameterServerStrategy()
    mirrored = ps.MirroredStrategy(["cpu:0"])
    with mirrored.scope():
        local = ps.Variable(np.zeros(3), name="local")
    with strategy.scope():
        w = ps.Variable(np.zeros(3), name="w")
        u = ps.Variable(np.zeros(3), name="u")
        count = ps.Variable(0.0, name="count")
        opt = ps.optimizers.Adam(0.1)
        mean = ps.metrics.Mean()
    rows = np.arange(2.0 * 2 * steps).reshape(-1, 1) * np.ones(3)
    extended = strategy.extended

    def batches():
        return strategy.experimental_distribute_dataset(ps.ArrayDataset(rows).batch(2))

    def loss_and_grads(x):
        return np.float64(((w.numpy() + u.numpy() - x) ** 2).sum()), [2 * x.mean(0), 2 * x.mean(0)]

    def train(x):
        loss, grads = loss_and_grads(x)
        opt.apply_gradients(zip(grads, [w, u], strict=True))
        return loss

    def forward(x):
        loss, grads = loss_and_grads(x)
        return loss, grads

    def apply_within(x):
        strategy.run(train, args=(x,))

    def apply_after(x):
        _, grads = strategy.run(forward, args=(x,))
        opt.apply_gradients(zip(grads, [w, u], strict=True))

    def reduced_loss(x):
        strategy.reduce("mean", strategy.run(train, args=(x,)), axis=None)

    def print_on_one_worker(x):
        loss = strategy.reduce("mean", strategy.run(train, args=(x,)), axis=None)
        if ME == 0:
            str(loss)
        strategy.reduce("sum", np.ones(2), axis=None)

    def early_stop(x):
        if float(strategy.reduce("mean", strategy.run(train, args=(x,)), axis=None)) < -1:
            raise AssertionError("a loss below zero")

    def assigns(x):
        strategy.run(train, args=(x,))
        count.assign_add(1.0)
        u.assign(np.zeros(3))

    def metrics(x):
        strategy.run(lambda x: mean.update_state(train(x)), args=(x,))
        float(mean.result())

    def merged(x):
        def merge(strategy, grad):
            total = extended.reduce_to("sum", grad, w)
            return extended.update(w, lambda v, g: v.assign_sub(g), (total,))

        def step(x):
            _, grads = loss_and_grads(x)
            ps.get_replica_context().merge_call(merge, (grads[0],))

        strategy.run(step, args=(x,))

    def all_reduced(x):
        def step(x):
            return ps.get_replica_context().all_reduce("sum", train(x))

        float(strategy.run(step, args=(x,)))

    def two_strategies(x):
        strategy.run(train, args=(x,))
        with mirrored.scope():
            local.assign(x.mean(0))
            mirrored.reduce("mean", local, axis=None)

    def evaluated(x):
        strategy.run(train, args=(x,))
        loss, _ = strategy.run(forward, args=(x,))
        strategy.reduce("mean", loss, axis=None)

    def told(name, step, source):
        waits = rounds = 0
        for number, x in enumerate(source):
            if number == steps:
                strategy.backend.settle()
                waits, rounds = strategy.waits, strategy.round
            step(x)
        strategy.backend.settle()
        say(name, [(strategy.waits - waits) / steps, (strategy.round - rounds) / steps])

    every = [apply_within, apply_after, reduced_loss, print_on_one_worker, early_stop, assigns, metrics, merged]
    every += [all_reduced, two_strategies, evaluated]
    for step in every:
        told(step.__name__, step, batches())
    told("without data", apply_within, [rows[:2]] * 2 * steps)
    with strategy.scope():
        told("in a scope", reduced_loss, batches())
    say("ends", [w.numpy(), u.numpy(), count.numpy()])


LOOPS = {
    "apply_within": (1, 1),
    "apply_after": (1, 1),
    "reduced_loss": (1, 2),
    "print_on_one_worker": (2, 3),  # where it prints; the others wait once
    "early_stop": (1, 2),
    "assigns": (1, 3),
    "metrics": (1, 2),
    "merged": (1, 1),
    "all_reduced": (1, 2),
    "two_strategies": (1, 1),
    "evaluated": (2, 2),  # the loss, which is handed back, is of the new values
    "without data": (1, 1),
    "in a scope": (1, 2),
}
"""Of each loop the most waits per step, and its rounds per step."""


@pytest.mark.parametrize("servers", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_a_step_waits_once(tmp_path, servers):
    """Whichever way it is written; and once more for each value that it hands back to servers."""
    with ProcessCluster(loops, tmp_path, (STEPS,), ps=servers, workers=2) as job:
        for name, (most, rounds) in LOOPS.items():
            found = [job.hear(task, name) for task in (W0, W1)]
            assert max(waits for waits, _ in found) <= most, (name, found)
            assert [per_step for _, per_step in found] == [rounds] * 2, (name, found)
        assert job.hear(W0, "ends") == job.hear(W1, "ends")
        job.finish()


def test_a_look_changes_no_round():
    """What one process prints between two reductions is nothing to the others, within a scope as well."""
    ended = threading.Barrier(2)

    def look_on_one(strategy, worker):
        """Worker 0 looks at everything at once, worker 1 at nothing before the end."""
        with strategy.scope():
            v = ps.Variable(np.zeros(2), name="v")
            opt = ps.optimizers.SGD(1.0)
        found = []

        def look(value):
            found.append(value)
            if worker == 0:
                str(value), float(np.asarray(value).sum())

        with strategy.scope():
            for n in range(5):
                look(strategy.reduce("sum", np.full(2, n + worker), axis=None))
                v.assign_add(np.ones(2))
                look(v + 0.0 if worker == 0 else 0.0)
                opt.apply_gradients([(np.full(2, -1.0), v)])
                look(v + 0.0 if worker == 0 else 0.0)
                look(strategy.extended.reduce_to("mean", np.float64(n), strategy.extended.worker_devices[0]))
        rounds = strategy.round
        sums = [float(np.asarray(value).sum()) for value in found[::4]], [float(value) for value in found[3::4]]
        ended.wait(SOON)
        return rounds, sums, v.numpy().tolist()

    expected = [2.0 * (2 * n + 1) for n in range(5)], [float(n) for n in range(5)]
    assert in_threads(look_on_one) == [(4 * 5, expected, [15.0, 15.0])] * 2


@pytest.mark.parametrize("lane", ["shm", "tcp", "grpc"])
def test_a_call_returns_once_its_array_may_be_changed(lane):
    """Nobody waits for a process that computes, for what fits the window."""
    sent = threading.Event()

    def send_ahead(strategy, worker):
        """Worker 0 sends as many rounds as it may from one array, which it changes; worker 1 comes late."""
        with strategy.scope():
            v = ps.Variable(np.zeros(1000), name="v")
        values = np.zeros(1000)
        strategy.run(lambda: add(v, values))
        strategy.reduce("sum", values, axis=None)
        strategy.backend.settle()
        if worker == 1:
            meet(sent)
        sums = []
        for n in range(WINDOW):
            values[:] = n
            if n % 2:
                strategy.run(lambda: add(v, values))
            else:
                sums.append(strategy.reduce("sum", values, axis=None))
        values[:] = -1.0
        assert strategy.round == 2 + WINDOW
        sent.set()
        return [float(each[-1]) for each in sums], float(v.numpy()[0])

    expected = [2.0 * n for n in range(0, WINDOW, 2)], 2.0 * sum(range(1, WINDOW, 2))
    assert in_threads(send_ahead, servers=1, lane=lane) == [expected] * 2


def fill_the_window(window):
    """Worker 0 sends one round more than fits; says so before and after."""
    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        v = ps.Variable(0.0, name="v")
    strategy.run(lambda: add(v, 0.0))
    strategy.backend.settle()
    if ME == 1:
        gate("go")
    for n in range(window + 1):
        strategy.run(lambda: add(v, 1.0))
        say(f"sent {n}")
    say("v", float(v))


def test_a_call_waits_where_the_window_is_full(tmp_path):
    """For the oldest round; no more than a window is ever kept for resends."""
    with ProcessCluster(fill_the_window, tmp_path, (WINDOW,), gates=["go"], workers=2) as job:
        job.hear(W0, f"sent {WINDOW - 1}")
        time.sleep(0.5)
        assert not job.said(W0, f"sent {WINDOW}")
        job.open("go")
        job.hear(W0, f"sent {WINDOW}")
        for task in (W0, W1):
            assert job.hear(task, "v") == 2.0 * (WINDOW + 1)
        job.finish()


def wait_too_often():
    """Looks at three values in each step, at lines that the log shall name."""
    strategy = ps.ParameterServerStrategy()
    for _ in range(4):
        strategy.run(lambda: None)
        for _ in range(2):
            float(strategy.reduce("sum", 1.0, axis=None))
        float(strategy.reduce("sum", 2.0, axis=None))


def test_a_step_that_waits_too_often_is_told_where(tmp_path):
    """Once, with the lines."""
    with ProcessCluster(wait_too_often, tmp_path) as job:
        job.finish()
        said = [line for line in job.errors(W0).splitlines() if "a step has waited 3 times" in line]
        assert len(said) == 1
        assert said[0].count("program.py:") == 2
