"""A real Ray cluster of two nodes on this machine, for tests; it leaves no process and no file behind."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parents[2]

SECOND = "127.0.0.2"
"""The address of the second node. That of the first is the machine's: Ray takes no loopback there."""


class Nodes:
    """The cluster.

    Attributes:
        address: that of its head.
    """

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self.address: str = cluster.address
        self._second: Any = None

    def add(self) -> None:
        """Starts the second node."""
        self._second = self._cluster.add_node(num_cpus=8, node_ip_address=SECOND, object_store_memory=STORE)

    def lose(self) -> None:
        """Kills the second node, and all that runs there."""
        processes = psutil.Process(self._second.all_processes["raylet"][0].process.pid).children(recursive=True)
        self._cluster.remove_node(self._second, allow_graceful=False)
        for process in processes:
            if process.is_running():
                process.kill()


@contextmanager
def occupied(cpus: float) -> Iterator[None]:
    """Takes so many CPUs of each node."""
    ray = pytest.importorskip("ray")
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    options = [{"num_cpus": cpus, "scheduling_strategy": NodeAffinitySchedulingStrategy(n, soft=False)} for n in nodes]
    actors = [ray.remote(Idle).options(**each).remote() for each in options]
    try:
        ray.get([actor.__ray_ready__.remote() for actor in actors])
        yield
    finally:
        for actor in actors:
            ray.kill(actor)


class Idle:
    """An actor that does nothing."""


STORE = 80 << 20
"""Bytes of a node's object store: the least that Ray takes."""


@contextmanager
def ray_nodes() -> Iterator[Nodes]:
    """Starts the two nodes, and connects this process with them. One process of a run has them at a time."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    with (ROOT / "pyproject.toml").open() as only:
        fcntl.flock(only, fcntl.LOCK_EX)
        yield from _started(ray, Cluster)


def _started(ray: Any, cluster_type: Any) -> Iterator[Nodes]:
    directory = tempfile.mkdtemp(prefix="ray-")  # short: sockets lie there
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", directory)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", str(ROOT))
        head = {"num_cpus": 8, "object_store_memory": STORE, "include_dashboard": False}
        cluster = cluster_type(initialize_head=True, head_node_args=head)
        try:
            nodes = Nodes(cluster)
            nodes.add()
            patch.setenv("RAY_ADDRESS", nodes.address)
            ray.init(address=nodes.address, log_to_driver=False, logging_level="error")
            yield nodes
        finally:
            ray.shutdown()
            cluster.shutdown()
            shutil.rmtree(directory, ignore_errors=True)
            assert not os.path.exists(directory)
