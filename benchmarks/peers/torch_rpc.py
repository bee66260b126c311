"""torch RPC: a server process that two workers call; the second argument is its transport.

`uv` is TCP, `shm` shared memory with `cma`, by which a process reads another's memory. Several connections for a tensor
(`mpt_uv`) were slower here. Tensors travel beside the pickled call. A model goes in one call, and again in calls of up
to 25 MB, the bucket of `DistributedDataParallel`, of which the server updates one while the next arrives: the faster
series counts.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rounds import RATE, WORKERS, Work, from_arguments, run_together, tell
from torch.distributed import rpc

BUCKETS = (25_000_000, 1 << 40)
"""Bytes of gradients in a call, at most: what is tried."""

CHANNELS = {"uv": ["basic"], "shm": ["cma", "basic"]}

Gradients = list[torch.Tensor]


class Calls:
    """The calls of one kind, each of which waits for those of all workers. Made in several threads.

    Args:
        workers: how many workers make a call.
        answer: returns the answer to each call by what these gave, in the order in which they came.
    """

    def __init__(self, workers: int, answer: Callable[[list[Any]], Sequence[Any]]) -> None:
        self._workers, self._answer = workers, answer
        self._lock = threading.Lock()  # guards what waits
        self._waiting: list[tuple[Any, Any]] = []

    def take(self, given: Any) -> Any:
        """Keeps what a worker gives, and returns the future of its answer; the last worker's call makes all answers."""
        future: Any = torch.futures.Future()
        with self._lock:
            self._waiting.append((given, future))
            calls = self._waiting if len(self._waiting) == self._workers else []
            if calls:
                self._waiting = []
        if calls:
            answers = self._answer([each for each, _ in calls])
            for (_, each), answer in zip(calls, answers, strict=True):
                each.set_result(answer)
        return future


class Server:
    """The variables of one model, of which each part is updated by itself.

    Attributes:
        calls: those with gradients of a part, by the number of its first variable.
    """

    def __init__(self, work: Work, parts: Sequence[slice]) -> None:
        self._variables = [torch.from_numpy(value) for value in work.zeros()]
        self.calls = {part.start: Calls(WORKERS, partial(self._update, part.start)) for part in parts}

    def _update(self, first: int, pushed: list[Gradients]) -> list[list[torch.Tensor]]:
        total, *others = pushed
        for gradients in others:
            torch._foreach_add_(total, gradients)
        variables = self._variables[first : first + len(total)]
        torch._foreach_add_(variables, total, alpha=-RATE)
        return [variables] * len(pushed)


Key = tuple[str, int]
"""The model's name, and how many calls it goes in."""

_servers: dict[Key, Server] = {}
"""In the server's process."""


@rpc.functions.async_execution
def exchange(key: Key, first: int, gradients: Gradients) -> Any:
    """What workers call on the server: the answer waits for all workers without holding a thread."""
    return _servers[key].calls[first].take(gradients)


def divisions(work: Work) -> list[list[slice]]:
    """Ways to divide the variables into calls."""
    found = {len(parts): parts for parts in (divide(work, nbytes) for nbytes in BUCKETS)}
    return list(found.values())


def divide(work: Work, nbytes: int) -> list[slice]:
    """Which variables go into one call of at most so many bytes; a larger one goes alone."""
    parts, first, size = [], 0, 0
    for index, length in enumerate(work.lengths):
        if size and size + 4 * length > nbytes:
            parts.append(slice(first, index))
            first, size = index, 0
        size += 4 * length
    return [*parts, slice(first, len(work.lengths))]


def make_round(key: Key, parts: list[slice], gradients: Gradients) -> list[torch.Tensor]:
    """All calls at once, then their answers in order."""
    calls = [rpc.rpc_async("server", exchange, (key, part.start, gradients[part])) for part in parts]
    return [value for call in calls for value in call.wait()]


def begin(name: str, rank: int, transport: str, store: str) -> None:
    """Connects this process to the others; all are there when it returns."""
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{store}", _transports=[transport], _channels=CHANNELS[transport]
    )
    rpc.init_rpc(name, rank=rank, world_size=WORKERS + 1, rpc_backend_options=options)


def serve(transport: str, store: str, works: list[Work]) -> None:
    """The server's process."""
    _servers.update(((work.size, len(parts)), Server(work, parts)) for work in works for parts in divisions(work))
    begin("server", WORKERS, transport, store)
    rpc.shutdown()


def train(worker: int, transport: str, store: str, works: list[Work]) -> None:
    """A worker's process."""
    begin(f"worker{worker}", worker, transport, store)
    for work in works:
        gradients = [torch.from_numpy(value) for value in work.gradients(worker)]
        series = [
            work.measure(partial(make_round, (work.size, len(parts)), parts, gradients)) for parts in divisions(work)
        ]
        if worker == 0:
            tell(work, min(series, key=median))
    rpc.shutdown()


def main() -> None:
    """Starts the server and the workers."""
    works, transport = from_arguments(), sys.argv[2]
    with tempfile.TemporaryDirectory() as directory:
        store = str(Path(directory) / "store")
        workers = [(train, (worker, transport, store, works)) for worker in range(WORKERS)]
        run_together(workers, [(serve, (transport, store, works))])


if __name__ == "__main__":
    main()
