"""Devices of a client, and arrays on them. What needs a GPU is in tests/gpu."""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import pytest

from psclient._src import devices
from psclient._src.devices import Device
from pswire.cluster import Task
from pswire.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "device"),
    [
        ("cpu:0", Device("cpu", 0)),
        ("cpu", Device("cpu", 0)),
        ("GPU:1", Device("gpu", 1)),
        ("/gpu:12", Device("gpu", 12)),
        ("/device:CPU:0", Device("cpu", 0)),
        ("/job:worker/task:0/device:GPU:0", Device("gpu", 0)),
        ("/job:worker/replica:0/task:1/device:GPU:3", Device("gpu", 3)),
    ],
)
def test_devices_are_read(text: str, device: Device) -> None:
    """Short names and full ones."""
    assert Device.parse(text) == device


@pytest.mark.parametrize("text", ["", "tpu:0", "gpu:-1", "gpu:", "gpu:1x", "cpu:0 ", "/job:worker/task:0"])
def test_what_is_no_device_is_refused(text: str) -> None:
    """With an example of one."""
    with pytest.raises(ConfigError, match="write cpu:0 or gpu:0"):
        Device.parse(text)


def test_a_name_comes_back() -> None:
    """What `str` and `full_name` write, `parse` reads."""
    device = Device("gpu", 2)
    assert device.full_name(Task("worker", 1)) == "/job:worker/task:1/device:GPU:2"
    assert Device.parse(device.full_name(Task("worker", 1))) == Device.parse(str(device)) == device


def test_the_default_is_all_gpus_or_one_cpu() -> None:
    """Whatever this machine has."""
    found = devices.available_gpus()
    kinds = [device.kind for device in devices.default_devices()]
    assert kinds == (["gpu"] * found or ["cpu"])
    assert devices.local_devices(None) == devices.default_devices()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "no device is given"),
        (["cpu:0", "cpu"], "given twice"),
        (["cpu:0", "abacus"], "'abacus' is no device"),
        ([f"gpu:{devices.available_gpus()}"], "use cpu:0"),
    ],
)
def test_devices_that_cannot_be_are_refused(names: list[str], message: str) -> None:
    """None, twice the same, and one that is not there."""
    with pytest.raises(ConfigError, match=message):
        devices.local_devices(names)


def test_several_cpu_replicas_need_no_gpu() -> None:
    """Their numbers only tell them apart."""
    assert devices.local_devices(["cpu:0", "cpu:1"]) == (Device("cpu", 0), Device("cpu", 1))


class Foreign:
    """An array of another library, in host memory."""

    def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
        return np.arange(3)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


@pytest.mark.parametrize("make", [lambda: np.arange(3), lambda: [0, 1, 2], Foreign])
def test_arrays_come_to_the_host(make: Callable[[], object]) -> None:
    """NumPy arrays are not copied; what NumPy can read is read."""
    given = make()
    got = devices.to_device(given, Device("cpu", 1))
    assert got.tolist() == [0, 1, 2]
    assert got is given or not isinstance(given, np.ndarray)


def test_host_arrays_are_added_on_the_host() -> None:
    """The dtype is that of the sum."""
    total = devices.add(np.array([1, 2], "float32"), np.array([3, 4], "float32"))
    assert total.dtype == np.float32
    assert total.tolist() == [4, 6]
    assert devices.device_of(total) == devices.CPU
    assert devices.namespace(devices.CPU) is np
    with devices.device_scope(devices.CPU):
        assert devices.device_of(1.0) == devices.CPU


def test_without_cupy_there_are_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is no error; asking for one is, and says what to install."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert devices.default_devices() == (devices.CPU,)
    with pytest.raises(ConfigError, match=r"install paramserver\[gpu\]"):
        devices.to_device(np.zeros(1), Device("gpu", 0))
