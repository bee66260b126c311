"""Arrays made of dynamic tables: for variables with rows 0 to N - 1, which a checkpoint has as tables by keys."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pswire.checkpoint.merged_tables import MergedTable
from pswire.checkpoint.reader import SavedCheckpoint
from pswire.errors import VariableMismatch
from pswire.model.first_values import RowInitializer
from pswire.model.plan import ShardOf
from pswire.model.tensor import DTYPES, Array, TensorSpec


def read_arrays(
    saved: SavedCheckpoint,
    wanted: Sequence[tuple[str, TensorSpec]],
    cast: bool = False,
    shards: Sequence[ShardOf | None] = (),
) -> list[Array]:
    """Does as `SavedCheckpoint.read`, also of tensors of dynamic tables: row k is that of key k.

    Rows without a key are as the table's rows begin.

    Args:
        saved: the checkpoint.
        wanted, cast, shards: as `SavedCheckpoint.read` takes them.

    Raises:
        VariableMismatch: as `SavedCheckpoint.read`; also where a key is no row of the variable.
        DamagedCheckpoint, CheckpointError: as `SavedCheckpoint.read`.
    """
    of, owners = list(shards) or [None] * len(wanted), saved.manifest.owners
    plain = [number for number, (name, _) in enumerate(wanted) if name not in owners]
    read = saved.read([wanted[number] for number in plain], cast, [of[number] for number in plain])
    found = dict(zip(plain, read, strict=True))
    tables: dict[str, MergedTable] = {}
    for number, ((name, spec), shard) in enumerate(zip(wanted, of, strict=True)):
        if name in owners:
            if owners[name] not in tables:
                tables[owners[name]] = MergedTable.of(saved, owners[name])
            found[number] = _array(saved, tables[owners[name]], name, spec, cast, shard)
    return [found[number] for number in range(len(wanted))]


def _array(
    saved: SavedCheckpoint, table: MergedTable, name: str, spec: TensorSpec, cast: bool, shard: ShardOf | None
) -> Array:
    there = table.rows.get(name)
    fits = there is not None and spec.shape and spec.shape[1:] == there.shape[1:]
    if there is None or not fits or (spec.dtype != there.dtype and not cast):
        raise VariableMismatch(
            f"the checkpoint {saved.full} holds {name!r} as {there} of dynamic table {table.name!r}, not {spec}"
        )
    first, total = (shard.first, shard.rows) if shard else (0, spec.shape[0])
    keys = table.keys
    bad = np.flatnonzero((keys < 0) | (keys >= total))
    if bad.size:
        raise VariableMismatch(
            f"the checkpoint {saved.full} holds {name!r} as a dynamic table with key {keys[bad[0]]}, but the "
            f"variable has {total} rows, which are keys 0 to {total - 1}"
        )
    found = _first(table, name, np.arange(first, first + spec.shape[0]), TensorSpec(there.dtype, spec.shape))
    at = 0
    for piece in table.pieces(name):
        rows = keys[at : at + len(piece)].astype(np.int64) - first
        mine = (rows >= 0) & (rows < len(found))
        found[rows[mine]] = piece[mine]
        at += len(piece)
    return found.astype(DTYPES[spec.dtype], copy=False)


def _first(table: MergedTable, name: str, ids: Array, spec: TensorSpec) -> Array:
    """Returns an array of rows as they begin."""
    if name == table.name:
        return RowInitializer(table.spec).rows(ids.astype(table.spec.key_dtype))
    values = {slot.name: slot.value for slot in table.slots}
    return np.full(spec.shape, values.get(name, 0), DTYPES[spec.dtype])
