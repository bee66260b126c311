"""Workers that join a running job by `psworker --join`: real processes, which come and go in the middle of a pass."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest

import psclient as ps
from pstesting.processes import CALM, PS0, PS1, QUICK, SECONDS, W0, W1, W2, ProcessCluster
from pstesting.script import DIRECTORY, ME, TASK, add_all, gate, say
from tests.kit.internals import Task

W3, W4 = Task("worker", 3), Task("worker", 4)
TOLD = "received SIGTERM"

EXAMPLES, BATCH = 120, 6
STEPS = EXAMPLES // BATCH
GROW, SHRINK = 4, 10
"""The rounds before which workers join, and before which they leave."""


def doze(name):
    """Waits at a gate, and hears signals meanwhile, also one that comes just before it waits."""
    pipe = os.open(DIRECTORY / name, os.O_RDONLY | os.O_NONBLOCK)
    while True:
        try:
            os.read(pipe, 1)
        except BlockingIOError:
            time.sleep(0.01)
        else:
            os.close(pipe)
            return


def train(examples, batch, stops):
    """A pass of gradient descent; what each step's loss was, and how often each example came, the servers know.

    Each step is a round. Before those at which it stops, a process waits at a gate.
    """
    strategy = ps.ParameterServerStrategy()
    say("open", ME)
    steps = examples // batch
    x = np.random.default_rng(7).normal(size=(examples, 3))
    y = x @ np.array([1.0, -2.0, 3.0])
    with strategy.scope():
        w = ps.Variable(np.zeros(3), name="w")
        losses = ps.Variable(np.zeros(steps), name="losses")
        seen = ps.Variable(np.zeros(examples, "int64"), name="seen")
    data = ps.ArrayDataset((x, y, np.arange(examples))).shuffle(seed=3).batch(batch)

    def step(x, y, which):
        error = x @ w.numpy() - y
        loss = np.zeros(steps)
        loss[strategy.round] = np.sum(error**2) / batch
        counts = np.bincount(np.asarray(which), minlength=examples)
        add_all([(w, -0.05 * (x.T @ error) / batch), (losses, loss), (seen, counts)])
        say("replicas", ps.get_replica_context().num_replicas_in_sync)

    batches = strategy.experimental_distribute_dataset(data)
    for each in batches:
        if strategy.round in stops:
            say("at", strategy.round)
            doze(stops[strategy.round])
        strategy.run(step, args=each)
        say("round", strategy.round)
        say("missed", list(strategy.last_round.excluded))
    say("end", [w.numpy(), losses.numpy(), seen.numpy()])


def undisturbed():
    """The variable and the losses of a pass of one process, in NumPy."""
    x = np.random.default_rng(7).normal(size=(EXAMPLES, 3))
    y, w, losses = x @ np.array([1.0, -2.0, 3.0]), np.zeros(3), []
    order = ps.ArrayDataset(np.arange(EXAMPLES)).shuffle(seed=3).batch(BATCH)
    for index in range(STEPS):
        rows = order.rows(0, index, 0, BATCH)
        error = x[rows] @ w - y[rows]
        losses.append(np.sum(error**2) / BATCH)
        w = w - 0.05 * (x[rows].T @ error) / BATCH
    return w, losses


def waiting(job, *tasks):
    """Whether these wait to be taken in."""
    with job.server(PS0) as server:
        there = {each.member.task for each in server.status().sessions if each.join_point and each.state == "open"}
    return there >= set(tasks)


def members(job, count):
    """Whether the newest generation has so many members."""
    with job.server(PS0) as server:
        generation = server.status().generation
    return generation is not None and len(generation.members) == count


@pytest.mark.usefixtures("compiled_rounds")
def test_two_become_four_and_then_one(tmp_path):
    """In the middle of a pass: each example comes once, and each step has the loss that it has where nobody comes."""
    gates = {GROW: "grow", SHRINK: "shrink"}
    keys = {"ps": 2, "workers": 2, "chief": "driver", "timeouts": CALM, "gates": gates.values()}
    with ProcessCluster(train, tmp_path, (EXAMPLES, BATCH, gates), (doze,), **keys) as job:
        for task in (W0, W1):
            job.hear(task, "at", GROW)
        for task, server in ((W2, PS0), (W3, PS1)):
            job.join(task, server=server)
        assert {job.hear(task, "open") for task in (W2, W3)} == {2, 3}, "both at once, and each has its own"
        job.until(lambda: waiting(job, W2, W3) and members(job, 4))
        job.open("grow")
        for task in (W0, W1, W2, W3):
            job.hear(task, "at", SHRINK)
        for task in (W1, W2, W3):
            job.kill(task, signal.SIGTERM)
            job.hear_error(task, TOLD)
        job.until(lambda: members(job, 1))
        job.open("shrink")
        assert [job.exited(task) for task in (W1, W2, W3)] == [0, 0, 0]
        w, losses, seen = (np.array(each) for each in job.hear(W0, "end"))
        job.finish()
        assert set(seen) == {1}
        expected = undisturbed()
        np.testing.assert_allclose(losses, expected[1], rtol=1e-9)
        np.testing.assert_allclose(w, expected[0], rtol=1e-9)
        replicas = job.said(W0, "replicas")
        assert sorted(set(replicas), key=replicas.index) == [2, 4, 1]
        assert len(replicas) == STEPS
        assert not any(job.said(W0, "missed"))
        assert all(0 < len(job.said(task, "round")) < STEPS - GROW for task in (W2, W3))


def stay(members):
    """Makes rounds until there are so many members, and says who it is. Worker 0 waits at the gate before round 3."""
    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        count = ps.Variable(np.zeros((), "int64"), name="count")
    say("is", [TASK, os.getpid()])
    most = 0  # every member counts the same
    while strategy.round < 8 or most < members:
        strategy.run(lambda: add_all([(count, np.int64(1))]))
        most = max(most, strategy.num_replicas_in_sync)
        say("made", strategy.round)
        if strategy.round == 3:
            gate("go")
        time.sleep(0.02)
    say("end", strategy.round)


GOES_ON = {"ps": 1, "workers": 1, "chief": "driver", "gates": ["go"], "timeouts": CALM}


def joins(job, task, index=None, *flags, **more):
    """A worker joins; returns its process once it says that it is this worker, or the one that it is called."""
    job.join(task, *flags, **more)
    found, process = job.hear(task, "is")
    assert found == str(index or task)
    return process


def test_an_index_is_free_again_when_its_worker_is_gone(tmp_path):
    """Once the session of the one that was killed has ended, and not before: who joins meanwhile has the next one.

    With --restarts a worker keeps its index: whoever joins while it is down gets another one.
    """
    with ProcessCluster(stay, tmp_path, (4,), **GOES_ON | {"timeouts": QUICK}) as job:
        job.hear(W0, "made", 3)
        joins(job, W1)
        process = joins(job, W2, None, "--restarts", "1")
        assert process != job.cluster.processes[W2].pid
        os.kill(process, signal.SIGKILL)
        assert "failed (killed by SIGKILL); restarting, 0 restarts left" in job.hear_error(W2, "restarting")
        joins(job, W3)
        again, other = job.hear(W2, "is")
        assert again == str(W2)
        assert other != process
        job.kill(W1)
        with job.server(PS0) as server:
            job.until(lambda: any(s.state == "lost" and s.member.task == W1 for s in server.status().sessions))
        joins(job, W4, W1)  # the first that is free
        job.open("go")
        for task in (W0, W2, W3, W4):
            job.hear(task, "end")
            assert job.exited(task) == 0


def test_a_signal_reaches_the_script_of_a_worker_with_restarts(tmp_path):
    """It leaves where its next step begins, and is not started again."""
    with ProcessCluster(stay, tmp_path, (1,), **GOES_ON) as job:
        job.hear(W0, "made", 3)
        joins(job, W1, None, "--restarts", "3")
        job.until(lambda: waiting(job, W1) and members(job, 2))
        job.kill(W1, signal.SIGTERM)
        assert f" W {W1} psclient: " in job.hear_error(W1, TOLD), "no launcher says whose line it is"
        # Meanwhile a script that fails again and again ends with its own code, once no restarts are left.
        (tmp_path / "program.py").write_text("import sys; print('{\"tried\": 1}', flush=True); sys.exit(7)")
        for task, restarts in ((W2, 1), (W3, 0)):
            job.join(task, "--restarts", str(restarts))
            assert job.exited(task, SECONDS) == 7
            job.until(lambda task=task, restarts=restarts: len(job.said(task, "tried")) == 1 + restarts)
            del job.cluster.processes[task]
        job.open("go")
        assert job.exited(W1) == 0
        job.finish()
        assert len(job.said(W1, "is")) == 1


def test_a_worker_that_has_joined_drives_the_job_on(tmp_path):
    """Where nobody of the cluster is left: it waits for none of those that joined before it."""
    keys = GOES_ON | {"chief": "none", "timeouts": QUICK, "gates": ["go"]}
    with ProcessCluster(stay, tmp_path, (1,), **keys) as job:
        job.hear(W0, "made", 3)
        joins(job, W1)
        joins(job, W2)
        job.until(lambda: waiting(job, W1, W2))
        job.kill(W1)
        job.kill(W0)
        job.hear_error(W2, f"the chief is down: {W2} takes over as chief")
        assert job.hear(W2, "end") >= 8
        assert job.exited(W2) == 0
        assert job.exited(PS0) == 0
