"""psctl doctor: each check finds what it is for, says what to do, and is content where all is well."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from psclient._src.arrays.devices import GpuReport
from psclient._src.processes.local_clusters import register
from psclient._src.telemetry.observer import Servers
from psclient.psctl.certificate_authority import Authority
from psclient.psctl.doctor import CHECKS, examine
from psclient.psctl.findings import Finding, LocalHost, Patient
from psclient.psctl.host_checks import here
from psclient.psctl.settings import ObservedCluster
from pswire.cluster import Task
from pswire.security.identity import Security, SecurityOptions
from pswire.telemetry.views.looked import Looked
from tests.kit.rig import WORKERS, Job, serving

WELL = LocalHost(
    shared="/dev/shm",
    shared_free=1 << 30,
    shared_writable=True,
    segments="",
    open_files=65536,
    memory=8 << 30,
    memory_limit=0,
    gpus=GpuReport(),
    nvidia=False,
    versions={"paramserver": "0.1.0", "python": "3.11.7", "numpy": "2.1.0"},
)
"""A machine on which nothing is wrong."""


def patient(host: LocalHost = WELL, looked: Sequence[Looked] = (), text: str = "", **said: Any) -> Patient:
    """Somebody with nothing wrong but what a test says."""
    addresses = {found.task: found.address for found in looked}
    given = {"security": SecurityOptions(), "name": "admin", "seconds": 2.0} | said
    return Patient(text, ObservedCluster(addresses) if looked else None, looked, host=host, **given)


def found(check: str, who: Patient) -> list[Finding]:
    return examine(who, {check: CHECKS[check]})[check]


def worst(check: str, who: Patient) -> tuple[str, str]:
    """The worst level of a check, and what it says there."""
    findings = found(check, who)
    level = next(level for level in ("fail", "warn", "ok") if any(each.level == level for each in findings))
    return level, "\n".join(f"{each.message} {each.advice}" for each in findings if each.level == level)


def finds(check: str, who: Patient, level: str, *said: str) -> None:
    """The worst that a check finds is of this level, and has these words."""
    found_level, text = worst(check, who)
    assert found_level == level, text
    for words in said:
        assert words in text


def tf_config(ps: Sequence[str], task: str = "worker", index: int = 0) -> str:
    cluster = {"ps": list(ps), "worker": ["w:1"]}
    return json.dumps({"cluster": cluster, "task": {"type": task, "index": index}})


CUPY = GpuReport("13.3.0", "12.4", "12.2", ("NVIDIA H100",))

HOSTS = [
    ("shared memory", {"segments": "Operation not permitted"}, "fail", "allow memfd_create, or use --transport tcp"),
    ("shared memory", {"shared_free": -1}, "warn", "/dev/shm does not exist"),
    ("shared memory", {"shared_writable": False}, "warn", "/dev/shm is not writable"),
    ("shared memory", {"shared_free": 100}, "warn", "/dev/shm is full"),
    ("shared memory", {"memory_limit": 512 << 20}, "warn", "this container can use 512 MiB"),
    ("shared memory", {}, "ok", "/dev/shm is writable, 1.0 GiB free"),
    ("GPU", {"gpus": CUPY, "nvidia": True}, "ok", "CuPy 13.3.0, CUDA 12.4, driver 12.2: NVIDIA H100"),
    ("GPU", {"gpus": GpuReport("13.3.0", error="too old"), "nvidia": True}, "fail", "too old check nvidia-smi"),
    ("GPU", {"gpus": GpuReport("13.3.0", error="no driver")}, "warn", "there is no GPU: no driver"),
    ("GPU", {"nvidia": True}, "warn", "pip install -e '.[gpu]' in the clone"),
    ("GPU", {"gpus": GpuReport(error="CuPy cannot be imported: no x")}, "fail", "CuPy cannot be imported: no x"),
    ("GPU", {}, "ok", "servers use NumPy"),
    ("open files", {"open_files": 100}, "fail", "raise the limit: ulimit -n"),
    ("open files", {"open_files": 1024}, "warn", "which is too few for a server with many workers"),
    ("open files", {}, "ok", "65536 files"),
    ("memory", {"memory": 100 << 20}, "fail", "100 MiB are free end other processes"),
    ("memory", {"memory_limit": 200 << 20}, "fail", "this container can use 200 MiB"),
    ("memory", {"memory": 700 << 20}, "warn", "700 MiB are free"),
    ("memory", {"memory": 0}, "ok", "is not known"),
    ("memory", {}, "ok", "8.0 GiB are free"),
]


def test_this_machine_is_read():
    host = here()
    assert host.open_files > 0
    assert host.memory > 1 << 20
    assert host.shared_free >= 0
    assert host.segments == ""
    assert host.versions["numpy"] == np.__version__


TEXTS = [
    ("", "warn", "a script starts its own server"),
    ("{", "fail", "TF_CONFIG is not JSON"),
    ("{}", "warn", "it has no cluster"),
    (tf_config(["h:1"], "worker", 7), "fail", "the cluster has no /job:worker/task:7"),
    (tf_config(["h:1", "h:1"]), "fail", "/job:ps/task:0 and /job:ps/task:1 have one address, h:1"),
    (tf_config(["h"]), "fail", "'h' is not an address"),
    (tf_config(["h:0"]), "fail", "/job:ps/task:0 has port 0"),
    (tf_config(["127.0.0.1:1", "h:1"]), "warn", "/job:ps/task:0 has a loopback address, but other servers have not"),
    (tf_config(["h:1", "i:1"], "ps", 1), "ok", "this process is /job:ps/task:1, of a cluster of 2 ps, 1 worker"),
]


@pytest.mark.parametrize(
    ("check", "wrong", "level", "said"), [*HOSTS, *(("TF_CONFIG", *row) for row in TEXTS)], ids=str
)
def test_a_machine_and_its_tf_config_are_examined(check, wrong, level, said):
    """What is wrong with them is said with what to do; also what is no cluster at all."""
    finds(check, patient(text=wrong) if check == "TF_CONFIG" else patient(replace(WELL, **wrong)), level, said)


@pytest.fixture
def looked(tmp_path):
    """What two servers of a job say."""
    with serving("grpc", 2, tmp_path) as servers:
        job = Job(servers)
        job.join(WORKERS[0])
        addresses = {Task("ps", index): server.address for index, server in enumerate(servers.verbs)}
        with Servers(addresses, 2.0, Security()) as connections:
            yield connections.look()


def changed(looked: Sequence[Looked], **status: Any) -> list[Looked]:
    """The same, with another status of the first server."""
    first, *others = looked
    return [replace(first, status=replace(first.status, **status)), *others]


def told(looked: Sequence[Looked], **process: Any) -> list[Looked]:
    """The same, with another process of the first server."""
    return changed(looked, process=replace(looked[0].status.process, **process))


def test_servers_that_are_well(looked):
    who = patient(replace(WELL, versions=dict(looked[0].status.process.versions)), looked)
    for check in ("TF_CONFIG", "names", "ports", "TLS", "servers", "clock", "versions"):
        assert worst(check, who)[0] == "ok", found(check, who)
    for transport in ("tcp", "shm"):
        assert sum(f"({transport} transport)" in each.message for each in found("ports", who)) == 2


def closed_port() -> int:
    """A port at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_servers_that_cannot_be_reached(looked):
    """Names that nobody knows, ports that are closed (that of the tcp transport is missed, and not needed), and
    silence."""
    lost = replace(looked[1], address="no-such-host.invalid:2222")
    unknown = "ps-1: the name 'no-such-host.invalid' cannot be resolved"
    finds("names", patient(looked=[looked[0], lost]), "fail", unknown)
    address = f"127.0.0.1:{closed_port()}"
    closed = patient(looked=[replace(looked[0], address=address)])
    finds("ports", closed, "fail", f"ps-0: nothing listens at {address} start it")
    finds("ports", patient(looked=told(looked, data_port=closed_port())), "warn", "go over gRPC open that port")
    with Servers({Task("ps", 0): address}, 0.2, Security()) as connections:
        finds("servers", patient(looked=connections.look()), "fail", f"ps-0: no answer at {address}")


def test_servers_that_say_what_is_wrong(looked):
    """That they are broken, or miss somebody; that their clock, by more than a second less what the network may have
    taken, or any version of this package, or the first number of another's, is another one."""
    finds("servers", patient(looked=changed(looked, broken="round 3 failed")), "fail", "ps-0: round 3 failed")
    gone = tuple(replace(session, state="lost") for session in looked[0].status.sessions)
    finds("servers", patient(looked=changed(looked, sessions=gone)), "warn", "worker-0: it sent no heartbeat")
    skews = ((30.0, 0.0, "warn", "30 s ahead of"), (-90.0, 0.0, "warn", "1.5 min behind"), (0.5, 0.0, "ok"))
    for skew, took, *said in (*skews, (3.0, 6.0, "ok")):
        finds("clock", patient(looked=[replace(each, skew=skew, took=took) for each in looked]), *said)
    who = patient(looked=told(looked[:1], versions={"paramserver": "0.2.0", "numpy": "1.26.0", "python": "3.12.1"}))
    ours = "ps-0: it has paramserver 0.2.0, but this machine has 0.1.0"
    finds("versions", who, "warn", ours, "ps-0: it has numpy 1.26.0, but this machine has 2.1.0")
    assert "python" not in worst("versions", who)[1]


@pytest.fixture
def certificates(tmp_path):
    """Certificates of `admin`, `ps-0` and `worker-0`."""
    authority = Authority(tmp_path / "certs", 365)
    for name in ("admin", "ps-0", "worker-0"):
        authority.issue(name, False)
    return tmp_path / "certs"


def options(directory: Path) -> SecurityOptions:
    return SecurityOptions(*(str(directory / file) for file in ("tls.crt", "tls.key", "ca.crt")))


def test_certificates_are_examined(certificates, looked, tmp_path):
    """Whose they are and until when; what is wrong with them as any process would say it at its start. Those who speak
    TLS to a server that does not are told so; elsewhere than at home nobody should do without."""
    admin = patient(security=options(certificates / "admin"))
    finds("TLS", admin, "ok", "our certificate is for admin, and valid until")
    spoken = patient(looked=looked, security=options(certificates / "admin"))
    finds("TLS", spoken, "fail", "ps-0: the server does not use TLS")
    finds("TLS", patient(looked=[replace(looked[0], address="192.0.2.1:1")]), "warn", "certificates with psctl certs")
    Authority(tmp_path / "certs", 7).issue("admin", True)
    finds("TLS", admin, "warn", "run psctl certs OUT --renew")
    finds("TLS", patient(security=options(certificates / "nowhere")), "fail", "cannot be read")
    finds("TLS", patient(security=options(certificates / "worker-0")), "fail", "is worker-0's")
    (certificates / "admin" / "tls.key").write_text("nonsense")
    finds("TLS", admin, "fail", "does not contain a PEM private key")


def test_what_fails_is_in_the_exit_code(call, monkeypatch):
    """1 where anything fails, in words and in JSON; nothing that is wrong keeps it from looking at the rest. Each check
    has a case above in which it is not content."""
    bad = {check for check, _, level, _ in HOSTS if level != "ok"}
    assert bad | {"TF_CONFIG", "names", "ports", "TLS", "servers", "clock", "versions"} == set(CHECKS)
    monkeypatch.delenv("PS_TOKEN", raising=False)
    for text, code in (("{", 1), ("", 0)):
        monkeypatch.setenv("TF_CONFIG", text)
        told, shown = call("doctor", "--json"), call("doctor")
        assert (told.code, told.json["ok"], shown.code) == (code, not code, code)
        assert {each["check"] for each in told.json["findings"]} >= {"TF_CONFIG", "GPU", "memory", "open files"}
        assert f"{code} fail" in shown.out


@pytest.mark.parametrize("text", ["", "{", tf_config(["h:0"], "worker", 0), tf_config(["elsewhere:1"], "boss")])
def test_a_cluster_of_this_machine_is_examined(certificates, tmp_path, call, monkeypatch, text):
    """`--local`: its addresses, and not what TF_CONFIG says; nor is the task that TF_CONFIG names anybody in it."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    (tmp_path / "runtime").mkdir()
    monkeypatch.setenv("TF_CONFIG", text)
    (certificates / "admin" / "tls.crt").unlink()  # a task's own certificate would be taken in its place
    address = f"127.0.0.1:{closed_port()}"
    cluster = {"ps": [address, address], "worker": ["w:0"], "chief": ["c:0"]}
    register("dir/train.py", [address], cluster, options(certificates / "{task}").variables())
    findings = call("--local", "doctor", "--timeout", "0.2", "--json").json["findings"]
    said = [(each["check"], each["level"], each["message"]) for each in findings]
    named = f"it is not used; --local names train-{os.getpid()}, a cluster of 1 chief, 2 ps, 1 worker"
    same = f"/job:ps/task:0 and /job:ps/task:1 have one address, {address}"
    assert [each[1:] for each in said if each[0] == "TF_CONFIG"] == [("ok", named), ("fail", same)]
    ((_, level, message), *_) = [each for each in said if each[0] == "TLS"]
    assert (level, "admin/tls.crt cannot be read" in message) == ("fail", True)
