"""Saving goes on while training does: who waits for it, who is told that it failed, and at which paths it may be."""

from __future__ import annotations

import contextlib
import threading
import uuid
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import psclient as ps
from tests.kit.rig import eventually
from tests.kit.strategies import opened, refused

pytestmark = pytest.mark.usefixtures("in_tmp_path")

AT_ONCE = ps.train.CheckpointOptions(enable_async=False)
REFUSE = ps.train.CheckpointOptions(if_busy="refuse")


@contextlib.contextmanager
def held_up(strategy):
    """Checkpoints are not committed before the event is set that this gives."""
    go, saves = threading.Event(), strategy._chief._checkpoints
    commit = saves.commit

    def late(plan):
        assert go.wait(60)
        return commit(plan)

    saves.commit = late
    try:
        yield go
    finally:
        go.set()


def counted(strategy, size=()):
    with strategy.scope():
        v = ps.Variable(np.zeros(size), name="v")
    return v, ps.train.Checkpoint(v=v)


def complete(path):
    return (Path("runs") / path / "manifest.json").exists()


# ---- Who waits ----


def test_training_goes_on_while_a_checkpoint_is_written():
    """It has the values of the round in which it was asked for; a strategy that is closed has saved it."""
    with opened("servers-1x1") as strategy:
        v, checkpoint = counted(strategy)
        with held_up(strategy) as go:
            path = checkpoint.save("run/ckpt")
            v.assign(1.0)
            assert float(v) == 1.0
            assert not complete(path)
            go.set()
            checkpoint.sync()
        assert complete(path)
        checkpoint.restore(path).assert_consumed()
        assert float(v) == 0.0
        with held_up(strategy) as go:
            path = checkpoint.save("run/ckpt")
            threading.Timer(0.2, go.set).start()
            strategy.close()
            assert complete(path)


def test_a_second_save_waits_or_is_refused():
    """As asked; what is refused counts for nothing, and the first is complete all the same."""
    with opened("servers-1x2") as strategy:
        _, checkpoint = counted(strategy)
        with held_up(strategy) as go:
            first = checkpoint.save("run/ckpt", REFUSE)
            with pytest.raises(ps.errors.CheckpointError, match="'run/ckpt-1' is still being written"):
                checkpoint.save("run/ckpt", REFUSE)
            assert int(checkpoint.save_counter) == 1
            threading.Timer(0.2, go.set).start()
            second = checkpoint.save("run/ckpt")
            assert complete(first)
        checkpoint.sync()
        assert (second, complete(second)) == ("run/ckpt-2", True)
        assert checkpoint.save("run/ckpt", REFUSE) == "run/ckpt-3"
        with pytest.raises(RuntimeError, match="save"):  # in replica context
            strategy.run(lambda: checkpoint.save("run/ckpt"))
        assert int(checkpoint.save_counter) == 3


def test_who_waited_too_long_waits_again():
    """A save is not taken for complete because it took longer than a round may; the next one does not pass it by."""
    with opened("servers-1x1") as strategy:
        _, checkpoint = counted(strategy)
        session = strategy._session
        timeouts = session.timeouts
        with held_up(strategy) as go:
            path = checkpoint.save("run/ckpt")
            session.timeouts = replace(timeouts, round_timeout=0.1)
            for wait in (checkpoint.sync, checkpoint.sync, lambda: checkpoint.save("run/ckpt")):
                with pytest.raises(ps.errors.RoundTimeout, match="the checkpoint was not completed in time"):
                    wait()
            session.timeouts = timeouts
            go.set()
            checkpoint.sync()
        assert complete(path)
        assert not checkpoint.backend.failed(path)


def test_who_came_late_restores_what_the_others_saved(monkeypatch):
    """They wait for their save before; a process that came after it does as well, though it has saved nothing."""
    with opened("servers-1x1") as strategy:
        v, checkpoint = counted(strategy)
        backend = strategy.backend
        news, follow = backend.group.news, backend.group.news.follow
        with held_up(strategy) as go, monkeypatch.context() as patch:
            path = checkpoint.save("run/ckpt")
            v.assign(2.0)
            patch.setattr(backend.checkpoints, "_saving", None)
            patch.setattr(type(backend.group), "late", True)
            patch.setattr(news, "follow", lambda *args: (go.set(), follow(*args))[1])
            assert checkpoint.restore("run").path == path
        assert float(v) == 0.0


# ---- What fails ----


@pytest.mark.parametrize("told", ["at once", "by sync", "by the next save", "by a restore"])
def test_a_failure_is_told_once(told):
    """By whatever comes first; then saving goes on. Which save has failed is known until there is one at its path."""
    Path("runs").mkdir()
    blocker = Path("runs/run")
    blocker.write_text("no directory")
    with opened("servers-1x2") as strategy:
        _, checkpoint = counted(strategy)
        failed = checkpoint.backend.failed
        checkpoint.write("other")
        if told != "at once":
            assert checkpoint.save("run/ckpt") == "run/ckpt-1"
            assert not failed("run/ckpt-1")  # nobody knows yet
        tell = {
            "at once": lambda: checkpoint.save("run/ckpt", AT_ONCE),
            "by sync": checkpoint.sync,
            "by the next save": lambda: checkpoint.save("run/ckpt"),
            "by a restore": lambda: checkpoint.restore("run/ckpt-1"),
        }
        refused(ps.errors.CheckpointError, "'run/ckpt-1' was not saved", tell[told])
        assert [failed(path) for path in ("run/ckpt-1", "other")] == [True, False]
        blocker.unlink()
        assert checkpoint.save("run/ckpt", AT_ONCE) == "run/ckpt-2"
        assert complete("run/ckpt-2")
        checkpoint.write("run/ckpt-1", AT_ONCE)
        assert not failed("run/ckpt-1")


def test_a_failure_that_nobody_asks_for_is_raised_at_the_end(caplog):
    """And the process leaves cleanly: what it trained is done."""
    Path("runs").mkdir()
    Path("runs/run").write_text("no directory")
    said = "the last checkpoint 'run/ckpt-1' was not saved"
    with pytest.raises(ps.errors.CheckpointError, match=said), opened("servers-1x1") as strategy:
        counted(strategy)[1].save("run/ckpt")
    assert "could not close its session" not in caplog.text


def test_a_manifest_that_is_too_large_is_told(monkeypatch):
    """Before it is sent, and to those who wait for the save; training goes on, and so do later saves."""
    with opened("servers-1x1") as strategy:
        v, checkpoint = counted(strategy)
        with monkeypatch.context() as patch:
            patch.setattr("psclient._src.chief.checkpoints.PART_BYTES", 400)
            checkpoint.save("run/ckpt")
            refused(ps.errors.CheckpointError, r"of 2 variables has [0-9]+ bytes; at most 400", checkpoint.sync)
        eventually(lambda: not list(Path("runs").rglob("shard-*")))
        v.assign(1.0)
        path = checkpoint.save("run/ckpt")
        v.assign(2.0)
        checkpoint.restore(path)
        assert float(v) == 1.0


def test_a_failure_without_servers_is_told_at_once():
    """The checkpoint before stays the newest; what a crash has left goes with the next save."""
    with opened("mirrored-1") as strategy:
        _, checkpoint = counted(strategy)
        first = checkpoint.save("run/ckpt")
        Path("run/ckpt-2").write_text("no directory")
        refused(ps.errors.CheckpointError, "'run/ckpt-2' was not saved", lambda: checkpoint.save("run/ckpt"))
        assert ps.train.latest_checkpoint("run", strategy) == first
        Path("run/ckpt-2").unlink()
        Path("run/ckpt-1/manifest.json").unlink()
        checkpoint.save("run/ckpt")
        assert sorted(path.name for path in Path("run").iterdir()) == ["ckpt-3", "latest"]


# ---- Where ----

IMPOSSIBLE = ["", "run/", "run/ckpt\n", "a\0b/ckpt", "run/\ud800", "run/" + "n" * 240]
ELSEWHERE = ["/abs/ckpt", "../ckpt", "run/../../ckpt", "s3://bucket/ckpt", "file:///abs/ckpt", "d/" * 600 + "ckpt"]


@pytest.mark.parametrize(("kind", "paths"), [("servers-1x1", IMPOSSIBLE + ELSEWHERE), ("mirrored-1", IMPOSSIBLE[:2])])
def test_an_impossible_path_is_refused(kind, paths):
    """By `save` and `write`: the save is not counted, nothing is written, and the next one works.

    Names are taken that the file beside checkpoints has, and damaged ones. A manager is told when it restores, before
    training, and not when its first save is due.
    """
    with opened(kind) as strategy:
        v, checkpoint = counted(strategy)
        for path in paths:
            for save in (checkpoint.save, checkpoint.write):
                with pytest.raises(ps.errors.CheckpointError, match="such as 'run1"):
                    save(path)
        for name in ("latest", "ckpt-7.damaged", "ckpt-7.damaged.2"):
            with pytest.raises(ps.errors.CheckpointError, match="choose another name"):
                checkpoint.write(f"run/{name}")
        for directory in ("/abs", "s3://bucket/run", "../run", "run\n") if kind == "servers-1x1" else ():
            manager = ps.train.CheckpointManager(checkpoint, directory, 2)
            for ask in (manager.restore_or_initialize, manager.save):
                with pytest.raises(ps.errors.CheckpointError, match="such as 'run1"):
                    ask()
        v.assign(2.0)
        assert int(checkpoint.save_counter) == 0
        checkpoint.sync()
        assert [found for found in Path().rglob("*") if found.is_file()] == []
        assert checkpoint.save("run/ckpt") == "run/ckpt-1"
        checkpoint.sync()


def test_a_process_without_servers_saves_where_it_says(tmp_path):
    """To an object store, to absolute paths, URLs and those above; the newest is found there, too."""
    Path("here").mkdir()
    store = f"memory://{uuid.uuid4()}/run"
    with opened("mirrored-1") as strategy:
        v, checkpoint = counted(strategy)
        places = (store, f"{tmp_path}/abs", "here/../there", f"file://{tmp_path}/url")
        for number, directory in enumerate(places, 1):
            v.assign(number)
            assert checkpoint.save(f"{directory}/ckpt") == f"{directory}/ckpt-{number}"
            v.assign(0.0)
            assert checkpoint.restore(directory).assert_consumed().path == f"{directory}/ckpt-{number}"
            assert float(v) == number
