"""Applications that one kernel makes one after another, each to variables of its own.

Where a plan updates many variables alike, what a round does for each of them is a call of a kernel with other
addresses. The addresses are found for all of them at once, without Python for each variable, as long as nothing is in
the way: every contribution is there in one piece, and nobody holds the variables, so that they are written in place.
Else the applications are made as `Call`s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from psserver.execution.calls import MAX_PARTS
from psserver.execution.senders import Sender
from psserver.plans.prepared import Application, Outline
from psserver.programs.kernels.codegen import Parameter, Sum
from psserver.programs.kernels.kernels import Kernels, Stage
from psserver.programs.kernels.launch import Crew, address_of
from pswire.model.plan import Plan, Ref
from pswire.model.tensor import DTYPES, Array


class Batch:
    """Successive applications of one kernel.

    Args:
        first: the number of the first one, among those of the server.
        applications: these.
        stages: the only stage of each.

    Attributes:
        stop: the number behind the last one.
        kernel: what makes them.
        sizes: for each of them the elements that it computes.
        refs: for each parameter of the kernel what it is, of each of them.
        assigned: for each of them the variables that it assigns.
        reductions: for each of them the reductions that it needs.
        nbytes: for each of them the bytes that one member contributes to it.
    """

    def __init__(self, first: int, applications: Sequence[Application], stages: Sequence[Stage]) -> None:
        self.first, self.stop = first, first + len(applications)
        self.assigned = [application.assigned for application in applications]
        self.reductions = np.array([application.needs for application in applications], np.int64)
        reduced = [sum(a.program.inputs[number].spec.nbytes for number in a.reduced) for a in applications]
        self.nbytes = np.array(reduced, np.int64)
        stage = stages[0]
        assert stage.kernel is not None
        self.kernel = stage.kernel
        self.sizes = [prod(stage.step.shape or ()) for stage in stages]
        self.refs = {
            parameter: [a.apply.args[s.step.args[parameter.value]] for a, s in zip(applications, stages, strict=True)]
            for parameter in self.kernel.parameters
        }

    def ready(self, low: int, high: int, senders: Sequence[Sender]) -> Ready | None:
        """Some of the applications, if all contributions to them are there, each in one piece.

        Args:
            low, high: which, counted from the first.
            senders: who contributes.
        """
        found: dict[Parameter, Sequence[int]] = {}
        for parameter, refs in self.refs.items():
            if parameter.role == "part":
                where = senders[parameter.place].addresses(np.array([ref.index for ref in refs[low:high]]))
                if where is None:
                    return None
                found[parameter] = where.tolist()
        return Ready(self, low, high, found)


class Ready:
    """Applications of a batch that can be made. Nothing of it can fail.

    Args:
        batch: of which.
        low, high: which, counted from the first.
        contributions: where they are, for each parameter of the kernel that is one.

    Attributes:
        numbers: of the applications, among those of the server.
        width: as of a `Call`.
    """

    width = 1

    def __init__(self, batch: Batch, low: int, high: int, contributions: Mapping[Parameter, Sequence[int]]) -> None:
        self.numbers = range(batch.first + low, batch.first + high)
        self._batch = batch
        self._rows = slice(low, high)
        self._contributions = contributions

    @property
    def assigned(self) -> list[int]:
        """Numbers of the variables that it assigns."""
        return [id for ids in self._batch.assigned[self._rows] for id in ids]

    def run(self, crew: Crew, totals: Callable[[int], float], value: Callable[[Ref], Any]) -> list[tuple[int, int]]:
        """Runs the kernel, which writes the variables in place: nobody else may hold them.

        Args:
            crew: the threads for it.
            totals: gives the sum of the weights of a reduction.
            value: gives the array of a variable, an operand or a result.

        Returns:
            Numbers of the applications in which the kernel saw NaN or infinity, and what it returned; one may be there
            several times.
        """
        held: list[Array] = []  # while the kernel runs
        columns: list[Sequence[int]] = [self._batch.sizes[self._rows]]
        for parameter, refs in self._batch.refs.items():
            if parameter.role == "part":
                columns.append(self._contributions[parameter])
            elif parameter.role == "total":
                columns.append(_totals([totals(ref.index) for ref in refs[self._rows]], parameter, held))
            else:
                columns.append(_arrays(refs[self._rows], value, held))
        calls = list(zip(*columns, strict=True))
        strides = [0 if p.single else DTYPES[p.dtype].itemsize for p in self._batch.refs]
        runs, places = crew.cut(calls, strides)
        found = crew.run(self._batch.kernel.function, runs)
        if not any(found):
            return []
        return [(self.numbers[place], flags) for place, flags in zip(places, found, strict=True) if flags]


def _totals(totals: Sequence[float], parameter: Parameter, held: list[Array]) -> range:
    held.append(np.array(totals, DTYPES[parameter.dtype]))
    first = address_of(held[-1])
    return range(first, first + held[-1].nbytes, held[-1].itemsize)


def _arrays(refs: Sequence[Ref], value: Callable[[Ref], Any], held: list[Array]) -> list[int]:
    known = {ref: np.ascontiguousarray(value(ref)) for ref in dict.fromkeys(refs)}
    held += known.values()
    addresses = {ref: address_of(array) for ref, array in known.items()}
    return [addresses[ref] for ref in refs]


def batches(plan: Plan, server: int, outline: Outline, kernels: Kernels, count: int) -> Mapping[int, Batch]:
    """The batches of a plan, each under the numbers of all its applications; remembered once all kernels are there.

    Args:
        plan, server, outline: what a round does.
        kernels: run it.
        count: how many contribute, to each reduction.
    """
    if kernels.device.gpu is not None or not 0 < count <= MAX_PARTS:
        return {}
    key = "batches", server, kernels, count
    found: Any = plan.remembered.get(key)
    if found is None:
        found = {
            number: each for each in _batches(plan, outline, kernels, count) for number in range(each.first, each.stop)
        }
        if all(kernels.settled(a.program, _sums(plan, a, count)) for a in outline.applications if a.distinct):
            plan.remembered[key] = found
    return found  # type: ignore[no-any-return]


def _sums(plan: Plan, application: Application, count: int) -> dict[int, Sum]:
    return {number: Sum(plan.reductions[index].op, count) for number, index in application.alone}


def _batches(plan: Plan, outline: Outline, kernels: Kernels, count: int) -> Iterator[Batch]:
    run = _Successive()
    for number, application in enumerate(outline.applications):
        stage = _stage(application, kernels, _sums(plan, application, count))
        if stage is None or not run.takes(application, stage):
            yield from run.batches(number)
            run = _Successive()
        if stage is not None:
            run.add(application, stage)
    yield from run.batches(len(outline.applications))


def _stage(application: Application, kernels: Kernels, sums: Mapping[int, Sum]) -> Stage | None:
    """The stage of an application that is one call of a kernel which writes variables in place, and nothing else."""
    if not application.distinct or not application.reduced or application.program.outputs:
        return None
    first, *others = kernels.stages(application.program, application.reduced, sums)
    alone = set(first.parts.values()).issuperset(application.reduced)
    return first if alone and first.kernel and not (others or first.step.kept) else None


class _Successive:
    """Applications that follow one another, and might be a batch."""

    def __init__(self) -> None:
        self.applications: list[Application] = []
        self.stages: list[Stage] = []
        self.written: set[int] = set()
        self.read: set[int] = set()

    def takes(self, application: Application, stage: Stage) -> bool:
        """Whether one more may follow: the same kernel, and their order does not matter."""
        if not self.stages:
            return True
        known, new = self.stages[0].kernel, stage.kernel
        same = known is not None and new is not None and known.function is new.function
        read = {id for id, *_ in application.variables}
        return same and self.written.isdisjoint(read) and self.read.isdisjoint(application.assigned)

    def add(self, application: Application, stage: Stage) -> None:
        """Takes one more."""
        self.applications.append(application)
        self.stages.append(stage)
        self.written.update(application.assigned)
        self.read.update(id for id, *_ in application.variables)

    def batches(self, stop: int) -> list[Batch]:
        """The batch that they are, if there are several; `stop` is the number of the one that is not among them."""
        count = len(self.applications)
        return [Batch(stop - count, self.applications, self.stages)] if count > 1 else []
