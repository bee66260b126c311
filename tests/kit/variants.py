"""The ways in which Kubernetes can run the example: directories of kustomize, and values of the chart."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.kit.manifests import Manifest, Pod, helm, pods, render

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
        servers, workers, spares: how many there are.
        values: of the chart; None for a directory of kustomize.
    """

    servers: int = 2
    workers: int = 2
    spares: int = 0
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
SPARE = {"replication": 1, "servers": {"spares": 1}}
ISSUED = {"certificates": {"source": "cert-manager"}}
WATCHED = {"serviceMonitor": {"enabled": True}, "alarms": {"enabled": True}}
BUCKET = {"checkpoints": {"root": "s3://bucket/run"}, "environment": {"AWS_REGION": "eu-central-1"}}

VARIANTS: dict[str, Variant] = {
    "base": Variant(),
    "overlays/once": Variant(),
    "overlays/gpu": Variant(),
    "overlays/larger": Variant(4, 8),
    "overlays/spare": Variant(spares=1),
    "jobset": Variant(),
    "tfjob": Variant(),
    "helm/job": Variant(values={}),
    "helm/statefulset": Variant(values={"controller": "statefulset"}),
    "helm/jobset": Variant(values={"controller": "jobset"}),
    "helm/tfjob": Variant(values={"controller": "tfjob"}),
    "helm/gpu": Variant(values={"workers": GPU}),
    "helm/larger": Variant(4, 8, values={"servers": LARGE, "workers": {"count": 8}}),
    "helm/spare": Variant(spares=1, values=SPARE),
    "helm/jobset-spare": Variant(spares=1, values={**SPARE, "controller": "jobset"}),
    "helm/cert-manager": Variant(spares=1, values={**SPARE, **ISSUED, **WATCHED}),
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
    """The path of helm; skips the test where it is not at hand."""
    found = shutil.which("helm")
    if found is None:
        pytest.skip("no helm: the chart is not rendered")
    return found


def rendered(variant: str) -> list[Manifest]:
    """All objects of a variant, to be changed by nobody. Skips the test where helm is needed and not at hand."""
    values = VARIANTS[variant].values
    return _by_kustomize(variant) if values is None else _by_helm(program(), variant)


@cache
def _by_kustomize(variant: str) -> list[Manifest]:
    return render(KUBERNETES / variant)


@cache
def _by_helm(path: str, variant: str) -> list[Manifest]:
    return helm(path, CHART, RELEASE, VARIANTS[variant].values or {}, NAMESPACE)


def all_pods(variant: str) -> list[Pod]:
    """All pods of a variant, spare servers included."""
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
