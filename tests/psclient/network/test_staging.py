"""Contributions on their way from GPUs, which are sent while they grow: who waits for whom.

A stand-in that does nothing before somebody waits shows each wait that is missing; real devices are in tests/gpu.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import psclient as ps
from psclient._src.arrays import devices
from psclient._src.arrays.devices import Device, Download
from psclient._src.distribute.destinations import to_devices
from psclient._src.distribute.reduction import combine
from psclient._src.network import staging
from psclient._src.variables.device_copies import DeviceCopies
from psserver import devices as server_arrays
from psserver.devices import ServerDevice
from pswire.errors import PSError
from pswire.limits import ALIGN
from pswire.model.tensor import align
from pswire.network.payload import Payload
from pswire.network.traffic import TRANSPORTS
from tests.kit.rig import SOON
from tests.kit.strategies import refused
from tests.kit.transports import SIZE, Site, eventually

# ---- a stand-in for CuPy ----
#
# A stream runs its work only as far as an event is waited for. Memory that nothing was written to has the byte 0xAA,
# which a reader that forgets to wait reads. Only what our array modules use is there; the real thing is in tests/gpu.

UNWRITTEN = 0xAA
DEVICES = 2


class CUDARuntimeError(RuntimeError):
    """What a device says that has failed."""


class Event:
    """A place in the work of a stream.

    Args:
        gpu: counts the waits of the host.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
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
        """The host waits until the stream has come so far."""
        self._gpu.waits += 1
        self.reach()

    def reach(self) -> None:
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
        self.work.append(copy.copy(event).reach)

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
    """Memory of a device, or a part of it. Copies hold none: it must be there when they are made.

    Args:
        gpu: counts the copies from and to the host.
        block: all of the memory.
        bytes: the part.
    """

    def __init__(self, gpu: Gpu, block: np.ndarray[Any, Any], bytes: np.ndarray[Any, Any]) -> None:
        self._gpu, self.block, self.bytes = gpu, block, bytes

    def part(self, at: slice) -> Memory:
        """Some of its bytes."""
        return Memory(self._gpu, self.block, self.bytes[at])

    @property
    def place(self) -> Callable[[], np.ndarray[Any, Any]]:
        """Gives its bytes, as long as somebody else holds them."""
        block, at = weakref.ref(self.block), self.bytes.ctypes.data - self.block.ctypes.data

        def bytes() -> np.ndarray[Any, Any]:
            found = block()
            assert found is not None, "a copy uses memory that somebody else may have by now"
            return found[at:]  # type: ignore[no-any-return]

        return bytes

    def copy_to_host_async(self, host: int, size: int, stream: Stream) -> None:
        """Writes host memory."""
        self._gpu.downloads += 1
        place = self.place
        stream.work.append(lambda: ctypes.memmove(host, place().ctypes.data, size))

    def copy_from_host_async(self, host: int, size: int, stream: Stream) -> None:
        """Reads host memory."""
        self._gpu.uploads += 1
        place = self.place
        stream.work.append(lambda: ctypes.memmove(place().ctypes.data, host, size))

    def copy_from_device_async(self, other: Memory, size: int, stream: Stream) -> None:
        """Reads another device."""
        mine, theirs = self.place, other.place
        stream.work.append(lambda: np.copyto(mine()[:size], theirs()[:size]))


class Gpu:
    """The stand-in: the devices of one test.

    Attributes:
        module: in place of `cupy`.
        streams: of each device the one that its work is given to.
        pinned: pinned memory that is in use.
        downloads, uploads: number of copies to the host, and from there.
        waits: number of events that the host has waited for.
    """

    def __init__(self) -> None:
        self._here = threading.local()
        self.streams = [Stream() for _ in range(DEVICES)]
        self.pinned: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self.downloads = self.uploads = self.waits = 0
        gpu = self

        class ndarray:
            """An array of a device."""

            __module__ = "cupy"

            def __init__(self, shape: tuple[int, ...], dtype: Any, data: Memory | None = None) -> None:
                self.shape, self.dtype = tuple(shape), np.dtype(dtype)
                self.size = int(np.prod(shape, dtype=int))
                self.nbytes, self.ndim = self.size * self.dtype.itemsize, len(self.shape)
                self.device = SimpleNamespace(id=gpu.device)
                block = np.full(self.nbytes, UNWRITTEN, np.uint8)
                self.data = data or Memory(gpu, block, block)

            def __len__(self) -> int:
                return self.shape[0]

            def __getitem__(self, at: slice) -> ndarray:
                """Some of a flat array of bytes."""
                part = self.data.part(at)
                return ndarray(part.bytes.shape, np.uint8, part)

            def reshape(self, shape: tuple[int, ...] | int) -> ndarray:
                """The same memory in another shape."""
                return ndarray((self.size,) if shape == -1 else shape, self.dtype, self.data)

            def view(self, dtype: Any) -> ndarray:
                """The same memory of a flat array in another dtype."""
                return ndarray((self.nbytes // np.dtype(dtype).itemsize,), dtype, self.data)

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
        module.ndarray = ndarray
        module.empty = lambda shape, dtype: ndarray((shape,) if isinstance(shape, int) else shape, dtype)
        module.concatenate = lambda arrays: self.compute(lambda *each: np.concatenate(each), *arrays)
        module.add = lambda a, b: self.compute(np.add, a, b)
        module.ascontiguousarray = lambda a, dtype=None: a if dtype in (None, a.dtype) else a.astype(dtype)
        module.cuda = SimpleNamespace(
            Device=self._on,
            Stream=Stream,
            Event=lambda block, disable_timing: Event(self),
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
        memory, taken = weakref.ref(made.data.block), [(array.data, array.host) for array in arrays]

        def work() -> None:
            if (out := memory()) is not None:
                np.copyto(out.view(like.dtype).reshape(like.shape), fn(*(host for _, host in taken)))

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


# ---- tests ----

GPU, OTHER = Device("gpu", 0), Device("gpu", 1)


def _forget() -> None:
    devices._copies.cache_clear()
    server_arrays._copies.cache_clear()


@pytest.fixture
def gpu(monkeypatch):
    """Has our array modules use the stand-in."""
    found = Gpu()
    monkeypatch.setitem(sys.modules, "cupy", found.module)
    _forget()  # Where there is a GPU, earlier tests may have used it.
    yield found
    _forget()


def download(array: devices.AnyArray) -> Download:
    """A copy of an array, begun."""
    (begun,) = downloads([array])
    assert isinstance(begun, Download)
    return begun


def downloads(arrays: Sequence[devices.AnyArray]) -> list[staging.Sent]:
    """Copies of arrays, begun together; an empty array is there at once."""
    begun: list[staging.Sent] = [devices.for_host(array, array.dtype, array.shape) for array in arrays]
    devices.begin_downloads(begun)
    return begun


def brought(array: devices.AnyArray) -> list[float]:
    """What is in an array of a device."""
    return download(array).wait().tolist()


@pytest.mark.parametrize("value", [[1.0, 2.0, 3.0], 4.0, [], [[1, 2], [3, 4]]])
def test_arrays_go_to_the_device_and_back(gpu, value):
    """Of any shape; and what is computed there comes after they have come."""
    host = np.array(value)
    there = devices.to_device(host, GPU)
    assert devices.device_of(there) == GPU
    assert devices.to_device(there, GPU) is there
    back = staging.host(*downloads([devices.add(there, there)]))
    assert (back.shape, back.dtype) == (host.shape, host.dtype)
    assert back.tolist() == (host + host).tolist()


def test_devices_wait_for_one_another(gpu):
    """Work on a device for what comes there; and that, which may get memory that is still read, for work under way."""
    for array in (np.array([1.0, 2.0]), gpu.array([1.0, 2.0], 1)):
        there = devices.to_device(array, GPU)
        doubled = devices.add(there, there)
        gpu.streams[0].finish()
        assert doubled.host.tolist() == [2, 4]
        before = gpu.array([3.0])
        there = devices.to_device(array, GPU)
        devices._copies(GPU)._stream.finish()
        assert there.host.tolist() == [1, 2]
        assert before.host.tolist() == [3]


def test_who_gave_an_array_may_change_it(gpu):
    """Once its upload, or its copy to another device, has begun: what comes next on its stream waits for that."""
    host = np.ones(3)
    there = devices.to_device(host, GPU)
    host[:] = 2
    assert brought(there) == [1, 1, 1]
    mine = gpu.array([1.0, 2.0], 1)
    taken = devices.to_device(mine, GPU)
    stream = gpu.streams[1]
    stream.work.append(lambda: mine.host.fill(7))
    stream.finish()
    assert mine.host.tolist() == [7, 7]
    assert brought(taken) == [1, 2]


def test_nothing_is_waited_for_that_comes_later(gpu):
    """Neither by the copy, nor by whoever waits for it."""
    made = gpu.array([1.0, 2.0])
    begun = download(made)
    assert begun.here is None
    assert not gpu.streams[0].done
    later = devices.add(made, made)
    assert begun.wait() is begun.here
    assert begun.wait().tolist() == [1, 2]
    assert (later.data.bytes == 0xAA).all()


def test_what_a_copy_uses_is_held_until_it_has_ended(gpu):
    """And no longer: the memory of gradients serves the next step, pinned memory the next round; a copy that nobody
    waits for, as of a section that failed, is let go by the next."""
    made = gpu.array([1.0, 2.0])
    gone, begun = weakref.ref(made.data.block), download(made)
    del made
    gc.collect()
    assert gone() is not None
    payload = staging.pack([begun])
    staging.fill([begun], [payload])
    assert np.frombuffer(payload.chunks[0][1]).tolist() == [1, 2]
    del begun
    gc.collect()
    assert gone() is None
    assert len(gpu.pinned) == 1
    del payload
    for _ in range(3):
        download(gpu.array([1.0]))
    assert len(gpu.pinned) == 3
    assert brought(gpu.array([2.0])) == [2]
    gc.collect()
    assert not gpu.pinned


def test_arrays_of_several_devices_are_summed_on_the_first(gpu):
    """In the order of the replicas, with the bits that the CPU gives; rows are brought to each, but for the host."""
    rng = np.random.default_rng(0)
    values = [(rng.standard_normal(50) * 10.0**place).astype("float32") for place in range(4)]
    there = [gpu.array(value, place % 2) for place, value in enumerate(values)]
    for op in ("sum", "mean"):
        expected = combine(op, values, frozenset([2]), None)
        found = combine(op, there, frozenset([2]), None)
        assert devices.device_of(found.total) == GPU
        assert (found.weight, found.spec) == (expected.weight, expected.spec)
        begun = found.array
        devices.begin_downloads([begun])
        assert isinstance(begun, Download)
        assert begun.wait().tobytes() == expected.array.tobytes()
    some = ps.IndexedSlices(np.ones((2, 3)), [0, 4], (5, 3))
    assert [devices.device_of(each.values) for each in to_devices(some, (GPU, OTHER)).values] == [GPU, OTHER]
    assert all(each is some for each in to_devices(some, (Device("cpu", 0), Device("cpu", 1))).values)


def test_a_server_brings_arrays_there_and_back(gpu):
    """Whatever their shape; and keeps no pinned memory that nobody reads."""
    device = ServerDevice.parse("gpu:1")
    there = device.put(np.array([1.0, 2.0]))
    with device.scope():
        doubled, before = gpu.module.add(there, there), gpu.array([3.0], 1)
    gpu.streams[1].run(len(gpu.streams[1].work) - 1)
    assert doubled.host.tolist() == [2, 4]
    assert device.get(doubled).tolist() == [2, 4]
    assert device.get(before).tolist() == [3]
    late = device.put(np.array([5.0]))
    following = gpu.array([6.0], 1)
    assert device.get(late).tolist() == [5]
    assert device.get(following).tolist() == [6]
    for host in (np.arange(6.0).reshape(2, 3), np.array(4, "int64"), np.empty((0, 3))):
        there = device.put(host)
        assert there.device.id == 1
        back = device.get(there)
        assert (back.shape, back.dtype, back.tolist()) == (host.shape, host.dtype, host.tolist())
        del back
    gc.collect()
    assert len(gpu.pinned) == 0


def test_a_staged_payload_is_that_of_the_host_arrays(gpu):
    """It grows with each copy that ends, up to the first that has not; what is on the host goes along. Without a device
    it is whole at once, over the arrays' own memory; nobody can look at what is still computed."""
    rng = np.random.default_rng(1)
    hosts = [rng.standard_normal(size) for size in (1, 100, 0, 7, 33)]
    sent = [host if place in (0, 3) else downloads([gpu.array(host)])[0] for place, host in enumerate(hosts)]
    whole, payload = Payload.pack(hosts), staging.pack(sent)
    assert payload.size == whole.size
    ends = []
    for place in (4, 1):
        sent[place].wait()
        payload.grow()
        ends.append(payload.end)
    assert ends == [8, whole.size]
    assert [(at, bytes(data)) for at, data in payload.chunks] == [(at, bytes(data)) for at, data in whole.chunks]
    host = np.arange(5.0)
    payload = staging.pack([host])
    assert type(payload) is Payload
    assert np.shares_memory(np.frombuffer(payload.chunks[0][1]), host)
    staging.fill([host, None], [payload])
    coming = devices.Coming(host.nbytes)
    refused(ValueError, "still computed", lambda: staging.host(coming))
    coming.give(host)
    assert staging.host(coming) is host


MIXED = [np.arange(n).astype(d) for n, d in enumerate("?bhifdFDfB", start=1)]
"""Arrays of several dtypes, whose ends are not aligned."""


def test_small_arrays_leave_by_one_copy_and_one_wait(gpu):
    """Of any dtype and shape, each at its place; none is there before the wait, and what the program writes to them
    once the copy has begun comes too late."""
    hosts = [np.array(5.0), *MIXED, np.empty((0, 3)), np.ones((2, 3), "float32")]
    there = [gpu.array(host) for host in hosts]
    sent = downloads(there)
    for array in there:
        gpu.streams[0].work.append(lambda array=array: array.data.bytes.fill(0xFF))
    payload = staging.pack(sent)
    assert (payload.end, gpu.downloads, gpu.waits) == (0, 1, 0)
    staging.fill(sent, [payload])
    assert (gpu.downloads, gpu.waits) == (1, 1)
    gpu.streams[0].finish()
    assert [staging.host(each).tobytes() for each in sent] == [host.tobytes() for host in hosts]
    whole = Payload.pack(hosts)
    assert [(at, bytes(data)) for at, data in payload.chunks] == [(at, bytes(data)) for at, data in whole.chunks]
    assert [(host.dtype, host.shape) for host in map(staging.host, sent)] == [(h.dtype, h.shape) for h in hosts]
    empty = downloads([gpu.array(np.empty((0, 3)))] * 2)
    assert [staging.host(each).shape for each in empty] == [(0, 3)] * 2
    assert (gpu.downloads, gpu.waits) == (1, 1)


def test_large_arrays_leave_by_themselves(gpu):
    """Each is sent while the next one is copied; small ones around them go together, those of each device."""
    big = devices.PACK_BYTES + 1
    hosts = [np.full(size, place, "uint8") for place, size in enumerate((9, 9, big, big, 9, 9), start=1)]
    sent = downloads([gpu.array(host) for host in hosts])
    payload, ends = staging.pack(sent), []
    assert gpu.downloads == 4
    for each in sent:
        staging.host(each)
        payload.grow()
        ends.append(payload.end)
    assert ends == [9, 25, 32 + big, align(32 + big) + big, payload.size - 16, payload.size]
    assert gpu.waits == 4
    assert b"".join(bytes(data) for _, data in payload.chunks) == b"".join(map(bytes, hosts))
    sent = downloads([gpu.array(np.arange(9.0), place % 2) for place in range(6)])
    assert [staging.host(each).tolist() for each in sent] == [np.arange(9.0).tolist()] * 6
    assert (gpu.downloads, gpu.waits) == (6, 6)


@given(st.lists(st.integers(0, 2 * devices.PACK_BYTES), max_size=30))
def test_packs_keep_the_order_and_the_limit(sizes):
    """Packs are as few as that allows, from the first array on."""
    packs = devices.packs([np.empty(size, "uint8") for size in sizes])
    assert [each.nbytes for pack in packs for each in pack] == sizes
    ends = [devices.pack_layout(pack)[1] for pack in packs]
    assert all(end <= devices.PACK_BYTES or len(pack) == 1 for end, pack in zip(ends, packs, strict=True))
    following = [devices.pack_layout([*one, other[0]])[1] for one, other in pairwise(packs)]
    assert all(end > devices.PACK_BYTES for end in following)


def test_what_is_uploaded_together_is_there_in_each_stream(gpu):
    """By one copy, for which every stream waits that reads it; the host arrays may change meanwhile."""
    hosts = [np.array(5.0), *MIXED, np.empty((0, 3)), np.ones((2, 3), "float32")]
    expected = [host.tobytes() for host in hosts]
    begun = devices.begin_uploads(hosts, GPU)
    for host in hosts[:-2]:
        host[...] = 0
    assert (gpu.uploads, gpu.waits) == (1, 0)
    for stream in (gpu.streams[0], Stream()):
        gpu.streams[0] = stream
        copied = [each.array().copy() for each in begun]
        stream.finish()
        assert [array.host.tobytes() for array in copied] == expected
    assert (gpu.uploads, gpu.waits) == (1, 0)


def test_a_step_of_small_variables_copies_and_waits_once_each_way(gpu):
    """Ten gradients leave by one copy and one wait, ten values come by one copy; the sums are exact."""
    shapes = [(), (1,), (3, 5), (40,)] * 2 + [(7,), (0, 2)]
    with ps.ParameterServerStrategy(devices=["gpu:0"]) as strategy:
        with strategy.scope():
            weights = [ps.Variable(np.full(shape, 10.0 * n, "float32")) for n, shape in enumerate(shapes)]
            optimizer = ps.optimizers.SGD(1.0)

        def step():
            values = [w.read_value() for w in weights]
            gpu.streams[0].finish()
            found.append([value.host.copy() for value in values])
            gradients = [gpu.array(np.full(w.shape, n, "float32")) for n, w in enumerate(weights)]
            optimizer.apply_gradients(list(zip(gradients, weights, strict=True)))

        found: list[Any] = []
        counts = []
        for _ in range(5):
            strategy.run(step)
            counts.append((gpu.downloads, gpu.uploads, gpu.waits))
    for number, values in enumerate(found):
        for n, value in enumerate(values):
            assert value.shape == shapes[n]
            assert (value == (10 - number) * n).all()
    assert np.diff(counts, axis=0).tolist() == [[1, 1, 1]] * 4


def test_values_that_are_not_read_do_not_come_to_the_device(gpu):
    """A variable that replicas read no more is copied no more; one that no round has changed keeps its copy."""
    with ps.ParameterServerStrategy(devices=["gpu:0"]) as strategy:
        with strategy.scope():
            v, w = (ps.Variable(np.zeros(3, "float32"), name=name) for name in "vw")
            kept = ps.Variable(np.zeros(3, "float32"))
            optimizer = ps.optimizers.SGD(1.0)
        same = strategy.run(lambda: (v.read_value(), w.read_value(), kept.read_value()))[2]
        for number in range(1, 4):
            strategy.run(lambda: optimizer.apply_gradients([(-np.ones(3, "float32"), each) for each in (v, w)]))
            before = gpu.uploads
            copy = strategy.run(v.read_value)
            assert strategy.run(v.read_value) is copy
            assert gpu.uploads == before + 1
            assert brought(copy) == [number] * 3
            assert (w._copies[GPU].host == 1).all()  # as the first round has brought it
            assert kept._copies[GPU].there.array() is same
        assert brought(strategy.run(w.read_value)) == [3, 3, 3]


def test_copies_on_a_device_are_let_go_with_their_variable(gpu):
    values: dict[int, Any] = {}
    copies = DeviceCopies(lambda ids: {id: values[id] for id in ids})

    def variable(id: int) -> Any:
        made = type("Named", (), {})()
        made.handle, made._copies, values[id] = SimpleNamespace(id=id), {}, np.full(3, id)
        copies.copy_to(GPU, made, values[id])
        return made

    one, other = variable(1), variable(2)
    devices._copies(GPU)._stream.finish()
    block = weakref.ref(one._copies[GPU].there.array().data.block)
    del one
    values[2] = np.full(3, 5)
    copies.copy_to(GPU, other, values[2])
    gc.collect()
    assert block() is None
    assert brought(other._copies[GPU].there.array()) == [5, 5, 5]


def test_a_copy_that_fails_says_so(gpu):
    """What came before it is there, and no more."""
    good = download(gpu.array([1.0]))
    gpu.break_down()
    bad = download(gpu.array([2.0]))
    payload = staging.pack([good, bad])
    refused(CUDARuntimeError, "illegal memory access", lambda: staging.fill([good, bad], [payload]))
    assert payload.end == 8
    assert not payload.whole


SMALL = 50
"""Elements of variables of which a few fit a part."""


def working() -> set[threading.Thread]:
    """This process's threads, but for the one by which gRPC serves all of it."""
    return {thread for thread in threading.enumerate() if "poll" not in thread.name}


def begin(site: Site, number: float) -> tuple[Payload, Payload, Future[Any]]:
    """A push of the first member that is under way before a byte is there: what it will be, what it is, its answer."""
    whole = site.payload(number)
    growing = Payload((), whole.size)
    return whole, growing, site.server.push(site.said(site.workers[0]), growing)


def grow(payload: Payload, whole: Payload, step: int) -> None:
    """More of a payload is there: tensor after tensor, each in pieces of so many bytes."""
    for offset, buffer in whole.chunks:
        for at in range(0, len(buffer), step):
            payload.add(offset + at, buffer[at : at + step])


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("elements", "step"), [(SMALL, 8 * SMALL), (SMALL, ALIGN), (SIZE, 1 << 30), (SIZE, 1 << 20)])
def test_what_grows_gives_what_is_whole(stack, transport, elements, step):
    """Beside a member who has sent all at once; the push is under way before the first byte is there. Where a transport
    breaks, what has come is sent again."""
    site = Site(stack, transport, elements=elements)
    for number in (1.0, 2.0):
        whole, growing, first = begin(site, number)
        if number == 2.0 and transport != "grpc":
            growing.add(*whole.chunks[0])
            used = site.transport(site.workers[0])
            used.close("a test cuts it")
            eventually(lambda used=used: site.transport(site.workers[0]) is not used)
        second = site.push(site.workers[1], 10 * number)
        assert not first.done()
        grow(growing, whole, step)
        site.whole([number, 10 * number], first, second)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("elements", [SMALL, SIZE])
def test_nobody_waits_for_the_rest_once_the_connection_is_closed(stack, transport, elements):
    """The push ends with an error, and no thread of it is left."""
    before = working()
    site = Site(stack, transport, elements=elements)
    whole, growing, push = begin(site, 1.0)
    growing.add(*whole.chunks[0])
    eventually(lambda: growing._waiting)  # for the rest
    site.server.close()
    refused(PSError, "closed", lambda: push.result(SOON))
    stack.close()
    eventually(lambda: working() <= before)


def test_gradients_of_several_gpus_are_pushed_as_they_come(gpu):
    """The sum of the replicas' arrays, and what an update makes of it."""
    with ps.ParameterServerStrategy(devices=["gpu:0", "gpu:1"]) as strategy:
        with strategy.scope():
            weights = [ps.Variable(np.zeros(size, "float32")) for size in (3, 1 << 20)]
            optimizer = ps.optimizers.SGD(1.0)

        def step() -> None:
            replica = ps.get_replica_context().replica_id_in_sync_group
            gradients = [gpu.array(np.full(w.shape, replica + 1.0, "float32"), replica) for w in weights]
            optimizer.apply_gradients(list(zip(gradients, weights, strict=True)))

        for count in (1, 2):
            strategy.run(step)
            assert [set(w.numpy().tolist()) for w in weights] == [{-3.0 * count}] * 2


@pytest.mark.parametrize("transport", ["grpc", "shm", pytest.param("tcp", marks=pytest.mark.soak)])
def test_a_gpu_that_fails_halfway_ends_the_session(gpu, transport, monkeypatch):
    """With an error that says why, at once, in this call and in all later ones; nobody hangs, and it can be closed."""
    monkeypatch.setenv("PS_TRANSPORT", transport)
    with ps.ParameterServerStrategy(devices=["gpu:0"]) as strategy:
        with strategy.scope():
            first, second = (ps.Variable(np.zeros(1 << 20, "float32")) for _ in range(2))
            optimizer = ps.optimizers.SGD(1.0)

        def step(fails: bool) -> None:
            gradient = gpu.array(np.ones(1 << 20, "float32"))
            if fails:
                gpu.break_down()
            late = gpu.array(np.ones(1 << 20, "float32"))
            optimizer.apply_gradients([(gradient, first), (late, second)])

        strategy.run(step, args=(False,))
        for fails in (True, False):
            with pytest.raises(PSError, match=r"could not be copied from the GPU \(an illegal memory access"):
                strategy.run(step, args=(fails,))
