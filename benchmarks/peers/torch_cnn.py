"""The convolutional network of `frameworks.py` by torch RPC: servers with parts of the parameters, workers in step.

Each server holds some parameters and its optimizer; every worker sends each server its gradients in one call, which is
answered with the new values once all workers have called. Needs torch and NumPy alone, since it runs in the peer's
Python. Prints lines of JSON, as `torch_step.py` does.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rounds import run_together
from torch import nn
from torch.distributed import rpc
from torch_rpc import Calls

WORKERS = SERVERS = 2


def make_model() -> nn.Sequential:
    """The network of examples/digits_torch.py."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Unflatten(1, (1, 8, 8))]
    for inputs, outputs in ((1, 16), (16, 32)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 10))


def places() -> list[int]:
    """Returns the server of each parameter: the largest first, each where there is least."""
    sizes = [p.numel() for p in make_model().parameters()]
    held, found = [0] * SERVERS, [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
        found[number] = held.index(min(held))
        held[found[number]] += sizes[number]
    return found


class Server:
    """Some parameters, and their optimizer.

    Attributes:
        calls: those with gradients, whose answers have the new values.
    """

    def __init__(self, index: int, rate: float) -> None:
        every = zip(make_model().parameters(), places(), strict=True)
        self._parameters = [p for p, place in every if place == index]
        self._optimizer = torch.optim.AdamW(self._parameters, rate, weight_decay=0.01)
        self.calls = Calls(WORKERS, self._answers)

    def _answers(self, pushed: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
        for parameter, *given in zip(self._parameters, *pushed, strict=True):
            parameter.grad = sum(given[1:], given[0]) / WORKERS
        self._optimizer.step()
        return [[parameter.detach() for parameter in self._parameters]] * len(pushed)


_servers: list[Server] = []
"""In a server's process."""


@rpc.functions.async_execution
def exchange(gradients: list[torch.Tensor]) -> Any:
    """What workers call: the answer waits for all workers without holding a thread."""
    return _servers[0].calls.take(gradients)


def begin(name: str, rank: int, store: str) -> None:
    """Connects this process to the others."""
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{store}")
    rpc.init_rpc(name, rank=rank, world_size=WORKERS + SERVERS, rpc_backend_options=options)


def serve(index: int, rate: float, store: str) -> None:
    """A server's process."""
    _servers.append(Server(index, rate))
    begin(f"server{index}", WORKERS + index, store)
    rpc.shutdown()


def train(worker: int, rate: float, batch: int, warm: int, steps: int, data: str, store: str) -> None:
    """A worker's process; the first one tells of it."""
    begin(f"worker{worker}", worker, store)
    with np.load(data) as arrays:
        images, labels = torch.from_numpy(arrays["images"]), torch.from_numpy(arrays["labels"])
    model, where = make_model(), places()
    placed: list[list[torch.Tensor]] = [[] for _ in range(SERVERS)]
    for p, place in zip(model.parameters(), where, strict=True):
        placed[place].append(p)
    random, losses, began = np.random.default_rng(0), list[float](), 0.0
    while len(losses) < warm + steps:
        for rows in torch.from_numpy(random.permutation(len(labels))).split(batch):
            if len(rows) < batch:
                continue
            if len(losses) == warm:
                began = time.perf_counter()
            if len(losses) == warm + steps:
                break
            own = rows[worker::WORKERS]
            model.zero_grad()
            loss = nn.functional.cross_entropy(model(images[own]), labels[own])
            loss.backward()
            calls = [rpc.rpc_async(f"server{n}", exchange, ([p.grad for p in some],)) for n, some in enumerate(placed)]
            for some, call in zip(placed, calls, strict=True):
                with torch.no_grad():
                    torch._foreach_copy_(some, call.wait())
            losses.append(float(loss.item()))
    if worker == 0:
        seconds = time.perf_counter() - began
        print(json.dumps({"seconds": seconds, "loss": float(np.mean(losses[-20:]))}), flush=True)
    rpc.shutdown()


def main() -> None:
    """Starts the servers, and trains."""
    parser = argparse.ArgumentParser()
    parser.add_argument("data")
    parser.add_argument("--rate", type=float)
    for name in ("--batch", "--warm", "--steps"):
        parser.add_argument(name, type=int)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        store = str(Path(directory) / "store")
        own = (args.rate, args.batch, args.warm, args.steps, args.data, store)
        workers = [(train, (worker, *own)) for worker in range(WORKERS)]
        run_together(workers, [(serve, (index, args.rate, store)) for index in range(SERVERS)])


if __name__ == "__main__":
    main()
