"""Checkpoints as one process sees them: what it has ordered and waits for, and what it restores."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

from psclient._src.distribute.residuals import Residuals
from psclient._src.rounds.restore import Restoring
from psclient._src.rounds.rounds import Exchange
from psclient._src.variables.kinds import ServerVariable, SyncOnReadVariable
from psclient._src.variables.sharded import shards_of
from psclient._src.variables.variable import Variable
from pswire.errors import CheckpointError
from pswire.model.saved import RestoreOrder, RestoreReply


class ServerCheckpoints:
    """The checkpoints that this process saves and restores. Used by the thread that runs cross-replica code.

    Args:
        exchange: makes the rounds.
        order: ends the open section with a checkpoint at a path, with a state; returns the id of its plan.
        residuals: those of compressed contributions.

    Attributes:
        saver: saves a checkpoint as the script does; None where the script has not said how.
    """

    def __init__(self, exchange: Exchange, order: Callable[[str, str], bytes], residuals: Residuals) -> None:
        self._exchange = exchange
        self._group = exchange.group
        self._order = order
        self._residuals = residuals
        self._restoring = Restoring(exchange)
        self._saving: tuple[bytes, str] | None = None
        self._failed: set[str] = set()
        self.saver: Callable[[], object] | None = None

    def save(self, path: str, state: str) -> None:
        """Ends the open section with a checkpoint; servers are writing it when this returns.

        Args:
            path: the checkpoint's path, below the servers' checkpoint root.
            state: see `SnapshotOrder`.
        """
        self._group.stand()
        self._saving = (self._order(path, state), path)
        self._failed.discard(path)

    @property
    def saving(self) -> str:
        """The last checkpoint of which `saved` has not been told; "" if there is none."""
        return self._saving[1] if self._saving else ""

    def is_saving(self) -> bool:
        """Returns whether a checkpoint is still being written."""
        return self._saving is not None and not self._group.news.is_snapshotted(self._saving[0])

    def saved(self) -> None:
        """Waits until the last checkpoint is complete.

        Raises:
            CheckpointError: the checkpoint failed; raised once.
            RoundTimeout: it takes too long; another call waits again.
        """
        if self._saving is None:
            return
        order, path = self._saving
        session = self._exchange.session
        done = self._group.news.snapshotted(order, session.deadline(session.timeouts.round_timeout))
        self._saving = None
        if done.error:
            self._failed.add(path)
            raise CheckpointError(f"checkpoint {path!r} was not saved: {done.error}")

    def failed(self, path: str) -> bool:
        """Returns whether the last checkpoint that this process saved at a path has failed, as `saved` has told."""
        return path in self._failed

    def look(self, path: str) -> RestoreReply:
        """Returns what a checkpoint has, or the newest of a directory of them; nothing changes."""
        return self._restoring.look(path)

    def restore(self, path: str, choose: Callable[[RestoreReply], Mapping[str, Variable]], cast: bool) -> RestoreReply:
        """Makes the servers restore a checkpoint into the chosen variables: a section of its own.

        Args:
            path: a checkpoint, or a directory of them.
            choose: called with the checkpoint's contents; returns for each of its tensors the variable that gets it.
            cast: True to cast values of another dtype.
        """
        self._exchange.creation.send()
        chosen: dict[str, Variable] = {}

        def orders_for(reply: RestoreReply) -> list[RestoreOrder]:
            chosen.clear()
            chosen.update(choose(reply))
            return [
                RestoreOrder(names={name: _stored(v, server).handle.id for name, v in chosen.items()}, cast=cast)
                for server in range(len(self._exchange.session.servers))
            ]

        reply = self._restoring.restore(path, orders_for)
        for variable in chosen.values():
            if isinstance(variable, SyncOnReadVariable):
                variable.share_out(variable.saved.numpy())
                variable.handed_in()
        self._residuals.restored(list(chosen.values()))
        self._exchange.reads.refresh()
        return reply

    def was_restored(self, variable: Variable) -> bool:
        """Returns whether a variable's first value was a restored checkpoint's."""
        return self._exchange.creation.was_restored(_stored(variable).handle.id)

    def restored_names(self) -> frozenset[str]:
        """Returns the names of the variables that got their first value from a restored checkpoint."""
        return self._exchange.creation.restored_names()


def _stored(variable: Variable, server: int = 0) -> ServerVariable:
    """Returns what the servers have of a variable; of a partitioned one a shard, which stands for all.

    It is one that a server holds, if there is such: of those of others it may not have been told yet.
    """
    whole = variable.saved if isinstance(variable, SyncOnReadVariable) else variable
    shards = [cast(ServerVariable, shard) for shard in shards_of(whole)]
    return next((shard for shard in shards if server in shard.handle.servers), shards[0])
