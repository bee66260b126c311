"""Ray: the server is an actor, and so are two workers.

Large arrays travel through Ray's object store, which is shared memory: an argument is written once and read where it
lies. Large values are put there once, and both workers get the reference; small ones come with the answer, which took
half the time for 4 KB.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from typing import Any

import numpy as np
import ray
from rounds import RATE, WORKERS, Array, Work, from_arguments, tell

SMALL = 1_000_000
"""Bytes of a model whose values come with the answer."""

STORE = 3 << 30
"""Bytes of the object store."""


class Server:
    """The variables, and the gradients that wait for another worker's. One thread, an event loop."""

    def __init__(self, work: Work) -> None:
        self._variables, self._sums = work.zeros(), work.zeros()
        self._small = 4 * sum(work.lengths) < SMALL
        self._pushed: list[list[Array]] = []
        self._answer: asyncio.Future[Any] = asyncio.Future()

    async def exchange(self, gradients: list[Array]) -> Any:
        """Takes a worker's gradients; returns the new values, or a reference to them, when all have pushed."""
        answer = self._answer
        self._pushed.append(gradients)
        if len(self._pushed) == WORKERS:
            self._update()
            self._answer = asyncio.Future()
            answer.set_result(self._variables if self._small else ray.put(self._variables))
        return await answer

    def _update(self) -> None:
        for variable, total, first, second in zip(self._variables, self._sums, *self._pushed, strict=True):
            np.add(first, second, out=total)
            total *= RATE
            variable -= total
        self._pushed.clear()


class Worker:
    """Trains in a process of its own."""

    def train(self, worker: int, server: Any, work: Work) -> list[float]:
        """Makes all rounds of a model; returns their seconds."""
        gradients = work.gradients(worker)

        def make_round() -> Any:
            answer = ray.get(server.exchange.remote(gradients))
            return ray.get(answer) if isinstance(answer, ray.ObjectRef) else answer

        return work.measure(make_round)


def train(work: Work) -> list[float]:
    """Starts the actors, and ends them after the rounds of a model; returns worker 0's seconds."""
    server = ray.remote(num_cpus=0)(Server).remote(work)
    workers = [ray.remote(num_cpus=0)(Worker).remote() for _ in range(WORKERS)]
    try:
        seconds: list[float] = ray.get([each.train.remote(index, server, work) for index, each in enumerate(workers)])[
            0
        ]
        return seconds
    finally:
        for actor in (server, *workers):
            ray.kill(actor)


def main() -> None:
    """Starts a cluster of one node."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "error"}
        ray.init(num_cpus=1, object_store_memory=STORE, _temp_dir=directory, **quiet)
        try:
            for work in from_arguments():
                tell(work, train(work))
        finally:
            ray.shutdown()


if __name__ == "__main__":
    main()
