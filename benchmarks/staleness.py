"""Steps of workers of which one, or each in turn, is slow: synchronous, with bounded staleness, and asynchronous.

    python benchmarks/staleness.py                     everything
    python benchmarks/staleness.py --quick             the same for a shorter time, for a first look
    python benchmarks/staleness.py --k 1 --k 3         with these bounds

Each row is a cluster of real processes on this machine: one server, three workers on the shm transport, whose step
sleeps for 5 ms in place of a computation, reads a variable of 4 KB and pushes as much to it. A slow step sleeps four
times as long. "one": the last worker's steps are all slow. "in turn": of each worker's steps every fourth is, at
another place than the others'. The steps of all workers are counted, for as long as all of them work.

`--json FILE` writes `{"format", "machine", "rows"}`: steps a second of all workers and of the last one, and by how many
rounds the foremost was ahead of the hindmost at most, as the workers read it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
from figures import machine, publish
from rich.console import Console
from rich.table import Table

import psclient as ps
from psclient._src.launch.cluster import Cluster
from psclient._src.processes.output import Line

FORMAT = 1
WORKERS = 3
STEP = 0.005
"""Seconds of a step."""

SLOWER = 4
LENGTH = 512
"""Of the variable: 4 KB of int64."""

WARM = 5
"""Steps before it is measured."""

SCENARIOS = ("one", "in turn")
RUNS = {"s": 6.0, "quick": 1.5}
"""Seconds of a measurement."""

LIMIT = 600.0
"""Seconds that one cluster may take."""

Said = dict[str, Any]
"""One row."""


def consistency_of(word: str) -> Any:
    """The consistency of a row, by its word: `sync`, `async`, or the bound."""
    return {"sync": ps.Sync(), "async": ps.Async()}.get(word) or ps.BoundedStaleness(int(word))


def be_worker(word: str, scenario: str, seconds: float) -> None:
    """Makes steps for some seconds, and says how many."""
    strategy = ps.ParameterServerStrategy(consistency=consistency_of(word))
    me = strategy.task.index
    with strategy.scope():
        v = ps.Variable(np.zeros(LENGTH, "int64"), name="v")
    mine = np.zeros(LENGTH, "int64")
    mine[me] = 1

    def add(strategy: ps.Strategy, value: Any) -> None:
        total = strategy.extended.reduce_to("sum", value, v)
        strategy.extended.update(v, lambda variable, x: variable.assign_add(x), (total,))

    def step() -> Any:
        seen = v.numpy()[:WORKERS].copy()
        context = ps.get_replica_context()
        assert context is not None
        context.merge_call(add, (mine,))
        return seen

    steps, gap, began = 0, 0, 0.0
    while not began or time.perf_counter() - began < seconds:
        slow = me == WORKERS - 1 if scenario == "one" else (steps + me) % SLOWER == 0
        time.sleep(STEP * (SLOWER if slow else 1))
        seen = strategy.run(step)
        steps += 1
        if steps == WARM:
            steps, began = WARM + 1, time.perf_counter()
        gap = max(gap, int(seen.max() - seen.min()))
    took = time.perf_counter() - began
    print(json.dumps({"worker": me, "rate": (steps - WARM - 1) / took, "gap": gap}), flush=True)


def measure(word: str, scenario: str, seconds: float) -> Said:
    """Runs one cluster."""
    said: list[Said] = []

    def hear(line: Line) -> None:
        if not line.error and line.text.startswith("{"):
            said.append(json.loads(line.text))

    args = ("--as-worker", word, "--scenario", scenario, "--seconds", str(seconds))
    with Cluster(
        sink=hear, ps=1, workers=WORKERS, chief="none", transport="shm", script=str(Path(__file__)), args=args
    ) as cluster:
        outcome = cluster.wait(LIMIT)
    if outcome.code or len(said) != WORKERS:
        raise click.ClickException(f"{word}, {scenario}: {outcome.report}")
    last = next(each["rate"] for each in said if each["worker"] == WORKERS - 1)
    return {
        "slow": scenario,
        "consistency": word if word in ("sync", "async") else f"bounded, k = {word}",
        "steps/s": sum(each["rate"] for each in said),
        "of the last": last,
        "gap": max(each["gap"] for each in said),
    }


def table(rows: Sequence[Said]) -> Table:
    """The rows as a table."""
    shown = Table(title=f"Steps of {WORKERS} workers; slow ones take {SLOWER} times {STEP * 1e3:g} ms")
    for name in rows[0]:
        shown.add_column(name, justify="right" if name not in ("slow", "consistency") else "left")
    for row in rows:
        shown.add_row(*(f"{value:.0f}" if isinstance(value, float) else str(value) for value in row.values()))
    return shown


@click.command(help=(__doc__ or "").partition("\n\n")[0])
@click.option("--k", "bounds", multiple=True, type=int, default=(0, 3), show_default=True, help="Bounds of staleness.")
@click.option("--quick", is_flag=True, help="For a shorter time.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures here.")
@click.option("--as-worker", "word", hidden=True)
@click.option("--scenario", default="one", hidden=True)
@click.option("--seconds", type=float, default=0.0, hidden=True)
def main(
    bounds: Sequence[int], quick: bool, json_file: Path | None, word: str | None, scenario: str, seconds: float
) -> None:
    """Measures, or is a worker of a cluster that is measured."""
    if word:
        be_worker(word, scenario, seconds)
        return
    console = Console()
    rows = []
    for one in SCENARIOS:
        for each in ("sync", *map(str, bounds), "async"):
            with console.status(f"{each}, {one}"):
                rows.append(measure(each, one, RUNS["quick" if quick else "s"]))
    report = {"format": FORMAT, "machine": machine(), "rows": rows}
    publish(console, report, [table(rows)], json_file, None)


if __name__ == "__main__":
    main()
