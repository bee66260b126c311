"""Formulas of TensorFlow 1's optimizers that `psclient.optimizers` has otherwise, or with other slots.

Each is what TensorFlow's kernel of its name computes: `ApplyMomentum`, `ApplyRMSProp`, `ApplyFtrl` and so on.
"""

from __future__ import annotations

import numpy as np

from psclient._src.arrays.devices import Value
from psclient._src.variables.variable import Variable
from psclient.optimizers import Adadelta, Adagrad, Ftrl, Optimizer
from psclient.optimizers.options import LearningRate
from psclient.optimizers.ranges import AT_LEAST_0, FROM_0_TO_1, MORE_THAN_0
from pswire.model.tensor import Array


class MomentumRule(Optimizer):
    """Momentum that holds gradients, and not steps: `m = momentum * m + g; v -= rate * m`.

    So a change of the learning rate also holds for the gradients of before, unlike in `ps.optimizers.SGD`.

    Args:
        learning_rate: step size.
        momentum: decay of the momentum.
        nesterov: True if the step looks ahead: `v -= rate * (g + momentum * m)`.
        name: prefix of the names of slots.
    """

    slots = ("momentum",)
    _ranges = {"momentum": FROM_0_TO_1}

    def __init__(self, learning_rate: LearningRate, momentum: float, nesterov: bool, name: str) -> None:
        super().__init__(learning_rate, name)
        self.momentum, self.nesterov = momentum, bool(nesterov)

    def update(self, v: Value, gradient: Value, iterations: Value, *slots: Value) -> None:
        """Applies a step of gradient descent with momentum."""
        (m,) = slots
        m.assign(self.momentum * m + gradient)
        ahead = gradient + self.momentum * m if self.nesterov else m
        v.assign_sub(self.learning_rate * ahead)


class RMSPropRule(Optimizer):
    """RMSProp whose mean of squares begins with ones, and that always keeps a momentum.

    Args:
        learning_rate: step size.
        decay: decay of the means.
        momentum: decay of the momentum.
        epsilon: keeps the division away from zero.
        centered: True to divide by the root of the variance in place of that of the mean of squares.
        name: prefix of the names of slots.
    """

    slots: tuple[str, ...] = ("rms", "momentum", "mg")
    _slot_of = {"centered": "mg"}
    _ranges = {"decay": FROM_0_TO_1, "momentum": FROM_0_TO_1, "epsilon": AT_LEAST_0}

    def __init__(
        self, learning_rate: LearningRate, decay: float, momentum: float, epsilon: float, centered: bool, name: str
    ) -> None:
        super().__init__(learning_rate, name)
        self.decay, self.momentum, self.epsilon, self.centered = decay, momentum, epsilon, bool(centered)
        self.slots = ("rms", "momentum", "mg") if centered else ("rms", "momentum")

    def initial_slot(self, slot: str, v: Variable) -> Array:
        """Ones for the mean of squares, zeros for the others, of the variable's shape."""
        zeros = super().initial_slot(slot, v)
        return np.ones_like(zeros) if slot == "rms" else zeros

    def update(self, v: Value, gradient: Value, iterations: Value, *slots: Value) -> None:
        """Applies a step of RMSProp."""
        squares, momentum, *mean = slots
        squares.assign(self.decay * squares + (1 - self.decay) * gradient * gradient)
        size = squares.value()
        for mg in mean if self.centered else ():
            mg.assign(self.decay * mg + (1 - self.decay) * gradient)
            size = size - mg * mg
        momentum.assign(self.momentum * momentum + self.learning_rate * gradient / np.sqrt(size + self.epsilon))
        v.assign_sub(momentum.value())


class AdagradRule(Adagrad):
    """Adagrad without an epsilon, for which its sum of squares begins with more than 0.

    Args:
        learning_rate: step size.
        initial_accumulator_value: initial value of the sum.
        name: prefix of the names of slots.
    """

    _ranges = {**Adagrad._ranges, "initial_accumulator_value": MORE_THAN_0}

    def __init__(self, learning_rate: LearningRate, initial_accumulator_value: float, name: str) -> None:
        super().__init__(learning_rate, initial_accumulator_value, 0.0, name=name)


class AdadeltaRule(Adadelta):
    """Adadelta with TensorFlow 1's names of slots."""

    slots = ("accum", "accum_update")


class FtrlRule(Ftrl):
    """Follow the regularized leader, with TensorFlow 1's names of slots."""

    slots = ("accum", "linear")

    def initial_slot(self, slot: str, v: Variable) -> Array:
        """`initial_accumulator_value` for the sum of squares, zeros for the other."""
        return super().initial_slot("accumulator" if slot == "accum" else slot, v)


class ProximalGradientDescentRule(Optimizer):
    """Gradient descent, after which weights are shrunk.

    Args:
        learning_rate: step size.
        l1: penalty on the size of the weights.
        l2: penalty on their squares.
        name: prefix of the names of slots.
    """

    _ranges = {"l1_regularization_strength": AT_LEAST_0, "l2_regularization_strength": AT_LEAST_0}

    def __init__(self, learning_rate: LearningRate, l1: float, l2: float, name: str) -> None:
        super().__init__(learning_rate, name)
        self.l1_regularization_strength, self.l2_regularization_strength = l1, l2

    def update(self, v: Value, gradient: Value, iterations: Value, *slots: Value) -> None:
        """Applies a proximal step of gradient descent."""
        rate = self.learning_rate
        moved = v.astype(gradient.dtype) - rate * gradient
        v.assign(_shrunk(moved, rate * self.l1_regularization_strength, rate * self.l2_regularization_strength))


class ProximalAdagradRule(AdagradRule):
    """Adagrad, after which weights are shrunk.

    Args:
        learning_rate: step size.
        initial_accumulator_value: initial value of the sum of squares.
        l1: penalty on the size of the weights.
        l2: penalty on their squares.
        name: prefix of the names of slots.
    """

    _ranges = {
        **AdagradRule._ranges,
        "l1_regularization_strength": AT_LEAST_0,
        "l2_regularization_strength": AT_LEAST_0,
    }

    def __init__(
        self, learning_rate: LearningRate, initial_accumulator_value: float, l1: float, l2: float, name: str
    ) -> None:
        super().__init__(learning_rate, initial_accumulator_value, name)
        self.l1_regularization_strength, self.l2_regularization_strength = l1, l2

    def update(self, v: Value, gradient: Value, iterations: Value, *slots: Value) -> None:
        """Applies a proximal step of Adagrad."""
        (total,) = slots
        total.assign_add(gradient * gradient)
        rate = self.learning_rate / np.sqrt(total)
        moved = v.astype(gradient.dtype) - rate * gradient
        v.assign(_shrunk(moved, rate * self.l1_regularization_strength, rate * self.l2_regularization_strength))


def _shrunk(x: Value, l1: Value, l2: Value) -> Value:
    """Returns the weights that are nearest to `x` under both penalties; Duchi and Singer, "FOBOS", 2009."""
    return np.sign(x) * np.maximum(np.abs(x) - l1, 0.0) / (1.0 + l2)
