"""A server that dies or is replaced: every process gets `ServerLost` that names it, and nobody mixes states.

One that is only silent is waited for.
"""

from __future__ import annotations

import time

import numpy as np
import pytest

import psclient as ps
from psserver.state.sessions import DEPUTY_BEATS
from pstesting.processes import CHIEF, PS0, PS1, QUICK, W0, W1, ProcessCluster
from pstesting.script import DIRECTORY, ME, add_all, gate, say
from tests.kit.internals import SERVER_LOST


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
