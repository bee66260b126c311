"""Hashes of variables, by which two servers find out that they hold other values: array work.

No round may run meanwhile: variables are read where they lie, and the next round may write into them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import xxhash

from psserver.devices import ServerDevice
from psserver.state.variables import Store, take_rows
from pswire.model.rows import Int64s
from pswire.model.tensor import as_bytes

PIECE = 1 << 14
"""Rows that are copied at a time."""


def hash_wholes(store: Store, device: ServerDevice, ids: Iterable[int]) -> dict[int, int]:
    """Returns the hash of all bytes of each variable, 64 bits, by number.

    A variable of which rows have missed updates is left out: what is in memory depends on who has read it.
    """
    with device.scope():
        settled = ((id, store.value(id)) for id in ids if store.is_settled(id))
        return {id: xxhash.xxh3_64_intdigest(as_bytes(device.get(value))) for id, value in settled}


def hash_rows(store: Store, device: ServerDevice, rows: Mapping[int, Int64s]) -> dict[int, int]:
    """Returns the hash of some rows of each variable, with all updates, 64 bits, by number.

    Args:
        store: the variables.
        device: where they are.
        rows: the rows' numbers in any order, also several times; of a dynamic table keys, of which those without a row
            have their first value.
    """
    tables, found = store.tables_of(rows), dict[int, int]()
    with device.scope():
        for id, ids in rows.items():
            if not store.initialized(id):
                continue
            table, places = tables.get(id) or store.views([id])[0], np.unique(ids)
            digest = xxhash.xxh3_64(as_bytes(places))
            for at in range(0, len(places), PIECE):
                digest.update(as_bytes(device.get(take_rows(table, places[at : at + PIECE], device.xp))))
            found[id] = digest.intdigest()
    return found
