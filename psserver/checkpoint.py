"""Checkpoints on disk: a directory with one safetensors file per server, and a manifest written last.

Without a manifest there is no checkpoint: a directory without one is what a crash left behind. Every file
is written beside its place, synced, and renamed into it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
import safetensors
from safetensors.numpy import save_file

from pswire.api import RestoreReply, Shard
from pswire.errors import CheckpointError, NoCheckpoint, VariableMismatch
from pswire.log import Position
from pswire.manifest import MANIFEST, Manifest
from pswire.spec import SnapshotOrder
from pswire.tensor import DTYPES, Array, TensorSpec, portable, spec_of


@dataclass(frozen=True)
class Frozen:
    """One server's variables right after a round. The arrays never change, so this costs nothing.

    Attributes:
        order: the plan's order.
        server: which server.
        round: the round.
        positions: the datasets' positions after it.
        values: arrays on the device, by the name that checkpoints have them by.
    """

    order: SnapshotOrder
    server: int
    round: int
    positions: tuple[Position, ...]
    values: dict[str, Array]


def write(root: Path, frozen: Frozen, manifest: str, get: Callable[[Array], Array]) -> Shard:
    """Writes a shard, or the manifest if its text is given.

    Args:
        root: the directory that no path may leave.
        frozen: what to write.
        manifest: JSON text, or "".
        get: brings an array to the host.

    Raises:
        CheckpointError: for a path outside of the root.
        OSError: what the file system says.
    """
    directory = resolve(root, frozen.order.path)
    place = frozen.order.servers.index(frozen.server)
    file = f"shard-{place:05d}-of-{len(frozen.order.servers):05d}.safetensors"
    arrays = {name: portable(get(value)) for name, value in frozen.values.items()}
    directory.mkdir(parents=True, exist_ok=True)
    if manifest:
        _replace(directory / MANIFEST, lambda path: path.write_text(manifest))
    else:
        # What may be overwritten is no checkpoint any more: a crash must not leave a manifest of mixed shards.
        (directory / MANIFEST).unlink(missing_ok=True)
        _sync(directory)
        _replace(directory / file, lambda path: _save(arrays, path))
    tensors = tuple((name, spec_of(array), "") for name, array in arrays.items())
    nbytes = 0 if manifest else (directory / file).stat().st_size
    return Shard(str(directory), file, frozen.round, frozen.positions, tensors, nbytes)


def _save(arrays: dict[str, Array], path: Path) -> None:
    # The format knows no complex128: its parts lie in one more dimension, and the metadata says so.
    parted = {name: array for name, array in arrays.items() if array.dtype == np.complex128}
    parts = {name: array.reshape(-1).view(np.float64).reshape(*array.shape, 2) for name, array in parted.items()}
    save_file(arrays | parts, path, dict.fromkeys(parted, "complex128"))


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Has a file written beside its place, syncs it, and renames it into it."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(beside)
        _sync(beside)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def resolve(root: Path, path: str) -> Path:
    """The directory that a client's path means; raises `CheckpointError` if it leaves the root."""
    pure = PurePosixPath(path)
    if not path or "\0" in path or pure.is_absolute() or ".." in pure.parts:
        raise CheckpointError(f"{path!r} is no path below the servers' checkpoint root; write such as 'run1'")
    resolved = (root / pure).resolve()
    if not resolved.is_relative_to(root.resolve()):
        raise CheckpointError(f"{path!r} leaves the servers' checkpoint root through a link")
    return resolved


@dataclass(frozen=True)
class Restored:
    """A checkpoint that was opened.

    Attributes:
        directory: where it is.
        path: the same, below the root.
        manifest: what it has.
        text: the same, as it was read.
    """

    directory: Path
    path: str
    manifest: Manifest
    text: str

    def __contains__(self, name: str) -> bool:
        return name in self.manifest.tensors

    @property
    def reply(self) -> RestoreReply:
        """What is told of it."""
        return RestoreReply(self.path, self.manifest.positions, self.text)

    @classmethod
    def open(cls, root: Path, path: str) -> Restored:
        """Opens a checkpoint, or the newest in a directory of them.

        Raises:
            CheckpointError: there is none, or its manifest is broken.
        """
        directory = resolve(root, path)
        if not (directory / MANIFEST).is_file():
            directory = newest(directory)
        try:
            text = (directory / MANIFEST).read_text()
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{directory / MANIFEST} cannot be read: {error}") from error
        manifest = Manifest.parse(text, str(directory / MANIFEST))
        return cls(directory, directory.relative_to(root.resolve()).as_posix(), manifest, text)

    def read(self, name: str, spec: TensorSpec, cast: bool = False) -> Array:
        """A tensor.

        Args:
            name: which.
            spec: what it has to be.
            cast: whether it may be of another dtype.

        Raises:
            CheckpointError: the checkpoint does not have it, or its file is broken.
            VariableMismatch: it has another shape or dtype.
        """
        tensors = self.manifest.tensors
        file = tensors[name].file if name in tensors else None
        if file is None:
            raise CheckpointError(
                f"the checkpoint {self.directory} has no variable {name!r}; it has {', '.join(sorted(tensors)[:8])}"
            )
        try:
            with safetensors.safe_open(self.directory / file, framework="np") as shard:
                value: Array = shard.get_tensor(name)
                parted = (shard.metadata() or {}).get(name) == "complex128"
        except (OSError, safetensors.SafetensorError) as error:
            raise CheckpointError(f"{self.directory / file} cannot be read: {error}") from error
        value = np.asarray(value).view(np.complex128)[..., 0] if parted else np.asarray(value)
        found = spec_of(value)
        if found.shape != spec.shape or (found.dtype != spec.dtype and not cast):
            raise VariableMismatch(f"the checkpoint {self.directory} has {name!r} as {found}, not {spec}")
        return np.array(value, DTYPES[spec.dtype])


def newest(directory: Path) -> Path:
    """The newest complete checkpoint in a directory; raises `NoCheckpoint` if there is none."""
    found = [path.parent for path in directory.glob(f"*/{MANIFEST}")]
    if not found:
        raise NoCheckpoint(f"there is no complete checkpoint in {directory}; save one first, or train anew")
    return max(found, key=lambda path: (path / MANIFEST).stat().st_mtime_ns)
