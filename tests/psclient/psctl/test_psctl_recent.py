"""`psctl recent` beside real servers: what they were told last, for people and for machines."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from psclient import psctl
from psserver.config import ServerConfig
from psserver.transport.server import ServerThread
from pstesting.clock import Clock
from pswire.encoding.verbs import VERBS
from pswire.errors import VariableMismatch
from pswire.model.plan import VariableSpec
from pswire.model.tensor import TensorSpec
from pswire.security.session_numbers import count_of
from tests.kit.rig import WORKERS, Job, Servers, core, sum_into, together


class Beside:
    """A job on two servers that listen, and psctl.

    Args:
        stack: ends the servers.
        capsys: has what psctl prints.
    """

    def __init__(self, stack: ExitStack, capsys: Any) -> None:
        clock = Clock()
        cores = [core(number, clock=clock) for number in (0, 1)]
        self.job = Job(Servers(list(cores), cores, clock, "nowhere", False))
        self.threads = [stack.enter_context(ServerThread(one, ServerConfig(one.task), grace=0.0)) for one in cores]
        self._capsys = capsys

    @property
    def addresses(self) -> str:
        """Of both servers, in order."""
        return ",".join(thread.address for thread in self.threads)

    def __call__(self, *args: str, address: str = "") -> tuple[Any, str]:
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            psctl.main(["recent", *args, "--address", address or self.addresses])
        said = self._capsys.readouterr()
        return ended.value.code, said.out + said.err

    def json(self, *args: str) -> tuple[Any, Any]:
        """What it says with `--json`."""
        code, text = self(*args, "--json")
        return code, json.loads(text)


@pytest.fixture
def run(capsys, monkeypatch) -> Iterator[Beside]:
    """Runs `psctl recent` in an environment that says nothing."""
    for name in ("TF_CONFIG", "PS_TOKEN", "PS_TOKEN_FILE", "PS_TLS_CERT", "PS_TLS_KEY", "PS_TLS_CA", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    with ExitStack() as stack:
        yield Beside(stack, capsys)


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
        run.job.verbs[0].create(worker.session, 0, -1, spec, (0,), None)
    return worker


def cells(text: str) -> list[list[str]]:
    """The lines below the heading: how long ago, on which server, what, and what was said; or more of that."""
    return [re.split(r"\s{2,}", line.strip()) for line in text.splitlines()[2:]]


def test_what_was_told_last_is_shown(run, worker):
    """In the order in which it came to any server, the newest last, and why it was refused below."""
    code, text = run()
    assert code == 0
    *before, push, work, create, why, _ = cells(text)
    who = f"worker-0, session {count_of(worker.session)}"
    assert push == ["2.25 s", "ps-1", "push", f"{who}: round 0 of epoch 1, 24 bytes"]
    assert work == ["2.25 s", "ps-1", "worked", "step (arrays)"]
    assert create == ["0.00 s", "ps-0", "create", f"{who}: 'dense/kernel' float32[4]"]
    assert why[0].startswith("VariableMismatch: ")
    assert {row[0] for row in before} == {"1.7 min"}
    assert {row[1] for row in before} == {"ps-0", "ps-1"}


@pytest.mark.parametrize("columns", [80, 120])
def test_it_fits_a_terminal(run, worker, columns, monkeypatch):
    """What is long goes on below itself; only why a call was refused is red."""
    for name, value in (("COLUMNS", str(columns)), ("FORCE_COLOR", "1"), ("TERM", "xterm-256color")):
        monkeypatch.setenv(name, value)
    why = run.json()[1]["servers"][0]["recent"][-1]["refused"]
    text = run()[1]
    red = re.findall(r"\x1b\[31m(.*?)\x1b\[0m", text)
    assert len(red) > 1
    assert " ".join(" ".join(red).split()) == why
    assert max(len(re.sub(r"\x1b\[\d*m", "", line).rstrip()) for line in text.splitlines()) <= columns


def test_one_server_alone(run, worker):
    """By its number, wherever it stands among the addresses."""
    backwards = ",".join(thread.address for thread in reversed(run.threads))
    for address in (run.addresses, backwards):
        code, text = run("--server", "1", address=address)
        assert code == 0
        assert {row[1] for row in cells(text)} == {"ps-1"}
    code, text = run("--server", "2")
    assert (code, text) == (
        2,
        "psctl: error: no address leads to /job:ps/task:2; name all servers of the job in --address\n",
    )


def test_machines_are_told_all(run, worker):
    """By server, in order, with every field."""
    code, said = run.json()
    assert (code, said["problems"]) == (0, [])
    assert [(each["task"], each["address"]) for each in said["servers"]] == [
        ("/job:ps/task:0", run.threads[0].address),
        ("/job:ps/task:1", run.threads[1].address),
    ]
    first, second = (each["recent"] for each in said["servers"])
    assert second[-1] == {"seconds": 2.25, "what": "worked", "said": "step (arrays)", "refused": ""}
    assert first[-1]["refused"].startswith("VariableMismatch: ")
    assert [each["recent"] for each in run.json("--server", "1")[1]["servers"]] == [second]


def test_a_server_that_does_not_answer_is_a_problem(run, worker):
    """The others are shown all the same."""
    run.threads[1].stop()
    code, text = run("--timeout", "0.5")
    assert code == 1
    assert "ps-0" in text
    assert text.splitlines()[-1].startswith("! ps-1: no answer at ")
    code, said = run.json("--timeout", "0.5")
    assert (code, said["servers"][1]["recent"]) == (1, [])
    assert [(each["kind"], each["task"]) for each in said["problems"]] == [("unreachable", "/job:ps/task:1")]


def test_a_server_that_is_too_old_is_a_problem(run, worker):
    """It is there, and does not know the verb: one line says so, and what to do."""
    old = run.threads[1]
    del old._server._service._methods[VERBS["Recent"].path]
    code, text = run("--server", "1")
    assert (code, text) == (
        1,
        f"! ps-1: the server at {old.address} is of an older version, which does not know Recent; "
        "install the same version of paramserver for both\n",
    )
    code, said = run.json()
    assert code == 1
    assert [(each["kind"], each["task"]) for each in said["problems"]] == [("refused", "/job:ps/task:1")]
    assert [bool(each["recent"]) for each in said["servers"]] == [True, False]
    del old._server._service._methods[VERBS["Status"].path]
    assert "is no parameter server of this version; correct the address" in run("--server", "1")[1]


def test_a_server_that_was_told_nothing(capsys, monkeypatch):
    """Says so, which is no problem."""
    monkeypatch.delenv("TF_CONFIG", raising=False)
    fresh = core()
    with ServerThread(fresh, ServerConfig(fresh.task), grace=0.0) as thread, pytest.raises(SystemExit) as ended:
        psctl.main(["recent", "--address", thread.address])
    assert (ended.value.code, capsys.readouterr().out) == (0, "nothing yet\n")
