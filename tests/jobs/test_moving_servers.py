"""Servers move to processes that wait for a place, or come back, and read their variables while training goes on."""

from __future__ import annotations

import signal
import socket
from contextlib import ExitStack

import numpy as np
import pytest

import psclient as ps
from pstesting.processes import CHIEF, PS0, PS1, QUICK, SECONDS, W0, W1, ProcessCluster
from pstesting.script import ME, gate, say
from tests.jobs.test_lost_servers import (
    KEYS,
    OTHER,
    all_go_on_with,
    await_variables,
    enough,
    learn,
    lose,
    problems,
)
from tests.kit.children import holds_reading, let_read
from tests.kit.internals import OUTLIVED, Task
from tests.kit.shell import Waiting, waiting
from tests.kit.workers import in_threads

LARGE = 300_000
"""Elements of a variable whose rounds stream, where their server has its variables."""


def move(job: ProcessCluster, task: Task, new: Waiting) -> None:
    """Has a server moved to a process that waits; returns once the next step will wait for it there."""
    with job.server(OTHER[task]) as other:
        assert other.move(task.index, new.address) == new.address
        job.until(
            lambda: (e := other.status().generation) is not None and getattr(e.awaited, "address", "") == new.address
        )
    job.cluster.addresses[task] = new.address


def goes_on(job: ProcessCluster, server: Task, rounds: int = 8) -> None:
    """Returns once a server has made some more rounds."""
    with job.server(server) as there:
        first = there.status().round
        job.until(lambda: there.status().round > first + rounds)


# ---- Servers that move ----


@pytest.mark.ci
def test_a_server_that_is_told_to_end_moves_before(tmp_path):
    """And ends with 0; training goes on while the new one reads its variables, and then the other one is lost.

    Whoever starts later finds it at its new address, also if something is at the old one.
    """
    moved = PS0
    with ProcessCluster(learn, tmp_path, (None, [], LARGE), **KEYS) as job:
        goes_on(job, moved, 5)
        with waiting(job, tmp_path, **holds_reading(tmp_path / "new")) as (new,):
            job.kill(moved, signal.SIGTERM)
            job.hear_error(moved, f"it moves to {new.address} first")
            job.hear_error(CHIEF, f"{moved} moves to {new.address}")
            assert job.exited(moved) == 0
            all_go_on_with(job, moved)
            there, job.cluster.addresses[moved] = job.cluster.addresses[moved], new.address
            for server in (PS0, PS1):
                goes_on(job, server)
            assert "has read its variables" not in new.text()
            let_read(tmp_path / "new")
            new.hear("has read its variables")
            job.cluster.addresses[moved] = there
            job.hear(W1, "trains")
            for task in (CHIEF, W1):
                job.kill(task)
                job.start(task)
            job.hear(W1, "trains")  # it has found the servers, and is taken in
            job.start(
                moved
            )  # at its old address, as whatever runs it does: it has no part in the job, and ends with it
            lose(job, OTHER[moved])
            (tmp_path / "enough").touch()
            assert job.hear(W0, "is") == job.hear(W1, "is")
            assert {job.exited(task) for task in (W0, W1, CHIEF, moved)} == {0}


@pytest.mark.ci  # sim/test_returning_servers.py has the machine
def test_who_waits_takes_the_place_of_a_server_that_stays_away(tmp_path):
    """After a lease, one that does not fail with the copies; so the next loss is survived as well.

    One that has got no place ends with the job, as the one that has. One that is to have a place, by order, and dies
    before it has read, changes nothing: the server stays where it is.
    """
    with ProcessCluster(learn, tmp_path, (None, [20]), **{**KEYS, "timeouts": QUICK}) as job:
        job.hear(W0, "at", 20)
        with waiting(job, tmp_path) as (first,):
            before = job.cluster.addresses[PS1]
            move(job, PS1, first)
            first.process.kill()
            job.open("go 20")
            job.hear_error(CHIEF, f"{PS1} could not be moved")
            job.cluster.addresses[PS1] = before
            with job.server(PS0) as server:
                job.until(lambda: not server.status().standbys)
        near = waiting(job, tmp_path, domain=socket.gethostname(), until_done=True)
        with near as (unused,), waiting(job, tmp_path, until_done=True) as (new,):
            lose(job, PS0)
            job.hear_error(CHIEF, f"{PS0} moves to {new.address}")
            all_go_on_with(job, PS0)
            job.cluster.addresses[PS0] = new.address
            await_variables(job, PS0)
            lose(job, PS1)
            job.start(PS1)
            all_go_on_with(job, PS1)
            enough(job, tmp_path)
            assert [each.process.wait(SECONDS) for each in (unused, new)] == [0, 0]


# ---- Servers that are back ----


@pytest.mark.ci  # sim/test_returning_servers.py has its promises
def test_training_goes_on_while_a_server_reads(tmp_path):
    """What was handed over to its first process is damaged: it says so, ends, and the job goes on without it.

    The next one takes part in all rounds while it reads, and has them all: the other server gets SIGTERM then, and ends
    with 0.
    """
    lost = PS1
    with ProcessCluster(learn, tmp_path, (None, [], LARGE), servers_environ=holds_reading(tmp_path), **KEYS) as job:
        goes_on(job, OTHER[lost], 5)
        lose(job, lost)
        job.start(lost)
        all_go_on_with(job, lost)
        handed = tmp_path / "checkpoints" / "handover"
        job.until(lambda: any(handed.glob("*/manifest.json")))
        for file in handed.glob("*/*.safetensors"):
            file.write_bytes(file.read_bytes()[:-1000])
        let_read(tmp_path)
        job.hear_error(lost, "ends: it could not read its variables: ")
        assert job.exited(lost) == OUTLIVED
        job.hear_error(CHIEF, f"goes on without {lost}")
        (tmp_path / "reading" / "read").unlink()
        job.start(lost)
        all_go_on_with(job, lost)
        for server in (PS0, PS1):
            goes_on(job, server)
        with job.server(lost) as server:
            assert server.status().recovering
        assert "do not end another server before this is done" in problems(job)["recovering", str(lost)]
        let_read(tmp_path)
        await_variables(job, lost)
        assert not [key for key in problems(job) if key[0] == "recovering"]
        job.kill(OTHER[lost], signal.SIGTERM)
        assert job.exited(OTHER[lost]) == 0
        goes_on(job, lost)
        enough(job, tmp_path, lost)


def learn_late(size):
    """Learns; worker 0 stops once where it waits for news of a server that comes back, until the test resumes it."""
    import os
    import signal

    from psclient._src.network.job_news import JobNews

    follow = JobNews.follow

    def stop(self, deadline, late, word):
        if "which is being readmitted" in word():
            JobNews.follow = follow
            say("waits", True)
            os.kill(os.getpid(), signal.SIGSTOP)
        return follow(self, deadline, late, word)

    if ME == 0:
        JobNews.follow = stop
    learn(None, [], size)


@pytest.mark.ci  # a race of three processes
def test_a_server_is_lost_that_has_not_told_all_of_the_others_return(tmp_path):
    """Who has not heard of it finds the server that is back, keeps its session there, and goes on."""
    with ProcessCluster(learn_late, tmp_path, (LARGE,), [learn], **KEYS) as job:
        goes_on(job, PS0, 5)
        lose(job, PS1)
        job.start(PS1)
        job.hear(W0, "waits")
        job.hear_error(PS1, f"{PS1} has read its variables; it still has to apply ")
        lose(job, PS0)
        job.resume(W0)
        job.hear_error(W0, f"goes on without {PS0}")
        goes_on(job, PS1)
        enough(job, tmp_path, PS1)


def train_rows(strategy, worker, goes_on):
    """Trains rows that miss updates, and a table whose keys come and go.

    One worker reads what the other one does not. `goes_on` says before each step whether it is made.
    """
    de = ps.dynamic_embedding
    with strategy.scope():
        cut = ps.Variable(np.zeros((40, 2), "float32"), name="cut")
        table = de.get_variable("table", dim=2, admission=de.CounterFilter(2), eviction=de.GlobalStepEvict(8))
        optimizer = ps.optimizers.Adagrad(0.5)
    draw, number, seen = np.random.default_rng(worker), 0, []

    def step(number):
        keys = draw.integers(0, 60, 5)
        table.prefetch(keys + 1)
        found = table.lookup(keys)
        grads = [
            (ps.IndexedSlices(draw.standard_normal((5, 2)).astype("float32"), keys % 40), cut),
            (found.gradient(draw.standard_normal(found.values.shape).astype("float32")), table),
        ]
        optimizer.apply_gradients(grads)
        return float(np.sum(found.values))

    while goes_on(number):
        seen.append(strategy.run(step, (number,)))
        number += 1
        if worker == 0 and number % 7 == 0:
            cut.numpy(), table.lookup(np.arange(20)).values
    keys, rows = table.export()
    order = np.argsort(keys)
    return [cut.numpy().tolist(), keys[order].tolist(), rows[order].tolist(), table.size(), seen[:20]]


def rows(stops):
    """Trains rows; waits before some steps until the test lets it go on."""

    def goes_on(number):
        if number in stops:
            say("at", number)
            gate(f"go {number}")
        return number < 38

    shards = ps.experimental.partitioners.FixedShardsPartitioner(2)
    strategy = ps.ParameterServerStrategy(devices=["cpu:0"], variable_partitioner=shards)
    say("is", train_rows(strategy, ME, goes_on))


@pytest.mark.ci  # test_a_server_that_is_told_to_end_moves_before has variables
def test_rows_and_tables_are_the_same_whatever_servers_do(tmp_path):
    """One is lost, comes back, the other one moves, and then it is lost again, while tables grow and rows come and go.

    All is, bit for bit, as in a cluster whose servers stay.
    """
    lost, stops = PS1, [4, 6, 20, 34]
    shards = ps.experimental.partitioners.FixedShardsPartitioner(2)
    expected = in_threads(
        lambda strategy, worker: train_rows(strategy, worker, lambda number: number < 38),
        devices=["cpu:0"],
        variable_partitioner=shards,
    )
    with ExitStack() as stack:
        keys = {**KEYS, "gates": [f"go {stop}" for stop in stops]}
        job = stack.enter_context(ProcessCluster(rows, tmp_path, (stops,), [train_rows], **keys))
        for stop in stops:
            for task in (W0, W1):
                job.hear(task, "at", stop)
            if stop == 4:
                lose(job, lost)
            elif stop == 6:
                job.start(lost)
                with job.server(OTHER[lost]) as other:
                    job.until(lambda other=other: other.status().generation.returns is not None)
            elif stop == 20:
                all_go_on_with(job, lost)
                await_variables(job, lost)
                (new,) = stack.enter_context(waiting(job, tmp_path))
                move(job, OTHER[lost], new)
            else:
                all_go_on_with(job, OTHER[lost])
                await_variables(job, OTHER[lost])
                lose(job, lost)
            job.open(f"go {stop}")
        assert [job.hear(task, "is") for task in (W0, W1)] == expected
        assert job.exited(W0) == job.exited(W1) == 0
