"""What a client is told: `TF_CONFIG`, `PS_TIMEOUT_*`, Slurm's variables, and the files in `configs/`.

The only module of this package that reads the environment for configuration.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import yaml

from pswire.cluster import TaskConfig, parse_tf_config
from pswire.errors import ConfigError
from pswire.lanes import LANES, LaneName
from pswire.limits import Timeouts, parse_seconds, refuse_unknown

LOG_LEVELS = ("debug", "info", "warning", "error")

GLIBC_TUNABLES = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=1073741824:glibc.malloc.trim_threshold=4294967296"
"""Buffers of parts are reused instead of unmapped, and lie on huge pages: 1.7 times the throughput."""

# gRPC's handlers of fork() abort the child where a call is under way, as one is nearly always. A fork has no part in
# the job and makes no calls, so that it needs no handlers: a data loader may fork at any time.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

LANE = "PS_LANE"
"""The environment variable that says which lane to begin with."""

CHIEFS = ("driver", "script", "none")
"""Ways to have a chief: a process that only drives, one that runs the script too, or worker 0."""


@dataclass(frozen=True)
class ServerOptions:
    """Flags of every server of a local cluster.

    Attributes:
        device: "cpu" or "gpu:N".
        memory_limit: bytes that variables may take on one server, with a unit; "0" for no limit.
        checkpoint_root: the directory, or the URL that fsspec knows, below which checkpoints are.
        threads: that run one update program, a number.
        shared_memory: bytes in which a server's answers are for clients on its host, with a unit; "0" for none.
        in_flight: bytes of one worker's contribution that a server holds before they are used, with a unit.
        snapshot_limit: bytes of old values that a server holds for checkpoints which are being written, with a unit;
            "0" for no limit.
    """

    device: str = "cpu"
    memory_limit: str = "0"
    checkpoint_root: str = "checkpoints"
    threads: str = "1"
    shared_memory: str = "1GiB"
    in_flight: str = "64MiB"
    snapshot_limit: str = "0"


@dataclass(frozen=True)
class LaunchConfig:
    """A local cluster, as flags and files describe it.

    Attributes:
        ps: how many servers.
        workers: how many workers.
        chief: one of `CHIEFS`.
        evaluator: whether one more process runs the script, as the task that follows checkpoints.
        restarts: how many failed tasks, in all, are replaced before a failure ends the cluster.
        script: what workers run; "" for servers alone.
        args: the script's arguments.
        server: flags of every server.
        timeouts: handed to every process; by default this process's own.
        debug: whether every process shows tracebacks of this package.
        lane: the fastest lane that workers may use; by default what `PS_LANE` says.
        log_level: of every process, one of `LOG_LEVELS`; "" for what each has by itself.
    """

    ps: int = 1
    workers: int = 1
    chief: str = "driver"
    evaluator: bool = False
    restarts: int = 0
    script: str = ""
    args: tuple[str, ...] = ()
    server: ServerOptions = ServerOptions()
    timeouts: Timeouts = field(default_factory=lambda: timeouts_from())
    debug: bool = False
    lane: str = field(default_factory=lambda: lane_from())
    log_level: str = ""

    def __post_init__(self) -> None:
        if self.ps < 1:
            raise ConfigError(f"a cluster of {self.ps} servers cannot hold variables; ask for at least one")
        if self.workers < 0 or self.restarts < 0:
            raise ConfigError("workers and restarts must be numbers from 0")
        if self.chief not in CHIEFS:
            raise ConfigError(f"chief {self.chief!r} is unknown; write one of {', '.join(CHIEFS)}")
        check_lane(self.lane)
        refuse_unknown([self.log_level] if self.log_level else [], LOG_LEVELS, "log_level")
        if self.script and not self.workers and self.chief != "script":
            raise ConfigError(f"nobody would run {self.script}: the cluster has no worker")


def task_config(environ: Mapping[str, str] = os.environ) -> TaskConfig | None:
    """The cluster and the task that `TF_CONFIG` names, read anew at each call; None where it names none.

    Raises:
        ConfigError: TF_CONFIG is malformed.
    """
    return parse_tf_config(tf_config_text(environ))


def tf_config_text(environ: Mapping[str, str] = os.environ) -> str:
    """The value of `TF_CONFIG`, "" where it is not set."""
    return environ.get("TF_CONFIG", "")


def slurm_variable(name: str, environ: Mapping[str, str] = os.environ) -> str:
    """A variable that Slurm sets for each process of a step; raises `RuntimeError` where it is not set."""
    if name not in environ:
        raise RuntimeError(f"{name} is not set: this process is in no Slurm step; start it with srun")
    return environ[name]


def visible_gpus(environ: Mapping[str, str] = os.environ) -> list[str] | None:
    """The names of the GPUs that `CUDA_VISIBLE_DEVICES` lets this process use; None where it is not set."""
    names = environ.get("CUDA_VISIBLE_DEVICES")
    return None if names is None else [name for name in names.split(",") if name]


def set_visible_gpus(names: Sequence[str], environ: MutableMapping[str, str] = os.environ) -> None:
    """Sets `CUDA_VISIBLE_DEVICES` for this process and its children; of no effect once CUDA has been used."""
    environ["CUDA_VISIBLE_DEVICES"] = ",".join(names)


def timeouts_from(environ: Mapping[str, str] = os.environ) -> Timeouts:
    """The timeouts that `PS_TIMEOUT_*` give; raises `ConfigError` for an unknown name or no number of seconds."""
    return Timeouts.from_environ(environ)


def lane_from(environ: Mapping[str, str] = os.environ) -> LaneName:
    """The fastest lane that may be used, which `PS_LANE` says, else any; raises `ConfigError` for an unknown one."""
    return check_lane(environ.get(LANE, LANES[0]))


def check_lane(name: str) -> LaneName:
    """The lane of a name; raises `ConfigError` where there is none."""
    refuse_unknown([name], LANES, "lane")
    return LANES[LANES.index(cast(LaneName, name))]


def set_lane(name: str, environ: MutableMapping[str, str] = os.environ) -> None:
    """Sets `PS_LANE` for this process and its children."""
    environ[LANE] = check_lane(name)


def child_environ(tasks: int, timeouts: Timeouts | None, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a process that we start; what the user has set stays.

    Args:
        tasks: how many processes share this machine's cores.
        timeouts: to be handed on.
        more: what this process alone gets.
    """
    threads = str(max(1, len(os.sched_getaffinity(0)) // tasks))
    environ = {"OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads}
    environ |= {"GLIBC_TUNABLES": GLIBC_TUNABLES, "PYTHONUNBUFFERED": "1"}
    environ |= {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    return environ | (timeouts.environ() if timeouts else {}) | dict(more or {})


def wants_colour(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a terminal should be shown colours (https://no-color.org)."""
    return not environ.get("NO_COLOR")


def load_launch_config(path: Path) -> LaunchConfig:
    """Reads a local cluster from a YAML file; its keys are the attributes of `LaunchConfig`.

    Raises:
        ConfigError: the file is not there, is no YAML, or says something unknown or impossible.
    """
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no YAML: {' '.join(str(error).split())}") from error
    return LaunchConfig(**_launch_keys(_mapping(data, str(path)), str(path)))


def _launch_keys(data: dict[str, Any], path: str) -> dict[str, Any]:
    refuse_unknown(data, [f.name for f in dataclasses.fields(LaunchConfig)], f"{path}: key")
    values = dict(data)
    for name, default in ((f.name, f.default) for f in dataclasses.fields(LaunchConfig)):
        if isinstance(default, int | str) and name in data and type(data[name]) is not type(default):
            kind = type(default).__name__
            raise ConfigError(f"{path}: {name} must be of type {kind}, not {type(data[name]).__name__}")
    if "args" in data:
        if not isinstance(data["args"], list):
            raise ConfigError(f"{path}: args must be a list, one item for each argument")
        values["args"] = tuple(str(arg) for arg in data["args"])
    if "server" in data:
        section = _section(data, "server", path, ServerOptions)
        values["server"] = ServerOptions(**{key: str(value) for key, value in section.items()})
    if "timeouts" in data:
        section = _section(data, "timeouts", path, Timeouts)
        seconds = {key: parse_seconds(f"{path}: timeouts.{key}", value) for key, value in section.items()}
        values["timeouts"] = dataclasses.replace(timeouts_from(), **seconds)
    return values


def _section(data: dict[str, Any], name: str, path: str, kind: type[Any]) -> dict[str, Any]:
    section = _mapping(data[name], f"{path}: {name}")
    refuse_unknown(section, [f.name for f in dataclasses.fields(kind)], f"{path}: key of {name}")
    return section


def _mapping(data: Any, where: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise ConfigError(f"{where} must be a mapping of keys to values, not {type(data).__name__}")
    return {str(key): value for key, value in data.items()}
