"""A recorded section, reusable with new contributions and scalar operands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np

from psclient._src.arraylike import HostArray
from psclient._src.arrays.devices import Coming, Pending
from psclient._src.distribute.reduction import Absent
from psclient._src.distribute.strands import Marks
from psclient._src.tracing.symbolic_numbers import Number
from psclient._src.tracing.update_function import Trace
from psclient._src.variables.feedback import Feedback
from psclient._src.variables.sharded import Sharding
from pswire.model.plan import Plan, Reduction
from pswire.model.tensor import DTYPES, Array


@dataclass(frozen=True, eq=False)
class SectionTemplate:
    """A recorded section.

    Attributes:
        plan: as it travels.
        written: ids of the variables that it assigns.
        traces: of its update functions, each with whether there were numbers among its arguments.
        sources: for each operand of the plan, of which trace it is which input.
        feedback: for each reduction what compresses contributions to it; None where they travel as they are.
        marks: what of it each worker makes alone; None where that was not asked.
    """

    plan: Plan
    written: frozenset[int]
    traces: Mapping[Trace, bool]
    sources: tuple[tuple[Trace, int], ...]
    feedback: tuple[Feedback | None, ...]
    marks: Marks | None = None

    def operands(self, numbers: list[Number]) -> tuple[Array, ...] | None:
        """Returns the operands for other numbers; None where an update function would record something else."""
        found: dict[Trace, list[Array | None]] = {}
        for one, takes in self.traces.items():
            arrays = one.operands(numbers if takes else [])
            if arrays is None:
                return None
            found[one] = arrays
        return cast(tuple[Array, ...], tuple([found[one][place] for one, place in self.sources]))


class PreparedStep:
    """The step that one caller made last, as it was recorded: as long as it stays the same it is not recorded again.

    Used by one thread at a time.

    Attributes:
        key: all that the step depends on, but for numbers and contributions; None where nothing is prepared.
        numbers: those that the step was made with last.
    """

    def __init__(self) -> None:
        self.key: Any = None
        self.numbers: list[Number] = []
        self._template: SectionTemplate | None = None

    def find(self, key: object) -> SectionTemplate | None:
        """Returns what was recorded under an equal key, if there is such a thing."""
        return self._template if self._template is not None and self.key == key else None

    def keep(self, key: object, template: SectionTemplate | None) -> None:
        """Replaces what is prepared; None forgets it."""
        self.key, self._template = (None, None) if template is None else (key, template)


class HostValue(NamedTuple):
    """A contribution that is an array of a replica, as it travels; to a section the same as a `LocalValue`.

    Attributes:
        weight: by how much it counts.
        array: contiguous, on the host, or on its way there; None where the weight is 0.
    """

    weight: float
    array: Array | Pending | None

    def cut(self, sharding: Sharding) -> list[HostValue]:
        """Returns the contribution to each shard of a partitioned variable."""
        array = cast(Array | None, self.array)
        return [HostValue(self.weight, None if array is None else array[rows]) for rows in sharding.bounds]


def as_it_travels(value: Any, reduction: Reduction) -> HostValue | None:
    """Returns the contribution of a replica's value to a reduction, if it travels as it is, or is nothing, or comes."""
    if isinstance(value, Absent):
        return HostValue(0.0, None)
    if isinstance(value, Coming):
        return HostValue(1.0, value)
    spec = reduction.tensor
    travels = (
        reduction.form == "dense"
        and isinstance(value, np.ndarray)
        and type(value) in (np.ndarray, HostArray)  # a class of the user's may mean something else
        and value.shape == spec.shape
        and value.dtype == DTYPES[spec.dtype]
        and value.flags.c_contiguous
    )
    return HostValue(1.0, value) if travels else None
