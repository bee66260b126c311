"""A server is lost, and another process is started in its place: it gets its variables back while the job goes on."""

from __future__ import annotations

import dataclasses
import signal
import time

import numpy as np
import pytest

import psclient as ps
from pstesting.processes import CALM, CHIEF, PS0, PS1, QUICK, W0, W1, ProcessCluster
from pstesting.script import DIRECTORY, ME, gate, say
from pswire.cluster import Task
from tests.faults.test_chief_faults import standing_by
from tests.faults.test_lost_servers import BOTH, PS2, rows, values

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


@pytest.mark.parametrize("lost", BOTH, ids=str)
def test_a_server_comes_back(tmp_path, lost):
    """Nobody restarts; then the other server is lost, and what came back has all: each step has counted once."""
    with ProcessCluster(learn, tmp_path, (60, [20, 30, 40]), **KEYS) as job:
        job.hear(W0, "at", 20)
        lose(job, lost)
        start_again(job, lost)
        job.open("go 20")
        for task in (W0, W1):
            job.hear(task, "at", 30)
            job.hear_error(task, f"goes on with {lost}, which is back")
        await_variables(job, lost)
        lose(job, OTHER[lost])
        job.open("go 30")
        job.open("go 40")
        for task in (W0, W1):
            assert job.hear(task, "is") == values(60, 60)
        assert {job.exited(task) for task in (W0, W1, CHIEF, lost)} == {0}
        assert not any((tmp_path / "checkpoints" / "handover").glob("*"))


def test_two_servers_come_back(tmp_path):
    """One after the other; then those are lost that had their copies."""
    with ProcessCluster(learn, tmp_path, (None, [20]), **{**KEYS, "ps": 4}) as job:
        job.hear(W0, "at", 20)
        for server in (PS0, PS2):
            lose(job, server)
        for server in (PS0, PS2):
            job.start(server)
        job.hear_error(CHIEF, "answers again, as a new process")
        job.open("go 20")
        for task in (CHIEF, W0, W1):  # whichever is back first
            for server in (PS0, PS2):
                job.until(lambda task=task, server=server: f"goes on with {server}, which is back" in job.errors(task))
        await_variables(job, PS0, PS2)
        for server in (PS1, PS3):
            lose(job, server)
        (tmp_path / "enough").touch()
        found = job.hear(W0, "is")
        assert found == job.hear(W1, "is") == values(found[2], found[2])


@pytest.mark.parametrize("lost", BOTH, ids=str)
def test_the_chief_and_a_server_die_at_once_and_are_started_again(tmp_path, lost):
    """The new chief finds a new process in the place of a server of which nobody knows that it was lost: no new job."""
    with ProcessCluster(learn, tmp_path, (60, [20, 30, 40]), **KEYS) as job:
        job.hear(W0, "at", 20)
        job.hear(W1, "at", 20)
        job.kill(CHIEF)
        job.kill(lost)
        job.start(lost)
        with job.server(lost) as server:
            assert not server.status().incarnations
        job.start(CHIEF)
        await_return(job, lost)
        job.open("go 20")
        for task in (W0, W1):
            job.hear(task, "at", 30)
            job.hear_error(task, f"goes on with {lost}, which is back")
        await_variables(job, lost)
        job.kill(OTHER[lost])
        job.open("go 30")
        job.open("go 40")
        for task in (W0, W1):
            assert job.hear(task, "is") == values(60, 60)


@pytest.mark.parametrize("heir", ["started", "standing by"])
def test_the_chief_and_the_server_that_keeps_the_log_die_at_once(tmp_path, heir):
    """As with the host of both: the next chief finds that nothing listens there any more, and tells the others."""
    keys = KEYS | {"timeouts": dataclasses.replace(CALM, lease=4.0)}
    with ProcessCluster(learn, tmp_path, (60, [20, 30]), **keys) as job:
        job.hear(W0, "at", 20)
        job.hear(W1, "at", 20)
        waiting = standing_by(job)[0] if heir == "standing by" else None
        job.kill(CHIEF)
        job.kill(PS0)
        if waiting is None:
            job.start(CHIEF)
        job.open("go 20")
        for task in (W0, W1):
            job.hear_error(task, f"goes on without {PS0}: was lost (nothing listens there any more")
            job.hear(task, "at", 30)
        job.open("go 30")
        for task in (W0, W1):
            assert job.hear(task, "is") == values(60, 60)
        if waiting is not None:
            assert waiting.wait(60) == 0


@pytest.mark.parametrize("lost", BOTH, ids=str)
def test_who_is_started_after_a_server_is_back_takes_part(tmp_path, lost):
    """A worker, and a chief, that have never known the server as gone: they ask the one that keeps the log since."""
    with ProcessCluster(learn, tmp_path, (None, []), **KEYS) as job:
        with job.server(OTHER[lost]) as other:
            job.until(lambda: other.status().round > 5)
            lose(job, lost)
            job.start(lost)
            all_go_on_with(job, lost)
            before = other.status().epoch.number
            for task in (W1, CHIEF):
                job.kill(task)
                job.start(task)
            job.until(lambda: (now := other.status().epoch).number > before and len(now.members) == 2)
        (tmp_path / "enough").touch()
        for task in (W0, W1, CHIEF):
            assert job.exited(task) == 0


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


@pytest.mark.parametrize("lost", [PS1, pytest.param(PS0, marks=pytest.mark.soak)], ids=str)
def test_rows_and_tables_come_back(tmp_path, lost):
    """Everything is, bit for bit, as it is in a cluster that has lost no server."""
    found = []
    for number, killed in enumerate((None, lost)):
        directory = tmp_path / str(number)
        directory.mkdir()
        keys = {**KEYS, "replication": int(killed is not None)}
        with ProcessCluster(rows, directory, (40, [20, 30]), **keys) as job:
            for task in (W0, W1):
                job.hear(task, "at", 20)
            if killed is not None:
                lose(job, killed)
                start_again(job, killed)
            go_on(job, 20)
            for task in (W0, W1):
                job.hear(task, "at", 30)
            if killed is not None:
                job.hear_error(W0, f"goes on with {killed}, which is back")
                await_variables(job, killed)
                lose(job, OTHER[killed])
            go_on(job, 30)
            found.append([job.hear(task, "is") for task in (W0, W1)])
            assert job.exited(W0) == job.exited(W1) == 0
    assert found[0] == found[1]


def test_a_server_that_dies_while_it_is_taken_back(tmp_path):
    """The job goes on without it, and takes back the process after it."""
    with ProcessCluster(learn, tmp_path, (60, [20, 30, 40]), **KEYS) as job:
        job.hear(W0, "at", 20)
        lose(job, PS1)
        start_again(job, PS1)
        job.kill(PS1)
        job.open("go 20")
        job.hear_error(CHIEF, f"the job goes on without {PS1}, which could not be taken back: {PS1}: was lost")
        for task in (W0, W1):
            job.hear(task, "at", 30)
        start_again(job, PS1)
        job.open("go 30")
        for task in (W0, W1):
            job.hear_error(task, f"goes on with {PS1}, which is back")
            job.hear(task, "at", 40)
        await_variables(job, PS1)
        lose(job, PS0)
        job.open("go 40")
        for task in (W0, W1):
            assert job.hear(task, "is") == values(60, 60)


@pytest.mark.parametrize("killed", [CHIEF, pytest.param(W1, marks=pytest.mark.soak)], ids=str)
def test_a_process_that_dies_while_a_server_is_taken_back(tmp_path, killed):
    """Of a chief the lowest worker goes on with what it has begun; a worker is left out."""
    # Nobody but who is killed may be lost, on a busy machine either.
    timeouts = dataclasses.replace(QUICK, lease=20.0)
    with ProcessCluster(learn, tmp_path, (60, [20, 30, 40]), **{**KEYS, "timeouts": timeouts}) as job:
        job.hear(W0, "at", 20)
        lose(job, PS1)
        start_again(job, PS1)
        job.pause(PS1)
        job.kill(killed)
        job.open("go 20")
        if killed == CHIEF:
            job.hear_error(W0, f"{W0} does, from now on")
        else:
            with job.server(PS0) as server:
                job.until(lambda: len(server.status().epoch.members) == 1)
        job.resume(PS1)
        job.hear(W0, "at", 30)
        job.hear_error(W0, f"goes on with {PS1}, which is back")
        await_variables(job, PS1)
        job.kill(PS0)
        job.open("go 30")
        job.open("go 40")
        found = job.hear(W0, "is")
        assert found in ([values(60, 60)] if killed == CHIEF else [values(60, both) for both in (20, 21)])
        assert job.exited(W0) == 0


def test_a_server_that_comes_too_late_ends_with_the_job(tmp_path):
    """The job ends before anybody has taken it back; it is told so."""
    with ProcessCluster(learn, tmp_path, (21, [20]), **KEYS) as job:
        job.hear(W0, "at", 20)
        lose(job, PS1)
        start_again(job, PS1)
        job.open("go 20")
        for task in (W0, W1):
            assert job.hear(task, "is") == values(21, 21)
        assert {job.exited(task) for task in (W0, W1, CHIEF, PS0, PS1)} == {0}
