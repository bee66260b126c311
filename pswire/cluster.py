"""Who is in the cluster: tasks, their addresses, and TF_CONFIG."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pswire.errors import ConfigError

JOBS = ("chief", "worker", "ps", "evaluator")
"""Job names that a cluster may have, in task order: a chief that runs the script comes before the workers."""

_NUMBER = re.compile(r"[0-9]{1,15}")
_TASK = re.compile(r"/job:([a-z]+)/task:([0-9]{1,15})")


@dataclass(frozen=True)
class Task:
    """One process of the cluster, `/job:<job>/task:<index>`."""

    job: str
    index: int

    def __str__(self) -> str:
        return f"/job:{self.job}/task:{self.index}"

    def __lt__(self, other: Task) -> bool:
        return (_rank(self.job), self.index) < (_rank(other.job), other.index)

    @classmethod
    def parse(cls, text: str) -> Task:
        """Reads `/job:worker/task:1`; raises `ConfigError` for anything else."""
        match = _TASK.fullmatch(text)
        if not match:
            raise ConfigError(f"{text!r} is no task; write /job:worker/task:0")
        return cls(match[1], int(match[2]))


def _rank(job: str) -> int:
    return JOBS.index(job) if job in JOBS else len(JOBS)


@dataclass(frozen=True)
class ClusterSpec:
    """The addresses of all tasks.

    Attributes:
        jobs: job name to the `host:port` of each of its tasks. Only `ps` tasks listen; the other
            addresses are names.
    """

    jobs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def tasks(self, job: str) -> list[Task]:
        """The tasks of one job, in order."""
        return [Task(job, index) for index in range(len(self.jobs.get(job, ())))]

    def address(self, task: Task) -> str:
        """The `host:port` of a task; raises `ConfigError` if the cluster has no such task."""
        addresses = self.jobs.get(task.job, ())
        if task.index >= len(addresses):
            raise ConfigError(f"the cluster has no {task}: it has {self.describe()}; correct the task or the cluster")
        return addresses[task.index]

    def describe(self) -> str:
        """One line for people: `2 ps, 2 worker, 1 chief`."""
        return ", ".join(f"{len(a)} {job}" for job, a in sorted(self.jobs.items())) or "no task at all"


@dataclass(frozen=True)
class TaskConfig:
    """A cluster and which of its tasks this process is."""

    cluster: ClusterSpec
    task: Task


def parse_tf_config(text: str) -> TaskConfig | None:
    """Reads the value of the environment variable `TF_CONFIG`.

    Args:
        text: the JSON text; empty, or `{}`, means that there is no cluster.

    Returns:
        The cluster and the task, or None where there is no cluster.

    Raises:
        ConfigError: with the key that is wrong and what to write instead.
    """
    if not text.strip():
        return None
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:  # not only JSONDecodeError: numbers and depth have limits
        raise ConfigError(
            f"TF_CONFIG is not JSON ({' '.join(str(error).split())}); "
            'write {"cluster": {"ps": ["host:port"], "worker": ["host:port"]}, '
            '"task": {"type": "worker", "index": 0}}'
        ) from None
    if not isinstance(data, dict):
        raise ConfigError(f"TF_CONFIG must be a JSON object, not {type(data).__name__}")
    if not data.get("cluster"):
        return None
    cluster = parse_cluster(data["cluster"])
    task = _parse_task(data.get("task"))
    cluster.address(task)
    return TaskConfig(cluster, task)


def parse_cluster(data: Any) -> ClusterSpec:
    """Reads the `cluster` part of TF_CONFIG: job names to lists (or index-keyed objects) of addresses."""
    if not isinstance(data, dict):
        raise ConfigError(f"TF_CONFIG: 'cluster' must be an object of jobs, not {type(data).__name__}")
    jobs: dict[str, tuple[str, ...]] = {}
    for job, addresses in data.items():
        if job not in JOBS:
            raise ConfigError(f"TF_CONFIG: unknown job {job!r} in 'cluster'; known are {', '.join(JOBS)}")
        if isinstance(addresses, dict):
            if set(addresses) != set(map(str, range(len(addresses)))):
                raise ConfigError(f"TF_CONFIG: cluster[{job!r}] must have the indices 0, 1, ... without gaps")
            addresses = [addresses[str(index)] for index in range(len(addresses))]
        if not isinstance(addresses, list) or not all(isinstance(a, str) for a in addresses):
            raise ConfigError(f'TF_CONFIG: cluster[{job!r}] must be a list of "host:port" strings')
        for address in addresses:
            check_address(address, f"TF_CONFIG: cluster[{job!r}]")
        jobs[job] = tuple(addresses)
    if not jobs.get("ps"):
        raise ConfigError("TF_CONFIG: the cluster has no 'ps' task; variables need at least one server")
    if len(jobs.get("chief", ())) > 1:
        raise ConfigError(f"TF_CONFIG: the cluster has {len(jobs['chief'])} chiefs; it can have one")
    if not jobs.get("worker") and not jobs.get("chief"):
        raise ConfigError("TF_CONFIG: the cluster has no 'worker' and no 'chief'; nobody would train")
    return ClusterSpec(jobs)


def _parse_task(data: Any) -> Task:
    if not isinstance(data, dict):
        raise ConfigError(
            'TF_CONFIG has a cluster but no \'task\': say which task this process is, {"type": "worker", "index": 0}'
        )
    job, index = data.get("type"), data.get("index", 0)
    if job not in JOBS:
        raise ConfigError(f"TF_CONFIG: unknown task type {job!r}; known are {', '.join(JOBS)}")
    if isinstance(index, str) and _NUMBER.fullmatch(index):
        index = int(index)
    if not isinstance(index, int) or isinstance(index, bool) or index < 0:
        raise ConfigError(f"TF_CONFIG: task index {index!r} must be a whole number from 0")
    return Task(job, index)


def check_address(address: str, where: str) -> tuple[str, int]:
    """Splits `host:port`; raises `ConfigError` naming `where` if it is none."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not _NUMBER.fullmatch(port) or int(port) > 65535:
        raise ConfigError(f"{where}: {address!r} is no address; write host:port, such as 10.0.0.7:2222")
    return host, int(port)
