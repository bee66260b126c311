"""Commands that `psctl` has where this package is installed."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path
from typing import get_args

import click
from rich.table import Table

from psclient.psctl.output import say, show, table
from pstesting.planner.fit import cells_of, fitted
from pstesting.planner.jobs import Cell, Timed, time_cells
from pstesting.simulation.costs import Costs
from pswire.errors import ConfigError
from pswire.transport.traffic import LaneName

BUSY = 0.5
"""Load of each core, before it begins, above which a calibration says that others use this machine."""


@click.command()
@click.option(
    "--lane",
    "lanes",
    multiple=True,
    type=click.Choice(get_args(LaneName)),
    default=get_args(LaneName),
    show_default=True,
    help="Lanes to measure.",
)
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    default="costs.json",
    show_default=True,
    help="File for the cost model.",
)
@click.option("--json", "as_json", is_flag=True, help="Answer in JSON.")
def calibrate(lanes: tuple[LaneName, ...], output: Path, as_json: bool) -> int:
    """Measures this host: what a push, a round, a variable and a byte cost.

    Runs small jobs of one or two servers and workers on it, for about half a minute for each lane, and writes a cost
    model, with which simulations tell how long rounds take. Nothing else should use the host meanwhile.
    """
    if not output.parent.is_dir():
        raise ConfigError(f"--output {output}: there is no directory {output.parent}")
    load, begun = os.getloadavg()[0] / (os.cpu_count() or 1), time.monotonic()
    if load > BUSY:
        click.echo(
            f"psctl: others use this host (load {load:.1f} for each core): its costs come out too high", err=True
        )
    timed = {lane: [found for cells in cells_of(lane) for found in _timed(cells)] for lane in lanes}
    costs = fitted(timed)
    costs.write(output)
    if as_json:
        say({"costs": dataclasses.asdict(costs), "file": str(output), "seconds": time.monotonic() - begun})
    else:
        show(_drawn(costs), f"{output}: {costs.machine}, {costs.cores} cores, in {time.monotonic() - begun:.0f} s")
    return 0


def _timed(cells: list[Cell]) -> list[tuple[Cell, Timed]]:
    return list(zip(cells, time_cells(cells), strict=True))


def _drawn(costs: Costs) -> Table:
    """The costs of pushes and their answers on each lane, in microseconds and nanoseconds for each KB."""
    rows = []
    for name, lane in costs.lanes.items():
        worker, server = lane.send + lane.take, lane.receive + lane.answer
        bytes_of = lane.send_byte + lane.take_byte, lane.receive_byte + lane.answer_byte
        rows.append(
            [
                name,
                f"{1e6 * worker:.0f}",
                f"{1e6 * server:.0f}",
                *(f"{1e12 * each:.0f}" for each in bytes_of),
                f"{1e6 * lane.latency:.0f}",
            ]
        )
    rows.append(
        ["a round", f"{1e6 * costs.step:.0f}", f"{1e6 * costs.round:.0f}", "", f"{1e12 * costs.kernel_byte:.0f}"]
    )
    rows.append(["a variable", f"{1e6 * costs.step_variable:.1f}", f"{1e6 * costs.round_variable:.1f}"])
    rows.append(["a row", f"{1e6 * costs.step_row:.2f}", f"{1e6 * costs.row:.2f}"])
    return table(
        ("processor time", "worker, us", "server, us", "worker, ns/KB", "server, ns/KB", "latency, us"),
        rows,
    )
