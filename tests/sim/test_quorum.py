"""A quorum, over whole jobs: rounds go on without the slowest workers, and what these send late counts once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from pstesting.processes import PS0, PS1, W0, W1, W2
from tests.kit.internals import Consistency, Task
from tests.kit.simulated import BASE, QUICK, World

BOTH = pytest.mark.parametrize("lost", [PS1, PS0], ids=str)
OTHER = {PS0: PS1, PS1: PS0}
GRACE = 0.2
TICK = QUICK.session_timeout / 8
"""Seconds between two looks of a simulated server at its clock."""


class Quorum(World):
    """A job of three workers, two of which suffice; each waits for the answer of its round before it goes on.

    Attributes:
        times: when each worker has made its rounds.
    """

    def __init__(self, **more: Any) -> None:
        more.setdefault("workers", 3)
        super().__init__(consistency=Consistency(quorum=2, grace=GRACE), **more)
        self.looks = False  # a late worker has the values of now, on each server of another moment
        self.times: dict[Task, list[float]] = {task: [] for task in self.members}

    def _made(self, task: Task) -> None:
        self.workers[task].exchange.settle()
        self.times[task].append(self.scheduler.now)

    def check(self) -> list[int]:
        """Each contribution that was answered is in all variables once, or waits on all servers; returns the counts."""
        assert self.compiled, "no round was compiled, as most of a real job are"
        totals, waiting = set[float](), list[Counter[Task]]()
        for server in self.servers:
            status = server.core.status()
            if server.alive and status.incarnation in status.incarnations:
                job = server.core.machine.job
                held = [n for n, (_, where) in enumerate(self.cluster.workload.created) if server.index in where]
                totals |= {float(x) for n in held for x in np.asarray(job.store.find(n).array)}
                waiting.append(Counter(share.member.task for share in job.rounds.late.ready()))
        assert len(totals) == 1, f"servers hold {totals}"
        assert all(each == waiting[0] for each in waiting), f"servers would merge {waiting}"
        counted, total = [], totals.pop()
        for task in self.members:
            times = int(total // BASE**task.index % BASE)
            made = sum(worker.count for worker in self.lives if worker.task == task)
            assert made - self.deaths[task] <= times + waiting[0][task] <= made, (task, times, waiting[0], made)
            counted.append(times)
        return counted


def test_a_lost_worker_delays_the_others_by_the_time_of_grace_at_most():
    """Until it is removed; then it is not waited for at all. Another process takes its place, and counts."""
    with Quorum(copies=0) as job:
        job.rounds(5)
        job.kill(W2)
        before = len(job.times[W0])
        job.until(lambda: W2 not in {member.task for member in job.status(PS0).generation.members})
        job.rounds(3, W0, W1)
        times = job.times[W0][before - 1 :]
        assert len(times) > 5
        assert max(np.diff(times)) <= GRACE + TICK + 0.1
        assert np.diff(times)[-1] <= 0.1
        job.start(W2)
        job.rounds(5, W2)
        made, *_ = job.finish()
        assert made == job.last


@pytest.mark.parametrize("servers", [1, 2])
def test_a_worker_that_comes_back_after_ten_rounds(servers):
    """It makes the rounds that it has missed, and each of its contributions counts once."""
    with Quorum(servers=servers, copies=0) as job:
        job.rounds(5)
        worker = job.workers[W2]
        job.hang(W2)
        job.rounds(10, W0, W1)
        job.go_on(worker)
        job.rounds(3, W2)
        assert job.finish(20) == pytest.approx([job.last] * 3, abs=1)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.ci) for seed in (1, 2))])
def test_a_worker_that_is_always_slower(seed):
    """Nobody waits for it for longer than the time of grace, and all that it makes counts."""
    with Quorum(copies=0, slow={2: 30.0}, seed=seed) as job:
        job.rounds(40, W0)
        assert job.workers[W2].count < 40
        job.finish(10)


@BOTH
def test_a_server_that_is_lost_with_copies(lost):
    """With late contributions on their way, or waiting: the other one has them all."""
    with Quorum(slow={2: 20.0}) as job:
        job.rounds(5)
        job.kill(lost)
        job.until(lambda: job.gone == {lost.index})
        job.rounds(5)
        job.finish()


@pytest.mark.ci
@BOTH
@pytest.mark.parametrize("seed", range(3))
def test_a_server_comes_back(lost, seed):
    """It has none of what waits then: that is applied before its variables are handed over. Then the other is lost."""
    with Quorum(slow={2: 20.0}, seed=seed) as job:
        job.rounds(5)
        job.kill(lost)
        job.until(lambda: job.gone == {lost.index})
        job.rounds(3)
        job.start(lost)
        job.until(lambda: job.is_back(lost))
        job.rounds(5)
        job.kill(OTHER[lost])
        job.until(lambda: job.gone == {OTHER[lost].index})
        job.rounds(3)
        job.finish()
