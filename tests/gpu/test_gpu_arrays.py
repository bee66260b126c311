"""Arrays on a GPU, of the client and of the server, copies that nobody waits for too early, and strategies whose
replicas compute there."""

from __future__ import annotations

import gc
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import psclient as ps
from psclient._src import context
from psclient._src.arrays import devices
from psclient._src.data.array_dataset import ArrayDataset
from psclient._src.distribute.replicas import ReplicaRunner
from pstesting.clock import Clock
from tests.kit import internals as inside
from tests.kit.rig import SOON, WORKERS, Job, Servers, given, remote, sum_into, together
from tests.kit.workers import Worker, distributed

GPU = devices.Device("gpu", 0)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "bool", "complex64", "float16"])
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (2, 3)])
def test_arrays_go_to_the_device_and_back(dtype: str, shape: tuple[int, ...]) -> None:
    """Bit-equal, by the client's road and by the server's."""
    host = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    there = devices.to_device(host, GPU)
    assert devices.device_of(there) == GPU
    assert devices.to_device(there, GPU) is there
    server = inside.ServerDevice.parse("gpu:0")
    for back in (devices.to_numpy(there), devices.to_device(there, devices.CPU), server.get(server.put(host))):
        assert isinstance(back, np.ndarray)
        assert back.dtype == host.dtype
        assert back.shape == host.shape
        assert back.tobytes() == host.tobytes()


def test_sums_are_made_where_the_first_lives() -> None:
    host, there = np.ones(3, "float32"), devices.to_device(np.full(3, 2, "float32"), GPU)
    assert devices.device_of(devices.add(there, host)) == GPU
    assert devices.device_of(devices.add(host, there)) == devices.CPU
    assert devices.to_numpy(devices.add(there, there)).tolist() == [4, 4, 4]
    device = inside.ServerDevice.parse("gpu:0")  # through the array API namespace, in its scope
    with device.scope():
        value = device.xp.sqrt(device.put(np.array([4.0, 9.0])))
    assert device.get(value).tolist() == [2, 3]


def test_other_libraries_arrays_are_read_over_dlpack() -> None:
    """Anything on CUDA that speaks DLPack, as PyTorch does."""
    inner = devices.to_device(np.arange(3), GPU)

    class Foreign:
        def __dlpack_device__(self) -> tuple[int, int]:
            return inner.__dlpack_device__()  # type: ignore[no-any-return]

        def __dlpack__(self, **options: object) -> object:
            return inner.__dlpack__(**options)

    assert devices.to_numpy(Foreign()).tolist() == [0, 1, 2]


def test_gpus_are_named() -> None:
    """Each that this process can use, with the versions of CuPy, of CUDA and of the driver; one beyond is refused."""
    report, count = inside.gpu_report(), devices.available_gpus()
    assert len(report.names) == inside.available_gpus() == count
    assert all(report.names)
    assert re.fullmatch(r"\d+\.\d+", report.runtime)
    assert re.fullmatch(r"\d+\.\d+", report.driver)
    assert (report.error, bool(report.cupy)) == ("", True)
    with pytest.raises(inside.ConfigError, match="this machine has gpu:0"):
        inside.ServerDevice.parse(f"gpu:{count}")
    with pytest.raises(inside.ConfigError, match=f"sees {count} GPUs"):
        devices.local_devices([f"gpu:{count}"])


def test_a_replica_runs_on_its_device() -> None:
    """A GPU and a CPU replica in one process: each gets arrays of its own kind, by the same code."""
    both = (GPU, devices.CPU)
    strategy = object()
    runner = ReplicaRunner(strategy, both, lambda: (0, 2), lambda call: call())

    worker = Worker(local=2, replicas=2)
    worker.devices = both

    def fn(x: devices.AnyArray) -> devices.AnyArray:
        replica = context.get_replica_context()
        assert replica is not None
        assert devices.device_of(x) == replica.device
        return (x * x).sum()

    dataset = ArrayDataset(np.arange(4.0)).batch(4)
    (batch,) = distributed(dataset, worker)
    with context.enter_cross_replica(strategy):
        result = runner.run(fn, (batch,))
    runner.close()
    assert [float(value) for value in result.values] == [1, 13]
    assert devices.device_of(result.values[0]) == GPU


several = pytest.mark.skipif(devices.available_gpus() < 2, reason="this machine has one CUDA device")
SIZES = (1, 7, 1000, 1 << 18, 3_000_001)


def cupy() -> Any:
    return devices.namespace(GPU)


def dawdle() -> Any:
    """Keeps the current stream busy for half a second or so; gives the event at its end."""
    source = 'extern "C" __global__ void spin(long long n) { long long s = clock64(); while (clock64() - s < n); }'
    cupy().RawKernel(source, "spin")((1,), (1,), (np.int64(1_000_000_000),))
    return cupy().cuda.get_current_stream().record()


def download(array: devices.AnyArray) -> inside.Download:
    (begun,) = downloads([array])
    return begun


def downloads(arrays: Sequence[devices.AnyArray]) -> list[inside.Download]:
    begun = [
        each
        for array in arrays
        if not isinstance(each := devices.for_host(array, array.dtype, array.shape), np.ndarray)
    ]
    devices.begin_downloads(begun)
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


MIXED = ("bool", "int8", "float16", "int32", "float32", "float64", "complex64")


@pytest.mark.parametrize("count", [2, 7, 40], ids=["few", "each dtype", "more than CuPy joins one by one"])
@pytest.mark.parametrize("non_contiguous", [False, True])
def test_small_arrays_are_copied_together(count: int, non_contiguous: bool) -> None:
    """There and back, of any dtype and shape, beside large and empty ones; whatever is written to them afterwards."""
    rng = np.random.default_rng(0)
    hosts = [(10 * rng.standard_normal((n % 5, 2 * n + 1))).astype(MIXED[n % len(MIXED)]) for n in range(count)]
    hosts += [np.array(5.0), rng.standard_normal(devices.PACK_BYTES), np.empty((0, 3), "float32")]
    with cupy().cuda.Stream(non_blocking=True):
        dawdle()
        uploads = [upload for pack in devices.packs(hosts) for upload in devices.begin_uploads(pack, GPU)]
        there = [upload.array() for upload in uploads]
        if non_contiguous:
            there, hosts = [each.T for each in there], [each.T for each in hosts]
        begun = downloads(there)
        for each in there:
            each.fill(1)
    found = [each.wait() for each in begun]
    expected = [host for host in hosts if host.size]
    assert [(each.dtype, each.shape) for each in found] == [(host.dtype, host.shape) for host in expected]
    assert all(each.tobytes() == host.tobytes() for each, host in zip(found, expected, strict=True))


def test_an_upload_is_there_in_every_stream() -> None:
    """A stream that reads it later than the one that it was begun in waits for the copy as well."""
    host = np.arange(3_000_001.0)
    with cupy().cuda.Stream(non_blocking=True):
        dawdle()
        (begun,) = devices.begin_uploads([host], GPU)
    with cupy().cuda.Stream(non_blocking=True):
        copied = begun.array() + 1
        assert devices.to_numpy(copied).tolist() == (host + 1).tolist()


def test_the_host_goes_on_meanwhile() -> None:
    """Uploads and begun downloads do not wait for the device; a download is there while the device computes on."""
    for copy in [download(devices.to_device(np.ones(1000), GPU)) for _ in range(4)]:
        copy.wait()  # New memory would have to be waited for.
    del copy
    end = dawdle()
    there = devices.to_device(np.ones(1000), GPU)
    begun = download(there)
    assert not end.done
    assert begun.here is None
    assert begun.wait().tolist() == [1.0] * 1000
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
    found, expected = (inside.combine(op, values, frozenset([1]), None) for values in (there, hosts))  # type: ignore[arg-type]
    assert devices.device_of(found.total) == GPU
    assert (found.weight, found.spec) == (expected.weight, expected.spec)
    begun = found.array
    assert isinstance(begun, inside.Download)
    assert isinstance(expected.array, np.ndarray)
    devices.begin_downloads([begun])
    assert begun.wait().tobytes() == expected.array.tobytes()


@several
def test_an_array_may_change_once_another_device_has_asked_for_it() -> None:
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
    device = inside.ServerDevice.parse("gpu:0")
    with device.scope():
        for size in SIZES:
            host = np.arange(size, dtype="float32")
            dawdle()
            there = device.put(host)
            host[:] = -1
            assert device.get(there + 1).tolist() == list(range(1, size + 1))


@pytest.mark.parametrize("transport", inside.TRANSPORTS)
def test_gradients_and_values_travel_as_on_the_host(transport: inside.TransportName) -> None:
    """Training gives the same bits, whatever the sizes and the transport."""
    rng = np.random.default_rng(0)
    gradients = [[rng.standard_normal(size).astype("float32") for size in SIZES] for _ in range(3)]

    def train(device: str) -> list[bytes]:
        with ps.ParameterServerStrategy(devices=[device], transport=transport) as strategy:
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
        core = inside.Core(inside.ServerConfig(inside.Task("ps", 0), device="gpu:0"), 100, Clock(), pool.submit)
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


# ---- Strategies whose replicas compute on a GPU: variables, reductions, rounds without a wait, and buffers ----

ON_READ = {"synchronization": ps.VariableSynchronization.ON_READ, "aggregation": ps.VariableAggregation.SUM}


@pytest.fixture(scope="module", params=["mirrored", "servers"])
def strategy(request):
    kind = ps.MirroredStrategy if request.param == "mirrored" else ps.ParameterServerStrategy
    with kind(devices=["gpu:0"]) as strategy:
        yield strategy


def test_a_mirrored_variable_lives_on_its_device():
    """Its copy is a CuPy array, which update functions get and replace."""
    with ps.MirroredStrategy(["gpu:0"]) as strategy:
        with strategy.scope():
            w = ps.Variable(np.ones(3, "float32"))
        assert w.devices == ("/job:localhost/task:0/device:GPU:0",)
        seen = []

        def add(v, x):
            seen.append(devices.device_of(v.read_value()))
            return v.assign_add(x)

        assert strategy.extended.update(w, add, (np.full(3, 2.0, "float32"),)) is w
        assert seen == [GPU]
        assert w.numpy().tolist() == [3.0] * 3


def test_replicas_assign_what_they_compute_on_the_device(strategy):
    """Aggregated, or to a copy of their own."""
    cupy = devices.namespace(GPU)
    with strategy.scope():
        w = ps.Variable(np.zeros(3, "float32"), aggregation=ps.VariableAggregation.SUM)
        count = ps.Variable(np.float32(1), **ON_READ)

    def step():
        w.assign_add(cupy.ones(3, "float32") * 2)
        count.assign_add(cupy.ones(4, "float32").sum())
        return count.read_value()

    assert devices.device_of(strategy.run(step)) == GPU
    assert w.numpy().tolist() == [2.0] * 3
    assert float(count) == 5.0


def test_optimizers_and_metrics_take_cupy_arrays(strategy):
    """Gradients, losses, labels and scores come from the device."""
    cupy = devices.namespace(GPU)
    with strategy.scope():
        w = ps.Variable(np.zeros(3, "float32"))
        optimizer = ps.optimizers.SGD(0.5)
        mean, auc = ps.metrics.Mean(), ps.metrics.AUC()

    def step():
        optimizer.apply_gradients([(cupy.ones(3, "float32"), w)])
        mean.update_state(cupy.arange(4.0))
        auc.update_state(cupy.asarray([0, 0, 1, 1]), cupy.asarray([0.1, 0.4, 0.35, 0.8]))

    strategy.run(step)
    assert w.numpy().tolist() == [-0.5] * 3
    assert mean.result() == 1.5
    assert auc.result() == pytest.approx(0.75, abs=0.01)


def test_losses_and_their_metrics_stay_on_the_device(strategy):
    """Predictions come from the device, labels and weights from anywhere; losses are there, and as on the host."""
    cupy, losses = devices.namespace(GPU), ps.losses
    random = np.random.default_rng(0)
    logits, classes = random.normal(size=(6, 3)), random.integers(0, 3, 6)
    shares, labels = random.uniform(size=(6, 3)), random.integers(0, 2, (6, 3))
    weights = random.uniform(size=6)
    calls = [
        lambda put: losses.mean_squared_error(put(labels), put(logits)),
        lambda put: losses.binary_crossentropy(labels, put(shares), label_smoothing=0.1),
        lambda put: losses.binary_crossentropy(put(labels), put(logits), from_logits=True),
        lambda put: losses.categorical_crossentropy(put(labels), put(shares)),
        lambda put: losses.categorical_crossentropy(labels, put(logits), from_logits=True),
        lambda put: losses.sparse_categorical_crossentropy(classes, put(shares)),
        lambda put: losses.sparse_categorical_crossentropy(put(classes), put(logits), from_logits=True),
        lambda put: losses.compute_average_loss(put(logits), sample_weight=weights),
        lambda put: losses.compute_average_loss(put(logits[:0])),
        lambda put: losses.scale_regularization_loss(put(logits)),
    ]
    for call in calls:
        found = strategy.run(lambda call=call: call(cupy.asarray))
        assert devices.device_of(found) == GPU
        np.testing.assert_allclose(devices.to_numpy(found), call(np.asarray), rtol=1e-12, atol=1e-15)
    metrics = ps.metrics
    kinds = [
        (lambda: metrics.SparseCategoricalAccuracy(), classes, logits),
        (lambda: metrics.BinaryAccuracy(threshold=0.3), labels, shares),
        (lambda: metrics.Precision([0.2, 0.5]), labels, shares),
        (lambda: metrics.Recall(), labels, shares),
        (lambda: metrics.RootMeanSquaredError(), labels, logits),
    ]
    for make, truth, predictions in kinds:
        with strategy.scope():
            metric = make()
        expected = make()
        strategy.run(lambda m=metric, t=truth, p=predictions: m.update_state(t, cupy.asarray(p), cupy.asarray(weights)))
        expected.update_state(truth, predictions, weights)
        np.testing.assert_allclose(metric.result(), expected.result(), rtol=1e-12)


def test_reductions_give_host_arrays(strategy):
    cupy = devices.namespace(GPU)
    rows = strategy.run(lambda: cupy.arange(6.0).reshape(3, 2))
    total = strategy.reduce("sum", rows, axis=0)
    assert isinstance(total.numpy(), np.ndarray)
    assert total.tolist() == [6.0, 9.0]
    assert devices.device_of(strategy.extended.reduce_to("sum", rows, "gpu:0")) == GPU


@pytest.fixture(scope="module")
def on_servers():
    with ps.ParameterServerStrategy(devices=["gpu:0"]) as on_servers:
        yield on_servers


def test_a_variable_is_copied_to_the_device_once_for_each_value(on_servers):
    """Reads between two rounds share the copy; a round makes a new one."""
    with on_servers.scope():
        w = ps.Variable(np.ones(3, "float32"))
    first, second = on_servers.run(lambda: (w.read_value(), w.read_value()))
    assert devices.device_of(first) == GPU
    assert first is second
    assert on_servers.run(w.read_value) is first
    w.assign_add(1.0)
    assert devices.to_numpy(on_servers.run(w.read_value)).tolist() == [2.0] * 3


def test_cupy_functions_and_operators_take_variables_and_reduced_values(on_servers):
    """On either side, and the result is on the device. Reductions and updates take CuPy arrays."""
    cupy = devices.namespace(GPU)
    with on_servers.scope():
        w = ps.Variable(np.ones(3, "float32"))
    reduced = on_servers.extended.reduce_to("sum", np.ones(3, "float32"), w)

    def step():
        x = cupy.ones(3, "float32")
        return [x + w, w + x, cupy.add(x, w), cupy.exp(w), x + reduced, reduced * x, cupy.add(reduced, x)]

    for found in on_servers.run(step):
        assert devices.device_of(found) == GPU
    rows = on_servers.run(lambda: cupy.ones((4, 3), "float16"))
    assert on_servers.reduce("mean", rows, axis=0).tolist() == [1.0] * 3
    on_servers.extended.update(w, lambda v, x: v.assign(x), (cupy.full(3, 2.0, "float32"),))
    assert w.numpy().tolist() == [2.0] * 3


def test_an_array_on_the_device_may_change_once_the_call_has_returned(on_servers):
    """Reductions of a whole window of rounds stay as they were."""
    x = devices.namespace(GPU).zeros(1 << 16, "float32")
    float(on_servers.reduce("sum", x, axis=None)[0])
    values = []
    for number in range(inside.WINDOW):
        x.fill(number)
        values.append(on_servers.reduce("sum", x, axis=None))
    x.fill(-1.0)
    assert [float(value[-1]) for value in values] == [float(number) for number in range(inside.WINDOW)]


def test_a_step_waits_once(on_servers):
    """For the variables that the next one reads, on the device; the loss comes with them."""
    cupy = devices.namespace(GPU)
    with on_servers.scope():
        w = ps.Variable(np.zeros(1000, "float32"))
        optimizer = ps.optimizers.SGD(0.5)

    def step(x):
        loss = ((w - x) ** 2).sum()
        optimizer.apply_gradients([(w - x, w)])
        return loss

    waits, losses = [], []
    for _ in range(6):
        waits.append(on_servers.blocking_waits)
        losses.append(on_servers.reduce("mean", on_servers.run(step, args=(cupy.ones(1000, "float32"),)), axis=None))
    assert np.diff(waits)[2:].tolist() == [1] * 3
    assert [float(loss) for loss in losses] == [1000.0 * 0.25**number for number in range(6)]


@pytest.fixture(params=[1 << 10, 3 << 20], ids=["small", "large"])
def trained(request):
    """A strategy, a variable of one part or of several, and its optimizer."""
    with ps.ParameterServerStrategy(devices=["gpu:0"]) as strategy:
        with strategy.scope():
            v = ps.Variable(np.zeros(request.param, np.float32), name="v")
        yield strategy, v, ps.optimizers.SGD(1.0)


def test_gradients_leave_from_pinned_memory(trained):
    """Servers add the values that are copied there from the device; two arrays alternate."""
    strategy, v, optimizer = trained
    cupy = devices.namespace(GPU)
    places = set()

    def step(n):
        buffer = strategy.buffer(v)
        assert isinstance(buffer, np.ndarray)
        found = cupy.cuda.runtime.pointerGetAttributes(buffer.ctypes.data)
        assert found.type == cupy.cuda.runtime.memoryTypeHost
        places.add(buffer.ctypes.data)
        cupy.full(v.shape, -float(n), np.float32).get(out=buffer)
        optimizer.apply_gradients([(buffer, v)])
        with pytest.raises(ValueError, match="read-only"):
            buffer[0] = 0.0

    for n in range(8):
        strategy.run(step, (n,))
    assert len(places) == 2
    assert v.numpy().min() == v.numpy().max() == sum(range(8))


def test_arrays_of_the_device_go_on_beside_buffers(trained):
    """In one step, and one round: some of its gradients are on the device."""
    strategy, v, optimizer = trained
    cupy = devices.namespace(GPU)
    with strategy.scope():
        w = ps.Variable(np.zeros(5, np.float32), name="w")

    def step():
        buffer = strategy.buffer(v)
        buffer.fill(-1.0)
        optimizer.apply_gradients([(cupy.full(5, -2.0, np.float32), w), (buffer, v)])

    for _ in range(4):
        strategy.run(step)
    assert w.numpy().tolist() == [8.0] * 5
    assert v.numpy().min() == v.numpy().max() == 4.0
