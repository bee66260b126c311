"""The example of embeddings, as its first user runs it: it learns what NumPy learns without servers, and resumes."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.kit.shell import shell

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = str(EXAMPLES / "recommender.py")
CLUSTER = ("psworker", "--standalone", "--ps", "2", "--workers", "2")
SMALL = ("--users", "100", "--items", "40", "--ratings", "8000", "--batch", "512", "--rate", "0.05")


def load(name, patch):
    """A file of the examples, as a module."""
    patch.syspath_prepend(str(EXAMPLES))
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    patch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def ratings():
    """What makes and reads ratings."""
    with pytest.MonkeyPatch.context() as patch:
        yield load("ratings", patch)


@pytest.fixture(scope="module")
def example(ratings):
    """The script, as a module."""
    with pytest.MonkeyPatch.context() as patch:
        yield load("recommender", patch)


def figures(out, what=r"test RMSE (\S+)  AUC (\S+) after"):
    """RMSE and AUC, said by exactly one process."""
    (found,) = re.findall(what, out)
    return tuple(map(float, found))


def best(out):
    """The best that can be reached, and the best without times."""
    whose = r"best RMSE (\S+)  AUC (\S+), by", r"best RMSE (\S+)  AUC (\S+) of guesses"
    return [figures(out, what) for what in whose]


def losses(out):
    """The loss of each epoch."""
    return np.array([float(loss) for loss in re.findall(r"epoch .*  loss (\S+)", out)])


def run(command, cwd, seconds=120):
    """What it printed."""
    done = shell(command, cwd, seconds)
    assert done.code == 0, done.err
    assert not done.left
    return done.out


def test_a_cluster_learns_what_numpy_learns(example, examples, tmp_path, monkeypatch, capsys):
    """Two servers, two workers, step by step as NumPy alone; and one process goes on from their checkpoint."""
    script = str(examples / "recommender.py")
    out = run([*CLUSTER, script, *SMALL, "--epochs", "3"], tmp_path)
    monkeypatch.setattr(sys, "argv", [SCRIPT, *SMALL, "--epochs", "3", "--plain"])
    example.main(example.parse())
    plain = capsys.readouterr().out
    assert figures(out) == pytest.approx(figures(plain), abs=0.005)
    assert losses(out) == pytest.approx(losses(plain), abs=0.005)
    assert best(out) == best(plain)
    rmse, auc = figures(out)
    (least, most), _ = best(out)
    assert least < rmse < 0.72
    assert 0.8 < auc < most
    on = run(["python", script, *SMALL, "--epochs", "4", "--resume"], tmp_path)
    assert re.findall(r"epoch +(\d)/4", on) == ["4"]
    assert figures(on)[0] < rmse + 0.01
    assert losses(on)[0] < losses(out)[-1]


@pytest.mark.soak
def test_make_demo_recommender(tmp_path):
    """At full size, in less than two minutes: as good as NumPy, and better than anything that knows no times."""
    out = run([*CLUSTER, SCRIPT], tmp_path)
    assert figures(out) == pytest.approx(figures(run(["python", SCRIPT, "--plain"], tmp_path)), abs=0.003)
    rmse, auc = figures(out)
    (least, most), (least_timeless, most_timeless) = best(out)
    assert least < rmse < least_timeless - 0.01
    assert most_timeless + 0.003 < auc < most


def test_gradients_are_those_of_the_loss(example):
    """By small differences, of all tables and weights: half the squared errors, and what keeps rows small."""
    made, rng = example.make_ratings(7, 5, 50), np.random.default_rng(1)
    mean, decay, size = 3.0, 0.3, 64
    batch = {"time": made.times.astype("float64"), "rating": made.ratings}
    values = [rng.normal(0, 0.7, value.shape) for value in example.first_values(made, 3, 4, 0).values()]

    def loss():
        u, v = values[0][made.users], values[4][made.items]
        errors = example.guess(u, v, batch["time"], (values[1:4], values[5:]), mean) - made.ratings
        return (np.sum(errors**2) + decay * (np.sum(u**2) + np.sum(v**2))) / 2 / size

    u, v = values[0][made.users], values[4][made.items]
    _, gradients = example.errors_and_gradients(u, v, batch, (values[1:4], values[5:]), mean, decay, size)
    for place, ids in ((0, made.users), (4, made.items)):
        by_rows, gradients[place] = gradients[place], np.zeros_like(values[place])
        np.add.at(gradients[place], ids, by_rows)
    for value, gradient in zip(values, gradients, strict=True):
        for at in np.ndindex(value.shape):
            value[at] += 1e-6
            above = loss()
            value[at] -= 2e-6
            below = loss()
            value[at] += 1e-6
            assert gradient[at] == pytest.approx((above - below) / 2e-6, abs=1e-6)


def test_the_best_guess_is_the_mean_of_what_is_rated(ratings):
    """Wherever it is, near the limits too; without the times as well, but then more is left to chance."""
    made = ratings.make_ratings(200, 100, 100_000, seed=3)
    for guess in (made.best, made.timeless):
        for part in np.array_split(np.argsort(guess), 20):
            left = made.ratings[part] - guess[part]
            assert abs(left.mean()) < 4 * left.std() / np.sqrt(len(part))
    assert np.square(made.ratings - made.best).mean() < 0.9 * np.square(made.ratings - made.timeless).mean()
    assert ((made.best > 0.5) & (made.best < 5)).all()


@pytest.mark.parametrize("form", ["u.data", "ratings.dat", "ratings.csv"])
def test_movielens_files_are_read(ratings, tmp_path, form):
    """Each by its own separator; users and items are numbered anew, and times go from -1 to 1."""
    rows = [(7, 30, 4.5, 881250949), (7, 31, 1.0, 881250969), (90, 30, 3.0, 881250959)]
    between = {"u.data": "\t", "ratings.dat": "::"}.get(form, ",")
    lines = [between.join(map(str, row)) for row in rows]
    path = tmp_path / form
    path.write_text("\n".join(["userId,movieId,rating,timestamp"] * (form == "ratings.csv") + lines))
    found = ratings.read_ratings(path)
    assert (found.users.tolist(), found.items.tolist(), found.ratings.tolist()) == ([0, 0, 1], [0, 1, 0], [4.5, 1, 3])
    assert found.times.tolist() == [-1, 1, 0]
    assert found.best is found.timeless is None


@pytest.mark.parametrize("text", ["", "no ratings here", "1 2 3", "1\t2\t3"])
def test_other_files_are_refused(ratings, tmp_path, text):
    """In one line, that says which they should be."""
    path = tmp_path / "u.data"
    path.write_text(text)
    with pytest.raises(SystemExit, match=r"give u\.data or ratings\.csv"):
        ratings.read_ratings(path)
    with pytest.raises(SystemExit, match=r"there is no file .*grouplens"):
        ratings.read_ratings(tmp_path / "none")
