"""Restarts by the launcher: each cause costs one, and its consequences cost none."""

from __future__ import annotations

import dataclasses
import signal
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import psclient as ps
from pstesting.processes import CHIEF, PS0, PS1, QUICK, SECONDS, W0, W1, ProcessCluster
from pstesting.script import DIRECTORY, ME, add_all, gate, say
from tests.jobs.test_lost_servers import learn, values
from tests.kit.internals import SERVER_LOST


def count(rounds, lives):
    """Rounds on both servers; some processes of each task stop at a gate in their middle: the first, and so on."""
    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        v, u = (ps.Variable(np.zeros(4), name=name) for name in "vu")
    life = sum((DIRECTORY / f"came-{ME}-{before}").exists() for before in range(lives))
    if life < lives:
        (DIRECTORY / f"came-{ME}-{life}").touch()
    while strategy.round < rounds:
        if strategy.round == 3 and life < lives:
            say("at", life)
            gate(f"go{life}")
        strategy.run(lambda: add_all([(v, np.ones(4)), (u, np.ones(4))]))
    say("sums", [float(v[0]), float(u[0])])


TIMEOUTS = dataclasses.replace(QUICK, server_timeout=2 * QUICK.session_timeout)

KEYS = {"ps": 2, "workers": 2, "chief": "driver", "timeouts": TIMEOUTS, "gates": ["go0", "go1"]}


def replaced(job, task):
    """The lines of the launcher about a task's replacements."""
    return [line.partition(f"{task} ")[2] for line in job.errors(task).splitlines() if "; restarted, " in line]


FOLLOWED = [f"ended because a server was lost (exit code {SERVER_LOST}); restarted, without using a restart"]


@pytest.mark.parametrize("second", ["silent", pytest.param("ended", marks=pytest.mark.soak)])
def test_a_server_s_loss_costs_one_restart(tmp_path, second):
    """However many processes end because of it, and whether its process has failed, ended in good order, or hangs."""
    hangs = second == "silent"
    with ProcessCluster(count, tmp_path, (8, 2), **{**KEYS, "restarts": 2}) as job, ThreadPoolExecutor(1) as pool:
        ended = pool.submit(job.finish)
        for life, number in enumerate((signal.SIGKILL, signal.SIGSTOP if hangs else signal.SIGTERM)):
            job.until(lambda life=life: all(life in job.said(task, "at") for task in (W0, W1)))
            job.kill(PS1, number)
            job.open(f"go{life}")
        ended.result(SECONDS)
        for task in (W0, W1):
            assert job.said(task, "sums") == [[16.0, 16.0]]
        for task in (W0, W1, CHIEF):
            assert (f"no answer from {PS1} at " in job.errors(task)) == hangs
        assert replaced(job, PS1) == [
            "failed (killed by SIGKILL); restarted, 1 restarts left",
            f"failed ({'it does not answer' if hangs else 'exit code 0'}); restarted, 0 restarts left",
        ]
        assert replaced(job, PS0) == []
        assert [replaced(job, task) for task in (W0, W1, CHIEF)] == [2 * FOLLOWED] * 3


def test_a_server_with_copies_is_replaced_alone(tmp_path):
    """The job goes on without it meanwhile, and readmits it; nobody else is started again."""
    keys = {**KEYS, "replication_factor": 2, "restarts": 1}
    with ProcessCluster(count, tmp_path, (40, 1), **keys) as job, ThreadPoolExecutor(1) as pool:
        for task in (W0, W1):
            job.hear(task, "at")
        ended = pool.submit(job.finish)
        job.kill(PS1)
        job.hear_error(CHIEF, f"{PS1} has restarted")
        with job.server(PS0) as server:
            job.until(lambda: server.status().generation.returns is not None)
        job.open("go0")
        ended.result(SECONDS)
        for task in (W0, W1):  # one of the rounds is that in which they hand over what it held
            assert job.said(task, "sums") == [[78.0, 78.0]]
        assert f"{PS1} was lost (killed by SIGKILL); restarted, 0" in job.errors(PS1)
        assert [replaced(job, task) for task in (PS0, W0, W1, CHIEF)] == [[]] * 4


def wait_to_begin():
    gate("go0")
    ps.ParameterServerStrategy()


@pytest.mark.parametrize("lost", [PS0, PS1], ids=str)
def test_a_server_that_is_lost_before_the_job_begins_ends_it(tmp_path, lost):
    """Also with copies: nobody has a value yet, and all would wait for the server until PS_START_TIMEOUT."""
    keys = {**KEYS, "replication_factor": 2, "chief": "none", "restarts": 0}
    with ProcessCluster(wait_to_begin, tmp_path, (), **keys) as job:
        job.kill(lost)
        outcome = job.cluster.wait(SECONDS)
    assert (outcome.task, outcome.code) == (lost, 128 + signal.SIGKILL)


@pytest.mark.ci
@pytest.mark.parametrize("restarts", [2, pytest.param(0, marks=pytest.mark.soak)], ids=["replaced", "not replaced"])
def test_a_server_and_its_copy_are_lost(tmp_path, restarts):
    """The job goes back to its checkpoint, bit for bit; without restarts every process ends, and says what was lost."""
    keys = {**KEYS, "replication_factor": 2, "restarts": restarts, "gates": ["go 20"]}
    with ProcessCluster(learn, tmp_path, (24, [20], 3, "run", 5), **keys) as job, ThreadPoolExecutor(1) as pool:
        for task in (W0, W1):
            assert job.hear(task, "begins") == 0
            job.hear(task, "at", 20)
        ended = pool.submit(job.finish) if restarts else None
        job.kill(PS0)
        job.kill(PS1)
        job.open("go 20")
        if ended is None:
            assert [job.exited(task) for task in (W0, W1, CHIEF)] == [SERVER_LOST] * 3
            return
        ended.result(SECONDS)
        for task in (W0, W1):
            assert job.said(task, "begins")[-1] == 5
            assert job.said(task, "is") == [values(24)]
