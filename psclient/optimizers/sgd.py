"""Optimizers that follow the gradient, or only its sign, with momentum."""

from __future__ import annotations

from typing import Unpack

import numpy as np

from psclient._src.arrays.devices import Value
from psclient.optimizers.base import Optimizer
from psclient.optimizers.options import LearningRate, Options
from psclient.optimizers.ranges import FROM_0_TO_1, Range


class SGD(Optimizer):
    """Gradient descent, with momentum: `m = momentum * m - rate * g; v += m`.

    Source: `keras.optimizers.SGD`; Sutskever et al., "On the importance of initialization and momentum", 2013.

    Args:
        learning_rate: step size.
        momentum: decay of the momentum; 0 for none, without a slot.
        nesterov: True for Nesterov momentum: `v += momentum * m - rate * g`.
        options: as in `Optimizer`.

    Raises:
        ValueError: momentum is not between 0 and 1.

    Examples:
        >>> import psclient as ps
        >>> with ps.MirroredStrategy().scope():
        ...     w = ps.Variable([1.0, 2.0])
        ...     optimizer = ps.optimizers.SGD(learning_rate=0.5, momentum=0.9)
        ...     optimizer.apply_gradients([([1.0, 1.0], w)])
        ...     w.numpy()
        array([0.5, 1.5], dtype=float32)
    """

    slots: tuple[str, ...] = ("momentum",)
    _slot_of = {"momentum": "momentum"}
    _ranges = {"momentum": FROM_0_TO_1}

    def __init__(
        self,
        learning_rate: LearningRate = 0.01,
        momentum: float = 0.0,
        nesterov: bool = False,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(learning_rate, **options)
        self.momentum, self.nesterov = momentum, bool(nesterov)
        self.slots = ("momentum",) if self.momentum else ()

    def update(self, v: Value, gradient: Value, iterations: Value, *slots: Value) -> None:
        """Applies a step of gradient descent, with momentum if there is any."""
        step = self.learning_rate * gradient
        for m in slots:
            m.assign(self.momentum * m - step)
            step = step - self.momentum * m if self.nesterov else -m
        v.assign_sub(step)


class Lion(Optimizer):
    """Updates by the sign of a mixture of gradient and momentum.

    Source: `keras.optimizers.Lion`; Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023.

    Args:
        learning_rate: step size; about a tenth of Adam's.
        beta_1: fraction of the momentum in the step.
        beta_2: decay of the momentum.
        options: as in `Optimizer`.

    Raises:
        ValueError: beta_1 is not more than 0 and at most 1, or beta_2 not between 0 and 1.
    """

    slots = ("momentum",)
    _ranges = {"beta_1": Range("more than 0 and at most 1; SGD has none", lambda x: 0 < x <= 1), "beta_2": FROM_0_TO_1}

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.99,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(learning_rate, **options)
        self.beta_1, self.beta_2 = beta_1, beta_2

    def update(self, v: Value, gradient: Value, iterations: Value, *slots: Value) -> None:
        """Applies a step of Lion."""
        (m,) = slots
        v.assign_sub(self.learning_rate * np.sign(self.beta_1 * m + (1 - self.beta_1) * gradient))
        m.assign(self.beta_2 * m + (1 - self.beta_2) * gradient)
