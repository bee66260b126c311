"""Ids of rows: checked, and grouped by place."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pswire.model.tensor import DTYPES, Array, TensorSpec

Int64s = npt.NDArray[np.int64]


class Rows(NamedTuple):
    """Rows of an array, each place once.

    Attributes:
        ids: int64[n] on the host, the places in increasing order.
        values: (n, ...), the row for each place, on any device.
    """

    ids: Int64s
    values: Any


ID_BYTES = 8
"""Bytes of an id as it travels."""

KEY_BYTES = 16
"""Bytes of a key as it travels, and of how often it came."""

MANY = 32
"""Rows for one place above which they are summed by themselves."""

MAX_ROWS = 1 << 24
"""Most rows in one contribution to a variable."""


def row_bytes(whole: TensorSpec) -> int:
    """Returns the bytes of one row of an array."""
    return prod(whole.shape[1:]) * DTYPES[whole.dtype].itemsize


def row_specs(whole: TensorSpec, count: int, keyed: bool = False) -> tuple[TensorSpec, TensorSpec]:
    """Returns what ids and rows are as tensors, for a number of rows of an array; `keyed` for keys and their counts."""
    ids = (2, count) if keyed else (count,)
    return TensorSpec("int64", ids), TensorSpec(whole.dtype, (count, *whole.shape[1:]))


def check_ids(ids: Array, size: int, where: str) -> Int64s:
    """Returns ids as int64, contiguous.

    Args:
        ids: integers of one dimension.
        size: rows of the table.
        where: what they belong to, for messages.

    Raises:
        ValueError: one of them is no row of the table; the first such id is named.
    """
    numbers = np.ascontiguousarray(ids, np.int64)
    if numbers.size and (int(numbers.min()) < 0 or int(numbers.max()) >= size):
        bad = int(np.argmax((numbers < 0) | (numbers >= size)))
        raise ValueError(f"{where}: id {ids[bad]} at index {bad} is not a row of {size}")
    return numbers


def group(ids: Int64s) -> tuple[Int64s, Int64s]:
    """Groups rows by place.

    Args:
        ids: int64[n], the place of each row, or its key.

    Returns:
        order: int64[n], the rows by place, then by their order.
        starts: int64[k + 1], the index in `order` of each place's first row, and the end.
    """
    # Pairs packed into one number are sorted several times as fast as by a stable sort of ids.
    bits = max(ids.size - 1, 0).bit_length()
    width = int(ids.max(initial=0)).bit_length()
    if bits + width > 63 or ids.min(initial=0) < 0:
        order = np.argsort(ids, kind="stable")
        places = ids[order]
        return order, np.append(np.flatnonzero(np.concatenate([[True], places[1:] != places[:-1]])), ids.size)
    pairs = ids << bits | np.arange(ids.size)
    pairs = np.sort(pairs.astype(np.uint32) if bits + width <= 32 else pairs).astype(np.int64)
    places = pairs >> bits
    new = np.flatnonzero(np.diff(places, prepend=-1))
    return pairs & ((1 << bits) - 1), np.append(new, ids.size)


def sum_groups(rows: Any, order: Int64s, starts: Int64s, xp: Any = np, factors: Any = None) -> Any:
    """Returns one row for each group: the sum of its rows, one after another, as a new array.

    A row may be in several groups, and often in one: what is allocated has a row for each group, and not for each
    member of it.

    Args:
        rows: (n, ...), on a device.
        order, starts: as `group` returns them.
        xp: the device's array namespace.
        factors: of each item of `order` a number by which its row is multiplied, with the dimensions of rows; None for
            rows as they are.
    """

    def some(at: Any) -> Any:
        found = rows[xp.asarray(order[at])]
        return found if factors is None else found * factors[at if isinstance(at, slice) else xp.asarray(at)]

    total = some(starts[:-1])
    counts = np.diff(starts)
    many = np.flatnonzero(counts > MANY) if xp is np else np.empty(0, np.int64)
    counts[many] = 0
    for nth in range(1, int(counts.max(initial=0))):
        more = np.flatnonzero(counts > nth)
        total[xp.asarray(more)] += some(starts[more] + nth)
    for place in many:  # a pass for each of its rows would be a pass over little
        total[place] = np.add.accumulate(some(slice(starts[place], starts[place + 1])), axis=0)[-1]
    return total
