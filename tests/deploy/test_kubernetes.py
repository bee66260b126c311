"""The manifests of Kubernetes: valid, restricted, and each pod is the task that its TF_CONFIG says.

No cluster runs here. What is tried is what can be without one: schemas, and what the kubelet makes of the environment.
"""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from click.testing import CliRunner

from psclient import TFConfigClusterResolver
from psclient._src.launch.psworker import command as psworker
from psclient._src.processes.shutdown import SERVER_LOST, code_of
from psclient.cluster_resolver import task_of
from psclient.psctl.cli import command as psctl
from psserver.cli import command as psserver
from pswire.cluster import parse_tf_config
from pswire.errors import ConfigError
from pswire.security.names import task_name
from tests.support.manifests import Manifest, Pod, containers, expanded, pods, render, templates

ROOT = Path(__file__).resolve().parents[2] / "configs" / "kubernetes"
VARIANTS = {
    "base": (2, 2),
    "overlays/once": (2, 2),
    "overlays/gpu": (2, 2),
    "overlays/larger": (4, 8),
    "jobset": (2, 2),
    "tfjob": (2, 2),
}
"""Servers and workers of each."""

VERSION = kubernetes_validate.latest_version()
CUSTOM = {"JobSet": "jobset.x-k8s.io/v1alpha2", "TFJob": "kubeflow.org/v1"}
"""Kinds that Kubernetes does not know by itself; there is no schema for them here, but for their pods there is."""

every_variant = pytest.mark.parametrize("variant", VARIANTS)


def rendered(variant: str) -> list[Manifest]:
    return render(ROOT / variant)


def all_pods(variant: str) -> list[Pod]:
    return pods(rendered(variant))


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


@every_variant
def test_kustomize_renders_what_is_tested(variant: str) -> None:
    """These tests render by themselves; where kubectl is at hand, it makes the same objects."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("no kubectl: manifests are rendered by the tests alone")
    done = subprocess.run([kubectl, "kustomize", str(ROOT / variant)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr

    def ordered(objects: list[Manifest]) -> list[Manifest]:
        return sorted(objects, key=lambda item: (item["kind"], item["metadata"]["name"]))

    assert ordered(list(yaml.safe_load_all(done.stdout))) == ordered(rendered(variant))


@every_variant
def test_each_pod_is_a_task_of_one_cluster(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our resolver reads the same cluster in every pod; each task is one pod, and servers are where it says."""
    servers, workers = VARIANTS[variant]
    found, clusters = Counter[str](), []
    for pod in all_pods(variant):
        monkeypatch.setenv("TF_CONFIG", pod.environ["TF_CONFIG"])
        resolver = TFConfigClusterResolver()
        config = parse_tf_config(pod.environ["TF_CONFIG"])
        assert config is not None
        assert (resolver.task_type, resolver.task_id) == (config.task.job, config.task.index)
        if config.task.job == "ps":
            assert resolver.cluster_spec().task_address("ps", config.task.index) == f"{pod.address}:2222"
        else:
            assert task_of(resolver) == config
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


@every_variant
def test_each_pod_sees_its_own_key(variant: str) -> None:
    """Of the Secret with everybody's certificates a container sees the files of its task, and no others."""
    for pod in all_pods(variant):
        config = parse_tf_config(pod.environ["TF_CONFIG"])
        assert config is not None
        mounts = {
            mount["mountPath"]: mount for mount in pod.container["volumeMounts"] if mount["name"] == "certificates"
        }
        seen = {
            path: mount.get("subPath") or expanded(mount["subPathExpr"], pod.environ) for path, mount in mounts.items()
        }
        task = task_name(config.task)
        expected = {"tls.crt": f"{task}.crt", "tls.key": f"{task}.key", "ca.crt": "ca.crt", "token": "token"}
        assert seen == {f"/certs/{file}": key for file, key in expected.items()}
        assert all(mount["readOnly"] for mount in mounts.values())
        told = {pod.environ[name] for name in ("PS_TLS_CERT", "PS_TLS_KEY", "PS_TLS_CA", "PS_TOKEN_FILE")}
        assert told == set(seen)


@every_variant
def test_the_secret_has_what_is_mounted(variant: str, tmp_path: Path) -> None:
    """Of what `psctl certs` makes for so many tasks make-secret makes a Secret, with the files of each pod."""
    servers, workers = VARIANTS[variant]
    made = CliRunner().invoke(psctl, ["certs", str(tmp_path), "--ps", str(servers), "--workers", str(workers)])
    assert made.exit_code == 0, made.output
    done = subprocess.run([str(ROOT / "make-secret"), str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    secret = yaml.safe_load(done.stdout)
    kubernetes_validate.validate(secret, VERSION, strict=True)
    tasks = [pod.environ["TASK"] for pod in all_pods(variant)]
    files = {f"{task}.{end}": tmp_path / task / f"tls.{end}" for task in tasks for end in ("crt", "key")}
    files |= {name: tmp_path / tasks[0] / name for name in ("ca.crt", "token")}
    assert {key: base64.b64decode(value) for key, value in secret["data"].items()} == {
        key: path.read_bytes() for key, path in files.items()
    }
    assert {volume["secret"]["secretName"] for pod in all_pods(variant) for volume in pod.spec["volumes"][:1]} == {
        secret["metadata"]["name"]
    }


def test_no_secret_is_made_of_nothing(tmp_path: Path) -> None:
    """A directory without certificates is named, and kubectl gets nothing to apply."""
    done = subprocess.run([str(ROOT / "make-secret"), str(tmp_path)], capture_output=True, text=True, timeout=60)
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
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod.spec)
        kinds = {kind for volume in pod.spec["volumes"] for kind in volume if kind != "name"}
        assert kinds <= {"secret", "persistentVolumeClaim", "emptyDir"}
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
def test_policies_select_the_pods(variant: str) -> None:
    """Selectors of policies and budgets find the pods that they are for."""
    objects = rendered(variant)
    for item in objects:
        if item["kind"] not in ("NetworkPolicy", "PodDisruptionBudget"):
            continue
        spec = item["spec"]
        wanted = (spec.get("podSelector") or spec["selector"])["matchLabels"].items()
        selected = [pod for pod in pods(objects) if wanted <= pod.metadata["labels"].items()]
        name = item["metadata"]["name"]
        jobs = {json.loads(pod.environ["TF_CONFIG"])["task"]["type"] for pod in selected}
        assert jobs == ({"ps", "worker", "chief"} if name == "tasks" else {name})
        if item["kind"] == "PodDisruptionBudget":
            assert 0 < spec["minAvailable"] <= len(selected)


@every_variant
def test_what_follows_from_a_lost_server_counts_for_nobody(variant: str) -> None:
    """Jobs of clients ignore the exit code that says it; a wrong setting ends each job. TFJob looks at no code."""
    for item in rendered(variant):
        for job in [item, *(each["template"] for each in item.get("spec", {}).get("replicatedJobs", ()))]:
            if "podFailurePolicy" not in job.get("spec", {}):
                continue
            (container,) = job["spec"]["template"]["spec"]["containers"]
            rules = job["spec"]["podFailurePolicy"]["rules"]
            codes = {rule["onExitCodes"]["values"][0]: rule for rule in rules if "onExitCodes" in rule}
            actions = {code: rule["action"] for code, rule in codes.items()}
            client = {SERVER_LOST: "Ignore"} if container["command"] == ["psworker"] else {}
            assert actions == {code_of(ConfigError("")): "FailJob"} | client
            assert {rule["onExitCodes"]["containerName"] for rule in codes.values()} == {container["name"]}
    if variant == "tfjob":
        (job,) = [item for item in rendered(variant) if item["kind"] == "TFJob"]
        assert {spec["restartPolicy"] for spec in job["spec"]["tfReplicaSpecs"].values()} == {"OnFailure"}


def test_servers_end_for_good_but_in_the_base() -> None:
    """A StatefulSet starts its pods again, with an empty server that waits; in the other variants they stay ended."""
    assert CliRunner().invoke(psserver, ["--help"]).output.count("--until-done") == 1
    kinds = {variant: {item["kind"] for item in rendered(variant) if containers(item)} for variant in VARIANTS}
    again = {variant for variant in VARIANTS if "StatefulSet" in kinds[variant]}
    assert again == {"base", "overlays/larger"}
    for variant in VARIANTS:
        policies = {pod.spec.get("restartPolicy") for pod in all_pods(variant)}
        assert policies == ({None, "Never"} if variant in again else {None} if variant == "tfjob" else {"Never"})
