"""Deltas made whole: the tensors of a checkpoint and its bases as if all had been saved at once."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import PurePosixPath

import numpy as np

from pswire.checkpoint.assembly import tensors_in
from pswire.checkpoint.manifest import MANIFEST, Manifest, shard_name
from pswire.checkpoint.merged_tables import MergedTable
from pswire.checkpoint.reader import SavedCheckpoint
from pswire.checkpoint.safetensors_stream import told
from pswire.checkpoint.storage import parted, storage_at
from pswire.checkpoint.table_layers import ALL
from pswire.checkpoint.table_tensors import BESIDE, beside, kinds_of
from pswire.checkpoint.writer import Column, sweep, write_file
from pswire.errors import CheckpointError
from pswire.model.plan import ShardOf
from pswire.model.saved import PartOf, Shard
from pswire.model.tensor import DTYPES, Array, TensorSpec, spec_of


def whole_columns(saved: SavedCheckpoint) -> list[Column]:
    """Returns all tensors of a checkpoint, by name; of a delta its tables are whole.

    Raises:
        DamagedCheckpoint: a file is not as it was saved; also while they are read.
        CheckpointError: a file cannot be read.
    """
    manifest = saved.manifest
    owners = manifest.owners if manifest.base else {}
    found = [
        Column(name, each.spec, partial(_one, saved, name))
        for name, each in sorted(manifest.tensors.items())
        if name not in owners
    ]
    for name in manifest.tables if manifest.base else ():
        found += _columns(MergedTable.of(saved, name), ALL)
    return found


def _one(saved: SavedCheckpoint, name: str) -> Iterator[Array]:
    yield saved.tensor(name)


def _columns(table: MergedTable, buckets: range) -> Iterator[Column]:
    """Returns the tensors of some buckets of a table."""
    ends = table.offsets[buckets.start : buckets.stop + 1]
    first, stop = int(ends[0]), int(ends[-1])
    for name, spec in table.rows.items():
        own = TensorSpec(spec.dtype, (stop - first, *spec.shape[1:]))
        yield Column(name, own, partial(table.pieces, name, buckets), part=PartOf(name, buckets.start))
    for kind in kinds_of(table.spec, is_delta=False):
        unit, name = BESIDE[kind].unit, beside(table.name, kind)
        if unit == "row" or (unit == "table" and buckets.start):
            continue
        array = np.diff(ends) if kind == "rows" else table.layers[-1].read(kind, buckets)
        yield Column(name, spec_of(array), partial(iter, (array,)), part=PartOf(name, buckets.start))


def compact(saved: SavedCheckpoint) -> SavedCheckpoint:
    """Makes a delta whole, where it is: its files are written anew, then its manifest, and then the old ones removed.

    Deltas to which it is the base stay what they are. What it had the changes to is not needed by it any more. Files
    that no checkpoint has are removed with the old ones, also where it is whole: a killed compaction has left them.

    Args:
        saved: the delta.

    Returns:
        The whole checkpoint.

    Raises:
        DamagedCheckpoint: a file of it, or of a base, is not as it was saved. Nothing has changed.
        CheckpointError: a file cannot be read or written, or another process compacts it. What was there is there.
    """
    place, manifest = saved.place, saved.manifest
    if manifest.base is None:
        _sweep(saved, manifest)
        return saved
    saved.check_rest(())
    tables = {name: MergedTable.of(saved, name) for name in manifest.tables}
    save, shards = secrets.token_hex(4), list[Shard]()
    try:
        for number, file in enumerate(manifest.shards):
            columns = [*_columns_of_file(saved, file, tables)]
            name = shard_name(number, len(manifest.shards), save)
            tensors, nbytes = write_file(place, str(PurePosixPath(saved.path) / name), columns)
            shards.append(Shard(saved.full, name, manifest.round, manifest.positions, tensors, nbytes))
        _check_alone(saved, shards)
    except BaseException:
        for number in range(len(manifest.shards)):
            with suppress(Exception):  # the first error is the one to raise
                place.remove(str(PurePosixPath(saved.path) / shard_name(number, len(manifest.shards), save)))
        raise
    whole = _whole(manifest, shards)
    with told(place.full(saved.path), "written"):
        place.put(str(PurePosixPath(saved.path) / MANIFEST), whole.text().encode())
    _sweep(saved, whole)
    return SavedCheckpoint.at(place, saved.path)


def _check_alone(saved: SavedCheckpoint, shards: Sequence[Shard]) -> None:
    """Raises `CheckpointError` if another process has compacted it meanwhile: that removes what this one has made."""
    place, found = saved.place, SavedCheckpoint.at(saved.place, saved.path)
    try:
        kept = all(place.size(str(PurePosixPath(saved.path) / shard.file)) == shard.nbytes for shard in shards)
    except FileNotFoundError:
        kept = False
    if found.manifest != saved.manifest or not kept:
        raise CheckpointError(f"another process has compacted {saved.full}; nothing was changed")


def _sweep(saved: SavedCheckpoint, whole: Manifest) -> None:
    """Removes all files that saves make and that the manifest does not name."""
    place, directory = saved.place, PurePosixPath(saved.path)
    if directory.name == "":  # the place is the checkpoint itself
        above, name = parted(saved.full)
        place, directory = storage_at(above), PurePosixPath(name)
    listed = place.listing(str(directory.parent)).get(directory.name, frozenset())
    sweep(place, directory, whole, {directory.name: listed}, (), ())


def _whole(manifest: Manifest, shards: Sequence[Shard]) -> Manifest:
    """Returns the manifest of the same checkpoint, with other files."""
    return replace(
        manifest,
        tensors=tensors_in(shards),
        files={shard.file: shard.nbytes for shard in shards},
        tables={name: replace(table, since=-1) for name, table in manifest.tables.items()},
        base=None,
        library="",
    )


def _columns_of_file(saved: SavedCheckpoint, file: str, tables: dict[str, MergedTable]) -> Iterator[Column]:
    """Returns what a file has, with parts of tables that are whole."""
    owners = saved.manifest.owners
    for name, each in saved.manifest.tensors.items():
        for one in each.pieces(name) if name not in owners else ():
            if one.file == file:
                shard = ShardOf(name, one.first, each.spec.shape[0]) if each.slices else None
                spec = each.piece(one).spec
                yield Column(one.tensor, spec, partial(_rows, saved, name, one.first, spec), shard)
    for name, table in tables.items():
        counts = beside(name, "rows")
        for one in saved.manifest.tensors[counts].pieces(counts):
            if one.file == file:
                yield from _columns(table, range(one.first, one.first + one.rows))


def _rows(saved: SavedCheckpoint, name: str, first: int, spec: TensorSpec) -> Iterator[Array]:
    if not saved.manifest.tensors[name].slices:
        yield saved.tensor(name)
        return
    found: Array = np.empty(spec.shape, DTYPES[spec.dtype])
    saved.fill([(name, first, found)])
    yield found
