"""A checkpoint: a directory with one safetensors file per server, and a manifest written last.

Without a manifest there is no checkpoint: a directory without one is what a crash left behind.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import IO

from psserver.places import Place, below
from pswire import tensorfile
from pswire.api import RestoreReply, Shard
from pswire.errors import CheckpointError, NoCheckpoint, VariableMismatch
from pswire.log import Position
from pswire.manifest import MANIFEST, Manifest, Saved, number, rank
from pswire.spec import SnapshotOrder
from pswire.tensor import DTYPES, Array, TensorSpec, portable, spec_of
from pswire.tensorfile import Entry, read_saved, told

log = logging.getLogger("psserver")


@dataclass(frozen=True)
class Frozen:
    """One server's variables right after a round. The arrays never change, so this costs nothing.

    Attributes:
        order: the plan's order.
        server: which server.
        round: the round.
        positions: the datasets' positions after it.
        values: arrays on the device, by the name that checkpoints have them by; less those that are written.
    """

    order: SnapshotOrder
    server: int
    round: int
    positions: tuple[Position, ...]
    values: dict[str, Array]


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
    directory = PurePosixPath(below(frozen.order.path))
    specs = {name: spec_of(value) for name, value in frozen.values.items()}
    sums: dict[str, str] = {}

    def fill(file: IO[bytes]) -> int:
        file.write(head)
        for name in tensorfile.ordered(specs):
            sums[name] = tensorfile.append(file, portable(get(frozen.values[name])))
            written(name)
        return len(head) + sum(spec.nbytes for spec in specs.values())

    count = len(frozen.order.servers)
    name = f"shard-{frozen.order.servers.index(frozen.server):05d}-of-{count:05d}.safetensors"
    with told(place.full(str(directory / name)), "written"):
        head = tensorfile.header(specs)
        # What may be overwritten is no checkpoint any more: a crash must not leave a manifest of mixed shards.
        place.remove(str(directory / MANIFEST))
        nbytes = place.write(str(directory / name), fill)
    tensors = tuple((name, spec, sums[name]) for name, spec in specs.items())
    return Shard(place.full(str(directory)), name, frozen.round, frozen.positions, tensors, nbytes)


def write_manifest(place: Place, frozen: Frozen, text: str, busy: Collection[str] = ()) -> Shard:
    """Writes the manifest, which makes the checkpoint one, and removes what crashed saves before it have left.

    Args:
        place: below which no path may lead out.
        frozen: whose checkpoint it is.
        text: JSON.
        busy: paths of checkpoints that are being written.

    Raises:
        CheckpointError: as `write_shard`; also where the text is no manifest.
    """
    directory = PurePosixPath(below(frozen.order.path))
    where = str(directory / MANIFEST)
    with told(place.full(where), "written"):
        manifest = Manifest.parse(text, place.full(where))
        place.put(where, text.encode())
    try:
        delete(place, directory, frozen.order.state)
        sweep(place, directory, manifest, busy)
    except Exception as error:  # the checkpoint is complete all the same
        log.warning("cannot remove what crashed saves have left beside %s: %s", place.full(str(directory)), error)
    return Shard(place.full(str(directory)), MANIFEST, frozen.round, frozen.positions, ())


def sweep(place: Place, directory: PurePosixPath, manifest: Manifest, busy: Collection[str]) -> None:
    """Removes what crashed saves left: in a checkpoint what its manifest does not name, and earlier ones without one.

    Earlier is what has the checkpoint's name and a smaller number: a job numbers its checkpoints upwards. Complete
    ones, those of other names, and files that no save makes are left alone.
    """
    others = place.listing(str(directory.parent))
    here = others.get(directory.name, frozenset()) - {MANIFEST, *manifest.files}
    # An older format does not say which files it has.
    _remove(place, directory, here if manifest.files else [])
    stem, mine = number(directory.name)
    for name, files in others.items():
        path = directory.parent / name
        crashed = MANIFEST not in files and all(_ours(file) for file in files) and str(path) not in busy
        if crashed and number(name)[0] == stem and -1 < number(name)[1] < mine:
            _remove(place, path, files)


def delete(place: Place, directory: PurePosixPath, said: str) -> None:
    """Deletes the checkpoints that an order names: what took their place is complete. What is none is left alone.

    Args:
        place: below which no path may lead out.
        directory: of the checkpoint that is complete, which is not deleted.
        said: the order's `state`, with their paths under "delete".
    """
    for path in json.loads(said).get("delete", []) if said else []:
        old = PurePosixPath(below(str(path)))
        files = place.listing(str(old.parent)).get(old.name, frozenset())
        if MANIFEST in files and old != directory:
            # Without it, it is none any more, however far this comes.
            place.remove(str(old / MANIFEST))
            _remove(place, old, files)


def _remove(place: Place, directory: PurePosixPath, files: Collection[str]) -> None:
    for file in files:
        if _ours(file):
            place.remove(str(directory / file))


def _ours(file: str) -> bool:
    """Whether a save makes files of such a name; it begins with a dot while the file is being written."""
    return file.startswith(("shard-", ".shard-", f".{MANIFEST}."))


@dataclass(frozen=True)
class Restored:
    """A checkpoint that was opened.

    Attributes:
        place: where it is.
        path: below the place.
        manifest: what it has.
        text: the same, as it was read.
    """

    place: Place
    path: str
    manifest: Manifest
    text: str
    _headers: dict[str, dict[str, Entry]] = field(default_factory=dict, compare=False, repr=False)

    def __contains__(self, name: str) -> bool:
        return name in self.manifest.tensors

    @property
    def reply(self) -> RestoreReply:
        """What is told of it."""
        return RestoreReply(self.path, self.manifest.positions, self.text)

    @classmethod
    def open(cls, place: Place, path: str) -> Restored:
        """Opens a checkpoint, or the newest in a directory of them.

        Raises:
            CheckpointError: there is none, or its manifest is broken.
        """
        path = below(path)
        with told(place.full(path)):
            if not place.exists(str(PurePosixPath(path) / MANIFEST)):
                path = newest(place, path)
        where = str(PurePosixPath(path) / MANIFEST)
        with told(place.full(where)), place.open(where) as file:
            text = file.read().decode()
        return cls(place, path, Manifest.parse(text, place.full(where)), text)

    def read(self, wanted: Sequence[tuple[str, TensorSpec]], cast: bool = False) -> list[Array]:
        """Reads tensors: nothing but these, each file in one go.

        Args:
            wanted: which, and what each has to be.
            cast: whether one may be of another dtype, and is cast.

        Returns:
            In the order of `wanted`; each has memory of its own.

        Raises:
            CheckpointError: the checkpoint does not have one of them, or its bytes are not those that were saved.
            VariableMismatch: it has another shape or dtype.
        """
        saved = [self._check(name, spec, cast) for name, spec in wanted]
        found: dict[int, Array] = {}
        for file in sorted({one.file for one in saved}):
            mine = [place for place, one in enumerate(saved) if one.file == file]
            found |= self._read(file, {place: wanted[place][0] for place in mine})
        return [found[place].astype(DTYPES[spec.dtype], copy=False) for place, (_, spec) in enumerate(wanted)]

    def _check(self, name: str, spec: TensorSpec, cast: bool) -> Saved:
        tensors, where = self.manifest.tensors, self.place.full(self.path)
        if name not in tensors:
            raise CheckpointError(
                f"the checkpoint {where} has no variable {name!r}; it has {', '.join(sorted(tensors)[:8])}"
            )
        found = tensors[name].spec
        if found.shape != spec.shape or (found.dtype != spec.dtype and not cast):
            raise VariableMismatch(f"the checkpoint {where} has {name!r} as {found}, not {spec}")
        return tensors[name]

    def _read(self, name: str, wanted: Mapping[int, str]) -> dict[int, Array]:
        """Reads tensors of one file."""
        path = str(PurePosixPath(self.path) / name)
        with told(self.place.full(path)), self.place.open(path) as file:
            entries = self._header(name, path, file)
            saved = self.manifest.tensors
            return {place: read_saved(file, entries, tensor, saved[tensor]) for place, tensor in wanted.items()}

    def _header(self, name: str, path: str, file: IO[bytes]) -> dict[str, Entry]:
        if name not in self._headers:
            size, expected = self.place.size(path), self.manifest.files.get(name)
            if expected not in (None, size):
                raise ValueError(f"it has {size} bytes, and had {expected} when it was saved")
            self._headers[name] = tensorfile.read_header(file, size)
        return self._headers[name]


def newest(place: Place, directory: str) -> str:
    """The path of the newest complete checkpoint in a directory, as `rank` says; raises `NoCheckpoint` without one."""
    found = [name for name, files in place.listing(directory).items() if MANIFEST in files]
    if not found:
        where = place.full(directory)
        raise NoCheckpoint(f"there is no complete checkpoint in {where}; save one first, or train anew")
    return str(PurePosixPath(directory) / max(found, key=rank))
