"""A server is lost, and another process is started in its place: it gets its variables back while the job goes on."""

from __future__ import annotations

import signal
import time

import numpy as np

import psclient as ps
from pstesting.processes import CALM, CHIEF, PS0, PS1, W0, W1, ProcessCluster
from pstesting.script import DIRECTORY, ME, gate, say
from tests.jobs.test_lost_servers import values
from tests.kit.internals import Task

PS3 = Task("ps", 3)

GATES = ["go 20", "go 30", "go 40"]
KEYS = {"ps": 2, "workers": 2, "chief": "driver", "replication": 1, "timeouts": CALM, "gates": GATES}
OTHER = {PS0: PS1, PS1: PS0}


def learn(steps, stops):
    """Adds up, with a momentum by which each step leaves its trace; waits before some steps until the test goes on.

    Without a number of steps it makes them until the test has had enough.
    """
    strategy = ps.ParameterServerStrategy(devices=["cpu:0"])
    with strategy.scope():
        v = ps.Variable(np.zeros(3, "float32"), name="v")
        w = ps.Variable(np.zeros((2, 2), "float32"), name="w")
        optimizer = ps.optimizers.SGD(1.0, momentum=0.5)
        optimizer.build([v, w])

    def step(number):
        grads = [(np.full(3, -(ME + 1.0), "float32"), v), (np.full((2, 2), -(number % 4), "float32"), w)]
        optimizer.apply_gradients(grads)
        time.sleep(0 if steps else 0.01)
        return np.float32((DIRECTORY / "enough").exists())

    number, enough = 0, False
    while not enough and number != steps:
        if number in stops:
            say("at", number)
            gate(f"go {number}")
        seen = strategy.run(step, (number,))
        enough = not steps and float(strategy.reduce("sum", seen, axis=None)) > 0
        number += 1
    say("is", [v.numpy().tolist(), w.numpy().ravel().tolist(), int(optimizer.iterations.numpy())])


def lose(job, server):
    """Kills a server; returns once the job goes on without it."""
    job.kill(server)
    job.hear_error(CHIEF, f"goes on without {server}")


def start_again(job, server):
    """Starts a server again; returns once the next step will wait for it."""
    job.start(server)
    job.hear_error(CHIEF, f"{server} answers again, as a new process")
    await_return(job, server)


def await_return(job, server):
    """Returns once the next step will wait for a server."""
    with job.server(OTHER[server]) as other:
        job.until(lambda: (epoch := other.status().epoch) is not None and epoch.returns is not None)


def all_go_on_with(job, server):
    """Returns once all have said that a server is back."""
    for task in (CHIEF, W0, W1):
        job.hear_error(task, f"goes on with {server}, which is back")


def await_variables(job, *servers):
    """Returns once servers that are back have their variables as they are now: another one may be lost."""
    for server in servers:
        with job.server(server) as there:
            job.until(lambda there=there: (s := there.status()).incarnation in s.incarnations and not s.catching_up)


def replace(job, server):
    """Ends a server in good order, and starts it again; returns once all go on with it, and it has its variables."""
    job.kill(server, signal.SIGTERM)
    for task in (CHIEF, W0, W1):
        job.hear_error(task, f"goes on without {server}")
    assert job.exited(server) == 0  # it has said so before, and listens until then
    job.start(server)
    all_go_on_with(job, server)
    await_variables(job, server)


def go_on(job, number, *tasks):
    """Lets workers go on that wait before a step."""
    for task in tasks:
        job.hear(task, "at", number)
    job.open(f"go {number}")


def test_servers_are_started_anew_one_after_the_other(tmp_path):
    """As in an upgrade: each ends by SIGTERM, the first one twice; training goes on, and each step counts once."""
    with ProcessCluster(learn, tmp_path, (None, [20]), **KEYS) as job:
        go_on(job, 20, W0, W1)
        for server in (PS0, PS1, PS0):
            replace(job, server)
        (tmp_path / "enough").touch()
        found = job.hear(W0, "is")
        assert found == job.hear(W1, "is") == values(found[2], found[2])
        job.finish()
