"""Handwritten digits, as `digits.py`, trained by a coordinator: it schedules steps, and workers run them.

    psworker --standalone --ps 2 --workers 2 --chief-runs-script examples/coordinator_digits.py

Every process runs this script. The chief coordinates; workers skip that part, and run what it schedules.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import numpy as np
from digits import load_data, losses_and_gradients, make_layers, predict

import psclient as ps

parser = argparse.ArgumentParser(description="Trains a small network on handwritten digits, by a coordinator.")
parser.add_argument("--epochs", type=int, default=20, help="[20]")
parser.add_argument("--batch", type=int, default=64, help="examples of a step [64]")
args = parser.parse_args()

train, test = load_data()
strategy = ps.ParameterServerStrategy(consistency=ps.Async())
with strategy.scope():
    layers = make_layers(0)
    variables = [variable for layer in layers for variable in layer]
    optimizer = ps.optimizers.Adam(0.002)
    optimizer.build(variables)
    checkpoint = ps.train.Checkpoint(layers=layers, optimizer=optimizer)


@ps.coordinator.function
def batches(context: ps.InputContext) -> Iterator[Any]:
    """Each worker's own order of the examples, again and again."""
    seed = context.input_pipeline_id
    while True:
        yield from ps.ArrayDataset(train).shuffle(seed).batch(args.batch)
        seed += context.num_input_pipelines


@ps.coordinator.function
def step(iterator: Iterator[Any]) -> float:
    """One update by a worker; returns the batch's mean loss."""
    images, targets = next(iterator)
    values = [(w.numpy(), b.numpy()) for w, b in layers]
    losses, gradients = losses_and_gradients(values, images, targets, len(images))
    optimizer.apply_gradients(zip(gradients, variables, strict=True))
    return float(losses.mean())


@ps.coordinator.function
def right(images: Any, labels: Any) -> int:
    """How many of some scans are recognized."""
    guesses = predict([(w.numpy(), b.numpy()) for w, b in layers], images)[0].argmax(axis=1)
    return int((guesses == labels).sum())


if ps.coordinator.is_coordinator():
    coordinator = ps.coordinator.ClusterCoordinator(strategy)
    iterator = iter(coordinator.create_per_worker_dataset(batches))
    for epoch in range(args.epochs):
        losses = [coordinator.schedule(step, args=(iterator,)) for _ in range(len(train[0]) // args.batch + 1)]
        coordinator.join()
        print(f"epoch {epoch + 1:2}/{args.epochs}  loss {np.mean(coordinator.fetch(losses)):.4f}", flush=True)
    print(f"saved checkpoint {checkpoint.save('coordinator_digits/ckpt')}", flush=True)
    shares = zip(np.array_split(test[0], 8), np.array_split(test[1].argmax(axis=1), 8), strict=True)
    found = coordinator.fetch([coordinator.schedule(right, args=share) for share in shares])
    print(f"test accuracy {sum(found) / len(test[0]):.4f} after {int(optimizer.iterations)} steps")
