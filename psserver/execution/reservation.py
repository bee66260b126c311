"""Where the calls of a step write: in place only after the last part that may fail."""

from __future__ import annotations

from collections.abc import Sequence, Set

from psserver.execution.calls import KernelCall, Ready, Spare
from psserver.execution.row_calls import RowsCall, RowsMeasurement

Call = KernelCall | Ready | RowsCall | RowsMeasurement


def reserve(calls: Sequence[Call], atomic: bool, exclusive: Set[int], own_rows: Set[int], spare: Spare) -> bool:
    """Makes all calls decide where they write, and take the memory that they need.

    Args:
        calls: the calls, in order.
        atomic: True if the step leaves nothing behind when a part of it fails.
        exclusive: variables whose arrays nobody else holds.
        own_rows: variables of which rows may be written in place.
        spare: returns an array for the new value of a variable, or None.

    Returns:
        False if a batch, which can only write in place, comes too early for that.
    """
    risky = at = 0
    for call in calls if atomic else ():
        if isinstance(call, KernelCall):
            risky = max([risky, *(n for n, stage in enumerate(call.stages, at) if stage.may_fail)])
            risky = at + call.width if call.copies else risky
        elif isinstance(call, RowsCall | RowsMeasurement) and call.may_fail:
            risky = max(risky, at)
        at += call.width
    at, fresh = 0, set[int]()
    for call in calls:
        if isinstance(call, KernelCall):
            call.reserve(risky - at, exclusive, fresh, spare)
            fresh |= call.assigned
        elif isinstance(call, RowsCall):
            call.reserve(own_rows | fresh, keeps_old=at < risky)
            fresh |= call.assigned
        elif isinstance(call, Ready) and at < risky:
            return False
        at += call.width
    return True
