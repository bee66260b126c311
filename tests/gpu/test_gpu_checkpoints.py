"""Checkpoints of variables on a device."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from pstesting.clock import Clock
from tests.kit.internals import Core, ServerConfig, Task
from tests.kit.rig import SOON, WORKERS, Job, Servers, manifest_of, sum_into, together


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    """While rounds go on beside the writing: the checkpoint has the values of its round."""
    with ThreadPoolExecutor(1) as rounds, ThreadPoolExecutor(1) as files:
        config = ServerConfig(Task("ps", 0), device="gpu:0", checkpoint_root=str(tmp_path))
        core = Core(config, 100, Clock(), rounds.submit, files.submit)
        job = Job(Servers([core], [core], Clock(), tmp_path, False))
        (worker,) = job.join(WORKERS[0])
        hosts = [np.full(size, 1.0, "float32") for size in (1, 1000, 3_000_001)]
        variables = [job.variable(worker, host) for host in hosts]
        plan = sum_into(*variables, returned=False)
        job.approve(plan, worker)

        def add() -> None:
            together(worker.push(plan, hosts))
            worker.round += 1

        add()
        order = job.order(worker, "ckpt-1")
        pending = core.snapshot(job.token, order.id, "")
        for _ in range(5):
            add()
        shard = pending.result(SOON)
        core.snapshot(job.token, order.id, manifest_of([shard])).result(SOON)
        assert [float(job.value(worker, v)[-1]) for v in variables] == [7.0] * 3
        job.restore(worker, "ckpt-1")
        for variable in variables:
            np.testing.assert_array_equal(job.value(worker, variable), 2.0)
        core.close()
