"""The manifests of Kubernetes and the chart: valid, restricted, and each pod is the task that its TF_CONFIG says.

No cluster runs here. What is tried is what can be without one: schemas, and what the kubelet makes of the environment.
`test_cluster.py` applies them to a real one, where there is one.
"""

from __future__ import annotations

import base64
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator, MutableMapping
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
from tests.kit.internals import (
    ABANDONED,
    OUTLIVED,
    SERVER_LOST,
    ConfigError,
    check_addresses,
    code_of,
    parse_tf_config,
    spare_name,
    task_name,
)
from tests.kit.internals import psserver_command as psserver
from tests.kit.internals import psworker_command as psworker
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

VERSION = kubernetes_validate.latest_version()
INSTANCE, COMPONENT = "app.kubernetes.io/instance", "app.kubernetes.io/component"
INDEX = "batch.kubernetes.io/job-completion-index"
BY_KUSTOMIZE = [variant for variant, found in VARIANTS.items() if found.values is None]

every_variant = pytest.mark.parametrize("variant", VARIANTS)


def tasks(variant: str) -> list[Pod]:
    """The pods that are tasks from the start: all but spare servers."""
    return [pod for pod in all_pods(variant) if "TF_CONFIG" in pod.environ]


def spares(variant: str) -> list[Pod]:
    """The pods that wait for the place of a server."""
    return [pod for pod in all_pods(variant) if "TF_CONFIG" not in pod.environ]


def jobs(variant: str) -> Iterator[Manifest]:
    """All Jobs, those of a JobSet included."""
    for item in rendered(variant):
        for job in [item, *(each["template"] for each in item.get("spec", {}).get("replicatedJobs", ()))]:
            if "podFailurePolicy" in job.get("spec", {}):
                yield job


@every_variant
def test_manifests_fit_the_schemas_of_kubernetes(variant: str) -> None:
    """Every object has only fields that the newest Kubernetes has, of the right types."""
    for item in rendered(variant):
        if item["kind"] in CUSTOM:
            assert item["apiVersion"] == CUSTOM[item["kind"]]
        else:
            kubernetes_validate.validate(item, VERSION, strict=True)
        for name, _, template in templates(item):
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": template["spec"]}
            kubernetes_validate.validate(pod, VERSION, strict=True)


@pytest.mark.parametrize("variant", BY_KUSTOMIZE)
def test_kustomize_renders_what_is_tested(variant: str) -> None:
    """These tests render by themselves; where kubectl is at hand, it makes the same objects."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("no kubectl: manifests are rendered by the tests alone")
    done = subprocess.run([kubectl, "kustomize", str(KUBERNETES / variant)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr

    def ordered(objects: list[Manifest]) -> list[Manifest]:
        return sorted(objects, key=lambda item: (item["kind"], item["metadata"]["name"]))

    assert ordered(list(yaml.safe_load_all(done.stdout))) == ordered(rendered(variant))


@every_variant
def test_each_pod_is_a_task_of_one_cluster(variant: str, environ: MutableMapping[str, str]) -> None:
    """Our resolver reads the same cluster in every pod; each task is one pod, and servers are where it says."""
    servers, workers = VARIANTS[variant].servers, VARIANTS[variant].workers
    found, clusters = Counter[str](), []
    for pod in tasks(variant):
        environ["TF_CONFIG"] = pod.environ["TF_CONFIG"]
        resolver = TFConfigClusterResolver()
        config = parse_tf_config(pod.environ["TF_CONFIG"])
        assert config is not None
        assert (resolver.task_type, resolver.task_id) == (config.task.job, config.task.index)
        if config.task.job == "ps":
            assert resolver.cluster_spec().task_address("ps", config.task.index) == f"{pod.address}:2222"
        else:
            assert task_of(resolver) == config
        assert pod.environ["TASK"] == task_name(config.task)
        found[str(config.task)] += 1
        clusters.append(config.cluster)
    assert set(found.values()) == {1}
    assert all(cluster == clusters[0] for cluster in clusters)
    assert {job: clusters[0].num_tasks(job) for job in clusters[0].jobs} == {
        "ps": servers,
        "worker": workers,
        "chief": 1,
    }
    assert sum(found.values()) == servers + workers + 1


BY_OTHERS = ("tfjob", "helm/tfjob")
"""Variants whose operator writes `TF_CONFIG`, and makes a Service for each task."""


@pytest.mark.parametrize("variant", [variant for variant in VARIANTS if variant not in BY_OTHERS])
def test_the_hostname_tells_what_the_cluster_of_each_pod_says(variant: str, environ: MutableMapping[str, str]) -> None:
    """`KubernetesClusterResolver` finds the same task and the same servers without `TF_CONFIG`."""
    found = 0
    for pod in tasks(variant):
        config = parse_tf_config(pod.environ["TF_CONFIG"])
        assert config is not None
        given = {job: config.cluster.num_tasks(job) for job in config.cluster.jobs}
        environ["HOSTNAME"] = pod.name
        environ.pop("JOB_COMPLETION_INDEX", None)
        if "annotations" in pod.metadata and INDEX in pod.metadata["annotations"]:
            environ["JOB_COMPLETION_INDEX"] = pod.metadata["annotations"][INDEX]
        resolver = KubernetesClusterResolver(given)
        assert (resolver.task_type, resolver.task_id) == (config.task.job, config.task.index)
        cluster = resolver.cluster_spec()
        assert cluster.job_tasks("ps") == config.cluster.job_tasks("ps")
        assert {job: cluster.num_tasks(job) for job in cluster.jobs} == given
        found += 1
    assert found == VARIANTS[variant].servers + VARIANTS[variant].workers + 1


@every_variant
def test_spare_servers_wait_for_a_place(variant: str) -> None:
    """They tell all servers of the cluster an address, which is theirs; and no probe ends one that waits."""
    (servers,) = {
        tuple(config.cluster.task_address("ps", index) for index in range(VARIANTS[variant].servers))
        for config in (parse_tf_config(pod.environ["TF_CONFIG"]) for pod in tasks(variant))
        if config
    }
    waiting = spares(variant)
    assert [pod.environ["TASK"] for pod in waiting] == [spare_name(index) for index in range(VARIANTS[variant].spares)]
    for pod in waiting:
        words = [expanded(word, pod.environ) for word in pod.container["args"]]
        flags = psserver.make_context("psserver", words).params
        assert check_addresses(flags["join"], "--join") == servers
        assert (flags["advertise"], flags["port"], flags["until_done"]) == (f"{pod.address}:2222", 2222, True)
        assert pod.environ["PS_REPLICATION"] == "1"
        assert not {"startupProbe", "livenessProbe"} & set(pod.container)  # it serves no metrics yet


@every_variant
def test_each_pod_sees_its_own_key(variant: str) -> None:
    """Of the Secret with everybody's certificates a container sees the files of its task, and no others."""
    for pod in all_pods(variant):
        mounts = {
            mount["mountPath"]: mount for mount in pod.container["volumeMounts"] if mount["name"] == "certificates"
        }
        seen = {
            path: mount.get("subPath") or expanded(mount["subPathExpr"], pod.environ) for path, mount in mounts.items()
        }
        task = pod.environ["TASK"]
        expected = {"tls.crt": f"{task}.crt", "tls.key": f"{task}.key", "ca.crt": "ca.crt", "token": "token"}
        assert seen == {f"/certs/{file}": key for file, key in expected.items()}
        assert all(mount["readOnly"] for mount in mounts.values())
        told = {pod.environ[name] for name in ("PS_TLS_CERT", "PS_TLS_KEY", "PS_TLS_CA", "PS_TOKEN_FILE")}
        assert told == set(seen)


@pytest.mark.parametrize("variant", [variant for variant in VARIANTS if not issued(variant)])
def test_the_secret_has_what_is_mounted(variant: str, tmp_path: Path) -> None:
    """Of what `psctl certs` makes for so many tasks make-secret makes a Secret, with the files of each pod."""
    counts = VARIANTS[variant]
    numbers = {"--ps": counts.servers, "--workers": counts.workers, "--extra-ps": counts.spares}
    words = [str(word) for pair in numbers.items() for word in pair]
    made = CliRunner().invoke(psctl, ["certs", str(tmp_path), *words])
    assert made.exit_code == 0, made.output
    command = [str(KUBERNETES / "make-secret"), str(tmp_path)]
    command += [secret_name(variant)] if secret_name(variant) != "certificates" else []
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    secret = yaml.safe_load(done.stdout)
    kubernetes_validate.validate(secret, VERSION, strict=True)
    names = [pod.environ["TASK"] for pod in all_pods(variant)]
    files = {f"{task}.{end}": tmp_path / task / f"tls.{end}" for task in names for end in ("crt", "key")}
    files |= {name: tmp_path / names[0] / name for name in ("ca.crt", "token")}
    assert {key: base64.b64decode(value) for key, value in secret["data"].items()} == {
        key: path.read_bytes() for key, path in files.items()
    }
    assert {volume["secret"]["secretName"] for pod in all_pods(variant) for volume in pod.spec["volumes"][:1]} == {
        secret["metadata"]["name"]
    }


def test_no_secret_is_made_of_nothing(tmp_path: Path) -> None:
    """A directory without certificates is named, and kubectl gets nothing to apply."""
    done = subprocess.run([str(KUBERNETES / "make-secret"), str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{tmp_path} is nothing that psctl certs has made" in done.stderr


@every_variant
def test_pods_are_restricted(variant: str) -> None:
    """What the Pod Security Standard "restricted" asks for, a root that nobody writes on, and no token of the API."""
    accounts = [item for item in rendered(variant) if item["kind"] == "ServiceAccount"]
    assert [account["automountServiceAccountToken"] for account in accounts] == [False]
    for pod in all_pods(variant):
        inside = pod.container["securityContext"]
        assert inside == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        whole = pod.spec["securityContext"]
        assert (whole["runAsNonRoot"], whole["runAsUser"], whole["seccompProfile"]) == (
            True,
            10001,
            {"type": "RuntimeDefault"},
        )
        assert pod.spec["automountServiceAccountToken"] is False
        assert pod.spec["serviceAccountName"] == accounts[0]["metadata"]["name"]
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod.spec)
        kinds = {kind for volume in pod.spec["volumes"] for kind in volume if kind != "name"}
        assert kinds <= {"secret", "projected", "persistentVolumeClaim", "emptyDir"}
        assert {"cpu", "memory"} <= set(pod.container["resources"]["requests"])
        assert "memory" in pod.container["resources"]["limits"]


@every_variant
def test_commands_are_ours(variant: str) -> None:
    """Every container runs a program that takes these flags; servers listen on the ports that policies let through."""
    for item in rendered(variant):
        for container in containers(item):
            (program,), args = container["command"], container.get("args", [])
            found = {"psserver": psserver, "psworker": psworker}[program].make_context(program, list(args))
            if program == "psserver":
                flags = found.params
                assert (flags["host"], flags["data_port"], flags["until_done"]) == ("0.0.0.0", 2223, True)
                ports = {port["containerPort"] for port in container["ports"]}
                assert ports == {2222, 2223, 9090}


@every_variant
def test_servers_are_ready_when_they_serve(variant: str) -> None:
    """The kubelet asks what gRPC's health service would say, at the port of metrics; it is alive while metrics come."""
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
def test_libraries_compute_in_as_many_threads_as_cores_are_asked_for(variant: str) -> None:
    """A container sees all cores of its node; and copies of variables go to other nodes than theirs."""
    for pod in all_pods(variant):
        asked = pod.container["resources"]["requests"]["cpu"]
        assert pod.environ["OMP_NUM_THREADS"] == ("1" if asked.endswith("m") else asked)
        server = pod.metadata["labels"][COMPONENT] == "ps"
        assert pod.environ.get("PS_DOMAIN") == (NODE if server else None)


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
            least = {"ps": max(1, counts.servers - counts.spares), "worker": 1}[name]
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
    """Each selector names the job, as does each pod: another job's pods are not taken for this one's."""
    objects = rendered(variant)
    found = [(item["kind"], *each) for item in objects for each in selectors(item.get("spec", {}))]
    kinds = {kind for kind, _, _ in found}
    assert {"NetworkPolicy", "PodDisruptionBudget"} < kinds
    for kind, way, selector in found:
        assert selector.get(INSTANCE) == instance(variant), f"{kind}{way} selects pods of every job: {selector}"
    assert {pod.metadata["labels"][INSTANCE] for pod in pods(objects)} == {instance(variant)}


@every_variant
def test_names_are_looked_up_wherever_the_resolver_is(variant: str) -> None:
    """A resolver on the node has no labels: port 53 is open to all addresses, and OpenShift's port to its namespace."""
    (policy,) = [
        item
        for item in rendered(variant)
        if item["kind"] == "NetworkPolicy" and "Egress" in item["spec"]["policyTypes"]
    ]
    dns = [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]
    assert {"ports": dns} in policy["spec"]["egress"]
    closed = [rule for rule in policy["spec"]["egress"] if rule["ports"] != dns]
    assert all(rule["to"] for rule in closed)


@every_variant
def test_what_others_are_to_blame_for_counts_for_nobody(variant: str) -> None:
    """Jobs of clients ignore a server's loss, those of servers that they were outlived; a wrong setting ends each job.

    Where nobody starts the servers again, a job that is given up ends as well. TFJob looks at no code.
    """
    wrong = code_of(ConfigError(""))
    again = "StatefulSet" in {item["kind"] for item in rendered(variant)}
    for job in jobs(variant):
        (container,) = job["spec"]["template"]["spec"]["containers"]
        rules = [rule for rule in job["spec"]["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
        actions = {code: rule["action"] for rule in rules for code in rule["onExitCodes"]["values"]}
        server = container["command"] == ["psserver"]
        chief = job["spec"]["template"]["metadata"]["labels"][COMPONENT] == "chief"
        expected = {wrong: "FailJob", OUTLIVED if server else SERVER_LOST: "Ignore"}
        assert actions == expected | ({ABANDONED: "FailJob"} if chief and not again else {})
        assert {rule["onExitCodes"]["containerName"] for rule in rules} == {container["name"]}
        assert {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]} in [
            rule | {"onPodConditions": [{"type": each["type"]} for each in rule["onPodConditions"]]}
            for rule in job["spec"]["podFailurePolicy"]["rules"]
            if "onPodConditions" in rule
        ]
    for item in rendered(variant):
        if item["kind"] == "TFJob":
            assert {spec["restartPolicy"] for spec in item["spec"]["tfReplicaSpecs"].values()} == {"OnFailure"}


@pytest.mark.parametrize("variant", [variant for variant in VARIANTS if "jobset" in variant])
def test_a_jobset_fails_as_a_whole_where_no_restart_helps(variant: str) -> None:
    """A Job that its own rule has ended ends the others: no server waits for workers that nobody starts again."""
    (jobset,) = [item for item in rendered(variant) if item["kind"] == "JobSet"]
    (rule,) = jobset["spec"]["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    assert rule["name"].isalnum()  # what its schema asks for
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] > 0


@every_variant
def test_servers_end_for_good_but_in_the_base(variant: str) -> None:
    """A StatefulSet starts its pods again, with an empty server that waits; in the other variants they stay ended."""
    kinds = {item["kind"] for item in rendered(variant) if containers(item)}
    again = variant in ("base", "overlays/larger", "helm/statefulset")
    assert ("StatefulSet" in kinds) == again
    policies = {pod.spec.get("restartPolicy") for pod in all_pods(variant)}
    assert policies == ({None, "Never"} if again else {None} if "tfjob" in variant else {"Never"})
