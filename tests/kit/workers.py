"""Workers that iterate over a dataset together, all in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from psclient._src import values
from psclient._src.data.distributed import DistributedDataset
from psclient._src.devices import Device
from pswire.model.log import Examples, Position


class Worker:
    """One worker of a group in this process; `do_round` is what a round of all workers does."""

    def __init__(self, first: int = 0, local: int = 1, replicas: int = 1, at: Position | None = None) -> None:
        self.devices = tuple(Device("cpu", index) for index in range(local))
        self.where = (first, replicas)
        self.at = at
        self.more = False
        self.others_more: bool | None = None
        self.empty: frozenset[int] = frozenset()
        self.fraction: float | None = None
        self.next: dict[int, Position] = {}
        self.events: list[str] = []
        self.backup_workers = 0
        self.late = self.behind = False
        self.dealt: tuple[Examples, ...] = ()

    def join(self, dataset: int) -> None:
        self.events.append(f"join {dataset}")

    def boundary(self, dataset: int) -> None:
        self.events.append(f"boundary {dataset}")

    def slice(self) -> tuple[int, int]:
        return self.where

    def share(self) -> tuple[int, int]:
        return self.where

    def position(self, dataset: int) -> Position | None:
        return self.at if self.at and self.at.dataset == dataset else None

    def advance(
        self,
        dataset: int,
        epoch: int,
        index: int,
        more: bool,
        empty: frozenset[int],
        fraction: float | None = None,
        returned: tuple[Examples, ...] = (),
    ) -> None:
        self.fraction = fraction
        self.next[dataset] = Position(dataset, epoch, index, returned)
        self.more, self.empty, self.others_more = more, empty, None

    def finish(self, dataset: int) -> None:
        self.empty = frozenset()

    def made_round(self, dataset: int) -> bool:
        return self.others_more is not None

    def any_more(self, dataset: int) -> bool | None:
        return self.others_more

    def returned(self, dataset: int) -> tuple[Examples, ...]:
        at = self.next.get(dataset) or self.position(dataset)
        return at.returned if at else ()

    def left_out(self, dataset: int) -> bool:
        return self.late

    def is_behind(self, dataset: int) -> bool:
        return self.behind

    def deal(self, dataset: int, examples: Sequence[Examples]) -> None:
        self.dealt = tuple(examples)


def do_round(*workers: Worker) -> None:
    """Tells each worker whether any of them has a further batch."""
    more = any(worker.more for worker in workers)
    for worker in workers:
        worker.others_more = more


def rows(batch: Any) -> list[list[Any]]:
    """What each local replica got."""
    return [part.tolist() for part in values.local_results(batch)]


def distributed(dataset: Any, worker: Worker, **said: Any) -> DistributedDataset:
    """The dataset with number 0, as a worker sees it."""
    return DistributedDataset(dataset, worker, 0, **said)


def team(split: Sequence[int]) -> list[Worker]:
    """Workers with so many local replicas each."""
    return [Worker(sum(split[:index]), local, sum(split)) for index, local in enumerate(split)]
