"""What a chief counts for its metrics."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from pswire.cluster import Task
from pswire.telemetry.metrics import Histogram


@dataclass(frozen=True)
class Driven:
    """What a chief knows of its job: what the log says, that of earlier chiefs included.

    Attributes:
        epochs: how many were closed.
        members: of the newest one.
        plans: how many were approved.
        missing: tasks of the cluster without a session, in order.
        checkpoints: how many there were, by how they ended: "saved" or "failed".
        saving: seconds from a checkpoint's order until it was complete, or had failed; this chief's alone.
    """

    epochs: int
    members: int
    plans: int
    missing: tuple[Task, ...]
    checkpoints: Counter[str]
    saving: Histogram
