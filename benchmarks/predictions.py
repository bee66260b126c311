#!/usr/bin/env python
"""How right the planner is: rounds of real jobs on this host, beside what a simulation of the same jobs predicts.

    python benchmarks/predictions.py [--quick] [--turns N] [--json FILE] [--lane LANE ...] [--costs FILE]
    python benchmarks/predictions.py --network 1Gbit --lane tcp    each process on a host of its own; needs root

In each turn the host is calibrated, as `psctl calibrate` does, with small jobs of one to eight workers. Then jobs of 1
to 64 workers and 1 to 4 servers run, dense and with rows, with copies and without, all on this host, and each is
simulated with that cost model. A row shows a job's median round, the predicted one, and their ratio; those that miss by
more than a fifth stand in a table of their own. `--costs FILE` takes a cost model that was measured before.

With `--network` jobs of four processes and fewer have hosts (`pstesting.hosts`) whose links carry that rate each way.
They share this machine's processors, which simulated hosts do not.

Medians are over the rounds of a job (20 to 400), and then over the `--turns`, of what was measured and of what was
predicted. Jobs of 16 workers and more run in the first turn alone. Nothing else should run.

`--json FILE` writes `{"format", "machine", "costs", "rows"}`, with the costs of each turn.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
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
from pstesting.simulation.costs import Costs
from pstesting.simulation.workloads import Workload
from pswire.transport.traffic import LaneName

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
class Kind:
    """A kind of job.

    Attributes:
        lane, workers, servers: as of the job.
        kind: what its rounds are of.
        copies: True if variables have copies.
        rate: bytes per second of the hosts' network; None for one host.
    """

    lane: str
    workers: int
    servers: int
    kind: str
    copies: bool
    rate: float | None


@dataclass(frozen=True)
class Row(Kind):
    """What was found of one.

    Attributes:
        measured, predicted: median rounds, in seconds.
    """

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


def compared(
    lane: LaneName, size: tuple[int, int, int], rate: float | None, costs: Costs
) -> Iterator[tuple[Kind, float, float]]:
    """Yields kinds of jobs with what their rounds take, measured and predicted, in seconds.

    Args:
        lane: by which pushes travel.
        size: workers, servers, copies.
        rate: bytes per second of the hosts' network; None for one host.
        costs: by which they are predicted.
    """
    workers, servers, copies = size
    kinds = workloads(workers, servers, copies)
    cells = [Cell(lane, workers, workload, rate or inf) for workload in kinds.values()]
    for kind, cell, took in zip(kinds, cells, time_cells(cells), strict=True):
        yield Kind(lane, workers, servers, kind, copies > 0, rate), took.wall, seen(cell, costs).wall


def tables(rows: list[Row]) -> list[Table]:
    """Returns a table of all rows, and one of those that miss."""
    drawn = []
    for title, some in (("All", rows), (f"Off by more than {NEAR:.0%}", [r for r in rows if abs(r.error) > NEAR])):
        table = Table(title=f"{title}: {len(some)}")
        for head in ("lane", "workers", "servers", "rounds of", "copies", "measured, ms", "predicted, ms", "off by"):
            table.add_column(head)
        for row in some:
            table.add_row(
                row.lane,
                str(row.workers),
                str(row.servers),
                row.kind,
                "yes" if row.copies else "",
                f"{1e3 * row.measured:.2f}",
                f"{1e3 * row.predicted:.2f}",
                f"{row.error:+.0%}",
            )
        drawn.append(table)
    return drawn


def rows_of(found: Mapping[Kind, Sequence[tuple[float, float]]]) -> list[Row]:
    """Returns the medians over all turns of what was measured, and of what was predicted."""
    return [Row(*dataclasses.astuple(kind), *map(median, zip(*pairs, strict=True))) for kind, pairs in found.items()]


def report(rows: list[Row], costs: Sequence[Costs]) -> dict[str, Any]:
    """Returns what `--json` writes."""
    said = [dataclasses.asdict(row) | {"error": row.error} for row in rows]
    return {"format": 2, "machine": machine(), "costs": [dataclasses.asdict(each) for each in costs], "rows": said}


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="Few kinds of jobs.")
@click.option("--turns", type=click.IntRange(1), default=1, show_default=True, help="Jobs of each kind.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="File for the figures.")
@click.option("--lane", "lanes", multiple=True, type=click.Choice(get_args(LaneName)), default=get_args(LaneName))
@click.option("--costs", "costs_file", type=click.Path(exists=True, path_type=Path), help="A calibration.")
@click.option("--network", help="Rate of the link of each process's host, such as 1Gbit; else one host has all.")
def main(
    quick: bool,
    turns: int,
    json_file: Path | None,
    lanes: tuple[LaneName, ...],
    costs_file: Path | None,
    network: str | None,
) -> None:
    """Calibrates, measures and predicts."""
    console = Console()
    rate = None if network is None else rate_of(network)
    sizes = [(*size, 0) for size in (QUICK_SIZES if quick else SIZES)]
    sizes += [] if quick else [(*size, 1) for size in COPIED]
    if rate is not None:
        sizes = [(*size, 0) for size in HOSTED_SIZES]
    found, costs = defaultdict[Kind, list[tuple[float, float]]](list), list[Costs]()
    for turn in range(turns):
        with console.status("calibrates"):
            costs.append(Costs.read(costs_file) if costs_file else calibrated(lanes))
        for lane, size in product(lanes, sizes):
            if turn and size[0] >= MANY:
                continue
            with console.status(f"{lane}, {size[0]} workers, {size[1]} servers"):
                for kind, measured, predicted in compared(lane, size, rate, costs[-1]):
                    found[kind].append((measured, predicted))
                    console.print(f"{turn} {lane} {size} {kind.kind} {predicted / measured - 1:+.0%}")
    rows = rows_of(found)
    near = sum(abs(row.error) <= NEAR for row in rows)
    publish(console, report(rows, costs), tables(rows), json_file, None)
    worst = max(rows, key=lambda row: abs(row.error))
    console.print(f"{near} of {len(rows)} within {NEAR:.0%}; the worst is off by {worst.error:+.0%} (aim: {FAR:.0%})")


if __name__ == "__main__":
    main()
