"""The outer parameters of a fragment, on the servers, and what workers send of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from psclient._src.distribute.reduction import Absent
from psclient._src.distribute.strategy import Strategy
from psclient._src.rounds.backend import RemoteBackend
from psclient._src.variables.sharded import shards_of
from psclient._src.variables.variable import Variable
from psclient.optimizers.base import Optimizer
from psclient.optimizers.state import state_of
from psclient.optimizers.step_driver import StepContribution, StepDriver
from psclient.optimizers.step_functions import state_dtype
from pswire.errors import InvalidType
from pswire.model.tensor import Array


def rules_of(rule: Optimizer, count: int) -> list[Optimizer]:
    """Returns an outer optimizer for each fragment, with the same hyperparameters: each has its own count of steps."""
    return [rule, *(type(rule).from_config(rule.get_config()) for _ in range(count - 1))]


def check_servers(strategy: Strategy) -> None:
    """Raises `TypeError` if a strategy has no servers."""
    if not isinstance(strategy.backend, RemoteBackend):
        raise InvalidType(
            f"local steps are exchanged by parameter servers, but a {type(strategy).__name__} has none; use a "
            "ps.ParameterServerStrategy"
        )


class Fragment:
    """The outer parameters of one fragment, on the servers. Used by the thread that trains.

    Args:
        strategy: owns the variables.
        rule: the outer optimizer, of this fragment alone.
        variables: the outer parameters.

    Attributes:
        start: the values of now, in arrays that do not change: those from which local steps began.
        counted: all tokens of this worker up to the last exchange.
    """

    def __init__(self, strategy: Strategy, rule: Optimizer, variables: Sequence[Variable]) -> None:
        self.rule, self.variables = rule, list(variables)
        self._strategy, self._backend = strategy, cast(RemoteBackend, strategy.backend)
        given = rule._check_variables, rule._needs, rule._decays, rule._decaying
        self._driver = StepDriver(rule, state_of(rule), *given, optional=True)
        self.counted = 0.0
        with strategy.scope():
            rule.build(self.variables)
        self.renew()

    @property
    def is_alone(self) -> bool:
        """True if each worker updates the variables by itself."""
        return self._strategy.backend.group.alone or any(v._alone for v in self.variables)

    def moved(self) -> bool:
        """Returns whether something but an exchange has changed the outer parameters: a checkpoint was restored."""
        return not self.is_alone and shards_of(self.variables[0])[0].numpy() is not self._seen

    def renew(self) -> None:
        """Begins with the outer parameters of now."""
        self.start = self._read()
        self._seen = None if self.is_alone else shards_of(self.variables[0])[0].numpy()

    def send(self, local: Sequence[Array] | None, tokens: float | None = None, overlaps: bool = False) -> None:
        """Sends how far this worker came. Does not wait for the others.

        Args:
            local: this worker's parameters; None if nothing of it shall count.
            tokens: what this worker has trained with so far; None if that is not counted.
            overlaps: True if the worker trains on while the arrays are sent.
        """
        weight = 1.0 if tokens is None else tokens - self.counted
        self.counted = tokens or 0.0
        if local is None or not weight:
            weight = 0.0
            values: list[Any] = [Absent(np.broadcast_to(np.zeros((), v.dtype), v.shape)) for v in self.variables]
        else:
            weight = 1.0 if self.is_alone else weight  # the mean of one is the one: nothing is rounded
            each = zip(self.variables, local, self.start, strict=True)
            values = [self._moved_by(v, own, start, weight, overlaps) for v, own, start in each]
        self._driver.send(self._strategy, StepContribution(self.variables, values, weight=weight))

    def _moved_by(self, v: Variable, local: Array, start: Array, weight: float, overlaps: bool) -> Array:
        """Returns a pseudo-gradient times the weight; in an array that may be read while the worker trains on."""
        dtype = state_dtype(v.dtype)
        if dtype != v.dtype:  # half precision: small differences, and large weights
            start, local = start.astype(dtype), local.astype(dtype)
            found = start
        else:
            found = self._backend.buffer(v, 0) if overlaps else np.empty(v.shape, dtype)
        np.subtract(start, local, out=found)
        if weight != 1.0:
            np.multiply(found, dtype.type(weight), out=found)
        return found

    def receive(self) -> list[Array]:
        """Waits for what was sent, and returns the outer parameters after it: a place to which all workers come."""
        self.renew()
        if not self.is_alone:
            # All members come here, so all know of new members at once. Other rounds tell them eight rounds later,
            # and eight exchanges may be hours.
            self._backend.exchange.settle()
        self._strategy._begin_step()
        self._backend.exchange.begin_run()
        return self.start

    def _read(self) -> list[Array]:
        # Asynchronous workers read anew, as in a step of its own, what their last exchange has not brought.
        found: list[Array] = self._strategy.run(self._fetched) if self.is_alone else self._fetched()
        return found

    def _fetched(self) -> list[Array]:
        return [v.numpy() for v in self.variables]
