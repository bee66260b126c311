"""Who drives a job, and who is given up, by whom, on what: chiefs, second processes and jobs, scripts that differ."""

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
from tests.kit.workers import learn


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
    job.hear_error(heir, f"the chief is down: {heir} takes over as chief")


def standing_by(job):
    """Starts one more process of the chief task, which stands by; waits until it does."""
    cluster = job.cluster
    command = [sys.executable, "-P", "-m", "psclient", "--die-with-parent", str(os.getpid()), "--log-level", "info"]
    told = cluster._options.variables() | cluster._told(CHIEF)
    environ = child_environ(4, cluster.config.timeouts, told)
    process = forks.Forked[str]([*command, "--standby"], env=environ, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert any("is on standby until its chief is down" in line for line in iter(process.stderr.readline, ""))
    return process


def test_a_chief_whose_place_is_taken_by_one_that_stands_by(tmp_path):
    """At once, whether it was told to end or was killed: no worker takes over; all sums are exact."""
    stops = KNOWN, (1, 0), (2, 0)
    unhurried = replace(
        CALM, heartbeat_interval=3.0
    )  # a worker waits for two heartbeats, one that stands by for little more than one
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
            assert time.monotonic() - began < CALM.session_timeout / 2
        for task in (W0, W1):
            assert job.hear(task, "sums") == SUMS
            assert job.exited(task) == 0
            assert "the chief is down" not in job.errors(task)
        assert (first.wait(SECONDS), second.wait(SECONDS)) == (-signal.SIGKILL, 0)
        assert {job.exited(task) for task in (PS0, PS1)} == {0}


def test_a_paused_chief_in_whose_place_another_drives(tmp_path):
    """The worker that drives is the only one heard; when the chief wakes it is told so, and ends.

    As long as nobody has taken its place, as no worker could, it goes on after its lease, with a new token. When it
    comes back it stands by while the worker drives. That one ends with all others, by the loss of a server: it need
    not, and begins the job anew.
    """
    with driven(tmp_path, KNOWN, (1, 2)) as job:
        for task in (W0, W1, CHIEF):
            job.pause(task)
        with job.server(PS0) as server:
            job.until(lambda: "lost" in [s.state for s in server.status().sessions if s.drives])
        job.resume(CHIEF)
        job.hear_error(CHIEF, "and continues: no other took over")
        for task in (W0, W1):
            job.resume(task)
        job.pause(CHIEF)
        takes_over(job, W0)
        job.open("0.2")
        for task in (W0, W1):
            job.hear(task, "at", [1, 2])
        job.resume(CHIEF)
        job.hear_error(CHIEF, f"another process is chief of this job, as {W0}")
        assert job.exited(CHIEF) == 1
        job.start(CHIEF)
        job.hear_error(CHIEF, f"{W0} has taken over the job from {CHIEF}, which is the standby now")
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


def test_worker_0_leaves_a_job_that_it_drives(tmp_path):
    """In a cluster without a chief the next worker drives on, and worker 0 ends with code 0."""
    with driven(tmp_path, KNOWN, (0, 39), rounds=40, chief="none") as job:
        job.kill(W0, signal.SIGTERM)
        job.hear_error(W0, "received SIGTERM")
        job.open("0.2")
        job.hear(W1, "at", [0, 39])
        assert job.exited(W0) == 0
        job.hear_error(W0, f"the chief in {W0} leaves")
        takes_over(job, W1)
        job.open("0.39")
        job.hear(W1, "sums")
        assert {job.exited(task) for task in (W1, PS0, PS1)} == {0}


def outcome(process: subprocess.Popen[bytes]) -> tuple[int, str]:
    """The code of a process that ends by itself, and what it printed on stderr."""
    _, errors = process.communicate(timeout=SECONDS)
    return process.returncode, errors.decode()


def test_a_job_that_was_not_left_cleanly_is_discarded(tmp_path):
    """A second process and a second job are refused, with a sentence that says what to do; so is `psctl job delete`.

    The job that runs does not notice, and goes on without its first server. Once its processes are dead its variables
    are held for them: another job is refused until `psctl job delete`. The server that keeps its sessions is asked
    whether anybody is there, and told that it is over.
    """
    stops, gates = [(0, 5, "0 at 5"), (0, 8, "0 at 8")], ["0 at 5", "0 at 8"]
    keys = {"ps": 2, "workers": 2, "chief": "driver", "replication_factor": 2, "timeouts": QUICK}
    with ProcessCluster(learn, tmp_path, (20, "ps.Sync()", stops), **keys, gates=gates) as job:
        servers = ",".join(job.cluster.addresses[task] for task in (PS0, PS1))
        psctl = [sys.executable, "-m", "psclient.psctl", "--address", servers, "job", "delete"]
        environ = os.environ | job.cluster._options.variables()

        def end():
            return forks.run(psctl, env=environ, capture_output=True, text=True, timeout=SECONDS, check=False)

        job.hear(W0, "at", 5)
        strays = [job.stray(W1), job.stray(W0, PS_JOB="blue"), job.stray(CHIEF)]
        (second, said), (other, refused), (chief, rival) = map(outcome, strays)
        assert (second, other, chief) == (2, 2, 2)
        assert f"error: {W1}: another process is {W1} of this job" in said
        assert f"{W0} belongs to the job 'blue', but these servers hold the job '{job.cluster.job}'" in refused
        assert f"set PS_JOB={job.cluster.job}" in refused
        assert "psctl job delete" in refused
        assert "another process is chief of this job" in rival
        job.kill(PS0)
        job.hear_error(W0, f"goes on without {PS0}")
        job.open("0 at 5")
        job.hear(W0, "at", 8)
        assert job.said(W0, "did")[-1] == 7
        refused = end()
        assert refused.returncode == 2
        assert f"still connected: {CHIEF}, {W0}, {W1}; " in refused.stderr
        for task in (CHIEF, W0, W1):
            job.kill(task)
        with job.server(PS1) as server:
            job.until(lambda: not [s for s in server.status().sessions if s.state == "open"])
        code, said = outcome(job.stray(W0, PS_JOB="blue"))
        assert code == 2
        assert "it was not closed cleanly, and its variables are still there" in said
        done = end()
        assert (done.returncode, done.stdout) == (0, f"the job {job.cluster.job!r} is over\n"), done.stderr
        assert job.exited(PS1) == 0


def test_a_refused_connection_may_be_silence(tmp_path):
    """Behind a proxy nobody knows who refuses: with PS_CONNECTION_REFUSED=retry it takes as long as silence does."""
    keys = {"ps": 2, "workers": 2, "chief": "driver", "timeouts": replace(QUICK, server_timeout=4.0)}
    job = ProcessCluster(learn, tmp_path, (20, "ps.Sync()", [(1, 5, "1 at 5")]), **keys, gates=["1 at 5"])
    job.cluster.client_environ = {"PS_CONNECTION_REFUSED": "retry"}
    with job:
        job.hear(W1, "at", 5)
        job.kill(PS1)
        assert "PS_SERVER_TIMEOUT" in job.hear_error(W0, f"error: {PS1}: was lost")
        assert "PS_SERVER_TIMEOUT" in job.hear_error(CHIEF, f"error: {PS1}: was lost")
