"""torch RPC, rows of a table: what benchmarks/rows.py compares with; prints the seconds of worker 0's steps as JSON.

Its arguments: the work as JSON, the transport (`uv` is TCP, `shm` shared memory with `cma`), the optimizer, and whether
a call takes gradients alone (`push`) or gives the rows of the next batch as well (`both`). The server adds up the rows
of both workers as torch's own optimizers do with sparse gradients (`coalesce`), where the formula needs that.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rounds import run_together
from torch.distributed import rpc
from torch_rpc import begin

Pushed = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Ids, rows, and the ids of the next batch."""


class Server:
    """The table, and the calls that wait for another worker's. Called in several threads."""

    def __init__(self, work: dict[str, Any], optimizer: str) -> None:
        self._work, self._adagrad = work, optimizer == "adagrad"
        self.table = torch.zeros(work["rows"], work["width"])
        self._sums = torch.full_like(self.table, 0.1) if self._adagrad else None
        self._lock = threading.Lock()  # guards what waits
        self._waiting: list[tuple[Pushed, Any]] = []

    def take(self, pushed: Pushed) -> Any:
        """Keeps a worker's gradients; the last worker's make the update."""
        answer: Any = torch.futures.Future()
        with self._lock:
            self._waiting.append((pushed, answer))
            calls = self._waiting if len(self._waiting) == self._work["workers"] else []
            if calls:
                self._waiting = []
        if calls:
            self._update([each for each, _ in calls])
            for (_, _, ahead), each in calls:
                each.set_result(None if ahead is None else self.table[ahead])
        return answer

    def _update(self, pushed: list[Pushed]) -> None:
        rate = self._work["rate"]
        if self._sums is None:
            for ids, rows, _ in pushed:
                self.table.index_add_(0, ids, rows, alpha=-rate)
            return
        ids, rows = torch.cat([each[0] for each in pushed]), torch.cat([each[1] for each in pushed])
        summed = torch.sparse_coo_tensor(ids.unsqueeze(0), rows, self.table.shape).coalesce()
        ids, rows = summed.indices()[0], summed.values()
        self._sums.index_add_(0, ids, rows * rows)
        self.table.index_add_(0, ids, rows / (self._sums[ids].sqrt() + 1e-7), alpha=-rate)


_servers: list[Server] = []
"""In the server's process."""


@rpc.functions.async_execution
def exchange(pushed: Pushed) -> Any:
    """What workers call: the answer waits for all workers without holding a thread."""
    return _servers[0].take(pushed)


def total() -> float:
    """Returns the sum of the table."""
    return float(_servers[0].table.sum(dtype=torch.float64))


def serve(work: dict[str, Any], transport: str, optimizer: str, store: str) -> None:
    """The server's process."""
    _servers.append(Server(work, optimizer))
    begin("server", work["workers"], transport, store)
    rpc.shutdown()


def train(worker: int, work: dict[str, Any], transport: str, optimizer: str, calls: str, store: str) -> None:
    """A worker's process."""
    begin(f"worker{worker}", worker, transport, store)
    rng = np.random.default_rng(worker)
    drawn = [np.unique(rng.integers(0, work["rows"], work["ids"])) for _ in range(work["batches"])]
    batches = [torch.from_numpy(ids) for ids in drawn]
    gradient = torch.ones(work["ids"], work["width"])
    seconds = []
    for step in range(work["warm"] + work["steps"]):
        ids, ahead = batches[step % len(batches)], batches[(step + 1) % len(batches)]
        start = time.perf_counter()
        rpc.rpc_sync("server", exchange, ((ids, gradient[: len(ids)], ahead if calls == "both" else None),))
        seconds.append(time.perf_counter() - start)
    if worker == 0:
        if optimizer == "sgd":
            _check(work, rpc.rpc_sync("server", total))
        print(json.dumps(seconds[work["warm"] :]), flush=True)
    rpc.shutdown()


def _check(work: dict[str, Any], found: float) -> None:
    steps = work["warm"] + work["steps"]
    places = 0
    for worker in range(work["workers"]):
        rng = np.random.default_rng(worker)
        sizes = [len(np.unique(rng.integers(0, work["rows"], work["ids"]))) for _ in range(work["batches"])]
        places += sum(sizes[step % len(sizes)] for step in range(steps))
    right = -work["rate"] * places * work["width"]
    # The other worker's last step is in the same round.
    if abs(found - right) > 1e-3 * abs(right):
        raise ValueError(f"the table sums to {found}, and should to {right}")


def main() -> None:
    """Starts the server and the workers."""
    work, (transport, optimizer, calls) = json.loads(sys.argv[1]), sys.argv[2:]
    with tempfile.TemporaryDirectory() as directory:
        store = str(Path(directory) / "store")
        workers = [(train, (worker, work, transport, optimizer, calls, store)) for worker in range(work["workers"])]
        run_together(workers, [(serve, (work, transport, optimizer, store))])


if __name__ == "__main__":
    main()
