"""A server that dies, stops or is replaced: every process gets `ServerLost` that names it, and nobody mixes states."""

from __future__ import annotations

import signal
import time

import numpy as np
import pytest

import psclient as ps
from psclient.runner import SERVER_LOST
from tests.support.inside import DIRECTORY, ME, add_all, gate, say
from tests.support.jobs import CHIEF, PS0, PS1, QUICK, W0, W1, Job

MARGIN = 3.0
"""Seconds beside the lease, for a machine that others use."""


def serve(rounds, stops):
    """Counts rounds on both servers; saves a checkpoint after 3 rounds, and restores it when there is one."""
    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        v = ps.Variable(np.zeros(4), name="v")
        u = ps.Variable(np.zeros(4), name="u")
    checkpoint = ps.train.Checkpoint(v=v, u=u)
    steps = 0
    if (DIRECTORY / "checkpoints" / "run").exists():
        say("restored", checkpoint.restore("run").restored)
        steps = 3
    say("begins", [float(v[0]), float(u[0])])
    try:
        while steps < rounds:
            if [ME, steps] in stops and strategy.round == steps + 1:
                say("at", steps)
                gate("go")
            mine = np.full(4, 100.0**ME)
            strategy.run(lambda mine=mine: add_all([(v, mine), (u, mine)]))
            steps += 1
            found = float(v[0]), float(u[0])
            assert found == (101.0 * steps, 101.0 * steps), found
            if steps == 3 and strategy.round == 3:
                checkpoint.save("run/ckpt", ps.train.CheckpointOptions(enable_async=False))
    except ps.errors.ServerLost as error:
        say("lost", [error.task, str(error)])
        raise
    say("sums", [float(v[0]), float(u[0])])


KEYS = {"ps": 2, "workers": 2, "chief": "driver", "timeouts": QUICK, "gates": ["go"]}


@pytest.mark.parametrize(
    ("server", "number"),
    [
        pytest.param(PS0, signal.SIGKILL, id="the first, killed"),
        pytest.param(PS1, signal.SIGSTOP, id="another, stopped"),
        pytest.param(PS1, signal.SIGKILL, id="another, killed", marks=pytest.mark.soak),
        pytest.param(PS0, signal.SIGSTOP, id="the first, stopped", marks=pytest.mark.soak),
    ],
)
def test_a_server_that_is_lost(tmp_path, server, number):
    """Killed or stopped: within a lease every process knows which one, whatever it does, and ends."""
    with Job(serve, tmp_path, (20, [[1, 5]]), **KEYS) as job:
        job.hear(W1, "at", 5)
        job.kill(server, number)
        began = time.monotonic()
        for task in (W0, CHIEF):  # one waits in a round, one for news
            text = job.hear_error(task, f"error: {server}: was lost")
            assert "restart from a checkpoint" in text
            assert time.monotonic() - began < QUICK.lease + MARGIN
        job.open("go")
        for task in (W0, W1):
            assert job.hear(task, "lost")[0] == str(server)
            assert job.exited(task) == SERVER_LOST
        assert job.exited(CHIEF) == SERVER_LOST
        job.kill(server)
        assert not job.said(W0, "sums")


@pytest.mark.parametrize("server", [pytest.param(PS0, marks=pytest.mark.soak), PS1])
def test_a_server_that_is_replaced(tmp_path, server):
    """Its successor refuses the old sessions at once. Everyone started again goes on from the checkpoint.

    One worker comes back before the chief: it is as new as all others.
    """
    with Job(serve, tmp_path, (20, [[1, 5]]), **KEYS) as job:
        job.hear(W1, "at", 5)
        job.kill(server)
        job.start(server)
        job.hear_error(W0, f"error: {server}: was ")
        job.open("go")
        for task in (W0, W1):
            assert job.hear(task, "lost")[0] == str(server)
        for task in (W0, W1, CHIEF):
            assert job.exited(task) == SERVER_LOST
        job.start(W1)
        job.hear_error(W1, "waits for a chief to begin the job")
        job.start(CHIEF)
        job.start(W0)
        for task in (W0, W1):
            assert job.hear(task, "restored") is True
            assert job.hear(task, "begins") == [303.0, 303.0]
            assert job.hear(task, "sums") == [2020.0, 2020.0]
        job.finish()


def test_the_launcher_starts_a_job_anew(tmp_path):
    """`--restarts`: a server is replaced, all others fail and are replaced, and the job starts anew."""

    def once(rounds):
        strategy = ps.ParameterServerStrategy()
        with strategy.scope():
            v = ps.Variable(np.zeros(4), name="v")
            u = ps.Variable(np.zeros(4), name="u")
        marker = DIRECTORY / f"server-{ME}"
        while strategy.round < rounds:
            if strategy.round == 5 and not marker.exists():
                marker.touch()
                say("at", 5)
                gate("go")
            strategy.run(lambda: add_all([(v, np.ones(4)), (u, np.ones(4))]))
        say("sums", [float(v[0]), float(u[0])])

    with Job(once, tmp_path, (12,), **{**KEYS, "restarts": 8}) as job:
        for task in (W0, W1):
            job.hear(task, "at", 5)
        job.kill(PS1)
        job.open("go")
        job.finish(30)
        for task in (W0, W1):
            assert job.said(task, "sums") == [[24.0, 24.0]]
