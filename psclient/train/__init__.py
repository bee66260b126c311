"""Checkpoints, with the names of `tf.train`."""

from psclient.train.checkpoint import Checkpoint
from psclient.train.iterator import checkpoints_iterator
from psclient.train.manager import CheckpointManager, latest_checkpoint
from psclient.train.options import CheckpointOptions
from psclient.train.status import LoadStatus

__all__ = [
    "Checkpoint",
    "CheckpointManager",
    "CheckpointOptions",
    "LoadStatus",
    "checkpoints_iterator",
    "latest_checkpoint",
]
