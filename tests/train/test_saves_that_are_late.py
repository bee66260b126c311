"""What a process knows of its last save: that it waits for it, and whether it has failed."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

import psclient as ps
from tests.kit.rig import eventually
from tests.kit.strategies import opened

pytestmark = pytest.mark.usefixtures("in_tmp_path")


def test_who_waited_too_long_waits_again():
    """A save is not taken for complete because it took longer than a round may; the next one does not pass it by."""
    with opened("servers-1x1") as strategy:
        with strategy.scope():
            checkpoint = ps.train.Checkpoint(v=ps.Variable(0.0, name="v"))
        go, saves, session = threading.Event(), strategy._chief._checkpoints, strategy._session
        commit, timeouts = saves.commit, session.timeouts
        saves.commit = lambda plan: (go.wait(60), commit(plan))[1]
        path = checkpoint.save("run/ckpt")
        session.timeouts = replace(timeouts, round=0.1)
        for wait in (checkpoint.sync, checkpoint.sync, lambda: checkpoint.save("run/ckpt")):
            with pytest.raises(ps.errors.RoundTimeout, match="the checkpoint was not complete in time"):
                wait()
        session.timeouts = timeouts
        go.set()
        checkpoint.sync()
        assert (Path("runs") / path / "manifest.json").exists()
        assert not checkpoint.backend.failed(path)


def test_which_save_has_failed_is_known():
    """Until there is a later one at the same path."""
    Path("runs").mkdir()
    blocker = Path("runs/best")
    blocker.write_text("no directory")
    with opened("servers-1x2") as strategy:
        with strategy.scope():
            checkpoint = ps.train.Checkpoint(v=ps.Variable(0.0, name="v"))
        checkpoint.write("other")
        checkpoint.write("best")
        assert not checkpoint.backend.failed("best")  # nobody knows yet
        with pytest.raises(ps.errors.CheckpointError, match="'best' was not saved"):
            checkpoint.sync()
        assert [checkpoint.backend.failed(path) for path in ("best", "other")] == [True, False]
        blocker.unlink()
        checkpoint.write("best")
        checkpoint.sync()
        assert not checkpoint.backend.failed("best")


def test_who_came_late_restores_what_the_others_saved(monkeypatch):
    """They wait for their save before; a process that came after it does as well, though it has saved nothing."""
    with opened("servers-1x1") as strategy:
        with strategy.scope():
            v = ps.Variable(1.0, name="v")
            checkpoint = ps.train.Checkpoint(v=v)
        go, saves, backend = threading.Event(), strategy._chief._checkpoints, strategy.backend
        commit, follow = saves.commit, backend.group._follow
        saves.commit = lambda plan: (go.wait(60), commit(plan))[1]
        path = checkpoint.save("run/ckpt")
        v.assign(2.0)
        with monkeypatch.context() as patch:
            patch.setattr(backend.checkpoints, "_saving", None)
            patch.setattr(type(backend.group), "late", True)
            patch.setattr(backend.group, "_follow", lambda *args: (go.set(), follow(*args))[1])
            try:
                assert checkpoint.restore("run").path == path
            finally:
                go.set()
        assert float(v) == 1.0


def test_a_manifest_that_is_too_large_is_told(monkeypatch):
    """Before it is sent, and to those who wait for the save; training goes on, and so do later saves."""
    with opened("servers-1x1") as strategy:
        with strategy.scope():
            v = ps.Variable(0.0, name="v")
            checkpoint = ps.train.Checkpoint(v=v)
        with monkeypatch.context() as patch:
            patch.setattr("psclient._src.chief.checkpoints.PART_BYTES", 400)
            checkpoint.save("run/ckpt")
            with pytest.raises(ps.errors.CheckpointError, match=r"of 2 variables, takes [0-9]+ bytes, and at most 400"):
                checkpoint.sync()
        eventually(lambda: not list(Path("runs").rglob("shard-*")))
        v.assign(1.0)
        path = checkpoint.save("run/ckpt")
        v.assign(2.0)
        checkpoint.restore(path)
        assert float(v) == 1.0
