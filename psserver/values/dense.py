"""An array as the value of a variable.

An array with another holder than its value never changes. So a reader that still sends it and a checkpoint that is
still being written need neither copy nor lock. A round replaces such an array, and writes in place into an array that
only its value holds. Rows of a table are written in place although a checkpoint reads it: it has a copy-on-write view,
which holds the value and not its array.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any

import numpy as np

from psserver.tables.frozen import FrozenRows, Views
from psserver.values.value import Memo, Value
from pswire.errors import InvalidRequest
from pswire.model.rows import Int64s


class Dense(Value):
    """An array. It is its own view, and frozen value, as long as another one than the server's holds the array.

    Args:
        array: the array, on the device.
    """

    __slots__ = ("_views", "array", "dtype", "shape")

    array: Any

    def __init__(self, array: Any) -> None:
        self.array = array
        self.shape = array.shape
        self.dtype = array.dtype
        self._views: Views[FrozenRows] | None = None

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return int(self.array.nbytes)

    def check_rows(self, ids: Int64s, name: str, task: str) -> None:
        shape = self.shape
        if not shape or (ids.size and int(ids.view(np.uint64).max()) >= shape[0]):  # a negative one is large
            bad = next((int(i) for i in ids if not (shape and 0 <= i < shape[0])), "")
            raise InvalidRequest(f"id {bad} is not a row of variable {name!r}, whose shape is {shape}", task)

    # ---- Readers ----

    def view(self, memo: Memo) -> Dense:
        return Dense(self.array)

    def whole(self) -> Any:
        return self.array

    def rows(self, ids: Int64s, xp: Any) -> Any:
        return xp.take(self.array, xp.asarray(ids), axis=0)

    def freeze(self, by_rows: bool, memo: Memo) -> Dense | FrozenDense:
        if not (by_rows and self.shape and self.array.flags.c_contiguous):
            return Dense(self.array)
        self._views = self._views or Views()
        return FrozenDense(self, self._views)

    def read(self, first: int, stop: int) -> Any:
        """Returns some rows that follow one another."""
        return self.array[first:stop]

    def pieces(self) -> Iterator[Any]:
        """Yields it, on its device, in pieces of some rows one behind another."""
        yield self.array

    def memory(self) -> Mapping[int, int]:
        """Returns the bytes that it holds, by the identities of arrays and of what was set aside."""
        return {id(self.array): self.nbytes}

    # ---- Steps ----

    @property
    def is_frozen(self) -> bool:
        return bool(self._views and any(view.left for view in self._views.living()))

    def set_aside(self, rows: Int64s) -> None:
        for view in self._views.living() if self._views else ():
            view.set_aside(rows)

    def replaced(self, array: Any) -> Dense:
        return Dense(array)


class FrozenDense:
    """A copy-on-write view of a table, read from its first row to its last.

    Args:
        value: the table.
        views: those of the table.
    """

    def __init__(self, value: Dense, views: Views[FrozenRows]) -> None:
        self.shape, self.dtype, self.nbytes = value.shape, value.dtype, value.nbytes
        self._rows = views.add(FrozenRows([value]))
        self._array = id(value.array)

    def read(self, first: int, stop: int) -> Any:
        """Returns some rows that follow one another; those before are let go of."""
        found = self._rows.take(0, slice(first, stop), stop)
        if stop >= self.shape[0]:
            self._rows.let_go(0)
        return found

    def pieces(self) -> Iterator[Any]:
        """Yields it, on its device, in pieces of some rows one behind another."""
        return self._rows.pieces()

    def memory(self) -> Mapping[int, int]:
        """Returns the bytes that it holds, by the identities of arrays and of what was set aside."""
        return {id(self._rows): self._rows.aside} | ({self._array: self.nbytes} if self._rows.left else {})


def owned(ids: Iterable[int], values: Mapping[int, Any]) -> frozenset[int]:
    """Returns those of some values, by number, of which nobody else holds the array: a round may write into it."""
    # No line of Python for each: there may be thousands.
    known = list(values.keys() & ids)
    counts = map(sys.getrefcount, map(_ARRAY, map(values.__getitem__, known)))
    flags = map(_FLAGS, map(values.__getitem__, known))
    found = zip(known, counts, flags, strict=True)
    return frozenset([id for id, count, flag in found if count <= _COUNTED and flag & _OWN == _OWN])


_ARRAY, _FLAGS = attrgetter("array"), attrgetter("array.flags.num")
_OWN = 0x1 | 0x4 | 0x400
"""NumPy's flags of an array that is contiguous, owns its memory, and may be written."""

_COUNTED = next(map(sys.getrefcount, map(_ARRAY, (Dense(np.empty(0)),))))
"""References to an array that only its value holds, those of the count included."""
