"""Configuration of a client from the environment.

Reads `TF_CONFIG`, the timeouts such as `PS_SESSION_TIMEOUT`, `PS_TLS_*`, `PS_TOKEN`, and Slurm's variables. No other
module of this package reads the environment for configuration.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import cast

from pswire.cluster import TaskConfig, parse_tf_config
from pswire.errors import ConfigError
from pswire.limits import REFUSALS, Refused, Timeouts, refuse_unknown
from pswire.network.traffic import TRANSPORTS, TransportName
from pswire.options import CHECKPOINTS, CLUSTER, LIST, LOGGING, NETWORK, SCRIPT, SWITCH, WHOLE, option
from pswire.security.identity import Security, SecurityOptions
from pswire.server_options import ServerOptions
from pswire.telemetry import logging_setup
from pswire.traces.options import TRACES, TraceOptions
from pswire.variables import (
    GRPC_STREAM,
    JOB,
    LOCAL_REDUCTION,
    METRICS_HOST,
    METRICS_PORT,
    NO_COLOR,
    REFUSED,
    REPLICATION_FACTOR,
    RUNTIME_DIRECTORY,
    SAVE_ON_SIGTERM,
    SCRIPT_ERROR,
    TF_CONFIG,
    THREADS,
    TOKEN,
    TRANSPORT,
    VISIBLE_GPUS,
)

GLIBC_TUNABLES = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=1073741824:glibc.malloc.trim_threshold=4294967296"
"""Buffers of parts are reused instead of unmapped, and lie on huge pages: 1.7 times the throughput."""

LOCAL_HOST, PORTS = "127.0.0.1", 65535
"""The default host of the page of metrics, and the greatest port."""

JOB_NAME = re.compile(r"[\w.:/-]{0,128}", re.ASCII)

CHIEFS = ("driver", "script", "none")
"""Ways to have a chief: a process that only drives, one that runs the script too, or worker 0."""


@dataclass(frozen=True)
class LaunchConfig:
    """A local cluster, as flags and files describe it.

    A server's loss is one failure for `restarts`, however many processes end because of it. Options that an
    environment variable says as well begin with what it says.

    Attributes:
        server: options of every server.
        timeouts: handed to every process; by default this process's own.
        security: of every process; by default what the environment says. Where there is no token, a cluster draws one.
    """

    ps: int = option(1, "Number of servers.", WHOLE, 1, group=CLUSTER)
    workers: int = option(1, "Number of workers, the processes that run the script.", WHOLE, 0, group=CLUSTER)
    chief: str = option(
        CHIEFS[0],
        "Chief of the cluster: a process of its own (driver), one that also runs the script (script), worker 0 (none).",
        choices=CHIEFS,
        group=CLUSTER,
    )
    evaluator: bool = option(
        False,
        "Run the script in one more process, the evaluator, which follows the checkpoints.",
        SWITCH,
        group=CLUSTER,
    )
    restarts: int = option(0, "Restart failed tasks up to N times in total.", WHOLE, 0, group=CLUSTER)
    replication_factor: int = option(
        lambda: replication_factor_from(),
        "Number of servers that hold each variable. With 2 the job survives the loss of a server. The same for all "
        "workers and the chief.",
        WHOLE,
        1,
        most=2,
        variable=REPLICATION_FACTOR,
        otherwise="1",
        group=CLUSTER,
    )
    script: str = option("", "Path of the script, relative to the working directory of psworker.", group=SCRIPT)
    args: tuple[str, ...] = option((), "Arguments of the script.", LIST, group=SCRIPT)
    save_on_sigterm: bool = option(
        lambda: saves_on_sigterm(),
        "When a worker gets SIGTERM, save a checkpoint before it leaves.",
        SWITCH,
        variable=SAVE_ON_SIGTERM,
        group=CHECKPOINTS,
    )
    module: str = option(
        "",
        "Module that workers import in place of the script; only the chief runs the script.",
        group=SCRIPT,
        metavar="MODULE",
    )
    server: ServerOptions = field(default_factory=ServerOptions)
    timeouts: Timeouts = field(default_factory=lambda: timeouts_from())
    debug: bool = option(False, "Show tracebacks of this package's errors.", SWITCH, group=LOGGING)
    transport: str = option(
        lambda: transport_from(),
        "Fastest transport that workers may use; where it does not work, the next one is used.",
        choices=TRANSPORTS,
        variable=TRANSPORT,
        otherwise=TRANSPORTS[0],
        group=NETWORK,
    )
    local_reduction: bool = option(
        lambda: local_reduction_from(),
        "Sum the gradients of a host's workers in shared memory, and send the sum once.",
        SWITCH,
        variable=LOCAL_REDUCTION,
        group=NETWORK,
    )
    log_level: str = logging_setup.LOG_LEVEL.field("")
    log_format: str = logging_setup.LOG_FORMAT.field(logging_setup.FORMATS[0])
    metrics_port: int | None = option(
        lambda: metrics_from()[1],
        "Port of the first task's metrics; the other tasks use the ports after it. 0 picks free ports.",
        WHOLE,
        0,
        most=PORTS,
        variable=METRICS_PORT,
        otherwise="no metrics",
        group=LOGGING,
        metavar="PORT",
    )
    traces: str = TRACES.field(lambda: trace_options().traces)
    metrics_host: str = option(
        lambda: metrics_from()[0],
        "Address on which metrics are served.",
        variable=METRICS_HOST,
        otherwise=LOCAL_HOST,
        group=LOGGING,
        metavar="ADDRESS",
    )
    security: SecurityOptions = field(default_factory=lambda: security_options())

    def __post_init__(self) -> None:
        if self.ps < 1:
            raise ConfigError(f"a cluster with {self.ps} servers cannot hold variables; use at least one server")
        check_replication_factor(self.replication_factor, "replication_factor")
        if self.workers < 0 or self.restarts < 0:
            raise ConfigError("workers and restarts must not be negative")
        if self.chief not in CHIEFS:
            raise ConfigError(f"chief {self.chief!r} is unknown; use one of {', '.join(CHIEFS)}")
        check_transport(self.transport)
        refuse_unknown([self.log_level] if self.log_level else [], logging_setup.LEVELS, "log_level")
        refuse_unknown([self.log_format], logging_setup.FORMATS, "log_format")
        _check_port("metrics_port", self.metrics_port)
        refuse_unknown([self.traces], TRACES.choices, "traces")

    def check(self) -> None:
        """Raises `ConfigError` where values do not go together, which may come from variables, a file and flags."""
        if self.replication_factor > self.ps:
            raise ConfigError("replication_factor=2 needs two servers; use two servers or replication_factor=1")
        if self.module and self.chief != "script":
            raise ConfigError(
                f"workers import {self.module}, so no process runs the script; let the chief run it (chief: "
                "script, or --chief-runs-script)"
            )
        if self.script and not self.workers and self.chief != "script":
            raise ConfigError(f"no process runs {self.script}, because the cluster has no worker; add a worker")


def task_config(environ: Mapping[str, str] = os.environ) -> TaskConfig | None:
    """Returns the cluster and the task that `TF_CONFIG` names, read anew at each call; None if it names none.

    Raises:
        ConfigError: TF_CONFIG is malformed.
    """
    return parse_tf_config(tf_config_text(environ))


def tf_config_text(environ: Mapping[str, str] = os.environ) -> str:
    """Returns the value of `TF_CONFIG`, "" if it is not set."""
    return environ.get(TF_CONFIG, "")


def slurm_variable(name: str, environ: Mapping[str, str] = os.environ) -> str:
    """Returns a variable that Slurm sets for each process of a step; raises `RuntimeError` if it is not set."""
    if name not in environ:
        raise RuntimeError(f"{name} is not set, because this process does not run in a Slurm step; start it with srun")
    return environ[name]


def launcher_variable(name: str, environ: Mapping[str, str] = os.environ) -> str:
    """Returns a variable that a launcher, such as torchrun or Kubernetes, sets for a process; "" if it is not set."""
    return environ.get(name, "")


def visible_gpus(environ: Mapping[str, str] = os.environ) -> list[str] | None:
    """The names of the GPUs that `CUDA_VISIBLE_DEVICES` lets this process use; None where it is not set."""
    names = environ.get(VISIBLE_GPUS)
    return None if names is None else [name for name in names.split(",") if name]


def timeouts_from(environ: Mapping[str, str] = os.environ) -> Timeouts:
    """Reads `Timeouts` from the environment; raises `ConfigError` for an unknown name or no number of seconds."""
    return Timeouts.from_environ(environ)


def transport_from(environ: Mapping[str, str] = os.environ) -> TransportName:
    """Returns the fastest transport that `PS_TRANSPORT` allows; raises `ConfigError` for an unknown one."""
    return check_transport(environ.get(TRANSPORT, TRANSPORTS[0]))


def check_transport(name: str) -> TransportName:
    """Returns the transport of a name; raises `ConfigError` if there is none."""
    refuse_unknown([name], TRANSPORTS, "transport")
    return TRANSPORTS[TRANSPORTS.index(cast(TransportName, name))]


def local_reduction_from(environ: Mapping[str, str] = os.environ) -> bool:
    """Returns True if `PS_LOCAL_REDUCTION` is 1: the workers of a host send the sum of their gradients.

    Raises:
        ConfigError: it is neither 1 nor 0.
    """
    return _switch(LOCAL_REDUCTION, environ.get(LOCAL_REDUCTION) or "0")


def job_from(environ: Mapping[str, str] = os.environ) -> str:
    """The identity of the job that this process belongs to, which `PS_JOB` says, else ""; raises `ConfigError`."""
    name = environ.get(JOB, "")
    if not JOB_NAME.fullmatch(name):
        raise ConfigError(f"{JOB}={name!r} is not a valid job name; use up to 128 letters, digits and . _ : / -")
    return name


def refused_from(environ: Mapping[str, str] = os.environ) -> Refused:
    """Reads `PS_CONNECTION_REFUSED`: "lost", the default, or "retry".

    "retry" is for a proxy that refuses connections to servers that may be alive.
    """
    said = environ.get(REFUSED) or REFUSALS[0]
    refuse_unknown([said], REFUSALS, REFUSED)
    return REFUSALS[REFUSALS.index(cast(Refused, said))]


def ends_with_script(environ: Mapping[str, str] = os.environ) -> bool:
    """Reads `PS_SCRIPT_ERROR`: True where an error that ends a worker's script ends the job."""
    said = environ.get(SCRIPT_ERROR) or "end"
    if said not in ("end", "leave"):
        raise ConfigError(
            f"{SCRIPT_ERROR}={said} is unknown; use end (an error in a worker's script ends the job) or "
            "leave (the worker will be restarted)"
        )
    return said == "end"


def replication_factor_from(environ: Mapping[str, str] = os.environ) -> int:
    """Reads `PS_REPLICATION_FACTOR`, the number of servers that hold each variable: 1, the default, or 2."""
    return check_replication_factor(environ.get(REPLICATION_FACTOR) or "1", REPLICATION_FACTOR)


def check_replication_factor(said: object, name: str) -> int:
    """Returns the number; raises `ConfigError`, which names where it was said, for another one than 1 and 2."""
    if str(said) not in ("1", "2"):
        raise ConfigError(
            f"{name}={said} is not supported; use 1, or 2 to keep a copy of each variable on another server"
        )
    return int(str(said))


def saves_on_sigterm(environ: Mapping[str, str] = os.environ) -> bool:
    """Returns True if `PS_SAVE_ON_SIGTERM` is 1: a worker that is told to end has a checkpoint saved.

    Raises:
        ConfigError: it is neither 1 nor 0.
    """
    return _switch(SAVE_ON_SIGTERM, environ.get(SAVE_ON_SIGTERM) or "0")


def _switch(name: str, value: str) -> bool:
    if value not in ("0", "1"):
        raise ConfigError(f"{name} must be 1 or 0, not {value!r}")
    return value == "1"


def grpc_streams(environ: Mapping[str, str] = os.environ) -> bool:
    """Returns False if `PS_GRPC_STREAM` is 0, for proxies that let no long stream through.

    Raises:
        ConfigError: it is neither 1 nor 0.
    """
    return _switch(GRPC_STREAM, environ.get(GRPC_STREAM) or "1")


def metrics_from(environ: Mapping[str, str] = os.environ) -> tuple[str, int | None]:
    """The host and the port where this process serves its metrics, which `PS_METRICS_*` say; no port for none.

    Raises:
        ConfigError: `PS_METRICS_PORT` is no port.
    """
    text = environ.get(METRICS_PORT, "")
    port = int(text) if text.isdecimal() else None
    if text and port is None:
        raise ConfigError(f"{METRICS_PORT}={text!r} is not a port; use a number from 0 to 65535")
    _check_port(METRICS_PORT, port)
    return environ.get(METRICS_HOST) or LOCAL_HOST, port


def trace_options(environ: Mapping[str, str] = os.environ) -> TraceOptions:
    """Returns how this process exports traces, as `PS_TRACES` and `OTEL_*` say; raises `ConfigError`."""
    return TraceOptions.from_environ(environ)


def _check_port(name: str, port: int | None) -> None:
    if port is not None and not 0 <= port <= PORTS:
        raise ConfigError(f"{name} {port} is not a port; use a number from 0 to {PORTS}")


def security_options(environ: Mapping[str, str] = os.environ) -> SecurityOptions:
    """Returns where certificates and the token are, as `PS_TLS_*`, `PS_TOKEN_FILE` and `PS_TOKEN` say."""
    return SecurityOptions.from_environ(environ)


def security_from(name: str, environ: Mapping[str, str] = os.environ) -> Security:
    """Reads the identity of a task, as `worker-0`, or of `admin`; raises `ConfigError` as `SecurityOptions.read`."""
    return security_options(environ).read(name)


def set_variables(variables: Mapping[str, str], environ: MutableMapping[str, str] = os.environ) -> None:
    """Sets environment variables for this process and its children."""
    environ.update(variables)


def threads_chosen(environ: Mapping[str, str] = os.environ) -> bool:
    """Returns whether the user has said in how many threads libraries compute."""
    return any(environ.get(name) for name in THREADS)


def threads_of(tasks: int) -> int:
    """Returns how many threads a process may compute in, where so many processes share this machine's cores."""
    return max(1, len(os.sched_getaffinity(0)) // tasks)


def child_environ(tasks: int, timeouts: Timeouts | None, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns the environment of a process that we start; what the user has set stays.

    Args:
        tasks: number of processes that share this machine's cores.
        timeouts: handed on as `PS_SESSION_TIMEOUT` and the others; None hands on none.
        more: variables that only this process gets.
    """
    environ = dict.fromkeys(THREADS, str(threads_of(tasks)))
    environ |= {"GLIBC_TUNABLES": GLIBC_TUNABLES, "PYTHONUNBUFFERED": "1"}
    # Two processes cannot serve their metrics at one port.
    environ |= {name: value for name, value in os.environ.items() if name not in (TF_CONFIG, METRICS_PORT)}
    return environ | (timeouts.environ() if timeouts else {}) | dict(more or {})


def handed_to_hosts(timeouts: Timeouts, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the variables that tasks on other hosts get of this process: `PS_*`, and the numbers of threads.

    Not the token: others may see an environment. Not the port of metrics, as in `child_environ`.

    Args:
        timeouts: handed on as `PS_SESSION_TIMEOUT` and the others.
        environ: the environment of this process.
    """
    kept = {name: value for name, value in environ.items() if name.startswith("PS_") or name in THREADS}
    return {name: value for name, value in kept.items() if name not in (METRICS_PORT, TOKEN)} | timeouts.environ()


def own_environ(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the environment of a program such as ssh, which is not ours: it has no need of the token."""
    return {name: value for name, value in environ.items() if name != TOKEN}


def runtime_directory(environ: Mapping[str, str] = os.environ) -> str:
    """Returns the directory in which files of this user's running clusters lie: below `XDG_RUNTIME_DIR`, or /tmp."""
    above = environ.get(RUNTIME_DIRECTORY, "")
    return f"{above}/paramserver" if above else f"/tmp/paramserver-{os.getuid()}"


def wants_colour(environ: Mapping[str, str] = os.environ) -> bool:
    """Returns whether a terminal should be shown colours (https://no-color.org)."""
    return not environ.get(NO_COLOR)
