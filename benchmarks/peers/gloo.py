"""gloo, as torch uses it: two workers sum their gradients over TCP, and each updates variables of its own.

There is no server, so it stands beside the others. The gradients lie in one buffer, as `DistributedDataParallel` has
them; several smaller all-reduces at a time were slower here.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from rounds import RATE, WORKERS, Work, from_arguments, run_together, tell
from torch import distributed


class Replica:
    """One worker's variables and gradients.

    Args:
        worker: its number.
        work: the model.
    """

    def __init__(self, worker: int, work: Work) -> None:
        self._variables = [torch.from_numpy(value) for value in work.zeros()]
        self._fresh = torch.cat([torch.from_numpy(value) for value in work.gradients(worker)])
        self._buffer = self._fresh.clone()
        self._gradients = self._buffer.split(list(work.lengths))

    def compute(self) -> None:
        """Makes the gradients anew, which the last round has overwritten with their sum."""
        self._buffer.copy_(self._fresh)

    def make_round(self) -> list[torch.Tensor]:
        """Sums the gradients of all workers in place, and applies them."""
        distributed.all_reduce(self._buffer)
        torch._foreach_add_(self._variables, self._gradients, alpha=-RATE)
        return self._variables


def train(worker: int, store: str, works: list[Work]) -> None:
    """A worker's process."""
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=worker, world_size=WORKERS)
    for work in works:
        replica = Replica(worker, work)
        seconds = work.measure(replica.make_round, ready=replica.compute)
        if worker == 0:
            tell(work, seconds)
    distributed.destroy_process_group()


def main() -> None:
    """Starts the workers."""
    works = from_arguments()
    with tempfile.TemporaryDirectory() as directory:
        store = str(Path(directory) / "store")
        run_together([(train, (worker, store, works)) for worker in range(WORKERS)])


if __name__ == "__main__":
    main()
