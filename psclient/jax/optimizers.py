"""Optimizers with the names, arguments and formulas of optax, which run on the servers.

    state = psj.TrainState.create(..., tx=psj.optimizers.adamw(1e-3, weight_decay=0.01))

An optimizer of optax itself is a Python function of all parameters, which servers cannot run; these are update
functions with the same formulas. `ps.optimizers` has Keras's optimizers, whose formulas differ in the place of epsilon
and the content of the momentum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, Unpack

import numpy as np

from psclient._src.arrays.devices import Value
from psclient._src.variables.variable import Variable
from psclient.jax.arrays import on_cpu
from psclient.optimizers import Optimizer
from psclient.optimizers.options import Options
from psclient.optimizers.ranges import AT_LEAST_0, FROM_0_TO_1, LESS_THAN_1
from psclient.optimizers.schedules import LearningRateSchedule
from pswire.errors import InvalidArgument, InvalidType
from pswire.model.tensor import Array

Rate = float | LearningRateSchedule | Callable[[Any], Any]
"""A number, a schedule of `ps.optimizers`, or a function of the number of steps before, such as optax's schedules."""

NAMES = ("adagrad", "adam", "adamw", "sgd")


class Rule(Optimizer):
    """Base of the optimizers: handles learning rates that are functions of the step.

    Args:
        learning_rate: a number, a schedule of `ps.optimizers`, or a function of the number of previous steps.
        options: as in `ps.optimizers.Optimizer`.
    """

    def __init__(self, learning_rate: Rate, **options: Unpack[Options]) -> None:
        given: Any = learning_rate
        if callable(given) and not isinstance(given, LearningRateSchedule):
            given = _RateOfStep(given, self)
        super().__init__(given, **options)


class _RateOfStep:
    """A learning rate that each process computes for each step, on the CPU.

    Args:
        schedule: returns the rate, given the number of steps before.
        rule: counts the steps.
    """

    def __init__(self, schedule: Callable[[Any], Any], rule: Rule) -> None:
        self._schedule = schedule
        self._rule = rule

    def __call__(self) -> float:
        """Returns the rate of the next step."""
        steps = self._rule._calls if self._rule.variables else 0
        with on_cpu():
            return float(self._schedule(steps))


class Sgd(Rule):
    """`t = g + momentum * t; v -= rate * t`; with `nesterov` the step is `g + momentum * t`."""

    slots: tuple[str, ...] = ("trace",)
    _slot_of = {"momentum": "trace"}
    _ranges = {"momentum": FROM_0_TO_1}

    def __init__(self, learning_rate: Rate, momentum: float, nesterov: bool, **options: Unpack[Options]) -> None:
        super().__init__(learning_rate, **options)
        self.momentum, self.nesterov = momentum, bool(nesterov)
        self.slots = ("trace",) if self.momentum else ()

    def update(self, v: Value, gradient: Value, iterations: Value, *slots: Value) -> None:
        """Applies a step of `optax.sgd`."""
        step = gradient
        for trace in slots:
            trace.assign(gradient + self.momentum * trace)
            step = gradient + self.momentum * trace if self.nesterov else trace.value()
        v.assign_sub(self.learning_rate * step)


class Adam(Rule):
    """The formula of `optax.adam` and `optax.adamw`: epsilon is added outside of the root of the corrected moment.

    Attributes:
        _decaying: in `update`, whether the variable takes part in weight decay.
    """

    _decaying: bool

    slots = ("mu", "nu")
    _decays_before = False  # a step of its own would be rounded twice, each time alike
    _ranges = {"b1": LESS_THAN_1, "b2": LESS_THAN_1, "eps": AT_LEAST_0, "eps_root": AT_LEAST_0}

    def __init__(
        self,
        learning_rate: Rate,
        b1: float,
        b2: float,
        eps: float,
        eps_root: float,
        nesterov: bool,
        mask: Any = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(learning_rate, **options)
        self.mask = mask
        self.b1, self.b2, self.eps, self.eps_root, self.nesterov = b1, b2, eps, eps_root, bool(nesterov)

    def update(self, v: Value, gradient: Value, iterations: Value, *slots: Value) -> None:
        """Applies a step of `optax.adam` or `optax.adamw`."""
        mu, nu = slots
        t = iterations.astype(gradient.dtype)  # as in optax: in single precision 1 - 0.999 has an error of 1e-5
        mu.assign(self.b1 * mu + (1 - self.b1) * gradient)
        nu.assign(self.b2 * nu + (1 - self.b2) * gradient * gradient)
        now, next, second = 1 - self.b1**t, 1 - self.b1 ** (t + 1), 1 - self.b2**t
        first = self.b1 * mu / next + (1 - self.b1) * gradient / now if self.nesterov else mu / now
        step = first / (np.sqrt(nu / second + self.eps_root) + self.eps)
        if self._decaying:
            step = step + self.weight_decay * v.astype(gradient.dtype)
        v.assign_sub(self.learning_rate * step)


class Adagrad(Rule):
    """`s += g * g; v -= rate * g / sqrt(s + eps)`; no step where s is 0."""

    slots = ("sum_of_squares",)
    _ranges = {"initial_accumulator_value": AT_LEAST_0, "eps": AT_LEAST_0}

    def __init__(
        self, learning_rate: Rate, initial_accumulator_value: float, eps: float, **options: Unpack[Options]
    ) -> None:
        super().__init__(learning_rate, **options)
        self.initial_accumulator_value, self.eps = initial_accumulator_value, eps

    def initial_slot(self, slot: str, v: Variable) -> Array:
        """`initial_accumulator_value`, of the variable's shape."""
        return np.full_like(super().initial_slot(slot, v), self.initial_accumulator_value)

    def update(self, v: Value, gradient: Value, iterations: Value, *slots: Value) -> None:
        """Applies a step of `optax.adagrad`."""
        (total,) = slots
        total.assign_add(gradient * gradient)
        size = np.where(total > 0, total + self.eps, 1.0)
        v.assign_sub(self.learning_rate * gradient / np.sqrt(size))


def sgd(
    learning_rate: Rate,
    momentum: float | None = None,
    nesterov: bool = False,
    accumulator_dtype: None = None,
    **options: Unpack[Options],
) -> Sgd:
    """Gradient descent, with optional momentum.

    Source: `optax.sgd`.

    Args:
        learning_rate: step size: a number; a schedule of `ps.optimizers`, computed on the servers; or a function of the
            number of previous steps, such as optax's schedules, which every worker computes itself.
        momentum: decay of the momentum; None for none.
        nesterov: True for Nesterov momentum.
        accumulator_dtype: None: slots have the parameter's dtype, float32 for half precision.
        options: as in `ps.optimizers.Optimizer`, for example `global_clipnorm` for `optax.clip_by_global_norm`.

    Returns:
        The optimizer, for `TrainState.create`.

    Raises:
        TypeError: an argument is not a number.
        ValueError: a number is out of its range, or another dtype of slots is requested.
    """
    _refuse_dtype("accumulator_dtype", accumulator_dtype)
    return Sgd(learning_rate, 0.0 if momentum is None else momentum, nesterov, **options)


def adam(
    learning_rate: Rate,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    mu_dtype: None = None,
    *,
    nesterov: bool = False,
    **options: Unpack[Options],
) -> Adam:
    """Gradient descent by decayed means of gradients and of their squares.

    Source: `optax.adam`; Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2015.

    Args:
        learning_rate: as in `sgd`.
        b1: decay of the first moment.
        b2: decay of the second moment.
        eps: added to the root.
        eps_root: added under the root.
        mu_dtype: None, as `accumulator_dtype` of `sgd`.
        nesterov: True for Nesterov momentum.
        options: as in `sgd`.

    Returns:
        The optimizer, for `TrainState.create`.

    Raises:
        TypeError: as `sgd`.
        ValueError: as `sgd`.
    """
    _refuse_dtype("mu_dtype", mu_dtype)
    return Adam(learning_rate, b1, b2, eps, eps_root, nesterov, **options)


def adamw(
    learning_rate: Rate,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    mu_dtype: None = None,
    weight_decay: float = 1e-4,
    mask: Any = None,
    *,
    nesterov: bool = False,
    **options: Any,
) -> Adam:
    """Adam with decoupled weight decay.

    Source: `optax.adamw`; Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019.

    Args:
        learning_rate: as in `adam`.
        b1: as in `adam`.
        b2: as in `adam`.
        eps: as in `adam`.
        eps_root: as in `adam`.
        mu_dtype: as in `adam`.
        weight_decay: fraction of the parameters, times the learning rate, that is subtracted from them.
        mask: a pytree like the parameters with True where they decay, or a function that takes the parameters and
            returns one; None for all. `TrainState` applies it.
        nesterov: as in `adam`.
        options: as in `sgd`.

    Returns:
        The optimizer, for `TrainState.create`.

    Raises:
        TypeError: as `sgd`.
        ValueError: as `sgd`.
    """
    _refuse_dtype("mu_dtype", mu_dtype)
    named = {"name": "adamw", **options}
    return Adam(learning_rate, b1, b2, eps, eps_root, nesterov, mask, weight_decay=weight_decay, **named)


def adagrad(
    learning_rate: Rate, initial_accumulator_value: float = 0.1, eps: float = 1e-7, **options: Unpack[Options]
) -> Adagrad:
    """Divides gradients by the root of the sum of all squared gradients.

    Source: `optax.adagrad`; Duchi et al., "Adaptive Subgradient Methods", 2011.

    Args:
        learning_rate: as in `sgd`.
        initial_accumulator_value: initial value of the sum.
        eps: small number against division by zero.
        options: as in `sgd`.

    Returns:
        The optimizer, for `TrainState.create`.

    Raises:
        TypeError: as `sgd`.
        ValueError: as `sgd`.
    """
    return Adagrad(learning_rate, initial_accumulator_value, eps, **options)


def _refuse_dtype(name: str, dtype: object) -> None:
    if dtype is not None:
        raise InvalidArgument(
            f"{name} is {dtype!r}, which is not supported; slots have the parameter's dtype, or float32 for "
            "half precision"
        )


def check_transformation(tx: object) -> None:
    """Raises `TypeError` for a transformation of optax itself, with the optimizer to use instead."""
    if callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None)):
        raise InvalidType(
            "tx is an optax transformation, a Python function that servers cannot run; use "
            f"psj.optimizers.{', psj.optimizers.'.join(NAMES[:-1])} or psj.optimizers.{NAMES[-1]} with the "
            "same arguments, or one of ps.optimizers. Replace optax.clip_by_global_norm(x) with "
            "global_clipnorm=x"
        )


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(
        f"psj.optimizers has no {name!r}; available are {', '.join(NAMES)}, with optax's formulas. "
        "ps.optimizers has more, with Keras's formulas, such as Adamax, Lamb, Lion, Nadam and RMSprop"
    )
