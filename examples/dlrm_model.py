"""DLRM, and what trains it wherever its tables are.

Needs torch alone: benchmarks/recommenders.py trains other systems with it as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from clicks import auc

try:
    import torch
    from torch import nn
except ModuleNotFoundError:
    raise SystemExit("this example needs PyTorch: pip install torch") from None

RULE = torch.optim.Adagrad
OPTIONS: dict[str, Any] = {"lr": 0.02, "eps": 1e-8}
"""The rule's numbers, the same on servers and by torch alone."""


class DLRM(nn.Module):
    """A network turns numbers into a vector like the rows of ids; another one sees the products of all pairs of these.

    Source: Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems", 2019.

    Args:
        rows: returns the rows of ids, (N, tables, dim).
        tables: how many there are.
        numbers: how many numbers an example has.
        dim: the width of rows.
        hidden: the width of hidden layers.
        seed: of first values.
    """

    def __init__(self, rows: nn.Module, tables: int, numbers: int, dim: int, hidden: int = 64, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        first, second = torch.triu_indices(tables + 1, tables + 1, 1)
        self.rows, self.pairs = rows, first * (tables + 1) + second
        self.bottom = nn.Sequential(nn.Linear(numbers, hidden), nn.ReLU(), nn.Linear(hidden, dim), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(dim + len(first), hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, ids: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """Returns the logits, (N,), by ids, (N, tables), and numbers, (N, numbers)."""
        low = self.bottom(numbers)
        vectors = torch.cat([low[:, None], self.rows(ids)], 1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1).index_select(1, self.pairs)
        logits: torch.Tensor = self.top(torch.cat([low, products], 1))[:, 0]
        return logits


class Tables(nn.ModuleList):
    """Tables in this process: the rows of ids, (N, tables, dim).

    Args:
        sizes: numbers of rows.
        dim: the width of rows.
        bound: first values are uniform up to this.
    """

    def __init__(self, sizes: Sequence[int], dim: int, bound: float = 0.05) -> None:
        super().__init__(nn.Embedding(size, dim, sparse=True) for size in sizes)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns rows."""
        return torch.stack([table(own) for table, own in zip(self, ids.unbind(1), strict=True)], 1)


def make_step(net: nn.Module, optimizer: Any, batch: Any) -> float:
    """Makes a step with some clicks; returns the loss."""
    optimizer.zero_grad()
    loss = nn.functional.binary_cross_entropy_with_logits(net(batch["ids"], batch["numbers"]), batch["clicked"])
    loss.backward()
    optimizer.step()
    return loss.item()


def train_alone(net: nn.Module, epochs: int, batches: Iterable[Any]) -> nn.Module:
    """Trains a network by torch alone, and returns it; epochs give arrays in batches."""
    optimizer = RULE(net.parameters(), **OPTIONS)
    for _ in range(epochs):
        for batch in batches:
            make_step(net, optimizer, {name: torch.from_numpy(array) for name, array in batch.items()})
    return net


def auc_of(net: nn.Module, test: Any) -> float:
    """Returns the AUC over some clicks."""
    with torch.no_grad():
        logits = net(torch.from_numpy(test["ids"]), torch.from_numpy(test["numbers"]))
    return auc(logits.numpy(), test["clicked"])
