"""The resolver of a Slurm step. What is expected was observed on TensorFlow 2, where a test does not say otherwise."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from psclient.cluster_resolver import SlurmClusterResolver, task_of
from pswire.cluster import ClusterSpec, Task, TaskConfig
from pswire.errors import ConfigError

Slurm = Callable[..., SlurmClusterResolver]
ONE_GPU = {"gpus_per_node": 1, "gpus_per_task": 1}


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Slurm:
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


def test_slurm_tasks_are_workers(slurm: Slurm) -> None:
    """Without jobs each task is a worker, in the order of the nodes."""
    resolver = slurm(3, 5, "t02n[1-4,7]", "1(x5)", **ONE_GPU)
    workers = [f"t02n{node}:8888" for node in (1, 2, 3, 4, 7)]
    assert resolver.cluster_spec() == ClusterSpec({"worker": workers})
    assert resolver.get_task_info() == (resolver.task_type, resolver.task_id) == ("worker", 3)
    assert (resolver.rpc_layer, resolver.environment) == ("grpc", "")
    assert resolver.num_accelerators() == {"GPU": 1}
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"
    assert (resolver.master(), resolver.master("worker", 0, "x")) == ("grpc://t02n4:8888", "x://t02n1:8888")


HETEROGENEOUS = {
    "ps": ["node1:9000"],
    "worker": ["node1:9001", "node2:9000", "node3:9000", "node7:9000", "other:9000"],
}


@pytest.mark.parametrize(
    ("rank", "task", "gpus"),
    [(0, ("ps", 0), "0,1"), (1, ("worker", 0), "2,3"), (2, ("worker", 1), "0,1"), (5, ("worker", 4), "0,1")],
)
def test_slurm_nodes_may_differ(slurm: Slurm, rank: int, task: tuple[str, int], gpus: str) -> None:
    """With two tasks on the first node and one on the others, each task has its port and its GPUs."""
    jobs = {"worker": 5, "ps": 1}
    resolver = slurm(rank, 6, "node[1-3,7],other", "2,1(x3),1", jobs=jobs, gpus_per_node=4, port_base=9000)
    assert resolver.cluster_spec().as_dict() == HETEROGENEOUS
    assert resolver.get_task_info() == task
    assert resolver.num_accelerators("worker", 3) == {"GPU": 2}
    assert os.environ["CUDA_VISIBLE_DEVICES"] == gpus
    if task[0] == "worker":
        assert task_of(resolver) == TaskConfig(ClusterSpec(HETEROGENEOUS), Task(*task))


def test_slurm_nodes_keep_their_order(slurm: Slurm) -> None:
    """Rank 0 is on the first node of the list. (TensorFlow sorts by name, and would take n10 to be the first.)"""
    resolver = slurm(0, 3, "n[8-10]", "1(x3)", gpus_per_node=0)
    assert resolver.cluster_spec().job_tasks("worker") == ["n8:8888", "n9:8888", "n10:8888"]


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("a", ["a"]),
        ("n[08-10]", ["n08", "n09", "n10"]),
        ("n[1-2],m5,o[3-4,6,7-9]", ["n1", "n2", "m5", "o3", "o4", "o6", "o7", "o8", "o9"]),
        ("a[1-2]-ib", ["a1-ib", "a2-ib"]),
        ("r[1-2]n[7,9]", ["r1n7", "r1n9", "r2n7", "r2n9"]),
    ],
)
def test_slurm_host_lists(slurm: Slurm, nodes: str, expected: list[str]) -> None:
    """Ranges keep their leading zeros; the last two forms are Slurm's as well, though TensorFlow refuses them."""
    resolver = slurm(0, len(expected), nodes, f"1(x{len(expected)})", gpus_per_node=0)
    assert resolver.cluster_spec().job_tasks("worker") == [f"{host}:8888" for host in expected]


def test_slurm_is_not_asked_what_is_given(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    """With jobs and hosts given, the rank is enough; with a number of tasks per node, the hosts are needed too."""
    assert slurm(3, 9, "a,b", "x", jobs={"worker": 4}, tasks_per_node=2, gpus_per_node=0).master() == "grpc://b:8889"
    for name in ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE"):
        monkeypatch.delenv(name)
    given: dict[str, Any] = {"jobs": {"worker": 4}, "gpus_per_node": 0, "rpc_layer": None}
    assert SlurmClusterResolver(tasks_per_node={"a": 3, "b": 1}, **given).master() == "b:8888"
    with pytest.raises(RuntimeError, match="SLURM_STEP_NODELIST is not set"):
        SlurmClusterResolver(tasks_per_node=2, **given)


@pytest.mark.parametrize(
    ("visible", "per_node", "own"),
    [
        ("0,1,2,3", None, "2,3"),
        ("4,5,6,7", None, "6,7"),
        ("4,5,6,7", 2, "5"),
        ("2,3", 4, "2,3"),
        ("", None, ""),
    ],
)
def test_slurm_gpus_are_those_that_are_visible(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch, visible: str, per_node: int | None, own: str
) -> None:
    """A task gets its share of what Slurm has given; where that is less than a node is said to have, by number.

    TensorFlow always goes by number, and may take the GPUs of others.
    """
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    resolver = slurm(1, 2, "a", "2", gpus_per_node=per_node)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == own
    assert resolver.num_accelerators() == {"GPU": len(own.replace(",", ""))}


def test_slurm_gpus_are_left_alone_on_request(slurm: Slurm) -> None:
    """Without `auto_set_gpu` the environment stays as it is."""
    resolver = slurm(0, 2, "a,b", "1(x2)", gpus_per_node=2, auto_set_gpu=False)
    assert resolver.cluster_spec().num_tasks("worker") == 2
    assert resolver.num_accelerators() == {"GPU": 2}
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


def nvidia_smi(directory: Path, script: str) -> None:
    path = directory / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_slurm_gpus_are_counted(slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's tool counts the GPUs of a node; without it there are none; where it fails, one is told."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert slurm(0, 1, "a", "1").num_accelerators() == {"GPU": 0}
    nvidia_smi(tmp_path, 'echo "GPU 0: one (UUID: 1)"; echo "  MIG"; echo "GPU 1: two (UUID: 2)"')
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert slurm(0, 1, "a", "1").num_accelerators() == {"GPU": 2}
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    nvidia_smi(tmp_path, "echo no driver >&2; exit 9")
    with pytest.raises(RuntimeError, match=r"cannot tell the number of GPUs \(no driver\); give gpus_per_node"):
        slurm(0, 1, "a", "1")


NO_STEPS: dict[str, tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = {
    "a rank in words": (("x", 2, "a", "2"), ONE_GPU, ConfigError, "SLURM_PROCID='x' must be a whole number"),
    "a rank too high": ((7, 2, "a", "2"), ONE_GPU, RuntimeError, "SLURM_PROCID=7, but the Slurm step has 2 tasks"),
    "an open bracket": ((0, 2, "a[1", "2"), ONE_GPU, ConfigError, r"NODELIST='a\[1' is no host list"),
    "a range of letters": ((0, 2, "a[1-x]", "2"), ONE_GPU, ConfigError, "is no host list"),
    "a range of three": ((0, 2, "a[1-2-3]", "2"), ONE_GPU, ConfigError, "'1-2-3' is no range of nodes"),
    "a range that goes down": ((0, 2, "a[3-1]", "2"), ONE_GPU, ConfigError, "'3-1' is no range of nodes"),
    "no host": ((0, 2, "", "2"), ONE_GPU, ConfigError, "NODELIST='' is no host list"),
    "a comma too many": ((0, 2, "a,,b", "1(x2)"), ONE_GPU, ConfigError, "is no host list"),
    "a count in words": ((0, 2, "a", "2(y2)"), ONE_GPU, ConfigError, r"TASKS_PER_NODE='2\(y2\)' is no list"),
    "counts for other nodes": ((0, 2, "a,b,c", "1(x2)"), ONE_GPU, RuntimeError, "NODELIST has 3 nodes, .*_NODE 2"),
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
def test_what_is_no_slurm_step_is_told(slurm: Slurm, case: str) -> None:
    """The error names the variable or the argument that is wrong."""
    step, given, error, said = NO_STEPS[case]
    with pytest.raises(error, match=said):
        slurm(*step, **given)


def test_outside_of_slurm_one_is_told(slurm: Slurm) -> None:
    """Without Slurm's variables there is no step."""
    with pytest.raises(RuntimeError, match="SLURM_PROCID is not set: this process is in no Slurm step; start it with"):
        SlurmClusterResolver()
