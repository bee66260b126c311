"""The rows of a table: in slots, which are the same in each of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from psserver.tables.frozen import FrozenRows, Views
from psserver.tables.reserved import ReservedArray
from psserver.tiers.mapped import Use
from psserver.tiers.tier import Tier
from pswire.model.rows import Int64s
from pswire.model.tables import MAX_COUNT, SlotTensor, TableSpec
from pswire.model.tensor import DTYPES, Array

SPARE = 1 << 16
"""Rows reserved beyond twice a table's limit: those that a round makes before others are evicted."""

WORDS = 4
"""Words of 4 bytes that are known of each row beside its tensors: a hash, of two of them, last, and count.

They lie together, as one round needs all of them.
"""

HASH, LAST, COUNT = slice(0, 2), 2, 3
"""Where they are."""

BOOK_BYTES = 4 * WORDS

TRIM = 1 << 14
"""Least free slots for which the end of the rows is looked at."""


class RowTensors:
    """The tensors of a table's rows, and what is known of each. Used by one thread at a time.

    Args:
        spec: the table.
        tensors: the tensors beside the rows.
        limit: most rows that are expected; 0 for no limit.
        tier: where the tensors lie; None for memory. What else is known of each row is always in memory.

    Attributes:
        tensors: the weights, then the tensors beside them; each `.array` is (slots, *row shape).
        used: number of rows.
        views: those who read the rows later as they are now.
    """

    def __init__(self, spec: TableSpec, tensors: Sequence[SlotTensor], limit: int, tier: Tier | None = None) -> None:
        self._tier = tier
        self._expected = expected = min(2 * limit + SPARE, MAX_COUNT) if limit else MAX_COUNT
        rows = [spec.row, *(tensor.row for tensor in tensors)]
        self.tensors = [ReservedArray(row.shape, DTYPES[row.dtype], expected, tier=tier) for row in rows]
        self._values = [tensor.value for tensor in tensors]
        self._books = ReservedArray((WORDS,), np.dtype(np.uint32), expected)
        self.views = Views[FrozenRows]()
        self._free = self._room = np.empty(0, np.int64)  # the free slots, and the array that they begin
        self._looked = TRIM
        self.used = 0

    def put_beside(self, tensor: SlotTensor) -> None:
        """Puts a tensor beside the rows, which all have its first value; raises `MemoryError` if there is no memory."""
        array = ReservedArray(tensor.row.shape, DTYPES[tensor.row.dtype], self._expected, tier=self._tier)
        array.resize(len(self.books))
        if tensor.value:
            array.fill(tensor.value)
        self.tensors.append(array)
        self._values.append(tensor.value)

    @property
    def books(self) -> Array:
        """uint32[slots, WORDS]: all that is known of each slot."""
        return self._books.array

    @property
    def hashes(self) -> Array:
        """uint64 of each slot: the hash of the key."""
        return self._books.array[:, HASH].view(np.uint64)[:, 0]

    @property
    def last(self) -> Array:
        """uint32 of each slot: the round of the last gradient, which changed the row last; 0 in a free slot."""
        return self._books.array[:, LAST]

    @property
    def count(self) -> Array:
        """float32 of each slot: the number of gradients, which a policy may let decay."""
        return self._books.array[:, COUNT].view(np.float32)

    @property
    def touched(self) -> int:
        """Bytes that the rows may have, of memory in whole pages, and of the disk in whole chunks."""
        return sum(array.touched for array in self.arrays)

    @property
    def in_memory(self) -> int:
        """Bytes of memory that the rows may have, in whole pages, without those that a tier bounds."""
        return sum(array.touched for array in self.arrays if array.tier is None)

    @property
    def row_bytes(self) -> int:
        """Bytes of memory that one more row takes, without those that a tier bounds."""
        return sum(array.array.strides[0] for array in self.arrays if array.tier is None)

    def touch(self, slots: Int64s, use: Use, later: bool = False) -> None:
        """Rows are about to be used: begins to read what of them lies on a disk alone; see `ReservedArray.touch`.

        Slots below 0 are passed over.
        """
        if self._tier is not None:
            slots = slots[slots >= 0]
            for tensor in self.tensors:
                tensor.touch(slots, use, later)

    def read_ahead(self, slots: Int64s, hint: bool) -> None:
        """Rows are going to be looked up, with `hint` after others; see `Table.read_ahead`. Else as `touch`."""
        if not hint:
            self.touch(slots, Use.LOOKUP, later=True)
        elif self._tier is not None:
            slots = slots[slots >= 0]
            for tensor in self.tensors:
                tensor.hint(slots)

    @property
    def arrays(self) -> list[ReservedArray]:
        """The tensors, then what is known of each row."""
        return [*self.tensors, self._books]

    def set_aside(self, slots: Int64s, tensor: int = 0) -> None:
        """Called before rows are written, with their slots, and the number of the tensor if it is one alone."""
        if self.views:
            slots = np.sort(slots)  # np.unique takes several times as long
            slots = slots[np.append(True, slots[1:] != slots[:-1])[: slots.size]]
            self.touch(slots, Use.PASS)
            for view in self.views.living():
                if tensor < view.count - 1:  # else it was put beside the rows later
                    view.set_aside(slots)

    def allocate(self, count: int) -> Int64s:
        """Takes slots, int64[count]; what is in them is not known.

        Raises:
            MemoryError: there is no memory for more. Nothing has changed then.
        """
        kept = max(self._free.size - count, 0)
        reused, missing = self._free[kept:][::-1], count - (self._free.size - kept)
        self.set_aside(reused)
        top = len(self.books)
        if missing:
            try:
                for array in self.arrays:
                    array.resize(top + missing)
            except MemoryError:
                for array in self.arrays:
                    array.resize(top)
                raise
        self._free = self._free[:kept]
        self.used += count
        return np.concatenate([reused, np.arange(top, top + missing)])

    def begin(self, slots: Int64s, write: Callable[[Array | None], Array]) -> None:
        """Writes the first values of some slots' rows, and of the tensors beside them.

        Args:
            slots: int64[n], as `allocate` has returned them.
            write: writes the values (n, *row shape) into an array, which it returns; into a new one for None.
        """
        self.touch(slots, Use.UPDATE)
        weights = self.tensors[0].array
        rows = _together(slots)
        if isinstance(rows, slice):
            write(weights[rows])
        else:
            weights[rows] = write(None)
        for tensor, value in zip(self.tensors[1:], self._values, strict=True):
            tensor.array[rows] = value

    def release(self, slots: Int64s) -> None:
        """Gives slots back; gives memory back to the system if many at the end are free."""
        self.set_aside(slots)
        self.last[slots] = 0
        self.used -= slots.size
        had, have = self._free.size, self._free.size + slots.size
        if have > self._room.size:  # to copy all of them for each round would take long where many are free
            self._room = np.empty(2 * have, np.int64)
            self._room[:had] = self._free
        self._room[had:have] = slots
        self._free = self._room[:have]
        if self._free.size >= max(self._looked, len(self.books) // 2):
            self._trim()

    def _trim(self) -> None:
        """Takes the free slots at the end away; orders the others, so that the first ones are used first."""
        top = len(self.books)
        is_free = np.zeros(top + 1, np.bool_)  # to sort millions of slots takes ten times as long
        is_free[self._free + 1] = True
        tail = int(np.argmin(is_free[::-1]))
        for array in self.arrays if tail else ():
            array.resize(top - tail)
        self._free = self._room = np.flatnonzero(is_free[1 : top + 1 - tail])[::-1].copy()
        self._looked = max(TRIM, self._free.size + (self._free.size >> 2))  # not again before there are many more

    def clear(self) -> None:
        """Drops all rows; the memory of those that somebody reads later stays as it is."""
        self.tensors = [array.renewed() for array in self.tensors]
        self._books = self._books.renewed()
        self.views = Views()
        self._free = self._room = np.empty(0, np.int64)
        self.used = 0


def _together(slots: Int64s) -> Int64s | slice:
    """Returns slots as a range, if they are one: to write to it takes half as long."""
    first = int(slots[0]) if slots.size else 0
    is_range = bool((slots == np.arange(first, first + slots.size)).all())
    return slice(first, first + slots.size) if is_range else slots
