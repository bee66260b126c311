"""The examples, as their first users run them: whole clusters learn what one process learns, and resume."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import pty
import re
import struct
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from pstesting import forks
from tests.kit.internals import start_server
from tests.kit.shell import PROGRAMS, SECONDS, shell

EXAMPLES = Path(__file__).parents[2] / "examples"
DIGITS = str(EXAMPLES / "digits.py")
STEPS = 23
"""Steps of one epoch: 1437 scans in batches of 64."""


def run(words: list[str], cwd: Path, seconds: float = SECONDS) -> str:
    """What a command printed, which ended well and left nothing."""
    done = shell(words, cwd, seconds)
    assert done.code == 0, done.err
    assert not done.left
    return done.out


def standalone(cwd: Path, *args: str, ps: int = 2, workers: int = 2, seconds: float = SECONDS) -> str:
    return run(["psworker", "--standalone", "--ps", str(ps), "--workers", str(workers), *args], cwd, seconds)


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


@pytest.mark.soak
def test_servers_that_stay_serve_one_job_after_another(tmp_path):
    """A second job on the same servers is not taken for one that comes late to the first: it resumes."""
    process, address = start_server(flags=("--checkpoint-root", str(tmp_path / "there")), until_done=False)
    with process:
        cluster = {"ps": [address], "worker": ["127.0.0.1:1"]}
        config = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}})
        words = ["psworker", DIGITS, "--resume", "--epochs"]
        jobs = [shell([*words, count], tmp_path, TF_CONFIG=config) for count in ("1", "2")]
        assert process.poll() is None
        assert process.stdin
        process.stdin.close()
    assert [(done.code, list(epochs(done.out)), result(done.out)[1]) for done in jobs] == [
        (0, [1], STEPS),
        (0, [2], 2 * STEPS),
    ]
    assert "no checkpoint in 'digits' yet: starts anew" in jobs[0].out
    assert "starts anew" not in jobs[1].out


def on_terminal(words: list[str], cwd: Path, columns: int) -> str:
    """What a command shows on a terminal of that width, up to its end."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    environ = {**os.environ, "TERM": "xterm-256color", "TF_CONFIG": ""}
    command = [*PROGRAMS[words[0]], *words[1:]]
    with forks.Forked[bytes](command, cwd=cwd, env=environ, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                data = os.read(ours, 1 << 16)
            except OSError:  # EIO: nobody has the terminal open any more
                break
            if not data:
                break
            shown += data
        assert process.wait(SECONDS) == 0, shown.decode()
    os.close(ours)
    return shown.decode()


@pytest.mark.soak
@pytest.mark.parametrize(
    "words", [["python"], ["psworker", "--standalone", "--workers", "2"]], ids=["alone", "cluster"]
)
def test_a_terminal_is_shown_one_bar(tmp_path, words):
    """On a terminal there is one progress bar, of the leading process, that fits; under a launcher, too."""
    shown = on_terminal([*words, DIGITS, "--epochs", "3"], tmp_path, 90)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    frames = [part for part in re.split(r"[\r\n]+", plain) if "━" in part]
    states = {
        int(n) for frame in frames for n in re.findall(r"epoch +(\d)/3 +loss \S+ +\d+ steps/s +\S+ [kM]?B/s ", frame)
    }
    assert states == {1, 2, 3}
    assert max(map(len, frames)) < 90
    assert {frame.startswith("[worker 0] ") for frame in frames} == {"--standalone" in words}
    assert "[worker 1]" not in plain
    assert not re.search(r"\[worker 0\] *[\r\n]", plain)
    assert plain.count("test accuracy") == 1


# ---- embeddings.py ----

FILES, BATCH, WIDTH = 30, 1024, 16
FEW_NAMES = ("--files", str(FILES), "--batch", str(BATCH), "--width", str(WIDTH))


@pytest.fixture(scope="module")
def embeddings():
    with loaded("embeddings") as module:
        yield module


def auc_of(out):
    """The test's figure, said by exactly one process."""
    (found,) = re.findall(r"test AUC (\S+) ", out)
    return float(found)


def sizes_of(out):
    return [int(size) for size in re.findall(r"(\d+) names have rows", out)]


def plain(example, files, epochs, batch, width, noise=8, often=0.01, rate=0.2, admission=3):
    """The same model, trained in one process by whole arrays and NumPy alone: its AUC, and its size by epoch."""
    corpus, rng = example.make_corpus(example.read_names(files), often, 0), np.random.default_rng(0)
    order = np.argsort(corpus.keys)
    train, test = (
        {name: order[np.searchsorted(corpus.keys, keys, sorter=order)] for name, keys in windows.items()}
        for windows in (corpus.train, corpus.test)
    )
    draw = example.drawing(corpus._replace(keys=np.arange(len(order))), noise)
    tables = [rng.uniform(-0.05, 0.05, (len(order), width)).astype("float32") for _ in range(2)]
    squares = [np.full_like(table, 0.1) for table in tables]
    occurred, sizes = [np.zeros(len(order), "int64") for _ in tables], []
    for epoch in range(epochs):
        chosen = np.random.default_rng(epoch).permutation(len(train["name"]))
        for at in range(0, len(chosen), batch):
            ids = list(draw({name: of[chosen[at : at + batch]] for name, of in train.items()}).values())
            _, *ds = example.losses_and_gradients(*(table[own] for table, own in zip(tables, ids, strict=True)))
            for table, square, often_seen, own, d in zip(tables, squares, occurred, ids, ds, strict=True):
                g = np.zeros_like(table)
                np.add.at(g, own, d)
                often_seen += np.bincount(own.ravel(), minlength=len(order))
                g[often_seen < admission] = 0
                square += g * g
                table -= rate * g / np.sqrt(square + 1e-7)
        sizes.append(int(np.sum(occurred[0] >= admission)))
    elsewhere = np.random.default_rng(0).permutation(test["around"])
    rows = tables[0][test["name"]], tables[1][test["around"]], tables[1][elsewhere]
    return example.auc(*rows), sizes


@pytest.mark.ci  # that of the recommender has tables as well
def test_a_cluster_learns_embeddings(embeddings, examples, tmp_path):
    """Two servers, two workers: as good, and as many rows; one process goes on, and what it exports needs no server."""
    script = str(examples / "embeddings.py")
    out = standalone(tmp_path, script, *FEW_NAMES, "--epochs", "1")
    auc, _ = plain(embeddings, FILES, 1, BATCH, WIDTH)
    assert abs(auc_of(out) - auc) < 0.015
    on = run(["python", script, *FEW_NAMES, "--epochs", "2", "--resume"], tmp_path)
    assert re.findall(r"epoch +(\d)/2", on) == ["2"]
    auc, sizes = plain(embeddings, FILES, 2, BATCH, WIDTH)
    assert sizes_of(out) + sizes_of(on) == sizes
    assert sizes[0] < sizes[1]
    assert 0.65 < auc_of(out) < auc_of(on) < 1
    assert abs(auc_of(on) - auc) < 0.015
    found = run(["python", script, "--query", "append"], tmp_path)
    assert f"append: {found}" in on
    assert len(found.split()) == 8


@pytest.mark.soak
def test_make_demo_embeddings(embeddings, tmp_path):
    """All of the library, in less than two minutes: as good as NumPy, with neighbours that make sense."""
    out = standalone(tmp_path, str(EXAMPLES / "embeddings.py"), seconds=120)
    auc, sizes = plain(embeddings, None, 5, 1024, 64)
    assert abs(auc_of(out) - auc) < 0.01
    assert auc_of(out) > 0.73
    assert sizes_of(out) == sizes
    near = {name: words.split() for name, words in re.findall(r"(?m)^(?:\[.*\] )?(\w+): (.*)$", out)}
    assert "extend" in near["append"]
    assert "max" in near["min"]
    assert "SOCK_STREAM" in near["socket"]
    assert "__exit__" in near["__enter__"]


def test_names_are_of_code(embeddings):
    """Strings, comments and numbers have none."""
    text = '''
def f(x0, \u00e4):  # a comment, 'quoted
    """A docstring, with "quotes" and \\""" within."""
    return rb"bytes" + 'it\\'s' + r"\\\\" + F"{text}", 0x1F, 1_000, 1e5, {'key': x0}["key"]
'''
    assert [name for name in embeddings.NAME.findall(text) if name] == ["def", "f", "x0", "\u00e4", "return", "x0"]


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


@pytest.mark.soak
def test_make_demo_recommender(tmp_path):
    """At full size, in less than two minutes: as good as NumPy, and better than anything that knows no times."""
    script = str(EXAMPLES / "recommender.py")
    out = standalone(tmp_path, script, seconds=120)
    assert figures(out) == pytest.approx(figures(run(["python", script, "--plain"], tmp_path)), abs=0.003)
    rmse, auc = figures(out)
    (least, most), (least_timeless, most_timeless) = best(out)
    assert least < rmse < least_timeless - 0.01
    assert most_timeless + 0.003 < auc < most


def test_gradients_are_those_of_the_loss(recommender):
    """By small differences, of all tables and weights: half the squared errors, and what keeps rows small."""
    made, rng = recommender.make_ratings(7, 5, 50), np.random.default_rng(1)
    mean, decay, size = 3.0, 0.3, 64
    batch = {"time": made.times.astype("float64"), "rating": made.ratings}
    values = [rng.normal(0, 0.7, value.shape) for value in recommender.first_values(made, 3, 4, 0).values()]

    def loss():
        u, v = values[0][made.users], values[4][made.items]
        errors = recommender.guess(u, v, batch["time"], (values[1:4], values[5:]), mean) - made.ratings
        return (np.sum(errors**2) + decay * (np.sum(u**2) + np.sum(v**2))) / 2 / size

    u, v = values[0][made.users], values[4][made.items]
    _, gradients = recommender.errors_and_gradients(u, v, batch, (values[1:4], values[5:]), mean, decay, size)
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
