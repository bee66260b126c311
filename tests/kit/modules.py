"""Modules of PyTorch, trained by workers in threads of this process, on real servers. For tests that have torch."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from tests.kit.workers import in_threads

T = TypeVar("T")

torch.set_num_threads(1)  # as a launcher would have it


def job(fn: Callable[[Any, int], T], workers: int = 1, servers: int = 1, root: Any = "runs", **options: Any) -> list[T]:
    """Runs a function in each worker of a job, with its strategy and its number; returns what each has returned."""
    return in_threads(fn, workers, servers, root=root, **options)


def mlp(dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.nn.Module:
    """A small network of two layers."""
    return seeded(seed, lambda: torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))).to(
        dtype
    )


_SEEDING = threading.Lock()


def seeded(seed: int, make: Callable[[], T]) -> T:
    """What a function makes from a seed; torch has one source of chance for all threads."""
    with _SEEDING:
        torch.manual_seed(seed)
        return make()


class Tied(torch.nn.Module):
    """Two layers that have one weight."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.a, self.b = seeded(seed, lambda: [torch.nn.Linear(5, 5), torch.nn.Linear(5, 5)])
        self.b.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x)))[:, :3]


def batches(count: int, size: int = 12, dtype: torch.dtype = torch.float64) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of examples, (size, 5) and (size, 3)."""
    source = torch.Generator().manual_seed(7)
    pairs = [torch.randn(2, size, 5, generator=source, dtype=torch.float64) for _ in range(count)]
    return [(x.to(dtype), (x[:, :3] * y[:, 1:4]).to(dtype)) for x, y in pairs]


def steps(
    module: torch.nn.Module, optimizer: Any, data: Sequence[tuple[torch.Tensor, torch.Tensor]], **options: Any
) -> None:
    """Trains a module by the mean of squares, a step for each batch."""
    for x, y in data:
        optimizer.zero_grad(**options)
        (module(x) - y).square().mean().backward()
        optimizer.step()


def sgd_of_torch(data: Sequence[tuple[torch.Tensor, torch.Tensor]], seed: int = 0) -> torch.nn.Module:
    """What torch alone makes of the small network."""
    module = mlp(seed=seed)
    steps(module, torch.optim.SGD(module.parameters(), lr=0.1), data)
    return module


def share(data: Sequence[Any], worker: int, workers: int) -> list[Any]:
    """A worker's part of each batch: as many examples as every other has."""
    return [tuple(part[worker::workers] for part in batch) for batch in data]


def values(module: torch.nn.Module) -> list[torch.Tensor]:
    """Copies of its parameters."""
    return [p.detach().clone() for p in module.parameters()]


def twin(module: torch.nn.Module) -> torch.nn.Module:
    """A module like it, with parameters of its own."""
    return copy.deepcopy(module)


def apart(one: torch.nn.Module | Sequence[torch.Tensor], other: torch.nn.Module | Sequence[torch.Tensor]) -> float:
    """The greatest difference between the parameters of two modules, relative to the greatest number of each."""
    pairs = zip(*(values(m) if isinstance(m, torch.nn.Module) else m for m in (one, other)), strict=True)
    return max(float((a.double() - b.double()).abs().max() / b.double().abs().max()) for a, b in pairs)
