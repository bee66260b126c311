"""The step that an optimizer made last: most steps differ from the one before by their gradients alone."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass

from psclient.backend import Backend
from psclient.configured import Settings
from psclient.section import Kept
from psclient.variables import Variable


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
        if len(self.variables) != len(other.variables) or not all(map(operator.is_, self.variables, other.variables)):
            return False
        words, others = ((step.decays, step.copies, step.settings.key) for step in (self, other))
        return words == others


class LastStep:
    """Makes an optimizer's steps, each in a section of its own: what a step like the last would record is repeated."""

    def __init__(self) -> None:
        self._known: tuple[Step, Kept] | None = None

    def make(self, backend: Backend, step: Step, record: Callable[[], None]) -> None:
        """Makes a step of gradients that are reduced in the open section, which is this step's alone.

        Args:
            backend: whose section it is.
            step: what it is.
            record: makes its updates, one by one.
        """
        if self._known is not None:
            before, section = self._known
            if step.same(before) and backend.repeat(section, step.settings.numbers):
                return
        record()
        recorded = backend.complete(step.settings.numbers)
        self._known = None if recorded is None else (step, recorded)
