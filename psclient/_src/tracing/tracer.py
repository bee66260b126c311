"""Tracers: what an update function gets in place of arrays, to have what it does with them recorded.

A `Tracer` stands for one value of a `Recording` and behaves as a NumPy array that cannot be looked at.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from psclient._src.arrays.devices import Value
from psclient._src.arrays.nest import Nest
from psclient._src.tracing.diagnostics import UnknownAttribute, fail, instead_of
from psclient._src.tracing.symbolic_numbers import Scalar, plain_number
from pswire.model.program import OPS, Attr
from pswire.model.tensor import DTYPES, TensorSpec

DType = Any  # Whatever `numpy.dtype` takes, or None where that is the default.

_NOT_YET = "the update function is being traced and this value is not known yet"
_CHOOSE = f"{_NOT_YET}; write np.where(condition, a, b)"
_NUMBER = f"{_NOT_YET}; keep it an array, or use .astype"
_WHOLE = "update functions work on whole arrays; write array operations, such as np.sum(x, axis=0)"
_IN_PLACE = "values cannot be changed in place; write x = x + y, or v.assign_add(y) for a variable"


class Recorder(Protocol):
    """The recorder of operations on tracers: a `Recording`."""

    named: bool
    """True once a tracer was asked for its variable's name."""

    def spec(self, place: int, /) -> TensorSpec:
        """The spec of a value, by its number."""

    def tracer(self, value: object) -> Tracer:
        """The tracer of anything that may meet a tracer in an op."""

    def apply(self, op: str, args: Sequence[object], about: str = "", **attrs: Attr) -> Tracer:
        """Records one op."""

    def astype(self, value: object, dtype: DType) -> Tracer:
        """The value in another dtype."""

    def broadcast_to(self, value: object, shape: int | Sequence[int]) -> Tracer:
        """The value in another shape."""

    def fit(self, value: object, variable: VariableTracer) -> Tracer:
        """The value as it is assigned to a variable."""


class Tracer(NDArrayOperatorsMixin):
    """A value in a program: an array of known shape and dtype that cannot be looked at.

    Takes Python's operators, NumPy's and CuPy's functions and `psclient.ops`, as far as `OPS` goes.
    Whatever would need the value raises `ProgramError` and says what to write instead.
    """

    __array_priority__ = 1000  # CuPy's operators then leave the operation to us.

    def __init__(self, recording: Recorder, number: int) -> None:
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

    def copy(self) -> Tracer:
        """The value as it is now; later assignments to a variable do not change it."""
        return Tracer(self.recording, self.number)

    def sum(self, axis: object = None, dtype: DType = None, out: None = None, keepdims: bool = False) -> Tracer:
        """The sum over axes, as `numpy.ndarray.sum`."""
        return self._reduce("sum", axis, out, keepdims, dtype)

    def mean(self, axis: object = None, dtype: DType = None, out: None = None, keepdims: bool = False) -> Tracer:
        """The mean over axes, as `numpy.ndarray.mean`."""
        return self._reduce("mean", axis, out, keepdims, dtype)

    def max(self, axis: object = None, out: None = None, keepdims: bool = False) -> Tracer:
        """The maximum over axes, as `numpy.ndarray.max`."""
        return self._reduce("max", axis, out, keepdims)

    def min(self, axis: object = None, out: None = None, keepdims: bool = False) -> Tracer:
        """The minimum over axes, as `numpy.ndarray.min`."""
        return self._reduce("min", axis, out, keepdims)

    def all(self, axis: object = None, out: None = None, keepdims: bool = False) -> Tracer:
        """Returns whether all are true over axes, as `numpy.ndarray.all`."""
        return self._reduce("all", axis, out, keepdims)

    def any(self, axis: object = None, out: None = None, keepdims: bool = False) -> Tracer:
        """Returns whether any is true over axes, as `numpy.ndarray.any`."""
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
        self, a_min: object = None, a_max: object = None, out: None = None, *, min: object = None, max: object = None
    ) -> Tracer:
        """The value within bounds, as `numpy.clip`; the bounds have the names of NumPy 1 and those of now."""
        if out is not None:
            fail(_IN_PLACE)
        low, high = (a_min if min is None else min), (a_max if max is None else max)
        low = None if self._is_bound(low, operator.le, "min") else low
        high = None if self._is_bound(high, operator.ge, "max") else high
        raised = self.copy() if low is None else self.recording.apply("maximum", (self, low))
        return raised if high is None else self.recording.apply("minimum", (raised, high))

    def _is_bound(self, value: object, beyond: Callable[[Value, Value], object], end: str) -> bool:
        """Returns whether a whole number is no bound, since the dtype ends before or there; as NumPy does."""
        whole = self.dtype.kind in "iu" and type(plain_number(value)) is int
        return whole and bool(beyond(value, int(getattr(np.iinfo(self.dtype.name), end))))

    def round(self, decimals: int = 0, out: None = None) -> Tracer:
        """The nearest whole numbers, as `numpy.ndarray.round` without decimals."""
        if decimals or out is not None:
            fail("rounding does not support decimals or out in an update function")
        return self if self.dtype.kind in "iu" else self.recording.apply("round", (self,))

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: object, **kwargs: object) -> Tracer:
        if kwargs.get("out") is not None:
            fail(_IN_PLACE)
        if method != "__call__":
            fail(f"np.{ufunc.__name__}.{method} is not supported in update functions; use np.sum or np.max")
        return _ufunc(self.recording, f"np.{ufunc.__name__}", self._op(ufunc.__name__, inputs), inputs, kwargs)

    def _op(self, ufunc: str, inputs: Sequence[object]) -> str | None:
        """The op that means the same as a ufunc of NumPy or CuPy; of bools `&`, `|` and `~` are logical ones."""
        op = _BY_UFUNC.get(ufunc)
        if op is None and ufunc in _OF_BOOLS:
            dtypes = {np.result_type(x.dtype if hasattr(x, "dtype") else np.asarray(x)) for x in inputs}
            return _OF_BOOLS[ufunc] if dtypes == {np.dtype(bool)} else None
        return op

    def __array_function__(
        self, func: Callable[..., object], types: object, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> Nest:
        handler, name = _FUNCTIONS.get(func), _name(func)
        if handler is None:
            _unknown(name)
        if args and is_weak(args[0]) and func is not np.where:
            fail(f"the first argument of {name} in an update function must be an array, not a {type(args[0]).__name__}")
        try:
            bound = inspect.signature(handler).bind(*map(self.recording.tracer, args[:1]), *args[1:], **kwargs)
        except TypeError as error:
            fail(f"{name} in an update function: {error}")
        return handler(*bound.args, **bound.kwargs)

    def __cupy_override_elementwise_kernel__(self, kernel: Any, *args: Value, **kwargs: object) -> Tracer:
        # CuPy names its own ufuncs cupy_*; a kernel that a user wrote may have any name and mean anything.
        own, name = kernel.name.startswith("cupy_"), kernel.name.removeprefix("cupy_")
        if own and name == "clip":
            return self.recording.tracer(args[0]).clip(*args[1:])
        op = self._op(name, args) if own else None
        if kwargs.get("out") is not None or (op and len(args) > OPS[op].arity):
            fail(_IN_PLACE)
        return _ufunc(self.recording, f"cupy.{name}", op, args, kwargs)

    def __pow__(self, exponent: object) -> Tracer:
        # As NumPy does; and these two are many times faster than a general power.
        if is_weak(exponent) and isinstance(plain_number(exponent), int | float):
            inexact = self.dtype.kind in "fc"
            if exponent == 2 and (inexact or isinstance(plain_number(exponent), int)):
                return self.recording.apply("square", (self,))
            if exponent == 0.5 and inexact:
                return self.recording.apply("sqrt", (self,))
        return self.recording.apply("pow", (self, exponent))

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):  # Libraries try these out.
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        fail(f"{self!r} has no {name!r} in an update function: {instead_of(name, _known())}", UnknownAttribute)

    def __format__(self, spec: str) -> str:
        if spec:
            fail(f"{self!r} cannot be formatted as {spec!r}: {_NOT_YET}; return it, and print the result of the update")
        return str(self)

    def __round__(self, digits: int | None = None) -> NoReturn:
        fail(f"round() of {self!r}: write np.round(x)")

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
    """A variable in a program. After an assignment it denotes its new value.

    Attributes:
        assigned: number of assignments so far.
    """

    def __init__(self, recording: Recorder, number: int, name: str) -> None:
        super().__init__(recording, number)
        self.input = number
        self.label = name
        self.assigned = 0

    @property
    def name(self) -> str:
        """The variable's name; a function that asks for it may do something else for another one."""
        self.recording.named = True
        return self.label

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
        self.assigned += 1
        return self

    def assign_add(self, delta: object) -> VariableTracer:
        """Adds to it; as `assign`."""
        return self.assign(self.recording.apply("add", (self, delta), f"variable {self.label!r}: "))

    def assign_sub(self, delta: object) -> VariableTracer:
        """Subtracts from it; as `assign`."""
        return self.assign(self.recording.apply("subtract", (self, delta), f"variable {self.label!r}: "))


def is_weak(value: object) -> bool:
    """Returns whether it is a Python scalar, which takes its dtype from what it meets."""
    return isinstance(value, bool | int | float | complex | Scalar) and not isinstance(value, np.generic)


def _name(function: Callable[..., object]) -> str:
    return f"{function.__module__}.{function.__name__}".replace("numpy.", "np.", 1)


def _unknown(name: str) -> NoReturn:
    fail(f"{name} is not supported in update functions; use one of {', '.join(_known())}")


def _known() -> list[str]:
    return sorted({*_BY_UFUNC, *(_name(function).removeprefix("np.") for function in _FUNCTIONS)})


# What NumPy's functions become. A handler's signature is the part of NumPy's that is understood.


def _ufunc(
    recording: Recorder, name: str, op: str | None, args: Sequence[object], kwargs: Mapping[str, object]
) -> Tracer:
    if op is None:
        _unknown(name)
    given = [key for key, value in kwargs.items() if value is not None]
    if given:
        fail(f"{name} does not support {', '.join(given)} in an update function; use np.where or .astype")
    return _where(recording.tracer(args[0]), *args[1:]) if op == "where" else recording.apply(op, args)


def _where(condition: Tracer, *values: object) -> Tracer:
    if len(values) != 2:
        fail("np.where in an update function needs a condition and two values")
    return condition.recording.apply("where", (condition.astype(bool), *values))


def _dot(a: Tracer, b: object) -> Tracer:
    other = a.recording.tracer(b)
    if a.ndim == other.ndim == 2:
        return a.recording.apply("matmul", (a, other))
    scales = 0 in (a.ndim, other.ndim)
    if not scales and (a.ndim > 2 or other.ndim > 1 or a.shape[-1] != other.shape[0]):
        fail(f"np.dot of {a!r} and {other!r} is not supported; use two vectors, a matrix and a vector, or two matrices")
    product = a.recording.apply("multiply", (a, other))
    return product if scales else product.sum(axis=-1).astype(product.dtype)


def _broadcast_to(array: Tracer, shape: int | Sequence[int]) -> Tracer:
    return array.recording.broadcast_to(array, shape)


def _full_like(a: Tracer, fill_value: object, dtype: DType = None) -> Tracer:
    return a.recording.broadcast_to(a.recording.astype(fill_value, dtype or a.dtype), a.shape)


def _norm(x: Tracer, ord: object = None, axis: object = None, keepdims: bool = False) -> Tracer:
    """NumPy's norm as far as it is one of vectors, or the root of the sum of all squares."""
    one_axis = isinstance(axis, int) or (axis is None and x.ndim == 1)
    if ord is not None and not one_axis and not (isinstance(ord, str) and ord == "fro"):
        fail(f"np.linalg.norm of matrices with ord={ord!r} is not supported in update functions; leave ord out")
    return _vector_norm(x, axis=axis, keepdims=keepdims, ord=2 if ord in (None, "fro") else ord)


def _vector_norm(x: Tracer, *, axis: object = None, keepdims: bool = False, ord: object = 2) -> Tracer:
    if ord not in (1, 2, np.inf, -np.inf):
        fail(f"the norm with ord={ord!r} is not supported in update functions; use 1, 2, inf or -inf")
    if x.dtype.kind not in "fc":  # As NumPy does, for which bfloat16 is no floating dtype.
        x = x.astype(np.float64)
    size = x.recording.apply("abs", (x,)) if ord != 2 or x.dtype.kind == "c" else x
    if ord == 2:
        total = x.recording.apply("square", (size,)).sum(axis=axis, keepdims=keepdims)
        return x.recording.apply("sqrt", (total,))
    if ord == 1:
        return size.sum(axis=axis, keepdims=keepdims)
    return size.max(axis=axis, keepdims=keepdims) if ord > 0 else size.min(axis=axis, keepdims=keepdims)


_FUNCTIONS: dict[Callable[..., object], Callable[..., object]] = {
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
    np.linalg.norm: _norm,
    np.linalg.vector_norm: _vector_norm,
    np.copy: lambda a: a.copy(),
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

_OF_BOOLS = {
    "bitwise_and": "logical_and",
    "bitwise_or": "logical_or",
    "bitwise_xor": "not_equal",
    "invert": "logical_not",
    "bitwise_not": "logical_not",
}
"""Ops by NumPy's name of a ufunc that means the same for bools alone."""
