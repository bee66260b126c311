"""The chart in configs/helm: what its values may be, and what it has beside what kustomize's directories have.

That its pods are right test_kubernetes.py says, which takes them for variants as any other. Needs helm.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from click.testing import CliRunner

from psclient.psctl.cli import command as psctl
from tests.kit.internals import METRICS, Timeouts, certificate_name
from tests.kit.kubernetes import CHART, NAMESPACE, RELEASE, VARIANTS, Manifest, all_pods, helm, pods, program, rendered
from tests.kit.shell import printed

VALUES = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
SCHEMA = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
OPEN = {"environment", "timeouts", "global"}
"""Values whose keys are the user's, or are not all there by default."""


def template(values: dict[str, Any], release: str = RELEASE) -> list[Manifest]:
    return helm(CHART, release, values, NAMESPACE)


def of(objects: list[Manifest], kind: str) -> list[Manifest]:
    return [item for item in objects if item["kind"] == kind]


def test_the_schema_and_the_values_have_the_same_keys() -> None:
    """Each value can be checked, and each that the schema knows has a default."""
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    jsonschema.validate(VALUES, SCHEMA)

    def check(values: Any, schema: dict[str, Any], way: str) -> None:
        if schema.get("properties") is None or schema.get("additionalProperties") is not False or way in OPEN:
            return
        optional = {"claims"} if way.endswith("resources") else {"global"}
        assert set(values) == set(schema["properties"]) - optional, way
        for key, value in values.items():
            check(value, schema["properties"][key], f"{way}.{key}".lstrip("."))

    check(VALUES, SCHEMA, "")
    known = {field.name for field in dataclasses.fields(Timeouts)}
    assert set(SCHEMA["properties"]["timeouts"]["properties"]) == known


WRONG = {
    '{"servers": {"cuont": 3}}': "cuont",
    '{"servers": {"count": 0}}': "servers.count",
    '{"controller": "deployment"}': "controller",
    '{"servers": {"memoryLimit": "2Gi"}}': "servers.memoryLimit",
    '{"timeouts": {"lease": 3}}': "lease",
    '{"checkpoints": {"root": "runs"}}': "checkpoints.root",
    '{"workers": {"resources": {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"memory": null}}}}': "memory",
    '{"servers": {"standbys": 1}}': "servers.standbys needs replicationFactor: 2",
    '{"servers": {"standbys": 1}, "replicationFactor": 2, "controller": "tfjob"}': "standbys needs controller: job or",
}


@pytest.mark.parametrize("values", WRONG)
def test_wrong_values_are_refused(values: str) -> None:
    """With the key in the message, before anything is applied."""
    with pytest.raises(ValueError) as error:
        template(json.loads(values))
    assert WRONG[values] in str(error.value).replace("/", ".")  # as Helm 4 has it, and as Helm 3 had


def test_the_chart_has_nothing_that_helm_minds() -> None:
    """`helm lint --strict` passes, which takes warnings for errors."""
    printed("helm", "lint", "--strict", CHART)


@pytest.mark.parametrize("controller", ["job", "statefulset", "jobset", "tfjob"])
def test_two_releases_share_nothing(controller: str) -> None:
    """In one namespace no object of theirs has the same name, and no pod of one mounts what is the other's."""
    releases = ("a", "b")
    values = {"controller": controller, "certificates": {"source": "cert-manager"}, "serviceMonitor": {"enabled": True}}
    found = {release: template(values, release) for release in releases}
    names = {release: {(item["kind"], item["metadata"]["name"]) for item in found[release]} for release in releases}
    assert not names["a"] & names["b"]
    for release in releases:
        own = {name for _, name in names[release]}
        for pod in pods(found[release]):
            for volume in pod.spec["volumes"]:
                claim = volume.get("persistentVolumeClaim", {}).get("claimName")
                sources = [source["secret"]["name"] for source in volume.get("projected", {}).get("sources", [])]
                assert all(name.removesuffix("-tls") in own for name in [*sources, *([claim] if claim else [])])
            assert pod.environ["PS_JOB"] == release


def test_cert_manager_makes_what_psctl_certs_makes() -> None:
    """One for each task, with both usages; a standby server's names all; pods see those of their kind, and a token."""
    variant = "helm/cert-manager"
    objects = rendered(variant)
    certificates = {item["spec"]["secretName"]: item["spec"] for item in of(objects, "Certificate")}
    servers = [certificate_name(f"ps-{index}") for index in range(VARIANTS[variant].servers)]
    tokens = {item["metadata"]["name"] for item in of(objects, "Secret")}
    for pod in all_pods(variant):
        task, standby = pod.environ["TASK"], "TF_CONFIG" not in pod.environ
        mine = certificates[f"{RELEASE}-{task}-tls"]
        assert mine["dnsNames"] == [certificate_name(task), certificate_name(METRICS), *(servers if standby else [])]
        assert {"server auth", "client auth"} <= set(mine["usages"])
        (volume,) = [volume for volume in pod.spec["volumes"] if volume["name"] == "certificates"]
        secrets = [source["secret"] for source in volume["projected"]["sources"]]
        files = {item["path"]: (secret["name"], item["key"]) for secret in secrets for item in secret["items"]}
        assert files[f"{task}.crt"] == (f"{RELEASE}-{task}-tls", "tls.crt")
        assert files[f"{task}.key"] == (f"{RELEASE}-{task}-tls", "tls.key")
        assert files["ca.crt"][1] == "ca.crt"
        assert files["ca.crt"][0] in certificates
        assert files["token"][0] in tokens
        kind = task.rpartition("-")[0]
        others = {file.rpartition("-")[0] for file in files} - {kind, ""}
        assert not others, f"{task} sees the keys of {others}"


def test_who_signs_may_be_somebody_else() -> None:
    """With an issuer of the cluster's there is no CA in the namespace."""
    issuer = {"name": "corporate", "kind": "ClusterIssuer"}
    objects = template({"certificates": {"source": "cert-manager", "issuer": issuer, "tokenSecret": "mine"}})
    assert not of(objects, "Issuer") + of(objects, "Secret")
    for certificate in (made := of(objects, "Certificate")):
        assert certificate["spec"]["issuerRef"] == issuer | {"group": "cert-manager.io"}
        assert not certificate["spec"].get("isCA")
    assert made


def test_prometheus_finds_every_task_and_names_the_job() -> None:
    """The monitor selects one Service of all pods; the job is the release; alarms are the committed file's."""
    objects = rendered("helm/cert-manager")
    (monitor,), everyone = of(objects, "ServiceMonitor"), pods(objects)
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    (service,) = [item for item in of(objects, "Service") if wanted <= item["metadata"]["labels"].items()]
    selected = [pod for pod in everyone if service["spec"]["selector"].items() <= pod.metadata["labels"].items()]
    assert len(selected) == len(everyone) == 6
    (endpoint,) = monitor["spec"]["endpoints"]
    assert {port["name"]: port["port"] for port in service["spec"]["ports"]}[endpoint["port"]] == 9090
    assert all(pod.environ["PS_METRICS_PORT"] == "9090" for pod in everyone)
    assert service["metadata"]["labels"][monitor["spec"]["jobLabel"]] == RELEASE
    (policy,) = [item for item in of(objects, "NetworkPolicy") if item["metadata"]["name"].endswith("-tasks")]
    assert policy["spec"]["ingress"][0]["ports"] == [{"protocol": "TCP", "port": 9090}]
    (rules,) = of(objects, "PrometheusRule")
    path = CHART.parent / "prometheus" / "alarms.yaml"
    assert rules["spec"] == yaml.safe_load(path.read_text(encoding="utf-8"))


def test_checkpoints_at_a_url_need_no_volume() -> None:
    """And those that are there already need no new claim."""
    objects = rendered("helm/bucket")
    assert not of(objects, "PersistentVolumeClaim")
    servers = [pod for pod in pods(objects) if pod.container["command"] == ["psserver"]]
    assert all("--checkpoint-root=s3://bucket/run" in pod.container["args"] for pod in servers)
    assert all("checkpoints" not in {volume["name"] for volume in pod.spec["volumes"]} for pod in servers)
    assert all(pod.environ["AWS_REGION"] == "eu-central-1" for pod in pods(objects))
    kept = template({"checkpoints": {"existingClaim": "mine"}})
    assert not of(kept, "PersistentVolumeClaim")
    claims = [volume.get("persistentVolumeClaim", {}) for pod in pods(kept) for volume in pod.spec["volumes"]]
    assert {claim["claimName"] for claim in claims if claim} == {"mine"}


def test_what_is_installed_says_what_to_do_next(tmp_path: Path) -> None:
    """The notes name commands of ours, for as many tasks as there are, and the Secret that pods wait for."""
    command = [program(), "install", RELEASE, str(CHART), "--dry-run=client", "--set", "workers.count=3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if "cluster unreachable" in done.stderr:
        pytest.skip("Helm 3 asks a cluster before it shows the notes")
    assert done.returncode == 0, done.stderr
    notes = [line.strip() for line in done.stdout.partition("NOTES:")[2].splitlines()]
    (line,) = [line for line in notes if line.startswith("psctl certs")]
    _, _, _, *counts = shlex.split(line)
    made = CliRunner().invoke(psctl, ["certs", str(tmp_path), *counts])
    assert made.exit_code == 0, made.output
    assert len(list(tmp_path.glob("worker-*"))) == 3
    assert any(f"make-secret certs {RELEASE}-certificates" in line for line in notes)
    assert (CHART.parent / "kubernetes" / "make-secret").exists()
