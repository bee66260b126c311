"""Optimizers: ordinary users of `reduce_to`, `update`, `colocate_vars_with` and `update_non_slot`.

A new one is a subclass with the names of its slots and an `update` function of a few lines, which is traced
and runs on the server, beside the variable.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import numpy as np

from psclient import context, values
from psclient.reduce_op import ReduceOp
from psclient.variables import Variable


class Optimizer:
    """Base of all optimizers. Create it inside `strategy.scope()`.

    Attributes:
        slots: names of the state that each variable has beside it, in the order in which `update` takes it.
        learning_rate: may be changed between steps; that makes no new program.
        iterations: int64, how many steps were applied; mirrored on every server that has a variable.

    Args:
        learning_rate: step size.
        name: prefix of the names of slots.
    """

    slots: ClassVar[tuple[str, ...]] = ()

    def __init__(self, learning_rate: float, name: str | None = None) -> None:
        self.learning_rate = learning_rate
        self.name = name or type(self).__name__.lower()
        self._strategy: Any = None
        self._slots: dict[int, tuple[Variable, ...]] = {}
        self._iterations: list[Variable] = []

    def update(self, v: Any, gradient: Any, iterations: Any, *slots: Any) -> None:
        """Updates one variable; runs on the server.

        Args:
            v: the variable.
            gradient: the sum over all replicas, of the variable's shape.
            iterations: steps applied, this one included.
            slots: this variable's slots.
        """
        raise NotImplementedError

    def build(self, variables: Sequence[Variable]) -> None:
        """Creates the optimizer's state for variables; `apply_gradients` does it if need be.

        In any context but an update function, by all replicas of all workers alike.

        Args:
            variables: trainable variables of one strategy.

        Raises:
            ValueError: there are none, or one is not trainable, or they are not of the optimizer's strategy.
            TypeError: one of them is no variable.
        """
        self._check_variables(variables)
        with variables[0].strategy.scope():
            if context.in_cross_replica_context():
                self._build(variables[0].strategy, list(variables))
            else:
                context.require_replica("build").merge_call(self._build, args=(list(variables),))

    def _build(self, strategy: Any, variables: Sequence[Variable]) -> None:
        self._check_variables(variables)
        self._strategy = strategy
        # Variables that came later may live where the count is not: there it gets another copy.
        uncounted = [v for v in variables if self._count_beside(v) is None]
        if uncounted:
            count = self._iterations[0].numpy() if self._iterations else np.int64(0)
            with strategy.extended.colocate_vars_with(strategy.extended.non_slot_devices(uncounted)):
                self._iterations.append(Variable(count, False, f"{self.name}/iterations"))
        for v in [v for v in variables if v.handle.id not in self._slots]:
            with strategy.extended.colocate_vars_with(v):
                self._slots[v.handle.id] = tuple(
                    Variable(np.zeros(v.shape, v.dtype), False, f"{self.name}/{v.name}/{slot}") for slot in self.slots
                )

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
                raise ValueError(f"{v!r} is not trainable; create it with trainable=True, or leave it out")
            v.check_strategy(variables[0].strategy)
        if self._strategy not in (None, variables[0].strategy):
            raise ValueError(
                f"this {type(self).__name__} keeps state in another strategy than that of {variables[0]!r}; create one "
                "optimizer for each strategy"
            )

    @property
    def iterations(self) -> Variable:
        """Steps applied; raises `RuntimeError` before `build` or the first step."""
        if not self._iterations:
            raise RuntimeError("the optimizer has no state yet; apply gradients first, or call build(variables)")
        return self._iterations[0]

    def _count_beside(self, v: Variable) -> Variable | None:
        return next((count for count in self._iterations if set(v.devices) <= set(count.devices)), None)

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
        grads, variables = [gradient for gradient, _ in pairs], [v for _, v in pairs]
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
        extended = strategy.extended
        reduced = extended.batch_reduce_to(ReduceOp.SUM, list(zip(grads, variables, strict=True)))
        for count in self._iterations:
            extended.update_non_slot(count.devices, count.assign_add, (1,))
        for gradient, v in zip(reduced, variables, strict=True):
            extended.update(v, self.update, (gradient, self._count_beside(v), *self._slots[v.handle.id]))


def _check_gradient(gradient: Any, v: Variable) -> None:
    for own in values.local_results(gradient):
        if own is None:
            raise ValueError(f"the gradient of variable {v.name!r} is None; give zeros, or leave the pair out")
        shape = tuple(own.shape) if hasattr(own, "shape") else np.shape(own)
        if shape != v.shape:
            raise ValueError(f"the gradient of variable {v.name!r} has shape {shape}, and the variable {v.shape}")


class SGD(Optimizer):
    """Gradient descent, with momentum: `m = momentum * m - rate * g; v += m`.

    Source: Keras's SGD; Sutskever et al., "On the importance of initialization and momentum", 2013.

    Args:
        learning_rate: step size.
        momentum: 0 for none, then there is no slot.
    """

    def __init__(self, learning_rate: float = 0.01, momentum: float = 0.0, name: str | None = None) -> None:
        super().__init__(learning_rate, name)
        self.momentum = momentum
        if momentum:
            self.slots = ("momentum",)  # type: ignore[misc]

    def update(self, v: Any, gradient: Any, iterations: Any, *slots: Any) -> None:
        if not slots:
            v.assign_sub(self.learning_rate * gradient)
            return
        (m,) = slots
        m.assign(self.momentum * m - self.learning_rate * gradient)
        v.assign_add(m)


class Adam(Optimizer):
    """Adaptive moments.

    Source: Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2015, in the form of its section 2.1's
    last paragraph, as Keras has it.

    Args:
        learning_rate: step size.
        beta_1, beta_2: decay of the first and second moment.
        epsilon: keeps the division away from zero.
    """

    slots = ("m", "v")

    def __init__(
        self,
        learning_rate: float = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        name: str | None = None,
    ) -> None:
        super().__init__(learning_rate, name)
        self.beta_1, self.beta_2, self.epsilon = beta_1, beta_2, epsilon

    def update(self, v: Any, gradient: Any, iterations: Any, *slots: Any) -> None:
        m, s = slots
        t = iterations.astype(gradient.dtype)
        rate = self.learning_rate * np.sqrt(1 - self.beta_2**t) / (1 - self.beta_1**t)
        m.assign_add((1 - self.beta_1) * (gradient - m))
        s.assign_add((1 - self.beta_2) * (gradient * gradient - s))
        v.assign_sub(rate * m / (np.sqrt(s) + self.epsilon))
