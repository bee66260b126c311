"""Rows of replicas on a GPU, and of servers whose variables are there."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import psclient as ps
from psclient._src import devices
from pstesting.clock import Clock
from tests.kit.contributions import by_keys, create_part, keyed, part_of
from tests.kit.internals import (
    Constant,
    Contribution,
    Core,
    Payload,
    RowRead,
    ServerConfig,
    TableSpec,
    Task,
    TensorSpec,
)
from tests.kit.rig import SOON, WORKERS, Job, Servers, together

GPU = devices.Device("gpu", 0)
IDS = np.array([5, 1, 5, 3])
KINDS = ("variable", "shards", "table")


def made(kind: str, strategy: Any) -> Any:
    """A table of ten rows, or of none."""
    with strategy.scope():
        if kind == "table":
            return ps.dynamic_embedding.get_variable("table", dim=2, initializer=ps.initializers.Zeros())
        return ps.Variable(np.zeros((10, 2), "float32"), name="table")


def trained(kind: str, device: str, optimizer: type[ps.optimizers.Optimizer]) -> Any:
    """The rows after a few steps of a replica on a device."""
    partitioner = ps.experimental.partitioners.FixedShardsPartitioner(2) if kind == "shards" else None
    with ps.ParameterServerStrategy(devices=[device], variable_partitioner=partitioner) as strategy:
        table, rule = made(kind, strategy), optimizer(0.5)
        xp = devices.namespace(devices.Device.parse(device))

        def step(n: int) -> None:
            table.look_ahead(IDS + n + 1)
            rows = table.lookup(xp.asarray(IDS + n))
            assert devices.device_of(rows.values) == devices.Device.parse(device)
            assert rows.values[rows.inverse].shape == (4, 2)
            rule.apply_gradients([(rows.gradient(rows.values + 1), table)])

        for n in range(4):
            strategy.run(step, (n,))
        return table.lookup(np.arange(10)).numpy()


@pytest.mark.parametrize("optimizer", [ps.optimizers.SGD, ps.optimizers.Adam, ps.optimizers.RowwiseAdagrad])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_replica_on_a_gpu(kind: str, optimizer: type[ps.optimizers.Optimizer]) -> None:
    """They are CuPy arrays there, and train what rows on the CPU train."""
    np.testing.assert_allclose(trained(kind, "gpu:0", optimizer), trained(kind, "cpu:0", optimizer), rtol=1e-6)


def test_slices_of_cupy_arrays_are_reduced() -> None:
    """Rows with ids on the device, some of them twice."""
    cupy = devices.namespace(GPU)
    with ps.ParameterServerStrategy(devices=["gpu:0"]) as strategy:
        table = made("variable", strategy)

        def step() -> None:
            slices = ps.IndexedSlices(cupy.ones((3, 2), "float32"), cupy.asarray([4, 2, 4]))
            ps.optimizers.SGD(1.0).apply_gradients([(slices, table)])

        strategy.run(step)
        assert table.numpy()[:, 0].tolist() == [0, 0, -1, 0, -2, 0, 0, 0, 0, 0]


def test_a_table_of_a_server_on_a_gpu() -> None:
    """Its rows lie in host memory, and are updated there; lookups and reads give what they ought to."""
    with ThreadPoolExecutor(1) as rounds:
        core = Core(ServerConfig(Task("ps", 0), device="gpu:0"), 100, Clock(), rounds.submit)
        job = Job(Servers([core], [core], Clock(), None, False))
        (worker,) = job.join(WORKERS[0])
        table = create_part(job, worker, part_of(0, TableSpec((2,), initializer=Constant(0.5))))
        plan = job.approve(by_keys(table), worker)
        for _ in range(3):
            asked = (RowRead.of(table.id, np.array([7, -1], np.int64)),)
            said = Contribution(
                worker.session, worker.epoch, worker.round, plan.id, (1.0,), rows=(2,), lookups=asked
            )  # fmt: skip
            (reply,) = together(core.push(said, Payload.pack(keyed([7, 8]))))
            worker.round += 1
        (rows,) = reply.payload.tensors([TensorSpec("float32", (2, 2))])
        assert rows[:, 0].tolist() == [3.5, 0.5]
        read = core.pull(worker.session, [], -1, [RowRead.of(table.id, np.array([8], np.int64))]).result(SOON)
        assert read.payload.tensors([TensorSpec("float32", (1, 2))])[0].tolist() == [[3.5, 3.5]]
        core.close()
