"""Metrics on every kind of strategy: filled by replicas, combined when they are read, some as Keras computes them; and
averages of losses: what all replicas get adds up to the mean over the global batch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import psclient as ps
from tests.kit.cases import once, search
from tests.kit.strategies import USUAL, by_replica, in_replicas, kind_of, merged, refused, replicas, variable

LABELS = np.array([0, 0, 1, 1])
SCORES = np.array([0.0, 0.5, 0.3, 0.9], "float32")
"""The example in Keras's document of AUC."""


# ---- Sum and Mean ----


def test_a_mean_counts_values_and_not_batches(strategy):
    """Batches of different sizes, and empty ones, weigh by what is in them. 0 before the first value, and again after a
    reset by either name, in cross-replica and in replica context."""
    mean, values = made(strategy, ps.metrics.Mean), np.arange(7.0)
    assert mean.result() == 0.0
    dealt(strategy, mean.update_state, values)
    dealt(strategy, mean.update_state, np.array([100.0]))
    assert mean.result() == pytest.approx((values.sum() + 100.0) / 8)
    strategy.run(lambda: mean.update_state(np.empty((0, 3))))
    assert mean.result() == pytest.approx((values.sum() + 100.0) / 8)
    for reset in (mean.reset_state, mean.reset_states, lambda: strategy.run(mean.reset_state)):
        reset()
        assert mean.result() == 0.0
        strategy.run(lambda: mean.update_state([4.0]))
        assert mean.result() == 4.0


def test_a_sum_is_over_all_replicas(strategy):
    """0 before the first value; of numbers, lists, variables, values of an all-reduce, and arrays of any shape. Counts
    are exact over long epochs: single precision would stop at 16777216."""
    total, n, expected = made(strategy, ps.metrics.Sum), replicas(strategy), 0.0
    v = variable(strategy, [1.0, 2.0])
    assert total.result() == 0.0
    in_replicas(strategy, lambda replica: total.update_state(np.full((2, 2), replica, "float32")))
    expected += 4 * n * (n - 1) / 2
    reduced = lambda: ps.get_replica_context().all_reduce("sum", np.ones(2))  # noqa: E731
    given = [([1, 2], 3), (0.5, 0.5), (v, 3), (reduced, 2 * n), (np.int64(0), 0), (np.float32(2**24), 2**24)]
    for value, added in (*given, (np.ones(3, "float16"), 3)):
        strategy.run(lambda x=value: total.update_state(x() if callable(x) else x))
        expected += added * n
        assert total.result() == expected


def test_weights_count_values_and_rows(strategy):
    """One for each value, for each row, or for all; of weight 0 nothing is left."""
    for kind, expected in ((ps.metrics.Mean, (1 * 1 + 2 * 3) / 4), (ps.metrics.Sum, 7.0)):
        metric = made(strategy, kind)
        dealt(strategy, metric.update_state, np.array([1.0, 2.0, 50.0]), np.array([1.0, 3.0, 0.0]))
        assert metric.result() == pytest.approx(expected)
    rows = made(strategy, ps.metrics.Mean)
    dealt(strategy, rows.update_state, np.array([[1.0, 3.0], [4.0, 4.0]]), np.array([3.0, 1.0]))
    assert rows.result() == pytest.approx((4 * 3 + 8 * 1) / 8)
    whole = made(strategy, ps.metrics.Sum)
    strategy.run(lambda: whole.update_state([1.0, 2.0], 2))
    assert whole.result() == 6.0 * replicas(strategy)
    refused(ValueError, "weights of shape", lambda: strategy.run(lambda: rows.update_state(np.ones(3), np.ones(2))))


def test_a_result_is_one_round(strategy):
    """Of however many variables; what replicas add makes none. Without servers there are no rounds at all. Two of a
    class, or of one name, have variables of their own; they are not trained."""
    metrics = [made(strategy, ps.metrics.Mean), made(strategy, ps.metrics.AUC)]
    before = getattr(strategy, "round", 0)
    strategy.run(lambda: metrics[0].update_state([1.0]))
    strategy.run(lambda: metrics[1].update_state(LABELS, SCORES))
    assert getattr(strategy, "round", 0) == before
    for metric in metrics:
        metric.result()
        before += kind_of(strategy) == "embedded"
        assert getattr(strategy, "round", 0) == before
    first, second = made(strategy, lambda: ps.metrics.Mean("loss")), made(strategy, lambda: ps.metrics.Mean("loss"))
    strategy.run(lambda: first.update_state([1.0]))
    assert (first.result(), second.result()) == (1.0, 0.0)
    assert not any(v.trainable for v in first.variables)
    if kind_of(strategy) != "default":
        assert len({v.name for v in (*first.variables, *second.variables)}) == 4


def test_a_metric_of_one_s_own(strategy):
    """It adds to sums in replicas, and computes from their totals; `reset_states` resets it in its own way."""

    class Variance(ps.metrics.Metric):
        def __init__(self):
            super().__init__()
            self.sums = self.add_variable("sums", (3,))

        def reset_state(self):
            super().reset_state()
            self.count = 0

        def update_state(self, values):
            x = np.asarray(values)
            self.sums.assign_add(np.array([x.size, x.sum(), (x * x).sum()]))

        def result(self):
            ((count, total, squares),) = self.totals()
            return squares / count - (total / count) ** 2

    variance, values = made(strategy, Variance), np.arange(9.0)
    dealt(strategy, variance.update_state, values)
    assert variance.result() == pytest.approx(values.var())
    assert variance.name == "variance"
    variance.count = 1
    variance.reset_states()
    assert variance.count == 0
    assert not any(variance.sums.numpy())


@pytest.mark.parametrize(
    ("curve", "method", "weights", "expected"),
    [
        ("ROC", "interpolation", None, 0.75),
        ("ROC", "interpolation", (1, 0, 0, 1), 1.0),
        ("ROC", "minoring", None, 0.5),
        ("ROC", "majoring", None, 1.0),
        # Thresholds -, 0.5, +: tp 2 1 0, fp 2 0 0. From 0.5 to + precision stays 1: 1/2. From - to 0.5 it is
        # slope 1/3, intercept 1 - 1/3: 1/3 * (1 + 2/3 * ln 4) / 2.
        ("PR", "interpolation", None, 0.5 + (1 / 3) * (1 + (2 / 3) * np.log(4)) / 2),
    ],
)
def test_areas_by_hand(strategy, curve, method, weights, expected):
    """Over three thresholds: that of 0.5, and those outside of all predictions."""
    auc = made(strategy, lambda: ps.metrics.AUC(3, curve, method))
    assert auc.result() == 0.0
    arrays = (LABELS, SCORES) if weights is None else (LABELS, SCORES, np.array(weights, float))
    dealt(strategy, auc.update_state, *arrays)
    assert auc.result() == pytest.approx(expected, abs=1e-6)
    auc.reset_state()
    strategy.run(lambda: auc.update_state(np.ones(0), np.ones(0)))
    assert auc.result() == 0.0


@search(0.5)
@given(
    pairs=st.lists(st.tuples(st.booleans(), st.integers(0, 20)), min_size=2, max_size=40).filter(
        lambda pairs: len({label for label, _ in pairs}) == 2
    )
)
def test_between_all_scores_an_area_is_exact(pairs):
    """Where a threshold stands between any two scores, the ROC curve is the true one."""
    labels = np.array([label for label, _ in pairs])
    scores = np.array([score / 20 for _, score in pairs])
    auc = ps.metrics.AUC(thresholds=[(k + 0.5) / 20 for k in range(20)])
    auc.update_state(labels, scores)
    ahead = scores[labels][:, None] - scores[~labels]  # the area is how often a true one is ahead of a false one
    area = np.mean((ahead > 0) + 0.5 * (ahead == 0))
    assert auc.result() == pytest.approx(area, abs=1e-9)


# ---- Predictions and labels, as Keras computes them ----

M = ps.metrics
_RNG = np.random.default_rng(3)
N = 11
KERAS_SCORES, CLASSES = _RNG.normal(size=(N, 4)).round(2), _RNG.integers(0, 4, N)
SHARES, TRUE = _RNG.uniform(size=(N, 2)).round(2), _RNG.integers(0, 2, (N, 2))
TARGETS, WEIGHTS = _RNG.normal(size=(N, 2)).round(2), _RNG.integers(0, 4, N) / 2
WEIGHTS_OF_EACH = _RNG.integers(0, 4, (N, 2)) / 2

CASES = {
    "sparse": (M.SparseCategoricalAccuracy, CLASSES, KERAS_SCORES, 0.2727272727272727, 0.125),
    "sparse column": (M.SparseCategoricalAccuracy, CLASSES[:, None], KERAS_SCORES, 0.2727272727272727, 0.125),
    "binary": (M.BinaryAccuracy, TRUE, SHARES, 0.45454545454545453, 0.34375),
    "binary 0.3": (lambda: M.BinaryAccuracy(threshold=0.3), TRUE, SHARES, 0.4090909090909091, 0.34375),
    "binary column": (M.BinaryAccuracy, TRUE[:, 0], SHARES[:, :1], 0.45454545454545453, 0.375),
    "precision": (M.Precision, TRUE, SHARES, 0.2857142857142857, 0.14285714285714285),
    "recall": (M.Recall, TRUE, SHARES, 0.6666666666666666, 0.5),
    "precision 3": (
        lambda: M.Precision([0.2, 0.5, 1.0]),
        *(TRUE, SHARES, [0.3333333333333333, 0.2857142857142857, 0.0], [0.25, 0.14285714285714285, 0.0]),
    ),
    "recall 3": (
        lambda: M.Recall([0.2, 0.5, 1.0]),
        *(TRUE, SHARES, [1.0, 0.6666666666666666, 0.0], [1.0, 0.5, 0.0]),
    ),
    "mse": (M.MeanSquaredError, TARGETS, SHARES, 1.0783500000000001, 1.1109624999999999),
    "mse column": (M.MeanSquaredError, TARGETS[:, 0], SHARES[:, :1], 1.157918181818182, None),
    "rmse": (M.RootMeanSquaredError, TARGETS, SHARES, 1.0384363244802255, 1.0540220585927031),
}
"""Labels, predictions, and what the classes of `keras.metrics` of these names give, without weights and with `WEIGHTS`:
Keras 3.15.1 on TensorFlow 2.21.0, floatx float64."""


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
    make, labels, predictions, *keras = CASES[name]
    plain, weighted = made(strategy, make), made(strategy, make)
    zero = np.zeros_like(keras[0])
    np.testing.assert_array_equal(plain.result(), zero)
    given = predictions.astype(dtype)
    dealt(strategy, plain.update_state, labels, given)
    dealt(strategy, weighted.update_state, labels, given, WEIGHTS)
    room = 1e-12 if dtype == np.float64 else 1e-6
    for metric, expected in zip((plain, weighted), keras, strict=True):
        if expected is not None:
            np.testing.assert_allclose(metric.result(), expected, rtol=room)
    for reset in (plain.reset_state, lambda: strategy.run(weighted.reset_state)):
        reset()
    np.testing.assert_array_equal(plain.result(), zero)
    np.testing.assert_array_equal(weighted.result(), zero)


def test_a_replica_s_result_is_its_own(strategy):
    """Only across replicas it is over all; one prediction in each, right in the first."""
    n = replicas(strategy)
    for make in (M.BinaryAccuracy, M.Precision):
        metric = made(strategy, make)
        found = in_replicas(strategy, lambda replica, m=metric: m([float(replica == 0)], [0.75]))
        assert found == (1.0, *(0.0,) * (n - 1))
        assert metric.result() == pytest.approx(1 / n)
    mean = made(strategy, M.Mean)
    assert in_replicas(strategy, lambda replica: mean([float(replica)])) == tuple(map(float, range(n)))
    with strategy.scope():
        assert mean.result() == (n - 1) / 2


PLACES = {
    "accuracy": (M.Accuracy, np.array([1, 2, 3, 4, 0]), np.array([0, 2, 3, 4, 1]), None, 0.6),
    "weighted": (M.Accuracy, np.array([1, 2, 3, 0]), np.array([0, 2, 3, 1]), np.array([1.0, 1, 0, 2]), 0.25),
    "precision": (M.Precision, TRUE, SHARES, WEIGHTS_OF_EACH, 0.35),
    "recall": (M.Recall, TRUE, SHARES, WEIGHTS_OF_EACH, 0.7),
    "rmse": (M.RootMeanSquaredError, TARGETS, SHARES, WEIGHTS_OF_EACH, 1.230892533315329),
    "mse of one dimension": (M.MeanSquaredError, TARGETS[:, 0], SHARES[:, 0], None, CASES["mse column"][3]),
    "rmse of one dimension": (M.RootMeanSquaredError, TARGETS[:, 0], SHARES[:, 0], None, 1.0760660675898028),
    "binary of one dimension": (M.BinaryAccuracy, TRUE[:, 0], SHARES[:, 0], None, CASES["binary column"][3]),
    "at a threshold": (lambda: M.BinaryAccuracy(threshold=0.3), np.array([0, 1]), np.float32([0.3, 0.3]), None, 0.5),
    "recall at it": (lambda: M.Recall(0.3), np.array([0, 1]), np.float32([0.3, 0.3]), None, 0.0),
    "whole numbers": (M.Precision, np.array([0, 1, 1]), np.array([0, 1, 1]), None, 1.0),
    "logits": (lambda: M.BinaryAccuracy("l", threshold=0), np.array([0, 1, 1]), np.array([-3.0, 4, -1]), None, 2 / 3),
    "several greatest": (M.SparseCategoricalAccuracy, np.array([0, 5]), np.array([[0.5, 0.5], [0.1, 0.2]]), None, 0.5),
}


@pytest.mark.parametrize("name", PLACES)
def test_each_prediction_counts_in_its_place(strategy, name):
    """With its weight, where weights have the predictions' shape; Keras counts a batch of one dimension as one value.
    What is at a threshold is not above it, in the dtype of the predictions: a float32 of 0.3 is not above 0.3. Of
    several greatest the first counts, and a label that is no class is met by nothing, as in Keras."""
    make, labels, predictions, weights, expected = PLACES[name]
    metric = made(strategy, make)
    dealt(strategy, metric.update_state, labels, predictions, *([] if weights is None else [weights]))
    assert metric.result() == pytest.approx(expected)
    if weights is WEIGHTS_OF_EACH:
        with pytest.raises(ValueError, match=r"weights of shape \(3,\) do not match values of shape \(11, 2\)"):
            strategy.run(lambda: metric.update_state(labels, predictions, np.ones(3)))
        assert metric.result() == pytest.approx(expected)


BAD_BATCHES = {
    "labels differ": (
        (M.BinaryAccuracy, M.Precision, M.Recall, M.MeanSquaredError, M.RootMeanSquaredError, M.Accuracy),
        (np.ones(2), np.ones((2, 2))),
        r"labels of shape \(2,\) and predictions of shape \(2, 2\)",
    ),
    "no label for each": (
        (M.SparseCategoricalAccuracy,),
        (np.ones(2), np.ones((3, 2))),
        r"labels of shape \(2,\) do not match predictions of shape \(3, 2\)",
    ),
    "other numbers": ((M.AUC,), (np.ones(2), np.ones(3)), "labels of shape"),
    **{
        f"{wrong} is no probability": ((M.Precision, M.Recall, M.AUC), ([1, 0], [0.9, wrong]), "between 0 and 1; pass")
        for wrong in (1.5, -0.1, np.nan)
    },
}


@pytest.mark.parametrize("what", BAD_BATCHES)
def test_a_batch_that_makes_no_sense_is_refused(strategy, what):
    """Nothing of it is counted."""
    kinds, arrays, says = BAD_BATCHES[what]
    for kind in kinds:
        metric = made(strategy, kind)
        refused(ValueError, says, lambda m=metric: strategy.run(lambda: m.update_state(*arrays)))
        assert metric.result() == 0.0


NOT_THRESHOLDS = "thresholds must be one or several numbers between 0 and 1"
BAD_ARGUMENTS = [
    *(
        (kind, {"thresholds": x}, NOT_THRESHOLDS)
        for kind in (M.Precision, M.Recall)
        for x in (1.5, [], [[0.5]], np.nan)
    ),
    (M.BinaryAccuracy, {"threshold": np.nan}, "threshold is nan, and must be a finite number"),
    (M.AUC, {"curve": "roc"}, "use 'ROC' or 'PR'"),
    (M.AUC, {"summation_method": "left"}, "use 'interpolation', 'minoring' or 'majoring'"),
    (M.AUC, {"thresholds": [0.5, 1.5]}, "must lie between 0 and 1"),
    (M.AUC, {"num_thresholds": 1}, "use at least 2"),
]


def test_arguments_that_make_no_sense_are_refused():
    """Before a variable is made."""
    for kind, arguments, says in BAD_ARGUMENTS:
        refused(ValueError, says, lambda kind=kind, arguments=arguments: kind(**arguments))


def test_a_metric_has_a_checkpoint(tmp_path):
    """By the names that Keras gives its counts."""
    precision = M.Precision()
    precision.update_state([1, 0], [0.9, 0.8])
    path = ps.train.Checkpoint(metric=precision).write(str(tmp_path / "ckpt"))
    again = M.Precision()
    ps.train.Checkpoint(metric=again).restore(path).assert_consumed()
    assert again.result() == 0.5
    assert set(again._trackable_children()) == {"true_positives", "false_positives"}
    assert set(M.Recall()._trackable_children()) == {"true_positives", "false_negatives"}


# ---- Averages of losses ----

AVERAGE = ps.losses.compute_average_loss


def test_the_sum_over_replicas_is_the_mean_over_the_global_batch(strategy):
    """The batch of a replica, times all replicas, is the global one. Where replicas have different numbers of examples,
    or none, its size is given."""

    def total(strategy, values):
        return float(strategy.reduce("sum", values, axis=None))

    n = replicas(strategy)
    losses = np.arange(3.0 * n)
    found = by_replica(strategy, lambda replica: AVERAGE(losses[replica::n]))
    assert total(strategy, found) == pytest.approx(losses.mean())
    rows = np.arange(4.0 * n).reshape(2 * n, 2)
    found = by_replica(strategy, lambda replica: AVERAGE(rows[replica::n]))
    assert total(strategy, found) == pytest.approx(rows.sum() / len(rows))
    losses = np.arange(1.0, 2 * n)  # one replica has one less
    found = by_replica(strategy, lambda replica: AVERAGE(losses[replica::n], global_batch_size=len(losses)))
    assert total(strategy, found) == pytest.approx(losses.mean())
    first = np.array([3.0])
    found = by_replica(strategy, lambda replica: AVERAGE(first[replica:], global_batch_size=np.int64(1)))
    assert total(strategy, found) == 3.0
    assert in_replicas(strategy, lambda _: float(AVERAGE(np.zeros(0, "float32")))) == (0.0,) * n
    assert in_replicas(strategy, lambda _: float(AVERAGE(np.ones(2), global_batch_size=0))) == (0.0,) * n


def test_weights_multiply_losses_and_not_the_size_of_the_batch(strategy):
    """For each loss, for each row, or for all; TensorFlow 2.21.0 has 7 / 3 and 17 / 2 for the first two."""
    n = replicas(strategy)
    for losses, weights, expected in (
        ([1.0, 2.0, 3.0], [1.0, 0.0, 2.0], 7 / 3),
        ([[1.0, 2.0], [3.0, 4.0]], [1.0, 2.0], 17 / 2),
        ([[1.0, 2.0], [3.0, 4.0]], [[1.0, 0.0], [0.0, 2.0]], 9 / 2),
        ([1.0, 2.0], 0.5, 1.5 / 2),
        (np.array([1, 2]), 0.5, 1.5 / 2),
    ):
        found = in_replicas(strategy, lambda _, a=losses, b=weights: float(AVERAGE(a, sample_weight=b)))
        assert found == pytest.approx((expected / n,) * n)
    with pytest.raises(ValueError, match=r"weights of shape \(2,\) do not match values of shape \(3,\)"):
        strategy.run(lambda: AVERAGE(np.ones(3), [1.0, 2.0]))


def test_penalties_count_once(strategy):
    """Each replica computes the same; an array of them is summed."""
    n = replicas(strategy)
    scale = ps.losses.scale_regularization_loss
    for penalties in (3.0, np.array([1.0, 2.0]), variable(strategy, [1.0, 2.0, 0.0])):
        found = by_replica(strategy, lambda _, x=penalties: np.float64(scale(x)))
        assert float(strategy.reduce("sum", found, axis=None)) == pytest.approx(3.0)
    assert in_replicas(strategy, lambda _: scale(np.float32(2)).dtype) == (np.dtype("float32"),) * n


def test_averages_are_of_replicas(strategy):
    """In cross-replica context there is no replica's batch; a size that is given needs none. What is no batch is
    refused by its value."""
    if kind_of(strategy) == "default":
        assert (AVERAGE([2.0, 4.0]), ps.losses.scale_regularization_loss(2.0)) == (3.0, 2.0)
    else:
        for fn in (AVERAGE, ps.losses.scale_regularization_loss):
            with strategy.scope(), pytest.raises(RuntimeError, match=f"{fn.__name__} needs replica context"):
                fn(np.ones(2))
    with pytest.raises(RuntimeError, match="compute_average_loss needs replica context"):
        merged(strategy, lambda _: AVERAGE(np.ones(2)))
    assert float(merged(strategy, lambda _: AVERAGE(np.ones(2), global_batch_size=4))) == 0.5
    for losses, size, says in (
        (np.float32(1), None, "per_example_loss has no dimensions; pass one loss per example"),
        (np.ones(2), 2.0, "global_batch_size is 2.0, and must be a whole number"),
        (np.ones(2), True, "global_batch_size is True, and must be a whole number"),
        (np.ones(2), -1, "global_batch_size is -1, and must be at least 0"),
    ):
        with pytest.raises(ValueError, match=says):
            strategy.run(AVERAGE, (losses,), {"global_batch_size": size})
