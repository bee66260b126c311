"""A server is lost, and its variables have copies: the job goes on at the same round, with exact sums."""

from __future__ import annotations

import time

import numpy as np
import pytest

import psclient as ps
from pstesting.processes import CHIEF, PS0, PS1, QUICK, W0, W1, ProcessCluster
from pstesting.script import ME, gate, say

KEYS = {"ps": 2, "workers": 2, "chief": "driver", "replication": 1, "timeouts": QUICK}


def learn(rounds, stops):
    """Adds up, with a momentum whose rounds each leave their trace; says where it is, and what it has at the end."""
    strategy = ps.ParameterServerStrategy(devices=["cpu:0"])
    with strategy.scope():
        v = ps.Variable(np.zeros(3, "float32"), name="v")
        w = ps.Variable(np.zeros((2, 2), "float32"), name="w")
        optimizer = ps.optimizers.SGD(1.0, momentum=0.5)

    def step(round):
        grads = [(np.full(3, -(ME + 1.0), "float32"), v), (np.full((2, 2), -(round % 4), "float32"), w)]
        optimizer.apply_gradients(grads)
        return np.float32(round)

    for round in range(rounds):
        if round in stops:
            say("at", round)
            gate(f"go {round}")
        own = strategy.run(step, (round,))
        assert float(strategy.reduce("sum", own, axis=None)) == 2 * round
        v.numpy()
    say("is", [v.numpy().tolist(), w.numpy().ravel().tolist(), int(optimizer.iterations.numpy())])


def trained(rounds, gradients):
    """What the optimizer makes of the sums of both workers, in NumPy."""
    value = moment = np.float32(0)
    for round in range(rounds):
        moment = np.float32(0.5) * moment - np.float32(gradients(round))
        value = value - moment
    return float(value)


def expected(rounds):
    v, w = trained(rounds, lambda _: 3.0), trained(rounds, lambda round: 2.0 * (round % 4))
    return [[v] * 3, [w] * 4, rounds]


@pytest.mark.parametrize("lost", [PS1, PS0], ids=str)
def test_the_job_goes_on_without_a_server(tmp_path, lost):
    """It is killed while rounds are made; nobody restarts, and every round has counted once on what is left."""
    rounds = 60
    with ProcessCluster(learn, tmp_path, (rounds, [20]), gates=["go 20"], **KEYS) as job:
        job.hear(W0, "at", 20)
        job.hear(W1, "at", 20)
        job.open("go 20")
        job.kill(lost)
        killed = time.monotonic()
        for task in (W0, W1):
            assert job.hear(task, "is") == expected(rounds)
        print(f"{rounds - 20} rounds after {time.monotonic() - killed:.2f} s")
        assert job.exited(W0) == job.exited(W1) == job.exited(CHIEF) == 0
