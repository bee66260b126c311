"""psctl doctor: each check finds what it is for, says what to do, and is content where all is well."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from psclient import psctl
from psclient._src.devices import GpuReport
from psclient._src.processes.local_clusters import register
from psclient._src.telemetry.observer import Servers
from psclient.psctl.certificate_authority import Authority
from psclient.psctl.doctor import CHECKS, examine
from psclient.psctl.findings import Finding, Host, Patient
from psclient.psctl.host_checks import here
from psclient.psctl.settings import ObservedCluster
from pswire.cluster import Task
from pswire.security.identity import Security, SecurityOptions
from pswire.telemetry.views.looked import Looked
from tests.kit.rig import WORKERS, Job, serving

WELL = Host(
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


def patient(host: Host = WELL, looked: Sequence[Looked] = (), text: str = "", **said: Any) -> Patient:
    """Somebody with nothing wrong but what a test says."""
    addresses = {found.task: found.address for found in looked}
    given = {"security": SecurityOptions(), "name": "admin", "seconds": 2.0} | said
    return Patient(text, ObservedCluster(addresses) if looked else None, looked, host=host, **given)


def found(check: str, who: Patient) -> list[Finding]:
    """What one check finds."""
    (row,) = [row for row in CHECKS if row.name == check]
    return examine(who, [row])[check]


def worst(check: str, who: Patient) -> tuple[str, str]:
    """The worst level of a check, and what it says there."""
    findings = found(check, who)
    level = next(level for level in ("fail", "warn", "ok") if any(each.level == level for each in findings))
    return level, "\n".join(f"{each.message} {each.advice}" for each in findings if each.level == level)


def tf_config(ps: Sequence[str], task: str = "worker", index: int = 0) -> str:
    cluster = {"ps": list(ps), "worker": ["w:1"]}
    return json.dumps({"cluster": cluster, "task": {"type": task, "index": index}})


# ---- This machine ----

CUPY = GpuReport("13.3.0", "12.4", "12.2", ("NVIDIA H100",))

HOSTS = [
    ("shared memory", {"segments": "Operation not permitted"}, "fail", "allow memfd_create, or use --lane tcp"),
    ("shared memory", {"shared_free": -1}, "warn", "/dev/shm is not there"),
    ("shared memory", {"shared_writable": False}, "warn", "/dev/shm may not be written"),
    ("shared memory", {"shared_free": 100}, "warn", "/dev/shm is full"),
    ("shared memory", {"memory_limit": 512 << 20}, "warn", "this container may use 512 MiB"),
    ("shared memory", {}, "ok", "/dev/shm may be written, 1.0 GiB free"),
    ("GPU", {"gpus": CUPY, "nvidia": True}, "ok", "CuPy 13.3.0, CUDA 12.4, driver 12.2: NVIDIA H100"),
    ("GPU", {"gpus": GpuReport("13.3.0", error="too old"), "nvidia": True}, "fail", "too old look at nvidia-smi"),
    ("GPU", {"gpus": GpuReport("13.3.0", error="no driver")}, "warn", "there is no GPU: no driver"),
    ("GPU", {"nvidia": True}, "warn", "install paramserver[gpu]"),
    ("GPU", {"gpus": GpuReport(error="CuPy cannot be imported: no x")}, "fail", "CuPy cannot be imported: no x"),
    ("GPU", {}, "ok", "arrays are NumPy's"),
    ("open files", {"open_files": 100}, "fail", "raise the limit: ulimit -n"),
    ("open files", {"open_files": 1024}, "warn", "too few for a server of many workers"),
    ("open files", {}, "ok", "65536 files"),
    ("memory", {"memory": 100 << 20}, "fail", "100 MiB are free end other processes"),
    ("memory", {"memory_limit": 200 << 20}, "fail", "this container may use 200 MiB"),
    ("memory", {"memory": 700 << 20}, "warn", "700 MiB are free"),
    ("memory", {"memory": 0}, "ok", "does not tell"),
    ("memory", {}, "ok", "8.0 GiB are free"),
]


@pytest.mark.parametrize(("check", "wrong", "level", "said"), HOSTS)
def test_a_machine_is_examined(check, wrong, level, said):
    """What is wrong with it is said with what to do."""
    worst_level, text = worst(check, patient(dataclasses.replace(WELL, **wrong)))
    assert worst_level == level
    assert said in text


def test_this_machine_is_read():
    """What the checks are given is what there is."""
    host = here()
    assert host.open_files > 0
    assert host.memory > 1 << 20
    assert host.shared_free >= 0
    assert host.segments == ""
    assert host.versions["numpy"] == np.__version__


# ---- TF_CONFIG ----

TEXTS = [
    ("", "warn", "a script starts a server of its own"),
    ("{", "fail", "TF_CONFIG is not JSON"),
    ("{}", "warn", "it names no cluster"),
    (tf_config([]), "fail", "has no 'ps' task"),
    (tf_config(["h:1"], "worker", 7), "fail", "the cluster has no /job:worker/task:7"),
    (tf_config(["h:1"], "boss"), "fail", "unknown task type 'boss'"),
    (tf_config(["h:1", "h:1"]), "fail", "/job:ps/task:0 and /job:ps/task:1 have one address, h:1"),
    (tf_config(["h"]), "fail", "'h' is no address"),
    (tf_config(["h:0"]), "fail", "/job:ps/task:0 has port 0"),
    (tf_config(["127.0.0.1:1", "h:1"]), "warn", "/job:ps/task:0 is at a loopback address, and others are not"),
    (tf_config(["h:1", "i:1"], "ps", 1), "ok", "this process is /job:ps/task:1, of a cluster of 2 ps, 1 worker"),
]


@pytest.mark.parametrize(("text", "level", "said"), TEXTS)
def test_tf_config_is_examined(text, level, said):
    """Also what is no cluster at all."""
    worst_level, words = worst("TF_CONFIG", patient(text=text))
    assert worst_level == level
    assert said in words


# ---- Servers ----


@pytest.fixture
def looked(tmp_path: Path) -> Iterator[list[Looked]]:
    """What two servers of a job say."""
    with serving("grpc", 2, tmp_path) as servers:
        job = Job(servers)
        job.join(WORKERS[0])
        addresses = {Task("ps", index): server.address for index, server in enumerate(servers.verbs)}  # type: ignore[attr-defined]
        with Servers(addresses, 2.0, Security()) as connections:
            yield connections.look()


def changed(looked: Sequence[Looked], **status: Any) -> list[Looked]:
    """The same, with another status of the first server."""
    first, *others = looked
    assert first.status
    return [dataclasses.replace(first, status=dataclasses.replace(first.status, **status)), *others]


def told(looked: Sequence[Looked], **process: Any) -> list[Looked]:
    """The same, with another process of the first server."""
    status = looked[0].status
    assert status
    assert status.process
    return changed(looked, process=dataclasses.replace(status.process, **process))


def test_servers_that_are_well(looked):
    """Nothing of what concerns them is worse than ok."""
    who = patient(dataclasses.replace(WELL, versions=dict(looked[0].status.process.versions)), looked)
    for check in ("TF_CONFIG", "names", "ports", "TLS", "servers", "clock", "versions"):
        assert worst(check, who)[0] == "ok", found(check, who)
    for lane in ("tcp", "shm"):
        assert sum(f"({lane} lane)" in each.message for each in found("ports", who)) == 2


def test_names_that_nobody_knows(looked):
    """Each is named, with the server whose it is."""
    lost = dataclasses.replace(looked[1], address="no-such-host.invalid:2222")
    level, said = worst("names", patient(looked=[looked[0], lost]))
    assert level == "fail"
    assert "ps-1: the name 'no-such-host.invalid' is not known here" in said


def closed_port() -> int:
    """A port at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_ports_that_are_closed(looked):
    """That of gRPC fails; that of the tcp lane is missed, and not needed."""
    address = f"127.0.0.1:{closed_port()}"
    level, said = worst("ports", patient(looked=[dataclasses.replace(looked[0], address=address)]))
    assert level == "fail"
    assert f"ps-0: nothing listens at {address} start it" in said
    level, said = worst("ports", patient(looked=told(looked, data_port=closed_port())))
    assert level == "warn"
    assert "so rounds go over gRPC open that port" in said


def test_servers_that_do_not_answer(looked):
    """As `status` says it."""
    address = f"127.0.0.1:{closed_port()}"
    with Servers({Task("ps", 0): address}, 0.2, Security()) as connections:
        silent = connections.look()
    level, said = worst("servers", patient(looked=silent))
    assert level == "fail"
    assert f"ps-0: no answer at {address}" in said
    level, said = worst("servers", patient(looked=changed(looked, broken="round 3 failed halfway")))
    assert (level, "ps-0: round 3 failed halfway" in said) == ("fail", True)
    gone = [dataclasses.replace(s, state="lost") for s in looked[0].status.sessions]
    level, said = worst("servers", patient(looked=changed(looked, sessions=tuple(gone))))
    assert (level, "worker-0: no sign of life" in said) == ("warn", True)


@pytest.mark.parametrize(
    ("skew", "level", "said"), [(30.0, "warn", "30 s ahead of"), (-90.0, "warn", "1.5 min behind"), (0.5, "ok", "")]
)
def test_clocks_that_differ(looked, skew, level, said):
    """By more than a second, less what the network may have taken."""
    off = [dataclasses.replace(each, skew=skew) for each in looked]
    worst_level, text = worst("clock", patient(looked=off))
    assert worst_level == level
    assert said in text
    slow = [dataclasses.replace(each, skew=3.0, took=6.0) for each in looked]
    assert worst("clock", patient(looked=slow))[0] == "ok"


def test_versions_that_differ(looked):
    """Of this package every difference is told, of others that of the first number; of programs it is fatal."""
    theirs = {"paramserver": "0.2.0", "numpy": "1.26.0", "python": "3.12.1"}
    level, said = worst("versions", patient(looked=told(looked[:1], versions=theirs)))
    assert level == "warn"
    assert "ps-0: it has paramserver 0.2.0, and we have 0.1.0" in said
    assert "ps-0: it has numpy 1.26.0, and we have 2.1.0" in said
    assert "python" not in said
    level, said = worst("versions", patient(looked=changed(looked, program_version=99)))
    assert (level, "update programs of version 99" in said) == ("fail", True)


# ---- TLS ----


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    """Certificates of `admin`, `ps-0` and `worker-0`."""
    authority = Authority(tmp_path / "certs", 365)
    for name in ("admin", "ps-0", "worker-0"):
        authority.issue(name, False)
    return tmp_path / "certs"


def options(directory: Path) -> SecurityOptions:
    paths = [str(directory / file) for file in ("tls.crt", "tls.key", "ca.crt")]
    return SecurityOptions(*paths)


def test_certificates_are_examined(certificates, tmp_path, looked):
    """Whose they are and until when; what is wrong with them as any process would say it at its start."""
    level, said = worst("TLS", patient(security=options(certificates / "admin")))
    assert level == "ok"
    assert "our certificate is admin's, good until" in said
    soon = Authority(tmp_path / "certs", 7)
    soon.issue("admin", True)
    level, said = worst("TLS", patient(security=options(certificates / "admin")))
    assert (level, "--renew makes new ones" in said) == ("warn", True)
    level, said = worst("TLS", patient(security=options(certificates / "nowhere")))
    assert (level, "cannot be read" in said) == ("fail", True)
    level, said = worst("TLS", patient(security=options(certificates / "worker-0")))
    assert (level, "is worker-0's" in said) == ("fail", True)
    (certificates / "admin" / "tls.key").write_text("nonsense")
    assert "has no private key" in worst("TLS", patient(security=options(certificates / "admin")))[1]


def test_servers_without_tls_are_found_out(certificates, looked):
    """Those who speak TLS to a server that does not are told so; elsewhere than at home nobody should do without."""
    level, said = worst("TLS", patient(looked=looked, security=options(certificates / "admin")))
    assert level == "fail"
    assert "ps-0: it speaks without TLS" in said
    far = [dataclasses.replace(looked[0], address="192.0.2.1:1")]
    level, said = worst("TLS", patient(looked=far))
    assert (level, "make certificates with psctl certs" in said) == ("warn", True)


# ---- The command ----


def test_every_check_can_find_something():
    """Each row of the table has a case above in which it is not content."""
    bad = {check for check, _, level, _ in HOSTS if level != "ok"}
    assert bad | {"TF_CONFIG", "names", "ports", "TLS", "servers", "clock", "versions"} == {row.name for row in CHECKS}


def test_what_fails_is_in_the_exit_code(capsys, monkeypatch):
    """1 where anything fails, in words and in JSON; nothing that is wrong keeps it from looking at the rest."""
    monkeypatch.delenv("PS_TOKEN", raising=False)
    for text, code in (("{", 1), ("", 0)):
        monkeypatch.setenv("TF_CONFIG", text)
        with pytest.raises(SystemExit) as ended:
            psctl.main(["doctor", "--json"])
        said = json.loads(capsys.readouterr().out)
        assert (ended.value.code, said["ok"]) == (code, not code)
        assert {each["check"] for each in said["findings"]} >= {"TF_CONFIG", "GPU", "memory", "open files"}
        with pytest.raises(SystemExit) as ended:
            psctl.main(["doctor"])
        assert ended.value.code == code
        assert f"{code} fail" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "{", tf_config(["h:0"], "worker", 0), tf_config(["elsewhere:1"], "boss")])
def test_a_cluster_of_this_machine_is_examined(certificates, tmp_path, capsys, monkeypatch, text):
    """`--local`: its addresses, and not what TF_CONFIG says; nor is the task that TF_CONFIG names anybody in it."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    (tmp_path / "runtime").mkdir()
    monkeypatch.setenv("TF_CONFIG", text)
    (certificates / "admin" / "tls.crt").unlink()  # a task's own certificate would be taken in its place
    address = f"127.0.0.1:{closed_port()}"
    cluster = {"ps": [address, address], "worker": ["w:0"], "chief": ["c:0"]}
    register("dir/train.py", [address], cluster, options(certificates / "{task}").variables())
    with pytest.raises(SystemExit):
        psctl.main(["--local", "doctor", "--timeout", "0.2", "--json"])
    said = [(each["check"], each["level"], each["message"]) for each in json.loads(capsys.readouterr().out)["findings"]]
    named = f"it is not read; --local names train-{os.getpid()}, a cluster of 1 chief, 2 ps, 1 worker"
    same = f"/job:ps/task:0 and /job:ps/task:1 have one address, {address}"
    assert [each for each in said if each[0] == "TF_CONFIG"] == [
        ("TF_CONFIG", "ok", named),
        ("TF_CONFIG", "fail", same),
    ]
    ((_, level, message), *_) = [each for each in said if each[0] == "TLS"]
    assert (level, "admin/tls.crt cannot be read" in message) == ("fail", True)
