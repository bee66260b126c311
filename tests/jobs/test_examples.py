"""The examples, as their first users run them: whole clusters learn what one process learns, and resume."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from pstesting import forks
from tests.kit.shell import shell

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 23
"""Steps of one epoch: 1437 scans in batches of 64."""


@pytest.fixture
def examples() -> Iterator[Path]:
    """The folder of the examples, whose processes have scikit-learn: to import it takes each of them two seconds."""
    if importlib.util.find_spec("sklearn") is None:
        pytest.skip("scikit-learn is not installed; it comes with paramserver[examples]")
    with forks.having("sklearn.datasets", "sklearn.metrics"):
        yield EXAMPLES


def run(words: list[str], cwd: Path) -> str:
    """What a command printed, which ended well and left nothing."""
    done = shell(words, cwd)
    assert done.code == 0, done.err
    assert not done.left
    return done.out


def standalone(cwd: Path, *args: str, ps: int = 2, workers: int = 2) -> str:
    return run(["psworker", "--standalone", "--ps", str(ps), "--workers", str(workers), *args], cwd)


@contextmanager
def loaded(name: str) -> Iterator[ModuleType]:
    """A file of the examples, as a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        yield module


# ---- digits.py, grain_pipeline.py and coordinator_digits.py ----


def epochs(out: str) -> dict[int, float]:
    """The loss that was shown for each epoch, by its number."""
    return {int(number): float(loss) for number, loss in re.findall(r"epoch +(\d+)/\d+ +loss (\S+)", out)}


def result(out: str) -> tuple[float, int]:
    """Test accuracy, and after how many steps; it is said by exactly one process."""
    (found,) = re.findall(r"test accuracy (\S+) after (\d+) steps", out)
    return float(found[0]), int(found[1])


@pytest.mark.ci  # `make demo` runs this script
def test_a_cluster_learns_digits_and_resumes(examples, tmp_path):
    """Two servers, two workers and a chief reach 0.93, and one process goes on from their checkpoint."""
    digits = str(examples / "digits.py")
    out = standalone(tmp_path, digits, "--epochs", "4", "--save-every", "3")
    assert list(epochs(out)) == [1, 2, 3, 4]
    assert re.search(r"loss \S+ +\d+ steps/s +\S+ [kM]?B/s", out)
    assert re.findall(r"saved checkpoint (\S+)", out) == ["digits/ckpt-1", "digits/ckpt-2"]
    accuracy, steps = result(out)
    assert (accuracy >= 0.93, steps) == (True, 4 * STEPS)
    on = run(["python", digits, "--epochs", "5", "--resume", "--devices", "cpu:0,cpu:1"], tmp_path)
    assert (list(epochs(on)), result(on)[1]) == ([5], 5 * STEPS)
    assert "saved checkpoint digits/ckpt-3" in on
    assert result(on)[0] >= 0.93
    assert [path.name for path in tmp_path.iterdir()] == ["runs"], "a clone ignores nothing else"


def test_a_coordinator_trains_digits(examples, tmp_path):
    """Scheduled steps learn, fetched results are the loss and the accuracy, and all processes end cleanly."""
    script = str(examples / "coordinator_digits.py")
    out = standalone(tmp_path, "--chief-runs-script", script, "--epochs", "2", ps=1)
    losses = epochs(out)
    assert list(losses) == [1, 2]
    assert losses[2] < losses[1] * 0.7
    accuracy, steps = result(out)
    assert (accuracy > 0.6, steps) == (True, 2 * STEPS)


def test_the_first_program_about_the_coordinator(tmp_path):
    """The first program of docs/coordinator.md runs as its command says, and its loss falls."""
    page = (EXAMPLES.parent / "docs" / "coordinator.md").read_text(encoding="utf-8")
    program, command = re.findall(r"^```(?:python|console)\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)[:2]
    (tmp_path / "main.py").write_text(program, encoding="utf-8")
    out = run(command.removeprefix("$ ").split(), tmp_path)
    sizes, losses = zip(*re.findall(r"(\d+) examples, loss (\S+)", out), strict=True)
    assert sizes == ("2500",) * 3
    assert float(losses[2]) < float(losses[0])
    assert (tmp_path / "runs" / "run" / "ckpt-1").is_dir()


@pytest.mark.ci  # to import grain takes longer than to train
def test_a_grain_pipeline_gives_what_one_process_sees(examples, tmp_path):
    """The other example: a fleet's losses are those of one process, random shifts included."""
    pytest.importorskip("grain", reason="grain is not installed; it comes with paramserver[examples]")
    script = str(examples / "grain_pipeline.py")
    fleet = standalone(tmp_path, "--no-chief", script, "--epochs", "2", ps=1)
    alone = run(["python", script, "--epochs", "2"], tmp_path)
    losses = [[float(x) for x in re.findall(r"epoch \d  loss (\S+)", out)] for out in (fleet, alone)]
    assert losses[0] == pytest.approx(losses[1], abs=2e-4)  # four digits are shown
    assert len(losses[0]) == 2
    assert losses[0][1] < 0.8 * losses[0][0]


# ---- embeddings.py ----


@pytest.fixture(scope="module")
def embeddings():
    with loaded("embeddings") as module:
        yield module


@pytest.mark.ci  # that of the recommender is compared with NumPy
def test_a_cluster_learns_embeddings(examples, tmp_path):
    """Two servers, two workers; one process goes on, with more rows, and what it exports needs no server."""
    words = [str(examples / "embeddings.py"), "--files", "30", "--batch", "1024", "--width", "16"]
    out = standalone(tmp_path, *words, "--epochs", "1")
    on = run(["python", *words, "--epochs", "2", "--resume"], tmp_path)
    assert re.findall(r"epoch +(\d)/2", on) == ["2"]
    before, after = (float(*re.findall(r"test AUC (\S+) ", each)) for each in (out, on))
    assert 0.65 < before < after < 1
    few, many = (int(*re.findall(r"(\d+) names have rows", each)) for each in (out, on))
    assert 0 < few < many
    found = run(["python", words[0], "--query", "append"], tmp_path)
    assert f"append: {found}" in on
    assert len(found.split()) == 8


def test_a_query_says_what_is_missing(embeddings, tmp_path):
    """In one line: the export, or the name in it."""
    with pytest.raises(SystemExit, match=r"there is no file .*; the example writes it"):
        embeddings.neighbours(tmp_path / "none.npz", "append")
    corpus = embeddings.make_corpus([["a", "b", "c", "b"] * 100], 1.0, 0)
    embeddings.write_rows(tmp_path / "some.npz", corpus, corpus.keys[1:][::-1], np.eye(2))
    assert embeddings.neighbours(tmp_path / "some.npz", corpus.names[1]) == corpus.names[2]
    with pytest.raises(SystemExit, match=r"has no row of 'b'"):
        embeddings.neighbours(tmp_path / "some.npz", "b")


# ---- recommender.py ----

FEW_RATINGS = ("--users", "100", "--items", "40", "--ratings", "8000", "--batch", "512", "--rate", "0.05")


@pytest.fixture(scope="module")
def ratings():
    with loaded("ratings") as module:
        yield module


@pytest.fixture(scope="module")
def recommender(ratings):
    with loaded("recommender") as module:
        yield module


def figures(out, what=r"test RMSE (\S+)  AUC (\S+) after"):
    """RMSE and AUC, said by exactly one process."""
    (found,) = re.findall(what, out)
    return tuple(map(float, found))


def best(out):
    """The best that can be reached, and the best without times."""
    whose = r"best RMSE (\S+)  AUC (\S+), by", r"best RMSE (\S+)  AUC (\S+) of guesses"
    return [figures(out, what) for what in whose]


def losses(out):
    return np.array([float(loss) for loss in re.findall(r"epoch .*  loss (\S+)", out)])


@pytest.mark.ci  # `make demo-recommender`, compared step by step
def test_a_cluster_learns_what_numpy_learns(recommender, examples, tmp_path, monkeypatch, capsys):
    """Two servers, two workers, step by step as NumPy alone; and one process goes on from their checkpoint."""
    script = str(examples / "recommender.py")
    out = standalone(tmp_path, script, *FEW_RATINGS, "--epochs", "3")
    monkeypatch.setattr(sys, "argv", [script, *FEW_RATINGS, "--epochs", "3", "--plain"])
    recommender.main(recommender.parse())
    plain = capsys.readouterr().out
    assert figures(out) == pytest.approx(figures(plain), abs=0.005)
    assert losses(out) == pytest.approx(losses(plain), abs=0.005)
    assert best(out) == best(plain)
    rmse, auc = figures(out)
    (least, most), _ = best(out)
    assert least < rmse < 0.72
    assert 0.8 < auc < most
    on = run(["python", script, *FEW_RATINGS, "--epochs", "4", "--resume"], tmp_path)
    assert re.findall(r"epoch +(\d)/4", on) == ["4"]
    assert figures(on)[0] < rmse + 0.01
    assert losses(on)[0] < losses(out)[-1]


@pytest.mark.parametrize("form", ["u.data", "ratings.dat", "ratings.csv"])
def test_movielens_files_are_read(ratings, tmp_path, form):
    """Each by its own separator; users and items are numbered anew, and times go from -1 to 1. Others are refused."""
    rows = [(7, 30, 4.5, 881250949), (7, 31, 1.0, 881250969), (90, 30, 3.0, 881250959)]
    between = {"u.data": "\t", "ratings.dat": "::"}.get(form, ",")
    lines = [between.join(map(str, row)) for row in rows]
    path = tmp_path / form
    path.write_text("\n".join(["userId,movieId,rating,timestamp"] * (form == "ratings.csv") + lines))
    found = ratings.read_ratings(path)
    assert (found.users.tolist(), found.items.tolist(), found.ratings.tolist()) == ([0, 0, 1], [0, 1, 0], [4.5, 1, 3])
    assert found.times.tolist() == [-1, 1, 0]
    assert found.best is found.timeless is None
    for text in ("", "no ratings here", "1 2 3", "1\t2\t3"):
        path.write_text(text)
        with pytest.raises(SystemExit, match=r"give u\.data or ratings\.csv"):
            ratings.read_ratings(path)
    with pytest.raises(SystemExit, match=r"there is no file .*grouplens"):
        ratings.read_ratings(tmp_path / "none")
