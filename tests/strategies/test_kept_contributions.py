"""Gradients of a step that is repeated: they are told apart from those of the step before, and count as ever."""

from __future__ import annotations

import numpy as np
import pytest

import psclient as ps
from psclient._src.tracing.hyperparameters import Configured
from tests.kit.strategies import kinds, variable

GRADIENT = np.arange(6, dtype="float32").reshape(2, 3)


pytestmark = kinds("servers-1x1", soak=["embedded-1"])


@pytest.mark.parametrize(
    "gradient",
    [
        GRADIENT,
        np.asfortranarray(GRADIENT),
        np.repeat(GRADIENT, 2, axis=1)[:, ::2],
        GRADIENT.astype(">f4"),
        GRADIENT.astype("float64"),
        GRADIENT.astype("int32"),
        GRADIENT.tolist(),
    ],
    ids=["plain", "columns", "strided", "big-endian", "double", "integers", "list"],
)
def test_gradients_of_any_kind_make_the_step_that_they_say(strategy, gradient):
    """However they lie in memory, and whatever the step before was made of."""
    w = variable(strategy, np.zeros((2, 3), "float32"))
    with strategy.scope():
        optimizer = ps.optimizers.SGD(1.0)
    for given in (GRADIENT, GRADIENT, gradient, gradient, GRADIENT):
        strategy.run(optimizer.apply_gradients, ([(given, w)],))
    assert w.numpy().tolist() == (-5 * GRADIENT).tolist()


def test_a_variable_that_is_no_longer_trainable_is_refused(strategy):
    """Also where the step before trained it."""
    w = variable(strategy)
    with strategy.scope():
        optimizer = ps.optimizers.SGD(1.0)
    for _ in range(2):
        strategy.run(optimizer.apply_gradients, ([(np.ones(3, "float32"), w)],))
    w.trainable = False
    with pytest.raises(ValueError, match="not trainable"):
        strategy.run(optimizer.apply_gradients, ([(np.ones(3, "float32"), w)],))


class Rates(Configured):
    """Two numbers, and a list of them."""

    def __init__(self):
        self.first, self.second, self.more = None, 0.5, [1.0]


def test_settings_stay_the_same_until_something_changes():
    """Then they are others: also if values change places, or a list changes in itself."""
    rates = Rates()
    rates.more = ()
    known = rates.settings()
    assert rates.settings() is known
    rates.first, rates.second = rates.second, rates.first
    swapped = rates.settings()
    assert (known.numbers, swapped.numbers, known.key == swapped.key) == ([0.5], [0.5], False)
    rates.more = [1.0]
    assert rates.settings().numbers == [0.5, 1.0]
    rates.more.append(2.0)
    assert rates.settings().numbers == [0.5, 1.0, 2.0]
