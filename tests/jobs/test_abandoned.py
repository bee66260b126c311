"""A job that nobody will finish: it is given up, its servers end, and everybody says why."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

import psclient as ps
from pstesting.processes import CHIEF, PS0, PS1, QUICK, W0, W1, ProcessCluster
from pstesting.script import ME, add, gate, say
from tests.kit.internals import ABANDONED, SERVER_LOST, Task

SOON = replace(QUICK, alone=4.0)
"""Longer than a lease: whoever is lost is known to be lost by then."""

KEYS = {"workers": 2, "chief": "driver", "gates": ["on"], "timeouts": SOON}


def train(servers, leaves=-1, fails=-1):
    """Rounds on all servers, and a gate after the second; there one may leave, its part done, and one may fail."""
    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        variables = [ps.Variable(np.zeros(4), name=name) for name in "uvw"[:servers]]  # one on each server
    while strategy.round < 4 * servers:
        for variable in variables:
            strategy.run(lambda variable=variable: add(variable, np.ones(4)))
        if strategy.round == 2 * servers:
            say("at")
            if leaves == ME:
                return
            gate("on")
            if fails == ME:
                raise ValueError("a slip")


def test_a_chief_whose_workers_are_all_gone_gives_the_job_up(tmp_path):
    """It names them and what became of them, lost or failed; the servers end by what it tells them.

    A worker whose script fails says so before it goes: nobody waits for ever for others in its place.
    """
    with ProcessCluster(train, tmp_path, (2, -1, 1), ps=2, **KEYS) as job:
        for task in (W0, W1):
            job.hear(task, "at")
        job.kill(W0)
        job.open("on")
        assert [job.exited(task) for task in (W1, CHIEF)] == [1, ABANDONED]
        told = job.hear_error(CHIEF, "no worker has been here for")
        assert f"{W0} lost, {W1} failed. The job is given up" in told
        assert [job.exited(task) for task in (PS0, PS1)] == [0, 0]


def test_servers_that_nobody_calls_end(tmp_path):
    """When a server dies all processes are told `ServerLost`, the chief as well, and nobody is left to tell the others.

    They end by themselves: the one that has the leases, and the one that has not.
    """
    left = PS0, Task("ps", 2)
    with ProcessCluster(train, tmp_path, (3,), ps=3, **{**KEYS, "workers": 1}) as job:
        job.hear(W0, "at")
        job.kill(PS1)
        job.open("on")
        assert [job.exited(task) for task in (W0, CHIEF)] == [SERVER_LOST] * 2
        for task in left:
            job.hear_error(task, "nobody has been here for 4 s (PS_TIMEOUT_ALONE), so that this server ends")
            assert job.exited(task) == 0


def test_worker_0_as_chief_does_not_wait_for_ever(tmp_path):
    """Its own part is done, and the other died afterwards: nobody is there for whom it would still drive."""
    with ProcessCluster(train, tmp_path, (1, 0), **{**KEYS, "chief": "none"}) as job:
        for task in (W0, W1):
            job.hear(task, "at")
        with job.server(PS0) as server:
            job.until(lambda: any(s.member.task == W0 and s.state == "left" for s in server.status().sessions))
        job.kill(W1)
        job.hear_error(W0, f"{W0} left, {W1} lost. The job is given up")
        assert job.exited(PS0) == 0
