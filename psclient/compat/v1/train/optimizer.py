"""The methods of all optimizers of `tf.compat.v1.train`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn, cast

import numpy as np

from psclient import optimizers
from psclient._src import context, values
from psclient._src.arrays.devices import Value
from psclient._src.arrays.nest import Nest
from psclient._src.distribute.strategy import Strategy
from psclient._src.tracing.update_function import update_function
from psclient._src.variables.variable import Variable
from psclient.optimizers.state import state_of


@update_function
def _count(step: Value) -> None:
    step.assign_add(1)


class Optimizer:
    """Base of the optimizers: TensorFlow 1's methods, for an optimizer of `ps.optimizers` that makes the steps.

    Source: `tf.compat.v1.train.Optimizer`.

    Args:
        rule: the optimizer that makes the steps.
        use_locking: has no effect: steps of one variable never run at the same time.
    """

    def __init__(self, rule: optimizers.Optimizer, use_locking: bool = False) -> None:
        self._rule = rule

    def get_name(self) -> str:
        """Returns the name, the prefix of the names of slots."""
        return self._rule.name

    def _trackable_children(self) -> dict[str, optimizers.Optimizer]:
        """Returns what checkpoints save of it. In any context."""
        return {"rule": self._rule}

    # ---- Steps ----

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Value, Variable]],
        global_step: Variable | None = None,
        name: str | None = None,
    ) -> None:
        """Sums gradients over all replicas of all workers, and updates the variables.

        Call it in replica context in all replicas of all workers; or in cross-replica context or outside of every
        scope, with per-replica gradients.

        Args:
            grads_and_vars: (gradient, variable) pairs; each gradient has its variable's shape. Pairs whose gradient is
                None, in all replicas the same ones, are ignored.
            global_step: an integer variable of the same strategy, without dimensions, that is increased by 1 in the
                same round; None for none.
            name: has no effect.

        Raises:
            ValueError: no pair has a gradient; a gradient has another shape than its variable; a variable is not
                trainable, or not of the optimizer's strategy; or `global_step` is not an integer of that strategy.
            TypeError: a pair has no variable, or `global_step` is not a variable.
        """
        given = [(gradient, values.container(v)) for gradient, v in grads_and_vars]
        pairs = [(gradient, v) for gradient, v in given if gradient is not None]
        if not pairs:
            names = ", ".join(repr(getattr(v, "name", v)) for _, v in given)
            raise ValueError(f"none of the variables [{names}] has a gradient; pass (gradient, variable) pairs")
        if global_step is None:
            self._rule.apply_gradients(pairs)
            return
        grads, variables = [gradient for gradient, _ in pairs], [v for _, v in pairs]
        step = _checked_step(values.container(global_step), variables)
        with context.within(step.strategy):
            if context.crosses_replicas():
                self._apply_and_count(cast(Strategy, step.strategy), grads, variables, step)
            else:
                # Replicas that were given one gradient object have a gradient each: it counts once for each.
                replica = context.require_replica("apply_gradients")
                replica.merge_call(self._merge, args=(context.Box(tuple(grads)), variables, step))

    def _merge(self, strategy: Strategy, boxes: Nest, variables: list[Variable], step: Variable) -> None:
        self._apply_and_count(strategy, context.unbox(boxes), variables, step)

    def _apply_and_count(
        self, strategy: Strategy, grads: Sequence[Value], variables: Sequence[Variable], step: Variable
    ) -> None:
        self._rule.apply_gradients(zip(grads, variables, strict=True))
        strategy.extended.update(step, _count)

    def compute_gradients(self, *args: object, **kwargs: object) -> NoReturn:
        """Raises `NotImplementedError`: there is no automatic differentiation here."""
        _refuse("compute_gradients")

    def minimize(self, *args: object, **kwargs: object) -> NoReturn:
        """Raises `NotImplementedError`: there is no automatic differentiation here."""
        _refuse("minimize")

    # ---- State ----

    def get_slot(self, var: Variable, name: str) -> Variable | None:
        """Returns a slot of a variable. In any context.

        Args:
            var: a variable that this optimizer trains.
            name: one of `get_slot_names`.

        Returns:
            The slot, of the variable's shape, float32 for half precision; None if it does not exist, as before the
            variable's first step.
        """
        state, v = state_of(self._rule), values.container(var)
        if not state.has(v):
            return None
        own = state.of(v)
        return dict(zip(own.slot_names, own.slots, strict=True)).get(name)

    def get_slot_names(self) -> list[str]:
        """Returns the names of slots, sorted; none before the first step. In any context."""
        return sorted(self._rule.slots) if state_of(self._rule).built else []

    def variables(self) -> list[Variable]:
        """Returns all state: the count of steps, and the slots; empty before the first step. In any context.

        The count replaces the powers of the betas that TensorFlow's Adam stores.
        """
        return self._rule.variables


def _checked_step(step: Any, variables: Sequence[Any]) -> Variable:
    if not isinstance(step, Variable):
        raise TypeError(f"global_step is a {type(step).__name__}; pass an integer variable, or None")
    if not np.issubdtype(step.dtype, np.integer) or step.shape:
        raise ValueError(
            f"global_step {step.name!r} has dtype {step.dtype} and shape {step.shape}; pass a variable with one integer"
        )
    if isinstance(variables[0], Variable):  # What is none is refused, with what to write, by the step itself.
        step._check_strategy(variables[0].strategy)
    return step


def _refuse(what: str) -> NoReturn:
    raise NotImplementedError(
        f"{what} needs automatic differentiation, which is not available here; compute gradients yourself, "
        "or with JAX or PyTorch, and pass them to apply_gradients"
    )
