"""The outline of a plan: the steps of a round on one server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np

from psserver.programs.kernels.fusion import Step, split
from psserver.programs.kernels.rows import divided
from pswire.model.plan import LATER, Apply, Plan, Reduction, Ref
from pswire.model.program import Program
from pswire.model.row_updates import keeps_rows
from pswire.model.tensor import DTYPES


@dataclass(frozen=True, eq=False)
class RowsUse:
    """The rows on which an application runs.

    Attributes:
        reduction: the number of the reduction.
        program: the program; of a mean it takes the sum, and divides it by one more input, the sum of the weights.
        tables: numbers of the variables that are its tables, in order, if other rows miss an update that they are to
            have later; else empty.
        closed: True if these may be made up by a closed form.
        keyed: True if its tables are dynamic, and rows are given by keys.
    """

    reduction: int
    program: Program
    tables: tuple[int, ...] = ()
    keyed: bool = False
    closed: bool = False


@dataclass(frozen=True, eq=False)
class Application:
    """One application of a program, as a server runs it in each round.

    Attributes:
        apply: the plan's entry.
        program: the applied program.
        distinct: True if no two of its inputs are the same value.
        variables: number, dtype and shape of each variable among its inputs.
        reduced: indices of its inputs that are reductions.
        needs: the numbers of these reductions.
        assigned: the numbers of the variables that it assigns.
        unshared: inputs that are reductions with no other reader in the plan, each with the reduction's number.
        read: inputs that are results of other applications.
        made: its results.
        rows: the rows on which it runs; None if it runs on whole variables.
        measured: number of the reduction of whose rows alone it computes numbers; None if it is no such application.
        beside: the numbers of the reductions to one of which somebody has to contribute, if it may be left out.
    """

    apply: Apply
    program: Program
    distinct: bool
    variables: tuple[tuple[int, np.dtype[Any], tuple[int, ...]], ...]
    reduced: tuple[int, ...]
    needs: tuple[int, ...]
    assigned: tuple[int, ...]
    unshared: tuple[tuple[int, int], ...]
    read: tuple[Ref, ...]
    made: tuple[Ref, ...]
    rows: RowsUse | None = None
    measured: int | None = None
    beside: tuple[int, ...] = ()

    @property
    def of_numbers(self) -> bool:
        """True if it computes numbers of numbers, and no contribution is among them."""
        rows = self.rows is not None or self.measured is not None
        return not (rows or self.reduced or any(spec.shape for spec in self.program.specs))


@dataclass(frozen=True, eq=False)
class Outline:
    """The steps of a round of a plan on one server.

    Attributes:
        applications: the applications, in order.
        given: returned values, after all applications.
        needs: for each step, an application or a returned value, the numbers of the reductions that it needs.
        reads: numbers of the variables that applications read or assign.
        uses: number of readers of each reduction.
        readers: number of readers of each result.
        last: for each assigned variable, the number of the last application that assigns it.
        watched: numbers of the reductions that reach a variable.
        results: True if an application has results.
        optional: numbers of the applications that are left out where nobody contributes to them.
    """

    applications: tuple[Application, ...]
    given: tuple[Ref, ...]
    needs: tuple[tuple[int, ...], ...]
    reads: frozenset[int]
    uses: Counter[int]
    readers: Counter[Ref]
    last: Mapping[int, int]
    watched: frozenset[int]
    results: bool
    optional: frozenset[int]


def outline(plan: Plan, server: int) -> Outline:
    """Computes the outline of a verified plan on a server."""
    given = tuple(ref for ref, _ in plan.given(server))
    # The number of each application's first result.
    firsts = accumulate((len(plan.programs[apply.program].outputs) for apply in plan.applies), initial=0)
    every = zip(plan.applies, firsts, plan.by_rows, plan.measured, strict=False)
    here = [each for each in every if server in each[0].servers]
    used = [ref for apply, *_ in here for ref in apply.args] + list(given)
    uses = Counter(ref.index for ref in used if ref.kind == "reduction")
    made = sum(len(plan.programs[apply.program].outputs) for apply in plan.applies)
    applications = tuple(_Numbers(made, server in plan.streams).apart(_application(plan, *item, uses) for item in here))
    readers = Counter(ref for each in applications for ref in each.read)
    readers.update(ref for ref in given if ref.kind == "result")
    last = {id: number for number, application in enumerate(applications) for id in application.assigned}
    needs = tuple(application.needs for application in applications)
    needs += tuple((ref.index,) if ref.kind == "reduction" else () for ref in given)
    reads = frozenset(id for application in applications for id, *_ in application.variables)
    watched = frozenset(index for application in applications for index in application.needs)
    results = any(application.made for application in applications)
    optional = frozenset(number for number, application in enumerate(applications) if application.apply.optional)
    return Outline(applications, given, needs, reads, uses, readers, last, watched, results, optional)


class _Numbers:
    """Numbers that programs compute of numbers, such as Adam's corrections: those of several variables only once.

    A program that is left without them is elementwise, so a kernel takes all its applications in one call.

    Args:
        made: how many results the plan's programs have; the numbers come after them.
        streams: True if a contribution may be lost in the middle of a round, after numbers that go with it.
    """

    def __init__(self, made: int, streams: bool) -> None:
        self._made, self._streams = made, streams
        self._steps: dict[int, tuple[Step, ...]] = {}  # of each of the plan's programs
        self._known: dict[tuple[Program, tuple[tuple[Ref, int], ...]], tuple[Ref, ...]] = {}
        self._assigned = Counter[int]()

    def apart(self, applications: Iterable[Application]) -> Iterator[Application]:
        """Yields applications: those that compute numbers of numbers first, as far as the others leave them alone."""
        others, read, assigned, made = list[Application](), set[int](), set[int](), set[Ref]()
        for whole in applications:
            steps = self._split(whole)
            for each in (whole,) if steps is None else self._cut(whole, *steps):
                variables = {ref.index for ref in each.apply.args if ref.kind == "variable"}
                follows = variables & assigned or made.intersection(each.read) or read.intersection(each.assigned)
                if each.of_numbers and not (each.apply.optional or follows):
                    yield each
                    continue
                others.append(each)
                read |= variables
                assigned.update(each.assigned)
                made.update(each.made)
            self._assigned.update(whole.assigned)
        yield from others

    def _split(self, each: Application) -> tuple[Step, Step] | None:
        """Returns the step that computes numbers, and the elementwise rest; None where there are no such two."""
        if each.rows is not None or each.measured is not None or each.program.outputs:
            return None
        if (steps := self._steps.get(each.apply.program)) is None:
            steps = self._steps[each.apply.program] = split(each.program)
        if len(steps) != 2 or steps[1].shape is None or steps[0].kept or steps[1].kept:
            return None
        numbers = steps[0].program
        if numbers.assigns and each.apply.optional and self._streams:
            return None
        scalar = not (numbers.may_refuse or any(spec.shape for spec in numbers.specs))
        given = all(each.apply.args[number].kind != "reduction" for number in steps[0].args)
        return (steps[0], steps[1]) if scalar and given else None

    def _cut(self, each: Application, numbers: Step, rest: Step) -> Iterator[Application]:
        args = each.apply.args
        taken = tuple(args[number] for number in numbers.args)
        # A variable that was assigned since has another value.
        key = numbers.program, tuple((ref, self._assigned[ref.index] * (ref.kind == "variable")) for ref in taken)
        assigns = bool(numbers.program.assigns)
        found = None if assigns else self._known.get(key)
        if found is None:
            results = range(self._made, self._made + len(numbers.results))
            found = self._known[key] = tuple(Ref("result", index) for index in results)
            self._made = results.stop
            apply = replace(each.apply, args=taken, optional=each.apply.optional and assigns)
            yield replace(_applied(apply, numbers.program, {}, found), beside=each.beside)
        of = dict(zip(numbers.results, found, strict=True))
        left = tuple(of[number] if number in of else args[number] for number in rest.args)
        unshared = dict(each.unshared)
        summed = {place: unshared[number] for place, number in enumerate(rest.args) if number in unshared}
        yield _applied(replace(each.apply, args=left), rest.program, summed)


def _application(
    plan: Plan, apply: Apply, first: int, rows: int | None, measured: int | None, uses: Mapping[int, int]
) -> Application:
    program = plan.programs[apply.program]
    given = [(i, ref.index) for i, ref in enumerate(apply.args) if ref.kind == "reduction"]
    unshared = {i: n for i, n in given if uses[n] == 1 and _is_summed(plan.reductions[n])}
    made = tuple(Ref("result", first + number) for number in range(len(program.outputs)))
    use = None if rows is None else _rows_use(plan.reductions[rows], rows, program, apply)
    return _applied(apply, program, unshared, made, use, measured)


def _applied(
    apply: Apply,
    program: Program,
    unshared: Mapping[int, int],
    made: tuple[Ref, ...] = (),
    rows: RowsUse | None = None,
    measured: int | None = None,
) -> Application:
    args = apply.args
    specs = [item.spec for item in program.inputs]
    reduced = tuple(i for i, ref in enumerate(args) if ref.kind == "reduction")
    return Application(
        apply,
        program,
        len(set(args)) == len(args),
        tuple(
            (ref.index, DTYPES[spec.dtype], spec.shape)
            for ref, spec in zip(args, specs, strict=True)
            if ref.kind == "variable"
        ),
        reduced,
        tuple(args[i].index for i in reduced),
        tuple(args[target].index for target, _ in program.assigns),
        tuple(unshared.items()),
        tuple(ref for ref in args if ref.kind == "result"),
        made,
        rows,
        measured,
        tuple(args[i].index for i in reduced),
    )


def _rows_use(reduction: Reduction, number: int, program: Program, apply: Apply) -> RowsUse:
    given = apply.args.index(Ref("reduction", number))
    misses = apply.sparse in LATER and not keeps_rows(program, [given])
    shaped = zip(apply.args, program.inputs, strict=True)
    tables = tuple(ref.index for ref, item in shaped if misses and ref.kind == "variable" and item.spec.shape)
    summed = divided(program, given) if reduction.op == "mean" else program
    return RowsUse(number, summed, tables, reduction.form == "keys", apply.sparse == "closed")


def _is_summed(reduction: Reduction) -> bool:
    """Returns True if a kernel may sum contributions to it, element by element, as they travel."""
    return reduction.op != "first" and reduction.form == "dense" and reduction.codec is None
