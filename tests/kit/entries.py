"""The ways by which a user's array comes into this package: of each a call with an array of three numbers."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np

import psclient as ps
from psclient.coordinator import content

_numbers = count()


def entries(strategy: Any) -> dict[str, Callable[[Any], Any]]:
    """Calls by their names. Each takes an array of ones, and returns what came of it as an array of NumPy.

    Those in `WITH_A_PATH` have the array as the field `x` of a dict, and name that in their errors.
    """
    with strategy.scope():
        name = f"entries{next(_numbers)}"
        v = ps.Variable(np.zeros(3, "float32"), name=name)
        mean = ps.metrics.Mean(name=f"{name}/mean")
        optimizer = ps.optimizers.SGD(1.0, name=f"{name}/sgd")

    def created(value: Any) -> Any:
        with strategy.scope():
            return ps.Variable(value, name=f"{name}/{next(_numbers)}").numpy()

    def assigned(value: Any) -> Any:
        v.assign(value)
        return v.numpy()

    def stepped(value: Any) -> Any:
        v.assign(np.zeros(3, "float32"))
        strategy.run(lambda: optimizer.apply_gradients([(value, v)]))
        return -v.numpy()

    def averaged(value: Any) -> Any:
        strategy.run(lambda: mean.update_state(value))
        return np.full(3, mean.result())

    def from_batch(value: Any) -> Any:
        batches = strategy.experimental_distribute_dataset([{"x": value}])
        return next(iter(batches))["x"]

    def sent(value: Any) -> Any:
        return content.decode(content.encode({"x": value}, "arguments"))["x"]

    return {
        "create": created,
        "assign": assigned,
        "step": stepped,
        "metric": averaged,
        "slices": lambda value: ps.IndexedSlices(value, [0, 1, 2], (3,)).numpy(),
        "reduce": lambda value: np.asarray(strategy.reduce("SUM", {"x": value}, axis=None)["x"]),
        "gather": lambda value: np.asarray(strategy.gather({"x": value}, axis=0)["x"]),
        "dataset": lambda value: ps.ArrayDataset({"x": value}).arrays["x"],
        "batch": from_batch,
        "send": sent,
    }


WITH_A_PATH = ("reduce", "gather", "dataset", "batch", "send")
