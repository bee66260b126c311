"""psctl beside servers in this process: what they were told last, and what they ask of it: certificates, a token."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from psclient.psctl.health import why_not
from psserver.config import ServerConfig
from psserver.network.server import ServerThread
from pstesting.clock import Clock
from pswire.encoding.verbs import VERBS
from pswire.errors import VariableMismatch
from pswire.model.plan import VariableSpec
from pswire.model.tensor import TensorSpec
from pswire.security.identity import Security
from pswire.security.session_numbers import count_of
from tests.kit.certificates import guarded
from tests.kit.rig import WORKERS, Job, Servers, core, create, serving, sum_into, together


class Beside:
    """A job on two servers that listen, and psctl."""

    def __init__(self, stack: ExitStack, call: Callable[..., Any]) -> None:
        clock = Clock()
        cores = [core(number, clock=clock) for number in (0, 1)]
        self.job = Job(Servers(list(cores), cores, clock, "nowhere", False))
        self.threads = [stack.enter_context(ServerThread(one, ServerConfig(one.task), grace=0.0)) for one in cores]
        self._call = call
        self.addresses = ",".join(thread.address for thread in self.threads)

    def __call__(self, *args: str, address: str = "") -> tuple[Any, str]:
        done = self._call("events", *args, "--address", address or self.addresses)
        return done.code, done.out + done.err

    def json(self, *args: str) -> tuple[Any, Any]:
        code, text = self(*args, "--json")
        return code, json.loads(text)


@pytest.fixture
def run(call, bare):
    """Runs `psctl events` in an environment that says nothing."""
    with ExitStack() as stack:
        yield Beside(stack, call)


@pytest.fixture
def worker(run):
    """A worker that has made a round on server 1, and was refused a variable by server 0."""
    (worker,) = run.job.join(WORKERS[0])
    v = run.job.variable(worker, np.zeros(3), (1,), "dense/kernel")
    plan = run.job.approve(sum_into(v), worker)
    run.job.servers.clock.now += 100.0
    together(worker.push(plan, [np.ones(3)], server=1))
    run.job.servers.clock.now += 2.25
    spec = VariableSpec("dense/kernel", TensorSpec("float32", (4,)))
    with pytest.raises(VariableMismatch):
        create(run.job.verbs[0], worker.session, 0, spec, (0,))
    return worker


def cells(text: str) -> list[list[str]]:
    """The lines below the heading: how long ago, on which server, what, and what was said; or more of that."""
    return [re.split(r"\s{2,}", line.strip()) for line in text.splitlines()[2:]]


def test_what_was_told_last_is_shown(run, worker):
    """In the order in which it came to any server, the newest last, why it was refused below; to machines all of it."""
    code, text = run()
    assert code == 0
    *before, push, work, create, why, _ = cells(text)
    who = f"worker-0, session {count_of(worker.session)}"
    assert push == ["2.25 s", "ps-1", "push", f"{who}: round 0 of generation 1, 24 bytes"]
    assert work == ["2.25 s", "ps-1", "worked", "step (arrays)"]
    assert create == ["0.00 s", "ps-0", "create_batch", f"{who}: 1 variable"]
    assert why[0].startswith("VariableMismatch: ")
    assert {row[0] for row in before} == {"1.7 min"}
    assert {row[1] for row in before} == {"ps-0", "ps-1"}
    code, said = run.json()
    assert (code, said["problems"]) == (0, [])
    assert [(each["task"], each["address"]) for each in said["servers"]] == [
        ("/job:ps/task:0", run.threads[0].address),
        ("/job:ps/task:1", run.threads[1].address),
    ]
    first, second = (each["events"] for each in said["servers"])
    assert second[-1] == {"seconds": 2.25, "what": "worked", "said": "step (arrays)", "refused": ""}
    assert first[-1]["refused"].startswith("VariableMismatch: ")
    assert [each["events"] for each in run.json("--server", "1")[1]["servers"]] == [second]

    backwards = ",".join(thread.address for thread in reversed(run.threads))
    for address in (run.addresses, backwards):
        code, text = run("--server", "1", address=address)
        assert code == 0
        assert {row[1] for row in cells(text)} == {"ps-1"}
    said = "/job:ps/task:2 is not at any of the addresses; name all servers of the job in --address"
    assert run("--server", "2") == (2, f"psctl: error: {said}\n")


@pytest.mark.parametrize("columns", [80, 120])
def test_it_fits_a_terminal(run, worker, columns, monkeypatch):
    """What is long goes on below itself; only why a call was refused is red."""
    for name, value in (("COLUMNS", str(columns)), ("FORCE_COLOR", "1"), ("TERM", "xterm-256color")):
        monkeypatch.setenv(name, value)
    why = run.json()[1]["servers"][0]["events"][-1]["refused"]
    text = run()[1]
    red = re.findall(r"\x1b\[31m(.*?)\x1b\[0m", text)
    assert len(red) > 1
    assert " ".join(" ".join(red).split()) == why
    assert max(len(re.sub(r"\x1b\[\d*m", "", line).rstrip()) for line in text.splitlines()) <= columns


def test_what_does_not_answer_is_a_problem(run, worker):
    """One that knows no such verb is no server of this version; one line says so, and what to do."""
    run.threads[1].stop()
    code, text = run("--timeout", "0.5")
    assert (code, "ps-0" in text) == (1, True)
    assert text.splitlines()[-1].startswith("! ps-1: no answer at ")
    code, said = run.json("--timeout", "0.5")
    assert (code, said["servers"][1]["events"]) == (1, [])
    assert [(each["kind"], each["task"]) for each in said["problems"]] == [("unreachable", "/job:ps/task:1")]
    del run.threads[0]._server._service._methods[VERBS["Status"].path]
    assert "is not a parameter server of this version; correct the address" in run("--server", "0")[1]


def test_a_server_that_was_told_nothing_and_one_that_is_gone(call, bare):
    """Says so, which is no problem; for probes it serves, with exit code 0, until it is gone, without a token."""
    fresh = core()
    with ServerThread(fresh, ServerConfig(fresh.task), grace=0.0) as thread:
        address = thread.address
        assert call("events", "--address", address) == (0, "nothing yet\n", "")
        assert call("health", address) == (0, f"{address} serves\n", "")
        said = call("health", "--address", address, "--json")
        one = {"address": address, "serving": True, "why": ""}
        assert (said.code, said.json) == (0, {"serving": True, "servers": [one]})
        for wrong in ("127.0.0.1:99999", "127.0.0.1:", ":1", "127.0.0.1", f"127.0.0.1:+{thread.port}"):
            code, _, said = call("health", address, wrong)
            assert code == 2
            assert f"{wrong!r} is not an address" in said
    assert call("health", address) == (1, f"{address} does not serve: nothing listens there\n", "")


NO_JOB = "no job runs on these servers, so they cannot be moved"
NO_COPIES = "a server can move only if its variables have copies; start the job with PS_REPLICATION_FACTOR=2"
WRONG = {
    ("move", "ps:9"): "psctl: error: the job has 2 servers, so there is no /job:ps/task:9",
    ("move", "ps:0"): "no standby server can replace /job:ps/task:0; start one on another machine with",
    ("move", "ps:1"): NO_COPIES,
    ("rebalance",): NO_JOB,
    ("move", "worker:0"): "'worker:0' is neither a server nor the domain of a server; write ps:0",
    ("move", "/job:worker/task:0"): "/job:worker/task:0 is not a server; write ps:0",
    ("move", "ps:0", "--to", "nowhere"): "no standby server can replace /job:ps/task:0",
    ("drain", "ps:1"): "there is no standby server for",
    ("drain", "rack-9"): "'rack-9' is neither a server nor the domain of a server; write ps:0",
    ("move",): "Missing argument 'TASK'",
}


@pytest.mark.parametrize("args", WRONG, ids=" ".join)
def test_what_cannot_be_done_is_said(call, bare, tmp_path, args):
    """At once, with what to do."""
    with serving("grpc", 2, tmp_path) as servers:
        if WRONG[args] != NO_JOB:
            Job(servers, copies=() if WRONG[args] == NO_COPIES else (1, 0))
        done = call(*args, "--address", ",".join(server.address for server in servers.verbs))
    assert (done.code, WRONG[args] in done.err) == (2, True), done.err


@pytest.fixture
def server(certificates):
    """A server that asks for certificates and the token, and has a variable."""
    behind = core()
    job = Job(Servers([behind], [behind], Clock(), "nowhere", False))
    (worker,) = job.join(WORKERS[0])
    job.variable(worker, np.arange(3.0), name="w")
    with guarded(certificates.of("ps-0"), behind) as thread:
        yield thread


@pytest.fixture
def ask(call, bare):
    """Runs psctl in an environment that says nothing; returns its code and what it says as JSON."""

    def asked(*args: str) -> tuple[Any, Any]:
        done = call(*args, "--json")
        return done.code, done.json

    return asked


def flags(directory: Path | str) -> list[str]:
    files = {"--tls-cert": "tls.crt", "--tls-key": "tls.key", "--tls-ca": "ca.crt", "--token-file": "token"}
    return [word for flag, file in files.items() for word in (flag, f"{directory}/{file}")]


def test_admin_sees_all(ask, server, certificates):
    """In its path `{task}` becomes `admin`."""

    def asked(*args: str) -> Any:
        code, said = ask(*args, "--address", server.address, *flags(certificates.out / "{task}"))
        assert code == 0
        return said

    assert asked("status")["servers"][0]["state"] == "up"
    assert [each["name"] for each in asked("vars")["variables"]] == ["w"]
    assert asked("read", "w")["value"] == [0.0, 1.0, 2.0]
    assert "create_batch" in [each["what"] for each in asked("events")["servers"][0]["events"]]


def test_in_a_task_s_container_its_certificate_will_do(ask, server, certificates, monkeypatch):
    """TF_CONFIG says which task this is; without it only `admin` is psctl."""
    cluster = {"ps": [server.address], "worker": ["w:1"]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}}))
    assert ask("status", *flags(certificates.out / "worker-0"))[1]["servers"][0]["state"] == "up"
    monkeypatch.delenv("TF_CONFIG")
    code, said = ask("status", "--address", server.address, *flags(certificates.out / "worker-0"))
    assert code == 2
    assert "is worker-0's, not for" in said["error"]["message"]


def test_who_shows_nothing_is_told_what_is_missing(ask, server, certificates):
    """A certificate, or one of the right CA, or the token: each in words, and at once."""
    said = {
        "the server requires TLS, but this process has no certificate": [],
        "not signed by this process's CA": flags(certificates.other / "admin"),
        "requires the token of its job": flags(certificates.out / "admin")[:6],
    }
    for words, shown in said.items():
        code, found = ask("status", "--address", server.address, *shown)
        assert (code, found["servers"][0]["state"]) == (1, "refused")
        assert words in found["problems"][0]["message"]
        code, found = ask("events", "--address", server.address, *shown)
        assert (code, found["servers"][0]["events"], found["problems"][0]["kind"]) == (1, [], "refused")
        assert words in found["problems"][0]["message"]


def test_a_health_check_shows_what_the_environment_names(call, bare, server, certificates, monkeypatch, tmp_path):
    """psctl's certificate, or that of the task which `TF_CONFIG` says this is; where it is another's it says so. One of
    the CA is enough, whatever task the server is, and without the token: a probe knows neither."""
    assert why_not(server.address, certificates.of("ps-1"), 5.0) == ""
    assert "not signed by this process's CA" in why_not(server.address, certificates.of_other("ps-0"), 5.0)
    assert "requires TLS" in why_not(server.address, Security(), 5.0)
    with guarded(Security()) as plain:
        assert "does not use TLS" in why_not(plain.address, certificates.of("admin"), 5.0)

    def checked(where: Path) -> tuple[Any, str]:
        files = {"PS_TLS_CERT": "tls.crt", "PS_TLS_KEY": "tls.key", "PS_TLS_CA": "ca.crt"}
        for name, file in files.items():
            monkeypatch.setenv(name, f"{where}/{file}")
        done = call("health", server.address, server.address)
        return done.code, done.out or done.err

    serves = 0, f"{server.address} serves\n" * 2
    assert checked(certificates.out / "admin") == checked(certificates.out / "{task}") == serves
    for tf_config in ("{", json.dumps({"task": {"type": "worker", "index": 0}}), json.dumps({"task": 3})):
        monkeypatch.setenv("TF_CONFIG", tf_config)
        code, said = checked(certificates.out / "ps-1")
        assert code == 2
        assert "tls.crt is ps-1's, not for" in said
    monkeypatch.setenv("TF_CONFIG", json.dumps({"task": {"type": "ps", "index": 1}}))
    assert checked(certificates.out / "ps-1") == serves
    shutil.copytree(certificates.out / "ps-1", tmp_path / "ps-1")  # all that there is in the task's container
    assert checked(tmp_path / "{task}") == serves
    (tmp_path / "ps-1" / "tls.key").unlink()
    assert checked(tmp_path / "ps-1")[0] == 2


def test_the_doctor_shakes_hands(ask, server, certificates, tmp_path):
    """With each server, with our certificate, of which it says that its end is near."""
    ends = shutil.copytree(certificates.out / "admin", tmp_path / "ends")
    made = certificates.signed(["admin.paramserver"], -1, 10)
    (ends / "tls.crt").write_bytes(made.certificate)
    (ends / "tls.key").write_bytes(made.key)
    for folder, level in ((certificates.out / "admin", "ok"), (ends, "warn")):
        found = ask("doctor", "--address", server.address, *flags(folder))[1]["findings"]
        tls = {each["message"].partition(",")[0]: each["level"] for each in found if each["check"] == "TLS"}
        assert tls == {"our certificate is for admin": level, "ps-0: it has a valid certificate": "ok"}
    code, said = ask("doctor", "--address", server.address, *flags(certificates.other / "admin"))
    assert code == 1
    failed = [each["message"] for each in said["findings"] if each["level"] == "fail"]
    assert any("not signed by this process's CA" in message for message in failed)
