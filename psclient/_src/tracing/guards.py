"""Guards: detect changes to the globals and closure variables that a traced function reads."""

from __future__ import annotations

import dis
import functools
import itertools
import os
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import CellType, CodeType, FunctionType
from typing import Any

_INSTALLED = tuple(
    f"{folder}{os.sep}"
    for folder in (
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        Path(__file__).parents[2],
    )
)
"""Folders of functions that do not change: Python's, those of installed packages, and of this one."""

_NOTHING = object()

_LOOKED_UP = frozenset({"LOAD_GLOBAL", "LOAD_NAME"})
"""Instructions that find a global by its name; those of attributes have names as well."""

_LONGEST = 100
"""Links of a chain of wrapped functions that are followed: some objects say of everything that they have it."""


class Surroundings:
    """Values that some functions read by name: globals, variables of enclosing functions, methods of their classes.

    Also of the functions among these, and of those that they wrap. Each counts as unchanged as long as it is the same
    object: changes inside of a list, a module or an array are not seen.

    Args:
        functions: the functions whose names are followed.
        kinds: classes, all functions of which are followed too.
    """

    def __init__(self, functions: Iterable[object], kinds: Iterable[type] = ()) -> None:
        self._names: list[tuple[Mapping[str, object], str, object]] = []
        self._cells: list[tuple[str, CellType, object]] = []
        self._entered: set[object] = set()
        for function in functions:
            self._enter(function)
        for base in {base for kind in kinds for base in kind.__mro__}:
            self._enter_class(base)

    @property
    def reads(self) -> bool:
        """True if there is anything that may change."""
        return bool(self._names or self._cells)

    def unchanged(self) -> bool:
        """Returns whether all of it is what it was when this was made."""
        for names, name, value in self._names:
            if names.get(name, _NOTHING) is not value:
                return False
        return all(_content(cell) is value for _, cell, value in self._cells)

    def name_of(self, value: object) -> str | None:
        """By which name the functions find an object; None if they do not."""
        cells = (name for name, cell, content in self._cells if content is value)
        return next((name for _, name, found in self._names if found is value), next(cells, None))

    def _enter_class(self, kind: type) -> None:
        for name, value in list(vars(kind).items()):
            if self._enter(value):
                self._names.append((vars(kind), name, value))

    def _enter(self, function: object) -> bool:
        """Adds what a function reads, and what those read that it wraps; returns whether one of them may be changed."""
        return True in {self._enter_one(link) for link in itertools.islice(_chain(function), _LONGEST)}

    def _enter_one(self, function: object) -> bool:
        if not isinstance(function, FunctionType) or function.__code__.co_filename.startswith(_INSTALLED):
            return False
        if function in self._entered:
            return True
        self._entered.add(function)
        for name in _names(function.__code__):
            if name in function.__globals__:
                self._names.append((function.__globals__, name, function.__globals__[name]))
                self._enter(function.__globals__[name])
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._cells.append((name, cell, _content(cell)))
            self._enter(_content(cell))
        return True


def _chain(function: object) -> Iterator[Any]:
    """A function, and what it wraps: as a property, by `functools.partial`, by a decorator, and so on."""
    while function is not None:
        yield function
        if isinstance(function, property):
            function = function.fget
        elif isinstance(function, functools.partial | functools.partialmethod | functools.cached_property):
            function = function.func
        else:
            function = getattr(function, "__wrapped__", None)


def _names(code: CodeType) -> set[str]:
    """Names by which a function's code looks for globals, those of functions within it included."""
    within = (_names(item) for item in code.co_consts if isinstance(item, CodeType))
    return {read.argval for read in dis.get_instructions(code) if read.opname in _LOOKED_UP}.union(*within)


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _NOTHING  # Not assigned yet, or deleted.
