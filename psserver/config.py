"""What a server is told: `TF_CONFIG`, `PS_TIMEOUT_*`, `PS_TLS_*`, `PS_TOKEN`, and flags, which win.

The only module of this package that reads the environment.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from psserver.devices import Device
from psserver.sizes import human, parse_bytes
from pswire.checkpoint.storage import DEFAULT_ROOT
from pswire.cluster import Task, TaskConfig, check_address, parse_tf_config
from pswire.errors import ConfigError
from pswire.limits import MAX_SESSIONS, Timeouts
from pswire.security.identity import Security, SecurityOptions
from pswire.security.names import task_name

LEAST_IN_FLIGHT = 1 << 20
"""Bytes: less may not hold a part of a contribution."""

LOCAL_HOST = "127.0.0.1"
"""Where a server listens that no cluster gives an address."""

# gRPC would print a line of its own on stderr for each handshake that fails.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

INSECURE = "PS_INSECURE"
"""The environment variable that says what `--insecure` does."""


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
        security: what it shows to clients, and asks them for.
        insecure: whether it may listen to other machines without TLS and token.
        max_sessions: that may be open at a time.
        metrics_host: where its metrics are served.
        metrics_port: the same, 0 to pick one; None for no metrics.
    """

    task: Task
    host: str = LOCAL_HOST
    port: int = 0
    device: str = "cpu"
    memory_limit: int = 0
    checkpoint_root: str = DEFAULT_ROOT
    timeouts: Timeouts = field(default_factory=Timeouts)
    threads: int = 1
    data_port: int = 0
    shared_memory: int = 1 << 30
    in_flight: int = 64 << 20
    snapshot_limit: int = 0
    security: Security = field(default=Security(), repr=False)
    insecure: bool = False
    max_sessions: int = MAX_SESSIONS
    metrics_host: str = LOCAL_HOST
    metrics_port: int | None = None

    @property
    def max_payload_bytes(self) -> int:
        """Bytes that one message may announce: more than the machine has is nothing but an attack."""
        return self.memory_limit or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def describe(self) -> str:
        """In words: `cpu, no memory limit`."""
        limit = f"at most {human(self.memory_limit)}" if self.memory_limit else "no memory limit"
        return f"{self.device}, {limit}"


@dataclass(frozen=True)
class Flags:
    """What the command line says; None where it says nothing. Sizes are bytes with a unit.

    Attributes:
        task: index of the `ps` task; else TF_CONFIG's, else 0.
        host, port: where to listen; else TF_CONFIG's, else this machine only, and a free port.
        device: "cpu", "gpu" or "gpu:N".
        memory_limit: "0" for no limit.
        checkpoint_root: a directory, or a URL that fsspec knows, below which checkpoints are.
        threads: that run one update program.
        data_port: the port of the tcp lane, 0 to pick one.
        shared_memory: "0" for no shm lane.
        in_flight: at least 1 MiB.
        snapshot_limit: "0" for no limit.
        tls_cert, tls_key, tls_ca, token_file: as in `SecurityOptions`; else the environment's.
        insecure: whether to listen to other machines without TLS and token.
        max_sessions: that may be open at a time.
        metrics_host: where metrics are served; else where it listens.
        metrics_port: the same; 0 picks, None for no metrics.
    """

    task: int | None = None
    host: str | None = None
    port: int | None = None
    device: str = "cpu"
    memory_limit: str = "0"
    checkpoint_root: str = DEFAULT_ROOT
    threads: int = 1
    data_port: int = 0
    shared_memory: str = "1GiB"
    in_flight: str = "64MiB"
    snapshot_limit: str = "0"
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_ca: str | None = None
    token_file: str | None = None
    insecure: bool = False
    max_sessions: int = MAX_SESSIONS
    metrics_host: str | None = None
    metrics_port: int | None = None


def server_config(environ: Mapping[str, str] = os.environ, **flags: Any) -> ServerConfig:
    """Merges flags with the environment.

    Args:
        environ: the environment.
        flags: attributes of `Flags`.

    Raises:
        ConfigError: what is asked for is malformed, not there, or not a task of the cluster.
    """
    given = Flags(**flags)
    cluster = parse_tf_config(environ.get("TF_CONFIG", ""))
    name = _task(given.task, cluster)
    listed = check_address(cluster.cluster.address(name), "TF_CONFIG") if cluster else (LOCAL_HOST, 0)
    host = listed[0] if given.host is None else given.host
    return ServerConfig(
        task=name,
        host=host,
        port=listed[1] if given.port is None else given.port,
        device=str(Device.parse(given.device)),
        memory_limit=parse_bytes(given.memory_limit, "--memory-limit"),
        checkpoint_root=_root(given.checkpoint_root),
        timeouts=Timeouts.from_environ(environ),
        threads=given.threads,
        data_port=given.data_port,
        shared_memory=_pages(parse_bytes(given.shared_memory, "--shared-memory")),
        in_flight=_pages(parse_bytes(given.in_flight, "--in-flight", LEAST_IN_FLIGHT)),
        snapshot_limit=parse_bytes(given.snapshot_limit, "--snapshot-limit"),
        security=SecurityOptions.from_environ(environ).under(vars(given)).read(task_name(name)),
        insecure=given.insecure or _switch(INSECURE, environ),
        max_sessions=given.max_sessions,
        metrics_host=given.metrics_host or host,
        metrics_port=given.metrics_port,
    )


def _root(text: str) -> str:
    """The root of checkpoints: a URL, or the whole path of a directory, which need not exist yet."""
    if "://" in text:
        return text
    if os.path.isfile(text):
        raise ConfigError(f"--checkpoint-root {text} is a file; name a directory, or a URL such as s3://bucket/run")
    return os.path.abspath(text)


def _switch(name: str, environ: Mapping[str, str]) -> bool:
    """What a variable says that is 1 or 0; another word is no reason to let everybody in."""
    value = environ.get(name, "")
    if value not in ("", "0", "1"):
        raise ConfigError(f"{name} must be 1 or 0, not {value!r}")
    return value == "1"


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
