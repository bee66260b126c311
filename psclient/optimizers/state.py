"""The variables that an optimizer keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from psclient._src.variables.variable import Variable, VariableAggregation
from psclient.optimizers.loss_scale import DynamicLossScale
from psclient.optimizers.step_functions import state_dtype
from pswire.model.plan import VariableSpec
from pswire.model.row_updates import row_shape
from pswire.model.tensor import Array, spec_of

APART = "async"
"""The word before the names of what steps share that each worker makes alone, in a job whose workers make others
together."""


@dataclass(frozen=True)
class Needs:
    """The state that a variable shall have beside it.

    Attributes:
        slots: initial values of the slots, by name.
        average: True if it shall have a moving average.
        accumulator: True if the gradients of several calls make a step.
        running: True if the last slot is a number that goes by steps alone.
        marks: True if a step of several calls is nothing to rows that none of these calls has.
    """

    slots: Mapping[str, Array]
    average: bool
    accumulator: bool
    running: bool = False
    marks: bool = False


@dataclass
class VariableState:
    """The state that one variable has beside it.

    Attributes:
        variable: the variable whose state it is.
        slot_names: names of the optimizer's slots, in order.
        slots: the variables that hold the slots, in the order of their names.
        average: its moving average, if it has one.
        accumulator: has the gradients of the calls before, if several make a step.
        running: True if the last slot is a number that goes by steps alone.
        staged: has the gradient of a call between its two rounds, if there ever were two.
        marks: has the largest size in each row of the gradients of the calls before, if a step of several calls is
            nothing to other rows.
    """

    variable: Variable
    slot_names: tuple[str, ...]
    slots: tuple[Variable, ...]
    average: Variable | None
    accumulator: Variable | None
    running: bool = False
    staged: Variable | None = None
    marks: Variable | None = None

    @property
    def number(self) -> Variable | None:
        """The slot that is moved once in each step, before `update`, which reads it; None if there is none."""
        return self.slots[-1] if self.running else None

    @property
    def updated(self) -> tuple[Variable, ...]:
        """The slots that `update` assigns."""
        return self.slots[:-1] if self.running else self.slots

    def __iter__(self) -> Iterator[Variable]:
        """All that is beside the variable."""
        yield from (x for x in (*self.slots, self.average, self.accumulator, self.marks, self.staged) if x is not None)

    def saved(self) -> Iterator[tuple[str, Variable]]:
        """Returns what checkpoints have of it, by the names of slots."""
        yield from zip(self.slot_names, self.slots, strict=True)
        rest = (
            ("average", self.average),
            ("gradient_accumulator", self.accumulator),
            ("accumulated_rows", self.marks),
        )
        yield from ((name, v) for name, v in rest if v is not None)


def first_shared(accumulates: bool, scale: object) -> dict[str, Array]:
    """Returns initial values of the state that all steps of an optimizer share, by name.

    Args:
        accumulates: True if several calls make a step.
        scale: the loss scale; a `DynamicLossScale` has state of its own.
    """
    first: dict[str, Array] = {"iterations": np.zeros((), np.int64)}
    if accumulates:
        first["accumulated"] = np.zeros((), np.int64)
    if isinstance(scale, DynamicLossScale):
        first["loss_scale"] = np.array(scale.initial_scale, np.float32)
        first |= {"good_steps": np.zeros((), np.int64), "skipped_steps": np.zeros((), np.int64)}
    return first


class State:
    """The state that an optimizer keeps beside each variable, and that of its steps on every server that needs it.

    Args:
        name: prefix of the names of all these variables.
        shared: initial values of the state that steps share, by name.

    Attributes:
        everywhere: the state that steps share, by name: for each group of servers that has it.
    """

    def __init__(self, name: str, shared: Mapping[str, Array]) -> None:
        self._name = name
        self._first = shared
        self.everywhere: list[dict[str, Variable]] = []
        self._own: dict[int, VariableState] = {}  # by the id of a variable that is in it
        self.strategy: Any = None

    @property
    def built(self) -> bool:
        """True once any state was created."""
        return bool(self.everywhere)

    def __iter__(self) -> Iterator[Variable]:
        for shared in self.everywhere:
            yield from shared.values()
        for own in self._own.values():
            yield from own

    def by_path(self, path_of: Callable[[Variable], str]) -> dict[str, Variable]:
        """Returns what a checkpoint has of it: of copies one, and nothing of what is between two rounds.

        Args:
            path_of: the path of a variable that is trained.

        Returns:
            What steps share by name, what each variable has by the slot's name and the variable's path.
        """
        found = dict(self._first_of(False))
        found |= {f"{APART}/{name}": v for name, v in self._first_of(True).items()}
        for own in self._own.values():
            found |= {f"{name}/{path_of(own.variable)}": v for name, v in own.saved()}
        return found

    def shared(self, name: str) -> Variable:
        """One of what steps share; raises `RuntimeError` if there is none."""
        if name not in self._first:
            raise RuntimeError(f"this optimizer has no {name}; use loss_scale_factor=DynamicLossScale()")
        if not self.everywhere:
            raise RuntimeError(
                "the optimizer has no state in this process; call optimizer.build(variables) in "
                "strategy.scope() (a coordinator does this for its workers), or apply gradients first"
            )
        return (self._first_of(False) or self.everywhere[0])[name]

    def beside(self, v: Variable) -> dict[str, Variable]:
        """Returns what steps share, where a variable lives."""
        return next(shared for shared in self.everywhere if self._covers(shared, v))

    def has(self, v: Variable) -> bool:
        """Returns whether a variable has anything beside it."""
        return id(v) in self._own

    def of(self, v: Variable) -> VariableState:
        """Returns what a variable has beside it; raises `RuntimeError` if it has nothing yet."""
        if not self.has(v):
            raise RuntimeError(f"the optimizer has no state for {v.name!r}; apply gradients first, or call build")
        return self._own[id(v)]

    @staticmethod
    def _covers(shared: Mapping[str, Variable], v: Variable) -> bool:
        count = shared["iterations"]
        return count._alone == v._alone and set(v.devices) <= set(count.devices)

    def _first_of(self, alone: bool) -> dict[str, Variable]:
        """Returns what the steps of all workers together share, or those of each worker alone; empty for nothing."""
        return next((shared for shared in self.everywhere if shared["iterations"]._alone == alone), {})

    def build(
        self, variables: Sequence[Variable], needs: Callable[[Variable], Needs], staged: Sequence[Variable] = ()
    ) -> None:
        """Creates the missing state. In cross-replica context.

        Args:
            variables: the variables to be trained, of one strategy.
            needs: returns the state that a variable shall have beside it.
            staged: those among them whose gradients are kept between two rounds.
        """
        self.strategy = variables[0].strategy
        new = [v for v in variables if id(v) not in self._own]
        for alone in (False, True):
            mine = [v for v in new if v._alone == alone]
            self._build_shared(
                [v for v in mine if not any(self._covers(shared, v) for shared in self.everywhere)], alone
            )
        for v in new:
            with self.strategy.extended.colocate_vars_with(v):
                self._own[id(v)] = self._first_own(v, needs(v))
        for v in staged:
            own = self._own[id(v)]
            if own.staged is None:
                with self.strategy.extended.colocate_vars_with(v):
                    zeros = np.zeros(v.shape, state_dtype(v.dtype))
                    own.staged = self._saved_as("", f"{self._name}/{v.name}/gradient_staged", zeros, v._alone)

    def _build_shared(self, uncounted: Sequence[Variable], alone: bool) -> None:
        """Variables that came later may live where the count is not: there it gets another copy.

        Those that each worker updates alone have a count of their own: of the updates of all workers, which are no
        steps of all together.
        """
        if not uncounted:
            return
        first, consistency = self._first_of(alone), next((v.consistency for v in uncounted if v._alone), None)
        now = {name: v.numpy() for name, v in first.items()}
        extended, prefix = self.strategy.extended, f"{self._name}/{APART}" if alone else self._name
        with extended.colocate_vars_with(extended.non_slot_devices(uncounted)):
            if first:
                # A name of its own kind: how many copies there are must not number what else is saved.
                made = {n: self._saved_as(v.name, f"{v.name}.copy", now[n], alone) for n, v in first.items()}
            else:
                made = {n: Variable(x, False, f"{prefix}/{n}", consistency=consistency) for n, x in self._first.items()}
        self.everywhere.append(made)

    def _first_own(self, v: Variable, needs: Needs) -> VariableState:
        dtype = state_dtype(v.dtype)
        slots = tuple(self._beside(v, name, value) for name, value in needs.slots.items())
        average = self._beside(v, "average", v.numpy().astype(dtype)) if needs.average else None
        accumulator = None
        if needs.accumulator:
            accumulator = self._beside(v, "gradient_accumulator", np.zeros(v.shape, dtype))
        marks = None
        if needs.marks and v.shape:
            marks = self._beside(v, "accumulated_rows", np.zeros(row_shape(v.shape), np.zeros((), dtype).real.dtype))
        return VariableState(v, tuple(needs.slots), slots, average, accumulator, needs.running, marks=marks)

    def _saved_as(self, saved_as: str, name: str, value: Array, alone: bool) -> Variable:
        """Creates a variable that checkpoints do not have by its own name, where `colocate_vars_with` says.

        What there is depends on how many servers there are, and a checkpoint is for any number of them.
        """
        spec = VariableSpec(name, spec_of(value), False, saved_as, alone=alone)
        extended = self.strategy.extended
        made: Variable = extended.create_variable(spec, value, extended._colocation, False, VariableAggregation.NONE)
        return made

    def _beside(self, v: Variable, name: str, value: Array) -> Variable:
        return Variable(value, False, f"{self._name}/{v.name}/{name}")


def state_of(optimizer: Any) -> State:
    """Returns what an optimizer keeps."""
    state: State = optimizer._state
    return state
