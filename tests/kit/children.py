"""What children of a worker run: they import nothing of ours, and start soon, however they are started."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

METHODS = ("fork", "spawn", "forkserver")
"""Ways of `multiprocessing` to start a process."""


def doubled(value: Any) -> tuple[int, Any]:
    """The process that computes it, and the double."""
    return os.getpid(), 2 * np.asarray(value)


def put_doubled(queue: Any, value: Any) -> None:
    """Puts what `doubled` returns into a queue."""
    queue.put(doubled(value))
