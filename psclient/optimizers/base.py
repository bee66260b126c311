"""The base of all optimizers: ordinary users of `reduce_to`, `update`, `colocate_vars_with` and `update_non_slot`.

A new one is a subclass with the names of its slots and an `update` function of a few lines, which is traced
and runs on the server, beside the variable. What all have in common is done around that, in `step`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypedDict, cast

import numpy as np

from psclient import context, values
from psclient.optimizers.scaling import DynamicLossScale
from psclient.optimizers.schedules import LearningRateSchedule
from psclient.optimizers.state import State
from psclient.optimizers.step import apply, become, begin, collect, measure, state_dtype, total
from psclient.reduce_op import ReduceOp
from psclient.section import bring
from psclient.traces import Configured, Settings
from psclient.variables import Variable
from pswire.tensor import Array

LearningRate = float | LearningRateSchedule | Callable[[], float]
"""A number, a schedule, or a function that each process calls for each step, and that gives all the same."""


class Options(TypedDict, total=False):
    """What every optimizer takes beside its own arguments; see `Optimizer`."""

    weight_decay: float | None
    clipnorm: float | None
    clipvalue: float | None
    global_clipnorm: float | None
    use_ema: bool
    ema_momentum: float
    ema_overwrite_frequency: int | None
    loss_scale_factor: float | DynamicLossScale | None
    gradient_accumulation_steps: int | None
    name: str | None


class Optimizer(Configured):
    """Base of all optimizers. Create it inside `strategy.scope()`.

    Source: `keras.optimizers.Optimizer`, whose names, defaults and formulas these are.

    Attributes:
        slots: names of the state that each variable has beside it, in the order in which `update` takes it.
        learning_rate: may be changed between steps; that makes no new program, and neither does any other number that
            an optimizer has as an attribute.

    Args:
        learning_rate: step size: a number, a schedule, or a function without arguments that gives a number, the same
            one on all processes.
        name: prefix of the names of slots.
        weight_decay: by which fraction of them, times the learning rate, variables are made smaller before each step.
        clipnorm: the most that the norm of each gradient may be; larger ones are made smaller.
        clipvalue: the most that an element of a gradient may be, in size.
        global_clipnorm: the most that the norm of all gradients together may be. Where variables live on several
            servers a step then takes two rounds.
        use_ema: keeps an exponential moving average of each variable; see `average`.
        ema_momentum: how much of the average stays in each step.
        ema_overwrite_frequency: after how many steps variables become their averages; None for never.
        loss_scale_factor: by which the loss was multiplied, so that gradients are divided by it; or a
            `DynamicLossScale`. See `scale_loss`.
        gradient_accumulation_steps: of how many calls the gradients are averaged for one step.

    Raises:
        ValueError: more than one way of clipping, or an option that is out of its range.
        TypeError: the learning rate is none.
    """

    slots: tuple[str, ...] = ()

    def __init__(
        self,
        learning_rate: LearningRate,
        name: str | None = None,
        *,
        weight_decay: float | None = None,
        clipnorm: float | None = None,
        clipvalue: float | None = None,
        global_clipnorm: float | None = None,
        use_ema: bool = False,
        ema_momentum: float = 0.99,
        ema_overwrite_frequency: int | None = None,
        loss_scale_factor: float | DynamicLossScale | None = None,
        gradient_accumulation_steps: int | None = None,
    ) -> None:
        _check_options(clipnorm, clipvalue, global_clipnorm, loss_scale_factor)
        _check_counts(ema_momentum, use_ema, ema_overwrite_frequency, gradient_accumulation_steps)
        self.learning_rate: Any = _check_rate(learning_rate)
        self.name = name or type(self).__name__.lower()
        self.weight_decay = weight_decay
        self.clipnorm, self.clipvalue, self.global_clipnorm = clipnorm, clipvalue, global_clipnorm
        self.use_ema, self.ema_momentum = use_ema, ema_momentum
        self.ema_overwrite_frequency = ema_overwrite_frequency
        self.loss_scale_factor = loss_scale_factor
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self._state = State(self.name, self._first_state())
        self._excluded: dict[int, Variable] = {}
        self._excluded_names: set[str] = set()

    def _first_state(self) -> dict[str, Array]:
        first: dict[str, Array] = {"iterations": np.zeros((), np.int64)}
        if self.gradient_accumulation_steps:
            first["accumulated"] = np.zeros((), np.int64)
        if isinstance(self.loss_scale_factor, DynamicLossScale):
            first["loss_scale"] = np.array(self.loss_scale_factor.initial_scale, np.float32)
            first |= {"good_steps": np.zeros((), np.int64), "skipped_steps": np.zeros((), np.int64)}
        return first

    # ---- For subclasses ----

    def update(self, v: Any, gradient: Any, iterations: Any, *slots: Any) -> None:
        """Updates one variable; runs on the server.

        It is traced once, and not again for another learning rate: what it does must depend on its arguments and on
        attributes of `self` that are numbers, words, functions or tuples of these. It sees no others.

        Args:
            v: the variable.
            gradient: the sum over all replicas, of the variable's shape; float32 for a variable of half precision.
            iterations: steps applied, this one included.
            slots: this variable's slots.
        """
        raise NotImplementedError

    def initial_slot(self, slot: str, v: Variable) -> Array:
        """What a slot holds at first: zeros of the variable's shape, float32 for a variable of half precision.

        Args:
            slot: one of the names in `slots`.
            v: the variable.
        """
        return np.zeros(v.shape, state_dtype(v.dtype))

    # ---- State ----

    def build(self, variables: Sequence[Variable]) -> None:
        """Creates the optimizer's state for variables; `apply_gradients` does it if need be.

        In any context but an update function, by all replicas of all workers alike.

        Args:
            variables: trainable variables of one strategy.

        Raises:
            ValueError: there are none, or one is not trainable, or of integers, or not of the optimizer's strategy.
            TypeError: one of them is no variable.
        """
        wholes = [values.container(v) for v in variables]
        self._check_variables(wholes)
        with wholes[0].strategy.scope():
            if context.in_cross_replica_context():
                self._build(wholes[0].strategy, wholes)
            else:
                context.require_replica("build").merge_call(self._build, args=(wholes,))

    def _build(self, strategy: Any, variables: Sequence[Variable]) -> None:
        self._check_variables(variables)
        kept = bool(self.gradient_accumulation_steps) or self._in_stages(strategy, variables)
        self._state.build(strategy, variables, self._first_slots, self.use_ema, kept)

    def _first_slots(self, v: Variable) -> dict[str, Array]:
        return {slot: self.initial_slot(slot, v) for slot in self.slots}

    @property
    def variables(self) -> list[Variable]:
        """All that the optimizer keeps: counts, slots, averages; empty before `build` or the first step."""
        return list(self._state)

    @property
    def iterations(self) -> Variable:
        """Steps applied, int64; mirrored on every server that has a variable.

        Raises:
            RuntimeError: before `build` or the first step.
        """
        return self._state.shared("iterations")

    @property
    def skipped_steps(self) -> Variable:
        """Steps that were left out because gradients were not finite, int64.

        Raises:
            RuntimeError: before `build` or the first step, or without a `DynamicLossScale`.
        """
        return self._state.shared("skipped_steps")

    @property
    def loss_scale(self) -> Variable:
        """The dynamic loss scale of now, float32.

        Raises:
            RuntimeError: before `build` or the first step, or without a `DynamicLossScale`.
        """
        return self._state.shared("loss_scale")

    def average(self, v: Variable) -> Variable:
        """The moving average of a variable, of its shape; float32 for one of half precision. In any context.

        Raises:
            RuntimeError: without `use_ema`, or before `build` or the first step.
        """
        if not self.use_ema:
            raise RuntimeError("this optimizer keeps no averages; create it with use_ema=True")
        return cast(Variable, self._state.of(values.container(v)).average)

    def finalize_variable_values(self, var_list: Iterable[Variable]) -> None:
        """Gives variables the values of their averages. In cross-replica context, or outside of every scope.

        Args:
            var_list: variables that this optimizer trains.

        Raises:
            RuntimeError: as `average`.
        """
        for v in map(values.container, var_list):
            v.strategy.extended.update(v, become, (self.average(v),))

    def exclude_from_weight_decay(
        self, var_list: Iterable[Variable] | None = None, var_names: Iterable[str] | None = None
    ) -> None:
        """Leaves variables out of weight decay. In any context, by all processes alike.

        Args:
            var_list: variables.
            var_names: regular expressions; a variable whose name has one in it is left out.
        """
        for v in map(values.container, var_list or ()):
            self._excluded[id(v)] = v
        self._excluded_names |= {re.compile(name).pattern for name in var_names or ()}

    def _decays(self, v: Variable) -> bool:
        named = any(re.search(name, v.name) for name in self._excluded_names)
        return bool(self.weight_decay) and id(v) not in self._excluded and not named

    def scale_loss(self, loss: Any) -> Any:
        """The loss, multiplied by the loss scale; the gradients of that go into `apply_gradients`.

        In replica context; without `loss_scale_factor` it is the loss itself.

        Args:
            loss: a number or an array.
        """
        factor: Any = self.loss_scale_factor
        if isinstance(factor, DynamicLossScale):
            factor = float(self.loss_scale) if self._state.built else factor.initial_scale
        return loss if factor is None else loss * factor

    def _check_variables(self, variables: Sequence[Any]) -> None:
        if not variables:
            raise ValueError("the optimizer is given no variables; give at least one, with its gradient")
        for v in variables:
            if not isinstance(v, Variable):
                raise TypeError(
                    f"a {type(v).__name__} stands where a variable should; give (gradient, variable) pairs, with the "
                    "same variables in all replicas"
                )
            if not v.trainable:
                raise ValueError(f"variable {v.name!r} is not trainable; create it so, or leave it out")
            if v.dtype.kind in "iub":
                raise ValueError(f"variable {v.name!r} is of {v.dtype}, and steps are fractions; take a floating dtype")
            v.check_strategy(variables[0].strategy)
        if len(set(map(id, variables))) < len(variables):
            raise ValueError("a variable stands in several pairs; add up its gradients first")
        if self._state.strategy not in (None, variables[0].strategy):
            raise ValueError(
                f"this {type(self).__name__} keeps state in another strategy than that of {variables[0].name!r}; "
                "create one optimizer for each strategy"
            )

    # ---- Steps ----

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Variable]]) -> None:
        """Sums gradients over all replicas of all workers, and updates the variables.

        In replica context, where all replicas of all workers call it; or in cross-replica context, or outside of
        every scope, with per-replica gradients.

        Args:
            grads_and_vars: (gradient, variable) pairs; each gradient of its variable's shape.

        Raises:
            ValueError: there are no pairs, a gradient is None or of another shape than its variable, a variable is
                not trainable, or not of the optimizer's strategy.
            TypeError: there is no variable in a pair.
        """
        pairs = list(grads_and_vars)
        grads, variables = [gradient for gradient, _ in pairs], [values.container(v) for _, v in pairs]
        self._check_variables(variables)
        with variables[0].strategy.scope():
            if context.in_cross_replica_context():
                self._apply(variables[0].strategy, grads, variables)
            else:
                replica = context.require_replica("apply_gradients")
                # Replicas that were given one gradient object have a gradient each: it counts once for each.
                replica.merge_call(self._apply_boxes, args=(context.Box(tuple(grads)), variables))

    def _apply_boxes(self, strategy: Any, boxes: Any, variables: list[Variable]) -> None:
        self._apply(strategy, context.unbox(boxes), variables)

    def _apply(self, strategy: Any, grads: list[Any], variables: list[Variable]) -> None:
        self._check_variables(variables)
        for gradient, v in zip(grads, variables, strict=True):
            _check_gradient(gradient, v)
        self._build(strategy, variables)
        extended, settings, state = strategy.extended, self.settings(), self._state
        sums = extended.batch_reduce_to(ReduceOp.SUM, list(zip(grads, variables, strict=True)))
        kept = bool(self.gradient_accumulation_steps) or self._in_stages(strategy, variables)
        if kept:
            for v, own in zip(variables, sums, strict=True):
                scale = state.beside(v).get("loss_scale")
                extended.update(v, collect, (settings, own, state.of(v).gradient, scale))
            sums = [state.of(v).gradient for v in variables]
        measured = self._measured(strategy, settings, variables, sums, kept)
        begun = {
            id(shared): extended.update_non_slot(
                shared["iterations"].devices, begin, (settings, shared, measured.get("finite"))
            )
            for shared in state.everywhere
        }
        for v, gradient in zip(variables, sums, strict=True):
            own, now = state.of(v), begun[id(state.beside(v))]
            rest = (measured.get("norm"), own.average, self._decays(v), own.slots)
            extended.update(v, apply, (settings, gradient, kept, now, *rest))

    def _measured(
        self, strategy: Any, settings: Settings, variables: Sequence[Variable], sums: Sequence[Any], kept: bool
    ) -> dict[str, Any]:
        """The norm of all gradients, and whether they are finite, as far as these are needed."""
        if not self._measures:
            return {}
        extended = strategy.extended
        parts = [
            extended.update(v, measure, (settings, own, kept, self._state.beside(v).get("loss_scale")))
            for v, own in zip(variables, sums, strict=True)
        ]
        if not self._in_stages(strategy, variables):
            found: dict[str, Any] = extended.update_non_slot(extended.non_slot_devices(variables), total, (parts,))
            return found
        # A value never crosses servers inside a section: the parts come here, and what they make goes back.
        names = list(parts[0])
        arrays = iter(bring([part[name] for part in parts for name in names]))
        return cast(dict[str, Any], total([{name: next(arrays) for name in names} for _ in parts]))

    @property
    def _measures(self) -> bool:
        return self.global_clipnorm is not None or isinstance(self.loss_scale_factor, DynamicLossScale)

    def _in_stages(self, strategy: Any, variables: Sequence[Variable]) -> bool:
        """Whether a step takes two rounds: what it has to know of all gradients is on several servers."""
        alone = getattr(strategy.backend.group, "alone", False)
        if alone and isinstance(self.loss_scale_factor, DynamicLossScale):
            raise ValueError(
                "with DynamicLossScale another asynchronous worker may change the scale between a loss and its "
                "gradient's division; give loss_scale_factor a number"
            )
        if not self._measures or len({v.place for v in variables}) == 1:
            return False
        if alone:
            raise ValueError(
                "global_clipnorm and DynamicLossScale need all gradients of a step, which asynchronous workers on "
                "several servers mix with those of others; use clipnorm, or one server"
            )
        return True

    def settings(self) -> Settings:
        """What update functions see of it, as of now."""
        rate = self.learning_rate
        if not isinstance(rate, LearningRateSchedule):
            rate = float(rate() if callable(rate) else rate)
        return self.settings_with(learning_rate=rate)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(
                f"{type(self).__name__} has no attribute {name!r}; an update function sees of its optimizer only "
                "attributes that are numbers, words, functions or tuples of these"
            )


def _check_gradient(gradient: Any, v: Variable) -> None:
    for own in values.local_results(gradient):
        if own is None:
            raise ValueError(f"the gradient of variable {v.name!r} is None; give zeros, or leave the pair out")
        shape = tuple(own.shape) if hasattr(own, "shape") else np.shape(own)
        if shape != v.shape:
            raise ValueError(f"the gradient of variable {v.name!r} has shape {shape}, and the variable {v.shape}")


def _check_rate(rate: Any) -> Any:
    if isinstance(rate, LearningRateSchedule) or callable(rate):
        return rate
    if isinstance(rate, bool | str) or np.ndim(rate) or not hasattr(type(rate), "__float__"):
        raise TypeError(f"learning_rate is {rate!r}; give a number, a schedule, or a function that returns a number")
    return float(rate)


def _check_options(
    clipnorm: float | None,
    clipvalue: float | None,
    global_clipnorm: float | None,
    loss_scale_factor: float | DynamicLossScale | None,
) -> None:
    clips = {"clipnorm": clipnorm, "clipvalue": clipvalue, "global_clipnorm": global_clipnorm}
    given = {name: value for name, value in clips.items() if value is not None}
    if len(given) > 1:
        raise ValueError(f"gradients are clipped in one way, and {' and '.join(given)} are given; keep one")
    if isinstance(loss_scale_factor, int | float):
        given["loss_scale_factor"] = loss_scale_factor
    for name, value in given.items():
        if not value > 0:
            raise ValueError(f"{name} is {value!r}, and must be more than 0")


def _check_counts(ema_momentum: float, use_ema: bool, overwrites: int | None, accumulates: int | None) -> None:
    if not 0 <= ema_momentum <= 1:
        raise ValueError(f"ema_momentum is {ema_momentum!r}, and must be between 0 and 1")
    if overwrites is not None and not use_ema:
        raise ValueError("ema_overwrite_frequency is given, and there is no average; add use_ema=True")
    for name, count, least in (
        ("ema_overwrite_frequency", overwrites, 1),
        ("gradient_accumulation_steps", accumulates, 2),
    ):
        if count is not None and not (isinstance(count, int) and count >= least):
            raise ValueError(f"{name} is {count!r}, and must be a whole number of at least {least}, or None")
