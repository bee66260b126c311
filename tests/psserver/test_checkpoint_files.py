"""A checkpoint's files: the manifest comes last, and goes first."""

from __future__ import annotations

import json

import numpy as np
import pytest

from psserver import checkpoint
from psserver.checkpoint import Frozen, Restored
from pswire.errors import CheckpointError, NoCheckpoint, VariableMismatch
from pswire.log import Position
from pswire.spec import SnapshotOrder, VariableSpec
from pswire.tensor import TensorSpec, spec_of

POSITION = Position(0, 2, 5)
VALUE = np.arange(6, dtype="float32").reshape(2, 3)


def write(root, path="run/ckpt-1", value=VALUE, manifest=""):
    frozen = Frozen(SnapshotOrder(path, (0,)), 0, 7, (POSITION,), {"w": value})
    return checkpoint.write(root, frozen, manifest, np.asarray)


def save(root, path="run/ckpt-1", value=VALUE):
    shard = write(root, path, value)
    tensors = {name: {"file": shard.file} for name, _ in shard.tensors}
    text = json.dumps({"format": 1, "round": 7, "positions": [vars(POSITION)], "tensors": tensors})
    write(root, path, value, text)


def w(value=VALUE):
    return VariableSpec("w", spec_of(value), True)


def test_what_is_saved_is_read(tmp_path):
    """Values and positions come back, by the checkpoint's path or its directory's."""
    save(tmp_path)
    for path in ("run", "run/ckpt-1"):
        restored = Restored.open(tmp_path, path)
        assert restored.positions == (POSITION,)
        np.testing.assert_array_equal(restored.read(w()), VALUE)


def test_the_newest_is_taken(tmp_path):
    """Of several checkpoints in a directory the one whose manifest was written last."""
    save(tmp_path, "run/ckpt-9")
    save(tmp_path, "run/ckpt-10", VALUE + 1)
    np.testing.assert_array_equal(Restored.open(tmp_path, "run").read(w()), VALUE + 1)


def test_without_a_manifest_there_is_no_checkpoint(tmp_path):
    """A directory that a crash left behind is not taken for a checkpoint, nor is a missing one."""
    write(tmp_path)
    for path in ("run", "elsewhere"):
        with pytest.raises(NoCheckpoint, match=r"there is no complete checkpoint in .*; save one first, or train anew"):
            Restored.open(tmp_path, path)


def test_a_checkpoint_that_is_overwritten_is_none(tmp_path):
    """From the first new shard on: a crash before the manifest must not leave a mixture of two saves."""
    save(tmp_path)
    write(tmp_path, value=VALUE + 1)
    with pytest.raises(NoCheckpoint):
        Restored.open(tmp_path, "run")
    save(tmp_path, value=VALUE + 1)
    np.testing.assert_array_equal(Restored.open(tmp_path, "run").read(w()), VALUE + 1)


@pytest.mark.parametrize("path", ["", "/etc", "../up", "a/../../up", "a\0b"])
def test_paths_stay_below_the_root(tmp_path, path):
    """Neither saving nor restoring leaves the directory that the server's operator set."""
    with pytest.raises(CheckpointError, match="no path below"):
        write(tmp_path, path)
    with pytest.raises(CheckpointError, match="no path below"):
        Restored.open(tmp_path, path)


def test_links_do_not_lead_out(tmp_path):
    """Nor does a link that lies below the root."""
    root = tmp_path / "root"
    root.mkdir()
    (root / "link").symlink_to(tmp_path)
    with pytest.raises(CheckpointError, match="through a link"):
        write(root, "link/x")


def test_a_variable_that_is_not_what_was_saved(tmp_path):
    """Another shape, or a name that is not there, is said with both sides."""
    save(tmp_path)
    restored = Restored.open(tmp_path, "run")
    with pytest.raises(VariableMismatch, match=r"has 'w' as float32\[2,3\], not float32\[3\]"):
        restored.read(VariableSpec("w", TensorSpec("float32", (3,)), True))
    with pytest.raises(CheckpointError, match="has no variable 'v'; it has w"):
        restored.read(VariableSpec("v", TensorSpec("float32", (3,)), True))


@pytest.mark.parametrize(
    "manifest", ["{", "[]", '{"format": 2}', '{"format": 1, "tensors": {"w": {"file": "../x"}}, "positions": []}']
)
def test_a_broken_manifest_is_an_error(tmp_path, manifest):
    """It is not taken for a missing one: a job that resumes must not silently start anew."""
    save(tmp_path)
    (tmp_path / "run" / "ckpt-1" / "manifest.json").write_text(manifest)
    with pytest.raises(CheckpointError) as caught:
        Restored.open(tmp_path, "run")
    assert not isinstance(caught.value, NoCheckpoint)
