"""A cluster on Ray: servers, workers and a chief, each an actor in one placement group. The extra `ray`.

    import ray, psclient.launch.ray

    ray.init(runtime_env={"working_dir": "."})
    psclient.launch.ray.run("train.py", ["--epochs", "3"], ps=2, workers=4, worker_resources={"CPU": 4, "GPU": 1})

`psworker --ray auto` is the same from a shell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from psclient._src.config import LaunchConfig, wants_colour
from psclient._src.launch.ray_cluster import PLACEMENTS, RayCluster, Resources
from psclient._src.processes.output import Printer
from pswire.errors import PSError

__all__ = ["run"]


def run(
    script: str,
    args: Sequence[str] = (),
    *,
    ps: int = 1,
    workers: int = 1,
    ps_resources: Mapping[str, float] | None = None,
    worker_resources: Mapping[str, float] | None = None,
    placement: str = PLACEMENTS[0],
    **options: Any,
) -> None:
    """Runs a script on a cluster of Ray actors until it ends; prints the tasks' output with their names.

    Call it in a Ray driver, after `ray.init`. It leaves no task, actor or placement group behind. The processes of
    tasks run beside their actors, and do not use Ray themselves.

    Args:
        script: the path of the script, in Ray's `working_dir`, or in the driver's directory on every node.
        args: its arguments.
        ps: number of servers.
        workers: number of workers.
        ps_resources: resources of a server, as Ray names them, such as `{"CPU": 2, "memory": 8e9}`; None for a CPU.
        worker_resources: resources of a worker, such as `{"CPU": 4, "GPU": 1}`; None for a CPU.
        placement: placement of tasks on nodes: "PACK", "SPREAD", "STRICT_PACK" or "STRICT_SPREAD".
        options: more options of a cluster, the keys of its YAML file: `replication_factor=2`, `restarts=3`,
            `chief="none"`.

    Raises:
        ConfigError: Ray is not installed, not initialised or does not have the resources; a node cannot run tasks; or
            an option is malformed.
        PSError: a task failed; the message has its name and its last output.
    """
    given = {name: value for name, value in (("ps", ps_resources), ("worker", worker_resources)) if value is not None}
    resources = Resources(**given, placement=placement)
    config = LaunchConfig(script=script, args=tuple(args), ps=ps, workers=workers, **options)
    printer = Printer(colour=wants_colour())
    cluster = RayCluster(resources, config, printer)
    cluster.client_environ = printer.terminal()
    with cluster:
        outcome = cluster.wait()
    printer.finish()
    if outcome.code:
        raise PSError(outcome.report.removeprefix("psworker: ") or f"exit code {outcome.code}", str(outcome.task or ""))
