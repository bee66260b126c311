"""Training with a worker that is four times slower: synchronous rounds of all workers, and with one backup worker.

    python benchmarks/straggler.py             three workers, all alike, and with a straggler
    python benchmarks/straggler.py --quick     a short pass of each, for a first look

Real processes on this machine: one server, three workers, a chief of its own. A step computes for some milliseconds
(it sleeps, so that few cores suffice), and makes one round of 4 KB. Systems take turns, and each makes whole passes
over the same examples, of which each counts once; the first pass is not measured. Figures are examples per second.

`--json FILE` writes `{"format", "machine", "examples", "rates"}`.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path

import click
from figures import machine
from rich.console import Console
from rich.table import Table

import psclient as ps
from pstesting.processes import CALM, W0, ProcessCluster
from pstesting.script import ME, add_all, say

FORMAT = 1
SLOWER = 4
"""How much longer the straggler computes."""

RUNS = {
    "all alike, Sync()": (1, 0),
    "all alike, Sync(backup_workers=1)": (1, 1),
    "a straggler, Sync()": (SLOWER, 0),
    "a straggler, Sync(backup_workers=1)": (SLOWER, 1),
}
"""How much longer worker 2 computes, and the backup workers."""


def train(rows: int, passes: int, seconds: float, slower: int, backup: int) -> None:
    """Visits all rows some times; says how long each pass took, and how often each row was visited."""
    import time

    import numpy as np

    strategy = ps.ParameterServerStrategy(consistency=ps.Sync(backup_workers=backup))
    with strategy.scope():
        visits = ps.Variable(np.zeros(rows), name="visits")
        w = ps.Variable(np.zeros(1024, "float32"), name="w")
    data = strategy.experimental_distribute_dataset(ps.ArrayDataset(np.arange(rows)).shuffle(1).batch(30))
    for _ in range(passes):
        began = time.perf_counter()
        for mine in data:
            if len(mine):
                time.sleep(seconds * (slower if ME == 2 else 1))
            seen = np.bincount(mine, minlength=rows).astype(float)
            strategy.run(lambda seen=seen: add_all([(visits, seen), (w, np.ones(1024, "float32"))]))
        counted = visits.numpy()
        say("pass", [time.perf_counter() - began, float(counted.min()), float(counted.max())])


def rates(rows: int, passes: int, seconds: float, slower: int, backup: int) -> list[float]:
    """Returns the examples per second of each measured pass, as worker 0 sees it."""
    with tempfile.TemporaryDirectory() as directory:
        args = (rows, passes + 1, seconds, slower, backup)
        with ProcessCluster(train, Path(directory), args, workers=3, chief="driver", timeouts=CALM) as job:
            job.finish()
            said = job.said(W0, "pass")
    for number, (_, least, most) in enumerate(said, 1):
        if (least, most) != (number, number):
            raise click.ClickException(f"in {number} passes an example has counted {least:g} to {most:g} times")
    return [rows / took for took, _, _ in said[1:]]


@click.command(help=__doc__, context_settings={"max_content_width": 100})
@click.option("--quick", is_flag=True, help="A short pass of each.")
@click.option("--json", "file", type=click.Path(path_type=Path), help="Where to write the figures.")
def main(quick: bool, file: Path | None) -> None:
    """Runs the benchmark."""
    rows, passes, seconds, laps = (600, 1, 0.01, 1) if quick else (3000, 2, 0.02, 3)
    found: dict[str, list[float]] = {name: [] for name in RUNS}
    before = machine()
    for _ in range(laps):
        for name, (slower, backup) in RUNS.items():
            found[name] += rates(rows, passes, seconds, slower, backup)
    medians = {name: statistics.median(each) for name, each in found.items()}
    table = Table("workers", "examples/s", "least", "most", "of all alike, Sync()")
    for name, each in found.items():
        ratio = medians[name] / medians["all alike, Sync()"]
        table.add_row(name, f"{medians[name]:.0f}", f"{min(each):.0f}", f"{max(each):.0f}", f"{ratio:.2f}")
    Console().print(table)
    if file is not None:
        file.write_text(json.dumps({"format": FORMAT, "machine": before, "examples": rows, "rates": found}, indent=1))


if __name__ == "__main__":
    main()
