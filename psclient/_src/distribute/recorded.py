"""The programs and operands of a section, each recorded once."""

from __future__ import annotations

from collections.abc import Hashable

from psclient._src.tracing.update_function import Trace, TracedCall
from pswire.model.plan import Operand, Ref
from pswire.model.program import Program
from pswire.model.tensor import Array, spec_of


class Operands:
    """The operands of a section: calls with the same numbers share them.

    Attributes:
        arrays: their values, in order.
        sources: of those that calls share, the trace that computes each of other numbers, and its place there.
    """

    def __init__(self) -> None:
        self.arrays: list[Array] = []
        self.sources: list[tuple[Trace, int]] = []
        self._said: list[tuple[tuple[int, ...], str]] = []  # of each its servers, and its label
        self._shared: dict[tuple[Hashable, tuple[int, ...]], Ref] = {}

    def add(self, array: Array, servers: tuple[int, ...], label: str = "") -> Ref:
        """Records an operand that no other call shares."""
        self.arrays.append(array)
        self._said.append((servers, label))
        return Ref("operand", len(self.arrays) - 1)

    def share(self, call: TracedCall, place: int, key: Hashable, servers: tuple[int, ...]) -> Ref:
        """Returns the operand that is an input of a traced call.

        Args:
            call: whose input it is.
            place: of the input.
            key: of `Trace.keys`.
            servers: on which the call runs.
        """
        found = self._shared.get((key, servers))
        if found is None:
            array = call.inputs[place]
            assert not isinstance(array, tuple), "what is given is no number"
            found = self._shared[key, servers] = self.add(array, servers, call.trace.label(place))
            self.sources.append((call.trace, place))
        return found

    def said(self) -> tuple[Operand, ...]:
        """Returns them as a plan has them."""
        each = zip(self.arrays, self._said, strict=True)
        return tuple([Operand(spec_of(array), servers, label) for array, (servers, label) in each])


class Programs:
    """The programs of a section, each once."""

    def __init__(self) -> None:
        self._places: dict[Program, int] = {}
        self._numbers: dict[int, int] = {}
        self._kept: list[Program] = []  # An id is a name as long as what has it is kept.

    @property
    def all(self) -> tuple[Program, ...]:
        """The programs, by number."""
        return tuple(self._places)

    def number(self, program: Program) -> int:
        """Returns a program's number; finds the same object again without a hash."""
        found = self._numbers.get(id(program))
        if found is None:
            found = self._places.setdefault(program, len(self._places))
            self._numbers[id(program)] = found
            self._kept.append(program)
        return found
