"""A server that dies or is replaced: every process gets `ServerLost` that names it, and nobody mixes states.

One that is only silent is waited for.
"""

from __future__ import annotations

import dataclasses
import signal
import time

import numpy as np
import pytest

import psclient as ps
from psclient._src.processes.shutdown import SERVER_LOST
from psserver.state.sessions import DEPUTY_BEATS
from pstesting.processes import CHIEF, PS0, PS1, QUICK, W0, W1, ProcessCluster
from pstesting.script import DIRECTORY, ME, add_all, gate, say


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


IMPATIENT = dataclasses.replace(QUICK, lease=6.0, server=6.0)
"""A stopped server is given up soon, and none that computes for some seconds on a busy machine, nor a worker."""


def end_by_silence(job, server):
    """Stops a server until every process has ended by that, lets it run again, and starts all others again."""
    job.hear(W1, "at", 5)
    job.kill(server, signal.SIGSTOP)
    for task in (W0, CHIEF):
        assert "PS_TIMEOUT_SERVER" in job.hear_error(task, f"error: {server}: was lost: no answer")
    job.open("go")
    for task in (W0, W1):
        assert job.hear(task, "lost")[0] == str(server)
    for task in (W0, W1, CHIEF):
        assert job.exited(task) == SERVER_LOST
    job.kill(server, signal.SIGCONT)
    for task in (CHIEF, W0, W1):
        job.start(task)


def go_on(rounds, stops):
    """Counts contributions by worker on both servers; the first lives save a checkpoint, the next would restore it."""
    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        v = ps.Variable(np.zeros(4), name="v")
        u = ps.Variable(np.zeros(4), name="u")
    checkpoint = ps.train.Checkpoint(v=v, u=u)
    if (DIRECTORY / "checkpoints" / "run").exists():
        say("restored", checkpoint.restore("run").restored)
    else:
        checkpoint.save("run/ckpt", ps.train.CheckpointOptions(enable_async=False))
    made = 0
    try:
        while strategy.round < rounds:
            if [ME, strategy.round] in stops:
                say("at", strategy.round)
                gate("go" if strategy.round == 5 else "on")
            mine = np.full(4, 100.0**ME)
            strategy.run(lambda mine=mine: add_all([(v, mine), (u, mine)]))
            made += 1
    except ps.errors.ServerLost as error:
        say("lost", [error.task, str(error)])
        raise
    say("made", made)
    say("sums", [float(v[0]), float(u[0])])


@pytest.mark.soak
def test_after_a_silence_of_server_0_the_job_goes_on_from_its_variables(tmp_path):
    """Every process ends as with another server. But nobody could write to the log that it is lost, and it is not.

    So the variables count, which are newer than the checkpoint: all rounds that were complete, what was under way
    at most once, and all that the next lives do.
    """
    keys = {**KEYS, "timeouts": IMPATIENT, "gates": ["go", "on"]}
    with ProcessCluster(go_on, tmp_path, (20, [[1, 5], [0, 16], [1, 16]]), **keys) as job, job.server(PS0) as server:
        end_by_silence(job, PS0)
        for task in (W0, W1):
            assert job.hear(task, "restored") is False

        def both_take_part():
            status = server.status()
            here = {s.member.session for s in status.sessions if s.state == "open" and s.member.task.job == "worker"}
            return len(here) == 2 and here == {member.session for member in status.epoch.members}

        job.until(both_take_part)  # else the first may be done before the second comes
        job.open("on")
        zero, one = job.hear(W0, "made"), job.hear(W1, "made")
        # Round 0 saves, and rounds 1 to 4 were complete. From round 5 on they were under way, up to eight.
        before = 4 * 101 + zero + 100 * one
        for task in (W0, W1):
            for found in job.hear(task, "sums"):
                assert all(0 <= each <= 8 for each in divmod(found - before, 100))
        job.finish()


@pytest.mark.parametrize("server", [pytest.param(PS0, marks=pytest.mark.soak), PS1])
def test_a_server_that_is_replaced(tmp_path, server):
    """Its successor refuses the old sessions at once. Everyone started again goes on from the checkpoint.

    One worker comes back before the chief: it is as new as all others, and drives nothing, since nothing is left.
    """
    with ProcessCluster(serve, tmp_path, (20, [[1, 5]]), **KEYS) as job:
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
        time.sleep(2 * DEPUTY_BEATS * QUICK.beat)
        assert "nobody drives the job any more" not in job.errors(W1)
        job.start(CHIEF)
        job.start(W0)
        for task in (W0, W1):
            assert job.hear(task, "restored") is True
            assert job.hear(task, "begins") == [303.0, 303.0]
            assert job.hear(task, "sums") == [2020.0, 2020.0]
        job.finish()


@pytest.mark.soak  # test_a_server_s_loss_costs_one_restart looks at the same, and at what it costs
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

    with ProcessCluster(once, tmp_path, (12,), **{**KEYS, "restarts": 8}) as job:
        for task in (W0, W1):
            job.hear(task, "at", 5)
        job.kill(PS1)
        job.open("go")
        job.finish()
        for task in (W0, W1):
            assert job.said(task, "sums") == [[24.0, 24.0]]
