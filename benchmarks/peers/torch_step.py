"""The training step of `step.py` by torch RPC: a parameter server as in PyTorch's tutorial on batch RPC processing.

The server holds the model and its optimizer; a trainer fetches the model, makes gradients by autograd, and pushes them;
the answer is the new model. Tensors travel beside the pickled call, by TCP or by the memory of the other process.
Needs torch and NumPy alone, since it runs in the peer's Python.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed import rpc

BATCH, RATE = 64, 0.002


def make_model() -> nn.Sequential:
    """The network of examples/digits.py."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))


class ParameterServer:
    """The model and its optimizer, in the server's process."""

    def __init__(self) -> None:
        self.model = make_model()
        self.optimizer = torch.optim.Adam(self.model.parameters(), RATE, eps=1e-7)

    def values(self) -> list[torch.Tensor]:
        """Returns the values of all parameters."""
        return [parameter.detach() for parameter in self.model.parameters()]

    def update(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """Applies gradients; returns the new values."""
        for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        self.optimizer.step()
        return self.values()


_server: list[ParameterServer] = []
"""In the server's process."""


def fetch() -> list[torch.Tensor]:
    """What the trainer calls at first."""
    return _server[0].values()


def push(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """What the trainer calls at each step."""
    return _server[0].update(gradients)


def begin(name: str, rank: int, store: str) -> None:
    """Connects this process to the other one."""
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{store}")
    rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)


def serve(store: str) -> None:
    """The server's process."""
    _server.append(ParameterServer())
    begin("server", 1, store)
    rpc.shutdown()


def tell(**said: Any) -> None:
    """Prints a line of JSON for the launcher."""
    print(json.dumps(said), flush=True)


def train(store: str, server: int, data: str, warm: int, steps: int) -> None:
    """The trainer's process."""
    begin("worker", 0, store)
    with np.load(data) as arrays:
        images, labels = torch.from_numpy(arrays["images"]), torch.from_numpy(arrays["labels"])
    model, cross_entropy = make_model(), nn.CrossEntropyLoss(reduction="none")
    set_values(model, rpc.rpc_sync("server", fetch))
    random = np.random.default_rng(0)
    losses: list[float] = []
    tell(pids={"worker 0": os.getpid(), "server 0": server})
    began = 0.0
    while len(losses) < warm + steps:
        for rows in torch.from_numpy(random.permutation(len(labels))).split(BATCH):
            if len(losses) == warm:
                tell(now="begin")
                began = time.perf_counter()
            if len(losses) < warm + steps:
                losses.append(make_step(model, cross_entropy, images[rows], labels[rows]))
    tell(now="end", seconds=time.perf_counter() - began, loss=float(np.mean(losses[-23:])), waits=1.0)
    rpc.shutdown()


def make_step(model: nn.Module, cross_entropy: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """One step; returns its loss."""
    model.zero_grad()
    losses = cross_entropy(model(images), labels)
    (losses.sum() / BATCH).backward()
    set_values(model, rpc.rpc_sync("server", push, ([parameter.grad for parameter in model.parameters()],)))
    return float(losses.mean().item())


def set_values(model: nn.Module, values: list[torch.Tensor]) -> None:
    """Gives a model the values that came."""
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), values, strict=True):
            parameter.copy_(value)


def main() -> None:
    """Starts the server, and trains."""
    parser = argparse.ArgumentParser()
    parser.add_argument("data")
    parser.add_argument("--warm", type=int)
    parser.add_argument("--steps", type=int)
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        store = str(Path(directory) / "store")
        server = context.Process(target=serve, args=(store,), daemon=True)
        server.start()
        train(store, server.pid or 0, args.data, args.warm, args.steps)
        server.join()


if __name__ == "__main__":
    main()
