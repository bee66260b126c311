"""Objects of which update functions read numbers and words: optimizers, schedules.

An update function gets, in place of such an object, one of the same class that has the same numbers and words, and
nothing else: all that it says is known before, so that calls can be told apart by it.
"""

from __future__ import annotations

import enum
import functools
import itertools
import types
from collections.abc import Callable, Hashable, Iterator, Mapping
from operator import is_
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from psclient._src.arrays import nest
from psclient._src.tracing.diagnostics import fail
from psclient._src.tracing.symbolic_numbers import Number

NUMBERS = frozenset({int, float, complex})
"""Types of what may change from call to call, without another trace."""

WORDS = (
    *(bool, str, bytes, type(None), enum.Enum, type, np.dtype),
    *(types.FunctionType, types.BuiltinFunctionType, np.ufunc),
)
"""Types of what makes another trace if it changes."""


_PLAIN = NUMBERS | {bool, str, type(None)}
"""Types of most attributes. The check is fast, since an optimizer's attributes are compared in each step."""

_VIEW = "_stands_for_another"

_LAST = "_last_settings"
"""Most steps find the settings of the step before, which know what they are."""


def is_view(configured: Configured) -> bool:
    """Returns whether it is what an update function gets in place of a configured object."""
    return _VIEW in vars(configured)


class Configured:
    """Base of objects of which an update function reads numbers and words: optimizers, schedules.

    Among the arguments of an update function stand its `settings`; the function gets an object of the same class that
    has the same attributes, its class's included: numbers, words, functions, tuples of these, and other configured
    objects. It lacks all else, and nothing can be assigned to it.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if is_view(self):
            fail(
                f"{type(self).__name__}.{name} was assigned in an update function, which runs on a server, "
                "so the value would be lost; use a slot of the optimizer, or a local variable"
            )
        super().__setattr__(name, value)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            why = ""
            if is_view(self):
                why = (
                    "; an update function can use only attributes that are numbers, strings, functions or "
                    "tuples of these, so keep arrays in slots of the optimizer"
                )
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}{why}")

    @classmethod
    def _label_of(cls, name: str, inner: str) -> str:
        """Returns a name for messages: of an attribute of a configured object that is its attribute."""
        return f"{name.lstrip('_')}.{inner}"

    def _settings(self) -> Settings:
        """Returns what an update function sees of it, as of now."""
        return self._settings_with()

    def _settings_with(self, **replaced: object) -> Settings:
        """As `settings`, with other values of some attributes."""
        kind: Any = type(self)
        names = tuple(itertools.chain.from_iterable(map(vars, kind.__mro__)))
        own = vars(self) | replaced
        last: Settings | None = own.pop(_LAST, None)
        readable = _readable(kind, names)
        given = {**dict(zip(readable, map(getattr, itertools.repeat(kind), readable), strict=True)), **own}
        if last is not None and last.is_of(kind, names, given):
            return last
        taken = {name: _taken(value) for name, value in own.items()}
        known = {name: _taken(given[name]) for name in readable if name not in own}
        attributes = {name: value for name, value in (known | taken).items() if value is not _LEFT_OUT}
        if last is not None and last.same(kind, names, attributes):
            return last
        for name, value in taken.items():
            if value is _LEFT_OUT and hasattr(kind, name):
                raise TypeError(
                    f"attribute {name!r} of {kind.__name__} hides the attribute of the class, but update "
                    "functions can use only numbers, strings, functions and tuples of these; use one of "
                    "these types, or another name"
                )
        made = vars(self)[_LAST] = Settings(
            kind, names, attributes, given if all(map(_is_fixed, given.values())) else {}
        )
        return made


@functools.lru_cache(maxsize=1024)
def _readable(kind: type, names: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the names of a class that its objects read as attributes; functions become methods, and stay with it.

    Args:
        kind: the class to look at.
        names: all names of the class and its bases; a class may get more.
    """
    found = {name: value for base in reversed(kind.__mro__) for name, value in vars(base).items()}
    return tuple(
        name
        for name, value in found.items()
        if not (name.startswith("__") or isinstance(value, types.FunctionType) or _taken(value) is _LEFT_OUT)
    )


class Settings:
    """The attributes of a configured object, as an argument of update functions.

    Args:
        kind: the class of the object.
        names: all names of the class and its bases: a new one, of a method as well, may hide another.
        attributes: the attributes by name.
        given: what they were made of; empty where something in it may change and stay the same object.

    Attributes:
        kind: the class of the object.
        key: all attributes but the numbers.
        numbers: the numbers among the attributes, in order.
    """

    def __init__(
        self,
        kind: Any,
        names: tuple[str, ...],
        attributes: Mapping[str, object],
        given: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        self.kind = kind
        self._names = names
        self._attributes = attributes
        self._given = given
        self.numbers: list[Number] = []
        self.view(self.numbers.append)
        self.key = _Key((kind, names, *((name, _key(value)) for name, value in attributes.items())))

    def is_of(self, kind: type, names: tuple[str, ...], given: Mapping[str, object]) -> bool:
        """Returns whether they are known to be what such attributes say; as the constructor's arguments."""
        return self.kind is kind and self._names == names and _identical(self._given, given)

    def same(self, kind: type, names: tuple[str, ...], attributes: Mapping[str, object]) -> bool:
        """Returns whether they are of this class, with these names, and have these very attributes."""
        return self.kind is kind and self._names == names and _identical(self._attributes, attributes)

    def view(self, number: Callable[[Number], object]) -> Any:
        """Makes an object of the class with these attributes.

        Args:
            number: called with each number; returns what stands for it in the object.
        """
        made: object = object.__new__(self.kind)
        made.__dict__ = {name: _seen(value, number) for name, value in self._attributes.items()}
        vars(made)[_VIEW] = True
        return made

    def names(self) -> Iterator[str]:
        """Yields the names of the attributes that the numbers are, in order; of one of another object `rule.rate`."""
        for name, value in self._attributes.items():
            for leaf in nest.flatten(value):
                if isinstance(leaf, Settings):
                    yield from (self.kind._label_of(name, inner) for inner in leaf.names())
                elif type(leaf) in NUMBERS:
                    yield name.lstrip("_")

    def kinds(self) -> Iterator[type]:
        """The class, and those of configured objects among the attributes."""
        yield self.kind
        for value in self._leaves():
            if isinstance(value, Settings):
                yield from value.kinds()

    def functions(self) -> Iterator[types.FunctionType]:
        """The functions among the attributes, and among those of configured objects there."""
        for value in self._leaves():
            if isinstance(value, Settings):
                yield from value.functions()
            elif isinstance(value, types.FunctionType):
                yield value

    def _leaves(self) -> list[object]:
        return nest.flatten(tuple(self._attributes.values()))


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


def _taken(value: object) -> Any:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Configured):
        return value._settings()
    if isinstance(value, tuple | list):
        items = tuple(map(_taken, value))
        if type(value) is tuple and all(map(is_, value, items)):
            return value
        return _LEFT_OUT if _LEFT_OUT in items else items
    if isinstance(value, np.generic):
        value = value.item()
    return value if type(value) in NUMBERS or isinstance(value, WORDS) else _LEFT_OUT


def _identical(some: Mapping[str, object], others: Mapping[str, object]) -> bool:
    """Returns whether both have the same names, in one order, and the very same values."""
    return [*some] == [*others] and all(map(is_, some.values(), others.values()))


def _is_fixed(value: object) -> bool:
    """Returns whether `_taken` says the same of an object whenever it is asked."""
    if type(value) is tuple:
        return all(map(_is_fixed, value))
    return not isinstance(value, tuple | list | Configured)


def _seen(value: Any, number: Callable[[Number], object]) -> Any:
    if isinstance(value, Settings):
        return value.view(number)
    if isinstance(value, tuple):
        return tuple(_seen(item, number) for item in value)
    return number(value) if type(value) in NUMBERS else value


def _key(value: object) -> Hashable:
    if isinstance(value, Settings):
        return value.key
    if isinstance(value, tuple):
        return tuple(map(_key, value))
    return (type(value),) if type(value) in NUMBERS else (type(value), value)
