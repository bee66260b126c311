"""A job that nobody will finish: it is given up, its servers end, and everybody says why."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import psclient as ps
from psclient._src.chief.driver import Chief
from psclient._src.processes.shutdown import ABANDONED, SERVER_LOST
from psclient._src.transport.remote_server import connect
from psserver.config import ServerConfig
from psserver.transport.server import ServerThread
from pstesting.processes import CHIEF, PS0, PS1, QUICK, W0, W1, ProcessCluster
from pstesting.script import ME, add, gate, say
from pswire.cluster import ClusterSpec
from pswire.errors import Abandoned
from pswire.limits import Timeouts
from tests.kit.rig import core

SOON = replace(QUICK, alone=4.0)
"""Longer than a lease: whoever is lost is known to be lost by then."""


def train(rounds, leaves=-1):
    """Rounds on all servers with a gate after the second; one worker may leave there, its part done."""
    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        variables = [ps.Variable(np.zeros(4), name=name) for name in "uv"]  # on one server each, where there are two
    while strategy.round < rounds:
        for variable in variables:
            strategy.run(lambda variable=variable: add(variable, np.ones(4)))
        if strategy.round == 2:
            say("at", 2)
            if leaves == ME:
                return
            gate("on")


def test_a_chief_whose_workers_are_all_gone_gives_the_job_up(tmp_path):
    """It names them and what became of them, and the servers end by what it tells them."""
    with ProcessCluster(train, tmp_path, (5,), ps=2, workers=2, chief="driver", gates=["on"], timeouts=SOON) as job:
        for task in (W0, W1):
            job.hear(task, "at")
        for task in (W0, W1):
            job.kill(task)
        assert job.exited(CHIEF) == ABANDONED
        told = job.hear_error(CHIEF, "no worker has been here for")
        assert f"{W0} lost, {W1} lost. The job is given up" in told
        assert [job.exited(task) for task in (PS0, PS1)] == [0, 0]


def test_servers_that_nobody_calls_end(tmp_path):
    """Without a chief nobody tells them; the one that has the leases, and the one that has not."""
    with ProcessCluster(train, tmp_path, (5,), ps=2, workers=2, chief="driver", gates=["on"], timeouts=SOON) as job:
        for task in (W0, W1):
            job.hear(task, "at")
        for task in (W0, W1, CHIEF):
            job.kill(task)
        for task in (PS0, PS1):
            job.hear_error(task, "nobody has been here for 4 s (PS_TIMEOUT_ALONE), so that this server ends")
            assert job.exited(task) == 0


def test_what_is_left_of_a_job_whose_server_died_ends(tmp_path):
    """All processes are told `ServerLost`, the chief as well; the other server is then alone."""
    with ProcessCluster(train, tmp_path, (5,), ps=2, workers=1, chief="driver", gates=["on"], timeouts=SOON) as job:
        job.hear(W0, "at")
        job.kill(PS1)
        job.open("on")
        assert [job.exited(task) for task in (W0, CHIEF, PS0)] == [SERVER_LOST, SERVER_LOST, 0]


def test_worker_0_as_chief_does_not_wait_for_ever(tmp_path):
    """Its own part is done, and the other died afterwards: nobody is there for whom it would still drive."""
    with ProcessCluster(train, tmp_path, (5, 0), workers=2, gates=["on"], timeouts=SOON) as job:
        for task in (W0, W1):
            job.hear(task, "at")
        with job.server(PS0) as server:
            job.until(lambda: any(s.member.task == W0 and s.state == "left" for s in server.status().sessions))
        job.kill(W1)
        job.hear_error(W0, f"{W0} left, {W1} lost. The job is given up")
        assert job.exited(PS0) == 0


def fail():
    """A script with a mistake."""
    ps.ParameterServerStrategy()
    raise ValueError("a slip")


def test_a_script_that_fails_everywhere_ends_its_job(tmp_path):
    """Its processes say so before they go; nobody waits for ever for others in their place."""
    with ProcessCluster(fail, tmp_path, ps=2, workers=2, chief="driver", timeouts=SOON) as job:
        assert [job.exited(task) for task in (W0, W1, CHIEF)] == [1, 1, ABANDONED]
        job.hear_error(CHIEF, f"{W0} failed, {W1} failed. The job is given up")
        assert [job.exited(task) for task in (PS0, PS1)] == [0, 0]


def test_a_job_to_which_nobody_comes_is_given_up():
    behind = core()
    timeouts = Timeouts(alone=0.5, first=0.5)
    with ServerThread(behind, ServerConfig(behind.task)) as thread:
        cluster = ClusterSpec({"ps": (thread.address,), "worker": ("x:1",), "chief": ("x:2",)})
        with pytest.raises(Abandoned, match=f"{W0} never came. The job is given up"):
            Chief(CHIEF, connect(cluster, timeouts), cluster, timeouts).drive()
        assert behind.done.done()
    behind.close()
