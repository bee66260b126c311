"""Writing a checkpoint: a directory with one safetensors file per server, and a manifest written last.

Without a manifest there is no checkpoint: a directory without one is what a crash left behind. No save touches a file
of another one before it is complete itself, so that whatever goes wrong leaves what was there.
"""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import PurePosixPath
from typing import IO, Any, Protocol

from pswire.checkpoint import safetensors_stream
from pswire.checkpoint.assembly import Said
from pswire.checkpoint.manifest import (
    LATEST,
    MANIFEST,
    MAX_MANIFEST,
    Base,
    Manifest,
    aside,
    is_aside,
    is_ours,
    latest_text,
    number,
    shard_name,
)
from pswire.checkpoint.reader import SavedCheckpoint, named_latest
from pswire.checkpoint.safetensors_stream import told
from pswire.checkpoint.storage import Storage, below, parted
from pswire.checkpoint.strict_json import Malformed
from pswire.errors import CheckpointError
from pswire.model.log import Position
from pswire.model.plan import ShardOf, SnapshotOrder
from pswire.model.saved import PartOf, SavedTable, SavedTensor, Shard
from pswire.model.tensor import Array, TensorSpec, portable, spec_of

log = logging.getLogger("pswire")

Busy = Callable[[], Collection[str]]
"""Asked after a directory was listed: whatever is in the list was ordered before."""


@dataclass(frozen=True)
class Column:
    """A tensor to be written, when its turn comes.

    Attributes:
        name: its name in the file.
        spec: dtype and shape.
        pieces: yields it, in pieces of some rows one behind another; called once.
        shard: which rows of a partitioned variable it is.
        part: which part of a tensor of a dynamic table it is.
    """

    name: str
    spec: TensorSpec
    pieces: Callable[[], Iterable[Array]]
    shard: ShardOf | None = None
    part: PartOf | None = None


class FrozenTable(Protocol):
    """A part of a dynamic table right after a round."""

    @property
    def saved(self) -> SavedTable:
        """What is saved of it."""

    @property
    def nbytes(self) -> int:
        """Bytes of rows that are not written yet."""

    @property
    def aside(self) -> int:
        """Bytes of what was set aside for it."""

    def columns(self) -> Iterable[Column]:
        """Finds out what there is to write; called once, in the thread that writes."""


@dataclass(frozen=True)
class Frozen:
    """One server's variables right after a round. They never change, so this costs nothing.

    Attributes:
        order: the plan's order.
        server: index of the server.
        round: number of the round.
        positions: the datasets' positions after it.
        values: arrays on the device, or what one is made of, by the name that the file has them by; less those that are
            written.
        save: tells its file apart from those of other saves at the same path. Plans do not: a job that goes on
            from an older checkpoint makes those that it made before.
        shards: which of the values are rows of a partitioned variable.
        tables: the parts of dynamic tables, by their keys, in their order.
    """

    order: SnapshotOrder
    server: int
    round: int
    positions: tuple[Position, ...]
    values: dict[str, Any]
    save: str = field(default_factory=lambda: secrets.token_hex(4))
    shards: Mapping[str, ShardOf] = field(default_factory=dict)
    tables: dict[str, FrozenTable] = field(default_factory=dict)

    @property
    def directory(self) -> PurePosixPath:
        """The checkpoint's directory; raises `CheckpointError` where it is not below the root, or the name is taken."""
        return PurePosixPath(saved_path(self.order.path))

    @property
    def file(self) -> str:
        """The name of its file."""
        return shard_name(self.order.servers.index(self.server), len(self.order.servers), self.save)


MAX_NAME = 200
"""Bytes of each part of a checkpoint's path: file systems take 255, and a damaged one gets a longer name."""

MAX_PATH = 1000
"""Bytes of a checkpoint's path; no object store takes many more."""


def saved_path(path: str, own: bool = False) -> str:
    """Checks a path at which a checkpoint is to be saved.

    Servers and whoever orders them to save ask this one function, so that nothing is ordered which they refuse.

    Args:
        path: path below the servers' root.
        own: True for one of this process's own instead, such as "/data/ckpt-1" or "s3://bucket/ckpt-1".

    Returns:
        The path in its plain form; of an own one the last part.

    Raises:
        CheckpointError: the path could lead elsewhere, or is no name for a checkpoint; the message says what to write.
    """
    plain = PurePosixPath(parted(path)[1] if own else below(path))
    why = ""
    if path.endswith("/") or plain.name in ("", "..") or plain.name.startswith("-"):
        why = "the part after the last slash has no name before the number"
    elif not str(plain).isprintable():
        why = "it contains characters that are not printable"
    elif any(len(part.encode()) > MAX_NAME for part in plain.parts) or len(str(plain).encode()) > MAX_PATH:
        why = f"it is too long; the maximum is {MAX_NAME} bytes per part and {MAX_PATH} bytes in total"
    elif plain.name == LATEST:
        why = f"{LATEST!r} is the name of the file that lists the newest checkpoint; choose another name"
    elif is_aside(plain.name):
        why = "this kind of name is used for damaged checkpoints; choose another name"
    if why:
        raise CheckpointError(f"cannot save a checkpoint at {path[:300]!r}: {why}; write a path such as 'run1/ckpt'")
    return str(plain)


def write_shard(
    place: Storage, frozen: Frozen, get: Callable[[Any], Iterable[Array]], written: Callable[[str], object]
) -> Shard:
    """Writes one server's file.

    Args:
        place: the storage; no path may lead out of it.
        frozen: the variables to write.
        get: brings a variable's value to the host, in pieces of some rows one behind another.
        written: called with the name of each variable whose bytes are written, so that it may be let go of.

    Raises:
        CheckpointError: a path leaves the storage, or writing fails; it names the file.
    """
    tables = [table.saved for table in frozen.tables.values()]
    columns = [
        *(
            # Nothing else holds a value, so that it can be let go of when it is written.
            Column(name, spec_of(value), partial(_pieces, frozen, name, get), frozen.shards.get(name))
            for name, value in frozen.values.items()
        ),
        *_columns(frozen.tables),
    ]
    tensors, nbytes = write_file(place, str(frozen.directory / frozen.file), columns, written)
    where = place.full(str(frozen.directory))
    return Shard(where, frozen.file, frozen.round, frozen.positions, tensors, nbytes, tuple(tables))


def _columns(tables: Mapping[str, FrozenTable]) -> Iterator[Column]:
    """Yields the tensors of parts of dynamic tables; of several parts of one, all but the first have own names."""
    taken = set[str]()
    for table in tables.values():
        columns = list(table.columns())
        for column in columns:
            first = column.part.first if column.part is not None else 0
            yield replace(column, name=f"{column.name}@{first}") if column.name in taken else column
        taken |= {column.name for column in columns}


def _pieces(frozen: Frozen, name: str, get: Callable[[Any], Iterable[Array]]) -> Iterable[Array]:
    return get(frozen.values[name])


def write_file(
    place: Storage, path: str, columns: Sequence[Column], written: Callable[[str], object] = lambda name: None
) -> tuple[tuple[SavedTensor, ...], int]:
    """Writes a safetensors file.

    Args:
        place: the storage.
        path: the file's path.
        columns: what to write; each has another name.
        written: called with the name of each as soon as its bytes are written.

    Returns:
        What the file has, and its size.

    Raises:
        CheckpointError: two have the same name, the path leaves the storage, or writing fails; it names the file.
    """
    by_name = {column.name: column for column in columns}
    twice = next((name for name, times in Counter(column.name for column in columns).items() if times > 1), None)
    if twice is not None:
        raise CheckpointError(
            f"two tensors would be saved as {twice!r}, because a variable has the name of a tensor of a dynamic "
            "table; rename the variable"
        )
    specs = {name: column.spec for name, column in by_name.items()}
    sums: dict[str, str] = {}

    def fill(file: IO[bytes]) -> int:
        file.write(head)
        for name in safetensors_stream.ordered(specs):
            sums[name] = safetensors_stream.append(file, map(portable, by_name[name].pieces()))
            written(name)
        return len(head) + sum(spec.nbytes for spec in specs.values())

    with told(place.full(path), "written"):
        head = safetensors_stream.header(specs)
        nbytes = place.write(path, fill)
    found = (SavedTensor(name, c.spec, sums[name], c.shard, c.part) for name, c in by_name.items())
    return tuple(found), nbytes


def remove_shard(place: Storage, frozen: Frozen) -> None:
    """Removes the file of a save that failed, if it is there; what the place raises is a `CheckpointError`.

    It stays where a manifest names it: one that could not be made lasting is there all the same.
    """
    directory = frozen.directory
    with told(place.full(str(directory / frozen.file)), "removed"):
        there = place.exists(str(directory / MANIFEST))
        if not there or frozen.file not in SavedCheckpoint.open(place, str(directory)).manifest.shards:
            place.remove(str(directory / frozen.file))


def write_manifest(
    place: Storage, frozen: Frozen, text: str, busy: Busy = frozenset, spare: Collection[str] = ()
) -> Shard:
    """Writes the manifest, which makes the checkpoint one; says that it is the newest, if that is ordered.

    Then what the order replaces is deleted, and what crashed saves left removed. What cannot be is told in the log.

    Args:
        place: the storage; no path may lead out of it.
        frozen: the variables whose checkpoint it is.
        text: the manifest, JSON.
        busy: returns the paths of checkpoints that are being written, other saves at this one's path included.
        spare: full paths of checkpoints that are still read: none of their files is removed.

    Raises:
        CheckpointError: as `write_shard`; also where the text is no manifest, or a file that it names is not there.
    """
    directory = frozen.directory
    where, said, data = str(directory / MANIFEST), Said.of(frozen.order), text.encode()
    with told(place.full(where), "written"):
        if len(data) > MAX_MANIFEST:
            raise Malformed(f"it has {len(data):,} bytes, but the maximum is {MAX_MANIFEST:,}")
        manifest = Manifest.parse(text, place.full(where))
    if manifest.base is not None:
        manifest = replace(manifest, base=_known(place, directory, manifest.base.name))
        data = manifest.text().encode()
    _check_shards(place, directory, manifest)
    with told(place.full(where), "written"):
        place.put(where, data)
    if said.latest:
        latest = str(directory.parent / LATEST)
        with told(place.full(latest), "written"):
            place.put(latest, latest_text(directory.name).encode())
    above = place.full(str(directory.parent))
    _tried(above, partial(_tidy, place, directory, manifest, said.delete, busy, spare))
    return Shard(place.full(str(directory)), MANIFEST, frozen.round, frozen.positions, ())


def _known(place: Storage, directory: PurePosixPath, name: str) -> Base:
    """Returns the base of a delta with its id; raises `CheckpointError` unless it is there."""
    if name == directory.name:
        raise CheckpointError(f"{place.full(str(directory))} cannot contain the changes since itself")
    base = SavedCheckpoint.at(place, str(directory.parent / name))
    return Base(name, base.manifest.id)


def set_aside(place: Storage, restored: str, damaged: Mapping[str, str]) -> None:
    """Gives damaged checkpoints names by which no job goes on from them, now that one before them is restored.

    None of their files is changed. What cannot be done is told in the log: they are passed over again then.

    Args:
        place: the storage that has them.
        restored: the path of the one that was restored.
        damaged: names of those beside it, with the damage of each.
    """
    path = PurePosixPath(below(restored))
    above = str(path.parent)
    if damaged:
        _tried(place.full(above), partial(_set_aside, place, above, path.name, damaged), "rename a damaged checkpoint")


def _set_aside(place: Storage, above: str, restored: str, damaged: Mapping[str, str]) -> None:
    listed = place.listing(above)
    if named_latest(place, above) in damaged:  # else the greatest number would be the newest
        latest = str(PurePosixPath(above) / LATEST)
        _tried(
            place.full(latest),
            lambda: place.put(latest, latest_text(restored).encode()),
            "write the name of the newest checkpoint",
        )
    for name, why in damaged.items():
        if name in listed and PurePosixPath(name).name == name != restored:
            kept = aside(name, listed)
            place.move(str(PurePosixPath(above) / name), kept)
            log.info("%s/%s is damaged, and was renamed to %s: %s", place.full(above), name, kept, why)


def _check_shards(place: Storage, directory: PurePosixPath, manifest: Manifest) -> None:
    """Raises `CheckpointError` unless the files that a manifest names are there: each server has written its own."""
    for file in manifest.shards:
        path = str(directory / file)
        with told(place.full(path), "found"):
            size = place.size(path) if place.exists(path) else None
        if size is None or size != manifest.files.get(file, size):
            raise CheckpointError(
                f"{place.full(path)} {'does not exist here' if size is None else f'has {size} bytes'}, although "
                "a server "
                f"wrote {manifest.files.get(file, 'some')} bytes of it. Servers on several hosts need a "
                "--checkpoint-root that all of them see: a shared directory, or a URL such as s3://bucket/run"
            )


def _tried(where: str, call: Callable[[], object], what: str = "remove old checkpoints") -> None:
    """The checkpoint is complete, or restored, whatever this does."""
    try:
        call()
    except Exception as error:  # object stores have errors of their own
        log.warning("cannot %s in %s: %s", what, where, error)


def _tidy(
    place: Storage,
    directory: PurePosixPath,
    manifest: Manifest,
    names: Sequence[str],
    busy: Busy,
    spare: Collection[str],
) -> None:
    """Deletes these checkpoints, and what crashed saves left. The directory, which may be large, is listed once."""
    listed = place.listing(str(directory.parent))
    for name in names:
        _tried(place.full(str(directory.parent)), partial(delete, place, directory, name, listed, spare))
    sweep(place, directory, manifest, listed, busy(), spare)


def sweep(
    place: Storage,
    directory: PurePosixPath,
    manifest: Manifest,
    listed: Mapping[str, frozenset[str]],
    writing: Collection[str],
    spare: Collection[str],
) -> None:
    """Removes what crashed saves left: in a checkpoint what its manifest does not name, and earlier ones without one.

    Earlier is what has the checkpoint's name and a smaller number: a job numbers its checkpoints upwards. Complete
    ones, those of other names, and files that no save makes are left alone.

    Args:
        place, spare: as `write_manifest` takes them.
        directory: path of the checkpoint.
        manifest: the checkpoint's table of contents.
        listed: names of directories beside it, with their files.
        writing: paths that were being written after that listing.
    """
    stem, mine = number(directory.name)
    for name, files in listed.items():
        path = directory.parent / name
        if path == directory:
            left = files - {MANIFEST, *manifest.shards}
        elif MANIFEST not in files and number(name)[0] == stem and -1 < number(name)[1] < mine:
            left = files if all(map(is_ours, files)) else frozenset()
        else:
            continue
        if str(path) not in writing and place.full(str(path)) not in spare:
            _tried(place.full(str(path)), partial(_remove, place, path, left))


def delete(
    place: Storage,
    directory: PurePosixPath,
    name: str,
    listed: Mapping[str, frozenset[str]],
    spare: Collection[str] = (),
) -> None:
    """Deletes a checkpoint beside one that is complete and takes its place. What is none is left alone.

    Args:
        place, spare: as `write_manifest` takes them.
        directory: path of the complete one.
        name: name of the other one.
        listed: names of directories beside it, with their files.

    Raises:
        CheckpointError: `name` leads elsewhere.
    """
    old = directory.parent / name
    if old.name != name or name == "..":
        raise CheckpointError(f"{name!r} is not the name of a checkpoint in the directory of {directory}")
    files = listed.get(name, frozenset())
    if MANIFEST in files and old != directory and place.full(str(old)) not in spare:
        # Without it, it is none any more, however far this comes.
        place.remove(str(old / MANIFEST))
        _remove(place, old, files)


def _remove(place: Storage, directory: PurePosixPath, files: Collection[str]) -> None:
    for file in files:
        if is_ours(file):
            place.remove(str(directory / file))
