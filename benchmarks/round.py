"""Time of a synchronous round: gradients out, update on the servers, new values back on every worker.

    python benchmarks/round.py             everything
    python benchmarks/round.py --quick     the same in a few seconds, for a first look
    make bench

Each cluster is one of real processes on this machine. The clusters take turns with measurements of memcpy
and of plain TCP on loopback, several times over, so that all sides see the same machine. A round begins
when a worker has its gradients and ends when it has the values of all variables.

`--json FILE` writes `{"format", "machine", "limits", "rounds"}`; docs/performance.md says what is in it.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, get_args

import click
import numpy as np
from figures import draw, machine, spread, tables
from limits import Limits
from rich.console import Console

import psclient as ps
from psclient.launch import Cluster
from psclient.placement import PsStrategy
from psclient.relay import Line
from pswire.cluster import Task

FORMAT = 1
SECONDS = 600
"""How long the rounds of one cluster may take."""

PLOT = Path(__file__).resolve().parent.parent / "docs" / "round.png"
CHIEFS = {"own": "driver", "worker": "none"}
"""Who is chief, a task of its own or worker 0, and what a launch calls that."""


@dataclass(frozen=True)
class Model:
    """What a round moves.

    Attributes:
        nbytes: of all variables together; they are float32.
        variables: how many.
        rounds: how many are measured at a time.
        warm: how many come before, not measured.
        largest: the first variable's part of the bytes; 0 makes all equal.
    """

    nbytes: int
    variables: int
    rounds: int
    warm: int
    largest: float = 0.0

    def shapes(self) -> list[tuple[int]]:
        """One for each variable; the first takes the rest."""
        total, others = self.nbytes // 4, self.variables - 1
        size = int(total * (1 - self.largest)) // others if self.largest else total // self.variables
        return [(total - others * size,), *[(size,)] * others]


MODELS = {
    "4KB": Model(4_000, 10, 200, 30),
    "4MB": Model(4_000_000, 20, 60, 15),
    "100MB": Model(100_000_000, 50, 12, 4),
    "skewed": Model(100_000_000, 50, 12, 4, 0.9),
}

QUICK = 10
"""With `--quick`, this many times fewer rounds are measured, and at least `FEWEST`."""

FEWEST = 3


@dataclass(frozen=True)
class Setting:
    """A cluster to measure.

    Attributes:
        workers, servers: how many.
        chief: a key of `CHIEFS`.
    """

    workers: int
    servers: int
    chief: str

    def __str__(self) -> str:
        chief = "a chief of its own" if self.chief == "own" else "worker 0 as chief"
        return f"{self.workers} workers, {self.servers} servers, {chief}"


@dataclass
class Measured:
    """What was measured of one model in one cluster.

    Attributes:
        seconds: of each round, as worker 0 sees it.
        rss: resident bytes of the largest server, after each series of rounds.
    """

    seconds: list[float] = field(default_factory=list)
    rss: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Options:
    """What every cluster is told.

    Attributes:
        sizes: keys of `MODELS`.
        optimizer: "sgd" or "adam".
        quick: whether to measure a few rounds only.
        ps_strategy: which server holds a variable.
    """

    sizes: tuple[str, ...]
    optimizer: str
    quick: bool
    ps_strategy: PsStrategy

    def args(self) -> tuple[str, ...]:
        """The arguments of the worker script, which is this file."""
        sizes = [arg for size in self.sizes for arg in ("--sizes", size)]
        chosen = ("--optimizer", self.optimizer, "--ps-strategy", self.ps_strategy)
        return ("--as-worker", *sizes, *chosen, *["--quick"] * self.quick)


# ---- In a worker ----


def work(options: Options) -> None:
    """Makes rounds of each model; worker 0 prints a JSON line for each."""
    with ps.ParameterServerStrategy(devices=["cpu:0"], ps_strategy=options.ps_strategy) as strategy, strategy.scope():
        for size in options.sizes:
            seconds = _rounds(strategy, size, options)
            if strategy.task == Task("worker", 0):
                print(json.dumps({"size": size, "seconds": seconds}), flush=True)


def _rounds(strategy: ps.ParameterServerStrategy, size: str, options: Options) -> list[float]:
    model = MODELS[size]
    variables = [ps.Variable(np.zeros(s, "float32"), name=f"{size}/{i}") for i, s in enumerate(model.shapes())]
    gradients = [np.full(s, 1e-3, "float32") for s in model.shapes()]
    optimizer = ps.optimizers.Adam(1e-3) if options.optimizer == "adam" else ps.optimizers.SGD(0.1)
    seconds = []
    count = max(model.rounds // QUICK, FEWEST) if options.quick else model.rounds
    for _ in range(model.warm + count):
        start = time.perf_counter()
        strategy.run(optimizer.apply_gradients, args=(list(zip(gradients, variables, strict=True)),))
        for variable in variables:
            variable.numpy()
        seconds.append(time.perf_counter() - start)
    return seconds[model.warm :]


# ---- In the launcher ----


def measure(setting: Setting, options: Options) -> dict[str, Measured]:
    """Starts a cluster, has it make rounds of each model, and ends it.

    Raises:
        ClickException: a task failed.
    """
    found: dict[str, Measured] = {}

    def hear(line: Line) -> None:
        if line.task == Task("worker", 0) and not line.error and line.text.startswith("{"):
            said = json.loads(line.text)
            found[said["size"]] = Measured(said["seconds"], [_rss(cluster)])

    cluster = Cluster(
        sink=hear,
        ps=setting.servers,
        workers=setting.workers,
        chief=CHIEFS[setting.chief],
        script=str(Path(__file__)),
        args=options.args(),
    )
    with cluster:
        outcome = cluster.wait(SECONDS)
    if outcome.code:
        raise click.ClickException(f"{setting}: {outcome.report}")
    return found


def _rss(cluster: Cluster) -> int:
    """Resident bytes of the largest server; 0 where the system does not say."""
    found = [0]
    for task, process in cluster.processes.items():
        status = Path(f"/proc/{process.pid}/statm")
        if task.job == "ps" and status.exists():
            found.append(int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
    return max(found)


def laps(
    settings: Sequence[Setting], options: Options, repeats: int, console: Console
) -> tuple[Limits, dict[tuple[str, Setting], Measured]]:
    """Measures every cluster several times, in turns with the limits."""
    limits = Limits()
    total: dict[tuple[str, Setting], Measured] = {}
    limits.measure()
    for lap, setting in product(range(repeats), settings):
        with console.status(f"lap {lap + 1} of {repeats}: {setting}"):
            for size, measured in measure(setting, options).items():
                of = total.setdefault((size, setting), Measured())
                of.seconds += measured.seconds
                of.rss += measured.rss
            limits.measure()
    return limits, total


# ---- Results ----


def report(limits: Limits, total: dict[tuple[str, Setting], Measured], options: Options) -> dict[str, Any]:
    """Everything as it is written with `--json`."""
    tcp, memcpy = statistics.median(limits.tcp), statistics.median(limits.memcpy)
    return {
        "format": FORMAT,
        "machine": machine(),
        "limits": {
            "memcpy_gb_per_s": spread(limits.memcpy, 1e-9),
            "tcp_gb_per_s": spread(limits.tcp, 1e-9),
            "tcp_round_trip_us": spread(limits.ping, 1e6),
        },
        "rounds": [
            row(size, setting, total[size, setting], options, tcp, memcpy)
            for size in options.sizes
            for setting in [setting for found, setting in total if found == size]
        ],
    }


def row(size: str, setting: Setting, measured: Measured, options: Options, tcp: float, memcpy: float) -> dict[str, Any]:
    """One line of the table."""
    model = MODELS[size]
    moved = 2 * model.nbytes * setting.workers
    rate = moved / statistics.median(measured.seconds)
    return {
        "size": size,
        "nbytes": model.nbytes,
        "variables": model.variables,
        "workers": setting.workers,
        "servers": setting.servers,
        "chief": setting.chief,
        "lane": "grpc",
        "optimizer": options.optimizer,
        "ps_strategy": options.ps_strategy,
        "rounds": len(measured.seconds),
        "ms": spread(measured.seconds, 1e3),
        "gb_per_s": rate / 1e9,
        "to_tcp": rate / tcp,
        "to_memcpy": rate / memcpy,
        "server_rss_mb": max(measured.rss) / 1e6,
    }


@click.command(help=(__doc__ or "").partition("\n\n")[0])
@click.option(
    "--sizes", multiple=True, type=click.Choice(list(MODELS)), help="Models to measure [default: all but skewed]."
)
@click.option("--workers", multiple=True, type=click.IntRange(1), default=(1, 2), show_default=True)
@click.option("--servers", multiple=True, type=click.IntRange(1), default=(1, 2), show_default=True)
@click.option("--chief", multiple=True, type=click.Choice(list(CHIEFS)), default=tuple(CHIEFS), show_default=True)
@click.option("--optimizer", type=click.Choice(["sgd", "adam"]), default="sgd", show_default=True)
@click.option("--ps-strategy", type=click.Choice(get_args(PsStrategy)), default="greedy", show_default=True)
@click.option("--repeats", type=click.IntRange(1), help="How many times over [default: 3, with --quick 1].")
@click.option("--quick", is_flag=True, help="A few rounds only.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures here.")
@click.option("--plot", is_flag=True, help="Also draw docs/round.png; needs matplotlib, which the extra `bench` has.")
@click.option("--as-worker", is_flag=True, hidden=True)
def main(
    sizes: tuple[str, ...],
    workers: tuple[int, ...],
    servers: tuple[int, ...],
    chief: tuple[str, ...],
    optimizer: str,
    ps_strategy: PsStrategy,
    repeats: int | None,
    quick: bool,
    json_file: Path | None,
    plot: bool,
    as_worker: bool,
) -> None:
    """Measures, or is a worker of a cluster that is measured."""
    equal = tuple(name for name, model in MODELS.items() if not model.largest)
    options = Options(sizes or equal, optimizer, quick, ps_strategy)
    if as_worker:
        work(options)
        return
    console = Console()
    settings = [Setting(*each) for each in product(workers, servers, chief)]
    limits, total = laps(settings, options, repeats or (1 if quick else 3), console)
    found = report(limits, total, options)
    for table in tables(found):
        console.print(table)
    if json_file:
        json_file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if plot:
        try:
            draw(found, PLOT)
        except ImportError:
            console.print("not drawn: matplotlib is not installed; pip install 'paramserver[bench]'")


if __name__ == "__main__":
    main()
