"""Sums over a replica's examples, divided so that the sum over all replicas is the mean over the global batch."""

from __future__ import annotations

import numpy as np

from psclient._src import context
from psclient._src.arraylike import read
from psclient._src.arrays.devices import Value, as_array, device_of, device_scope
from psclient.losses.labels import broadcast_weights, floating


def compute_average_loss(
    per_example_loss: Value, sample_weight: Value = None, global_batch_size: int | None = None
) -> Value:
    """Returns the sum of a replica's losses, divided by the size of the global batch.

    The sum of the results of all replicas is the mean over the global batch; the sum of their gradients is its
    gradient. In replica context; with `global_batch_size` in any context.

    Source: `tf.nn.compute_average_loss`.

    Args:
        per_example_loss: the losses of this replica's examples, an array of shape (N, ...).
        sample_weight: factors for the losses: a number for each loss, for each row of them, or for all.
        global_batch_size: number of examples of all replicas; None for N times the number of all replicas, which is
            correct if each replica has the same number of examples. Give it if the last batch may be smaller.

    Returns:
        A number, float64 for float64 losses, else float32, on their device; 0 if the global batch has no example.

    Raises:
        RuntimeError: in cross-replica context without `global_batch_size`.
        ValueError: the losses have no dimensions, the weights do not fit them, or `global_batch_size` is not an integer
            of at least 0.
    """
    losses = floating(as_array(read(per_example_loss)))
    if not losses.ndim:
        raise ValueError(
            "per_example_loss has no dimensions; pass one loss per example, such as the losses of "
            "predictions of shape (N, 1)"
        )
    if global_batch_size is None:
        global_batch_size = losses.shape[0] * context.require_replica("compute_average_loss").num_replicas_in_sync
    elif isinstance(global_batch_size, bool) or not isinstance(global_batch_size, int | np.integer):
        raise ValueError(f"global_batch_size is {global_batch_size!r}, and must be a whole number")
    elif global_batch_size < 0:
        raise ValueError(f"global_batch_size is {global_batch_size}, and must be at least 0")
    with device_scope(device_of(losses)):
        if sample_weight is not None:
            losses = losses * broadcast_weights(sample_weight, losses)
        # Without examples there is nothing to be divided: what is left is the 0 of an empty sum.
        return losses.sum() / int(global_batch_size) if global_batch_size else losses[:0].sum() / 1


def scale_regularization_loss(regularization_loss: Value) -> Value:
    """Returns the sum of penalties, divided by the number of all replicas, each of which computes the same penalties.

    In replica context.

    Source: `tf.nn.scale_regularization_loss`.

    Args:
        regularization_loss: a number, or an array of penalties.

    Returns:
        A number, float64 for float64 penalties, else float32, on their device.

    Raises:
        RuntimeError: in cross-replica context.
    """
    replicas = context.require_replica("scale_regularization_loss").num_replicas_in_sync
    losses = floating(as_array(read(regularization_loss)))
    with device_scope(device_of(losses)):
        return losses.sum() / replicas
