"""Sums of rows by group."""

from __future__ import annotations

import numpy as np

from psclient._src.arrays.devices import AnyArray, device_of, device_scope, namespace
from pswire.model.rows import Int64s, sum_groups

_PIECE = 32
"""Rows that are summed one after another. A group may have every row: then its pieces are summed, and theirs."""


def sum_segments(rows: AnyArray, order: Int64s, starts: Int64s, factors: AnyArray | None = None) -> AnyArray:
    """Returns one row for each group: the sum of its rows, zeros where it has none.

    The order of the additions depends on the groups' sizes alone. Nothing is allocated for each item of `order`, of
    which there may be very many.

    Args:
        rows: (n, ...), on any device.
        order: int64[m], the rows by group; a row may be in many groups, and often in one.
        starts: int64[k + 1], the index in `order` of each group's first row, and the end.
        factors: a number for each item of `order` by which its row is multiplied, with the dimensions of rows; None for
            rows as they are.

    Returns:
        (k, ...), on the device of the rows.
    """
    filled = np.flatnonzero(np.diff(starts))
    device = device_of(rows)
    with device_scope(device):
        xp = namespace(device)
        total = xp.zeros((len(starts) - 1, *rows.shape[1:]), rows.dtype)
        starts = np.append(starts[filled], starts[-1])
        while int(np.diff(starts).max(initial=0)) > _PIECE:
            pieces = -(-np.diff(starts) // _PIECE)
            ends = np.cumsum(pieces)
            nth = np.arange(ends[-1]) - np.repeat(ends - pieces, pieces)
            cuts = np.append(np.repeat(starts[:-1], pieces) + nth * _PIECE, starts[-1])
            rows = sum_groups(rows, order, cuts, xp, factors)
            order, starts, factors = np.arange(len(rows)), np.append(0, ends), None
        total[xp.asarray(filled)] = sum_groups(rows, order, starts, xp, factors)
    return total
