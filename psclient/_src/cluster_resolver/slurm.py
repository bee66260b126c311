"""The resolver of a Slurm job step."""

from __future__ import annotations

import itertools
import re
import subprocess
from collections.abc import Mapping
from typing import Any

from psclient._src.cluster_resolver.base import StartedClusterResolver, dealt, whole_number
from psclient._src.config import set_variables, slurm_variable, visible_gpus
from pswire.cluster import ClusterSpec
from pswire.errors import ConfigError
from pswire.variables import VISIBLE_GPUS

_HOST = re.compile(r"(?:[^\[\],\s]|\[[0-9,-]+\])+")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_COUNT = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")


class SlurmClusterResolver(StartedClusterResolver):
    """Finds the cluster that the tasks of a Slurm step form, from the variables that Slurm sets for each task.

    Tasks are numbered over the nodes in order, as Slurm numbers them, and assigned to jobs in the order of the jobs'
    names. Task k of a node, from 0, has port `port_base + k` and the GPUs from `k * gpus_per_task`. The constructor
    reads `SLURM_PROCID` and, for arguments that are not given, `SLURM_STEP_NUM_TASKS`, `SLURM_STEP_NODELIST` and
    `SLURM_STEP_TASKS_PER_NODE`.

    Source: `tf.distribute.cluster_resolver.SlurmClusterResolver`. Unlike there, nodes keep the order of the list:
    sorted by name, node10 would come before node9, and processes would get wrong addresses.

    Args:
        jobs: maps job names to numbers of tasks; None makes all tasks workers.
        port_base: the first port on each node.
        gpus_per_node: GPUs of each node; None counts those of this node.
        gpus_per_task: GPUs of each task; None divides those of a node evenly.
        tasks_per_node: tasks on each node, or a mapping from host names to tasks, in Slurm's order of the hosts; None
            asks Slurm.
        auto_set_gpu: True to set `CUDA_VISIBLE_DEVICES` to this task's GPUs in the constructor. It has no effect in a
            process that has used CUDA before.
        rpc_layer: the protocol of addresses.

    Raises:
        RuntimeError: a variable is missing, jobs and nodes have different numbers of tasks, or there are too few GPUs.
        ConfigError: the value of a variable is malformed.
    """

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int = 8888,
        gpus_per_node: int | None = None,
        gpus_per_task: int | None = None,
        tasks_per_node: int | Mapping[str, int] | None = None,
        auto_set_gpu: bool = True,
        rpc_layer: str | None = "grpc",
    ) -> None:
        rank = _number("SLURM_PROCID")
        jobs = {"worker": _number("SLURM_STEP_NUM_TASKS")} if jobs is None else jobs
        nodes = _nodes(tasks_per_node)
        _check_counts(rank, jobs, nodes)
        places = [(host, index) for host, count in nodes.items() for index in range(count)]
        gpus = _node_gpus(gpus_per_node)
        self._share = _share(gpus, gpus_per_task, max(nodes.values()))
        addresses = [f"{host}:{port_base + index}" for host, index in places]
        self._cluster, (self.task_type, self.task_id) = _assigned(jobs, addresses, rank)
        self.rpc_layer = rpc_layer
        if auto_set_gpu:
            # Of no effect once CUDA has been used.
            mine = gpus[places[rank][1] * self._share :][: self._share]
            set_variables({VISIBLE_GPUS: ",".join(mine)})

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: Any = None
    ) -> Mapping[str, int]:
        """Returns the number of GPUs of each task, the same for all tasks."""
        return {"GPU": self._share}


def _number(name: str) -> int:
    return whole_number(name, slurm_variable(name))


def _nodes(tasks_per_node: int | Mapping[str, int] | None) -> dict[str, int]:
    """The number of tasks on each node, in Slurm's order."""
    if isinstance(tasks_per_node, Mapping):
        return dict(tasks_per_node)
    hosts = expand_hosts(slurm_variable("SLURM_STEP_NODELIST"))
    if tasks_per_node is not None:
        return dict.fromkeys(hosts, tasks_per_node)
    counts = expand_counts(slurm_variable("SLURM_STEP_TASKS_PER_NODE"))
    if len(counts) != len(hosts):
        raise RuntimeError(
            f"SLURM_STEP_NODELIST has {len(hosts)} nodes, but SLURM_STEP_TASKS_PER_NODE has "
            f"{len(counts)}; leave both as Slurm sets them"
        )
    return dict(zip(hosts, counts, strict=True))


def _check_counts(rank: int, jobs: Mapping[str, int], nodes: Mapping[str, int]) -> None:
    asked, there = sum(jobs.values()), sum(nodes.values())
    if asked != there:
        raise RuntimeError(f"the jobs have {asked} tasks, but the Slurm step has {there}; make them equal")
    if rank >= there:
        raise RuntimeError(
            f"SLURM_PROCID={rank}, but the Slurm step has {there} tasks; correct tasks_per_node and jobs"
        )


def expand_hosts(text: str) -> list[str]:
    """Expands a Slurm host list, in order: `n[08-10],m` gives n08, n09, n10 and m.

    Raises:
        ConfigError: the text is no host list.
    """
    parts = _HOST.findall(text)
    hosts = [host for part in parts for host in _expand_host(part)]
    if ",".join(parts) != text or not hosts:
        raise ConfigError(f"SLURM_STEP_NODELIST={text!r} is not a host list such as node[1-3,7],other")
    return hosts


def _expand_host(part: str) -> list[str]:
    pieces = re.split(r"\[(.*?)\]", part)  # texts in brackets are at odd indices
    choices = [_expand_ranges(piece) if place % 2 else [piece] for place, piece in enumerate(pieces)]
    return ["".join(choice) for choice in itertools.product(*choices)]


def _expand_ranges(text: str) -> list[str]:
    numbers: list[str] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if not match or int(match[2] or match[1]) < int(match[1]):
            raise ConfigError(f"SLURM_STEP_NODELIST: {part!r} is not a range of nodes such as 08-10")
        first, last = match[1], match[2] or match[1]
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def expand_counts(text: str) -> list[int]:
    """Returns the tasks of each node from Slurm's form: `3(x2),1` gives 3, 3 and 1.

    Raises:
        ConfigError: the text is not of that form.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part)
        if not match:
            raise ConfigError(f"SLURM_STEP_TASKS_PER_NODE={text!r} is not a list of task counts such as 3(x2),1")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _node_gpus(count: int | None) -> list[str]:
    """The names of this node's GPUs, as `CUDA_VISIBLE_DEVICES` would list them."""
    visible = visible_gpus()
    if count is None:
        return _numbered(_count_gpus()) if visible is None else visible
    return visible[:count] if visible and len(visible) >= count else _numbered(count)


def _numbered(count: int) -> list[str]:
    return [str(number) for number in range(count)]


def _count_gpus() -> int:
    # Not by CuPy: once CUDA has been asked, CUDA_VISIBLE_DEVICES is read no more.
    try:
        listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=True).stdout
    except FileNotFoundError:
        return 0
    except subprocess.CalledProcessError as error:
        said = " ".join((error.stdout + error.stderr).split())
        raise RuntimeError(f"nvidia-smi cannot report the number of GPUs ({said}); give gpus_per_node") from error
    return sum(line.startswith("GPU ") for line in listed.splitlines())


def _share(gpus: list[str], per_task: int | None, tasks: int) -> int:
    """Returns how many GPUs a task has, on nodes with at most so many tasks."""
    share = len(gpus) // tasks if per_task is None else per_task
    if per_task is None and gpus and not share:
        raise RuntimeError(f"a node has {len(gpus)} GPUs for {tasks} tasks; give gpus_per_node and gpus_per_task")
    if share * tasks > len(gpus):
        raise RuntimeError(
            f"{tasks} tasks with {share} GPUs each need more than the {len(gpus)} GPUs of a node; lower gpus_per_task"
        )
    return share


def _assigned(
    jobs: Mapping[str, int], addresses: list[str], rank: int
) -> tuple[ClusterSpec, tuple[str | None, int | None]]:
    """The addresses of each job, and the job and the index of the task with a rank."""
    names = dealt(jobs)
    cluster: dict[str, list[str]] = {job: [] for job in sorted(jobs)}
    for (job, _), address in zip(names, addresses, strict=True):
        cluster[job].append(address)
    return ClusterSpec(cluster), names[rank]
