"""Saving goes on while training does: who waits for it, who is told that it failed, and what a second one does."""

from __future__ import annotations

import contextlib
import resource
import signal
import threading
import uuid
from pathlib import Path

import numpy as np
import pytest

import psclient as ps
from tests.kit.strategies import opened

pytestmark = pytest.mark.usefixtures("in_tmp_path")

AT_ONCE = ps.train.CheckpointOptions(enable_async=False)


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


def counted(strategy):
    with strategy.scope():
        v = ps.Variable(0.0, name="v")
    return v, ps.train.Checkpoint(v=v)


def complete(path):
    return (Path("runs") / path / "manifest.json").exists()


def test_training_goes_on_while_a_checkpoint_is_written():
    """It has the values of the round in which it was asked for."""
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


def test_a_second_save_waits_or_is_refused():
    """As asked; what is refused counts for nothing, and the first is complete all the same."""
    with opened("servers-1x2") as strategy:
        _, checkpoint = counted(strategy)
        refuse = ps.train.CheckpointOptions(if_busy="refuse")
        with held_up(strategy) as go:
            first = checkpoint.save("run/ckpt", refuse)
            with pytest.raises(ps.errors.CheckpointError, match="'run/ckpt-1' is still being written"):
                checkpoint.save("run/ckpt", refuse)
            assert int(checkpoint.save_counter) == 1
            threading.Timer(0.2, go.set).start()
            second = checkpoint.save("run/ckpt")
            assert complete(first)
        checkpoint.sync()
        assert (second, complete(second)) == ("run/ckpt-2", True)
        assert checkpoint.save("run/ckpt", refuse) == "run/ckpt-3"


def test_the_end_waits_for_what_is_written():
    """A strategy that is closed has saved what it was told to save."""
    with opened("servers-1x1") as strategy:
        _, checkpoint = counted(strategy)
        with held_up(strategy) as go:
            path = checkpoint.save("run/ckpt")
            threading.Timer(0.2, go.set).start()
            strategy.close()
            assert complete(path)


@pytest.mark.parametrize("told", ["at once", "by sync", "by the next save", "by a restore"])
def test_a_failure_is_told_once(told):
    """By whatever comes first; then saving goes on."""
    Path("runs").mkdir()
    blocker = Path("runs/run")
    blocker.write_text("no directory")
    with opened("servers-1x1") as strategy:
        _, checkpoint = counted(strategy)
        if told != "at once":
            assert checkpoint.save("run/ckpt") == "run/ckpt-1"
        tell = {
            "at once": lambda: checkpoint.save("run/ckpt", AT_ONCE),
            "by sync": checkpoint.sync,
            "by the next save": lambda: checkpoint.save("run/ckpt"),
            "by a restore": lambda: checkpoint.restore("run/ckpt-1"),
        }
        with pytest.raises(ps.errors.CheckpointError, match="'run/ckpt-1' was not saved"):
            tell[told]()
        blocker.unlink()
        assert checkpoint.save("run/ckpt", AT_ONCE) == "run/ckpt-2"
        assert complete("run/ckpt-2")


def test_a_failure_that_nobody_asks_for_is_raised_at_the_end(caplog):
    """And the process leaves cleanly: what it trained is done."""
    Path("runs").mkdir()
    Path("runs/run").write_text("no directory")
    with (
        pytest.raises(ps.errors.CheckpointError, match="the last checkpoint 'run/ckpt-1' was not saved"),
        opened("servers-1x1") as strategy,
    ):
        counted(strategy)[1].save("run/ckpt")
    assert "does not leave cleanly" not in caplog.text


def test_a_failure_without_servers_is_told_at_once():
    """Nothing is left for later there, and the checkpoint before stays what is newest."""
    with opened("mirrored-1") as strategy:
        _, checkpoint = counted(strategy)
        path = checkpoint.save("run/ckpt")
        Path("run/ckpt-2").write_text("no directory")
        with pytest.raises(ps.errors.CheckpointError, match="'run/ckpt-2' was not saved"):
            checkpoint.save("run/ckpt")
        assert ps.train.latest_checkpoint("run", strategy) == path


@contextlib.contextmanager
def small_files():
    """No file may grow beyond a thousand bytes, as on a full disk."""
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("size", [10, 10_000])
def test_what_cannot_be_replaced_stays(size):
    """A disk that is full when the shard is written, or its manifest, leaves the checkpoint at that path whole."""
    with opened("mirrored-1") as strategy:
        with strategy.scope():
            v = ps.Variable(np.zeros(size), name="v")
        checkpoint = ps.train.Checkpoint(v=v, note=Note())
        checkpoint.write("run/best")
        before = {path.name: path.read_bytes() for path in Path("run/best").iterdir()}
        v.assign(np.ones(size))
        with small_files(), pytest.raises(ps.errors.CheckpointError, match=r"'run/best' was not saved: .*too large"):
            checkpoint.write("run/best")
        assert {path.name: path.read_bytes() for path in Path("run/best").iterdir()} == before
        checkpoint.restore("run/best").assert_consumed()
        assert not v.numpy().any()
        with small_files(), pytest.raises(ps.errors.CheckpointError):
            checkpoint.write("run/better")
        assert sorted(path.name for path in Path("run").iterdir()) == ["best"]
        v.assign(np.ones(size))
        checkpoint.write("run/best")
        assert len(list(Path("run/best").iterdir())) == 2
        checkpoint.restore("run").assert_consumed()
        assert v.numpy().all()


class Note:
    """Makes a manifest longer than a small shard is."""

    def state_dict(self):
        return "x" * 1000

    def load_state_dict(self, state):
        assert state == self.state_dict()


def test_the_rules_of_files_hold_without_servers(tmp_path):
    """What a crash has left goes with the next save, and no link leads anywhere else; absolute paths are fine."""
    with opened("mirrored-1") as strategy:
        _, checkpoint = counted(strategy)
        for _ in range(2):
            checkpoint.save("run/ckpt")
        Path("run/ckpt-1/manifest.json").unlink()
        assert checkpoint.save(f"{tmp_path}/run/ckpt") == f"{tmp_path}/run/ckpt-3"
        assert sorted(path.name for path in Path("run").iterdir()) == ["ckpt-2", "ckpt-3", "latest"]
        (tmp_path / "elsewhere").mkdir()
        Path("run/ckpt-4").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(
            ps.errors.CheckpointError, match=r"'run/ckpt-4' was not saved: 'ckpt-4/.* leaves .* through"
        ):
            checkpoint.save("run/ckpt")
        assert not list((tmp_path / "elsewhere").iterdir())
        with pytest.raises(ps.errors.CheckpointError, match=r"'run/latest': .*choose another one"):
            checkpoint.write("run/latest")
        assert ps.train.latest_checkpoint("run", strategy) == "run/ckpt-3"


def test_a_process_may_save_to_an_object_store():
    """By a URL, without servers; the newest is found there, too."""
    with opened("mirrored-1") as strategy:
        v, checkpoint = counted(strategy)
        v.assign(3.0)
        root = f"memory://{uuid.uuid4()}/run"
        assert checkpoint.save(f"{root}/ckpt") == f"{root}/ckpt-1"
        v.assign(4.0)
        assert checkpoint.restore(root).assert_consumed().path == f"{root}/ckpt-1"
        assert float(v) == 3.0


def test_asynchronous_workers_save_what_their_servers_have():
    """The process that `should_checkpoint` names does so, and restores it."""
    with ps.ParameterServerStrategy(["cpu:0"], consistency=ps.Async()) as strategy:
        v, checkpoint = counted(strategy)
        v.assign(3.0)
        path = checkpoint.save("run/ckpt", ps.train.CheckpointOptions(if_busy="refuse"))
        checkpoint.sync()
        v.assign(4.0)
        checkpoint.restore(path).assert_consumed()
        assert float(v) == 3.0


def test_deterministic_needs_rounds():
    """Asynchronous updates come when they come."""
    with pytest.raises(ps.errors.ConfigError, match="deterministic=True needs rounds"):
        ps.ParameterServerStrategy(consistency=ps.Async(), deterministic=True)


def test_saving_is_no_part_of_a_replica():
    """In replica context it is refused with a word."""
    with opened("servers-1x2") as strategy:
        _, checkpoint = counted(strategy)
        with pytest.raises(RuntimeError, match="save"):
            strategy.run(lambda: checkpoint.save("run/ckpt"))
        assert np.float32(checkpoint.save_counter.numpy()) == 0
