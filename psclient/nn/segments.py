"""Sums of rows by group."""

from __future__ import annotations

import numpy as np

from psclient._src.arrays.devices import AnyArray, device_of, device_scope, namespace
from pswire.model.rows import Int64s, sum_groups

_PIECE = 32
"""Rows that are summed one after another. A group may have every row: then its pieces are summed, and theirs."""


def sum_segments(rows: AnyArray, order: Int64s, starts: Int64s) -> AnyArray:
    """Returns one row for each group: the sum of its rows, zeros where it has none.

    The order of the additions depends on the groups' sizes alone.

    Args:
        rows: (n, ...), on any device.
        order: int64[n], the rows by group.
        starts: int64[k + 1], the index in `order` of each group's first row, and the end.

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
            rows = sum_groups(rows, order, cuts, xp)
            order, starts = np.arange(len(rows)), np.append(0, ends)
        total[xp.asarray(filled)] = sum_groups(rows, order, starts, xp)
    return total
