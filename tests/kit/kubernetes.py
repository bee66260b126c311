"""Kubernetes manifests as a cluster would see them, and the ways in which it can run the example."""

from __future__ import annotations

import copy
import json
import math
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import yaml

Manifest = dict[str, Any]

_FIELD = re.compile(r"metadata\.(labels|annotations)\['([^']+)'\]")
_VARIABLE = re.compile(r"\$\((\w+)\)")

NODE = "node-7"
"""The node of every pod."""


# ---- Helm ----


def helm(chart: Path, release: str, values: Mapping[str, Any], namespace: str) -> list[Manifest]:
    """What `helm template` prints, as objects in the release's namespace: by helm, else by its engine (extra `helm`).

    Skips the test where neither is at hand.

    Raises:
        ValueError: helm refuses the values, or the chart; with what it says.
    """
    found = shutil.which("helm")
    template = partial(_by_program, found) if found else _by_engine
    objects = [item for item in yaml.safe_load_all(template(chart, release, values, namespace)) if item]
    for item in objects:
        item["metadata"]["namespace"] = namespace
    return objects


def _by_program(program: str, chart: Path, release: str, values: Mapping[str, Any], namespace: str) -> str:
    command = [program, "template", release, str(chart), "--namespace", namespace, "--values", "-"]
    done = subprocess.run(command, input=json.dumps(values), capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise ValueError(done.stderr)
    return done.stdout


def _by_engine(chart: Path, release: str, values: Mapping[str, Any], namespace: str) -> str:
    engine = pytest.importorskip("helm_python", reason="neither helm nor the extra helm: the chart is not rendered")
    with engine.Chart.load(str(chart)) as loaded:
        try:
            files = loaded.render(dict(values), name=release, namespace=namespace)
        except engine.HelmError as error:
            raise ValueError(str(error)) from error
    return "\n---\n".join(text for name, text in files.items() if name.endswith(".yaml"))


# ---- kustomize ----


def render(directory: Path) -> list[Manifest]:
    """What `kubectl kustomize DIRECTORY` prints, as objects."""
    wanted = yaml.safe_load((directory / "kustomization.yaml").read_text(encoding="utf-8"))
    known = {"apiVersion", "kind", "namespace", "images", "resources", "patches"}
    assert set(wanted) <= known, f"{directory} uses {set(wanted) - known}, which is not rendered here"
    objects = [found for name in wanted["resources"] for found in _resources(directory / name)]
    for patch in wanted.get("patches", []):
        objects = _patched(objects, patch)
    for item in objects:
        if item["kind"] != "Namespace":
            item["metadata"]["namespace"] = wanted["namespace"]
        for container in containers(item):
            for image in wanted.get("images", []):
                if container["image"].partition(":")[0] == image["name"]:
                    container["image"] = f"{image['newName']}:{image['newTag']}"
    return objects


def _resources(path: Path) -> list[Manifest]:
    if path.is_dir():
        return render(path)
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def _patched(objects: list[Manifest], patch: Mapping[str, Any]) -> list[Manifest]:
    change = yaml.safe_load(patch["patch"])
    if isinstance(change, dict):
        assert change["$patch"] == "delete", "the only strategic merge that is rendered here"
        target = {"kind": change["kind"], "name": change["metadata"]["name"]}
    else:
        target = patch["target"]
    found = [item for item in objects if (item["kind"], item["metadata"]["name"]) == (target["kind"], target["name"])]
    assert len(found) == 1, f"{target} is there {len(found)} times"
    if isinstance(change, dict):
        return [item for item in objects if item is not found[0]]
    for step in change:
        _apply(found[0], step)
    return objects


def _apply(item: Manifest, step: Mapping[str, Any]) -> None:
    """One step of RFC 6902."""
    *way, last = [part.replace("~1", "/").replace("~0", "~") for part in step["path"].split("/")[1:]]
    place: Any = item
    for part in way:
        place = place[int(part)] if isinstance(place, list) else place[part]
    assert isinstance(place, dict), f"{step['path']} is an item of a list, which is not rendered here"
    assert step["op"] == "add" or (step["op"], last in place) == ("replace", True), step
    place[last] = copy.deepcopy(step["value"])


def templates(item: Manifest) -> list[tuple[str, int, Manifest]]:
    """The pods that an object describes: name of the controller, how many, template."""
    spec, name = item.get("spec", {}), item["metadata"]["name"]
    if item["kind"] == "StatefulSet":
        return [(name, spec["replicas"], spec["template"])]
    if item["kind"] == "Job":
        return [(name, spec["completions"], spec["template"])]
    if item["kind"] == "JobSet":
        jobs = [(job["name"], job["template"]["spec"]) for job in spec["replicatedJobs"]]
        return [(f"{name}-{job}-0", given["completions"], given["template"]) for job, given in jobs]
    if item["kind"] == "TFJob":
        kinds = spec["tfReplicaSpecs"].items()
        return [(f"{name}-{kind.lower()}", given["replicas"], given["template"]) for kind, given in kinds]
    return []


def containers(item: Manifest) -> list[Manifest]:
    """The containers of all pods that an object describes."""
    return [container for _, _, template in templates(item) for container in template["spec"]["containers"]]


# ---- Controllers ----


@dataclass(frozen=True)
class Pod:
    """A pod as its controller makes it.

    Attributes:
        name: its hostname.
        address: by which others find it, "" if there is no Service for that.
        metadata: its labels and annotations.
        spec: its spec.
        environ: the environment of its only container.
    """

    name: str
    address: str
    metadata: Manifest
    spec: Manifest
    environ: dict[str, str]

    @property
    def container(self) -> Manifest:
        """Its only container."""
        (container,) = self.spec["containers"]
        return container  # type: ignore[no-any-return]


def pods(objects: list[Manifest]) -> list[Pod]:
    """All pods."""
    return [pod for item in objects for pod in _pods(item, objects)]


def _pods(item: Manifest, objects: list[Manifest]) -> Iterator[Pod]:
    for controller, count, template in templates(item):
        for index in range(count):
            name = f"{controller}-{index}"
            metadata = copy.deepcopy(template["metadata"])
            more = _marks(item, controller, index)
            for kind, marks in more.items():
                metadata[kind] = metadata.get(kind, {}) | marks
            (container,) = template["spec"]["containers"]
            environ = _environ(container, metadata, objects)
            if item["kind"] == "TFJob":
                assert container["name"] == "tensorflow"
                environ["TF_CONFIG"] = _tf_config(item, controller, index)
            yield Pod(name, _address(item, name, template, objects), metadata, template["spec"], environ)


def _marks(item: Manifest, controller: str, index: int) -> dict[str, dict[str, str]]:
    """Labels and annotations that controllers put on their pods."""
    if item["kind"] == "StatefulSet":
        return {"labels": {"apps.kubernetes.io/pod-index": str(index)}}
    if item["kind"] == "TFJob":
        kind = controller.removeprefix(item["metadata"]["name"] + "-")
        prefix = "training.kubeflow.org/replica-"
        return {"labels": {f"{prefix}type": kind, f"{prefix}index": str(index)}}
    return {"annotations": {"batch.kubernetes.io/job-completion-index": str(index)}}


def _address(item: Manifest, name: str, template: Manifest, objects: list[Manifest]) -> str:
    """By which DNS name the pod is found: of the headless Service that selects it, or of what its operator makes."""
    if item["kind"] == "TFJob":
        return f"{name}.{item['metadata']['namespace']}.svc"
    if item["kind"] == "JobSet":
        return f"{name}.{item['spec']['network']['subdomain']}"
    subdomain = item["spec"].get("serviceName") or template["spec"].get("subdomain")
    services = [one for one in objects if one["kind"] == "Service" and one["metadata"]["name"] == subdomain]
    labels = template["metadata"]["labels"].items()
    if not services or not services[0]["spec"]["selector"].items() <= labels:
        return ""
    assert services[0]["spec"]["clusterIP"] == "None"
    return f"{name}.{subdomain}"


def _environ(container: Manifest, metadata: Manifest, objects: list[Manifest]) -> dict[str, str]:
    """As the kubelet makes it: what comes first may stand in what follows as `$(NAME)`."""
    maps = {item["metadata"]["name"]: item["data"] for item in objects if item["kind"] == "ConfigMap"}
    environ: dict[str, str] = {}
    for source in container.get("envFrom", []):
        environ |= maps[source["configMapRef"]["name"]]
    for variable in container.get("env", []):
        environ[variable["name"]] = _value(variable, environ, metadata, maps, container)
    return environ


def _value(
    variable: Manifest, environ: Mapping[str, str], metadata: Manifest, maps: Mapping[str, Any], container: Manifest
) -> str:
    if "value" in variable:
        return expanded(variable["value"], environ)
    source = variable["valueFrom"]
    if "resourceFieldRef" in source:
        return _amount(container["resources"], source["resourceFieldRef"])
    if "configMapKeyRef" in source:
        return str(maps[source["configMapKeyRef"]["name"]][source["configMapKeyRef"]["key"]])
    if source["fieldRef"]["fieldPath"] == "spec.nodeName":
        return NODE
    field = _FIELD.fullmatch(source["fieldRef"]["fieldPath"])
    assert field, source
    return str(metadata[field[1]][field[2]])


def _amount(resources: Manifest, source: Manifest) -> str:
    """As the kubelet computes it: cores over the divisor, rounded up."""
    assert source == {"resource": "requests.cpu", "divisor": "1"}, source
    cores = str(resources["requests"]["cpu"])
    return str(math.ceil(float(cores.removesuffix("m")) / 1000 if cores.endswith("m") else float(cores)))


def expanded(text: str, environ: Mapping[str, str]) -> str:
    """A text in which `$(NAME)` stands for the variable; what is not there stays, and so does Kubernetes."""
    return _VARIABLE.sub(lambda found: environ.get(found[1], found[0]), text)


def _tf_config(item: Manifest, controller: str, index: int) -> str:
    """What Kubeflow's training operator writes: job names in lower case, a Service for each task, port 2222."""
    name, namespace = item["metadata"]["name"], item["metadata"]["namespace"]
    jobs = {kind.lower(): given["replicas"] for kind, given in item["spec"]["tfReplicaSpecs"].items()}
    cluster = {
        job: [f"{name}-{job}-{task}.{namespace}.svc:2222" for task in range(count)] for job, count in jobs.items()
    }
    task = {"type": controller.removeprefix(name + "-"), "index": index}
    return json.dumps({"cluster": cluster, "task": task, "environment": "cloud"})


ROOT = Path(__file__).resolve().parents[2] / "configs"
KUBERNETES, CHART = ROOT / "kubernetes", ROOT / "helm"
NAMESPACE = "paramserver"
RELEASE = "clicks"
"""The name of the release; no template may know another."""

JOB = "digits"
"""The name of the job in the files of kustomize."""


@dataclass(frozen=True)
class Variant:
    """A way.

    Attributes:
        servers, workers, standbys: how many there are.
        values: of the chart; None for a directory of kustomize.
    """

    servers: int = 2
    workers: int = 2
    standbys: int = 0
    values: dict[str, Any] | None = None


GPU = {
    "image": "registry.example.com/paramserver:gpu",
    "resources": {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"memory": "2Gi", "nvidia.com/gpu": 1}},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
}
LARGE = {
    "count": 4,
    "memoryLimit": "10GiB",
    "args": ["--threads=4"],
    "resources": {"requests": {"cpu": "4", "memory": "12Gi"}, "limits": {"memory": "16Gi"}},
}
STANDBY = {"replicationFactor": 2, "servers": {"standbys": 1}}
ISSUED = {"certificates": {"source": "cert-manager"}}
WATCHED = {"serviceMonitor": {"enabled": True}, "alarms": {"enabled": True}}
BUCKET = {"checkpoints": {"root": "s3://bucket/run"}, "environment": {"AWS_REGION": "eu-central-1"}}

VARIANTS: dict[str, Variant] = {
    "base": Variant(),
    "overlays/once": Variant(),
    "overlays/gpu": Variant(),
    "overlays/larger": Variant(4, 8),
    "overlays/standby": Variant(standbys=1),
    "jobset": Variant(),
    "tfjob": Variant(),
    "helm/job": Variant(values={}),
    "helm/statefulset": Variant(values={"controller": "statefulset"}),
    "helm/jobset": Variant(values={"controller": "jobset"}),
    "helm/tfjob": Variant(values={"controller": "tfjob"}),
    "helm/gpu": Variant(values={"workers": GPU}),
    "helm/larger": Variant(4, 8, values={"servers": LARGE, "workers": {"count": 8}}),
    "helm/standby": Variant(standbys=1, values=STANDBY),
    "helm/jobset-standby": Variant(standbys=1, values={**STANDBY, "controller": "jobset"}),
    "helm/cert-manager": Variant(standbys=1, values={**STANDBY, **ISSUED, **WATCHED}),
    "helm/bucket": Variant(values=BUCKET),
}

CUSTOM = {
    "JobSet": "jobset.x-k8s.io/v1alpha2",
    "TFJob": "kubeflow.org/v1",
    "Certificate": "cert-manager.io/v1",
    "Issuer": "cert-manager.io/v1",
    "ServiceMonitor": "monitoring.coreos.com/v1",
    "PrometheusRule": "monitoring.coreos.com/v1",
}
"""Kinds that Kubernetes does not know by itself; there is no schema for them here, but for their pods there is."""


def program() -> str:
    """The path of helm, for what its engine alone does not do; skips the test where it is not at hand."""
    found = shutil.which("helm")
    if found is None:
        pytest.skip("no helm: only its engine may be here")
    return found


@cache
def rendered(variant: str) -> list[Manifest]:
    """All objects of a variant, to be changed by nobody. Skips the test where helm is needed and not at hand."""
    values = VARIANTS[variant].values
    if values is None:
        return render(KUBERNETES / variant)
    return helm(CHART, RELEASE, values, NAMESPACE)


def all_pods(variant: str) -> list[Pod]:
    """All pods of a variant, standby servers included."""
    return pods(rendered(variant))


def instance(variant: str) -> str:
    """The label that all objects of the job have, and nobody else's."""
    return JOB if VARIANTS[variant].values is None else RELEASE


def secret_name(variant: str) -> str:
    """The name of the Secret that make-secret is to make."""
    return "certificates" if VARIANTS[variant].values is None else f"{RELEASE}-certificates"


def issued(variant: str) -> bool:
    """Whether cert-manager makes the certificates, so that nobody makes a Secret."""
    return ISSUED.items() <= (VARIANTS[variant].values or {}).items()
