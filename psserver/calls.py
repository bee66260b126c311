"""One application of a program in a round: its steps, their kernels, and the memory that they write.

A kernel writes into a variable's own array where nobody else holds it and nothing of the round that may still fail
comes after. Everywhere else it writes into new arrays, which are made before the round begins to write.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from psserver.kernels.kernels import Kernel, Kernels
from psserver.kernels.launch import Copy, Pieces
from psserver.kernels.source import Parameter, Role, Sum
from psserver.kernels.steps import Step
from pswire.program import Program
from pswire.spec import Apply, Ref
from pswire.tensor import DTYPES, Array, TensorSpec

MAX_PARTS = 8
"""Contributions that a kernel sums; of more, the reducer makes one value first."""


@dataclass(frozen=True)
class Parts:
    """The contributions to a reduction that nothing but one kernel reads.

    Attributes:
        combined: how they become one value.
        pieces: of each contribution.
        total: the sum of the weights.
    """

    combined: Sum
    pieces: Sequence[Pieces]
    total: float


@dataclass
class Stage:
    """A step that is going to run.

    Attributes:
        step: what it does.
        kernel: what does it; None for the interpreter.
        parts: by input of the step, what the kernel sums.
        may_fail: whether running it may raise an error.
        in_place: inputs of the step that are written where they are.
        room: new arrays: of assigned inputs, by input, and of outputs.
    """

    step: Step
    kernel: Kernel | None = None
    parts: Mapping[int, Parts] = field(default_factory=dict)
    may_fail: bool = True
    in_place: frozenset[int] = frozenset()
    room: dict[tuple[Role, int], Array] = field(default_factory=dict)


class Call:
    """An application of a program.

    Args:
        apply: which.
        program: of the plan's, the one that it applies.
        kernels: gives steps and kernels.
        parts: the contributions to a value if nobody but this call needs it; None for any other value.
    """

    def __init__(self, apply: Apply, program: Program, kernels: Kernels, parts: Callable[[Ref], Parts | None]) -> None:
        self.apply = apply
        self.program = program
        self._kernels = kernels
        self.stages = self._compiled(parts) or [Stage(kernels.whole(program))]

    def _compiled(self, parts: Callable[[Ref], Parts | None]) -> list[Stage] | None:
        """All stages, if the kernels are there."""
        if len(set(self.apply.args)) < len(self.apply.args):
            return None  # Two names for one memory.
        steps = self._kernels.steps(self.program)
        if any(step.shape is not None and prod(step.shape) < self._kernels.smallest for step in steps):
            return None
        stages = [self._stage(step, steps, parts) for step in steps]
        missing = [stage for stage in stages if stage.step.shape is not None and stage.kernel is None]
        return None if missing else stages

    def _stage(self, step: Step, steps: Sequence[Step], parts: Callable[[Ref], Parts | None]) -> Stage:
        found = self._parts(step, steps, parts) if step.shape is not None else {}
        sums = {index: part.combined for index, part in found.items()}
        kernel = self._kernels.kernel(step, sums) if step.shape is not None else None
        # A reduction takes memory when it is first used.
        reduced = [i for i, number in enumerate(step.args) if i not in found and self._is_reduction(number)]
        return Stage(step, kernel, found, step.may_fail or bool(reduced))

    def _is_reduction(self, number: int) -> bool:
        return number < len(self.apply.args) and self.apply.args[number].kind == "reduction"

    def _parts(self, step: Step, steps: Sequence[Step], parts: Callable[[Ref], Parts | None]) -> dict[int, Parts]:
        """The inputs of a step that are sums of contributions which no other step reads."""
        if self._kernels.device.gpu is not None:
            return {}  # Summed before they go there: one value over the bus and not many.
        found = {}
        for index, number in enumerate(step.args):
            alone = self._is_reduction(number) and sum(number in other.args for other in steps) == 1
            if alone and step.program.inputs[index].spec.shape == step.shape and number not in self.program.outputs:
                part = parts(self.apply.args[number])
                if part is not None:
                    found[index] = part
        return found

    def target(self, step: Step, index: int) -> int:
        """The variable that is an input of a step."""
        return self.apply.args[step.args[index]].index

    def reserve(self, safe: Sequence[bool], own: Set[int], fresh: Set[int]) -> None:
        """Decides where kernels write, and makes the arrays for it; on a GPU kernels make their own.

        Args:
            safe: for each stage whether nothing after it may fail.
            own: variables whose arrays nobody else holds.
            fresh: variables whose values are new ones of this round.
        """
        for stage, secure in zip(self.stages, safe, strict=True):
            if stage.kernel is not None and self._kernels.device.gpu is None:
                self._reserve(stage, own | fresh if secure else fresh)

    def _reserve(self, stage: Stage, mine: Set[int]) -> None:
        step = stage.step
        targets = frozenset(target for target, _ in step.program.assigns)
        stage.in_place = frozenset(t for t in targets - step.kept if self.target(step, t) in mine)
        for target in targets - stage.in_place:
            stage.room["array", target] = _empty(step.program.inputs[target].spec)
        for index, spec in enumerate(step.program.output_specs):
            stage.room["output", index] = _empty(spec)

    @property
    def copies(self) -> bool:
        """Whether it gives back what must be copied when it is done, which takes memory."""
        outputs = self.program.outputs
        made = {number for stage in self.stages for number in stage.step.results}
        return len(set(outputs)) < len(outputs) or not made.issuperset(outputs)

    @property
    def assigned(self) -> set[int]:
        """Numbers of the variables that it assigns."""
        return {self.target(s.step, target) for s in self.stages for target, _ in s.step.program.assigns}

    def run(self, value: Callable[[Ref], Any], xp: Any) -> tuple[dict[int, Any], list[Any]]:
        """Runs all stages.

        Args:
            value: gives a value of the round; of a reduction it is asked once.
            xp: the array namespace.

        Returns:
            The new value of each assigned variable, by its number, and the outputs.
        """
        known: dict[int, Any] = {}

        def get(number: int) -> Any:
            if number not in known:
                known[number] = value(self.apply.args[number])
            return known[number]

        if self.stages[0].step.program is self.program:  # Interpreted as a whole: its results are the outputs.
            written, outputs = self._run(self.stages[0], get, xp)
            return {self.apply.args[target].index: array for target, array in written.items()}, outputs
        assigned: dict[int, Any] = {}
        for stage in self.stages:
            written, results = self._run(stage, get, xp)
            known.update(zip(stage.step.results, results, strict=True))
            known.update((number, written[target]) for number, target in stage.step.shared)
            assigned |= {self.target(stage.step, target): array for target, array in written.items()}
            for number in stage.step.done:
                del known[number]
        own = {number for stage in self.stages for number in stage.step.results}
        outputs = []
        for number in self.program.outputs:
            outputs.append(get(number) if number in own else xp.array(get(number), copy=True, order="C"))
            own.discard(number)
        return assigned, outputs

    def _run(self, stage: Stage, get: Callable[[int], Any], xp: Any) -> tuple[dict[int, Any], list[Any]]:
        step, kernel = stage.step, stage.kernel
        inputs = {i: get(number) for i, number in enumerate(step.args) if i not in stage.parts}
        if kernel is None:
            return step.script.run(list(inputs.values()), xp)
        if self._kernels.device.gpu is not None:
            return _on_gpu(kernel, inputs, xp)
        arrays = [_memory(stage, parameter, inputs) for parameter in kernel.parameters]
        self._kernels.crew.launch(kernel.function, prod(step.shape or ()), arrays, kernel.singles)
        room, stage.room = stage.room, {}  # so that they are let go when nobody needs them
        written = {t: inputs[t] if t in stage.in_place else room["array", t] for t, _ in step.program.assigns}
        return written, [room["output", index] for index in range(len(step.results))]


def _memory(stage: Stage, parameter: Parameter, inputs: Mapping[int, Any]) -> Pieces | Copy:
    """What a kernel on the CPU reads or writes for a parameter."""
    index = parameter.value
    match parameter.role:
        case "part":
            return stage.parts[index].pieces[parameter.place]
        case "total":
            return [np.asarray(stage.parts[index].total, DTYPES[parameter.dtype])]
        case "output":
            return [stage.room["output", index]]
    array = np.ascontiguousarray(inputs[index])
    if ("array", index) not in stage.room:
        return [array]
    new = stage.room["array", index]
    return Copy(array, new) if stage.kernel and index in stage.kernel.form.read else [new]


def _on_gpu(kernel: Kernel, inputs: Mapping[int, Any], xp: Any) -> tuple[dict[int, Any], list[Any]]:
    """Runs a kernel of CuPy; what it assigns is new, since its memory pool gives that for nothing."""
    program = kernel.form.program
    given = [inputs[p.value] for p in kernel.parameters if p.role != "output"]
    targets = [target for target, _ in program.assigns]
    specs = [*(program.inputs[target].spec for target in targets), *program.output_specs]
    made = [xp.empty(spec.shape, DTYPES[spec.dtype]) for spec in specs]
    kernel.function(*given, *made)
    return dict(zip(targets, made, strict=False)), made[len(targets) :]


def _empty(spec: TensorSpec) -> Array:
    return np.empty(spec.shape, DTYPES[spec.dtype])
