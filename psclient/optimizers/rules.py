"""The table of update rules: what each optimizer of Keras, TensorFlow 1, PyTorch and optax keeps, and its formula."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from psclient._src.arrays.devices import Value
from psclient._src.variables.variable import Variable
from psclient.optimizers import formulas as f
from psclient.optimizers.base import Optimizer
from psclient.optimizers.ranges import (
    AT_LEAST_0,
    AT_MOST_0,
    FINITE,
    FROM_0_TO_1,
    LESS_THAN_1,
    MORE_THAN_0,
    Range,
    check_number,
)
from psclient.optimizers.state import Needs
from pswire.model.tensor import Array

STEP = "step"
"""The slot that counts the steps of one variable: those in which it had a gradient."""


class Slot(NamedTuple):
    """State that a rule keeps of each variable.

    Attributes:
        name: the slot's name in checkpoints.
        needs: the hyperparameters without which there is no such slot, all of them.
        first: its initial value: a number, or the hyperparameter that it is.
        shape: that of the variable, one number for each row, or one number.
    """

    name: str
    needs: tuple[str, ...] = ()
    first: float | str = 0.0
    shape: Literal["variable", "rows", "number"] = "variable"


@dataclass(frozen=True, eq=False)
class Rule:
    """A row of the table.

    Attributes:
        formula: makes a step; see `formulas`.
        slots: what it keeps of each variable, in the order in which the formula takes it.
        numbers: the hyperparameters but for the learning rate, with the numbers that are allowed; None for a flag.
        by_row: True if it computes each row by itself, so that it may run beside the shards of a partitioned variable.
        decays: True if the formula itself makes the weight decay.
        advance: moves the last slot once for each step, if that is a number that goes by steps alone.
        of_rows: True if it is for gradients of rows, and leaves rows without a gradient as they are by default.
    """

    formula: Callable[..., None]
    slots: tuple[Slot, ...] = ()
    numbers: Mapping[str, Range | None] = field(default_factory=dict)
    by_row: bool = True
    decays: bool = False
    advance: Callable[..., Value] | None = None
    of_rows: bool = False


class RuleOptimizer(Optimizer):
    """An optimizer that is a row of the table, which a subclass names: `class Adam(RuleOptimizer, rule=KERAS["Adam"])`.

    Args:
        learning_rate: as in `Optimizer`.
        given: the rule's hyperparameters by name, and options as in `Optimizer`.
    """

    _rule: ClassVar[Rule]

    def __init_subclass__(cls, rule: Rule | None = None) -> None:
        if rule is not None:
            cls._rule = rule
            cls.slots = tuple([slot.name for slot in rule.slots])
            cls._by_row, cls._decays_before, cls._running = rule.by_row, not rule.decays, rule.advance is not None

    def __init__(self, learning_rate: Any, **given: Any) -> None:
        numbers = {name: given.pop(name) for name in self._rule.numbers}
        super().__init__(learning_rate, **({"sparse": "lazy"} if self._rule.of_rows else {}) | given)
        for name, value in numbers.items():
            setattr(self, name, value)
        if (slots := self._needed()) != tuple([slot.name for slot in self._rule.slots]):
            self.slots = slots

    def __setattr__(self, name: str, value: object) -> None:
        # What stands for an optimizer in an update function has no state.
        if "_state" in vars(self) and name in self._rule.numbers:
            range = self._rule.numbers[name]
            value = bool(value) if range is None else check_number(name, value, range)
            needs = [slot.name for slot in self._rule.slots if name in slot.needs and self._has(slot, {name: value})]
            if missing := [slot for slot in needs if slot not in self.slots]:
                raise AttributeError(
                    f"{name} needs a slot {missing[-1]!r}, but this {type(self).__name__} was created without it; "
                    "create another one"
                )
        super().__setattr__(name, value)

    def _has(self, slot: Slot, changed: Mapping[str, object]) -> bool:
        return all(changed[name] if name in changed else getattr(self, name, False) for name in slot.needs)

    def _needed(self, **changed: object) -> tuple[str, ...]:
        return tuple([slot.name for slot in self._rule.slots if self._has(slot, changed)])

    def _prepare(self, name: str, value: object) -> None:
        """Keeps the slots that another value of an attribute needs, for variables of which it keeps nothing yet."""
        vars(self)["slots"] = self._needed(**{name: value})

    @classmethod
    def _arguments(cls) -> list[str]:
        named = super()._arguments()
        return list(dict.fromkeys((*named, "learning_rate", *cls._rule.numbers)))

    def initial_slot(self, slot: str, v: Variable) -> Array:
        """Returns the initial value of a slot, which the rule says."""
        whole = super().initial_slot(slot, v)
        row = next((each for each in self._rule.slots if each.name == slot), Slot(slot))
        first = getattr(self, row.first) if isinstance(row.first, str) else row.first
        if row.shape == "number":
            return np.array(first)
        if row.shape == "rows":
            whole = whole[tuple(slice(None) if axis == 0 else slice(0, 1) for axis in range(whole.ndim))]
        return np.full_like(whole, first)

    def _needs(self, v: Variable) -> Needs:
        # Where the steps of one variable are counted, `update` moves the number that goes by them.
        needs = super()._needs(v)
        return replace(needs, running=False) if STEP in needs.slots else needs

    def update(self, v: Value, gradient: Value, iterations: Value, *slots: Value) -> None:
        """Applies a step of the rule's formula."""
        names = [slot.name for slot in self._rule.slots if slot.name in self.slots]
        if len(slots) < len(names):  # the steps of a table's rows are not counted
            names.remove(STEP)
        own = dict(zip(names, slots, strict=True))
        t, count = iterations, own.pop(STEP, None)
        if count is not None:
            t = count + 1
            count.assign(t)
            if self._rule.advance:
                own[names[-1]].assign(self._advanced(own[names[-1]], t))
        step = self._descending(v, gradient)
        rest = [slot for slot in self._rule.slots if slot.name != STEP]
        self._rule.formula(self, v, step, t, *(own.get(slot.name) if self._has(slot, {}) else None for slot in rest))

    def _descending(self, v: Value, gradient: Value) -> Value:
        """Returns the gradient of what is minimized."""
        return gradient

    def _advanced(self, number: Value, iterations: Value) -> Value:
        return self._rule.advance(self, number, iterations) if self._rule.advance else number


class TorchRule(RuleOptimizer):
    """An optimizer by the formula of one of torch's: it counts the steps of each variable, and may ascend.

    Attributes:
        penalty: torch's `weight_decay`; the base's is another one.
        decoupled: True if parameters decay by it, and no gradient has it.
    """

    maximize: bool
    penalty: float = 0.0
    decoupled: bool = False

    def _descending(self, v: Value, gradient: Value) -> Value:
        step = -gradient if self.maximize else gradient
        if not self.penalty:
            return step
        value = v.astype(step.dtype)
        if not self.decoupled:
            return step + self.penalty * value
        v.assign(value * (1 - self.learning_rate * self.penalty))
        return step


@functools.cache
def kind_of(rule: Rule, name: str, base: type[RuleOptimizer] = RuleOptimizer) -> type[RuleOptimizer]:
    """Returns the class of the optimizers that are a row.

    Args:
        rule: the row.
        name: the class's name, for messages.
        base: what it is a subclass of.
    """
    return type(name, (base,), {"__module__": __package__}, rule=rule)


# ---- The table ----

_MOMENTUM = {"momentum": FROM_0_TO_1, "nesterov": None}
_MOMENTS = {"beta_1": LESS_THAN_1, "beta_2": LESS_THAN_1, "epsilon": AT_LEAST_0}
_SUM = {"initial_accumulator_value": AT_LEAST_0, "epsilon": AT_LEAST_0}
_SIZES = {"rho": FROM_0_TO_1, "epsilon": AT_LEAST_0}
_RMSPROP = {"rho": FROM_0_TO_1, "momentum": FROM_0_TO_1, "epsilon": AT_LEAST_0, "centered": None}
_PENALTIES = {"l1_regularization_strength": AT_LEAST_0, "l2_regularization_strength": AT_LEAST_0}
_FTRL = {
    "learning_rate_power": AT_MOST_0,
    "initial_accumulator_value": AT_LEAST_0,
    **_PENALTIES,
    "l2_shrinkage_regularization_strength": AT_LEAST_0,
    "beta": AT_LEAST_0,
}
_M, _V, _FIRST = Slot("m"), Slot("v"), "initial_accumulator_value"
_TORCH_FIRST = Slot(STEP, first=0, shape="number"), Slot("exp_avg")
_TORCH_MOMENTS = *_TORCH_FIRST, Slot("exp_avg_sq")
_TORCH_BETAS: Mapping[str, Range | None] = {**dict.fromkeys(("beta_1", "beta_2", "epsilon"), FINITE), "maximize": None}
_TORCH_DECAY = {**_TORCH_BETAS, "penalty": FINITE, "decoupled": None}
_TORCH_ADAM = Rule(
    f.adam_of_torch, (*_TORCH_MOMENTS, Slot("max_exp_avg_sq", ("amsgrad",))), {**_TORCH_DECAY, "amsgrad": None}
)
_OPTAX_MOMENTS = dict.fromkeys(("b1", "b2"), LESS_THAN_1) | {"eps": AT_LEAST_0}
_OPTAX_ADAM: Mapping[str, Range | None] = {**_OPTAX_MOMENTS, "eps_root": AT_LEAST_0, "nesterov": None}
_AT_LEAST_1 = Range("a whole number of at least 1", lambda x: x >= 1 and x == int(x))
_ABOVE_0 = Range("more than 0 and at most 1; SGD has none", lambda x: 0 < x <= 1)

KERAS = {
    "SGD": Rule(f.descent, (Slot("momentum", ("momentum",)),), _MOMENTUM),
    "DelayedNesterov": Rule(
        f.delayed_nesterov, (Slot("gradients"), Slot("momentum")), {"momentum": FROM_0_TO_1, "delay": _AT_LEAST_1}
    ),
    "Lion": Rule(f.lion, (Slot("momentum"),), {"beta_1": _ABOVE_0, "beta_2": FROM_0_TO_1}),
    "Adam": Rule(f.adam, (_M, _V, Slot("v_hat", ("amsgrad",))), {**_MOMENTS, "amsgrad": None}),
    "Adamax": Rule(f.adamax, (_M, Slot("u")), _MOMENTS),
    "Nadam": Rule(f.nadam, (_M, _V, Slot("product", first=1.0, shape="number")), _MOMENTS, advance=f.nadam_product),
    "Lamb": Rule(f.lamb, (_M, _V), _MOMENTS, by_row=False),  # the lengths are those of whole variables
    "Adagrad": Rule(f.adagrad, (Slot("accumulator", first=_FIRST),), _SUM),
    "RowwiseAdagrad": Rule(f.adagrad_of_rows, (Slot("accumulator", first=_FIRST, shape="rows"),), _SUM),
    "Adadelta": Rule(f.adadelta, (Slot("gradients"), Slot("steps")), _SIZES),
    "RMSprop": Rule(
        f.rmsprop, (Slot("squares"), Slot("mean", ("centered",)), Slot("momentum", ("momentum",))), _RMSPROP
    ),
    "Ftrl": Rule(f.ftrl, (Slot("accumulator", first=_FIRST), Slot("linear")), _FTRL),
}

TENSORFLOW = {
    "Momentum": Rule(f.heavy_ball, (Slot("momentum"),), _MOMENTUM),
    "Adagrad": Rule(f.adagrad, (Slot("accumulator", first=_FIRST),), {**_SUM, _FIRST: MORE_THAN_0}),
    "RMSProp": Rule(f.rmsprop, (Slot("rms", first=1.0), Slot("mg", ("centered",)), Slot("momentum")), _RMSPROP),
    "Adadelta": Rule(f.adadelta, (Slot("accum"), Slot("accum_update")), _SIZES),
    "Ftrl": Rule(f.ftrl, (Slot("accum", first=_FIRST), Slot("linear")), _FTRL),
    "ProximalGradientDescent": Rule(f.proximal_descent, (), _PENALTIES),
    "ProximalAdagrad": Rule(
        f.proximal_adagrad, (Slot("accumulator", first=_FIRST),), {_FIRST: MORE_THAN_0, **_PENALTIES}
    ),
}

OPTAX = {
    "Sgd": Rule(f.heavy_ball, (Slot("trace", ("momentum",)),), _MOMENTUM),
    "Adam": Rule(f.adam_of_optax, (Slot("mu"), Slot("nu")), _OPTAX_ADAM, decays=True),
    "Radam": Rule(f.radam_of_optax, (Slot("mu"), Slot("nu")), {**_OPTAX_ADAM, "threshold": FINITE}),
    "Adamax": Rule(f.adamax_of_optax, (Slot("mu"), Slot("nu")), _OPTAX_MOMENTS),
    "Adadelta": Rule(
        f.adadelta_of_optax, (Slot("e_g"), Slot("e_x")), {"rho": FROM_0_TO_1, "eps": AT_LEAST_0}, decays=True
    ),
    "Adagrad": Rule(
        f.adagrad_of_optax, (Slot("sum_of_squares", first=_FIRST),), {_FIRST: AT_LEAST_0, "eps": AT_LEAST_0}
    ),
}

TORCH = {
    "SGD": Rule(
        f.heavy_ball,
        (Slot(STEP, ("momentum", "dampening"), 0, "number"), Slot("momentum_buffer", ("momentum",))),
        {"momentum": FINITE, "dampening": FINITE, "penalty": FINITE, "nesterov": None, "maximize": None},
    ),
    "Adam": _TORCH_ADAM,
    "AdamW": _TORCH_ADAM,
    "SparseAdam": Rule(f.adam, _TORCH_MOMENTS, _TORCH_BETAS, of_rows=True),
    "NAdam": Rule(
        f.nadam_of_torch,
        (*_TORCH_MOMENTS, Slot("mu_product", first=1.0, shape="number")),
        {**_TORCH_DECAY, "momentum_decay": FINITE},
        advance=f.nadam_product_of_torch,
    ),
    "RAdam": Rule(f.radam_of_torch, _TORCH_MOMENTS, _TORCH_DECAY),
    "Adamax": Rule(f.adamax_of_torch, (*_TORCH_FIRST, Slot("exp_inf")), {**_TORCH_BETAS, "penalty": FINITE}),
    "Adagrad": Rule(
        f.adagrad_of_torch,
        (Slot(STEP, ("lr_decay",), 0, "number"), Slot("sum", first=_FIRST)),
        {"lr_decay": FINITE, "penalty": FINITE, _FIRST: FINITE, "epsilon": FINITE, "maximize": None},
    ),
    "RMSprop": Rule(
        f.rmsprop_of_torch,
        (Slot("square_avg"), Slot("momentum_buffer", ("momentum",)), Slot("grad_avg", ("centered",))),
        {
            **dict.fromkeys(("alpha", "epsilon", "penalty", "momentum"), FINITE),
            **dict.fromkeys(("centered", "maximize")),
        },
    ),
    "Adadelta": Rule(
        f.adadelta,
        (Slot("square_avg"), Slot("acc_delta")),
        {**dict.fromkeys(("rho", "epsilon", "penalty"), FINITE), "maximize": None},
    ),
}
"""By the names of the classes of `torch.optim`, which checks numbers itself; `TorchRule` says what `penalty` is."""
