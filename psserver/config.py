"""A server's configuration, merged from flags and the environment; flags win.

Of the environment `TF_CONFIG`, `PS_SESSION_TIMEOUT` and the others, `PS_TLS_*`, `PS_TOKEN`, `PS_INSECURE` and
`PS_KERNEL_CACHE` are read.

The only module of this package that reads the environment.
"""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from psserver.devices import ServerDevice
from pswire.cluster import Task, TaskConfig, check_address, check_addresses, join_address, parse_tf_config
from pswire.errors import ConfigError
from pswire.limits import Timeouts
from pswire.options import LOGGING, SECURITY, SERVER, SWITCH, WHOLE, option
from pswire.security.identity import Security, SecurityOptions
from pswire.security.names import task_name
from pswire.server_options import ServerOptions
from pswire.sizes import human, parse_bytes
from pswire.traces.options import NO_TRACES, TRACES, TraceOptions
from pswire.variables import CACHE_HOME, DOMAIN, INSECURE, KERNEL_CACHE, METRICS_HOST, METRICS_PORT, TF_CONFIG

LEAST_TIER_MEMORY = 16 << 20
"""Least number of bytes for `--tier-memory`."""

LEAST_IN_FLIGHT = 1 << 20
"""Least number of bytes for `--in-flight`: fewer may not hold one part of a contribution."""

PORTS = 65535
"""The greatest port number."""

LOCAL_HOST = "127.0.0.1"
"""The address that a server listens on if neither a flag nor a cluster gives one."""

# gRPC would print a line of its own on stderr for each handshake that fails.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

HARMLESS = ("NUMBA_CACHE_DIR", "NUMBA_NUM_THREADS", "NUMBA_THREADING_LAYER")
"""Settings of Numba that change no kernel."""


@dataclass(frozen=True)
class ServerConfig:
    """The configuration of one server: `ServerFlags` and the environment, read and merged. Sizes are in bytes.

    Attributes:
        task: the server's task.
        host, port: the address to listen on; port 0 picks a free one.
        device: the device of the variables, as `ServerDevice` writes it: "cpu" or "gpu:N".
        timeouts: timeouts of sessions and calls.
        security: the certificate and token it shows, and those it asks clients for.
        metrics_host, metrics_port: the address of its metrics; port 0 picks a free one, None serves no metrics.
        traces: how it exports traces.
        addresses: the addresses of all servers in `TF_CONFIG`; empty without one: then the chief says them.
        kernel_cache: the folder of compiled kernels, an absolute path; "" for none.
        domain: the part of the machines that fails as one, in which it runs.
        address: the address at which others reach it; "" where nobody has to be told it.
        join: the addresses of servers of a job, of which it gets the place of one; empty for a server with a place.
        tier_path, tier_memory: the directory for rows of dynamic tables, "" for none, and bytes of them in memory.
    """

    task: Task
    host: str = LOCAL_HOST
    port: int = 0
    device: str = ServerOptions.device
    memory_limit: int = parse_bytes(ServerOptions.memory_limit, "memory_limit")
    checkpoint_root: str = ServerOptions.checkpoint_root
    timeouts: Timeouts = field(default_factory=Timeouts)
    threads: int = ServerOptions.threads
    data_port: int = 0
    shared_memory: int = parse_bytes(ServerOptions.shared_memory, "shared_memory")
    in_flight: int = parse_bytes(ServerOptions.in_flight, "in_flight")
    snapshot_limit: int = parse_bytes(ServerOptions.snapshot_limit, "snapshot_limit")
    security: Security = field(default=Security(), repr=False)
    insecure: bool = False
    max_sessions: int = ServerOptions.max_sessions
    metrics_host: str = LOCAL_HOST
    metrics_port: int | None = None
    traces: TraceOptions = NO_TRACES
    addresses: tuple[str, ...] = ()
    kernel_cache: str = ""
    domain: str = ""
    address: str = ""
    join: tuple[str, ...] = ()
    tier_path: str = ServerOptions.tier_path
    tier_memory: int = parse_bytes(ServerOptions.tier_memory, "tier_memory")

    @property
    def max_payload_bytes(self) -> int:
        """Most bytes that one message may announce: the memory limit, else the machine's memory."""
        return self.memory_limit or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def describe(self) -> str:
        """Returns the device, the memory limit and TLS in words: `cpu, no memory limit, TLS`."""
        limit = f"at most {human(self.memory_limit)}" if self.memory_limit else "no memory limit"
        tier = f", {human(self.tier_memory)} of tables' rows, others in {self.tier_path}" if self.tier_path else ""
        return f"{self.device}, {limit}{tier}{', TLS' if self.security.tls else ''}"


@dataclass(frozen=True)
class ListenOptions:
    """Options that no two servers share."""

    task: int | None = option(None, "Index of this ps task.", WHOLE, 0, otherwise="TF_CONFIG's, else 0", group=SERVER)
    host: str | None = option(
        None, "Address to listen on.", otherwise="TF_CONFIG's, else 127.0.0.1", group=SERVER, metavar="ADDRESS"
    )
    port: int | None = option(
        None,
        "Port to listen on; 0 picks a free one.",
        WHOLE,
        0,
        most=PORTS,
        otherwise="TF_CONFIG's, else 0",
        group=SERVER,
        metavar="PORT",
    )
    data_port: int = option(
        0, "Port of the tcp transport; 0 picks a free one.", WHOLE, 0, most=PORTS, group=SERVER, metavar="PORT"
    )
    insecure: bool = option(
        False, "Allow clients from other machines without TLS and a token.", SWITCH, variable=INSECURE, group=SECURITY
    )
    metrics_host: str | None = option(
        None,
        "Address on which metrics are served.",
        variable=METRICS_HOST,
        otherwise="--host",
        group=LOGGING,
        metavar="ADDRESS",
    )
    metrics_port: int | None = option(
        None,
        "Port on which metrics are served; 0 picks a free one.",
        WHOLE,
        0,
        most=PORTS,
        variable=METRICS_PORT,
        otherwise="no metrics",
        group=LOGGING,
        metavar="PORT",
    )
    traces: str | None = TRACES.field(None)
    domain: str | None = option(
        None,
        "Failure domain, such as a rack; copies of variables are placed in other domains.",
        variable=DOMAIN,
        otherwise="the host's name",
        group=SERVER,
        metavar="NAME",
    )
    join: str | None = option(
        None,
        "Start as a standby server: wait to take the place of one of these servers, named in their order.",
        group=SERVER,
        metavar="HOST:PORT[,...]",
    )
    advertise: str | None = option(
        None,
        "With --join: address at which others reach this server.",
        otherwise="--host and --port",
        group=SERVER,
        metavar="HOST:PORT",
    )


@dataclass(frozen=True)
class ServerFlags(ListenOptions, ServerOptions, SecurityOptions):
    """All flags of the command line that configure a server."""


def server_config(environ: Mapping[str, str] = os.environ, **flags: Any) -> ServerConfig:
    """Merges flags with the environment.

    Args:
        environ: the environment.
        flags: attributes of `ServerFlags`.

    Raises:
        ConfigError: a value is malformed, a device or file is not there, or the task is not in the cluster.
    """
    given = ServerFlags(**flags)
    cluster = parse_tf_config(environ.get(TF_CONFIG, ""))
    join = _join(given, cluster)
    name = _task(given.task, cluster)
    listed = check_address(cluster.cluster.address(name), "TF_CONFIG") if cluster else (LOCAL_HOST, 0)
    host = listed[0] if given.host is None else given.host
    return ServerConfig(
        task=name,
        host=host,
        port=listed[1] if given.port is None else given.port,
        device=str(ServerDevice.parse(given.device)),
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
        traces=TraceOptions.from_environ(environ, given.traces),
        addresses=tuple(cluster.cluster.address(task) for task in cluster.cluster.tasks("ps")) if cluster else (),
        kernel_cache=kernel_cache(environ),
        domain=given.domain or socket.gethostname(),
        address=_advertised(given, host) if join else "",
        join=join,
        **_tier(given),
    )


def _tier(given: ServerFlags) -> dict[str, Any]:
    """Returns the settings of the tier below memory.

    Raises:
        ConfigError: one of two settings is missing, or no memory would be left for anything else.
    """
    memory = parse_bytes(given.tier_memory, "--tier-memory")
    if not given.tier_path:
        if memory:
            raise ConfigError(
                "--tier-memory limits the rows in memory of tables with --tier-path; give --tier-path as well"
            )
        return {}
    if not memory:
        raise ConfigError("--tier-path needs --tier-memory, the maximum bytes of table rows in memory")
    memory = parse_bytes(given.tier_memory, "--tier-memory", LEAST_TIER_MEMORY)
    limit = parse_bytes(given.memory_limit, "--memory-limit")
    if limit and memory >= limit:
        raise ConfigError(
            f"--tier-memory {given.tier_memory} is part of --memory-limit {given.memory_limit}, and leaves no memory "
            "for other variables and table indexes; lower --tier-memory"
        )
    return {"tier_path": os.path.abspath(given.tier_path), "tier_memory": memory}


def _join(given: ServerFlags, cluster: TaskConfig | None) -> tuple[str, ...]:
    """Returns the addresses of the servers that a process joins; empty for a server with a place of its own."""
    if given.join is None:
        if given.advertise is not None:
            raise ConfigError("--advertise needs --join; without it TF_CONFIG has the server's address")
        return ()
    if given.task is not None:
        raise ConfigError("--join starts a standby server, which has no task yet; leave --task out")
    if cluster is not None:
        raise ConfigError(
            "--join starts a standby server, which has no task yet, but TF_CONFIG names "
            f"{cluster.task}; unset TF_CONFIG"
        )
    return check_addresses(given.join, "--join")


def _advertised(given: ServerFlags, host: str) -> str:
    """Returns the address at which others reach a process that joins a job."""
    if given.advertise is not None:
        check_address(given.advertise, "--advertise")
        if not given.port:
            raise ConfigError(f"--advertise {given.advertise} needs --port, the port to listen on")
        return given.advertise
    if not given.port:
        raise ConfigError("--join needs --port, because other processes must know where this server listens")
    if host in ("0.0.0.0", "::", "[::]"):
        raise ConfigError(f"--host {host} is not an address that other processes can reach; give --advertise HOST:PORT")
    return join_address(host, given.port)


def kernel_cache(environ: Mapping[str, str] = os.environ) -> str:
    """Returns the folder of compiled kernels; "" for none, as with settings of Numba that may change a kernel."""
    given = environ.get(KERNEL_CACHE, "")
    numba = [name for name in environ if name.startswith("NUMBA_") and name not in HARMLESS]
    if given == "0" or numba or os.path.exists(".numba_config.yaml"):
        return ""
    if given:
        return os.path.abspath(os.path.expanduser(given))
    base = environ.get(CACHE_HOME, "")  # its specification says that a relative path counts for nothing
    home = environ.get("HOME") or os.path.expanduser("~")
    found = os.path.join(base if os.path.isabs(base) else os.path.join(home, ".cache"), "paramserver", "kernels")
    return found if os.path.isabs(found) else ""


def _root(text: str) -> str:
    """Returns the root of checkpoints: a URL, or the absolute path of a directory, which need not exist yet."""
    if "://" in text:
        return text
    if os.path.isfile(text):
        raise ConfigError(f"--checkpoint-root {text} is a file; name a directory, or a URL such as s3://bucket/run")
    return os.path.abspath(text)


def _switch(name: str, environ: Mapping[str, str]) -> bool:
    """Reads an environment variable that is 1 or 0. Any other word is an error: a typo must not let everybody in."""
    value = environ.get(name, "")
    if value not in ("", "0", "1"):
        raise ConfigError(f"{name} must be 1 or 0, not {value!r}")
    return value == "1"


def _pages(size: int) -> int:
    """Rounds a size up to whole pages, as shared memory needs."""
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def _task(index: int | None, cluster: TaskConfig | None) -> Task:
    if index is not None:
        return Task("ps", index)
    if cluster is None:
        return Task("ps", 0)
    if cluster.task.job != "ps":
        raise ConfigError(
            f"TF_CONFIG names {cluster.task} as this process's task; start it with psworker, or give the index of a "
            "ps task with --task"
        )
    return cluster.task
