"""The example, as its first user runs it: alone, on a cluster, and on from a checkpoint."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.kit.shell import shell

pytest.importorskip("jax", reason="JAX is not installed; it comes with paramserver[jax]")

SCRIPT = Path(__file__).parents[2] / "examples" / "digits_jax.py"
STEPS = 23
"""Steps of one epoch: 1440 scans in batches of 64."""


def epochs(done):
    """Number, step, loss and accuracy of each epoch; each is said by exactly one process."""
    assert done.code == 0, done.err
    found = re.findall(r"epoch (\d+)  step (\d+)  loss (\S+)  test accuracy (\S+)", done.out)
    return [(int(epoch), int(step), float(loss), float(accuracy)) for epoch, step, loss, accuracy in found]


def test_a_cluster_does_what_one_process_does_and_resumes(tmp_path):
    """Two servers and two workers reach the loss of one process, and one goes on from their checkpoint."""
    alone = epochs(shell(["python", str(SCRIPT), "--epochs", "1"], tmp_path))
    command = ["psworker", "--standalone", "--ps", "2", "--workers", "2", str(SCRIPT), "--epochs", "1"]
    done = shell(command, tmp_path)
    assert not done.left
    assert [each[:2] for each in alone] == [(1, STEPS)]
    assert epochs(done) == [pytest.approx(each, abs=2e-3) for each in alone]
    on = epochs(shell(["python", str(SCRIPT), "--epochs", "2", "--resume"], tmp_path))
    assert [each[:2] for each in on] == [(2, 2 * STEPS)]
    assert on[0][2] < alone[0][2] / 2
    assert on[0][3] > 0.8
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_it_is_short():
    """Sixty lines, so that it is read."""
    assert len(SCRIPT.read_text(encoding="utf-8").splitlines()) <= 60
