#!/usr/bin/env python
"""Where growth ends: simulated jobs of up to 1,000 workers and 100 servers, by a cost model that was measured.

    python benchmarks/curves.py [--quick] [--most N] --costs FILE [--mode MODE ...] [--json FILE]

Each server has a host of its own, of the kind that `psctl calibrate` measured, and so has each worker, but in the modes
with ten of them to a host, who push by themselves or in sums. Every tenth process is a server. A worker computes for
`STEP` seconds between two rounds; one in fifty takes half as long again. `speedup` is how many rounds all workers make
in a second, each by its median round, over what one alone does; an ideal cluster has as much as it has workers.

`--json FILE` writes `{"format", "costs", "rows"}`.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from figures import publish
from rich.console import Console
from rich.table import Table

from pstesting.simulation.clusters import Cluster
from pstesting.simulation.costs import Costs
from pstesting.simulation.jobs import SimulatedJob
from pstesting.simulation.workloads import Workload
from pswire.model.consistency import ASYNC, Consistency

WORKERS, QUICK_WORKERS = (1, 10, 30, 100, 300, 1000), (1, 10, 30)

PER_SERVER = 10
"""Workers for each server."""

STEP = 0.1

RATE = 25e9 / 8

ROUNDS = 12

SLOW, EVERY = 1.5, 50
"""How much longer one worker in so many takes."""

DENSE, VARIABLES = 10e6, 100

MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "sync, 2 % backup workers": {"backup_workers": 0.02},
    "bounded, 4 rounds": {"consistency": Consistency("bounded", staleness=4)},
    "async": {"consistency": ASYNC},
    "sync, 10 to a host": {"per_host": 10},
    "sync, sums of 10": {"per_host": 10, "local_reduction": True},
}


@dataclass(frozen=True)
class Row:
    """A simulated job.

    Attributes:
        mode: how rounds are made.
        workers, servers: their numbers.
        step_seconds: the median step of a worker.
        speedup: rounds of all workers in a second, over those of one alone.
        bottleneck: what is used most.
        use: the part of the time in which the busiest of its kind works.
        took: seconds of this machine.
    """

    mode: str
    workers: int
    servers: int
    step_seconds: float
    speedup: float
    bottleneck: str
    use: float
    took: float


def simulated(mode: str, workers: int, costs: Costs, alone: float) -> Row:
    """Simulates a job, beside a worker alone that makes so many rounds in a second; 0 for that one."""
    begun, servers = time.perf_counter(), max(workers // PER_SERVER, 1)
    keys = dict(MODES[mode])
    if "backup_workers" in keys:
        backup_workers = max(int(keys.pop("backup_workers") * workers), int(workers > 1))
        keys["consistency"] = Consistency(backup_workers=backup_workers)
    slow = dict.fromkeys(range(0, workers, EVERY), SLOW) if workers > 1 else {}
    workload = Workload(servers, DENSE, VARIABLES, step=STEP)
    seen = SimulatedJob(Cluster(workers, workload, costs, "tcp", RATE, slow=slow, **keys), ROUNDS).train()
    speed = sum(1 / statistics.median(made) for made in seen.rounds.values() if made)
    speedup = speed / (alone or speed)
    took = time.perf_counter() - begun
    return Row(mode, workers, servers, seen.round_seconds, speedup, seen.bottleneck, seen.use[seen.bottleneck], took)


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="Up to 30 workers.")
@click.option(
    "--costs", type=click.Path(exists=True, path_type=Path), required=True, help="What psctl calibrate wrote."
)
@click.option("--most", type=click.IntRange(1), default=1000, show_default=True, help="No more workers than these.")
@click.option("--mode", "modes", multiple=True, type=click.Choice([*MODES]), default=[*MODES])
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="File for the figures.")
def main(quick: bool, costs: Path, most: int, modes: tuple[str, ...], json_file: Path | None) -> None:
    """Simulates one job after the other."""
    console, model, rows = Console(), Costs.read(costs), list[Row]()
    for mode in modes:
        alone = 0.0
        for workers in (each for each in (QUICK_WORKERS if quick else WORKERS) if each <= most):
            with console.status(f"{mode}, {workers} workers"):
                rows.append(simulated(mode, workers, model, alone))
            alone = alone or 1 / rows[-1].step_seconds
    heads = ("mode", "workers", "servers", "step, ms", "speedup", "of ideal", "used most", "simulated in, s")
    table = Table(*heads)
    for row in rows:
        table.add_row(
            row.mode,
            str(row.workers),
            str(row.servers),
            f"{1e3 * row.step_seconds:.0f}",
            f"{row.speedup:.1f}",
            f"{row.speedup / row.workers:.0%}",
            f"{row.bottleneck}, {row.use:.0%}",
            f"{row.took:.0f}",
        )
    found = {"format": 1, "costs": dataclasses.asdict(model), "rows": [dataclasses.asdict(row) for row in rows]}
    publish(console, found, [table], json_file, None)


if __name__ == "__main__":
    main()
