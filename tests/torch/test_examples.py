"""The examples for PyTorch, as their first user runs them: alone, on a cluster, and on from a checkpoint."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed; it comes with paramserver[torch]")

from tests.kit.shell import shell

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ("--ratings", "60000")
STEPS = {"digits_torch": 23, "recommender_torch": 27}
"""Steps of one epoch."""


def run(cwd, name, epochs, *args, cluster=False, resume=False):
    """What an example has printed, and how many steps the job has made then."""
    python = ["psworker", "--standalone", "--ps", "2", "--workers", "2"] if cluster else ["python"]
    command = [*python, str(EXAMPLES / f"{name}.py"), "--epochs", str(epochs), *args, *(["--resume"] if resume else [])]
    done = shell(command, cwd)
    assert done.code == 0, done.err
    assert not done.left
    (steps,) = re.findall(r"after (\d+) steps", done.out)
    return done.out, int(steps)


@pytest.mark.parametrize(
    ("name", "args", "epochs", "least"), [("digits_torch", (), 2, 0.9), ("recommender_torch", SMALL, 4, 0.65)]
)
def test_an_example(tmp_path, name, args, epochs, least):
    """One epoch in one process; the others on two servers and two workers, from its checkpoint."""
    out, steps = run(tmp_path, name, 1, *args)
    assert steps == STEPS[name]
    assert "epoch  1/1" in out
    assert f"saved checkpoint {name}/ckpt-1" in out
    out, steps = run(tmp_path, name, epochs, *args, cluster=True, resume=True)
    assert steps == epochs * STEPS[name]
    assert {int(epoch) for epoch in re.findall(rf"epoch +(\d)/{epochs}", out)} == {*range(2, epochs + 1)}
    (figure,) = re.findall(r"test accuracy (\S+)|test RMSE \S+  AUC (\S+)", out)
    assert float("".join(figure)) > least


@pytest.mark.parametrize("name", STEPS)
def test_an_example_is_short(name):
    """Sixty lines, so that it is read."""
    assert len((EXAMPLES / f"{name}.py").read_text(encoding="utf-8").splitlines()) <= 60


@pytest.mark.soak  # the other way round
@pytest.mark.parametrize(("name", "args"), [("digits_torch", ()), ("recommender_torch", SMALL)])
def test_a_cluster_is_followed_by_one_process(tmp_path, name, args):
    """As above."""
    assert run(tmp_path, name, 1, *args, cluster=True)[1] == STEPS[name]
    assert run(tmp_path, name, 2, *args, resume=True)[1] == 2 * STEPS[name]
