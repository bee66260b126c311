"""Processes that wait for the place of a server of a job (`psserver --join`), for tests that move some."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pstesting.processes import CALM, SECONDS, W0, ProcessCluster, until
from pswire.cluster import Task

HOST = "127.0.0.7"
"""An address on which nobody else gets ports."""


class Waiting:
    """A process that waits for the place of a server of a job.

    Attributes:
        address: where it will serve.
        process: the process.
    """

    def __init__(self, job: ProcessCluster, directory: Path, domain: str = "elsewhere", **environ: str) -> None:
        port = free_port()
        self.address = f"{HOST}:{port}"
        self.said = directory / f"waiting-{port}.log"
        servers = ",".join(job.cluster.addresses[task] for task in _servers(job))
        root = str(directory / "checkpoints")
        flags = ("--join", servers, "--host", HOST, "--port", str(port), "--domain", domain, "--checkpoint-root", root)
        kept = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
        kept["PS_TOKEN"] = job.cluster.security(W0).token
        with self.said.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "psserver", *flags],
                env={**kept, **CALM.environ(), **environ},
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def text(self) -> str:
        """What it has said."""
        return self.said.read_text()

    def hear(self, text: str) -> None:
        """Waits until it says something."""
        until(lambda: text in self.text(), SECONDS, self.text)

    def end(self) -> int:
        """Ends it; returns its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(SECONDS)


def _servers(job: ProcessCluster) -> list[Task]:
    return sorted(task for task in job.cluster.addresses if task.job == "ps")


def free_port() -> int:
    """A port of this host at which nothing listens now."""
    with socket.socket() as sock:
        sock.bind((HOST, 0))
        return int(sock.getsockname()[1])


@contextmanager
def waiting(job: ProcessCluster, directory: Path, count: int = 1, **keys: str) -> Iterator[list[Waiting]]:
    """Processes that wait, and have said so to all servers."""
    made = [Waiting(job, directory, **keys) for _ in range(count)]
    try:
        for each in made:
            for task in _servers(job):
                with job.server(task) as server:
                    assert each.process.poll() is None, each.text()
                    job.until(
                        lambda each=each, server=server: each.address in {s.address for s in server.status().spares}
                    )
        yield made
    finally:
        for each in made:
            each.process.kill()
            each.process.wait()
