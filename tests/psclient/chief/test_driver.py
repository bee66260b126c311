"""The end of a job and its checkpoints, as a chief commits them; what it measures, and what stands by for it."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np

import psclient as ps
from psclient._src.chief.checkpoints import CheckpointCommitter
from psclient._src.chief.standby import outlook
from psclient._src.chief.timers import STEP, AbandonmentTimer, Stall, Stalls
from psclient._src.network.daemon_threads import Threads
from psclient._src.network.session import Session
from psserver.config import ServerConfig
from psserver.network.server import ServerThread
from pswire.cluster import ClusterSpec, Task
from pswire.limits import Timeouts
from pswire.model.log import Member
from pswire.model.status import OpenRound, ServerStatus, SessionState
from pswire.telemetry.metrics import Histogram
from tests.kit.rig import CHIEF, SOON, WORKERS, checkpoint, core, together
from tests.kit.workers import SLOW

A, B = WORKERS[:2]


def test_parts_of_different_rounds_are_no_checkpoint(job, tmp_path):
    """The chief writes no manifest over them, and says which rounds they are of; those of one round are one."""
    (one,) = job.join(A, mode="async")
    for number in (0, 1):
        job.variable(one, np.array(float(number)), (number,))
    session = Session(A, job.verbs, 0, True, SLOW)
    session.token = job.token
    checkpoints = CheckpointCommitter(job.verbs, session, Threads("checkpoint"), Histogram())

    def save(path, *rounds):
        plan = job.approve(checkpoint(path, (0, 1)), one)
        for server, one.round in enumerate(rounds):
            together(one.push(plan, server=server))
        done = checkpoints.commit(plan)
        assert (tmp_path / path / "manifest.json").exists() == (not done.error)
        return done

    assert "the servers wrote parts from different rounds (0, 1); save again" in save("run/ckpt-1", 0, 1).error
    assert save("run/ckpt-2", 2, 2).round == 2


def test_an_end_that_is_none_waits_for_nobody():
    """The job cannot go on, and only the server knows: the process that has the chief in it ends all the same."""
    behind = core()
    with ServerThread(behind, ServerConfig(behind.task), grace=0.0) as thread:
        cluster = ClusterSpec({"ps": (thread.address,), "worker": ("x:1", "x:2")})
        resolver = ps.SimpleClusterResolver(cluster, task_type="worker", task_id=0)
        strategy = ps.ParameterServerStrategy(cluster_resolver=resolver, timeouts=SLOW)
        other = Session(B, [behind], 1, timeouts=SLOW)
        other.open()
        other.leave("Diverged: at another section")
        closing = threading.Thread(target=strategy.close, daemon=True)
        closing.start()
        closing.join(SOON)
        assert not closing.is_alive()
    behind.close()


TIMEOUTS = Timeouts(no_workers_timeout=10.0, first_worker_timeout=30.0)


def states(**ends: str) -> list[SessionState]:
    """Sessions of A and B, in the order in which they are given."""
    tasks = {"a": A, "b": B}
    return [
        SessionState(Member(tasks[name[0]], number, 1), state, "", 0.0, False)
        for number, (name, state) in enumerate(ends.items())
    ]


def given_up(presence: AbandonmentTimer, sessions: list[SessionState], start: float, end: float) -> tuple[float, str]:
    """When it gives up, looking once a second, and what it says; the end where it does not."""
    now = start
    while now < end:
        if (told := presence.look(sessions, now)) is not None:
            return now, str(told)
        now += 1.0
    return end, ""


def test_it_waits_for_those_who_are_gone():
    """It says of each task what became of its newest process. A script may do much before it makes its strategy, also
    where another one has failed by then: it waits longer for those who never came. Whoever is there begins it anew."""

    def given(sessions: list[SessionState], tasks: set[Task] = {A, B}, **more: float) -> tuple[float, str]:  # noqa: B006
        timer = AbandonmentTimer(tasks, Timeouts(**{"no_workers_timeout": 10.0, "first_worker_timeout": 30.0, **more}))
        return given_up(timer, sessions, 0.0, 100.0)

    now, told = given(states(a="lost", b="failed", a2="left"))
    said = f"no worker was connected for 10 s (PS_NO_WORKERS_TIMEOUT): {A} left, {B} failed"
    assert (now, told.partition(". ")[0]) == (10.0, said)
    now, told = given(states(a="failed"))
    assert now == 30.0
    assert f"(PS_FIRST_WORKER_TIMEOUT): {A} failed, {B} never connected. " in told
    now, told = given([], {A}, no_workers_timeout=50.0)
    assert (now, "(PS_NO_WORKERS_TIMEOUT)" in told) == (50.0, True)
    presence = AbandonmentTimer({A, B}, TIMEOUTS)
    assert given_up(presence, states(a="lost", b="lost"), 0.0, 10.0) == (10.0, "")
    assert given_up(presence, states(a="lost", b="lost", b2="open"), 10.0, 50.0) == (50.0, "")
    assert given_up(presence, states(a="lost", b="lost", b2="lost"), 50.0, 100.0)[0] == 59.0


def test_time_in_which_it_stood_still_does_not_count():
    """A process that was stopped, or on a machine that was, could not see who was there."""
    presence = AbandonmentTimer({A}, TIMEOUTS)
    gone = states(a="lost")
    assert presence.look(gone, 0.0) is None
    assert presence.look(gone, 5000.0) is None
    assert given_up(presence, gone, 5001.0, 6000.0)[0] == 5000.0 + TIMEOUTS.no_workers_timeout - STEP


LEASE, PERIOD = 4.0, 1.0


def status(*rounds: tuple[int, tuple[Task, ...]]) -> ServerStatus:
    """What a server says whose open rounds wait for these."""
    waiting = tuple(OpenRound(number, "a section", missing, True) for number, missing in rounds)
    return ServerStatus(0, 7, 1, None, 0, (), waiting, 0, 0, 0, 0.0)


def looks(stalls: Stalls, statuses: list[ServerStatus], start: float, seconds: float) -> Stall | None:
    stall = None
    for step in range(int(seconds / PERIOD) + 1):
        stall = stalls.look(statuses, start + step * PERIOD)
    return stall


def test_the_oldest_round_counts_from_the_look_that_shows_it():
    """Over all servers; whom any of them misses there is missing, and nobody else. When it is over the next one has all
    of its time; between two rounds there is nothing."""
    servers = [status((5, (B,)), (6, (A,))), status(), status((5, (A, B)))]
    stalls = Stalls(LEASE, PERIOD)
    assert looks(stalls, servers, 100.0, 7.0) == Stall(5, 7.0, (A, B))
    assert looks(stalls, [status((6, (B,)))], 108.0, 2.0) == Stall(6, 2.0, (B,))
    assert stalls.look([status()], 111.0) is None
    assert looks(stalls, [status((6, (B,)))], 112.0, 0.0) == Stall(6, 0.0, (B,))


def test_time_in_which_somebody_stood_still_does_not_count():
    """Nor does the lease after it, in which all come back; a look that is a little late counts."""
    stalls = Stalls(LEASE, PERIOD)
    servers = [status((5, (B,)))]
    assert looks(stalls, servers, 100.0, 3.0) == Stall(5, 3.0, (B,))
    late = 103.0 + PERIOD + LEASE / 2 + 0.1
    assert stalls.look(servers, late) == Stall(5, 3.0, (B,))
    assert looks(stalls, servers, late + 1.0, LEASE - 1.0) == Stall(5, 3.0, (B,))
    assert looks(stalls, servers, late + LEASE + 1.0, 1.0) == Stall(5, 5.0, (B,))
    stalls = Stalls(LEASE, PERIOD)
    stalls.look(servers, 100.0)
    assert stalls.look(servers, 100.0 + PERIOD + LEASE / 2) == Stall(5, PERIOD + LEASE / 2, (B,))


TIMES = Timeouts(heartbeat_interval=2.0)
EMPTY = ServerStatus(0, 1, 0, None, -1, (), (), 0, 0, 0, 0.0)


def chief(state, silent=0.0, task=CHIEF):
    return SessionState(Member(task, 7, 0), state, "", silent, True)


def seen(*sessions, over=False, broken=""):
    """How a job with these sessions is driven."""
    return outlook(replace(EMPTY, sessions=sessions, over=over, broken=broken), TIMES)


def test_the_newest_chief_counts():
    """Not workers; one that missed a heartbeat may be gone, one that left saw the end; a lost job does not go on."""
    worker = SessionState(Member(WORKERS[0], 1, 1), "open", "", 0.0)
    assert seen() == seen(worker) == "none"
    assert seen(chief("lost"), chief("open", 2.5), worker) == "driven"
    assert seen(chief("open", 2.6)) == "gone"
    assert {seen(chief("open"), chief(state)) for state in ("lost", "failed", "hung")} == {"gone"}
    assert seen(chief("left"), worker) == seen(chief("open"), over=True) == "over"
    assert seen(over=True) == "over"  # a server that keeps no sessions says so as well
    assert {seen(chief(state), broken="a server was lost") for state in ("open", "failed")} == {"none"}
