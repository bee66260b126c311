"""Processes that start in any order, and long after each other."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

import psclient as ps
from pstesting.processes import QUICK, SECONDS, until
from pstesting.script import add
from tests.kit.internals import RemoteServer, Task, start_server


def free_address():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return f"127.0.0.1:{taken.getsockname()[1]}"


def test_a_server_that_starts_a_lease_after_the_others():
    """A worker that waits for it keeps its session with the other servers, and then the job begins."""
    first, address = start_server(0, until_done=False, timeouts=QUICK)
    late = free_address()
    spec = ps.ClusterSpec({"ps": (address, late), "worker": ("127.0.0.1:0",)})
    resolver = ps.SimpleClusterResolver(spec, task_type="worker", task_id=0)
    servers = [first]
    waited = threading.Event()

    def work():
        strategy = ps.ParameterServerStrategy(cluster_resolver=resolver, timeouts=QUICK)
        assert waited.is_set()
        with strategy, strategy.scope():
            v, u = (ps.Variable(np.zeros(3), name=name) for name in "vu")
            strategy.run(lambda: [add(v, np.ones(3)), add(u, np.ones(3))])
            return float(v[0]), float(u[0])

    status = RemoteServer(address, Task("ps", 0))
    try:
        with ThreadPoolExecutor(1) as pool:
            result = pool.submit(work)
            until(lambda: status.status().chief < SECONDS, SECONDS, lambda: str(status.status()))
            began = time.monotonic()
            until(lambda: time.monotonic() > began + QUICK.lease + 1, SECONDS, lambda: "")
            waited.set()
            servers.append(start_server(1, int(late.rpartition(":")[2]), until_done=False, timeouts=QUICK)[0])
            assert result.result(SECONDS) == (1.0, 1.0)
    finally:
        status.close()
        for process in servers:
            process.stdin.close()
            process.wait(SECONDS)
            process.stdout.close()
