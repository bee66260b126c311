"""Handwritten digits: a small network, trained on parameter servers, its gradients written by hand.

    python examples/digits.py                                      one process, and a server started for it
    psworker --standalone --ps 2 --workers 2 examples/digits.py    a whole cluster on this machine

Every process of a job runs this script. NumPy's functions take CuPy's arrays, too, so the same lines run on a GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from report import Report, say
from sklearn.datasets import load_digits

import psclient as ps

SIZES = (64, 128, 64, 10)
OPTIMIZERS: dict[str, Callable[[], ps.optimizers.Optimizer]] = {
    "adam": lambda: ps.optimizers.Adam(0.002),
    "sgd": lambda: ps.optimizers.SGD(0.1, momentum=0.9),
}


def load_data() -> tuple[Any, Any]:
    """1437 scans to train on, and 360 to test: (N, 64) pixels from 0 to 1, and (N, 10) labels, one-hot; float32."""
    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    images, targets = (pixels[order] / 16).astype("float32"), np.eye(10, dtype="float32")[labels[order]]
    return (images[:1437], targets[:1437]), (images[1437:], targets[1437:])


def make_layers(seed: int) -> list[tuple[ps.Variable, ps.Variable]]:
    """Weights and biases of each layer, on the parameter servers."""
    random = np.random.default_rng(seed)
    first = [random.normal(0, (2 / rows) ** 0.5, (rows, columns)) for rows, columns in pairwise(SIZES)]
    weights = [ps.Variable(w, name=f"w{i}", dtype="float32") for i, w in enumerate(first)]
    biases = [ps.Variable(np.zeros(n), name=f"b{i}", dtype="float32") for i, n in enumerate(SIZES[1:])]
    return list(zip(weights, biases, strict=True))


def predict(layers: Sequence[Any], images: Any) -> tuple[Any, list[Any]]:
    """The logarithms of the ten digits' probabilities, (N, 10), and what went into each layer."""
    inputs = [images]
    for w, b in layers[:-1]:
        inputs.append(np.maximum(inputs[-1] @ w + b, 0))
    w, b = layers[-1]
    logits = inputs[-1] @ w + b
    logits = logits - logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)), inputs


def losses_and_gradients(layers: Sequence[Any], images: Any, targets: Any, batch: int) -> tuple[Any, list[Any]]:
    """The cross-entropy of each example, (N,), and its gradients; summed over all replicas, a mean over `batch`."""
    log_p, inputs = predict(layers, images)
    gradients: list[Any] = []
    delta = (np.exp(log_p) - targets) / batch
    for (w, _), x in zip(reversed(layers), reversed(inputs), strict=True):
        gradients = [x.T @ delta, delta.sum(axis=0), *gradients]
        delta = delta @ w.T * (x > 0)
    return -(log_p * targets).sum(axis=1), gradients


def main(args: argparse.Namespace) -> None:
    """Trains, saves a checkpoint, and tests."""
    train, test = load_data()
    consistency = ps.Async() if args.asynchronous else ps.Sync()
    strategy = ps.ParameterServerStrategy(args.devices, consistency=consistency)
    dataset = ps.ArrayDataset(train).shuffle(args.seed).batch(args.batch)  # in another order in each epoch
    batches = strategy.experimental_distribute_dataset(dataset)
    with strategy.scope():
        layers = make_layers(args.seed)
        variables = [variable for layer in layers for variable in layer]
        optimizer = OPTIMIZERS[args.optimizer]()
        optimizer.build(variables)
        checkpoint = ps.train.Checkpoint(layers=layers, optimizer=optimizer)
        if args.resume:
            try:
                checkpoint.restore(args.checkpoint).assert_consumed()  # all that is saved, and nothing else, is here
            except ps.errors.NoCheckpoint:
                say(strategy, f"no checkpoint in {args.checkpoint!r} yet: starts anew")

        def step(images: Any, targets: Any) -> tuple[Any, list[Any]]:  # runs on each replica, with its slice
            values = [(w.read_value(), b.read_value()) for w, b in layers]
            return losses_and_gradients(values, images, targets, args.batch)

        report = Report(strategy, args.epochs, dataset.batches(0), int(optimizer.iterations))
        with report.bar:
            for epoch in batches.epochs(args.epochs):
                for batch in batches:
                    losses, gradients = strategy.run(step, args=batch)
                    # The step is sent, and the loss after it: only `float` waits for both.
                    optimizer.apply_gradients(zip(gradients, variables, strict=True))
                    loss = strategy.reduce("mean", losses, axis=0)
                    report.step(epoch, int(optimizer.iterations), float(loss))
                if (epoch + 1) % args.save_every == 0 or epoch + 1 == args.epochs:
                    path = checkpoint.save(f"{args.checkpoint}/ckpt")
                    say(strategy, f"saved checkpoint {path}")
        guesses = predict([(w.numpy(), b.numpy()) for w, b in layers], test[0])[0].argmax(axis=1)
        accuracy = np.mean(guesses == test[1].argmax(axis=1))
        say(strategy, f"test accuracy {accuracy:.4f} after {int(optimizer.iterations)} steps")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Trains a small network on handwritten digits.")
    parser.add_argument("--epochs", type=int, default=20, help="epochs in all, those before a resume included [20]")
    parser.add_argument("--batch", type=int, default=64, help="examples of a step, over all replicas [64]")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adam", help="[adam]")
    parser.add_argument("--asynchronous", action="store_true", help="workers do not wait for each other")
    parser.add_argument("--seed", type=int, default=0, help="of the first weights and of the order of the data [0]")
    parser.add_argument("--devices", type=lambda text: text.split(","), help="such as cpu:0,cpu:1 [all GPUs, or a CPU]")
    parser.add_argument("--checkpoint", default="digits", help="directory below the servers' checkpoint root [digits]")
    parser.add_argument("--save-every", type=int, default=10, help="epochs from one checkpoint to the next [10]")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint, if there is one")
    return parser.parse_args()


if __name__ == "__main__":
    main(parse())
