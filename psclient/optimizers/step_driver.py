"""Drives one step of an optimizer: sums the gradients, measures them, and updates the variables beside them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, cast

from psclient._src import context
from psclient._src.devices import Value
from psclient._src.distribute.strategy import Strategy
from psclient._src.distribute.template import TemplateCache
from psclient._src.nest import Nest
from psclient._src.tracing.hyperparameters import Settings
from psclient._src.variables.sparse_updates import Sparse, SparseUpdate
from psclient._src.variables.variable import Variable
from psclient.optimizers.checks import check_gradients
from psclient.optimizers.loss_scale import DynamicLossScale
from psclient.optimizers.state import Needs, State
from psclient.optimizers.step_functions import apply, become, begin, measure, total

_TRAINABLE = operator.attrgetter("trainable")


class Rule(Protocol):
    """An optimizer, as its driver sees it."""

    global_clipnorm: float | None
    loss_scale_factor: float | DynamicLossScale | None
    sparse: Sparse

    def settings(self) -> Settings:
        """Returns the hyperparameters of now."""


@dataclass(frozen=True, eq=False)
class StepKey:
    """The key of a repeatable step: all that it depends on but gradients, and the names that update functions read.

    Attributes:
        variables: the variables, in the order of their gradients.
        decays: for each variable True if it takes part in weight decay.
        settings: the optimizer's attributes; their numbers may differ between equal keys.
        copies: number of copies of the state that steps share.
    """

    variables: tuple[Variable, ...]
    decays: tuple[bool, ...]
    settings: Settings
    copies: int

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StepKey) or not _same(self.variables, other.variables):
            return False
        words, others = ((key.decays, key.copies, key.settings.key) for key in (self, other))
        return words == others

    __hash__ = None  # type: ignore[assignment]  # it is compared with one other, and never looked up


class StepDriver:
    """Makes the steps of one optimizer. Belongs to the thread that runs cross-replica code, but for `was_of`.

    Args:
        rule: the optimizer that makes the steps.
        state: the optimizer's state.
        check: raises where the optimizer cannot train some variables together.
        needs: returns the state that a variable needs beside it.
        decays: returns whether a variable takes part in weight decay.
    """

    def __init__(
        self,
        rule: Rule,
        state: State,
        check: Callable[[Sequence[Variable]], None],
        needs: Callable[[Variable], Needs],
        decays: Callable[[Variable], bool],
    ) -> None:
        self._rule = rule
        self._state = state
        self._check, self._needs, self._decays = check, needs, decays
        self._cache = TemplateCache()

    def was_of(self, variables: Sequence[Variable]) -> bool:
        """Returns whether the last step was of these variables, so that they need no check. For any thread."""
        known: StepKey | None = self._cache.key
        return known is not None and _same(known.variables, variables) and all(map(_TRAINABLE, variables))

    def build(self, strategy: Strategy, variables: Sequence[Variable]) -> None:
        """Creates what is not there yet of the state for variables. In cross-replica context."""
        self._state.build(variables, self._needs, self._in_stages(strategy, variables))

    def apply_whole(self, strategy: Strategy, grads: list[Value], variables: list[Variable]) -> None:
        """Makes a step in cross-replica context: in a section of its own, but within a merge call.

        What fails is given up altogether.
        """
        if context.in_merge_call():
            self._apply(strategy, grads, variables)
            return
        strategy.backend.flush()  # What was begun before is no part of this.
        with context.enter_cross_replica(strategy):
            strategy.backend.section(lambda: self._apply(strategy, grads, variables, alone=True))

    def apply_boxes(self, strategy: Strategy, boxes: Nest, variables: list[Variable]) -> None:
        """Makes a step in a section of its own, which the next step's may replay; run by `merge_call`."""
        self._apply(strategy, context.unbox(boxes), variables, alone=True)

    def _apply(self, strategy: Strategy, grads: list[Value], variables: list[Variable], alone: bool = False) -> None:
        rule, state = self._rule, self._state
        self._check(variables)
        check_gradients(grads, variables)
        self.build(strategy, variables)
        settings = rule.settings()
        record = partial(self._record, strategy, settings, grads, variables)
        if not alone:
            record()
            return
        key = StepKey(tuple(variables), tuple(map(self._decays, variables)), settings, len(state.everywhere))
        local = partial(strategy.extended.contributions, grads)
        strategy.backend.replay(self._cache, key, settings.numbers, local, record)

    def _record(self, strategy: Strategy, settings: Settings, grads: list[Value], variables: list[Variable]) -> None:
        extended, state = strategy.extended, self._state
        sums = extended.batch_reduce_to("sum", list(zip(grads, variables, strict=True)))
        if self._in_stages(strategy, variables):
            for v, gradient in zip(variables, sums, strict=True):
                extended.update(cast(Variable, state.of(v).staged), become, (gradient,))
            sums = [state.of(v).staged for v in variables]
        measured = self._measured(strategy, settings, variables, sums)
        begun, finite = {}, measured.get("finite")
        for shared in state.everywhere:
            counted = shared["iterations"].devices
            begun[id(shared)] = extended.update_non_slot(counted, begin, (settings, shared, finite))
        step = SparseUpdate(apply, self._rule.sparse)
        for v, gradient in zip(variables, sums, strict=True):
            own, now = state.of(v), begun[id(state.beside(v))]
            rest = (measured.get("norm"), own.average, self._decays(v), own.slots)
            extended.update(v, step, (settings, gradient, own.accumulator, now, *rest))

    def _measured(
        self, strategy: Strategy, settings: Settings, variables: Sequence[Variable], sums: Sequence[Value]
    ) -> dict[str, Value]:
        """The norm of all gradients, and whether they are finite, as far as these are needed."""
        if not self._measures:
            return {}
        extended, state = strategy.extended, self._state
        parts = [
            extended.update(v, measure, (settings, own, state.of(v).accumulator, state.beside(v).get("loss_scale")))
            for v, own in zip(variables, sums, strict=True)
        ]
        if not self._in_stages(strategy, variables):
            found: dict[str, Value] = extended.update_non_slot(extended.non_slot_devices(variables), total, (parts,))
            return found
        # A value never crosses servers inside a section: the parts come here, and what they make goes back.
        names = list(parts[0])
        arrays = iter(strategy.backend.bring([part[name] for part in parts for name in names]))
        return cast(dict[str, Value], total([{name: next(arrays) for name in names} for _ in parts]))

    @property
    def _measures(self) -> bool:
        return self._rule.global_clipnorm is not None or isinstance(self._rule.loss_scale_factor, DynamicLossScale)

    def _in_stages(self, strategy: Strategy, variables: Sequence[Variable]) -> bool:
        """Returns whether a step takes two rounds: what it has to know of all gradients is on several servers."""
        alone = strategy.backend.group.alone
        if alone and isinstance(self._rule.loss_scale_factor, DynamicLossScale):
            raise ValueError(
                "with DynamicLossScale another asynchronous worker may change the scale between a loss and its "
                "gradient's division; give loss_scale_factor a number"
            )
        places = {v.place for v in variables}
        if isinstance(self._rule.loss_scale_factor, DynamicLossScale):
            # All copies of the loss scale have to be told, whether or not a variable of this step is beside them.
            places |= {shared["iterations"].place for shared in self._state.everywhere}
        if not self._measures or len(places) == 1:
            return False
        if alone:
            raise ValueError(
                "global_clipnorm and DynamicLossScale need all gradients of a step, which asynchronous workers on "
                "several servers mix with those of others; use clipnorm, or one server"
            )
        return True


def _same(some: Sequence[object], others: Sequence[object]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))
