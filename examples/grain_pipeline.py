"""A grain pipeline as the dataset: images are read by number, shuffled, and shifted at random, in each epoch anew.

    python examples/grain_pipeline.py                                      one process, and a server started for it
    psworker --standalone --ps 1 --workers 2 examples/grain_pipeline.py    a cluster; each worker reads its share

The strategy asks the pipeline for the batches of each epoch by number: each example is seen once, by one worker. A
stage that draws at random gets its generator from grain, which seeds it by the example's number.
"""

from __future__ import annotations

import argparse
import logging
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

import psclient as ps

logging.getLogger("absl").setLevel(logging.ERROR)  # grain says at its import that JAX is not installed
import grain  # noqa: E402


def shifted(example: tuple[Any, Any], random: np.random.Generator) -> tuple[Any, Any]:
    """An image, (64,), moved by at most one pixel to a side, and its label."""
    image, label = example
    return np.roll(image.reshape(8, 8), int(random.integers(-1, 2)), axis=1).ravel(), label


def batches_of(images: Any, labels: Any, batch: int, seed: int) -> Any:
    """Batches of images, (batch, 64), and labels, (batch,)."""
    examples = grain.MapDataset.range(len(images)).shuffle(seed=seed).map(lambda i: (images[i], labels[i]))
    return examples.seed(seed).random_map(shifted).batch(batch)


def main(args: argparse.Namespace) -> None:
    """Trains a linear classifier, and says the loss of each epoch."""
    pixels, labels = load_digits(return_X_y=True)
    images = (pixels / 16).astype("float32")
    strategy = ps.ParameterServerStrategy()
    dataset = batches_of(images, labels, args.batch, seed=0)
    batches = strategy.experimental_distribute_dataset(dataset)
    with strategy.scope():
        w = ps.Variable(np.zeros((64, 10), "float32"))
        optimizer = ps.optimizers.Adam(0.01)

        def step(images: Any, labels: Any) -> tuple[Any, Any]:  # runs on each replica, with its slice of the batch
            logits = images @ w.read_value()
            p = np.exp(logits - logits.max(axis=1, keepdims=True))
            p /= p.sum(axis=1, keepdims=True)
            targets = np.eye(10, dtype="float32")[labels]
            return -np.log((p * targets).sum(axis=1)), images.T @ (p - targets) / args.batch

        for epoch in batches.epochs(args.epochs):
            shown = []
            for batch in batches:
                losses, gradient = strategy.run(step, args=batch)
                optimizer.apply_gradients([(gradient, w)])
                shown.append(float(strategy.reduce("mean", losses, axis=0)))
            if strategy.is_main_process:  # one process of all
                print(f"epoch {epoch + 1}  loss {np.mean(shown):.4f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Trains a linear classifier on a grain pipeline.")
    parser.add_argument("--epochs", type=int, default=5, help="[5]")
    parser.add_argument("--batch", type=int, default=64, help="examples of a step, over all replicas [64]")
    main(parser.parse_args())
