"""`strategy.buffer` of a replica on a GPU: pinned memory of the host."""

from __future__ import annotations

import numpy as np
import pytest

import psclient as ps
from psclient._src import devices

GPU = devices.Device("gpu", 0)


@pytest.fixture(params=[1 << 10, 3 << 20], ids=["small", "large"])
def trained(request):
    """A strategy, a variable of one part or of several, and its optimizer."""
    with ps.ParameterServerStrategy(devices=["gpu:0"]) as strategy:
        with strategy.scope():
            v = ps.Variable(np.zeros(request.param, np.float32), name="v")
        yield strategy, v, ps.optimizers.SGD(1.0)


def test_gradients_leave_from_pinned_memory(trained):
    """What is copied there from the device is what the servers add; two arrays alternate."""
    strategy, v, optimizer = trained
    cupy = devices.namespace(GPU)
    places = set()

    def step(n):
        buffer = strategy.buffer(v)
        assert isinstance(buffer, np.ndarray)
        found = cupy.cuda.runtime.pointerGetAttributes(buffer.ctypes.data)
        assert found.type == cupy.cuda.runtime.memoryTypeHost
        places.add(buffer.ctypes.data)
        cupy.full(v.shape, -float(n), np.float32).get(out=buffer)
        optimizer.apply_gradients([(buffer, v)])
        with pytest.raises(ValueError, match="read-only"):
            buffer[0] = 0.0

    for n in range(8):
        strategy.run(step, (n,))
    assert len(places) == 2
    assert v.numpy().min() == v.numpy().max() == sum(range(8))


def test_arrays_of_the_device_go_on_beside_buffers(trained):
    """In one step, and one round: some of its gradients are on the device."""
    strategy, v, optimizer = trained
    cupy = devices.namespace(GPU)
    with strategy.scope():
        w = ps.Variable(np.zeros(5, np.float32), name="w")

    def step():
        buffer = strategy.buffer(v)
        buffer.fill(-1.0)
        optimizer.apply_gradients([(cupy.full(5, -2.0, np.float32), w), (buffer, v)])

    for _ in range(4):
        strategy.run(step)
    assert w.numpy().tolist() == [8.0] * 5
    assert v.numpy().min() == v.numpy().max() == 4.0
