"""Who only looks at a job: no session, no wait, no trace."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kit.internals import Created, PSError, Snapshotted, TensorSpec, VariableSpec
from tests.kit.rig import CHIEF, SOON, WORKERS, Job

NOBODY = 0
W0, W1 = WORKERS[:2]


def test_values_are_read_as_they_are(job: Job):
    """Whatever round is asked for: nobody who looks waits for rounds of others."""
    (worker,) = job.join(W0)
    v = job.variable(worker, np.arange(3.0), (1,))
    for after in (-1, 99):
        reply = job.verbs[1].pull(NOBODY, [v.id], after).result(SOON)
        np.testing.assert_array_equal(reply.payload.tensors([v.spec.tensor])[0], np.arange(3.0))
        assert reply.round == -1


def test_news_are_told_at_once(job: Job):
    """Whatever is known already: nobody would notice that who looks is gone."""
    (worker,) = job.join(W0)
    v = job.variable(worker, np.zeros(2))
    length = job.verbs[0].status().log
    first = job.verbs[0].watch(NOBODY, 0, 0).result(SOON)
    assert [entry.variable for entry in first.entries if isinstance(entry, Created)] == [v]
    again = job.verbs[0].watch(NOBODY, length, first.version).result(SOON)
    assert (again.entries, again.start) == ((), length)


def test_who_looks_may_do_nothing_else(job: Job):
    """Everything that changes a job needs a session."""
    spec = VariableSpec("x", TensorSpec("float64", (2,)))
    for server in job.verbs:
        for act in (
            lambda server=server: server.beat(NOBODY, -1, b""),
            lambda server=server: server.create(NOBODY, 0, -1, spec, (0,), None),
            lambda server=server: server.propose(NOBODY, None, "dataset:0", None),
        ):
            with pytest.raises(PSError):
                act()
    assert job.verbs[0].status().variables == 0


def test_status_tells_who_is_there(job: Job):
    """Server 0 has the sessions of all, the chief's included, and each server the lives of all."""
    job.join(W0, W1)
    first, second = (server.status() for server in job.verbs)
    assert [(s.member.task, s.drives, s.state) for s in first.sessions] == [
        *((CHIEF, True, "open"), (W0, False, "open"), (W1, False, "open"))
    ]
    assert second.sessions == ()
    assert first.incarnations == second.incarnations == (first.incarnation, second.incarnation)
    assert (first.device, first.broken, first.over) == ("cpu", "", False)
    job.verbs[0].leave(job.join(W1)[0].session, "it failed")
    assert [s.state for s in job.verbs[0].status().sessions if s.member.task == W1] == ["failed", "failed"]


def test_looking_leaves_no_trace(job: Job):
    """Neither sessions nor versions nor logs are others than before, and a round that waits waits on."""
    (worker,) = job.join(W0)
    v = job.variable(worker, np.zeros(2))
    before = [server.status() for server in job.verbs]
    version = job.verbs[0].watch(worker.session, 0, 0).result(SOON).version
    for server in job.verbs:
        server.watch(NOBODY, 0, 0).result(SOON)
        server.status()
    job.verbs[0].pull(NOBODY, [v.id], -1).result(SOON)
    assert job.verbs[0].watch(worker.session, 0, 0).result(SOON).version == version
    after = [server.status() for server in job.verbs]
    assert [(s.log, s.epoch, s.round, len(s.sessions)) for s in after] == [
        (s.log, s.epoch, s.round, len(s.sessions)) for s in before
    ]


def test_a_checkpoint_that_is_written_is_told(job: Job):
    """From its round until the chief says that it is complete: its path, its round, and what is still to be written."""
    (worker,) = job.join(W0)
    job.variable(worker, np.zeros(4))
    plan = job.order(worker, "run/ckpt-1")
    (saving,) = job.verbs[0].status().saving
    assert (saving.path, saving.round) == ("run/ckpt-1", 0)
    assert saving.nbytes <= 32
    job.verbs[0].snapshot(job.token, plan.id, "").result(SOON)
    assert job.verbs[0].status().saving[0].nbytes == 0
    job.append(Snapshotted(plan.id, 0, "run/ckpt-1"))
    assert [server.status().saving for server in job.verbs] == [(), ()]


@pytest.mark.parametrize("serve", ["grpc", "tcp", "shm"], indirect=True)
def test_a_process_tells_of_itself(job: Job, request: pytest.FixtureRequest):
    """Its clock, its memory, what is installed, its port; and which lane each session uses."""
    (worker,) = job.join(W0)
    v = job.variable(worker, np.zeros(2))
    lane = request.node.callspec.params["serve"]
    job.value(worker, v)
    process = job.verbs[0].status().process
    assert process is not None
    assert process.resident > 1 << 20
    assert {"paramserver", "numpy", "grpcio", "python"} <= set(process.versions)
    assert process.data_port > 0
    assert process.lanes.get(worker.session, "grpc") == lane
    assert process.traffic[f"{lane} sent"] >= 16
