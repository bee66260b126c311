"""Saves that fail, and those that come upon each other: what is told, what stays in the files, and what is held."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from pswire.model import log as log_entries
from tests.kit.internals import (
    MAX_PLANS,
    MAX_SAVES,
    Apply,
    Approved,
    CheckpointError,
    Input,
    InvalidRequest,
    Node,
    Plan,
    Program,
    PSError,
    Reduction,
    Ref,
    SnapshotOrder,
    Snapshotted,
    TensorSpec,
    VariableSpec,
)
from tests.kit.rig import CHIEF, SOON, WORKERS, Job, checkpoint, eventually, manifest_of, sum_into, together

A, B = WORKERS[:2]
BOTH = (0, 1)
STATE = json.dumps({"state": {"mine": "x" * 1000}})


def files(job):
    """All files below the root, less what tells the saves apart."""
    root = job.servers.root
    # Directories may go while this looks at them.
    found = [Path(where, name).relative_to(root) for where, _, names in os.walk(root) for name in names]
    return sorted(f"{path.parent}/{path.name[:14] if 'shard' in path.name else path.name}" for path in found)


def whole(path):
    return [f"{path}/manifest.json", f"{path}/shard-00000-of", f"{path}/shard-00001-of"]


def shards_of(job, plan):
    return [server.snapshot(job.token, plan.id, "").result(SOON) for server in job.verbs]


def commit(job, plan, shards):
    return job.verbs[0].snapshot(job.token, plan.id, manifest_of(shards)).result(SOON)


def fail(job, plan, why="no space left"):
    job.append(Snapshotted(plan.id, 0, plan.snapshot.path, why))


def told(future):
    with pytest.raises(CheckpointError) as caught:
        future.result(SOON)
    return str(caught.value)


def forgotten(job):
    """Nothing is held or waited for on any server."""
    return all(not server.machine.snapshots and server.status().held == 0 for server in job.servers.cores)


# ---- Who asks ----


def test_who_waits_for_a_shard_is_told_that_the_save_was_given_up(job, worker):
    """Its round has not run, and nobody waits for it any more."""
    plan = job.approve(stateful(0), worker)
    waiting = [server.snapshot(job.token, plan.id, "") for server in job.verbs]
    eventually(lambda: all("snapshot" in {one.what for one in server.recent()} for server in job.servers.cores))
    assert not any(future.done() for future in waiting)
    fail(job, plan, "another server is full")
    assert all("it was given up: another server is full" in told(future) for future in waiting)
    assert forgotten(job)


def test_a_manifest_needs_a_shard(job, worker):
    """One that is asked for before the round has run is refused; the save goes on."""
    job.variable(worker, np.array(1))
    plan = job.approve(stateful(0), worker)
    early = job.verbs[0].snapshot(job.token, plan.id, "{}")
    assert "no checkpoint of this plan is being written here" in told(early)
    together(*(worker.push(plan, server=server) for server in BOTH))
    assert commit(job, plan, shards_of(job, plan)).round == 0


def test_a_variable_without_a_value_is_not_saved(job, worker):
    """Its creator was lost before it gave one; the others are."""
    job.variable(worker, np.array(1))
    job.verbs[0].create(worker.session, 1, -1, VariableSpec("empty", TensorSpec("int64", ())), (0,), None)
    plan = job.order(worker, "run/ckpt-1")
    assert [[each.name for each in shard.tensors] for shard in shards_of(job, plan)] == [["v0"], []]


def test_a_new_job_has_no_save_of_the_old_one(job, worker):
    """Nobody in it can ask for one, and none counts against those that it may order."""
    job.variable(worker, np.array(1))
    plan = job.order(worker, "run/ckpt-1")
    shards_of(job, plan)
    job.begin()
    assert forgotten(job)
    for server in job.verbs:
        assert server.status().saving == ()
        assert "no checkpoint of this plan" in told(server.snapshot(job.token, plan.id, ""))


# ---- Files ----


def test_shards_are_written_without_a_chief(job, worker):
    """What a save holds is let go of as soon as it is in the files; a chief is needed for the manifest alone."""
    job.variable(worker, np.array(1))
    job.order(worker, "run/ckpt-1")
    eventually(lambda: len(files(job)) == 2)
    eventually(lambda: [one.nbytes for one in job.verbs[0].status().saving] == [0])


def test_a_save_that_failed_leaves_no_files(job, worker):
    """Each server removes its own once it is told, and nothing else."""
    job.variable(worker, np.array(1))
    job.save(worker, "run/ckpt-1")
    plan = job.order(worker, "run/ckpt-2")
    shards_of(job, plan)
    assert len(files(job)) == 5
    fail(job, plan)
    eventually(lambda: files(job) == whole("run/ckpt-1"))
    assert forgotten(job)


def test_a_failed_save_leaves_the_one_before_at_its_path(job, worker):
    """The earlier one's files are whole, since no save has the names of another."""
    variable = job.variable(worker, np.array(1))
    job.save(worker, "best")
    plan = job.order(worker, "best")
    shards_of(job, plan)
    fail(job, plan)
    eventually(lambda: files(job) == whole("best"))
    job.restore(worker, "best")
    assert int(job.value(worker, variable)) == 1


def test_what_a_manifest_names_stays(job, worker):
    """Should the chief say that a save has failed whose manifest is there all the same."""
    job.variable(worker, np.array(1))
    plan = job.order(worker, "best")
    commit(job, plan, shards_of(job, plan))
    fail(job, plan, "it was written, and could not be made lasting")
    job.save(worker, "other")
    assert files(job) == [*whole("best"), *whole("other")]


def order_twice(job, worker):
    """Two saves to one path, of different values, both of them written but for the manifests."""
    variable = job.variable(worker, np.array(1))
    first = job.order(worker, "best")
    add = job.approve(sum_into(variable), worker)
    together(worker.push(add, [1]))
    worker.round += 1
    later = job.approve(Plan(snapshot=SnapshotOrder("best", BOTH, round=2)), worker)
    together(*(worker.push(later, server=server) for server in BOTH))
    worker.round += 1
    return variable, [(plan, shards_of(job, plan)) for plan in (first, later)]


def test_of_two_saves_to_one_path_the_later_stays(job, worker):
    """The earlier one is complete until then, and its files go when it is replaced."""
    variable, ((first, its), (later, others)) = order_twice(job, worker)
    commit(job, first, its)
    assert set(json.loads((job.servers.root / "best/manifest.json").read_text())["files"]) == {s.file for s in its}
    job.append(Snapshotted(first.id, 0, "best"))
    commit(job, later, others)
    job.append(Snapshotted(later.id, 2, "best"))
    assert files(job) == whole("best")
    job.restore(worker, "best")
    assert int(job.value(worker, variable)) == 2


def test_of_two_saves_to_one_path_the_earlier_stays_if_the_later_fails(job, worker):
    """Its files are its own."""
    variable, ((first, its), (later, _)) = order_twice(job, worker)
    commit(job, first, its)
    fail(job, later)
    job.append(Snapshotted(first.id, 0, "best"))
    eventually(lambda: files(job) == whole("best"))
    job.restore(worker, "best")
    assert int(job.value(worker, variable)) == 1


def test_a_manifest_that_is_asked_for_again_is_written_once(job, worker):
    """By the same chief or by the next one, which may put it in other words."""
    job.variable(worker, np.array(1))
    plan = job.order(worker, "best")
    shards = shards_of(job, plan)
    first = commit(job, plan, shards)
    (job.servers.root / "best/manifest.json").unlink()
    assert commit(job, plan, shards) == first
    assert not (job.servers.root / "best/manifest.json").exists()


# ---- Rounds that do not come ----


def test_a_failure_is_known_before_the_round(job, worker):
    """One server is late, and another has failed: nothing is written or held for it any more."""
    job.variable(worker, np.array(1))
    plan = job.approve(checkpoint("late", BOTH), worker)
    first = worker.push(plan)
    fail(job, plan)
    together(first, worker.push(plan, server=1))
    assert forgotten(job)
    worker.round += 1
    job.save(worker, "run/ckpt-1")
    assert files(job) == whole("run/ckpt-1")


def refusing(variable, servers=(0,)):
    """A section that saves, and whose program nobody can run."""
    spec = variable.spec.tensor
    power = Program((Input("variable", spec), Input("value", spec)), (Node("pow", (0, 1)),), ((0, 2),), ())
    refs = (Ref("variable", variable.id), Ref("reduction", 0))
    return Plan(
        (Reduction("sum", spec, servers),),
        programs=(power,),
        applies=(Apply(0, servers, refs),),
        snapshot=SnapshotOrder("run/ckpt-1", BOTH),
    )


@pytest.mark.parametrize("copies", [(0,), BOTH], ids=["on one server", "on all"])
def test_a_round_that_fails_has_no_checkpoint(job, worker, copies):
    """Whoever asks for its shard is told, before and after; what other servers have written goes with the failure."""
    variable = job.variable(worker, np.array(3), copies)
    plan = job.approve(refusing(variable, copies), worker)
    asked = [server.snapshot(job.token, plan.id, "") for server in job.verbs]
    pushed = [worker.push(plan, [-1], server=server) for server in BOTH]
    for server in copies:
        with pytest.raises(PSError):
            pushed[server].result(SOON)
        assert "'run/ckpt-1' failed" in told(asked[server])
        assert "'run/ckpt-1' failed" in told(job.verbs[server].snapshot(job.token, plan.id, ""))
    fail(job, plan)
    eventually(lambda: files(job) == [])
    assert forgotten(job)


def test_a_round_that_nobody_can_make_any_more(job, worker):
    """Its only member has reached one server and died: the other one says so once another round is over there."""
    job.variable(worker, np.array(1))
    plan = job.approve(checkpoint("run/ckpt-1", BOTH), worker)
    together(worker.push(plan))
    missing = job.verbs[1].snapshot(job.token, plan.id, "")
    job.close()
    (other,) = job.join(B)
    other.round = 1
    assert not missing.done()
    job.save(other, "run/ckpt-2")
    assert "those who began it are gone" in told(missing)
    fail(job, plan)
    eventually(lambda: files(job) == whole("run/ckpt-2"))
    assert forgotten(job)


def test_an_asynchronous_round_that_nobody_can_make_any_more(job):
    """What others do says nothing of it; the next save of who came back does."""
    one, other = job.join(A, B, mode="async")
    variable = job.variable(one, np.array(1), (1,))
    plan = job.approve(checkpoint("run/ckpt-1", BOTH), one)
    together(one.push(plan))
    missing = job.verbs[1].snapshot(job.token, plan.id, "")
    job.close([other.member])
    other.epoch = job.epoch.number
    add = job.approve(sum_into(variable), other)
    together(other.push(add, [1], server=1))
    assert not missing.done()
    (back,) = job.join(A, mode="async")
    back.round = 1
    job.save(back, "run/ckpt-2")
    assert "those who began it are gone" in told(missing)
    fail(job, plan)
    eventually(lambda: files(job) == whole("run/ckpt-2"))


def test_a_new_epoch_completes_the_round(job):
    """A member that is gone is left out, and the checkpoint is made without it."""
    one, gone = job.join(A, B)
    job.variable(one, np.array(1))
    plan = job.approve(checkpoint("run/ckpt-1", BOTH), one)
    pushed = [one.push(plan, server=server) for server in BOTH]
    asked = [server.snapshot(job.token, plan.id, "") for server in job.verbs]
    assert not any(future.done() for future in asked)
    job.close([one.member])
    assert [reply.left_out for reply in together(*pushed)] == [(gone.task,)] * 2
    commit(job, plan, [future.result(SOON) for future in asked])
    assert files(job) == whole("run/ckpt-1")


def test_a_section_that_a_server_refuses_has_no_checkpoint(serve):
    """For want of memory, say: who asks is told the reason, and nothing is held."""
    job = Job(serve(2, 1000))
    (worker,) = job.join(A)
    job.variable(worker, np.zeros(8))
    wide = Reduction("sum", TensorSpec("float64", (500,)), (1,))
    large = Plan((wide,), returned=(Ref("reduction", 0),), snapshot=SnapshotOrder("run/ckpt-1", BOTH))
    job.append(Approved(large))
    assert "the limit is" in told(job.verbs[1].snapshot(job.token, large.id, ""))
    fail(job, large)
    assert forgotten(job)


def test_a_chief_asks_in_vain_for_what_is_over(job, worker):
    """It is told at once."""
    job.variable(worker, np.array(1))
    plan = job.order(worker, "run/ckpt-1")
    assert "no checkpoint of this plan" in told(job.verbs[0].snapshot(job.token, bytes(32), ""))
    fail(job, plan)
    assert "no checkpoint of this plan" in told(job.verbs[1].snapshot(job.token, plan.id, ""))


# ---- What stays in the log ----


def stateful(number, path="run/ckpt"):
    return Plan(snapshot=SnapshotOrder(f"{path}-{number}", BOTH, number, STATE))


def log_of(job, server=0):
    return job.servers.cores[server].machine.log.entries


def test_the_state_goes_when_the_save_is_over(job, worker):
    """On every server, in the log and among the plans; the next chief reads it so, and its log is the same one."""
    plans = [job.approve(stateful(number), worker) for number in range(3)]
    before = list(log_of(job))
    assert [entry.plan.snapshot.state for entry in before if isinstance(entry, Approved)] == [STATE] * 3
    job.append(Snapshotted(plans[0].id, 0, "run/ckpt-0"), Snapshotted(plans[1].id, 0, "", "no space"))
    for server in BOTH:
        kept = [entry.plan for entry in log_of(job, server) if isinstance(entry, Approved)]
        assert [plan.snapshot.state for plan in kept] == ["", "", STATE]
        assert [plan.id for plan in kept] == [plan.id for plan in plans]
        assert [job.servers.cores[server].machine.rounds.plans[plan.id].plan.snapshot.state for plan in plans] == [
            "",
            "",
            STATE,
        ]
    job.opened = job.open(CHIEF, 0, True)
    job.token = job.opened.token
    seen = job.verbs[0].watch(job.opened.session, 0, -1).result(SOON).entries
    for entries in (before, list(seen)):
        assert [server.approve(job.token, 0, entries) for server in job.verbs] == [len(entries)] * 2
    assert list(seen) == log_of(job, 1)


def test_saves_are_no_sections_of_many_shapes(job, worker, monkeypatch):
    """However many there were; those that nobody completes are bounded, and one more is possible when one is over."""
    monkeypatch.setattr("psserver.core.log.MAX_PLANS", 2)
    monkeypatch.setattr("psserver.core.log.MAX_SAVES", 3)
    assert MAX_SAVES < MAX_PLANS
    plans = [job.approve(stateful(number), worker) for number in range(2)]
    job.verbs[0].propose(worker.session, stateful(2), "", None)
    with pytest.raises(InvalidRequest, match=r"3 checkpoints were ordered and are not complete.*checkpoint\.sync"):
        job.verbs[0].propose(worker.session, stateful(3), "", None)
    fail(job, plans[0])
    job.verbs[0].propose(worker.session, stateful(3), "", None)
    for place in range(2):
        job.approve(Plan((Reduction("sum", TensorSpec("int64", (place,)), (0,)),)), worker)
    with pytest.raises(InvalidRequest, match="2 different sections"):
        job.verbs[0].propose(worker.session, Plan((Reduction("sum", TensorSpec("int64", ()), (0,)),)), "", None)


def test_what_is_no_order_has_no_state():
    """Nothing of a log is touched for a plan that is not in it."""
    plain = Approved(Plan((Reduction("sum", TensorSpec("int64", ()), (0,)),)))
    entries = [plain]
    assert log_entries.forget_state(entries, plain.plan.id) is None
    assert log_entries.forget_state(entries, bytes(32)) is None
    assert entries == [plain]
