"""Counts of predictions above thresholds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from psclient._src.arrays.devices import AnyArray, Value, device_of, device_scope, namespace
from psclient.losses.labels import floating, pair
from psclient.metrics.base import Metric, alike, ratio, weighted
from pswire.model.tensor import Array

MARGIN = 1e-7
"""By how much the outermost thresholds of a curve lie beyond 0 and 1."""


class AUC(Metric):
    """The area under the ROC or the precision-recall curve, approximated by a Riemann sum over thresholds.

    Source: `tf.keras.metrics.AUC`; the interpolation of precision-recall: Davis and Goadrich, "The relationship between
    precision-recall and ROC curves", 2006.

    Args:
        num_thresholds: number of thresholds, evenly from 0 to 1.
        curve: "ROC" or "PR".
        summation_method: "interpolation", "minoring" or "majoring".
        name: prefix of its variables' names.
        thresholds: between 0 and 1, instead of `num_thresholds`; 0 and 1 are added.

    Raises:
        ValueError: an argument has another value.
    """

    def __init__(
        self,
        num_thresholds: int = 200,
        curve: str = "ROC",
        summation_method: str = "interpolation",
        name: str | None = None,
        thresholds: Sequence[float] | None = None,
    ) -> None:
        if curve not in ("ROC", "PR"):
            raise ValueError(f"curve {curve!r} is unknown; use 'ROC' or 'PR'")
        if summation_method not in ("interpolation", "minoring", "majoring"):
            raise ValueError(
                f"summation_method {summation_method!r} is unknown; use 'interpolation', 'minoring' or 'majoring'"
            )
        if thresholds is not None and not all(0 <= threshold <= 1 for threshold in thresholds):
            raise ValueError(f"thresholds must lie between 0 and 1: {list(thresholds)}")
        if thresholds is None and num_thresholds < 2:
            raise ValueError(f"a curve over {num_thresholds} thresholds has no area; use at least 2")
        super().__init__(name)
        inner = (
            sorted(thresholds) if thresholds is not None else np.arange(1, num_thresholds - 1) / (num_thresholds - 1)
        )
        self.thresholds = np.array([-MARGIN, *inner, 1 + MARGIN])
        self.curve = curve
        self.summation_method = summation_method
        self._positives = self.add_variable("positives", (len(self.thresholds) + 1,))
        self._negatives = self.add_variable("negatives", (len(self.thresholds) + 1,))

    def update_state(self, y_true: Value, y_pred: Value, sample_weight: Value = None) -> None:
        """Counts predictions by threshold. In replica context.

        Args:
            y_true: labels, 0 or 1, an array.
            y_pred: predicted probabilities, of its shape.
            sample_weight: as in `Mean`.

        Raises:
            ValueError: the shapes differ, or a prediction is not between 0 and 1.
        """
        labels, predictions = alike(y_true, y_pred)
        predictions, weights = weighted(predictions, sample_weight)
        check_probabilities(predictions)
        xp = namespace(device_of(predictions))
        with device_scope(device_of(predictions)):
            # How many thresholds lie below each prediction.
            above = xp.searchsorted(xp.asarray(self.thresholds), predictions.ravel(), side="left")
            for variable, of_it in ((self._positives, labels), (self._negatives, ~labels.astype(bool))):
                counted = (weights * of_it.astype(bool)).ravel()
                variable.assign_add(xp.bincount(above, weights=counted, minlength=len(self.thresholds) + 1))

    def result(self) -> float:
        """Returns the area, 0.0 before the first label. In the contexts of `totals`."""
        positives: AnyArray
        negatives: AnyArray
        positives, negatives = self.totals()
        true = np.cumsum(positives[::-1])[::-1][1:]  # predictions above each threshold
        false = np.cumsum(negatives[::-1])[::-1][1:]
        missed = positives.sum() - true
        if self.curve == "PR" and self.summation_method == "interpolation":
            return _interpolated_pr(true, false, missed)
        recall = ratio(true, true + missed)
        if self.curve == "ROC":
            x, y = ratio(false, np.full_like(false, negatives.sum())), recall
        else:
            x, y = recall, ratio(true, true + false)
        heights = {"interpolation": (y[:-1] + y[1:]) / 2, "minoring": np.minimum(y[:-1], y[1:])}
        height = heights.get(self.summation_method, np.maximum(y[:-1], y[1:]))
        return float(((x[:-1] - x[1:]) * height).sum())


class Share(Metric):
    """Base of metrics that are a fraction of true positives, at one or several thresholds.

    Args:
        thresholds: one or several numbers between 0 and 1; predictions above one are positive. None is 0.5.
        name: prefix of its variables' names.

    Raises:
        ValueError: there is no threshold, or one is not between 0 and 1.
    """

    _of_positive_predictions: ClassVar[bool]
    """True if the other part is that of false positives, False if it is that of false negatives."""

    def __init__(self, thresholds: float | Sequence[float] | None = None, *, name: str | None = None) -> None:
        given = np.atleast_1d(np.asarray(0.5 if thresholds is None else thresholds, np.float64))
        if given.ndim != 1 or not given.size or not ((given >= 0) & (given <= 1)).all():
            raise ValueError(f"thresholds must be one or several numbers between 0 and 1: {thresholds!r}")
        super().__init__(name)
        self.thresholds: list[float] = given.tolist()
        self._true = self.add_variable("true_positives", given.shape)
        other = "false_positives" if self._of_positive_predictions else "false_negatives"
        self._other = self.add_variable(other, given.shape)

    def update_state(self, y_true: Value, y_pred: Value, sample_weight: Value = None) -> None:
        """Counts predictions. In replica context.

        Args:
            y_true: labels, 0 or 1, an array.
            y_pred: predicted probabilities of 1, of its shape; for (N, 1) the labels may be of shape (N,).
            sample_weight: as in `Mean`.

        Raises:
            ValueError: the shapes differ, the weights do not fit them, or a prediction is not between 0 and 1.
        """
        labels, predictions = pair(y_true, y_pred)
        predictions = floating(predictions)
        check_probabilities(predictions)
        _, weights = weighted(predictions, sample_weight)
        xp = namespace(device_of(predictions))
        with device_scope(device_of(predictions)):
            # In the predictions' own dtype: a float32 of 0.3 is not above 0.3.
            limits = xp.asarray(self.thresholds, predictions.dtype)
            above = predictions.ravel() > limits[:, None]
            actual, counted = labels.ravel().astype(bool), weights.ravel()
            other = above & ~actual if self._of_positive_predictions else ~above & actual
            self._true.assign_add(((above & actual) * counted).sum(axis=1))
            self._other.assign_add((other * counted).sum(axis=1))

    def result(self) -> float | Array:
        """Returns the fraction, 0.0 where it is of nothing. In the contexts of `totals`.

        Returns:
            A number; for several thresholds an array of float64, with one for each.
        """
        true, other = self.totals()
        found: Array = ratio(true, true + other)
        return found if len(self.thresholds) > 1 else float(found[0])


class Precision(Share):
    """The fraction of positive predictions whose labels are 1.

    Source: `tf.keras.metrics.Precision`, without `top_k` and `class_id`.

    Args:
        thresholds: one or several numbers between 0 and 1; predictions above a threshold are positive. None is 0.5.
        name: prefix of its variables' names.

    Raises:
        ValueError: there is no threshold, or one is not between 0 and 1.
    """

    _of_positive_predictions = True


class Recall(Share):
    """The fraction of labels of 1 whose predictions are positive.

    Source: `tf.keras.metrics.Recall`, without `top_k` and `class_id`.

    Args:
        thresholds: one or several numbers between 0 and 1; predictions above a threshold are positive. None is 0.5.
        name: prefix of its variables' names.

    Raises:
        ValueError: there is no threshold, or one is not between 0 and 1.
    """

    _of_positive_predictions = False


def check_probabilities(predictions: AnyArray) -> None:
    """Raises `ValueError` unless all predictions are between 0 and 1."""
    if predictions.size and not bool(((predictions >= 0) & (predictions <= 1)).all()):
        raise ValueError("predictions must be between 0 and 1; pass probabilities, not logits")


def _interpolated_pr(true: Value, false: Value, missed: Value) -> float:
    above = true + false
    step = ratio(true[:-1] - true[1:], above[:-1] - above[1:])
    offset = true[1:] - step * above[1:]
    both = (above[:-1] > 0) & (above[1:] > 0)
    growth = np.where(both, ratio(above[:-1], above[1:]), 1.0)
    parts = ratio(step * (true[:-1] - true[1:] + offset * np.log(growth)), true[1:] + missed[1:])
    return float(parts.sum())
