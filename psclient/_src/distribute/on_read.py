"""ON_READ variables of asynchronous workers: replicas fill copies of their own, and servers have what all make of them.

Synchronous processes combine their copies when one is read, in a round of all. Asynchronous ones cannot wait for each
other. So each hands in what has changed in its copies, at the end of each `run`, and of a function that a coordinator
has scheduled; servers keep the whole, also of workers that have left. Then it is read, saved and restored as any other
variable. See decision 61.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from psclient._src import context
from psclient._src.context import StrategyFace
from psclient._src.data.group import ReplicaGroup
from psclient._src.variables.kinds import SyncOnReadVariable
from psclient._src.variables.variable import VariableAggregation
from pswire.model.plan import PlacedVariable
from pswire.model.tensor import Array


class Copies:
    """The ON_READ variables of this process that have an aggregation. Used by the thread that records.

    Args:
        group: the processes that train together.
        record_own: sends the updates that a function records: a round of this process alone, which counts as no step.
        makes_rounds: returns True in the thread that makes the rounds of this process, or where none was made.
        read_now: returns the values that servers have now.
    """

    def __init__(
        self,
        group: ReplicaGroup,
        record_own: Callable[[StrategyFace, Callable[[], object]], None],
        makes_rounds: Callable[[], bool],
        read_now: Callable[[Sequence[PlacedVariable]], list[Array]],
    ) -> None:
        self._group = group
        self._record_own, self._makes_rounds, self._read_now = record_own, makes_rounds, read_now
        self._all: list[SyncOnReadVariable] = []

    @property
    def active(self) -> bool:
        """True where servers have the whole: each process makes rounds of its own."""
        return self._group.alone

    def add(self, variable: SyncOnReadVariable) -> None:
        """Adds a variable, with copies that hold nothing to be handed in."""
        if variable.aggregation is not VariableAggregation.NONE:
            variable.parts = self
            self._all.append(variable)
            variable.handed_in()

    # ---- What replicas have changed ----

    def hand_in(self, ends: bool = True) -> None:
        """Hands in what replicas have changed since the last time; does nothing where processes wait for each other.

        Args:
            ends: True to look also at copies that others write without a word, such as a module's buffers.
        """
        if self.active and (ahead := [variable for variable in self._all if variable.is_ahead(ends)]):
            self._record_own(ahead[0].strategy, lambda: self._record(ahead))
            for variable in ahead:
                variable.handed_in()

    def _record(self, ahead: Sequence[SyncOnReadVariable]) -> None:
        for variable in ahead:
            self._record_one(variable)

    def _record_one(self, variable: SyncOnReadVariable) -> None:
        saved, how, copies = variable.saved, variable.aggregation, variable.copies()
        if how is VariableAggregation.ONLY_FIRST_REPLICA:
            saved.assign(copies[0])
        elif how is VariableAggregation.SUM:
            saved.assign_add(sum(variable.changes(), np.zeros_like(copies[0])))
        elif self._group.coordinated:
            # As with TensorFlow: there is one value, with which each function begins, and the last one counts.
            saved.assign(_mean(copies, len(copies)))
        else:
            # Of the copies of all replicas, as if they were combined in one round: each moves the mean by its part.
            saved.assign_add(_mean(variable.changes(), self._group.share()[1]))

    def begin_function(self) -> None:
        """Begins a function that a coordinator has scheduled: sums are its own, all else begins with what there is.

        So what it adds counts once, whichever workers have run it, and whatever the coordinator has set meanwhile.
        """
        shared = [each for each in self._all if each.aggregation is not VariableAggregation.SUM]
        for variable, value in zip(shared, self._read(shared) if shared else (), strict=True):
            variable.take_over(value)
        for variable in self._all:
            if variable.aggregation is VariableAggregation.SUM:
                variable.take_over(np.zeros(variable.shape, variable.dtype))

    # ---- The whole ----

    def read(self, variables: Sequence[SyncOnReadVariable]) -> list[Array]:
        """Returns what all replicas of all workers have made of variables. In cross-replica context.

        A thread that makes no rounds gets what is on servers: replicas may be at work meanwhile.
        """
        with variables[0].strategy.scope():  # which another strategy's refuses
            if self._makes_rounds():
                self.hand_in()
            return self._read(variables)

    def _read(self, variables: Sequence[SyncOnReadVariable]) -> list[Array]:
        return self._read_now([variable.saved.handle for variable in variables])

    def assign(self, variable: SyncOnReadVariable, how: str, value: object) -> None:
        """Changes what all have made of a variable, by "assign", "assign_add" or "assign_sub"."""
        self._record_own(variable.strategy, lambda: getattr(variable.saved, how)(value))

    # ---- In rounds of all ----

    def leave_in_round(self) -> None:
        """Records that servers keep the aggregates of now, where all processes make a round together."""
        for variable in self._all:
            variable.saved._assign_aggregate(variable.strategy, "assign", variable)

    def changes(self, change: Callable[[], bool]) -> bool:
        """Calls what changes how processes make rounds, at the same place of all programs; returns what it does.

        Those that become asynchronous leave on servers what they have; those that were take their shares of it.
        """
        was = self.active
        if self._all and not was:
            strategy = self._all[0].strategy
            with strategy.scope(), context.enter_cross_replica(strategy):
                self.leave_in_round()
        if not change():
            return False
        if self._all and was and not self.active:
            for variable, whole in zip(self._all, self._read(self._all), strict=True):
                variable.share_out(whole)
        for variable in self._all:
            variable.handed_in()
        return True


def _mean(arrays: Sequence[Array], count: int) -> Array:
    """The sum of arrays over a count, of their dtype; of half precision it is computed in single."""
    wide = np.result_type(arrays[0].dtype, np.float32)
    return (sum([array.astype(wide) for array in arrays], np.zeros((), wide)) / count).astype(arrays[0].dtype)
