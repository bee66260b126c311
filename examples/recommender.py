"""Ratings: who likes what, by embeddings of users and items on parameter servers, their gradients written by hand.

    python examples/recommender.py                                      one process, and a server started for it
    psworker --standalone --ps 2 --workers 2 examples/recommender.py    a whole cluster on this machine
    python examples/recommender.py --data ml-100k/u.data                MovieLens's ratings, from grouplens.org

Each user and each item has a row of a table: a vector, and a number that says how high its ratings are. A rating is
their product and both numbers. A step touches the rows of its batch: gradients of these alone travel, and the rows of
the next batch come back with the answer. Without `--data` ratings are made, so that the best result is known.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from report import Report, say
from sklearn.metrics import roc_auc_score

import psclient as ps

LIKED = 4.0
"""A rating from which on somebody likes something: what the AUC is about."""


class Ratings(NamedTuple):
    """Ratings, and where they are made, the best guess of each: nobody can know more."""

    users: Any
    items: Any
    ratings: Any
    best: Any = None


def make_ratings(users: int, items: int, count: int, seed: int = 0) -> Ratings:
    """Ratings from 0.5 to 5 in halves: tastes of eight dimensions, and noise; items are as popular as Zipf says."""
    rng = np.random.default_rng(seed)
    tastes, traits = rng.normal(0, 0.4, (users, 8)), rng.normal(0, 0.8, (items, 8))
    kind, good = rng.normal(0, 0.3, users), rng.normal(0, 0.4, items)
    popular = np.arange(1, items + 1) ** -0.8
    who, what = rng.integers(0, users, count), rng.choice(items, count, p=popular / popular.sum())
    mean = 3.3 + kind[who] + good[what] + np.sum(tastes[who] * traits[what], axis=1)
    rated = np.clip(np.round(2 * (mean + rng.normal(0, 0.6, count))) / 2, 0.5, 5)
    return Ratings(who, what, rated.astype("float32"), np.clip(mean, 0.5, 5))


def read_ratings(path: Path) -> Ratings:
    """MovieLens's files: `u.data` (tabs), `ratings.dat` (::) or `ratings.csv` (commas, and a line with names)."""
    if not path.is_file():
        raise SystemExit(
            f"there is no file {path}; MovieLens's ratings are at https://grouplens.org/datasets/movielens"
        )
    lines = [line.replace("::", "\t").replace(",", "\t").split("\t") for line in path.read_text().splitlines()]
    rows = [line[:3] for line in lines if line[0].isdigit()]
    if not rows or any(len(row) < 3 for row in rows):
        raise SystemExit(f"{path} has no lines with a user, an item and a rating; give u.data or ratings.csv")
    table = np.array(rows, dtype="float64")
    who, what = (np.unique(table[:, column], return_inverse=True)[1] for column in (0, 1))
    return Ratings(who, what, table[:, 2].astype("float32"))


def split(ratings: Ratings, seed: int) -> tuple[Ratings, Ratings]:
    """Nine tenths to train on, and one to test."""
    order = np.random.default_rng(seed).permutation(len(ratings.users))
    cut = len(order) // 10
    parts = [[None if one is None else one[part] for one in ratings] for part in (order[cut:], order[:cut])]
    return Ratings(*parts[0]), Ratings(*parts[1])


def guess(u: Any, v: Any, mean: float) -> Any:
    """The ratings, (N,), by the users' and the items' rows, (N, width + 1)."""
    return mean + u[:, -1] + v[:, -1] + np.sum(u[:, :-1] * v[:, :-1], axis=1)


def errors_and_gradients(u: Any, v: Any, ratings: Any, mean: float, decay: float, batch: int) -> tuple[Any, Any, Any]:
    """The errors, (N,), and the gradients of their squares by both rows; summed over all, a mean over `batch`."""
    errors = guess(u, v, mean) - ratings
    d = (errors / batch)[:, None]
    by_u, by_v = (np.concatenate([d * other[:, :-1], d], axis=1) for other in (v, u))
    return errors, by_u + decay / batch * u, by_v + decay / batch * v


def of_rows(rows: Any, gradient: Any) -> ps.IndexedSlices:
    """The gradient of a table, by that of the row of each example."""
    d = np.zeros_like(rows.values)
    np.add.at(d, rows.inverse, gradient)
    gradient_of_rows: ps.IndexedSlices = rows.gradient(d)
    return gradient_of_rows


def scores(guesses: Any, test: Ratings) -> str:
    """RMSE, and the AUC of who likes what."""
    rmse = np.sqrt(np.mean((np.clip(guesses, 0.5, 5) - test.ratings) ** 2))
    return f"RMSE {rmse:.3f}  AUC {roc_auc_score(test.ratings >= LIKED, guesses):.3f}"


def main(args: argparse.Namespace) -> None:
    """Trains, saves a checkpoint, and tests."""
    everything = read_ratings(args.data) if args.data else make_ratings(args.users, args.items, args.ratings)
    train, test = split(everything, args.seed)
    mean = float(train.ratings.mean())
    strategy = ps.ParameterServerStrategy(args.devices)
    dataset = ps.ArrayDataset({"user": train.users, "item": train.items, "rating": train.ratings})
    dataset = dataset.shuffle(args.seed).batch(args.batch)
    with strategy.scope():
        rng = np.random.default_rng(args.seed)
        sizes = {"users": int(everything.users.max()) + 1, "items": int(everything.items.max()) + 1}
        first = {name: rng.normal(0, 0.1, (n, args.width + 1)).astype("float32") for name, n in sizes.items()}
        users, items = (ps.Variable(value, name=name) for name, value in first.items())
        optimizer = ps.optimizers.Adam(args.rate)
        optimizer.build([users, items])
        checkpoint = ps.train.Checkpoint(users=users, items=items, optimizer=optimizer)
        if args.resume:
            try:
                checkpoint.restore(args.checkpoint).assert_consumed()
            except ps.errors.NoCheckpoint:
                say(strategy, f"no checkpoint in {args.checkpoint!r} yet: starts anew")
        lookups = {users: lambda batch: batch["user"], items: lambda batch: batch["item"]}
        batches = strategy.experimental_distribute_dataset(dataset, ps.InputOptions(lookups=lookups))

        def step(batch: Any) -> Any:  # runs on each replica, with its slice
            u, v = users.lookup(batch["user"]), items.lookup(batch["item"])
            rows = u.values[u.inverse], v.values[v.inverse]
            errors, by_u, by_v = errors_and_gradients(*rows, batch["rating"], mean, args.decay, args.batch)
            return np.square(errors), [of_rows(u, by_u), of_rows(v, by_v)]

        report = Report(strategy, args.epochs, dataset.batches(0), int(optimizer.iterations))
        with report.bar:
            for epoch in batches.epochs(args.epochs):
                for batch in batches:
                    losses, gradients = strategy.run(step, args=(batch,))
                    # The rows of the next batch come with the answer. Only `float` waits for it, and for the loss.
                    optimizer.apply_gradients(zip(gradients, [users, items], strict=True))
                    loss = strategy.reduce("mean", losses, axis=0)
                    report.step(epoch, int(optimizer.iterations), float(loss))
            say(strategy, f"saved checkpoint {checkpoint.save(f'{args.checkpoint}/ckpt')}")
        guesses = guess(users.numpy()[test.users], items.numpy()[test.items], mean)
        say(strategy, f"test {scores(guesses, test)} after {int(optimizer.iterations)} steps")
        if test.best is not None:
            say(strategy, f"best {scores(test.best, test)}, by who made the ratings")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Learns who likes what from ratings.")
    parser.add_argument("--data", type=Path, help="MovieLens's u.data, ratings.dat or ratings.csv [ratings are made]")
    parser.add_argument("--users", type=int, default=3000, help="how many rate, where ratings are made [3000]")
    parser.add_argument("--items", type=int, default=1000, help="what is rated, where ratings are made [1000]")
    parser.add_argument("--ratings", type=int, default=300_000, help="how many are made [300000]")
    parser.add_argument("--epochs", type=int, default=8, help="epochs in all, those before a resume included [8]")
    parser.add_argument("--batch", type=int, default=2048, help="ratings of a step, over all replicas [2048]")
    parser.add_argument("--width", type=int, default=8, help="of a vector [8]")
    parser.add_argument("--rate", type=float, default=0.01, help="learning rate [0.01]")
    parser.add_argument("--decay", type=float, default=0.02, help="by which rows of a batch are kept small [0.02]")
    parser.add_argument("--seed", type=int, default=0, help="of first rows, of the split, of the order of data [0]")
    parser.add_argument("--devices", type=lambda text: text.split(","), help="such as cpu:0,cpu:1 [all GPUs, or a CPU]")
    parser.add_argument("--checkpoint", default="recommender", help="directory below the servers' root [recommender]")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint, if there is one")
    return parser.parse_args()


if __name__ == "__main__":
    main(parse())
