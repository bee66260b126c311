"""Optimizers that keep moments of the gradient."""

from __future__ import annotations

from typing import Any, Unpack

import numpy as np

from psclient._src.arrays.devices import Value
from psclient._src.variables.sparse_updates import Sparse
from psclient._src.variables.variable import Variable
from psclient.optimizers.base import Optimizer
from psclient.optimizers.options import LearningRate, Options
from psclient.optimizers.ranges import AT_LEAST_0, LESS_THAN_1
from pswire.model.tensor import Array


class Moments(Optimizer):
    """Base of optimizers with a first and a second moment, which `update` moves towards the gradient and its square.

    Args:
        learning_rate: step size.
        beta_1: decay of the first moment.
        beta_2: decay of the second moment.
        epsilon: small number against division by zero.
        options: as in `Optimizer`.

    Raises:
        ValueError: a decay is not at least 0 and less than 1, or epsilon is negative.
    """

    slots: tuple[str, ...] = ("m", "v")
    _ranges = {"beta_1": LESS_THAN_1, "beta_2": LESS_THAN_1, "epsilon": AT_LEAST_0}

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(learning_rate, **options)
        self.beta_1, self.beta_2, self.epsilon = beta_1, beta_2, epsilon

    def _move(self, gradient: Value, m: Value, s: Value) -> None:
        """Moves both moments."""
        m.assign_add((1 - self.beta_1) * (gradient - m))
        s.assign_add((1 - self.beta_2) * (gradient * gradient - s))

    def _corrections(self, iterations: Value) -> tuple[Value, Value]:
        """`1 - beta_1 ** t` and `1 - beta_2 ** t`, float64: in half precision 0.999 is 1."""
        t = iterations.astype(np.float64)
        return 1 - self.beta_1**t, 1 - self.beta_2**t


class Adam(Moments):
    """Gradient descent by decayed means of gradients and of their squares.

    Source: `keras.optimizers.Adam`; Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2015, in the form of
    the last paragraph of its section 2.1.

    Args:
        learning_rate: step size.
        beta_1: decay of the first moment.
        beta_2: decay of the second moment.
        epsilon: small number against division by zero.
        amsgrad: True to divide by the largest second moment so far; Reddi et al., 2018.
        options: as in `Optimizer`.

    Raises:
        ValueError: a decay is not at least 0 and less than 1, or epsilon is negative.

    Examples:
        >>> import psclient as ps
        >>> with ps.MirroredStrategy().scope():
        ...     w = ps.Variable([1.0, 2.0])
        ...     optimizer = ps.optimizers.Adam(learning_rate=0.5)
        ...     optimizer.apply_gradients([([1.0, 1.0], w)])
        ...     w.numpy().round(3)
        array([0.5, 1.5], dtype=float32)
    """

    _slot_of = {"amsgrad": "v_hat"}

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        amsgrad: bool = False,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(learning_rate, beta_1, beta_2, epsilon, **options)
        self.slots = ("m", "v", "v_hat") if amsgrad else ("m", "v")
        self.amsgrad = bool(amsgrad)

    def update(self, v: Value, gradient: Value, iterations: Value, *slots: Value) -> None:
        """Applies a step of Adam or AdamW."""
        m, s, *largest = slots
        first, second = self._corrections(iterations)
        rate = (self.learning_rate * np.sqrt(second) / first).astype(gradient.dtype)
        self._move(gradient, m, s)
        for x in largest if self.amsgrad else ():
            s = x.assign(np.maximum(x, s))
        v.assign_sub(rate * m / (np.sqrt(s) + self.epsilon))


class LazyAdam(Adam):
    """Adam that does not change rows, and their moments, that a sparse gradient does not contain.

    Source: `tfa.optimizers.LazyAdam`. For dense gradients it is `Adam`.

    Args:
        learning_rate: as in `Adam`.
        beta_1: as in `Adam`.
        beta_2: as in `Adam`.
        epsilon: as in `Adam`.
        amsgrad: as in `Adam`.
        sparse: as in `Optimizer`.
        options: as in `Optimizer`.
    """

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        amsgrad: bool = False,
        sparse: Sparse = "lazy",
        **options: Any,
    ) -> None:
        super().__init__(learning_rate, beta_1, beta_2, epsilon, amsgrad, sparse=sparse, **options)


class AdamW(Adam):
    """Adam with decoupled weight decay.

    Source: `keras.optimizers.AdamW`; Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019.

    Args:
        learning_rate: step size.
        weight_decay: as in `Optimizer`.
        beta_1: as in `Adam`.
        beta_2: as in `Adam`.
        epsilon: as in `Adam`.
        amsgrad: as in `Adam`.
        options: as in `Optimizer`.
    """

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        weight_decay: float | None = 0.004,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        amsgrad: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(learning_rate, beta_1, beta_2, epsilon, amsgrad, weight_decay=weight_decay, **options)


class Adamax(Moments):
    """Adam with the largest decayed gradient instead of the second moment.

    Source: `keras.optimizers.Adamax`; Kingma and Ba, 2015, section 7.1.

    Args:
        learning_rate: step size.
        beta_1: as in `Adam`.
        beta_2: as in `Adam`.
        epsilon: as in `Adam`.
        options: as in `Optimizer`.
    """

    slots = ("m", "u")

    def update(self, v: Value, gradient: Value, iterations: Value, *slots: Value) -> None:
        """Applies a step of Adamax."""
        m, u = slots
        rate = (self.learning_rate / self._corrections(iterations)[0]).astype(gradient.dtype)
        m.assign_add((1 - self.beta_1) * (gradient - m))
        u.assign(np.maximum(self.beta_2 * u, np.abs(gradient)))
        v.assign_sub(rate * m / (u + self.epsilon))


class Nadam(Moments):
    """Adam with Nesterov momentum.

    Source: `keras.optimizers.Nadam`; Dozat, "Incorporating Nesterov Momentum into Adam", 2016.

    Args:
        learning_rate: step size.
        beta_1: as in `Adam`.
        beta_2: as in `Adam`.
        epsilon: as in `Adam`.
        options: as in `Optimizer`.
    """

    slots = ("m", "v", "product")
    _running = True

    def initial_slot(self, slot: str, v: Variable) -> Array:
        """Returns zeros for the moments, and one number for the product of the momenta so far."""
        return np.ones(()) if slot == "product" else super().initial_slot(slot, v)

    def _momentum(self, step: Value) -> Value:
        """Returns the momentum of a step, float64, which grows with its number."""
        return self.beta_1 * (1 - 0.5 * 0.96**step)

    def _advanced(self, number: Value, iterations: Value) -> Value:
        return number * self._momentum(iterations.astype(np.float64))

    def update(self, v: Value, gradient: Value, iterations: Value, *slots: Value) -> None:
        """Applies a step of Nadam."""
        m, s, product = slots
        t = iterations.astype(np.float64)
        now, next = self._momentum(t), self._momentum(t + 1)
        of_m, of_g = next / (1 - product * next), (1 - now) / (1 - product)
        self._move(gradient, m, s)
        ahead = of_m.astype(gradient.dtype) * m + of_g.astype(gradient.dtype) * gradient
        second = self._corrections(iterations)[1].astype(gradient.dtype)
        v.assign_sub(self.learning_rate * ahead / (np.sqrt(s / second) + self.epsilon))


class Lamb(Moments):
    """Adam with a step whose length, relative to the variable, is the learning rate.

    Source: `keras.optimizers.Lamb`; You et al., "Large Batch Optimization for Deep Learning", 2020.

    Args:
        learning_rate: step size.
        beta_1: as in `Adam`.
        beta_2: as in `Adam`.
        epsilon: as in `Adam`.
        options: as in `Optimizer`.
    """

    _by_row = False  # the lengths are those of whole variables

    def update(self, v: Value, gradient: Value, iterations: Value, *slots: Value) -> None:
        """Applies a step of LAMB."""
        m, s = slots
        first, second = (correction.astype(gradient.dtype) for correction in self._corrections(iterations))
        self._move(gradient, m, s)
        step = (m / first) / (np.sqrt(s / second) + self.epsilon)
        length, own = (np.sqrt(np.sum(np.square(x))) for x in (v.astype(gradient.dtype), step))
        known = np.logical_and(length > 0, own > 0)
        ratio = np.where(known, length / np.where(known, own, 1.0), 1.0)
        v.assign_sub(self.learning_rate * ratio * step)
