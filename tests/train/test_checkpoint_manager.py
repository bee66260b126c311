"""`ps.train.CheckpointManager`: which checkpoints it keeps, and what it restores."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest

import psclient as ps
from tests.kit.strategies import opened

pytestmark = pytest.mark.usefixtures("in_tmp_path")

KINDS = pytest.mark.parametrize("kind", ["mirrored-1", "servers-2x2"])


def managed(strategy, max_to_keep=2, **keys):
    with strategy.scope():
        v = ps.Variable(0.0, name="v")
        return v, ps.train.CheckpointManager(ps.train.Checkpoint(v=v), "run", max_to_keep, **keys)


def root_of(kind):
    return Path("runs" if kind.startswith("servers") else ".")


def on_disk(kind):
    return sorted(path.name for path in (root_of(kind) / "run").iterdir() if path.name != "latest")


def note_of(kind, name):
    manifest = json.loads((root_of(kind) / "run" / name / "manifest.json").read_text())
    return manifest["state"][".manager"]


@KINDS
def test_old_ones_are_deleted_when_a_new_one_is_complete(kind):
    """`max_to_keep` are left, and the newest is the latest."""
    with opened(kind) as strategy:
        _, manager = managed(strategy)
        assert manager.latest_checkpoint is None
        assert [manager.save() for _ in range(4)] == [f"run/ckpt-{n}" for n in (1, 2, 3, 4)]
        manager.sync()
        assert manager.checkpoints == ["run/ckpt-3", "run/ckpt-4"]
        assert manager.latest_checkpoint == ps.train.latest_checkpoint("run", strategy) == "run/ckpt-4"
        assert on_disk(kind) == ["ckpt-3", "ckpt-4"]


@KINDS
def test_a_new_process_goes_on_with_the_list(kind):
    """It restores the newest, and deletes what the one before it has left."""
    with opened(kind) as strategy:
        v, manager = managed(strategy)
        for value in (1.0, 2.0):
            v.assign(value)
            manager.save()
    with opened(kind) as strategy:
        v, manager = managed(strategy)
        assert manager.checkpoints == ["run/ckpt-1", "run/ckpt-2"]
        assert manager.restore_or_initialize() == "run/ckpt-2"
        assert float(v) == 2.0
        assert manager.save() == "run/ckpt-3"
        manager.sync()
        assert on_disk(kind) == ["ckpt-2", "ckpt-3"]


@KINDS
def test_the_first_start_initializes(kind):
    """`init_fn` is called where there is no checkpoint, and only there."""
    calls = []
    with opened(kind) as strategy:
        _, manager = managed(strategy, init_fn=lambda: calls.append(1))
        assert manager.restore_or_initialize() is None
        manager.save()
        manager.sync()
        assert manager.restore_or_initialize() == "run/ckpt-1"
        assert calls == [1]


@KINDS
def test_all_are_kept_where_no_number_is_given(kind):
    """And where one is to be kept every so many hours, it is no more managed."""
    with opened(kind) as strategy:
        _, manager = managed(strategy, None)
        for _ in range(4):
            manager.save()
        manager.sync()
        assert on_disk(kind) == [f"ckpt-{n}" for n in (1, 2, 3, 4)]


def test_one_in_so_many_hours_stays():
    """With an interval that always has passed nothing is deleted, but the list is as long as asked."""
    with opened("mirrored-1") as strategy:
        _, manager = managed(strategy, 1, keep_checkpoint_every_n_hours=1e-12)
        for _ in range(3):
            manager.save()
        assert manager.checkpoints == ["run/ckpt-3"]
        assert on_disk("mirrored-1") == ["ckpt-1", "ckpt-2", "ckpt-3"]


@KINDS
def test_an_interval_counts_steps(kind):
    """Whoever asks in between gets None; after a restore it counts from there."""
    with opened(kind) as strategy:
        with strategy.scope():
            step = ps.Variable(0, name="step")
            checkpoint = ps.train.Checkpoint(step=step)
        manager = ps.train.CheckpointManager(checkpoint, "run", 9, step_counter=step, checkpoint_interval=3)
        saved = []
        for at in range(8):
            step.assign(at)
            saved += [manager.save()]
        assert [path is not None for path in saved] == [True, False, False, True, False, False, True, False]
        assert manager.save(check_interval=False, checkpoint_number=70) == "run/ckpt-70"
        assert manager.restore_or_initialize() == "run/ckpt-70"
        assert manager.save() is None


def test_an_interval_is_in_no_checkpoint():
    """What counts it is this job's: another one, whose steps begin anew, saves at once."""
    with opened("servers-1x1") as strategy:
        with strategy.scope():
            step, v = ps.Variable(7, name="step"), ps.Variable(0.0, name="v")
        checkpoint = ps.train.Checkpoint(step=step, v=v)
        path = ps.train.CheckpointManager(checkpoint, "run", 9, step_counter=step, checkpoint_interval=3).save()
        checkpoint.sync()
    tensors = json.loads((root_of("servers") / path / "manifest.json").read_text())["tensors"]
    assert set(tensors) == {"step", "v", "checkpoint/saves"}
    with opened("servers-1x1") as strategy:
        with strategy.scope():
            steps, v = ps.Variable(0, name="steps"), ps.Variable(0.0, name="v")
        checkpoint = ps.train.Checkpoint(v=v)
        checkpoint.restore(path)
        manager = ps.train.CheckpointManager(checkpoint, "other", 9, step_counter=steps, checkpoint_interval=3)
        assert manager.save() is not None


def test_a_checkpoint_that_was_not_saved_is_no_part_of_the_list():
    """What it would have replaced stays."""
    with opened("servers-1x1") as strategy:
        _, manager = managed(strategy, 1)
        manager.save()
        manager.sync()
        blocker = Path("runs/run/ckpt-2")
        blocker.write_text("no directory")
        manager.save()
        with pytest.raises(ps.errors.CheckpointError, match="'run/ckpt-2' was not saved"):
            manager.save()
        assert on_disk("servers") == ["ckpt-1", "ckpt-2"]
        assert manager.save() == "run/ckpt-3"
        manager.sync()
        assert manager.checkpoints == ["run/ckpt-3"]
        assert on_disk("servers") == ["ckpt-2", "ckpt-3"]
        assert blocker.is_file()


def test_one_that_failed_at_the_very_end_is_deleted_with_the_next():
    """It is complete, but could not be named as the newest; nobody lists it, and it does not stay for ever."""
    with opened("servers-1x1") as strategy:
        _, manager = managed(strategy, 1)
        manager.save()
        manager.sync()
        latest = Path("runs/run/latest")
        latest.unlink()
        latest.mkdir()
        manager.save()
        with pytest.raises(ps.errors.CheckpointError, match="latest cannot be written"):
            manager.sync()
        assert manager.checkpoints == []
        latest.rmdir()
        assert on_disk("servers") == ["ckpt-1", "ckpt-2"]
        manager.save()
        manager.sync()
        assert on_disk("servers") == ["ckpt-3"]


def test_a_failure_that_somebody_else_was_told_of_is_known():
    """`Checkpoint.sync` and `restore` raise it as well: what has failed is not counted, and what it was to replace goes
    with the next."""
    with opened("servers-1x1") as strategy:
        _, manager = managed(strategy)
        manager.save()
        manager.save()
        manager.sync()
        for number, tell in [(3, manager.checkpoint.sync), (4, lambda: manager.checkpoint.restore("run/ckpt-2"))]:
            Path(f"runs/run/ckpt-{number}").write_text("no directory")
            manager.save()
            with pytest.raises(ps.errors.CheckpointError, match=f"'run/ckpt-{number}' was not saved"):
                tell()
            assert f"run/ckpt-{number}" not in manager.checkpoints
        manager.save()
        manager.sync()
        assert manager.checkpoints == ["run/ckpt-2", "run/ckpt-5"]
        assert on_disk("servers") == ["ckpt-2", "ckpt-3", "ckpt-4", "ckpt-5"]


@KINDS
def test_an_older_one_may_be_gone_back_to(kind):
    """What is saved then takes the next number anew, and is the newest: a restart goes on from it."""
    with opened(kind) as strategy:
        v, manager = managed(strategy, 9)
        for number in range(1, 6):
            v.assign(float(number))
            manager.save()
        manager.sync()
    with opened(kind) as strategy:
        v, manager = managed(strategy, 9)
        manager.checkpoint.restore("run/ckpt-2")
        v.assign(222.0)
        assert manager.save() == "run/ckpt-3"
        manager.sync()
        assert manager.latest_checkpoint == ps.train.latest_checkpoint("run", strategy) == "run/ckpt-3"
    with opened(kind) as strategy:
        v, manager = managed(strategy, 9)
        assert manager.restore_or_initialize() == "run/ckpt-3"
        assert float(v) == 222.0
        assert manager.save() == "run/ckpt-4"
        manager.sync()
        assert ps.train.latest_checkpoint("run", strategy) == "run/ckpt-4"
        assert on_disk(kind) == [f"ckpt-{n}" for n in (1, 2, 3, 4, 5)]


@KINDS
def test_a_path_that_was_written_to_is_not_the_newest(kind):
    """`write` leaves that as it was, as in TensorFlow, whatever the name is."""
    with opened(kind) as strategy:
        _, manager = managed(strategy)
        manager.save()
        assert manager.checkpoint.write("run/ckpt-99") == "run/ckpt-99"
        manager.checkpoint.sync()
        assert ps.train.latest_checkpoint("run", strategy) == "run/ckpt-1"


@KINDS
def test_the_note_has_names_only(kind):
    """And those whose deletion is ordered: the life that takes the list over orders it again."""
    with opened(kind) as strategy:
        _, manager = managed(strategy)
        for _ in range(3):
            manager.save()
        manager.sync()
    note = note_of(kind, "ckpt-3")
    assert [name for name, _ in note["checkpoints"]] == ["ckpt-2", "ckpt-3"]
    assert note["deleting"] == ["ckpt-1"]
    # The server was killed after the manifest, and before it deleted anything.
    shutil.copytree(root_of(kind) / "run/ckpt-2", root_of(kind) / "run/ckpt-1")
    with opened(kind) as strategy:
        _, manager = managed(strategy)
        manager.restore_or_initialize()
        manager.save()
        manager.sync()
        assert on_disk(kind) == ["ckpt-3", "ckpt-4"]
        manager.save()
        manager.sync()
    assert note_of(kind, "ckpt-5")["deleting"] == ["ckpt-3"]  # No more than that: ckpt-1 and 2 are gone.


@KINDS
def test_a_note_of_paths_is_read(kind):
    """As older versions wrote it."""
    with opened(kind) as strategy:
        _, manager = managed(strategy)
        for _ in range(2):
            manager.save()
        manager.sync()
    path = root_of(kind) / "run/ckpt-2/manifest.json"
    manifest = json.loads(path.read_text())
    listed = [[f"elsewhere/ckpt-{number}", 1.0 * number] for number in (1, 2)]
    manifest["state"][".manager"] = {"checkpoints": listed, "preserved": 0.0}
    path.write_text(json.dumps(manifest))
    with opened(kind) as strategy:
        _, manager = managed(strategy)
        manager.restore_or_initialize()
        assert manager.checkpoints == ["run/ckpt-1", "run/ckpt-2"]
        manager.save()
        manager.sync()
    assert on_disk(kind) == ["ckpt-2", "ckpt-3"]


@KINDS
def test_what_is_created_later_finds_its_checkpoint(kind, caplog):
    """It is not deleted before all that it has was taken; said once; then it goes."""
    caplog.set_level(logging.INFO, "psclient")
    with opened(kind) as strategy, strategy.scope():
        v, late = ps.Variable(1.0, name="v"), ps.Variable(2.0, name="late")
        ps.train.CheckpointManager(ps.train.Checkpoint(v=v, late=late), "run", 1).save()
    with opened(kind) as strategy:
        v, manager = managed(strategy, 1)
        manager.restore_or_initialize()
        for _ in range(3):
            manager.save()
        manager.sync()
        assert on_disk(kind) == ["ckpt-1", "ckpt-4"]
        assert note_of(kind, "ckpt-4")["deleting"] == ["ckpt-1", "ckpt-3"]
        said = [record.getMessage() for record in caplog.records if "is still there" in record.getMessage()]
        assert [text.split()[0] for text in said] == ["run/ckpt-1"]
        with strategy.scope():
            assert float(ps.Variable(0.0, name="late")) == 2.0
        manager.save()
        manager.sync()
        assert on_disk(kind) == ["ckpt-5"]


def test_impossible_wishes_are_refused():
    """To keep nothing; to count steps without a counter; a name with a directory in it."""
    with opened("mirrored-1") as strategy:
        with pytest.raises(ValueError, match="has a slash"):
            managed(strategy, checkpoint_name="a/ckpt")
        with pytest.raises(ValueError, match="keeps nothing"):
            managed(strategy, 0)
        with pytest.raises(ValueError, match="give step_counter"):
            managed(strategy, checkpoint_interval=2)


@KINDS
def test_a_copy_deletes_nothing_of_what_it_was_copied_from(kind):
    """A directory may be copied, and a run go on in the copy; what is not a save's own stays there, too."""
    root = root_of(kind)
    with opened(kind) as strategy:
        _, manager = managed(strategy)
        for _ in range(2):
            manager.save()
        manager.sync()
    shutil.copytree(root / "run", root / "copy")
    (root / "copy/ckpt-1/notes.txt").write_text("mine")
    with opened(kind) as strategy, strategy.scope():
        checkpoint = ps.train.Checkpoint(v=ps.Variable(0.0, name="v"))
        manager = ps.train.CheckpointManager(checkpoint, "copy", 2)
        manager.restore_or_initialize()
        for _ in range(2):
            manager.save()
        manager.sync()
    assert on_disk(kind) == ["ckpt-1", "ckpt-2"]
    assert sorted(path.name for path in (root / "copy").iterdir()) == ["ckpt-1", "ckpt-3", "ckpt-4", "latest"]
    assert [path.name for path in (root / "copy/ckpt-1").iterdir()] == ["notes.txt"]
