"""What NaN and infinity mean for a round: whether it is applied, and what people are told."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from psserver.effects import Effect
from psserver.execution.execution import Execution
from psserver.execution.nonfinite import NonfiniteValues
from psserver.plans.outline import Application
from psserver.plans.round import ReadyRound
from psserver.rounds.participants import RoundParticipant
from psserver.state.counters import ServerCounters
from psserver.state.variables import Store
from psserver.values.value import Value
from pswire.cluster import Task
from pswire.errors import NonfiniteError

log = logging.getLogger("psserver")

MAX_LINES = 10
"""Most warnings of one round; further variables are only counted."""

MAX_NAMES = 4
"""Most variables, or tasks, that one warning names."""


class NonfiniteVariables(RoundParticipant):
    """The variables of a server that have NaN or infinite values and were reported. Guarded by the core's lock.

    Args:
        store: the variables.
        tally: counts NaN and infinite values.

    Attributes:
        ids: numbers of reported variables, until a round makes them finite or a checkpoint is restored.
    """

    def __init__(self, store: Store, tally: ServerCounters) -> None:
        self._store = store
        self._tally = tally
        self.ids: set[int] = set()

    def committed(self, job: ReadyRound, given: Mapping[int, Value]) -> Sequence[Effect]:
        """Forgets variables that have a checkpoint's values: they are reported anew."""
        if self.ids:
            self.ids.difference_update(given)
        return ()

    def refuses(self, job: ReadyRound) -> NonfiniteError | None:
        """Returns the error of a round that is not applied, as its plan asks for that; None for any other."""
        if job.prepared.plan.nonfinite != "raise" or not job.accused:
            return None
        self._tally.nonfinite_contributions += len(job.accused)
        return NonfiniteError(
            f"round {job.round} was not applied: {self.refusal(job)} (nonfinite='raise'); check that step's loss and "
            "gradients"
        )

    def warns(self, execution: Execution) -> Sequence[str]:
        """Counts NaN and infinite values after a round; returns the warnings for its members."""
        job, found = execution.job, execution.found
        if job.skipped:
            self._tally.nonfinite_contributions += len(job.accused)
            warning = f"round {job.round} was skipped: {self.refusal(job)} (nonfinite='skip')"
            log.warning("%s", warning)
            return (warning,)
        warnings = self.over(job, found)
        self._tally.nonfinite_contributions += len(found.contributions)
        self._tally.nonfinite_variables = len(self.ids)
        return warnings

    def over(self, job: ReadyRound, found: NonfiniteValues) -> tuple[str, ...]:
        """Takes the findings of a round.

        Returns:
            Warnings for variables that were not reported yet. They are written to the server's log as well.
        """
        if self.ids:
            self.ids.difference_update(set(job.prepared.writes) - found.variables.keys())
        if not found.variables:
            return ()  # nor for contributions that the update kept out, as with a loss scale
        tasks: dict[int, set[Task]] = {}
        for reduction, task in found.contributions:
            tasks.setdefault(reduction, set()).add(task)
        lines = []
        for application in job.prepared.outline.applications:
            senders = set[Task]().union(*(tasks.get(reduction, ()) for reduction in application.needs))
            line = self._line(application, sorted(senders), found)
            lines += [f"round {job.round}: {line}"] if line else []
        if len(lines) > MAX_LINES:
            more = len(lines) - MAX_LINES
            lines[MAX_LINES:] = [f"round {job.round}: the same holds for {more} more variables"]
        for line in lines:
            log.warning("%s", line)
        return tuple(lines)

    def refusal(self, job: ReadyRound) -> str:
        """Returns which contributions are the reason that nothing of a round is applied, in words."""
        tasks: dict[int, set[Task]] = {}
        for reduction, task in job.accused:
            tasks.setdefault(reduction, set()).add(task)
        lines = []
        for reduction, senders in sorted(tasks.items()):
            target = job.plan.reductions[reduction].target or f"reduction {reduction}"
            lines.append(f"the gradients of {_some(list(map(str, sorted(senders))))} for {target}")
        more = len(lines) - MAX_NAMES
        lines[MAX_NAMES:] = [f"and in {more} more gradients"] if more > 0 else []
        return f"NaN or infinity in {'; '.join(lines)}"

    def _line(self, application: Application, senders: Sequence[Task], found: NonfiniteValues) -> str:
        """Returns the warning for an application; empty if it is no news."""
        fresh = [id for id in application.assigned if found.variables.get(id) is False and id not in self.ids]
        if not fresh:
            return ""
        self.ids.update(fresh)
        names = [repr(self._store.variables[id].spec.name) for id in fresh]
        why = (
            f"the gradients of {_some(list(map(str, senders)))} contained NaN or infinity, and were applied"
            if senders
            else "the update produced NaN or infinity from finite gradients; likely causes are an overflow, a "
            "division by zero, or a learning rate that is not finite"
        )
        return (
            f"{'variable' if len(names) == 1 else 'variables'} {_some(names)}: {why}. Check that step's loss and "
            "gradients, and restore an earlier checkpoint"
        )


def _some(names: Sequence[str]) -> str:
    """Returns the first names in words, with the number of the others."""
    more = len(names) - MAX_NAMES
    return ", ".join([*names[:MAX_NAMES], *([f"and {more} more"] if more > 0 else [])])
