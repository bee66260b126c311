"""The rounds of one optimizer: each is mostly like the last one, and then sent without being recorded again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from psclient._src import context
from psclient._src.distribute.reduction import LocalValue
from psclient._src.distribute.strategy import Strategy
from psclient._src.distribute.template import HostValue, TemplateCache
from psclient._src.rounds.backend import RemoteBackend
from psclient._src.rounds.section import Section
from psclient._src.tracing.hyperparameters import Settings
from psclient._src.variables.variable import Variable
from psclient.optimizers.step_driver import StepKey
from psclient.torch.groups import ParameterGroups
from pswire.errors import InvalidArgument
from pswire.model.plan import ReduceOp, Reduction, Ref
from pswire.model.tensor import Array, TensorSpec, spec_of


class Extra(NamedTuple):
    """A value that rides in a round beside gradients, and comes back reduced.

    Attributes:
        op: how it is reduced.
        array: this worker's part of it.
    """

    op: ReduceOp
    array: Array


class StepContribution(NamedTuple):
    """What this worker puts into a round.

    Attributes:
        variables: the variables that are trained.
        gradients: of each of them, as reductions take it.
        extras: what rides beside.
        skips: True if nothing shall be applied where a gradient has NaN or infinity.
    """

    variables: list[Variable]
    gradients: list[Any]
    extras: list[Extra]
    skips: bool = False


class StepRounds:
    """Sends the rounds of one optimizer. Used by one thread at a time.

    Args:
        strategy: owns the variables.
        groups: the rules.
    """

    def __init__(self, strategy: Strategy, groups: ParameterGroups) -> None:
        self._strategy = strategy
        self._backend = cast(RemoteBackend, strategy.backend)
        self._groups = groups
        self._cache = TemplateCache()
        self._sent: list[Any] = []  # the numbers of the last round

    def is_known(self, out: StepContribution) -> bool:
        """Returns whether the last round was like this one, so that its gradients need not be there to send it."""
        nonfinite = self._backend.exchange.session.nonfinite
        return self._cache.find(self._key(out, self._groups._settings()), nonfinite) is not None

    @property
    def changed(self) -> bool:
        """True if a learning rate, or another number, is not what the last round was sent with."""
        return repr(self._groups._settings().numbers) != repr(self._sent)

    def send(self, out: StepContribution) -> Section:
        """Sends a round, and does not wait for it; returns its section."""
        backend, driver, settings = self._backend, self._groups.driver, self._groups._settings()
        last = self._cache.key
        known = last is not None and last.step.is_of(out.variables)
        if not known:
            self._groups.first._check_variables(out.variables)
        backend.flush()  # what was begun before is no part of this
        with context.enter_cross_replica(self._strategy):
            if not known:
                driver.build(self._strategy, out.variables, out.gradients)
            return backend.section(lambda: self._section(out, settings))

    def _key(self, out: StepContribution, settings: Settings) -> _Key:
        extras = tuple([(extra.op, spec_of(extra.array)) for extra in out.extras])
        return _Key(self._groups.driver.key(settings, out.variables), extras, out.skips)

    def _section(self, out: StepContribution, settings: Settings) -> Section:
        backend = self._backend
        section = backend.section_here
        self._sent = settings.numbers

        def local(reductions: Sequence[Reduction]) -> list[LocalValue | HostValue]:
            mine = [HostValue(1.0, extra.array) for extra in out.extras]
            rest = reductions[len(mine) :]
            return [*mine, *self._strategy.extended._contributions(out.gradients, out.variables, rest)]

        def record() -> None:
            for op, array in out.extras:
                backend.reduce([(LocalValue(op, 1.0, spec_of(array), array), None)])
            if out.skips:
                section.skip_nonfinite()
            self._groups.driver.record(self._strategy, settings, out.gradients, out.variables)
            if out.skips and section.marks:
                raise InvalidArgument(
                    "a GradScaler skips a step on all workers if any gradient is not finite, but variables "
                    "with consistency=ps.Async() do not wait for all workers; train these with an "
                    "optimizer without a scaler"
                )

        backend.replay(self._cache, self._key(out, settings), settings.numbers, local, record)
        return section


class _Key(NamedTuple):
    """What a repeatable round depends on, but for gradients and numbers."""

    step: StepKey
    extras: tuple[tuple[ReduceOp, TensorSpec], ...]
    skips: bool


def values_of(section: Section, count: int) -> list[Array]:
    """Returns the extras of a round, reduced."""
    return [np.asarray(section.value(Ref("reduction", number))) for number in range(count)]
