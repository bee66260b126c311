"""Clusters, and TF_CONFIG."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pswire.cluster import JOBS, ClusterSpec, Task, TFConfig, check_address, check_cluster, parse_tf_config
from pswire.errors import ConfigError
from tests.kit.cases import search

CLUSTER = {"ps": ["a:1", "b:2"], "worker": ["c:3"], "chief": ["d:4"]}
WORKER = {"type": "worker", "index": 0}


def test_a_good_tf_config() -> None:
    """Cluster and task are what was written."""
    config = parse_tf_config(json.dumps({"cluster": CLUSTER, "task": {"type": "ps", "index": 1}}))
    assert config is not None
    assert str(config.task) == "/job:ps/task:1"
    assert config.cluster.address(config.task) == "b:2"
    assert config.cluster.tasks("ps") == [Task("ps", 0), Task("ps", 1)]
    assert config.cluster.tasks("evaluator") == []
    assert config.cluster.describe() == "1 chief, 2 ps, 1 worker"
    # A chief that runs the script comes first, then workers by number, not by letter.
    tasks = [Task("ps", 0), Task("worker", 10), Task("worker", 2), Task("chief", 0)]
    assert sorted(tasks) == [Task("chief", 0), Task("worker", 2), Task("worker", 10), Task("ps", 0)]


EVALUATOR = {"type": "evaluator", "index": 0}
VARIANTS: dict[str, Any] = {
    # It has no part in the training, so that those who have need not know of it; as in TensorFlow.
    "an evaluator that is not in the cluster": {"cluster": CLUSTER, "task": EVALUATOR},
    "an evaluator that is": {"cluster": {**CLUSTER, "evaluator": ["e:5"]}, "task": EVALUATOR},
    "index as text": {"cluster": CLUSTER, "task": {"type": "worker", "index": "0"}},
    "no index": {"cluster": CLUSTER, "task": {"type": "worker"}},
    "addresses by index": {"cluster": {**CLUSTER, "worker": {"1": "k:10", "0": "c:3"}}, "task": WORKER},
    "an environment, which is ignored": {"cluster": CLUSTER, "task": WORKER, "environment": "cloud"},
}


@pytest.mark.parametrize("case", VARIANTS)
def test_variants_that_tensorflow_takes(case: str) -> None:
    """What TensorFlow's resolver reads, this reads alike."""
    config = parse_tf_config(json.dumps(VARIANTS[case]))
    assert config is not None
    assert config.task == Task(VARIANTS[case]["task"]["type"], 0)
    assert config.cluster.address(Task("worker", 0)) == "c:3"


@pytest.mark.parametrize("text", ["", "  \n", "{}", '{"cluster": {}}', '{"environment": "cloud"}'])
def test_no_cluster(text: str) -> None:
    """Without a cluster there is none, and that is no error."""
    assert parse_tf_config(text) is None


def written(**said: Any) -> str:
    """A TF_CONFIG with these keys."""
    return json.dumps(said)


def config(cluster: Any = CLUSTER, task: Any = WORKER) -> str:
    return written(cluster=cluster, task=task)


def changed(**jobs: Any) -> str:
    """A TF_CONFIG some of whose jobs are others."""
    return config(CLUSTER | jobs)


BAD: dict[str, tuple[str, str]] = {
    "no JSON": ("{", "not JSON .*line 1.*write {"),
    "JSON of another kind": ("[1]", "must be a JSON object, not list"),
    "a cluster of another kind": (config(cluster=[1]), "'cluster' must be an object of jobs, not list"),
    "an unknown job": (changed(master=["a:1"]), "unknown job 'master'.*known are chief"),
    "a job of another kind": (changed(ps="a:1"), r"cluster\['ps'\] must be a list"),
    "an address of another kind": (changed(ps=[1]), r"cluster\['ps'\] must be a list"),
    "indices that are no numbers": (changed(ps={"a": "a:1"}), r"cluster\['ps'\]: task index 'a'"),
    "an index written twice": (changed(ps={"0": "a:1", "00": "b:1"}), r"cluster\['ps'\].*twice: '0', '00'"),
    "indices with a gap": (changed(ps={"0": "a:1", "2": "b:2"}), r"cluster\['ps'\].*without gaps"),
    "workers with a gap": (changed(worker={"0": "a:1", "2": "b:2", "3": "c:3"}), r"cluster\['worker'\].*without gaps"),
    "no worker to drive": (config({"ps": ["a:1"], "worker": {"1": "a:1"}}), r"cluster\['worker'\].*without gaps"),
    "a number without end": ('{"task": ' + "9" * 5000 + "}", "not JSON"),
    "lists without end": ("[" * 100_000, "not JSON"),
    "an address without port": (changed(ps=["a"]), r"cluster\['ps'\]: 'a' is not an address"),
    "an address without host": (changed(ps=[":1"]), "':1' is not an address; write host:port"),
    "a port that is none": (changed(worker=["a:x"]), "'a:x' is not an address"),
    "a port too high": (changed(worker=["a:65536"]), "'a:65536' is not an address"),
    "a port without end": (changed(worker=["a:" + "9" * 5000]), "is not an address"),
    "a port in other digits": (changed(worker=["a:²"]), "'a:²' is not an address"),
    "no server": (config({"worker": ["a:1"]}), "no 'ps' task"),
    "an empty list of servers": (config({"worker": ["a:1"], "ps": []}), "no 'ps' task"),
    "two chiefs": (changed(chief=["a:1", "b:2"]), "has 2 chiefs, but can have only one"),
    "nobody who trains": (config({"ps": ["a:1"]}, {"type": "ps"}), "so no task would train"),
    "no task": (written(cluster=CLUSTER), "no task type; name this process's task"),
    "a task of another kind": (config(task="worker"), "'task' must be an object, .* not 'worker'"),
    "a task without a cluster": (written(task=WORKER), "names this process as a worker, but has no cluster; add"),
    "a task of an empty cluster": (config(cluster={}), "has no cluster"),
    "a misspelt cluster": (written(clusters=CLUSTER, task=WORKER), "key clusters is unknown; did you mean cl"),
    "a foreign cluster": (written(sparseCluster=CLUSTER, task=WORKER), "sparseCluster is unknown; did you mean clus"),
    "a misspelt task": (written(cluster=CLUSTER, taks=WORKER), "key taks is unknown; did you mean task"),
    "a misspelt index": (config(task={"type": "worker", "idx": 1}), "key of 'task' idx is unknown; did you mean index"),
    "a task without type": (config(task={"index": 0}), "no task type; name this process's task"),
    "an unknown type": (config(task={"type": "boss"}), "unknown task type 'boss'; known are chief"),
    "a type of another kind": (config(task={"type": ["worker"]}), "unknown task type"),
    "an index without end": (config(task={"type": "worker", "index": "9" * 5000}), "must be a whole number"),
    "an index below zero": (config(task={"type": "worker", "index": -1}), "index -1 must be a whole number"),
    "an index of another kind": (config(task={"type": "worker", "index": True}), "index True must be"),
    "an index in words": (config(task={"type": "worker", "index": "one"}), "index 'one' must be"),
    "an index in other digits": (config(task={"type": "worker", "index": "²"}), "index '²' must be"),
    "a task that is not there": (
        config(task={"type": "worker", "index": 7}),
        "no /job:worker/task:7; it has 1 chief, 2 ps, 1 worker: correct",
    ),
    "a job that is not there": (
        config({"ps": ["a:1"], "worker": ["b:2"]}, {"type": "chief"}),
        "no /job:chief/task:0; it has 1 ps, 1 worker: correct",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_tf_config_is_told(case: str) -> None:
    """Whatever is wrong, one line says what and where."""
    text, message = BAD[case]
    with pytest.raises(ConfigError, match=message) as caught:
        parse_tf_config(text)
    assert "\n" not in str(caught.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([*JOBS, "cluster", "task", "type", "index", "0"]), inner, max_size=4)
    ),
    max_leaves=12,
)

CONFIGS = JSON | st.builds(lambda cluster, task: {"cluster": cluster, "task": task}, JSON, JSON)


@given(CONFIGS.map(json.dumps) | st.text(max_size=20))
@search(2)
def test_any_text_is_read_or_refused(text: str) -> None:
    """No text, JSON or other, does anything but be read, or raise ConfigError."""
    try:
        parse_tf_config(text)
    except ConfigError:
        pass


@given(st.sampled_from(JOBS), st.integers(0, 1 << 40))
def test_tasks_are_read_as_written(job: str, index: int) -> None:
    """`parse` undoes `str`; what cannot be a task is named, with an example."""
    assert Task.parse(str(Task(job, index))) == Task(job, index)
    for text in ("", f"{job}:{index}", f"/job:{job}", f"/job:{job}/task:x", f"/job:{job}/task:{index}/x"):
        with pytest.raises(ConfigError, match="is not a task; write /job:worker/task:0"):
            Task.parse(text)


def test_addresses() -> None:
    """The last colon separates the port; an IPv6 address keeps its own."""
    assert check_address("10.0.0.7:2222", "here") == ("10.0.0.7", 2222)
    assert check_address("[::1]:0", "here") == ("[::1]", 0)
    with pytest.raises(ConfigError, match=r"^here: 'x' is not an address"):
        check_address("x", "here")


def test_a_cluster_spec_answers_as_tensorflow_s() -> None:
    """The names of `tf.train.ClusterSpec` give what they give there, for lists and for indices with gaps."""
    spec = ClusterSpec({"worker": {"3": "w3:1", 1: "w1:1"}, "ps": ("p:1",), "evaluator": []})
    assert spec.jobs == ["worker", "ps", "evaluator"]
    assert [spec.num_tasks(job) for job in spec.jobs] == [2, 1, 0]
    assert [spec.task_indices(job) for job in spec.jobs] == [[1, 3], [0], []]
    assert [spec.job_tasks(job) for job in spec.jobs] == [[None, "w1:1", None, "w3:1"], ["p:1"], []]
    assert spec.task_address("worker", 3) == "w3:1"
    assert spec.as_dict() == {"worker": {1: "w1:1", 3: "w3:1"}, "ps": ["p:1"], "evaluator": {}}
    assert repr(spec) == "ClusterSpec({'evaluator': {}, 'ps': ['p:1'], 'worker': {1: 'w1:1', 3: 'w3:1'}})"
    assert spec.tasks("worker") == [Task("worker", 1), Task("worker", 3)]
    assert spec.address(Task("worker", 3)) == "w3:1"
    keys = {str(index): f"h:{index}" for index in reversed(range(12))}  # numbers: 10 comes after 9
    assert ClusterSpec({"worker": keys}).job_tasks("worker") == [f"h:{index}" for index in range(12)]


def test_a_cluster_def_has_the_fields_of_tensorflow_s() -> None:
    """Jobs by name, tasks by index; a cluster is made of it again."""
    cluster = ClusterSpec({"worker": {3: "c:1", 1: "a:1"}, "ps": ["b:1"], "chief": []})
    found = cluster.as_cluster_def()
    jobs = [(job.name, job.tasks) for job in found.job]
    assert jobs == [("chief", {}), ("ps", {0: "b:1"}), ("worker", {1: "a:1", 3: "c:1"})]
    assert ClusterSpec(found) == cluster
    assert ClusterSpec({}).as_cluster_def().job == ()


def test_clusters_are_equal_by_their_tasks() -> None:
    """It does not matter how the tasks were written; a dict is no cluster, and clusters cannot be keys. A cluster is
    true as soon as it has a job, even one without tasks."""
    spec = ClusterSpec({"ps": ["a:1", "b:1"]})
    assert spec == ClusterSpec({"ps": {1: "b:1", 0: "a:1"}})
    assert spec != ClusterSpec({"ps": ["b:1", "a:1"]})
    assert spec != {"ps": ["a:1", "b:1"]}
    with pytest.raises(TypeError, match="unhashable"):
        hash(spec)
    assert ClusterSpec({"worker": []})
    none = ClusterSpec({})
    assert (bool(none), repr(none), none.describe()) == (False, "ClusterSpec({})", "no task at all")


JOB = st.lists(st.text(), max_size=4) | st.dictionaries(st.integers(0, 9), st.text(), max_size=4)


@given(st.dictionaries(st.text(), JOB, max_size=4))
def test_a_cluster_spec_is_made_from_what_it_gives(jobs: dict[str, Any]) -> None:
    """`as_dict` loses nothing, a copy is equal, and changing what was given changes no cluster."""
    spec = ClusterSpec(jobs)
    assert ClusterSpec(spec.as_dict()) == spec
    assert ClusterSpec(spec) == spec
    for job, tasks in jobs.items():
        assert spec.num_tasks(job) == len(tasks)
        assert len([task for task in spec.job_tasks(job) if task is not None]) == len(tasks)
        tasks.clear()
    assert spec.jobs == list(jobs)
    assert ClusterSpec(spec.as_dict()) == spec


NO_CLUSTERS: dict[str, tuple[Any, type[Exception], str]] = {
    "a list": ([1], TypeError, "a cluster must be a dict .* not list"),
    "nothing": (None, TypeError, "not NoneType"),
    "an address as a job": ({"ps": "a:1"}, TypeError, r"cluster\['ps'\] must be a list"),
    "a number as a job": ({"ps": 3}, TypeError, r"cluster\['ps'\] must be a list"),
    "a number as an address": ({"ps": [1]}, TypeError, r"cluster\['ps'\] must be a list of \"host:port\" strings"),
    "a number as a job's name": ({1: ["a:1"]}, TypeError, "a job name must be a string, not 1"),
    "an index in words": ({"ps": {"a": "a:1"}}, ValueError, r"cluster\['ps'\]: task index 'a' must be a whole number"),
    "an index below zero": ({"ps": {-1: "a:1"}}, ValueError, "task index -1 must"),
    "a broken index": ({"ps": {1.5: "a:1"}}, ValueError, "task index 1.5 must"),
    "an index twice": ({"ps": {"1": "a:1", 1: "b:1"}}, ValueError, "a task index twice: '1', 1"),
}


@pytest.mark.parametrize("case", NO_CLUSTERS)
def test_what_is_no_cluster_is_told(case: str) -> None:
    """The error names the job, and what to write instead."""
    given, error, said = NO_CLUSTERS[case]
    with pytest.raises(error, match=said):
        ClusterSpec(given)


def test_a_task_that_is_not_there_is_told() -> None:
    """Asking for an unknown job, or the address of an unknown task, is a ValueError that says what there is."""
    spec = ClusterSpec({"ps": ["a:1"], "worker": {1: "c:1"}})
    for index in (0, -1, 2):
        with pytest.raises(ValueError, match=f"job 'worker' has no task {index}; the cluster has 1 ps, 1 worker"):
            spec.task_address("worker", index)
    asked = [spec.num_tasks, spec.task_indices, spec.job_tasks, lambda job: spec.task_address(job, 0)]
    for ask in asked:
        with pytest.raises(ValueError, match="no job 'boss'; it has 1 ps, 1 worker"):
            ask("boss")


def test_any_jobs_make_a_cluster_but_not_one_of_ours() -> None:
    """Only the check for a strategy knows which jobs there are, and it says who has named them."""
    spec = ClusterSpec({"boss": ["a:1"]})
    assert spec.task_address("boss", 0) == "a:1"
    with pytest.raises(ConfigError, match=r"^the file: unknown job 'boss' in the cluster; known are chief"):
        check_cluster(spec, "the file")


def test_each_part_of_tf_config_is_checked_when_it_is_read() -> None:
    """A bad task does not hide the cluster, nor a bad cluster the task."""
    bad_task = TFConfig(json.dumps({"cluster": CLUSTER, "task": {"type": "worker", "index": "x"}}))
    assert bad_task.cluster_spec() == ClusterSpec(CLUSTER)
    assert bad_task.task_type == "worker"
    with pytest.raises(ConfigError, match="task index 'x'"):
        _ = bad_task.task_id
    bad_cluster = TFConfig(
        json.dumps({"cluster": {"ps": 1}, "task": WORKER, "rpc_layer": "grpc", "session_master": "m"})
    )
    assert (bad_cluster.task_type, bad_cluster.task_id) == ("worker", 0)
    assert (bad_cluster.rpc_layer, bad_cluster.session_master) == ("grpc", "m")
    with pytest.raises(ConfigError, match=r"^TF_CONFIG: cluster\['ps'\] must be a list"):
        bad_cluster.cluster_spec()
