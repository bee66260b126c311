"""Options of `psworker` that say where a cluster runs, or which part this process has in one; no file has them."""

from __future__ import annotations

from dataclasses import dataclass

from pswire.options import CLUSTER, HOSTS, PATH, SWITCH, option
from pswire.variables import RAY_ADDRESS


@dataclass(frozen=True)
class StartOptions:
    """Options of the command line alone."""

    standalone: bool = option(
        False, "Start servers, workers and a chief on this machine, and run SCRIPT.", SWITCH, group=CLUSTER
    )
    config: str | None = option(None, "YAML file that describes a cluster on this machine.", PATH, group=CLUSTER)
    join: str | None = option(
        None,
        "Run SCRIPT as one more worker of the job on these servers, without TF_CONFIG; one server is enough.",
        group=CLUSTER,
        metavar="HOST:PORT[,...]",
    )
    standby: bool = option(
        False, "Wait as a second chief, and take over when the job's chief is lost.", SWITCH, group=CLUSTER
    )
    hosts: str | None = option(
        None,
        "Start the cluster over ssh on the hosts of this file, with lines such as: node1 ps=1 worker=4.",
        PATH,
        group=HOSTS,
    )
    remote_python: str | None = option(
        None, "With --hosts: path of Python on the hosts.", PATH, otherwise="that of this psworker", group=HOSTS
    )
    ssh: str | None = option(
        None, "With --hosts: ssh command with its options.", otherwise="ssh", group=HOSTS, metavar="COMMAND"
    )
    ray: str | None = option(
        None,
        f"Start the cluster on Ray: HOST:PORT of the head, or auto for {RAY_ADDRESS}'s, else this host's.",
        group=HOSTS,
        metavar="ADDRESS",
    )
    ps_resources: str | None = option(
        None,
        "With --ray: resources of a server, such as CPU=4,memory=8e9.",
        otherwise="CPU=1",
        group=HOSTS,
        metavar="NAME=N,...",
    )
    worker_resources: str | None = option(
        None,
        "With --ray: resources of a worker, such as CPU=4,GPU=1.",
        otherwise="CPU=1",
        group=HOSTS,
        metavar="NAME=N,...",
    )
    placement: str | None = option(
        None,
        "With --ray: PACK, SPREAD, STRICT_PACK or STRICT_SPREAD over nodes.",
        otherwise="PACK",
        group=HOSTS,
        metavar="STRATEGY",
    )
