"""Compiled rounds: tables of kernel calls that know every argument but the addresses of the contributions.

A training loop makes the same round thousands of times, and only the bytes of the contributions are new. So a
compiled round does not read its plan again; it only checks that the variables are still where they were. `Execution`
runs every other round.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, call, is_
from typing import Any

import numpy as np

from psserver.devices import owned
from psserver.execution.contributions import reduce
from psserver.plans.batches import CallColumn, KernelBatch
from psserver.plans.layout import ContributionLayout, Numbers
from psserver.plans.outline import Application
from psserver.plans.prepared import PreparedPlan
from psserver.plans.round import MemberShare
from psserver.programs.interpreter import Script
from psserver.programs.kernels.kernels import Kernels
from psserver.programs.kernels.launch import Crew
from psserver.values.step import StepVariables
from psserver.values.value import Value
from pswire.model.plan import Ref
from pswire.model.tensor import DTYPES, Array, TensorSpec, address_of

MAX_COMPILED = 16
"""Most compiled rounds of a plan, one for each kind of contributions; beyond it, it forgets all of them."""

NEVER, ONCE = "never", "once"
"""How often a kind of round that is not compiled has come."""

_ARRAY = attrgetter("array")

Weights = tuple[tuple[float, ...], ...]
"""The weights of each contributor."""


class NotCompiledError(Exception):
    """A plan's rounds are not of the kind that compiles."""


@dataclass(frozen=True)
class CompiledOutcome:
    """Results of a compiled round.

    Attributes:
        values: returned values, in order.
        flags: numbers of the applications in which a kernel saw NaN or infinity, each with its flags.
    """

    values: Sequence[Array]
    flags: Sequence[tuple[int, int]]


class _Table:
    """The calls of one kernel.

    Args:
        batch: the kernel and its applications.
        layouts: the layout of each contribution.
        weights: the weights of each contributor.
    """

    def __init__(self, batch: KernelBatch, layouts: Sequence[ContributionLayout], weights: Weights) -> None:
        self.batch = batch
        self.table = batch.table.copy()
        self.variables: list[tuple[CallColumn, Sequence[int]]] = []
        self.results: list[CallColumn] = []
        self.sent: list[tuple[int, int, Numbers]] = []  # column, contributor, and offsets in its payload
        self._totals: list[Array] = []
        for column in batch.columns:
            self._fill(column, layouts, weights)

    def _fill(self, column: CallColumn, layouts: Sequence[ContributionLayout], weights: Weights) -> None:
        place, parameter = column.place, column.parameter
        kinds = {ref.kind for ref in column.refs}
        if parameter.role == "part":
            layout = layouts[parameter.place]
            if not layout.ends[column.numbers].all():
                raise NotCompiledError("somebody contributes nothing to some reductions")
            self.sent.append((place, parameter.place, layout.starts[column.numbers]))
        elif parameter.role == "total":
            sums = [sum([each[number] for each in weights]) for number in column.numbers.tolist()]
            totals = np.array(sums, DTYPES[parameter.dtype])
            self._totals.append(totals)
            self.table[:, place] = address_of(totals) + np.arange(len(sums)) * totals.itemsize
        elif column.variables is not None:
            self.variables.append((column, column.variables))
        elif kinds == {"operand"}:
            self.sent.append((place, 0, np.array([layouts[0].of[ref][0] for ref in column.refs], np.int64)))
        elif kinds == {"result"}:
            self.results.append(column)
        else:
            raise NotCompiledError(f"a kernel takes {', '.join(sorted(kinds))} for one parameter")

    def run(self, crew: Crew, bases: Sequence[int], known: Mapping[Ref, Array]) -> list[tuple[int, int]]:
        """Runs the calls; returns the numbers of applications with flags, as `CompiledOutcome` has them."""
        table = self.table
        for place, sender, starts in self.sent:
            np.add(starts, bases[sender], out=table[:, place])
        for column in self.results:
            if column.shared is not None:
                table[:, column.place] = address_of(known[column.shared])
            else:
                table[:, column.place] = [address_of(known[ref]) for ref in column.refs]
        found = crew.run_table(self.batch.kernel.function, table, self.batch.strides)
        return [(self.batch.first + row, flags) for row, flags in found] if found else []


class CompiledRound:
    """The rounds of a plan with one kind of contributions. Used by one thread at a time.

    Args:
        prepared: the plan.
        parts: the contributions, all of them with examples.
        kernels: the kernels, which are final.

    Raises:
        NotCompiledError: its rounds are not of this kind.
    """

    def __init__(self, prepared: PreparedPlan, parts: Sequence[MemberShare], kernels: Kernels) -> None:
        settled = prepared.settled(kernels, len(parts))
        plan, outline = prepared.plan, prepared.outline
        if settled is None or kernels.device.gpu is not None:
            raise NotCompiledError("kernels may still come, or are on a GPU")
        if prepared.orders or prepared.tables or prepared.trims or plan.rows or plan.compressed:
            raise NotCompiledError("it does more than to sum and to update whole variables")
        self.weights = tuple([part.said.weights for part in parts])
        layouts = [prepared.layout(part.said) for part in parts]
        self._sizes = [layout.size for layout in layouts]
        self._operands = layouts[0].operands
        self._kernels = kernels
        self._outline = outline
        self._tables: list[_Table] = []
        self._numbers: list[tuple[Application, Script]] = []
        for number, application in enumerate(outline.applications):
            batch = settled.batches.get(number)
            if batch is None:
                if not application.of_numbers or application.program.may_refuse:
                    raise NotCompiledError("the interpreter computes more than numbers")
                self._numbers.append((application, kernels.whole(application.program).script))
            elif batch.first == number:
                self._tables.append(_Table(batch, layouts, self.weights))
        self._written = frozenset(id for each in self._tables for ids in each.batch.assigned for id in ids)
        self._read = list(dict.fromkeys(id for each in self._tables for _, ids in each.variables for id in ids))
        refs = [ref for each, _ in self._numbers for ref in each.apply.args if ref.kind == "variable"]
        self._counts = {ref: ref.index for ref in refs}  # the variables that are numbers
        self._known: list[weakref.ref[Array]] = []
        self._taken = [
            (ref, operand.tensor, layouts[0].of[ref][0])
            for ref, operand in prepared.operands
            if any(ref in each.apply.args for each, _ in self._numbers)
        ]
        self._sent = b""  # the operands of the last round
        self._operand_values: dict[Ref, Array] = {}
        self._given = [self._reduced(ref, prepared, layouts) for ref in outline.given]

    def _reduced(
        self, ref: Ref, prepared: PreparedPlan, layouts: Sequence[ContributionLayout]
    ) -> tuple[Ref, Any, list[int]]:
        """Returns a returned value, its reduction, and where the contributions to it lie; -1 for none."""
        if ref.kind != "reduction":
            return ref, None, []
        return ref, prepared.plan.reductions[ref.index], [each.of[ref][0] if ref in each.of else -1 for each in layouts]

    def run(self, parts: Sequence[MemberShare], variables: StepVariables) -> CompiledOutcome | None:
        """Runs the round; returns None, and does nothing, where it is not as it was compiled.

        Args:
            parts: the contributions, as many as before, with the same weights.
            variables: those that the plan reads and assigns.
        """
        sent, end = list[memoryview](), self._operands
        for part, size in zip(parts, self._sizes, strict=True):
            chunks = part.payload.chunks
            if not chunks or chunks[0][0] or len(chunks[0][1]) != size:
                return None  # not here in one piece
            data = chunks[0][1]
            if sent and end and data[:end] != sent[0][:end]:
                return None  # the general road says who differs
            sent.append(data)
        if not variables.exclusive >= self._written or (variables.is_lazy and self._is_behind(variables)):
            return None
        counts: list[Any] = list(map(variables.before.get, self._counts.values()))
        if None in counts or not self._stand(variables):
            return None
        if self._taken and self._sent != sent[0][:end]:
            self._sent = bytes(sent[0][:end])
            self._operand_values = {ref: _tensor(memoryview(self._sent), spec, at) for ref, spec, at in self._taken}
        known = dict(self._operand_values)
        if self._numbers:
            variables.assign(self._compute(known, counts))
        bases = [address_of(np.frombuffer(each, np.uint8)) if len(each) else 0 for each in sent]
        given = [self._value(*one, sent, known) for one in self._given]
        variables.assign({id: variables.before[id] for id in self._written})
        flags: list[tuple[int, int]] = []
        for table in self._tables:  # at last: what may fail comes before anything is written
            flags += table.run(self._kernels.crew, bases, known)
        return CompiledOutcome(given, flags)

    def _compute(self, known: dict[Ref, Array], counts: Sequence[Value]) -> dict[int, Value]:
        """Computes numbers of numbers, as the interpreter does it, since a kernel may round them otherwise.

        Args:
            known: operands; gets the results.
            counts: the variables that are numbers.

        Returns:
            Those of them that are assigned.
        """
        now = dict(zip(self._counts, counts, strict=True))
        known |= {ref: value.array for ref, value in now.items()}
        assigned: dict[int, Value] = {}
        self._kernels.interpretations += len(self._numbers)
        with np.errstate(all="ignore"):
            for each, script in self._numbers:
                args = each.apply.args
                found, outputs = script.compute(list(map(known.__getitem__, args)), np)
                for target, array in found.items():
                    ref = args[target]
                    known[ref], assigned[ref.index] = array, now[ref].replaced(array)
                known.update(zip(each.made, outputs, strict=True))
        return assigned

    def _is_behind(self, variables: StepVariables) -> bool:
        """Returns whether updates of some rows are deferred, and have to be made first."""
        values = map(variables.before.get, self._outline.reads)
        return any(value is None or value.group is not None for value in values)

    def _stand(self, variables: StepVariables) -> bool:
        """Returns whether the arrays are those of before; takes them where they are others, if kernels can."""
        values: list[Any] = list(map(variables.before.get, self._read))
        if None in values:
            return False
        arrays = list(map(_ARRAY, values))
        if len(self._known) == len(arrays) and all(map(is_, map(call, self._known), arrays)):
            return True
        for application in self._outline.applications:
            variables.check(application.variables)
        if False in [array.flags.c_contiguous for array in arrays]:
            return False
        addresses = dict(zip(self._read, map(address_of, arrays), strict=True))
        for each in self._tables:
            for column, ids in each.variables:
                each.table[:, column.place] = [addresses[id] for id in ids]
        # Weakly: else the store were not the only holder of its arrays, and nothing were written in place.
        self._known = list(map(weakref.ref, arrays))
        return True

    def _value(
        self, ref: Ref, reduction: Any, starts: Sequence[int], sent: Sequence[Any], known: Mapping[Ref, Array]
    ) -> Array:
        if reduction is None:
            return owned(known[ref])
        spec = TensorSpec(reduction.tensor.dtype, (reduction.tensor.size,))
        each = zip(self.weights, starts, sent, strict=True)
        pieces = [(weights[ref.index], [_tensor(data, spec, at)] if at >= 0 else []) for weights, at, data in each]
        return owned(reduce(reduction.op, reduction.tensor, pieces))


def compiled(prepared: PreparedPlan, parts: Sequence[MemberShare], kernels: Kernels) -> CompiledRound | None:
    """Returns how rounds of a plan run with such contributions; None where they are not compiled, or not yet."""
    known, key = prepared.compiled, (kernels, tuple([part.said.weights for part in parts]))
    found: Any = known.get(key, NEVER)
    if found is NEVER:
        if prepared.settled(kernels, len(parts)) is not None:
            if len(known) >= MAX_COMPILED:
                known.clear()
            known[key] = ONCE  # perhaps it stays so, where each round has other weights
        return None
    if found is ONCE:
        try:
            found = CompiledRound(prepared, parts, kernels)
        except NotCompiledError:
            found = None
        known[key] = found
    made: CompiledRound | None = found
    return made


def _tensor(data: memoryview, spec: TensorSpec, at: int) -> Array:
    return np.frombuffer(data, DTYPES[spec.dtype], spec.size, at).reshape(spec.shape)
