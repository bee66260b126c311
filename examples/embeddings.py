"""Names of Python code: which are used alike, by vectors in tables that grow with the vocabulary.

    python examples/embeddings.py                                      one process, and a server started for it
    psworker --standalone --ps 2 --workers 2 examples/embeddings.py    a whole cluster on this machine
    python examples/embeddings.py --query append                       neighbours of a name, from what was exported

It reads the standard library of the Python that runs it, and learns by skip-gram with negative sampling: of each name,
which names stand around it, and which do not. Its gradients are written by hand. A row's key is a hash of the name, so
no vocabulary is made. A name has a row from its third occurrence on; most names that occur are rare.
"""

from __future__ import annotations

import argparse
import os
import re
from collections import Counter
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from report import Report, say
from sklearn.metrics import roc_auc_score
from xxhash import xxh3_64_intdigest

import psclient as ps

NAME = re.compile(
    r"""[rbfu]{0,2}(?:'''(?:\\.|[^\\])*?'''|\"""(?:\\.|[^\\])*?\"""|'(?:\\.|[^'\\\n])*'|"(?:\\.|[^"\\\n])*")"""
    r"""|\#[^\n]*|(\b[^\W\d]\w*)""",
    re.DOTALL | re.IGNORECASE,
)
"""Strings and comments, which are passed over, and names: group 1."""

NOT_READ = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "encodings"}
"""Directories that are not of the standard library, not in every Python, or of files that are all alike."""

WINDOW = 2
"""Names before, and names behind, that are a name's contexts."""

PIECE = 200
"""Names of a piece: every tenth is for the test."""

COMMON = 2000
"""Most frequent names, among which neighbours are sought: little is learned of a name that occurs three times."""

SHOWN = ("append", "min", "socket", "__enter__")
"""Names of which neighbours are shown in the end."""


class Corpus(NamedTuple):
    """Windows of names, and all names, the most frequent first, with their keys and numbers."""

    train: dict[str, Any]
    test: dict[str, Any]
    names: list[str]
    keys: Any
    counts: Any


def keys_of(names: list[str]) -> Any:
    """The keys of names, int64: hashes that are the same in each process, and in each Python."""
    return np.array([xxh3_64_intdigest(name.encode()) for name in names], dtype="uint64").view("int64")


def read_names(files: int | None) -> list[list[str]]:
    """The names in each file of the standard library, in order: on one machine all processes read the same."""
    paths = list[Path]()
    for folder, inner, found in os.walk(Path(os.__file__).parent):
        inner[:] = set(inner) - NOT_READ
        paths += [Path(folder, file) for file in found if file.endswith(".py")]
    texts = (path.read_text(encoding="utf-8", errors="replace") for path in sorted(paths)[:files])
    return [list(filter(None, NAME.findall(text))) for text in texts]


def windows_of(pieces: list[Any]) -> dict[str, Any]:
    """Each key of some pieces, (N,), and those around it, (N, 2 WINDOW)."""
    width = 2 * WINDOW + 1
    views = [np.lib.stride_tricks.sliding_window_view(piece, width) for piece in pieces if len(piece) >= width]
    windows = np.concatenate(views)
    return {"name": windows[:, WINDOW].copy(), "around": np.delete(windows, WINDOW, axis=1)}


def make_corpus(texts: list[list[str]], often: float, seed: int) -> Corpus:
    """Windows of names; of a name whose share is above `often` only some stay, as in word2vec."""
    found = Counter(chain.from_iterable(texts)).most_common()
    names, counts = [name for name, _ in found], np.array([count for _, count in found])
    keys, place = keys_of(names), {name: number for number, name in enumerate(names)}
    stays = np.sqrt(often * counts.sum() / counts)
    rng, pieces = np.random.default_rng(seed), list[Any]()
    for text in texts:
        places = np.array([place[name] for name in text], dtype="int64")
        staying = keys[places[rng.random(len(places)) < stays[places]]]
        pieces += [staying[at : at + PIECE] for at in range(0, len(staying), PIECE)]
    test = pieces[::10]
    del pieces[::10]
    return Corpus(windows_of(pieces), windows_of(test), names, keys, counts)


def drawing(corpus: Corpus, noise: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A function that makes of windows examples: each key, and those around it, then `noise` that are drawn."""
    urn = np.repeat(corpus.keys, np.round(corpus.counts**0.75).astype("int64"))

    def draw(windows: dict[str, Any]) -> dict[str, Any]:
        rng = np.random.default_rng(windows["name"].view("uint64"))  # the same in each process, another in each epoch
        drawn = urn[rng.integers(0, len(urn), (len(windows["name"]), noise))]
        return {"name": windows["name"], "others": np.concatenate([windows["around"], drawn], axis=1)}

    return draw


def losses_and_gradients(u: Any, v: Any) -> tuple[Any, Any, Any]:
    """The loss of each example, (N,), and the gradients of their sum by the rows of names and of others.

    Args:
        u: (N, width), the rows of names.
        v: (N, others, width), those of the names around each, then of the drawn ones.
    """
    scores = (v @ u[:, :, None])[:, :, 0]
    losses = np.logaddexp(0, scores).sum(axis=1) - scores[:, : 2 * WINDOW].sum(axis=1)
    d = 1 / (1 + np.exp(-scores))
    d[:, : 2 * WINDOW] -= 1
    return losses, (d[:, None] @ v)[:, 0], d[:, :, None] * u[:, None]


def auc(u: Any, around: Any, elsewhere: Any) -> float:
    """How often a name around another scores above a name around one elsewhere: 1 at best, by chance 0.5.

    Args:
        u: (N, width), the rows of names.
        around, elsewhere: (N, 2 WINDOW, width), the rows of names around them, and around others.
    """
    scores = np.concatenate([(v @ u[:, :, None]).ravel() for v in (around, elsewhere)])
    return float(roc_auc_score(np.arange(len(scores)) < len(scores) // 2, scores))


def write_rows(path: Path, corpus: Corpus, keys: Any, rows: Any) -> None:
    """Writes an exported table for programs that know of no servers: names, the most frequent first, keys and rows."""
    order, has_row = np.argsort(keys), np.isin(corpus.keys, keys)
    places = order[np.searchsorted(keys, corpus.keys[has_row], sorter=order)]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        np.savez(file, names=np.array(corpus.names)[has_row], keys=keys[places], rows=rows[places])


def neighbours(path: Path, name: str, count: int = 8) -> str:
    """The names whose rows have the least angles to that of a name."""
    if not path.is_file():
        raise SystemExit(f"there is no file {path}; the example writes it when it has trained")
    with np.load(path) as saved:
        names, rows = saved["names"], saved["rows"]
    if name not in names:
        raise SystemExit(f"{path} has no row of {name!r}: the standard library has it too seldom, or not at all")
    place = int(np.argmax(names == name))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    nearest = np.argsort(-(rows[:COMMON] @ rows[place]))
    return " ".join(names[nearest[nearest != place][:count]])


def main(args: argparse.Namespace) -> None:
    """Trains, saves a checkpoint after each epoch, tests, and exports."""
    corpus = make_corpus(read_names(args.files), args.often, args.seed)
    strategy = ps.ParameterServerStrategy(args.devices)
    dataset = ps.ArrayDataset(corpus.train).shuffle(args.seed).batch(args.batch).map(drawing(corpus, args.noise))
    with strategy.scope():
        de, uniform = ps.dynamic_embedding, ps.initializers.RandomUniform
        names, others = (
            de.get_variable(name, args.width, initializer=uniform(seed=seed), admission=de.CounterFilter(3))
            for name, seed in (("names", args.seed), ("others", args.seed + 1))
        )
        optimizer = ps.optimizers.Adagrad(args.rate)
        optimizer.build([names, others])
        checkpoint = ps.train.Checkpoint(names=names, others=others, optimizer=optimizer)
        manager = ps.train.CheckpointManager(checkpoint, args.checkpoint, max_to_keep=2)
        if args.resume and manager.restore_or_initialize() is None:
            say(strategy, f"no checkpoint in {args.checkpoint!r} yet: starts anew")
        batches = strategy.experimental_distribute_dataset(dataset)

        def step(batch: Any) -> Any:  # runs on each replica, with its slice
            u, v = names.lookup(batch["name"]), others.lookup(batch["others"])
            losses, by_u, by_v = losses_and_gradients(u.values[u.inverse], v.values[v.inverse])
            # A name may come several times: its gradients count together.
            by_names = ps.IndexedSlices(by_u, batch["name"])
            return losses, [by_names, ps.IndexedSlices(by_v.reshape(-1, args.width), batch["others"].ravel())]

        report = Report(strategy, args.epochs, dataset.batches(0), int(optimizer.iterations))
        with report.bar:
            for epoch in batches.epochs(args.epochs):
                for batch in batches:
                    losses, gradients = strategy.run(step, args=(batch,))
                    # The rows of the next batch come with the answer. Only `float` waits for it, and for the loss.
                    optimizer.apply_gradients(zip(gradients, [names, others], strict=True))
                    loss = strategy.reduce("mean", losses, axis=0)
                    report.step(epoch, int(optimizer.iterations), float(loss))
                size, path = names.size(), manager.save()  # all processes take part
                say(strategy, f"{size} names have rows; saved checkpoint {path}")
        test = corpus.test
        elsewhere = np.random.default_rng(args.seed).permutation(test["around"])
        u, v, w = (
            np.asarray(table.lookup(keys))
            for table, keys in ((names, test["name"]), (others, test["around"]), (others, elsewhere))
        )
        say(strategy, f"test AUC {auc(u, v, w):.3f} after {int(optimizer.iterations)} steps")
        keys, rows = names.export()
        if strategy.is_main_process:  # one does, of all that run the script
            write_rows(args.export, corpus, keys, rows)
            for name in SHOWN:
                print(f"{name}: {neighbours(args.export, name)}", flush=True)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Learns which names of Python code are used alike.")
    parser.add_argument("--query", metavar="NAME", help="trains nothing, and shows a name's neighbours in the export")
    parser.add_argument("--export", type=Path, default="runs/embeddings.npz", help="file [runs/embeddings.npz]")
    parser.add_argument("--files", type=int, help="how many files of the standard library are read [all]")
    parser.add_argument("--epochs", type=int, default=5, help="epochs in all, those before a resume included [5]")
    parser.add_argument("--batch", type=int, default=1024, help="windows of a step, over all replicas [1024]")
    parser.add_argument("--width", type=int, default=64, help="of a row [64]")
    parser.add_argument("--noise", type=int, default=8, help="names that are drawn for each window [8]")
    parser.add_argument("--often", type=float, default=0.01, help="share above which a name is thinned out [0.01]")
    parser.add_argument("--rate", type=float, default=0.2, help="learning rate [0.2]")
    parser.add_argument("--seed", type=int, default=0, help="of first rows, and of the order of data [0]")
    parser.add_argument("--devices", type=lambda text: text.split(","), help="such as cpu:0,cpu:1 [all GPUs, or a CPU]")
    parser.add_argument("--checkpoint", default="embeddings", help="directory below the servers' root [embeddings]")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint, if there is one")
    return parser.parse_args()


if __name__ == "__main__":
    options = parse()
    if options.query is None:
        main(options)
    else:
        print(neighbours(options.export, options.query))
