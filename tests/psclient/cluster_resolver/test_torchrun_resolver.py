"""The resolver of torchrun's processes. `tests/frameworks/torch/test_torchrun.py` runs it under a real torchrun."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from psclient.cluster_resolver import TorchrunClusterResolver, task_of
from pswire.cluster import Task
from pswire.errors import ConfigError

Torchrun = Callable[..., TorchrunClusterResolver]

VARIABLES = {
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
def torchrun(monkeypatch: pytest.MonkeyPatch) -> Torchrun:
    """Makes the resolver of a process with some variables other than `VARIABLES`; None for one that is not set."""

    def made(variables: dict[str, str | None] | None = None, **given: Any) -> TorchrunClusterResolver:
        for name, value in (VARIABLES | (variables or {})).items():
            monkeypatch.delenv(name, raising=False)
            if value is not None:
                monkeypatch.setenv(name, value)
        return TorchrunClusterResolver(**given)

    return made


def test_the_first_ranks_are_servers(torchrun: Torchrun) -> None:
    """On the node whose address torchrun tells, each on its port; all others are workers, named by their nodes."""
    resolver = torchrun(jobs={"worker": 4, "ps": 2})
    assert resolver.get_task_info() == (resolver.task_type, resolver.task_id) == ("worker", 2)
    cluster = resolver.cluster_spec()
    assert cluster.job_tasks("ps") == ["node1:22220", "node1:22221"]
    assert cluster.job_tasks("worker") == ["node1:0", "node-1:0", "node-1:0", "node-1:0"]
    assert (resolver.master("ps", 1), resolver.master("ps", 0, "x")) == ("grpc://node1:22221", "x://node1:22220")


def test_tasks_of_one_node_are_of_one_host(torchrun: Torchrun) -> None:
    """So that they share its cores."""
    config = task_of(torchrun(jobs={"worker": 4, "ps": 2}, port_base=9000))
    assert config is not None
    assert config.task == Task("worker", 2)
    assert config.cluster.at_host_of(Task("worker", 0)) == [Task("ps", 0), Task("ps", 1), Task("worker", 0)]
    assert config.cluster.at_host_of(Task("worker", 2)) == [Task("worker", index) for index in (1, 2, 3)]
    assert config.cluster.task_address("ps", 1) == "node1:9001"


@pytest.mark.parametrize(
    ("rank", "task"), [("0", ("chief", 0)), ("1", ("ps", 0)), ("2", ("worker", 0)), ("5", ("worker", 3))]
)
def test_a_chief_has_the_first_rank(torchrun: Torchrun, rank: str, task: tuple[str, int]) -> None:
    """In the order of the jobs' names, as for Slurm; ports follow the ranks."""
    resolver = torchrun(
        {"RANK": rank, "GROUP_RANK": "0" if rank < "3" else "1"}, jobs={"ps": 1, "worker": 4, "chief": 1}
    )
    assert resolver.get_task_info() == task
    assert resolver.cluster_spec().task_address("ps", 0) == "node1:22221"


def test_by_itself_one_task_is_a_server(torchrun: Torchrun) -> None:
    """And all others are workers."""
    cluster = torchrun().cluster_spec()
    assert (cluster.num_tasks("ps"), cluster.num_tasks("worker")) == (1, 5)


@pytest.mark.parametrize(
    ("variables", "given", "error", "said"),
    [
        ({"RANK": None}, {}, RuntimeError, "RANK is not set: .*start it with torchrun"),
        ({"MASTER_ADDR": None}, {}, RuntimeError, "MASTER_ADDR is not set"),
        ({"WORLD_SIZE": "six"}, {}, ConfigError, "WORLD_SIZE='six' must be a whole number"),
        ({}, {"jobs": {"ps": 1, "worker": 4}}, RuntimeError, "the jobs have 5 tasks, but torchrun has started 6"),
        ({}, {"jobs": {"worker": 6}}, RuntimeError, "jobs must have a server and a worker"),
        ({}, {"jobs": {"ps": 5, "worker": 1}}, RuntimeError, "ranks up to 4, and the first node has fewer processes"),
        (
            {"RANK": "0", "GROUP_RANK": "0"},
            {"jobs": {"ps": 4, "worker": 2}},
            RuntimeError,
            "ranks up to 3, and the first node has 3 processes.*raise --nproc-per-node",
        ),
        ({"MASTER_PORT": "22220"}, {}, ConfigError, "MASTER_PORT=22220 is torchrun's own.*another port_base"),
        ({}, {"port_base": 65536}, ConfigError, "port_base=65536 leaves no ports"),
    ],
)
def test_what_makes_no_cluster_is_refused(
    torchrun: Torchrun, variables: dict[str, str | None], given: dict[str, Any], error: type[Exception], said: str
) -> None:
    """With the variable or the flag to correct."""
    with pytest.raises(error, match=said):
        torchrun(variables, **given)


def test_serve_returns_in_workers(torchrun: Torchrun, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script goes on there, without a `TF_CONFIG`."""
    monkeypatch.delenv("TF_CONFIG", raising=False)
    resolver = torchrun()
    resolver.serve()
    assert resolver.task_type == "worker"
