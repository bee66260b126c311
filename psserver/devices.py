"""The device of a server's arrays: NumPy on the CPU, CuPy on a GPU, by the same code.

The only module of the server that imports CuPy, and only for a GPU. CuPy imports without a driver, so availability is
decided by a device, not by the package.
"""

from __future__ import annotations

import contextlib
import math
import re
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np

from pswire.errors import ConfigError
from pswire.model.tensor import Array

PINNED = 1 << 16
"""Bytes of a host array from which on pinned memory pays: to wait for a copy from there takes longer for less."""

_NAME = re.compile(r"cpu(?::0)?|gpu(?::(?P<gpu>\d+))?", re.IGNORECASE)


@dataclass(frozen=True)
class ServerDevice:
    """The CPU, or one GPU. May be used from any thread.

    Attributes:
        gpu: index of the GPU; None for the CPU.
    """

    gpu: int | None = None

    def __str__(self) -> str:
        return "cpu" if self.gpu is None else f"gpu:{self.gpu}"

    @classmethod
    def parse(cls, text: str) -> ServerDevice:
        """Reads `cpu`, `gpu` or `gpu:1`.

        Raises:
            ConfigError: the text names no device, or that GPU is not there; the message says what to do.
        """
        match = _NAME.fullmatch(text)
        if not match:
            raise ConfigError(f"{text!r} is not a device; write cpu or gpu:0")
        if text.lower().startswith("cpu"):
            return cls()
        index = int(match["gpu"] or 0)
        count = _gpu_count()
        if index >= count:
            seen = "gpu:0" if count == 1 else f"gpu:0 to gpu:{count - 1}"
            raise ConfigError(
                f"there is no gpu:{index}: "
                + (f"this machine has {seen}" if count else "CUDA finds no device; check the driver (nvidia-smi)")
                + "; or start with --device cpu"
            )
        return cls(index)

    @property
    def xp(self) -> Any:
        """The array API namespace of this device's arrays.

        NumPy is one itself; the wrapper in `array_api_compat` takes longer to import than the rest of NumPy.
        """
        if self.gpu is None:
            return np
        _cupy()
        from array_api_compat import cupy as cupy_api

        return cupy_api

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """Returns a context in which the calling thread makes new arrays on this device."""
        if self.gpu is None:
            return contextlib.nullcontext()
        scope: contextlib.AbstractContextManager[Any] = _cupy().cuda.Device(self.gpu)
        return scope

    def put(self, array: Array) -> Any:
        """Copies a host array to this device, as it is now; on the CPU returns the array itself.

        On a GPU the calling thread waits until the array has been read, and its current stream for the copy.
        """
        return array if self.gpu is None else _copies(self).put(np.asarray(array))

    def get(self, array: Any) -> Array:
        """Copies an array of this device to host memory; on the CPU returns the array itself.

        The copy of a GPU's array is in pinned memory, which is reused once the copy is gone. The calling thread waits
        for the copy, but not for work that its current stream is given later.
        """
        if self.gpu is None or isinstance(array, np.ndarray | np.generic):
            return np.asarray(array)
        return _copies(self).get([array])[0]

    def get_all(self, arrays: Sequence[Any]) -> list[Array]:
        """Copies several arrays as `get`; the calling thread waits once, for all of them."""
        there = [array for array in arrays if not isinstance(array, np.ndarray | np.generic)]
        copies = iter(_copies(self).get(there) if self.gpu is not None and there else there)
        return [np.asarray(a) if isinstance(a, np.ndarray | np.generic) else next(copies) for a in arrays]

    def room(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Allocates a host array that is going to be `put`: for a GPU a large one is pinned, and goes there sooner."""
        if self.gpu is None or math.prod(shape) * dtype.itemsize < PINNED:
            return np.empty(shape, dtype)
        return _copies(self).pinned(shape, dtype)

    def elementwise(self, inputs: str, outputs: str, operation: str, preamble: str, scalars: Sequence[bool]) -> Any:
        """Compiles a `cupy.ElementwiseKernel` for this GPU.

        Args:
            inputs, outputs: parameters such as `float32 a0, float32 a1`.
            operation: CUDA statements for one element.
            preamble: CUDA functions that they call.
            scalars: one flag per input; True if it has a single element, shared by all.
        """
        cupy = _cupy()
        # Without contraction a product is rounded before it is added, as in the interpreter.
        kernel = cupy.ElementwiseKernel(
            inputs, outputs, operation, "update", preamble=preamble, options=("--fmad=false",)
        )
        # CuPy compiles at the first call for each memory layout: these arguments have the layout of those in rounds.
        taken = zip(inputs.split(", "), scalars, strict=True)
        given = [cupy.zeros(() if scalar else 2, parameter.split()[-2]) for parameter, scalar in taken]
        kernel(*given, *(cupy.zeros(2, parameter.split()[-2]) for parameter in outputs.split(", ")))
        return kernel


class _Copies:
    """The stream of a GPU that carries all copies from and to the host. May be used by any thread.

    A copy begins once the calling thread's current stream has done the work it was given so far, so no stream waits for
    more than it needs. Host memory that is filled from the GPU is pinned and comes from CuPy's pool. It returns there
    with the last array or payload that uses it.
    """

    def __init__(self, device: ServerDevice) -> None:
        self._cupy: Any = _cupy()
        self._device = device
        with device.scope():
            self._stream = self._cupy.cuda.Stream(non_blocking=True)
        self._lock = threading.Lock()  # guards `_held`, which is in the order of the copies
        self._held: deque[tuple[Any, tuple[Any, ...]]] = deque()

    def put(self, array: Array) -> Any:
        host = np.ascontiguousarray(array)
        with self._device.scope():
            there = self._cupy.empty(array.shape, array.dtype)
            current = self._cupy.cuda.get_current_stream()
            # The memory is the current stream's, which may still be reading its earlier content.
            self._stream.wait_event(self._now(current))
            # CUDA has read memory that is not pinned when this returns. Its own way, through pinned memory in pieces,
            # takes three fifths of the time of a copy into pinned memory and one from there.
            there.data.copy_from_host_async(host.ctypes.data, host.nbytes, self._stream)
            done = self._copied(there, host)
            current.wait_event(done)
            if self._is_pinned(host):
                done.synchronize()
            return there

    def get(self, arrays: Sequence[Any]) -> list[Array]:
        with self._device.scope():
            there = [self._cupy.ascontiguousarray(array).reshape(array.shape) for array in arrays]
            hosts = [self.pinned(array.shape, array.dtype) for array in there]
            self._stream.wait_event(self._now(self._cupy.cuda.get_current_stream()))
            for array, host in zip(there, hosts, strict=True):
                array.data.copy_to_host_async(host.ctypes.data, host.nbytes, self._stream)
            done = self._copied(*there, *hosts)
        done.synchronize()
        self._let_go()
        return hosts

    def pinned(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Allocates a pinned host array."""
        size = math.prod(shape)
        if not size:
            return np.empty(shape, dtype)
        memory = self._cupy.cuda.alloc_pinned_memory(size * dtype.itemsize)
        return np.frombuffer(memory, dtype, size).reshape(shape)

    def _is_pinned(self, host: Array) -> bool:
        runtime = self._cupy.cuda.runtime
        kind = runtime.pointerGetAttributes(host.ctypes.data).type if host.nbytes else None
        return bool(kind == runtime.memoryTypeHost)

    def _now(self, stream: Any) -> Any:
        """Records the end of a stream's work so far; returns the event. A thread that waits for it sleeps."""
        return stream.record(self._cupy.cuda.Event(block=True, disable_timing=True))

    def _copied(self, *arrays: Any) -> Any:
        """Records the end of copies; returns the event.

        Holds their arrays until then, so that nobody else gets their memory.
        """
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
def _copies(device: ServerDevice) -> _Copies:
    return _Copies(device)


def _cupy() -> ModuleType:
    try:
        import cupy
    except ImportError as error:
        raise ConfigError(
            f"a GPU needs CuPy, which cannot be imported ({error}); run pip install -e '.[gpu]' in the clone, or use "
            "--device cpu"
        ) from None
    return cupy  # type: ignore[no-any-return,unused-ignore]


def _gpu_count() -> int:
    cupy = _cupy()
    try:
        return int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError:  # also: there is no driver
        return 0


def owned(value: Array) -> Array:
    """Returns the array itself if it owns contiguous memory, else a copy: a view would keep a whole message alive."""
    if isinstance(value, np.ndarray) and not (value.flags.owndata and value.flags.c_contiguous):
        return np.array(value, order="C", copy=True)
    return value
