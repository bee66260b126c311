"""`ps.train.CheckpointManager`: which checkpoints it keeps and restores, and what it does where some are damaged."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import tempfile
import uuid
from pathlib import Path

import fsspec
import numpy as np
import pytest

import psclient as ps
from pswire.checkpoint import storage
from tests.kit.shell import shell
from tests.kit.storage import BUCKET, object_store
from tests.kit.strategies import opened, root_of

pytestmark = pytest.mark.usefixtures("in_tmp_path")

KINDS = pytest.mark.parametrize(
    "kind", ["mirrored-1", "servers-2x2", pytest.param("servers-1x2", marks=pytest.mark.soak)]
)


def managed(strategy, max_to_keep=9, directory="run", **keys):
    with strategy.scope():
        v, w = (ps.Variable(np.zeros(40), name=name) for name in "vw")
        return ps.train.CheckpointManager(ps.train.Checkpoint(v=v, w=w), directory, max_to_keep, **keys)


@contextlib.contextmanager
def managing(kind, *args, **keys):
    """A manager of a strategy of its own."""
    with opened(kind) as strategy:
        yield managed(strategy, *args, **keys)


def value(manager):
    return manager.checkpoint.v.numpy()[0]


def save(manager, *values, numbers=None):
    """A checkpoint for each value, which all variables have; returns their paths when all are complete."""
    paths = []
    for place, number in enumerate(values):
        for v in (manager.checkpoint.v, manager.checkpoint.w):
            v.assign(np.full(40, float(number)))
        paths.append(manager.save(numbers and numbers[place]))
    manager.sync()
    return paths


def saved(kind, *numbers, directory="run"):
    """A job makes checkpoints of these numbers, of which the values are the numbers; returns where they lie."""
    with opened(kind) as strategy:
        save(managed(strategy, directory=directory), *numbers, numbers=numbers)
    return root_of(kind) / directory


def on_disk(kind):
    return sorted(path.name for path in (root_of(kind) / "run").iterdir() if path.is_dir())


def numbered(*numbers):
    return [f"ckpt-{number}" for number in numbers]


def paths(*numbers):
    return [f"run/ckpt-{number}" for number in numbers]


def manifest_at(kind, number):
    path = root_of(kind) / f"run/ckpt-{number}/manifest.json"
    return path, json.loads(path.read_text())


# ---- Which are kept ----


@KINDS
def test_the_newest_are_kept(kind):
    """`max_to_keep` are left when a new one is complete; a new process goes on with the list and restores the newest.

    `init_fn` is called where there is none, and only there. What is written to a path is not the newest, whatever its
    name, as in TensorFlow.
    """
    calls = []
    with opened(kind) as strategy:
        manager = managed(strategy, 2, init_fn=lambda: calls.append(1))
        assert manager.latest_checkpoint is None
        assert manager.restore_or_initialize() is None
        assert save(manager, 1, 2, 3, 4) == paths(1, 2, 3, 4)
        assert manager.checkpoints == paths(3, 4)
        assert manager.latest_checkpoint == ps.train.latest_checkpoint("run", strategy) == "run/ckpt-4"
        assert on_disk(kind) == numbered(3, 4)
        assert manager.restore_or_initialize() == "run/ckpt-4"
        assert calls == [1]
    with opened(kind) as strategy:
        manager = managed(strategy, 2)
        assert manager.checkpoints == paths(3, 4)
        assert manager.restore_or_initialize() == "run/ckpt-4"
        assert value(manager) == 4
        assert save(manager, 5) == paths(5)
        assert on_disk(kind) == numbered(4, 5)
        assert manager.checkpoint.write("run/ckpt-99") == "run/ckpt-99"
        manager.checkpoint.sync()
        assert ps.train.latest_checkpoint("run", strategy) == "run/ckpt-5"


@KINDS
def test_an_interval_counts_steps(kind):
    """Whoever asks in between gets None; after a restore it counts from there.

    What counts it is in no checkpoint: another job, whose steps begin anew, saves at once.
    """

    def counting(strategy, at, directory, **tracked):
        with strategy.scope():
            step, v = ps.Variable(at, name=f"step{at}"), ps.Variable(0.0, name="v")
        checkpoint = ps.train.Checkpoint(v=v, **({"step": step} if tracked else {}))
        return step, ps.train.CheckpointManager(checkpoint, directory, 9, step_counter=step, checkpoint_interval=3)

    with opened(kind) as strategy:
        step, manager = counting(strategy, 0, "run", tracked=True)
        saves = []
        for at in range(8):
            step.assign(at)
            saves += [manager.save()]
        assert [path is not None for path in saves] == [True, False, False, True, False, False, True, False]
        assert not getattr(manager._shared_step, "trainable", False)
        assert manager.save(check_interval=False, checkpoint_number=70) == "run/ckpt-70"
        assert manager.restore_or_initialize() == "run/ckpt-70"
        assert manager.save() is None
    assert set(manifest_at(kind, 70)[1]["tensors"]) == {"step0", "v", "checkpoint/saves"}
    with opened(kind) as strategy:
        _, manager = counting(strategy, 1, "other")
        manager.checkpoint.restore("run/ckpt-70")
        assert manager.save() is not None


def test_a_checkpoint_that_was_not_saved_is_no_part_of_the_list():
    """What it would have replaced stays, and goes with the next; what was in its way stays, too."""
    with managing("servers-1x1", 1) as manager:
        save(manager, 1)
        blocker = Path("runs/run/ckpt-2")
        blocker.write_text("no directory")
        manager.save()
        with pytest.raises(ps.errors.CheckpointError, match="'run/ckpt-2' was not saved"):
            manager.save()
        assert "run/ckpt-2" not in manager.checkpoints
        assert on_disk("servers") == numbered(1)
        assert save(manager, 3) == paths(3)
        assert manager.checkpoints == paths(3)
        assert on_disk("servers") == numbered(3)
        assert blocker.is_file()


def test_one_that_failed_at_the_very_end_is_deleted_with_the_next():
    """It is complete, but could not be named as the newest; nobody lists it, and it does not stay for ever."""
    with managing("servers-1x1", 1) as manager:
        save(manager, 1)
        latest = Path("runs/run/latest")
        latest.unlink()
        latest.mkdir()
        manager.save()
        with pytest.raises(ps.errors.CheckpointError, match="latest cannot be written"):
            manager.sync()
        assert manager.checkpoints == []
        latest.rmdir()
        assert on_disk("servers") == numbered(1, 2)
        save(manager, 3)
        assert on_disk("servers") == numbered(3)


@KINDS
def test_an_older_one_may_be_gone_back_to(kind):
    """What is saved then takes the next number anew, and is the newest: a restart goes on from it. The one before is
    the one with the next smaller number, and not what the job has once gone back from; a restart finds it again."""
    run = saved(kind, 1, 2, 3, 4, 5)
    with opened(kind) as strategy:
        manager = managed(strategy)
        manager.checkpoint.restore("run/ckpt-2")
        assert save(manager, 222) == paths(3)
        assert manager.latest_checkpoint == ps.train.latest_checkpoint("run", strategy) == "run/ckpt-3"
    with opened(kind) as strategy:
        manager = managed(strategy)
        assert manager.restore_or_initialize() == "run/ckpt-3"
        assert value(manager) == 222
        assert save(manager, 4) == paths(4)
        assert ps.train.latest_checkpoint("run", strategy) == "run/ckpt-4"
        assert on_disk(kind) == numbered(1, 2, 3, 4, 5)
    for number in (3, 4):
        flip(run / f"ckpt-{number}")
    for _ in range(2):
        with managing(kind) as manager:
            assert manager.restore_or_initialize() == "run/ckpt-2"
            assert value(manager) == 2
    assert on_disk(kind) == ["ckpt-1", "ckpt-2", "ckpt-3.damaged", "ckpt-4.damaged", "ckpt-5"]


@KINDS
def test_the_note_has_names_only(kind):
    """And those whose deletion is ordered: the life that takes the list over orders it again."""
    with opened(kind) as strategy:
        save(managed(strategy, 2), 1, 2, 3)
    note = manifest_at(kind, 3)[1]["state"][".manager"]
    assert [name for name, _ in note["checkpoints"]] == numbered(2, 3)
    assert note["deleting"] == numbered(1)
    # The server was killed after the manifest, and before it deleted anything.
    shutil.copytree(root_of(kind) / "run/ckpt-2", root_of(kind) / "run/ckpt-1")
    with managing(kind, 2) as manager:
        manager.restore_or_initialize()
        save(manager, 4)
        assert on_disk(kind) == numbered(3, 4)
        save(manager, 5)
    # No more than that: ckpt-1 and 2 are gone.
    assert manifest_at(kind, 5)[1]["state"][".manager"]["deleting"] == numbered(3)


@KINDS
def test_a_note_of_paths_is_read(kind):
    """As older versions wrote it."""
    saved(kind, 1, 2)
    path, manifest = manifest_at(kind, 2)
    listed = [[f"elsewhere/ckpt-{number}", 1.0 * number] for number in (1, 2)]
    manifest["state"][".manager"] = {"checkpoints": listed, "preserved": 0.0}
    path.write_text(json.dumps(manifest))
    with managing(kind, 2) as manager:
        manager.restore_or_initialize()
        assert manager.checkpoints == paths(1, 2)
        save(manager, 3)
    assert on_disk(kind) == numbered(2, 3)


@KINDS
def test_what_is_created_later_finds_its_checkpoint(kind, caplog):
    """It is not deleted before all that it has was taken; said once; then it goes."""
    caplog.set_level(logging.INFO, "psclient")
    with opened(kind) as strategy, strategy.scope():
        v, w, late = (ps.Variable(2.0 * np.ones(40), name=name) for name in ("v", "w", "late"))
        ps.train.CheckpointManager(ps.train.Checkpoint(v=v, w=w, late=late), "run", 1).save()
    with opened(kind) as strategy:
        manager = managed(strategy, 1)
        manager.restore_or_initialize()
        save(manager, 2, 3, 4)
        assert on_disk(kind) == numbered(1, 4)
        assert manifest_at(kind, 4)[1]["state"][".manager"]["deleting"] == numbered(1, 3)
        said = [record.getMessage() for record in caplog.records if "could not be deleted yet" in record.getMessage()]
        assert [text.split()[0] for text in said] == paths(1)
        with strategy.scope():
            assert ps.Variable(np.zeros(40), name="late").numpy()[0] == 2.0
        save(manager, 5)
        assert on_disk(kind) == numbered(5)


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"checkpoint_name": "a/ckpt"}, "contains a slash"),
        ({"max_to_keep": 0}, "would keep no checkpoint"),
        ({"checkpoint_interval": 2}, "pass step_counter"),
        ({"full_every": 0}, "full_every=0"),
        ({"delta_interval": 3}, "step_counter"),
        ({"delta_interval": 3, "checkpoint_interval": 3, "step_counter": 1}, "leave checkpoint_interval out"),
    ],
)
def test_impossible_wishes_are_refused(keys, told):
    """When the manager is made."""
    with opened("mirrored-1") as strategy, pytest.raises(ValueError, match=told):
        managed(strategy, **keys)


@KINDS
def test_a_copy_deletes_nothing_of_what_it_was_copied_from(kind):
    """A directory may be copied, and a run go on in the copy; what is not a save's own stays there, too."""
    run = saved(kind, 1, 2)
    copy = shutil.copytree(run, run.parent / "copy")
    (copy / "ckpt-1/notes.txt").write_text("mine")
    with managing(kind, 2, "copy") as manager:
        manager.restore_or_initialize()
        save(manager, 3, 4)
    assert on_disk(kind) == numbered(1, 2)
    assert sorted(path.name for path in copy.iterdir()) == [*numbered(1, 3, 4), "latest"]
    assert [path.name for path in (copy / "ckpt-1").iterdir()] == ["notes.txt"]


# ---- Damaged ones ----


def flip(directory):
    for shard in directory.glob("shard-*"):
        shard.write_bytes(shard.read_bytes()[:-1] + b"?")


def cut(directory):
    manifest = directory / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-9])


def brackets(directory):
    (directory / "manifest.json").write_text("[" * 200_000)


def lose(directory):
    next(directory.glob("shard-*")).unlink()


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize(
    ("kind", "damage", "how"),
    [
        ("mirrored-1", flip, "another checksum than when it was saved"),
        ("servers-2x2", cut, "not a checkpoint manifest"),
    ],
)
def test_the_one_before_is_restored(kind, damage, how, caplog):
    """One warning says which is damaged, how, and what is restored instead; it stays as it is under a name by which it
    is neither restored, counted, written over nor deleted. The next test has all that can be wrong."""
    run = saved(kind, 1, 2, 3)
    damage(run / "ckpt-3")
    kept = contents(run / "ckpt-3")
    assert shell(["psctl", "checkpoint", "verify", str(run)], Path.cwd()).code == 1
    with opened(kind) as strategy:
        manager = managed(strategy, 2)
        assert manager.restore_or_initialize() == "run/ckpt-2"
        assert value(manager) == 2
        (said,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        for words in ("'run/ckpt-2' was restored instead", "ckpt-3: ", how):
            assert words in said
        assert manager.checkpoints == paths(1, 2)
        assert ps.train.latest_checkpoint("run", strategy) == "run/ckpt-2"
        assert save(manager, 3, 4, 5, 6) == paths(3, 4, 5, 6)
    assert on_disk(kind) == ["ckpt-3.damaged", "ckpt-5", "ckpt-6"]
    assert contents(run / "ckpt-3.damaged") == kept
    listed = json.loads(shell(["psctl", "checkpoint", "ls", "--json", str(run)], Path.cwd()).out)
    assert [each["name"] for each in listed["checkpoints"]] == numbered(5, 6)
    assert (list(listed["damaged"]), listed["latest"]) == (["ckpt-3.damaged"], "ckpt-6")


@KINDS
def test_several_in_a_row(kind):
    """All that are newer than the first whole one are passed over and set aside; a name that is taken stays."""
    run = saved(kind, 1, 2, 3, 4, 5)
    for number, damage in ((5, brackets), (4, flip), (3, cut), (2, lose)):
        damage(run / f"ckpt-{number}")
    shutil.copytree(run / "ckpt-1", run / "ckpt-3.damaged")
    with managing(kind) as manager:
        manager.restore_or_initialize()
        assert value(manager) == 1
        assert manager.checkpoints == paths(1)
    assert on_disk(kind) == [
        "ckpt-1", "ckpt-2.damaged", "ckpt-3.damaged", "ckpt-3.damaged.2", "ckpt-4.damaged", "ckpt-5.damaged"
    ]  # fmt: skip


@KINDS
def test_where_all_are_damaged_nothing_begins_anew(kind):
    """An error names them all; nothing is renamed, for nothing else was restored. Nor is anything where a script names
    one that is damaged: that one is never passed over. Of servers the first says what it has found."""
    run = saved(kind, 1, 2)
    flip(run / "ckpt-2")
    with managing(kind) as manager:
        manager.checkpoint.v.assign(np.full(40, 9.0))
        said = "ckpt-2/shard-.*another checksum than when it was saved"
        with pytest.raises(ps.errors.DamagedCheckpoint, match=said) as told:
            manager.checkpoint.restore("run/ckpt-2")
        assert told.value.task in ("", "/job:ps/task:0")
        cut(run / "ckpt-1")
        said = "ckpt-2: .*another checksum.*ckpt-1: .*is not a checkpoint manifest"
        with pytest.raises(ps.errors.DamagedCheckpoint, match=said):
            manager.restore_or_initialize()
        assert value(manager) == 9
    assert on_disk(kind) == numbered(1, 2)


@KINDS
def test_what_is_created_later_is_looked_at_now(kind):
    """Values that only later variables will take are checked as well: else the job would fail at its first step, at
    every start."""
    run = saved(kind, 1, 2)
    shard = run / "ckpt-2" / manifest_at(kind, 2)[1]["tensors"]["w"]["file"]
    data = shard.read_bytes()
    at = data.rindex(np.full(40, 2.0).tobytes())  # where one file has both variables: that of w, which is the last
    shard.write_bytes(data[:at] + b"?" + data[at + 1 :])
    with opened(kind) as strategy, strategy.scope():
        v = ps.Variable(np.zeros(40), name="v")
        manager = ps.train.CheckpointManager(ps.train.Checkpoint(v=v), "run", 9)
        assert manager.restore_or_initialize() == "run/ckpt-1"
        assert ps.Variable(np.zeros(40), name="w").numpy()[0] == 1.0


# ---- What is no damage ----


def refused(manager, words):
    """It is told that what is there cannot be read, and not that it is damaged."""
    with pytest.raises(ps.errors.CheckpointError, match=words) as told:
        manager.restore_or_initialize()
    assert type(told.value) is ps.errors.CheckpointError


def test_a_file_that_may_not_be_read_is_raised():
    """Nobody knows whether it is damaged: a shard, a manifest, a directory."""
    with tempfile.TemporaryDirectory() as above:
        os.chmod(above, 0o777)
        directory = f"{above}/run"
        saved("mirrored-1", 1, 2, directory=directory)
        newest = Path(directory, "ckpt-2")
        uid = os.geteuid()
        with managing("mirrored-1", directory=directory) as manager:
            for hidden in (next(newest.glob("shard-*")), newest / "manifest.json", newest):
                mode = hidden.stat().st_mode
                hidden.chmod(0)
                if uid == 0:
                    os.seteuid(65534)
                try:
                    refused(manager, "Permission denied")
                finally:
                    if uid == 0:
                        os.seteuid(0)
                    hidden.chmod(mode)
            assert value(manager) == 0
            assert manager.restore_or_initialize() == f"{directory}/ckpt-2"
        assert sorted(path.name for path in Path(directory).iterdir()) == [*numbered(1, 2), "latest"]


def test_what_one_server_cannot_read_counts_for_more(tmp_path):
    """Than what another one finds damaged: its part may be whole, and nothing is passed over."""
    run = saved("servers-2x1", 1, 2)
    first, second = (next((run / "ckpt-2").glob(f"shard-0000{server}-*")) for server in (0, 1))
    first.write_bytes(first.read_bytes()[:-1] + b"?")
    shutil.move(second, tmp_path / "elsewhere")
    second.symlink_to(tmp_path / "elsewhere")
    with managing("servers-2x1") as manager:
        refused(manager, "through a link")
        assert value(manager) == 0
    assert on_disk("servers-2x1") == numbered(1, 2)


def test_by_a_url(monkeypatch):
    """Where nothing can be renamed all files are copied before any is removed, the manifest last, and that is removed
    first: whatever is there with a manifest is whole."""
    moved, memory = [], fsspec.get_filesystem_class("memory")
    for how in ("cp_file", "rm_file"):
        own = getattr(memory, how)
        monkeypatch.setattr(memory, how, lambda fs, key, *to, own=own: (moved.append(key), own(fs, key, *to))[1])
    url = f"memory://{uuid.uuid4()}"
    saved("mirrored-1", 1, 2, directory=url)
    there = storage.storage_at(url)
    (shard,) = (name for name in there.listing(".")["ckpt-2"] if name.startswith("shard"))
    with there.open(f"ckpt-2/{shard}") as file:
        data = file.read()
    there.put(f"ckpt-2/{shard}", data[:-1] + b"?")
    with managing("mirrored-1", directory=url) as manager:
        moved.clear()
        assert manager.restore_or_initialize() == f"{url}/ckpt-1"
        assert [key.rpartition("/")[2] for key in moved] == [shard, "manifest.json", "manifest.json", shard]
        assert value(manager) == 1
    assert there.listing(".").keys() == {"ckpt-1", "ckpt-2.damaged"}
    assert there.listing(".")["ckpt-2.damaged"] == {shard, "manifest.json"}


def test_a_bucket_that_does_not_answer_is_raised():
    """It is neither damaged nor empty: the job does not begin anew."""
    with object_store() as said:
        url = f"s3://{BUCKET}/{uuid.uuid4()}"
        saved("mirrored-1", 1, directory=url)
    with pytest.MonkeyPatch.context() as patch:
        for name, setting in (said | {"AWS_MAX_ATTEMPTS": "1"}).items():
            patch.setenv(name, setting)
        with opened("mirrored-1") as strategy:
            refused(managed(strategy, directory=url), "cannot be read")
