"""A job whose table is larger than the memory that its server may take, beside the same job with it in memory.

    python benchmarks/tier_job.py                              a million rows of 64 float32, a tenth of them in memory
    python benchmarks/tier_job.py --path /nvme --rows 4000000  on another disk, a gigabyte

For each system one server and two workers, all real processes on this machine, as users have them: a dataset names
the keys of each batch (`InputOptions(prefetch=...)`), 4,096 for each worker by Zipf's law; a step looks its rows up,
computes for a while (it sleeps), and applies a gradient of each row by SGD. What it computes is left out of its time.
The jobs are there together, and make their steps in turns, lap by lap.

- `memory`: the table in memory. `tier`: in a file, as it is. `unhinted`: in a file, where a push names the rows of the
  next batch alone, and not those of the one behind it.
- `order`: "frequency" where keys came first that come often, as in training, "random" where any came first, as after a
  restore: then a page of 4 KiB has rows of both kinds.
- `hit`, `hinted` and `waited` are pages of 4 KiB a step, of the server: see docs/metrics.md.
"""

from __future__ import annotations

import json
import os
import queue
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import click
import numpy as np
from figures import machine

import psclient as ps
from psclient._src.launch.cluster import Cluster
from psclient._src.processes.output import Line
from pswire.cluster import Task
from pswire.server_options import ServerOptions

BATCH, WORKERS, DIM = 4096, 2, 64
FILLED = 1 << 15
"""Rows that a round makes before the first step."""

WARM = 3
"""Steps of a lap that are not measured: before them a server had more time than between two steps."""

AIM = 2.0
"""What the ratio should be at most."""

SECONDS = 600
SYSTEMS = ("memory", "tier", "unhinted")
SERVES = " serves metrics at "


@dataclass(frozen=True)
class Work:
    """One measurement.

    Attributes:
        rows: of the table.
        share: how many times larger than its memory it is.
        zipf: exponent of the keys' frequencies.
        order: of the keys' first rounds.
        pause: milliseconds for which a step computes.
        laps: how many are measured; one more comes before.
        steps: of a lap.
    """

    rows: int
    share: int
    zipf: float
    order: str
    pause: float
    laps: int
    steps: int

    def keys(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Returns the keys of all steps, by worker, (steps * WORKERS * BATCH,)."""
        sums = np.cumsum(np.arange(1, self.rows + 1) ** -self.zipf)
        count = (1 + self.laps) * self.steps * WORKERS * BATCH
        drawn = sums[-1] * np.random.default_rng(0).random(count)
        found: np.ndarray[Any, np.dtype[np.int64]] = np.searchsorted(sums, drawn, "right").clip(0, self.rows - 1)
        return found

    def filled(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Returns all keys in the order in which they get their rows; a key's number is the rank of its frequency."""
        return np.arange(self.rows) if self.order == "frequency" else np.random.default_rng(1).permutation(self.rows)


# ---- In a worker ----


@dataclass(frozen=True)
class Unhinted:
    """A table whose rows are named one batch ahead, and not two."""

    prefetch: Callable[..., None]


def train(work: Work, system: str, directory: Path) -> None:
    """Fills the table, and makes the laps, each once its file is there; tells the seconds of each step."""
    with ps.ParameterServerStrategy(devices=["cpu:0"]) as strategy, strategy.scope():
        table = ps.dynamic_embedding.get_variable("table", dim=DIM)
        optimizer = ps.optimizers.SGD(0.01)
        filled = work.filled()
        for first in range(0, work.rows, FILLED):
            keys = filled[first : first + FILLED]
            table.scatter_add(ps.IndexedSlices(np.zeros((len(keys), DIM), "float32"), keys))
        gradient = np.ones((BATCH, DIM), "float32")
        slept = 0.0

        def step(keys: Any) -> None:
            nonlocal slept
            rows = table.lookup(keys)
            began = time.perf_counter()
            time.sleep(work.pause / 1e3)
            slept = time.perf_counter() - began
            optimizer.apply_gradients([(rows.gradient(gradient[: len(rows.ids)]), table)])

        named: Any = Unhinted(table.prefetch) if system == "unhinted" else table
        options = ps.InputOptions(prefetch={named: lambda keys: keys})
        data = ps.ArrayDataset(work.keys()).batch(WORKERS * BATCH)
        batches = iter(strategy.experimental_distribute_dataset(data, options))
        table.lookup([0])  # waits until all rows are there
        for lap in range(1 + work.laps):
            wait_for(directory / f"{system} {lap}")
            seconds = list(_laps(work.steps, batches, lambda keys: strategy.run(step, args=(keys,)), lambda: slept))
            say(system, seconds[WARM:])
        wait_for(directory / f"{system} {1 + work.laps}")
        total = sum(float(rows.sum(dtype=np.float64)) for rows in _rows(table, filled))
        say(system, [total])


def wait_for(file: Path) -> None:
    """Waits until a file is there."""
    while not file.exists():
        time.sleep(0.01)


def _laps(
    steps: int, batches: Iterator[Any], run: Callable[[Any], object], slept: Callable[[], float]
) -> Iterator[float]:
    """Makes steps; yields the seconds of each, from batch to batch, without those in which it computed."""
    began = time.perf_counter()
    for _ in range(steps):
        run(next(batches))
        now = time.perf_counter()
        yield now - began - slept()
        began = now


def _rows(table: Any, filled: Any) -> Iterator[Any]:
    """Yields all rows, in the order in which they lie in a file."""
    for first in range(0, len(filled), FILLED):
        yield table.lookup(filled[first : first + FILLED]).values


def say(system: str, numbers: list[float]) -> None:
    """Tells the process that measures."""
    print(system, json.dumps(numbers), flush=True)


# ---- Where it is measured ----


class Job:
    """A server and its workers; a context manager.

    Args:
        work: what they do.
        system: one of `SYSTEMS`.
        directory: where laps are begun.
        path: where a table may lie.
    """

    def __init__(self, work: Work, system: str, directory: Path, path: str) -> None:
        self._system, self._directory = system, directory
        self._said: queue.Queue[list[float]] = queue.Queue()
        self._url = ""
        memory = f"{work.rows * DIM * 4 // work.share}B"
        self._cluster = Cluster(
            sink=self._hear,
            ps=1,
            workers=WORKERS,
            chief="none",
            script=str(Path(__file__)),
            args=("--as-worker", json.dumps(asdict(work)), system, str(directory)),
            server=ServerOptions() if system == "memory" else ServerOptions(tier_path=path, tier_memory=memory),
            metrics_port=0,
        )

    def __enter__(self) -> Job:
        self._cluster.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._cluster.stop()

    def _hear(self, line: Line) -> None:
        if SERVES in line.text and line.task == Task("ps", 0):
            self._url = line.text.rpartition(" ")[2]
        if not line.error and line.text.startswith(self._system + " ["):
            self._said.put(json.loads(line.text.removeprefix(self._system)))

    def lap(self, number: int) -> list[float]:
        """Has the workers make a lap; returns the seconds of the steps of both, and behind the last lap their sums."""
        (self._directory / f"{self._system} {number}").touch()
        return [each for _ in range(WORKERS) for each in self._said.get(timeout=SECONDS)]

    def pages(self) -> dict[str, float]:
        """Returns the pages that its server has counted so far, by outcome."""
        with urlopen(self._url, timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        words = [line.split('"') for line in lines if line.startswith("paramserver_server_tier_pages_total{")]
        return {outcome: float(count.removeprefix("} ")) for _, outcome, count in words}


def measure(work: Work, path: str) -> dict[str, Any]:
    """Measures the jobs in turns."""
    times: dict[str, list[list[float]]] = {name: [] for name in SYSTEMS}
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        jobs = {name: stack.enter_context(Job(work, name, Path(directory), path)) for name in SYSTEMS}
        for job in jobs.values():
            job.lap(0)
        before = {name: job.pages() for name, job in jobs.items()}
        for lap in range(1, 1 + work.laps):
            for name, job in jobs.items():
                times[name].append(job.lap(lap))
        pages = {name: {o: n - before[name][o] for o, n in job.pages().items()} for name, job in jobs.items()}
        sums = {name: job.lap(1 + work.laps) for name, job in jobs.items()}
    if len({each for found in sums.values() for each in found}) != 1:
        raise click.ClickException(f"the tables are not the same: their sums are {sums}")
    medians = {name: 1e3 * statistics.median(second for lap in laps for second in lap) for name, laps in times.items()}
    steps = work.laps * work.steps
    return {
        **asdict(work),
        **{f"{name}, ms": round(found, 2) for name, found in medians.items()},
        **{f"{name}, ms of laps": [round(1e3 * statistics.median(lap), 1) for lap in times[name]] for name in SYSTEMS},
        **{f"{name}, ratio": round(medians[name] / medians["memory"], 2) for name in SYSTEMS[1:]},
        **{f"{name}, {o}": round(n / steps) for name in SYSTEMS[1:] for o, n in pages[name].items()},
        "table, MiB": work.rows * DIM * 4 >> 20,
        "bound, MiB": work.rows * DIM * 4 // work.share >> 20,
        "load": round(os.getloadavg()[0], 1),
    }


@click.command(help=(__doc__ or "").partition("\n\n")[0])
@click.option("--path", default=tempfile.gettempdir(), show_default=True, help="A directory on the disk.")
@click.option("--rows", default=1_000_000, show_default=True, help="Rows of the table, of 64 float32.")
@click.option("--share", default=10, show_default=True, help="How many times larger than its memory it is.")
@click.option("--zipf", default=1.05, show_default=True, help="Exponent of the keys' frequencies.")
@click.option("--order", "orders", multiple=True, default=("frequency", "random"), show_default=True)
@click.option("--pause", default=50.0, show_default=True, help="Milliseconds for which a step computes.")
@click.option("--laps", default=5, show_default=True, help="Laps that are measured; one more comes before.")
@click.option("--steps", default=15, show_default=True, help="Steps of a lap, of which the first three do not count.")
@click.option("--json", "file", type=click.Path(path_type=Path), help="Write the figures there; times are in ms.")
@click.option("--as-worker", "said", nargs=3, hidden=True)
def main(
    path: str,
    rows: int,
    share: int,
    zipf: float,
    orders: tuple[str, ...],
    pause: float,
    laps: int,
    steps: int,
    file: Path | None,
    said: tuple[str, str, str] | None,
) -> None:
    """Measures, or is a worker of a job that is measured."""
    if said:
        train(Work(**json.loads(said[0])), said[1], Path(said[2]))
        return
    found = []
    for order in orders:
        figures = measure(Work(rows, share, zipf, order, pause, laps, steps), path)
        found.append(figures)
        for name, value in figures.items():
            click.echo(f"{name:25} {value}")
        reached = "reached" if figures["tier, ratio"] <= AIM else "missed"
        click.echo(f"{'aim':25} {reached}: at most {AIM}\n")
    if file:
        file.write_text(json.dumps({"format": 1, "machine": machine(), "tiers": found}, indent=1))


if __name__ == "__main__":
    main()
