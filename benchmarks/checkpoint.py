"""Checkpoints: for how long they stop training, and their rates beside those of plain safetensors files.

    python benchmarks/checkpoint.py             1 GB on two servers
    python benchmarks/checkpoint.py --quick     100 MB, for a first look
    python benchmarks/checkpoint.py --device gpu:0     of variables on a GPU

A cluster of real processes on this machine: two servers, and a worker that is chief. In each lap the worker makes
rounds of which each updates all variables; saves, and waits until the checkpoint is complete; saves, and makes rounds
until the manifest is there; restores; and, itself, writes the same bytes with `safetensors.numpy.save_file`, synced to
the disk, and reads them with `load_file`. So all sides see the same machine, in turns.

- The rate of a save is counted from its call to the manifest, that of a restore to its end; files are in the page cache
  for both readers.
- A round stops for as long as the largest one during a save is above the median of those without one.
- What `save` itself takes is from its call to its return, while rounds go on.

`--json FILE` writes `{"format", "machine", "nbytes", "seconds", "figures"}`.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
from figures import machine, publish
from measures import spread
from rich.console import Console
from rich.table import Table
from safetensors.numpy import load_file, save_file

import psclient as ps
from psclient._src.launch.cluster import Cluster
from psclient._src.processes.output import Line
from pswire.checkpoint.manifest import MANIFEST
from pswire.server_options import ServerOptions

FORMAT = 1
SECONDS = 3600
"""How long one cluster may take."""

VARIABLES = 20
NBYTES, QUICK_NBYTES = 1_000_000_000, 100_000_000
LAPS, QUICK_LAPS = 5, 2
ROUNDS, WARM = 10, 6
RATE = 1e-3

STOP_SECONDS, RATIO = 0.25, 0.6
"""What has to be reached."""


# ---- In the worker ----


class Worker:
    """Makes the rounds, the checkpoints and the plain files; tells the launcher of each lap.

    Args:
        nbytes: of all variables together; they are float32.
        root: the servers' checkpoint root.
    """

    def __init__(self, nbytes: int, root: Path) -> None:
        self._root = root
        self._strategy = ps.ParameterServerStrategy(devices=["cpu:0"])
        size = nbytes // 4 // VARIABLES
        with self._strategy.scope():
            self._variables = [
                ps.Variable(np.full(size, index, "float32"), name=f"v{index}") for index in range(VARIABLES)
            ]
            self._checkpoint = ps.train.Checkpoint(variables=self._variables)
        self._plain = {f"v{index}": np.full(size, index, "float32") for index in range(VARIABLES)}

    def run(self, laps: int) -> None:
        """Everything, to its end."""
        with self._strategy:
            for _ in range(WARM):  # the servers compile their kernels meanwhile
                self._round()
            for lap in range(-1, laps):
                said = self._lap()
                if lap >= 0:  # the first one touches memory and files
                    print(json.dumps(said), flush=True)

    def _lap(self) -> dict[str, Any]:
        said: dict[str, Any] = {"round": [self._round() for _ in range(ROUNDS)]}
        said["save"] = _seconds(self._save_and_wait)
        said["call"], said["round while saving"] = self._save_and_go_on()
        said["restore"] = _seconds(self._restore)
        plain = self._root / "plain.safetensors"
        said["save_file"] = _seconds(lambda: self._write_plain(plain))
        said["load_file"] = _seconds(lambda: load_file(plain))
        shutil.rmtree(self._root / "run")
        plain.unlink()
        return said

    def _round(self) -> float:
        """Updates all that there is, and reads one number of it, which is there when the round is over."""
        start = time.perf_counter()
        with self._strategy.scope():
            for variable in self._variables:
                variable.assign_sub(RATE)
            self._strategy.reduce("sum", np.float32(0), axis=None)
        return time.perf_counter() - start

    def _save_and_wait(self) -> None:
        self._checkpoint.save("run/ckpt")
        self._checkpoint.sync()

    def _save_and_go_on(self) -> tuple[float, list[float]]:
        start = time.perf_counter()
        path = self._checkpoint.save("run/ckpt")
        call = time.perf_counter() - start
        rounds = [self._round()]
        while not (self._root / path / MANIFEST).exists():
            rounds.append(self._round())
        self._checkpoint.sync()
        return call, rounds

    def _restore(self) -> None:
        self._checkpoint.restore("run").assert_consumed()

    def _write_plain(self, path: Path) -> None:
        save_file(self._plain, path)
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


# ---- In the launcher ----


def measure(
    nbytes: int, laps: int, servers: int, device: str, directory: Path, console: Console
) -> dict[str, list[float]]:
    """Seconds of each kind of work; of rounds one figure for each, of all else one for each lap.

    Raises:
        ClickException: a task failed.
    """
    seconds: dict[str, list[float]] = {}

    def hear(line: Line) -> None:
        if line.error or not line.text.startswith("{"):
            return
        said = json.loads(line.text)
        said["stop"] = max(said["round while saving"]) - statistics.median(said["round"])
        for name, value in said.items():
            seconds.setdefault(name, []).extend(value if isinstance(value, list) else [value])

    with tempfile.TemporaryDirectory(dir=directory) as root:
        args = ("--as-worker", root, "--nbytes", str(nbytes), "--laps", str(laps))
        options = ServerOptions(device=device, checkpoint_root=root)
        cluster = Cluster(
            sink=hear, ps=servers, workers=1, chief="none", script=str(Path(__file__)), args=args, server=options
        )
        with console.status(f"{laps} laps of {nbytes / 1e6:.0f} MB on {servers} servers"), cluster:
            outcome = cluster.wait(SECONDS)
    if outcome.code:
        raise click.ClickException(outcome.report)
    return seconds


# ---- Results ----


@dataclass(frozen=True)
class Figure:
    """One figure, and what it should be.

    Attributes:
        words: what it is.
        value: what was found.
        least, most: what it should be at least, or at most; None where nobody has said.
    """

    words: str
    value: float
    least: float | None = None
    most: float | None = None

    @property
    def limit(self) -> str:
        """In words, "" where there is none."""
        least = "" if self.least is None else f">= {self.least:g}"
        return least if self.most is None else f"<= {self.most:g}"

    @property
    def verdict(self) -> str:
        """`missed`, or nothing."""
        low = self.least is not None and self.value < self.least
        return "missed" if low or (self.most is not None and self.value > self.most) else ""


def figures(seconds: dict[str, list[float]], nbytes: int) -> Iterator[Figure]:
    """From medians of one run."""
    median = {name: statistics.median(values) for name, values in seconds.items()}
    yield Figure("training stops, s", median["stop"], most=STOP_SECONDS)
    yield Figure("training stops at most, s", max(seconds["stop"]))
    yield Figure("the call of save, s", median["call"], most=STOP_SECONDS)
    for ours, plain in (("save", "save_file"), ("restore", "load_file")):
        yield Figure(f"{ours}, MB/s", nbytes / median[ours] / 1e6)
        yield Figure(f"{plain}, MB/s", nbytes / median[plain] / 1e6)
        yield Figure(f"{ours} / {plain}", median[plain] / median[ours], least=RATIO)


def tables(seconds: dict[str, list[float]], found: list[Figure], nbytes: int, servers: int) -> Iterator[Table]:
    """What a person reads: seconds of each kind of work, and the figures."""
    title = f"{nbytes / 1e6:.0f} MB in {VARIABLES} variables on {servers} servers; seconds"
    times = Table("work", "min", "median", "p90", "count", title=title, title_justify="left")
    for name, values in seconds.items():
        times.add_row(name, *(f"{value:.3g}" for value in spread(values, 1.0).values()), str(len(values)))
    yield times
    judged = Table("figure", "found", "limit", "", title="Medians of one run", title_justify="left")
    for each in found:
        judged.add_row(each.words, f"{each.value:.3g}", each.limit, each.verdict)
    yield judged


@click.command(help=(__doc__ or "").partition("\n\n")[0])
@click.option("--quick", is_flag=True, help=f"{QUICK_LAPS} laps of {QUICK_NBYTES // 10**6} MB.")
@click.option("--nbytes", type=click.IntRange(4 * VARIABLES), help=f"Of all variables [default: {NBYTES}].")
@click.option("--laps", type=click.IntRange(1), help=f"How many [default: {LAPS}].")
@click.option("--servers", type=click.IntRange(1), default=2, show_default=True)
@click.option("--device", default="cpu", show_default=True, help="The servers': cpu, or gpu:N.")
@click.option(
    "--directory",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="On the disk to measure [default: that for temporary files].",
)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures here.")
@click.option("--as-worker", "root", type=click.Path(path_type=Path), hidden=True)
def main(
    quick: bool,
    nbytes: int | None,
    laps: int | None,
    servers: int,
    device: str,
    directory: Path | None,
    json_file: Path | None,
    root: Path | None,
) -> None:
    """Measures, or is the worker of the cluster that is measured."""
    nbytes, laps = nbytes or (QUICK_NBYTES if quick else NBYTES), laps or (QUICK_LAPS if quick else LAPS)
    if root:
        Worker(nbytes, root).run(laps)
        return
    console = Console()
    seconds = measure(nbytes, laps, servers, device, directory or Path(tempfile.gettempdir()), console)
    found = list(figures(seconds, nbytes))
    report = {
        "format": FORMAT,
        "machine": machine(),
        "nbytes": nbytes,
        "seconds": {name: spread(values, 1.0) for name, values in seconds.items()},
        "figures": {each.words: each.value for each in found},
    }
    publish(console, report, tables(seconds, found, nbytes, servers), json_file, None)


if __name__ == "__main__":
    main()
