"""The resolver of processes that torchrun has started."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from psclient._src.cluster_resolver.base import StartedClusterResolver, dealt, whole_number
from psclient._src.config import launcher_variable, set_variables
from pswire.cluster import ClusterSpec, Task, join_address, tf_config_for
from pswire.errors import ConfigError
from pswire.variables import TF_CONFIG

SERVERS = "ps"
"""The job whose tasks listen."""

PORT_BASE = 22220
"""The port of the first server: the one that our files for Slurm begin with."""

MOST_PORTS = 65535


class TorchrunClusterResolver(StartedClusterResolver):
    """Finds the cluster that the processes of a torchrun job form, from the variables that torchrun sets for each.

    Ranks are assigned to jobs as in `SlurmClusterResolver`, in the order of the jobs' names: a chief, if there is one,
    and the servers have the first ranks. Servers must be on the first node, the only one whose address torchrun
    provides (`MASTER_ADDR`); the server of rank r listens there on port `port_base + r`. Workers do not listen, and may
    be on any node. Without a chief, worker 0 is also the chief. The constructor reads `RANK`, `WORLD_SIZE`,
    `LOCAL_WORLD_SIZE`, `GROUP_RANK`, `MASTER_ADDR` and `MASTER_PORT`. TensorFlow has no such resolver.

    Args:
        jobs: maps job names to numbers of tasks, `WORLD_SIZE` in total; None for one server, and workers.
        port_base: the port of a server with rank 0.
        rpc_layer: the protocol of addresses.

    Raises:
        RuntimeError: a variable is missing; the number of tasks is not that of ranks; or a server is not on the first
            node.
        ConfigError: the value of a variable is malformed, or a server's port is torchrun's own.
    """

    def __init__(
        self, jobs: Mapping[str, int] | None = None, port_base: int = PORT_BASE, rpc_layer: str | None = "grpc"
    ) -> None:
        rank, world = _number("RANK"), _number("WORLD_SIZE")
        jobs = {SERVERS: 1, "worker": world - 1} if jobs is None else jobs
        if sum(jobs.values()) != world:
            raise RuntimeError(
                f"the jobs have {sum(jobs.values())} tasks, but torchrun started {world} processes; make them equal "
                "with jobs, or with --nnodes and --nproc-per-node"
            )
        if not jobs.get(SERVERS):
            raise RuntimeError(f'jobs must have a server and a worker, such as {{"ps": 1, "worker": 3}}, not {jobs}')
        tasks = dealt(jobs)
        _check_servers(tasks, rank, port_base)
        self.task_type, self.task_id = tasks[rank]
        self.rpc_layer = rpc_layer
        self._cluster = _cluster(tasks, port_base)

    def serve(self, *arguments: str) -> None:
        """Runs the server of this process's task; returns at once if the task is not a server.

        Call it before the script makes a strategy: the program `psserver` replaces the script, and ends with the job.

        Args:
            arguments: more arguments of `psserver`, such as `"--memory-limit", "8GiB"`.
        """
        if self.task_type != SERVERS:
            return
        task = Task(SERVERS, self.task_id or 0)
        set_variables({TF_CONFIG: tf_config_for(self._cluster.as_dict(), task)})
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.execv(sys.executable, [sys.executable, "-P", "-m", "psserver", "--until-done", *arguments])


def _check_servers(tasks: Sequence[tuple[str, int]], rank: int, port_base: int) -> None:
    """Raises if a server would be where others do not look for it."""
    last = max(place for place, (job, _) in enumerate(tasks) if job == SERVERS)
    node, here = _number("GROUP_RANK"), _number("LOCAL_WORLD_SIZE")
    if (tasks[rank][0] == SERVERS and node != 0) or (node == 0 and last >= here):
        raise RuntimeError(
            f"servers are the ranks up to {last}, but the first node has {here if node == 0 else 'fewer'} "
            "processes. All servers must be on the first node, because torchrun gives only its address; use fewer "
            "servers, or raise --nproc-per-node"
        )
    taken = _number("MASTER_PORT")
    ports = range(port_base, port_base + last + 1)
    if ports[0] < 1 or ports[-1] > MOST_PORTS:
        raise ConfigError(f"port_base={port_base} leaves no ports for {last + 1} ranks; use one from 1024 to 65000")
    if taken in ports:
        raise ConfigError(
            f"MASTER_PORT={taken}, which torchrun uses, is within the servers' ports {ports[0]} to {ports[-1]}; give "
            "another port_base, or another --master-port"
        )


def _cluster(tasks: Sequence[tuple[str, int]], port_base: int) -> ClusterSpec:
    first, here = _variable("MASTER_ADDR"), max(_number("LOCAL_WORLD_SIZE"), 1)
    cluster: dict[str, list[str]] = {job: [] for job, _ in tasks}
    for rank, (job, _) in enumerate(tasks):
        node = rank // here
        name = join_address(first if node == 0 else f"node-{node}", 0)
        cluster[job].append(join_address(first, port_base + rank) if job == SERVERS else name)
    return ClusterSpec(cluster)


def _variable(name: str) -> str:
    text = launcher_variable(name)
    if not text:
        raise RuntimeError(f"{name} is not set, because torchrun did not start this process; start it with torchrun")
    return text


def _number(name: str) -> int:
    return whole_number(name, _variable(name))
