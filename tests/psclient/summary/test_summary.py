"""Summaries: what is in the event files, and who writes there."""

from __future__ import annotations

import sys

import numpy as np
import pytest

import psclient as ps
from tests.kit.telemetry import scalars


def test_numbers_are_in_the_event_file(tmp_path):
    """Python's, NumPy's and variables', with their steps, as soon as the default ends."""
    writer = ps.summary.create_file_writer(str(tmp_path))
    loss = ps.Variable(np.float32(0.25), name="loss")
    with writer.as_default():
        assert ps.summary.scalar("loss", 0.5, 1)
        assert ps.summary.scalar("loss", np.float64(0.125), step=2)
        assert ps.summary.scalar("loss", loss, step=np.int64(3))
    assert scalars(tmp_path) == [("loss", 1, 0.5), ("loss", 2, 0.125), ("loss", 3, 0.25)]
    writer.close()


def test_a_default_step_is_that_of_every_scalar(tmp_path):
    """Unless one has its own; without either it is an error that says what to write."""
    writer = ps.summary.create_file_writer(str(tmp_path))
    with writer.as_default(step=7):
        ps.summary.scalar("a", 1.0)
        ps.summary.scalar("b", 2.0, step=8)
    with writer.as_default(), pytest.raises(ValueError, match=r"scalar\('c'\) needs a step; write scalar\(name, data"):
        ps.summary.scalar("c", 3.0)
    writer.close()
    assert scalars(tmp_path) == [("a", 7, 1.0), ("b", 8, 2.0)]


def test_an_array_is_no_scalar(tmp_path):
    """It is refused with its shape, as is text."""
    writer = ps.summary.create_file_writer(str(tmp_path))
    with writer.as_default(step=0):
        with pytest.raises(ValueError, match=r"takes one number, not an array of shape \(3,\); reduce it first"):
            ps.summary.scalar("a", np.zeros(3))
        with pytest.raises(ValueError, match="could not convert"):
            ps.summary.scalar("a", "text")
    writer.close()
    assert scalars(tmp_path) == []


def test_without_a_writer_nothing_is_written(tmp_path):
    """Outside of every default, with a writer that writes nothing, and after the end of one."""
    assert not ps.summary.scalar("a", 1.0, step=0)
    with ps.summary.create_noop_writer().as_default():
        assert not ps.summary.scalar("a", 1.0, step=0)
        ps.summary.flush()
    closed = ps.summary.create_file_writer(str(tmp_path))
    closed.close()
    closed.close()
    with closed.as_default():
        assert not ps.summary.scalar("a", 1.0, step=0)


def test_the_innermost_writer_is_the_default(tmp_path):
    """The outer one is again when it ends."""
    outer, inner = (ps.summary.create_file_writer(str(tmp_path / name)) for name in ("outer", "inner"))
    with outer.as_default(step=0):
        with inner.as_default(step=1):
            ps.summary.scalar("a", 1.0)
        ps.summary.scalar("a", 2.0)
        ps.summary.flush()
        assert scalars(tmp_path / "outer") == [("a", 0, 2.0)]
    outer.close()
    inner.close()
    assert scalars(tmp_path / "inner") == [("a", 1, 1.0)]


@pytest.mark.parametrize("keys", [{"max_queue": 2}, {"max_queue": 100, "flush_millis": 0}])
def test_a_full_queue_is_written(tmp_path, keys):
    """Without a flush: after so many summaries, or so long."""
    writer = ps.summary.create_file_writer(str(tmp_path), **keys)
    with writer.as_default():
        ps.summary.scalar("a", 1.0, step=0)
        ps.summary.scalar("a", 2.0, step=1)
        assert scalars(tmp_path) == [("a", 0, 1.0), ("a", 1, 2.0)]
    writer.close()


def test_of_the_replicas_the_first_writes(tmp_path):
    """What every replica reports is in the file once."""
    strategy = ps.MirroredStrategy(["cpu:0", "cpu:1"])
    writer = ps.summary.create_file_writer(str(tmp_path))

    def step():
        replica = ps.get_replica_context().replica_id_in_sync_group
        return ps.summary.scalar("replica", float(replica), step=0)

    with strategy.scope(), writer.as_default():
        written = strategy.experimental_local_results(strategy.run(step))
    strategy.close()
    writer.close()
    assert written == (True, False)
    assert scalars(tmp_path) == [("replica", 0, 0.0)]


def test_without_tensorboardx_one_is_told(tmp_path, monkeypatch):
    """What to install, and how to do without."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "tensorboardX"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        ModuleNotFoundError, match=r"pip install 'paramserver\[summary\]', or take ps.summary.create_noop"
    ):
        ps.summary.create_file_writer(str(tmp_path))
