"""The rules of rounds: what is one, who waits for it and when, and when its arrays may be changed."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

import psclient as ps
from pstesting.script import add, add_all
from tests.kit.internals import PART_BYTES, WINDOW
from tests.kit.rig import SOON
from tests.kit.workers import in_threads, meet

STEPS = 4
"""Steps of a loop that count, after as many in which plans are new."""

LARGE = PART_BYTES // 8 + 1
"""Elements of float64 that one part does not hold."""


# ---- What a round is ----


def test_what_is_a_round():
    """A section is one, and so is a reduction; a read ends its section, which the next one sees; a look is none."""

    def work(strategy, worker):
        with strategy.scope():
            a, b = ps.Variable(np.zeros(4), name="a"), ps.Variable(np.zeros(3), name="b")

        def look():
            found = [float(a.read_value().sum() + b.read_value().sum()) for _ in range(20)]
            return found == [14.0] * 20

        def twice():
            add(a, np.full(4, worker + 1.0))
            seen = a.read_value()[0]
            add(a, np.full(4, seen))
            return seen

        def read_in_a_merge(strategy):
            strategy.extended.update(a, lambda v: v.assign(v * 0 + 5.0))
            value = a.numpy().tolist()
            strategy.extended.update(a, lambda v: v.assign_add(1.0))
            return value

        strategy.run(lambda: add_all([(a, np.ones(4)), (b, np.ones(3))]))
        cases = (
            ("a run that only reads", 0, lambda: strategy.run(look), True),
            ("two sections", 2, lambda: float(strategy.run(twice)), 2.0 + 3.0),
            ("a sum", 1, lambda: strategy.reduce("sum", np.arange(3.0) + worker, None).tolist(), [1.0, 3.0, 5.0]),
            ("a mean", 1, lambda: float(strategy.reduce("mean", np.arange(2.0 + worker), axis=0)), 4 / 5),
            (
                "a read in a merge call",
                2,
                lambda: strategy.run(lambda: ps.get_replica_context().merge_call(read_in_a_merge)),
                [5.0] * 4,
            ),
        )
        for name, rounds, make, expected in cases:
            before, sent = strategy.round, strategy.bytes_transferred[0]
            assert (name, make(), strategy.round - before) == (name, expected, rounds)
            assert rounds or strategy.bytes_transferred[0] == sent
        return a.numpy().tolist()

    assert in_threads(work) == [[6.0] * 4] * 2


# ---- Rounds are sent without a wait, and only a look waits ----


def loops(strategy, worker):
    """Loops as users write them, each over the same data; returns of each its waits and rounds per step."""
    with strategy.scope():
        w, u = (ps.Variable(np.zeros(3), name=name) for name in "wu")
        count = ps.Variable(0.0, name="count")
        opt = ps.optimizers.Adam(0.1)
        mean = ps.metrics.Mean()
    rows = np.arange(2.0 * 2 * STEPS).reshape(-1, 1) * np.ones(3)
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
        float(strategy.reduce("mean", strategy.run(train, args=(x,)), axis=None))

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

    def evaluated(x):
        strategy.run(train, args=(x,))
        loss, _ = strategy.run(forward, args=(x,))
        strategy.reduce("mean", loss, axis=None)

    def counted(step, source):
        waits = rounds = 0
        for number, x in enumerate(source):
            if number == STEPS:
                strategy.backend.settle()
                waits, rounds = strategy.blocking_waits, strategy.round
            step(x)
        strategy.backend.settle()
        return (strategy.blocking_waits - waits) / STEPS, (strategy.round - rounds) / STEPS

    every = [apply_within, apply_after, reduced_loss, assigns, metrics, merged, all_reduced, evaluated]
    found = {step.__name__: counted(step, batches()) for step in every}
    found["without data"] = counted(apply_within, [rows[:2]] * 2 * STEPS)
    with strategy.scope():
        found["in a scope"] = counted(reduced_loss, batches())
    return found, [w.numpy().tolist(), u.numpy().tolist(), float(count)]


LOOPS = {
    "apply_within": (1, 1),
    "apply_after": (1, 1),
    "reduced_loss": (1, 2),
    "assigns": (1, 3),
    "metrics": (1, 2),
    "merged": (1, 1),
    "all_reduced": (1, 2),
    "evaluated": (2, 2),  # the loss, which is handed back, is of the new values
    "without data": (1, 1),
    "in a scope": (1, 2),
}
"""Of each loop the most waits per step, and its rounds per step."""


def test_a_step_waits_once():
    """Whichever way it is written; and once more for each value that it hands back to servers."""
    (one, end), (other, same) = in_threads(loops)
    assert end == same
    assert {name: (one[name][1], other[name][1]) for name in one} == {name: (n, n) for name, (_, n) in LOOPS.items()}
    for name, (most, _) in LOOPS.items():
        assert max(one[name][0], other[name][0]) <= most, name


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


@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
def test_a_call_returns_once_its_array_may_be_changed(transport):
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
    assert in_threads(send_ahead, servers=1, transport=transport) == [expected] * 2


def test_a_step_that_waits_too_often_is_told_where(caplog):
    """Once, with the lines."""

    def look(strategy, worker):
        for _ in range(6):
            strategy.run(lambda: None)
            for _ in range(2):
                float(strategy.reduce("sum", 1.0, axis=None))
            float(strategy.reduce("sum", 2.0, axis=None))

    in_threads(look, 1, 1)
    (said,) = [each.getMessage() for each in caplog.records if "waited several times" in each.getMessage()]
    assert said.count("test_rounds.py:") == 2


# ---- `strategy.buffer`: what is computed there is sent from there ----


@pytest.mark.parametrize(("transport", "broken"), [("grpc", False), ("shm", True), ("tcp", True)])
def test_a_large_round_is_not_waited_for(transport, broken):
    """A third one is: its array is still in a round. What lay in a transport that broke is sent again from where it
    is."""
    two, three = threading.Event(), threading.Event()

    def send(strategy, worker):
        with strategy.scope():
            v = ps.Variable(np.zeros(LARGE), name="v")

        def step(number):
            buffer = strategy.buffer(v)
            buffer[:] = number
            add(v, buffer)

        strategy.run(step, (0,))
        strategy.backend.settle()
        if worker:  # it is late
            meet(two)
            time.sleep(0.5)
            assert not three.is_set()
        strategy.run(step, (1,))
        strategy.run(step, (2,))
        two.set()
        if broken and not worker:
            strategy._session.transport(0).close("the test breaks it")
        strategy.run(step, (100,))
        three.set()
        return strategy.round, float(v.numpy().min()), float(v.numpy().max())

    assert in_threads(send, servers=1, transport=transport) == [(4, 206.0, 206.0)] * 2
