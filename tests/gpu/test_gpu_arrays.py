"""Arrays on a GPU, of the client and of the server."""

from __future__ import annotations

import numpy as np
import pytest

from psclient._src import context
from psclient._src import devices as arrays
from psclient._src.data.array_dataset import ArrayDataset
from psclient._src.distribute.replicas import ReplicaRunner
from tests.kit.internals import ConfigError, ServerDevice
from tests.kit.workers import Worker, distributed

GPU = arrays.Device("gpu", 0)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "bool", "complex64", "float16"])
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (2, 3)])
def test_arrays_go_to_the_device_and_back(dtype: str, shape: tuple[int, ...]) -> None:
    """Bit-equal, by the client's road and by the server's."""
    host = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    there = arrays.to_device(host, GPU)
    assert arrays.device_of(there) == GPU
    assert arrays.to_device(there, GPU) is there
    server = ServerDevice.parse("gpu:0")
    for back in (arrays.to_numpy(there), arrays.to_device(there, arrays.CPU), server.get(server.put(host))):
        assert isinstance(back, np.ndarray)
        assert back.dtype == host.dtype
        assert back.shape == host.shape
        assert back.tobytes() == host.tobytes()


def test_sums_are_made_where_the_first_lives() -> None:
    """Replicas on a GPU and on the CPU can be summed."""
    host, there = np.ones(3, "float32"), arrays.to_device(np.full(3, 2, "float32"), GPU)
    assert arrays.device_of(arrays.add(there, host)) == GPU
    assert arrays.device_of(arrays.add(host, there)) == arrays.CPU
    assert arrays.to_numpy(arrays.add(there, there)).tolist() == [4, 4, 4]


def test_other_libraries_arrays_are_read_over_dlpack() -> None:
    """Anything on CUDA that speaks DLPack, as PyTorch does."""
    inner = arrays.to_device(np.arange(3), GPU)

    class Foreign:
        def __dlpack_device__(self) -> tuple[int, int]:
            return inner.__dlpack_device__()  # type: ignore[no-any-return]

        def __dlpack__(self, **options: object) -> object:
            return inner.__dlpack__(**options)

    assert arrays.to_numpy(Foreign()).tolist() == [0, 1, 2]


def test_a_server_computes_on_its_device() -> None:
    """Through the array API namespace, in its scope."""
    device = ServerDevice.parse("gpu:0")
    with device.scope():
        value = device.xp.sqrt(device.put(np.array([4.0, 9.0])))
    assert device.get(value).tolist() == [2, 3]


def test_a_gpu_beyond_the_last_is_refused() -> None:
    """And the message says which there are."""
    count = arrays.available_gpus()
    with pytest.raises(ConfigError, match="this machine has gpu:0"):
        ServerDevice.parse(f"gpu:{count}")
    with pytest.raises(ConfigError, match=f"sees {count} GPUs"):
        arrays.local_devices([f"gpu:{count}"])


def test_a_replica_runs_on_its_device() -> None:
    """A GPU and a CPU replica in one process: each gets arrays of its own kind, by the same code."""
    devices = (GPU, arrays.CPU)
    strategy = object()
    runner = ReplicaRunner(strategy, devices, lambda: (0, 2), lambda call: call())

    worker = Worker(local=2, replicas=2)
    worker.devices = devices

    def fn(x: arrays.AnyArray) -> arrays.AnyArray:
        replica = context.get_replica_context()
        assert replica is not None
        assert arrays.device_of(x) == replica.device
        return (x * x).sum()

    dataset = ArrayDataset(np.arange(4.0)).batch(4)
    (batch,) = distributed(dataset, worker)
    with context.enter_strategy_scope(strategy):
        result = runner.run(fn, (batch,))
    runner.close()
    assert [float(value) for value in result.values] == [1, 13]
    assert arrays.device_of(result.values[0]) == GPU
