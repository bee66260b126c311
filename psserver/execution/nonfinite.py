"""NaN and infinite values: tests of arrays, the findings of a round, and the warnings for people.

A kernel reports at no cost whether a sum or an assigned value has any; only then is each contribution tested. The
values are applied all the same.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from psserver.devices import ServerDevice
from psserver.execution.calls import Doubt
from psserver.execution.contributions import Contributions
from psserver.plans.outline import Application
from psserver.plans.round import ReadyRound
from psserver.state.counters import ServerCounters
from psserver.state.variables import Store, take_rows
from pswire.cluster import Task
from pswire.errors import NonfiniteError
from pswire.model.finite import EXPONENTS, NO_SIGN, is_finite, may_be_nonfinite
from pswire.model.plan import Ref
from pswire.model.rows import Rows

log = logging.getLogger("psserver")

MAX_LINES = 10
"""Most warnings of one round; further variables are only counted."""

MAX_NAMES = 4
"""Most variables, or tasks, that one warning names."""


def finite_flag(array: Any, xp: Any) -> Any:
    """Returns a device array with one bool, True if an array there is finite; does not wait for the device.

    Args:
        array: an array of floating-point numbers.
        xp: its array namespace.
    """
    exponent = EXPONENTS.get(array.dtype)
    if exponent is None:
        return xp.all(xp.isfinite(array))
    return xp.all((array.view(xp.uint16) & NO_SIGN) < exponent)


class NonfiniteValues:
    """The NaN and infinite values of one round. Used by one thread at a time.

    Args:
        device: the device of the values.
        sent: the contributions that they are computed from.

    Attributes:
        contributions: non-finite contributions: the number of the reduction, and the contributor's task.
        variables: numbers of the variables that are not finite after the round, each with True if it was known not to
            be finite before. On a GPU both are complete after `settle`.
    """

    def __init__(self, device: ServerDevice, sent: Contributions) -> None:
        self._device = device
        self._sent = sent
        self._flags: list[tuple[Ref, Any, Any, Any]] = []
        self._doubts: list[tuple[Doubt, Mapping[int, tuple[Any, Any]]]] = []
        self.contributions: list[tuple[int, Task]] = []
        self.variables: dict[int, bool] = {}

    def forget(self, ids: Iterable[int]) -> None:
        """Forgets variables that have new values."""
        if self.variables:
            for id in ids:
                self.variables.pop(id, None)

    def look(self, ref: Ref, value: Any, old: Any = None) -> None:
        """Tests a reduction's value, or a variable's new one; `old` is the variable's last array, if it is another."""
        if not may_be_nonfinite(value.dtype):
            return
        if self._device.gpu is None:
            self._take_in(ref, value, old, is_finite(value))
        else:
            held = value if ref.kind == "variable" else None  # a reduction's memory serves the next one
            self._flags.append((ref, held, old, finite_flag(value, self._device.xp)))

    def look_at_rows(self, reduction: int, rows: Rows, assigned: Mapping[int, Any], keyed: bool) -> None:
        """Tests the rows of a reduction, and if some are not finite the rows of variables that were updated by them.

        Args:
            reduction: its number.
            rows: its rows, on the host.
            assigned: the variables, by number.
            keyed: True if they are of a dynamic table, which is on the host wherever variables are.
        """
        if not may_be_nonfinite(rows.values.dtype) or is_finite(rows.values):
            return
        self.accuse(reduction)
        for id, array in assigned.items():
            own = take_rows(array, rows.ids, np if keyed else self._device.xp)
            self.look(Ref("variable", id), self._device.put(own) if keyed else own)

    def doubt(self, doubt: Doubt, values: Mapping[int, tuple[Any, Any]]) -> None:
        """Takes what a kernel on a GPU has seen, or will have.

        Args:
            doubt: this.
            values: the new values of the variables that it has assigned, by number, each with the last one.
        """
        self._doubts.append((doubt, values))

    def settle(self) -> None:
        """Takes the results of all tests on a GPU; waits for it."""
        if self._flags:
            flags, self._flags = self._flags, []
            finite = self._device.get(self._device.xp.stack([flag for *_, flag in flags]))
            for (ref, value, old, _), is_so in zip(flags, finite, strict=True):
                self._take_in(ref, value, old, bool(is_so))
        if self._doubts:
            doubts, self._doubts = self._doubts, []
            seen = self._device.get(self._device.xp.stack([doubt.seen for doubt, _ in doubts]))
            for (doubt, values), (in_reductions, in_values) in zip(doubts, seen.tolist(), strict=True):
                for index in doubt.reductions if in_reductions else ():
                    self.accuse(index)
                for id, (value, old) in values.items():
                    self._take_in(Ref("variable", id), value, old, not in_values or self._finite(value))

    def _take_in(self, ref: Ref, value: Any, old: Any, finite: bool) -> None:
        if ref.kind == "variable":
            self.variables.pop(ref.index, None)
            if not finite:
                # After a write in place the old state is not known.
                self.variables[ref.index] = old is not None and old is not value and not self._finite(old)
        elif not finite:
            self.accuse(ref.index)

    def _finite(self, value: Any) -> bool:
        on_host = self._device.gpu is None
        return is_finite(value) if on_host else bool(self._device.get(finite_flag(value, self._device.xp)))

    def accuse(self, index: int) -> None:
        """Finds the contributors of non-finite values to a reduction; the contributions must not be released yet."""
        for task, pieces in self._sent.counted(index):
            if not all(map(is_finite, pieces)):
                self.contributions.append((index, task))


class NonfiniteVariables:
    """The variables of a server that have NaN or infinite values and were reported. Guarded by the core's lock.

    Args:
        store: the variables.

    Attributes:
        ids: numbers of reported variables, until a round makes them finite or a checkpoint is restored.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.ids: set[int] = set()

    def clear(self) -> None:
        """Forgets all variables, as at the start of a job."""
        self.ids.clear()

    def restore(self, ids: Iterable[int]) -> None:
        """Forgets variables that have a checkpoint's values: they are reported anew."""
        self.ids.difference_update(ids)

    def refused(self, job: ReadyRound, tally: ServerCounters) -> NonfiniteError | None:
        """Returns the error of a round that is not applied, as its plan asks for that; None for any other."""
        if job.plan.nonfinite != "raise" or not job.accused:
            return None
        tally.nonfinite_contributions += len(job.accused)
        return NonfiniteError(
            f"round {job.round} was not applied: {self.refusal(job)} (nonfinite='raise'); check that step's loss and "
            "gradients"
        )

    def judge(self, job: ReadyRound, found: NonfiniteValues, tally: ServerCounters) -> tuple[str, ...]:
        """Counts NaN and infinite values after a round; returns the warnings for its members."""
        if job.skipped:
            tally.nonfinite_contributions += len(job.accused)
            warning = f"round {job.round} was skipped: {self.refusal(job)} (nonfinite='skip')"
            log.warning("%s", warning)
            return (warning,)
        warnings = self.over(job, found)
        tally.nonfinite_contributions += len(found.contributions)
        tally.nonfinite_variables = len(self.ids)
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
