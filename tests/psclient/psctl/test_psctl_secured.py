"""psctl beside servers that ask for certificates and a token: who it is, and what it is told."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from psclient import psctl
from psclient.psctl.health import why_not
from psserver.transport.server import ServerThread
from pstesting.clock import Clock
from pswire.security.identity import Security
from tests.kit.certificates import guarded
from tests.kit.rig import WORKERS, Job, Servers, core


@pytest.fixture
def server(certificates) -> Iterator[ServerThread]:
    """A server that asks for certificates and the token."""
    with guarded(certificates.of("ps-0")) as thread:
        yield thread


@pytest.fixture
def run(capsys, monkeypatch):
    """Runs psctl in an environment that says nothing."""
    for name in ("TF_CONFIG", "PS_TOKEN", "PS_TOKEN_FILE", "PS_TLS_CERT", "PS_TLS_KEY", "PS_TLS_CA"):
        monkeypatch.delenv(name, raising=False)

    def ran(*args: str) -> tuple[Any, Any]:
        with pytest.raises(SystemExit) as ended:
            psctl.main([*args, "--json"])
        return ended.value.code, json.loads(capsys.readouterr().out)

    return ran


def flags(directory: Path | str) -> list[str]:
    files = {"--tls-cert": "tls.crt", "--tls-key": "tls.key", "--tls-ca": "ca.crt", "--token-file": "token"}
    return [word for flag, file in files.items() for word in (flag, f"{directory}/{file}")]


def test_admin_sees_all(run, server, certificates):
    """In its path `{task}` becomes `admin`."""
    code, said = run("status", "--address", server.address, *flags(certificates.out / "{task}"))
    assert (code, said["servers"][0]["state"]) == (1, "up")
    assert [each["kind"] for each in said["problems"]] == ["no_chief"]
    assert run("vars", "--address", server.address, *flags(certificates.out / "{task}"))[1]["variables"] == []
    code, said = run("recent", "--address", server.address, *flags(certificates.out / "{task}"))
    assert (code, [each["what"] for each in said["servers"][0]["recent"]]) == (0, [])


def test_in_a_task_s_container_its_certificate_will_do(run, server, certificates, monkeypatch):
    """TF_CONFIG says which task this is; without it only `admin` is psctl."""
    cluster = {"ps": [server.address], "worker": ["w:1"]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}}))
    assert run("status", *flags(certificates.out / "worker-0"))[1]["servers"][0]["state"] == "up"
    monkeypatch.delenv("TF_CONFIG")
    code, said = run("status", "--address", server.address, *flags(certificates.out / "worker-0"))
    assert code == 2
    assert "is worker-0's, and not of" in said["error"]["message"]


def test_who_shows_nothing_is_told_what_is_missing(run, server, certificates):
    """A certificate, or one of the right CA, or the token: each in words, and at once."""
    said = {
        "the server expects TLS, and this process has no certificate": [],
        "not signed by our CA": flags(certificates.other / "admin"),
        "asks for the token of its job": flags(certificates.out / "admin")[:6],
    }
    for words, shown in said.items():
        code, found = run("status", "--address", server.address, *shown)
        assert (code, found["servers"][0]["state"]) == (1, "refused")
        assert words in found["problems"][0]["message"]
        code, found = run("recent", "--address", server.address, *shown)
        assert (code, found["servers"][0]["recent"], found["problems"][0]["kind"]) == (1, [], "refused")
        assert words in found["problems"][0]["message"]


def test_health_needs_a_certificate_of_the_ca_alone(run, server, certificates):
    """Whatever task the server is, and without the token: a probe knows neither."""
    assert run("health", server.address, *flags(certificates.out / "ps-1")[:6])[0] == 2  # psctl is not ps-1
    assert run("health", server.address, *flags(certificates.out / "admin")[:6])[0] == 0
    assert why_not(server.address, certificates.of("ps-1"), 5.0) == ""
    assert "not signed by our CA" in why_not(server.address, certificates.of_other("ps-0"), 5.0)
    assert "expects TLS" in why_not(server.address, Security(), 5.0)
    with guarded(Security()) as plain:
        assert "speaks without TLS" in why_not(plain.address, certificates.of("admin"), 5.0)


def test_the_doctor_shakes_hands(run, server, certificates, tmp_path):
    """With each server, with our certificate, of which it says that its end is near."""
    ends = shutil.copytree(certificates.out / "admin", tmp_path / "ends")
    made = certificates.signed(["admin.paramserver"], -1, 10)
    (ends / "tls.crt").write_bytes(made.certificate)
    (ends / "tls.key").write_bytes(made.key)
    for folder, level in ((certificates.out / "admin", "ok"), (ends, "warn")):
        found = run("doctor", "--address", server.address, *flags(folder))[1]["findings"]
        tls = {each["message"].partition(",")[0]: each["level"] for each in found if each["check"] == "TLS"}
        assert tls == {"our certificate is admin's": level, "ps-0: it shows its certificate": "ok"}
    code, said = run("doctor", "--address", server.address, *flags(certificates.other / "admin"))
    assert code == 1
    assert any("not signed by our CA" in each["message"] for each in said["findings"] if each["level"] == "fail")


def test_values_are_read_with_a_certificate(run, certificates):
    """Reading is looking."""
    behind = core()
    job = Job(Servers([behind], [behind], Clock(), "nowhere", False))
    (worker,) = job.join(WORKERS[0])
    job.variable(worker, np.arange(3.0), name="w")
    with guarded(certificates.of("ps-0"), behind) as thread:
        code, said = run("read", "w", "--address", thread.address, *flags(certificates.out / "admin"))
        assert (code, said["value"]) == (0, [0.0, 1.0, 2.0])
