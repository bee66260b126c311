"""A server is lost, and another process is started in its place: it gets its variables back while the job goes on."""

from __future__ import annotations

import numpy as np
import pytest

import psclient as ps
from pstesting.processes import CALM, CHIEF, PS0, PS1, W0, W1, ProcessCluster
from pstesting.script import ME, gate, say
from tests.faults.test_lost_servers import BOTH, values

KEYS = {
    "ps": 2,
    "workers": 2,
    "chief": "driver",
    "replication": 1,
    "timeouts": CALM,
    "gates": ["go 20", "go 30", "go 40"],
}


def learn(steps, stops):
    """Adds up, with a momentum by which each step leaves its trace; waits before some steps until the test goes on."""
    strategy = ps.ParameterServerStrategy(devices=["cpu:0"])
    with strategy.scope():
        v = ps.Variable(np.zeros(3, "float32"), name="v")
        w = ps.Variable(np.zeros((2, 2), "float32"), name="w")
        optimizer = ps.optimizers.SGD(1.0, momentum=0.5)
        optimizer.build([v, w])

    def step(number):
        grads = [(np.full(3, -(ME + 1.0), "float32"), v), (np.full((2, 2), -(number % 4), "float32"), w)]
        optimizer.apply_gradients(grads)

    for number in range(steps):
        if number in stops:
            say("at", number)
            gate(f"go {number}")
        strategy.run(step, (number,))
    say("is", [v.numpy().tolist(), w.numpy().ravel().tolist(), int(optimizer.iterations.numpy())])


def await_epoch(job, keeper):
    """Waits until a server's log tells that another one is taken back: the next step waits for that."""
    with job.server(keeper) as server:
        job.until(lambda: (epoch := server.status().epoch) is not None and epoch.returns is not None)


@pytest.mark.parametrize("lost", BOTH, ids=str)
def test_a_server_comes_back(tmp_path, lost):
    """Nobody restarts; then the other server is lost, and what came back has all: each step has counted once."""
    other = PS0 if lost == PS1 else PS1
    with ProcessCluster(learn, tmp_path, (60, [20, 30, 40]), gates=GATES, **KEYS) as job:
        for task in (W0, W1):
            job.hear(task, "at", 20)
        job.kill(lost)
        job.hear_error(CHIEF, f"goes on without {lost}")
        job.start(lost)
        job.hear_error(CHIEF, f"{lost} answers again, as a new process")
        await_epoch(job, other)
        job.open("go 20")
        for task in (W0, W1):
            job.hear(task, "at", 30)
            job.hear_error(task, f"goes on with {lost}, which is back")
        job.kill(other)
        job.hear_error(CHIEF, f"goes on without {other}")
        job.open("go 30")
        for task in (W0, W1):
            job.hear(task, "at", 40)
        job.open("go 40")
        for task in (W0, W1):
            assert job.hear(task, "is") == values(60, 60)
        assert job.exited(W0) == job.exited(W1) == job.exited(CHIEF) == 0
        assert job.exited(lost) == 0
