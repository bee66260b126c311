"""torch's optimizers by torch's formulas, as update functions that servers run: `torch.optim.AdamW` and others.

Each computes what torch's single-tensor implementation does, with numbers in the same places. The state of a parameter
has torch's names, so that a `state_dict` goes both ways.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from psclient._src.arrays.devices import Value
from psclient._src.variables.variable import Variable
from psclient.optimizers import Optimizer
from pswire.errors import InvalidArgument
from pswire.model.tensor import Array

STEP = "step"
"""The slot that counts the steps of one parameter: those in which it had a gradient."""


class TorchRule(Optimizer):
    """Base of torch's optimizers. A parameter without the slot "step" counts by the optimizer's steps.

    Args:
        numbers: torch's hyperparameters, by torch's names.
        name: prefix of the names of slots.
        options: `clipnorm`, `clipvalue`, `global_clipnorm`, `sparse` and `catch_up`, as of `ps.optimizers`.
    """

    hyperparameters: ClassVar[Mapping[str, str]] = {}
    """The attributes that keep torch's hyperparameters, by torch's names; but for `lr`."""

    def __init__(self, numbers: Mapping[str, Any], name: str | None = None, **options: Any) -> None:
        for theirs, ours in self.hyperparameters.items():
            setattr(self, ours, plain(numbers[theirs]))
        self.slots = self._needed()  # before there is state, which needs these slots
        super().__init__(plain(numbers["lr"]), name, **options)

    def _needed(self) -> tuple[str, ...]:
        """Returns the names of the slots that these hyperparameters need."""
        raise NotImplementedError

    def _slots_with(self, name: str, value: object) -> tuple[str, ...]:
        """See the base: `_needed` says which."""
        changed = copy.copy(self)
        vars(changed)[name] = value
        return changed._needed()

    def initial_slot(self, slot: str, v: Variable) -> Array:
        """A count for "step", else zeros of the parameter's shape."""
        return np.zeros((), np.int64) if slot == STEP else super().initial_slot(slot, v)

    def _count(self, iterations: Value, slots: Sequence[Value], others: int) -> tuple[Value, Sequence[Value]]:
        """Counts a step; returns the parameter's number of steps, float64, and its other slots, `others` in number."""
        if len(slots) == others:
            return iterations.astype(np.float64), slots
        count, *rest = slots
        now = count + 1
        count.assign(now)
        return now.astype(np.float64), rest

    def _gradient(self, v: Value, gradient: Value) -> Value:
        """The gradient of what is minimized, with that of the penalty of large parameters."""
        if self.maximize:
            gradient = -gradient
        return gradient + self.penalty * v.astype(gradient.dtype) if self.penalty else gradient

    maximize: bool = False
    penalty: float = 0.0
    """torch's `weight_decay`, where it is a penalty; the base's `weight_decay` is another one."""


class SGD(TorchRule):
    """`torch.optim.SGD`: momentum with dampening, or Nesterov's."""

    hyperparameters = {
        "momentum": "momentum",
        "dampening": "dampening",
        "weight_decay": "penalty",
        "nesterov": "nesterov",
        "maximize": "maximize",
    }
    _slot_of = {"momentum": "momentum_buffer", "dampening": STEP}
    momentum: float
    dampening: float
    nesterov: bool

    def _needed(self) -> tuple[str, ...]:
        if not self.momentum:
            return ()
        return (STEP, "momentum_buffer") if self.dampening else ("momentum_buffer",)

    def update(self, v: Value, gradient: Value, iterations: Value, *slots: Value) -> None:
        """Applies a step of `torch.optim.SGD`."""
        step = self._gradient(v, gradient)
        if slots and self.momentum:
            t, (momentum,) = self._count(iterations, slots, 1)
            now = self.momentum * momentum + (1 - self.dampening) * step
            # The first gradient is not dampened.
            momentum.assign(np.where(t == 1, step, now) if self.dampening else now)
            step = step + self.momentum * momentum if self.nesterov else momentum
        v.assign_sub(self.learning_rate * step)


class Adam(TorchRule):
    """`torch.optim.Adam`; with decoupled decay `AdamW`."""

    hyperparameters = {
        "betas": "betas",
        "eps": "epsilon",
        "weight_decay": "decay",
        "amsgrad": "amsgrad",
        "maximize": "maximize",
        "decoupled_weight_decay": "decoupled",
    }
    _slot_of = {"amsgrad": "max_exp_avg_sq"}
    betas: tuple[float, float]
    epsilon: float
    decay: float
    amsgrad: bool
    decoupled: bool

    def _needed(self) -> tuple[str, ...]:
        return (STEP, "exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if self.amsgrad else ()))

    def update(self, v: Value, gradient: Value, iterations: Value, *slots: Value) -> None:
        """Applies a step of `torch.optim.Adam` or `AdamW`."""
        beta_1, beta_2 = self.betas
        t, (first, second, *greatest) = self._count(iterations, slots, 3 if self.amsgrad else 2)
        step = -gradient if self.maximize else gradient
        if self.decay:
            value = v.astype(step.dtype)
            if self.decoupled:
                v.assign(value * (1 - self.learning_rate * self.decay))
            else:
                step = step + self.decay * value
        first.assign_add((1 - beta_1) * (step - first))
        second.assign(beta_2 * second + (1 - beta_2) * step * step)
        size = second
        for most in greatest if self.amsgrad else ():
            most.assign(np.maximum(most, second))
            size = most
        rate = (self.learning_rate / (1 - beta_1**t)).astype(step.dtype)
        root = np.sqrt(1 - beta_2**t).astype(step.dtype)
        v.assign_sub(rate * (first / (np.sqrt(size) / root + self.epsilon)))


class Adagrad(TorchRule):
    """`torch.optim.Adagrad`."""

    hyperparameters = {
        "lr_decay": "lr_decay",
        "weight_decay": "penalty",
        "initial_accumulator_value": "initial_accumulator_value",
        "eps": "epsilon",
        "maximize": "maximize",
    }
    _slot_of = {"lr_decay": STEP}
    lr_decay: float
    initial_accumulator_value: float
    epsilon: float

    def _needed(self) -> tuple[str, ...]:
        return (STEP, "sum") if self.lr_decay else ("sum",)

    def initial_slot(self, slot: str, v: Variable) -> Array:
        """Sums begin with `initial_accumulator_value`."""
        first = super().initial_slot(slot, v)
        return first if slot == STEP else np.full_like(first, self.initial_accumulator_value)

    def update(self, v: Value, gradient: Value, iterations: Value, *slots: Value) -> None:
        """Applies a step of `torch.optim.Adagrad`."""
        step = self._gradient(v, gradient)
        t, (total,) = self._count(iterations, slots, 1)
        total.assign_add(step * step)
        rate = self.learning_rate
        if self.lr_decay:
            rate = (rate / (1 + (t - 1) * self.lr_decay)).astype(step.dtype)
        v.assign_sub(rate * (step / (np.sqrt(total) + self.epsilon)))


class RMSprop(TorchRule):
    """`torch.optim.RMSprop`: centered or not, with momentum or without."""

    hyperparameters = {
        "alpha": "alpha",
        "eps": "epsilon",
        "weight_decay": "penalty",
        "momentum": "momentum",
        "centered": "centered",
        "maximize": "maximize",
    }
    _slot_of = {"momentum": "momentum_buffer", "centered": "grad_avg"}
    alpha: float
    epsilon: float
    momentum: float
    centered: bool

    def _needed(self) -> tuple[str, ...]:
        momentum = ("momentum_buffer",) if self.momentum else ()
        return ("square_avg", *momentum, *(("grad_avg",) if self.centered else ()))

    def update(self, v: Value, gradient: Value, iterations: Value, *slots: Value) -> None:
        """Applies a step of `torch.optim.RMSprop`."""
        own = dict(zip(self.slots, slots, strict=True))
        step, squares = self._gradient(v, gradient), own["square_avg"]
        squares.assign(self.alpha * squares + (1 - self.alpha) * step * step)
        size = squares.value()
        if self.centered:
            mean = own["grad_avg"]
            mean.assign_add((1 - self.alpha) * (step - mean))
            size = size - mean * mean
        step = step / (np.sqrt(size) + self.epsilon)
        if self.momentum:
            momentum = own["momentum_buffer"]
            momentum.assign(self.momentum * momentum + step)
            step = momentum
        v.assign_sub(self.learning_rate * step)


RULES: Mapping[type[torch.optim.Optimizer], type[TorchRule]] = {
    torch.optim.SGD: SGD,
    torch.optim.Adam: Adam,
    torch.optim.AdamW: Adam,
    torch.optim.Adagrad: Adagrad,
    torch.optim.RMSprop: RMSprop,
}


def plain(value: Any) -> Any:
    """Returns a hyperparameter as an update function takes it: tensors as numbers, lists as tuples."""
    if isinstance(value, torch.Tensor):
        return float(value)
    return tuple(map(plain, value)) if isinstance(value, list | tuple) else value


def rule_class(theirs: Any) -> type[TorchRule]:
    """Returns the rule that computes what a class of torch's optimizers does.

    Raises:
        ValueError: there is none.
    """
    found = RULES.get(theirs)
    if found is None:
        known = ", ".join(kind.__name__ for kind in RULES)
        raise InvalidArgument(
            f"{getattr(theirs, '__module__', '')}.{getattr(theirs, '__name__', theirs)} is not supported; "
            f"servers run {known} of torch.optim. Otherwise use one of ps.optimizers, or write a subclass "
            "of one"
        )
    return found
