"""Resolvers of pods, of Slurm steps, and of torchrun's processes.

What is expected of Slurm's was observed on TensorFlow 2, where a test does not say otherwise. Real manifests and a real
torchrun are in `tests/deploy` and `tests/frameworks`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import psclient as ps
from psclient.cluster_resolver import KubernetesClusterResolver, SlurmClusterResolver, TorchrunClusterResolver, task_of
from pswire.cluster import ClusterSpec, Task, TaskConfig
from pswire.errors import ConfigError
from tests.kit.strategies import refused

VARIABLES = ("HOSTNAME", "JOB_COMPLETION_INDEX", "JOB_COMPLETIONS", "JOBSET_NAME", "REPLICATED_JOB_NAME", "JOB_INDEX")
JOBS = {"ps": 2, "worker": 4}


@pytest.fixture
def pod(monkeypatch):
    """Makes the resolver of a pod with a hostname and variables."""

    def made(host: str, variables: dict[str, str] | None = None, **given: Any) -> KubernetesClusterResolver:
        for name in VARIABLES:
            monkeypatch.delenv(name, raising=False)
        for name, value in ({"HOSTNAME": host} | (variables or {})).items():
            monkeypatch.setenv(name, value)
        return KubernetesClusterResolver(**({"jobs": JOBS} | given))

    return made


TOLD = {"JOBSET_NAME": "digits", "REPLICATED_JOB_NAME": "worker", "JOB_INDEX": "1", "JOB_COMPLETION_INDEX": "0"}
NAMES = {"ps": "server", "worker": "big-server"}

PODS: dict[str, tuple[str, dict[str, str], dict[str, Any], tuple[str, int], str]] = {
    "of an indexed Job": ("worker-3", {"JOB_COMPLETION_INDEX": "3"}, {}, ("worker", 3), "ps-{}.ps:2222"),
    "of a StatefulSet of any name": ("a-b-ps-1", {}, {}, ("ps", 1), "a-b-ps-{}.a-b-ps:2222"),
    "with a namespace": ("ps-1", {}, {"service": "ps.training", "port": 3333}, ("ps", 1), "ps-{}.ps.training:3333"),
    "of the longest name": ("x-big-server-2", {}, {"names": NAMES}, ("worker", 2), "x-server-{}.x-server:2222"),
    "of a JobSet": ("a-worker-0-3", {"JOB_COMPLETION_INDEX": "3"}, {}, ("worker", 3), "a-ps-0-{}.a:2222"),
    "of several Jobs, by an argument": (
        *("digits-worker-1-1", {}, {"completions": {"worker": 2, "ps": 1}}, ("worker", 3)),
        "digits-ps-{}-0.digits:2222",
    ),
    "of several Jobs, by variables, which win over the hostname that a node's network may have set": (
        *("node7", TOLD, {"completions": {"worker": 2}}, ("worker", 2)),
        "digits-ps-0-{}.digits:2222",
    ),
}


@pytest.mark.parametrize("case", PODS)
def test_a_pod_knows_its_task(pod, case):
    """The hostname ends with the controller's name and the index; servers are found through the Service of theirs.
    Tasks of a JobSet are numbered through its Jobs, whose Service has the JobSet's name."""
    host, variables, given, task, servers = PODS[case]
    resolver = pod(host, variables, **given)
    assert (resolver.task_type, resolver.task_id) == task
    assert resolver.cluster_spec().job_tasks("ps") == [servers.format(index) for index in range(2)]


def test_a_pod_knows_the_others(pod):
    """Workers have names and no ports; how many pods a Job has a variable may say."""
    resolver = pod("worker-3", {"JOB_COMPLETION_INDEX": "3"})
    assert resolver.cluster_spec().job_tasks("worker") == [f"worker-{index}:0" for index in range(4)]
    assert (resolver.master("ps", 1), resolver.master(rpc_layer="x")) == ("grpc://ps-1.ps:2222", "x://worker-3:0")
    config = task_of(resolver)
    assert config.task == Task("worker", 3)
    assert isinstance(resolver, ps.ClusterResolver)
    of_two = pod("digits-worker-1-1", {"JOB_COMPLETIONS": "2"}, completions={"ps": 1})
    assert (of_two.task_id, of_two.cluster_spec().task_address("worker", 2)) == (3, "digits-worker-1-0:0")


NO_CLUSTER: list[tuple[dict[str, Any], str]] = [
    ({"jobs": {"worker": 2}}, "jobs must contain the servers"),
    ({"jobs": {"ps": 0}}, r"jobs\['ps'\] must be a whole number from 1, not 0"),
    ({"completions": {"worker": "2"}}, r"completions\['worker'\] must be a whole number"),
    ({"names": {"wroker": "x"}}, "names contains 'wroker', which is not in jobs; jobs has ps, worker"),
]
SET = {"JOBSET_NAME": "digits", "REPLICATED_JOB_NAME": "worker", "JOB_COMPLETION_INDEX": "0"}


@pytest.mark.parametrize(
    ("host", "variables", "given", "said"),
    [
        ("node7", {}, {}, r"HOSTNAME='node7' is not a pod of these jobs; .* ps-0, worker-0, .*`names`.*hostNetwork"),
        ("worker-x", {}, {}, "is not a pod"),
        ("trainer-0", {}, {}, "is not a pod"),
        ("worker-4", {}, {}, "task 4 of 'worker', but `jobs` has 4, 4 in each Job"),
        ("digits-worker-1-0", {}, {}, "task 4 of 'worker'"),
        ("digits-worker-0-2", {}, {"completions": {"worker": 2}}, "task 2 of 'worker', .* 2 in each Job"),
        ("worker-1", {"JOB_COMPLETION_INDEX": "2"}, {}, ("JOB_COMPLETION_INDEX=2, but HOSTNAME='worker-1' belongs "
                                                        "to pod 1")),
        ("worker-1", {"JOB_COMPLETION_INDEX": "two"}, {}, "JOB_COMPLETION_INDEX='two' must be a whole number"),
        ("worker-1", {"JOB_COMPLETIONS": "3"}, {"completions": {"worker": 4}}, "JOB_COMPLETIONS=3, but completions"),
        ("node7", SET | {"JOBSET_NAME": ""}, {}, "JOBSET_NAME is not set, but REPLICATED_JOB_NAME is"),
        ("node7", SET | {"JOB_COMPLETION_INDEX": ""}, {}, ("JOB_COMPLETION_INDEX is not set; set completionMode: "
                                                          "Indexed")),
        ("node7", SET | {"REPLICATED_JOB_NAME": "driver"}, {}, "'driver' is not one of ps, worker; give `names`"),
    ],
)  # fmt: skip
def test_what_is_no_pod_of_the_cluster_is_refused(pod, host, variables, given, said):
    """The error names the variable, or the argument, and says what to do."""
    refused(ConfigError, said, lambda: pod(host, variables, **given))
    for wrong, words in NO_CLUSTER:
        refused(ValueError, words, lambda wrong=wrong: pod("worker-0", **wrong))


ONE_GPU = {"gpus_per_node": 1, "gpus_per_task": 1}


@pytest.fixture
def slurm(monkeypatch):
    """Makes the resolver of one process of a Slurm step: rank, tasks, nodes, tasks per node."""
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # so that what a resolver sets is undone
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")

    def made(rank: Any, tasks: int, nodes: str, per_node: str, **given: Any) -> SlurmClusterResolver:
        monkeypatch.setenv("SLURM_PROCID", str(rank))
        monkeypatch.setenv("SLURM_STEP_NUM_TASKS", str(tasks))
        monkeypatch.setenv("SLURM_STEP_NODELIST", nodes)
        monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", per_node)
        return SlurmClusterResolver(**given)

    return made


def test_slurm_tasks_are_workers(slurm):
    """Without jobs each task is a worker, in the order of the nodes."""
    resolver = slurm(3, 5, "t02n[1-4,7]", "1(x5)", **ONE_GPU)
    workers = [f"t02n{node}:8888" for node in (1, 2, 3, 4, 7)]
    assert resolver.cluster_spec() == ClusterSpec({"worker": workers})
    assert resolver.get_task_info() == (resolver.task_type, resolver.task_id) == ("worker", 3)
    assert (resolver.rpc_layer, resolver.environment) == ("grpc", "")
    assert resolver.num_accelerators() == {"GPU": 1}
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"
    assert (resolver.master(), resolver.master("worker", 0, "x")) == ("grpc://t02n4:8888", "x://t02n1:8888")


HETEROGENEOUS = {"ps": ["node1:9000"], "worker": ["node1:9001", "node2:9000", "node3:9000", "node7:9000", "other:9000"]}


@pytest.mark.parametrize(
    ("rank", "task", "gpus"),
    [(0, ("ps", 0), "0,1"), (1, ("worker", 0), "2,3"), (2, ("worker", 1), "0,1"), (5, ("worker", 4), "0,1")],
)
def test_slurm_nodes_may_differ(slurm, rank, task, gpus):
    """With two tasks on the first node and one on the others, each task has its port and its GPUs."""
    jobs = {"worker": 5, "ps": 1}
    resolver = slurm(rank, 6, "node[1-3,7],other", "2,1(x3),1", jobs=jobs, gpus_per_node=4, port_base=9000)
    assert resolver.cluster_spec().as_dict() == HETEROGENEOUS
    assert resolver.get_task_info() == task
    assert resolver.num_accelerators("worker", 3) == {"GPU": 2}
    assert os.environ["CUDA_VISIBLE_DEVICES"] == gpus
    if task[0] == "worker":
        assert task_of(resolver) == TaskConfig(ClusterSpec(HETEROGENEOUS), Task(*task))


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("a", ["a"]),
        ("n[08-10]", ["n08", "n09", "n10"]),
        ("n[8-10]", ["n8", "n9", "n10"]),  # TensorFlow sorts by name, and would take n10 to be the first
        ("n[1-2],m5,o[3-4,6,7-9]", ["n1", "n2", "m5", "o3", "o4", "o6", "o7", "o8", "o9"]),
        ("a[1-2]-ib", ["a1-ib", "a2-ib"]),
        ("r[1-2]n[7,9]", ["r1n7", "r1n9", "r2n7", "r2n9"]),
    ],
)
def test_slurm_host_lists(slurm, nodes, expected):
    """Ranges keep their leading zeros; the last two forms are Slurm's as well, though TensorFlow refuses them."""
    resolver = slurm(0, len(expected), nodes, f"1(x{len(expected)})", gpus_per_node=0)
    assert resolver.cluster_spec().job_tasks("worker") == [f"{host}:8888" for host in expected]


def test_slurm_is_not_asked_what_is_given(slurm, monkeypatch):
    """With jobs and hosts given, the rank is enough; with a number of tasks per node, the hosts are needed too."""
    assert slurm(3, 9, "a,b", "x", jobs={"worker": 4}, tasks_per_node=2, gpus_per_node=0).master() == "grpc://b:8889"
    for name in ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE"):
        monkeypatch.delenv(name)
    given: dict[str, Any] = {"jobs": {"worker": 4}, "gpus_per_node": 0, "rpc_layer": None}
    assert SlurmClusterResolver(tasks_per_node={"a": 3, "b": 1}, **given).master() == "b:8888"
    refused(RuntimeError, "SLURM_STEP_NODELIST is not set", lambda: SlurmClusterResolver(tasks_per_node=2, **given))


@pytest.mark.parametrize(
    ("visible", "per_node", "own"),
    [("0,1,2,3", None, "2,3"), ("4,5,6,7", None, "6,7"), ("4,5,6,7", 2, "5"), ("2,3", 4, "2,3"), ("", None, "")],
)
def test_slurm_gpus_are_those_that_are_visible(slurm, monkeypatch, visible, per_node, own):
    """A task gets its share of what Slurm has given; where that is less than a node is said to have, by number. Without
    `auto_set_gpu` the environment stays as it is.

    TensorFlow always goes by number, and may take the GPUs of others.
    """
    assert slurm(0, 2, "a,b", "1(x2)", gpus_per_node=2, auto_set_gpu=False).num_accelerators() == {"GPU": 2}
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    resolver = slurm(1, 2, "a", "2", gpus_per_node=per_node)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == own
    assert resolver.num_accelerators() == {"GPU": len(own.replace(",", ""))}


def nvidia_smi(directory: Path, script: str) -> None:
    path = directory / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_slurm_gpus_are_counted(slurm, tmp_path, monkeypatch):
    """The driver's tool counts the GPUs of a node; without it there are none; where it fails, one is told."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert slurm(0, 1, "a", "1").num_accelerators() == {"GPU": 0}
    nvidia_smi(tmp_path, 'echo "GPU 0: one (UUID: 1)"; echo "  MIG"; echo "GPU 1: two (UUID: 2)"')
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert slurm(0, 1, "a", "1").num_accelerators() == {"GPU": 2}
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    nvidia_smi(tmp_path, "echo no driver >&2; exit 9")
    with pytest.raises(RuntimeError, match=r"cannot report the number of GPUs \(no driver\); give gpus_per_node"):
        slurm(0, 1, "a", "1")


NO_STEPS: dict[str, tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = {
    "a rank in words": (("x", 2, "a", "2"), ONE_GPU, ConfigError, "SLURM_PROCID='x' must be a whole number"),
    "a rank too high": ((7, 2, "a", "2"), ONE_GPU, RuntimeError, "SLURM_PROCID=7, but the Slurm step has 2 tasks"),
    "an open bracket": ((0, 2, "a[1", "2"), ONE_GPU, ConfigError, r"NODELIST='a\[1' is not a host list"),
    "a range of letters": ((0, 2, "a[1-x]", "2"), ONE_GPU, ConfigError, "is not a host list"),
    "a range of three": ((0, 2, "a[1-2-3]", "2"), ONE_GPU, ConfigError, "'1-2-3' is not a range of nodes"),
    "a range that goes down": ((0, 2, "a[3-1]", "2"), ONE_GPU, ConfigError, "'3-1' is not a range of nodes"),
    "no host": ((0, 2, "", "2"), ONE_GPU, ConfigError, "NODELIST='' is not a host list"),
    "a comma too many": ((0, 2, "a,,b", "1(x2)"), ONE_GPU, ConfigError, "is not a host list"),
    "a count in words": ((0, 2, "a", "2(y2)"), ONE_GPU, ConfigError, r"TASKS_PER_NODE='2\(y2\)' is not a list"),
    "counts for other nodes": ((0, 2, "a,b,c", "1(x2)"), ONE_GPU, RuntimeError, "NODELIST has 3 nodes, .*_NODE has 2"),
    "jobs too many": ((0, 2, "a", "2"), {"jobs": {"worker": 3}}, RuntimeError, "the jobs have 3 tasks, but .* 2"),
    "jobs too few": ((0, 2, "a", "2"), {"jobs": {"worker": 1}}, RuntimeError, "the jobs have 1 tasks, but .* 2"),
    "GPUs too few": (
        (0, 2, "a", "2"),
        {"gpus_per_node": 2, "gpus_per_task": 2},
        RuntimeError,
        "2 tasks with 2 GPUs each need more than the 2 GPUs of a node",
    ),
    "a GPU for two": ((0, 2, "a", "2"), {"gpus_per_node": 1}, RuntimeError, "has 1 GPUs for 2 tasks; give gpus_per_"),
}


@pytest.mark.parametrize("case", NO_STEPS)
def test_what_is_no_slurm_step_is_told(slurm, case):
    """The error names the variable or the argument that is wrong; outside of Slurm it says how to start."""
    said_outside = "SLURM_PROCID is not set, because this process does not run in a Slurm step; start it with"
    refused(RuntimeError, said_outside, SlurmClusterResolver)
    step, given, error, said = NO_STEPS[case]
    refused(error, said, lambda: slurm(*step, **given))


TORCHRUN = {
    "RANK": "4",
    "WORLD_SIZE": "6",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "3",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29400",
}
"""Of the second process on the second of two nodes with three processes each."""


@pytest.fixture
def torchrun(monkeypatch):
    """Makes the resolver of a process with some variables other than `TORCHRUN`; None for one that is not set."""

    def made(variables: dict[str, str | None] | None = None, **given: Any) -> TorchrunClusterResolver:
        for name, value in (TORCHRUN | (variables or {})).items():
            monkeypatch.delenv(name, raising=False)
            if value is not None:
                monkeypatch.setenv(name, value)
        return TorchrunClusterResolver(**given)

    return made


def test_the_first_ranks_are_servers(torchrun):
    """On the node whose address torchrun tells, each on its port; all others are workers, named by their nodes."""
    resolver = torchrun(jobs={"worker": 4, "ps": 2})
    assert resolver.get_task_info() == (resolver.task_type, resolver.task_id) == ("worker", 2)
    cluster = resolver.cluster_spec()
    assert cluster.job_tasks("ps") == ["node1:22220", "node1:22221"]
    assert cluster.job_tasks("worker") == ["node1:0", "node-1:0", "node-1:0", "node-1:0"]
    assert (resolver.master("ps", 1), resolver.master("ps", 0, "x")) == ("grpc://node1:22221", "x://node1:22220")


def test_by_itself_one_task_is_a_server(torchrun):
    """And all others are workers; tasks of one node are of one host, so that they share its cores."""
    config = task_of(torchrun(jobs={"worker": 4, "ps": 2}, port_base=9000))
    assert config.task == Task("worker", 2)
    assert config.cluster.at_host_of(Task("worker", 0)) == [Task("ps", 0), Task("ps", 1), Task("worker", 0)]
    assert config.cluster.at_host_of(Task("worker", 2)) == [Task("worker", index) for index in (1, 2, 3)]
    assert config.cluster.task_address("ps", 1) == "node1:9001"
    resolver = torchrun()
    cluster = resolver.cluster_spec()
    assert (cluster.num_tasks("ps"), cluster.num_tasks("worker")) == (1, 5)
    resolver.serve()  # returns in workers, where the script goes on
    assert resolver.task_type == "worker"


@pytest.mark.parametrize(
    ("rank", "task"), [("0", ("chief", 0)), ("1", ("ps", 0)), ("2", ("worker", 0)), ("5", ("worker", 3))]
)
def test_a_chief_has_the_first_rank(torchrun, rank, task):
    """In the order of the jobs' names, as for Slurm; ports follow the ranks."""
    resolver = torchrun({"RANK": rank, "GROUP_RANK": f"{int(rank) // 3}"}, jobs={"ps": 1, "worker": 4, "chief": 1})
    assert resolver.get_task_info() == task
    assert resolver.cluster_spec().task_address("ps", 0) == "node1:22221"


@pytest.mark.parametrize(
    ("variables", "given", "error", "said"),
    [
        ({"RANK": None}, {}, RuntimeError, "RANK is not set, .*start it with torchrun"),
        ({"MASTER_ADDR": None}, {}, RuntimeError, "MASTER_ADDR is not set"),
        ({"WORLD_SIZE": "six"}, {}, ConfigError, "WORLD_SIZE='six' must be a whole number"),
        ({}, {"jobs": {"ps": 1, "worker": 4}}, RuntimeError, "the jobs have 5 tasks, but torchrun started 6"),
        ({}, {"jobs": {"worker": 6}}, RuntimeError, "jobs must have a server and a worker"),
        ({}, {"jobs": {"ps": 5, "worker": 1}}, RuntimeError, "ranks up to 4, but the first node has fewer processes"),
        (
            {"RANK": "0", "GROUP_RANK": "0"},
            {"jobs": {"ps": 4, "worker": 2}},
            RuntimeError,
            "ranks up to 3, but the first node has 3 processes.*raise --nproc-per-node",
        ),
        ({"MASTER_PORT": "22220"}, {}, ConfigError, "MASTER_PORT=22220, which torchrun uses.*another port_base"),
        ({}, {"port_base": 65536}, ConfigError, "port_base=65536 leaves no ports"),
    ],
)
def test_what_makes_no_cluster_is_refused(torchrun, variables, given, error, said):
    refused(error, said, lambda: torchrun(variables, **given))
