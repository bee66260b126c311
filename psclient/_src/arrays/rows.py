"""Rows of arrays, taken, joined and added up on the device where they are."""

from __future__ import annotations

from collections.abc import Sequence

from psclient._src.arrays.devices import AnyArray, device_of, device_scope, namespace
from pswire.model.rows import Int64s, sum_groups


def take(rows: AnyArray, places: Int64s) -> AnyArray:
    """Returns the rows at some places."""
    device = device_of(rows)
    with device_scope(device):
        return rows[namespace(device).asarray(places)]


def concatenate(pieces: Sequence[AnyArray]) -> AnyArray:
    """Returns the rows of all pieces, which are on one device, as one array."""
    if len(pieces) == 1:
        return pieces[0]
    device = device_of(pieces[0])
    with device_scope(device):
        return namespace(device).concatenate(pieces)


def add_groups(rows: AnyArray, order: Int64s, starts: Int64s) -> AnyArray:
    """Returns the sum of each group of rows; see `pswire.model.rows.sum_groups`."""
    device = device_of(rows)
    with device_scope(device):
        return sum_groups(rows, order, starts, namespace(device))
