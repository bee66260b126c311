"""Optimizers with the names, arguments and formulas of optax, which run on the servers.

    state = psj.TrainState.create(..., tx=psj.optimizers.adamw(1e-3, weight_decay=0.01))

An optimizer of optax itself is a Python function of all parameters, which servers cannot run; these are update
functions with the same formulas. `ps.optimizers` has Keras's optimizers, whose formulas differ in the place of epsilon
and the content of the momentum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, Unpack, cast

from psclient.jax.arrays import on_cpu
from psclient.optimizers import Optimizer
from psclient.optimizers.options import Options
from psclient.optimizers.rules import OPTAX, RuleOptimizer, kind_of
from psclient.optimizers.schedules import LearningRateSchedule
from pswire.errors import InvalidArgument, InvalidType

Rate = float | LearningRateSchedule | Callable[[Any], Any]
"""A number, a schedule of `ps.optimizers`, or a function of the number of steps before, such as optax's schedules."""

NAMES = ("adadelta", "adagrad", "adam", "adamax", "adamw", "nadam", "radam", "sgd")


class _OptaxRule(RuleOptimizer):
    """An optimizer whose learning rate may be a function of the number of steps before."""

    mask: Any

    def __init__(self, learning_rate: Rate, **given: Any) -> None:
        rate: Any = learning_rate
        if callable(rate) and not isinstance(rate, LearningRateSchedule):
            rate = _RateOfStep(rate, self)
        super().__init__(rate, **given)


class _RateOfStep:
    """A learning rate that each process computes for each step, on the CPU.

    Args:
        schedule: returns the rate, given the number of steps before.
        rule: counts the steps.
    """

    def __init__(self, schedule: Callable[[Any], Any], rule: _OptaxRule) -> None:
        self._schedule = schedule
        self._rule = rule

    def __call__(self) -> float:
        """Returns the rate of the next step."""
        steps = self._rule._calls if self._rule.variables else 0
        with on_cpu():
            return float(self._schedule(steps))


def sgd(
    learning_rate: Rate,
    momentum: float | None = None,
    nesterov: bool = False,
    accumulator_dtype: None = None,
    **options: Unpack[Options],
) -> Optimizer:
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
    return _made("Sgd", learning_rate, momentum=0.0 if momentum is None else momentum, nesterov=nesterov, **options)


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
) -> Optimizer:
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
    return _made("Adam", learning_rate, b1=b1, b2=b2, eps=eps, eps_root=eps_root, nesterov=nesterov, **options)


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
) -> Optimizer:
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
    numbers = {"b1": b1, "b2": b2, "eps": eps, "eps_root": eps_root, "weight_decay": weight_decay}
    made = _made("Adam", learning_rate, nesterov=nesterov, **numbers, **{"name": "adamw", **options})
    made.mask = mask
    return made


def nadam(
    learning_rate: Rate,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    mu_dtype: None = None,
    *,
    nesterov: bool = True,
    **options: Any,
) -> Optimizer:
    """Adam with Nesterov momentum.

    Source: `optax.nadam`; Dozat, "Incorporating Nesterov Momentum into Adam", 2016.

    Args:
        learning_rate: as in `adam`.
        b1: as in `adam`.
        b2: as in `adam`.
        eps: as in `adam`.
        eps_root: as in `adam`.
        mu_dtype: as in `adam`.
        nesterov: as in `adam`.
        options: as in `sgd`.

    Returns:
        The optimizer, for `TrainState.create`.

    Raises:
        TypeError: as `sgd`.
        ValueError: as `sgd`.
    """
    named = {"name": "nadam", **options}
    return adam(learning_rate, b1, b2, eps, eps_root, mu_dtype, nesterov=nesterov, **named)


def radam(
    learning_rate: Rate,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    threshold: float = 5.0,
    *,
    nesterov: bool = False,
    **options: Unpack[Options],
) -> Optimizer:
    """Adam that divides by the second moment only once that is known well enough.

    With `b2=0.999` in float32, rounding changes the first of these steps by up to 1 %, as in optax.

    Source: `optax.radam`; Liu et al., "On the Variance of the Adaptive Learning Rate and Beyond", 2020.

    Args:
        learning_rate: as in `adam`.
        b1: as in `adam`.
        b2: as in `adam`.
        eps: as in `adam`.
        eps_root: as in `adam`.
        threshold: the number of gradients in the second moment's mean from which on it is known well enough.
        nesterov: as in `adam`.
        options: as in `sgd`.

    Returns:
        The optimizer, for `TrainState.create`.

    Raises:
        TypeError: as `sgd`.
        ValueError: as `sgd`.
    """
    numbers = {"b1": b1, "b2": b2, "eps": eps, "eps_root": eps_root, "threshold": threshold}
    return _made("Radam", learning_rate, nesterov=nesterov, **numbers, **options)


def adamax(
    learning_rate: Rate, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, **options: Unpack[Options]
) -> Optimizer:
    """Adam with the largest decayed gradient instead of the second moment.

    Source: `optax.adamax`; Kingma and Ba, 2015, section 7.1.

    Args:
        learning_rate: as in `adam`.
        b1: as in `adam`.
        b2: decay of the largest gradient.
        eps: added to the size of each gradient.
        options: as in `sgd`.

    Returns:
        The optimizer, for `TrainState.create`.

    Raises:
        TypeError: as `sgd`.
        ValueError: as `sgd`.
    """
    return _made("Adamax", learning_rate, b1=b1, b2=b2, eps=eps, **options)


def adadelta(
    learning_rate: Rate | None = None,
    rho: float = 0.9,
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    weight_decay_mask: Any = None,
    **options: Any,
) -> Optimizer:
    """Divides gradients by the size of recent gradients, and multiplies them by that of recent steps.

    Source: `optax.adadelta`; Zeiler, "ADADELTA: An Adaptive Learning Rate Method", 2012.

    Args:
        learning_rate: as in `sgd`. None, with which optax ascends, raises an error.
        rho: decay of both sizes.
        eps: small number against division by zero.
        weight_decay: fraction of the parameters that is added to their gradients.
        weight_decay_mask: as `mask` of `adamw`.
        options: as in `sgd`.

    Returns:
        The optimizer, for `TrainState.create`.

    Raises:
        TypeError: as `sgd`.
        ValueError: as `sgd`.
    """
    made = _made("Adadelta", learning_rate, rho=rho, eps=eps, weight_decay=weight_decay, **options)
    made.mask = weight_decay_mask
    return made


def adagrad(
    learning_rate: Rate, initial_accumulator_value: float = 0.1, eps: float = 1e-7, **options: Unpack[Options]
) -> Optimizer:
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
    first = {"initial_accumulator_value": initial_accumulator_value, "eps": eps}
    return _made("Adagrad", learning_rate, **first, **options)


def _made(rule: str, learning_rate: Rate | None, **given: Any) -> _OptaxRule:
    return cast(_OptaxRule, kind_of(OPTAX[rule], rule, _OptaxRule)(learning_rate, **given))


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
        "ps.optimizers has more, with Keras's formulas, such as Ftrl, Lamb, Lion and RMSprop"
    )
