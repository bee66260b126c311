"""Rows of asynchronous workers as real processes: a row misses updates by the count that its table keeps of all."""

from __future__ import annotations

import numpy as np
import pytest

import psclient as ps
from pstesting.processes import ProcessCluster
from pstesting.script import ME, gate, say
from pswire.cluster import Task

ROWS, WIDTH, STEPS = 12, 2, 20


def given(worker, number):
    """The rows that a worker gives in one of its steps, few of them."""
    rng = np.random.default_rng([worker, number])
    return rng.choice(12, 2, replace=False), rng.normal(size=(2, 2)).astype("float32")


def learn(kind, steps, name):
    """Steps of one table, each worker's in its own pace; says as which of all of them each was applied."""
    strategy = ps.ParameterServerStrategy(consistency=ps.Async())
    with strategy.scope():
        if kind == "dynamic":
            table = ps.dynamic_embedding.get_variable("table", dim=2, initializer=1)
        else:
            table = ps.Variable(np.ones((12, 2), "float32"), name="table")
        count = ps.Variable(np.int64(0), trainable=False, name="count")
        optimizer = getattr(ps.optimizers, name)(0.1)

    def apply(s, slices):
        optimizer.apply_gradients([(slices, table)])
        return s.extended.update(count, lambda count: count.assign_add(1).value())

    def step(number):
        rng = np.random.default_rng([ME, number])
        ids, values = rng.choice(12, 2, replace=False), rng.normal(size=(2, 2)).astype("float32")
        return int(ps.get_replica_context().merge_call(apply, args=(ps.IndexedSlices(values, ids),)))

    order = []
    for number in range(steps):
        if number == steps // 2:
            say("half")
            gate("half")
        order.append(int(strategy.run(step, (number,))))
    say("order", order)
    gate("end")
    own = [table, *(slot for slot in optimizer._state.of(table).slots if slot.ndim)]
    say("table", [np.asarray(each.lookup(np.arange(12)).numpy()).tolist() for each in own])
    say("steps", int(optimizer.iterations))


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
def test_rows_have_the_steps_that_others_made(tmp_path, kind, workers, name):
    """Each row is what whole gradients make of it, in the order in which the table had the pushes of all workers."""
    tasks = [Task("worker", n) for n in range(workers)]
    keys = {"ps": 1, "workers": workers, "gates": ["half", "end"]}
    with ProcessCluster(learn, tmp_path, (kind, STEPS, name), **keys) as job:
        for task in tasks:
            job.hear(task, "half")
        job.open("half")
        orders = [job.hear(task, "order") for task in tasks]
        job.open("end")
        found = [job.hear(task, "table") for task in tasks]
        assert [job.hear(task, "steps") for task in tasks] == [STEPS * workers] * workers
        job.finish()
    applied = {place: (n, number) for n, order in enumerate(orders) for number, place in enumerate(order)}
    assert sorted(applied) == list(range(1, STEPS * workers + 1))
    # Nobody has made all steps before another began: the first halves of all come first.
    assert {number < STEPS // 2 for place, (_, number) in applied.items() if place <= STEPS * workers // 2} == {True}
    w, m, v = np.ones((ROWS, WIDTH), "float32"), *(np.zeros((ROWS, WIDTH), "float32") for _ in range(2))
    for t in sorted(applied):
        ids, values = given(*applied[t])
        g = np.zeros((ROWS, WIDTH), "float32")
        g[ids] = values
        ORACLES[name](w, m, v, g, t)
    for own in found:
        for one, other in zip(own, (w, m, v), strict=True):
            np.testing.assert_array_equal(np.array(one, "float32"), other)
