"""`ps.train.CheckpointManager`: which checkpoints it keeps, and what it restores."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from strategies import opened

import psclient as ps

KINDS = pytest.mark.parametrize("kind", ["mirrored-1", "embedded-2"])


@pytest.fixture(autouse=True)
def _root(tmp_path, monkeypatch):
    """Servers of this process's own keep checkpoints below the directory in which they were started."""
    monkeypatch.chdir(tmp_path)


def managed(strategy, max_to_keep=2, **keys):
    with strategy.scope():
        v = ps.Variable(0.0, name="v")
        return v, ps.train.CheckpointManager(ps.train.Checkpoint(v=v), "run", max_to_keep, **keys)


def on_disk(kind):
    root = Path("checkpoints" if kind.startswith("embedded") else ".") / "run"
    return sorted(path.name for path in root.iterdir())


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


def test_a_checkpoint_that_was_not_saved_is_no_part_of_the_list():
    """What it would have replaced stays."""
    with opened("embedded-1") as strategy:
        _, manager = managed(strategy, 1)
        manager.save()
        manager.sync()
        blocker = Path("checkpoints/run/ckpt-2")
        blocker.write_text("no directory")
        manager.save()
        with pytest.raises(ps.errors.CheckpointError, match="'run/ckpt-2' was not saved"):
            manager.save()
        assert on_disk("embedded") == ["ckpt-1", "ckpt-2"]
        assert manager.save() == "run/ckpt-3"
        manager.sync()
        assert manager.checkpoints == ["run/ckpt-3"]
        assert on_disk("embedded") == ["ckpt-2", "ckpt-3"]
        assert blocker.is_file()


def test_impossible_wishes_are_refused():
    """To keep nothing; to count steps without a counter."""
    with opened("mirrored-1") as strategy:
        with pytest.raises(ValueError, match="keeps nothing"):
            managed(strategy, 0)
        with pytest.raises(ValueError, match="give step_counter"):
            managed(strategy, checkpoint_interval=2)


@KINDS
def test_a_copy_deletes_nothing_of_what_it_was_copied_from(kind):
    """A directory may be copied, and a run go on in the copy; what is not a save's own stays there, too."""
    root = Path("checkpoints" if kind.startswith("embedded") else ".")
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
    assert sorted(path.name for path in (root / "copy").iterdir()) == ["ckpt-1", "ckpt-3", "ckpt-4"]
    assert [path.name for path in (root / "copy/ckpt-1").iterdir()] == ["notes.txt"]
