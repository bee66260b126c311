"""A path at which no checkpoint can be saved is refused in the caller's line, before anything is ordered."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import psclient as ps
from pstesting.processes import PS0, W0, W1, ProcessCluster
from pstesting.script import ME, say
from tests.kit.strategies import opened

pytestmark = pytest.mark.usefixtures("in_tmp_path")

IMPOSSIBLE = [
    "",
    "run/",
    "run/ckpt\n",
    "a\0b/ckpt",
    "run/\ud800",
    "run/" + "n" * 240,
]
ELSEWHERE = ["/abs/ckpt", "../ckpt", "run/../../ckpt", "s3://bucket/ckpt", "file:///abs/ckpt", "d/" * 600 + "ckpt"]


@pytest.mark.parametrize(
    ("kind", "path"),
    [("servers-1x1", path) for path in IMPOSSIBLE + ELSEWHERE] + [("mirrored-1", path) for path in IMPOSSIBLE[:-4] * 2],
    ids=lambda word: repr(word)[:20],
)
def test_an_impossible_path_is_refused(kind, path):
    """By `save`, by `write` and by a manager: the save is not counted, nothing is written, and the next one works."""
    with opened(kind) as strategy:
        with strategy.scope():
            v = ps.Variable(1.0, name="v")
            checkpoint = ps.train.Checkpoint(v=v)
        for save in (checkpoint.save, checkpoint.write):
            with pytest.raises(ps.errors.CheckpointError, match="such as 'run1"):
                save(path)
        v.assign(2.0)
        assert int(checkpoint.save_counter) == 0
        checkpoint.sync()
        assert [found for found in Path().rglob("*") if found.is_file()] == []
        assert checkpoint.save("run/ckpt") == "run/ckpt-1"
        checkpoint.sync()


@pytest.mark.parametrize("kind", ["servers-1x1", "mirrored-1"])
@pytest.mark.parametrize("name", ["latest", "ckpt-7.damaged", "ckpt-7.damaged.2"])
def test_names_that_are_taken_are_refused(kind, name):
    """That of the file beside checkpoints, and those of damaged ones."""
    with opened(kind) as strategy, strategy.scope():
        checkpoint = ps.train.Checkpoint(v=ps.Variable(1.0, name="v"))
        with pytest.raises(ps.errors.CheckpointError, match="choose another one"):
            checkpoint.write(f"run/{name}")


def test_a_manager_is_told_when_it_restores():
    """Before training, and not when its first save is due."""
    with opened("servers-1x1") as strategy, strategy.scope():
        checkpoint = ps.train.Checkpoint(v=ps.Variable(1.0, name="v"))
        for directory in ("/abs", "s3://bucket/run", "../run", "run\n"):
            manager = ps.train.CheckpointManager(checkpoint, directory, 2)
            for ask in (manager.restore_or_initialize, manager.save):
                with pytest.raises(ps.errors.CheckpointError, match="such as 'run1"):
                    ask()


def test_a_local_strategy_saves_where_its_process_says(tmp_path):
    """Absolute paths, URLs and those above are its own."""
    (tmp_path / "here").mkdir()
    with opened("mirrored-1") as strategy, strategy.scope():
        checkpoint = ps.train.Checkpoint(v=ps.Variable(1.0, name="v"))
        for path in (f"{tmp_path}/abs/ckpt", "here/../there/ckpt", f"file://{tmp_path}/url/ckpt"):
            assert checkpoint.restore(checkpoint.save(path)).assert_consumed()


def refused(asynchronous):
    """Saves at an impossible path, trains, and saves again."""
    strategy = ps.ParameterServerStrategy(consistency=ps.Async() if asynchronous else ps.Sync())
    with strategy.scope():
        a = ps.Variable(np.zeros(3), name="a")
    checkpoint = ps.train.Checkpoint(a=a)
    try:
        checkpoint.save("/abs/ckpt")
    except ps.errors.CheckpointError as error:
        say("told", str(error))
    before = strategy.round
    strategy.run(lambda: a.read_value())
    a.assign_add(np.ones(3))
    say("value", a.numpy())
    say("rounds", [ME, strategy.round - before])
    say("saved", checkpoint.save("run/ckpt"))


@pytest.mark.parametrize("asynchronous", [pytest.param(False, marks=pytest.mark.soak), True])
def test_all_processes_are_told_alike(tmp_path, asynchronous):
    """In the same line, also the asynchronous one that saves nothing; then the job goes on, and ends well."""
    with ProcessCluster(refused, tmp_path, (asynchronous,), workers=2) as job, job.server(PS0):
        job.finish()
    (first,), (second,) = (job.said(task, "told") for task in (W0, W1))
    assert first == second
    assert "'/abs/ckpt-1'" in first
    assert (tmp_path / "checkpoints/run/ckpt-1/manifest.json").exists()
