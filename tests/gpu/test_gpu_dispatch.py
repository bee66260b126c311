"""Rounds that are sent without a wait, of arrays on a GPU."""

from __future__ import annotations

import numpy as np
import pytest

import psclient as ps
from psclient._src import devices
from tests.kit.internals import WINDOW

GPU = devices.Device("gpu", 0)


@pytest.fixture
def strategy():
    with ps.ParameterServerStrategy(devices=["gpu:0"]) as strategy:
        yield strategy


def test_an_array_on_the_device_may_change_once_the_call_has_returned(strategy):
    """What was reduced is what it was, of a whole window of rounds."""
    x = devices.namespace(GPU).zeros(1 << 16, "float32")
    float(strategy.reduce("sum", x, axis=None)[0])
    values = []
    for number in range(WINDOW):
        x.fill(number)
        values.append(strategy.reduce("sum", x, axis=None))
    x.fill(-1.0)
    assert [float(value[-1]) for value in values] == [float(number) for number in range(WINDOW)]


def test_a_step_waits_once(strategy):
    """For the variables that the next one reads, on the device; the loss comes with them."""
    cupy = devices.namespace(GPU)
    with strategy.scope():
        w = ps.Variable(np.zeros(1000, "float32"))
        optimizer = ps.optimizers.SGD(0.5)

    def step(x):
        loss = ((w - x) ** 2).sum()
        optimizer.apply_gradients([(w - x, w)])
        return loss

    waits, losses = [], []
    for _ in range(6):
        waits.append(strategy.waits)
        losses.append(strategy.reduce("mean", strategy.run(step, args=(cupy.ones(1000, "float32"),)), axis=None))
    assert np.diff(waits)[2:].tolist() == [1] * 3
    assert [float(loss) for loss in losses] == [1000.0 * 0.25**number for number in range(6)]
