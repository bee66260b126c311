"""Hashes of variables, by which two servers find out that they hold other values: array work.

No round may run meanwhile: variables are read where they lie, and the next round may write into them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import xxhash

from psserver.devices import ServerDevice
from psserver.state.variables import Store
from pswire.model.rows import Int64s
from pswire.model.tensor import as_bytes

PIECE = 1 << 14
"""Rows that are copied at a time."""


def hash_wholes(store: Store, device: ServerDevice, ids: Iterable[int]) -> dict[int, int]:
    """Returns the hash of all bytes of each variable, 64 bits, by number.

    A variable of which updates of rows are deferred is left out: what is in memory depends on who has read it.
    """
    with device.scope():
        values = {id: store.find(id) for id in ids if store.initialized(id)}
        return {
            id: xxhash.xxh3_64_intdigest(as_bytes(device.get(value.array)))
            for id, value in values.items()
            if value.is_plain
        }


def hash_rows(store: Store, device: ServerDevice, rows: Mapping[int, Int64s]) -> dict[int, int]:
    """Returns the hash of some rows of each variable, with all updates, 64 bits, by number.

    Args:
        store: the variables.
        device: where they are.
        rows: the rows' numbers in any order, also several times; of a dynamic table keys, of which those without a row
            have their first value.
    """
    found = dict[int, int]()
    with device.scope():
        for id, ids in rows.items():
            if not store.initialized(id):
                continue
            (view,), places = store.views([id]), np.unique(ids)
            digest = xxhash.xxh3_64(as_bytes(places))
            for at in range(0, len(places), PIECE):
                digest.update(as_bytes(device.get(view.rows(places[at : at + PIECE], device.xp))))
            found[id] = digest.intdigest()
    return found
