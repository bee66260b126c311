"""Training steps by `DistributedDataParallel` over gloo, for `frameworks.py`: no servers, each worker has an optimizer.

Needs torch and NumPy alone, since it runs in the peer's Python. Prints lines of JSON, which `measures.Watch` reads.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from rounds import run_together
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch_step import Job, tell, train


def work(job: Job, worker: int, store: str) -> None:
    """A worker's process."""
    tell(pids={f"worker {worker}": os.getpid()})
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=worker, world_size=job.workers)
    model = DistributedDataParallel(job.make_model())
    train(job, worker, model, job.make_optimizer(list(model.parameters())).step)
    distributed.destroy_process_group()


def main() -> None:
    """Starts the workers."""
    job = Job.from_command_line()
    with tempfile.TemporaryDirectory() as directory:
        store = str(Path(directory) / "store")
        run_together([(work, (job, worker, store)) for worker in range(job.workers)])


if __name__ == "__main__":
    main()
