"""The example for Keras, as its first user runs it: alone, and on from its checkpoint on a cluster."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.kit.shell import shell

pytest.importorskip("jax", reason="JAX is not installed; it comes with paramserver[jax]")

pytestmark = pytest.mark.skipif(find_spec("keras") is None, reason="Keras is not installed")  # it asks for a backend

SCRIPT = Path(__file__).parents[2] / "examples" / "keras_jax.py"
STEPS = 23
"""Steps of one epoch: 1437 scans in batches of 64."""


def epochs(done):
    """Number, step and accuracy of each epoch; each is said by exactly one process."""
    assert done.code == 0, done.err
    assert not done.left
    found = re.findall(r"epoch (\d+)  step (\d+)  loss \S+  test accuracy (\S+)", done.out)
    return [(int(epoch), int(step), float(accuracy)) for epoch, step, accuracy in found]


def test_it_learns_and_resumes(tmp_path):
    """One epoch in one process; two servers and two workers make the next, from its checkpoint."""
    ((epoch, step, alone),) = epochs(shell(["python", str(SCRIPT), "--epochs", "1"], tmp_path))
    assert (epoch, step) == (1, STEPS)
    command = ["psworker", "--standalone", "--ps", "2", "--workers", "2", str(SCRIPT), "--epochs", "2", "--resume"]
    ((epoch, step, after),) = epochs(shell(command, tmp_path))
    assert (epoch, step) == (2, 2 * STEPS)
    assert 0.8 < alone < after
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_it_is_short():
    """Sixty lines, so that it is read."""
    assert len(SCRIPT.read_text(encoding="utf-8").splitlines()) <= 60
