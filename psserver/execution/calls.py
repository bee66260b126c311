"""Kernel calls of a round: one application's stages, or many applications at once, and the memory that they write.

A kernel writes into a variable's own array if nobody else holds it and no later part of the round may fail. Otherwise
it writes into new arrays, which are allocated before the round begins to write.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from psserver.execution.contributions import ContributionParts, MemberInput
from psserver.plans.batches import CallColumn, KernelBatch
from psserver.plans.outline import Application
from psserver.programs.kernels.codegen import ASSIGNED, SUMS, Parameter, Role
from psserver.programs.kernels.kernels import Kernel, Kernels, Stage
from psserver.programs.kernels.launch import Crew, PieceCopy, Pieces
from pswire.model.plan import Ref
from pswire.model.tensor import DTYPES, Array, TensorSpec, address_of

Room = dict[tuple[Role, int], Array]
"""New arrays that a stage writes: for assigned inputs, by input, and for outputs."""

Spare = Callable[[int], Array | None]
"""Returns an array for the new value of a variable, into which nobody else looks; None if there is none."""


@dataclass(frozen=True)
class Doubt:
    """NaN and infinity that a kernel on a GPU sees.

    Attributes:
        seen: two bools on the device: whether some are in reductions, and in assigned values.
        reductions: numbers of the reductions that it looks at.
        variables: numbers of the variables that it assigns.
    """

    seen: Any
    reductions: Set[int]
    variables: Set[int]


class KernelCall:
    """An application of a program in one round.

    Args:
        number: number of the application, among those of the server.
        application: the application.
        kernels: gives stages and kernels.
        parts: returns the contributions to a reduction, by its number; None where a kernel cannot sum them.
    """

    def __init__(
        self, number: int, application: Application, kernels: Kernels, parts: Callable[[int], ContributionParts | None]
    ) -> None:
        self.numbers = range(number, number + 1)
        self._application = application
        self._args = application.apply.args
        self._kernels = kernels
        found = {number: part for number, index in application.unshared if (part := parts(index)) is not None}
        sums = {number: part.combined for number, part in found.items()}
        program = application.program
        self.stages = (
            kernels.stages(program, application.reduced, sums) if application.distinct else kernels.interpreted(program)
        )
        self._parts = found
        self.suspects: Set[int] = frozenset()
        """Numbers of the reductions whose sums a kernel found not finite."""
        self.unsure: Set[int] = frozenset()
        """Numbers of the variables that it has assigned and that may not be finite."""
        self.doubts: list[Doubt] = []
        """What its kernels on a GPU have seen, or will have."""
        self._in_place: list[frozenset[int]] = [frozenset()] * len(self.stages)
        self._rooms: list[Room] = [{} for _ in self.stages]

    @property
    def width(self) -> int:
        """Number of its stages."""
        return len(self.stages)

    def target(self, stage: Stage, index: int) -> int:
        """Returns the number of the variable that is an input of a stage."""
        return self._args[stage.step.args[index]].index

    def reserve(self, safe: int, own: Set[int], fresh: Set[int], spare: Spare) -> None:
        """Decides which arrays kernels write in place, and allocates the others; on a GPU kernels allocate their own.

        Args:
            safe: the first stage from which on nothing may fail.
            own: variables whose arrays nobody else holds.
            fresh: variables whose values are new arrays of this round.
            spare: returns an array for the new value of a variable, or None: then it is allocated.
        """
        for at, stage in enumerate(self.stages):
            if stage.kernel is not None and self._kernels.device.gpu is None:
                mine = own | fresh if at >= safe else fresh
                self._in_place[at] = frozenset(
                    t for t in stage.targets - stage.step.kept if self.target(stage, t) in mine
                )
                new = {t: spare(self.target(stage, t)) for t in stage.targets - self._in_place[at]}
                self._rooms[at] = _room(stage, new)

    @property
    def judged(self) -> Set[int]:
        """Numbers of the reductions at which its kernels on a GPU look: nobody else has to."""
        if self._kernels.device.gpu is None:
            return frozenset()
        return frozenset[int]().union(*map(self._judged_by, self.stages))

    def _judged_by(self, stage: Stage) -> Set[int]:
        if stage.kernel is None:
            return frozenset()
        looked = stage.kernel.looked_at
        numbers = (number for index, number in stage.inputs if index in looked and number < len(self._args))
        return frozenset(self._args[n].index for n in numbers if self._args[n].kind == "reduction")

    @property
    def copies(self) -> bool:
        """True if some outputs are copied at the end, which takes memory."""
        outputs = self._application.program.outputs
        made = {number for stage in self.stages for number in stage.step.results}
        return len(set(outputs)) < len(outputs) or not made.issuperset(outputs)

    @property
    def assigned(self) -> set[int]:
        """Numbers of the variables that it assigns."""
        return {self.target(stage, target) for stage in self.stages for target in stage.targets}

    def run(self, value: Callable[[Ref], Any], xp: Any) -> tuple[dict[int, Any], list[Any]]:
        """Runs all stages.

        Args:
            value: returns a value of the round; called once per reduction.
            xp: the array namespace.

        Returns:
            The new value of each assigned variable, by its number, and the outputs.
        """
        known: dict[int, Any] = {}

        def get(number: int) -> Any:
            if number not in known:
                known[number] = value(self._args[number])
            return known[number]

        program = self._application.program
        if self.stages[0].step.program is program:  # interpreted as a whole: its results are the outputs
            written, outputs = self._run(0, get, xp)
            return {self._args[target].index: array for target, array in written.items()}, outputs
        assigned: dict[int, Any] = {}
        own: set[int] = set()
        for at, stage in enumerate(self.stages):
            step = stage.step
            written, results = self._run(at, get, xp)
            known.update(zip(step.results, results, strict=True))
            known.update((number, written[target]) for number, target in step.shared)
            assigned.update((self.target(stage, target), array) for target, array in written.items())
            own.update(step.results)
            for number in step.done:
                del known[number]
        outputs = []
        for number in program.outputs:
            outputs.append(get(number) if number in own else xp.array(get(number), copy=True, order="C"))
            own.discard(number)
        return assigned, outputs

    def _run(self, at: int, get: Callable[[int], Any], xp: Any) -> tuple[dict[int, Any], list[Any]]:
        stage = self.stages[at]
        step, kernel = stage.step, stage.kernel
        inputs = {index: get(number) for index, number in stage.inputs}
        if kernel is None:
            self.unsure = self.unsure | {self.target(stage, target) for target in stage.targets}
            self._kernels.interpretations += 1
            return step.script.run(list(inputs.values()), xp)
        if self._kernels.device.gpu is not None:
            began = time.perf_counter()
            seen = xp.zeros(2, dtype=np.bool_)
            done = _on_gpu(kernel, inputs, seen, xp)
            assigned = frozenset(self.target(stage, target) for target in stage.targets)
            self.doubts.append(Doubt(seen, self._judged_by(stage), assigned))
            self._kernels.crew.seconds += time.perf_counter() - began
            return done
        room, self._rooms[at] = self._rooms[at], {}  # so that they are released once nobody needs them
        arrays = [self._memory(stage, parameter, inputs, room) for parameter in kernel.parameters]
        seen = self._kernels.crew.launch(kernel.function, prod(step.shape or ()), arrays, kernel.singles)
        if seen & SUMS:
            self.suspects = self.suspects | {self._args[number].index for number in stage.parts.values()}
        if seen & ASSIGNED:
            self.unsure = self.unsure | {self.target(stage, target) for target in stage.targets}
        written = {t: inputs[t] if t in self._in_place[at] else room["array", t] for t in stage.targets}
        return written, [room["output", index] for index in range(len(step.results))]

    def _memory(self, stage: Stage, parameter: Parameter, inputs: Mapping[int, Any], room: Room) -> Pieces | PieceCopy:
        """Returns the memory that a kernel on the CPU reads or writes for a parameter."""
        index = parameter.value
        match parameter.role:
            case "part":
                return self._parts[stage.parts[index]].pieces[parameter.place]
            case "total":
                return [np.asarray(self._parts[stage.parts[index]].total, DTYPES[parameter.dtype])]
            case "output":
                return [room["output", index]]
        array = np.ascontiguousarray(inputs[index])
        if ("array", index) not in room:
            return [array]
        new = room["array", index]
        return PieceCopy(array, new) if stage.kernel and index in stage.kernel.read else [new]


def _room(stage: Stage, new: Mapping[int, Array | None]) -> Room:
    """Allocates arrays for outputs, and for inputs that are not assigned in place and for which there is none."""
    program = stage.step.program
    room: Room = {
        ("array", target): _empty(program.inputs[target].spec) if array is None else array
        for target, array in new.items()
    }
    for index, spec in enumerate(program.output_specs):
        room["output", index] = _empty(spec)
    return room


def _on_gpu(kernel: Kernel, inputs: Mapping[int, Any], seen: Any, xp: Any) -> tuple[dict[int, Any], list[Any]]:
    """Runs a kernel of CuPy, which writes `seen` as `cuda_source` says.

    Assigned values are new arrays: CuPy's memory pool makes them cheap.
    """
    program = kernel.form.program
    given = [inputs[p.value] for p in kernel.parameters if p.role != "output"]
    targets = [target for target, _ in program.assigns]
    specs = [*(program.inputs[target].spec for target in targets), *program.output_specs]
    made = [xp.empty(spec.shape, dtype=DTYPES[spec.dtype]) for spec in specs]
    kernel.function(*given, *made, seen)
    return dict(zip(targets, made, strict=False)), made[len(targets) :]


def _empty(spec: TensorSpec) -> Array:
    return np.empty(spec.shape, DTYPES[spec.dtype])


class Ready:
    """Applications of a batch that run in one call and cannot fail.

    All contributions to them are there, each in one piece, and nobody else holds their variables, which are written in
    place. Otherwise the applications run as `KernelCall`s.

    Args:
        batch: the batch.
        rows: the applications, as a slice of the batch.

    Attributes:
        numbers: numbers of the applications, among those of the server.
        assigned: numbers of the variables that they assign.
        table: the kernel's arguments, a row for each application, int64; complete once it runs.
        width: number of stages, as of a `KernelCall`.
    """

    width = 1

    def __init__(self, batch: KernelBatch, rows: slice) -> None:
        self.numbers = range(batch.first, batch.stop)[rows]
        self.assigned = [id for ids in batch.assigned[rows] for id in ids]
        self.table = batch.table[rows].copy()
        self._batch = batch
        self._rows = rows

    @classmethod
    def of(
        cls, batch: KernelBatch, at: int, stop: int, senders: Sequence[MemberInput], exclusive: Set[int]
    ) -> Ready | None:
        """Returns some of a batch's applications as one call; None if they cannot run together.

        Args:
            batch: the batch.
            at, stop: the range of their numbers, among those of the server.
            senders: the contributors.
            exclusive: variables whose arrays nobody else holds.
        """
        ready = cls(batch, slice(at - batch.first, stop - batch.first))
        return ready if exclusive >= set(ready.assigned) and ready._take(senders) else None

    def _take(self, senders: Sequence[MemberInput]) -> bool:
        """Writes the addresses of the contributions into the table; returns False if some are not in one piece."""
        for column in self._batch.columns:
            if column.parameter.role == "part":
                where = senders[column.parameter.place].addresses(column.numbers[self._rows])
                if where is None:
                    return False
                self.table[:, column.place] = where
        return True

    def run(self, crew: Crew, totals: Callable[[int], float], value: Callable[[Ref], Any]) -> list[tuple[int, int]]:
        """Runs the kernel, which writes the variables in place: nobody else may hold them.

        Args:
            crew: the threads for it.
            totals: returns the sum of the weights of a reduction.
            value: returns the array of a variable, an operand or a result.

        Returns:
            Numbers of the applications in which the kernel saw NaN or infinity, with its flags. A number may come
            several times.
        """
        held: list[Array] = []  # while the kernel runs
        for column in self._batch.columns:
            if column.parameter.role == "total":
                weights = list(map(totals, column.numbers[self._rows].tolist()))
                self.table[:, column.place] = _totals(weights, column.parameter, held)
            elif column.parameter.role != "part":
                self.table[:, column.place] = _addresses(column, self._rows, value, held)
        found = crew.run_table(self._batch.kernel.function, self.table, self._batch.strides)
        return [(self.numbers[row], flags) for row, flags in found]


def _totals(totals: Sequence[float], parameter: Parameter, held: list[Array]) -> range:
    held.append(np.array(totals, DTYPES[parameter.dtype]))
    first = address_of(held[-1])
    return range(first, first + held[-1].nbytes, held[-1].itemsize)


def _addresses(column: CallColumn, rows: slice, value: Callable[[Ref], Any], held: list[Array]) -> list[int]:
    """Returns the address of each value, or of the only one."""
    refs = column.refs[rows] if column.shared is None else [column.shared]
    known = {ref: np.ascontiguousarray(value(ref)) for ref in dict.fromkeys(refs)}
    held += known.values()
    addresses = {ref: address_of(array) for ref, array in known.items()}
    return [addresses[ref] for ref in refs]
