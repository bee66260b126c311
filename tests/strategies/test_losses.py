"""Averages of losses on every kind of strategy: what all replicas get adds up to the mean over the global batch."""

from __future__ import annotations

import numpy as np
import pytest

import psclient as ps
from tests.kit.strategies import by_replica, in_replicas, kind_of, merged, replicas, variable

AVERAGE = ps.losses.compute_average_loss


def total(strategy, values):
    """The sum over all replicas."""
    return float(strategy.reduce("sum", values, axis=None))


def test_the_sum_over_replicas_is_the_mean_over_the_global_batch(strategy):
    """The batch of a replica, times all replicas, is the global one."""
    n = replicas(strategy)
    losses = np.arange(3.0 * n)
    found = by_replica(strategy, lambda replica: AVERAGE(losses[replica::n]))
    assert total(strategy, found) == pytest.approx(losses.mean())
    rows = np.arange(4.0 * n).reshape(2 * n, 2)
    found = by_replica(strategy, lambda replica: AVERAGE(rows[replica::n]))
    assert total(strategy, found) == pytest.approx(rows.sum() / len(rows))


def test_a_last_batch_has_its_own_size(strategy):
    """Where replicas have different numbers of examples, or none, its size is given."""
    n = replicas(strategy)
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
    with pytest.raises(ValueError, match=r"weights of shape \(2,\) do not fit values of shape \(3,\)"):
        strategy.run(lambda: AVERAGE(np.ones(3), [1.0, 2.0]))


def test_gradients_of_averages_add_up_to_that_of_the_mean(strategy):
    """So an optimizer, which sums over replicas, makes one step of the whole batch."""
    n = replicas(strategy)
    w = variable(strategy, np.zeros(1))
    with strategy.scope():
        optimizer = ps.optimizers.SGD(1.0)
    targets = np.arange(2.0 * n)

    def step(replica):
        own = targets[replica::n]
        slopes = 2 * (w.numpy() - own)  # of the squared errors
        optimizer.apply_gradients([(np.array([AVERAGE(slopes)]), w)])

    in_replicas(strategy, step)
    assert w.numpy() == pytest.approx([2 * targets.mean()])


def test_penalties_count_once(strategy):
    """Each replica computes the same; an array of them is summed."""
    n = replicas(strategy)
    scale = ps.losses.scale_regularization_loss
    for penalties in (3.0, np.array([1.0, 2.0]), variable(strategy, [1.0, 2.0, 0.0])):
        found = by_replica(strategy, lambda _, x=penalties: np.float64(scale(x)))
        assert total(strategy, found) == pytest.approx(3.0)
    assert in_replicas(strategy, lambda _: scale(np.float32(2)).dtype) == (np.dtype("float32"),) * n


def test_averages_are_of_replicas(strategy):
    """In cross-replica context there is no replica's batch; a size that is given needs none."""
    if kind_of(strategy) == "default":
        assert (AVERAGE([2.0, 4.0]), ps.losses.scale_regularization_loss(2.0)) == (3.0, 2.0)
    with strategy.scope():
        for fn in (AVERAGE, ps.losses.scale_regularization_loss):
            if kind_of(strategy) != "default":
                with pytest.raises(RuntimeError, match=f"{fn.__name__} needs replica context"):
                    fn(np.ones(2))
    with pytest.raises(RuntimeError, match="compute_average_loss needs replica context"):
        merged(strategy, lambda _: AVERAGE(np.ones(2)))
    assert float(merged(strategy, lambda _: AVERAGE(np.ones(2), global_batch_size=4))) == 0.5


@pytest.mark.parametrize(
    ("losses", "size", "says"),
    [
        (np.float32(1), None, "per_example_loss has no dimensions; give one loss for each example"),
        (np.ones(2), 2.0, "global_batch_size is 2.0, and must be a whole number"),
        (np.ones(2), True, "global_batch_size is True, and must be a whole number"),
        (np.ones(2), -1, "global_batch_size is -1, and must be at least 0"),
    ],
)
def test_what_is_no_batch_is_refused(strategy, losses, size, says):
    """By its value."""
    with pytest.raises(ValueError, match=says):
        strategy.run(lambda: AVERAGE(losses, global_batch_size=size))
