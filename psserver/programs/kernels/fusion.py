"""Fusion: splits a program into elementwise steps, which become one kernel each, and steps that are interpreted.

A node can be in a kernel if the table of ops has an expression for it, its result is no scalar, and each argument is a
scalar or has the result's shape. A view that only the interpreter reads stays a view. The interpreter computes scalars,
before the kernels that read them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from psserver.programs.interpreter import Script, peak_bytes
from pswire.model.program import OPS, Input, Node, Program
from pswire.model.tensor import DTYPES, TensorSpec

Shape = tuple[int, ...]

KERNEL_DTYPES = frozenset(DTYPES) - {"float16", "bfloat16", "complex64", "complex128"}
"""Dtypes that kernels compute with. Half precision is rounded after every op, which is left to the interpreter."""

SCALARS = 1 << 12
"""Bytes that the steps may need beyond those of the whole program: scalars wait between steps."""

MAX_FUSED = 500
"""Most nodes of one kernel: compile time more than doubles with twice the nodes."""

MAX_STEPS = 200
"""Most steps of one program: each costs a little in every round."""


@dataclass(frozen=True)
class Step:
    """A part of a program, as a program.

    Attributes:
        program: the computation.
        args: for each of its inputs, the value's number in the whole program.
        results: for each of its outputs, the value's number in the whole program.
        shape: shape of a kernel's arrays; None if the step is interpreted.
        shared: numbers of values that later steps read from a variable that this step assigns, each with the variable's
            input.
        kept: assigned inputs with an old value that a later step still reads.
        done: numbers of results, of this and earlier steps, without a reader after it.
    """

    program: Program
    args: tuple[int, ...]
    results: tuple[int, ...]
    shape: Shape | None
    shared: tuple[tuple[int, int], ...] = ()
    kept: frozenset[int] = frozenset()
    done: frozenset[int] = frozenset()

    @cached_property
    def script(self) -> Script:
        """The step, ready to be interpreted."""
        return Script(self.program)

    @cached_property
    def may_fail(self) -> bool:
        """True if running it may raise an error: an op may refuse a value, or memory may be short."""
        if self.shape is not None:
            return False
        made = {n for n, node in enumerate(self.program.nodes, len(self.args)) if not OPS[node.op].view}
        copied = {*self.program.outputs, *(value for _, value in self.program.assigns)}
        return self.program.may_refuse or any(self.program.specs[n].shape for n in made | copied)


def whole(program: Program) -> Step:
    """Returns a program as one step, which is interpreted."""
    return Step(program, tuple(range(len(program.inputs))), program.outputs, None)


def split(program: Program) -> tuple[Step, ...]:
    """Splits a verified program into steps, in order.

    Values have the same bits as those of the interpreted whole. If there is nothing for a kernel, or if steps would
    need more memory than the whole, there is one step, which is interpreted.
    """
    splitting = _Splitting(program)
    if len(splitting.order) > MAX_STEPS:
        return (whole(program),)
    steps = _marked(tuple(splitting.steps()), program)
    fused = [step for step in steps if step.shape is not None]
    too_long = any(len(step.program.nodes) > MAX_FUSED for step in fused)
    if not fused or too_long or _peak(steps) > peak_bytes(program) + SCALARS:
        return (whole(program),)
    return steps


def _marked(steps: Sequence[Step], program: Program) -> tuple[Step, ...]:
    """Returns the steps with the values in `done` that have no reader after them."""
    marked: list[Step] = []
    needed = set(program.outputs)
    made = {number for step in steps for number in step.results}
    for step in reversed(steps):
        read = {*step.args, *step.results}
        marked.append(replace(step, done=frozenset((read & made) - needed)))
        needed |= read
    return tuple(reversed(marked))


def _peak(steps: Sequence[Step]) -> int:
    """Returns the most memory that the steps need beside the inputs, in bytes, if nothing is written in place.

    The arrays that kernels write are there from the beginning, since nothing may fail once the first has written.
    """
    peak = held = sum(_made(step) for step in steps if step.shape is not None)
    sizes: dict[int, int] = {}
    for step in steps:
        sizes.update(zip(step.results, (spec.nbytes for spec in step.program.output_specs), strict=True))
        if step.shape is None:
            peak = max(peak, held + peak_bytes(step.program))
            held += _made(step)
        held -= sum(sizes[number] for number in step.done)
    return peak


def _made(step: Step) -> int:
    """Returns the bytes of all values that a step assigns or outputs."""
    specs = step.program.specs
    return sum(specs[value].nbytes for value in (*step.program.outputs, *(v for _, v in step.program.assigns)))


def fused_shape(node: Node, specs: Sequence[TensorSpec], result: TensorSpec) -> Shape | None:
    """Returns the array shape of a kernel that can compute this node; None if none can."""
    row, shape = OPS[node.op], result.shape
    if not row.kernel or not shape or any(spec.shape not in ((), shape) for spec in specs):
        return None
    loop = row.loop(specs, dict(node.attrs))
    dtypes = {*loop, result.dtype, *(spec.dtype for spec in specs)}
    return shape if loop and dtypes <= KERNEL_DTYPES else None


Group = tuple[int, Shape | None]
"""The nodes of one step: its level in the order, and its shape."""


class _Splitting:
    """The assignment of a program's nodes to steps.

    Attributes:
        order: the steps' groups; interpreted ones before kernels of the same level.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.specs = program.specs
        self.first = len(program.inputs)
        self.outputs = frozenset(program.outputs)
        self.nodes = list(enumerate(program.nodes, self.first))
        self.users: dict[int, list[int]] = {number: [] for number in range(len(self.specs))}
        for number, node in self.nodes:
            for arg in dict.fromkeys(node.args):
                self.users[arg].append(number)
        self.assigned: dict[int, list[int]] = {}
        for target, value in program.assigns:
            self.assigned.setdefault(value, []).append(target)
        self.shapes = self._shapes()
        self.groups = self._groups()
        self.last = max((level for level, _ in self.groups.values()), default=0)
        self.places = {target: self._place(target, value) for target, value in program.assigns}
        found = {*self.groups.values(), *self.places.values()}
        self.order = sorted(found, key=lambda group: (group[0], group[1] is not None))
        self.turn = {group: at for at, group in enumerate(self.order)}

    def _shapes(self) -> dict[int, Shape | None]:
        """Returns the shape of each node's kernel; None for a node in no kernel."""
        shapes = {
            number: fused_shape(node, [self.specs[arg] for arg in node.args], self.specs[number])
            for number, node in self.nodes
        }
        for number, node in reversed(self.nodes):
            kept = number in self.outputs or number in self.assigned
            if OPS[node.op].view and not kept and all(shapes[user] != shapes[number] for user in self.users[number]):
                shapes[number] = None
        return shapes

    def _groups(self) -> dict[int, Group]:
        """Groups interpreted nodes as early and fused ones as late as possible: so few values wait between steps."""
        level: dict[int, int] = {}
        for number, node in self.nodes:
            before = [level[arg] + self._apart(arg, number) for arg in node.args if arg >= self.first]
            level[number] = max(before, default=0)
        last = max(level.values(), default=0)
        for number, _ in reversed(self.nodes):
            if self.shapes[number] is not None:
                level[number] = min(
                    (level[user] - self._apart(number, user) for user in self.users[number]), default=last
                )
        return {number: (level[number], self.shapes[number]) for number, _ in self.nodes}

    def _apart(self, one: int, other: int) -> int:
        """Returns 1 if two nodes, one of which reads the other, cannot be in one step; else 0."""
        return int(self.shapes[one] != self.shapes[other])

    def steps(self) -> Iterator[Step]:
        """Yields the steps in order."""
        nodes: dict[Group, list[tuple[int, Node]]] = {group: [] for group in self.order}
        assigns: dict[Group, list[tuple[int, int]]] = {group: [] for group in self.order}
        for number, node in self.nodes:
            nodes[self.groups[number]].append((number, node))
        for target, value in self.program.assigns:
            assigns[self.places[target]].append((target, value))
        for group in self.order:
            step = self._step(group, nodes[group], assigns[group])
            if step.shape is None or assigns[group] or step.results:  # else its values have no reader
                yield step

    def _place(self, target: int, value: int) -> Group:
        """Returns the group that assigns a variable: the one that computes the value, or a last one for an input."""
        if value in self.groups:
            return self.groups[value]
        spec = self.specs[target]
        return self.last, spec.shape if spec.shape and spec.dtype in KERNEL_DTYPES else None

    def _step(self, group: Group, mine: Sequence[tuple[int, Node]], assigns: Sequence[tuple[int, int]]) -> Step:
        own = {number for number, _ in mine}
        read = {arg for _, node in mine for arg in node.args} | {number for pair in assigns for number in pair}
        args = tuple(sorted(read - own))
        results = tuple(n for n, _ in mine if n in self.outputs or set(self.users[n]) - own)
        holders = {value: target for target, value in assigns} if group[1] is not None else {}
        place = {number: index for index, number in enumerate((*args, *(number for number, _ in mine)))}
        shared = tuple((number, place[holders[number]]) for number in results if number in holders)
        results = tuple(number for number in results if number not in holders)
        program = Program(
            tuple(self._input(number) for number in args),
            tuple(Node(node.op, tuple(place[arg] for arg in node.args), node.attrs) for _, node in mine),
            tuple((place[target], place[value]) for target, value in assigns),
            tuple(place[number] for number in results),
        )
        kept = frozenset(place[t] for t, _ in assigns if self._read_after(t, self.turn[group]))
        return Step(program, args, results, group[1], shared, kept)

    def _read_after(self, target: int, turn: int) -> bool:
        """Returns True if a later step, or an output of the program, needs a variable's old value."""
        return (
            target in self.outputs
            or any(self.turn[self.groups[user]] > turn for user in self.users[target])
            or any(self.turn[self.places[t]] > turn for t in self.assigned.get(target, ()) if t != target)
        )

    def _input(self, number: int) -> Input:
        if number < self.first:
            return self.program.inputs[number]
        return Input("value", self.specs[number])
