"""A chief that dies, is replaced, or is doubled: workers go on as far as they can, and only the newest is heard."""

from __future__ import annotations

import signal
import time

import numpy as np
import pytest

import psclient as ps
from psclient._src.processes.shutdown import SERVER_LOST
from pstesting.processes import CHIEF, MARGIN, PS0, PS1, QUICK, SECONDS, W0, W1, ProcessCluster
from pstesting.script import ME, add, gate, say


def drive(known, after):
    """`known` rounds of one section, a gate in their middle, then as many of another one."""
    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        v = ps.Variable(np.zeros(4), name="v")
        u = ps.Variable(np.zeros(4), name="u")
    while strategy.round < known:
        if strategy.round == known // 2:
            say("at", strategy.round)
            gate("known")
        strategy.run(lambda: add(v, np.full(4, 100.0**ME)))
    say("known", float(v[0]))
    for _ in range(after):
        strategy.run(lambda: add(u, np.full(4, 100.0**ME)))
    with strategy.scope():
        late = ps.Variable(np.ones(2), name="late")
    say("sums", [float(v[0]), float(u[0]), float(late[0])])


def test_a_chief_that_dies_and_is_replaced(tmp_path):
    """Approved sections run without it; a new one waits and says for whom; the next chief goes on from there."""
    keys = {"ps": 2, "workers": 2, "chief": "driver", "timeouts": QUICK, "gates": ["known"]}
    with ProcessCluster(drive, tmp_path, (20, 5), **keys) as job:
        for task in (W0, W1):
            job.hear(task, "at", 10)
        job.kill(CHIEF)
        job.open("known")
        for task in (W0, W1):
            assert job.hear(task, "known") == 20 * 101.0
        for task in (W0, W1):
            job.hear_error(task, "waits in round 20 for the chief")
        job.start(CHIEF)
        for task in (W0, W1):
            assert job.hear(task, "sums") == [20 * 101.0, 5 * 101.0, 1.0]
        job.finish()


def test_a_chief_that_does_not_come_back(tmp_path):
    """What needs one fails with `ChiefLost` before its deadline, everywhere, and names what to do."""
    timeouts = QUICK.__class__(**{**vars(QUICK), "chief": 5.0})
    with ProcessCluster(drive, tmp_path, (20, 5), workers=2, chief="driver", timeouts=timeouts, gates=["known"]) as job:
        for task in (W0, W1):
            job.hear(task, "at", 10)
        job.kill(CHIEF)
        job.open("known")
        for task in (W0, W1):
            job.hear_error(task, "error: the chief has been silent for")
            assert job.exited(task) == 1


def test_of_two_chiefs_the_older_is_refused(tmp_path):
    """One that was silent, and replaced, is told so when it speaks again; the job does not notice it."""
    keys = {"ps": 2, "workers": 2, "chief": "driver", "timeouts": QUICK, "gates": ["known"]}
    with ProcessCluster(drive, tmp_path, (20, 5), **keys) as job:
        for task in (W0, W1):
            job.hear(task, "at", 10)
        older = job.cluster.processes[CHIEF]
        job.kill(CHIEF, signal.SIGSTOP)
        with job.server(PS0) as server:
            job.until(lambda: server.status().chief > 0.7)
            job.start(CHIEF)
            job.until(lambda: server.status().chief < 0.5)
        job.open("known")
        for task in (W0, W1):
            job.hear(task, "known")
        older.send_signal(signal.SIGCONT)
        assert older.wait(SECONDS) == 1
        assert "this session was ended: " in job.errors(CHIEF)
        for task in (W0, W1):
            assert job.hear(task, "sums") == [20 * 101.0, 5 * 101.0, 1.0]
        job.finish()


@pytest.mark.soak
def test_a_second_chief_is_refused_while_the_first_is_there(tmp_path):
    """It waits for a lease, says for whom, and ends; the first does not notice, and every sum is exact."""
    keys = {"ps": 2, "workers": 2, "chief": "driver", "timeouts": QUICK, "gates": ["known"]}
    with ProcessCluster(drive, tmp_path, (20, 5), **keys) as job:
        for task in (W0, W1):
            job.hear(task, "at", 10)
        older = job.cluster.processes[CHIEF]
        job.start(CHIEF)
        job.hear_error(CHIEF, "another process is chief of this job")
        assert job.cluster.processes[CHIEF].wait(SECONDS) == 2
        assert older.poll() is None
        job.open("known")
        for task in (W0, W1):
            assert job.hear(task, "sums") == [20 * 101.0, 5 * 101.0, 1.0]
        assert older.wait(SECONDS) == 0
        assert {job.exited(task) for task in (W0, W1, PS0, PS1)} == {0}


def test_a_chief_that_was_paused_goes_on(tmp_path):
    """Its lease has ended, and nobody has taken its place: it opens again, with a new token, and the job goes on."""
    keys = {"ps": 2, "workers": 2, "chief": "driver", "timeouts": QUICK, "gates": ["known"]}
    with ProcessCluster(drive, tmp_path, (20, 5), **keys) as job:
        for task in (W0, W1):
            job.hear(task, "at", 10)
        job.kill(CHIEF, signal.SIGSTOP)
        with job.server(PS0) as server:
            job.until(lambda: [s.state for s in server.status().sessions if s.drives] == ["lost"])
        job.open("known")
        for task in (W0, W1):
            job.hear_error(task, "waits in round 20 for the chief")
        job.kill(CHIEF, signal.SIGCONT)
        job.hear_error(CHIEF, "nobody has taken its place, and it goes on")
        for task in (W0, W1):
            assert job.hear(task, "sums") == [20 * 101.0, 5 * 101.0, 1.0]
        job.finish()


def test_a_chief_that_was_paused_tells_that_a_server_was_lost_meanwhile(tmp_path):
    """It alone decides that: when it runs again it says so at once, and every process ends."""
    keys = {"ps": 2, "workers": 2, "chief": "driver", "timeouts": QUICK, "gates": ["known"]}
    with ProcessCluster(drive, tmp_path, (20, 5), **keys) as job:
        for task in (W0, W1):
            job.hear(task, "at", 10)
        job.kill(CHIEF, signal.SIGSTOP)
        with job.server(PS0) as server:
            job.until(lambda: [s.state for s in server.status().sessions if s.drives] == ["lost"])
        job.kill(PS1)
        job.open("known")
        job.kill(CHIEF, signal.SIGCONT)
        began = time.monotonic()
        for task in (CHIEF, W0, W1):
            job.hear_error(task, f"error: {PS1}: was lost (nothing listens there any more")
            assert job.exited(task) == SERVER_LOST
        assert time.monotonic() - began < MARGIN
