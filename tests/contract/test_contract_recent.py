"""What a server was told last, as people hear of it: in which words, in which order, and what it holds for that."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from psserver.core.stimuli import Stimulus
from tests.kit.internals import (
    Fenced,
    Happened,
    NoCheckpoint,
    Payload,
    PSError,
    TensorSpec,
    VariableMismatch,
    VariableSpec,
    count_of,
)
from tests.kit.rig import SOON, WORKERS, Job, Worker, eventually, sum_into, together

W0, W1 = WORKERS[:2]
NOBODY = 0


@pytest.fixture
def worker(job: Job):
    """A member of the job."""
    return job.join(W0)[0]


def who(worker: Worker) -> str:
    """A worker as servers name it to people, by the number that psctl shows."""
    return f"{worker.task}, session {count_of(worker.session)}"


def what(job: Job, server: int = 0) -> list[str]:
    """The names of all that is told."""
    return [each.what for each in job.verbs[server].recent()]


def last(job: Job, name: str, server: int = 0) -> Happened:
    """The last of a name, once it is there."""
    found = eventually(lambda: [each for each in job.verbs[server].recent() if each.what == name])
    return found[-1]


def test_calls_are_told(job: Job, worker: Worker):
    """Each by its name, with whom it came from and what it was about; the oldest is the first."""
    v = job.variable(worker, np.zeros((2, 3), "float32"), name="dense/kernel")
    job.value(worker, v)
    job.verbs[0].leave(worker.session, "it failed")
    assert [(each.what, each.said) for each in job.verbs[0].recent()] == [
        ("open", "/job:chief/task:0: drives"),
        ("approve", "the log from 0 on: 1 job started"),
        ("open", "/job:worker/task:0: 1 replica, sync"),
        ("approve", "the log from 1 on: 1 epoch closed"),
        ("create", f"{who(worker)}: 'dense/kernel' float32[2,3]"),
        ("create", f"{who(worker)}: 'dense/kernel' float32[2,3], number {v.id}"),
        ("pull", f"{who(worker)}: 1 variable"),
        ("leave", f"{who(worker)}: it failed"),
    ]
    assert what(job, 1) == ["open", "approve", "open", "approve"]


def test_each_server_tells_its_own(job: Job, worker: Worker):
    """A push comes to the servers that hold what it is for."""
    v = job.variable(worker, np.zeros(3), (1,))
    plan = job.approve(sum_into(v), worker)
    together(worker.push(plan, [np.ones(3)], server=1))
    assert last(job, "push", 1).said == f"{who(worker)}: round 0 of epoch 1, 24 bytes"
    assert last(job, "worked", 1) == Happened(0.0, "worked", "step (arrays)")
    assert last(job, "propose").said == f"{who(worker)}: plan {plan.id.hex()[:8]}"
    assert {"push", "worked"}.isdisjoint(what(job))


def test_a_refused_call_says_why(job: Job, worker: Worker):
    """Whether it was refused at once, or by its answer."""
    job.variable(worker, np.zeros(3), name="v")
    other = VariableSpec("v", TensorSpec("float64", (4,)))
    with pytest.raises(VariableMismatch) as caught:
        job.verbs[0].create(worker.session, 0, -1, other, (0,), None)
    assert last(job, "create") == Happened(
        0.0, "create", f"{who(worker)}: 'v' float64[4]", f"VariableMismatch: {caught.value.message}"
    )
    with pytest.raises(PSError) as caught:
        job.verbs[0].snapshot(job.token, b"p" * 32, "{}").result(SOON)
    assert last(job, "snapshot").refused == f"{type(caught.value).__name__}: {caught.value.message}"
    assert all(not each.refused for each in job.verbs[0].recent() if each.what not in ("create", "snapshot"))


def test_what_fails_others_is_not_refused_itself(job: Job):
    """A new job ends a push of the old one; the chief that began it was not refused."""
    worker, _ = job.join(W0, W1)
    v = job.variable(worker, np.zeros(3))
    waiting = worker.push(job.approve(sum_into(v), worker), [np.ones(3)])
    job.arrived(worker)
    job.begin()
    with pytest.raises(PSError):
        waiting.result(SOON)
    assert {each.refused for each in job.verbs[0].recent()} == {""}


def test_a_beat_that_is_refused_is_told(job: Job, worker: Worker):
    """Whose session has ended; its number stands there with its task still."""
    (other,) = job.join(W1)
    job.servers.spend(11, other.session)
    with pytest.raises(Fenced) as caught:
        job.verbs[0].beat(worker.session, -1, b"")
    assert last(job, "beat") == Happened(0.0, "beat", who(worker), f"Fenced: {caught.value.message}")


def test_the_work_of_a_checkpoint_is_told(job: Job, worker: Worker):
    """The order of its shard, that it is written, and the manifest; and on a restore what was not found."""
    job.variable(worker, np.zeros(3))
    job.save(worker, "run/ckpt-1")
    told = [(each.what, each.said, each.refused) for each in job.verbs[0].recent()]
    assert ("worked", "write shard (files)", "") in told
    shard, manifest = [said for name, said, _ in told if name == "snapshot"]
    assert (shard[13:], manifest[13:]) == (", the shard", ", the manifest")
    with pytest.raises(NoCheckpoint) as caught:
        job.restore(worker, "nowhere")
    assert last(job, "restore").said == f"{who(worker)}: open 'nowhere'"
    eventually(lambda: last(job, "worked").said == "find (files)")
    assert last(job, "worked").refused == f"NoCheckpoint: {caught.value.message}"


def test_beats_ticks_and_watches_are_left_out(job: Job, worker: Worker):
    """However many there are: they would leave room for nothing else."""
    before = job.verbs[0].recent()
    for version in (0, 0):
        job.verbs[0].watch(worker.session, 0, version).result(SOON)
    job.servers.spend(3, worker.session)
    after = job.verbs[0].recent()
    assert [(each.what, each.said) for each in after] == [(each.what, each.said) for each in before]
    assert {each.seconds for each in after} == {3.0}


def test_how_long_ago(job: Job, worker: Worker):
    """In seconds of the server's clock."""
    job.servers.clock.now += 2.5
    job.verbs[0].leave(worker.session, "")
    job.servers.clock.now += 1.5
    assert [each.seconds for each in job.verbs[0].recent()] == [4.0] * 4 + [1.5]


def test_a_hundred_at_most(job: Job, worker: Worker):
    """The last ones, in their order."""
    v = job.variable(worker, np.zeros(3))
    for number in range(120):
        job.servers.clock.now = float(number)
        job.value(worker, v)
    found = job.verbs[0].recent()
    assert [each.what for each in found] == ["pull"] * 100
    assert [each.seconds for each in found] == [float(number) for number in reversed(range(100))]


def test_looking_is_not_told(job: Job, worker: Worker):
    """A question changes nothing of the answer to the next one."""
    before = job.verbs[0].recent()
    job.verbs[0].status()
    job.verbs[0].watch(NOBODY, 0, 0).result(SOON)
    assert job.verbs[0].recent() == before


def test_no_payload_is_kept_alive(job: Job, worker: Worker):
    """A server tells of a push whose round is over without the values that came with it."""
    held: list[weakref.ref] = []

    def record(stimulus: Stimulus) -> None:
        held.extend(weakref.ref(arg) for arg in stimulus.args if isinstance(arg, Payload))

    v = job.variable(worker, np.zeros(1000))
    job.servers.cores[0].stimuli.record = record
    plan = job.approve(sum_into(v), worker)
    for _ in range(3):
        together(worker.push(plan, [np.ones(1000)]))
        worker.round += 1
    assert len(held) == 3
    assert what(job)[-6:] == ["push", "worked"] * 3
    eventually(lambda: (gc.collect(), [ref() for ref in held] == [None] * 3)[1])
