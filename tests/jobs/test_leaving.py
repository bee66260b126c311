"""Workers that get SIGTERM: each finishes its step, and leaves where the next one begins; nobody waits for a lease."""

from __future__ import annotations

import signal
import sys
import time

import numpy as np
import pytest

import psclient as ps
from pstesting import forks
from pstesting.processes import CALM, CHIEF, PS0, PS1, W0, W1, W2, ProcessCluster
from pstesting.script import add, add_all, gate, say

SOON = CALM.session_timeout / 2
"""Far above what any of this takes: who waits for a lease is found out."""

KEYS = {"ps": 2, "workers": 3, "chief": "driver", "timeouts": CALM}
ALL = (W0, W1, W2)
TOLD = "received SIGTERM"


def visit(examples, batch, passes, stops, restores=""):
    """Counts each example that it visits, on the servers; waits at some steps: each is a pass, a step, and a gate."""
    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        seen = ps.Variable(np.zeros(examples, "int64"), name="seen")
        steps = ps.Variable(np.zeros((), "int64"), name="steps")
        manager = None
        if restores:
            checkpoint = ps.train.Checkpoint(seen=seen, steps=steps)
            manager = ps.train.CheckpointManager(checkpoint, restores, max_to_keep=3)
            say("restored", manager.restore_or_initialize())
    data = ps.ArrayDataset(np.arange(examples)).batch(batch)
    batches = strategy.experimental_distribute_dataset(data)
    say("open")
    for number in batches.epochs(passes):
        for index, mine in enumerate(batches):
            for at, name in [(at, name) for *at, name in stops if at == [number, index]]:
                say("at", at)
                gate(name)
            counts = np.bincount(np.asarray(mine), minlength=examples)
            strategy.run(lambda counts: add_all([(seen, counts), (steps, np.int64(1))]), args=(counts,))
            say("round", strategy.round - 1)
            last = strategy.last_round
            say("missed", list(last.excluded) if last else [])
        say("seen", seen.numpy())
        say("saved", manager.checkpoints if manager else [])
    say("done", steps.numpy())


def tell_to_end(job, *tasks):
    """Sends SIGTERM, and waits until it is noted."""
    for task in tasks:
        job.kill(task, signal.SIGTERM)
        job.hear_error(task, TOLD)


def test_a_worker_that_leaves_loses_no_example(tmp_path):
    """It ends with code 0 in that pass; the others share what is left, and each example of a pass counts once.

    Another process of its task is taken in as any other. When all leave the job is over with them: chief and servers,
    which are told as well and stay till then, end as after a script's end.
    """
    args = (240, 6, 1000, [[0, 3, "go"], [1, 2, "again"], [2, 3, "end"]])
    with ProcessCluster(visit, tmp_path, args, gates=["go", "again", "end"], **KEYS) as job:
        for task in ALL:
            job.hear(task, "at")
        tell_to_end(job, W1)
        began = time.monotonic()
        job.open("go")
        assert job.exited(W1) == 0
        assert len(job.said(W1, "round")) < 240 / 6
        for task in (W0, W2):
            job.hear(task, "at", [1, 2])
        assert time.monotonic() - began < SOON
        job.start(W1)
        job.hear(W1, "open")
        with job.server(PS0) as server:
            job.until(lambda: any(s.member.task == W1 and s.join_point for s in server.status().sessions))
        job.open("again")
        for task in ALL:
            job.hear(task, "at", [2, 3])
        tell_to_end(job, *ALL, CHIEF)
        for server in (PS0, PS1):
            job.kill(server, signal.SIGTERM)
            job.hear_error(server, "it waits for the processes that are leaving")
        job.open("end")
        job.finish(SOON)
        for task in (W0, W2):
            assert [set(seen) for seen in job.said(task, "seen")][:2] == [{1}, {2}]
        assert set(job.said(W1, "seen")[0]) == {2}
        assert not any(job.said(task, "done") for task in ALL)
        assert not any(job.said(W0, "missed"))


def loop(enough, stop):
    """Adds to a variable without a dataset; a step has two rounds, of which each has both or none."""
    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        v = ps.Variable(np.zeros((), "int64"), name="v")
        u = ps.Variable(np.zeros((), "int64"), name="u")
    for n in range(enough):
        if n == stop:
            say("at", n)
            gate("go")
        strategy.run(lambda: (add(v, np.int64(1)), add(u, np.int64(1))))
        say("made", n + 1)
    say("sums", [v.numpy(), u.numpy()])


def test_a_worker_without_a_dataset_leaves_between_steps(tmp_path):
    """It finishes what it has begun: both rounds of each of its steps count.

    Without a manager all variables are saved: by their names, in a directory of their own, once.
    """
    keys = KEYS | {"workers": 2, "save_on_sigterm": True}
    with ProcessCluster(loop, tmp_path, (40, 5), gates=["go"], **keys) as job:
        for task in (W0, W1):
            job.hear(task, "at")
        tell_to_end(job, W1)
        job.open("go")
        assert job.exited(W1) == 0
        sums = job.hear(W0, "sums")
        job.finish()
        made = sum(len(job.said(task, "made")) for task in (W0, W1))
        assert sums == [made, made]
        assert len(job.said(W1, "made")) < 40
        (saved,) = [path for path in (tmp_path / "checkpoints" / "sigterm").iterdir() if path.is_dir()]
        assert saved.name.startswith("ckpt-")
        command = [sys.executable, "-P", "-m", "psclient.psctl", "checkpoint", "verify", str(saved)]
        told = forks.run(command, capture_output=True, text=True)
        assert told.returncode == 0, told.stderr


@pytest.mark.ci
def test_what_leaves_saves_first(tmp_path):
    """One checkpoint for two that are told within a lease, by the script's manager."""
    keys = KEYS | {"gates": ["go"], "save_on_sigterm": True}
    with ProcessCluster(visit, tmp_path, (60, 6, 1, [[0, 3, "go"]], "kept"), **keys) as job:
        for task in ALL:
            job.hear(task, "at")
        tell_to_end(job, W1, W2)
        job.open("go")
        assert {job.exited(W1), job.exited(W2)} == {0}
        assert set(job.hear(W0, "seen")) == {1}
        assert job.hear(W0, "saved") == ["kept/ckpt-1"]
        job.finish()
