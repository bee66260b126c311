"""The example of tables that grow, as its first user runs it: it learns what a loop in plain NumPy learns."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.kit.shell import shell

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = str(EXAMPLES / "embeddings.py")
CLUSTER = ("psworker", "--standalone", "--ps", "2", "--workers", "2")
FILES, BATCH, WIDTH = 30, 1024, 16
SMALL = ("--files", str(FILES), "--batch", str(BATCH), "--width", str(WIDTH))


@pytest.fixture(scope="module")
def example():
    """The script, as a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        spec = importlib.util.spec_from_file_location("embeddings", SCRIPT)
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, "embeddings", module)
        spec.loader.exec_module(module)
        yield module


def auc_of(out):
    """The test's figure, said by exactly one process."""
    (found,) = re.findall(r"test AUC (\S+) ", out)
    return float(found)


def sizes_of(out):
    """How many names have rows after each epoch."""
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
def test_a_cluster_learns_what_numpy_learns(example, examples, tmp_path):
    """Two servers, two workers: as good, and as many rows; one process goes on, and what it exports needs no server."""
    script = str(examples / "embeddings.py")
    done = shell([*CLUSTER, script, *SMALL, "--epochs", "1"], tmp_path)
    assert done.code == 0, done.err
    assert not done.left
    auc, _ = plain(example, FILES, 1, BATCH, WIDTH)
    assert abs(auc_of(done.out) - auc) < 0.015
    on = shell(["python", script, *SMALL, "--epochs", "2", "--resume"], tmp_path)
    assert on.code == 0, on.err
    assert re.findall(r"epoch +(\d)/2", on.out) == ["2"]
    auc, sizes = plain(example, FILES, 2, BATCH, WIDTH)
    assert sizes_of(done.out) + sizes_of(on.out) == sizes
    assert sizes[0] < sizes[1]
    assert 0.65 < auc_of(done.out) < auc_of(on.out) < 1
    assert abs(auc_of(on.out) - auc) < 0.015
    found = shell(["python", script, "--query", "append"], tmp_path)
    assert found.code == 0, found.err
    assert f"append: {found.out}" in on.out
    assert len(found.out.split()) == 8


@pytest.mark.soak
def test_make_demo_embeddings(example, tmp_path):
    """All of the library, in less than two minutes: as good as NumPy, with neighbours that make sense."""
    done = shell([*CLUSTER, SCRIPT], tmp_path, seconds=120)
    assert done.code == 0, done.err
    auc, sizes = plain(example, None, 5, 1024, 64)
    assert abs(auc_of(done.out) - auc) < 0.01
    assert auc_of(done.out) > 0.73
    assert sizes_of(done.out) == sizes
    near = {name: words.split() for name, words in re.findall(r"(?m)^(?:\[.*\] )?(\w+): (.*)$", done.out)}
    assert "extend" in near["append"]
    assert "max" in near["min"]
    assert "SOCK_STREAM" in near["socket"]
    assert "__exit__" in near["__enter__"]


def test_names_are_of_code(example):
    """Strings, comments and numbers have none."""
    text = '''
def f(x0, \u00e4):  # a comment, 'quoted
    """A docstring, with "quotes" and \\""" within."""
    return rb"bytes" + 'it\\'s' + r"\\\\" + F"{text}", 0x1F, 1_000, 1e5, {'key': x0}["key"]
'''
    assert [name for name in example.NAME.findall(text) if name] == ["def", "f", "x0", "\u00e4", "return", "x0"]


def test_a_query_says_what_is_missing(example, tmp_path):
    """In one line: the export, or the name in it."""
    with pytest.raises(SystemExit, match=r"there is no file .*; the example writes it"):
        example.neighbours(tmp_path / "none.npz", "append")
    corpus = example.make_corpus([["a", "b", "c", "b"] * 100], 1.0, 0)
    example.write_rows(tmp_path / "some.npz", corpus, corpus.keys[1:][::-1], np.eye(2))
    assert example.neighbours(tmp_path / "some.npz", corpus.names[1]) == corpus.names[2]
    with pytest.raises(SystemExit, match=r"has no row of 'b'"):
        example.neighbours(tmp_path / "some.npz", "b")
