"""Options for writing and reading checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

IfBusy = Literal["wait", "refuse"]
"""The action of a save while the one before is being written."""


@dataclass(frozen=True)
class CheckpointOptions:
    """Options for writing or reading a checkpoint; the same in all processes.

    Source: `tf.train.CheckpointOptions`.

    Attributes:
        enable_async: True if `save` and `write` return when the values are frozen, while servers are still writing. An
            error is then raised by the next save, or by `Checkpoint.sync`.
        if_busy: while the checkpoint before is being written, "wait" for it, or "refuse" with a `CheckpointError`.
        cast: True to cast restored values to the dtypes of the variables; else another dtype is an error.

    Raises:
        ValueError: `if_busy` is another word.
    """

    enable_async: bool = True
    if_busy: IfBusy = "wait"
    cast: bool = False

    def __post_init__(self) -> None:
        if self.if_busy not in get_args(IfBusy):
            raise ValueError(f"if_busy {self.if_busy!r} is unknown; use 'wait' or 'refuse'")


DEFAULT = CheckpointOptions()
"""The options where none are given."""
