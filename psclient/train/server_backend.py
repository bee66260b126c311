"""Checkpoints that parameter servers write and read."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import cast

import numpy as np

from psclient._src import values
from psclient._src.distribute.strategy import Strategy
from psclient._src.rounds.backend import RemoteBackend
from psclient._src.variables.variable import Variable
from psclient.train.backend import Choose, Content, OpenedCheckpoint
from psclient.train.options import CheckpointOptions
from pswire.checkpoint.manifest import Manifest
from pswire.checkpoint.writer import saved_path
from pswire.errors import CheckpointError
from pswire.limits import PART_BYTES
from pswire.model.saved import RestoreReply

log = logging.getLogger("psclient")


class ServerBackend:
    """A `CheckpointBackend` of a strategy with parameter servers.

    Args:
        strategy: the strategy that owns the variables.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._remote = cast(RemoteBackend, strategy.backend)
        self._checkpoints = self._remote.checkpoints

    def check_path(self, path: str) -> None:
        """As `CheckpointBackend.check_path`, by the servers' own rules."""
        saved_path(path)

    def take_part(self) -> bool:
        """As `CheckpointBackend.take_part`: synchronous processes all have one, of asynchronous ones the first."""
        self._remote.settle()
        # Only now does a process that came late know how many saves there were, and in which round it is.
        self._remote.group.enter("save")
        return not self._remote.group.alone or self._remote.group.leads

    def check_free(self, options: CheckpointOptions) -> None:
        """As `CheckpointBackend.check_free`; it is asked in a round, so that all processes go the same way."""
        if options.if_busy == "refuse" and self._busy():
            path = self._checkpoints.saving
            raise CheckpointError(f"checkpoint {path!r} is still being written; save less often, or use if_busy='wait'")

    def _busy(self) -> bool:
        """Returns whether a checkpoint is being written, as the process knows that asks for them."""
        busy = self._remote.group.saves() and self._checkpoints.is_saving()
        if self._remote.group.alone:
            return busy
        told = [np.float32(busy and not index) for index in range(len(self._remote.worker_devices))]
        with self._remote.group.holding_back():
            return bool(self._strategy.reduce("sum", values.per_replica(told), axis=None))

    def saves_by(self, save: Callable[[], object]) -> None:
        """Implements `CheckpointBackend.saves_by`."""
        self._checkpoints.saver = save

    def save(self, path: str, content: Content) -> None:
        """As `CheckpointBackend.save`: ends the open section with the order of a checkpoint."""
        order = content.order()
        if len(order) > PART_BYTES // 2:
            raise ValueError(
                f"the states and paths in checkpoint {path!r} have {len(order):,} bytes of JSON, but at "
                f"most {PART_BYTES // 2:,} can be sent; keep large data in variables"
            )
        self._checkpoints.save(path, order)

    def sync(self) -> None:
        """Implements `CheckpointBackend.sync`."""
        self._checkpoints.saved()

    def failed(self, path: str) -> bool:
        """Implements `CheckpointBackend.failed`."""
        return self._checkpoints.failed(path)

    def look(self, path: str) -> OpenedCheckpoint:
        """As `CheckpointBackend.look`, on server 0."""
        return _opened(self._checkpoints.look(path))

    def restore(self, path: str, choose: Choose, cast: bool) -> OpenedCheckpoint | None:
        """As `CheckpointBackend.restore`: a round of all, but for a process that comes back to a running job."""
        self._remote.settle()
        if self._remote.group.outside:
            log.info("this process rejoins a running job, so restore keeps the current values of variables")
            return None
        self.sync()
        if self._remote.group.late:
            # The others have waited for what they saved before this process came.
            self._remote.group.news.settle_saves()
        return _opened(self._checkpoints.restore(path, lambda reply: _with_residuals(reply, choose), cast))

    def was_restored(self, variable: Variable) -> bool:
        """Implements `CheckpointBackend.was_restored`."""
        return self._checkpoints.was_restored(variable)

    def restored_names(self) -> frozenset[str]:
        """Implements `CheckpointBackend.restored_names`."""
        return self._checkpoints.restored_names()


def _with_residuals(reply: RestoreReply, choose: Choose) -> dict[str, Variable]:
    """Returns what is chosen of a checkpoint, and what it has beside that of compression's residuals."""
    manifest = _opened(reply).manifest
    chosen = dict(choose(manifest))
    beside = {f"{name}/residual": v._residual for name, v in chosen.items() if v._residual is not None}
    return chosen | {name: v for name, v in beside.items() if name in manifest.variables}


def _opened(reply: RestoreReply) -> OpenedCheckpoint:
    return OpenedCheckpoint(reply.path, Manifest.parse(reply.manifest, f"the manifest of {reply.path}"), reply.damaged)
