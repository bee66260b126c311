"""Workers and chiefs are lost, and come back: rounds go on, and whoever drives is one process."""

import logging

import pytest

from pstesting.processes import CHIEF, PS1, W0, W1, W2
from tests.kit.internals import Abandoned, ServerLost
from tests.kit.simulated import QUICK, World, with_lease

LEASE = QUICK.session_timeout


@pytest.fixture(autouse=True)
def told(caplog):
    """The log of all processes."""
    caplog.set_level(logging.INFO)
    return caplog


def drives(task):
    return f"the chief is down: {task} takes over as chief"


# ---- Workers ----


def test_the_others_go_on_after_a_lease(told):
    """Two are killed, one after another: rounds are complete without them, and say so; a round later it is no news."""
    with World(workers=3, copies=0) as job:
        for lost in (W1, W2):
            job.rounds(10)
            at, began = job.round, job.scheduler.now
            job.kill(lost)
            job.until(lambda at=at: job.round > at + 1)
            assert LEASE / 2 < job.scheduler.now - began < LEASE + 1
            job.rounds(5)
            without = [line for line in told.messages if f"is complete without {lost}" in line]
            assert 0 < len(without) <= 2 * 2 * 2, (
                "one round, or two that were under way, on two servers for two workers"
            )
        made, *lost = job.finish()
        assert made == job.last
        assert all(0 < count < made for count in lost)


def test_a_worker_that_comes_back_begins_where_the_others_are(told):
    """It joins at a round, with the values of that; then it is waited for as before. The log has a line of each."""
    with World(workers=3, copies=0) as job:
        for _ in range(3):
            job.rounds(7)
            job.kill(W1)
            job.rounds(5, W0)
            before = job.round
            job.start(W1)
            job.rounds(5, W1)
            back = job.workers[W1]
            assert back.joined > before
            assert back.made[back.joined] == job.workers[W0].made[back.joined]
        assert job.finish()[0] == job.last
    said = [record.getMessage() for record in told.records if record.levelno >= logging.WARNING]
    assert [line for line in said if "goes on without" in line] == [f"goes on without {W1}, which is lost"] * 3
    assert [line for line in said if "has reconnected" in line] == [f"{W1} has reconnected and takes part again"] * 3


def test_all_workers_die_and_new_ones_come():
    """The job goes on from the live variables; rounds that nobody holds any more are not waited for."""
    with World(workers=2, copies=0, timeouts=with_lease(LEASE, no_workers_timeout=60.0)) as job:
        job.rounds(9)
        before = job.round
        job.kill(W0, W1)
        job.start(W0, W1)
        job.rounds(5)
        assert min(job.workers[task].joined for task in (W0, W1)) >= before
        counts = job.finish()
        assert min(counts) > before


# ---- Workers that compute ----


def test_a_worker_that_computes_about_as_long_as_before_is_not_reported(told):
    """It is the slower one of two, as with local steps of different lengths. One that is silent for longer is named."""
    with World(workers=2, copies=0, step=2.0, slow={1: 5.0}, timeouts=with_lease(20.0, round_timeout=60.0)) as job:
        for _ in range(3):
            job.rounds(3)
        told.clear()
        for _ in range(3):
            job.rounds(3)
        assert "has waited for" not in told.text
        worker = job.workers[W1]
        job.hang(W1)
        job.until(lambda: f"has waited for {W1}" in told.text)
        job.go_on(worker)
        job.finish(2)


# ---- Workers that hang ----

HASTY = with_lease(LEASE, round_timeout=3 * LEASE)
"""The shortest time for a round that may be set."""


def test_a_hung_worker_is_excluded(told):
    """Its heartbeats go on, and it does not come to its push: it is named, then fenced; the others go on, and so does
    its next process. When it wakes it ends, and is told why. A worker that is only slow harms nobody."""
    with World(workers=3, copies=0, timeouts=HASTY) as job:
        for worker in (W2, W1):
            job.rounds(5)
            job.hang(worker)
            job.until(lambda worker=worker: f"has waited for {worker}" in told.text)
            at = job.workers[worker].last + 1
            assert f"round {at} has waited for {worker}" in told.text
            if worker == W2:
                job.go_on(job.workers[worker])
        job.rounds(5, W0, W2)
        assert f"round {at} of server 0 is complete without {W1}" in told.text
        assert f"is complete without {W2}" not in told.text
        hung = job.workers[W1]
        job.start(W1)
        job.rounds(5)
        job.go_on(hung)
        job.until(lambda: hung.failure)
        assert "PS_ROUND_TIMEOUT" in str(hung.failure)
        assert hung.count == at
        there, dead, slow = job.finish()
        assert there == slow == job.last
        assert dead == at + job.workers[W1].count


def test_who_waits_for_a_hung_worker_without_a_chief_is_told_for_whom(told):
    """Nor a worker that may drive: two leases after a chief would have dropped it the others end, and name it."""
    with World(copies=0, timeouts=HASTY) as job:
        job.workers[W0].session.drive = lambda: None  # as one whose certificate names no chief
        job.rounds(5)
        job.hang(W1)
        job.kill(CHIEF)
        began = job.scheduler.now
        job.until(lambda: W0 in job.failures())
        assert HASTY.round_timeout + 2 * LEASE - 1 < job.scheduler.now - began < HASTY.round_timeout + 3 * LEASE
        at = job.workers[W0].last + 1
        error = str(job.failures()[W0])
        assert f"round {at} did not complete within {HASTY.round_timeout + 2 * LEASE:g} s: it waits for {W1}" in error


# ---- The chief ----


def test_the_lowest_worker_drives_on_and_then_the_next(told):
    """Once the chief's lease is over; a chief that stands by meanwhile ends with the job."""
    with World(workers=3, copies=0) as job:
        job.rounds(5)
        job.kill(CHIEF)
        job.until(lambda: job.workers[W0].chief is not None)
        job.rounds(5)
        assert drives(W0) in told.text
        job.kill(W0)
        job.until(lambda: job.workers[W1].chief is not None)
        job.rounds(5)
        assert drives(W1) in told.text
        late = job.stand_by()
        job.start(W0)  # whom the worker that drives takes in
        job.rounds(5)
        assert drives(W2) not in told.text
        assert drives(CHIEF) not in told.text
        job.finish(chief=False)
        job.until(lambda: not late.alive)
        assert late.failure is None


def test_one_that_stands_by_drives_on(told):
    """No worker does; what the chief decided stands."""
    with World(workers=2, copies=0) as job:
        job.rounds(5)
        heir = job.stand_by()
        job.wait(1)
        job.kill(CHIEF)
        job.until(lambda: heir.chief._session is not None and heir.chief._session.token)
        job.kill(W1)
        job.rounds(5, W0)
        job.start(W1)  # it decides that this one is lost, and comes
        job.rounds(5)
        assert drives(W0) not in told.text
        job.finish(chief=False)
        job.until(lambda: not heir.alive)
        assert heir.failure is None


@pytest.mark.parametrize("heir", ["a worker", "a worker that drives", "one that stands by"])
def test_a_chief_and_a_server_are_lost(heir):
    """At the same time, or one after the other: who takes the chief's place finds the server gone, and every process
    ends, with the same error."""
    with World(workers=2, copies=0) as job:
        job.rounds(5)
        late = job.stand_by() if heir == "one that stands by" else None
        job.kill(CHIEF)
        if heir == "a worker that drives":
            job.until(lambda: job.workers[W0].chief is not None)
        job.kill(PS1)
        job.until(lambda: {W0, W1} <= set(job.failures()))
        if late is not None:
            job.until(lambda: not late.alive)
        for error in (job.failures()[W0], job.failures()[W1], *([late.failure] if late is not None else [])):
            assert isinstance(error, ServerLost)
            assert error.task == str(PS1)


# ---- Nobody is left ----


def test_a_chief_whose_workers_are_all_gone_gives_the_job_up():
    """When they have been gone for `PS_NO_WORKERS_TIMEOUT`, and not before; it says what became of each, and servers
    end."""
    with World(workers=2, copies=0, timeouts=with_lease(LEASE, no_workers_timeout=10.0)) as job:
        job.rounds(5)
        began = job.scheduler.now
        job.kill(W0, W1)
        job.until(lambda: job.failures())
        error = job.failures()[CHIEF]
        assert isinstance(error, Abandoned)
        assert f"{W0} lost, {W1} lost. The job has ended" in str(error)
        assert 10.0 <= job.scheduler.now - began < 10.0 + 2 * LEASE
        assert all(server.core.done.done() for server in job.servers)


def test_a_job_to_which_nobody_comes_is_given_up():
    """After `PS_FIRST_WORKER_TIMEOUT`."""
    with World(
        workers=2, copies=0, timeouts=with_lease(LEASE, no_workers_timeout=1.0, first_worker_timeout=20.0)
    ) as job:
        job.kill(W0, W1)
        job.until(lambda: job.failures())
        assert f"{W0} never connected, {W1} never connected. The job has ended" in str(job.failures()[CHIEF])
        assert job.scheduler.now >= 20.0
