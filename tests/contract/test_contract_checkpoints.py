"""Snapshot and Restore: one round's state on disk, and back."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.kit.internals import (
    CheckpointError,
    Fenced,
    Manifest,
    NoCheckpoint,
    Payload,
    Position,
    ServerLost,
    SnapshotOrder,
    TensorSpec,
    VariableMismatch,
    VariableSpec,
)
from tests.kit.rig import CHIEF, SOON, WORKERS, checkpoint, eventually, given, sum_into, together

A, B = WORKERS[:2]
BOTH = (0, 1)
PLACES = (Position(0, 1, 7), Position(2, 0, 3))


def order(job, worker, path):
    """A round that orders a checkpoint; returns its plan."""
    return job.order(worker, path, positions=PLACES)


def save(job, worker, path="run/ckpt-1"):
    """Saves; returns the checkpoint's directory."""
    job.save(worker, path, positions=PLACES)
    return job.servers.root / path


def restore(job, worker, path):
    """What every process does."""
    return job.restore(worker, path)


def add(job, worker, variable, value):
    """A round that adds a value to a variable."""
    plan = sum_into(variable)
    if plan.id not in job.servers.cores[0].machine.rounds.plans:
        job.approve(plan, worker)
    together(worker.push(plan, [value], server=variable.servers[0]))
    worker.round += 1


def test_what_was_saved_comes_back(job, worker):
    """Bit for bit, on every server, whatever happened since; with the datasets' positions."""
    values = [
        np.array(-3),
        np.array([[1.5, np.nan], [np.inf, -0.0]], "float32"),
        np.array([1.5, 3e38], ml_dtypes.bfloat16),
        np.zeros((0, 2), "float16"),
        np.array([True, False]),
        np.array([1 + 2j]),
    ]
    variables = [job.variable(worker, value, (index % 2,)) for index, value in enumerate(values)]
    assert {variable.servers for variable in variables} == {(0,), (1,)}
    save(job, worker)
    add(job, worker, variables[0], 100)
    assert int(job.value(worker, variables[0])) == 97
    found = restore(job, worker, "run/ckpt-1")
    assert (found.path, found.positions) == ("run/ckpt-1", PLACES)
    assert Manifest.parse(found.manifest, "here").positions == PLACES
    for variable, value in zip(variables, values, strict=True):
        back = job.value(worker, variable)
        assert (back.dtype, back.shape, back.tobytes()) == (value.dtype, value.shape, value.tobytes())


def test_a_checkpoint_is_of_its_round(job, worker):
    """However late it is written: the values are frozen when the round has run."""
    variable = job.variable(worker, np.array([1, 2]), (1,))
    plan = order(job, worker, "late")
    add(job, worker, variable, [10, 10])
    shard = job.verbs[1].snapshot(job.token, plan.id, "").result(SOON)
    assert (shard.round, shard.positions) == (0, PLACES)
    assert [(tensor.name, tensor.spec) for tensor in shard.tensors] == [("v0", variable.spec.tensor)]
    assert shard.nbytes == Path(shard.path, shard.file).stat().st_size
    assert shard.path == str(job.servers.root.resolve() / "late")
    assert load_file(f"{shard.path}/{shard.file}")["v0"].tolist() == [1, 2]


def asked(job, plan):
    """Who waits for the first server's shard."""
    return job.servers.cores[0].machine.snapshots._saves[plan.id].shard._done_callbacks


def test_a_snapshot_waits_for_its_round(job, worker):
    """The chief may ask before the workers have come to it."""
    job.variable(worker, np.array(1))
    plan = job.approve(checkpoint("early", BOTH), worker)
    waiting = job.verbs[0].snapshot(job.token, plan.id, "")
    eventually(lambda: asked(job, plan))
    assert not waiting.done()
    together(worker.push(plan))
    assert waiting.result(SOON).round == 0


def test_a_resent_snapshot_is_answered(job, worker):
    """Not written twice: its values are let go of; an abandoned one harms nobody."""
    job.variable(worker, np.array(1))
    plan = job.approve(checkpoint("twice", BOTH), worker)
    gone = job.verbs[0].snapshot(job.token, plan.id, "")
    eventually(lambda: asked(job, plan))
    gone.cancel()
    together(worker.push(plan))
    first = job.verbs[0].snapshot(job.token, plan.id, "").result(SOON)
    Path(first.path, first.file).unlink()
    assert job.verbs[0].snapshot(job.token, plan.id, "").result(SOON) == first
    assert not Path(first.path, first.file).exists()


def test_servers_have_different_files(job, worker):
    """Each variable is in one of them; of one with several copies the first is saved."""
    for servers in ((0,), (1,), (0, 1)):
        job.variable(worker, np.array(1), servers)
    plan = order(job, worker, "x")
    shards = [server.snapshot(job.token, plan.id, "").result(SOON) for server in job.verbs]
    assert [[each.name for each in shard.tensors] for shard in shards] == [["v0", "v2"], ["v1"]]
    assert len({shard.file for shard in shards}) == 2


def test_only_the_newest_chief_takes_snapshots(job, worker):
    """An older one is told so."""
    job.variable(worker, np.array(1))
    plan = order(job, worker, "x")
    job.open(CHIEF, 0, True)
    with pytest.raises(Fenced, match="newer chief"):
        job.verbs[0].snapshot(job.token, plan.id, "").result(SOON)


def test_a_checkpoint_stays_below_its_root(job, worker):
    """Nothing is written or read elsewhere, whatever the path and the links below the root say."""
    job.variable(worker, np.array(1))
    root = job.servers.root
    root.mkdir()
    outside = root.parent / "outside"
    outside.mkdir()
    (root / "link").symlink_to(outside)
    for path in ("../up", "/etc/x", "a/../../b", "", "link/x"):
        plan = order(job, worker, path)
        for manifest in ("", Manifest(0, (), {}).text()):
            with pytest.raises(CheckpointError, match=r"path (that stays )?below"):
                job.verbs[0].snapshot(job.token, plan.id, manifest).result(SOON)
        with pytest.raises(CheckpointError, match=r"path (that stays )?below"):
            job.restore(worker, path)
    assert list(outside.iterdir()) == []
    assert list(root.iterdir()) == [root / "link"]


def test_a_checkpoint_that_cannot_be_written_is_an_error(job, worker):
    """The chief is told what the file system says; the server goes on."""
    variable = job.variable(worker, np.array(1))
    job.servers.root.write_text("a file where a directory should be")
    plan = order(job, worker, "x")
    with pytest.raises(CheckpointError, match=r"shard-00000-of-00002-\w{8}\.safetensors cannot be written") as told:
        job.verbs[0].snapshot(job.token, plan.id, "").result(SOON)
    assert told.value.task == "/job:ps/task:0"
    assert int(job.value(worker, variable)) == 1


def test_a_variable_created_later_gets_the_restored_value(job, worker):
    """Whatever first value its creators bring; one that the checkpoint does not have keeps theirs."""
    job.variable(worker, np.array([1.0, 2.0]), (1,), "w")
    save(job, worker)
    job.begin()
    (again,) = job.join(A)
    assert restore(job, again, "run/ckpt-1").positions == PLACES
    restored = job.variable(again, np.array([8.0, 9.0]), (1,), "w")
    fresh = job.variable(again, np.array([8.0, 9.0]), (1,), "new")
    assert job.value(again, restored).tolist() == [1.0, 2.0]
    assert job.value(again, fresh).tolist() == [8.0, 9.0]


def test_variables_saved_by_one_name_are_saved_once(job, worker):
    """As the first created, whichever server holds it; a restore gives all of them its value."""
    first = job.variable(worker, np.array(1), (1,), "count")
    copy = job.variable(worker, np.array(2), (0,), "copy", saved_as="count")
    directory = save(job, worker)
    assert list(json.loads((directory / "manifest.json").read_text())["tensors"]) == ["count"]
    add(job, worker, first, 10)
    restore(job, worker, "run")
    assert [int(job.value(worker, v)) for v in (first, copy)] == [1, 1]


def test_scratch_is_in_no_checkpoint(job, worker):
    """It is neither saved nor restored, and a checkpoint without it fits."""
    job.variable(worker, np.array(1), (0,), "w")
    save(job, worker)
    scratch = job.variable(worker, np.array(5), (0,), "scratch", saved_as="")
    restore(job, worker, "run/ckpt-1")
    directory = save(job, worker, "run/ckpt-2")
    assert list(json.loads((directory / "manifest.json").read_text())["tensors"]) == ["w"]
    assert int(job.value(worker, scratch)) == 5


def test_what_is_saved_by_another_name_begins_as_its_creator_says(job, worker):
    """After a restore, too: the other variable may have changed since."""
    job.variable(worker, np.array(1), (0,), "count")
    save(job, worker)
    job.begin()
    (again,) = job.join(A)
    restore(job, again, "run")
    first = job.variable(again, np.array(0), (0,), "count")
    add(job, again, first, 10)
    copy = job.variable(again, np.array(11), (1,), "copy", saved_as="count")
    assert [int(job.value(again, v)) for v in (first, copy)] == [11, 11]


def test_a_restored_first_value_is_told(job, worker):
    """To everyone who creates the variable, however late; until the job is started anew."""
    job.variable(worker, np.array(1), (1,), "there")
    save(job, worker)

    def created(session, ordinal, name):
        spec = VariableSpec(name, TensorSpec("int64", ()))
        named = job.verbs[0].create(session, ordinal, -1, spec, (1,), None)
        payload = Payload.pack([np.array(7)])
        return [named, job.verbs[1].create(session, ordinal, named.id, spec, (1,), payload)]

    job.begin()
    one, two = job.join(A, B)
    job.restore(one, "run", others=[two])
    for session in (one.session, two.session, one.session):
        told = [
            [reply.restored for reply in created(session, place, name)] for place, name in enumerate(("there", "new"))
        ]
        assert told == [[False, True], [False, False]]
    job.begin()
    (again,) = job.join(A)
    assert not any(reply.restored for reply in created(again.session, 0, "there"))


def test_a_variable_that_was_there_before_has_its_own_first_value(job, worker):
    """What a restore gives it afterwards does not change that."""
    variable = job.variable(worker, np.array(1))
    save(job, worker)
    restore(job, worker, "run")
    assert not job.verbs[0].create(worker.session, 0, -1, variable.spec, (0,), None).restored


def test_a_variable_created_later_must_fit(job, worker):
    """Its creator is told, with both shapes."""
    job.variable(worker, np.zeros(3), (0,), "w")
    save(job, worker)
    job.begin()
    (again,) = job.join(A)
    restore(job, again, "run")
    spec = VariableSpec("w", TensorSpec("float64", (2,)))
    with pytest.raises(VariableMismatch, match=r"float64\[3\], not float64\[2\]"):
        job.verbs[0].create(again.session, 0, -1, spec, (0,), Payload.pack([np.zeros(2)]))


def test_a_directory_of_checkpoints_means_its_newest(job, worker):
    """The one with the greatest number, whatever the clocks say; those without a manifest do not count."""
    variable = job.variable(worker, np.array(1))
    save(job, worker, "run/ckpt-10")
    add(job, worker, variable, 1)
    for path in ("run/ckpt-9", "run/best"):
        save(job, worker, path)
    order(job, worker, "run/ckpt-11")
    eventually((job.servers.root / "run/ckpt-11").is_dir)
    assert restore(job, worker, "run").path == "run/ckpt-10"
    assert int(job.value(worker, variable)) == 1


def test_where_there_is_none_nothing_is_restored(job, worker):
    """Said by a class of its own, so that a job can begin anew; the values stay."""
    variable = job.variable(worker, np.array(1))
    for path in ("nowhere", "run"):
        with pytest.raises(NoCheckpoint, match="no complete checkpoint"):
            job.restore(worker, path)
        (job.servers.root / "run/ckpt-1").mkdir(parents=True, exist_ok=True)
    assert int(job.value(worker, variable)) == 1


MANIFESTS = {
    "no JSON": "{",
    "no object": "[1]",
    "another format": '{"format": 3}',
    "no tensors": '{"format": 1, "positions": []}',
    "a path": '{"format": 1, "positions": [], "tensors": {"v0": {"file": "../x"}}}',
    "odd positions": '{"format": 1, "positions": [{"place": 1}], "tensors": {}}',
    "nothing": "",
    "no text": b"\xff\xfe\x00",
}


def test_a_broken_manifest_is_told(job, worker):
    """It is no reason to begin anew, and changes nothing."""
    variable = job.variable(worker, np.array(1))
    directory = save(job, worker)
    add(job, worker, variable, 1)
    for name, text in MANIFESTS.items():
        (directory / "manifest.json").write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(CheckpointError) as told:
            job.restore(worker, "run")
        assert not isinstance(told.value, NoCheckpoint), name
        assert "manifest" in str(told.value) or "format" in str(told.value), name
    assert int(job.value(worker, variable)) == 2


def damage_cut(file):
    file.write_bytes(file.read_bytes()[:-3])


def damage_header(file):
    file.write_bytes(b"\xff" * 64)


@pytest.mark.parametrize(
    "damage", [lambda file: file.unlink(), damage_cut, damage_header], ids=["gone", "cut", "noise"]
)
def test_a_broken_shard_is_told(job, worker, damage):
    """With the file's name; the variables keep what they have, all of them, and a repaired one is read."""
    v, w = job.variable(worker, np.array(1)), job.variable(worker, np.array(1))
    directory = save(job, worker)
    (shard,) = [file for file in directory.iterdir() if file.name.startswith("shard-00000")]
    whole = shard.read_bytes()
    for variable in (v, w):
        add(job, worker, variable, 1)
    damage(shard)
    with pytest.raises(CheckpointError, match="shard-00000"):
        job.restore(worker, "run")
    assert [int(job.value(worker, variable)) for variable in (v, w)] == [2, 2]
    shard.write_bytes(whole)
    job.restore(worker, "run")
    assert [int(job.value(worker, variable)) for variable in (v, w)] == [1, 1]


def test_a_variable_that_the_checkpoint_lacks_is_told(job, worker):
    """And nothing is restored, not even what is there."""
    old = job.variable(worker, np.array(1))
    save(job, worker)
    job.variable(worker, np.array(5), (0,), "new")
    add(job, worker, old, 1)
    with pytest.raises(CheckpointError, match="has no variable 'new'"):
        job.restore(worker, "run")
    assert int(job.value(worker, old)) == 2


def test_a_checkpoint_may_be_moved(job, worker):
    """It does not say where it was written."""
    variable = job.variable(worker, np.array(1))
    directory = save(job, worker)
    shutil.move(directory, job.servers.root / "elsewhere")
    add(job, worker, variable, 1)
    restore(job, worker, "elsewhere")
    assert int(job.value(worker, variable)) == 1


def test_a_snapshot_ends_with_its_server(job, worker):
    """Nobody waits for what is gone."""
    plan = job.approve(checkpoint("x", BOTH), worker)
    waiting = job.verbs[0].snapshot(job.token, plan.id, "")
    eventually(lambda: asked(job, plan))
    job.servers.cores[0].close()
    with pytest.raises(ServerLost, match="server ends"):
        waiting.result(SOON)


def test_a_plan_may_update_and_save(job, worker):
    """The checkpoint holds the section's own updates."""
    variable = job.variable(worker, np.array(1))
    plan = job.approve(replace(sum_into(variable), snapshot=SnapshotOrder("x", BOTH)), worker)
    (reply, _) = together(worker.push(plan, [4]), worker.push(plan, [4], server=1))
    assert int(given(reply, plan)[0]) == 4
    shard = job.verbs[0].snapshot(job.token, plan.id, "").result(SOON)
    assert int(load_file(f"{shard.path}/{shard.file}")["v0"]) == 5
