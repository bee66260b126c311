"""How updates of different workers relate to each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pswire.model.log import Mode


@dataclass(frozen=True)
class Sync:
    """Synchronous rounds: every update includes each worker's contribution once and whole.

    Attributes:
        mode: "sync".
    """

    mode: ClassVar[Mode] = "sync"


@dataclass(frozen=True)
class Async:
    """Each worker makes updates of its own: a push is applied once, whole and at once, and nobody waits for others.

    `num_replicas_in_sync` is then this worker's number of replicas, and what a step reads may have been changed by
    others since. The examples of a dataset are shared by all workers all the same.

    Attributes:
        mode: "async".
    """

    mode: ClassVar[Mode] = "async"
