"""The recommenders that all systems of benchmarks/recommenders.py train: data, networks, and how steps are timed.

Needs torch and NumPy alone, since it runs in the peers' Python too.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

from clicks import Clicks, auc
from dlrm_model import DLRM, Tables

EPSILON = 1e-8
"""Keeps Adagrad away from zero; its first sums are 0."""

BOUND = 0.05
"""First values of rows are uniform in -BOUND to BOUND."""

TEST = 8192
"""Test examples whose chances are computed together."""

KINDS = ("train", "test")


@dataclass(frozen=True)
class Work:
    """The work, which is the same for every system.

    Attributes:
        model: the name of its network.
        sizes: for each feature its number of ids.
        numbers: how many features are numbers.
        dim: the width of rows.
        hidden: the width of hidden layers.
        batch: examples of a step, of all workers together.
        warm: how many steps come before those that are measured.
        steps: how many are measured.
        rate: the learning rate.
        data: the directory of the examples; each of them is in one batch, and test examples in none.
    """

    model: str
    sizes: tuple[int, ...]
    numbers: int
    dim: int
    hidden: int
    batch: int
    warm: int
    steps: int
    rate: float
    data: str

    @classmethod
    def read(cls, text: str) -> Work:
        """Returns what a process is told as JSON."""
        said = json.loads(text)
        return cls(**{**said, "sizes": tuple(said["sizes"])})

    def save(self, kind: str, clicks: Clicks) -> None:
        """Writes the examples of a kind."""
        for name, array in clicks._asdict().items():
            np.save(Path(self.data) / f"{kind}_{name}.npy", array)

    def load(self, kind: str) -> Clicks:
        """Returns the examples of a kind, whose memory all processes share."""
        return Clicks(*(np.load(Path(self.data) / f"{kind}_{name}.npy", mmap_mode="c") for name in Clicks._fields))

    def network(self) -> nn.Module:
        """Returns the network, with the same first values for all systems."""
        torch.manual_seed(0)
        return NETWORKS[self.model](self)

    def tables(self) -> nn.Module:
        """Returns tables in this process."""
        return Tables(self.sizes, self.dim, BOUND)

    def make_steps(self, step: Callable[[int], object], first: bool) -> None:
        """Makes all steps, by their numbers.

        Args:
            step: makes one.
            first: True in the process that tells the launcher when the measured steps begin and end.
        """
        began = 0.0
        for number in range(self.warm + self.steps):
            if number == self.warm:
                began = time.perf_counter()
                if first:
                    tell(now="begin")
            step(number)
        if first:
            tell(now="end", seconds=time.perf_counter() - began, threads=torch.get_num_threads())

    def tell_auc(self, guess: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        """Tells the launcher the AUC of test examples.

        Args:
            guess: returns their logits by their ids and numbers.
        """
        test = self.load("test")
        with torch.no_grad():
            guesses = [
                guess(*(torch.from_numpy(array[start : start + TEST]) for array in (test.ids, test.numbers)))
                for start in range(0, len(test.ids), TEST)
            ]
        tell(auc=auc(torch.cat(guesses).numpy(), test.clicked))


def tell(**said: Any) -> None:
    """Prints a line of JSON for the launcher."""
    print(json.dumps(said), flush=True)


def tell_pid(name: str) -> None:
    """Tells the launcher the number of this process."""
    tell(pids={name: os.getpid()})


class Towers(nn.Module):
    """Two towers over the rows of users and items, and a network over both: the logits of rows, (N, 2, dim)."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        dim, hidden = work.dim, work.hidden
        self.users, self.items = (
            nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, dim)) for _ in range(2)
        )
        self.both = nn.Sequential(nn.Linear(2 * dim, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, rows: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        products = self.users(rows[:, 0]) * self.items(rows[:, 1])
        return products.sum(1) + self.both(rows.flatten(1))[:, 0]


NETWORKS: dict[str, Callable[[Work], nn.Module]] = {
    "towers": Towers,
    "dlrm": lambda work: DLRM(nn.Identity(), len(work.sizes), work.numbers, work.dim, work.hidden),
}
"""Networks over rows and numbers, by their names."""


def loss_of(logits: torch.Tensor, clicked: torch.Tensor) -> torch.Tensor:
    """The mean of the cross entropy."""
    return nn.functional.binary_cross_entropy_with_logits(logits, clicked)
