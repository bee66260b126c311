"""What a server keeps to run update programs compiled: their steps, their kernels, the threads that run them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from psserver.arrays import Device
from psserver.kernels.compiled import PATIENCE, Compiler
from psserver.kernels.launch import Crew
from psserver.kernels.source import Form, Parameter, Sum, parameters
from psserver.kernels.steps import Step, split, whole
from pswire.program import Program

MAX_KNOWN = 10_000
"""Programs, and forms of their steps, that are remembered; then all are forgotten."""


@dataclass(frozen=True)
class Kernel:
    """A step's kernel, ready to run.

    Attributes:
        form: what it does.
        function: what the compiler made.
    """

    form: Form
    function: Any

    @cached_property
    def parameters(self) -> list[Parameter]:
        """What it takes, in order."""
        return parameters(self.form)

    @cached_property
    def singles(self) -> list[bool]:
        """Which of them have one element."""
        return [parameter.single for parameter in self.parameters]


@dataclass
class _Known:
    """A step that was asked for; it is held, so that its identity stays its own."""

    step: Step
    form: Form
    kernel: Kernel | None = None


SMALLEST = 1 << 14
"""Elements of an array below which the interpreter takes as long as a kernel."""


class Kernels:
    """Steps and kernels of the programs of one server. May be called from any thread; `crew` serves one at a time.

    Args:
        device: where programs run.
        threads: that run one kernel, on the CPU.
        patience: how often a kernel is asked for before it is compiled.
        smallest: elements of arrays from which on there are kernels.

    Attributes:
        compiler: makes the kernels.
        crew: runs those of the CPU.
    """

    def __init__(self, device: Device, threads: int = 1, patience: int = PATIENCE, smallest: int = SMALLEST) -> None:
        self.device = device
        self.smallest = smallest
        self.compiler = Compiler(device, patience)
        self.crew = Crew(threads)
        self._lock = threading.Lock()
        # By identity: a plan's programs are the same objects in each round, and comparing them takes longer than
        # all else here. What is remembered holds them, so that no number is used twice.
        self._steps: dict[int, tuple[Program, tuple[Step, ...], Step]] = {}
        self._known: dict[object, _Known] = {}

    def steps(self, program: Program) -> tuple[Step, ...]:
        """The steps of a program."""
        return self._of(program)[1]

    def whole(self, program: Program) -> Step:
        """A program as one step, which is interpreted."""
        return self._of(program)[2]

    def _of(self, program: Program) -> tuple[Program, tuple[Step, ...], Step]:
        found = self._steps.get(id(program))
        if found is None:
            found = program, split(program), whole(program)
            with self._lock:
                self._make_room()
                self._steps[id(program)] = found
        return found

    def kernel(self, step: Step, sums: Mapping[int, Sum]) -> Kernel | None:
        """The kernel of an elementwise step with these inputs summed in it; None while it is not compiled."""
        return self._kernel(step, sums, self.compiler.elementwise)

    def rows(self, step: Step) -> Kernel | None:
        """The kernel of an elementwise step on rows of tables; None while it is not compiled.

        Values that are no scalars are rows, of which those for one place are summed first; variables are tables.
        """
        inputs = enumerate(step.program.inputs)
        values = {i: Sum("sum", 1) for i, item in inputs if item.kind == "value" and item.spec.shape}
        return self._kernel(step, values, self.compiler.rows)

    def _kernel(self, step: Step, sums: Mapping[int, Sum], make: Callable[[Form], Any]) -> Kernel | None:
        key = id(step), tuple(sums.items()), make
        found = self._known.get(key)
        if found is None:
            with self._lock:
                self._make_room()
                found = self._known.setdefault(key, _Known(step, Form(step.program, dict(sums))))
        if found.kernel is None:
            function = make(found.form)
            found.kernel = None if function is None else Kernel(found.form, function)
        return found.kernel

    def _make_room(self) -> None:
        if len(self._steps) + len(self._known) >= MAX_KNOWN:
            self._steps.clear()
            self._known.clear()

    def close(self) -> None:
        """Ends all threads."""
        self.compiler.close()
        self.crew.close()
