"""Cluster resolvers. What is expected was observed on TensorFlow 2, where a test does not say otherwise."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from psclient._src.arrays.devices import available_gpus
from psclient._src.config import task_config
from psclient.cluster_resolver import (
    ClusterResolver,
    SimpleClusterResolver,
    TFConfigClusterResolver,
    UnionResolver,
    task_of,
)
from pswire.cluster import JOBS, ClusterSpec, Task, TaskConfig
from pswire.errors import ConfigError
from tests.kit.strategies import opened, refused

JOBS_GIVEN = {"worker": ["w0:1", "w1:1"], "ps": ["p:1"]}
SPEC = ClusterSpec(JOBS_GIVEN)
OWN_GPUS = {"GPU": available_gpus()} if available_gpus() else {}


@pytest.fixture
def tf_config(monkeypatch):
    """Sets TF_CONFIG, from a text or from the parts of the object."""

    def set_to(text: str | None = None, **parts: Any) -> None:
        monkeypatch.setenv("TF_CONFIG", json.dumps(parts) if text is None else text)

    monkeypatch.setenv("TF_CONFIG", "")
    monkeypatch.delenv("TF_CONFIG")
    return set_to


def test_without_tf_config_nothing_is_known(tf_config):
    """No TF_CONFIG, an empty one, and one without a cluster are the same: no cluster, no task, no error."""
    resolver = TFConfigClusterResolver()
    for text in (None, "", "{}", '{"cluster": {}}'):
        if text is not None:
            tf_config(text)
        assert resolver.cluster_spec() == ClusterSpec({})
        assert (resolver.task_type, resolver.task_id) == (None, None)
        assert (resolver.rpc_layer, resolver.environment) == (None, None)
        assert resolver.master() == resolver.master("ps", 0, "grpc") == ""
        assert resolver.num_accelerators() == OWN_GPUS
        assert resolver.num_accelerators("worker", 0) == {}


def test_tf_config_is_told_at_each_call(tf_config):
    """Cluster, task and layer are those of TF_CONFIG, and follow as it changes; its environment is not."""
    tf_config(cluster=JOBS_GIVEN, task={"type": "worker", "index": "1"}, rpc_layer="grpc", environment="cloud")
    resolver = TFConfigClusterResolver()
    assert resolver.cluster_spec() == SPEC
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)
    assert (resolver.rpc_layer, resolver.environment) == ("grpc", None)
    assert resolver.master() == "grpc://w1:1"
    assert resolver.master("ps", 0, "tcp") == "tcp://p:1"
    assert resolver.master(task_id=0) == "grpc://w0:1"
    tf_config(cluster=JOBS_GIVEN, task={"type": "worker", "index": 1})
    assert (resolver.task_id, resolver.master()) == (1, "w1:1")
    for cluster, master in (
        ({"worker": ["a:1"]}, ""),  # only the master of a cluster of one task is empty
        ({"worker": {"0": "a:1"}}, ""),
        ({"worker": ["a:1"], "ps": ["p:1"]}, "a:1"),
        ({"worker": ["a:1", "b:1"]}, "a:1"),
    ):
        tf_config(cluster=cluster, task={"type": "worker", "index": 0})
        assert resolver.master() == master
    tf_config(cluster={"ps": ["z:1"]}, task={"type": "ps", "index": 0})
    assert resolver.cluster_spec() == ClusterSpec({"ps": ["z:1"]})
    assert (resolver.task_type, resolver.task_id, resolver.master()) == ("ps", 0, "")


def test_what_is_given_goes_before_tf_config(tf_config):
    """Constructor arguments and setters win, until they are set to None."""
    tf_config(cluster=JOBS_GIVEN, task={"type": "ps", "index": 0}, rpc_layer="there")
    resolver = TFConfigClusterResolver("worker", 1, "given", "env")
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("worker", 1, "given")
    assert (resolver.environment, resolver.master()) == ("env", "given://w1:1")
    resolver.task_id, resolver.rpc_layer = 0, "set"
    assert resolver.master() == "set://w0:1"
    resolver.task_type = resolver.task_id = resolver.rpc_layer = None
    assert resolver.master() == "there://p:1"


def test_accelerators_and_masters_are_of_tasks_that_are_there(tf_config):
    """Of its own task a process knows the GPUs, of another none; one that is not there is told with what there is."""
    tf_config(cluster=JOBS_GIVEN, task={"type": "worker", "index": 1})
    resolver = TFConfigClusterResolver()
    assert resolver.num_accelerators() == resolver.num_accelerators("worker", 1) == OWN_GPUS
    assert resolver.num_accelerators(config_proto=object()) == OWN_GPUS
    assert resolver.num_accelerators("worker", 0) == resolver.num_accelerators(task_id=0) == {}
    refused(ValueError, "job 'worker' has no task 9", lambda: resolver.num_accelerators("worker", 9))
    tf_config(cluster=JOBS_GIVEN)
    resolver = TFConfigClusterResolver()
    for asked, said in (((None, None), "no job None"), (("boss", 0), "no job 'boss'"), (("ps", 1), "has no task 1")):
        refused(ValueError, f"{said}; .* 1 ps, 2 worker", lambda asked=asked: resolver.master(*asked))
    tf_config(cluster=JOBS_GIVEN, session_master="m:1", rpc_layer="grpc")
    assert TFConfigClusterResolver().master() == TFConfigClusterResolver().master("ps", 0) == "m:1"


def test_a_bad_tf_config_is_told_when_it_is_read(tf_config):
    """The resolver can be made; the property that needs what is malformed raises."""
    tf_config('{"task": {"index": "x"}}')
    resolver = TFConfigClusterResolver()
    refused(ConfigError, "TF_CONFIG: task index 'x' must be a whole number", lambda: resolver.task_id)


def test_a_simple_resolver_tells_what_it_was_given():
    """Nothing is detected; a task has its own address; what was not given is None or empty, and can be set."""
    resolver = SimpleClusterResolver(SPEC, "m:1", "worker", 0, "env", {"GPU": 8}, "grpc")
    assert resolver.cluster_spec() is SPEC
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("worker", 0, "grpc")
    assert resolver.environment == "env"
    assert resolver.num_accelerators() == resolver.num_accelerators("ps", 0) == {"GPU": 8}
    assert resolver.master() == resolver.master("ps") == "grpc://m:1"
    assert resolver.master("ps", 0) == "grpc://p:1"
    assert resolver.master("ps", 0, "tcp") == "tcp://p:1"
    refused(ValueError, "no job 'boss'", lambda: resolver.master("boss", 0))
    resolver = SimpleClusterResolver(SPEC)
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == (None, None, None)
    assert (resolver.environment, resolver.master(), resolver.num_accelerators()) == ("", "", {})
    resolver.task_type, resolver.task_id, resolver.rpc_layer = "ps", 3, "k"
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("ps", 3, "k")


def test_resolvers_refuse_other_types():
    """A dict is no ClusterSpec, a number no master, a cluster no resolver; a union has at least one."""
    with pytest.raises(TypeError, match="cluster_spec must be a ClusterSpec, not dict; write ClusterSpec"):
        SimpleClusterResolver(JOBS_GIVEN)
    refused(TypeError, "master must be a string such as host:port, not 3", lambda: SimpleClusterResolver(SPEC, 3))
    refused(ValueError, "at least one ClusterResolver", lambda: UnionResolver())
    refused(TypeError, "ClusterResolvers, not ClusterSpec", lambda: UnionResolver(SPEC))
    refused(TypeError, "foo", lambda: union({}, foo=1))
    refused(TypeError, "cluster_resolver must be a ClusterResolver, not ClusterSpec", lambda: task_of(SPEC))


def test_a_resolver_of_ones_own_needs_two_methods():
    """Cluster and master are enough; task and layer may be set, and are None until then."""

    class Own(ClusterResolver):
        def cluster_spec(self) -> ClusterSpec:
            return SPEC

        def master(self, task_type: Any = None, task_id: Any = None, rpc_layer: Any = None) -> str:
            return ""

    resolver = Own()
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == (None, None, None)
    assert (resolver.environment, resolver.num_accelerators()) == ("", OWN_GPUS)
    resolver.task_type, resolver.task_id = "worker", 1
    assert task_of(resolver) == TaskConfig(SPEC, Task("worker", 1))
    refused(TypeError, "abstract", lambda: ClusterResolver())


def union(*clusters: dict[str, Any], **given: Any) -> UnionResolver:
    return UnionResolver(*(SimpleClusterResolver(ClusterSpec(cluster)) for cluster in clusters), **given)


@pytest.mark.parametrize(
    ("clusters", "expected"),
    [
        ([{"ps": ["a:1"]}], {"ps": ["a:1"]}),
        ([{"worker": ["a:1"]}, {"worker": ["b:1"], "ps": ["p:1"]}], {"worker": ["a:1", "b:1"], "ps": ["p:1"]}),
        ([{"worker": ["a:1"]}, {"worker": ["a:1"]}], {"worker": ["a:1", "a:1"]}),
        ([{"worker": {0: "a:1"}}, {"worker": {0: "b:1"}}], {"worker": ["a:1", "b:1"]}),
        ([{"worker": ["a:1"]}, {"worker": {2: "b:1"}}], {"worker": {0: "a:1", 2: "b:1"}}),
        ([{"worker": {2: "b:1"}}, {"worker": ["a:1"]}], {"worker": {0: "a:1", 2: "b:1"}}),
        ([{"worker": {1: "a:1"}}, {"worker": {3: "b:1"}}], {"worker": {1: "a:1", 3: "b:1"}}),
        ([{"worker": []}, {"worker": ["a:1"]}], {"worker": ["a:1"]}),
    ],
)
def test_unions(clusters, expected):
    """Lists of a job are put one after another; where one has gaps, all tasks keep their indices: two with one index
    are told."""
    assert union(*clusters).cluster_spec().as_dict() == expected
    one, two, gap = ({"worker": tasks} for tasks in (["a:1"], ["b:1"], {0: "c:1", 2: "d:1"}))
    for conflict in ((one, gap), (one, two, {"worker": {5: "c:1"}})):
        said = "several resolvers have task 0 of job 'worker'"
        refused(KeyError, said, lambda conflict=conflict: union(*conflict).cluster_spec())


def two_resolvers() -> tuple[SimpleClusterResolver, SimpleClusterResolver]:
    return (
        SimpleClusterResolver(ClusterSpec({"worker": ["a:1"]}), "m:1", "worker", 1, "e", {"GPU": 2}, "grpc"),
        SimpleClusterResolver(ClusterSpec({"ps": ["p:1"]}), "n:1", "ps", 3, "f", {"GPU": 4}, "other"),
    )


def test_what_is_given_to_a_union_goes_before_its_resolvers():
    """Else all but the cluster is the first one's, and a task's address its own; a 0 counts (not in TensorFlow)."""
    resolver = UnionResolver(*two_resolvers())
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("worker", 1, "grpc")
    assert (resolver.environment, resolver.num_accelerators()) == ("e", {"GPU": 2})
    assert (resolver.master(), resolver.master(rpc_layer="z")) == ("grpc://m:1", "z://m:1")
    assert (resolver.master("ps", 0), resolver.master("ps", 0, "q")) == ("other://p:1", "q://p:1")
    resolver = UnionResolver(*two_resolvers(), task_type="ps", task_id=0, rpc_layer="L")
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("ps", 0, "L")
    assert (resolver.master(), resolver.master("ps", 0)) == ("L://m:1", "L://p:1")
    resolver.task_type, resolver.task_id, resolver.rpc_layer = "chief", 5, None
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("chief", 5, "grpc")


def test_a_union_follows_its_resolvers(tf_config):
    """A union holds no copy: the GPUs of one resolver, the changing cluster of another."""
    first = SimpleClusterResolver(ClusterSpec({}), num_accelerators={"GPU": 1})
    resolver = UnionResolver(first, TFConfigClusterResolver())
    assert not resolver.cluster_spec()
    tf_config(cluster=JOBS_GIVEN)
    assert resolver.cluster_spec() == SPEC
    assert resolver.num_accelerators() == {"GPU": 1}


def test_the_task_of_a_strategy():
    """The resolver's; without an index it is task 0; no cluster is no task; one that is not there, or does not train,
    is told."""
    for job, said in NO_SCRIPTS.items():
        with pytest.raises(ConfigError, match=f"^/job:{job}/task:0: {said}"):
            task_of(SimpleClusterResolver(ClusterSpec(JOBS_GIVEN), task_type=job, task_id=0))
    assert task_of(SimpleClusterResolver(SPEC, task_type="worker", task_id=1)) == TaskConfig(SPEC, Task("worker", 1))
    assert task_of(SimpleClusterResolver(SPEC, task_type="worker")) == TaskConfig(SPEC, Task("worker", 0))
    assert task_of(SimpleClusterResolver(ClusterSpec({}))) is None
    with pytest.raises(ConfigError, match="SimpleClusterResolver names this process as a boss, but has no cluster"):
        task_of(SimpleClusterResolver(ClusterSpec({}), task_type="boss"))
    with pytest.raises(ConfigError, match="the cluster has no /job:worker/task:2; it has 1 ps, 2 worker: correct"):
        task_of(SimpleClusterResolver(SPEC, task_type="worker", task_id=2))
    with pytest.raises(ConfigError, match=r'^Simple.* a cluster but no task type; .* task_type="worker", task_id=0'):
        task_of(SimpleClusterResolver(SPEC))
    with pytest.raises(ConfigError, match=r"^SimpleClusterResolver.* 'ps' task; variables need at least one server"):
        task_of(SimpleClusterResolver(ClusterSpec({"worker": ["w:1"]}), task_type="worker"))


NO_SCRIPTS = {
    "ps": "a ps task does not run a training script; start a ps task with psserver",
    "evaluator": "an evaluator does not take part in training; give it its own strategy, such as Mirrored",
}
"""A strategy is for workers and the chief; others are told how to start."""


def test_a_strategy_hands_out_the_resolver_that_it_was_given():
    """It tells the cluster and the task; a strategy without a cluster has none."""
    for kind in ("embedded-1", "mirrored-1"):
        with opened(kind) as strategy:
            assert strategy.cluster_resolver is None
    with opened("servers-1") as strategy:
        resolver = strategy.cluster_resolver
        assert isinstance(resolver, SimpleClusterResolver)
        assert task_of(resolver) == TaskConfig(resolver.cluster_spec(), Task("worker", 0))
        assert resolver.cluster_spec().jobs == ["ps", "worker"]


ADDRESSES = st.lists(st.sampled_from(["a:1", "b:2", "c"]), max_size=2)
TASKS = st.fixed_dictionaries({}, optional={"type": st.sampled_from([*JOBS, "boss"]), "index": st.integers(-1, 2)})


@example({"ps": ["a:1"], "worker": ["b:2"]}, {"type": "worker", "index": 0})
@example({"ps": ["a:1"], "chief": ["b:2"]}, {"type": "ps"})
@given(st.dictionaries(st.sampled_from([*JOBS, "boss"]), ADDRESSES), TASKS | st.none())
def test_tf_config_is_one_resolver_among_others(cluster, task):
    """The same cluster and task, told by TF_CONFIG or by the program, give the same task or the same error."""
    text = json.dumps({"cluster": cluster, "task": task})
    task = task or {}
    told = SimpleClusterResolver(ClusterSpec(cluster), task_type=task.get("type"), task_id=task.get("index"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TF_CONFIG", text)
        by_text = outcome(task_config)
        assert outcome(lambda: checked(TFConfigClusterResolver())) == by_text
    assert outcome(lambda: checked(told)).replace("SimpleClusterResolver", "TF_CONFIG") == by_text


def checked(resolver: ClusterResolver) -> TaskConfig | None:
    """`task_of`, but for tasks that run no training script, which only a strategy refuses."""
    try:
        return task_of(resolver)
    except ConfigError as error:
        if not error.task:
            raise
        return TaskConfig(resolver.cluster_spec(), Task.parse(error.task))


def outcome(make: Callable[[], Any]) -> str:
    try:
        return repr(make())
    except ConfigError as error:
        return str(error)
