"""How often predictions meet labels."""

from __future__ import annotations

import math

from psclient._src.arrays.devices import Value, device_of, device_scope
from psclient.losses.labels import class_pair, floating, pair
from psclient.metrics.averages import Mean
from psclient.metrics.base import alike


class Accuracy(Mean):
    """The fraction of predictions that equal their labels.

    Source: `tf.keras.metrics.Accuracy`.

    Args:
        name: prefix of its variables' names.
    """

    def update_state(self, y_true: Value, y_pred: Value, sample_weight: Value = None) -> None:  # type: ignore[override]
        """Compares predictions with labels. In replica context.

        Args:
            y_true: labels, an array.
            y_pred: predicted labels, of its shape.
            sample_weight: as in `Mean`.

        Raises:
            ValueError: the shapes differ.
        """
        labels, predictions = alike(y_true, y_pred)
        super().update_state(labels == predictions, sample_weight)


class BinaryAccuracy(Mean):
    """The fraction of predictions that are on the same side of a threshold as their labels.

    Source: `tf.keras.metrics.BinaryAccuracy`.

    Args:
        name: prefix of its variables' names.
        threshold: predictions above it are 1, all others 0.

    Raises:
        ValueError: the threshold is not a number.
    """

    def __init__(self, name: str | None = None, *, threshold: float = 0.5) -> None:
        if not math.isfinite(threshold):
            raise ValueError(f"threshold is {threshold!r}, and must be a finite number")
        super().__init__(name)
        self.threshold = float(threshold)

    def update_state(self, y_true: Value, y_pred: Value, sample_weight: Value = None) -> None:  # type: ignore[override]
        """Compares predictions with labels. In replica context.

        Args:
            y_true: labels, 0 or 1, an array.
            y_pred: probabilities of 1, of its shape; for (N, 1) the labels may be of shape (N,).
            sample_weight: as in `Mean`.

        Raises:
            ValueError: the shapes differ, or the weights do not fit them.
        """
        labels, predictions = pair(y_true, y_pred)
        with device_scope(device_of(predictions)):
            met = labels == (floating(predictions) > self.threshold)
        super().update_state(met, sample_weight)


class SparseCategoricalAccuracy(Mean):
    """The fraction of predictions whose largest element is that of the label's class.

    Source: `tf.keras.metrics.SparseCategoricalAccuracy`.

    Args:
        name: prefix of its variables' names.
    """

    def update_state(self, y_true: Value, y_pred: Value, sample_weight: Value = None) -> None:  # type: ignore[override]
        """Compares predictions with labels. In replica context.

        Args:
            y_true: class numbers, an array of shape (N, ...) or (N, ..., 1).
            y_pred: probabilities or logits, of shape (N, ..., C); of equal largest elements the first counts.
            sample_weight: as in `Mean`, for values of shape (N, ...).

        Raises:
            ValueError: the shapes do not fit.
        """
        labels, predictions = class_pair(y_true, y_pred)
        with device_scope(device_of(predictions)):
            met = labels == predictions.argmax(axis=-1)
        super().update_state(met, sample_weight)
