"""NaN and infinite values: tests of arrays, the findings of a round, and the warnings for people.

A kernel reports at no cost whether a sum or an assigned value has any; only then is each contribution tested. The
values are applied all the same.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from psserver.devices import ServerDevice
from psserver.execution.calls import Doubt
from psserver.execution.contributions import Contributions
from pswire.cluster import Task
from pswire.model.finite import EXPONENTS, NO_SIGN, is_finite, may_be_nonfinite
from pswire.model.plan import Ref
from pswire.model.rows import Rows

log = logging.getLogger("psserver")


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

    Attributes:
        sent: the contributions that they are computed from; None as long as nobody has looked at them one by one.
        contributions: non-finite contributions: the number of the reduction, and the contributor's task.
        variables: numbers of the variables that are not finite after the round, each with True if it was known not to
            be finite before. On a GPU both are complete after `settle`.
    """

    def __init__(self, device: ServerDevice) -> None:
        self._device = device
        self.sent: Contributions | None = None
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
            xp = np if keyed else self._device.xp
            own = xp.take(array, xp.asarray(rows.ids), axis=0)
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
        for task, pieces in self.sent.counted(index) if self.sent else ():
            if not all(map(is_finite, pieces)):
                self.contributions.append((index, task))
