"""Variables and values of the servers beside CuPy arrays."""

from __future__ import annotations

import numpy as np
import pytest

import psclient as ps
from psclient._src import devices

GPU = devices.Device("gpu", 0)


@pytest.fixture(scope="module")
def strategy():
    with ps.ParameterServerStrategy(devices=["gpu:0"]) as strategy:
        yield strategy


def test_a_variable_is_copied_to_the_device_once_for_each_value(strategy):
    """Reads between two rounds share the copy; a round makes a new one."""
    with strategy.scope():
        w = ps.Variable(np.ones(3, "float32"))
    first, second = strategy.run(lambda: (w.read_value(), w.read_value()))
    assert devices.device_of(first) == GPU
    assert first is second
    assert strategy.run(w.read_value) is first
    w.assign_add(1.0)
    assert devices.to_numpy(strategy.run(w.read_value)).tolist() == [2.0] * 3


def test_cupy_functions_and_operators_take_variables_and_reduced_values(strategy):
    """On either side, and the result is on the device."""
    cupy = devices.namespace(GPU)
    with strategy.scope():
        w = ps.Variable(np.ones(3, "float32"))
    reduced = strategy.extended.reduce_to("sum", np.ones(3, "float32"), w)

    def step():
        x = cupy.ones(3, "float32")
        return [x + w, w + x, cupy.add(x, w), cupy.exp(w), x + reduced, reduced * x, cupy.add(reduced, x)]

    for found in strategy.run(step):
        assert devices.device_of(found) == GPU


def test_reductions_and_updates_take_cupy_arrays(strategy):
    """Sums within a replica are made on the device."""
    cupy = devices.namespace(GPU)
    with strategy.scope():
        w = ps.Variable(np.zeros(3, "float32"))
    rows = strategy.run(lambda: cupy.ones((4, 3), "float16"))
    assert strategy.reduce("mean", rows, axis=0).tolist() == [1.0] * 3
    strategy.extended.update(w, lambda v, x: v.assign(x), (cupy.full(3, 2.0, "float32"),))
    assert w.numpy().tolist() == [2.0] * 3
