"""What a server is told: `TF_CONFIG`, `PS_TIMEOUT_*`, and flags, which win.

The only module of this package that reads the environment.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass

from psserver.arrays import Device
from psserver.units import human, parse_bytes
from pswire.cluster import Task, TaskConfig, check_address, parse_tf_config
from pswire.errors import ConfigError
from pswire.limits import Timeouts

LEAST_IN_FLIGHT = 1 << 20
"""Bytes: less may not hold a part of a contribution."""

LOCAL_HOST = "127.0.0.1"
"""Where a server listens that no cluster gives an address."""


@dataclass(frozen=True)
class ServerConfig:
    """One server, as it is to be started.

    Attributes:
        task: which task it is.
        host: the address to listen on.
        port: the port to listen on, 0 to pick one.
        device: where the variables live, as `Device` writes it: "cpu" or "gpu:N".
        memory_limit: bytes that variables may take, 0 for no limit.
        checkpoint_root: the directory, or the URL that fsspec knows, below which checkpoints are.
        timeouts: of sessions and calls.
        threads: that run one update program.
        data_port: the port of the tcp lane, 0 to pick one.
        shared_memory: bytes in which answers are for clients on this host; 0 for no shm lane.
        in_flight: bytes of one client's contribution that are held before they are used.
        snapshot_limit: bytes of old values that checkpoints hold while they are written, 0 for no limit.
    """

    task: Task
    host: str
    port: int
    device: str
    memory_limit: int
    checkpoint_root: str
    timeouts: Timeouts
    threads: int = 1
    data_port: int = 0
    shared_memory: int = 0
    in_flight: int = 0
    snapshot_limit: int = 0

    @property
    def max_payload_bytes(self) -> int:
        """Bytes that one message may announce: more than the machine has is nothing but an attack."""
        return self.memory_limit or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def describe(self) -> str:
        """In words: `cpu, no memory limit`."""
        limit = f"at most {human(self.memory_limit)}" if self.memory_limit else "no memory limit"
        return f"{self.device}, {limit}"


def server_config(
    task: int | None = None,
    host: str | None = None,
    port: int | None = None,
    device: str = "cpu",
    memory_limit: str = "0",
    checkpoint_root: str = "checkpoints",
    environ: Mapping[str, str] = os.environ,
    threads: int = 1,
    data_port: int = 0,
    shared_memory: str = "1GiB",
    in_flight: str = "64MiB",
    snapshot_limit: str = "0",
) -> ServerConfig:
    """Merges flags with the environment.

    Args:
        task: index of the `ps` task; None takes it from TF_CONFIG, else 0.
        host: where to listen; None takes it from TF_CONFIG, else this machine only.
        port: where to listen; None takes it from TF_CONFIG, else a free one.
        device: "cpu", "gpu" or "gpu:N".
        memory_limit: bytes with a unit, "0" for no limit.
        checkpoint_root: a directory, or a URL that fsspec knows, below which checkpoints are.
        environ: the environment.
        threads: that run one update program.
        data_port: the port of the tcp lane, 0 to pick one.
        shared_memory: bytes with a unit, "0" for no shm lane.
        in_flight: bytes with a unit, at least 1 MiB.
        snapshot_limit: bytes with a unit, "0" for no limit.

    Raises:
        ConfigError: what is asked for is malformed, not there, or not a task of the cluster.
    """
    cluster = parse_tf_config(environ.get("TF_CONFIG", ""))
    name = _task(task, cluster)
    listed = check_address(cluster.cluster.address(name), "TF_CONFIG") if cluster else (LOCAL_HOST, 0)
    return ServerConfig(
        task=name,
        host=listed[0] if host is None else host,
        port=listed[1] if port is None else port,
        device=str(Device.parse(device)),
        memory_limit=parse_bytes(memory_limit, "--memory-limit"),
        checkpoint_root=_root(checkpoint_root),
        timeouts=Timeouts.from_environ(environ),
        threads=threads,
        data_port=data_port,
        shared_memory=_pages(parse_bytes(shared_memory, "--shared-memory")),
        in_flight=_pages(parse_bytes(in_flight, "--in-flight", LEAST_IN_FLIGHT)),
        snapshot_limit=parse_bytes(snapshot_limit, "--snapshot-limit"),
    )


def _root(text: str) -> str:
    """The root of checkpoints: a URL, or the whole path of a directory, which need not exist yet."""
    if "://" in text:
        return text
    if os.path.isfile(text):
        raise ConfigError(f"--checkpoint-root {text} is a file; name a directory, or a URL such as s3://bucket/run")
    return os.path.abspath(text)


def _pages(size: int) -> int:
    """A size in whole pages, which shared memory has."""
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def _task(index: int | None, cluster: TaskConfig | None) -> Task:
    if index is not None:
        return Task("ps", index)
    if cluster is None:
        return Task("ps", 0)
    if cluster.task.job != "ps":
        raise ConfigError(
            f"TF_CONFIG says that this process is {cluster.task}; start it with psworker, "
            "or say with --task which ps task this is"
        )
    return cluster.task
