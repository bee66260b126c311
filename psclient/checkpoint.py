"""Saving and restoring what the servers hold, as of one round."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pswire.errors import CheckpointError

if TYPE_CHECKING:
    from psclient.strategy import ParameterServerStrategy


class Checkpoint:
    """All variables of a job, and where its datasets stand.

    Every process that runs the script makes the same calls; the servers write and read, below the
    checkpoint root that their operator set, and the chief commits.

    Args:
        strategy: whose variables.
    """

    def __init__(self, strategy: ParameterServerStrategy) -> None:
        self._strategy = strategy
        self._saves = strategy.saves

    def save(self, directory: str) -> str:
        """Writes a checkpoint of this round, and waits until it is complete. In cross-replica context.

        Args:
            directory: a path below the servers' checkpoint root, with `/` between its parts; the checkpoint
                becomes `<directory>/ckpt-<number>`. Numbers count from 1, and go on after a restore.

        Returns:
            The path that `restore` takes.

        Raises:
            CheckpointError: a server could not write its part, or the chief could not commit it.
        """
        strategy = self._strategy
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
