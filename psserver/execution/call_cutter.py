"""The applications of a round as calls of kernels."""

from __future__ import annotations

from collections.abc import Iterator, Set

from psserver.execution.calls import KernelCall, Ready, Spare
from psserver.execution.contributions import Contributions
from psserver.execution.reservation import Call, reserve
from psserver.execution.row_calls import RowsCall, RowsMeasurement
from psserver.execution.table_rounds import TableRounds
from psserver.plans.prepared import PreparedPlan
from psserver.programs.kernels.kernels import Kernels
from psserver.values.step import StepVariables


class CallCutter:
    """Cuts the applications of one round into calls. Used by one thread at a time.

    Args:
        prepared: the plan.
        kernels: run its programs.
        contributions: the contributions of a fixed number of members.

    Attributes:
        batches: applications that one kernel runs in one call, each under the numbers of all of them.
        tables: the round in dynamic tables, once it has begun; None for none.
    """

    def __init__(self, prepared: PreparedPlan, kernels: Kernels, contributions: Contributions) -> None:
        self.batches = prepared.batches(kernels, contributions.batched)
        self.tables: TableRounds | None = None
        self._outline, self._kernels, self._contributions = prepared.outline, kernels, contributions

    def calls(self, at: int, stop: int, variables: StepVariables, atomic: bool, spare: Spare) -> list[Call]:
        """Returns the calls for some applications, in batches where possible, and decides where each of them writes.

        Args:
            at, stop: the range of the applications.
            variables: those of the step.
            atomic: True if the step leaves nothing behind when a part of it fails.
            spare: returns an array for the new value of a variable, or None.
        """
        exclusive, own = variables.exclusive, variables.own_rows
        calls = list(self._cut(at, stop, exclusive))
        if not reserve(calls, atomic, exclusive, own, spare):
            calls = list(self._cut(at, stop, frozenset()))
            reserve(calls, atomic, exclusive, own, spare)
        return calls

    def excludes(self, number: int) -> bool:
        """Returns whether nobody contributes to an application that may be left out."""
        return not any(map(self._contributions.is_given, self._outline.applications[number].beside))

    def _cut(self, at: int, stop: int, exclusive: Set[int]) -> Iterator[Call]:
        excluded = [n for n in sorted(self._outline.optional) if at <= n < stop and self.excludes(n)]
        for end in (*excluded, stop):
            while at < end:
                call = self._call(at, end, exclusive)
                yield call
                at = call.numbers.stop
            at = end + 1

    def _call(self, at: int, stop: int, exclusive: Set[int]) -> Call:
        application, batch = self._outline.applications[at], self.batches.get(at)
        if application.rows is not None:
            if self.tables is not None and application.rows.keyed:
                return self.tables.call(at, application, application.rows)
            return RowsCall(at, application, application.rows, self._kernels, self._contributions)
        if application.measured is not None:
            return RowsMeasurement(at, application, self._contributions)
        senders = self._contributions.senders
        ready = Ready.of(batch, at, min(batch.stop, stop), senders, exclusive) if batch else None
        return ready or KernelCall(at, application, self._kernels, self._contributions.parts)
