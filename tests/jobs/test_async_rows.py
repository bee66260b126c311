"""Rows of asynchronous workers: a row misses updates by the count that its table keeps of all."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import psclient as ps
from tests.kit.rig import SOON
from tests.kit.workers import in_threads

ROWS, WIDTH, STEPS = 12, 2, 12


def given(worker, number):
    """The rows that a worker gives in one of its steps, few of them."""
    rng = np.random.default_rng([worker, number])
    return rng.choice(ROWS, 2, replace=False), rng.normal(size=(2, WIDTH)).astype("float32")


def learn(strategy, worker, kind, name, half, ended):
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


def adam(w, m, v, g, t):
    """A step of Adam, of a whole table."""
    rate = np.float32(0.1 * np.sqrt(1 - 0.999 ** np.float64(t)) / (1 - 0.9 ** np.float64(t)))
    m += (1 - 0.9) * (g - m)
    v += (1 - 0.999) * (g * g - v)
    w -= rate * m / (np.sqrt(v) + 1e-7)


def nadam(w, m, v, g, t):
    """A step of Nadam, of a whole table."""
    momentum = [0.9 * (1 - 0.5 * 0.96 ** np.float64(n)) for n in range(1, t + 2)]
    *_, now, after = momentum
    product = np.prod(momentum[:-1])
    m += (1 - 0.9) * (g - m)
    v += (1 - 0.999) * (g * g - v)
    ahead = np.float32(after / (1 - product * after)) * m + np.float32((1 - now) / (1 - product)) * g
    w -= 0.1 * ahead / (np.sqrt(v / np.float32(1 - 0.999 ** np.float64(t))) + 1e-7)


ORACLES = {"Adam": adam, "Nadam": nadam}


@pytest.mark.parametrize(
    ("kind", "workers", "name"),
    [("static", 2, "Adam"), ("dynamic", 3, "Adam"), pytest.param("dynamic", 2, "Nadam", marks=pytest.mark.soak)],
)
def test_rows_have_the_steps_that_others_made(kind, workers, name):
    """Each row is what whole gradients make of it, in the order in which the table had the pushes of all workers."""
    meetings = threading.Barrier(workers), threading.Barrier(workers)
    found = in_threads(lambda *one: learn(*one, kind, name, *meetings), workers, 1, consistency=ps.Async())
    applied = {place: (n, number) for n, (order, _) in enumerate(found) for number, place in enumerate(order)}
    assert sorted(applied) == list(range(1, STEPS * workers + 1))
    # Nobody has made all steps before another began: the first halves of all come first.
    assert {number < STEPS // 2 for place, (_, number) in applied.items() if place <= STEPS * workers // 2} == {True}
    w, m, v = np.ones((ROWS, WIDTH), "float32"), *(np.zeros((ROWS, WIDTH), "float32") for _ in range(2))
    for t in sorted(applied):
        ids, values = given(*applied[t])
        g = np.zeros((ROWS, WIDTH), "float32")
        g[ids] = values
        ORACLES[name](w, m, v, g, t)
    for _, own in found:
        for one, other in zip(own, (w, m, v), strict=True):
            np.testing.assert_array_equal(one, other)
