"""Stands in for CuPy on machines without a GPU: devices that do nothing until somebody waits for it.

A stream runs its work only as far as an event is waited for, and memory that nothing was written to has the byte 0xAA:
whoever forgets to wait reads that. Only what our array modules use is there. The real thing is tested in tests/gpu.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from psclient._src.arrays import devices as client_arrays
from psserver import devices as server_arrays

UNWRITTEN = 0xAA
DEVICES = 2


class CUDARuntimeError(RuntimeError):
    """What a device says that has failed."""


class Event:
    """A place in the work of a stream."""

    def __init__(self, block: bool = False, disable_timing: bool = False) -> None:
        self._stream: Stream | None = None
        self._end = 0

    def at(self, stream: Stream) -> Event:
        """The same event, recorded."""
        self._stream, self._end = stream, len(stream.work)
        return self

    @property
    def done(self) -> bool:
        """Whether the stream has come so far."""
        return self._stream is None or self._stream.done >= self._end

    def synchronize(self) -> None:
        """Has the stream come so far."""
        if self._stream is not None:
            self._stream.run(self._end)


class Stream:
    """Work in order, which is done when it is waited for."""

    def __init__(self, non_blocking: bool = False) -> None:
        self.work: list[Callable[[], object]] = []
        self.done = 0

    def record(self, event: Event) -> Event:
        """An event here."""
        return event.at(self)

    def wait_event(self, event: Event) -> None:
        """What is added from now on comes after an event, as it is now."""
        self.work.append(copy.copy(event).synchronize)

    def run(self, end: int) -> None:
        """Does its work up to a place."""
        while self.done < end:
            work, self.work[self.done] = self.work[self.done], int  # what was done holds no memory
            work()
            self.done += 1

    def finish(self) -> None:
        """Does all of its work."""
        self.run(len(self.work))


class Memory:
    """Memory of a device. Copies hold none: it must be there when they are made."""

    def __init__(self, size: int) -> None:
        self.bytes = np.full(size, UNWRITTEN, np.uint8)

    def copy_to_host_async(self, host: int, size: int, stream: Stream) -> None:
        """Writes host memory."""
        me = weakref.ref(self)
        stream.work.append(lambda: ctypes.memmove(host, _there(me).ctypes.data, size))

    def copy_from_host_async(self, host: int, size: int, stream: Stream) -> None:
        """Reads host memory."""
        me = weakref.ref(self)
        stream.work.append(lambda: ctypes.memmove(_there(me).ctypes.data, host, size))

    def copy_from_device_async(self, other: Memory, size: int, stream: Stream) -> None:
        """Reads another device."""
        me, them = weakref.ref(self), weakref.ref(other)
        stream.work.append(lambda: np.copyto(_there(me)[:size], _there(them)[:size]))


def _there(memory: weakref.ref[Memory]) -> np.ndarray[Any, Any]:
    found = memory()
    assert found is not None, "a copy uses memory that somebody else may have by now"
    return found.bytes


class Gpu:
    """The stand-in: the devices of one test.

    Attributes:
        module: in place of `cupy`.
        streams: of each device the one that its work is given to.
        pinned: pinned memory that is in use.
    """

    def __init__(self) -> None:
        self._here = threading.local()
        self.streams = [Stream() for _ in range(DEVICES)]
        self.pinned: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        gpu = self

        class ndarray:
            """An array of a device."""

            __module__ = "cupy"

            def __init__(self, shape: tuple[int, ...], dtype: Any, data: Memory | None = None) -> None:
                self.shape, self.dtype = tuple(shape), np.dtype(dtype)
                self.size = int(np.prod(shape, dtype=int))
                self.nbytes, self.ndim = self.size * self.dtype.itemsize, len(self.shape)
                self.device = SimpleNamespace(id=gpu.device)
                self.data = data or Memory(self.nbytes)

            def __len__(self) -> int:
                return self.shape[0]

            def reshape(self, shape: tuple[int, ...]) -> ndarray:
                """The same memory in another shape."""
                return ndarray(shape, self.dtype, self.data)

            def copy(self) -> ndarray:
                """Memory of its own."""
                return gpu.compute(np.copy, self)

            def astype(self, dtype: Any) -> ndarray:
                """In another dtype."""
                return gpu.compute(lambda array: array.astype(dtype), self)

            @property
            def host(self) -> np.ndarray[Any, Any]:
                """What is in its memory at this moment."""
                return self.data.bytes.view(self.dtype).reshape(self.shape)

        self.ndarray = ndarray
        module: Any = ModuleType("cupy")
        module.ndarray, module.empty = ndarray, ndarray
        module.add = lambda a, b: self.compute(np.add, a, b)
        module.ascontiguousarray = lambda a, dtype=None: a if dtype in (None, a.dtype) else a.astype(dtype)
        module.cuda = SimpleNamespace(
            Device=self._on,
            Stream=Stream,
            Event=Event,
            get_current_stream=lambda: self.streams[self.device],
            alloc_pinned_memory=self._pin,
            runtime=SimpleNamespace(
                getDeviceCount=lambda: DEVICES,
                CUDARuntimeError=CUDARuntimeError,
                memoryTypeHost=1,
                pointerGetAttributes=lambda host: SimpleNamespace(type=0),
            ),
        )
        self.module = module

    @property
    def device(self) -> int:
        """The calling thread's."""
        return getattr(self._here, "device", 0)

    @contextlib.contextmanager
    def _on(self, device: int) -> Iterator[None]:
        before, self._here.device = self.device, device
        try:
            yield
        finally:
            self._here.device = before

    def _pin(self, size: int) -> Any:
        memory = np.full(-(-size // 512) * 512, UNWRITTEN, np.uint8)
        self.pinned[id(memory)] = memory
        return memory

    def compute(self, fn: Callable[..., Any], *arrays: Any) -> Any:
        """A new array, which a function will have computed when the current stream has come so far."""
        like = fn(*(np.zeros(array.shape, array.dtype) for array in arrays))
        made = self.ndarray(like.shape, like.dtype)
        memory, taken = weakref.ref(made.data), [(array.data, array.host) for array in arrays]

        def work() -> None:
            if (out := memory()) is not None:
                np.copyto(out.bytes.view(like.dtype).reshape(like.shape), fn(*(host for _, host in taken)))

        self.streams[self.device].work.append(work)
        return made

    def array(self, value: Any, device: int = 0) -> Any:
        """An array of a device that will have a value."""
        with self._on(device):
            return self.compute(lambda: np.array(value))

    def break_down(self, device: int = 0) -> None:
        """What a device is given next fails."""

        def fail() -> None:
            raise CUDARuntimeError("an illegal memory access was encountered")

        self.streams[device].work.append(fail)


@contextlib.contextmanager
def slow_gpu() -> Iterator[Gpu]:
    """Has our array modules use the stand-in."""
    gpu, before = Gpu(), sys.modules.get("cupy")
    sys.modules["cupy"] = gpu.module
    _forget()  # Where there is a GPU, earlier tests may have used it.
    try:
        yield gpu
    finally:
        _forget()
        if before is None:
            del sys.modules["cupy"]
        else:
            sys.modules["cupy"] = before


def _forget() -> None:
    client_arrays._copies.cache_clear()
    server_arrays._copies.cache_clear()
