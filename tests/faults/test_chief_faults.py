"""A chief that dies, is replaced, or is doubled: workers go on as far as they can, and only the newest is heard."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import psclient as ps
from psclient._src.config import child_environ
from psclient._src.processes.shutdown import SERVER_LOST
from pstesting import forks
from pstesting.processes import CALM, CHIEF, MARGIN, PS0, PS1, QUICK, SECONDS, W0, W1, W2, ProcessCluster
from pstesting.script import ME, add, gate, say


def drive(known, after, stops=False):
    """`known` rounds of one section, a gate in their middle, then `after` of another one, maybe behind a gate."""
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
    if stops:
        gate("new")
    for _ in range(after):
        strategy.run(lambda: add(u, np.full(4, 100.0**ME)))
    with strategy.scope():
        late = ps.Variable(np.ones(2), name="late")
    say("sums", [float(v[0]), float(u[0]), float(late[0])])


def standing_by(job):
    """Starts one more process of the chief task, which stands by; waits until it does."""
    cluster = job.cluster
    command = [sys.executable, "-P", "-m", "psclient", "--die-with-parent", str(os.getpid()), "--log-level", "info"]
    told = cluster._options.variables() | cluster._told(CHIEF)
    environ = child_environ(4, cluster.config.timeouts, told)
    process = forks.Forked[str]([*command, "--standby"], env=environ, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    lines = iter(process.stderr.readline, "")
    assert any("stands by until its chief is gone" in line for line in lines)
    return process, lines


def first_approval(job, since, known):
    """Seconds from a moment until server 0's log is longer than it was: the first decision of the next chief."""
    with job.server(PS0) as server:
        job.until(lambda: server.status().log > known)
    return time.monotonic() - since


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_chief_whose_place_is_taken_by_one_that_stands_by(tmp_path, how, capsys):
    """Within about a second after its session is known to be gone: no worker takes over; all sums are exact."""
    keys = {"ps": 2, "workers": 2, "chief": "driver", "timeouts": CALM, "gates": ["known", "new"]}
    with ProcessCluster(drive, tmp_path, (20, 5, True), **keys) as job:
        for task in (W0, W1):
            job.hear(task, "at", 10)
        standby, lines = standing_by(job)
        job.open("known")
        for task in (W0, W1):
            job.hear(task, "known")
        with job.server(PS0) as server:
            known = server.status().log
        began = time.monotonic()
        job.kill(CHIEF, how)
        job.open("new")
        took = first_approval(job, began, known)
        with capsys.disabled():
            print(f"\n{how.name} of the chief: one that stands by has approved the next section {took:.2f} s later")  # noqa: T201
        assert took < CALM.lease / 2
        for task in (W0, W1):
            assert job.hear(task, "sums") == [20 * 101.0, 5 * 101.0, 1.0]
            assert job.exited(task) == 0
            assert "nobody drives the job any more" not in job.errors(task)
        assert standby.wait(SECONDS) == 0, list(lines)
        assert {job.exited(task) for task in (PS0, PS1)} == {0}


def test_a_chief_whose_place_nobody_stands_by_for(tmp_path, capsys):
    """The lowest worker that lives drives on, to the end of the job; once that is gone as well, the next one."""
    keys = {"ps": 2, "workers": 3, "chief": "driver", "timeouts": QUICK, "gates": ["known"]}
    with ProcessCluster(drive, tmp_path, (20, 5), **keys) as job:
        for task in (W0, W1, W2):
            job.hear(task, "at", 10)
        began = time.monotonic()
        job.kill(CHIEF)
        job.hear_error(W0, f"nobody drives the job any more: {W0} does, from now on")
        with capsys.disabled():
            print(f"\nSIGKILL of the chief: the lowest worker drives {time.monotonic() - began:.2f} s later")  # noqa: T201
        job.kill(W0)
        job.hear_error(W1, f"nobody drives the job any more: {W1} does, from now on")
        job.open("known")
        for task in (W1, W2):
            job.hear(task, "sums")
            assert job.exited(task) == 0
        assert {job.exited(task) for task in (PS0, PS1)} == {0}
        assert "nobody drives" not in job.errors(W2)


def test_a_chief_that_comes_back_stands_by(tmp_path):
    """While a worker drives; it ends with the job."""
    keys = {"ps": 2, "workers": 2, "chief": "driver", "timeouts": QUICK, "gates": ["known"]}
    with ProcessCluster(drive, tmp_path, (20, 5), **keys) as job:
        for task in (W0, W1):
            job.hear(task, "at", 10)
        job.kill(CHIEF)
        job.hear_error(W0, f"nobody drives the job any more: {W0} does, from now on")
        job.start(CHIEF)
        job.hear_error(CHIEF, f"{W0} drives the job in the place of {CHIEF}, which stands by")
        job.open("known")
        for task in (W0, W1):
            assert job.hear(task, "sums") == [20 * 101.0, 5 * 101.0, 1.0]
        job.finish()


def test_a_chief_that_stands_by_begins_a_lost_job_anew(tmp_path):
    """The worker in whose place it stands by has ended with all others, by the loss of a server: it need not."""
    keys = {"ps": 2, "workers": 2, "chief": "driver", "timeouts": QUICK, "gates": ["known"]}
    with ProcessCluster(drive, tmp_path, (20, 5), **keys) as job:
        for task in (W0, W1):
            job.hear(task, "at", 10)
        job.kill(CHIEF)
        job.hear_error(W0, f"nobody drives the job any more: {W0} does, from now on")
        job.start(CHIEF)
        job.hear_error(CHIEF, f"{W0} drives the job in the place of {CHIEF}, which stands by")
        job.kill(PS1)
        job.start(PS1)
        job.open("known")
        for task in (W0, W1):
            assert job.exited(task) == SERVER_LOST
            job.start(task)
        for task in (W0, W1):
            assert job.hear(task, "sums") == [20 * 101.0, 5 * 101.0, 1.0]
        job.finish()


def test_worker_0_leaves_a_job_that_it_drives(tmp_path):
    """In a cluster without a chief the next worker drives on, and worker 0 ends with code 0."""
    keys = {"ps": 2, "workers": 2, "timeouts": QUICK, "gates": ["known"]}
    with ProcessCluster(drive, tmp_path, (600, 5), **keys) as job:
        for task in (W0, W1):
            job.hear(task, "at", 300)
        time.sleep(0.5)  # it waits at the gate by then, in a call that the signal interrupts
        job.kill(W0, signal.SIGTERM)
        job.hear_error(W0, "told to end (SIGTERM)")
        job.open("known")
        assert job.exited(W0) == 0
        job.hear_error(W0, f"the chief in {W0} leaves")
        job.hear_error(W1, f"nobody drives the job any more: {W1} does, from now on")
        job.hear(W1, "sums")
        assert {job.exited(task) for task in (W1, PS0, PS1)} == {0}


def test_a_paused_chief_in_whose_place_another_drives(tmp_path):
    """The worker that drives is the only one heard; when the chief wakes it is told so, and ends."""
    keys = {"ps": 2, "workers": 2, "chief": "driver", "timeouts": QUICK, "gates": ["known"]}
    with ProcessCluster(drive, tmp_path, (20, 5), **keys) as job:
        for task in (W0, W1):
            job.hear(task, "at", 10)
        job.pause(CHIEF)
        job.hear_error(W0, f"nobody drives the job any more: {W0} does, from now on")
        job.open("known")
        for task in (W0, W1):
            job.hear(task, "known")
        job.resume(CHIEF)
        job.hear_error(CHIEF, f"another process is chief of this job, as {W0}")
        assert job.exited(CHIEF) == 1
        for task in (W0, W1):
            assert job.hear(task, "sums") == [20 * 101.0, 5 * 101.0, 1.0]
            assert job.exited(task) == 0


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
    """Its lease has ended, and nobody has taken its place, as no worker could: it opens again, with a new token."""
    keys = {"ps": 2, "workers": 2, "chief": "driver", "timeouts": QUICK, "gates": ["known"]}
    with ProcessCluster(drive, tmp_path, (20, 5), **keys) as job:
        for task in (W0, W1):
            job.hear(task, "at", 10)
        for task in (W0, W1, CHIEF):
            job.pause(task)
        with job.server(PS0) as server:
            job.until(lambda: "lost" in [s.state for s in server.status().sessions if s.drives])
        job.open("known")
        job.resume(CHIEF)
        job.hear_error(CHIEF, "nobody has taken its place, and it goes on")
        for task in (W0, W1):
            job.resume(task)
        for task in (W0, W1):
            assert job.hear(task, "sums") == [20 * 101.0, 5 * 101.0, 1.0]
        job.finish()


def test_a_chief_that_was_paused_tells_that_a_server_was_lost_meanwhile(tmp_path):
    """Who drives in its place says so, or the chief once it runs again: every process ends, at once."""
    keys = {"ps": 2, "workers": 2, "chief": "driver", "timeouts": QUICK, "gates": ["known"]}
    with ProcessCluster(drive, tmp_path, (20, 5), **keys) as job:
        for task in (W0, W1):
            job.hear(task, "at", 10)
        job.kill(CHIEF, signal.SIGSTOP)
        with job.server(PS0) as server:
            # By the end of its lease, or by the worker that has taken its place as soon as that was over.
            job.until(lambda: next(s.state for s in server.status().sessions if s.drives) != "open")
        began = time.monotonic()
        job.kill(PS1)
        job.open("known")
        job.kill(CHIEF, signal.SIGCONT)
        for task in (W0, W1):
            job.hear_error(task, f"error: {PS1}: was lost (nothing listens there any more")
            assert job.exited(task) == SERVER_LOST
        assert job.exited(CHIEF) in (1, SERVER_LOST)  # it may have been told first that another one drives
        assert time.monotonic() - began < MARGIN


@pytest.mark.parametrize("heir", ["a worker", "one that stands by"])
def test_a_chief_and_a_server_are_lost_at_the_same_time(tmp_path, heir):
    """Who takes the chief's place finds the server gone where it opens its session, says so, and every process ends."""
    keys = {"ps": 2, "workers": 2, "chief": "driver", "timeouts": QUICK, "gates": ["known"]}
    with ProcessCluster(drive, tmp_path, (20, 5), **keys) as job:
        for task in (W0, W1):
            job.hear(task, "at", 10)
        waiting = standing_by(job)[0] if heir == "one that stands by" else None
        job.pause(CHIEF)  # so that it does not say it itself
        job.kill(PS1)
        began = time.monotonic()
        job.kill(CHIEF)
        job.open("known")
        for task in (W0, W1):
            job.hear_error(task, f"error: {PS1}: was lost (nothing listens there any more")
            assert job.exited(task) == SERVER_LOST
        if waiting is not None:
            assert waiting.wait(SECONDS) == SERVER_LOST
        assert time.monotonic() - began < QUICK.lease + MARGIN
