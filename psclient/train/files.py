"""Checkpoints of strategies without servers: this process writes and reads the files, in the servers' format."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

from psclient.local import LocalBackend
from psclient.saved import SavedCheckpoint
from psclient.stored import SyncOnReadVariable
from psclient.train.keeper import Choose, Content, Opened
from psclient.train.options import CheckpointOptions
from psclient.variables import Variable
from pswire import tensorfile
from pswire.errors import CheckpointError, VariableMismatch
from pswire.manifest import MANIFEST, Manifest, Saved
from pswire.spec import VariableSpec
from pswire.tensor import DTYPES, Array, TensorSpec, portable, spec_of

SHARD = "shard-00000-of-00001.safetensors"
"""The one file that has the tensors."""


class FileKeeper:
    """A `Keeper` of a strategy without servers. Paths are those of this process; nothing is left for later.

    Args:
        strategy: whose variables.
    """

    takes_part = True

    def __init__(self, strategy: Any) -> None:
        self._backend: LocalBackend = strategy.backend

    def check_free(self, options: CheckpointOptions) -> None:
        """As `Keeper.check_free`: no save is ever under way."""

    def sync(self) -> None:
        """As `Keeper.sync`: whatever was saved is complete."""

    def save(self, path: str, content: Content) -> None:
        """As `Keeper.save`; what it has is complete when this returns.

        Raises:
            CheckpointError: it cannot be written.
        """
        names = content.names()
        arrays = {names[at]: portable(v.numpy()) for at, v in content.variables.items()}
        directory = Path(path)
        try:
            saved = _write_shard(directory, arrays)
            sizes = {SHARD: (directory / SHARD).stat().st_size}
            manifest = Manifest(0, self._backend.group.positions, saved, sizes, names, content.state, time.time())
            with _beside(directory / MANIFEST) as file:
                file.write(manifest.text().encode())
            for old in content.delete:
                _delete(Path(old))
        except OSError as error:
            raise CheckpointError(f"checkpoint {path!r} was not saved: {error}") from error

    def look(self, path: str) -> Opened:
        """As `Keeper.look`."""
        found = SavedCheckpoint.open(path)
        # What is told is what was asked for, or something in it: relative where that was.
        return Opened(path if Path(path).name == found.name else f"{path.rstrip('/')}/{found.name}", found.manifest)

    def restore(self, path: str, choose: Choose, cast: bool) -> Opened:
        """As `Keeper.restore`: nothing changes where anything is wrong.

        Raises:
            CheckpointError: a value is broken.
            VariableMismatch: it has another shape or dtype.
        """
        found = SavedCheckpoint.open(path)
        chosen = choose(found.manifest)
        fit = partial(_fitting, found, cast=cast)
        values = [(v, fit(name, v.name, v.spec)) for name, v in chosen.items()]
        for variable, value in values:
            if isinstance(variable, SyncOnReadVariable):
                variable.share_out(value)
            else:
                variable.assign(value)
        self._backend.group.begin_at(found.manifest.positions)
        left = {name for name in found.manifest.tensors if name not in chosen}
        self._backend.first_value = partial(_take, left, fit)
        return self.look(path)

    def was_restored(self, variable: Variable) -> bool:
        """As `Keeper.was_restored`."""
        return self._backend.was_restored(variable)


def _take(left: set[str], fit: Callable[[str, str, TensorSpec], Array], spec: VariableSpec) -> Array | None:
    """What a checkpoint has for a variable that is created later; each value is given once."""
    if spec.saved_as is not None or spec.name not in left:
        return None
    left.discard(spec.name)
    return fit(spec.name, spec.name, spec.tensor)


def _fitting(found: SavedCheckpoint, name: str, variable: str, spec: TensorSpec, cast: bool) -> Array:
    """A tensor of a checkpoint, as a variable takes it."""
    saved = found.manifest.tensors[name]
    if saved.spec.shape != spec.shape or (saved.spec.dtype != spec.dtype and not cast):
        raise VariableMismatch(
            f"the checkpoint {found.path} has {name!r} as {saved.spec}, and variable {variable!r} is {spec}"
            + ("; restore it with CheckpointOptions(cast=True)" if saved.spec.shape == spec.shape else "")
        )
    return found.read(name).astype(DTYPES[spec.dtype], copy=False)


def _write_shard(directory: Path, arrays: Mapping[str, Array]) -> dict[str, Saved]:
    directory.mkdir(parents=True, exist_ok=True)
    # What may be overwritten is no checkpoint any more.
    (directory / MANIFEST).unlink(missing_ok=True)
    specs = {name: spec_of(array) for name, array in arrays.items()}
    with _beside(directory / SHARD) as file:
        file.write(tensorfile.header(specs))
        sums = {name: tensorfile.append(file, arrays[name]) for name in tensorfile.ordered(specs)}
    return {name: Saved(SHARD, spec, sums[name]) for name, spec in specs.items()}


@contextmanager
def _beside(path: Path) -> Iterator[IO[bytes]]:
    """A file that takes its place, whole and synced, when all is written."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def _delete(directory: Path) -> None:
    """Deletes a checkpoint; what has no manifest is none, and stays."""
    if (directory / MANIFEST).is_file():
        (directory / MANIFEST).unlink()
        for shard in directory.glob("shard-*.safetensors"):
            shard.unlink(missing_ok=True)
        with suppress(OSError):  # what somebody else has put there stays
            directory.rmdir()
