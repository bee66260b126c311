"""Arrays where replicas compute: NumPy on a CPU, CuPy on a GPU, by the same code.

The only module of the client that imports CuPy, and only when it is needed. CuPy imports without a
driver, so what is looked for is a device, not the package.
"""

from __future__ import annotations

import contextlib
import math
import re
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any, ClassVar, Literal, Protocol

import numpy as np

from psclient._src.arrays import conversions
from pswire.cluster import Task
from pswire.errors import ConfigError
from pswire.model.tensor import Array

AnyArray = Any
"""A NumPy or CuPy array."""

Value = Any
"""An array, a number, a variable, or the tracer that stands for one in an update function: what arithmetic takes."""


class _Event(Protocol):
    """CuPy's event at a point of a stream."""

    done: bool

    def synchronize(self) -> None:
        """Waits until the stream has come to it."""


class _Stream(Protocol):
    """CuPy's stream, as far as copies use it."""

    def record(self, event: object, /) -> _Event:
        """Puts an event at its end; returns it."""


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
        index: number of the GPU. All CPUs are the same one; their numbers only tell replicas apart.
    """

    _nest_leaf: ClassVar[bool] = True

    kind: Literal["cpu", "gpu"]
    index: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.index}"

    def full_name(self, task: Task) -> str:
        """Returns the name of the device in its cluster, `/job:worker/task:1/device:GPU:0`."""
        return f"{task}/device:{self.kind.upper()}:{self.index}"

    @classmethod
    def parse(cls, text: str) -> Device:
        """Reads `cpu:0`, `gpu`, or a full name as `full_name` gives; raises `ConfigError` for all else."""
        match = _DEVICE.fullmatch(text)
        if not match:
            raise ConfigError(f"{text!r} is not a device; use cpu:0 or gpu:0")
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
        raise ConfigError(
            "a GPU was requested, but CuPy is not installed; run pip install -e '.[gpu]' in the clone, or use cpu:0"
        )
    return found


def available_gpus() -> int:
    """Returns how many GPUs this process can use; 0 without CuPy, without a driver, or without a device."""
    cupy = _cupy()
    if cupy is None:
        return 0
    try:
        return int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError:
        return 0


@dataclass(frozen=True)
class GpuReport:
    """CuPy's report on the GPUs of this machine, for people.

    Attributes:
        cupy: its version; "" where it is not installed, or cannot be imported.
        runtime, driver: of CUDA, as 12.4; "" where they are not known.
        names: of the GPUs that this process can use.
        error: why there are none; "" where nothing is wrong with that.
    """

    cupy: str = ""
    runtime: str = ""
    driver: str = ""
    names: tuple[str, ...] = ()
    error: str = ""


def gpu_report() -> GpuReport:
    """Returns what CuPy says of the GPUs here; it is asked for a device, and for no memory."""
    try:
        import cupy
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == "cupy"
        return GpuReport() if missing else GpuReport(error=f"CuPy cannot be imported: {' '.join(str(error).split())}")
    runtime = cupy.cuda.runtime
    try:
        names = [runtime.getDeviceProperties(index)["name"].decode() for index in range(runtime.getDeviceCount())]
        ours, driver = _cuda_version(runtime.runtimeGetVersion()), _cuda_version(runtime.driverGetVersion())
    except RuntimeError as error:  # CUDA's own, and CuPy's where a library of CUDA is missing
        return GpuReport(cupy.__version__, error=str(error))
    return GpuReport(cupy.__version__, ours, driver, tuple(names))


def _cuda_version(number: int) -> str:
    """Formats a CUDA version: 12040 is 12.4."""
    return f"{number // 1000}.{number % 1000 // 10}"


def default_devices() -> tuple[Device, ...]:
    """Returns all GPUs, or else `cpu:0`."""
    return tuple(Device("gpu", index) for index in range(available_gpus())) or (CPU,)


def local_devices(names: Sequence[str] | None) -> tuple[Device, ...]:
    """Returns the devices of this process's replicas.

    Args:
        names: one for each replica, such as `["cpu:0", "cpu:1"]`; None takes `default_devices`.

    Raises:
        ConfigError: it is no list, or a name is none, comes twice, or is that of a GPU that is not there.
    """
    if names is None:
        return default_devices()
    if isinstance(names, str):
        raise ConfigError(f"devices must be a list with one name per replica; use devices=[{names!r}]")
    devices = tuple(Device.parse(name) for name in names)
    if not devices:
        raise ConfigError("the list of devices is empty; name at least one, such as cpu:0")
    if len(set(devices)) < len(devices):
        raise ConfigError(f"a device is listed twice in {list(names)}; use a different device for each replica")
    gpus = available_gpus() if any(device.kind == "gpu" for device in devices) else 0
    for device in devices:
        if device.kind == "gpu" and device.index >= gpus:
            raise ConfigError(
                f"device {device} does not exist: this process sees {gpus} GPUs; use cpu:0, or check the driver"
            )
    return devices


def namespace(device: Device) -> ModuleType:
    """Returns the module whose functions make arrays on a device: `numpy`, or `cupy`."""
    return _loaded_cupy() if device.kind == "gpu" else np


def device_scope(device: Device) -> contextlib.AbstractContextManager[object]:
    """Returns a context in which the calling thread makes new arrays on a device."""
    if device.kind == "cpu":
        return contextlib.nullcontext()
    scope: contextlib.AbstractContextManager[object] = _loaded_cupy().cuda.Device(device.index)
    return scope


def _is_cupy(array: AnyArray) -> bool:
    # An array of CuPy cannot be there before CuPy is; this standbys the import to those without a GPU.
    return type(array).__module__.partition(".")[0] == "cupy" and hasattr(array, "device")


def device_of(array: AnyArray) -> Device:
    """Returns where an array lives; whatever is no CuPy array lives on `cpu:0`."""
    return Device("gpu", int(array.device.id)) if _is_cupy(array) else CPU


def to_device(array: AnyArray, device: Device) -> AnyArray:
    """Returns the array on a device: itself if it is there, else a copy, which the host does not wait for.

    Args:
        array: anything that `to_numpy` takes.
        device: the device that shall hold it.
    """
    if device.kind == "cpu":
        return to_numpy(array)
    found = as_array(array)
    if isinstance(found, np.ndarray):
        return _copies(device).upload(found)
    return found if device_of(found) == device else _copies(device).take(found)


def is_array(value: object) -> bool:
    """Returns whether it is an array of any library, or a NumPy scalar."""
    return isinstance(value, np.generic) or hasattr(value, "__dlpack_device__")


def as_array(value: Any) -> AnyArray:
    """Returns a value as a NumPy or CuPy array, where it lies; copies only if it must.

    Args:
        value: an array of NumPy or CuPy, or of another library on CPU or CUDA (PyTorch, JAX), or whatever
            `numpy.asarray` takes.

    Raises:
        TypeError: as of `conversions.on_host`.
    """
    if (type(value) is np.ndarray and value.dtype.isnative) or _is_cupy(value):
        return value
    if conversions.is_torch(value):
        on_cuda = value.is_cuda and value.layout is sys.modules["torch"].strided and not value.is_nested
        return _loaded_cupy().from_dlpack(value.detach()) if on_cuda else conversions.on_host(value)
    conversions.check_jax(value)
    if hasattr(value, "__dlpack_device__") and value.__dlpack_device__()[0] == _ON_CUDA:
        return _loaded_cupy().from_dlpack(value)
    return conversions.on_host(value)


def to_numpy(array: AnyArray) -> Array:
    """Returns the array in host memory, without a copy if it is there.

    Args:
        array: anything that `as_array` takes.
    """
    found = as_array(array)
    host: Array = found if isinstance(found, np.ndarray) else _loaded_cupy().asnumpy(found)
    return host


def begin_download(array: AnyArray, dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> Array | Download:
    """An array on its way to the host, contiguous; what is on the host is there already.

    Args:
        array: NumPy's or CuPy's; on a GPU it must not change before the copy has ended. What makes it must be in the
            calling thread's current stream, or in one that this stream waits for, as the null stream does.
        dtype: the dtype of the result.
        shape: the shape of the result, with as many elements as the array has.
    """
    if _is_cupy(array):
        return _copies(device_of(array)).download(array, dtype, shape)
    return np.ascontiguousarray(array, dtype).reshape(shape)


def empty_host(device: Device, dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> Array:
    """Returns a new array on the host, in pinned memory where the device is a GPU."""
    return np.empty(shape, dtype) if device.kind == "cpu" else _copies(device).pinned(dtype, shape)


def add(a: AnyArray, b: AnyArray) -> AnyArray:
    """Returns the sum of two arrays of one shape, on the device of the first."""
    device = device_of(a)
    with device_scope(device):
        return namespace(device).add(a, to_device(b, device))


# ---- Copies that nobody waits for ----


class Pending:
    """A host array that is on its way.

    Attributes:
        nbytes: of the array.
        here: the array, once it is known to be there; None before.
    """

    nbytes: int
    here: Array | None = None


class Coming(Pending):
    """An array that the program has promised, and is still computing. Given by one thread.

    Args:
        nbytes: size of the array, in bytes.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._then: list[Callable[[Array], object]] = []

    def when(self, then: Callable[[Array], object]) -> None:
        """Calls a function with the array, once it is given: after those that were registered before."""
        self._then.append(then)

    def give(self, array: Array) -> None:
        """Gives the array, `portable`, which nobody may change until its round is answered."""
        self.here = array
        told, self._then = self._then, []
        for then in told:
            then(array)


class Download(Pending):
    """A host array that a copy from a GPU fills, while the program goes on. May be waited for by any thread.

    Args:
        host: the array in host memory that the copy fills.
        done: the event at the end of the copy.
        over: called when somebody has seen that end.
    """

    def __init__(self, host: Array, done: _Event, over: Callable[[], object]) -> None:
        self._host = host
        self._done = done
        self._over = over
        self.nbytes = host.nbytes

    def wait(self) -> Array:
        """Waits for the end of the copy; returns the array. Raises the device's error if it has failed."""
        if self.here is None:
            self._done.synchronize()
            self.here = self._host
            self._over()
        return self.here


class _Copies:
    """The one stream of a GPU on which arrays come there and leave. May be used by any thread.

    The host waits for nothing, and the streams for as little as they can: a copy begins when the calling thread's
    current stream has done what it was given so far, and what that stream is given next begins when the copy that it
    needs has ended. Host memory is pinned, from CuPy's pool, where it goes back to with the last array that is made
    of it.
    """

    def __init__(self, device: Device) -> None:
        self._cupy: ModuleType = _loaded_cupy()
        self._device = device
        with device_scope(device):
            self._stream = self._cupy.cuda.Stream(non_blocking=True)
        self._lock = threading.Lock()  # guards what is held, which is in the order of the copies
        self._held: deque[tuple[_Event, tuple[AnyArray, ...]]] = deque()

    def download(self, array: AnyArray, dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> Download:
        """Begins to copy an array of this device to the host, contiguous, in a dtype and a shape."""
        with device_scope(self._device):
            there = self._cupy.ascontiguousarray(array, dtype).reshape(shape)
            host = self.pinned(there.dtype, there.shape)
            self._stream.wait_event(self._now(self._current()))
            there.data.copy_to_host_async(host.ctypes.data, host.nbytes, self._stream)
            return Download(host, self._copied(there, host), self._let_go)

    def upload(self, host: Array) -> AnyArray:
        """Copies a host array to this device; the host array may change when this returns."""
        with device_scope(self._device):
            there = self._cupy.empty(host.shape, host.dtype.newbyteorder("="))
            pinned = self.pinned(there.dtype, there.shape)
            pinned[...] = host
            current = self._current()
            # The array is the current stream's, which may still be reading what was in this memory before.
            self._stream.wait_event(self._now(current))
            there.data.copy_from_host_async(pinned.ctypes.data, pinned.nbytes, self._stream)
            current.wait_event(self._copied(there, pinned))
            return there

    def take(self, array: AnyArray) -> AnyArray:
        """Copies another GPU's array to this device."""
        with device_scope(device_of(array)):
            array = self._cupy.ascontiguousarray(array).reshape(array.shape)
            giving = self._current()
            made = self._now(giving)
        with device_scope(self._device):
            there = self._cupy.empty(array.shape, array.dtype)
            current = self._current()
            self._stream.wait_event(made)
            self._stream.wait_event(self._now(current))
            there.data.copy_from_device_async(array.data, array.nbytes, self._stream)
            done = self._copied(there, array)
            current.wait_event(done)
        with device_scope(device_of(array)):
            giving.wait_event(done)  # What it is given next may change the array.
        return there

    def _current(self) -> Any:
        return self._cupy.cuda.get_current_stream()

    def _now(self, stream: _Stream) -> _Event:
        """Records the end of the work that a stream of the current device was given so far; returns the event."""
        return stream.record(self._cupy.cuda.Event(block=True, disable_timing=True))

    def pinned(self, dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> Array:
        """Allocates a pinned host array."""
        size = math.prod(shape)
        if not size:
            return np.empty(shape, dtype)
        memory = self._cupy.cuda.alloc_pinned_memory(size * dtype.itemsize)
        return np.frombuffer(memory, dtype, size).reshape(shape)

    def _copied(self, *arrays: AnyArray) -> _Event:
        """Records the end of a copy, and holds its arrays until then, so that nobody else gets their memory."""
        with self._lock:
            done = self._now(self._stream)
            self._held.append((done, arrays))
        self._let_go()
        return done

    def _let_go(self) -> None:
        with self._lock:
            while self._held and self._held[0][0].done:
                self._held.popleft()


@cache
def _copies(device: Device) -> _Copies:
    return _Copies(device)
