"""Groups of parameters with hyperparameters of their own, which one optimizer updates in one round."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from psclient._src.arrays.devices import Value
from psclient._src.tracing.hyperparameters import Configured, Settings
from psclient._src.variables.variable import Variable
from psclient.optimizers import Optimizer
from psclient.optimizers.rules import STEP, TORCH, RuleOptimizer, TorchRule, kind_of
from psclient.optimizers.schedules import LearningRateSchedule
from psclient.optimizers.state import Needs, State, state_of
from psclient.optimizers.step_driver import StepDriver
from psclient.optimizers.step_functions import state_dtype
from psclient.torch.rows import LIMIT_EPSILON, Limit
from pswire.errors import InvalidArgument, InvalidType

LR = "lr"
BETAS = "betas"


class ParameterGroups(Configured):
    """The rules of all groups, as one optimizer: they share its counts.

    The first group's rule has the state of all, and the options that are of a step as a whole, such as
    `global_clipnorm`. A rule is an optimizer of `ps.optimizers`, or one of torch's.

    Args:
        first: the rule of the first group.

    Attributes:
        chosen: the number of the group that an update is of, as a word: each has an update function's trace of its own.
        limit: the norm that rows may not exceed and its p, as words, or an empty one.
        divisor, half_divisor: by what the sum of all workers' gradients is divided, and that of gradients in float16;
            None for nothing.
    """

    chosen = "0"
    limit = ""
    divisor: float | None = None
    half_divisor: float | None = None

    def __init__(self, first: Optimizer) -> None:
        self.rule_0 = first
        self._made: dict[int, Optimizer] = {0: first}  # no list, which update functions would see
        self._of: dict[int, int] = {}
        self._entered: list[tuple[Variable, int]] = []
        self._by_rows: set[int] = set()
        self._limits: dict[int, str] = {}
        self._seen: dict[tuple[float | None, float | None], tuple[list[Settings], Settings]] = {}  # the last
        given = (self.state, first._check_variables, self._needs, self._decays, self._decaying)
        self.driver = StepDriver(first, *given, self._settings, self._settings_of, optional=True)

    # ---- What an update sees ----

    @classmethod
    def _label_of(cls, name: str, inner: str) -> str:
        """As `param_groups` has it."""
        return f"{_SHOWN.get(inner, inner)} of param_groups[{name.removeprefix('rule_')}]"

    def _settings(self) -> Settings:
        """Returns what an update function sees of all rules, as of now."""
        rules, divisors = [rule._settings() for rule in self._made.values()], (self.divisor, self.half_divisor)
        known = self._seen.get(divisors)
        if known is None or known[0] != rules:
            self._seen.clear()
            known = self._seen[divisors] = rules, super()._settings()
        return known[1]

    def _divided(self, v: Value, gradient: Value) -> Value:
        divisor = self.half_divisor if v.dtype == np.float16 else self.divisor
        return gradient if divisor is None else gradient.astype(state_dtype(v.dtype)) / divisor

    @property
    def _chosen(self) -> Any:
        """The rule of the chosen group."""
        return getattr(self, f"rule_{self.chosen}")

    def _settings_of(self, v: Variable) -> Settings:
        return self._settings_with(chosen=str(self._of[id(v)]), limit=self._limits.get(id(v), ""))

    def _shorten(self, v: Any) -> None:
        if not self.limit:
            return
        max_norm, p = map(float, self.limit.split())
        rows = v.astype(state_dtype(v.dtype))
        if p == np.inf:
            norms = np.max(np.abs(rows), axis=1, keepdims=True)
        elif p == 2:
            norms = np.sqrt(np.sum(np.square(rows), axis=1, keepdims=True))
        else:
            norms = np.sum(np.abs(rows) ** p, axis=1, keepdims=True) ** (1 / p)
        v.assign(np.where(norms > max_norm, rows * (max_norm / (norms + LIMIT_EPSILON)), rows).astype(v.dtype))

    # ---- What a step is ----

    @property
    def first(self) -> Optimizer:
        """The first group's rule."""
        return self._made[0]

    @property
    def state(self) -> State:
        """What is kept of all variables."""
        return state_of(self.first)

    # ---- Groups ----

    def add(self) -> None:
        """Adds a group with the first one's hyperparameters.

        Raises:
            ValueError: the learning rate is a schedule's, which is computed once for all.
        """
        if isinstance(self.first._learning_rate, LearningRateSchedule):
            raise InvalidArgument(
                "a schedule of ps.optimizers supports only one parameter group; pass a number as learning "
                "rate, and use a scheduler of torch.optim.lr_scheduler"
            )
        number, made = len(self._made), copy.copy(self.first)
        setattr(self, f"rule_{number}", made)
        self._made[number] = made

    def enter(self, v: Variable, group: int, by_rows: bool, limit: Limit | None = None) -> None:
        """Puts a variable into a group.

        Args:
            v: the variable.
            group: the number of the group.
            by_rows: True if its gradients are rows: then its steps are not counted one by one.
            limit: the norm that its rows may not exceed; None for any.
        """
        if limit is not None:
            self._limits[id(v)] = f"{limit.max_norm!r} {limit.norm_type!r}"
        self._of[id(v)] = group
        self._entered.append((v, group))
        if by_rows:
            self._by_rows.add(id(v))

    def of(self, v: Variable) -> Optimizer:
        """Returns the rule of a variable."""
        return self._made[self._of[id(v)]]

    def set(self, group: int, name: str, value: Any) -> None:
        """Changes a hyperparameter of a group.

        Args:
            group: the number of the group.
            name: as in `param_groups`.
            value: the new value.

        Raises:
            ValueError, TypeError: it is none for this hyperparameter.
            AttributeError: it would need state that is not there.
        """
        rule, value = self._made[group], plain(value)
        if not any(self.state.has(v) for v, of in self._entered if of == group):
            rule._prepare(keys_of(rule).get(name, name), value)
        set_hyperparameter(rule, name, value)

    def get(self, group: int, name: str) -> Any:
        """Returns a hyperparameter of a group as of now."""
        return value_of(self._made[group], name)

    # ---- For the driver ----

    def _needs(self, v: Variable) -> Needs:
        rule = self.of(v)
        found = rule._needs(v)
        if id(v) not in self._by_rows:
            return found
        slots = {name: value for name, value in found.slots.items() if name != STEP}
        return replace(found, slots=slots, running=rule._running)

    def _decays(self, v: Variable) -> bool:
        return self.of(v)._decays(v)

    def _decaying(self) -> object:
        return [rule._decaying() for rule in self._made.values()]


def value_of(rule: Optimizer, name: str) -> Any:
    """Returns a hyperparameter of a rule by its name in `param_groups`."""
    if name == BETAS:
        return rule.beta_1, rule.beta_2  # type: ignore[attr-defined]
    return getattr(rule, keys_of(rule)[name])


def set_hyperparameter(rule: Optimizer, name: str, value: Any) -> None:
    """Changes a hyperparameter of a rule, by its name in `param_groups`."""
    if name == BETAS:
        rule.beta_1, rule.beta_2 = value  # type: ignore[attr-defined]
    else:
        setattr(rule, keys_of(rule)[name], value)


def keys_of(rule: Optimizer) -> Mapping[str, str]:
    """Returns the names of a rule's hyperparameters in `param_groups`, with the attributes they are."""
    if isinstance(rule, TorchRule):
        return {_theirs(name): name for name in ("learning_rate", *rule._rule.numbers)}
    config = rule.get_config()
    numbers = {name for name, value in config.items() if isinstance(value, bool | int | float)} | {"weight_decay"}
    theirs = _SHOWN if {"beta_1", "beta_2"} <= numbers else {}  # so that torch's schedulers find betas
    return {LR: "learning_rate", **{theirs.get(name, name): name for name in sorted(numbers - _OF_A_STEP)}}


def needs_rows(rule: Optimizer) -> bool:
    """Returns whether a rule takes sparse gradients alone."""
    return isinstance(rule, RuleOptimizer) and rule._rule.of_rows


_SHOWN = {
    "learning_rate": LR,
    "beta_1": BETAS,
    "beta_2": BETAS,
    "penalty": "weight_decay",
    "decoupled": "decoupled_weight_decay",
}
_THEIRS = {**_SHOWN, "epsilon": "eps"}
"""torch's names of attributes of its rules; without those that optimizers of `ps.optimizers` have as well."""

_OF_A_STEP = frozenset(
    {
        *("learning_rate", "clipnorm", "clipvalue", "global_clipnorm", "loss_scale_factor"),
        *("sparse", "catch_up"),
        *("gradient_accumulation_steps", "use_ema", "ema_momentum", "ema_overwrite_frequency"),
    }
)
"""Options of Keras's optimizers that are not of a group."""


OURS = frozenset({"clipnorm", "clipvalue", "global_clipnorm", "sparse", "catch_up"})
"""Options of `ps.optimizers` that go with torch's rules as well."""


def rule_of(optimizer: Any, options: Mapping[str, Any], name: str | None) -> tuple[Optimizer, dict[str, Any]]:
    """Returns the rule of an optimizer, and the defaults of `param_groups`.

    Args:
        optimizer: one of `ps.optimizers`, or a class of torch's.
        options: arguments of a class of torch's.
        name: prefix of the names of slots, for a rule that is made.

    Raises:
        TypeError: it is neither; or options are given to one of `ps.optimizers`.
        ValueError: servers do not run that class; or it refuses its arguments.
    """
    if isinstance(optimizer, Optimizer):
        if options:
            raise InvalidType(
                f"{', '.join(sorted(options))} cannot be passed together with a {type(optimizer).__name__} "
                "instance; pass them to its constructor, or pass a class of torch.optim instead"
            )
        return optimizer, {name: value_of(optimizer, name) for name in keys_of(optimizer)}
    if isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidType(
            f"a {type(optimizer).__name__} instance would update parameters in this process instead of on "
            "servers; pass its class and arguments: pst.Optimizer(module, "
            f"torch.optim.{type(optimizer).__name__}, lr=...)"
        )
    if not (isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer)):
        raise InvalidType(
            f"{optimizer!r} is not an optimizer; pass one of ps.optimizers, or a class such as torch.optim.AdamW"
        )
    kind = _kind_of(optimizer)
    if options.get("differentiable"):
        raise InvalidArgument("differentiable=True is not supported, because servers make the steps; leave it out")
    own = {name: options[name] for name in OURS & options.keys()}
    given = {name: value for name, value in options.items() if name not in own}
    (theirs,) = optimizer([{"params": []}], **given).param_groups  # torch checks the arguments, and adds defaults
    defaults = {name: theirs[name] for name in dict.fromkeys(map(_theirs, ("learning_rate", *kind._rule.numbers)))}
    numbers = {name: plain(theirs[_theirs(name)]) for name in kind._rule.numbers}
    if BETAS in theirs:
        numbers["beta_1"], numbers["beta_2"] = numbers["beta_1"]
    return kind(plain(theirs[LR]), name=name or optimizer.__name__.lower(), **numbers, **own), defaults


def _theirs(name: str) -> str:
    return _THEIRS.get(name, name)


def _kind_of(theirs: Any) -> type[RuleOptimizer]:
    """Returns the optimizers that compute what a class of torch's optimizers does; raises `ValueError` without one."""
    name = getattr(theirs, "__name__", str(theirs))
    if name in TORCH and theirs is getattr(torch.optim, name):
        return kind_of(TORCH[name], name, TorchRule)
    raise InvalidArgument(
        f"{getattr(theirs, '__module__', '')}.{name} is not supported; servers run {', '.join(TORCH)} of torch.optim. "
        "Otherwise use one of ps.optimizers, or write a subclass of one"
    )


def plain(value: Any) -> Any:
    """Returns a hyperparameter as an update function takes it: tensors as numbers, lists as tuples."""
    if isinstance(value, torch.Tensor):
        return float(value)
    return tuple(map(plain, value)) if isinstance(value, list | tuple) else value
