"""The step that an optimizer made last: most steps differ from the one before by their gradients alone."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from psclient._src.distribute.strategy import Strategy
from psclient._src.distribute.template import SectionTemplate
from psclient._src.tracing.hyperparameters import Settings
from psclient._src.variables.variable import Variable

_TRAINABLE = operator.attrgetter("trainable")


@dataclass(frozen=True, eq=False)
class Step:
    """What a step depends on, beside its gradients and what its update functions read by other ways.

    Attributes:
        variables: in the order of their gradients.
        decays: of each variable, whether it takes part in weight decay.
        settings: the optimizer's.
        copies: how many copies there are of what steps share.
    """

    variables: tuple[Variable, ...]
    decays: tuple[bool, ...]
    settings: Settings
    copies: int

    def same(self, other: Step) -> bool:
        """Whether another one would do the same with these numbers."""
        if not _same(self.variables, other.variables):
            return False
        words, others = ((step.decays, step.copies, step.settings.key) for step in (self, other))
        return words == others


class LastStep:
    """Makes an optimizer's steps, each in a section of its own: what a step like the last would record is repeated."""

    def __init__(self) -> None:
        self._known: tuple[Step, SectionTemplate] | None = None

    def was_of(self, variables: Sequence[Variable]) -> bool:
        """Whether it is known that a step of these variables can be made: the last one was. For any thread."""
        known = self._known
        return known is not None and _same(known[0].variables, variables) and all(map(_TRAINABLE, variables))

    def make(self, strategy: Strategy, step: Step, gradients: Sequence[Any], record: Callable[[], None]) -> None:
        """Makes a step in the open section, which is this step's alone.

        Args:
            strategy: whose section it is.
            step: what it is.
            gradients: of its variables, checked.
            record: reduces the gradients, and makes the updates, one by one.
        """
        if self._known is not None and step.same(self._known[0]):
            kept, numbers = self._known[1], step.settings.numbers
            local = strategy.extended.contributions(gradients, kept.plan.reductions)
            if len(local) == len(gradients) and strategy.backend.repeat(kept, numbers, local):
                return
        record()
        recorded = strategy.backend.complete(step.settings.numbers)
        self._known = None if recorded is None else (step, recorded)


def _same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))
