"""Update functions that are traced once, and not again for other numbers.

    @ps.update_function
    def decay(v, rate):
        v.assign_sub(rate * v)

A Python function may read whatever it likes, so that nobody can see from outside whether two calls of it do the same.
`update_function` is the author's promise that what it does depends on its arguments alone. Then a call whose arguments
have the same structure, shapes and dtypes makes the same program; numbers among them are the program's operands.
"""

from __future__ import annotations

import enum
import functools
import itertools
import types
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from psclient import context, nest
from psclient.readable import Readable
from psclient.recording import Recording, ScalarOrigin, Traced, trace
from psclient.scalars import Number, Tape
from psclient.tracer import Tracer, fail
from psclient.values import DistributedValues
from pswire.program import InputKind
from pswire.tensor import Array, TensorSpec

MAX_TRACES = 1024
"""For how many kinds of arguments a function keeps traces; then it forgets all of them."""

MAX_TRACES_OF_ONE_KIND = 8
"""How many traces it keeps that differ by what the function saw of numbers."""

_NUMBERS = frozenset({int, float, complex})
_WORDS = (
    *(bool, str, bytes, type(None), enum.Enum, type, np.dtype),
    *(types.FunctionType, types.BuiltinFunctionType, np.ufunc),
)


class Given(NamedTuple):
    """A leaf of the arguments that becomes an input of the program.

    Attributes:
        kind: of the input.
        spec: its dtype and shape.
        source: what it is to the caller; the same for two leaves that are one input. Of an operand its array.
        variable: the variable, if it is one.
    """

    kind: InputKind
    spec: TensorSpec
    source: Any
    variable: Any = None


class Configured:
    """Base of objects of which an update function reads numbers and words: optimizers, schedules.

    Among the arguments of an update function stand its `settings`; the function gets an object of the same class that
    has the same attributes: numbers, words, functions, tuples of these, and other configured objects. It lacks
    all else.
    """

    def settings(self) -> Settings:
        """What an update function sees of it, as of now."""
        return self.settings_with()

    def settings_with(self, **replaced: Any) -> Settings:
        """As `settings`, with other values of some attributes."""
        taken = {name: _taken(value) for name, value in (vars(self) | replaced).items()}
        for name, value in taken.items():
            if value is _LEFT_OUT and hasattr(type(self), name):
                raise TypeError(
                    f"attribute {name!r} of {type(self).__name__} hides the class's own, and update functions see "
                    "numbers, words, functions and tuples only; make it one of these, or give it another name"
                )
        return Settings(type(self), {name: value for name, value in taken.items() if value is not _LEFT_OUT})


class Settings:
    """The attributes of a configured object, as an argument of update functions.

    Args:
        kind: its class.
        attributes: by name.

    Attributes:
        key: all but the numbers.
        numbers: in order.
    """

    def __init__(self, kind: type, attributes: Mapping[str, Any]) -> None:
        self._kind = kind
        self._attributes = attributes
        self.numbers: list[Number] = []
        self.view(self.numbers.append)
        self.key = _Key((kind, *((name, _key(value)) for name, value in attributes.items())))

    def view(self, number: Callable[[Number], Any]) -> Any:
        """An object of the class with these attributes.

        Args:
            number: what shall stand for a number.
        """
        made: Any = object.__new__(self._kind)
        made.__dict__ = {name: _seen(value, number) for name, value in self._attributes.items()}
        return made


class _Key:
    """A hashable that knows its hash."""

    def __init__(self, value: Hashable) -> None:
        self.value = value
        self._hash = hash(value)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, _Key) and self.value == other.value)


_LEFT_OUT = object()


def _taken(value: Any) -> Any:
    if isinstance(value, Configured):
        return value.settings()
    if isinstance(value, tuple | list):
        items = tuple(map(_taken, value))
        return _LEFT_OUT if _LEFT_OUT in items else items
    if isinstance(value, np.generic):
        value = value.item()
    return value if type(value) in _NUMBERS or isinstance(value, _WORDS) else _LEFT_OUT


def _seen(value: Any, number: Callable[[Number], Any]) -> Any:
    if isinstance(value, Settings):
        return value.view(number)
    if isinstance(value, tuple):
        return tuple(_seen(item, number) for item in value)
    return number(value) if type(value) in _NUMBERS else value


def _key(value: Any) -> Hashable:
    if isinstance(value, Settings):
        return value.key
    if isinstance(value, tuple):
        return tuple(map(_key, value))
    return (type(value),) if type(value) in _NUMBERS else (type(value), value)


class Call(NamedTuple):
    """One call of an update function.

    Attributes:
        traced: what it does.
        inputs: of the program: what was given, and arrays of the function's own and of numbers. Such an array is the
            same object in one call and the next, as long as the numbers are the same.
    """

    traced: Traced
    inputs: list[Given | Array]


class Trace:
    """What one call of an update function did, for other calls of it.

    Args:
        traced: the origins are places among what was given, arrays of the function's own, or scalars.
        tape: what it computed from numbers.
        numbers: in that call.
        names: of the variables in that call, if the function has asked for one; else None.
    """

    def __init__(self, traced: Traced, tape: Tape, numbers: list[Number], names: tuple[str, ...] | None = None) -> None:
        self._names = names
        self._traced = traced
        self._tape = tape
        self._remember(numbers, tape.values)

    def call(self, given: Sequence[Given], numbers: list[Number]) -> Call | None:
        """The same with other arguments; None where the function would have seen other numbers.

        Raises:
            OverflowError: a number is beyond the range of an operand's dtype.
        """
        if self._names is not None and self._names != _names(given):
            return None
        # Equal numbers may differ as operands: 0.0 == -0.0.
        word, arrays = self._last
        if word != repr(numbers):
            values = self._tape.replay(numbers)
            if values is None:
                return None
            arrays = self._remember(numbers, values)
        return self._with(given, arrays)

    def same(self, given: Sequence[Given]) -> Call:
        """The same with other inputs, and with the numbers of the last call."""
        return self._with(given, self._last[1])

    def _with(self, given: Sequence[Given], arrays: Sequence[Array | None]) -> Call:
        found = zip(self._traced.origins, arrays, strict=True)
        return Call(self._traced, [given[cast(int, place)] if array is None else array for place, array in found])

    def _remember(self, numbers: list[Number], values: Sequence[Any]) -> list[Array | None]:
        arrays = [_array(origin, values) for origin in self._traced.origins]
        self._last = (repr(numbers), arrays)
        return arrays


def _array(origin: Any, values: Sequence[Any]) -> Array | None:
    """The array of an operand; None if it was given."""
    if isinstance(origin, ScalarOrigin):
        with np.errstate(all="ignore"):
            return np.asarray(values[origin.place], origin.dtype)
    return origin if isinstance(origin, np.ndarray) else None


class UpdateFunction:
    """A function for `update` and `update_non_slot` that depends on its arguments alone; see `update_function`.

    Args:
        fn: the function.
    """

    __name__: str

    def __init__(self, fn: Callable[..., Any]) -> None:
        functools.update_wrapper(self, fn)
        self._fn = fn
        self._traces: dict[Hashable, tuple[Trace, ...]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function, as a strategy without servers does."""
        own = [arg.view(_itself) if isinstance(arg, Settings) else arg for arg in args]
        return self._fn(*own, **kwargs)

    def call(
        self, strategy: Any, args: Sequence[Any], kwargs: Mapping[str, Any], give: Callable[[Any], Given | None]
    ) -> Call:
        """Finds the trace of a call, or makes it.

        Args:
            strategy: whose update it is.
            args, kwargs: its arguments.
            give: what a leaf of them becomes as an input of the program; None for what does not become one.

        Raises:
            ProgramError: it cannot be traced, or there is no telling whether an argument is another one.
        """
        given, numbers, key = _opened(args, kwargs, give)
        try:
            known = self._traces.get(key, ())
        except TypeError as error:
            fail(f"an argument of {self.__name__} cannot be compared: {error}; give arrays, numbers, words or tuples")
        try:
            for found in known:
                call = found.call(given, numbers)
                if call is not None:
                    return call
        except OverflowError as error:
            fail(f"an argument of {self.__name__}: {error}")
        made = self._trace(strategy, args, kwargs, give, given, numbers)
        if len(self._traces) >= MAX_TRACES:
            self._traces.clear()
        self._traces[key] = (made, *known[: MAX_TRACES_OF_ONE_KIND - 1])
        return made.same(given)

    def _trace(
        self,
        strategy: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        give: Callable[[Any], Given | None],
        given: Sequence[Given],
        numbers: list[Number],
    ) -> Trace:
        recording, tape = Recording(self._refuse), Tape(numbers)
        places = itertools.count()
        inputs = [_tracer(recording, given, place) for place in range(len(given))]

        def scalar(_: Number) -> Any:
            return tape.scalar(next(places))

        rest = iter(inputs)

        def leaf(value: Any) -> Any:
            if isinstance(value, Settings):
                return value.view(scalar)
            if type(value) in _NUMBERS:
                return scalar(value)
            return value if isinstance(value, _WORDS) or give(value) is None else next(rest)

        own = nest.map_structure(leaf, (tuple(args), dict(kwargs)))
        with context.enter_update(strategy, self._refuse):
            traced = trace(recording, self._fn, *own)
        return Trace(traced, tape, numbers, _names(given) if recording.named else None)

    def _refuse(self, value: Any) -> None:
        """What a function brings along from elsewhere: arrays are its own, all else belongs among its arguments."""
        if isinstance(value, Readable | DistributedValues):
            fail(f"{self.__name__} uses {value!r}, which is not among its arguments; pass it")


def update_function(fn: Callable[..., Any]) -> UpdateFunction:
    """Promises that an update function depends on its arguments alone: then it is traced once, and not for each call.

    A call whose arguments have the same structure, dtypes and shapes, and the same words and functions, does what the
    first one did. Numbers (int, float, complex) may differ: they are operands of one program. What the function
    reads by other ways, by closure or as a global, has to stay what it is. In any context.

    Args:
        fn: for `strategy.extended.update` and `update_non_slot`. Not a method.
    """
    return UpdateFunction(fn)


def _tracer(recording: Recording, given: Sequence[Given], place: int) -> Tracer:
    one = given[place]
    first = place if one.kind == "operand" else next(i for i, other in enumerate(given) if _same(one, other))
    if one.kind == "variable":
        return recording.variable(one.spec, one.variable.name, first)
    return (recording.value if one.kind == "value" else recording.argument)(one.spec, first)


def _names(given: Sequence[Given]) -> tuple[str, ...]:
    return tuple(one.variable.name for one in given if one.variable is not None)


def _same(one: Given, other: Given) -> bool:
    return other.kind != "operand" and bool(other.source == one.source)


def _opened(
    args: Sequence[Any], kwargs: Mapping[str, Any], give: Callable[[Any], Given | None]
) -> tuple[list[Given], list[Number], Hashable]:
    """The inputs and the numbers among the arguments, and what is the same for all calls that do the same."""
    given: list[Given] = []
    numbers: list[Number] = []
    key: list[Hashable] = []
    sources: dict[Any, int] = {}
    for leaf in nest.flatten((args, kwargs)):
        kind = type(leaf)
        if kind is Settings:
            numbers += leaf.numbers
            key.append(leaf.key)
        elif kind in _NUMBERS:
            numbers.append(leaf)
            key.append((kind,))
        elif isinstance(leaf, _WORDS):
            key.append((kind, leaf))
        elif (found := give(leaf)) is None:
            fail(
                f"a {kind.__name__} stands among the arguments, which may change without a word; give numbers, words, "
                "arrays, or a Configured object"
            )
        else:
            place = len(given)
            first = place if found.kind == "operand" else sources.setdefault(found.source, place)
            key.append((found.kind, found.spec, first))
            given.append(found)
    return given, numbers, (_structure((args, kwargs)), *key)


def _structure(value: Any) -> Hashable:
    """How a nest is built, without its leaves."""
    kind = type(value)
    how = nest.children_of(kind)
    if how is None:
        return None
    children = [None if nest.children_of(type(item)) is None else _structure(item) for item in how(value)]
    return (kind, tuple(value), *children) if issubclass(kind, dict) else (kind, *children)


def _itself(number: Number) -> Number:
    return number
