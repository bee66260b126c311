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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any, ClassVar, Literal, Protocol, TypeVar

import numpy as np

from psclient._src.arrays import conversions
from pswire.cluster import Task
from pswire.errors import ConfigError
from pswire.limits import ALIGN
from pswire.model.tensor import Array, align

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

PACK_BYTES = 1 << 20
"""Bytes of small arrays that one copy takes from or to a GPU. They cross the bus in 19 us, and a wait for one more copy
takes 37, as measured on one H100. Larger arrays are copied by themselves: each is sent while the next one comes."""


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
        return begin_uploads([found], device)[0].array()
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


def for_host(array: AnyArray, dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> Array | Download:
    """Returns an array on the host, contiguous: itself, or for one of a GPU the copy that `begin_downloads` begins.

    Args:
        array: NumPy's or CuPy's; on a GPU it must not change before the copy has ended. What makes it must be in the
            calling thread's current stream, or in one that this stream waits for, as the null stream does.
        dtype: the dtype of the result.
        shape: the shape of the result, with as many elements as the array has.
    """
    if not _is_cupy(array):
        return np.ascontiguousarray(array, dtype).reshape(shape)
    if not array.size:
        return np.empty(shape, dtype)
    with device_scope(device_of(array)):
        return Download(_loaded_cupy().ascontiguousarray(array, dtype).reshape(shape))


def begin_downloads(arrays: Iterable[object]) -> None:
    """Begins those of some arrays that are downloads: of each device in their order, small ones by one copy."""
    by_device: dict[Device, list[Download]] = {}
    for each in arrays:
        if type(each) is Download:
            by_device.setdefault(device_of(each.source), []).append(each)
    for device, some in by_device.items():
        _copies(device).download(some)


def begin_uploads(hosts: Sequence[Array], device: Device) -> list[Upload]:
    """Copies host arrays to a GPU, all by one copy, which the host does not wait for; they may change at once."""
    return _copies(device).upload(hosts)


def empty_host(device: Device, dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> Array:
    """Returns a new array on the host, in pinned memory where the device is a GPU."""
    if device.kind == "cpu":
        return np.empty(shape, dtype)
    return _copies(device).pinned(math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)


class _Sized(Protocol):
    @property
    def nbytes(self) -> int:
        """Size in bytes."""


_SizedT = TypeVar("_SizedT", bound=_Sized)


def packs(arrays: Iterable[_SizedT]) -> list[list[_SizedT]]:
    """Groups arrays that follow one another: those of a group have `PACK_BYTES` at most, or are one."""
    found: list[list[_SizedT]] = []
    room = -1
    for array in arrays:
        room -= align(array.nbytes)
        if room < 0:
            found.append([])
            room = PACK_BYTES - align(array.nbytes)
        found[-1].append(array)
    return found


def pack_layout(arrays: Iterable[_Sized]) -> tuple[list[slice], int]:
    """Returns where arrays lie in one buffer, aligned, and the size of the buffer, in bytes."""
    places, end = [], 0
    for array in arrays:
        places.append(slice(end, end + array.nbytes))
        end = align(end + array.nbytes)
    return places, end


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


class _Transfer:
    """A copy from a GPU, of one array or of several. May be waited for by any thread.

    Args:
        done: the event at its end.
        over: called when somebody has seen that end.
    """

    def __init__(self, done: _Event, over: Callable[[], object]) -> None:
        self._done = done
        self._over = over
        self._ended = False

    def synchronize(self) -> None:
        """Waits for its end, once; raises the device's error if it has failed."""
        if not self._ended:
            self._done.synchronize()
            self._ended = True
            self._over()


class Download(Pending):
    """A host array that a copy from a GPU fills, while the program goes on. Once begun, any thread may wait for it.

    Args:
        source: the array of the GPU, contiguous.
    """

    def __init__(self, source: AnyArray) -> None:
        self.source: AnyArray = source
        self.nbytes = source.nbytes

    def begin(self, host: Array, transfer: _Transfer) -> None:
        """Notes the copy that fills it, and its bytes on the host, of the same dtype and shape once they are there."""
        self._host = host.view(self.source.dtype).reshape(self.source.shape)
        self._transfer = transfer
        self.source = None

    def wait(self) -> Array:
        """Waits for the end of the copy; returns the array. Raises the device's error if it has failed."""
        if self.here is None:
            self._transfer.synchronize()
            self.here = self._host
        return self.here


class Upload:
    """An array of a GPU that a copy from the host fills. May be used by any thread.

    Args:
        there: the array.
        done: the event at the end of the copy.
    """

    def __init__(self, there: AnyArray, done: _Event) -> None:
        self._there = there
        self._done = done

    def array(self) -> AnyArray:
        """Returns the array; what the calling thread's current stream is given next comes after the copy."""
        if not self._done.done:
            with device_scope(device_of(self._there)):
                _loaded_cupy().cuda.get_current_stream().wait_event(self._done)
        return self._there


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
            self._gap = self._cupy.empty(ALIGN, np.uint8)  # lies between arrays that are joined, and is never sent
        self._lock = threading.Lock()  # guards what is held, which is in the order of the copies
        self._held: deque[tuple[_Event, tuple[AnyArray, ...]]] = deque()

    def download(self, wanted: Sequence[Download]) -> None:
        """Begins to copy arrays of this device to the host, in their order: a pack of small ones by one copy."""
        with device_scope(self._device):
            joined = [(pack, self._joined(pack)) for pack in packs(wanted)]
            self._stream.wait_event(self._now(self._current()))
            for pack, there in joined:
                host = self.pinned(there.nbytes)
                there.data.copy_to_host_async(host.ctypes.data, there.nbytes, self._stream)
                # What was joined is held as well: the memory of another library's array is not the current stream's.
                copy = _Transfer(self._copied(there, host, *[each.source for each in pack]), self._let_go)
                for each, place in zip(pack, pack_layout(pack)[0], strict=True):
                    each.begin(host[place], copy)

    def _joined(self, pack: Sequence[Download]) -> AnyArray:
        """Returns one array with the bytes of several, each where `pack_layout` has it; of one array itself."""
        if len(pack) == 1:
            return pack[0].source
        parts: list[AnyArray] = []
        for each in pack:
            parts += [each.source.reshape(-1).view(np.uint8), self._gap[: -each.nbytes % ALIGN]]
        return self._cupy.concatenate([part for part in parts if part.size])

    def upload(self, hosts: Sequence[Array]) -> list[Upload]:
        """Copies host arrays to this device by one copy; the host arrays may change when this returns."""
        places, size = pack_layout(hosts)
        with device_scope(self._device):
            there, pinned = self._cupy.empty(size, np.uint8), self.pinned(size)
            made = []
            for host, place in zip(hosts, places, strict=True):
                dtype = host.dtype.newbyteorder("=")
                pinned[place].view(dtype).reshape(host.shape)[...] = host
                made.append(there[place].view(dtype).reshape(host.shape))
            current = self._current()
            # The memory is the current stream's, which may still be reading what was in it before.
            self._stream.wait_event(self._now(current))
            there.data.copy_from_host_async(pinned.ctypes.data, size, self._stream)
            done = self._copied(there, pinned)
        return [Upload(array, done) for array in made]

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

    def pinned(self, size: int) -> Array:
        """Allocates bytes of pinned host memory."""
        if not size:
            return np.empty(0, np.uint8)
        return np.frombuffer(self._cupy.cuda.alloc_pinned_memory(size), np.uint8, size)

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
