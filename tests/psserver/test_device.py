"""The device of a server. What needs a GPU is in tests/gpu."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from psserver.arrays import Device
from pswire.errors import ConfigError


@pytest.mark.parametrize("text", ["cpu", "CPU:0"])
def test_the_cpu_keeps_arrays_as_they_are(text: str) -> None:
    """Nothing is copied there and back."""
    device = Device.parse(text)
    array = np.arange(3)
    assert str(device) == "cpu"
    assert device.put(array) is array
    assert device.get(array) is array
    with device.scope():
        assert device.xp.sum(device.xp.asarray(array)) == 3


@pytest.mark.parametrize("text", ["", "gpu:", "tpu:0", "cpu:1", "gpu:-1", "0"])
def test_what_is_no_device_is_refused(text: str) -> None:
    """With an example of one."""
    with pytest.raises(ConfigError, match="write cpu or gpu:0"):
        Device.parse(text)


def test_a_gpu_that_is_not_there_is_refused() -> None:
    """Whatever is missing, the message says how to go on without it."""
    with pytest.raises(ConfigError, match="--device cpu"):
        Device.parse("gpu:4096")


def test_without_cupy_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what to install; the CPU needs nothing."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ConfigError, match=r"install paramserver\[gpu\], or start with --device cpu"):
        Device.parse("gpu")
    assert Device.parse("cpu").put(1) == 1
