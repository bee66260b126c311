"""psctl moves servers of jobs of real processes, which train meanwhile, and says what it cannot do."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import ExitStack

import numpy as np
import pytest

import psclient as ps
from pstesting.processes import CHIEF, PS0, PS1, W0, ProcessCluster
from pstesting.script import DIRECTORY, say
from pswire.cluster import Task
from tests.kit.shell import waiting
from tests.psclient.psctl.test_psctl_jobs import psctl_of  # noqa: F401  a fixture

KEYS = {"workers": 1, "chief": "driver"}


def count():
    """Counts in four variables, on as many servers as there are, until the test has had enough."""
    strategy = ps.ParameterServerStrategy(devices=["cpu:0"])
    with strategy.scope():
        counts = [ps.Variable(np.zeros(size, "float32"), name=f"count{size}") for size in (1, 2, 3, 4)]

    def step():
        for each in counts:
            each.assign_add(np.ones(each.shape, "float32"))

    steps = 0
    while not (DIRECTORY / "enough").exists():
        strategy.run(step)
        steps += 1
        time.sleep(0.4)  # a job that waits for psctl needs no more rounds
    say("is", [each.numpy().tolist() == [steps] * len(each.numpy()) for each in counts])


def domains(run, psctl_of):  # noqa: F811
    """How many servers each failure domain has, as psctl sees it; from now on it is told where they are."""
    servers = run.json("status")[1]["servers"]
    run.job.cluster.addresses |= {Task.parse(server["task"]): server["address"] for server in servers}
    psctl_of(run.job)
    return Counter(server["domain"] for server in servers)


@pytest.mark.parametrize("half", [1, pytest.param(2, marks=pytest.mark.ci)])
def test_servers_are_spread_drained_and_moved(tmp_path, psctl_of, half):  # noqa: F811
    """Half of them go to a machine that came; all that are there leave it again; nothing is lost, nobody restarts."""
    with ExitStack() as stack:
        job = stack.enter_context(ProcessCluster(count, tmp_path, (), ps=2 * half, replication=1, **KEYS))
        run = psctl_of(job)
        run.until(lambda view: view["round"] > 0)
        (here,) = domains(run, psctl_of)
        stack.enter_context(waiting(job, tmp_path, half, domain="b"))
        code, text = run("status")
        assert (code, text.count("(in b) waits for the place of a server")) == (0, half)
        code, told = run.json("rebalance")
        assert (code, len(told["moved"])) == (0, half)
        assert domains(run, psctl_of) == {here: half, "b": half}
        assert run("rebalance") == (0, "no server has to move\n")

        others = stack.enter_context(waiting(job, tmp_path, half, domain="c"))
        code, told = run.json("drain", "b")
        assert (code, {each["to"] for each in told["moved"]}) == (0, {each.address for each in others})
        assert domains(run, psctl_of) == {here: half, "c": half}

        (new,) = stack.enter_context(waiting(job, tmp_path, 1, domain="d"))
        code, text = run("move", "ps:0", "--to", new.address)
        assert (code, text) == (0, f"/job:ps/task:0 has moved to {new.address}\n")
        assert domains(run, psctl_of)["d"] == 1
        (tmp_path / "enough").touch()
        assert job.hear(W0, "is") == [True] * 4
        assert {job.exited(task) for task in (W0, CHIEF)} == {0}


WRONG = {
    ("move", "ps:9"): "psctl: error: the job has 2 servers, and no /job:ps/task:9",
    ("move", "ps:0"): "no process waits for the place of /job:ps/task:0; start one on another machine with",
    ("move", "worker:0"): "'worker:0' is no server, nor a domain of one; write ps:0",
    ("move", "/job:worker/task:0"): "/job:worker/task:0 is no server; write ps:0",
    ("move", "ps:0", "--to", "nowhere"): "no process waits for the place of /job:ps/task:0",
    ("drain", "ps:1"): "no process of another domain than",
    ("drain", "rack-9"): "'rack-9' is no server, nor a domain of one; write ps:0",
    ("move",): "Missing argument 'TASK'",
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A job beside which no process waits."""
    directory = tmp_path_factory.mktemp("alone")
    with ProcessCluster(count, directory, (), ps=2, replication=1, **KEYS) as job:
        with job.server(PS0) as server:
            job.until(lambda: server.status().round >= 0)
        yield job
        (directory / "enough").touch()
        job.finish()


@pytest.mark.parametrize("args", WRONG, ids=" ".join)
def test_what_cannot_be_done_is_said(alone, psctl_of, args):  # noqa: F811
    """At once, with what to do; the job does not notice."""
    code, text = psctl_of(alone)(*args)
    assert code == 2
    assert WRONG[args] in text


def test_a_job_without_copies_moves_no_server(tmp_path, psctl_of):  # noqa: F811
    """psctl says which setting it needs; and once the job has ended, that nothing listens there."""
    with ProcessCluster(count, tmp_path, (), ps=2, **KEYS) as job:
        with waiting(job, tmp_path) as (new,):
            run = psctl_of(job)
            run.until(lambda view: view["round"] > 0)
            code, text = run("move", "ps:0", "--to", new.address)
            assert code == 2
            assert "servers move only in a job whose variables have copies; start it with PS_REPLICATION=1" in text
            (tmp_path / "enough").touch()
            job.hear(W0, "is")
        for task in (W0, CHIEF, PS0, PS1):
            assert job.exited(task) == 0
        code, text = run("rebalance", "--timeout", "3")
        assert code == 2
        assert "nothing listens there" in text
