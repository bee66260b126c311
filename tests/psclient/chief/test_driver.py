"""The end of a job, which needs that every task has done its part, and its checkpoints, as a chief commits them."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import psclient as ps
from psclient._src.chief.checkpoints import CheckpointCommitter
from psclient._src.chief.decisions import is_done as decide_end
from psclient._src.chief.job_state import JobState
from psclient._src.transport.daemon_threads import Threads
from psclient._src.transport.session import Session
from psserver.config import ServerConfig
from psserver.transport.server import ServerThread
from pswire.cluster import ClusterSpec
from pswire.limits import Timeouts
from pswire.model.log import EpochClosed
from pswire.telemetry.metrics import Histogram
from tests.kit.rig import SOON, WORKERS, Job, checkpoint, core, serving, together

A, B = WORKERS[:2]
SLOW = Timeouts(beat=60.0)
"""No beat tells anything."""


@pytest.fixture
def job(tmp_path):
    """Two servers and a chief that does nothing by itself."""
    with serving("core", 2, tmp_path) as servers:
        yield Job(servers)


def is_done(job):
    """What a chief says that sees all that happened in a job at once."""
    state = JobState()
    watched = job.verbs[0].watch(job.opened.session, 0, 0).result(SOON)
    state.take([entry for entry in watched.entries if isinstance(entry, EpochClosed)])
    return decide_end(state, watched.sessions, {A, B})


def leave(job, *sessions):
    for session in sessions:
        job.verbs[0].leave(session, "")


def test_a_job_is_done_when_all_have_left(job):
    """Cleanly, and each of them."""
    one, other = job.join(A, B)
    leave(job, one.session)
    assert not is_done(job)
    leave(job, other.session)
    assert is_done(job)


def test_a_failed_task_is_waited_for(job):
    """It did not do its part, and no other process of its task has."""
    one, other = job.join(A, B)
    job.verbs[0].leave(other.session, "ValueError: a bug")
    leave(job, one.session)
    assert not is_done(job)
    again = job.open(B).session
    assert not is_done(job)
    leave(job, again)
    assert is_done(job)


@pytest.mark.parametrize("lost", [True, False], ids=["lost", "replaced"])
def test_a_process_may_leave_for_the_one_that_died(job, lost):
    """Its task is done, though no epoch took it in: those who would have done so left at the same time."""
    one, dead = job.join(A, B)
    if lost:
        job.servers.spend(12, one.session, job.opened.session)
    back = job.open(B).session
    leave(job, back, one.session)
    assert job.epoch.session(dead.session)
    assert is_done(job)


def test_a_process_that_came_after_the_end_of_its_task_undoes_nothing(job):
    """What was done is done, whatever becomes of one that was started again."""
    one, other = job.join(A, B)
    leave(job, other.session)
    job.open(B)
    leave(job, one.session)
    assert not is_done(job)
    job.end(B)
    job.servers.spend(12, job.opened.session)
    assert is_done(job)


def test_parts_of_different_rounds_are_no_checkpoint(job, tmp_path):
    """The chief writes no manifest over them, and says which rounds they are of; those of one round are one."""
    (one,) = job.join(A)
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

    assert "the servers' parts are of different rounds (0, 1); save again" in save("run/ckpt-1", 0, 1).error
    assert save("run/ckpt-2", 2, 2).round == 2


def test_an_end_that_is_none_waits_for_nobody():
    """The job cannot go on, and only the server knows: the process that has the chief in it ends all the same."""
    behind = core()
    with ServerThread(behind, ServerConfig(behind.task), grace=0.0) as thread:
        cluster = ClusterSpec({"ps": (thread.address,), "worker": ("x:1", "x:2")})
        resolver = ps.SimpleClusterResolver(cluster, task_type="worker", task_id=0)
        strategy = ps.ParameterServerStrategy(cluster_resolver=resolver, timeouts=SLOW)
        other = Session(B, [behind], 1, timeouts=SLOW, consistency="whole")
        other.open()
        other.leave("Diverged: at another section")
        closing = threading.Thread(target=strategy.close, daemon=True)
        closing.start()
        closing.join(SOON)
        assert not closing.is_alive()
    behind.close()
