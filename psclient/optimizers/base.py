"""The base of all optimizers: ordinary users of `reduce_to`, `update`, `colocate_vars_with` and `update_non_slot`.

A new one is a subclass with the names of its slots and an `update` function of a few lines, which is traced
and runs on the server, beside the variable. What all have in common is done around that, in `step`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self, cast

import numpy as np

from psclient._src import context, values
from psclient._src.arrays.devices import Value
from psclient._src.distribute.strategy import Strategy
from psclient._src.tracing.diagnostics import refuse_slots
from psclient._src.tracing.hyperparameters import Settings, is_view
from psclient._src.variables.sharded import shards_of
from psclient._src.variables.sparse_updates import CatchUp, Sparse
from psclient._src.variables.table_views import join_views, without_views
from psclient._src.variables.tables import OneRow, TableVariable
from psclient._src.variables.variable import Variable
from psclient.optimizers.checks import Exclusions, check_lazy, check_tables, check_variables
from psclient.optimizers.configs import Described
from psclient.optimizers.loss_scale import DynamicLossScale
from psclient.optimizers.options import OPTIONS, LearningRate, check_options, check_rate, rate_now
from psclient.optimizers.ranges import is_number
from psclient.optimizers.state import Needs, State, first_shared
from psclient.optimizers.step_driver import StepDriver
from psclient.optimizers.step_functions import become, state_dtype
from pswire.model.tensor import Array

_NOT_KERAS = {"sparse": "exact", "catch_up": "replay"}
"""Options that Keras does not have, with their defaults."""


class Optimizer(Described):
    """Base of all optimizers. Create it inside `strategy.scope()`.

    Source: `keras.optimizers.Optimizer`, with its names, defaults and formulas.

    Attributes:
        slots: names of the state that each variable has, in the order in which `update` takes it.
        learning_rate: may be changed between steps, as any other number that is an attribute, without a new trace.
            Attributes that determine which state exists are fixed at creation: `name`, `slots`, `use_ema`,
            `gradient_accumulation_steps` (and with it `sparse`), and whether the loss scale is dynamic.

    Args:
        learning_rate: step size: a number, a schedule, or a function without arguments that returns a number, the same
            in all processes.
        name: prefix of the names of slots.
        weight_decay: fraction of the variables, times the learning rate, that is subtracted from them before each step.
        clipnorm: largest norm of each gradient; larger gradients are scaled down.
        clipvalue: largest magnitude of an element of a gradient; larger elements are clipped.
        global_clipnorm: largest norm of all gradients together. With variables on several servers a step then takes two
            rounds.
        use_ema: True to keep an exponential moving average of each variable; see `average`.
        ema_momentum: fraction of the average that stays in each step.
        ema_overwrite_frequency: number of steps after which variables are set to their averages; None for never.
        loss_scale_factor: number by which the loss was multiplied, so that gradients are divided by it; or a
            `DynamicLossScale`. See `scale_loss`.
        gradient_accumulation_steps: number of calls whose gradients are averaged for one step. A schedule then counts
            calls.
        sparse: how a step treats rows that a sparse gradient does not contain. "exact": as for the dense gradient,
            deferred until the row is updated, read or saved, with the same bits. "lazy": not at all, even if the
            optimizer would continue with momentum or decay; with `gradient_accumulation_steps` a row takes part in a
            step if the sum of the gradients of one of its calls is not zero there. "dense": as for the dense gradient,
            which is made. Steps that are not elementwise, such as those of `Lamb`, are dense and cannot be lazy.
            Dynamic tables cannot have dense steps and raise an error.
        catch_up: how deferred exact steps are applied. "replay": one after another, with the same bits. "closed_form":
            many at once, within a few millionths; for `SGD`, `Adam`, `AdamW`, `Nadam`, `RMSprop` and `Adadelta`.

    Raises:
        ValueError: more than one way of clipping, a number that is out of its range or not finite, or another `sparse`
            or `catch_up`.
        TypeError: the learning rate is not a number, schedule or function, or another argument is not a number.
    """

    slots: tuple[str, ...] = ()
    _fixed: ClassVar[Set[str]] = frozenset({"name", "gradient_accumulation_steps"})
    _fixed_once_built: ClassVar[Set[str]] = frozenset({"slots", "use_ema"})
    _by_row: ClassVar[bool] = True
    """Whether `update` computes each row by itself, so that it may run beside the shards of a partitioned variable."""
    _decays_before: ClassVar[bool] = True
    """Whether a variable decays before `update`; else `update` does it, by `self.weight_decay`, if `self._decaying`."""
    _running: ClassVar[bool] = False
    """Whether the last slot is one number that goes by steps alone: `_advanced` moves it, and `update` gets its value.

    What `update` does to a row of a gradient of rows then depends on nothing that it assigns but this row.
    """
    weight_decay: float | None
    clipnorm: float | None
    clipvalue: float | None
    global_clipnorm: float | None
    use_ema: bool
    ema_momentum: float
    ema_overwrite_frequency: int | None
    loss_scale_factor: float | DynamicLossScale | None
    gradient_accumulation_steps: int | None
    sparse: Sparse
    catch_up: CatchUp

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
        sparse: Sparse = "exact",
        catch_up: CatchUp = "replay",
    ) -> None:
        self._learning_rate: object = check_rate(learning_rate)
        self.name = name or type(self).__name__.lower()
        options = {name: given for name, given in locals().items() if name in OPTIONS}
        vars(self).update(check_options(options))
        first = first_shared(bool(gradient_accumulation_steps), loss_scale_factor)
        self._state = State(self.name, first)
        self._driver = StepDriver(self, self._state, self._check_variables, self._needs, self._decays, self._decaying)
        self._excluded = Exclusions()

    def __setattr__(self, name: str, value: object) -> None:
        # What stands for an optimizer in an update function has no state.
        if "_state" in vars(self):
            self._check_change(name, value)
            if name in OPTIONS:
                options = {option: getattr(self, option) for option in OPTIONS}
                value = check_options(options | {name: value})[name]
        super().__setattr__(name, value)

    def _check_change(self, name: str, value: object) -> None:
        """Raises `AttributeError` where an attribute's new value would need other state than there is."""
        scale = name == "loss_scale_factor" and any(
            isinstance(factor, DynamicLossScale) for factor in (value, self.loss_scale_factor)
        )
        once_built = name in self._fixed_once_built or (name == "sparse" and bool(self.gradient_accumulation_steps))
        fixed = name in self._fixed or (once_built and self._state.built)
        if (scale or fixed) and value is not (old := getattr(self, name)) and (scale or value != old):
            raise AttributeError(
                f"{name} of this {type(self).__name__} is {old!r} and cannot be changed, because it "
                "determines the optimizer's state; create another one"
            )

    def _prepare(self, name: str, value: object) -> None:
        """Keeps what another value of an attribute needs, for variables of which nothing is kept yet."""

    @property
    def learning_rate(self) -> Any:
        """The current learning rate, a number; for a schedule, that of the next step.

        It may be set between steps, to any value that the constructor takes. In an update function it is a stand-in for
        the number.

        Raises:
            TypeError: on setting, the value is not a learning rate.
            ValueError: on setting, the value is not finite.
        """
        if "_state" not in vars(self):
            return self._learning_rate
        rate = rate_now(self._learning_rate)
        return float(rate(self._calls if self._state.built else 0)) if callable(rate) else rate

    @learning_rate.setter
    def learning_rate(self, rate: object) -> None:
        self._learning_rate = check_rate(rate) if "_state" in vars(self) else rate

    @property
    def _calls(self) -> int:
        steps, count = self.gradient_accumulation_steps, int(self.iterations)
        return count * steps + int(self._state.shared("accumulated")) if steps else count

    # ---- For subclasses ----

    def update(self, v: Value, gradient: Value, iterations: Value, *slots: Value) -> None:
        """Updates one variable; runs on the server.

        It is traced once, and not again for another learning rate: its result must depend only on its arguments and on
        attributes of `self` that are numbers, strings, functions or tuples of these. It sees no other attributes.

        Args:
            v: the variable, or in a trace a stand-in for it.
            gradient: the sum over all replicas, of the variable's shape; float32 for a variable of half precision.
            iterations: the number of steps, this one included.
            slots: the slots of the variable.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not define a step; implement update(self, v, gradient, iterations, *slots)"
        )

    @property
    def _chosen(self) -> Self:
        return self

    def _divided(self, v: Value, gradient: Value) -> Value:
        return gradient

    def _shorten(self, v: Any) -> None:
        """Shortens rows that may not exceed a norm; here none."""

    def _advanced(self, number: Value, iterations: Value) -> Value:
        """Returns what the last slot, if it is `_running`, is in a step; runs on the server, once for each variable.

        Args:
            number: what it was before, a value without dimensions.
            iterations: steps applied, this one included.
        """
        return number

    def initial_slot(self, slot: str, v: Variable) -> Array:
        """Returns the initial value of a slot: zeros of the variable's shape, float32 for a variable of half precision.

        Args:
            slot: one of the names in `slots`.
            v: the variable that the slot belongs to. For a dynamic table one row of it, of shape (1, *row shape), with
                its name and dtype: the slot of each key begins with the returned value, which must be the same number
                everywhere.
        """
        return np.zeros(v.shape, state_dtype(v.dtype))

    @classmethod
    def _arguments(cls) -> list[str]:
        # Those that a subclass takes as **options are the base's.
        return list(dict.fromkeys((*super()._arguments(), "name", *sorted(OPTIONS))))

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor; `sparse` and `catch_up` only if they are not the defaults."""
        config = super().get_config()
        return {name: value for name, value in config.items() if name not in _NOT_KERAS or value != _NOT_KERAS[name]}

    def _argument(self, name: str) -> object:
        return self._learning_rate if name == "learning_rate" else super()._argument(name)

    # ---- State ----

    def build(self, variables: Sequence[Variable]) -> None:
        """Creates the optimizer's state for variables; `apply_gradients` does it if needed.

        In any context except an update function, in the same way in all replicas of all workers.

        Args:
            variables: trainable variables of one strategy.

        Raises:
            ValueError: no variables; or one is not trainable, of integers, or not of the optimizer's strategy.
            TypeError: an element is not a variable.
        """
        wholes = without_views([values.container(v) for v in variables])
        self._check_variables(wholes)
        with wholes[0].strategy.scope():
            if context.crosses_replicas():
                self._build(wholes[0].strategy, wholes)
            else:
                context.require_replica("build").merge_call(self._build, args=(wholes,))

    def _build(self, strategy: Strategy, variables: Sequence[Variable]) -> None:
        self._check_variables(variables)
        self._driver.build(strategy, variables)

    def _needs(self, v: Variable) -> Needs:
        refuse_slots(self)
        of = OneRow.of(v) if isinstance(v, TableVariable) else v
        slots = {slot: self.initial_slot(slot, cast(Variable, of)) for slot in self.slots}
        accumulates = bool(self.gradient_accumulation_steps)
        return Needs(slots, self.use_ema, accumulates, self._running, accumulates and self.sparse == "lazy")

    @property
    def variables(self) -> list[Variable]:
        """All state of the optimizer: counts, slots, averages; empty before `build` or the first step."""
        return list(self._state)

    def __repr__(self) -> str:
        rate = self._learning_rate if is_number(self._learning_rate) else type(self._learning_rate).__name__
        kept = self.variables if "_state" in vars(self) else []
        places = sorted({device for v in kept for device in v.devices})
        state = f"{len(kept)} variables on {', '.join(places)}" if kept else "not built"
        return f"{type(self).__name__}(learning_rate={rate}, name={self.name!r}, {state})"

    @property
    def iterations(self) -> Variable:
        """The number of steps, int64; mirrored on every server that has a variable.

        Raises:
            RuntimeError: before `build` or the first step.
        """
        return self._state.shared("iterations")

    @property
    def skipped_steps(self) -> Variable:
        """The number of steps that were skipped because gradients were not finite, int64.

        Raises:
            RuntimeError: before `build` or the first step, or without a `DynamicLossScale`.
        """
        return self._state.shared("skipped_steps")

    @property
    def loss_scale(self) -> Variable:
        """The current dynamic loss scale, float32.

        Raises:
            RuntimeError: before `build` or the first step, or without a `DynamicLossScale`.
        """
        return self._state.shared("loss_scale")

    def average(self, v: Variable) -> Variable:
        """Returns the moving average of a variable, of its shape; float32 for half precision. In any context.

        Raises:
            RuntimeError: without `use_ema`, or before `build` or the first step.
        """
        if not self.use_ema:
            raise RuntimeError("this optimizer keeps no averages; create it with use_ema=True")
        return cast(Variable, self._state.of(values.container(v)).average)

    def finalize_variable_values(self, var_list: Iterable[Variable]) -> None:
        """Sets variables to their averages; without `use_ema` it does nothing.

        In cross-replica context, or outside of every scope.

        Args:
            var_list: variables that this optimizer trains.

        Raises:
            RuntimeError: before `build` or the first step.
        """
        for v in map(values.container, var_list if self.use_ema else ()):
            v.strategy.extended.update(v, become, (self.average(v),))

    def exclude_from_weight_decay(
        self, var_list: Iterable[Variable] | None = None, var_names: Iterable[str] | None = None
    ) -> None:
        """Excludes variables from weight decay. In any context, in the same way in all processes.

        Args:
            var_list: the variables to exclude.
            var_names: regular expressions; a variable whose name contains a match is excluded.
        """
        self._excluded.add(map(values.container, var_list or ()), var_names or ())

    def _decays(self, v: Variable) -> bool:
        return bool(self.weight_decay) and v not in self._excluded

    def _decaying(self) -> object:
        return bool(self.weight_decay), self._excluded.count

    def scale_loss(self, loss: Value) -> Value:
        """Returns the loss multiplied by the loss scale; give the gradients of the result to `apply_gradients`.

        In replica context. Without `loss_scale_factor` it returns the loss itself.

        Args:
            loss: a number or an array.
        """
        factor: Any = self.loss_scale_factor
        if isinstance(factor, DynamicLossScale):
            factor = float(self.loss_scale) if self._state.built else factor.initial_scale
        return loss if factor is None else loss * factor

    def _check_variables(self, variables: Sequence[Variable]) -> None:
        if self.sparse == "lazy":
            check_lazy(self, variables)
        if self._driver.known(variables) is not None:
            return
        check_variables(variables)
        check_tables(self, [v for v in variables if isinstance(v, TableVariable)])
        cut = [v for v in variables if len(shards_of(v)) > 1 and not self._by_row]
        if cut:
            raise ValueError(
                f"{type(self).__name__} needs the whole variable in each step, but {cut[0].name!r} is split "
                "into shards; create it in a strategy whose variable_partitioner does not split it"
            )
        if self._state.strategy not in (None, variables[0].strategy):
            raise ValueError(
                f"this {type(self).__name__} has state in another strategy than that of "
                f"{variables[0].name!r}; create one optimizer for each strategy"
            )

    # ---- Steps ----

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Value, Variable]]) -> None:
        """Sums gradients over all replicas of all workers, and updates the variables.

        Call it in replica context in all replicas of all workers; or in cross-replica context or outside of every
        scope, with per-replica gradients.

        Args:
            grads_and_vars: (gradient, variable) pairs; each gradient has its variable's shape. The gradient of a
                dynamic table is an `IndexedSlices` by its keys; those of tables of one group become one.

        Raises:
            ValueError: no pairs; a gradient is None or of another shape than its variable; a variable is not trainable,
                or not of the optimizer's strategy; or an option of the optimizer needs the dense gradient of a dynamic
                table.
            TypeError: a pair has no variable.

        Examples:
            >>> import numpy as np
            >>> import psclient as ps
            >>> strategy = ps.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> with strategy.scope():
            ...     w = ps.Variable([1.0, 2.0])
            ...     optimizer = ps.optimizers.SGD(learning_rate=0.25)
            >>> def step():
            ...     optimizer.apply_gradients([(np.ones(2, np.float32), w)])
            >>> strategy.run(step)
            >>> w.numpy()  # the sum of two gradients, times 0.25, is subtracted
            array([0.5, 1.5], dtype=float32)
        """
        pairs = list(grads_and_vars)
        grads: list[Value]
        variables: list[Variable]
        grads, variables = map(list, zip(*pairs, strict=True)) if pairs else ([], [])
        if self.sparse == "lazy" or self._driver.known(variables) is None:
            grads, variables = join_views(grads, [values.container(v) for v in variables])
            self._check_variables(variables)
        strategy = variables[0].strategy
        replica = context.replica_in(strategy)
        if replica is not None:
            # Replicas that were given one gradient object have a gradient each: it counts once for each.
            replica._merge(self._driver.apply_boxes, (context.Box(tuple(grads)), variables), {})
            return
        with context.within(strategy):
            if not context.crosses_replicas():
                context.require_replica("apply_gradients")  # raises: an update function makes no step
            self._driver.apply_whole(strategy, grads, variables)

    def _distributed_apply(
        self,
        distribution: Any,
        grads_and_vars: Iterable[tuple[Value, Variable]],
        global_step: Variable | None = None,
        name: str | None = None,
    ) -> None:
        """The steps of `apply_gradients` by the name that r1.9 has for them in cross-tower context.

        Args:
            distribution: the variables' strategy, or its `compat.contrib.DistributionStrategy`.
            grads_and_vars: (per-device gradient, variable) pairs.
            global_step: a variable to be counted up by one; or None.
            name: ignored.

        Raises:
            RuntimeError: called in replica or update context.
            ValueError, TypeError: as `apply_gradients`; or a variable is of another strategy.
        """
        strategy: Strategy = getattr(distribution, "strategy", distribution)
        pairs = list(grads_and_vars)
        with context.within(strategy):
            context.require_cross_replica(strategy, "_distributed_apply")
            for v in (*(v for _, v in pairs), *(() if global_step is None else (global_step,))):
                if isinstance(values.container(v), Variable):
                    values.container(v)._check_strategy(strategy)
            self.apply_gradients(pairs)
            if global_step is not None:
                strategy.extended.update(global_step, lambda step: step.assign_add(1))

    def _settings(self) -> Settings:
        """Returns what update functions see of it, as of now."""
        return self._settings_with(_learning_rate=rate_now(self._learning_rate))

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            if not (is_view(self) or "_state" in vars(self)):
                raise AttributeError(
                    f"{type(self).__name__} has no attribute {name!r}; call super().__init__(learning_rate, "
                    "**options) in its __init__"
                )
            super().__getattr__(name)
