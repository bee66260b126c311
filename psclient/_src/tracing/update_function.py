"""Update functions that are traced once, and not again for other numbers.

    @ps.update_function
    def decay(v, rate):
        v.assign_sub(rate * v)

A Python function may read whatever it likes, so that nobody can see from outside whether two calls of it do the same.
`update_function` is the author's promise that what it does depends on its arguments alone. Then a call whose arguments
have the same structure, shapes and dtypes makes the same program; numbers among them are the program's operands.

Also seen, for a new trace, is that a global, a variable of an enclosing function, or a method of a configured object's
class is another object than when the function was traced: of the function itself, of those that it wraps or is given,
and of functions that it finds that way. Not seen is what changes within an object: an item of a list, an attribute of a
module or of another object, an array in place; nor what an installed package's functions read.
"""

from __future__ import annotations

import functools
import itertools
import threading
import types
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass
from typing import Any, NamedTuple, cast

import numpy as np

from psclient._src import context
from psclient._src.arraylike import Readable
from psclient._src.arrays import nest
from psclient._src.arrays.devices import Value
from psclient._src.arrays.nest import Leaf, Nest
from psclient._src.context import StrategyFace
from psclient._src.tracing.diagnostics import fail, refuse_changing, users_function
from psclient._src.tracing.guards import Surroundings
from psclient._src.tracing.hyperparameters import NUMBERS, WORDS, Settings
from psclient._src.tracing.recorder import Recording, ScalarOrigin, Traced, trace
from psclient._src.tracing.symbolic_numbers import Number, Tape
from psclient._src.tracing.tracer import Tracer
from psclient._src.values import DistributedValues
from pswire.model.program import InputKind
from pswire.model.tensor import Array, TensorSpec

MAX_TRACES = 1024
"""For how many kinds of arguments a function keeps traces; then it forgets all of them."""

MAX_TRACES_OF_ONE_KIND = 8
"""Maximum number of kept traces that differ only in the numbers that the function looked at."""


class InputLeaf(NamedTuple):
    """A leaf of the arguments that becomes an input of the program.

    Attributes:
        kind: the kind of input.
        spec: its dtype and shape.
        source: its identity for the caller; equal for two leaves that are one input. Of an operand its array.
        variable: the variable, if the leaf is one.
    """

    kind: InputKind
    spec: TensorSpec
    source: object
    variable: Any = None


Give = Callable[[Leaf], InputLeaf | None]
"""Returns the input of the program that a leaf of the arguments becomes; None where it becomes none."""


class TracedCall(NamedTuple):
    """One call of an update function.

    Attributes:
        traced: the recorded call.
        inputs: of the program: what was given, and arrays of the function's own and of numbers. Such an array is the
            same object in one call and the next, as long as the numbers are the same.
        trace: recomputes the operands for other numbers.
        numbers: the numbers among the arguments, in order.
    """

    traced: Traced
    inputs: list[InputLeaf | Array]
    trace: Trace
    numbers: list[Number]


@dataclass(eq=False)
class Trace:
    """A recorded call of an update function, reusable for other calls of it.

    Args:
        traced: the recorded call; its origins are indices of given leaves, arrays of the function's own, or scalars.
        tape: the computation from numbers.
        numbers: the numbers among that call's arguments.
        around: the names that the function read.
        labels: names of the numbers among the arguments, for messages.
        names: of the variables in that call, if the function has asked for one; else None.
    """

    traced: Traced
    tape: Tape
    numbers: InitVar[list[Number]]
    around: Surroundings
    labels: Sequence[str]
    names: tuple[str, ...] | None = None

    def __post_init__(self, numbers: list[Number]) -> None:
        self._remember(numbers, self.tape.values)

    def call(self, given: Sequence[InputLeaf], numbers: list[Number]) -> TracedCall | None:
        """The same with other arguments; None where the function would have seen other numbers, or other globals."""
        if self.names is not None and self.names != _names(given):
            return None
        arrays = self.operands(numbers)
        return None if arrays is None else self._with(given, arrays, numbers)

    def operands(self, numbers: list[Number]) -> list[Array | None] | None:
        """Of each input the array, if it is the function's own or of a number; None in all where `call` gives none."""
        if not self.around.unchanged():
            return None
        # Equal numbers may differ as operands: 0.0 == -0.0.
        word, arrays = self._last
        if word != repr(numbers):
            values = self.tape.replay(numbers)
            if values is None:
                return None
            try:
                arrays = self._remember(numbers, values)
            except OverflowError:  # Beyond an operand's dtype: a new trace says at which line, or takes another way.
                return None
        return arrays

    def label(self, place: int) -> str:
        """Returns the names of the numbers that an input of the program is computed from; "" where it is no number."""
        origin = self.traced.origins[place]
        sources = self.tape.sources(origin.place) if isinstance(origin, ScalarOrigin) else ()
        return ", ".join(dict.fromkeys(self.labels[source] for source in sorted(sources)))

    def keys(self, numbers: list[Number]) -> Iterator[Hashable]:
        """Yields what each input is, of given numbers: operands of two calls that are alike have the same value.

        Two operands of one trace are never alike: an update on rows alone takes each of its inputs once.
        """
        return zip(self._kinds, itertools.repeat(repr(numbers)))

    @functools.cached_property
    def _kinds(self) -> list[Hashable]:
        taken, found = Counter[Hashable](), list[Hashable]()
        for place, origin in enumerate(self.traced.origins):
            kind: Hashable = id(origin)
            if isinstance(origin, ScalarOrigin):
                kind = self.tape.expression(origin.place), origin.dtype, self.label(place)
            elif isinstance(origin, np.ndarray) and origin.shape == ():
                kind = origin.dtype, origin.tobytes()
            taken[kind] += 1
            found.append((kind, taken[kind]))
        return found

    def same(self, given: Sequence[InputLeaf], numbers: list[Number]) -> TracedCall:
        """The same with other inputs, and with the numbers of the last call."""
        return self._with(given, self._last[1], numbers)

    def _with(self, given: Sequence[InputLeaf], arrays: Sequence[Array | None], numbers: list[Number]) -> TracedCall:
        found = zip(self.traced.origins, arrays, strict=True)
        inputs = [given[cast(int, place)] if array is None else array for place, array in found]
        return TracedCall(self.traced, inputs, self, numbers)

    def _remember(self, numbers: list[Number], values: Sequence[object]) -> list[Array | None]:
        arrays = [_array(origin, values) for origin in self.traced.origins]
        self._last = (repr(numbers), arrays)
        return arrays


def _array(origin: object, values: Sequence[object]) -> Array | None:
    """The array of an operand; None if it was given."""
    if isinstance(origin, ScalarOrigin):
        with np.errstate(all="ignore"):
            return np.asarray(values[origin.place], origin.dtype)
    return origin if isinstance(origin, np.ndarray) else None


class _NewCall(NamedTuple):
    """A call that is to be traced: what the function was given, and its leaves that become inputs, or numbers."""

    strategy: StrategyFace
    args: Sequence[object]
    kwargs: Mapping[str, object]
    give: Give
    given: Sequence[InputLeaf]
    numbers: list[Number]


class UpdateFunction:
    """A function for `update` and `update_non_slot` that depends on its arguments alone; see `update_function`.

    Args:
        fn: the function to trace.
    """

    __name__: str

    def __init__(self, fn: Callable[..., object]) -> None:
        functools.update_wrapper(self, fn)
        self._fn = fn
        self._traces: dict[Hashable, tuple[Trace, ...]] = {}
        self._tracing = threading.RLock()  # held by who adds a trace: of two for one call each had operands of its own

    def __call__(self, *args: object, **kwargs: object) -> Nest:
        """Calls the function, as a strategy without servers does."""
        own = [arg.view(_itself) if isinstance(arg, Settings) else arg for arg in args]
        return self._fn(*own, **kwargs)

    def call(
        self, strategy: StrategyFace, args: Sequence[object], kwargs: Mapping[str, object], give: Give
    ) -> TracedCall:
        """Finds the trace of a call, or makes it.

        Args:
            strategy: the strategy whose variables are updated.
            args: the positional arguments of the call.
            kwargs: the keyword arguments of the call.
            give: called with a leaf; returns the input of the program that it becomes, or None where it becomes none.

        Raises:
            ProgramError: the function cannot be traced, or two arguments cannot be told apart.
        """
        given, numbers, key = _opened(args, kwargs, give)
        try:
            known = self._traces.get(key, ())
        except TypeError as error:
            fail(f"an argument of {self.__name__} cannot be compared: {error}; pass arrays, numbers, strings or tuples")
        call = _known_call(known, given, numbers)
        if call is not None:
            return call
        with self._tracing:
            known = self._traces.get(key, ())
            call = _known_call(known, given, numbers)
            if call is not None:
                return call
            made = self._trace(_NewCall(strategy, args, kwargs, give, given, numbers))
            call = made.same(given, numbers)  # Once the trace is known, another thread may give it other numbers.
            if len(self._traces) >= MAX_TRACES:
                self._traces.clear()
            self._traces[key] = (made, *known[: MAX_TRACES_OF_ONE_KIND - 1])
            return call

    def _trace(self, call: _NewCall) -> Trace:
        around = _around(self._fn, (call.args, call.kwargs))
        traced, tape, recording = self._record(call, around)
        brought = [*recording.brought, *tape.brought]
        # What changes its surroundings is traced at each call, and may do what it likes.
        if around.unchanged() and any(one.is_number or around.name_of(one.value) is None for one in brought):
            _, tape_again, again = self._record(call, around)
            refuse_changing(brought, [*again.brought, *tape_again.brought])
        labels = _labels(self.__name__, call.args, call.kwargs)
        return Trace(traced, tape, call.numbers, around, labels, _names(call.given) if recording.named else None)

    def _record(self, call: _NewCall, around: Surroundings) -> tuple[Traced, Tape, Recording]:
        recording, tape = Recording(self._refuse), Tape(call.numbers)
        places = itertools.count()
        inputs = [_tracer(recording, call.given, place) for place in range(len(call.given))]

        def scalar(_: Number) -> Value:
            return tape.scalar(next(places))

        rest = iter(inputs)

        def leaf(value: Leaf) -> Leaf:
            if isinstance(value, Settings):
                return value.view(scalar)
            if type(value) in NUMBERS:
                return scalar(value)
            return value if isinstance(value, WORDS) or call.give(value) is None else next(rest)

        own, named = nest.map_structure(leaf, (tuple(call.args), dict(call.kwargs)))
        with context.enter_update(call.strategy, self._refuse):
            traced = trace(recording, self._fn, own, named, around)
        return traced, tape, recording

    def _refuse(self, value: object) -> None:
        """Refuses values from elsewhere than the arguments; arrays are the function's own, and are let through."""
        if isinstance(value, Readable | DistributedValues):
            fail(
                f"{users_function() or self.__name__} uses {value!r}, which is not among its arguments; "
                "pass it as an argument, or in an optimizer keep arrays in a slot and numbers in attributes"
            )


def _known_call(known: Sequence[Trace], given: Sequence[InputLeaf], numbers: list[Number]) -> TracedCall | None:
    """Returns the call that one of some traces makes of arguments; None if none does."""
    return next((call for found in known if (call := found.call(given, numbers)) is not None), None)


def update_function(fn: Callable[..., object]) -> UpdateFunction:
    """Declares that an update function depends only on its arguments: it is traced once instead of at each call.

    A call whose arguments have the same structure, dtypes and shapes, and the same strings and functions, runs the
    first trace. Numbers (int, float, complex) may differ: they are operands of the program. Values that the function
    reads by closure or as a global are compared at each call: another object, or another number, makes another trace.
    Such an object must not change inside. In any context.

    Args:
        fn: a function for `strategy.extended.update` and `update_non_slot`. Not a method.

    Returns:
        The function, to be called as before.

    Examples:
        >>> import psclient as ps
        >>> strategy = ps.MirroredStrategy()
        >>> with strategy.scope():
        ...     w = ps.Variable([1.0, 2.0])
        >>> @ps.update_function
        ... def decay(v, rate):
        ...     v.assign_sub(rate * v)
        >>> strategy.extended.update(w, decay, args=(0.5,))
        >>> w.numpy()
        array([0.5, 1. ], dtype=float32)
    """
    return UpdateFunction(fn)


def _around(fn: Callable[..., object], args: object) -> Surroundings:
    """Returns what a function may read by other ways than its arguments, as of now."""
    leaves = nest.flatten(args)
    settings = [leaf for leaf in leaves if isinstance(leaf, Settings)]
    given = [leaf for leaf in leaves if isinstance(leaf, types.FunctionType)]
    given += [function for one in settings for function in one.functions()]
    return Surroundings([fn, *given], [kind for one in settings for kind in one.kinds()])


def _tracer(recording: Recording, given: Sequence[InputLeaf], place: int) -> Tracer:
    one = given[place]
    first = place if one.kind == "operand" else next(i for i, other in enumerate(given) if _same(one, other))
    if one.kind == "variable":
        return recording.variable(one.spec, one.variable.name, first)
    return (recording.value if one.kind == "value" else recording.argument)(one.spec, first)


def _labels(function: str, args: Sequence[object], kwargs: Mapping[str, object]) -> list[str]:
    """Returns the names of the numbers among the arguments of a function, for messages."""
    found: list[str] = []
    for leaf in nest.flatten((tuple(args), dict(kwargs))):
        if isinstance(leaf, Settings):
            found += leaf.names()
        elif type(leaf) in NUMBERS:
            found.append(f"a number that {function} is given")
    return found


def _names(given: Sequence[InputLeaf]) -> tuple[str, ...]:
    return tuple(one.variable.name for one in given if one.variable is not None)


def _same(one: InputLeaf, other: InputLeaf) -> bool:
    return other.kind != "operand" and bool(other.source == one.source)


def _opened(
    args: Sequence[object], kwargs: Mapping[str, object], give: Give
) -> tuple[list[InputLeaf], list[Number], Hashable]:
    """The inputs and the numbers among the arguments, and what is the same for all calls that do the same."""
    given: list[InputLeaf] = []
    numbers: list[Number] = []
    key: list[Hashable] = []
    sources: dict[object, int] = {}
    for leaf in nest.flatten((args, kwargs)):
        kind = type(leaf)
        if kind is Settings:
            numbers += leaf.numbers
            key.append(leaf.key)
        elif kind in NUMBERS:
            numbers.append(leaf)
            key.append((kind,))
        elif isinstance(leaf, WORDS):
            key.append((kind, leaf))
        elif (found := give(leaf)) is None:
            fail(
                f"an argument is a {kind.__name__}, whose content may change unnoticed; pass numbers, "
                "strings, arrays, or a Configured object"
            )
        else:
            place = len(given)
            first = place if found.kind == "operand" else sources.setdefault(found.source, place)
            key.append((found.kind, found.spec, first))
            given.append(found)
    return given, numbers, (_structure((args, kwargs)), *key)


def _structure(value: Nest) -> Hashable:
    """Returns how a nest is built, without its leaves."""
    kind = type(value)
    how = nest.children_of(kind)
    if how is None:
        return None
    children = [None if nest.children_of(type(item)) is None else _structure(item) for item in how(value)]
    return (kind, tuple(value), *children) if issubclass(kind, dict) else (kind, *children)


def _itself(number: Number) -> Number:
    return number
