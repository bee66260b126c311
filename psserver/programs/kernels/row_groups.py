"""Groups of received rows that belong to the same row of a table.

Computed in two ways with equal results: by NumPy, and by a function for Numba, which sorts by digits and is four times
as fast.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from pswire.errors import InvalidRequest
from pswire.model.rows import Int64s, group, sum_groups
from pswire.model.tensor import Array, address_of

DIGIT = 11
"""Bits of a row's number sorted at a time: two passes cover most tables, and the counts stay in the first cache."""

DIGITS = 1 << DIGIT
NUMBERS, ARRAYS = 3, 2
"""Number of integers, and then of int64 arrays, that the function made by `grouping` takes."""


@dataclass(frozen=True)
class RowGroups:
    """Received rows grouped by place, a row of the table.

    Attributes:
        ids: int64[k], the places, in increasing order, each once.
        order: int64[n], the received rows by place, then by order of arrival.
        starts: int64[k + 1], the index in `order` of each place's first row, and the end.
    """

    ids: Int64s
    order: Int64s
    starts: Int64s

    @classmethod
    def of(cls, ids: Array, size: int, kernel: Callable[..., None] | None = None) -> RowGroups:
        """Groups rows.

        Args:
            ids: int64[n], the place of each row.
            size: rows of the table.
            kernel: `grouping`, compiled; None for NumPy.

        Raises:
            InvalidRequest: an id is no row of the table, or there are too many.
        """
        numbers = np.asarray(ids, np.int64, order="C")
        if numbers.ndim != 1 or (numbers.size and (numbers.min() < 0 or numbers.max() >= size)):
            raise InvalidRequest(f"ids of shape {numbers.shape} are not all rows of a table of {size}")
        # Pairs packed into one number are sorted several times as fast as by a stable sort of ids.
        bits, width = max(numbers.size - 1, 0).bit_length(), max(size - 1, 0).bit_length()
        if bits + width > 63:
            raise InvalidRequest(f"{numbers.size} rows for a table of {size} are too many at once")
        if kernel:
            return cls._by(kernel, numbers, bits, width)
        order, starts = group(numbers)
        return cls(numbers[order[starts[:-1]]], order, starts)

    @classmethod
    def _by(cls, kernel: Callable[..., None], numbers: Int64s, bits: int, width: int) -> RowGroups:
        n = numbers.size
        room = np.empty(5 * n + 2 + DIGITS, np.int64)
        kernel(n, bits, width, address_of(numbers), address_of(room))
        count = int(room[-1])
        return cls(room[n : n + count], room[:n], room[2 * n : 2 * n + count + 1])

    def sum(self, rows: Any, xp: Any) -> Any:
        """Returns one row for each place: the sum of the rows that belong there."""
        return sum_groups(rows, self.order, self.starts, xp)


def grouping(carray: Any) -> Callable[..., None]:
    """Returns a function for Numba that sorts by digits, the lowest first, and marks the beginning of each place.

    Args:
        carray: Numba's `carray`.
    """

    def group(n: int, bits: int, width: int, p_ids: Any, p_room: Any) -> None:
        ids, room = carray(p_ids, n), carray(p_room, 5 * n + 2 + DIGITS)
        order, places, starts = room[:n], room[n : 2 * n], room[2 * n : 3 * n + 1]
        one, other, counts = room[3 * n + 1 : 4 * n + 1], room[4 * n + 1 : 5 * n + 1], room[5 * n + 1 :]
        for i in range(n):
            one[i] = ids[i] << bits | i
        for shift in range(bits, bits + width, DIGIT):
            counts[:] = 0
            for i in range(n):
                counts[(one[i] >> shift) & (DIGITS - 1)] += 1
            total = 0
            for digit in range(DIGITS):
                total, counts[digit] = total + counts[digit], total
            for i in range(n):
                digit = (one[i] >> shift) & (DIGITS - 1)
                other[counts[digit]] = one[i]
                counts[digit] += 1
            one, other = other, one
        count, last = 0, -1
        for i in range(n):
            place = one[i] >> bits
            order[i] = one[i] & ((1 << bits) - 1)
            if place != last:
                places[count], starts[count], last = place, i, place
                count += 1
        starts[count], room[-1] = n, count

    return group
