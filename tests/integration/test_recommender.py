"""The example of embeddings, as its first user runs it: it learns what a loop in plain NumPy learns, and resumes."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.shell import shell

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = str(EXAMPLES / "recommender.py")
SMALL = ("--users", "300", "--items", "100", "--ratings", "30000", "--batch", "512")


@pytest.fixture(scope="module")
def example():
    """The script, as a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        spec = importlib.util.spec_from_file_location("recommender", SCRIPT)
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, "recommender", module)
        spec.loader.exec_module(module)
        yield module


def figures(out, who="test"):
    """RMSE and AUC, said by exactly one process."""
    (found,) = re.findall(rf"{who} RMSE (\S+)  AUC (\S+?),? ", out)
    return tuple(map(float, found))


def plain(example, epochs, width=8, rate=0.01, decay=0.02, batch=512):
    """The same model, trained in one process by whole arrays and NumPy alone."""
    train, test = example.split(example.make_ratings(300, 100, 30000), 0)
    mean, rng = float(train.ratings.mean()), np.random.default_rng(0)
    tables = [rng.normal(0, 0.1, (n, width + 1)).astype("float32") for n in (300, 100)]
    moments = [[np.zeros_like(table) for _ in range(2)] for table in tables]
    t = 0
    for epoch in range(epochs):
        order = np.random.default_rng(epoch).permutation(len(train.users))
        for at in range(0, len(order), batch):
            part, t = order[at : at + batch], t + 1
            ids = train.users[part], train.items[part]
            given = (table[own] for table, own in zip(tables, ids, strict=True))
            _, *ds = example.errors_and_gradients(*given, train.ratings[part], mean, decay, len(part))
            for table, (m, s), own, d in zip(tables, moments, ids, ds, strict=True):
                g = np.zeros_like(table)
                np.add.at(g, own, d)
                m += 0.1 * (g - m)
                s += 0.001 * (g * g - s)
                table -= rate * np.sqrt(1 - 0.999**t) / (1 - 0.9**t) * m / (np.sqrt(s) + 1e-7)
    return figures(f"test {example.scores(example.guess(tables[0][test.users], tables[1][test.items], mean), test)} ")


def test_a_cluster_learns_what_numpy_learns(example, tmp_path):
    """Two servers, two workers; and one process goes on from their checkpoint."""
    command = ["psworker", "--standalone", "--ps", "2", "--workers", "2", SCRIPT, *SMALL, "--epochs", "4"]
    done = shell(command, tmp_path)
    assert done.code == 0, done.err
    assert not done.left
    rmse, auc = figures(done.out)
    expected = plain(example, 4)
    assert abs(rmse - expected[0]) < 0.03
    assert abs(auc - expected[1]) < 0.02
    best = figures(done.out, "best")
    assert best[0] < rmse < 1.0
    assert 0.75 < auc < best[1]
    on = shell(["python", SCRIPT, *SMALL, "--epochs", "5", "--resume"], tmp_path)
    assert on.code == 0, on.err
    assert re.findall(r"epoch +(\d)/5", on.out) == ["5"]
    assert figures(on.out)[0] < rmse + 0.02


@pytest.mark.parametrize("form", ["u.data", "ratings.dat", "ratings.csv"])
def test_movielens_files_are_read(example, tmp_path, form):
    """Each by its own separator; users and items are numbered anew."""
    rows, between = [(7, 30, 4.5), (7, 31, 1.0), (90, 30, 3.0)], {"u.data": "\t", "ratings.dat": "::"}.get(form, ",")
    lines = [between.join([str(user), str(item), str(rating), "881250949"]) for user, item, rating in rows]
    path = tmp_path / form
    path.write_text("\n".join(["userId,movieId,rating,timestamp"] * (form == "ratings.csv") + lines))
    found = example.read_ratings(path)
    assert (found.users.tolist(), found.items.tolist(), found.ratings.tolist()) == ([0, 0, 1], [0, 1, 0], [4.5, 1, 3])


@pytest.mark.parametrize("text", ["", "no ratings here", "1 2 3"])
def test_other_files_are_refused(example, tmp_path, text):
    """In one line, that says which they should be."""
    path = tmp_path / "u.data"
    path.write_text(text)
    with pytest.raises(SystemExit, match=r"give u\.data or ratings\.csv"):
        example.read_ratings(path)
    with pytest.raises(SystemExit, match=r"there is no file .*grouplens"):
        example.read_ratings(tmp_path / "none")
