"""`strategy.buffer`: what is computed there is sent from there, and nothing changes it before its round is answered."""

from __future__ import annotations

import time

import numpy as np
import pytest

import psclient as ps
from pstesting.processes import W0, W1, ProcessCluster
from pstesting.script import ME, add, gate, say
from tests.kit.internals import PART_BYTES

LARGE = PART_BYTES // 8 + 1
"""Elements of float64 that one part does not hold."""


def train(lane, sizes, steps):
    """Each size in turn."""
    strategy = ps.ParameterServerStrategy(lane=lane)
    for size in sizes:
        with strategy.scope():
            variables = [ps.Variable(np.zeros(size), name=f"{size}/{n}") for n in range(3)]
        train_with(strategy, variables, steps)


def train_with(strategy, variables, steps):
    """Three gradients a step, in buffers; the last two steps look at the values."""
    optimizer = ps.optimizers.SGD(1.0)
    places = [set() for _ in variables]
    refused, waits = [], strategy.waits

    def step(n):
        gradients = [strategy.buffer(v) for v in variables]
        assert all(strategy.buffer(v) is gradient for v, gradient in zip(variables, gradients, strict=True))
        for number, gradient in enumerate(gradients):
            places[number].add(gradient.__array_interface__["data"][0])
            gradient[:] = -(n + 1) * (number + 1)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        try:
            gradients[0][0] = 1.0
        except ValueError as error:
            refused.append(str(error))
        if n > steps - 3:
            say("values", [[float(v.numpy().min()), float(v.numpy().max())] for v in variables])

    for n in range(steps):
        strategy.run(step, (n,))
    say("places", [len(found) for found in places])
    say("refused", len(refused))
    say("waits", strategy.waits - waits)


# Over gRPC a buffer is an array like any other: it is copied into frames. The next test has one there.
@pytest.mark.parametrize("lane", ["shm", "tcp", pytest.param("grpc", marks=pytest.mark.soak)])
def test_two_arrays_alternate(tmp_path, lane):
    """Of each variable, over all rounds; what was handed in is read-only, and a step waits once."""
    sizes, steps = (1, 20_000, LARGE), 6
    with ProcessCluster(train, tmp_path, (lane, sizes, steps), [train_with], workers=2) as job:
        for task in (W0, W1):
            for _ in sizes:
                for made in (steps - 1, steps):
                    expected = [float(made * (made + 1) * (number + 1)) for number in range(3)]
                    assert job.hear(task, "values") == [[value, value] for value in expected]
                assert job.hear(task, "places") == [2, 2, 2]
                assert job.hear(task, "refused") == steps
                assert job.hear(task, "waits") <= steps
        job.finish()


def send_two(lane, size, broken):
    """Worker 0 sends two large rounds while worker 1 is late, and asks for a third buffer."""
    strategy = ps.ParameterServerStrategy(lane=lane)
    with strategy.scope():
        v = ps.Variable(np.zeros(size), name="v")

    def step(n):
        buffer = strategy.buffer(v)
        buffer[:] = n
        add(v, buffer)

    strategy.run(step, (0,))
    strategy.backend.settle()
    if ME == 1:
        gate("go")
    strategy.run(step, (1,))
    strategy.run(step, (2,))
    say("sent", strategy.round)
    if broken and ME == 0:
        strategy._session.lane(0).close("the test breaks it")
    strategy.run(step, (100,))
    say("third", strategy.round)
    say("v", [float(v.numpy().min()), float(v.numpy().max())])


@pytest.mark.parametrize(("lane", "broken"), [("grpc", False), ("shm", True), ("tcp", True)])
def test_a_large_round_is_not_waited_for(tmp_path, lane, broken):
    """A third one is: its array is still in a round. What lay in a lane that broke is sent again from where it is."""
    with ProcessCluster(send_two, tmp_path, (lane, LARGE, broken), gates=["go"], workers=2) as job:
        assert job.hear(W0, "sent") == 3
        time.sleep(0.5)
        assert not job.said(W0, "third")
        job.open("go")
        for task in (W0, W1):
            assert job.hear(task, "third") == 4
            assert job.hear(task, "v") == [206.0, 206.0]
        job.finish()
