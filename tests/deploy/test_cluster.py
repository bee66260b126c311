"""Every variant in the cluster that `PS_TEST_KUBECONFIG` names, in a namespace of its own that is removed after.

The API server has to take every object, and the controllers have to make every pod, which the Pod Security Standard
"restricted" may refuse. With `PS_TEST_IMAGE`, an image with the examples that the nodes have, the job trains as well.
"""

from __future__ import annotations

import copy
import json
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from psclient.psctl.cli import command as psctl
from tests.kit.kubernetes import (
    CUSTOM,
    KUBERNETES,
    VARIANTS,
    Manifest,
    all_pods,
    containers,
    instance,
    issued,
    rendered,
    secret_name,
)

KUBECONFIG, IMAGE = os.environ.get("PS_TEST_KUBECONFIG", ""), os.environ.get("PS_TEST_IMAGE", "")
SECONDS, TRAINING_SECONDS = 120, 900
WORKERS = ("worker", "worker-0")
"""With what the name of the workers' Job ends: of a JobSet there may be several."""

pytestmark = pytest.mark.skipif(not KUBECONFIG, reason="no PS_TEST_KUBECONFIG: the manifests are applied to no cluster")


def kubectl(*words: str, given: object = None, seconds: float = SECONDS) -> str:
    """What kubectl prints.

    Raises:
        AssertionError: it fails; with what it says.
    """
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
        counts = VARIANTS[variant]
        numbers = {"--ps": counts.servers, "--workers": counts.workers, "--extra-ps": counts.spares}
        words = [str(word) for pair in numbers.items() for word in pair]
        made = CliRunner().invoke(psctl, ["certs", str(tmp_path), *words])
        assert made.exit_code == 0, made.output
        command = [str(KUBERNETES / "make-secret"), str(tmp_path), secret_name(variant)]
        secret = yaml.safe_load(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
        kubectl("apply", "--namespace", namespace, "-f", "-", given=secret)
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
