"""Copies between devices and the host that nobody waits for too early."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import psclient as ps
from psclient._src import devices
from pstesting.clock import Clock
from tests.kit.internals import LANES, Core, Download, LaneName, ServerConfig, ServerDevice, Task, combine
from tests.kit.rig import SOON, WORKERS, Job, Servers, given, remote, sum_into, together

GPU = devices.Device("gpu", 0)
several = pytest.mark.skipif(devices.available_gpus() < 2, reason="this machine has one CUDA device")
SIZES = (1, 7, 1000, 1 << 18, 3_000_001)


def cupy() -> Any:
    """The library."""
    return devices.namespace(GPU)


def dawdle() -> Any:
    """Keeps the current stream busy for half a second or so; gives the event at its end."""
    source = 'extern "C" __global__ void spin(long long n) { long long s = clock64(); while (clock64() - s < n); }'
    cupy().RawKernel(source, "spin")((1,), (1,), (np.int64(1_000_000_000),))
    return cupy().cuda.get_current_stream().record()


def download(array: devices.AnyArray) -> Download:
    """A copy of an array, begun."""
    begun = devices.begin_download(array, array.dtype, array.shape)
    assert isinstance(begun, Download)
    return begun


@pytest.mark.parametrize("stream", ["null", "blocking", "non_blocking"])
def test_copies_come_after_what_makes_their_array(stream: str) -> None:
    """In whatever stream that is, and however long it takes; many are on their way at once."""
    rng = np.random.default_rng(0)
    hosts = [rng.standard_normal(size).astype("float32") for size in SIZES]
    with cupy().cuda.Stream(null=stream == "null", non_blocking=stream == "non_blocking"):
        dawdle()
        there = [devices.to_device(host, GPU) for host in hosts]
        begun = [download(array * np.float32(2)) for array in there]
        for array in there:
            array.fill(-1)
    for copy, host in zip(begun, hosts, strict=True):
        assert copy.wait().tobytes() == (host * np.float32(2)).tobytes()


def test_the_host_goes_on_meanwhile() -> None:
    """Neither an upload nor the beginning of a download waits for what the device has still to do."""
    for copy in [download(devices.to_device(np.ones(1000), GPU)) for _ in range(4)]:
        copy.wait()  # New memory would have to be waited for.
    del copy
    end = dawdle()
    there = devices.to_device(np.ones(1000), GPU)
    begun = download(there)
    assert not end.done
    assert begun.here is None
    assert begun.wait().tolist() == [1.0] * 1000


def test_a_download_does_not_wait_for_later_work() -> None:
    """It is there while the device computes on."""
    begun = download(devices.to_device(np.arange(1000.0), GPU))
    end = dawdle()
    assert begun.wait().tolist() == list(range(1000))
    assert not end.done
    end.synchronize()


def test_memory_is_used_again() -> None:
    """The device's after a copy has ended, and pinned memory with the last array made of it."""
    pinned, memory = cupy().get_default_pinned_memory_pool(), cupy().get_default_memory_pool()

    def round(number: int) -> None:
        begun = [download(devices.to_device(np.full(size, number), GPU)) for size in SIZES]
        for copy in begun:
            assert (copy.wait() == number).all()

    gc.collect()
    before, used = pinned.n_free_blocks(), memory.used_bytes()
    for number in range(30):
        round(number)
    gc.collect()
    assert pinned.n_free_blocks() <= before + 2 * len(SIZES)
    assert memory.used_bytes() == used


def test_threads_share_a_devices_copies() -> None:
    """Each gets its own."""

    def there_and_back(number: int) -> bool:
        found = [download(devices.to_device(np.full(size, number), GPU) + 1).wait() for size in SIZES * 5]
        return all((array == number + 1).all() for array in found)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(there_and_back, range(32)))


@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int32"])
def test_replicas_are_summed_as_on_the_host(op: str, dtype: str) -> None:
    """With the same bits, on the first one's device; values of other devices come there."""
    rng = np.random.default_rng(0)
    hosts = [(rng.standard_normal(1000) * 10.0**place).astype(dtype) for place in range(4)]
    count = devices.available_gpus()
    there = [devices.to_device(host, devices.Device("gpu", place % count)) for place, host in enumerate(hosts)]
    found, expected = (combine(op, values, frozenset([1]), None) for values in (there, hosts))  # type: ignore[arg-type]
    assert devices.device_of(found.total) == GPU
    assert (found.weight, found.spec) == (expected.weight, expected.spec)
    assert isinstance(found.array, Download)
    assert isinstance(expected.array, np.ndarray)
    assert found.array.wait().tobytes() == expected.array.tobytes()


@several
def test_an_array_may_change_once_another_device_has_asked_for_it() -> None:
    """The copy is of what it was."""
    other = devices.Device("gpu", 1)
    mine = devices.to_device(np.arange(1000.0), other)
    with devices.device_scope(GPU):
        dawdle()
        taken = devices.to_device(mine, GPU)
    with devices.device_scope(other):
        mine.fill(-1)
    assert devices.device_of(taken) == GPU
    assert devices.to_numpy(taken).tolist() == list(range(1000))


def test_a_servers_values_come_after_what_makes_them() -> None:
    """And what it computes comes after the values that it was sent."""
    device = ServerDevice.parse("gpu:0")
    with device.scope():
        for size in SIZES:
            host = np.arange(size, dtype="float32")
            dawdle()
            there = device.put(host)
            host[:] = -1
            assert device.get(there + 1).tolist() == list(range(1, size + 1))


@pytest.mark.parametrize("lane", LANES)
def test_gradients_and_values_travel_as_on_the_host(lane: LaneName) -> None:
    """Training gives the same bits, whatever the sizes and the lane."""
    rng = np.random.default_rng(0)
    gradients = [[rng.standard_normal(size).astype("float32") for size in SIZES] for _ in range(3)]

    def train(device: str) -> list[bytes]:
        with ps.ParameterServerStrategy(devices=[device], lane=lane) as strategy:
            place = devices.Device.parse(device)
            with strategy.scope():
                weights = [ps.Variable(np.ones(size, "float32")) for size in SIZES]
                optimizer = ps.optimizers.SGD(0.5)

            def step(pushed: list[np.ndarray]) -> None:
                there = [devices.to_device(one, place) * w.read_value() for one, w in zip(pushed, weights, strict=True)]
                optimizer.apply_gradients(list(zip(there, weights, strict=True)))

            for pushed in gradients:
                strategy.run(step, args=(pushed,))
            return [w.numpy().tobytes() for w in weights]

    assert train("gpu:0") == train("cpu:0")


@pytest.mark.parametrize("elements", [100, 3_000_001])
def test_variables_of_a_server_may_live_on_a_gpu(elements: int) -> None:
    """Rounds, resends and reads, of rounds that stream as well."""
    with ThreadPoolExecutor(1) as pool:
        core = Core(ServerConfig(Task("ps", 0), device="gpu:0"), 100, Clock(), pool.submit)
        with remote(core) as server:
            job = Job(Servers([server], [core], Clock(), Path("nowhere"), True))
            two = job.join(*WORKERS[:2])
            variable = job.variable(two[0], np.zeros(elements, "float32"))
            plan = job.approve(sum_into(variable), two[0])
            want = (variable.id,)
            for count in range(1, 4):
                push = [worker.push(plan, [np.full(elements, n)], want=want) for n, worker in enumerate(two, 1)]
                again = two[0].push(plan, [np.full(elements, 1)], want=want)
                for reply in together(*push, again):
                    reduced, value = given(reply, plan, 0, (variable,))
                    assert (reduced == 3).all()
                    assert (value == 3 * count).all()
                late = two[1].push(plan, [np.full(elements, 2)], want=want).result(SOON)
                assert (given(late, plan, 0, (variable,))[1] == 3 * count).all()
                for worker in two:
                    worker.round += 1
            assert (job.value(two[0], variable) == 9).all()
        core.close()
