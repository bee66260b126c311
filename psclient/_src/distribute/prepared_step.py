"""A recorded section, reusable with new contributions and scalar operands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from psclient._src.distribute.strands import Marks
from psclient._src.tracing.symbolic_numbers import Number
from psclient._src.tracing.update_function import Trace
from psclient._src.variables.feedback import Feedback
from pswire.model.plan import Plan
from pswire.model.tensor import Array


class SectionTemplate:
    """A recorded section. Used by one thread at a time.

    Args:
        plan: as it travels.
        written: ids of the variables that it assigns.
        traces: of its update functions, each with whether there were numbers among its arguments.
        sources: for each operand of the plan, of which trace it is which input.
        feedback: for each reduction what compresses contributions to it; None where they travel as they are.
        marks: what of it each worker makes alone; None where that was not asked.
    """

    def __init__(
        self,
        plan: Plan,
        written: frozenset[int],
        traces: Mapping[Trace, bool],
        sources: Sequence[tuple[Trace, int]],
        feedback: tuple[Feedback | None, ...],
        marks: Marks | None = None,
    ) -> None:
        self.plan, self.written, self.feedback, self.marks = plan, written, feedback, marks
        self._traces, self._sources = traces, sources
        self._around = [trace.around for trace in traces if trace.around.reads]
        self._numbers: list[Number] | None = None
        self._operands: tuple[Array, ...] = ()  # for these numbers

    def operands(self, numbers: list[Number]) -> tuple[Array, ...] | None:
        """Returns the operands for other numbers; None where an update function would record something else.

        The same list always has the same numbers.
        """
        for around in self._around:
            if not around.unchanged():
                return None
        if numbers is not self._numbers:
            found: dict[Trace, list[Array | None]] = {}
            for one, takes in self._traces.items():
                arrays = one.operands(numbers if takes else [])
                if arrays is None:
                    return None
                found[one] = arrays
            self._operands = cast(tuple[Array, ...], tuple([found[one][place] for one, place in self._sources]))
            self._numbers = numbers
        return self._operands


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


class OwnContributions(NamedTuple):
    """This process's contributions to the reductions of a section.

    Attributes:
        weights: for each reduction, by how much the contribution counts.
        arrays: for each reduction, the contribution as it travels: contiguous, on the host, or on its way there; None
            where the weight is 0.
    """

    weights: Sequence[float]
    arrays: Sequence[Any]
