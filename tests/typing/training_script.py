"""A user's script, as `mypy --strict` sees it: each type that it rests on is stated. It is checked, and never run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, assert_type

import numpy as np
import numpy.typing as npt

import psclient as ps

Batch = tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]

strategy = ps.ParameterServerStrategy(consistency=ps.Sync())
with strategy.scope():
    w = ps.Variable(np.zeros((4, 2), np.float32), name="w")
    optimizer = ps.optimizers.Adam(1e-3)
    accuracy = ps.metrics.Accuracy()
    older = ps.compat.v1.train.MomentumOptimizer(1e-3, 0.9)
    global_step = ps.Variable(np.int64(0), trainable=False)


def step(batch: Batch) -> float:
    """One step of a replica."""
    x, y = batch
    scores = x @ w.numpy()
    gradient = x.T @ (scores - np.eye(2, dtype=np.float32)[y])
    optimizer.apply_gradients([(gradient, w)])
    older.apply_gradients([(gradient, w)], global_step)
    accuracy.update_state(y, scores.argmax(-1))
    ps.summary.histogram("scores", scores)
    return float(ps.losses.compute_average_loss(ps.losses.sparse_categorical_crossentropy(y, scores, from_logits=True)))


@ps.update_function
def add(v: ps.Variable, delta: npt.NDArray[np.float32]) -> None:
    """An update function."""
    v.assign_add(delta)


def gathered(losses: npt.NDArray[np.float32]) -> None:
    """What the names of other releases give."""
    assert_type(strategy.unwrap(losses), tuple[Any, ...])
    assert_type(w.device, str)
    assert_type(optimizer.get_config(), dict[str, Any])
    assert_type(ps.optimizers.Adam.from_config(optimizer.get_config()), ps.optimizers.Adam)
    assert_type(ps.ArrayDataset(losses).shuffle(1).map(np.sqrt).repeat().batch(2), ps.ArrayDataset)
    ps.experimental_set_strategy(strategy)


def restore(checkpoint: ps.train.Checkpoint) -> None:
    """Looks at what a checkpoint has."""
    checkpoint.restore("run1").assert_existing_objects_matched()


arrays = ps.ArrayDataset((np.ones((8, 4), np.float32), np.zeros(8, np.int64)))
dataset = strategy.experimental_distribute_dataset(arrays)
for batch in dataset:
    loss = strategy.run(step, args=(batch,))
    assert_type(loss, float)
    mean: npt.NDArray[Any] = strategy.reduce("mean", loss, axis=None)
    assert_type(strategy.reduce("mean", loss, axis=None).numpy(), npt.NDArray[Any])
assert_type(w.numpy(), npt.NDArray[Any])
assert_type(strategy.num_replicas_in_sync, int)
assert_type(older.get_slot(w, "momentum"), ps.Variable | None)


def handle(error: ps.errors.ServerLost) -> str:
    """Reads an error."""
    return f"{error.task}: {error.message}"


def build(cluster: Mapping[str, list[str]]) -> ps.ParameterServerStrategy:
    """Builds a strategy from addresses."""
    resolver = ps.SimpleClusterResolver(ps.ClusterSpec(dict(cluster)), task_type="worker", task_id=0)
    return ps.ParameterServerStrategy(cluster_resolver=resolver, timeouts=ps.Timeouts(round_timeout=60.0))
