"""Recordings: an update function run once on tracers becomes a program.

A `Recording` holds what has been recorded so far. Python scalars and arrays met on the way become operands and
not constants, so that a new learning rate makes no new program. Scalars are weak, as in NumPy 2.

    recording = Recording()
    v = recording.variable(spec, "w", ref)
    g = recording.value(spec, ref)
    traced = trace(recording, fn, (v, g, 0.1))
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import numpy as np

from psclient._src.arrays import nest
from psclient._src.arrays.devices import Value, to_numpy
from psclient._src.tracing.diagnostics import Brought, WrongDtype, fail, refuse_result, warn_of_large
from psclient._src.tracing.guards import Surroundings
from psclient._src.tracing.symbolic_numbers import Scalar, plain_number
from psclient._src.tracing.tracer import DType, Tracer, VariableTracer, is_weak
from pswire.errors import InvalidRequest, ProgramError
from pswire.limits import MAX_NODES
from pswire.model.program import OPS, Attr, Input, InputKind, Node, Program, infer
from pswire.model.tensor import DTYPES, Array, TensorSpec, portable, spec_of


@dataclass(frozen=True)
class OutputLeaf:
    """In a result: the program's output of this index."""

    _nest_leaf: ClassVar = True
    index: int


@dataclass(frozen=True)
class ScalarOrigin:
    """An operand that is a scalar's value.

    Attributes:
        place: index of the scalar on its tape.
        dtype: dtype of the operand.
    """

    place: int
    dtype: np.dtype[np.generic]


@dataclass(frozen=True)
class AssignedLeaf:
    """In a result: the variable that is the program's input of this index, assigned or not."""

    _nest_leaf: ClassVar = True
    input: int


@dataclass(frozen=True, eq=False)
class Traced:
    """The recorded call of a function.

    Attributes:
        program: the program as it travels, without nodes that nothing depends on.
        origins: for each of the program's inputs the origin that the caller gave for it; for an operand its
            array, or the scalar whose value it is.
        result: the function's result: a nest of `OutputLeaf`, `AssignedLeaf` and constants.
    """

    program: Program
    origins: tuple[Hashable | Array, ...]
    result: object


class Recording:
    """Builds a program. Used by one thread, for one call of one function.

    Args:
        lift: asked about each object that meets a tracer and is neither a tracer nor a Python scalar;
            returns its tracer, or None to have it taken as an array. So a variable that comes in by a
            closure is found.

    Attributes:
        named: True if the function has asked for a variable's name.
        brought: arrays and numbers that are no arguments, in the order in which they were met.
    """

    def __init__(self, lift: Callable[[object], Tracer | None] | None = None) -> None:
        self._lift = lift
        self._steps: list[Input | Node] = []
        self._specs: list[TensorSpec] = []
        self._origins: dict[int, Hashable | Array] = {}
        self._known: dict[Hashable, Tracer] = {}
        self._open = True
        self.named = False
        self.brought: list[Brought] = []

    def variable(self, spec: TensorSpec, name: str, origin: Hashable) -> VariableTracer:
        """A variable's tracer; the same one each time for the same origin."""
        found = self._known.get(origin)
        if not isinstance(found, VariableTracer):
            found = VariableTracer(self, self._input("variable", spec, origin), name)
            self._known[origin] = found
        return found

    def value(self, spec: TensorSpec, origin: Hashable) -> Tracer:
        """The tracer of a reduced value, or of an earlier program's output; one for each origin."""
        return self._known_input("value", spec, origin)

    def argument(self, spec: TensorSpec, origin: Hashable) -> Tracer:
        """The tracer of an operand whose array its origin has; one for each origin."""
        return self._known_input("operand", spec, origin)

    def operand(self, value: object) -> Tracer:
        """The tracer of an array that every process has; it is copied, so that it may change afterwards."""
        if isinstance(value, Scalar):
            return self._scalar(value, np.asarray(value.value).dtype)
        try:
            array = portable(np.array(to_numpy(value), order="C"))
            return Tracer(self, self._input("operand", spec_of(array), array))
        except ProgramError:
            raise
        except (TypeError, ValueError) as error:
            unfit = WrongDtype if isinstance(error, TypeError | InvalidRequest) else ProgramError
            fail(f"{type(value).__name__} cannot be used in an update function: {error}", unfit)

    def _scalar(self, value: Scalar, dtype: np.dtype[np.generic]) -> Tracer:
        return self._known_input("operand", TensorSpec(dtype.name, ()), ScalarOrigin(value.place, dtype))

    def _known_input(self, kind: InputKind, spec: TensorSpec, origin: Hashable) -> Tracer:
        if origin not in self._known:
            self._known[origin] = Tracer(self, self._input(kind, spec, origin))
        return self._known[origin]

    def spec(self, place: int) -> TensorSpec:
        """The spec of a value, by its number in this recording."""
        return self._specs[place]

    def apply(self, op: str, args: Sequence[object], about: str = "", **attrs: Attr) -> Tracer:
        """Records one op.

        Args:
            op: a key of `OPS`.
            args: tracers, arrays and Python scalars.
            about: purpose of the op, to begin a message with.
            attrs: the op's attributes.

        Raises:
            ProgramError: with the caller's file and line, if the op does not take these.
        """
        tracers = [arg if is_weak(arg) else self.tracer(arg) for arg in args]
        if op in _COMPARISONS and (known := self._compared(op, tracers)) is not None:
            return known
        numbers = []
        for arg, tracer in zip(args, tracers, strict=True):
            weak = not isinstance(tracer, Tracer)
            numbers.append((self._weak(op, arg, tracers, about) if weak else self.tracer(tracer)).number)
        if len(self._steps) - len(self._origins) >= MAX_NODES:
            fail(f"the update function has more than {MAX_NODES} operations; replace loops by array operations")
        try:
            spec = infer(op, [self._specs[number] for number in numbers], attrs)
        except (ProgramError, InvalidRequest) as error:
            fail(about + error.message)
        return Tracer(self, self._add(Node(op, tuple(numbers), tuple(sorted(attrs.items()))), spec))

    def tracer(self, value: object) -> Tracer:
        """The tracer of anything that may meet a tracer in an op, Python scalars taken as arrays."""
        found = value if isinstance(value, Tracer) else self._lift(value) if self._lift else None
        if found is None:
            found = self._bring(value, self.operand(value))
        if found.recording is not self or not self._open:
            fail(
                "a value of another update function, or of one that has returned, was used; return it from "
                "that function"
            )
        return found

    def _bring(self, value: object, tracer: Tracer) -> Tracer:
        """The tracer of an operand; notes what it is of, unless that is an argument."""
        if not isinstance(value, Scalar):
            self.brought.append(Brought.here(value, cast(Array, self._origins[tracer.number])))
        return tracer

    def astype(self, value: object, dtype: DType) -> Tracer:
        """The value in another dtype."""
        try:
            name = np.dtype(dtype).name
        except TypeError:
            fail(f"dtype {dtype!r} is not supported; use one of {', '.join(DTYPES)}")
        tracer = self.tracer(value)
        return tracer if tracer.dtype.name == name else self.apply("astype", (tracer,), dtype=name)

    def broadcast_to(self, value: object, shape: int | Sequence[int]) -> Tracer:
        """The value in another shape, repeated as NumPy does."""
        sizes = tuple(int(operator.index(n)) for n in ((shape,) if isinstance(shape, int) else shape))
        tracer = self.tracer(value)
        return tracer if tracer.shape == sizes else self.apply("broadcast_to", (tracer,), shape=sizes)

    def fit(self, value: object, variable: VariableTracer) -> Tracer:
        """The value as it is assigned: cast within its kind and broadcast, as NumPy does in place."""
        about = f"variable {variable.label!r}: "
        if is_weak(value):
            value = self._typed(value, np.result_type(variable.dtype, plain_number(value)), about)
        tracer = self.tracer(value)
        if not np.can_cast(tracer.dtype, variable.dtype, "same_kind"):
            fail(
                f"{about}{tracer.dtype} cannot be assigned to {variable.dtype}; "
                f"write value.astype({variable.dtype.name!r})",
                WrongDtype,
            )
        tracer = self.astype(tracer, variable.dtype)
        if tracer.shape == variable.shape:
            return tracer
        return self.apply("broadcast_to", (tracer,), about, shape=variable.shape)

    def _returned(self, leaf: object) -> object:
        return self._scalar(leaf, np.asarray(plain_number(leaf)).dtype) if isinstance(leaf, Scalar) else leaf

    def finish(self, result: object = None) -> Traced:
        """Ends the recording; its tracers cannot be used any more.

        Args:
            result: the function's result, a nest.

        Raises:
            ProgramError: the program is too long.
        """
        # A number that is returned is that of the call, and not of the trace.
        result = nest.map_structure(self._returned, result)
        self._open = False
        found = [leaf for leaf in nest.flatten(result) if isinstance(leaf, Tracer)]
        returned = dict.fromkeys(t.number for t in found if not isinstance(t, VariableTracer))
        variables = [t for t in self._known.values() if isinstance(t, VariableTracer)]
        written = [(t.input, t.number) for t in variables if t.assigned]
        shown = [t.input for t in found if isinstance(t, VariableTracer)]
        order = self._live([*returned, *shown, *(n for pair in written for n in pair)])
        place = {number: index for index, number in enumerate(order)}
        steps = [self._steps[number] for number in order]
        program = Program(
            tuple(step for step in steps if isinstance(step, Input)),
            tuple(_renumber(step, place) for step in steps if isinstance(step, Node)),
            tuple((place[target], place[value]) for target, value in written),
            tuple(place[number] for number in returned),
        )
        _ = program.specs  # Verifies it where the user sees the error, and not on the server.
        outputs = {number: index for index, number in enumerate(returned)}

        def leaf(value: object) -> object:
            if isinstance(value, VariableTracer):
                return AssignedLeaf(place[value.input])
            return OutputLeaf(outputs[value.number]) if isinstance(value, Tracer) else value

        origins = tuple(self._origins[number] for number in order if number in self._origins)
        return Traced(program, origins, nest.map_structure(leaf, result))

    def _live(self, roots: Sequence[int]) -> list[int]:
        live = set(roots)
        for number in reversed(range(len(self._steps))):
            step = self._steps[number]
            if number in live and isinstance(step, Node):
                live.update(step.args)
        return sorted(live, key=lambda number: (isinstance(self._steps[number], Node), number))

    def _input(self, kind: InputKind, spec: TensorSpec, origin: Hashable | Array) -> int:
        number = self._add(Input(kind, spec), spec)
        self._origins[number] = origin
        return number

    def _add(self, step: Input | Node, spec: TensorSpec) -> int:
        if not self._open:
            fail("a value was used after its update function returned; return it from the function")
        self._steps.append(step)
        self._specs.append(spec)
        return len(self._steps) - 1

    def _weak(self, op: str, value: object, peers: Sequence[object], about: str) -> Tracer:
        """A Python scalar as NumPy would cast it beside these arguments of this op."""
        dtypes: list[Any] = [peer.dtype if isinstance(peer, Tracer) else plain_number(peer) for peer in peers]
        function = getattr(np, OPS[op].numpy)
        try:
            if not isinstance(function, np.ufunc):  # Only `where`, whose condition has no say.
                return self._typed(value, np.result_type(*dtypes[1:]), about)
            kinds = (d if isinstance(d, np.dtype) else _weak_type(d) for d in dtypes)
            resolved = function.resolve_dtypes((*kinds, None))
        except TypeError as error:
            fail(f"{about}{op} does not support these arguments: {error}")
        at = next(i for i, peer in enumerate(peers) if peer is value)
        return self._typed(value, resolved[at], about)

    def _compared(self, op: str, pair: Sequence[Value]) -> Tracer | None:
        """Compares integers with a whole number out of their dtype's range, as NumPy does: all are less, or more."""
        array, number = pair if isinstance(pair[0], Tracer) else pair[::-1]
        if not is_weak(number) or type(plain_number(number)) is not int or array.dtype.kind not in "iu":
            return None
        low, high = (int(getattr(np.iinfo(array.dtype.name), end)) for end in ("min", "max"))
        # A scalar that is not beyond stays an operand, of which nothing is seen.
        if low <= plain_number(number) <= high or low <= number <= high:
            return None
        answer = _COMPARISONS[op](*(low if one is array else one for one in pair))
        return self.broadcast_to(self.operand(np.asarray(answer)), array.shape)

    def _typed(self, value: object, dtype: np.dtype[np.generic], about: str) -> Tracer:
        try:
            with np.errstate(all="ignore"):
                array = np.asarray(plain_number(value), dtype)
            return self._scalar(value, dtype) if isinstance(value, Scalar) else self._bring(value, self.operand(array))
        except OverflowError as error:
            fail(f"{about}{error}")


def trace(
    recording: Recording,
    fn: Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object] | None = None,
    around: Surroundings | None = None,
) -> Traced:
    """Runs an update function once and gives what it did.

    Args:
        recording: has made the tracers that are in `args`; it ends here.
        fn: the update function.
        args: tracers, and anything else that `fn` takes; Python scalars stay what they are
            and become operands where they meet a tracer.
        kwargs: its keyword arguments, likewise.
        around: the names that it reads, where they are known.

    Raises:
        ProgramError: with the user's file and line, for what cannot be traced.
    """
    result = fn(*args, **(kwargs or {}))
    refuse_result(fn, result)
    warn_of_large(recording.brought, fn, around)
    return recording.finish(result)


_COMPARISONS: dict[str, Callable[[Value, Value], Value]] = {
    "equal": operator.eq,
    "not_equal": operator.ne,
    "less": operator.lt,
    "less_equal": operator.le,
    "greater": operator.gt,
    "greater_equal": operator.ge,
}


def _weak_type(value: object) -> Any:
    # A bool is not weak for NumPy; of the others the type alone counts. Subclasses count as their base.
    if isinstance(value, bool):
        return np.dtype(bool)
    return next(kind for kind in (int, float, complex) if isinstance(value, kind))


def _renumber(node: Node, place: Mapping[int, int]) -> Node:
    return Node(node.op, tuple(place[arg] for arg in node.args), node.attrs)
