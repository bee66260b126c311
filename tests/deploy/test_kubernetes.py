"""The manifests of Kubernetes and the chart: valid, restricted, and each pod is the task that its TF_CONFIG says.

What can be tried without a cluster is schemas, and what the kubelet makes of the environment. Where
`PS_TEST_KUBECONFIG` names a cluster, each variant is applied in a namespace of its own that is removed after: the API
server has to take every object, and the controllers have to make every pod, which the Pod Security Standard
"restricted" may refuse. With `PS_TEST_IMAGE`, an image with the examples that the nodes have, the job trains as well.
"""

from __future__ import annotations

import base64
import copy
import json
import os
import secrets
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, MutableMapping
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from click.testing import CliRunner

from psclient import KubernetesClusterResolver, TFConfigClusterResolver
from psclient.cluster_resolver import task_of
from psclient.psctl.cli import command as psctl
from pswire.telemetry.prometheus import HEALTH
from tests.kit import internals as inside
from tests.kit.kubernetes import (
    CUSTOM,
    KUBERNETES,
    NODE,
    VARIANTS,
    Manifest,
    Pod,
    all_pods,
    containers,
    expanded,
    instance,
    issued,
    pods,
    rendered,
    secret_name,
    templates,
)
from tests.kit.shell import printed

VERSION = kubernetes_validate.latest_version()
INSTANCE, COMPONENT = "app.kubernetes.io/instance", "app.kubernetes.io/component"
INDEX = "batch.kubernetes.io/job-completion-index"
COMMANDS = {"psserver": inside.psserver_command, "psworker": inside.psworker_command}
BY_KUSTOMIZE = [variant for variant, found in VARIANTS.items() if found.values is None]

every_variant = pytest.mark.parametrize("variant", VARIANTS)


def tasks(variant: str, standby: bool = False) -> list[Pod]:
    """The pods that are tasks from the start; or standby servers, which wait for a place."""
    return [pod for pod in all_pods(variant) if ("TF_CONFIG" not in pod.environ) == standby]


def jobs(variant: str) -> Iterator[Manifest]:
    """All Jobs, those of a JobSet included."""
    for item in rendered(variant):
        for job in [item, *(each["template"] for each in item.get("spec", {}).get("replicatedJobs", ()))]:
            if "podFailurePolicy" in job.get("spec", {}):
                yield job


@cache
def assert_valid(text: str) -> None:
    """Each object is looked at once; most are the same in many variants."""
    kubernetes_validate.validate(json.loads(text), VERSION, strict=True)


@every_variant
def test_manifests_fit_the_schemas_of_kubernetes(variant: str) -> None:
    """Every object has only fields that the newest Kubernetes has, of the right types."""
    for item in rendered(variant):
        if item["kind"] in CUSTOM:
            assert item["apiVersion"] == CUSTOM[item["kind"]]
        else:
            assert_valid(json.dumps(item))
        for _, _, template in templates(item):
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": template["spec"]}
            assert_valid(json.dumps(pod))


@pytest.mark.parametrize("variant", BY_KUSTOMIZE)
def test_kustomize_renders_what_is_tested(variant: str) -> None:
    """These tests render by themselves; where kubectl is at hand, it makes the same objects."""

    def ordered(objects: list[Manifest]) -> list[Manifest]:
        return sorted(objects, key=lambda item: (item["kind"], item["metadata"]["name"]))

    made = yaml.safe_load_all(printed("kubectl", "kustomize", KUBERNETES / variant))
    assert ordered(list(made)) == ordered(rendered(variant))


@every_variant
def test_each_pod_is_a_task_of_one_cluster(variant: str, environ: MutableMapping[str, str]) -> None:
    """Both resolvers read the same cluster in every pod, with `TF_CONFIG` and, but for TFJob, by the hostname."""
    found, clusters = Counter[str](), []
    for pod in tasks(variant):
        config = inside.parse_tf_config(pod.environ["TF_CONFIG"])
        assert config is not None
        environ["TF_CONFIG"] = pod.environ["TF_CONFIG"]
        resolver = TFConfigClusterResolver()
        assert (resolver.task_type, resolver.task_id) == (config.task.job, config.task.index)
        if config.task.job == "ps":
            assert resolver.cluster_spec().task_address("ps", config.task.index) == f"{pod.address}:2222"
        else:
            assert task_of(resolver) == config
        assert pod.environ["TASK"] == inside.task_name(config.task)
        found[str(config.task)] += 1
        clusters.append(config.cluster)
        if "tfjob" not in variant:
            given = {job: config.cluster.num_tasks(job) for job in config.cluster.jobs}
            environ["HOSTNAME"] = pod.name
            for name in ("TF_CONFIG", "JOB_COMPLETION_INDEX"):
                environ.pop(name, None)
            if index := pod.metadata.get("annotations", {}).get(INDEX):
                environ["JOB_COMPLETION_INDEX"] = index
            by_name = KubernetesClusterResolver(given)
            assert (by_name.task_type, by_name.task_id) == (config.task.job, config.task.index)
            cluster = by_name.cluster_spec()
            assert cluster.job_tasks("ps") == config.cluster.job_tasks("ps")
            assert {job: cluster.num_tasks(job) for job in cluster.jobs} == given
    assert set(found.values()) == {1}
    assert all(cluster == clusters[0] for cluster in clusters)
    counts = {"ps": VARIANTS[variant].servers, "worker": VARIANTS[variant].workers, "chief": 1}
    assert {job: clusters[0].num_tasks(job) for job in clusters[0].jobs} == counts
    assert sum(found.values()) == sum(counts.values())


@every_variant
def test_standby_servers_wait_for_a_place(variant: str) -> None:
    """They tell all servers of the cluster an address, which is theirs; and no probe ends one that waits."""
    (servers,) = {
        tuple(config.cluster.task_address("ps", index) for index in range(VARIANTS[variant].servers))
        for config in (inside.parse_tf_config(pod.environ["TF_CONFIG"]) for pod in tasks(variant))
        if config
    }
    waiting = tasks(variant, standby=True)
    assert [pod.environ["TASK"] for pod in waiting] == [
        inside.standby_name(index) for index in range(VARIANTS[variant].standbys)
    ]
    for pod in waiting:
        words = [expanded(word, pod.environ) for word in pod.container["args"]]
        flags = inside.psserver_command.make_context("psserver", words).params
        assert inside.check_addresses(flags["join"], "--join") == servers
        assert (flags["advertise"], flags["port"], flags["until_done"]) == (f"{pod.address}:2222", 2222, True)
        assert pod.environ["PS_REPLICATION_FACTOR"] == "2"
        assert not {"startupProbe", "livenessProbe"} & set(pod.container)  # it serves no metrics yet


@every_variant
def test_each_pod_sees_its_own_key(variant: str) -> None:
    """Of the Secret with everybody's certificates a container sees the files of its task, and no others."""
    for pod in all_pods(variant):
        mounts = [mount for mount in pod.container["volumeMounts"] if mount["name"] == "certificates"]
        seen = {
            mount["mountPath"]: mount.get("subPath") or expanded(mount["subPathExpr"], pod.environ) for mount in mounts
        }
        task = pod.environ["TASK"]
        expected = {"tls.crt": f"{task}.crt", "tls.key": f"{task}.key", "ca.crt": "ca.crt", "token": "token"}
        assert seen == {f"/certs/{file}": key for file, key in expected.items()}
        assert all(mount["readOnly"] for mount in mounts)
        told = {pod.environ[name] for name in ("PS_TLS_CERT", "PS_TLS_KEY", "PS_TLS_CA", "PS_TOKEN_FILE")}
        assert told == set(seen)


def made_secret(variant: str, directory: Path) -> Manifest:
    """The Secret that make-secret makes of what `psctl certs` makes for a variant."""
    counts = VARIANTS[variant]
    numbers = {"--ps": counts.servers, "--workers": counts.workers, "--extra-ps": counts.standbys}
    words = [str(word) for pair in numbers.items() for word in pair]
    made = CliRunner().invoke(psctl, ["certs", str(directory), *words])
    assert made.exit_code == 0, made.output
    named = [secret_name(variant)] if secret_name(variant) != "certificates" else []
    return yaml.safe_load(printed(str(KUBERNETES / "make-secret"), directory, *named))


@pytest.mark.parametrize("variant", [variant for variant in VARIANTS if not issued(variant)])
def test_the_secret_has_what_is_mounted(variant: str, tmp_path: Path) -> None:
    secret = made_secret(variant, tmp_path)
    assert_valid(json.dumps(secret))
    names = [pod.environ["TASK"] for pod in all_pods(variant)]
    files = {f"{task}.{end}": tmp_path / task / f"tls.{end}" for task in names for end in ("crt", "key")}
    files |= {name: tmp_path / names[0] / name for name in ("ca.crt", "token")}
    found = {key: base64.b64decode(value) for key, value in secret["data"].items()}
    assert found == {key: path.read_bytes() for key, path in files.items()}
    mounted = {volume["secret"]["secretName"] for pod in all_pods(variant) for volume in pod.spec["volumes"][:1]}
    assert mounted == {secret["metadata"]["name"]}


def test_no_secret_is_made_of_nothing(tmp_path: Path) -> None:
    """A directory without certificates is named, and kubectl gets nothing to apply."""
    done = subprocess.run([str(KUBERNETES / "make-secret"), str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{tmp_path} is nothing that psctl certs has made" in done.stderr


@every_variant
def test_pods_are_restricted(variant: str) -> None:
    """As "restricted" asks, with a root that nobody writes on, as many threads as cores, and copies elsewhere.

    A pod that is told to end has the time to leave its job.
    """
    accounts = [item for item in rendered(variant) if item["kind"] == "ServiceAccount"]
    assert [account["automountServiceAccountToken"] for account in accounts] == [False]
    for pod in all_pods(variant):
        drop = {"drop": ["ALL"]}
        assert pod.container["securityContext"] == {
            "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": drop
        }  # fmt: skip
        whole, profile = pod.spec["securityContext"], {"type": "RuntimeDefault"}
        assert (whole["runAsNonRoot"], whole["runAsUser"], whole["seccompProfile"]) == (True, 10001, profile)
        assert pod.spec["automountServiceAccountToken"] is False
        assert pod.spec["serviceAccountName"] == accounts[0]["metadata"]["name"]
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod.spec)
        assert pod.spec["terminationGracePeriodSeconds"] >= inside.Timeouts().termination_grace + inside.LAST_SECONDS
        kinds = {kind for volume in pod.spec["volumes"] for kind in volume if kind != "name"}
        assert kinds <= {"secret", "projected", "persistentVolumeClaim", "emptyDir"}
        asked = pod.container["resources"]["requests"]
        assert {"cpu", "memory"} <= set(asked)
        assert "memory" in pod.container["resources"]["limits"]
        assert pod.environ["OMP_NUM_THREADS"] == ("1" if asked["cpu"].endswith("m") else asked["cpu"])
        server = pod.metadata["labels"][COMPONENT] == "ps"
        assert pod.environ.get("PS_DOMAIN") == (NODE if server else None)


@every_variant
def test_commands_are_ours_and_servers_are_ready_when_they_serve(variant: str) -> None:
    """With flags that they take, and ports that policies let through; the kubelet asks at the port of metrics."""
    for item in rendered(variant):
        for container in containers(item):
            (program,), args = container["command"], container.get("args", [])
            flags = COMMANDS[program].make_context(program, list(args)).params
            if program == "psserver":
                assert (flags["host"], flags["data_port"], flags["until_done"]) == ("0.0.0.0", 2223, True)
                assert {port["containerPort"] for port in container["ports"]} == {2222, 2223, 9090}
    for pod in all_pods(variant):
        if pod.metadata["labels"][COMPONENT] != "ps":
            assert "readinessProbe" not in pod.container
            continue
        ports = {port["name"]: port["containerPort"] for port in pod.container["ports"]}
        asked = pod.container["readinessProbe"]["httpGet"]
        assert (asked["path"], ports[asked["port"]]) == (HEALTH, int(pod.environ["PS_METRICS_PORT"]))
        assert pod.environ["PS_METRICS_HOST"] == "0.0.0.0"
        if "livenessProbe" in pod.container:
            alive = pod.container["livenessProbe"]["httpGet"]
            assert (alive["path"], ports[alive["port"]]) == ("/metrics", 9090)


@every_variant
def test_policies_select_the_pods(variant: str) -> None:
    """Selectors of policies and budgets find the pods that they are for."""
    objects = rendered(variant)
    for item in objects:
        if item["kind"] not in ("NetworkPolicy", "PodDisruptionBudget"):
            continue
        spec = item["spec"]
        wanted = (spec.get("podSelector") or spec["selector"])["matchLabels"].items()
        selected = [pod for pod in pods(objects) if wanted <= pod.metadata["labels"].items()]
        name = item["metadata"]["name"].rpartition("-")[2]
        found = {pod.metadata["labels"][COMPONENT] for pod in selected}
        assert found == ({"ps", "worker", "chief"} if name == "tasks" else {name})
        if item["kind"] == "PodDisruptionBudget":
            counts = VARIANTS[variant]
            least = {"ps": max(1, counts.servers - counts.standbys), "worker": 1}[name]
            assert 0 < spec["minAvailable"] == least <= len(selected)


def selectors(tree: Any, way: str = "") -> Iterator[tuple[str, dict[str, str]]]:
    """What in an object selects pods of its own namespace, with where it stands."""
    if isinstance(tree, list):
        for index, each in enumerate(tree):
            yield from selectors(each, f"{way}[{index}]")
    elif isinstance(tree, dict):
        for key, value in tree.items():
            if key == "matchLabels" and not way.endswith("namespaceSelector"):
                yield way, value
            elif key == "selector" and value and "matchLabels" not in value:
                yield f"{way}.{key}", value
            else:
                yield from selectors(value, f"{way}.{key}")


@every_variant
def test_jobs_of_one_namespace_do_not_find_each_other(variant: str) -> None:
    """Each selector names the job, as does each pod; port 53 is open to all: a resolver has no labels."""
    objects = rendered(variant)
    found = [(item["kind"], *each) for item in objects for each in selectors(item.get("spec", {}))]
    assert {"NetworkPolicy", "PodDisruptionBudget"} < {kind for kind, _, _ in found}
    for kind, way, selector in found:
        assert selector.get(INSTANCE) == instance(variant), f"{kind}{way} selects pods of every job: {selector}"
    assert {pod.metadata["labels"][INSTANCE] for pod in pods(objects)} == {instance(variant)}
    policies = [item["spec"] for item in objects if item["kind"] == "NetworkPolicy"]
    (egress,) = [policy["egress"] for policy in policies if "Egress" in policy["policyTypes"]]
    dns = [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]
    assert {"ports": dns} in egress
    assert all(rule["to"] for rule in egress if rule["ports"] != dns)


@every_variant
def test_what_others_are_to_blame_for_counts_for_nobody(variant: str) -> None:
    """Jobs of clients ignore a server's loss, those of servers that they were outlived; a wrong setting ends each job.

    A StatefulSet starts its pods again, with an empty server that waits; in other variants they stay ended, and a job
    that is given up ends as well. TFJob looks at no code. In a JobSet a Job that its own rule has ended ends the
    others: no server waits for workers that nobody starts again.
    """
    wrong = inside.code_of(inside.ConfigError(""))
    again = variant in ("base", "overlays/larger", "helm/statefulset")
    assert ("StatefulSet" in {item["kind"] for item in rendered(variant) if containers(item)}) == again
    policies = {pod.spec.get("restartPolicy") for pod in all_pods(variant)}
    assert policies == ({None, "Never"} if again else {None} if "tfjob" in variant else {"Never"})
    for job in jobs(variant):
        (container,) = job["spec"]["template"]["spec"]["containers"]
        rules = [rule for rule in job["spec"]["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
        actions = {code: rule["action"] for rule in rules for code in rule["onExitCodes"]["values"]}
        server = container["command"] == ["psserver"]
        chief = job["spec"]["template"]["metadata"]["labels"][COMPONENT] == "chief"
        expected = {wrong: "FailJob", inside.OUTLIVED if server else inside.SERVER_LOST: "Ignore"}
        assert actions == expected | ({inside.ABANDONED: "FailJob"} if chief and not again else {})
        assert {rule["onExitCodes"]["containerName"] for rule in rules} == {container["name"]}
        assert {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]} in [
            rule | {"onPodConditions": [{"type": each["type"]} for each in rule["onPodConditions"]]}
            for rule in job["spec"]["podFailurePolicy"]["rules"]
            if "onPodConditions" in rule
        ]
    for item in rendered(variant):
        if item["kind"] == "JobSet":
            (rule,) = item["spec"]["failurePolicy"]["rules"]
            assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
            assert rule["name"].isalnum()  # what its schema asks for
            assert item["spec"]["failurePolicy"]["maxRestarts"] > 0
        if item["kind"] == "TFJob":
            assert {spec["restartPolicy"] for spec in item["spec"]["tfReplicaSpecs"].values()} == {"OnFailure"}
    assert ("jobset" in variant) == ("JobSet" in {item["kind"] for item in rendered(variant)})


KUBECONFIG, IMAGE = os.environ.get("PS_TEST_KUBECONFIG", ""), os.environ.get("PS_TEST_IMAGE", "")
SECONDS, TRAINING_SECONDS = 120, 900
WORKERS = ("worker", "worker-0")
"""With what the name of the workers' Job ends: of a JobSet there may be several."""


def kubectl(*words: str, given: object = None, seconds: float = SECONDS) -> str:
    """What kubectl prints, if it does not fail."""
    program = shutil.which("kubectl")
    assert program, "PS_TEST_KUBECONFIG is set, and there is no kubectl"
    command = [program, "--kubeconfig", KUBECONFIG, f"--request-timeout={SECONDS}s", *words]
    text = None if given is None else json.dumps(given)
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def namespace() -> Iterator[str]:
    """A namespace that takes only restricted pods; it and all in it are removed after."""
    if not KUBECONFIG:
        pytest.skip("no PS_TEST_KUBECONFIG: the manifests are applied to no cluster")
    name = f"paramserver-test-{secrets.token_hex(4)}"
    labels = yaml.safe_load((KUBERNETES / "base" / "namespace.yaml").read_text(encoding="utf-8"))["metadata"]["labels"]
    made = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
    kubectl("create", "-f", "-", given=made)
    try:
        yield name
    finally:
        kubectl("delete", "namespace", name, f"--timeout={SECONDS}s", seconds=2 * SECONDS)


def applied(variant: str, namespace: str) -> list[Manifest]:
    """The objects of a variant as they are applied here; skips the test where the cluster has no such kinds."""
    objects = [copy.deepcopy(item) for item in rendered(variant) if item["kind"] != "Namespace"]
    for group in {CUSTOM[item["kind"]].partition("/")[0] for item in objects if item["kind"] in CUSTOM}:
        if not kubectl("api-resources", f"--api-group={group}", "--output=name").strip():
            pytest.skip(f"the cluster serves no {group}")
    for item in objects:
        item["metadata"]["namespace"] = namespace
        if item["kind"] == "PersistentVolumeClaim":
            item["spec"]["accessModes"] = ["ReadWriteOnce"]  # a cluster for tests often has nothing else, and one node
        for container in containers(item):
            container["image"] = IMAGE or container["image"]
    return objects


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_cluster_takes_the_manifests(variant: str, namespace: str, tmp_path: Path) -> None:
    """It takes each object, and its controllers make each pod; where there is an image, the workers' Job completes."""
    objects = applied(variant, namespace)
    if not issued(variant):
        kubectl("apply", "--namespace", namespace, "-f", "-", given=made_secret(variant, tmp_path))
    kubectl("apply", "-f", "-", given={"apiVersion": "v1", "kind": "List", "items": objects})
    label = f"--selector=app.kubernetes.io/instance={instance(variant)}"
    expected, until = len(all_pods(variant)), time.monotonic() + SECONDS
    found: list[str] = []
    while len(found) < expected and time.monotonic() < until:
        time.sleep(1)
        found = kubectl("get", "pods", "--namespace", namespace, label, "--output=name").split()
    events = "" if len(found) >= expected else kubectl("get", "events", "--namespace", namespace)
    assert len(found) >= expected, events
    if IMAGE and "tfjob" not in variant and "gpu" not in variant:
        # A JobSet's Jobs do not have the labels of their pods.
        jobs = json.loads(kubectl("get", "jobs", "--namespace", namespace, "--output=json"))["items"]
        (worker,) = [one["metadata"]["name"] for one in jobs if one["metadata"]["name"].endswith(WORKERS)]
        kubectl(
            *("wait", f"job/{worker}", "--namespace", namespace, "--for=condition=complete"),
            f"--timeout={TRAINING_SECONDS}s",
            f"--request-timeout={TRAINING_SECONDS}s",
            seconds=2 * TRAINING_SECONDS,
        )
