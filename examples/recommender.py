"""Ratings: who likes what, by two towers over embeddings of users and items, their gradients written by hand.

    python examples/recommender.py                                      one process, and a server started for it
    psworker --standalone --ps 2 --workers 2 examples/recommender.py    a whole cluster on this machine
    python examples/recommender.py --plain                              the same model by NumPy alone, without servers
    python examples/recommender.py --data ml-100k/u.data                MovieLens's ratings, from grouplens.org

A user has a row of a table: a vector, a number that says how high the ratings are, and how both change with time; so
has an item. A tower adds to the vector what a hidden layer makes of it. A rating is the product of what leaves both
towers, and both numbers. A step touches the rows of its batch: gradients of these alone travel, and the rows of the
next batch come back with the answer. Without `--data` ratings are made, so that the best result is known: RMSE 0.585
and AUC 0.912, or 0.644 and 0.890 without the times. A cluster ends with 0.628 and 0.896, and so does NumPy alone.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from ratings import Ratings, make_ratings, read_ratings, scores, split
from report import Report, say

import psclient as ps


def first_values(ratings: Ratings, width: int, hidden: int, seed: int) -> dict[str, Any]:
    """Of users, then of items: the table, (rows, 2, width + 1), and weights of its tower."""
    rng, first = np.random.default_rng(seed), dict[str, Any]()
    for name, ids in (("users", ratings.users), ("items", ratings.items)):
        first[name] = rng.normal(0, 0.1, (int(ids.max()) + 1, 2, width + 1))
        first[name][:, 1] = 0  # nothing changes with time, as far as is known
        first[f"{name}_in"] = rng.normal(0, (1 / width) ** 0.5, (width, hidden))
        first[f"{name}_bias"] = np.zeros(hidden)
        first[f"{name}_out"] = rng.normal(0, (2 / hidden) ** 0.5, (hidden, width))
    return {name: value.astype("float32") for name, value in first.items()}


def tower(rows: Any, times: Any, w_in: Any, bias: Any, w_out: Any) -> tuple[Any, Any, Any, Any]:
    """What leaves a tower, (N, width), the numbers, (N,), and what gradients need: the vectors, the hidden layer."""
    now = rows[:, 0] + times[:, None] * rows[:, 1]
    vectors = now[:, :-1]
    hidden = np.maximum(vectors @ w_in + bias, 0)
    return vectors + hidden @ w_out, now[:, -1], vectors, hidden


def guess(u: Any, v: Any, times: Any, weights: Any, mean: float) -> Any:
    """The ratings, (N,), by the users' and the items' rows, (N, 2, width + 1), and the weights of both towers."""
    (p, high, *_), (q, good, *_) = (tower(rows, times, *own) for rows, own in zip((u, v), weights, strict=True))
    return mean + high + good + np.sum(p * q, axis=1)


def errors_and_gradients(
    u: Any, v: Any, batch: Any, weights: Any, mean: float, decay: float, size: int
) -> tuple[Any, list[Any]]:
    """The errors, (N,), and the gradients of half their squares by the users' rows and weights, then the items'.

    Summed over all replicas they are a mean over `size`, the ratings of the whole batch.
    """
    times = batch["time"]
    users, items = (tower(rows, times, *own) for rows, own in zip((u, v), weights, strict=True))
    errors = mean + users[1] + items[1] + np.sum(users[0] * items[0], axis=1) - batch["rating"]
    d, gradients = (errors / size)[:, None], list[Any]()
    for rows, own, this, that in ((u, weights[0], users, items), (v, weights[1], items, users)):
        w_in, _, w_out = own
        _, _, vectors, hidden = this
        d_out = d * that[0]
        d_hidden = d_out @ w_out.T * (hidden > 0)
        d_now = np.concatenate([d_out + d_hidden @ w_in.T, d], axis=1)
        by_rows = np.stack([d_now, times[:, None] * d_now], axis=1) + decay / size * rows
        gradients += [by_rows, vectors.T @ d_hidden, d_hidden.sum(axis=0), hidden.T @ d_out]
    return errors, gradients


def results(values: list[Any], test: Ratings, mean: float, steps: int) -> str:
    """Lines that say how good a model is, and how good one can be."""
    u, v = values[0][test.users], values[4][test.items]
    guesses = guess(u, v, test.times, (values[1:4], values[5:]), mean)
    lines = [f"test {scores(guesses, test)} after {steps} steps"]
    if test.best is not None:
        lines.append(f"best {scores(test.best, test)}, by who made the ratings")
        lines.append(f"best {scores(test.timeless, test)} of guesses that know no times")
    return "\n".join(lines)


def train_plain(
    dataset: ps.ArrayDataset, values: list[Any], mean: float, args: argparse.Namespace
) -> tuple[list[Any], int]:
    """What training makes of the first values, in the same order of data: NumPy alone, whole arrays, Adam's formula."""
    moments, step = [(np.zeros_like(value), np.zeros_like(value)) for value in values], 0
    for epoch in range(args.epochs):
        losses = []
        for batch in dataset.epoch(epoch):
            step += 1
            u, v = values[0][batch["user"]], values[4][batch["item"]]
            weights = values[1:4], values[5:]
            errors, gradients = errors_and_gradients(u, v, batch, weights, mean, args.decay, args.batch)
            for place, ids in ((0, batch["user"]), (4, batch["item"])):
                by_rows, gradients[place] = gradients[place], np.zeros_like(values[place])
                np.add.at(gradients[place], ids, by_rows)
            rate = args.rate * np.sqrt(1 - 0.999**step) / (1 - 0.9**step)
            for value, (m, s), g in zip(values, moments, gradients, strict=True):
                m += 0.1 * (g - m)
                s += 0.001 * (g * g - s)
                value -= rate * m / (np.sqrt(s) + 1e-7)
            losses.append(np.square(errors).mean())
        print(f"epoch {epoch + 1:2}/{args.epochs}  loss {np.mean(losses):.4f}", flush=True)
    return values, step


def train_on_servers(
    strategy: ps.ParameterServerStrategy,
    dataset: ps.ArrayDataset,
    first: dict[str, Any],
    mean: float,
    args: argparse.Namespace,
) -> tuple[list[Any], int]:
    """Trains, and saves a checkpoint: the values, and the number of steps."""
    with strategy.scope():
        variables = [ps.Variable(value, name=name) for name, value in first.items()]
        users, items = variables[0], variables[4]
        optimizer = ps.optimizers.Adam(args.rate)
        optimizer.build(variables)
        checkpoint = ps.train.Checkpoint(model=variables, optimizer=optimizer)
        if args.resume:
            try:
                checkpoint.restore(args.checkpoint).assert_consumed()
            except ps.errors.NoCheckpoint:
                say(strategy, f"no checkpoint in {args.checkpoint!r} yet: starts anew")
        batches = strategy.experimental_distribute_dataset(dataset)

        def step(batch: Any) -> Any:  # runs on each replica, with its slice
            u, v = users.lookup(batch["user"]), items.lookup(batch["item"])
            weights = [[w.read_value() for w in own] for own in (variables[1:4], variables[5:])]
            rows = u.values[u.inverse], v.values[v.inverse]
            errors, gradients = errors_and_gradients(*rows, batch, weights, mean, args.decay, args.batch)
            for place, ids in ((0, batch["user"]), (4, batch["item"])):  # who comes several times counts several times
                gradients[place] = ps.IndexedSlices(gradients[place], ids)
            return np.square(errors), gradients

        report = Report(strategy, args.epochs, dataset.batches(0), int(optimizer.iterations))
        with report.bar:
            for epoch in batches.epochs(args.epochs):
                for batch in batches:
                    losses, gradients = strategy.run(step, args=(batch,))
                    # The rows of the next batch come with the answer. Only `float` waits for it, and for the loss.
                    optimizer.apply_gradients(zip(gradients, variables, strict=True))
                    loss = strategy.reduce("mean", losses, axis=0)
                    report.step(epoch, int(optimizer.iterations), float(loss))
            say(strategy, f"saved checkpoint {checkpoint.save(f'{args.checkpoint}/ckpt')}")
        return [variable.numpy() for variable in variables], int(optimizer.iterations)


def main(args: argparse.Namespace) -> None:
    """Trains, and tests."""
    everything = read_ratings(args.data) if args.data else make_ratings(args.users, args.items, args.ratings)
    train, test = split(everything, args.seed)
    mean = float(train.ratings.mean())
    arrays = {"user": train.users, "item": train.items, "time": train.times, "rating": train.ratings}
    dataset = ps.ArrayDataset(arrays).shuffle(args.seed).batch(args.batch)
    first = first_values(everything, args.width, args.hidden, args.seed)
    if args.plain:
        values, steps = train_plain(dataset, list(first.values()), mean, args)
        print(results(values, test, mean, steps))
        return
    strategy = ps.ParameterServerStrategy(args.devices)
    values, steps = train_on_servers(strategy, dataset, first, mean, args)
    say(strategy, results(values, test, mean, steps))


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Learns who likes what from ratings.")
    parser.add_argument("--data", type=Path, help="MovieLens's u.data, ratings.dat or ratings.csv [ratings are made]")
    parser.add_argument("--users", type=int, default=2000, help="how many rate, where ratings are made [2000]")
    parser.add_argument("--items", type=int, default=1000, help="what is rated, where ratings are made [1000]")
    parser.add_argument("--ratings", type=int, default=400_000, help="how many are made [400000]")
    parser.add_argument("--epochs", type=int, default=6, help="epochs in all, those before a resume included [6]")
    parser.add_argument("--batch", type=int, default=2048, help="ratings of a step, over all replicas [2048]")
    parser.add_argument("--width", type=int, default=8, help="of a vector [8]")
    parser.add_argument("--hidden", type=int, default=16, help="width of the hidden layer in each tower [16]")
    parser.add_argument("--rate", type=float, default=0.01, help="learning rate [0.01]")
    parser.add_argument("--decay", type=float, default=0.01, help="by which rows of a batch are kept small [0.01]")
    parser.add_argument("--seed", type=int, default=0, help="of first values, of the split, of the order of data [0]")
    parser.add_argument("--devices", type=lambda text: text.split(","), help="such as cpu:0,cpu:1 [all GPUs, or a CPU]")
    parser.add_argument("--checkpoint", default="recommender", help="directory below the servers' root [recommender]")
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--resume", action="store_true", help="go on from the newest checkpoint, if there is one")
    either.add_argument("--plain", action="store_true", help="train by NumPy alone, without servers and checkpoints")
    return parser.parse_args()


if __name__ == "__main__":
    main(parse())
