"""A server is lost, and another process is started in its place: it gets its variables back while the job goes on."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from psserver.rounds import backlog
from pstesting.processes import CHIEF, PS0, PS1, W0, W1
from pswire.telemetry.views.job_view import view_of
from pswire.telemetry.views.looked import Looked
from tests.kit.internals import DIGEST_ROUNDS as ROUNDS
from tests.kit.internals import Task
from tests.kit.simulated import World, with_lease

PS2, PS3 = Task("ps", 2), Task("ps", 3)
OTHER = {PS0: PS1, PS1: PS0}
BOTH = pytest.mark.parametrize("lost", [PS1, PS0], ids=str)


def lose(job: World, *servers: Task) -> None:
    """Kills servers; returns once the job goes on without each of them."""
    for server in servers:
        job.kill(server)
        job.until(lambda server=server: server.index in job.gone)


def await_return(job: World, server: Task) -> None:
    """Returns once the log tells that a server comes back."""
    other = OTHER[server]
    job.until(lambda: (generation := job.status(other).generation) is not None and generation.returns is not None)


def come_back(job: World, *servers: Task) -> None:
    """Starts servers again that were lost; returns once they have their variables."""
    job.start(*servers)
    job.until(lambda: job.is_back(*servers))


@BOTH
def test_a_server_comes_back(lost, caplog):
    """Nobody restarts; then the other server is lost, and what came back has all: each step has counted once."""
    with World() as job:
        job.rounds(5)
        lose(job, lost)
        come_back(job, lost)
        job.rounds(5)
        lose(job, OTHER[lost])
        assert job.finish() == [job.steps] * 2
    for task in (CHIEF, W0, W1):
        assert f"{task} uses {lost} again, which was readmitted" in caplog.text


def test_servers_are_started_anew_one_after_the_other():
    """The first one twice; training goes on, and each step counts once. Of four, two come back; then the others go."""
    with World() as job:
        job.rounds(5)
        for server in (PS0, PS1, PS0):
            lose(job, server)
            come_back(job, server)
        assert job.finish() == [job.steps] * 2
    with World(servers=4) as job:
        job.rounds(5)
        lose(job, PS0, PS2)
        come_back(job, PS0, PS2)
        lose(job, PS1, PS3)
        assert job.finish() == [job.steps] * 2


@BOTH
def test_the_chief_and_a_server_die_at_once_and_are_started_again(lost):
    """The new chief finds a new process in the place of a server of which nobody knows that it was lost: no new job. A
    worker, and a chief, that are started then have never known it as gone: they ask the one that keeps the log
    since."""
    with World() as job:
        job.rounds(5)
        job.kill(CHIEF, lost)
        job.start(lost, CHIEF)
        assert not job.status(lost).incarnations
        await_return(job, lost)
        job.until(lambda: job.is_back(lost))
        job.kill(W1, CHIEF)
        job.start(W1, CHIEF)
        job.until(lambda: job.workers[W1].joined)
        lose(job, OTHER[lost])
        assert job.finish()[0] == job.steps


def test_a_server_that_dies_while_it_is_taken_back(caplog):
    """The job goes on without it, and takes back the process after it."""
    with World() as job:
        job.rounds(5)
        lose(job, PS1)
        job.start(PS1)
        job.until(lambda: "has restarted" in caplog.text)
        job.kill(PS1)
        job.until(lambda: f"without {PS1}, which could not be readmitted: {PS1}: was lost" in caplog.text)
        job.rounds(5)
        come_back(job, PS1)
        lose(job, PS0)
        assert job.finish() == [job.steps] * 2


def test_a_full_disk_while_a_server_comes_back_is_named(caplog):
    """By the file; the server is asked again, and has its variables once there is room."""

    def full(path, *_):
        if str(path).endswith("later.json"):
            raise OSError(errno.ENOSPC, "No space left on device")
        raise AssertionError(path)

    with World() as job:
        job.rounds(5)
        lose(job, PS1)
        place = job.servers[0].core.machine.job.snapshots._place
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(place, "put", full)
            job.start(PS1)
            job.until(lambda: f"without {PS1}, which could not be readmitted" in caplog.text)
        (said,) = {line for line in caplog.messages if "could not be readmitted" in line}
        assert "later.json cannot be written: [Errno 28] No space left on device" in said
        assert "internal error" not in caplog.text
        job.until(lambda: job.is_back(PS1))
        job.rounds(5)
        assert job.finish() == [job.steps] * 2


@pytest.mark.parametrize("killed", [CHIEF, W1], ids=str)
def test_a_process_that_dies_while_a_server_is_taken_back(killed):
    """Of a chief the lowest worker goes on with what it has begun; a worker is left out."""
    with World(timeouts=with_lease(4.0)) as job:
        job.rounds(5)
        lose(job, PS1)
        job.start(PS1)
        await_return(job, PS1)
        job.pause(PS1)
        job.kill(killed)
        if killed == CHIEF:
            job.until(lambda: job.workers[W0].chief)
        else:
            job.until(lambda: len(job.status(PS0).generation.members) == 1)
        job.resume(PS1)
        job.until(lambda: job.is_back(PS1))
        lose(job, PS0)
        assert job.finish(chief=killed != CHIEF)[0] == job.steps


def test_a_server_that_comes_too_late_ends_with_the_job():
    """The job ends before anybody has taken it back; it is told so."""
    with World() as job:
        job.rounds(5)
        lose(job, PS1)
        job.finish(1)
        assert not job.status(PS1).over
    with World() as job:
        job.rounds(5)
        lose(job, PS1)
        job.last = job.round + 2
        job.start(PS1)
        job.finish(0)
        job.until(lambda: job.status(PS1).over)


# ---- A server that reads its variables while training goes on ----


@contextmanager
def reading(lost: Task) -> Iterator[World]:
    """A job that goes on with a server that is back, and reads, until `let_read`."""
    with World() as job:
        job.rounds(5)
        lose(job, lost)
        job.hold_files(lost)
        job.looks = False
        job.start(lost)
        job.until(lambda: job.gone == set())
        yield job
        assert job.finish() == [job.steps] * 2


def let_read(job: World, server: Task) -> None:
    """It has its variables."""
    job.let_read(server)
    job.looks = True


@BOTH
def test_training_goes_on_while_a_server_reads(lost):
    """It takes part in all rounds of meanwhile, and has them all: the other server is lost then."""
    with reading(lost) as job:
        before = job.round
        job.rounds(20)
        assert job.status(lost).recovering
        assert job.status(lost).round > before + 10
        let_read(job, lost)
        job.until(lambda: job.is_back(lost))
        job.rounds(5)
        lose(job, OTHER[lost])


@BOTH
def test_the_other_server_is_lost_while_one_reads(lost):
    """What was handed over is on disk, and what came since it has: it goes on alone, once it has read."""
    with reading(lost) as job:
        job.until(lambda: not job.status(OTHER[lost]).saving)
        job.rounds(10)
        lose(job, OTHER[lost])
        let_read(job, lost)
        job.rounds(10)


def test_a_server_is_killed_while_it_reads():
    """It is lost as any other; the next process reads what is handed over anew."""
    with reading(PS1) as job:
        job.rounds(5)
        lose(job, PS1)
        job.rounds(5)
        let_read(job, PS1)
        come_back(job, PS1)
        lose(job, PS0)


def test_rounds_wait_where_too_much_is_to_be_made_up(monkeypatch):
    """The backlog has a limit; nothing is lost by it."""
    monkeypatch.setattr(backlog, "BACKLOG_BYTES", 8 * 2 * 2 * 4 * 8)
    with reading(PS1) as job:
        job.wait(3.0)
        last = job.round
        job.wait(3.0)
        assert job.round == last
        let_read(job, PS1)
        job.rounds(10)
        job.until(lambda: job.is_back(PS1))
        lose(job, PS0)


# ---- A server that has other values than its copies ----


@pytest.mark.parametrize(("variable", "home", "failing"), [(0, PS0, PS1), (2, PS2, PS0)], ids=str)
def test_a_server_with_another_value_is_taken_back_with_the_right_one(variable, home, failing, caplog):
    """One bit of a copy: within a span of rounds both servers name it, and the sums are exact without the other one. Of
    three servers the one that fails keeps the log."""
    with World(servers=max(home.index, failing.index) + 1) as job:
        job.rounds(5)
        last = job.round
        job.fail(failing, variable)
        job.until(lambda: job.process(failing).outlived)
        assert last < job.round <= last + 2 * ROUNDS
        for one, other in ((home, failing), (failing, home)):
            assert f"{one} and its copy on {other} have different values of " in caplog.text
        assert f"goes on without {failing}: had different values from {home} after round " in caplog.text
        come_back(job, failing)
        before = job.round
        job.until(lambda: job.round > before + 2 * ROUNDS)
        assert not job.status(failing).differences
        lose(job, home)
        assert job.finish() == [job.steps] * 2
    assert caplog.text.count("have different values of") == 2


def test_servers_that_compute_differently(caplog):
    """One of them is started anew once; then both go on, the log says why, once, and `psctl status` of both."""
    with World() as job:
        job.rounds(5)
        job.fail(PS1, 0, always=True)
        job.until(lambda: job.process(PS1).outlived)
        job.start(PS1)
        job.until(lambda: job.is_back(PS1))
        job.fail(PS1, 0, always=True)
        job.until(lambda: f"{PS0} and {PS1} have different values since round " in caplog.text)
        assert (
            "They are not repaired: both began with the same values, so they compute differently; run all servers on"
            in caplog.text
        )
        before = job.round
        job.until(lambda: job.round > before + 2 * ROUNDS)
        assert {each.server for each in job.status(PS0).differences} == {1}
        seen = view_of([Looked(task, "", job.status(task)) for task in (PS0, PS1)])
        told = {each.task: each.message for each in seen.problems if each.kind == "differs"}
        assert told.keys() == {str(PS0), str(PS1)}
        for one, other in ((PS0, PS1), (PS1, PS0)):
            assert f"it has different values than {other} since round " in told[str(one)]
        assert job.failures() == {}
    assert caplog.text.count("They are not repaired") == 1


def test_the_last_copy_is_kept(caplog):
    """While the server is gone that has copies of what the failing one holds, nobody is given up; the log says why."""
    with World(servers=3) as job:
        job.rounds(5)
        lose(job, PS1)
        job.fail(PS0, 2)
        job.until(lambda: f"{PS0} and {PS2} have different values since round " in caplog.text)
        assert "removing either server would lose" in caplog.text
        job.rounds(5)
        assert job.gone == {1}
        assert job.failures() == {}


def test_undisturbed_servers_never_differ(caplog):
    """Nor do they where a server comes back, or a worker is left out."""
    with World(servers=3) as job:
        job.until(lambda: job.round > ROUNDS)
        lose(job, PS1)
        come_back(job, PS1)
        job.kill(W1)
        before = job.round
        job.until(lambda: job.round > before + 2 * ROUNDS)
        assert job.finish()[0] == job.steps
    assert "different values" not in caplog.text
