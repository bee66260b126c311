"""A parameter server by torch RPC that trains a recommender: what benchmarks/recommenders.py compares with.

The server holds the rows of all tables in one tensor, and the network's parameters in another. A step is one call of
each worker: it has each of its rows once, with the sum of the gradients, the network's gradients, and the rows of the
next batch. The call is answered with these rows and the new parameters once all workers have called and the server has
applied Adagrad. `--plain` trains in this process, without RPC, with `nn.Embedding` of sparse gradients and torch's own
optimizer.

Its arguments: the work as JSON, the transport (`uv` is TCP, `shm` shared memory with `cma`) or `plain`. Needs torch and
NumPy alone, since it runs in the peer's Python. Prints lines of JSON.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from recommender_steps import BOUND, EPSILON, Work, loss_of, tell_pid
from rounds import WORKERS, run_together
from torch import nn
from torch.distributed import rpc
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch_rpc import Calls, begin

Pushed = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Ids, the gradients of their rows, those of the network, and the ids of the next batch."""


class Server:
    """Rows, and the network's parameters.

    Attributes:
        table: the rows of all tables.
        dense: the parameters as one vector.
        calls: those with gradients, whose answers have the rows of the next batch and the parameters.
    """

    def __init__(self, work: Work) -> None:
        self._rate = work.rate
        self.table = torch.empty(sum(work.sizes), work.dim).uniform_(-BOUND, BOUND)
        self.dense = parameters_to_vector(work.network().parameters()).detach()
        self._row_sums, self._sums = torch.zeros_like(self.table), torch.zeros_like(self.dense)
        self.calls = Calls(WORKERS, self._answers)

    def _answers(self, pushed: list[Pushed]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        self._update(pushed)
        return [(self.table[ahead], self.dense) for *_, ahead in pushed]

    def _update(self, pushed: list[Pushed]) -> None:
        ids, rows = torch.cat([each[0] for each in pushed]), torch.cat([each[1] for each in pushed])
        summed = torch.sparse_coo_tensor(ids.unsqueeze(0), rows, self.table.shape).coalesce()
        ids, rows = summed.indices()[0], summed.values()
        sums = self._row_sums[ids].addcmul_(rows, rows)
        self._row_sums[ids] = sums
        self.table.index_add_(0, ids, rows / sums.sqrt_().add_(EPSILON), alpha=-self._rate)
        dense = sum((each[2] for each in pushed[1:]), pushed[0][2])
        self._sums.addcmul_(dense, dense)
        self.dense = self.dense - self._rate * dense / (self._sums.sqrt() + EPSILON)  # the last one may still be sent


_servers: list[Server] = []
"""In the server's process."""


@rpc.functions.async_execution
def exchange(pushed: Pushed) -> Any:
    """Workers call it: the answer waits for all workers without holding a thread."""
    return _servers[0].calls.take(pushed)


def look_up(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns rows, and the network's parameters."""
    return _servers[0].table[ids], _servers[0].dense


def serve(work: Work, transport: str, store: str) -> None:
    """The server's process."""
    tell_pid("server 0")
    _servers.append(Server(work))
    begin("server", WORKERS, transport, store)
    rpc.shutdown()


def train(worker: int, work: Work, transport: str, store: str) -> None:
    """A worker's process."""
    tell_pid(f"worker {worker}")
    begin(f"worker{worker}", worker, transport, store)
    net, clicks = work.network(), work.load("train")
    share, last = work.batch // WORKERS, work.warm + work.steps - 1
    starts = torch.from_numpy(np.cumsum([0, *work.sizes[:-1]]))

    def own(number: int) -> slice:
        start = number * work.batch + worker * share
        return slice(start, start + share)

    def unique(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.unique(torch.from_numpy(clicks.ids[own(number)]) + starts, return_inverse=True)

    ids, places = unique(0)
    rows, dense = rpc.rpc_sync("server", look_up, (ids,))

    def step(number: int) -> None:
        nonlocal ids, places, rows, dense
        vector_to_parameters(dense, net.parameters())
        rows.requires_grad_()
        net.zero_grad()
        given = clicks.numbers[own(number)], clicks.clicked[own(number)]
        numbers, clicked = map(torch.from_numpy, given)
        loss = loss_of(net(nn.functional.embedding(places, rows), numbers), clicked) / WORKERS
        loss.backward()
        gradient = parameters_to_vector([p.grad for p in net.parameters() if p.grad is not None])
        following, places = unique(min(number + 1, last))
        rows, dense = rpc.rpc_sync("server", exchange, ((ids, rows.grad, gradient, following),))
        ids = following

    def guess(ids: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        wanted, places = torch.unique(ids + starts, return_inverse=True)
        rows, dense = rpc.rpc_sync("server", look_up, (wanted,))
        vector_to_parameters(dense, net.parameters())
        guesses: torch.Tensor = net(nn.functional.embedding(places, rows), numbers)
        return guesses

    work.make_steps(step, worker == 0)
    if worker == 0:
        work.tell_auc(guess)
    rpc.shutdown()


def train_plain(work: Work) -> None:
    """Trains in this process alone."""
    tell_pid("worker 0")
    net, rows, clicks = work.network(), work.tables(), work.load("train")
    optimizer = torch.optim.Adagrad([*net.parameters(), *rows.parameters()], work.rate, eps=EPSILON)

    def step(number: int) -> None:
        own = slice(number * work.batch, (number + 1) * work.batch)
        ids, numbers, clicked = (torch.from_numpy(array[own]) for array in clicks[:3])
        optimizer.zero_grad()
        loss_of(net(rows(ids), numbers), clicked).backward()
        optimizer.step()

    work.make_steps(step, True)
    work.tell_auc(lambda ids, numbers: net(rows(ids), numbers))


def main() -> None:
    """Starts the server and the workers, or trains alone."""
    work, how = Work.read(sys.argv[1]), sys.argv[2]
    if how == "plain":
        train_plain(work)
        return
    with tempfile.TemporaryDirectory() as directory:
        store = str(Path(directory) / "store")
        workers = [(train, (worker, work, how, store)) for worker in range(WORKERS)]
        run_together(workers, [(serve, (work, how, store))])


if __name__ == "__main__":
    main()
