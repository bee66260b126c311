"""Numbers that may change from call to call: what an update function that is traced once gets in their place.

A `Scalar` computes as the Python number would, and has a `Tape` note how, so that the same can be computed from
other numbers. Where the function looks at a value, as `if` does, the tape notes what it saw: it holds for numbers
with which the function would see the same. To `isinstance` it is a number of its type; `type(x) is float` is False.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from psclient._src.arrays.devices import Value
from psclient._src.tracing.diagnostics import Brought

Number = bool | int | float | complex

_Operator = Callable[["Scalar", object], object]


class Tape:
    """The computation of a function from some numbers. Used by one thread while it is written; afterwards by any.

    Args:
        numbers: the numbers that may change.

    Attributes:
        values: the given numbers, and then the computed ones.
        brought: numbers that are no arguments, in the order in which they were met.
    """

    def __init__(self, numbers: Sequence[Number]) -> None:
        self.values: list[Any] = list(numbers)
        self._given = len(numbers)
        self.brought: list[Brought] = []
        self._steps: list[tuple[Callable[..., Any], tuple[int, ...]]] = []
        self._seen: list[tuple[int, object]] = []

    def scalar(self, place: int) -> Scalar:
        """Stands for a number: the given ones come first, and then what was computed."""
        return Scalar(self, place, self.values[place])

    def compute(self, fn: Callable[..., object], *args: object) -> Scalar:
        """Calls a function with scalars and numbers, and notes it."""
        places = tuple(arg.place if isinstance(arg, Scalar) else self._constant(arg) for arg in args)
        return self.scalar(self._add(fn, places))

    def _constant(self, value: object) -> int:
        self.brought.append(Brought.here(value, np.asarray(value)))
        return self._add(lambda: value, ())

    def _add(self, fn: Callable[..., object], places: tuple[int, ...]) -> int:
        self.values.append(fn(*(self.values[place] for place in places)))
        self._steps.append((fn, places))
        return len(self.values) - 1

    def sources(self, place: int) -> set[int]:
        """Returns the places of the given numbers that a value is, or is computed from."""
        if place < self._given:
            return {place}
        return {source for before in self._steps[place - self._given][1] for source in self.sources(before)}

    def expression(self, place: int) -> Hashable:
        """Returns how a value is computed; equal expressions give the same value of the same numbers, on any tape."""
        if place < self._given:
            return place
        fn, places = self._steps[place - self._given]
        constant = self.values[place]
        return (fn, *map(self.expression, places)) if places else (type(constant), repr(constant))

    def see(self, scalar: Scalar) -> Any:
        """The value, for a function that looks at it."""
        self._seen.append((scalar.place, scalar.value))
        return scalar.value

    def replay(self, numbers: Sequence[Number]) -> list[Any] | None:
        """All values, computed from other numbers of the same types; None where the tape does not hold for them."""
        values: list[object] = list(numbers)
        try:
            for fn, places in self._steps:
                values.append(fn(*[values[place] for place in places]))
        except (ArithmeticError, ValueError, TypeError):
            return None  # The function may not come to this with these numbers; if it does, it raises itself.
        if any(values[place] != seen for place, seen in self._seen):
            return None
        return values if all(type(a) is type(b) for a, b in zip(values, self.values, strict=True)) else None


class Scalar:
    """Stands for a Python number in an update function that is traced once.

    Args:
        tape: records what is done with it.
        place: index of its value on the tape.
        value: its value in the call that is traced.
    """

    def __init__(self, tape: Tape, place: int, value: Number) -> None:
        self.tape = tape
        self.place = place
        self.value = value

    # Not a subclass of float: C code would read the value of one without asking, and so without a note.
    @property  # type: ignore[misc]  # It cannot be set.
    def __class__(self) -> type[Any]:
        return type(self.value)

    def __getattr__(self, name: str) -> Any:
        # NumPy and others try out names that no number has: that is not yet a look at the value.
        if name.startswith("__") or not hasattr(type(self.value), name):
            raise AttributeError(f"{type(self.value).__name__!r} object has no attribute {name!r}")
        return getattr(self.tape.see(self), name)

    def __repr__(self) -> str:
        return f"Scalar({self.value!r})"

    def __str__(self) -> str:
        return str(self.tape.see(self))

    def __bool__(self) -> bool:
        return bool(self.tape.see(self.tape.compute(bool, self)))

    def __int__(self) -> int:
        return int(self.tape.see(self))

    def __index__(self) -> int:
        return operator.index(self.tape.see(self))

    def __float__(self) -> float:
        return float(self.tape.see(self))

    def __trunc__(self) -> Scalar:
        return self.tape.compute(math.trunc, self)

    def __divmod__(self, other: Value) -> tuple[Value, Value]:
        return self // other, self % other

    def __rdivmod__(self, other: Value) -> tuple[Value, Value]:
        return other // self, other % self

    def __complex__(self) -> complex:
        return complex(self.tape.see(self))

    def __hash__(self) -> int:
        return hash(self.tape.see(self))

    def __format__(self, spec: str) -> str:
        return format(self.tape.see(self), spec)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.array(self.tape.see(self), dtype=dtype)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Value, **kwargs: object) -> Value:
        # What records, such as a tracer, takes a scalar as an operand; NumPy itself has to know the value.
        own = (Scalar, np.ndarray)
        if any(hasattr(type(arg), "__array_ufunc__") and not isinstance(arg, own) for arg in inputs):
            return NotImplemented
        return getattr(ufunc, method)(*(plain_number(arg, look=True) for arg in inputs), **kwargs)


def plain_number(value: object, look: bool = False) -> Any:
    """Returns the number for which a scalar stands; anything else itself.

    Args:
        value: perhaps a scalar.
        look: True if the result depends on the value, and not only on its type.
    """
    if not isinstance(value, Scalar):
        return value
    return value.tape.see(value) if look else value.value


def _operators() -> None:
    """Python's operators: among numbers they are computed and noted, beside all else left to that."""

    def binary(fn: Callable[[Value, Value], object], looks: bool) -> tuple[_Operator, _Operator]:
        def forward(self: Scalar, other: object) -> object:
            if not isinstance(other, Scalar | Number) or isinstance(other, np.generic):
                return NotImplemented
            found = self.tape.compute(fn, self, other)
            return self.tape.see(found) if looks else found

        def backward(self: Scalar, other: object) -> object:
            if not isinstance(other, Number) or isinstance(other, np.generic):
                return NotImplemented
            return self.tape.compute(fn, other, self)

        return forward, backward

    for name in ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift", "and_", "or_", "xor"]:
        forward, backward = binary(getattr(operator, name), False)
        setattr(Scalar, f"__{name.rstrip('_')}__", forward)
        setattr(Scalar, f"__r{name.rstrip('_')}__", backward)
    for name in ["lt", "le", "eq", "ne", "gt", "ge"]:
        setattr(Scalar, f"__{name}__", binary(getattr(operator, name), True)[0])
    for name in ["neg", "pos", "abs", "invert"]:
        fn = getattr(operator, name)
        setattr(Scalar, f"__{name}__", lambda self, fn=fn: self.tape.compute(fn, self))
    Scalar.__round__ = lambda self, digits=None: self.tape.compute(round, self, digits)  # type: ignore[attr-defined]


_operators()
