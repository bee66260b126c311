"""The kernels of a server: the steps of its programs, their compiled kernels, and the threads that run them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, TypeVar

from psserver.devices import ServerDevice
from psserver.programs.kernels.codegen import Form, Parameter, SumTerm, looked_at, parameters
from psserver.programs.kernels.compiler import PATIENCE, Compiler
from psserver.programs.kernels.fusion import Step, split, whole
from psserver.programs.kernels.launch import Crew
from psserver.programs.kernels.row_codegen import RowForm
from psserver.programs.kernels.row_steps import RowSteps
from pswire.model.program import Program

MAX_KNOWN = 10_000
"""Most programs, forms of steps and stages that are kept; beyond it all are forgotten."""


K = TypeVar("K")


@dataclass(frozen=True)
class Kernel:
    """A step's compiled kernel.

    Attributes:
        form: the computation.
        function: the compiled function.
    """

    form: Form
    function: Any

    @cached_property
    def parameters(self) -> list[Parameter]:
        """Its parameters, in order."""
        return parameters(self.form)

    @cached_property
    def read(self) -> frozenset[int]:
        """Numbers of the values that it reads."""
        return self.form.read

    @cached_property
    def looked_at(self) -> frozenset[int]:
        """Inputs in which it looks for NaN and infinity, on a GPU."""
        return looked_at(self.form)

    @cached_property
    def singles(self) -> list[bool]:
        """One flag per parameter; True if it has a single element."""
        return [parameter.single for parameter in self.parameters]


@dataclass(frozen=True, eq=False)
class Stage:
    """A step of a program with its kernel, for all rounds with the same kinds of contributions.

    Attributes:
        step: the step.
        kernel: the kernel; None for the interpreter.
        inputs: inputs of the step that are values, each with its number in the program.
        parts: inputs of the step that the kernel sums, each with its number in the program.
        may_fail: True if running it may raise an error.
    """

    step: Step
    kernel: Kernel | None
    inputs: tuple[tuple[int, int], ...]
    parts: Mapping[int, int]
    may_fail: bool

    @cached_property
    def targets(self) -> frozenset[int]:
        """Inputs of the step that are assigned."""
        return frozenset(target for target, _ in self.step.program.assigns)


@dataclass(frozen=True)
class RowKernel(Kernel):
    """A compiled kernel of a step on rows of tables."""

    form: RowForm


@dataclass
class _Known:
    """A step with its kernel. Holds the step, so that its `id` is not reused."""

    step: Step
    form: Any
    kernel: Any = None


SMALLEST = 1 << 14
"""Elements of an array below which the interpreter is as fast as a kernel."""


LARGE = 1 << 26
"""Elements of an array from which on a round waits for the kernel.

The interpreter would take longer than the compiler, and several times the array's memory.
"""

SMALL_PATIENCE = 256
"""Requests before a kernel for smaller arrays is compiled: it saves little in a round."""


class Kernels:
    """Steps and kernels of a server's programs. May be called from any thread; `crew` serves one caller at a time.

    Args:
        device: the device where programs run.
        threads: number of threads that run one kernel, on the CPU.
        patience: number of requests after which a kernel is compiled.
        smallest: elements of an array from which on there are kernels.
        folder: where kernels of the CPU are kept for other processes; "" for nowhere.

    Attributes:
        compiler: compiles the kernels.
        crew: runs the kernels of the CPU.
        on_host: the kernels of arrays in host memory: of dynamic tables, wherever variables are.
        interpretations: number of programs, or of steps, that ran without a kernel.
    """

    def __init__(
        self,
        device: ServerDevice,
        threads: int = 1,
        patience: int = PATIENCE,
        smallest: int = SMALLEST,
        folder: str = "",
    ) -> None:
        self.device = device
        self.smallest = smallest
        self.on_host = self if device.gpu is None else Kernels(ServerDevice(), threads, patience, smallest, folder)
        self.compiler = Compiler(device, patience, folder)
        self.crew = Crew(threads)
        self.interpretations = 0
        self._lock = threading.Lock()
        # By identity: a plan's programs are the same objects in each round, and comparing them takes longer than
        # all else here. What is remembered holds them, so that no number is used twice.
        self._steps: dict[int, tuple[Program, tuple[Step, ...]]] = {}
        self._wholes: dict[int, tuple[Program, Step]] = {}
        self._row_steps: dict[int, tuple[Program, RowSteps]] = {}
        self._known: dict[object, _Known] = {}
        self._stages: dict[object, tuple[Program, tuple[Stage, ...]]] = {}
        self._asked: dict[int, tuple[Program, int]] = {}

    def stages(self, program: Program, reduced: Sequence[int], sums: Mapping[int, SumTerm]) -> tuple[Stage, ...]:
        """Returns a program's stages: kernels if all elementwise steps have one, else the interpreter for the whole."""
        if self.device.gpu is not None:
            sums = {}  # Sums are made on the host: one value crosses the bus and not many.
        key = id(program), tuple(sums.items())
        found = self._stages.get(key)
        if found is None:
            stages = self._compiled(program, reduced, sums)
            if stages is None:
                return self.interpreted(program)
            with self._lock:
                self._make_room()
                found = self._stages[key] = program, stages
        return found[1]

    def settled(self, program: Program, sums: Mapping[int, SumTerm]) -> bool:
        """Returns True if `stages` returns the same from now on."""
        return (id(program), tuple(sums.items())) in self._stages

    def interpreted(self, program: Program) -> tuple[Stage, ...]:
        """Returns a program's stages without kernels."""
        step = self.whole(program)
        return (Stage(step, None, tuple((index, index) for index in step.args), {}, True),)

    def _compiled(
        self, program: Program, reduced: Sequence[int], sums: Mapping[int, SumTerm]
    ) -> tuple[Stage, ...] | None:
        """Returns all stages; None while a kernel is missing."""
        steps = self.steps(program)
        if not any(step.shape is not None for step in steps):
            return self.interpreted(program)
        if any(step.shape is not None and prod(step.shape) < self.smallest for step in steps):
            with self._lock:
                self._asked[id(program)] = program, self._asked.get(id(program), (program, 0))[1] + 1
            if self._asked[id(program)][1] < SMALL_PATIENCE:
                return None
        stages = [self._stage(step, program, reduced, sums) for step in steps]
        missing = [stage for stage in stages if stage.step.shape is not None and stage.kernel is None]
        return None if missing else tuple(stages)

    def _stage(self, step: Step, program: Program, reduced: Sequence[int], sums: Mapping[int, SumTerm]) -> Stage:
        parts: dict[int, int] = {}
        kernel = None
        if step.shape is not None:
            # A value that another step reads, or that is returned, is summed once for all.
            read = Counter(number for other in self.steps(program) for number in set(other.args))
            summed = {number for number in sums if read[number] == 1 and number not in program.outputs}
            parts = {i: number for i, number in enumerate(step.args) if number in summed}
            parts = {i: number for i, number in parts.items() if step.program.inputs[i].spec.shape == step.shape}
            kernel = self.kernel(step, {i: sums[number] for i, number in parts.items()})
        inputs = tuple((i, number) for i, number in enumerate(step.args) if i not in parts)
        takes_memory = any(number in reduced for _, number in inputs)
        return Stage(step, kernel, inputs, parts, step.may_fail or takes_memory)

    def steps(self, program: Program) -> tuple[Step, ...]:
        """Returns the steps of a program."""
        return self._made(self._steps, program, split)

    def whole(self, program: Program) -> Step:
        """Returns a program as one step, which is interpreted."""
        return self._made(self._wholes, program, whole)

    def row_steps(self, program: Program) -> RowSteps:
        """Returns the steps of a program that updates rows of tables; raises `ProgramError` for another one."""
        return self._made(self._row_steps, program, RowSteps.of)

    def _made(self, kept: dict[int, tuple[Program, K]], program: Program, make: Callable[[Program], K]) -> K:
        found = kept.get(id(program))
        if found is None:
            found = program, make(program)
            with self._lock:
                self._make_room()
                kept[id(program)] = found
        return found[1]

    def kernel(self, step: Step, sums: Mapping[int, SumTerm]) -> Kernel | None:
        """Returns the kernel of an elementwise step that sums these inputs itself; None while it is not compiled."""
        key = id(step), tuple(sums.items())
        known = self._known.get(key) or self._know(key, step, Form(step.program, dict(sums)))
        if known.kernel is None:
            function = self.compiler.elementwise(known.form, now=prod(step.shape or ()) >= LARGE)
            known.kernel = None if function is None else Kernel(known.form, function)
        found: Kernel | None = known.kernel
        return found

    def rows(self, step: Step) -> RowKernel | None:
        """Returns the kernel of a step of `row_steps`; None while it is not compiled.

        Values that are not scalars are rows; rows for the same place are summed first. Variables are tables.
        """
        return self._row_kernel(step, self.compiler.rows)

    def replay(self, step: Step) -> RowKernel | None:
        """Returns the kernel that makes up such a step on rows that have missed it; None while it is not compiled."""
        return self._row_kernel(step, self.compiler.replay)

    def once(self, step: Step) -> RowKernel | None:
        """Returns the kernel that makes such a step by numbers of each row's own; None while it is not compiled."""
        return self._row_kernel(step, self.compiler.once)

    def _row_kernel(self, step: Step, make: Callable[[RowForm], Any]) -> RowKernel | None:
        key = id(step), make
        known = self._known.get(key) or self._know(key, step, row_form(step))
        if known.kernel is None:
            function = make(known.form)
            known.kernel = None if function is None else RowKernel(known.form, function)
        found: RowKernel | None = known.kernel
        return found

    def _know(self, key: object, step: Step, form: Form | RowForm) -> _Known:
        with self._lock:
            self._make_room()
            return self._known.setdefault(key, _Known(step, form))

    def _make_room(self) -> None:
        kept: Any = self._steps, self._wholes, self._row_steps, self._known, self._stages
        if sum(map(len, kept)) >= MAX_KNOWN:
            for each in (*kept, self._asked):
                each.clear()

    def close(self) -> None:
        """Ends all threads."""
        self.compiler.close()
        self.crew.close()
        if self.on_host is not self:
            self.on_host.close()


def row_form(step: Step) -> RowForm:
    """Returns the computation of a step on rows of tables, of which all but tables and numbers are rows."""
    inputs = enumerate(step.program.inputs)
    given = {i: SumTerm("sum", 1) for i, item in inputs if item.kind == "value" and item.spec.shape}
    return RowForm(step.program, given, step.shape or ())
