"""The manifest of a checkpoint whose files are written: what servers have written, and what a process has ordered."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import PurePosixPath
from typing import Any

from pswire.checkpoint import strict_json
from pswire.checkpoint.manifest import Base, Manifest, Saved, Slice
from pswire.checkpoint.strict_json import Malformed
from pswire.checkpoint.table_tensors import beside
from pswire.errors import CheckpointError
from pswire.model.hashing import BUCKETS
from pswire.model.plan import SnapshotOrder
from pswire.model.saved import SavedTable, SavedTensor, Shard
from pswire.model.tensor import TensorSpec


@dataclass(frozen=True)
class Said:
    """The content of a `SnapshotOrder`'s state.

    Attributes:
        objects, state: as a `Manifest` has them.
        delete: names of checkpoints beside it that are to be deleted once it is complete.
        latest: True if it is the one to go on from then.
        base: name of the checkpoint beside it to which it has the changes; "" for all.
    """

    objects: Mapping[str, str]
    state: Mapping[str, Any]
    delete: tuple[str, ...]
    latest: bool
    base: str

    @classmethod
    def of(cls, order: SnapshotOrder) -> Said:
        """Reads it; raises `CheckpointError` where it is not such."""
        try:
            said = strict_json.fields(strict_json.parse(order.state or "{}"))
            objects = strict_json.fields(said.get("objects", {}))
            return cls(
                {path: strict_json.text(name) for path, name in objects.items()},
                {key: strict_json.shallow(value) for key, value in strict_json.fields(said.get("state", {})).items()},
                tuple(map(strict_json.text, strict_json.items(said.get("delete", [])))),
                said.get("latest") is True,
                _name(said.get("base", "")),
            )
        except Malformed as error:
            raise CheckpointError(f"the data to be saved as {order.path[:300]!r} is malformed: {error}") from error


def _name(data: Any) -> str:
    """The name of a checkpoint beside another one, "" for none; raises `Malformed` for any other."""
    name = strict_json.text(data)
    if name in (".", "..") or "\0" in name or PurePosixPath(name).name != name:
        raise Malformed(f"{name[:80]!r} is not the name of a checkpoint")
    return name


def base_of(order: SnapshotOrder) -> str:
    """Returns the name of the checkpoint to which an order wants the changes; "" for all, also of a malformed order."""
    try:
        return Said.of(order).base
    except CheckpointError:
        return ""  # who makes the manifest is told


def manifest_of(shards: Sequence[Shard], order: SnapshotOrder) -> Manifest:
    """The manifest of a checkpoint whose files are written.

    Args:
        shards: all of one round.
        order: by which they were written.

    Raises:
        CheckpointError: the order is malformed, or rows of a partitioned variable are missing.
    """
    said, tables = Said.of(order), tables_in(shards)
    is_delta = any(table.since >= 0 for table in tables.values())
    if is_delta and not said.base:
        raise CheckpointError("the server wrote only changes, but the checkpoint has no base")
    return Manifest(
        shards[0].round,
        shards[0].positions,
        tensors_in(shards),
        {shard.file: shard.nbytes for shard in shards},
        said.objects,
        said.state,
        time.time(),
        tables=tables,
        id=secrets.token_hex(8) if tables else "",
        base=Base(said.base, "") if is_delta else None,
    )


def tensors_in(shards: Sequence[Shard]) -> dict[str, Saved]:
    """Returns what files have; rows of a partitioned variable, and parts of a table's tensor, are one by its name.

    Raises:
        CheckpointError: rows are missing, or a name is there twice.
    """
    found: dict[str, Saved] = {}
    parts: dict[str, list[tuple[int, str, SavedTensor]]] = {}
    of_tables = set[str]()
    for file in shards:
        for each in file.tensors:
            place = each.part or each.shard
            if place is None:
                found[each.name] = Saved(file.file, each.spec, each.checksum)
                continue
            of_tables |= {each.part.whole} if each.part else set()
            parts.setdefault(place.whole, []).append((place.first, file.file, each))
    for name, pieces in parts.items():
        if name in of_tables and (name in found or any(each.part is None for _, _, each in pieces)):
            raise CheckpointError(f"variable {name!r} has the same name as a tensor of a dynamic table; rename it")
        found[name] = _joined(name, sorted(pieces, key=itemgetter(0)))
    return found


def _joined(name: str, pieces: Sequence[tuple[int, str, SavedTensor]]) -> Saved:
    """Returns the tensor that pieces make, which are in order; those of tables may be empty, and are left out then."""
    _, first, one = pieces[0]
    slices, rows = list[Slice](), 0
    for _, file, each in pieces:
        if (each.spec.dtype, each.spec.shape[1:]) != (one.spec.dtype, one.spec.shape[1:]):
            raise CheckpointError(f"the parts of {name!r} are {one.spec} and {each.spec}")
        if each.spec.shape[0]:
            slices.append(Slice(file, each.name, rows, each.spec.shape[0], each.checksum))
            rows += each.spec.shape[0]
    if one.shard is not None and rows != one.shard.rows:
        raise CheckpointError(
            f"partitioned variable {name!r} has no value yet in some of its {one.shard.rows} rows, because the process "
            "that created it was lost; save again"
        )
    spec = TensorSpec(one.spec.dtype, (rows, *one.spec.shape[1:]))
    if len(slices) > 1 or any(each.tensor != name for each in slices):
        return Saved("", spec, "", tuple(slices))
    whole = slices[0] if slices else Slice(first, name, 0, 0, one.checksum)
    return Saved(whole.file, spec, whole.checksum)


def tables_in(shards: Sequence[Shard]) -> dict[str, SavedTable]:
    """Returns the dynamic tables that files have.

    Raises:
        CheckpointError: a part is missing, or is of another table.
    """
    found: dict[str, SavedTable] = {}
    buckets = Counter[str]()
    for file in shards:
        tables = {beside(each.name, "rows"): each.name for each in file.tables}
        for tensor in file.tensors:
            if tensor.part is not None and tensor.part.whole in tables:
                buckets[tables[tensor.part.whole]] += tensor.spec.shape[0]
        for each in file.tables:
            known = found.setdefault(each.name, each)
            if (known.spec, known.slots) != (each.spec, each.slots):
                raise CheckpointError(
                    f"the parts of table {each.name!r} do not have the same slot variables; save again"
                )
            changes = [one for one in (known.since, each.since) if one >= 0]
            found[each.name] = replace(known, since=min(changes, default=-1), round=max(known.round, each.round))
    missing = next((name for name in found if buckets[name] != BUCKETS), None)
    if missing is not None:
        raise CheckpointError(
            f"table {missing!r} does not exist yet on all of its servers, because the process that created it was "
            "lost; save again"
        )
    return found
