"""Workers of their own pace: asynchronous ones wait for nobody, and every push counts once, whoever dies."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import psclient as ps
from pstesting.processes import PS0, PS1, QUICK, W0, W1, ProcessCluster
from tests.kit import references
from tests.kit.rig import SOON
from tests.kit.workers import in_threads, learn, total

# ---- Asynchronous ----


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


# ---- Rows: a row misses updates by the count that its table keeps of all ----

ROWS, WIDTH, STEPS = 12, 2, 12


def given(worker, number):
    """The rows that a worker gives in one of its steps, few of them."""
    rng = np.random.default_rng([worker, number])
    return rng.choice(ROWS, 2, replace=False), rng.normal(size=(2, WIDTH)).astype("float32")


def learn_rows(strategy, worker, kind, half, ended):
    """Steps of one table, each worker's in its own pace; returns as which of all of them each was applied, and rows."""
    with strategy.scope():
        if kind == "dynamic":
            table = ps.dynamic_embedding.get_variable("table", dim=2, initializer=1)
        else:
            table = ps.Variable(np.ones((ROWS, WIDTH), "float32"), name="table")
        count = ps.Variable(np.int64(0), trainable=False, name="count")
        optimizer = ps.optimizers.Adam(0.1)

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


@pytest.mark.parametrize(("kind", "workers"), [("static", 2), ("dynamic", 3)])
def test_rows_have_the_steps_that_others_made(kind, workers):
    """Each row is what whole gradients make of it, in the order in which the table had the pushes of all workers."""
    meetings = threading.Barrier(workers), threading.Barrier(workers)
    found = in_threads(lambda *one: learn_rows(*one, kind, *meetings), workers, 1, consistency=ps.Async())
    applied = {place: (n, number) for n, (order, _) in enumerate(found) for number, place in enumerate(order)}
    assert sorted(applied) == list(range(1, STEPS * workers + 1))
    # Nobody has made all steps before another began: the first halves of all come first.
    assert {number < STEPS // 2 for place, (_, number) in applied.items() if place <= STEPS * workers // 2} == {True}
    rule, w, slots = references.adam(0.1, 0.9, 0.999, 1e-7), np.ones((ROWS, WIDTH)), {}
    for t in sorted(applied):
        ids, values = given(*applied[t])
        g = np.zeros((ROWS, WIDTH))
        g[ids] = values
        w = rule(w, g, slots, t)
    for _, own in found:
        for one, other in zip(own, (w, slots["m"], slots["v"]), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
