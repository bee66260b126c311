"""Checkpoints that earlier versions have written: one of each format is kept beside this file."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import psclient as ps
from pswire.checkpoint.manifest import FORMAT
from tests.support.strategies import opened

FORMATS = Path(__file__).parent / "formats"
"""Format 1 was written by the version of 2026-11-21, format 2 by that of 2026-11-22, format 3, of two servers,
by that of 2026-11-24."""


@pytest.fixture(autouse=True)
def _root(tmp_path, monkeypatch):
    """Paths of this process and of embedded servers are below a directory of the test."""
    monkeypatch.chdir(tmp_path)


def test_there_is_one_of_each_format():
    """A new format comes with a checkpoint of it, and takes none away."""
    assert sorted(path.name for path in FORMATS.iterdir()) == [str(number) for number in range(1, FORMAT + 1)]


@pytest.mark.parametrize("format", range(1, FORMAT + 1))
@pytest.mark.parametrize("kind", ["embedded-1", "mirrored-1"])
def test_a_checkpoint_of_each_format_is_restored(kind, format):
    """With all its variables, of several dtypes and shapes; and the next save counts on."""
    saved = FORMATS / str(format) / ("run1/ckpt-1" if format == 1 else "run1-1")
    with opened(kind) as strategy:
        root = Path("runs" if kind == "embedded-1" else ".")
        shutil.copytree(saved, root / "ckpt" / "old-1")
        with strategy.scope():
            w = ps.Variable(np.zeros((2, 3), "f4"), name="w")
            b = ps.Variable(np.zeros(2), name="b")
            n = ps.Variable(np.int64(0), name="n")
        checkpoint = ps.train.Checkpoint(w=w, b=b, n=n)
        checkpoint.restore("ckpt/old-1").assert_nontrivial_match().assert_existing_objects_matched()
        assert np.asarray(w).tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
        assert (np.asarray(b).tolist(), int(n), int(checkpoint.save_counter)) == ([0.5, -1.5], 7, 1)
        assert checkpoint.save("ckpt/new") == "ckpt/new-2"
