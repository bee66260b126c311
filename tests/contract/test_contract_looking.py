"""Who only looks at a job leaves no trace; what a server was told last is told in people's words."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.kit import internals as inside
from tests.kit.rig import CHIEF, SOON, WORKERS, Job, Worker, create
from tests.kit.strategies import refused

NOBODY = 0
W0, W1 = WORKERS[:2]


def test_looking_leaves_no_trace(job: Job, worker: Worker):
    """Values and news are told at once, whatever round is asked for, or known already: nobody would notice that who
    looks is gone. Neither sessions nor versions nor logs nor what is told are others than before. Everything that
    changes a job needs a session."""
    v = job.variable(worker, np.arange(3.0), (1,))

    def now():
        version = job.verbs[0].watch(worker.session, 0, 0).result(SOON).version
        status = [server.status() for server in job.verbs]
        told = [[(each.what, each.said) for each in server.events()] for server in job.verbs]
        return version, told, [(s.log, s.generation, s.round, len(s.sessions)) for s in status]

    before = now()
    for after in (-1, 99):
        reply = job.verbs[1].pull(NOBODY, [v.id], after).result(SOON)
        np.testing.assert_array_equal(reply.payload.tensors([v.spec.tensor])[0], np.arange(3.0))
        assert reply.round == -1
    first = job.verbs[0].watch(NOBODY, 0, 0).result(SOON)
    assert [entry.variable for entry in first.entries if isinstance(entry, inside.Created)] == [v]
    length = job.verbs[0].status().log
    again = job.verbs[0].watch(NOBODY, length, first.version).result(SOON)
    assert (again.entries, again.start) == ((), length)
    assert [each for each in now()[1][0] if each[0] != "pull"] == before[1][0]
    for server in job.verbs:
        refused(inside.PSError, "", lambda: server.heartbeat(NOBODY, -1, b""))  # noqa: B023
        refused(inside.PSError, "", lambda: create(server, NOBODY, 1, v.spec, (0,)))  # noqa: B023
        refused(inside.PSError, "", lambda: server.propose(NOBODY, None, "dataset:0", None))  # noqa: B023
    assert (now()[0], now()[2]) == (before[0], before[2])


def test_status_tells_who_is_there(job: Job):
    """Server 0 has the sessions of all, the chief's included, and each server the lives of all."""
    job.join(W0, W1)
    first, second = (server.status() for server in job.verbs)
    expected = [(CHIEF, True, "open"), (W0, False, "open"), (W1, False, "open")]
    assert [(s.member.task, s.drives, s.state) for s in first.sessions] == expected
    assert second.sessions == ()
    assert first.incarnations == second.incarnations == (first.incarnation, second.incarnation)
    assert (first.device, first.broken, first.over) == ("cpu", "", False)
    job.verbs[0].leave(job.join(W1)[0].session, "it failed")
    assert [s.state for s in job.verbs[0].status().sessions if s.member.task == W1] == ["failed", "failed"]


def test_a_checkpoint_that_is_written_is_told(job: Job, worker: Worker):
    """From its round until the chief says that it is complete: its path, its round, and what is still to be written."""
    job.variable(worker, np.zeros(4))
    plan = job.order(worker, "run/ckpt-1")
    (saving,) = job.verbs[0].status().saving
    assert (saving.path, saving.round) == ("run/ckpt-1", 0)
    assert saving.nbytes <= 32
    job.verbs[0].snapshot(job.token, plan.id, "").result(SOON)
    assert job.verbs[0].status().saving[0].nbytes == 0
    job.append(inside.Snapshotted(plan.id, 0, "run/ckpt-1"))
    assert [server.status().saving for server in job.verbs] == [(), ()]


@pytest.mark.parametrize("serve", ["grpc", "tcp", "shm"], indirect=True)
def test_a_process_tells_of_itself(job: Job, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """Its clock, its memory (0 where the system reports none), what is installed, its port; and which transport each
    session uses.
    """
    (worker,) = job.join(W0)
    v = job.variable(worker, np.zeros(2))
    transport = request.node.callspec.params["serve"]
    job.value(worker, v)
    process = job.verbs[0].status().process
    assert process is not None
    assert process.resident > 1 << 20
    assert {"paramserver", "numpy", "grpcio", "python"} <= set(process.versions)
    assert process.data_port > 0
    assert process.transports.get(worker.session, "grpc") == transport
    assert process.traffic[f"{transport} sent"] >= 16
    monkeypatch.setattr("psserver.network.process.STATM", Path("no such file"))
    process = job.verbs[0].status().process
    assert process is not None
    assert process.resident == 0


# ---- What a server was told last ----


def who(worker: Worker) -> str:
    """A worker as servers name it to people, by the number that psctl shows."""
    return f"{worker.task}, session {inside.count_of(worker.session)}"


def test_calls_are_told(job: Job, worker: Worker):
    """Each by its name, with whom it came from and what it was about; the oldest is the first."""
    v = job.variable(worker, np.zeros((2, 3), "float32"), name="dense/kernel")
    job.value(worker, v)
    job.verbs[0].leave(worker.session, "it failed")
    assert [(each.what, each.said) for each in job.verbs[0].events()] == [
        ("open", "/job:chief/task:0: drives"),
        ("approve", "the log from 0 on: 1 job started"),
        ("open", "/job:worker/task:0: 1 replica, sync"),
        ("approve", "the log from 1 on: 1 generation closed"),
        ("create_batch", f"{who(worker)}: 1 variable"),
        ("push", f"{who(worker)}: 1 first value, 24 bytes"),
        ("worked", "copy (arrays)"),
        ("create_batch", f"{who(worker)}: 1 variable"),
        ("pull", f"{who(worker)}: 1 variable"),
        ("leave", f"{who(worker)}: it failed"),
    ]
    assert [each.what for each in job.verbs[1].events()] == ["open", "approve", "open", "approve"]


def test_heartbeats_ticks_and_watches_are_excluded(job: Job, worker: Worker):
    """However many there are: they would leave room for nothing else. It is told how long ago the others were."""
    before = job.verbs[0].events()
    for version in (0, 0):
        job.verbs[0].watch(worker.session, 0, version).result(SOON)
    job.servers.spend(3, worker.session)
    after = job.verbs[0].events()
    assert [(each.what, each.said) for each in after] == [(each.what, each.said) for each in before]
    assert {each.seconds for each in after} == {3.0}
    job.verbs[0].leave(worker.session, "")
    job.servers.clock.now += 1.5
    assert [each.seconds for each in job.verbs[0].events()] == [4.5] * 4 + [1.5]
