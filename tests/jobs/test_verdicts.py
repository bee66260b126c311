"""Who is given up, by whom, and on what: second processes, second jobs, scripts that differ."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import numpy as np
import pytest

import psclient as ps
from pstesting import forks
from pstesting.processes import CHIEF, PS0, PS1, QUICK, SECONDS, W0, W1, ProcessCluster
from pstesting.script import DIRECTORY, ME, add, add_all, gate, say
from tests.kit.workers import learn


def digits(total, workers=3):
    """How many contributions of each worker are in a sum."""
    return [int(total) // 100**worker % 100 for worker in range(workers)]


def outcome(process: subprocess.Popen[bytes]) -> tuple[int, str]:
    """The code of a process that ends by itself, and what it printed on stderr."""
    _, errors = process.communicate(timeout=SECONDS)
    return process.returncode, errors.decode()


def test_a_job_that_was_not_left_cleanly_is_discarded(tmp_path):
    """A second process and a second job are refused, with a sentence that says what to do; so is `psctl job end`.

    The job that runs does not notice, and goes on without its first server. Once its processes are dead its variables
    are held for them: another job is refused until `psctl job end`. The server that keeps its sessions is asked whether
    anybody is there, and told that it is over.
    """
    stops, gates = [(0, 5, "0 at 5"), (0, 8, "0 at 8")], ["0 at 5", "0 at 8"]
    keys = {"ps": 2, "workers": 2, "chief": "driver", "replication": 1, "timeouts": QUICK}
    with ProcessCluster(learn, tmp_path, (20, "ps.Sync()", stops), **keys, gates=gates) as job:
        servers = ",".join(job.cluster.addresses[task] for task in (PS0, PS1))
        psctl = [sys.executable, "-m", "psclient.psctl", "--address", servers, "job", "end"]
        environ = os.environ | job.cluster._options.variables()

        def end():
            return forks.run(psctl, env=environ, capture_output=True, text=True, timeout=SECONDS, check=False)

        job.hear(W0, "at", 5)
        strays = [job.stray(W1), job.stray(W0, PS_JOB="blue"), job.stray(CHIEF)]
        (second, said), (other, refused), (chief, rival) = map(outcome, strays)
        assert (second, other, chief) == (2, 2, 2)
        assert f"error: {W1}: another process is {W1} of this job" in said
        assert f"{W0} is of the job 'blue', and these servers hold the job '{job.cluster.job}'" in refused
        assert f"set PS_JOB={job.cluster.job}" in refused
        assert "psctl job end" in refused
        assert "another process is chief of this job" in rival
        job.kill(PS0)
        job.hear_error(W0, f"goes on without {PS0}")
        job.open("0 at 5")
        job.hear(W0, "at", 8)
        assert job.said(W0, "did")[-1] == 7
        refused = end()
        assert refused.returncode == 2
        assert f"{CHIEF}, {W0}, {W1} of the job are here" in refused.stderr
        for task in (CHIEF, W0, W1):
            job.kill(task)
        with job.server(PS1) as server:
            job.until(lambda: not [s for s in server.status().sessions if s.state == "open"])
        code, said = outcome(job.stray(W0, PS_JOB="blue"))
        assert code == 2
        assert "its variables are, and it was not left cleanly" in said
        done = end()
        assert (done.returncode, done.stdout) == (0, f"the job {job.cluster.job!r} is over\n"), done.stderr
        assert job.exited(PS1) == 0


def differ(rounds, stops):
    """Counts in rounds; the second life of a worker runs another program than all others, the third the same."""
    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        v = ps.Variable(np.zeros(4), name="v")
        u = ps.Variable(np.zeros(4), name="u")
    marker = DIRECTORY / f"life {ME}"
    life = len(marker.read_text()) + 1 if marker.exists() else 1
    marker.write_text("." * life)
    say("open", life)
    for _ in strategy.experimental_distribute_dataset(ps.ArrayDataset(np.zeros(2 * rounds)).batch(2)):
        if [ME, life, strategy.round] in stops:
            say("at", strategy.round)
            gate(f"{ME} at {strategy.round}")
        if life == 2:
            strategy.run(lambda: add(u, np.full(4, 100.0**ME)))
        else:
            strategy.run(lambda: add_all([(v, np.full(4, 100.0**ME)), (u, np.ones(4))]))
        say("did", strategy.round - 1)
    say("sums", float(v[0]))


@pytest.mark.parametrize("first", ["newcomer", pytest.param("member", marks=pytest.mark.soak)])
def test_a_newcomer_that_differs_ends_alone(tmp_path, first):
    """Whoever of both pushes first: the newcomer is told with both positions, the others go on without it.

    Its next process, with the right script, takes part.
    """
    stops = [[1, 1, 2], [0, 1, 4], [0, 1, 5], [1, 2, 5], [0, 1, 8]]
    gates = [f"{worker} at {round}" for worker, _, round in stops]
    with (
        ProcessCluster(
            differ, tmp_path, (40, stops), ps=2, workers=2, chief="driver", timeouts=QUICK, gates=gates
        ) as job,
        job.server(PS0) as keeper,
        job.server(PS1) as holder,
    ):

        def join(life):
            job.start(W1)
            job.hear(W1, "open", life)
            job.until(lambda: len(keeper.status().epoch.members) == 2)

        job.hear(W1, "at", 2)
        job.kill(W1)
        job.hear(W0, "at", 4)
        join(2)
        job.open("0 at 4")
        for task in (W0, W1):
            job.hear(task, "at", 5)
        for gate in ("1 at 5", "0 at 5") if first == "newcomer" else ("0 at 5", "1 at 5"):
            job.open(gate)
            job.until(lambda: [waiting.round for waiting in holder.status().waiting] == [5] or W1 in ended(job))
        told = job.hear_error(W1, "it joined a running job, and does not run the job's program: in its first round, 5")
        assert f"{W0} is at" in told
        assert f"{W1} is at" in told
        assert job.exited(W1) == 1
        job.hear(W0, "at", 8)
        join(3)
        job.open("0 at 8")
        total = job.hear(W0, "sums")
        assert job.hear(W1, "sums") == total
        there, newcomer = digits(total, 2)
        assert there == 40
        assert newcomer == 2 + len([round for round in job.said(W1, "did") if round >= 5])
        job.finish()


def ended(job):
    """The tasks whose processes have ended."""
    return [task for task, process in job.cluster.processes.items() if process.poll() is not None]


def test_a_refused_connection_may_be_silence(tmp_path):
    """Behind a proxy nobody knows who refuses: with PS_REFUSED=silence it takes as long as silence does."""
    timeouts = dataclasses.replace(QUICK, server=4.0)
    keys = {"ps": 2, "workers": 2, "chief": "driver", "timeouts": timeouts, "more": {"PS_REFUSED": "silence"}}
    with ProcessCluster(learn, tmp_path, (20, "ps.Sync()", [(1, 5, "1 at 5")]), **keys, gates=["1 at 5"]) as job:
        job.hear(W1, "at", 5)
        job.kill(PS1)
        assert "PS_TIMEOUT_SERVER" in job.hear_error(W0, f"error: {PS1}: was lost")
        assert "PS_TIMEOUT_SERVER" in job.hear_error(CHIEF, f"error: {PS1}: was lost")
