"""The cluster: tasks, their addresses, and TF_CONFIG."""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pswire.errors import ConfigError, PSError
from pswire.limits import refuse_unknown

EVALUATOR = "evaluator"
"""The job of a task that has no part in the training: it follows the checkpoints."""

JOBS = ("chief", "worker", "ps", EVALUATOR)
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
        return self.order() < other.order()

    def order(self) -> tuple[int, int]:
        """Returns by what tasks are ordered: the job, and the index."""
        return _rank(self.job), self.index

    @classmethod
    def parse(cls, text: str) -> Task:
        """Reads `/job:worker/task:1`; raises `ConfigError` for anything else."""
        match = _TASK.fullmatch(text)
        if not match:
            raise ConfigError(f"{text!r} is not a task; write /job:worker/task:0")
        return cls(match[1], int(match[2]))


def _rank(job: str) -> int:
    return JOBS.index(job) if job in JOBS else len(JOBS)


Addresses = Sequence[str] | Mapping[int, str] | Mapping[str, str]
"""The tasks of one job: addresses in task order, or task index to address, where indices may be missing."""


@dataclass(frozen=True)
class JobDef:
    """One job of a `ClusterDef`.

    Attributes:
        name: of the job.
        tasks: its addresses by task index, ascending.
    """

    name: str
    tasks: Mapping[int, str]


@dataclass(frozen=True)
class ClusterDef:
    """A cluster as TensorFlow's message of this name has it, as plain values.

    Attributes:
        job: the jobs, sorted by name.
    """

    job: tuple[JobDef, ...]

    def as_dict(self) -> dict[str, Mapping[int, str]]:
        """Job names to addresses by task index."""
        return {job.name: job.tasks for job in self.job}


class ClusterSpec:
    """The addresses of all tasks of a cluster, as `tf.train.ClusterSpec`.

    It may have any jobs. Only the `ps` tasks listen on their addresses; the other addresses are names.

    Args:
        cluster: maps job names to the addresses of their tasks: a list, or a mapping from task index to address, in
            which indices may be missing. Or another `ClusterSpec`, or its `ClusterDef`, to copy.

    Raises:
        TypeError: the cluster is not a mapping, a job name or an address not a string, or a job not a list or mapping.
        ValueError: a task index is not an integer of at least 0, or is repeated.
    """

    def __init__(self, cluster: Mapping[str, Addresses] | ClusterSpec | ClusterDef) -> None:
        jobs = cluster.as_dict() if isinstance(cluster, ClusterSpec | ClusterDef) else cluster
        if not isinstance(jobs, Mapping):
            raise TypeError(f"a cluster must be a dict of job names and addresses, not {type(cluster).__name__}")
        self._jobs = {job: _addresses(job, tasks) for job, tasks in jobs.items()}

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def __eq__(self, other: object) -> bool:
        return self._jobs == other._jobs if isinstance(other, ClusterSpec) else NotImplemented

    def __repr__(self) -> str:
        return f"ClusterSpec({dict(sorted(self.as_dict().items()))})"

    @property
    def jobs(self) -> list[str]:
        """The names of the jobs, in the order in which they were given."""
        return list(self._jobs)

    def num_tasks(self, job_name: str) -> int:
        """Returns the number of tasks of a job; raises `ValueError` if there is no such job."""
        return len(self._job(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """Returns the indices of a job's tasks, ascending; raises `ValueError` if there is no such job."""
        return list(self._job(job_name))

    def task_address(self, job_name: str, task_index: int) -> str:
        """Returns the address of one task; raises `ValueError` if there is no such job or no such task in it."""
        tasks = self._job(job_name)
        if task_index not in tasks:
            raise ValueError(f"job {job_name!r} has no task {task_index!r}; the cluster has {self.describe()}")
        return tasks[task_index]

    def job_tasks(self, job_name: str) -> list[str | None]:
        """Returns the addresses of a job by task index, None for a missing index.

        Raises:
            ValueError: there is no such job.
        """
        tasks = self._job(job_name)
        return [tasks.get(index) for index in range(max(tasks, default=-1) + 1)]

    def as_dict(self) -> dict[str, list[str] | dict[int, str]]:
        """Returns for each job a list of addresses, or a dict by task index if indices are missing or it is empty."""
        return {job: list(tasks.values()) if _dense(tasks) else dict(tasks) for job, tasks in self._jobs.items()}

    def as_cluster_def(self) -> ClusterDef:
        """Returns the cluster with the fields of TensorFlow's protocol buffer: its jobs, sorted by name."""
        return ClusterDef(tuple(JobDef(job, dict(tasks)) for job, tasks in sorted(self._jobs.items())))

    def tasks(self, job: str) -> list[Task]:
        """Returns the tasks of one job, in order; empty if there is no such job."""
        return [Task(job, index) for index in self._jobs.get(job, ())]

    def address(self, task: Task) -> str:
        """Returns the `host:port` of a task; raises `ConfigError` if the cluster has no such task."""
        address = self._jobs.get(task.job, {}).get(task.index)
        if address is None:
            raise ConfigError(f"the cluster has no {task}; it has {self.describe()}: correct the task or the cluster")
        return address

    def at_host_of(self, task: Task) -> list[Task]:
        """Returns the tasks whose addresses have the same host as a task's, itself included."""
        hosts = {
            Task(job, index): address.rpartition(":")[0]
            for job, addresses in self._jobs.items()
            for index, address in addresses.items()
        }
        return [other for other, host in hosts.items() if host == hosts.get(task)] or [task]

    def describe(self) -> str:
        """Returns one line for people, such as `2 ps, 2 worker, 1 chief`."""
        return ", ".join(f"{len(tasks)} {job}" for job, tasks in sorted(self._jobs.items())) or "no task at all"

    def _job(self, name: str) -> dict[int, str]:
        if name not in self._jobs:
            raise ValueError(f"the cluster has no job {name!r}; it has {self.describe()}")
        return self._jobs[name]


def _addresses(job: Any, tasks: Any) -> dict[int, str]:
    """The addresses of one job by task index, ascending."""
    if not isinstance(job, str):
        raise TypeError(f"a job name must be a string, not {job!r}")
    by_index = dict(enumerate(tasks)) if isinstance(tasks, list | tuple) else tasks
    if not isinstance(by_index, Mapping) or not all(isinstance(address, str) for address in by_index.values()):
        raise TypeError(f'cluster[{job!r}] must be a list of "host:port" strings, or a dict from task index to them')
    found = {parse_index(index, f"cluster[{job!r}]"): address for index, address in by_index.items()}
    if len(found) < len(by_index):
        raise ValueError(f"cluster[{job!r}] has a task index twice: {', '.join(map(repr, by_index))}")
    return dict(sorted(found.items()))


def _dense(tasks: Mapping[int, str]) -> bool:
    return bool(tasks) and max(tasks) + 1 == len(tasks)


def server_of(error: PSError) -> int | None:
    """Returns the index of the server that an error is about; None where it is about none."""
    match = _TASK.fullmatch(error.task)
    return int(match[2]) if match and match[1] == "ps" else None


def parse_index(index: Any, where: str) -> int:
    """A task index, as a number or as its text; raises `ConfigError` naming `where` for anything else."""
    if isinstance(index, str) and _NUMBER.fullmatch(index):
        index = int(index)
    if not isinstance(index, int) or isinstance(index, bool) or index < 0:
        raise ConfigError(f"{where}: task index {index!r} must be a whole number from 0")
    return index


@dataclass(frozen=True)
class TaskConfig:
    """A cluster and which of its tasks this process is."""

    cluster: ClusterSpec
    task: Task


class TaskSource(Protocol):
    """A source of a process's cluster and task: TF_CONFIG, or a cluster resolver."""

    def cluster_spec(self) -> ClusterSpec:
        """The cluster; an empty one where there is none."""

    @property
    def task_type(self) -> str | None:
        """The job of this process."""

    @property
    def task_id(self) -> int | None:
        """The index of this process in its job."""


KEYS = ("cluster", "task", "rpc_layer", "session_master", "eval_session_master", "master", "environment", "job")
"""Keys of `TF_CONFIG`. The last four are those of TensorFlow and of clouds, and say nothing here."""

TASK_KEYS = ("type", "index", "trial", "cloud")
"""Keys of its task; the last two are those of clouds."""


class TFConfig:
    """The value of the environment variable `TF_CONFIG`; each part is checked when it is asked for.

    Args:
        text: the JSON text; empty means that there is no cluster.

    Raises:
        ConfigError: the text is no JSON object, or has a key that nobody knows.
    """

    def __init__(self, text: str) -> None:
        self._data = _json_object(text)
        refuse_unknown(self._data, KEYS, "TF_CONFIG: key")
        task = self._data.get("task")
        if task is not None and not isinstance(task, dict):
            raise ConfigError(f'TF_CONFIG: \'task\' must be an object, {{"type": "worker", "index": 0}}, not {task!r}')
        refuse_unknown(task or {}, TASK_KEYS, "TF_CONFIG: key of 'task'")

    def cluster_spec(self) -> ClusterSpec:
        """The cluster, an empty one where none is named; raises `ConfigError` for what cannot be one."""
        data = self._data.get("cluster") or {}
        if not isinstance(data, dict):
            raise ConfigError(f"TF_CONFIG: 'cluster' must be an object of jobs, not {type(data).__name__}")
        try:
            return ClusterSpec(data)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"TF_CONFIG: {error}") from None

    @property
    def task_type(self) -> str | None:
        """The job of this process; None where it is not said."""
        return str(self._task["type"]) if "type" in self._task else None

    @property
    def task_id(self) -> int | None:
        """The index of this process in its job, None where it is not said; raises `ConfigError` for what is none."""
        return parse_index(self._task["index"], "TF_CONFIG") if "index" in self._task else None

    @property
    def rpc_layer(self) -> str | None:
        """The protocol of addresses, such as "grpc"; None where it is not said."""
        return self._data.get("rpc_layer")

    @property
    def session_master(self) -> str | None:
        """An address that stands for that of this task; None where it is not said."""
        return self._data.get("session_master")

    @property
    def _task(self) -> dict[str, Any]:
        return self._data.get("task") or {}


def _json_object(text: str) -> dict[str, Any]:
    try:
        data = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError) as error:  # not only JSONDecodeError: numbers and depth have limits
        raise ConfigError(
            f"TF_CONFIG is not JSON ({' '.join(str(error).split())}); "
            'write {"cluster": {"ps": ["host:port"], "worker": ["host:port"]}, '
            '"task": {"type": "worker", "index": 0}}'
        ) from None
    if not isinstance(data, dict):
        raise ConfigError(f"TF_CONFIG must be a JSON object, not {type(data).__name__}")
    return data


def tf_config_for(cluster: Mapping[str, Any], task: Task) -> str:
    """Returns the `TF_CONFIG` of a task; `cluster` has the addresses of each job."""
    return json.dumps({"cluster": cluster, "task": {"type": task.job, "index": task.index}})


def parse_tf_config(text: str) -> TaskConfig | None:
    """Reads the value of the environment variable `TF_CONFIG`.

    Args:
        text: the JSON text; empty, or `{}`, means that there is no cluster.

    Returns:
        The cluster and the task, or None where there is no cluster.

    Raises:
        ConfigError: with the key that is wrong and what to write instead.
    """
    return task_config_of(TFConfig(text), "TF_CONFIG")


def task_config_of(source: TaskSource, where: str) -> TaskConfig | None:
    """The cluster and the task that a source names, checked to be those of a parameter-server cluster.

    An evaluator need not be in the cluster, which knows nothing of it.

    Args:
        source: a source; one that names a job but no index means its task 0.
        where: name of the source in errors.

    Returns:
        The cluster and the task, or None where the cluster is empty.

    Raises:
        ConfigError: `check_cluster` refuses the cluster, the task is not said, or the cluster has no such task.
    """
    cluster, job = source.cluster_spec(), source.task_type
    if not cluster and job is not None:
        raise ConfigError(
            f"{where} names this process as a {job}, but has no cluster; add "
            '"cluster": {"ps": ["host:port"], "worker": ["host:port"]}, or remove the task'
        )
    if not cluster:
        return None
    check_cluster(cluster, where)
    if job is None:
        raise ConfigError(
            f"{where} has a cluster but no task type; name this process's task: "
            '"task": {"type": "worker", "index": 0} in TF_CONFIG, or task_type="worker", task_id=0 of a resolver'
        )
    if job not in JOBS:
        raise ConfigError(f"{where}: unknown task type {job!r}; known are {', '.join(JOBS)}")
    index = source.task_id
    task = Task(job, 0 if index is None else parse_index(index, where))
    if job != EVALUATOR:
        cluster.address(task)
    return TaskConfig(cluster, task)


def check_cluster(cluster: ClusterSpec, where: str) -> None:
    """Raises `ConfigError` naming `where` if variables could not be held, or nobody would train."""
    counts = {job: len(cluster.tasks(job)) for job in cluster.jobs}
    for job in cluster.jobs:
        if job not in JOBS:
            raise ConfigError(f"{where}: unknown job {job!r} in the cluster; known are {', '.join(JOBS)}")
        indices = cluster.task_indices(job)
        if job == "worker" and (counts[job] > 1 or counts.get("chief")):
            indices = indices[:-1]  # the last may be one that has joined, and others before it are gone
        if indices != list(range(len(indices))):
            raise ConfigError(f"{where}: cluster[{job!r}] must have the indices 0, 1, ... without gaps")
        for task in cluster.tasks(job):
            check_address(cluster.address(task), f"{where}: cluster[{job!r}]")
    if not counts.get("ps"):
        raise ConfigError(f"{where}: the cluster has no 'ps' task; variables need at least one server")
    if counts.get("chief", 0) > 1:
        raise ConfigError(f"{where}: the cluster has {counts['chief']} chiefs, but can have only one")
    if not counts.get("worker") and not counts.get("chief"):
        raise ConfigError(f"{where}: the cluster has no 'worker' and no 'chief', so no task would train")


def join_address(host: str, port: int) -> str:
    """`host:port`, with the brackets that an IPv6 address needs."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def check_addresses(text: str, where: str) -> tuple[str, ...]:
    """Splits `host:port,host:port`; raises `ConfigError` naming `where` for what is no address."""
    addresses = tuple(part.strip() for part in text.split(","))
    for address in addresses:
        check_address(address, where)
    return addresses


def is_loopback(host: str) -> bool:
    """Returns whether a host, as an address has it, is this machine alone."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def check_address(address: str, where: str) -> tuple[str, int]:
    """Splits `host:port`; raises `ConfigError` naming `where` if it is none."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not _NUMBER.fullmatch(port) or int(port) > 65535:
        raise ConfigError(f"{where}: {address!r} is not an address; write host:port, such as 10.0.0.7:2222")
    return host, int(port)
