#!/usr/bin/env python
"""How right the planner is: rounds of real jobs on this host, beside what a simulation of the same jobs predicts.

    python benchmarks/predictions.py [--quick] [--turns N] [--json FILE] [--transport TRANSPORT ...] [--costs FILE]
    python benchmarks/predictions.py --network 1Gbit --transport tcp    each process on a host of its own; needs root

Each turn first runs the jobs of `psctl calibrate`, of one to eight workers. Then it runs jobs of 1 to 64 workers and 1
to 4 servers, dense and with rows, with copies and without, all on this host. Each of these is simulated, with the cost
model of all turns, as `psctl calibrate --turns` fits it. A row shows a job's median round, the predicted one, and their
ratio; those that miss by more than a fifth stand in a table of their own. `--costs FILE` takes a cost model that was
measured before.

With `--network` jobs of four processes and fewer have hosts (`pstesting.hosts`) whose links carry that rate each way.
They share this machine's processors, which simulated hosts do not.

Medians are over the rounds of a job (20 to 400), and then over the `--turns`. Jobs of 16 workers and more run in the
first turn alone. Nothing else should run.

`--json FILE` writes `{"format", "machine", "costs", "rows"}`.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from dataclasses import dataclass
from itertools import product
from math import inf
from pathlib import Path
from statistics import median
from typing import Any, get_args

import click
from figures import machine, publish
from rich.console import Console
from rich.table import Table

from pstesting.planner.commands import rate_of
from pstesting.planner.fit import calibrated, seen
from pstesting.planner.jobs import Cell, time_cells
from pstesting.planner.measurements import Measured, measure
from pstesting.simulation.costs import Costs
from pstesting.simulation.workloads import Workload
from pswire.network.traffic import TransportName

SIZES = ((1, 1), (2, 2), (4, 1), (8, 2), (16, 4), (64, 2))
"""Workers and servers."""

QUICK_SIZES = ((1, 1), (4, 1))

HOSTED_SIZES = ((1, 1), (2, 1), (3, 1), (1, 2), (2, 2), (1, 3))
"""The same, of jobs whose processes have hosts of their own: four at most."""

COPIED = ((4, 2),)
"""The same, of jobs whose variables have copies."""

NEAR, FAR = 0.2, 0.4
"""Errors that a prediction should not have, and that none may have."""


@dataclass(frozen=True)
class Row:
    """What was found of a kind of job.

    Attributes:
        kind: what its rounds are of.
        cell: the job.
        measured, predicted: median rounds, in seconds.
    """

    kind: str
    cell: Cell
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """By which part the prediction is off; above 0 where it is too long."""
        return self.predicted / self.measured - 1


MANY = 16
"""Workers of jobs that take minutes: they run once, and have no large rounds."""


def workloads(workers: int, servers: int, copies: int) -> dict[str, Workload]:
    """Returns what the rounds are of, by its name. None of it was calibrated with."""
    large = {"dense, 16 MB in 8": Workload(servers, 16e6, 8, copies=copies)} if workers < MANY else {}
    return large | {
        "dense, 40 KB in 10": Workload(servers, 4e4, 10, copies=copies),
        "dense, 1 MB in 4": Workload(servers, 1e6, 4, copies=copies),
        "rows, 1024 of 32": Workload(servers, 0.0, 0, 1024, 32, copies=copies),
    }


def kinds_of(transport: TransportName, size: tuple[int, int, int], rate: float) -> dict[str, Cell]:
    """Returns the jobs of a number of workers, servers and copies, by what their rounds are of."""
    workers, servers, copies = size
    return {kind: Cell(transport, workers, work, rate) for kind, work in workloads(workers, servers, copies).items()}


def tables(rows: list[Row]) -> list[Table]:
    """Returns a table of all rows, and one of those that miss."""
    drawn = []
    for title, some in (("All", rows), (f"Off by more than {NEAR:.0%}", [r for r in rows if abs(r.error) > NEAR])):
        table = Table(title=f"{title}: {len(some)}")
        for head in (
            "transport",
            "workers",
            "servers",
            "rounds of",
            "copies",
            "measured, ms",
            "predicted, ms",
            "off by",
        ):
            table.add_column(head)
        for row in some:
            cell = row.cell
            table.add_row(
                cell.transport,
                str(cell.workers),
                str(cell.workload.servers),
                row.kind,
                "yes" if cell.workload.copies else "",
                f"{1e3 * row.measured:.2f}",
                f"{1e3 * row.predicted:.2f}",
                f"{row.error:+.0%}",
            )
        drawn.append(table)
    return drawn


def said_of(row: Row) -> dict[str, Any]:
    """Returns what `--json` says of a row."""
    cell, workload = row.cell, row.cell.workload
    return {
        "transport": cell.transport,
        "workers": cell.workers,
        "servers": workload.servers,
        "kind": row.kind,
        "copies": workload.copies > 0,
        "rate": None if cell.rate == inf else cell.rate,
        "measured": row.measured,
        "predicted": row.predicted,
        "error": row.error,
    }


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="Few kinds of jobs.")
@click.option("--turns", type=click.IntRange(1), default=1, show_default=True, help="Jobs of each kind.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="File for the figures.")
@click.option(
    "--transport",
    "transports",
    multiple=True,
    type=click.Choice(get_args(TransportName)),
    default=get_args(TransportName),
)
@click.option("--costs", "costs_file", type=click.Path(exists=True, path_type=Path), help="A calibration.")
@click.option("--network", help="Rate of the link of each process's host, such as 1Gbit; else one host has all.")
def main(
    quick: bool,
    turns: int,
    json_file: Path | None,
    transports: tuple[TransportName, ...],
    costs_file: Path | None,
    network: str | None,
) -> None:
    """Measures, calibrates and predicts."""
    console = Console()
    rate = inf if network is None else rate_of(network)
    sizes = [(*size, 0) for size in (HOSTED_SIZES if network else QUICK_SIZES if quick else SIZES)]
    sizes += [] if quick or network else [(*size, 1) for size in COPIED]
    walls, calibrations = defaultdict[tuple[str, Cell], list[float]](list), list[Measured]()
    for turn in range(turns):
        if costs_file is None:
            with console.status(f"turn {turn}: calibrates"):
                calibrations.append(measure(transports))
        for transport, size in product(transports, sizes):
            if turn and size[0] >= MANY:
                continue
            cells = kinds_of(transport, size, rate)
            with console.status(f"turn {turn}: {transport}, {size[0]} workers, {size[1]} servers"):
                for job, took in zip(cells.items(), time_cells([*cells.values()]), strict=True):
                    walls[job].append(took.wall)
    costs = Costs.read(costs_file) if costs_file else calibrated(calibrations)
    rows = [Row(kind, cell, median(took), seen(cell, costs).wall) for (kind, cell), took in walls.items()]
    near = sum(abs(row.error) <= NEAR for row in rows)
    said = {"format": 2, "machine": machine(), "costs": dataclasses.asdict(costs), "rows": [*map(said_of, rows)]}
    publish(console, said, tables(rows), json_file, None)
    worst = max(rows, key=lambda row: abs(row.error))
    console.print(f"{near} of {len(rows)} within {NEAR:.0%}; the worst is off by {worst.error:+.0%} (aim: {FAR:.0%})")


if __name__ == "__main__":
    main()
