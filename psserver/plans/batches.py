"""Batches: successive applications of one kernel, each to variables of its own.

Where a plan updates many variables alike, an application in a round is a kernel call with other addresses.
`psserver/execution/calls.py` finds the addresses of all of them at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import numpy as np

from psserver.plans.layout import Numbers
from psserver.plans.outline import Application
from psserver.programs.kernels import rows
from psserver.programs.kernels.codegen import Parameter, SumTerm
from psserver.programs.kernels.kernels import Kernels, Stage
from pswire.model.plan import Plan, Ref
from pswire.model.tensor import DTYPES

MAX_PARTS = 8
"""Most contributions that one kernel sums; more are summed before it runs."""


class CallColumn:
    """One parameter of a batch's kernel: a column of the table of its calls.

    Args:
        place: the number of the column. The first one is the sizes'.
        parameter: the parameter.
        refs: the value that it takes in each application.

    Attributes:
        numbers: the values' numbers in their lists, int64.
        variables: the same as a list if all are variables; else None.
        shared: the only value; None if there are several.
    """

    def __init__(self, place: int, parameter: Parameter, refs: Sequence[Ref]) -> None:
        self.place, self.parameter, self.refs = place, parameter, refs
        indices = [ref.index for ref in refs]
        self.numbers = np.array(indices, np.int64)
        self.variables = indices if all(ref.kind == "variable" for ref in refs) else None
        self.shared = refs[0] if len(set(refs)) == 1 else None


class KernelBatch:
    """Successive applications of one kernel.

    Args:
        first: the number of the first application, among those of the server.
        applications: the applications, in order.
        stages: the only stage of each application.

    Attributes:
        stop: the number after the last application's.
        kernel: the kernel.
        columns: the parameters of the kernel.
        strides: for each of them, bytes between two elements; 0 for a single one.
        table: for each application a row with the number of elements that it computes, and room for the addresses that
            the kernel takes; int64.
        assigned: for each application, the variables that it assigns.
        reductions: for each application, the reductions that it needs; shape `[applications, reductions]`, int64.
        nbytes: for each application, the bytes that one member contributes to it, int64.
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
        self.columns = [
            CallColumn(
                place, p, [a.apply.args[s.step.args[p.value]] for a, s in zip(applications, stages, strict=True)]
            )
            for place, p in enumerate(self.kernel.parameters, 1)
        ]
        self.strides = [0 if p.single else DTYPES[p.dtype].itemsize for p in self.kernel.parameters]
        self.table: Numbers = np.zeros((len(applications), 1 + len(self.columns)), np.int64)
        self.table[:, 0] = [prod(stage.step.shape or ()) for stage in stages]


@dataclass(frozen=True)
class PlanKernels:
    """How the kernels that a server has now run a plan.

    Attributes:
        batches: the batches, each under the numbers of all its applications.
        settled: True if this is final, since all kernels are compiled.
        interpreted: True if the interpreter runs some application on arrays, or may do so for now.
    """

    batches: Mapping[int, KernelBatch]
    settled: bool
    interpreted: bool


def plan_kernels(plan: Plan, applications: Sequence[Application], kernels: Kernels, count: int) -> PlanKernels:
    """Finds out how kernels run a plan.

    Args:
        plan, applications: the plan, and a server's applications of it.
        kernels: the kernels that run them.
        count: number of contributors to each reduction.
    """
    summed = count <= MAX_PARTS
    sums = [
        {number: SumTerm(plan.reductions[index].op, count) for number, index in a.unshared if summed}
        for a in applications
    ]
    # First: a kernel that is compiled meanwhile would be in the batches of some applications, and of others not.
    settled = all(
        kernels.settled(a.program, each) if a.rows is None else rows.is_settled(kernels, a.rows.program)
        for a, each in zip(applications, sums, strict=True)
        if a.distinct and a.measured is None
    )
    found = list(_batches(applications, sums, kernels)) if summed else []
    numbered = {number: each for each in found for number in range(each.first, each.stop)}
    in_kernels = settled and all(map(partial(_runs_in_kernels, kernels), applications, sums))
    return PlanKernels(numbered, settled, not in_kernels)


def _runs_in_kernels(kernels: Kernels, application: Application, sums: Mapping[int, SumTerm]) -> bool:
    if application.measured is not None or not any(spec.shape for spec in application.program.specs):
        return True  # to interpret numbers takes no longer than to call a kernel; nor do a few rows that are read once
    if application.rows is not None:
        return rows.kernel_of(kernels, application.rows.program) is not None
    stages = kernels.stages(application.program, application.reduced, sums) if application.distinct else ()
    return bool(stages) and all(stage.kernel is not None for stage in stages)


def _batches(
    applications: Sequence[Application], sums: Sequence[Mapping[int, SumTerm]], kernels: Kernels
) -> Iterator[KernelBatch]:
    run = _Successive()
    for number, application in enumerate(applications):
        stage = _stage(application, kernels, sums[number])
        if stage is None or not run.takes(application, stage):
            yield from run.batches(number)
            run = _Successive()
        if stage is not None:
            run.add(application, stage)
    yield from run.batches(len(applications))


def _stage(application: Application, kernels: Kernels, sums: Mapping[int, SumTerm]) -> Stage | None:
    """Returns the stage of an application that is one kernel call writing variables in place; else None."""
    if not application.distinct or not application.reduced or application.program.outputs:
        return None
    if application.rows is not None:
        return None
    first, *others = kernels.stages(application.program, application.reduced, sums)
    unshared = set(first.parts.values()).issuperset(application.reduced)
    return first if unshared and first.kernel and not (others or first.step.kept) else None


class _Successive:
    """Successive applications that may become a batch."""

    def __init__(self) -> None:
        self.applications: list[Application] = []
        self.stages: list[Stage] = []
        self.written: set[int] = set()
        self.read: set[int] = set()

    def takes(self, application: Application, stage: Stage) -> bool:
        """Returns True if one more may follow: it has the same kernel, and the order does not matter."""
        if not self.stages:
            return True
        known, new = self.stages[0].kernel, stage.kernel
        same = known is not None and new is not None and known.function is new.function
        read = {id for id, *_ in application.variables}
        return same and self.written.isdisjoint(read) and self.read.isdisjoint(application.assigned)

    def add(self, application: Application, stage: Stage) -> None:
        """Adds one more."""
        self.applications.append(application)
        self.stages.append(stage)
        self.written.update(application.assigned)
        self.read.update(id for id, *_ in application.variables)

    def batches(self, stop: int) -> list[KernelBatch]:
        """Returns the batch, if there is an application; `stop` is the number of the next one."""
        count = len(self.applications)
        return [KernelBatch(stop - count, self.applications, self.stages)] if count else []
