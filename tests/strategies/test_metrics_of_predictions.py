"""Metrics that compare predictions with labels, on every kind of strategy: as Keras computes them."""

from __future__ import annotations

import numpy as np
import pytest

import psclient as ps
from tests.kit.cases import once
from tests.kit.strategies import USUAL, in_replicas, replicas

M = ps.metrics
_RNG = np.random.default_rng(3)
N = 11
SCORES, CLASSES = _RNG.normal(size=(N, 4)).round(2), _RNG.integers(0, 4, N)
SHARES, LABELS = _RNG.uniform(size=(N, 2)).round(2), _RNG.integers(0, 2, (N, 2))
TARGETS, WEIGHTS = _RNG.normal(size=(N, 2)).round(2), _RNG.integers(0, 4, N) / 2
WEIGHTS_OF_EACH = _RNG.integers(0, 4, (N, 2)) / 2

THREE = [0.2, 0.5, 1.0]
CASES = {
    "sparse": (M.SparseCategoricalAccuracy, CLASSES, SCORES),
    "sparse column": (M.SparseCategoricalAccuracy, CLASSES[:, None], SCORES),
    "binary": (M.BinaryAccuracy, LABELS, SHARES),
    "binary 0.3": (lambda: M.BinaryAccuracy(threshold=0.3), LABELS, SHARES),
    "binary column": (M.BinaryAccuracy, LABELS[:, 0], SHARES[:, :1]),
    "precision": (M.Precision, LABELS, SHARES),
    "recall": (M.Recall, LABELS, SHARES),
    "precision 3": (lambda: M.Precision(THREE), LABELS, SHARES),
    "recall 3": (lambda: M.Recall(THREE), LABELS, SHARES),
    "mse": (M.MeanSquaredError, TARGETS, SHARES),
    "mse column": (M.MeanSquaredError, TARGETS[:, 0], SHARES[:, :1]),
    "rmse": (M.RootMeanSquaredError, TARGETS, SHARES),
}
KERAS = {
    "sparse": (0.2727272727272727, 0.125),
    "sparse column": (0.2727272727272727, 0.125),
    "binary": (0.45454545454545453, 0.34375),
    "binary 0.3": (0.4090909090909091, 0.34375),
    "binary column": (0.45454545454545453, 0.375),
    "precision": (0.2857142857142857, 0.14285714285714285),
    "recall": (0.6666666666666666, 0.5),
    "precision 3": ([0.3333333333333333, 0.2857142857142857, 0.0], [0.25, 0.14285714285714285, 0.0]),
    "recall 3": ([1.0, 0.6666666666666666, 0.0], [1.0, 0.5, 0.0]),
    "mse": (1.0783500000000001, 1.1109624999999999),
    "rmse": (1.0384363244802255, 1.0540220585927031),
    "mse column": (1.157918181818182, None),
}
"""What the classes of `keras.metrics` of these names give, without weights and with `WEIGHTS`: Keras 3.15.1 on
TensorFlow 2.21.0, floatx float64."""

WITH_WEIGHTS_OF_EACH = {
    "precision": (M.Precision, LABELS, 0.35),
    "recall": (M.Recall, LABELS, 0.7),
    "rmse": (M.RootMeanSquaredError, TARGETS, 1.230892533315329),
}
"""The same with `WEIGHTS_OF_EACH`."""


def made(strategy, make):
    """A metric of the strategy."""
    with strategy.scope():
        return make()


def dealt(strategy, fn, *arrays):
    """Calls a function with each replica's part of the arrays, in three batches; parts may be empty."""
    n = replicas(strategy)
    for batch in (slice(0, 4), slice(4, 7), slice(7, None)):
        in_replicas(strategy, lambda replica, b=batch: fn(*(array[b][replica::n] for array in arrays)))


@once(strategy=USUAL, dtype=[np.float64, np.float32], name=CASES)
def test_a_metric_is_keras(strategy, name, dtype):
    """Over batches of different sizes and all replicas, some of which have nothing; with weights of rows, too."""
    make, labels, predictions = CASES[name]
    plain, weighted = made(strategy, make), made(strategy, make)
    zero = np.zeros_like(KERAS[name][0])
    np.testing.assert_array_equal(plain.result(), zero)
    given = predictions.astype(dtype)
    dealt(strategy, plain.update_state, labels, given)
    dealt(strategy, weighted.update_state, labels, given, WEIGHTS)
    room = 1e-12 if dtype == np.float64 else 1e-6
    for metric, expected in zip((plain, weighted), KERAS[name], strict=True):
        if expected is not None:
            np.testing.assert_allclose(metric.result(), expected, rtol=room)
    for reset in (plain.reset_state, lambda: strategy.run(weighted.reset_state)):
        reset()
    np.testing.assert_array_equal(plain.result(), zero)
    np.testing.assert_array_equal(weighted.result(), zero)


def test_each_prediction_has_its_weight(strategy):
    """Where weights have the predictions' shape."""
    for make, labels, expected in WITH_WEIGHTS_OF_EACH.values():
        metric = made(strategy, make)
        dealt(strategy, metric.update_state, labels, SHARES, WEIGHTS_OF_EACH)
        assert metric.result() == pytest.approx(expected)
        with pytest.raises(ValueError, match=r"weights of shape \(3,\) do not fit values of shape \(11, 2\)"):
            strategy.run(lambda m=metric, labels=labels: m.update_state(labels, SHARES, np.ones(3)))
        assert metric.result() == pytest.approx(expected)


def test_a_batch_of_one_dimension_has_a_value_in_each_place(strategy):
    """Keras counts such a batch as one value in the mean squared error; its other metrics do as here."""
    for make, labels, expected in (
        (M.MeanSquaredError, TARGETS, KERAS["mse column"][0]),
        (M.RootMeanSquaredError, TARGETS, 1.0760660675898028),
        (M.BinaryAccuracy, LABELS, KERAS["binary column"][0]),
    ):
        metric = made(strategy, make)
        dealt(strategy, metric.update_state, labels[:, 0], SHARES[:, 0])
        assert metric.result() == pytest.approx(expected)


def test_a_replica_s_result_is_its_own(strategy):
    """Only across replicas it is over all; one prediction in each, right in the first."""
    n = replicas(strategy)
    for make in (M.BinaryAccuracy, M.Precision):
        metric = made(strategy, make)
        found = in_replicas(strategy, lambda replica, m=metric: m([float(replica == 0)], [0.75]))
        assert found == (1.0, *(0.0,) * (n - 1))
        assert metric.result() == pytest.approx(1 / n)


def test_what_is_at_a_threshold_is_not_above_it(strategy):
    """In the dtype of the predictions: a float32 of 0.3 is not above 0.3."""
    predictions = np.array([0.3, 0.3], "float32")
    accuracy = made(strategy, lambda: M.BinaryAccuracy(threshold=0.3))
    recall = made(strategy, lambda: M.Recall(0.3))
    for metric in (accuracy, recall):
        strategy.run(lambda m=metric: m.update_state([0, 1], predictions))
    assert (accuracy.result(), recall.result()) == (0.5, 0.0)
    certain = made(strategy, M.Precision)
    strategy.run(lambda: certain.update_state([0, 1, 1], [0, 1, 1]))  # whole numbers
    assert certain.result() == 1.0


def test_of_several_greatest_the_first_counts(strategy):
    """As in Keras; a label that is no class is met by nothing."""
    metric = made(strategy, M.SparseCategoricalAccuracy)
    strategy.run(lambda: metric.update_state([0, 5], [[0.5, 0.5], [0.1, 0.2]]))
    assert metric.result() == 0.5


def test_shapes_that_do_not_fit_are_refused(strategy):
    """Nothing of such a batch is counted."""
    for make in (M.BinaryAccuracy, M.Precision, M.Recall, M.MeanSquaredError, M.RootMeanSquaredError):
        metric = made(strategy, make)
        with pytest.raises(ValueError, match=r"labels of shape \(2,\) and predictions of shape \(2, 2\) differ"):
            strategy.run(lambda m=metric: m.update_state(np.ones(2), np.ones((2, 2))))
        assert metric.result() == 0.0
    sparse = made(strategy, M.SparseCategoricalAccuracy)
    with pytest.raises(ValueError, match=r"labels of shape \(2,\) do not fit predictions of shape \(3, 2\)"):
        strategy.run(lambda: sparse.update_state(np.ones(2), np.ones((3, 2))))
    assert sparse.result() == 0.0


def test_predictions_are_probabilities(strategy):
    """Of precision and recall; anything else is refused, and nothing of its batch is counted."""
    for make in (M.Precision, M.Recall):
        metric = made(strategy, make)
        for wrong in (1.5, -0.1, np.nan):
            with pytest.raises(ValueError, match="between 0 and 1; give probabilities"):
                strategy.run(lambda m=metric, wrong=wrong: m.update_state([1, 1], [0.9, wrong]))
        assert metric.result() == 0.0


@pytest.mark.parametrize("thresholds", [1.5, [0.5, -0.1], [], [[0.5]], np.nan])
def test_thresholds_are_between_0_and_1(thresholds):
    """Refused before a variable is made."""
    for kind in (M.Precision, M.Recall):
        with pytest.raises(ValueError, match="thresholds must be one or several numbers between 0 and 1"):
            kind(thresholds)


def test_a_threshold_is_a_number():
    """Of the binary accuracy: also one beyond 0 and 1, as for logits."""
    with pytest.raises(ValueError, match="threshold is nan, and must be a finite number"):
        M.BinaryAccuracy(threshold=np.nan)
    accuracy = M.BinaryAccuracy("logits", threshold=0)
    accuracy.update_state([0, 1, 1], [-3.0, 4.0, -1.0])
    assert (accuracy.result(), accuracy.name) == (pytest.approx(2 / 3), "logits")


def test_a_metric_has_a_checkpoint(tmp_path):
    """By the names that Keras gives its counts."""
    precision = M.Precision()
    precision.update_state([1, 0], [0.9, 0.8])
    path = ps.train.Checkpoint(metric=precision).write(str(tmp_path / "ckpt"))
    again = M.Precision()
    ps.train.Checkpoint(metric=again).restore(path).assert_consumed()
    assert again.result() == 0.5
    assert set(again.trackable_children()) == {"true_positives", "false_positives"}
    assert set(M.Recall().trackable_children()) == {"true_positives", "false_negatives"}
