"""How checkpoints are written and read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

IfBusy = Literal["wait", "refuse"]
"""What a save does while the one before is being written."""


@dataclass(frozen=True)
class CheckpointOptions:
    """How a checkpoint is written or read; the same in all processes.

    Source: `tf.train.CheckpointOptions`.

    Attributes:
        enable_async: whether `save` and `write` return when the values are frozen, while servers go on writing. What
            goes wrong then is raised by the next save, or by `Checkpoint.sync`.
        if_busy: while the checkpoint before is being written, "wait" for it, or "refuse", with a `CheckpointError`.
        cast: whether restored values are cast to the dtypes of the variables; else another dtype is refused.

    Raises:
        ValueError: `if_busy` is neither.
    """

    enable_async: bool = True
    if_busy: IfBusy = "wait"
    cast: bool = False

    def __post_init__(self) -> None:
        if self.if_busy not in get_args(IfBusy):
            raise ValueError(f"if_busy {self.if_busy!r} is unknown; write 'wait' or 'refuse'")


DEFAULT = CheckpointOptions()
"""What holds where no options are given."""
