"""The examples for PyTorch, JAX and Keras, as their first user runs them: alone, on a cluster, from a checkpoint."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from pstesting import forks
from tests.kit.shell import shell

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ("--ratings", "60000")
SECONDS = 600.0
NEEDS = {"digits_torch": "torch", "recommender_torch": "torch", "digits_jax": "jax", "keras_jax": "keras"}
IMPORTS = {
    "torch": ("psclient.torch", "sklearn.datasets", "sklearn.metrics"),
    **dict.fromkeys(("jax", "keras"), ("psclient.jax", "sklearn.datasets", "keras")),
}
"""Modules that examples import, by framework: a new import costs each process four seconds or more."""

STEPS = {"recommender_torch": 27}
"""Steps of one epoch; of the others 23, for 1440 scans in batches of 64."""


@pytest.fixture(autouse=True, scope="module")
def _compiled_once(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        patch.setenv("KERAS_BACKEND", "jax")
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # these would take longer than the steps
        yield


@pytest.fixture(autouse=True)
def _imported_once(request, _compiled_once):
    needed = NEEDS[request.node.callspec.params["name"]]
    if find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    with forks.having(*(name for name in IMPORTS[needed] if find_spec(name.split(".")[0]))):
        yield


def run(cwd, name, epochs, *args, cluster=False, resume=False):
    """Returns the output of an example, which leaves no process, and no file but its checkpoints."""
    python = ["psworker", "--standalone", "--ps", "2", "--workers", "2"] if cluster else ["python"]
    command = [*python, str(EXAMPLES / f"{name}.py"), "--epochs", str(epochs), *args, *(["--resume"] if resume else [])]
    done = shell(command, cwd, SECONDS)
    assert done.code == 0, done.err
    assert not done.left
    assert [path.name for path in cwd.iterdir()] == ["runs"]
    return done.out


def steps_of(out):
    (steps,) = re.findall(r"after (\d+) steps", out)
    return int(steps)


@pytest.mark.parametrize(
    ("name", "args", "alone", "epochs", "least"),
    [
        ("digits_torch", (), 1, 2, 0.9),
        ("recommender_torch", SMALL, 0, 2, 0.65),
        pytest.param("recommender_torch", SMALL, 1, 4, 0.65, marks=pytest.mark.soak),
    ],
)
def test_an_example_of_torch(tmp_path, name, args, alone, epochs, least):
    """One epoch in one process; the others on two servers and two workers, from its checkpoint."""
    one = STEPS.get(name, 23)
    if alone:
        out = run(tmp_path, name, alone, *args)
        assert steps_of(out) == one
        assert "epoch  1/1" in out
        assert f"saved checkpoint {name}/ckpt-1" in out
    out = run(tmp_path, name, epochs, *args, cluster=True, resume=bool(alone))
    assert steps_of(out) == epochs * one
    assert {int(epoch) for epoch in re.findall(rf"epoch +(\d)/{epochs}", out)} == {*range(alone + 1, epochs + 1)}
    (figure,) = re.findall(r"test accuracy (\S+)|test RMSE \S+  AUC (\S+)", out)
    assert float("".join(figure)) > least


@pytest.mark.soak  # the other way round
@pytest.mark.parametrize(("name", "args"), [("digits_torch", ()), ("recommender_torch", SMALL)])
def test_a_cluster_is_followed_by_one_process(tmp_path, name, args):
    one = STEPS.get(name, 23)
    assert steps_of(run(tmp_path, name, 1, *args, cluster=True)) == one
    assert steps_of(run(tmp_path, name, 2, *args, resume=True)) == 2 * one


def epochs_of(out):
    """Number, step, loss and accuracy of each epoch; each is said by exactly one process."""
    found = re.findall(r"epoch (\d+)  step (\d+)  loss (\S+)  test accuracy (\S+)", out)
    return [(int(epoch), int(step), float(loss), float(accuracy)) for epoch, step, loss, accuracy in found]


@pytest.mark.parametrize("name", ["digits_jax"])
def test_a_cluster_does_what_one_process_does_and_resumes(tmp_path, name):
    """Two servers and two workers reach the loss of one process, and one goes on from their checkpoint."""
    alone = epochs_of(run(tmp_path, name, 1))
    assert [each[:2] for each in alone] == [(1, 23)]
    assert epochs_of(run(tmp_path, name, 1, cluster=True)) == [pytest.approx(each, abs=2e-3) for each in alone]
    on = epochs_of(run(tmp_path, name, 2, resume=True))
    assert [each[:2] for each in on] == [(2, 46)]
    assert on[0][2] < alone[0][2] / 2
    assert on[0][3] > 0.8


@pytest.mark.parametrize("name", ["keras_jax"])
def test_keras_learns_and_resumes(tmp_path, name):
    """One epoch in one process; two servers and two workers make the next, from its checkpoint."""
    ((epoch, step, _, alone),) = epochs_of(run(tmp_path, name, 1))
    assert (epoch, step) == (1, 23)
    ((epoch, step, _, after),) = epochs_of(run(tmp_path, name, 2, cluster=True, resume=True))
    assert (epoch, step) == (2, 46)
    assert 0.8 < alone < after


@pytest.mark.parametrize("name", NEEDS)
def test_an_example_is_short(name):
    """Sixty lines, so that it is read."""
    assert len((EXAMPLES / f"{name}.py").read_text(encoding="utf-8").splitlines()) <= 60
