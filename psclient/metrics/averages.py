"""Sums and means of values."""

from __future__ import annotations

import math

import numpy as np

from psclient._src.arrays.devices import AnyArray, Value, device_of, device_scope
from psclient.losses.labels import pair
from psclient.metrics.base import Metric, ratio, weighted


class Sum(Metric):
    """The weighted sum of all values.

    Source: `tf.keras.metrics.Sum`.

    Args:
        name: prefix of its variables' names.
    """

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)
        self._total = self.add_variable("total")

    def update_state(self, values: Value, sample_weight: Value = None) -> None:
        """Adds values to the sum. In replica context.

        Args:
            values: an array of numbers, of any shape.
            sample_weight: a weight for each value, or for each row of values; None for 1 each.

        Raises:
            ValueError: the weights do not fit the values.
        """
        values, weights = weighted(values, sample_weight)
        self._total.assign_add((values * weights).sum())

    def result(self) -> float:
        """Returns the sum; 0.0 before the first value. In the contexts of `totals`."""
        return float(self.totals()[0])


class Mean(Metric):
    """The weighted mean of all values.

    Source: `tf.keras.metrics.Mean`.

    Args:
        name: prefix of its variables' names.

    Examples:
        >>> import psclient as ps
        >>> strategy = ps.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> with strategy.scope():
        ...     mean = ps.metrics.Mean()
        >>> def step():
        ...     replica = ps.get_replica_context().replica_id_in_sync_group
        ...     mean.update_state([replica, replica + 2.0])
        >>> strategy.run(step)
        >>> float(mean.result())
        1.5
    """

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)
        self._total = self.add_variable("total")
        self._count = self.add_variable("count")

    def update_state(self, values: Value, sample_weight: Value = None) -> None:
        """Adds values to the mean. In replica context.

        Args:
            values: an array of numbers, of any shape.
            sample_weight: a weight for each value, or for each row of values; None for 1 each.

        Raises:
            ValueError: the weights do not fit the values.
        """
        values, weights = weighted(values, sample_weight)
        self._total.assign_add((values * weights).sum())
        self._count.assign_add(weights.sum())

    def result(self) -> float:
        """Returns the mean; 0.0 before the first value. In the contexts of `totals`."""
        total, count = self.totals()
        return float(ratio(total, count))


class MeanSquaredError(Mean):
    """The weighted mean of squared differences between predictions and labels.

    Source: `tf.keras.metrics.MeanSquaredError`, which counts a batch of one dimension as one value; here each value
    counts.

    Args:
        name: prefix of its variables' names.
    """

    def update_state(self, y_true: Value, y_pred: Value, sample_weight: Value = None) -> None:  # type: ignore[override]
        """Adds squared errors to the mean. In replica context.

        Args:
            y_true: labels, an array of numbers.
            y_pred: predictions, of its shape; for (N, 1) the labels may be of shape (N,).
            sample_weight: as in `Mean`.

        Raises:
            ValueError: the shapes differ, or the weights do not fit them.
        """
        super().update_state(_squared_errors(y_true, y_pred), sample_weight)


class RootMeanSquaredError(MeanSquaredError):
    """The root of the weighted mean of squared differences between predictions and labels.

    Source: `tf.keras.metrics.RootMeanSquaredError`.

    Args:
        name: prefix of its variables' names.
    """

    def result(self) -> float:
        """Returns the root of the mean; 0.0 before the first value. In the contexts of `totals`."""
        return math.sqrt(super().result())


def _squared_errors(y_true: Value, y_pred: Value) -> AnyArray:
    labels, predictions = pair(y_true, y_pred)
    with device_scope(device_of(predictions)):
        return (predictions.astype(np.float64) - labels) ** 2
