"""Servers of a running job move to processes that wait for a place, and the job goes on."""

from __future__ import annotations

import signal
import socket
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

import psclient as ps
from pstesting.processes import CHIEF, PS0, PS1, QUICK, W0, W1, ProcessCluster
from tests.jobs.test_lost_servers import rows, train_rows, values
from tests.jobs.test_returning_servers import KEYS, OTHER, all_go_on_with, await_variables, learn, lose, start_again
from tests.kit.internals import Task
from tests.kit.shell import Waiting, waiting
from tests.kit.workers import in_threads


def move(job: ProcessCluster, task: Task, new: Waiting) -> None:
    """Has a server moved to a process that waits; returns once the next step will wait for it there."""
    with job.server(OTHER[task]) as other:
        assert other.move(task.index, new.address) == new.address
        job.until(lambda: (e := other.status().epoch) is not None and getattr(e.awaited, "address", "") == new.address)
    job.cluster.addresses[task] = new.address


def enough(job: ProcessCluster, directory: Path) -> None:
    """Ends the job; what it has learnt is what the steps that it says make."""
    (directory / "enough").touch()
    found = job.hear(W0, "is")
    assert found == job.hear(W1, "is") == values(found[2], found[2])
    assert {job.exited(task) for task in (W0, W1, CHIEF)} == {0}


@pytest.mark.parametrize("moved", [PS0, pytest.param(PS1, marks=pytest.mark.soak)], ids=str)
def test_a_server_that_is_told_to_end_moves_before(tmp_path, moved):
    """And ends with 0; whoever starts later finds it at its new address, also if something is at the old one."""
    with ProcessCluster(learn, tmp_path, (None, [20]), **KEYS) as job:
        job.hear(W0, "at", 20)
        with waiting(job, tmp_path) as (new,):
            job.kill(moved, signal.SIGTERM)
            job.hear_error(moved, f"it moves to {new.address} before")
            job.hear_error(CHIEF, f"{moved} moves to {new.address}")
            job.open("go 20")
            assert job.exited(moved) == 0
            all_go_on_with(job, moved)
            job.hear(W1, "at", 20)
            for task in (CHIEF, W1):
                job.kill(task)
                job.start(task)
            job.hear(W1, "at", 20)  # it has found the servers, and is taken in
            job.start(moved)  # at its old address, as whatever runs it does: it has no part in the job
            new.hear("has its variables")
            lose(job, OTHER[moved])
            (tmp_path / "enough").touch()
            assert job.hear(W0, "is") == job.hear(W1, "is")
            assert {job.exited(task) for task in (W0, W1, CHIEF)} == {0}


def test_who_waits_takes_the_place_of_a_server_that_stays_away(tmp_path):
    """After a lease, one that does not fail with the copies; so the next loss is survived as well."""
    with ProcessCluster(learn, tmp_path, (None, [20]), **{**KEYS, "timeouts": QUICK}) as job:
        job.hear(W0, "at", 20)
        near = waiting(job, tmp_path, domain=socket.gethostname())
        with near, waiting(job, tmp_path) as (new,):
            lose(job, PS0)
            job.hear_error(CHIEF, f"{PS0} moves to {new.address}")
            job.open("go 20")
            all_go_on_with(job, PS0)
            job.cluster.addresses[PS0] = new.address
            await_variables(job, PS0)
            lose(job, PS1)
            job.start(PS1)
            all_go_on_with(job, PS1)
            enough(job, tmp_path)


@pytest.mark.ci
def test_who_waited_dies_before_it_has_the_place(tmp_path):
    """The server stays where it is, and moves to the next one that waits."""
    with ProcessCluster(learn, tmp_path, (None, [20]), **KEYS) as job:
        job.hear(W0, "at", 20)
        with waiting(job, tmp_path) as (first,):
            before = job.cluster.addresses[PS1]
            move(job, PS1, first)
            first.process.kill()
            job.open("go 20")
            job.hear_error(CHIEF, f"{PS1} stays where it is")
            job.cluster.addresses[PS1] = before
            with job.server(PS0) as server:
                job.until(lambda: not server.status().spares)
        with waiting(job, tmp_path) as (second,):
            with job.server(PS0) as server:
                server.move(1, second.address)
            assert job.exited(PS1) == 0
            job.cluster.addresses[PS1] = second.address
            await_variables(job, PS1)
            lose(job, PS0)
            enough(job, tmp_path)


@pytest.mark.parametrize("lost", [PS1, pytest.param(PS0, marks=pytest.mark.soak)], ids=str)
def test_rows_and_tables_are_the_same_whatever_servers_do(tmp_path, lost):
    """One is lost, comes back, the other one moves, and then it is lost again, while tables grow and rows come and go.

    All is, bit for bit, as in a cluster whose servers stay.
    """
    stops = [8, 12, 26, 40]
    shards = ps.experimental.partitioners.FixedShardsPartitioner(2)
    train = partial(train_rows, rounds=44, at=lambda round: None)
    expected = in_threads(train, devices=["cpu:0"], variable_partitioner=shards)
    keys = {**KEYS, "gates": [f"go {stop}" for stop in stops]}
    with ExitStack() as stack:
        job = stack.enter_context(ProcessCluster(rows, tmp_path, (44, stops), [train_rows], **keys))
        for stop in stops:
            for task in (W0, W1):
                job.hear(task, "at", stop)
            if stop == 8:
                lose(job, lost)
            elif stop == 12:
                start_again(job, lost)
            elif stop == 26:
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
