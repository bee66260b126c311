"""A server that is back reads its variables while training goes on, and makes up the rounds of meanwhile."""

from __future__ import annotations

import time

import numpy as np
import pytest

import psclient as ps
from pstesting.processes import CHIEF, PS0, PS1, W0, W1, ProcessCluster
from pstesting.script import DIRECTORY, ME, say
from tests.jobs.test_differing_servers import problems
from tests.jobs.test_lost_servers import values
from tests.jobs.test_moving_servers import move
from tests.jobs.test_returning_servers import KEYS, OTHER, all_go_on_with, await_variables, lose
from tests.kit.faulty_servers import holds_reading, let_read
from tests.kit.internals import OUTLIVED
from tests.kit.shell import waiting

LARGE = 300_000
"""Elements of a variable whose rounds stream, where their server has its variables."""


def learn(size):
    """Adds up, with a momentum by which each step leaves its trace, until the test has had enough."""
    strategy = ps.ParameterServerStrategy(devices=["cpu:0"])
    with strategy.scope():
        v = ps.Variable(np.zeros(3, "float32"), name="v")
        w = ps.Variable(np.zeros((2, 2), "float32"), name="w")
        large = ps.Variable(np.zeros(size, "float32"), name="large")
        optimizer = ps.optimizers.SGD(1.0, momentum=0.5)
        optimizer.build([v, w, large])

    def step(number):
        mine = -(ME + 1.0)
        grads = [(np.full(3, mine, "float32"), v), (np.full((2, 2), -(number % 4), "float32"), w)]
        optimizer.apply_gradients([*grads, (np.full(size, mine, "float32"), large)])
        time.sleep(0.01)
        return np.float32((DIRECTORY / "enough").exists())

    number, enough = 0, False
    while not enough:
        seen = strategy.run(step, (number,))
        enough = float(strategy.reduce("sum", seen, axis=None)) > 0
        number += 1
    found, first = large.numpy(), v.numpy()
    assert (found == first[0]).all(), (found.min(), found.max(), first)
    say("is", [first.tolist(), w.numpy().ravel().tolist(), int(optimizer.iterations.numpy())])


def stand_still_before_news():
    """Has this process stop once where it waits for news of a server that comes back, until the test lets it go on."""
    import os
    import signal

    from psclient._src.rounds.membership import Follower

    follow = Follower._follow

    def stop(self, deadline, late, word):
        if "which comes back" in word():
            Follower._follow = follow
            say("waits", True)
            os.kill(os.getpid(), signal.SIGSTOP)
        return follow(self, deadline, late, word)

    Follower._follow = stop


def learn_late(size):
    """Learns; worker 0 hears late that a server is back."""
    if ME == 0:
        stand_still_before_news()
    learn(size)


def come_back(job, server):
    """Has a server lost and started again; returns once all go on with it, and it has not read its variables."""
    with job.server(OTHER[server]) as other:
        job.until(lambda: other.status().round > 5)
    lose(job, server)
    job.start(server)
    all_go_on_with(job, server)


def goes_on(job, server, rounds=8):
    """Returns once a server has made some more rounds."""
    with job.server(server) as there:
        first = there.status().round
        job.until(lambda: there.status().round > first + rounds)


def enough(job, directory, *servers):
    """Ends the job; what both workers have learnt is what the steps that they say make."""
    (directory / "enough").touch()
    found = job.hear(W0, "is")
    assert found == job.hear(W1, "is") == values(found[2], found[2])
    assert {job.exited(task) for task in (W0, W1, CHIEF, *servers)} == {0}


@pytest.mark.parametrize("lost", [PS1, pytest.param(PS0, marks=pytest.mark.soak)], ids=str)
def test_training_goes_on_while_a_server_reads(tmp_path, lost):
    """What was handed over to its first process is damaged: it says so, ends, and the job goes on without it.

    The next one takes part in all rounds while it reads, and has them all: the other server is lost then.
    """
    with ProcessCluster(learn, tmp_path, (LARGE,), servers_environ=holds_reading(tmp_path), **KEYS) as job:
        come_back(job, lost)
        handed = tmp_path / "checkpoints" / "handover"
        job.until(lambda: any(handed.glob("*/manifest.json")))
        for file in handed.glob("*/*.safetensors"):
            file.write_bytes(file.read_bytes()[:-1000])
        let_read(tmp_path)
        job.hear_error(lost, "ends: it could not read the variables that were handed over to it: ")
        assert job.exited(lost) == OUTLIVED
        job.hear_error(CHIEF, f"goes on without {lost}")
        (tmp_path / "reading" / "read").unlink()
        job.start(lost)
        all_go_on_with(job, lost)
        for server in (PS0, PS1):
            goes_on(job, server)
        with job.server(lost) as server:
            assert server.status().catching_up
        assert "end no other server until it has" in problems(job)["catching_up", str(lost)]
        let_read(tmp_path)
        await_variables(job, lost)
        assert not [key for key in problems(job) if key[0] == "catching_up"]
        lose(job, OTHER[lost])
        goes_on(job, lost)
        enough(job, tmp_path, lost)


def test_a_server_is_lost_that_has_not_told_all_of_the_others_return(tmp_path):
    """Who has not heard of it finds the server that is back, keeps its session there, and goes on."""
    helpers = learn, stand_still_before_news
    with ProcessCluster(learn_late, tmp_path, (LARGE,), helpers, **KEYS) as job:
        with job.server(PS0) as other:
            job.until(lambda: other.status().round > 5)
        lose(job, PS1)
        job.start(PS1)
        job.hear(W0, "waits")
        job.hear_error(PS1, "has its variables, with ")
        lose(job, PS0)
        job.resume(W0)
        job.hear_error(W0, f"goes on without {PS0}")
        goes_on(job, PS1)
        enough(job, tmp_path, PS1)


def test_training_goes_on_while_a_server_moves(tmp_path):
    """It ends once the job goes on elsewhere; then the other one is lost."""
    with ProcessCluster(learn, tmp_path, (LARGE,), servers_environ=holds_reading(tmp_path), **KEYS) as job:
        goes_on(job, PS1, 5)
        with waiting(job, tmp_path, **holds_reading(tmp_path / "new")) as (new,):
            move(job, PS1, new)
            assert job.exited(PS1) == 0
            goes_on(job, PS1)
            goes_on(job, PS0)
            assert "has its variables" not in new.text()
            let_read(tmp_path / "new")
            new.hear("has its variables")
            lose(job, PS0)
            goes_on(job, PS1)
            enough(job, tmp_path)
            assert new.end() == 0
