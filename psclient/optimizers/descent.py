"""Optimizers that follow the gradient, or only its sign, with momentum."""

from __future__ import annotations

from typing import Any, Unpack

import numpy as np

from psclient.optimizers.base import Optimizer
from psclient.optimizers.options import LearningRate, Options


class SGD(Optimizer):
    """Gradient descent, with momentum: `m = momentum * m - rate * g; v += m`.

    Source: `keras.optimizers.SGD`; Sutskever et al., "On the importance of initialization and momentum", 2013.

    Args:
        learning_rate: step size.
        momentum: 0 for none, then there is no slot.
        nesterov: whether the step looks ahead: `v += momentum * m - rate * g`.
        options: as in `Optimizer`.

    Raises:
        ValueError: momentum is not between 0 and 1.
    """

    _slot_of = {"momentum": "momentum"}

    def __init__(
        self,
        learning_rate: LearningRate = 0.01,
        momentum: float = 0.0,
        nesterov: bool = False,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(learning_rate, **options)
        if not isinstance(momentum, int | float) or not 0 <= momentum <= 1:
            raise ValueError(f"momentum is {momentum!r}, and must be between 0 and 1")
        self.slots = ("momentum",) if momentum else ()
        self.momentum, self.nesterov = momentum, bool(nesterov)

    def update(self, v: Any, gradient: Any, iterations: Any, *slots: Any) -> None:
        step = self.learning_rate * gradient
        for m in slots:
            m.assign(self.momentum * m - step)
            step = step - self.momentum * m if self.nesterov else -m
        v.assign_sub(step)


class Lion(Optimizer):
    """The sign of a mixture of gradient and momentum.

    Source: `keras.optimizers.Lion`; Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023.

    Args:
        learning_rate: step size; about a tenth of Adam's.
        beta_1: how much of the momentum is in the step.
        beta_2: decay of the momentum.
        options: as in `Optimizer`.

    Raises:
        ValueError: beta_1 is not more than 0 and at most 1.
    """

    slots = ("momentum",)

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.99,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(learning_rate, **options)
        if not 0 < beta_1 <= 1:
            raise ValueError(f"beta_1 is {beta_1!r}, and must be more than 0 and at most 1; SGD has none")
        self.beta_1, self.beta_2 = beta_1, beta_2

    def update(self, v: Any, gradient: Any, iterations: Any, *slots: Any) -> None:
        (m,) = slots
        v.assign_sub(self.learning_rate * np.sign(self.beta_1 * m + (1 - self.beta_1) * gradient))
        m.assign(self.beta_2 * m + (1 - self.beta_2) * gradient)
