"""The steps on rows of a table that every peer makes: which rows, what must come out, and how their time is taken.

Needs NumPy alone, since it runs in the peers' Python. The work is the first argument of a peer's program, as JSON, as
`benchmarks/rows.py` says it: `rows`, `width`, `ids`, `steps`, `warm`, `rate`, `batches`, `workers`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

Work = dict[str, Any]
Ids = np.ndarray[Any, np.dtype[np.int64]]

INITIAL, EPSILON = 0.1, 1e-7
"""Adagrad's first sums, and what keeps it away from zero."""


def drawn(work: Work, worker: int) -> list[Ids]:
    """Returns the ids of a worker's batches, each once in one, in increasing order."""
    rng = np.random.default_rng(worker)
    return [np.unique(rng.integers(0, work["rows"], work["ids"])) for _ in range(work["batches"])]


def measure(work: Work, worker: int, make_step: Callable[[Ids, Ids], object]) -> list[float]:
    """Makes all steps of a worker; returns the seconds of those that count.

    Args:
        work: the work.
        worker: the worker.
        make_step: makes one, given its ids and those of the next one.
    """
    batches, seconds = drawn(work, worker), []
    for step in range(work["warm"] + work["steps"]):
        ids, ahead = batches[step % len(batches)], batches[(step + 1) % len(batches)]
        start = time.perf_counter()
        make_step(ids, ahead)
        seconds.append(time.perf_counter() - start)
    return seconds[work["warm"] :]


def check(work: Work, found: float) -> None:
    """Raises `ValueError` unless a table sums to what gradient descent makes of gradients of 1."""
    steps, places = work["warm"] + work["steps"], 0
    for worker in range(work["workers"]):
        sizes = list(map(len, drawn(work, worker)))
        places += sum(sizes[step % len(sizes)] for step in range(steps))
    right = -work["rate"] * places * work["width"]
    if abs(found - right) > 1e-3 * abs(right):
        raise ValueError(f"the table sums to {found}, and should to {right}")
