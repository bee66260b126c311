"""A chief that dies, is replaced, or is doubled: workers go on as far as they can, and only the newest is heard."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

import psclient as ps
from pstesting import forks
from pstesting.processes import CALM, CHIEF, PS0, PS1, QUICK, SECONDS, W0, W1, ProcessCluster
from pstesting.script import ME, add, gate, say
from tests.kit.internals import SERVER_LOST, child_environ


def drive(stops, rounds=4):
    """Some rounds of each of three sections; a stop is a section and a round of it, with a gate before that."""
    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        variables = [ps.Variable(np.zeros(4), name=name) for name in "uvw"]
    for section, variable in enumerate(variables):
        for round in range(rounds):
            if [section, round] in stops:
                say("at", [section, round])
                gate(f"{section}.{round}")
            strategy.run(lambda variable=variable: add(variable, np.full(4, 100.0**ME)))
        say("made", float(variable[0]))
    with strategy.scope():
        late = ps.Variable(np.ones(2), name="late")
    say("sums", [float(variable[0]) for variable in variables] + [float(late[0])])


SUMS = [4 * 101.0] * 3 + [1.0]
"""The sums that two workers make."""

KNOWN = (0, 2)
"""A stop amid rounds of a section that is known; the next one needs a chief."""


@contextmanager
def driven(directory, *stops, rounds=4, **keys):
    """A job whose workers stand at its first stop."""
    keys = {"ps": 2, "workers": 2, "chief": "driver", "timeouts": QUICK, **keys}
    gates = [f"{section}.{round}" for section, round in stops]
    with ProcessCluster(drive, directory, ([list(stop) for stop in stops], rounds), gates=gates, **keys) as job:
        for task in (W0, W1):
            job.hear(task, "at", list(stops[0]))
        yield job


def takes_over(job, heir):
    """Waits until a worker drives."""
    job.hear_error(heir, f"nobody drives the job any more: {heir} does, from now on")


def standing_by(job):
    """Starts one more process of the chief task, which stands by; waits until it does."""
    cluster = job.cluster
    command = [sys.executable, "-P", "-m", "psclient", "--die-with-parent", str(os.getpid()), "--log-level", "info"]
    told = cluster._options.variables() | cluster._told(CHIEF)
    environ = child_environ(4, cluster.config.timeouts, told)
    process = forks.Forked[str]([*command, "--standby"], env=environ, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert any("stands by until its chief is gone" in line for line in iter(process.stderr.readline, ""))
    return process


def test_a_chief_whose_place_is_taken_by_one_that_stands_by(tmp_path):
    """At once, whether it was told to end or was killed: no worker takes over; all sums are exact."""
    stops = KNOWN, (1, 0), (2, 0)
    unhurried = replace(CALM, beat=3.0)  # a worker waits for two beats, one that stands by for little more than one
    with driven(tmp_path, *stops, timeouts=unhurried) as job, job.server(PS0) as server:
        first = standing_by(job)
        job.open("0.2")
        for chief, number, stop in ((job.cluster.processes[CHIEF], signal.SIGTERM, stops[1]), (first, None, stops[2])):
            for task in (W0, W1):
                job.hear(task, "at", list(stop))
            if number is None:
                second = standing_by(job)
            known = server.status().log
            began = time.monotonic()
            chief.send_signal(number or signal.SIGKILL)
            job.open(f"{stop[0]}.{stop[1]}")
            job.until(lambda known=known: server.status().log > known)  # the first decision of the next chief
            assert time.monotonic() - began < CALM.lease / 2
        for task in (W0, W1):
            assert job.hear(task, "sums") == SUMS
            assert job.exited(task) == 0
            assert "nobody drives the job any more" not in job.errors(task)
        assert (first.wait(SECONDS), second.wait(SECONDS)) == (-signal.SIGKILL, 0)
        assert {job.exited(task) for task in (PS0, PS1)} == {0}


def test_a_paused_chief_in_whose_place_another_drives(tmp_path):
    """The worker that drives is the only one heard; when the chief wakes it is told so, and ends.

    When it comes back it stands by while the worker drives. That one ends with all others, by the loss of a server: it
    need not, and begins the job anew.
    """
    with driven(tmp_path, KNOWN, (1, 2)) as job:
        job.pause(CHIEF)
        takes_over(job, W0)
        job.open("0.2")
        for task in (W0, W1):
            job.hear(task, "at", [1, 2])
        job.resume(CHIEF)
        job.hear_error(CHIEF, f"another process is chief of this job, as {W0}")
        assert job.exited(CHIEF) == 1
        job.start(CHIEF)
        job.hear_error(CHIEF, f"{W0} drives the job in the place of {CHIEF}, which stands by")
        job.kill(PS1)
        job.start(PS1)
        job.open("1.2")
        for task in (W0, W1):
            job.hear_error(task, f"error: {PS1}: was ")
            assert job.exited(task) == SERVER_LOST
            job.start(task)
        for task in (W0, W1):
            assert job.hear(task, "sums") == SUMS
        job.finish()


def test_of_two_chiefs_the_older_is_refused(tmp_path):
    """One that was silent, and replaced, is told so when it speaks again; the job does not notice it.

    As long as nobody has taken its place, as no worker could, it goes on after its lease, with a new token.
    """
    with driven(tmp_path, KNOWN) as job, job.server(PS0) as server:
        for task in (W0, W1, CHIEF):
            job.pause(task)
        job.until(lambda: "lost" in [s.state for s in server.status().sessions if s.drives])
        job.resume(CHIEF)
        job.hear_error(CHIEF, "nobody has taken its place, and it goes on")
        for task in (W0, W1):
            job.resume(task)
        older = job.cluster.processes[CHIEF]
        job.pause(CHIEF)
        job.until(lambda: server.status().chief > 0.7)
        job.start(CHIEF)
        job.until(lambda: server.status().chief < 0.5)
        job.open("0.2")
        for task in (W0, W1):
            job.hear(task, "made")
        older.send_signal(signal.SIGCONT)
        assert older.wait(SECONDS) == 1
        assert "this session was ended: " in job.errors(CHIEF)
        for task in (W0, W1):
            assert job.hear(task, "sums") == SUMS
        job.finish()


def test_worker_0_leaves_a_job_that_it_drives(tmp_path):
    """In a cluster without a chief the next worker drives on, and worker 0 ends with code 0."""
    with driven(tmp_path, KNOWN, rounds=40, chief="none") as job:
        job.kill(W0, signal.SIGTERM)
        job.hear_error(W0, "told to end (SIGTERM)")
        job.open("0.2")
        assert job.exited(W0) == 0
        job.hear_error(W0, f"the chief in {W0} leaves")
        takes_over(job, W1)
        job.hear(W1, "sums")
        assert {job.exited(task) for task in (W1, PS0, PS1)} == {0}
