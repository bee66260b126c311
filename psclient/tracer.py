"""Update functions as data: runs a function once on tracers and records what it does.

A `Recording` holds what has been recorded so far; a `Tracer` stands for one value in it and behaves as
a NumPy array that cannot be looked at. Python scalars and arrays met on the way become operands and
not constants, so that a new learning rate makes no new program. Scalars are weak, as in NumPy 2.

    recording = Recording()
    v = recording.variable(spec, "w", ref)
    g = recording.value(spec, ref)
    traced = trace(recording, fn, (v, g, 0.1))
"""

from __future__ import annotations

import inspect
import operator
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, ClassVar, NoReturn

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from psclient import nest
from pswire.errors import InvalidRequest, ProgramError
from pswire.program import OPS, Attr, Input, InputKind, Node, Program, infer
from pswire.tensor import DTYPES, Array, TensorSpec, portable, spec_of

DType = Any  # Whatever `numpy.dtype` takes, or None where that is the default.

_NOT_THE_USERS = frozenset({"psclient", "numpy", "cupy", "cupyx"})
_CHOOSE = "its value is not known while the update function is traced; write np.where(condition, a, b)"
_NUMBER = "its value is not known while the update function is traced; leave it an array, or use .astype"
_WHOLE = "update functions work on whole arrays; write array operations, such as np.sum(x, axis=0)"
_IN_PLACE = "values cannot be changed in place; write x = x + y, or v.assign_add(y) for a variable"


@dataclass(frozen=True)
class OutputLeaf:
    """In a result: the program's output of this index."""

    nest_leaf: ClassVar = True
    index: int


@dataclass(frozen=True)
class AssignedLeaf:
    """In a result: the variable that is the program's input of this index, assigned or not."""

    nest_leaf: ClassVar = True
    input: int


@dataclass(frozen=True, eq=False)
class Traced:
    """What a function did.

    Attributes:
        program: as it travels; what nothing depends on is left out.
        origins: for each of the program's inputs the origin that the caller gave for it, or, for an
            operand, its array.
        result: what the function returned: a nest of `OutputLeaf`, `AssignedLeaf` and constants.
    """

    program: Program
    origins: tuple[Hashable | Array, ...]
    result: Any

    @property
    def operands(self) -> tuple[Array, ...]:
        """The arrays of the operand inputs, in the order of the inputs."""
        return tuple(origin for origin in self.origins if isinstance(origin, np.ndarray))


class Recording:
    """Builds a program. Used by one thread, for one call of one function.

    Args:
        lift: asked about each object that meets a tracer and is neither a tracer nor a Python scalar;
            returns its tracer, or None to have it taken as an array. So a variable that comes in by a
            closure is found.
    """

    def __init__(self, lift: Callable[[object], Tracer | None] | None = None) -> None:
        self._lift = lift
        self._steps: list[Input | Node] = []
        self._specs: list[TensorSpec] = []
        self._origins: dict[int, Hashable | Array] = {}
        self._known: dict[Hashable, Tracer] = {}
        self._open = True

    def variable(self, spec: TensorSpec, name: str, origin: Hashable) -> VariableTracer:
        """A variable's tracer; the same one each time for the same origin."""
        found = self._known.get(origin)
        if not isinstance(found, VariableTracer):
            found = VariableTracer(self, self._input("variable", spec, origin), name)
            self._known[origin] = found
        return found

    def value(self, spec: TensorSpec, origin: Hashable) -> Tracer:
        """The tracer of a reduced value, or of an earlier program's output; one for each origin."""
        if origin not in self._known:
            self._known[origin] = Tracer(self, self._input("value", spec, origin))
        return self._known[origin]

    def operand(self, value: object) -> Tracer:
        """The tracer of an array that every process has; it is copied, so that it may change afterwards."""
        to_host = getattr(value, "get", None) if hasattr(value, "__cuda_array_interface__") else None
        try:
            array = portable(np.array(to_host() if to_host else value, order="C"))
            return Tracer(self, self._input("operand", spec_of(array), array))
        except (InvalidRequest, TypeError, ValueError) as error:
            if isinstance(error, ProgramError):
                raise
            fail(f"{type(value).__name__} cannot be used in an update function: {error}")

    def spec(self, number: int) -> TensorSpec:
        """The spec of a value, by its number in this recording."""
        return self._specs[number]

    def apply(self, op: str, args: Sequence[object], about: str = "", **attrs: Attr) -> Tracer:
        """Records one op.

        Args:
            op: a key of `OPS`.
            args: tracers, arrays and Python scalars.
            about: what it is for, to begin a message with.
            attrs: the op's attributes.

        Raises:
            ProgramError: with the caller's file and line, if the op does not take these.
        """
        tracers = [arg if is_weak(arg) else self.tracer(arg) for arg in args]
        numbers = []
        for arg, tracer in zip(args, tracers, strict=True):
            weak = not isinstance(tracer, Tracer)
            numbers.append((self._weak(op, arg, tracers, about) if weak else self.tracer(tracer)).number)
        try:
            spec = infer(op, [self._specs[number] for number in numbers], attrs)
        except (ProgramError, InvalidRequest) as error:
            fail(about + error.message)
        return Tracer(self, self._add(Node(op, tuple(numbers), tuple(sorted(attrs.items()))), spec))

    def tracer(self, value: object) -> Tracer:
        """The tracer of anything that may meet a tracer in an op, Python scalars taken as arrays."""
        found = value if isinstance(value, Tracer) else self._lift(value) if self._lift else None
        if found is None:
            return self.operand(value)
        if found.recording is not self or not self._open:
            fail("a value of another update function, or of one that has returned, is used; return it there")
        return found

    def astype(self, value: object, dtype: DType) -> Tracer:
        """The value in another dtype."""
        tracer, name = self.tracer(value), np.dtype(dtype).name
        return tracer if tracer.dtype.name == name else self.apply("astype", (tracer,), dtype=name)

    def broadcast_to(self, value: object, shape: int | Sequence[int]) -> Tracer:
        """The value in another shape, repeated as NumPy does."""
        sizes = (shape,) if isinstance(shape, int) else tuple(operator.index(n) for n in shape)
        tracer = self.tracer(value)
        return tracer if tracer.shape == sizes else self.apply("broadcast_to", (tracer,), shape=sizes)

    def fit(self, value: Any, variable: VariableTracer) -> Tracer:
        """The value as it is assigned: cast within its kind and broadcast, as NumPy does in place."""
        about = f"variable {variable.name!r}: "
        if is_weak(value):
            value = self._typed(value, np.result_type(variable.dtype, value), about)
        tracer = self.tracer(value)
        if not np.can_cast(tracer.dtype, variable.dtype, "same_kind"):
            fail(
                f"{about}{tracer.dtype} cannot be assigned to {variable.dtype}; "
                f"write value.astype({variable.dtype.name!r})"
            )
        tracer = self.astype(tracer, variable.dtype)
        if tracer.shape == variable.shape:
            return tracer
        return self.apply("broadcast_to", (tracer,), about, shape=variable.shape)

    def finish(self, result: object = None) -> Traced:
        """Ends the recording; its tracers cannot be used any more.

        Args:
            result: what the function returned, a nest.

        Raises:
            ProgramError: the program is too long.
        """
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
            fail("a value is used after its update function has returned; return it from there")
        self._steps.append(step)
        self._specs.append(spec)
        return len(self._steps) - 1

    def _weak(self, op: str, value: Any, peers: Sequence[object], about: str) -> Tracer:
        """A Python scalar as NumPy would cast it beside these arguments of this op."""
        dtypes: list[Any] = [peer.dtype if isinstance(peer, Tracer) else peer for peer in peers]
        function = getattr(np, OPS[op].numpy)
        try:
            if not isinstance(function, np.ufunc):  # Only `where`, whose condition has no say.
                return self._typed(value, np.result_type(*dtypes[1:]), about)
            kinds = (d if isinstance(d, np.dtype) else _weak_type(d) for d in dtypes)
            resolved = function.resolve_dtypes((*kinds, None))
        except TypeError as error:
            fail(f"{about}{op} does not take these: {error}")
        at = next(i for i, peer in enumerate(peers) if peer is value)
        return self._typed(value, resolved[at], about)

    def _typed(self, value: object, dtype: np.dtype[Any], about: str) -> Tracer:
        try:
            with np.errstate(all="ignore"):
                return self.operand(np.asarray(value, dtype))
        except OverflowError as error:
            fail(f"{about}{error}")


def trace(
    recording: Recording,
    fn: Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object] | None = None,
) -> Traced:
    """Runs an update function once and gives what it did.

    Args:
        recording: has made the tracers that are in `args`; it ends here.
        fn: the update function.
        args, kwargs: tracers, and anything else that `fn` takes; Python scalars stay what they are
            and become operands where they meet a tracer.

    Raises:
        ProgramError: with the user's file and line, for what cannot be traced.
    """
    return recording.finish(fn(*args, **(kwargs or {})))


class Tracer(NDArrayOperatorsMixin):
    """A value in a program: an array of known shape and dtype that cannot be looked at.

    Takes Python's operators, NumPy's and CuPy's functions and `psclient.ops`, as far as `OPS` goes.
    Whatever would need the value raises `ProgramError` and says what to write instead.
    """

    __array_priority__ = 1000  # CuPy's operators then leave the operation to us.

    def __init__(self, recording: Recording, number: int) -> None:
        self.recording = recording
        self.number = number

    @property
    def spec(self) -> TensorSpec:
        """Shape and dtype."""
        return self.recording.spec(self.number)

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the dimensions."""
        return self.spec.shape

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """The dtype, as a NumPy dtype."""
        return DTYPES[self.spec.dtype]

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.spec.size

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.spec})"

    def astype(self, dtype: DType, copy: bool = True) -> Tracer:
        """The value in another dtype."""
        return self.recording.astype(self, dtype)

    def sum(self, axis: Any = None, dtype: DType = None, out: None = None, keepdims: bool = False) -> Tracer:
        """The sum over axes, as `numpy.ndarray.sum`."""
        return self._reduce("sum", axis, out, keepdims, dtype)

    def mean(self, axis: Any = None, dtype: DType = None, out: None = None, keepdims: bool = False) -> Tracer:
        """The mean over axes, as `numpy.ndarray.mean`."""
        return self._reduce("mean", axis, out, keepdims, dtype)

    def max(self, axis: Any = None, out: None = None, keepdims: bool = False) -> Tracer:
        """The maximum over axes, as `numpy.ndarray.max`."""
        return self._reduce("max", axis, out, keepdims)

    def min(self, axis: Any = None, out: None = None, keepdims: bool = False) -> Tracer:
        """The minimum over axes, as `numpy.ndarray.min`."""
        return self._reduce("min", axis, out, keepdims)

    def all(self, axis: Any = None, out: None = None, keepdims: bool = False) -> Tracer:
        """Whether all are true over axes, as `numpy.ndarray.all`."""
        return self._reduce("all", axis, out, keepdims)

    def any(self, axis: Any = None, out: None = None, keepdims: bool = False) -> Tracer:
        """Whether any is true over axes, as `numpy.ndarray.any`."""
        return self._reduce("any", axis, out, keepdims)

    def _reduce(self, op: str, axis: Any, out: None, keepdims: bool, dtype: DType = None) -> Tracer:
        if out is not None:
            fail(_IN_PLACE)
        if isinstance(axis, tuple | list):
            axis = tuple(operator.index(n) for n in axis)
        elif axis is not None:
            axis = operator.index(axis)
        tracer = self if dtype is None else self.astype(dtype)
        return self.recording.apply(op, (tracer,), axis=axis, keepdims=bool(keepdims))

    def clip(
        self, a_min: Any = None, a_max: Any = None, out: None = None, *, min: Any = None, max: Any = None
    ) -> Tracer:
        """The value within bounds, as `numpy.clip`; the bounds have the names of NumPy 1 and those of now."""
        if out is not None:
            fail(_IN_PLACE)
        low, high = (a_min if min is None else min), (a_max if max is None else max)
        raised = self if low is None else self.recording.apply("maximum", (self, low))
        return raised if high is None else self.recording.apply("minimum", (raised, high))

    def round(self, decimals: int = 0, out: None = None) -> Tracer:
        """The nearest whole numbers, as `numpy.ndarray.round` without decimals."""
        if decimals or out is not None:
            fail("rounding takes no decimals and no out in an update function")
        return self if self.dtype.kind in "iu" else self.recording.apply("round", (self,))

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: object, **kwargs: object) -> Tracer:
        if kwargs.get("out") is not None:
            fail(_IN_PLACE)
        if method != "__call__":
            fail(f"np.{ufunc.__name__}.{method} is not known in update functions; write np.sum or np.max")
        return _ufunc(self.recording, f"np.{ufunc.__name__}", _BY_UFUNC.get(ufunc.__name__), inputs, kwargs)

    def __array_function__(
        self, func: Callable[..., Any], types: object, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        handler, name = _FUNCTIONS.get(func), f"np.{func.__name__}"
        if handler is None:
            _unknown(name)
        if args and is_weak(args[0]) and func is not np.where:
            fail(f"{name} takes an array first in an update function, and not a {type(args[0]).__name__}")
        try:
            bound = inspect.signature(handler).bind(*map(self.recording.tracer, args[:1]), *args[1:], **kwargs)
        except TypeError as error:
            fail(f"{name} in an update function: {error}")
        return handler(*bound.args, **bound.kwargs)

    def __cupy_override_elementwise_kernel__(self, kernel: Any, *args: Any, **kwargs: object) -> Tracer:
        # CuPy names its own ufuncs cupy_*; a kernel that a user wrote may have any name and mean anything.
        own, name = kernel.name.startswith("cupy_"), kernel.name.removeprefix("cupy_")
        if own and name == "clip":
            return self.recording.tracer(args[0]).clip(*args[1:])
        op = _BY_UFUNC.get(name) if own else None
        if kwargs.get("out") is not None or (op and len(args) > OPS[op].arity):
            fail(_IN_PLACE)
        return _ufunc(self.recording, f"cupy.{name}", op, args, kwargs)

    def __pow__(self, exponent: object) -> Tracer:
        # As NumPy does; and these two are many times faster than a general power.
        if isinstance(exponent, int | float) and is_weak(exponent):
            inexact = self.dtype.kind in "fc"
            if exponent == 2 and (inexact or isinstance(exponent, int)):
                return self.recording.apply("square", (self,))
            if exponent == 0.5 and inexact:
                return self.recording.apply("sqrt", (self,))
        return self.recording.apply("pow", (self, exponent))

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError(f"len() of {self!r}, which has no dimensions")
        return self.shape[0]

    def __bool__(self) -> NoReturn:
        fail(f"`if`, `and`, `or`, `not` or `while` on {self!r}: {_CHOOSE} (or ps.ops.where)")

    def __int__(self) -> NoReturn:
        fail(f"int() of {self!r}: {_NUMBER}")

    def __index__(self) -> NoReturn:
        fail(f"{self!r} as an index: {_NUMBER}")

    def __float__(self) -> NoReturn:
        fail(f"float() of {self!r}: {_NUMBER}; write np.sqrt(x) for math.sqrt(x)")

    def __complex__(self) -> NoReturn:
        fail(f"complex() of {self!r}: {_NUMBER}")

    def __array__(self, *args: object, **kwargs: object) -> NoReturn:
        fail(f"np.asarray() of {self!r}: it is an array already, and {_NUMBER}")

    def __iter__(self) -> NoReturn:
        fail(f"iteration over {self!r}: {_WHOLE}")

    def __getitem__(self, key: object) -> NoReturn:
        fail(f"indexing of {self!r}: {_WHOLE}")

    def __setitem__(self, key: object, value: object) -> NoReturn:
        fail(f"assignment to items of {self!r}: write np.where(mask, new, old), or v.assign(value)")


class VariableTracer(Tracer):
    """A variable in a program. After an assignment it denotes its new value."""

    def __init__(self, recording: Recording, number: int, name: str) -> None:
        super().__init__(recording, number)
        self.input = number
        self.name = name
        self.assigned = False

    def value(self) -> Tracer:
        """The value that it has at this point; later assignments do not change that."""
        return Tracer(self.recording, self.number)

    read_value = value

    def assign(self, value: object) -> VariableTracer:
        """Gives it a value: broadcast to its shape and cast to its dtype within the same kind.

        Returns:
            Itself.

        Raises:
            ProgramError: with its name, if shape or dtype do not fit.
        """
        self.number = self.recording.fit(value, self).number
        self.assigned = True
        return self

    def assign_add(self, delta: object) -> VariableTracer:
        """Adds to it; as `assign`."""
        return self.assign(self.recording.apply("add", (self, delta), f"variable {self.name!r}: "))

    def assign_sub(self, delta: object) -> VariableTracer:
        """Subtracts from it; as `assign`."""
        return self.assign(self.recording.apply("subtract", (self, delta), f"variable {self.name!r}: "))


def is_weak(value: object) -> bool:
    """Whether it is a Python scalar, which takes its dtype from what it meets."""
    return isinstance(value, bool | int | float | complex) and not isinstance(value, np.generic)


def fail(message: str) -> NoReturn:
    """Raises `ProgramError` at the user's line: the innermost one outside of this package and NumPy."""
    frame: FrameType | None = sys._getframe(1)
    while frame and str(frame.f_globals.get("__name__")).partition(".")[0] in _NOT_THE_USERS:
        frame = frame.f_back
    where = f"{frame.f_code.co_filename}:{frame.f_lineno}: " if frame else ""
    raise ProgramError(where + message)


def _unknown(name: str) -> NoReturn:
    known = sorted({*_BY_UFUNC, *(function.__name__ for function in _FUNCTIONS)})
    fail(f"{name} is not known in update functions; known are {', '.join(known)}")


def _weak_type(value: object) -> Any:
    # A bool is not weak for NumPy; of the others the type alone counts. Subclasses count as their base.
    if isinstance(value, bool):
        return np.dtype(bool)
    return next(kind for kind in (int, float, complex) if isinstance(value, kind))


def _renumber(node: Node, place: Mapping[int, int]) -> Node:
    return Node(node.op, tuple(place[arg] for arg in node.args), node.attrs)


# What NumPy's functions become. A handler's signature is the part of NumPy's that is understood.


def _ufunc(
    recording: Recording, name: str, op: str | None, args: Sequence[object], kwargs: Mapping[str, object]
) -> Tracer:
    if op is None:
        _unknown(name)
    given = [key for key, value in kwargs.items() if value is not None]
    if given:
        fail(f"{name} takes no {', '.join(given)} in an update function; write np.where or .astype")
    return _where(recording.tracer(args[0]), *args[1:]) if op == "where" else recording.apply(op, args)


def _where(condition: Tracer, *values: object) -> Tracer:
    if len(values) != 2:
        fail("np.where takes a condition and two values in an update function")
    return condition.recording.apply("where", (condition.astype(bool), *values))


def _dot(a: Tracer, b: object) -> Tracer:
    return a.recording.apply("matmul", (a, b))


def _broadcast_to(array: Tracer, shape: int | Sequence[int]) -> Tracer:
    return array.recording.broadcast_to(array, shape)


def _full_like(a: Tracer, fill_value: object, dtype: DType = None) -> Tracer:
    return a.recording.broadcast_to(a.recording.astype(fill_value, dtype or a.dtype), a.shape)


_FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    np.sum: Tracer.sum,
    np.mean: Tracer.mean,
    np.max: Tracer.max,
    np.amax: Tracer.max,
    np.min: Tracer.min,
    np.amin: Tracer.min,
    np.all: Tracer.all,
    np.any: Tracer.any,
    np.clip: Tracer.clip,
    np.round: Tracer.round,
    np.around: Tracer.round,
    np.where: _where,
    np.dot: _dot,
    np.broadcast_to: _broadcast_to,
    np.full_like: _full_like,
    np.zeros_like: lambda a, dtype=None: _full_like(a, 0, dtype),
    np.ones_like: lambda a, dtype=None: _full_like(a, 1, dtype),
    np.shape: lambda a: a.shape,
    np.ndim: lambda a: a.ndim,
    np.size: lambda a: a.size,
}

if hasattr(np, "astype"):  # Since NumPy 2.1.
    _FUNCTIONS[np.astype] = Tracer.astype

_BY_UFUNC: dict[str, str] = {
    name: row.name
    for row in OPS.values()
    for function in [getattr(np, row.numpy, None)]
    if isinstance(function, np.ufunc) or row.name == "where"
    for name in {row.numpy, getattr(function, "__name__", row.numpy)}
}
"""Ops by NumPy's name of the ufunc, its aliases included; CuPy has a ufunc for `where` as well."""
