"""Contributions on their way from GPUs: what grows while it is sent, and who waits for whom.

A stand-in that does nothing before somebody waits shows each wait that is missing; real devices are in tests/gpu.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import numpy as np
import pytest

from psclient._src import devices
from psclient._src.devices import Device, Download
from psclient._src.distribute.reduction import combine
from psclient._src.transport import staging
from psserver.devices import Device as ServerDevice
from pswire.transport.payload import Payload
from tests.kit.slow_gpu import CUDARuntimeError, Gpu, slow_gpu

GPU, OTHER = Device("gpu", 0), Device("gpu", 1)


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    with slow_gpu() as found:
        yield found


def download(array: devices.AnyArray) -> Download:
    """A copy of an array, begun."""
    begun = devices.begin_download(array, array.dtype, array.shape)
    assert isinstance(begun, Download)
    return begun


def brought(array: devices.AnyArray) -> list[float]:
    """What is in an array of a device."""
    return download(array).wait().tolist()


# ---- Copies ----


@pytest.mark.parametrize("value", [[1.0, 2.0, 3.0], 4.0, [], [[1, 2], [3, 4]]])
def test_arrays_go_to_the_device_and_back(gpu: Gpu, value: object) -> None:
    """Of any shape; and what is computed there comes after they have come."""
    host = np.array(value)
    there = devices.to_device(host, GPU)
    assert devices.device_of(there) == GPU
    assert devices.to_device(there, GPU) is there
    back = download(devices.add(there, there)).wait()
    assert (back.shape, back.dtype) == (host.shape, host.dtype)
    assert back.tolist() == (host + host).tolist()


def test_work_on_a_device_waits_for_what_comes_there(gpu: Gpu) -> None:
    """From the host, and from another device."""
    for array in (np.array([1.0, 2.0]), gpu.array([1.0, 2.0], 1)):
        there = devices.to_device(array, GPU)
        doubled = devices.add(there, there)
        gpu.streams[0].finish()
        assert doubled.host.tolist() == [2, 4]


def test_memory_is_written_when_its_last_user_has_done(gpu: Gpu) -> None:
    """What comes to a device may get memory that work under way still reads: it waits for that work."""
    for array in (np.array([1.0, 2.0]), gpu.array([1.0, 2.0], 1)):
        before = gpu.array([3.0])
        there = devices.to_device(array, GPU)
        devices._copies(GPU)._stream.finish()
        assert there.host.tolist() == [1, 2]
        assert before.host.tolist() == [3]


def test_a_host_array_may_change_once_its_upload_has_begun(gpu: Gpu) -> None:
    """The device gets what it was."""
    host = np.ones(3)
    there = devices.to_device(host, GPU)
    host[:] = 2
    assert brought(there) == [1, 1, 1]


def test_nothing_is_waited_for_that_comes_later(gpu: Gpu) -> None:
    """Neither by the copy, nor by whoever waits for it."""
    made = gpu.array([1.0, 2.0])
    begun = download(made)
    assert begun.here is None
    assert not gpu.streams[0].done
    later = devices.add(made, made)
    assert begun.wait() is begun.here
    assert begun.wait().tolist() == [1, 2]
    assert (later.data.bytes == 0xAA).all()


def test_what_a_copy_uses_is_held_until_it_has_ended(gpu: Gpu) -> None:
    """And no longer: the memory of gradients serves the next step, pinned memory the next round."""
    made = gpu.array([1.0, 2.0])
    gone, begun = weakref.ref(made.data), download(made)
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
    gc.collect()
    assert not gpu.pinned


def test_a_copy_nobody_waits_for_is_let_go_by_the_next(gpu: Gpu) -> None:
    """A section may fail after the copies were begun."""
    for _ in range(3):
        download(gpu.array([1.0]))
    assert len(gpu.pinned) == 3
    assert brought(gpu.array([2.0])) == [2]
    gc.collect()
    assert not gpu.pinned


def test_arrays_of_several_devices_are_summed_on_the_first(gpu: Gpu) -> None:
    """In the order of the replicas, with the bits that the CPU gives."""
    rng = np.random.default_rng(0)
    values = [(rng.standard_normal(50) * 10.0**place).astype("float32") for place in range(4)]
    there = [gpu.array(value, place % 2) for place, value in enumerate(values)]
    for op in ("sum", "mean"):
        expected = combine(op, values, frozenset([2]), None)
        found = combine(op, there, frozenset([2]), None)
        assert devices.device_of(found.total) == GPU
        assert (found.weight, found.spec) == (expected.weight, expected.spec)
        assert isinstance(found.array, Download)
        assert found.array.wait().tobytes() == expected.array.tobytes()  # type: ignore[union-attr]


def test_who_gave_an_array_may_change_it(gpu: Gpu) -> None:
    """What its stream is given next waits for the copy to the other device."""
    mine = gpu.array([1.0, 2.0], 1)
    taken = devices.to_device(mine, GPU)
    stream = gpu.streams[1]
    stream.work.append(lambda: mine.host.fill(7))
    stream.finish()
    assert mine.host.tolist() == [7, 7]
    assert brought(taken) == [1, 2]


def test_a_server_brings_arrays_there_and_back(gpu: Gpu) -> None:
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


# ---- Payloads ----


def test_a_staged_payload_is_that_of_the_host_arrays(gpu: Gpu) -> None:
    """It grows with each copy that ends, up to the first that has not; what is on the host goes along."""
    rng = np.random.default_rng(1)
    hosts = [rng.standard_normal(size) for size in (1, 100, 0, 7, 33)]
    sent = [host if place in (0, 3) else download(gpu.array(host)) for place, host in enumerate(hosts)]
    whole, payload = Payload.pack(hosts), staging.pack(sent)
    assert payload.size == whole.size
    ends = []
    for place in (4, 1):
        sent[place].wait()  # type: ignore[union-attr]
        payload.grow()  # type: ignore[attr-defined]
        ends.append(payload.end)
    assert ends == [8, whole.size]
    assert [(at, bytes(data)) for at, data in payload.chunks] == [(at, bytes(data)) for at, data in whole.chunks]


def test_on_the_host_nothing_is_staged() -> None:
    """The payload is whole at once, over the arrays' own memory."""
    host = np.arange(5.0)
    payload = staging.pack([host])
    assert type(payload) is Payload
    assert np.shares_memory(np.frombuffer(payload.chunks[0][1]), host)
    staging.fill([host, None], [payload])


def test_a_copy_that_fails_says_so(gpu: Gpu) -> None:
    """What came before it is there, and no more."""
    good = download(gpu.array([1.0]))
    gpu.break_down()
    bad = download(gpu.array([2.0]))
    payload = staging.pack([good, bad])
    with pytest.raises(CUDARuntimeError, match="illegal memory access"):
        staging.fill([good, bad], [payload])
    assert payload.end == 8
    assert not payload.whole
