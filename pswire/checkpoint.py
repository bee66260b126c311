"""Writing a checkpoint: a directory with one safetensors file per server, and a manifest written last.

Without a manifest there is no checkpoint: a directory without one is what a crash left behind. No save touches a file
of another one before it is complete itself, so that whatever goes wrong leaves what was there.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import PurePosixPath
from typing import IO

from pswire import tensorfile
from pswire.api import Shard
from pswire.errors import CheckpointError
from pswire.log import Position
from pswire.manifest import LATEST, MANIFEST, Manifest, Saved, is_ours, latest_text, number, shard_name
from pswire.places import Place, below
from pswire.saved import SavedCheckpoint
from pswire.spec import SnapshotOrder
from pswire.tensor import Array, portable, spec_of
from pswire.tensorfile import told

log = logging.getLogger("pswire")

Busy = Callable[[], Collection[str]]
"""Asked after a directory was listed: whatever is in the list was ordered before."""


@dataclass(frozen=True)
class Frozen:
    """One server's variables right after a round. The arrays never change, so this costs nothing.

    Attributes:
        order: the plan's order.
        server: which server.
        round: the round.
        positions: the datasets' positions after it.
        values: arrays on the device, by the name that checkpoints have them by; less those that are written.
        save: what sets its file apart from those of other saves at the same path. Plans do not: a job that goes on
            from an older checkpoint makes those that it made before.
    """

    order: SnapshotOrder
    server: int
    round: int
    positions: tuple[Position, ...]
    values: dict[str, Array]
    save: str = field(default_factory=lambda: secrets.token_hex(4))

    @property
    def directory(self) -> PurePosixPath:
        """Where the checkpoint is; raises `CheckpointError` where that is not below the root, or the name is taken."""
        directory = PurePosixPath(below(self.order.path))
        if directory.name == LATEST:
            raise CheckpointError(
                f"{self.order.path!r}: the name {LATEST!r} is that of the file which names the newest checkpoint; "
                "choose another one"
            )
        return directory

    @property
    def file(self) -> str:
        """The name of its file."""
        return shard_name(self.order.servers.index(self.server), len(self.order.servers), self.save)


def write_shard(place: Place, frozen: Frozen, get: Callable[[Array], Array], written: Callable[[str], object]) -> Shard:
    """Writes one server's file.

    Args:
        place: below which no path may lead out.
        frozen: what to write.
        get: brings an array to the host.
        written: told of each variable whose bytes are written, so that it may be let go of.

    Raises:
        CheckpointError: for a path that leaves the place, and for whatever goes wrong there; it names the file.
    """
    path = str(frozen.directory / frozen.file)
    specs = {name: spec_of(value) for name, value in frozen.values.items()}
    sums: dict[str, str] = {}

    def fill(file: IO[bytes]) -> int:
        file.write(head)
        for name in tensorfile.ordered(specs):
            sums[name] = tensorfile.append(file, portable(get(frozen.values[name])))
            written(name)
        return len(head) + sum(spec.nbytes for spec in specs.values())

    with told(place.full(path), "written"):
        head = tensorfile.header(specs)
        nbytes = place.write(path, fill)
    tensors = tuple((name, spec, sums[name]) for name, spec in specs.items())
    where = place.full(str(frozen.directory))
    return Shard(where, frozen.file, frozen.round, frozen.positions, tensors, nbytes)


def remove_shard(place: Place, frozen: Frozen) -> None:
    """Removes the file of a save that failed, if it is there; what the place raises is a `CheckpointError`.

    It stays where a manifest names it: one that could not be made lasting is there all the same.
    """
    directory = frozen.directory
    with told(place.full(str(directory / frozen.file)), "removed"):
        there = place.exists(str(directory / MANIFEST))
        if not there or frozen.file not in SavedCheckpoint.open(place, str(directory)).manifest.shards:
            place.remove(str(directory / frozen.file))


def manifest_of(shards: Sequence[Shard], state: str) -> Manifest:
    """The manifest of a checkpoint whose files are written.

    Args:
        shards: all of one round.
        state: as a `SnapshotOrder` has it.
    """
    said = json.loads(state or "{}")
    return Manifest(
        shards[0].round,
        shards[0].positions,
        {name: Saved(shard.file, spec, checksum) for shard in shards for name, spec, checksum in shard.tensors},
        {shard.file: shard.nbytes for shard in shards},
        said.get("objects", {}),
        said.get("state", {}),
        time.time(),
    )


def write_manifest(
    place: Place, frozen: Frozen, text: str, busy: Busy = frozenset, spare: Collection[str] = ()
) -> Shard:
    """Writes the manifest, which makes the checkpoint one; says that it is the newest, if that is ordered.

    Then what the order replaces is deleted, and what crashed saves left removed. What cannot be is told in the log.

    Args:
        place: below which no path may lead out.
        frozen: whose checkpoint it is.
        text: JSON.
        busy: gives the paths of checkpoints that are being written, other saves at this one's path included.
        spare: full paths of checkpoints that somebody still reads: none of their files is removed.

    Raises:
        CheckpointError: as `write_shard`; also where the text is no manifest, or a file that it names is not there.
    """
    directory = frozen.directory
    where, said = str(directory / MANIFEST), json.loads(frozen.order.state or "{}")
    with told(place.full(where), "written"):
        manifest = Manifest.parse(text, place.full(where))
    _check_shards(place, directory, manifest)
    with told(place.full(where), "written"):
        place.put(where, text.encode())
    if said.get("latest"):
        latest = str(directory.parent / LATEST)
        with told(place.full(latest), "written"):
            place.put(latest, latest_text(directory.name).encode())
    above = place.full(str(directory.parent))
    _tried(above, partial(_tidy, place, directory, manifest, said.get("delete", []), busy, spare))
    return Shard(place.full(str(directory)), MANIFEST, frozen.round, frozen.positions, ())


def _check_shards(place: Place, directory: PurePosixPath, manifest: Manifest) -> None:
    """Raises `CheckpointError` unless the files that a manifest names are there: each server has written its own."""
    for file in manifest.shards:
        path = str(directory / file)
        with told(place.full(path), "found"):
            size = place.size(path) if place.exists(path) else None
        if size is None or size != manifest.files.get(file, size):
            raise CheckpointError(
                f"{place.full(path)} {'is not there' if size is None else f'has {size} bytes'}, though a server has "
                f"written {manifest.files.get(file, 'some')} bytes of it; servers on several hosts need a place "
                "that all of them see: a shared directory, or a URL such as s3://bucket/run, as --checkpoint-root"
            )


def _tried(where: str, call: Callable[[], object]) -> None:
    """The checkpoint is complete, whatever this does."""
    try:
        call()
    except Exception as error:  # object stores have errors of their own
        log.warning("cannot remove what is not needed in %s: %s", where, error)


def _tidy(
    place: Place,
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
    place: Place,
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
        directory: the checkpoint.
        manifest: what it has.
        listed: what is beside it.
        writing: what was being written after that was listed.
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
    place: Place,
    directory: PurePosixPath,
    name: str,
    listed: Mapping[str, frozenset[str]],
    spare: Collection[str] = (),
) -> None:
    """Deletes a checkpoint beside one that is complete and takes its place. What is none is left alone.

    Args:
        place, spare: as `write_manifest` takes them.
        directory: the one that is complete.
        name: of the other one.
        listed: what is beside it.

    Raises:
        CheckpointError: the name leads elsewhere.
    """
    old = directory.parent / name
    if old.name != name or name == "..":
        raise CheckpointError(f"{name!r} is no name of a checkpoint beside {directory}")
    files = listed.get(name, frozenset())
    if MANIFEST in files and old != directory and place.full(str(old)) not in spare:
        # Without it, it is none any more, however far this comes.
        place.remove(str(old / MANIFEST))
        _remove(place, old, files)


def _remove(place: Place, directory: PurePosixPath, files: Collection[str]) -> None:
    for file in files:
        if is_ours(file):
            place.remove(str(directory / file))
