"""Parameter servers in threads of this process: a cluster that is there in milliseconds."""

from __future__ import annotations

import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import psclient as ps
from psserver.config import ServerConfig, kernel_cache
from psserver.core.core import Core
from psserver.network.server import ServerThread
from pswire.cluster import Task
from pswire.limits import Timeouts

TICK_SECONDS = 0.1
"""Between two looks at the leases."""


class InProcessCluster:
    """Parameter servers, each with its own thread and port; a context manager.

    The servers are those of `psserver`, over real connections, but not in separate processes. A test makes its
    strategies with `resolver`, one for each worker, and each in its own thread if there are several.

    Args:
        servers: number of servers.
        workers: number of workers of the cluster; worker 0 is the chief.
        checkpoint_root: directory or URL of checkpoints.
        timeouts: time limits of the servers.
        device: the device of the variables: "cpu" or "gpu:N".
        tier_path: directory for rows of dynamic tables; "" to keep all rows in memory.
        tier_memory: bytes of rows that stay in memory if there is a `tier_path`.

    Attributes:
        addresses: `host:port` of each server.
        cores: the state of each server, for tests that inspect it.
    """

    def __init__(
        self,
        servers: int = 1,
        workers: int = 1,
        checkpoint_root: str | Path = "runs",
        timeouts: Timeouts | None = None,
        device: str = "cpu",
        tier_path: str = "",
        tier_memory: int = 0,
    ) -> None:
        self.addresses: list[str] = []
        self.cores: list[Core] = []
        self._count = servers
        self._workers = workers
        self._root = checkpoint_root
        self._timeouts = timeouts or Timeouts()
        self._device = device
        self._tier_path, self._tier_memory = tier_path, tier_memory
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for index in range(self._count):
                submit = stack.enter_context(ThreadPoolExecutor(1, f"server {index}")).submit
                config = ServerConfig(
                    Task("ps", index),
                    device=self._device,
                    checkpoint_root=str(self._root),
                    timeouts=self._timeouts,
                    tier_path=self._tier_path,
                    tier_memory=self._tier_memory,
                    kernel_cache=kernel_cache(),
                )
                core = Core(config, secrets.randbits(64), time.monotonic, submit)
                if (tier := core.machine.job.store.native.tier) is not None:
                    stack.callback(tier.close)
                stack.callback(core.close)
                thread = stack.enter_context(ServerThread(core, config, grace=0.0))
                self.cores.append(core)
                self.addresses.append(thread.address)
            ended = threading.Event()
            ticker = threading.Thread(target=self._tick, args=(ended,), name="leases", daemon=True)
            ticker.start()
            stack.callback(ticker.join)
            stack.callback(ended.set)
            self._stack = stack.pop_all()
        return self

    def _tick(self, ended: threading.Event) -> None:
        """Looks at the leases, as a server's process does."""
        while not ended.wait(TICK_SECONDS):
            for core in self.cores:
                core.tick()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the servers; does nothing if they have ended."""
        self._stack.close()

    def resolver(self, worker: int = 0) -> ps.ClusterResolver:
        """Returns the resolver of one worker, for `ps.ParameterServerStrategy(cluster_resolver=...)`."""
        names = [f"worker-{index}:0" for index in range(self._workers)]
        spec = ps.ClusterSpec({"ps": self.addresses, "worker": names})
        return ps.SimpleClusterResolver(spec, task_type="worker", task_id=worker)
