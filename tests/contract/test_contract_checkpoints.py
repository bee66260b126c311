"""Snapshot: one round's state on disk, and back; what is told, kept and held where a save fails or meets another."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.kit import internals as inside
from tests.kit.rig import CHIEF, SOON, WORKERS, Job, checkpoint, create, eventually, manifest_of, sum_into, together

A, B = WORKERS[:2]
BOTH = (0, 1)
PLACES = (inside.Position(0, 1, 7), inside.Position(2, 0, 3))
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
    job.append(inside.Snapshotted(plan.id, 0, plan.snapshot.path, why))


def told(future):
    with pytest.raises(inside.CheckpointError) as caught:
        future.result(SOON)
    return str(caught.value)


def forgotten(job):
    """Nothing is held or waited for on any server."""
    return all(not one.machine.job.snapshots and one.status().snapshot_bytes == 0 for one in job.servers.cores)


# ---- What is saved ----


def test_what_was_saved_comes_back(job, worker):
    """Bit for bit, on every server, whatever happened since, with datasets' positions; a checkpoint may be moved.

    Its manifest names the round, and these positions.
    """
    values = [np.array(-3), np.array([1.5, 3e38], ml_dtypes.bfloat16), np.array([True, False])]
    values += [np.array([[1.5, np.nan], [np.inf, -0.0]], "float32"), np.zeros((0, 2), "float16"), np.array([1 + 2j])]
    variables = [job.variable(worker, value, (index % 2,)) for index, value in enumerate(values)]
    assert {variable.servers for variable in variables} == {(0,), (1,)}
    plan = job.approve(sum_into(variables[0]), worker)
    worker.make(plan, [0])
    job.save(worker, positions=PLACES)
    worker.make(plan, [100])
    assert int(job.value(worker, variables[0])) == 97
    found = job.restore(worker, "run/ckpt-1")
    assert (found.path, found.positions) == ("run/ckpt-1", PLACES)
    manifest = inside.Manifest.parse(found.manifest, "here")
    assert (manifest.round, manifest.positions) == (1, PLACES)
    for variable, value in zip(variables, values, strict=True):
        back = job.value(worker, variable)
        assert (back.dtype, back.shape, back.tobytes()) == (value.dtype, value.shape, value.tobytes())
    shutil.move(job.servers.root / "run/ckpt-1", job.servers.root / "elsewhere")
    assert job.restore(worker, "elsewhere").path == "elsewhere"


def test_a_checkpoint_is_of_its_round(job, worker):
    """However late it is written: the values are frozen when the round has run."""
    variable = job.variable(worker, np.array([1, 2]), (1,))
    plan = job.order(worker, "late", positions=PLACES)
    worker.make(job.approve(sum_into(variable), worker), [[10, 10]], server=1)
    shard = job.verbs[1].snapshot(job.token, plan.id, "").result(SOON)
    assert (shard.round, shard.positions) == (0, PLACES)
    assert [(tensor.name, tensor.spec) for tensor in shard.tensors] == [("v0", variable.spec.tensor)]
    assert shard.nbytes == Path(shard.path, shard.file).stat().st_size
    assert shard.path == str(job.servers.root.resolve() / "late")
    assert load_file(f"{shard.path}/{shard.file}")["v0"].tolist() == [1, 2]


def test_a_snapshot_waits_for_its_round(job, worker):
    """The chief may ask before the workers have come to it; a call that is abandoned harms nobody. A resent one is
    answered, and not written twice: its values are let go of."""
    job.variable(worker, np.array(1))
    plan = job.approve(checkpoint("early", BOTH), worker)
    gone, waiting = (job.verbs[0].snapshot(job.token, plan.id, "") for _ in range(2))
    saves = job.servers.cores[0].machine.job.snapshots.saves
    eventually(lambda: len(saves[plan.id].shard._done_callbacks) == 2)
    assert not waiting.done()
    gone.cancel()
    together(*(worker.push(plan, server=server) for server in BOTH))
    first = waiting.result(SOON)
    assert first.round == 0
    Path(first.path, first.file).unlink()
    assert job.verbs[0].snapshot(job.token, plan.id, "").result(SOON) == first
    assert not Path(first.path, first.file).exists()


def test_servers_have_different_files(job, worker):
    """Each variable is in one of them; of one with several copies the first is saved. One without a value is not: its
    creator was lost before it gave one. Only the newest chief takes snapshots."""
    for servers in ((0,), (1,), BOTH):
        job.variable(worker, np.array(1), servers)
    create(job.verbs[0], worker.session, 3, inside.VariableSpec("empty", inside.TensorSpec("int64", ())), (0,))
    plan = job.order(worker, "x")
    shards = shards_of(job, plan)
    assert [[each.name for each in shard.tensors] for shard in shards] == [["v0", "v2"], ["v1"]]
    assert len({shard.file for shard in shards}) == 2
    job.open(CHIEF, 0, True)
    with pytest.raises(inside.Fenced, match="newer chief"):
        shards_of(job, plan)


def test_variables_saved_by_one_name_are_saved_once(job, worker):
    """As the first created, whichever server holds it; a restore gives all of them its value. Scratch is neither saved
    nor restored, and a checkpoint without it fits."""
    first = job.variable(worker, np.array(1), (1,), "count")
    copy = job.variable(worker, np.array(2), (0,), "copy", saved_as="count")
    scratch = job.variable(worker, np.array(5), (0,), "scratch", saved_as="")
    job.save(worker)
    assert list(json.loads((job.servers.root / "run/ckpt-1/manifest.json").read_text())["tensors"]) == ["count"]
    for variable in (first, scratch):
        worker.make(job.approve(sum_into(variable), worker), [10], server=variable.servers[0])
    job.restore(worker)
    assert [int(job.value(worker, v)) for v in (first, copy, scratch)] == [1, 1, 15]


def test_a_checkpoint_stays_below_its_root(job, worker):
    """Nothing is written or read elsewhere, whatever the path and the links below the root say."""
    job.variable(worker, np.array(1))
    root = job.servers.root
    root.mkdir()
    outside = root.parent / "outside"
    outside.mkdir()
    (root / "link").symlink_to(outside)
    for path in ("../up", "/etc/x", "a/../../b", "", "link/x"):
        plan = job.order(worker, path)
        for manifest in ("", inside.Manifest(0, (), {}).text()):
            with pytest.raises(inside.CheckpointError, match=r"path (that stays )?below"):
                job.verbs[0].snapshot(job.token, plan.id, manifest).result(SOON)
        with pytest.raises(inside.CheckpointError, match=r"path (that stays )?below"):
            job.restore(worker, path)
    assert list(outside.iterdir()) == []
    assert list(root.iterdir()) == [root / "link"]


# ---- Who asks ----


def test_who_waits_for_a_shard_is_told_that_the_save_was_given_up(job, worker):
    """Its round has not run, and nobody waits for it any more; when it runs, nothing is written or held for it."""
    job.variable(worker, np.array(1))
    plan = job.approve(stateful(0), worker)
    waiting = [server.snapshot(job.token, plan.id, "") for server in job.verbs]
    eventually(lambda: all("snapshot" in {one.what for one in server.events()} for server in job.servers.cores))
    assert not any(future.done() for future in waiting)
    fail(job, plan, "another server is full")
    assert all("the checkpoint was cancelled: another server is full" in told(future) for future in waiting)
    assert forgotten(job)
    together(*(worker.push(plan, server=server) for server in BOTH))
    assert forgotten(job)
    worker.round += 1
    job.save(worker, "run/ckpt-1")
    assert files(job) == whole("run/ckpt-1")


def test_a_manifest_needs_a_shard(job, worker):
    """One that is asked for before the round has run is refused; the save goes on. One that is asked for again, by the
    same chief or by the next one, which may put it in other words, is written once."""
    job.variable(worker, np.array(1))
    plan = job.approve(stateful(0), worker)
    early = job.verbs[0].snapshot(job.token, plan.id, "{}")
    assert "this server is not writing the checkpoint that was asked for" in told(early)
    together(*(worker.push(plan, server=server) for server in BOTH))
    shards = shards_of(job, plan)
    first = commit(job, plan, shards)
    assert first.round == 0
    manifest = job.servers.root / "run/ckpt-0/manifest.json"
    manifest.unlink()
    assert commit(job, plan, shards) == first
    assert not manifest.exists()


def test_what_is_over_is_told_at_once(job, worker):
    """A chief that asks for it is told that it failed, was never planned, or is of an old job. Nobody in the new
    one can ask for a save of the old one, and none counts against those that it may order."""
    job.variable(worker, np.array(1))
    plan = job.order(worker, "run/ckpt-1")
    assert "is not writing the checkpoint" in told(job.verbs[0].snapshot(job.token, bytes(32), ""))
    fail(job, plan)
    assert "is not writing the checkpoint" in told(job.verbs[1].snapshot(job.token, plan.id, ""))
    plan = job.order(worker, "run/ckpt-2")
    shards_of(job, plan)
    job.begin()
    assert forgotten(job)
    for server in job.verbs:
        assert server.status().saving == ()
        assert "is not writing the checkpoint" in told(server.snapshot(job.token, plan.id, ""))


# ---- Files ----


def test_a_save_that_failed_leaves_no_files(job, worker):
    """Each server removes its own once it is told, and nothing else; the checkpoint before at that path is whole, since
    no save has the names of another. What a manifest names stays, should the chief say that this save has failed."""
    variable = job.variable(worker, np.array(1))
    job.save(worker, "best")
    for path in ("run/ckpt-2", "best"):
        plan = job.order(worker, path)
        shards = shards_of(job, plan)
        assert len(files(job)) == 5
        fail(job, plan)
        eventually(lambda: files(job) == whole("best"))
        assert forgotten(job)
    job.restore(worker, "best")
    assert int(job.value(worker, variable)) == 1
    plan = job.order(worker, "best")
    shards = shards_of(job, plan)
    commit(job, plan, shards)
    fail(job, plan, "it was written, and could not be made lasting")
    job.save(worker, "other")
    assert files(job) == [*whole("best"), *whole("other")]
    assert set(json.loads((job.servers.root / "best/manifest.json").read_text())["files"]) == {s.file for s in shards}


@pytest.mark.parametrize("fails", [False, True])
def test_of_two_saves_to_one_path_the_later_stays(job, worker, fails):
    """The earlier one is complete until then, and its files go when it is replaced; it stays if the later one fails."""
    variable = job.variable(worker, np.array(1))
    first = job.order(worker, "best")
    worker.make(job.approve(sum_into(variable), worker), [1])
    later = job.approve(inside.Plan(snapshot=inside.SnapshotOrder("best", BOTH, round=2)), worker)
    together(*(worker.push(later, server=server) for server in BOTH))
    worker.round += 1
    its, others = shards_of(job, first), shards_of(job, later)
    commit(job, first, its)
    assert set(json.loads((job.servers.root / "best/manifest.json").read_text())["files"]) == {s.file for s in its}
    if fails:
        fail(job, later)
    job.append(inside.Snapshotted(first.id, 0, "best"))
    if not fails:
        commit(job, later, others)
        job.append(inside.Snapshotted(later.id, 2, "best"))
    eventually(lambda: files(job) == whole("best"))
    job.restore(worker, "best")
    assert int(job.value(worker, variable)) == (1 if fails else 2)


# ---- Rounds that do not come ----


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_round_that_nobody_can_make_any_more(job, mode):
    """The worker that made it died after reaching one server: the other server says so once both agree. What other
    asynchronous workers do says nothing of it; the next save of who came back does."""
    one, other = job.join(A, B, mode=mode)
    variable = job.variable(one, np.array(1), (1,))
    if mode == "sync":
        job.close([one.member])
        one.generation = job.generation.number
    plan = job.approve(checkpoint("run/ckpt-1", BOTH), one)
    pushed = one.push(plan)
    if mode == "async":
        pushed.result(SOON)
    else:
        eventually(lambda: job.verbs[0].status().waiting)
    missing = job.verbs[1].snapshot(job.token, plan.id, "")
    if mode == "sync":
        job.close()
        (back,) = job.join(B)
    else:
        job.close([other.member])
        other.generation = job.generation.number
        other.make(job.approve(sum_into(variable), other), [1], server=1)
        (back,) = job.join(A, mode="async")
    back.round = 1
    assert eventually(missing.done) if mode == "sync" else not missing.done()
    job.save(back, "run/ckpt-2")
    assert "the workers that began it were lost" in told(missing)
    fail(job, plan)
    eventually(lambda: files(job) == whole("run/ckpt-2"))
    assert forgotten(job)


@pytest.mark.parametrize("copies", [(0,), BOTH], ids=["on one server", "on all"])
def test_a_round_that_fails_has_no_checkpoint(job, worker, copies):
    """Who asks for its shard is told, before and after; shards of other servers go with the failure."""
    adding = sum_into(job.variable(worker, np.array(3), copies))
    power = replace(adding.programs[0], nodes=(inside.Node("pow", (0, 1)),))
    plan = job.approve(replace(adding, programs=(power,), snapshot=inside.SnapshotOrder("run/ckpt-1", BOTH)), worker)
    asked = [server.snapshot(job.token, plan.id, "") for server in job.verbs]
    pushed = [worker.push(plan, [-1], server=server) for server in BOTH]
    for server in copies:
        assert isinstance(pushed[server].exception(SOON), inside.ProgramError)
        assert "'run/ckpt-1' failed" in told(asked[server])
        assert "'run/ckpt-1' failed" in told(job.verbs[server].snapshot(job.token, plan.id, ""))
    fail(job, plan)
    eventually(lambda: files(job) == [])
    assert forgotten(job)


def test_a_section_that_a_server_refuses_has_no_checkpoint(serve):
    """For want of memory, say: who asks is told the reason, and nothing is held."""
    job = Job(serve(2, 1000))
    (worker,) = job.join(A)
    job.variable(worker, np.zeros(8))
    wide = inside.Reduction("sum", inside.TensorSpec("float64", (500,)), (1,))
    order = inside.SnapshotOrder("run/ckpt-1", BOTH)
    large = inside.Plan((wide,), returned=(inside.Ref("reduction", 0),), snapshot=order)
    job.append(inside.Approved(large))
    assert "the limit is" in told(job.verbs[1].snapshot(job.token, large.id, ""))
    fail(job, large)
    assert forgotten(job)


# ---- What stays in the log ----


def stateful(number, path="run/ckpt"):
    return inside.Plan(snapshot=inside.SnapshotOrder(f"{path}-{number}", BOTH, number, STATE))


def log_of(job, server=0):
    return job.servers.cores[server].machine.job.log.entries


def test_the_state_goes_when_the_save_is_over(job, worker):
    """On every server, in the log and among the plans; the next chief reads it so, and its log is the same one."""
    plans = [job.approve(stateful(number), worker) for number in range(3)]
    before = list(log_of(job))
    assert [entry.plan.snapshot.state for entry in before if isinstance(entry, inside.Approved)] == [STATE] * 3
    job.append(inside.Snapshotted(plans[0].id, 0, "run/ckpt-0"), inside.Snapshotted(plans[1].id, 0, "", "no space"))
    for server in BOTH:
        kept = [entry.plan for entry in log_of(job, server) if isinstance(entry, inside.Approved)]
        assert [plan.snapshot.state for plan in kept] == ["", "", STATE]
        assert [plan.id for plan in kept] == [plan.id for plan in plans]
        known = job.servers.cores[server].machine.job.rounds.plans
        assert [known[plan.id].plan.snapshot.state for plan in plans] == ["", "", STATE]
    job.opened = job.open(CHIEF, 0, True)
    job.token = job.opened.token
    seen = job.verbs[0].watch(job.opened.session, 0, -1).result(SOON).entries
    for entries in (before, list(seen)):
        assert [server.approve(job.token, 0, entries) for server in job.verbs] == [len(entries)] * 2
    assert list(seen) == log_of(job, 1)


def test_saves_are_no_sections_of_many_shapes(job, worker, monkeypatch):
    """However many there were; those that nobody completes are bounded, and one more is possible when one is over."""
    monkeypatch.setattr("psserver.services.log.MAX_PLANS", 2)
    monkeypatch.setattr("psserver.services.log.MAX_SAVES", 3)
    assert inside.MAX_SAVES < inside.MAX_PLANS
    plans = [job.approve(stateful(number), worker) for number in range(2)]
    job.verbs[0].propose(worker.session, stateful(2), "", None)
    with pytest.raises(inside.InvalidRequest, match=r"3 checkpoints are not complete yet.*checkpoint\.sync"):
        job.verbs[0].propose(worker.session, stateful(3), "", None)
    fail(job, plans[0])
    job.verbs[0].propose(worker.session, stateful(3), "", None)
    for place in range(2):
        job.approve(inside.Plan((inside.Reduction("sum", inside.TensorSpec("int64", (place,)), (0,)),)), worker)
    with pytest.raises(inside.InvalidRequest, match="2 different compiled steps"):
        job.verbs[0].propose(
            worker.session, inside.Plan((inside.Reduction("sum", inside.TensorSpec("int64", ()), (0,)),)), "", None
        )
