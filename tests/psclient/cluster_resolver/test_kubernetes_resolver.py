"""The resolver of pods: what hostnames and variables tell, and which of them are refused.

`tests/deploy/test_kubernetes.py` holds that it finds in the pods of our manifests what their `TF_CONFIG` says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import psclient as ps
from psclient.cluster_resolver import KubernetesClusterResolver, task_of
from pswire.cluster import Task
from pswire.errors import ConfigError

Pod = Callable[..., KubernetesClusterResolver]

VARIABLES = ("HOSTNAME", "JOB_COMPLETION_INDEX", "JOB_COMPLETIONS", "JOBSET_NAME", "REPLICATED_JOB_NAME", "JOB_INDEX")
JOBS = {"ps": 2, "worker": 4}


@pytest.fixture
def pod(monkeypatch: pytest.MonkeyPatch) -> Pod:
    """Makes the resolver of a pod with a hostname and variables."""

    def made(host: str, variables: dict[str, str] | None = None, **given: Any) -> KubernetesClusterResolver:
        for name in VARIABLES:
            monkeypatch.delenv(name, raising=False)
        for name, value in ({"HOSTNAME": host} | (variables or {})).items():
            monkeypatch.setenv(name, value)
        return KubernetesClusterResolver(**({"jobs": JOBS} | given))

    return made


def test_indexed_jobs_and_stateful_sets(pod: Pod) -> None:
    """The hostname ends with the controller's name and the index; servers are found through the Service of theirs."""
    resolver = pod("worker-3", {"JOB_COMPLETION_INDEX": "3"})
    assert (resolver.task_type, resolver.task_id) == ("worker", 3)
    cluster = resolver.cluster_spec()
    assert cluster.job_tasks("ps") == ["ps-0.ps:2222", "ps-1.ps:2222"]
    assert cluster.job_tasks("worker") == [f"worker-{index}:0" for index in range(4)]
    assert (resolver.master("ps", 1), resolver.master(rpc_layer="x")) == ("grpc://ps-1.ps:2222", "x://worker-3:0")
    config = task_of(resolver)
    assert config is not None
    assert config.task == Task("worker", 3)
    assert resolver is not None
    assert isinstance(resolver, ps.ClusterResolver)


def test_what_stands_before_the_name_is_in_all_names(pod: Pod) -> None:
    """As the chart makes them; a namespace may be said, and another port."""
    resolver = pod("a-b-ps-1")
    assert (resolver.task_type, resolver.task_id) == ("ps", 1)
    assert resolver.cluster_spec().job_tasks("ps") == ["a-b-ps-0.a-b-ps:2222", "a-b-ps-1.a-b-ps:2222"]
    resolver = pod("a-b-ps-1", service="servers.training", port=3333)
    assert resolver.cluster_spec().task_address("ps", 0) == "a-b-ps-0.servers.training:3333"


def test_other_names_of_controllers(pod: Pod) -> None:
    """Of several names that fit the longest counts."""
    names = {"ps": "server", "worker": "big-server"}
    resolver = pod("x-big-server-2", names=names)
    assert (resolver.task_type, resolver.task_id) == ("worker", 2)
    assert resolver.cluster_spec().task_address("ps", 1) == "x-server-1.x-server:2222"


def test_a_job_set_by_its_hostnames(pod: Pod) -> None:
    """Its Service has its name."""
    resolver = pod("digits-worker-0-3", {"JOB_COMPLETION_INDEX": "3"})
    assert (resolver.task_type, resolver.task_id) == ("worker", 3)
    assert resolver.cluster_spec().job_tasks("ps") == ["digits-ps-0-0.digits:2222", "digits-ps-0-1.digits:2222"]


def test_a_job_set_with_several_replicas_of_a_job(pod: Pod) -> None:
    """Tasks are numbered through the Jobs; the pods of a Job are in `completions`, or for this pod in a variable."""
    resolver = pod("digits-worker-1-1", completions={"worker": 2, "ps": 1})
    assert resolver.task_id == 3
    cluster = resolver.cluster_spec()
    assert cluster.job_tasks("ps") == ["digits-ps-0-0.digits:2222", "digits-ps-1-0.digits:2222"]
    assert cluster.task_address("worker", 2) == "digits-worker-1-0:0"
    assert pod("digits-worker-1-1", {"JOB_COMPLETIONS": "2"}).task_id == 3


def test_a_job_set_by_its_variables(pod: Pod) -> None:
    """They win over the hostname, which the network of a node may have set."""
    told = {"JOBSET_NAME": "digits", "REPLICATED_JOB_NAME": "worker", "JOB_INDEX": "1", "JOB_COMPLETION_INDEX": "0"}
    resolver = pod("node7", told, completions={"worker": 2})
    assert (resolver.task_type, resolver.task_id) == ("worker", 2)
    assert resolver.cluster_spec().task_address("ps", 1) == "digits-ps-0-1.digits:2222"


SET = {"JOBSET_NAME": "digits", "REPLICATED_JOB_NAME": "worker", "JOB_COMPLETION_INDEX": "0"}


@pytest.mark.parametrize(
    ("host", "variables", "given", "said"),
    [
        ("node7", {}, {}, r"HOSTNAME='node7' is of no pod of these jobs: .* ps-0, worker-0, .*`names`.*hostNetwork"),
        ("worker-x", {}, {}, "is of no pod"),
        ("trainer-0", {}, {}, "is of no pod"),
        ("worker-4", {}, {}, "task 4 of 'worker', of which `jobs` has 4, 4 in each Job"),
        ("digits-worker-1-0", {}, {}, "task 4 of 'worker'"),
        ("digits-worker-0-2", {}, {"completions": {"worker": 2}}, "task 2 of 'worker', .* 2 in each Job"),
        ("worker-1", {"JOB_COMPLETION_INDEX": "2"}, {}, "JOB_COMPLETION_INDEX=2, but HOSTNAME='worker-1' is of pod 1"),
        ("worker-1", {"JOB_COMPLETION_INDEX": "two"}, {}, "JOB_COMPLETION_INDEX='two' must be a whole number"),
        ("worker-1", {"JOB_COMPLETIONS": "3"}, {"completions": {"worker": 4}}, "JOB_COMPLETIONS=3, but completions"),
        ("node7", SET | {"JOBSET_NAME": ""}, {}, "JOBSET_NAME is not set, and REPLICATED_JOB_NAME is"),
        ("node7", SET | {"JOB_COMPLETION_INDEX": ""}, {}, "JOB_COMPLETION_INDEX is not set: .*completionMode: Indexed"),
        ("node7", SET | {"REPLICATED_JOB_NAME": "driver"}, {}, "'driver' is none of ps, worker; give `names`"),
    ],
)  # fmt: skip
def test_what_is_no_pod_of_the_cluster_is_refused(
    pod: Pod, host: str, variables: dict[str, str], given: dict[str, Any], said: str
) -> None:
    """The error names the variable, and says what to do."""
    with pytest.raises(ConfigError, match=said):
        pod(host, variables, **given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"jobs": {"worker": 2}}, "jobs must have the servers"),
        ({"jobs": {"ps": 0}}, r"jobs\['ps'\] must be a whole number from 1, not 0"),
        ({"completions": {"worker": "2"}}, r"completions\['worker'\] must be a whole number"),
        ({"names": {"wroker": "x"}}, "names has 'wroker', and jobs has no such job; it has ps, worker"),
    ],
)
def test_arguments_that_are_no_cluster_are_refused(pod: Pod, given: dict[str, Any], said: str) -> None:
    """At once, in every pod alike."""
    with pytest.raises(ValueError, match=said):
        pod("worker-0", **given)
