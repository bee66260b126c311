"""Training steps by torch RPC, for `step.py` and `frameworks.py`: servers hold parameters, and workers keep in step.

As in PyTorch's tutorial on batch RPC processing, but that there may be several servers, each with some parameters and
their optimizer. Every worker sends each server its gradients in one call; all workers' calls are answered together with
the new values. Tensors travel beside the pickled call, by TCP or by the memory of the other process. Needs torch and
NumPy alone, since it runs in the peer's Python. Prints lines of JSON, which `measures.Watch` reads.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rounds import run_together
from torch import nn
from torch.distributed import rpc
from torch_rpc import Calls


def make_mlp(*sizes: int) -> nn.Sequential:
    """Returns a network of dense layers between these sizes."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def make_cnn() -> nn.Sequential:
    """Returns the network of examples/digits_torch.py."""
    layers: list[nn.Module] = [nn.Unflatten(1, (1, 8, 8))]
    for inputs, outputs in ((1, 16), (16, 32)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 10))


MODELS: dict[str, tuple[Callable[[], nn.Sequential], Any, dict[str, Any]]] = {
    "digits": (partial(make_mlp, 64, 128, 64, 10), torch.optim.Adam, {"eps": 1e-7}),
    "cnn": (make_cnn, torch.optim.AdamW, {"weight_decay": 0.01}),
    "wide": (partial(make_mlp, 64, 1024, 900, 10), torch.optim.SGD, {}),
}
"""Networks, optimizers, arguments of these: as in examples/digits.py, in digits_torch.py, and of a million numbers."""


@dataclass(frozen=True)
class Job:
    """A model, how it is trained, and how many processes train it.

    Attributes:
        model: a key of `MODELS`.
        rate: the optimizer's.
        batch: examples of a step, of all workers.
        warm, steps: steps that come before those that are measured, and these.
        workers, servers: how many there are.
        data: a file of arrays `images` and `labels`.
    """

    model: str
    rate: float
    batch: int
    warm: int
    steps: int
    workers: int
    servers: int
    data: str

    @classmethod
    def from_command_line(cls) -> Job:
        """Returns what the command line says, which is JSON."""
        return cls(**json.loads(sys.argv[1]))

    def make_model(self) -> nn.Sequential:
        """Returns the model, with the same first values in every process."""
        torch.manual_seed(0)
        return MODELS[self.model][0]()

    def make_optimizer(self, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """Returns the optimizer of some parameters."""
        _, make, options = MODELS[self.model]
        found: torch.optim.Optimizer = make(parameters, lr=self.rate, **options)
        return found

    def divide(self, parameters: list[torch.nn.Parameter]) -> list[list[torch.nn.Parameter]]:
        """Returns the parameters of each server: the largest goes first, each where there is least."""
        held: list[list[torch.nn.Parameter]] = [[] for _ in range(self.servers)]
        for parameter in sorted(parameters, key=torch.numel, reverse=True):
            min(held, key=lambda some: sum(map(torch.numel, some))).append(parameter)
        return held


def tell(**said: Any) -> None:
    """Prints a line of JSON for the launcher."""
    print(json.dumps(said), flush=True)


def train(job: Job, worker: int, model: nn.Module, step: Callable[[], Any]) -> None:
    """Makes all steps of a worker; the first one tells when the measured ones begin and end.

    Args:
        job: what is trained.
        worker: its number.
        model: gets its gradients by the mean loss of the worker's part of a batch.
        step: updates the model by the mean of all workers' gradients.
    """
    with np.load(job.data) as arrays:
        images, labels = torch.from_numpy(arrays["images"]), torch.from_numpy(arrays["labels"])
    random, losses, began = np.random.default_rng(0), list[float](), 0.0
    while len(losses) < job.warm + job.steps:
        order = torch.from_numpy(random.permutation(len(labels)))
        for rows in order[: len(order) // job.batch * job.batch].split(job.batch):
            if len(losses) == job.warm:
                if worker == 0:
                    tell(now="begin")
                began = time.perf_counter()
            if len(losses) == job.warm + job.steps:
                break
            own = rows[worker :: job.workers]
            model.zero_grad()
            loss = nn.functional.cross_entropy(model(images[own]), labels[own])
            loss.backward()
            step()
            losses.append(float(loss.item()))
    if worker == 0:
        tell(now="end", seconds=time.perf_counter() - began, loss=float(np.mean(losses[-20:])), waits=1.0)


class Server:
    """Some parameters, and their optimizer.

    Attributes:
        calls: those with gradients, whose answers have the new values.
    """

    def __init__(self, job: Job, index: int) -> None:
        self._parameters = job.divide(list(job.make_model().parameters()))[index]
        self._optimizer = job.make_optimizer(self._parameters)
        self.calls = Calls(job.workers, self._answers)

    def update(self, *pushed: list[torch.Tensor]) -> list[torch.Tensor]:
        """Applies the mean of the workers' gradients; returns the new values."""
        for parameter, first, *others in zip(self._parameters, *pushed, strict=True):
            parameter.grad = sum(others, first) / len(pushed) if others else first
        self._optimizer.step()
        return [parameter.detach() for parameter in self._parameters]

    def _answers(self, pushed: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
        return [self.update(*pushed)] * len(pushed)


_servers: list[Server] = []
"""In a server's process."""


def update(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """Called by the only worker."""
    return _servers[0].update(gradients)


@rpc.functions.async_execution
def exchange(gradients: list[torch.Tensor]) -> Any:
    """Called by several workers: the answer waits for all of them without holding a thread."""
    return _servers[0].calls.take(gradients)


def begin(job: Job, name: str, rank: int, store: str) -> None:
    """Connects this process to the others, and tells its number."""
    tell(pids={name: os.getpid()})
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{store}")
    rpc.init_rpc(name.replace(" ", ""), rank=rank, world_size=job.workers + job.servers, rpc_backend_options=options)


def serve(job: Job, index: int, store: str) -> None:
    """A server's process."""
    _servers.append(Server(job, index))
    begin(job, f"server {index}", job.workers + index, store)
    rpc.shutdown()


def work(job: Job, worker: int, store: str) -> None:
    """A worker's process."""
    begin(job, f"worker {worker}", worker, store)
    model = job.make_model()
    placed = list(enumerate(job.divide(list(model.parameters()))))
    push = exchange if job.workers > 1 else update

    def step() -> None:
        calls = [rpc.rpc_async(f"server{n}", push, ([p.grad for p in some],)) for n, some in placed]
        for (_, some), call in zip(placed, calls, strict=True):
            with torch.no_grad():
                torch._foreach_copy_([*some], call.wait())

    train(job, worker, model, step)
    rpc.shutdown()


def main() -> None:
    """Starts the servers and the workers."""
    job = Job.from_command_line()
    with tempfile.TemporaryDirectory() as directory:
        store = str(Path(directory) / "store")
        workers = [(work, (job, worker, store)) for worker in range(job.workers)]
        run_together(workers, [(serve, (job, index, store)) for index in range(job.servers)])


if __name__ == "__main__":
    main()
