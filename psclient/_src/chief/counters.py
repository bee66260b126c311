"""Readings of a chief for its metrics."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from pswire.cluster import Task
from pswire.telemetry.metrics import Histogram


@dataclass(frozen=True)
class Driven:
    """A chief's view of its job, from the log: that of earlier chiefs is included.

    Attributes:
        generations: number of closed generations.
        members: number of members of the newest generation.
        plans: number of approved plans.
        missing: tasks of the cluster without a session, in order.
        checkpoints: number of checkpoints by outcome: "saved" or "failed".
        saving: seconds from a checkpoint's order until it was complete, or had failed; this chief's alone.
    """

    generations: int
    members: int
    plans: int
    missing: tuple[Task, ...]
    checkpoints: Counter[str]
    saving: Histogram
