"""Chief and workers are told to end, together or one after another: each finishes a step, and ends within seconds."""

import pytest

from pstesting.processes import CHIEF, PS0, W0, W1, W2
from tests.kit.internals import STEP, Consistency, Timeouts
from tests.kit.simulated import World

ALL = (CHIEF, W0, W1, W2)
SECONDS = 5.0
"""Half of what Docker gives, with heartbeats of two seconds, and leases of ten."""


def stop(job, moments):
    """Tells tasks to end, each at its moment; returns how long the last of them took."""
    began = job.scheduler.now
    for task, moment in moments.items():
        job.scheduler.at(began + moment, job.tell_to_end, task)
    job.until(lambda: not any(job.process(task).alive for task in moments))
    assert job.failures() == {}
    return job.scheduler.now - began - max(moments.values())


MOMENTS = {
    "together": dict.fromkeys(ALL, 0.0),
    "the chief last": {CHIEF: 0.4, W0: 0.0, W1: 0.0, W2: 0.0},
    "one after another": {CHIEF: 0.0, W0: 0.7, W1: 1.4, W2: 2.1},
    "workers once the chief has left": {CHIEF: 0.0, W0: 2.5, W1: 2.6, W2: 3.7},
    "workers once one of them drives": {CHIEF: 0.0, W0: 9.0, W1: 9.0, W2: 9.0},
    "a worker that drives first": {CHIEF: 0.0, W0: 9.0, W1: 10.5, W2: 13.0},
}


@pytest.mark.parametrize(("case", "mode"), [*((case, "sync") for case in MOMENTS), ("one after another", "async")])
def test_all_end_soon_that_are_told_to_end_together(case, mode):
    """No worker waits for half of its grace period, and none has to do without what it has contributed."""
    with World(workers=3, copies=0, consistency=Consistency(mode), step=0.2, timeouts=Timeouts()) as job:
        job.looks = mode != "async"
        job.rounds(10)
        assert stop(job, MOMENTS[case]) < SECONDS
        assert all(job.workers[task].left for task in (W0, W1, W2))
        if job.looks:
            job.check()


@pytest.mark.parametrize("before", [0.0, 3.0, 8.0])
def test_all_workers_leave_whose_chief_was_killed(before):
    """At the same moment, or before."""
    with World(workers=3, copies=0, step=0.2, timeouts=Timeouts()) as job:
        job.rounds(10)
        job.kill(CHIEF)
        job.wait(before)
        assert stop(job, dict.fromkeys((W0, W1, W2), 0.0)) < SECONDS
        job.check()


def test_a_worker_that_is_told_to_end_and_killed_before_its_next_step():
    """It was to leave with the next step: the others wait for its lease, as for anybody's."""
    with World(workers=3, copies=0) as job:
        job.rounds(5)
        job.hang(W0)
        job.hang(W1)
        job.tell_to_end(W1)
        job.until(lambda: [member.task for member in job.status(PS0).generation.leaving] == [W1])
        assert job.status(PS0).generation.join_point == STEP
        job.kill(W1)
        job.go_on(job.workers[W0])
        job.rounds(5, W0, W2)
        there, dead, other = job.finish()
        assert there == other == job.last
        assert dead < there


def test_who_stays_trains_on_and_drives():
    """The chief and two of three workers are told: the third leads the job to its end."""
    with World(workers=3, copies=0, step=0.2, timeouts=Timeouts()) as job:
        job.rounds(10)
        assert stop(job, {CHIEF: 0.0, W0: 0.0, W2: 0.1}) < SECONDS
        job.rounds(10, W1)
        job.until(lambda: job.workers[W1].chief is not None)
        job.finish(chief=False)
        assert not job.workers[W1].left
