"""Checkpoints of strategies without servers: this process writes and reads the files, by the servers' rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import cast

from psclient._src.distribute.local import LocalBackend
from psclient._src.distribute.strategy import Strategy
from psclient._src.variables.kinds import SyncOnReadVariable
from psclient._src.variables.variable import Variable
from psclient.train.backend import Choose, Content, OpenedCheckpoint
from psclient.train.options import CheckpointOptions
from pswire.checkpoint.arrays_of_tables import read_arrays
from pswire.checkpoint.assembly import manifest_of
from pswire.checkpoint.reader import SavedCheckpoint, open_whole
from pswire.checkpoint.storage import Storage, parted, storage_at
from pswire.checkpoint.writer import Frozen, remove_shard, saved_path, set_aside, write_manifest, write_shard
from pswire.errors import CheckpointError, DamagedCheckpoint
from pswire.model.plan import SnapshotOrder, VariableSpec
from pswire.model.tensor import Array


class FileBackend:
    """A `CheckpointBackend` of a strategy without servers. Paths are those of this process; nothing is left for later.

    Args:
        strategy: the strategy that owns the variables.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._backend = cast(LocalBackend, strategy.backend)

    def check_path(self, path: str) -> None:
        """Implements `CheckpointBackend.check_path`; what is above the last part is this process's own."""
        saved_path(path, own=True)

    def take_part(self) -> bool:
        """As `CheckpointBackend.take_part`: it is this process that saves."""
        return True

    def check_free(self, options: CheckpointOptions) -> None:
        """As `CheckpointBackend.check_free`: no save is ever under way."""

    def sync(self) -> None:
        """As `CheckpointBackend.sync`: whatever was saved is complete."""

    def failed(self, path: str) -> bool:
        """As `CheckpointBackend.failed`: `save` raises it."""
        return False

    def saves_by(self, save: Callable[[], object]) -> None:
        """Implements `CheckpointBackend.saves_by`: without servers nobody leaves before its script ends."""

    def save(self, path: str, content: Content) -> None:
        """Implements `CheckpointBackend.save`; the checkpoint is complete when this returns.

        Raises:
            CheckpointError: the checkpoint cannot be written.
        """
        above, name = parted(path)
        names = content.names()
        values = {names[at]: v.numpy() for at, v in content.variables.items()}
        order = SnapshotOrder(name, (0,), state=content.order())
        try:
            self._write(storage_at(above), Frozen(order, 0, 0, self._backend.group.positions, values))
        except CheckpointError as error:
            raise CheckpointError(f"checkpoint {path!r} was not saved: {error}") from error

    def _write(self, root: Storage, frozen: Frozen) -> None:
        later = self._backend.first_value
        try:
            shard = write_shard(root, frozen, lambda value: (value,), lambda name: None)
            text = manifest_of([shard], frozen.order).text()
            write_manifest(root, frozen, text, spare=later.needed if isinstance(later, DeferredValues) else ())
        except CheckpointError:
            with suppress(CheckpointError):  # the first error is the one to raise
                remove_shard(root, frozen)
            raise

    def look(self, path: str) -> OpenedCheckpoint:
        """Implements `CheckpointBackend.look`."""
        return _opened(path, *open_whole(path))

    def restore(self, path: str, choose: Choose, cast: bool) -> OpenedCheckpoint:
        """Implements `CheckpointBackend.restore`: nothing changes where anything is wrong.

        Raises:
            DamagedCheckpoint: the checkpoint is not as it was saved; of a directory, none that may be meant is.
            CheckpointError: the checkpoint cannot be read.
            VariableMismatch: a value has another shape or dtype than its variable.
        """
        damaged: dict[str, str] = {}
        while True:
            found, damaged = open_whole(path, damaged)
            chosen = choose(found.manifest)
            try:
                values = read_arrays(found, [(name, variable.spec) for name, variable in chosen.items()], cast)
                if found.path != ".":
                    found.check_rest(chosen)
            except DamagedCheckpoint as error:
                if found.path == ".":
                    raise
                damaged[found.name] = error.message
            else:
                break
        for variable, value in zip(chosen.values(), values, strict=True):
            if isinstance(variable, SyncOnReadVariable):
                variable.share_out(value)
            else:
                variable.assign(value)
        self._backend.group.restore(found.manifest.positions)
        self._backend.first_value = DeferredValues(found, set(found.manifest.variables) - set(chosen), cast)
        set_aside(found.place, found.path, damaged)
        return _opened(path, found, damaged)

    def was_restored(self, variable: Variable) -> bool:
        """Implements `CheckpointBackend.was_restored`."""
        return self._backend.was_restored(variable)

    def restored_names(self) -> frozenset[str]:
        """Implements `CheckpointBackend.restored_names`."""
        return self._backend.restored_names()


class DeferredValues:
    """Values of a restored checkpoint for variables that are created later; each value is given once.

    Args:
        found: the checkpoint that was restored.
        left: the names of the tensors that no variable has got.
        cast: True if a variable may have another dtype than its value.
    """

    def __init__(self, found: SavedCheckpoint, left: set[str], cast: bool) -> None:
        self._found = found
        self._left = left
        self._cast = cast

    @property
    def needed(self) -> tuple[str, ...]:
        """The full paths of the checkpoint, and of what it is based on, as long as there is anything left in it."""
        return tuple(saved.full for saved in (self._found, *self._found.bases)) if self._left else ()

    def __call__(self, spec: VariableSpec) -> Array | None:
        """The first value of a new variable; None where there is none for it."""
        if spec.saved_as is not None or spec.name not in self._left:
            return None
        (value,) = read_arrays(self._found, [(spec.name, spec.tensor)], self._cast)
        self._left.discard(spec.name)
        return value


def _opened(path: str, found: SavedCheckpoint, damaged: Mapping[str, str]) -> OpenedCheckpoint:
    """Returns the path to tell: what was asked for, or something in it, relative where that was."""
    return OpenedCheckpoint(path if found.path == "." else f"{path.rstrip('/')}/{found.path}", found.manifest, damaged)
