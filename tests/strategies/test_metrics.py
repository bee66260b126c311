"""Metrics on every kind of strategy: filled by replicas, combined when they are read."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import psclient as ps
from tests.kit.cases import once, search
from tests.kit.strategies import USUAL, in_replicas, kind_of, replicas

LABELS = np.array([0, 0, 1, 1])
SCORES = np.array([0.0, 0.5, 0.3, 0.9], "float32")
"""The example in Keras's document of AUC."""


def made(strategy, kind, *args, **keys):
    """A metric of the strategy."""
    with strategy.scope():
        return kind(*args, **keys)


def dealt(strategy, fn, *arrays):
    """Calls a function with each replica's part of the arrays, which may be empty."""
    n = replicas(strategy)
    in_replicas(strategy, lambda replica: fn(*(array[replica::n] for array in arrays)))


def test_a_metric_is_reset_by_either_name(strategy):
    """Also one that resets itself in its own way."""

    class Own(ps.metrics.Sum):
        def reset_state(self):
            super().reset_state()
            self.count = 0

    for kind in (ps.metrics.Mean, Own):
        for reset in ("reset_state", "reset_states"):
            metric = made(strategy, kind)
            metric.count = 1
            strategy.run(lambda metric=metric: metric.update_state(2.0))
            getattr(metric, reset)()
            assert (metric.result(), metric.count) == (0.0, kind is not Own)


# ---- Sum and Mean ----


def test_a_sum_is_over_all_replicas(strategy):
    """0 before the first value; of numbers, lists and arrays of any shape."""
    total, n = made(strategy, ps.metrics.Sum), replicas(strategy)
    assert total.result() == 0.0
    in_replicas(strategy, lambda replica: total.update_state(np.full((2, 2), replica, "float32")))
    strategy.run(lambda: total.update_state([1, 2]))
    strategy.run(lambda: total.update_state(0.5))
    assert total.result() == 4 * n * (n - 1) / 2 + 3.5 * n


def test_a_mean_counts_values_and_not_batches(strategy):
    """Batches of different sizes, and empty ones, weigh by what is in them."""
    mean, values = made(strategy, ps.metrics.Mean), np.arange(7.0)
    assert mean.result() == 0.0
    dealt(strategy, mean.update_state, values)
    dealt(strategy, mean.update_state, np.array([100.0]))
    assert mean.result() == pytest.approx((values.sum() + 100.0) / 8)
    strategy.run(lambda: mean.update_state(np.empty((0, 3))))
    assert mean.result() == pytest.approx((values.sum() + 100.0) / 8)


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
    with pytest.raises(ValueError, match="weights of shape"):
        strategy.run(lambda: rows.update_state(np.ones(3), np.ones(2)))


def test_counts_are_exact_over_long_epochs(strategy):
    """Single precision would stop at 16777216."""
    total = made(strategy, ps.metrics.Sum)
    strategy.run(lambda: total.update_state(np.float32(2**24)))
    strategy.run(lambda: total.update_state(np.ones(3, "float16")))
    assert total.result() == (2**24 + 3) * replicas(strategy)


def test_a_reset_begins_anew(strategy):
    """In cross-replica and in replica context."""
    mean = made(strategy, ps.metrics.Mean)
    for reset in (mean.reset_state, lambda: strategy.run(mean.reset_state)):
        strategy.run(lambda: mean.update_state([4.0]))
        assert mean.result() == 4.0
        reset()
        assert mean.result() == 0.0


def test_a_replica_s_result_is_its_own(strategy):
    """Only across replicas it is over all."""
    mean, n = made(strategy, ps.metrics.Mean), replicas(strategy)

    def step(replica):
        mean.update_state([float(replica)])
        return mean.result()

    assert in_replicas(strategy, step) == tuple(map(float, range(n)))
    assert mean.result() == (n - 1) / 2
    with strategy.scope():
        assert mean.result() == (n - 1) / 2


def test_a_result_is_one_round(strategy):
    """Of however many variables; what replicas add makes none. Without servers there are no rounds at all."""
    metrics = [made(strategy, ps.metrics.Mean), made(strategy, ps.metrics.AUC)]
    before = getattr(strategy, "round", 0)
    strategy.run(lambda: metrics[0].update_state([1.0]))
    strategy.run(lambda: metrics[1].update_state(LABELS, SCORES))
    assert getattr(strategy, "round", 0) == before
    for metric in metrics:
        metric.result()
        before += kind_of(strategy) == "embedded"
        assert getattr(strategy, "round", 0) == before


def test_metrics_are_named_apart(strategy):
    """Two of a class, or of one name, have variables of their own; they are not trained."""
    first, second = made(strategy, ps.metrics.Mean, "loss"), made(strategy, ps.metrics.Mean, "loss")
    strategy.run(lambda: first.update_state([1.0]))
    assert (first.result(), second.result()) == (1.0, 0.0)
    assert not any(v.trainable for v in first.variables)
    if kind_of(strategy) != "default":
        assert len({v.name for v in (*first.variables, *second.variables)}) == 4


def test_a_metric_of_one_s_own(strategy):
    """It adds to sums in replicas, and computes from their totals."""

    class Variance(ps.metrics.Metric):
        def __init__(self):
            super().__init__()
            self.sums = self.add_variable("sums", (3,))

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


def test_a_metric_takes_what_replicas_have(strategy):
    """Variables, values of an all-reduce, and integers."""
    mean, n = made(strategy, ps.metrics.Mean), replicas(strategy)
    with strategy.scope():
        v = ps.Variable([1.0, 2.0])

    def step():
        mean.update_state(v)
        mean.update_state(ps.get_replica_context().all_reduce("sum", np.ones(2)))
        mean.update_state(np.int64(0))

    strategy.run(step)
    assert mean.result() == pytest.approx((3.0 + 2 * n) / 5)


# ---- Accuracy ----


def test_accuracy_is_how_often_labels_are_met(strategy):
    """With weights, over batches of different sizes."""
    accuracy, weighted = made(strategy, ps.metrics.Accuracy), made(strategy, ps.metrics.Accuracy, "weighted")
    labels, predictions = np.array([1, 2, 3, 4, 0]), np.array([0, 2, 3, 4, 1])
    dealt(strategy, accuracy.update_state, labels, predictions)
    dealt(strategy, weighted.update_state, labels, predictions, np.array([1.0, 1.0, 0.0, 0.0, 2.0]))
    assert (accuracy.result(), weighted.result()) == (pytest.approx(0.6), pytest.approx(0.25))
    with pytest.raises(ValueError, match=r"labels of shape \(2,\) and predictions of shape \(2, 1\)"):
        strategy.run(lambda: accuracy.update_state(np.ones(2), np.ones((2, 1))))


# ---- AUC ----


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
    auc = made(strategy, ps.metrics.AUC, 3, curve, method)
    assert auc.result() == 0.0
    arrays = (LABELS, SCORES) if weights is None else (LABELS, SCORES, np.array(weights, float))
    dealt(strategy, auc.update_state, *arrays)
    assert auc.result() == pytest.approx(expected, abs=1e-6)
    auc.reset_state()
    assert auc.result() == 0.0


SCIKIT_LEARN = {
    "ROC": (0.8494495873623968, 0.8493405550039868),
    "PR": (0.8499761228204217, 0.8490187835507501),
}
"""What `roc_auc_score` and `average_precision_score` of scikit-learn 1.9.1 give, without and with weights."""


@once(strategy=USUAL, curve=SCIKIT_LEARN)
def test_areas_are_scikit_learn_s(strategy, curve):
    """Within what the thresholds leave, with ties, weights and noise."""
    rng = np.random.default_rng(5)
    labels = rng.integers(0, 2, 4000)
    scores = np.clip(rng.normal(0.35 + 0.3 * labels, 0.2), 0, 1).round(3)
    weights = rng.uniform(0.5, 2.0, 4000)
    for more, expected in zip(([], [weights]), SCIKIT_LEARN[curve], strict=True):
        auc = made(strategy, ps.metrics.AUC, 1001, curve)
        for batch in np.array_split(np.arange(4000), 3):
            dealt(strategy, auc.update_state, *(array[batch] for array in (labels, scores, *more)))
        assert auc.result() == pytest.approx(expected, abs=2e-3)


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


def test_predictions_are_probabilities(strategy):
    """Anything else is refused, and nothing of its batch is counted."""
    auc = made(strategy, ps.metrics.AUC)
    for wrong in (1.5, -0.1, np.nan):
        with pytest.raises(ValueError, match="between 0 and 1; give probabilities"):
            strategy.run(lambda wrong=wrong: auc.update_state(np.array([1, 0]), np.array([0.5, wrong])))
    with pytest.raises(ValueError, match="labels of shape"):
        strategy.run(lambda: auc.update_state(np.ones(2), np.ones(3)))
    assert auc.result() == 0.0
    strategy.run(lambda: auc.update_state(np.ones(0), np.ones(0)))
    assert auc.result() == 0.0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"curve": "roc"}, "write 'ROC' or 'PR'"),
        ({"summation_method": "left"}, "write 'interpolation', 'minoring' or 'majoring'"),
        ({"thresholds": [0.5, 1.5]}, "must lie between 0 and 1"),
        ({"num_thresholds": 1}, "take at least 2"),
    ],
)
def test_a_curve_is_described(arguments, says):
    """What is none is refused before a variable is made."""
    with pytest.raises(ValueError, match=says):
        ps.metrics.AUC(**arguments)
