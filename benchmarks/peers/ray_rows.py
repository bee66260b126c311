"""Ray, rows of a table: what benchmarks/rows.py compares with; prints the seconds of worker 0's steps as JSON.

Its arguments: the work as JSON, the optimizer, and whether a call takes gradients alone (`push`) or gives the rows of
the next batch as well (`both`). The server is an actor, and so are the workers; rows travel through the object store.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from typing import Any

import numpy as np
import ray
from row_steps import EPSILON, INITIAL, Ids, Work, check, measure

STORE = 1 << 30
"""Bytes of the object store."""

Pushed = tuple[Ids, Any, Ids | None]
"""Ids, rows, and the ids of the next batch."""


class Server:
    """The table, and the gradients that wait for another worker's. One thread, an event loop."""

    def __init__(self, work: Work, optimizer: str) -> None:
        self._work = work
        self._table = np.zeros((work["rows"], work["width"]), np.float32)
        self._sums = np.full_like(self._table, INITIAL) if optimizer == "adagrad" else None
        self._pushed: list[Pushed] = []
        self._done: asyncio.Future[None] = asyncio.Future()

    async def exchange(self, ids: Ids, rows: Any, ahead: Ids | None) -> Any:
        """Takes a worker's gradients; returns the rows of its next batch, when all have pushed."""
        done = self._done
        self._pushed.append((ids, rows, ahead))
        if len(self._pushed) == self._work["workers"]:
            self._update()
            self._pushed, self._done = [], asyncio.Future()
            done.set_result(None)
        await done
        return None if ahead is None else self._table[ahead]

    def _update(self) -> None:
        rate = self._work["rate"]
        if self._sums is None:
            for ids, rows, _ in self._pushed:  # each id once in each
                self._table[ids] -= rate * rows
            return
        ids, rows = (np.concatenate([each[n] for each in self._pushed]) for n in (0, 1))
        order = np.argsort(ids, kind="stable")
        ids, starts = np.unique(ids[order], return_index=True)
        summed = np.add.reduceat(rows[order], starts)
        self._sums[ids] += summed * summed
        self._table[ids] -= rate * summed / (np.sqrt(self._sums[ids]) + EPSILON)

    async def total(self) -> float:
        """Returns the sum of the table."""
        return float(self._table.sum(dtype=np.float64))


class Worker:
    """Trains in a process of its own."""

    def train(self, worker: int, server: Any, work: Work, calls: str) -> list[float]:
        """Makes all steps; returns their seconds."""
        gradient = np.ones((work["ids"], work["width"]), np.float32)

        def make_step(ids: Ids, ahead: Ids) -> Any:
            wanted = ahead if calls == "both" else None
            return ray.get(server.exchange.remote(ids, gradient[: len(ids)], wanted))

        return measure(work, worker, make_step)


def main() -> None:
    """Starts a cluster of one node, and the actors."""
    work, (optimizer, calls) = json.loads(sys.argv[1]), sys.argv[2:]
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "error"}
        ray.init(num_cpus=1, object_store_memory=STORE, _temp_dir=directory, **quiet)
        try:
            server = ray.remote(num_cpus=0)(Server).remote(work, optimizer)
            workers = [ray.remote(num_cpus=0)(Worker).remote() for _ in range(work["workers"])]
            done = [each.train.remote(index, server, work, calls) for index, each in enumerate(workers)]
            seconds = ray.get(done)[0]
            if optimizer == "sgd":
                check(work, ray.get(server.total.remote()))
            print(json.dumps(seconds), flush=True)
        finally:
            ray.shutdown()


if __name__ == "__main__":
    main()
