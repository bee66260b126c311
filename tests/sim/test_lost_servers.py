"""A server is lost: with copies the job goes on with exact sums; without, every process gets the same error."""

from __future__ import annotations

import pytest

from pstesting.processes import CHIEF, PS0, PS1, W0, W1
from pswire.telemetry.views.job_view import view_of
from pswire.telemetry.views.looked import Looked
from tests.kit.internals import PSError, ServerLost, Task
from tests.kit.simulated import QUICK, World, with_lease

PS2, PS3 = Task("ps", 2), Task("ps", 3)
BOTH = pytest.mark.parametrize("lost", [PS1, PS0], ids=str)
CHEAP = [1, 4]
"""Seeds of jobs that take few rounds; each loses another server."""


@BOTH
def test_the_job_goes_on_without_a_server(lost, caplog):
    """It is killed while rounds are made; nobody restarts, and every round has counted once on what is left. A worker
    that is started again, and a chief, find the other one."""
    with World() as job:
        job.rounds(10)
        job.kill(lost)
        job.until(lambda: job.gone == {lost.index})
        assert job.finish() == [job.steps] * 2
    for task in (W0, W1, CHIEF):
        assert f"{task} goes on without {lost}: was lost (nothing listens there any more" in caplog.text
    with World() as job:
        job.rounds(5)
        job.kill(lost)
        job.until(lambda: job.gone == {lost.index})
        job.kill(W1, CHIEF)
        job.start(CHIEF, W1)
        job.until(lambda: job.workers[W1].joined)
        job.rounds(5)
        zero, one = job.finish()
        assert zero == job.steps
        assert one < job.steps


@BOTH
@pytest.mark.parametrize("after", [0.0004, 0.0008, 0.0013, 0.0018, 0.0025, 0.0035, 0.005])
def test_a_server_is_lost_while_the_job_begins(lost, after):
    """Once a chief has found all servers, the job needs one of two: before it has a log, before it has variables."""
    with World() as job:
        job.wait(after)
        job.kill(lost)
        job.until(lambda: job.gone == {lost.index})
        assert job.finish() == [job.steps] * 2


@BOTH
def test_a_server_that_wakes_up_too_late_answers_nobody(lost, caplog):
    """One that was paused for less than a lease is waited for: nobody goes on without it. After a longer pause the
    others have gone on; it is told so, and ends."""
    with World() as job:
        job.rounds(10)
        before = job.round
        job.pause(lost)
        job.wait(0.9 * QUICK.session_timeout)
        assert job.round <= before + 1
        job.resume(lost)
        job.rounds(5)
        assert "goes on without" not in caplog.text
        job.pause(lost)
        job.rounds(10)
        job.resume(lost)
        job.until(lambda: not job.process(lost).alive)
        assert job.process(lost).outlived
        assert f"{lost} ends: the job goes on without this server, because it was lost" in caplog.text
        assert job.finish() == [job.steps] * 2


def test_a_server_and_its_copy():
    """Both are lost: everybody is told which, and ends."""
    with World(servers=3, timeouts=with_lease(2.0, server_timeout=4.0)) as job:
        job.rounds(5)
        job.kill(PS1)
        job.until(lambda: job.gone == {1})
        job.kill(PS2, PS0)
        job.until(lambda: len(job.failures()) == 3)
        for error in job.failures().values():
            assert isinstance(error, ServerLost)
            assert error.task in (str(PS0), str(PS2))


@BOTH
def test_a_worker_and_a_server_are_lost_at_the_same_time(lost):
    """A round of the worker counts for all variables, or for none."""
    for steps in (5, 6, 7):
        with World(seed=steps) as job:
            job.rounds(steps)
            job.wait(0.004 * steps)
            job.kill(W1, lost)
            job.rounds(10, W0)
            assert job.finish()[0] == job.steps


def open_half(job: World) -> None:
    """Worker 1 is started again; meanwhile it has opened a session on one server, and not on the other."""
    job.rounds(5)
    job.kill(W1)
    job.start(W1)
    opens = job.workers[W1].session
    job.until(lambda: opens.number)
    assert not opens.incarnations


@BOTH
def test_a_server_is_lost_while_a_worker_opens_its_session(lost):
    """Between two servers. The one that keeps the sessions now knows only the worker's dead process, which has a lease.
    The worker waits for that, and takes part. Without copies it learns of the loss as all others do, and not only when
    `PS_START_TIMEOUT` is over."""
    with World() as job:
        open_half(job)
        job.kill(lost)
        job.until(lambda: job.workers[W1].joined)
        job.rounds(5)
        assert job.finish()[0] == job.steps
    with World(copies=0) as job:
        open_half(job)
        job.kill(PS1)
        began = job.scheduler.now
        job.until(lambda: W1 in job.failures())
        assert job.scheduler.now - began < QUICK.session_timeout
        assert_lost(job.failures()[W1], PS1, "")


@pytest.mark.parametrize("heir", ["started", "standing by"])
def test_the_chief_and_the_server_that_keeps_the_log_die_at_once(heir):
    """As with the host of both: the next chief finds that nothing listens there any more, and tells the others."""
    with World() as job:
        standing = job.stand_by() if heir == "standing by" else None
        job.wait(1.5)
        job.kill(CHIEF, PS0)
        if standing is None:
            job.start(CHIEF)
        job.until(lambda: job.gone == {0})
        job.rounds(5)
        assert job.finish(chief=standing is None) == [job.steps] * 2
        if standing is not None:
            job.until(standing.has_ended)
            assert standing.failure is None


@pytest.mark.parametrize(
    "seed", CHEAP + [pytest.param(n, marks=pytest.mark.soak) for n in range(200) if n not in CHEAP]
)
def test_all_die_and_come_back(seed):
    """Workers, the chief and, one at a time, servers die at random moments, and are started again. A contribution that
    was answered counts; of those that were not, at most one for each death does."""
    with World(servers=3, workers=3, seed=seed) as job:
        servers = [PS0, PS1, PS2]
        job.rounds(3)
        for _ in range(6):
            there = [task for task, worker in job.workers.items() if worker.alive]
            choices = [CHIEF, *there] if len(there) > 1 else [CHIEF]
            whole = job.gone == set() and job.is_back(*servers)
            task = job.luck.choice(choices + servers if whole else choices)
            job.kill(task)
            job.wait(job.luck.uniform(0.0, 0.5))  # some come back before their lease has ended
            job.start(task)
            job.wait(job.luck.uniform(0.0, 2.5))
        job.until(lambda: job.is_back(*servers) and all(worker.joined is not None for worker in job.workers.values()))
        job.finish()


# ---- Without copies ----


@BOTH
def test_without_copies_every_process_ends(lost):
    """Within a lease every process knows which server was lost, whatever it does, and ends."""
    with World(copies=0) as job:
        job.rounds(5)
        job.hang(W1)
        began = job.scheduler.now
        job.kill(lost)
        job.until(lambda: {W0, CHIEF} <= job.failures().keys())  # one waits in a round, one for news
        assert job.scheduler.now - began < QUICK.session_timeout
        job.go_on(job.workers[W1])
        job.until(lambda: W1 in job.failures())
        for error in job.failures().values():
            assert_lost(error, lost, "nothing listens there any more")


def assert_lost(error: PSError, server: Task, why: str) -> None:
    """An error says which server was lost, how that was found, and what to do."""
    assert isinstance(error, ServerLost)
    assert error.task == str(server)
    assert why in error.message
    assert "restart from a checkpoint" in error.message


@BOTH
def test_a_server_that_is_silent_for_too_long_is_lost(lost, caplog):
    """One that pauses for two leases is waited for: nobody ends, no session does, and all goes on where it was. After
    `PS_SERVER_TIMEOUT` every process ends, and says which server, for how long, and by which setting. Nobody knows what
    another server has missed: a new job begins, and has nothing of the old one. But nobody could write to the log that
    server 0 is lost, and it is not: its variables count, with all rounds that were complete, what was under way at most
    once, and all that the next lives do."""
    with World(copies=0) as job:
        job.rounds(5)
        before = job.round
        job.pause(lost)
        job.wait(2 * QUICK.session_timeout)
        assert job.round <= before + 1
        job.resume(lost)
        assert job.finish() == [job.steps] * 2
    assert "is complete without" not in caplog.text
    with World(copies=0, timeouts=with_lease(2.0, server_timeout=6.0)) as job:
        job.rounds(5)
        job.pause(lost)
        job.wait(5.5)
        assert job.failures() == {}
        job.until(lambda: len(job.failures()) == 3, 2.0)
        for error in job.failures().values():
            assert_lost(error, lost, "for 6 s (PS_SERVER_TIMEOUT")
        job.resume(lost)
        old, job.lives = job.lives, [] if lost == PS1 else job.lives
        job.deaths |= {W0: 1, W1: 1}
        job.start(CHIEF, W0, W1)
        job.until(lambda: all(job.workers[task].made for task in (W0, W1)))
        first = min(job.workers[W0].made)
        assert (first == 0) == (lost == PS1)
        job.rounds(5)
        job.finish()
        assert {worker.last for worker in old[:2]} == {4}


# ---- Servers that do not reach one another ----


def test_servers_that_never_reach_each_other(caplog):
    """No round is made, and nobody waits for ever: after `PS_SERVER_TIMEOUT` every process ends, and names both."""
    with World(copies=0, timeouts=with_lease(2.0, server_timeout=6.0)) as job:
        job.cut(PS0, PS1)
        job.until(lambda: len(job.failures()) == 3)
        assert job.round == -1
        for error in job.failures().values():
            assert_lost(error, PS1, "allow connections between the servers, ")
            assert f"{PS0} has not reached {PS1} for " in error.message
    for one, other in ((PS0, PS1), (PS1, PS0)):
        assert f"rounds wait, because {one} cannot reach {other} (at " in caplog.text


def test_a_server_and_its_copy_that_do_not_reach_each_other(caplog):
    """With copies the job goes on with one of them, by the chief's word alone; the other answers nobody any more."""
    with World() as job:
        job.rounds(5)
        job.cut(PS0, PS1)
        job.until(lambda: job.gone == {1})
        assert job.finish() == [job.steps] * 2
        assert job.process(PS1).outlived
    assert f"goes on without {PS1}: {PS0} has not reached {PS1}" in caplog.text


def test_servers_that_are_cut_off_for_a_while():
    """Rounds wait, `psctl status` says why, and once the servers reach each other again all go on."""
    with World(copies=0) as job:
        job.rounds(5)
        before = job.round
        job.cut(PS0, PS1)
        job.wait(5.0)
        seen = view_of([Looked(task, "", job.status(task)) for task in (PS0, PS1)])
        told = {each.task: each.message for each in seen.problems if each.kind == "cut_off"}
        for server, other in ((PS0, PS1), (PS1, PS0)):
            assert f"it has not reached {other} for " in told[str(server)]
        assert job.round <= before + 1
        job.mend(PS0, PS1)
        assert job.finish() == [job.steps] * 2
