"""Optimizers: ordinary users of `reduce_to`, `update`, `colocate_vars_with` and `update_non_slot`.

A new one is a subclass with the names of its slots and an `update` function of a few lines, which is traced
and runs on the server, beside the variable.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import numpy as np

from psclient import context
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
        self._slots: dict[str, tuple[Variable, ...]] = {}
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
        """Creates the optimizer's state for these variables; `apply_gradients` does it if need be."""
        strategy = variables[0].strategy
        with strategy.scope():
            # Variables that came later may live where the count is not: there it gets another copy.
            uncounted = [v for v in variables if self._count_beside(v) is None]
            if uncounted:
                count = self._iterations[0].numpy() if self._iterations else np.int64(0)
                with strategy.extended.colocate_vars_with(strategy.extended.non_slot_devices(uncounted)):
                    self._iterations.append(Variable(count, False, f"{self.name}/iterations"))
            for v in [v for v in variables if v.name not in self._slots]:
                with strategy.extended.colocate_vars_with(v):
                    self._slots[v.name] = tuple(
                        Variable(np.zeros(v.shape, v.dtype), False, f"{self.name}/{v.name}/{slot}")
                        for slot in self.slots
                    )

    @property
    def iterations(self) -> Variable:
        """Steps applied; there is none before `build` or the first step."""
        if not self._iterations:
            raise RuntimeError("the optimizer has no state yet; apply gradients first, or call build(variables)")
        return self._iterations[0]

    def _count_beside(self, v: Variable) -> Variable | None:
        return next((count for count in self._iterations if set(v.devices) <= set(count.devices)), None)

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Variable]]) -> None:
        """Sums gradients over all replicas of all workers, and updates the variables.

        In replica context, where all replicas of all workers call it; or in cross-replica context with
        per-replica gradients.

        Args:
            grads_and_vars: (gradient, variable) pairs; each gradient of its variable's shape.
        """
        grads, variables = zip(*grads_and_vars, strict=True)
        if context.in_cross_replica_context():
            self._apply(context.get_strategy(), list(grads), list(variables))
        else:
            replica = context.require_replica("apply_gradients")
            replica.merge_call(self._apply, args=(list(grads), list(variables)))

    def _apply(self, strategy: Any, grads: list[Any], variables: list[Variable]) -> None:
        self.build(variables)
        extended = strategy.extended
        reduced = extended.batch_reduce_to(ReduceOp.SUM, list(zip(grads, variables, strict=True)))
        for count in self._iterations:
            extended.update_non_slot(count.devices, count.assign_add, (1,))
        for gradient, v in zip(reduced, variables, strict=True):
            extended.update(v, self.update, (gradient, self._count_beside(v), *self._slots[v.name]))


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
