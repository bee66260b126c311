"""Arrays where replicas compute: NumPy on a CPU, CuPy on a GPU, by the same code.

The only module of the client that imports CuPy, and only when it is needed. CuPy imports without a
driver, so what is looked for is a device, not the package.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar, Literal

import numpy as np

from pswire.cluster import Task
from pswire.errors import ConfigError
from pswire.tensor import Array

AnyArray = Any
"""A NumPy or CuPy array."""

_DEVICE = re.compile(
    r"(?:/job:[a-z]+)?(?:/replica:\d+)?(?:/task:\d+)?/?(?:device:)?(?P<kind>cpu|gpu)(?::(?P<index>\d+))?",
    re.IGNORECASE,
)

_ON_CUDA = 2  # kDLCUDA, DLPack's number for CUDA memory


@dataclass(frozen=True, order=True)
class Device:
    """One device of this process, `cpu:0` or `gpu:1`.

    Attributes:
        kind: "cpu" or "gpu".
        index: which of that kind. CPUs are all the same one; their numbers only tell replicas apart.
    """

    nest_leaf: ClassVar[bool] = True

    kind: Literal["cpu", "gpu"]
    index: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.index}"

    def full_name(self, task: Task) -> str:
        """The name of the device in its cluster, `/job:worker/task:1/device:GPU:0`."""
        return f"{task}/device:{self.kind.upper()}:{self.index}"

    @classmethod
    def parse(cls, text: str) -> Device:
        """Reads `cpu:0`, `gpu`, or a full name as `full_name` gives; raises `ConfigError` for all else."""
        match = _DEVICE.fullmatch(text)
        if not match:
            raise ConfigError(f"{text!r} is no device; write cpu:0 or gpu:0")
        return cls("gpu" if match["kind"].lower() == "gpu" else "cpu", int(match["index"] or 0))


CPU = Device("cpu", 0)


def _cupy() -> ModuleType | None:
    try:
        import cupy
    except ImportError:
        return None
    return cupy  # type: ignore[no-any-return,unused-ignore]


def _loaded_cupy() -> ModuleType:
    found = _cupy()
    if found is None:
        raise ConfigError("a GPU is asked for, but CuPy is not installed; install paramserver[gpu], or use cpu:0")
    return found


def available_gpus() -> int:
    """How many GPUs this process can use; 0 without CuPy, without a driver, or without a device."""
    cupy = _cupy()
    if cupy is None:
        return 0
    try:
        return int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError:
        return 0


def default_devices() -> tuple[Device, ...]:
    """All GPUs, or else `cpu:0`."""
    return tuple(Device("gpu", index) for index in range(available_gpus())) or (CPU,)


def local_devices(names: Sequence[str] | None) -> tuple[Device, ...]:
    """The devices of this process's replicas.

    Args:
        names: one for each replica, such as `["cpu:0", "cpu:1"]`; None takes `default_devices`.

    Raises:
        ConfigError: it is no list, or a name is none, comes twice, or is that of a GPU that is not there.
    """
    if names is None:
        return default_devices()
    if isinstance(names, str):
        raise ConfigError(f"devices are a list with one name for each replica; write devices=[{names!r}]")
    devices = tuple(Device.parse(name) for name in names)
    if not devices:
        raise ConfigError("no device is given; name at least one, such as cpu:0")
    if len(set(devices)) < len(devices):
        raise ConfigError(f"a device is given twice in {list(names)}; each replica needs its own")
    gpus = available_gpus() if any(device.kind == "gpu" for device in devices) else 0
    for device in devices:
        if device.kind == "gpu" and device.index >= gpus:
            raise ConfigError(f"there is no {device}: this process sees {gpus} GPUs; use cpu:0, or check the driver")
    return devices


def namespace(device: Device) -> Any:
    """The module whose functions make arrays on a device: `numpy`, or `cupy`."""
    return _loaded_cupy() if device.kind == "gpu" else np


def device_scope(device: Device) -> contextlib.AbstractContextManager[Any]:
    """A context in which new arrays of the calling thread are made on a device."""
    if device.kind == "cpu":
        return contextlib.nullcontext()
    scope: contextlib.AbstractContextManager[Any] = _loaded_cupy().cuda.Device(device.index)
    return scope


def _is_cupy(array: AnyArray) -> bool:
    # An array of CuPy cannot be there before CuPy is; this spares the import to those without a GPU.
    return type(array).__module__.partition(".")[0] == "cupy" and hasattr(array, "device")


def device_of(array: AnyArray) -> Device:
    """Where an array lives; whatever is no CuPy array lives on `cpu:0`."""
    return Device("gpu", int(array.device.id)) if _is_cupy(array) else CPU


def to_device(array: AnyArray, device: Device) -> AnyArray:
    """The array on a device: itself if it is there, else a copy.

    Args:
        array: anything that `to_numpy` takes.
        device: where to.
    """
    if device.kind == "cpu":
        return to_numpy(array)
    with device_scope(device):
        return _loaded_cupy().asarray(array if _is_cupy(array) else to_numpy(array))


def is_array(value: Any) -> bool:
    """Whether it is an array of any library, or a NumPy scalar."""
    return isinstance(value, np.generic) or hasattr(value, "__dlpack_device__")


def as_array(value: Any) -> AnyArray:
    """A NumPy or CuPy array where the value lies; not copied if that can be avoided.

    Args:
        value: an array of NumPy or CuPy, or of another library on CPU or CUDA (PyTorch, JAX), or whatever
            `numpy.asarray` takes.
    """
    if isinstance(value, np.ndarray) or _is_cupy(value):
        return value
    if hasattr(value, "__dlpack_device__") and value.__dlpack_device__()[0] == _ON_CUDA:
        return _loaded_cupy().from_dlpack(value)
    return np.asarray(value)


def to_numpy(array: AnyArray) -> Array:
    """The array in host memory; not copied if it is there.

    Args:
        array: what `as_array` takes.
    """
    found = as_array(array)
    host: Array = found if isinstance(found, np.ndarray) else _loaded_cupy().asnumpy(found)
    return host


def add(a: AnyArray, b: AnyArray) -> AnyArray:
    """The sum of two arrays of one shape, on the device of the first."""
    device = device_of(a)
    with device_scope(device):
        return namespace(device).add(a, to_device(b, device))
