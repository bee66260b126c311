"""Saving and restoring what the servers hold, as of one round."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pswire.errors import CheckpointError

if TYPE_CHECKING:
    from psclient.parameter_server import ParameterServerStrategy


class Checkpoint:
    """All variables of a job, and where its datasets stand.

    Every process that runs the script makes the same calls; the servers write and read, below the
    checkpoint root that their operator set, and the chief commits.

    Args:
        strategy: whose variables.

    Raises:
        TypeError: the strategy has no servers.
    """

    def __init__(self, strategy: ParameterServerStrategy) -> None:
        if not hasattr(type(strategy), "saves"):
            raise TypeError(
                f"servers write checkpoints, and a {type(strategy).__name__} has none; use a ParameterServerStrategy, "
                "which starts one of its own where there is no cluster"
            )
        self._strategy = strategy
        self._saves = strategy.saves

    def save(self, directory: str) -> str:
        """Writes a checkpoint of this round, and waits until it is complete. In cross-replica context.

        In asynchronous mode, where processes make no rounds together, only the one in which
        `strategy.extended.should_checkpoint` is True does so: each server's part is its state right after this
        process's update, and of ON_READ variables there are this process's copies alone.

        Args:
            directory: a path below the servers' checkpoint root, with `/` between its parts; the checkpoint
                becomes `<directory>/ckpt-<number>`. Numbers count from 1, and go on after a restore.

        Returns:
            The path that `restore` takes; of a process that does not save the directory, whose newest checkpoint
            is meant.

        Raises:
            CheckpointError: a server could not write its part, or the chief could not commit it.
        """
        strategy = self._strategy
        if not strategy.saves_here:
            return directory
        path = f"{directory.rstrip('/')}/ckpt-{int(self._saves) + 1}"
        done = strategy.save_section(path, self._saves)
        if done.error:
            raise CheckpointError(f"checkpoint {path!r} was not saved: {done.error}")
        return path

    def restore(self, path: str) -> bool:
        """Reads a checkpoint into the variables; those created later get their value then.

        A process that joins a running job changes nothing: the variables on the servers are newer.

        Args:
            path: what `save` returned, or a directory whose newest checkpoint is meant.

        Returns:
            Whether the checkpoint was read.

        Raises:
            NoCheckpoint: there is none; nothing has changed.
            CheckpointError: it is broken.
            VariableMismatch: it has a variable with another shape or dtype.
        """
        return self._strategy.restore_variables(path)
