"""Gradients of some rows of a dynamic table: `IndexedSlices` whose indices are keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from psclient._src.arrays.devices import AnyArray, device_of, to_device
from psclient._src.arrays.rows import concatenate
from psclient._src.variables.indexed_slices import IndexedSlices
from psclient._src.variables.keys import CountedKeys, KeySpace
from pswire.model.rows import Rows
from pswire.model.tensor import Array


class KeyedSlices(IndexedSlices):
    """Rows of a dynamic table, each key once. Lookups make it, and reductions of `IndexedSlices` to a table.

    `indices` are the keys, by part of the table, and within a part increasing.

    Args:
        space: the table's keys.
        counted: the keys, and how often each was asked for, or was given.
        values: (n, *row shape), the row of each.
        shape: the table's.
    """

    def __init__(self, space: KeySpace, counted: CountedKeys, values: AnyArray, shape: tuple[int, ...]) -> None:
        super().__init__(values, space.shown(counted.keys), shape)
        self.space = space
        self.counted = counted
        self._grouped = Rows(counted.keys, self._values)

    @classmethod
    def joined(cls, some: Sequence[KeyedSlices]) -> KeyedSlices:
        """Joins rows of one table whose keys follow each other: those of each item are less than those of the next."""
        first = some[0]
        if len(some) == 1:
            return first
        pieces = first.space.pieces([each.counted.keys for each in some])
        keys, counts = (np.concatenate([some[n].counted[which][at] for n, at in pieces]) for which in (0, 1))
        device = device_of(first.values)
        values = [to_device(each.values, device) for each in some]
        rows = concatenate([values[n][at] for n, at in pieces])
        return cls(first.space, CountedKeys(keys, counts), rows, first.shape)

    @property
    def counts(self) -> Array:
        """How often each key was asked for, or was given: int64 (n,)."""
        return self.counted.counts

    def _with_shape(self, shape: tuple[int, ...], where: Callable[[], str] = lambda: "IndexedSlices") -> IndexedSlices:
        """Returns itself.

        Args:
            shape: of the whole.
            where: returns what they belong to, for messages.

        Raises:
            ValueError: the shape is another one.
        """
        if self.shape != shape:
            raise ValueError(
                f"{where()}: expected an array of shape {shape}, but got rows of table "
                f"{self.space.table!r}; pass an array"
            )
        return self

    def _with_values(self, values: AnyArray) -> KeyedSlices:
        """Returns other rows of the same keys."""
        return KeyedSlices(self.space, self.counted, values, self.shape)

    def without_rows(self) -> KeyedSlices:
        """Returns the same without any row."""
        keys, counts = self.counted
        return KeyedSlices(self.space, CountedKeys(keys[:0], counts[:0]), self.values[:0], self.shape)

    def cut(self) -> list[KeyedSlices]:
        """Returns the rows that each part of the table has; nothing is copied."""
        keys, counts = self.counted
        return [
            KeyedSlices(self.space, CountedKeys(keys[at], counts[at]), self.values[at], self.shape)
            for at in self.space.cut(keys)
        ]

    def numpy(self) -> Array:
        """Raises `TypeError`: a table has no size."""
        raise TypeError(
            f"rows of table {self.space.table!r} cannot be converted to an array, because a table has no "
            "size; use their values and indices"
        )

    def _like(self, values: AnyArray) -> KeyedSlices:
        return self._with_values(values)

    def __repr__(self) -> str:
        return f"IndexedSlices(values={self._values!r}, keys={self._indices!r} of table {self.space.table!r})"
