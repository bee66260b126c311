"""Metrics that all replicas fill and that are combined when they are read: their state is ON_READ variables.

    mean = ps.metrics.Mean()                 # in strategy.scope()
    mean.update_state(losses)                # in the function given to strategy.run
    mean.result()                            # outside of it: over all replicas of all workers

Names and meanings are those of `tf.keras.metrics`; sums are kept in float64, so that long epochs are counted.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from psclient._src import context
from psclient._src.arraylike import read
from psclient._src.devices import AnyArray, Value, as_array, device_of, device_scope, namespace, to_numpy
from psclient._src.variables.variable import Variable, VariableAggregation, VariableSynchronization
from pswire.model.tensor import Array

MARGIN = 1e-7
"""By how much the outermost thresholds of a curve lie beyond 0 and 1."""


class Metric:
    """Base of all metrics. Create it inside `strategy.scope()`, on every process alike.

    A metric of one's own creates its sums with `add_variable`, adds to them in `update_state`, and computes
    `result` from `totals()`.

    Args:
        name: prefix of the names of its variables; by default that of its class.
    """

    def __init__(self, name: str | None = None) -> None:
        self.name = name or type(self).__name__.lower()
        self.variables: list[Variable] = []
        self._by_name: dict[str, Variable] = {}
        self._strategy = context.get_strategy()

    def add_variable(self, name: str, shape: tuple[int, ...] = ()) -> Variable:
        """Creates a sum of float64 that each replica fills by itself.

        Args:
            name: second part of the variable's name, after the metric's.
            shape: shape of the sum.
        """
        variable: Variable = Variable(
            np.zeros(shape),
            name=f"{self.name}/{name}",
            synchronization=VariableSynchronization.ON_READ,
            aggregation=VariableAggregation.SUM,
        )
        self.variables.append(variable)
        self._by_name[name] = variable
        return variable

    def trackable_children(self) -> dict[str, Variable]:
        """Returns what checkpoints save of it: its variables, by the names given to `add_variable`. In any context."""
        return dict(self._by_name)

    def totals(self) -> list[Array]:
        """Returns the values of its variables: in replica context this replica's, else the sums over all replicas.

        In cross-replica context this is one round for all of them, made by every process alike.
        """
        strategy = self._strategy
        if context.is_default(strategy) or context.local_replica(strategy) is not None:
            return [v.numpy() for v in self.variables]
        here = strategy.extended.worker_devices[0]
        sums = strategy.extended.batch_reduce_to("sum", [(v, here) for v in self.variables])
        return [to_numpy(total) for total in sums]

    def update_state(self, *values: Value, **keys: Value) -> None:
        """Takes a batch into account. In replica context."""
        raise NotImplementedError

    def result(self) -> Value:
        """Returns the metric's value, in the contexts of `totals`."""
        raise NotImplementedError

    def __call__(self, *values: Value, **keys: Value) -> Value:
        """Takes a batch into account, and gives this replica's value. In replica context."""
        self.update_state(*values, **keys)
        return self.result()

    def reset_state(self) -> None:
        """Begins anew. In replica or cross-replica context."""
        for v in self.variables:
            v.assign(np.zeros(v.shape))


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
        """Adds values. In replica context.

        Args:
            values: an array of numbers, of any shape.
            sample_weight: a number for each value, or for each row of them; None counts each once.

        Raises:
            ValueError: the weights do not fit the values.
        """
        values, weights = _weighted(values, sample_weight)
        self._total.assign_add((values * weights).sum())

    def result(self) -> float:
        """Returns the sum; 0.0 before the first value. In the contexts of `totals`."""
        return float(self.totals()[0])


class Mean(Metric):
    """The weighted mean of all values.

    Source: `tf.keras.metrics.Mean`.

    Args:
        name: prefix of its variables' names.
    """

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)
        self._total = self.add_variable("total")
        self._count = self.add_variable("count")

    def update_state(self, values: Value, sample_weight: Value = None) -> None:
        """Takes values into the mean. In replica context.

        Args:
            values: an array of numbers, of any shape.
            sample_weight: a number for each value, or for each row of them; None counts each once.

        Raises:
            ValueError: the weights do not fit the values.
        """
        values, weights = _weighted(values, sample_weight)
        self._total.assign_add((values * weights).sum())
        self._count.assign_add(weights.sum())

    def result(self) -> float:
        """Returns the mean; 0.0 before the first value. In the contexts of `totals`."""
        total, count = self.totals()
        return float(_ratio(total, count))


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
        labels, predictions = _alike(y_true, y_pred)
        super().update_state(labels == predictions, sample_weight)


class AUC(Metric):
    """The area under the ROC or the precision-recall curve, approximated by a Riemann sum over thresholds.

    Source: `tf.keras.metrics.AUC`; the interpolation of precision-recall: Davis and Goadrich, "The relationship
    between precision-recall and ROC curves", 2006.

    Args:
        num_thresholds: number of thresholds, evenly from 0 to 1.
        curve: "ROC" or "PR".
        summation_method: "interpolation", "minoring" or "majoring".
        name: prefix of its variables' names.
        thresholds: between 0 and 1, in place of `num_thresholds`; 0 and 1 are added.

    Raises:
        ValueError: an argument has none of these values.
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
            raise ValueError(f"curve {curve!r} is unknown; write 'ROC' or 'PR'")
        if summation_method not in ("interpolation", "minoring", "majoring"):
            raise ValueError(
                f"summation_method {summation_method!r} is unknown; write 'interpolation', 'minoring' or 'majoring'"
            )
        if thresholds is not None and not all(0 <= threshold <= 1 for threshold in thresholds):
            raise ValueError(f"thresholds must lie between 0 and 1: {list(thresholds)}")
        if thresholds is None and num_thresholds < 2:
            raise ValueError(f"a curve over {num_thresholds} thresholds has no area; take at least 2")
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
        labels, predictions = _alike(y_true, y_pred)
        predictions, weights = _weighted(predictions, sample_weight)
        if predictions.size and not bool(((predictions >= 0) & (predictions <= 1)).all()):
            raise ValueError("predictions must lie between 0 and 1; give probabilities, not logits")
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
        recall = _ratio(true, true + missed)
        if self.curve == "ROC":
            x, y = _ratio(false, np.full_like(false, negatives.sum())), recall
        else:
            x, y = recall, _ratio(true, true + false)
        heights = {"interpolation": (y[:-1] + y[1:]) / 2, "minoring": np.minimum(y[:-1], y[1:])}
        height = heights.get(self.summation_method, np.maximum(y[:-1], y[1:]))
        return float(((x[:-1] - x[1:]) * height).sum())


def _interpolated_pr(true: Value, false: Value, missed: Value) -> float:
    above = true + false
    step = _ratio(true[:-1] - true[1:], above[:-1] - above[1:])
    offset = true[1:] - step * above[1:]
    both = (above[:-1] > 0) & (above[1:] > 0)
    ratio = np.where(both, _ratio(above[:-1], above[1:]), 1.0)
    parts = _ratio(step * (true[:-1] - true[1:] + offset * np.log(ratio)), true[1:] + missed[1:])
    return float(parts.sum())


def _ratio(a: Value, b: Value) -> Value:
    """Returns the quotient; 0 where the divisor is 0."""
    a, b = np.asarray(a, float), np.asarray(b, float)
    return np.divide(a, b, out=np.zeros(np.broadcast_shapes(a.shape, b.shape)), where=b != 0)


def _weighted(values: Value, sample_weight: Value) -> tuple[AnyArray, AnyArray]:
    """Returns the values and a weight for each, as float64 on the device of the values."""
    values = as_array(read(values))
    xp = namespace(device_of(values))
    with device_scope(device_of(values)):
        values = values.astype(xp.float64)
        weights = xp.asarray(1.0 if sample_weight is None else as_array(read(sample_weight))).astype(xp.float64)
        if 0 < weights.ndim < values.ndim:
            weights = weights.reshape(weights.shape + (1,) * (values.ndim - weights.ndim))
        try:
            return values, xp.broadcast_to(weights, values.shape)
        except ValueError:
            raise ValueError(
                f"weights of shape {weights.shape} do not fit values of shape {values.shape}; give one for each value, "
                "or one for each row of them"
            ) from None


def _alike(y_true: Value, y_pred: Value) -> tuple[AnyArray, AnyArray]:
    labels, predictions = as_array(read(y_true)), as_array(read(y_pred))
    if labels.shape != predictions.shape:
        raise ValueError(f"labels of shape {labels.shape} and predictions of shape {predictions.shape} differ")
    return labels, predictions
