"""Optimizers that divide by the size that gradients have had."""

from __future__ import annotations

from typing import Unpack

import numpy as np

from psclient._src.arrays.devices import Value
from psclient._src.variables.variable import Variable
from psclient.optimizers.base import Optimizer
from psclient.optimizers.options import LearningRate, Options
from psclient.optimizers.ranges import AT_LEAST_0, AT_MOST_0, FROM_0_TO_1
from pswire.model.tensor import Array


class Adagrad(Optimizer):
    """Divides gradients by the root of the sum of all squared gradients.

    Source: `keras.optimizers.Adagrad`; Duchi et al., "Adaptive Subgradient Methods", 2011.

    Args:
        learning_rate: step size.
        initial_accumulator_value: initial value of the sum.
        epsilon: small number against division by zero.
        options: as in `Optimizer`.

    Raises:
        ValueError: `initial_accumulator_value` or epsilon is negative.
    """

    slots = ("accumulator",)
    _ranges = {"initial_accumulator_value": AT_LEAST_0, "epsilon": AT_LEAST_0}

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        initial_accumulator_value: float = 0.1,
        epsilon: float = 1e-7,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(learning_rate, **options)
        self.initial_accumulator_value, self.epsilon = initial_accumulator_value, epsilon

    def initial_slot(self, slot: str, v: Variable) -> Array:
        """Returns `initial_accumulator_value`, of the variable's shape."""
        return np.full_like(super().initial_slot(slot, v), self.initial_accumulator_value)

    def update(self, v: Value, gradient: Value, iterations: Value, *slots: Value) -> None:
        """Applies a step of Adagrad."""
        (total,) = slots
        total.assign_add(gradient * gradient)
        v.assign_sub(self.learning_rate * gradient / np.sqrt(total + self.epsilon))


class RowwiseAdagrad(Adagrad):
    """Adagrad with one sum for each row, of the means of its squared gradients: its state is 1/width of the table.

    Source: `torchrec`'s and FBGEMM's `EXACT_ROWWISE_ADAGRAD`; `fbgemm_gpu.split_embedding_configs`.

    Args:
        learning_rate: as in `Adagrad`.
        initial_accumulator_value: as in `Adagrad`.
        epsilon: as in `Adagrad`.
        options: as in `Optimizer`.
    """

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        initial_accumulator_value: float = 0.0,
        epsilon: float = 1e-8,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(learning_rate, initial_accumulator_value, epsilon, **options)

    def initial_slot(self, slot: str, v: Variable) -> Array:
        """Returns `initial_accumulator_value`, one for each row, with the variable's rank."""
        whole = super().initial_slot(slot, v)
        return whole[tuple(slice(None) if axis == 0 else slice(0, 1) for axis in range(whole.ndim))].copy()

    def update(self, v: Value, gradient: Value, iterations: Value, *slots: Value) -> None:
        """Applies a step of Adagrad with one accumulator per row."""
        (total,) = slots
        axes = tuple(range(1, len(gradient.shape)))
        squares = np.square(gradient)
        total.assign_add(np.mean(squares, axis=axes, keepdims=True) if axes else squares)
        v.assign_sub(self.learning_rate * gradient / (np.sqrt(total) + self.epsilon))


class Adadelta(Optimizer):
    """Divides gradients by the size of recent gradients, and multiplies them by that of recent steps.

    Source: `keras.optimizers.Adadelta`; Zeiler, "ADADELTA: An Adaptive Learning Rate Method", 2012.

    Args:
        learning_rate: step size; 1.0 is the paper's.
        rho: decay of both sizes.
        epsilon: small number against division by zero.
        options: as in `Optimizer`.

    Raises:
        ValueError: the decay is not between 0 and 1, or epsilon is negative.
    """

    slots = ("gradients", "steps")
    _ranges = {"rho": FROM_0_TO_1, "epsilon": AT_LEAST_0}

    def __init__(
        self, learning_rate: LearningRate = 0.001, rho: float = 0.95, epsilon: float = 1e-7, **options: Unpack[Options]
    ) -> None:
        super().__init__(learning_rate, **options)
        self.rho, self.epsilon = rho, epsilon

    def update(self, v: Value, gradient: Value, iterations: Value, *slots: Value) -> None:
        """Applies a step of Adadelta."""
        gradients, steps = slots
        gradients.assign(self.rho * gradients + (1 - self.rho) * gradient * gradient)
        step = np.sqrt(steps + self.epsilon) / np.sqrt(gradients + self.epsilon) * gradient
        steps.assign(self.rho * steps + (1 - self.rho) * step * step)
        v.assign_sub(self.learning_rate * step)


class RMSprop(Optimizer):
    """Divides gradients by the root of the mean of recent squared gradients.

    Source: `keras.optimizers.RMSprop`; Hinton, "Neural Networks for Machine Learning", lecture 6e, 2012.

    Args:
        learning_rate: step size.
        rho: decay of the mean.
        momentum: decay of the momentum; 0 for none.
        epsilon: small number against division by zero.
        centered: True to divide by the root of the variance instead of that of the mean of squares.
        options: as in `Optimizer`.

    Raises:
        ValueError: momentum or the decay is not between 0 and 1, or epsilon is negative.
    """

    slots: tuple[str, ...] = ("squares", "mean", "momentum")
    _slot_of = {"centered": "mean", "momentum": "momentum"}
    _ranges = {"rho": FROM_0_TO_1, "momentum": FROM_0_TO_1, "epsilon": AT_LEAST_0}

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        rho: float = 0.9,
        momentum: float = 0.0,
        epsilon: float = 1e-7,
        centered: bool = False,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(learning_rate, **options)
        self.rho, self.momentum, self.epsilon, self.centered = rho, momentum, epsilon, bool(centered)
        more = {"mean": self.centered, "momentum": self.momentum}
        self.slots = ("squares", *(slot for slot, wanted in more.items() if wanted))

    def update(self, v: Value, gradient: Value, iterations: Value, *slots: Value) -> None:
        """Applies a step of RMSprop."""
        kept = dict(zip(self.slots, slots, strict=True))
        squares = kept["squares"]
        squares.assign(self.rho * squares + (1 - self.rho) * gradient * gradient)
        size = squares.value()
        if self.centered:
            mean = kept["mean"]
            mean.assign(self.rho * mean + (1 - self.rho) * gradient)
            size = size - mean * mean
        step = self.learning_rate * gradient / np.sqrt(size + self.epsilon)
        if self.momentum:
            m = kept["momentum"]
            step = m.assign(self.momentum * m + step).value()
        v.assign_sub(step)


class Ftrl(Optimizer):
    """Follow the regularized leader: sparse weights by an L1 penalty.

    Source: `keras.optimizers.Ftrl`; McMahan et al., "Ad Click Prediction: a View from the Trenches", 2013.

    Args:
        learning_rate: step size.
        learning_rate_power: exponent by which it decreases with the sum of squared gradients; at most 0.
        initial_accumulator_value: initial value of that sum.
        l1_regularization_strength: L1 penalty on the weights.
        l2_regularization_strength: L2 penalty on the weights.
        l2_shrinkage_regularization_strength: L2 penalty on the current weights in each step.
        beta: reduces the first learning rates.
        options: as in `Optimizer`.

    Raises:
        ValueError: a number is negative, or the power is positive.
    """

    slots = ("accumulator", "linear")
    _ranges = {
        "learning_rate_power": AT_MOST_0,
        "initial_accumulator_value": AT_LEAST_0,
        "l1_regularization_strength": AT_LEAST_0,
        "l2_regularization_strength": AT_LEAST_0,
        "l2_shrinkage_regularization_strength": AT_LEAST_0,
        "beta": AT_LEAST_0,
    }

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        learning_rate_power: float = -0.5,
        initial_accumulator_value: float = 0.1,
        l1_regularization_strength: float = 0.0,
        l2_regularization_strength: float = 0.0,
        l2_shrinkage_regularization_strength: float = 0.0,
        beta: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(learning_rate, **options)
        self.learning_rate_power = learning_rate_power
        self.initial_accumulator_value = initial_accumulator_value
        self.l1_regularization_strength = l1_regularization_strength
        self.l2_regularization_strength = l2_regularization_strength
        self.l2_shrinkage_regularization_strength = l2_shrinkage_regularization_strength
        self.beta = beta

    def initial_slot(self, slot: str, v: Variable) -> Array:
        """Returns `initial_accumulator_value` for the sum of squares, zeros for the other slot."""
        zeros = super().initial_slot(slot, v)
        return np.full_like(zeros, self.initial_accumulator_value) if slot == "accumulator" else zeros

    def update(self, v: Value, gradient: Value, iterations: Value, *slots: Value) -> None:
        """Applies a step of FTRL."""
        total, linear = slots
        l1, l2 = self.l1_regularization_strength, self.l2_regularization_strength
        rate, weights = self.learning_rate, v.astype(gradient.dtype)
        before = total.value() ** -self.learning_rate_power
        total.assign_add(gradient * gradient)
        after = total.value() ** -self.learning_rate_power
        linear.assign_add(
            gradient + 2 * self.l2_shrinkage_regularization_strength * weights - (after - before) / rate * weights
        )
        quadratic = after / rate + 2 * (l2 + self.beta / (2 * rate))
        v.assign((np.clip(linear, -l1, l1) - linear) / quadratic)
