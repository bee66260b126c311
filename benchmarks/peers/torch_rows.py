"""torch RPC, rows of a table: what benchmarks/rows.py compares with; prints the seconds of worker 0's steps as JSON.

Its arguments: the work as JSON, the transport (`uv` is TCP, `shm` shared memory with `cma`), the optimizer, and whether
a call takes gradients alone (`push`) or gives the rows of the next batch as well (`both`). The server adds up the rows
of both workers as torch's own optimizers do with sparse gradients (`coalesce`), where the formula needs that.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from rounds import run_together
from row_steps import EPSILON, INITIAL, Ids, Work, check, measure
from torch.distributed import rpc
from torch_rpc import Calls, begin

Pushed = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Ids, rows, and the ids of the next batch."""


class Server:
    """The table.

    Attributes:
        calls: those with gradients, whose answers have the rows of the next batch.
    """

    def __init__(self, work: Work, optimizer: str) -> None:
        self._work, self._adagrad = work, optimizer == "adagrad"
        self.table = torch.zeros(work["rows"], work["width"])
        self._sums = torch.full_like(self.table, INITIAL) if self._adagrad else None
        self.calls = Calls(work["workers"], self._answers)

    def _answers(self, pushed: list[Pushed]) -> list[torch.Tensor | None]:
        self._update(pushed)
        return [None if ahead is None else self.table[ahead] for *_, ahead in pushed]

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
        self.table.index_add_(0, ids, rows / (self._sums[ids].sqrt() + EPSILON), alpha=-rate)


_servers: list[Server] = []
"""In the server's process."""


@rpc.functions.async_execution
def exchange(pushed: Pushed) -> Any:
    """What workers call: the answer waits for all workers without holding a thread."""
    return _servers[0].calls.take(pushed)


def total() -> float:
    """Returns the sum of the table."""
    return float(_servers[0].table.sum(dtype=torch.float64))


def serve(work: Work, transport: str, optimizer: str, store: str) -> None:
    """The server's process."""
    _servers.append(Server(work, optimizer))
    begin("server", work["workers"], transport, store)
    rpc.shutdown()


def train(worker: int, work: Work, transport: str, optimizer: str, calls: str, store: str) -> None:
    """A worker's process."""
    begin(f"worker{worker}", worker, transport, store)
    gradient = torch.ones(work["ids"], work["width"])

    def make_step(ids: Ids, ahead: Ids) -> None:
        wanted = torch.from_numpy(ahead) if calls == "both" else None
        rpc.rpc_sync("server", exchange, ((torch.from_numpy(ids), gradient[: len(ids)], wanted),))

    seconds = measure(work, worker, make_step)
    if worker == 0:
        if optimizer == "sgd":
            check(work, rpc.rpc_sync("server", total))  # the other worker's last step is in the same round
        print(json.dumps(seconds), flush=True)
    rpc.shutdown()


def main() -> None:
    """Starts the server and the workers."""
    work, (transport, optimizer, calls) = json.loads(sys.argv[1]), sys.argv[2:]
    with tempfile.TemporaryDirectory() as directory:
        store = str(Path(directory) / "store")
        workers = [(train, (worker, work, transport, optimizer, calls, store)) for worker in range(work["workers"])]
        run_together(workers, [(serve, (work, transport, optimizer, store))])


if __name__ == "__main__":
    main()
