"""psctl beside jobs of real processes: what it shows of them, and that they do not notice; how it moves servers."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

import psclient as ps
from pstesting import forks
from pstesting.processes import CALM, CHIEF, PS0, PS1, SECONDS, W0, W1, ProcessCluster
from pstesting.script import DIRECTORY, ME, gate, say
from pswire.cluster import Task
from tests.kit.shell import shown, terminal, waiting

KEYS = {"ps": 2, "workers": 2, "chief": "driver", "gates": ["go1", "end"]}


class Psctl:
    """Runs psctl with what a job's tasks are told."""

    def __init__(self, job: ProcessCluster, call: Callable[..., Any]) -> None:
        self.job = job
        self._call = call

    def __call__(self, *args: str) -> tuple[int, str]:
        done = self._call(*args)
        assert "Traceback" not in done.out + done.err
        return int(str(done.code)), done.out + done.err

    def json(self, *args: str) -> tuple[int, Any]:
        code, text = self(*args, "--json")
        return code, json.loads(text)

    def until(self, true: Any) -> Any:
        """The status once something is true of it."""
        found: list[Any] = []

        def look() -> bool:
            found[:] = [self.json("status")]
            return bool(true(found[0][1]))

        self.job.until(look)
        return found[0]


@pytest.fixture
def psctl_of(monkeypatch, call):
    """Runs psctl beside a job that runs."""

    def told(job: ProcessCluster) -> Psctl:
        monkeypatch.setenv("TF_CONFIG", job.cluster.tf_config(W0))
        monkeypatch.setenv("PS_TOKEN", job.cluster.security(W0).token)
        return Psctl(job, call)

    return told


@pytest.fixture(scope="module")
def paused(tmp_path_factory):
    """A job whose worker 0 waits for worker 1 in round 5, for tests that look; it ends well, as if nobody had."""
    patient = replace(CALM, round_timeout=600.0)
    with ProcessCluster(train, tmp_path_factory.mktemp("paused"), (8, 5), timeouts=patient, **KEYS) as job:
        job.hear(W1, "at", 5)
        yield job
        job.open("go1")
        job.hear(W0, "done")
        job.open("end")
        assert job.hear(W0, "bias") == job.hear(W1, "bias")
        job.finish()


@pytest.fixture
def run(paused, psctl_of):
    return psctl_of(paused)


def train(rounds, stop):
    """Both workers add to three variables; worker 1 stops before a round until it is let go on."""
    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        v = ps.Variable(np.zeros((2, 3), "float32"), name="dense/kernel")
        u = ps.Variable(np.zeros(4), name="dense/bias")
        optimizer = ps.optimizers.Adam(0.5)

    def step():
        optimizer.apply_gradients([(np.ones((2, 3), "float32"), v), (np.ones(4), u)])

    while strategy.round < rounds:
        if ME and strategy.round == stop:
            say("at", stop)
            gate("go1")
        strategy.run(step)
        u.numpy()
        say("did", strategy.round - 1)
    say("done")
    gate("end")
    say("bias", u.numpy())


def by_task(items: list[dict[str, Any]], drives: bool = False) -> dict[str, dict[str, Any]]:
    return {each["task"]: each for each in items if each.get("drives", False) == drives}


def test_a_job_that_waits_is_shown(run):
    """Who is in which round, who waits for whom and over which transport; what servers were told; the job does not
    notice."""
    code, said = run.until(lambda said: said["round"] == 5 and by_task(said["tasks"])[str(W0)]["waits_for"])
    assert (code, said["problems"], said["state"], said["mode"]) == (0, [], "running", "sync")
    assert (said["generation"], said["replicas"]) == (1, 2)
    tasks = by_task(said["tasks"])
    assert (tasks[str(W0)]["round"], tasks[str(W0)]["lag"], tasks[str(W0)]["waits_for"]) == (5, 0, [str(W1)])
    assert (tasks[str(W1)]["round"], tasks[str(W1)]["lag"], tasks[str(W1)]["waits_for"]) == (4, 1, [])
    assert all(task["takes_part"] and task["transports"] == ["shm"] for task in tasks.values())
    assert by_task(said["tasks"], drives=True)[str(CHIEF)]["state"] == "open"
    servers = by_task(said["servers"])
    assert set(servers) == {str(PS0), str(PS1)}
    assert all(server["waits_for"] == [str(W1)] for server in servers.values())
    assert all(server["waiting"][0]["missing"] == [str(W1)] for server in servers.values())
    assert all(server["transports"] == {"shm": 2} for server in servers.values())
    assert all(server["resident_bytes"] > 1 << 20 and server["version"] for server in servers.values())

    code, text = run("status")
    assert (code, text.splitlines()[0]) == (0, "job is running: generation 1, round 5, 2 replicas, sync")
    assert [line for line in text.splitlines() if line.startswith("worker-0") and line.rstrip().endswith("worker-1")]

    sessions = [task["session"] for task in said["tasks"]]
    run("vars")
    run("read", "dense/kernel")
    code, told = run.json("events")
    assert (code, told["problems"], [each["task"] for each in told["servers"]]) == (0, [], [str(PS0), str(PS1)])
    assert all(f"{W0}" in str(each) and "step (arrays)" in str(each) for each in told["servers"])
    assert [task["session"] for task in run.json("status")[1]["tasks"]] == sessions


def test_variables_are_listed_and_read(run, tmp_path):
    """With what the optimizer keeps beside each, by server; values as NumPy prints them, in files, as numbers."""
    run.until(lambda said: all(server["round"] == 4 for server in said["servers"]))
    code, said = run.json("vars")
    found = {each["name"]: each for each in said["variables"]}
    assert code == 0
    assert found["dense/kernel"]["shape"] == [2, 3]
    assert (found["dense/kernel"]["dtype"], found["dense/kernel"]["bytes"]) == ("float32", 24)
    assert found["adam/dense/kernel/m"]["slot_of"] == "dense/kernel"
    assert found["adam/dense/kernel/m"]["servers"] == found["dense/kernel"]["servers"]
    assert found["adam/iterations"]["slot_of"] is None
    assert [*found][:3] == ["dense/kernel", "adam/dense/kernel/m", "adam/dense/kernel/v"]
    held = [sum(each["bytes"] for each in said["variables"] if str(task) in each["servers"]) for task in (PS0, PS1)]
    assert [server["bytes"] for server in said["servers"]] == held
    bias = run.json("vars", "*bias")[1]["variables"]
    assert [each["name"] for each in bias] == ["dense/bias", "adam/dense/bias/m", "adam/dense/bias/v"]
    assert "no variable matches 'nothing*'; the job has 7" in run("vars", "nothing*")[1]
    assert "  adam/dense/bias/m" in run("vars")[1]

    code, said = run.json("read", "dense/bias")
    assert (code, said["round"], said["dtype"]) == (0, 4, "float64")
    np.testing.assert_allclose(said["value"], [-2.5] * 4, rtol=1e-5)
    assert "[-2.49999" in run("read", "dense/bias")[1]
    path = tmp_path / "bias.npy"
    assert run("read", "dense/bias", "--npy", str(path))[0] == 0
    np.testing.assert_array_equal(np.load(path), said["value"])
    stats = run.json("read", "dense/bias", "--stats")[1]["stats"]
    assert (stats["count"], stats["nan"], stats["min"]) == (4, 0, said["value"][0])
    code, text = run("read", "dense/bia")
    assert code == 2
    assert "did you mean dense/bias?" in text


def test_top_is_live_and_ends_with_ctrl_c(run):
    """On a terminal it goes on until Ctrl-C, which is no failure; elsewhere it tells of one interval."""
    command = [sys.executable, "-m", "psclient.psctl", "top", "--interval", "0.2"]
    with terminal(partial(forks.Forked[bytes], command), 140) as (process, screen):
        assert "rounds/s" in shown(screen, "worker-1")
        shown(screen, "rounds/s")
        process.send_signal(signal.SIGINT)
        assert "Traceback" not in shown(screen, "\x1b[?1049l")
        assert process.wait(SECONDS) == 0
    code, said = run.json("top", "--interval", "0.1")
    assert code == 0
    assert set(said["rates"]) == {str(PS0), str(PS1)}
    assert said["rates"][str(PS0)]["rounds_per_second"] == 0
    assert "rounds/s" in run("top", "--interval", "0.1")[1]


ONE = {"workers": 1, "chief": "driver"}


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


def domains(run, psctl_of):
    """How many servers each failure domain has, as psctl sees it; from now on it is told where they are."""
    servers = run.json("status")[1]["servers"]
    run.job.cluster.addresses |= {Task.parse(server["task"]): server["address"] for server in servers}
    psctl_of(run.job)
    return Counter(server["domain"] for server in servers)


@pytest.mark.parametrize("half", [1, pytest.param(2, marks=pytest.mark.ci)])
def test_servers_are_spread_drained_and_moved(tmp_path, psctl_of, half):
    """Half of them go to a machine that came; all that are there leave it again; nothing is lost, nobody restarts."""
    with ExitStack() as stack:
        job = stack.enter_context(ProcessCluster(count, tmp_path, (), ps=2 * half, replication_factor=2, **ONE))
        run = psctl_of(job)
        run.until(lambda view: view["round"] > 0)
        (here,) = domains(run, psctl_of)
        stack.enter_context(waiting(job, tmp_path, half, domain="b"))
        code, text = run("status")
        assert (code, text.count("(in b) standby")) == (0, half)
        code, told = run.json("rebalance")
        assert code == 0, told
        assert len(told["moved"]) == half
        assert domains(run, psctl_of) == {here: half, "b": half}
        assert run("rebalance") == (0, "no server needs to move\n")

        others = stack.enter_context(waiting(job, tmp_path, half, domain="c"))
        code, told = run.json("drain", "b")
        assert code == 0, told
        assert {each["to"] for each in told["moved"]} == {each.address for each in others}
        assert domains(run, psctl_of) == {here: half, "c": half}

        (new,) = stack.enter_context(waiting(job, tmp_path, 1, domain="d"))
        code, text = run("move", "ps:0", "--to", new.address)
        assert text == f"/job:ps/task:0 has moved to {new.address}\n"
        assert code == 0
        assert domains(run, psctl_of)["d"] == 1
        (tmp_path / "enough").touch()
        assert job.hear(W0, "is") == [True] * 4
        assert {job.exited(task) for task in (W0, CHIEF)} == {0}
