"""The examples for PyTorch, JAX and Keras, as their first user runs them: alone, on a cluster, from a checkpoint."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from pstesting import forks
from tests.kit.shell import shell

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = {"recommender_torch": ("--ratings", "60000"), "dlrm": ("--examples", "30000")}
SECONDS = 600.0
NEEDS = {
    **dict.fromkeys(("digits_torch", "recommender_torch", "dlrm", "local_steps"), "torch"),
    "digits_jax": "jax",
    "keras_jax": "keras",
}
IMPORTS = {
    "torch": ("psclient.torch", "sklearn.datasets", "sklearn.metrics"),
    **dict.fromkeys(("jax", "keras"), ("psclient.jax", "sklearn.datasets", "keras")),
}
"""Modules that examples import, by framework: a new import costs each process four seconds or more."""

STEPS = {"recommender_torch": 27, "dlrm": 14}
"""Steps of one epoch; of the others 23, for 1440 scans in batches of 64."""

SOAK = pytest.mark.soak


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


def run(cwd, name, epochs, options):
    """Trains an example until so many epochs are done; it leaves no process, and no file but its checkpoints.

    Args:
        cwd: where.
        name: the example's.
        epochs: how many.
        options: of "cluster", for two servers and two workers, and "resume", from the checkpoint of the last run.

    Returns:
        Of the last epoch the figure that grows, and its loss, or 0 if that is not said.
    """
    python = ["psworker", "--standalone", "--ps", "2", "--workers", "2"] if "cluster" in options else ["python"]
    more = [*SMALL.get(name, ()), *(["--resume"] if "resume" in options else [])]
    done = shell([*python, str(EXAMPLES / f"{name}.py"), "--epochs", str(epochs), *more], cwd, SECONDS)
    assert done.code == 0, done.err
    assert not done.left
    assert [path.name for path in cwd.iterdir()] == ["runs"]
    *_, steps = re.findall(r"after (\d+) steps|epoch \d+  step (\d+)  loss", done.out)
    assert int("".join(steps)) == epochs * STEPS.get(name, 23)
    first = epochs if "resume" in options else 1
    assert {int(epoch) for epoch in re.findall(r"epoch +(\d+)", done.out)} == {*range(first, epochs + 1)}
    *_, figure = re.findall(r"test accuracy (\S+)|AUC (\S+)", done.out)
    losses = re.findall(r"loss (\S+)  test", done.out)
    return float("".join(figure)), float(losses[-1] if losses else 0)


ALONE, RESUMES, CLUSTER, GOES_ON = (), ("resume",), ("cluster",), ("cluster", "resume")


@pytest.mark.parametrize(
    ("name", "runs", "least"),
    [
        ("digits_torch", [(1, ALONE), (2, GOES_ON)], 0.9),
        ("recommender_torch", [(2, CLUSTER)], 0.65),
        ("dlrm", [(1, CLUSTER)], 0.6),
        ("digits_jax", [(1, ALONE), (1, CLUSTER), (2, RESUMES)], 0.8),
        ("keras_jax", [(1, ALONE), (2, GOES_ON)], 0.8),
        pytest.param("digits_torch", [(1, CLUSTER), (2, RESUMES)], 0.9, marks=SOAK),
        pytest.param("recommender_torch", [(1, ALONE), (2, GOES_ON)], 0.65, marks=SOAK),
        pytest.param("recommender_torch", [(1, CLUSTER), (2, RESUMES)], 0.65, marks=SOAK),
    ],
)
def test_an_example(tmp_path, name, runs, least):
    """Two servers and two workers do what one process does, and each goes on from the other's checkpoint."""
    found = {}
    for epochs, options in runs:
        figures = run(tmp_path, name, epochs, options)
        assert figures == pytest.approx(found.get(epochs, figures), abs=2e-3)
        found[epochs] = figures
    figure, loss = figures
    assert figure > least
    assert loss <= found.get(1, (0, 0))[1]


@pytest.mark.parametrize("name", ["local_steps"])
def test_local_steps_learn(tmp_path, name):
    """Two workers train a small transformer by local steps; what they print has no error in it."""
    python = ["psworker", "--standalone", "--ps", "2", "--workers", "2", str(EXAMPLES / f"{name}.py")]
    flags = "--steps 40 --sync-every 10 --sync-delay 2 --width 16 --batch 8"
    done = shell([*python, *flags.split()], tmp_path, SECONDS)
    assert done.code == 0, done.err
    assert not done.left
    losses = [float(loss) for loss in re.findall(r"step +\d+  loss (\S+)", done.out)]
    assert len(losses) == 4
    assert losses[-1] < losses[0] - 0.5
    assert " 8 exchanges" in done.out


@pytest.mark.parametrize("name", NEEDS)
def test_an_example_is_short(name):
    """Sixty lines, so that it is read."""
    assert len((EXAMPLES / f"{name}.py").read_text(encoding="utf-8").splitlines()) <= 60
