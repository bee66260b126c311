"""Backends that keep the checkpoints of a strategy: its servers, or this process."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from psclient._src.variables.variable import Variable
from psclient.train.options import CheckpointOptions
from pswire.checkpoint.manifest import Manifest

Choose = Callable[[Manifest], Mapping[str, Variable]]
"""Told what a checkpoint has; says for each of its tensors which variable gets it."""


@dataclass(frozen=True)
class Content:
    """The content of a checkpoint that is to be saved.

    Attributes:
        variables: the variables by path; the names of their tensors are their own where these differ from each other.
        state: states of other objects by path, JSON.
        delete: names of checkpoints beside it that are to be deleted once it is complete.
        latest: True if it is the one to go on from, once it is complete.
        base: name of a checkpoint beside it, since which changes of dynamic tables suffice; "" for all.
    """

    variables: Mapping[str, Variable]
    state: Mapping[str, object] = field(default_factory=dict)
    delete: tuple[str, ...] = ()
    latest: bool = False
    base: str = ""

    def names(self) -> dict[str, str]:
        """Returns the name of the tensor of each path."""
        times = Counter(v.name for v in self.variables.values())
        return {path: v.name if times[v.name] == 1 else path for path, v in self.variables.items()}

    def order(self) -> str:
        """Returns what a `SnapshotOrder` says of it."""
        said: dict[str, object] = {"objects": self.names(), "state": dict(self.state)}
        said |= {"delete": list(self.delete), "latest": self.latest}
        said |= {"base": self.base} if self.base else {}
        return json.dumps(said, allow_nan=False)


@dataclass(frozen=True)
class OpenedCheckpoint:
    """A checkpoint that was found.

    Attributes:
        path: path of the checkpoint; where a directory was asked for, of its newest one.
        manifest: the checkpoint's table of contents.
        damaged: names of those beside it that were passed over, since they are damaged, with what is wrong.
    """

    path: str
    manifest: Manifest
    damaged: Mapping[str, str] = field(default_factory=dict)


class CheckpointBackend(Protocol):
    """Saves and restores. Used by the thread that runs cross-replica code."""

    def check_path(self, path: str) -> None:
        """Before a save: raises `CheckpointError` for a path at which none can be saved, before anything is done."""
        ...

    def take_part(self) -> bool:
        """Before a save: a process that came late is taken in here. Says whether this one has a part in saving."""
        ...

    def check_free(self, options: CheckpointOptions) -> None:
        """Before a save: raises `CheckpointError` if the one before is being written, and is not to be waited for."""
        ...

    def saves_by(self, save: Callable[[], object]) -> None:
        """Told how the script saves its checkpoints: so is one saved before processes leave that are told to end."""
        ...

    def save(self, path: str, content: Content) -> None:
        """Freezes the values, and has them written; `sync` waits for it. In cross-replica context."""
        ...

    def sync(self) -> None:
        """Waits until what was saved is complete; raises `CheckpointError` if it failed."""
        ...

    def failed(self, path: str) -> bool:
        """Returns whether what was saved last at this path is known to be incomplete, since `sync` has raised that."""
        ...

    def look(self, path: str) -> OpenedCheckpoint:
        """Finds a checkpoint, or the newest of a directory whose manifest is whole; raises `CheckpointError`."""
        ...

    def restore(self, path: str, choose: Choose, cast: bool) -> OpenedCheckpoint | None:
        """Reads one; of a directory the newest that is not damaged: those before it are set aside then.

        In cross-replica context.

        Returns:
            Which one; None where nothing has changed, since the variables are newer than any checkpoint.
        """
        ...

    def was_restored(self, variable: Variable) -> bool:
        """Returns whether a variable that was created after a restore began with a restored value."""
        ...

    def restored_names(self) -> frozenset[str]:
        """Returns the names of variables created after a restore that began with a restored value."""
        ...
