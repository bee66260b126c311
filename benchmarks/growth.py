"""What grows with a job: variables, workers, servers, the size of a variable; and how long a start takes.

    python benchmarks/growth.py                        everything
    python benchmarks/growth.py --quick                the same with smaller numbers, for a first look
    python benchmarks/growth.py --part variables       one part alone

Each part starts clusters of real processes on this machine, on the shm transport:

- variables: many variables of 4 KB. Creation is from the scope's begin to its end, which sends them; then the first
  step with SGD and its rounds, and the first step with Adam, which creates its slots.
- workers, servers: rounds of 4 KB in 10 variables, as `benchmarks/round.py` makes them.
- large: one variable, beside a copy of the same bytes into fresh memory, which is what its creation needs at least.
- rejoin: a worker of two ends without a word and is started again. What it needs is told from the time on at
  which it has its strategy: creation, reading all variables, and the step that it is taken in with.
- restore: a checkpoint into its variables, beside safetensors' `load_file` of the same bytes, in turns.

`--json FILE` writes `{"format", "machine", "parts"}`; times are in seconds there.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
import round as rounds
from figures import machine, publish
from rich.console import Console
from rich.table import Table
from safetensors.numpy import load_file, save_file

import psclient as ps
from psclient._src.launch.cluster import Cluster
from psclient._src.processes.output import Line
from pswire.cluster import Task
from pswire.server_options import ServerOptions

FORMAT = 1
SECONDS = 3600
"""How long one cluster may take."""

TRANSPORT = "shm"
NBYTES = 4096
"""Of each of many variables."""

STEPS = 20
"""Rounds that are measured beside the first one; the half of them in a quick run."""

LAPS = 5
FIRST = Task("worker", 0)
RATE = 2.0**-10

Said = dict[str, Any]
"""One row: what was measured, by its name; seconds, but for what is named otherwise."""


def seconds(work: Callable[[], object]) -> float:
    """How long some work takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


# ---- In a worker ----


def create(strategy: ps.ParameterServerStrategy, count: int) -> list[ps.Variable]:
    """Creates variables of `NBYTES` each, in a scope of their own."""
    with strategy.scope():
        return [ps.Variable(np.full(NBYTES // 4, 1.0, "float32"), name=f"v{index}") for index in range(count)]


def make_step(strategy: ps.ParameterServerStrategy, variables: list[ps.Variable], optimizer: Any) -> Callable[[], None]:
    """A step: a round of all variables, whose new values come back."""
    gradient = np.full(NBYTES // 4, RATE, "float32")

    def step() -> None:
        strategy.run(optimizer.apply_gradients, args=([(gradient, variable) for variable in variables],))
        for variable in variables:
            variable.numpy()

    return step


def many_variables(strategy: ps.ParameterServerStrategy, count: int, laps: int) -> Iterator[Said]:
    """Creates variables, and makes steps with them."""
    found: list[ps.Variable] = []
    said: Said = {"variables": count, "create": seconds(lambda: found.extend(create(strategy, count)))}
    for name, optimizer in (("SGD", ps.optimizers.SGD(RATE)), ("Adam", ps.optimizers.Adam(RATE))):
        step = make_step(strategy, found, optimizer)
        said[f"first step, {name}"] = seconds(step)
        said[f"round, {name}"] = statistics.median(seconds(step) for _ in range(laps))
    yield said


def large_variable(strategy: ps.ParameterServerStrategy, nbytes: int, laps: int) -> Iterator[Said]:
    """Creates large variables, each beside a copy of its bytes into fresh memory."""
    value, kept = np.ones(nbytes // 4, "float32"), []

    def create_one() -> None:
        with strategy.scope():
            ps.Variable(value, name="large")

    def copy_one() -> None:
        kept.append(value.copy())  # kept: the next one gets other memory

    creations, copies = zip(*((seconds(create_one), seconds(copy_one)) for _ in range(laps)), strict=True)
    created, copied = statistics.median(creations), statistics.median(copies)
    yield {"MB": nbytes / 1e6, "create": created, "copy": copied, "copy / create": copied / created}


def rejoining(strategy: ps.ParameterServerStrategy, count: int, root: Path) -> Iterator[Said]:
    """Two workers make steps; the second one ends, and comes back."""
    marker, over = root / "ended", root / "over"
    back = marker.exists() and strategy.task != FIRST
    found: list[ps.Variable] = []
    created = seconds(lambda: found.extend(create(strategy, count)))
    read = seconds(lambda: [variable.numpy() for variable in found])
    step = make_step(strategy, found, ps.optimizers.SGD(RATE))
    first = seconds(step)
    if back:
        yield {"variables": count, "create": created, "read": read, "step": first, "in all": created + read + first}
        over.touch()
    while strategy.reduce("sum", np.float32(over.exists()), axis=None) == 0:
        if strategy.task != FIRST and not back:
            marker.touch()
            os._exit(1)
        step()


def restoring(strategy: ps.ParameterServerStrategy, nbytes: int, laps: int, root: Path) -> Iterator[Said]:
    """Restores a checkpoint, in turns with `load_file` of the same bytes."""
    values = [np.full(nbytes // 80, index, "float32") for index in range(20)]
    with strategy.scope():
        variables = [ps.Variable(value, name=f"v{index}") for index, value in enumerate(values)]
    checkpoint = ps.train.Checkpoint(variables=variables)
    checkpoint.save("run/ckpt")
    checkpoint.sync()
    plain = root / "plain.safetensors"
    save_file({f"v{index}": value for index, value in enumerate(values)}, plain)
    restored, loaded = [], []
    for lap in range(-1, laps):
        times = seconds(lambda: checkpoint.restore("run").assert_consumed()), seconds(lambda: load_file(plain))
        if lap >= 0:  # the first one touches memory and files
            restored.append(times[0])
            loaded.append(times[1])
    found = {"restore": statistics.median(restored), "load_file": statistics.median(loaded)}
    yield {"MB": nbytes / 1e6, **found, "load_file / restore": found["load_file"] / found["restore"]}


def be_worker(part: str, size: int, laps: int, root: Path) -> None:
    """Does one part of the work, and tells the launcher of it."""
    work: dict[str, Callable[[ps.ParameterServerStrategy], Iterator[Said]]] = {
        "variables": lambda strategy: many_variables(strategy, size, laps),
        "large": lambda strategy: large_variable(strategy, size, laps),
        "rejoin": lambda strategy: rejoining(strategy, size, root),
        "restore": lambda strategy: restoring(strategy, size, laps, root),
    }
    with ps.ParameterServerStrategy(devices=["cpu:0"]) as strategy:
        for said in work[part](strategy):
            print(json.dumps(said), flush=True)


# ---- In the launcher ----


def measure(part: str, size: int, laps: int, workers: int = 1, servers: int = 1) -> list[Said]:
    """Starts a cluster that does one part of the work; returns what it says.

    Raises:
        ClickException: a task failed.
    """
    said: list[Said] = []

    def hear(line: Line) -> None:
        if not line.error and line.text.startswith("{"):
            said.append(json.loads(line.text))

    root = tempfile.mkdtemp()
    try:
        args = ("--as-worker", root, "--part", part, "--size", str(size), "--laps", str(laps))
        cluster = Cluster(
            sink=hear,
            ps=servers,
            workers=workers,
            chief="none",
            transport=TRANSPORT,
            script=str(Path(__file__)),
            args=args,
            restarts=workers - 1,
            server=ServerOptions(checkpoint_root=root),
        )
        with cluster:
            outcome = cluster.wait(SECONDS)
    finally:
        shutil.rmtree(root)
    if outcome.code:
        raise click.ClickException(f"{part}: {outcome.report}")
    return said


def measure_rounds(workers: int, servers: int, count: int) -> list[Said]:
    """Rounds of 4 KB, as `benchmarks/round.py` makes them."""
    setting = rounds.Setting(TRANSPORT, "worker", workers, servers, "sgd", "tuned", "token", "arrays", "none")
    found = rounds.measure(setting, rounds.Options(("4KB",), False, count, "greedy"))["4KB"]
    cpu = statistics.median(found.server_cpu)
    return [{"workers": workers, "servers": servers, "round": statistics.median(found.seconds), "server CPU": cpu}]


def variables(quick: bool) -> Iterator[list[Said]]:
    """More and more variables."""
    for count in (1, 10, 100) if quick else (1, 10, 100, 1000, 5000):
        yield measure("variables", count, STEPS // (1 + quick))


def workers(quick: bool) -> Iterator[list[Said]]:
    """More and more workers, on one server."""
    for count in (1, 2) if quick else (1, 2, 4, 8, 16):
        yield measure_rounds(count, 1, 20 if quick else 200)


def servers(quick: bool) -> Iterator[list[Said]]:
    """More and more servers, and two workers."""
    for count in (1, 2) if quick else (1, 2, 4):
        yield measure_rounds(2, count, 20 if quick else 200)


def sizes(quick: bool) -> tuple[int, ...]:
    """Bytes of what is large."""
    return (100_000_000,) if quick else (100_000_000, 1_000_000_000)


PARTS: dict[str, Callable[[bool], Iterator[list[Said]]]] = {
    "variables": variables,
    "workers": workers,
    "servers": servers,
    "large": lambda quick: (measure("large", nbytes, 2) for nbytes in sizes(quick)),
    "rejoin": lambda quick: iter([measure("rejoin", 100 if quick else 2000, 1, workers=2)]),
    "restore": lambda quick: (measure("restore", nbytes, LAPS) for nbytes in sizes(quick)),
}
"""For each part what is measured, one cluster after the other."""


# ---- Results ----

PLAIN = ("variables", "workers", "servers", "MB")
"""What counts something."""


def tables(parts: dict[str, list[Said]]) -> Iterator[Table]:
    """What a person reads: times in ms."""
    for part, rows in parts.items():
        table = Table(title=f"{part}; ms", title_justify="left")
        for name in rows[0]:
            table.add_column(name, justify="right", no_wrap=True)
        for row in rows:
            table.add_row(*(_cell(name, value) for name, value in row.items()))
        yield table


def _cell(name: str, value: float) -> str:
    if name in PLAIN:
        return f"{value:g}"
    return f"{value:.2f}" if " / " in name else f"{1e3 * value:.4g}"


@click.command(help=(__doc__ or "").partition("\n\n")[0])
@click.option("--part", "chosen", multiple=True, type=click.Choice(list(PARTS)), help="What to measure [default: all].")
@click.option("--quick", is_flag=True, help="Smaller numbers.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures here.")
@click.option("--as-worker", "root", type=click.Path(path_type=Path), hidden=True)
@click.option("--size", type=int, default=0, hidden=True)
@click.option("--laps", type=int, default=0, hidden=True)
def main(chosen: Sequence[str], quick: bool, json_file: Path | None, root: Path | None, size: int, laps: int) -> None:
    """Measures, or is a worker of a cluster that is measured."""
    if root:
        be_worker(chosen[0], size, laps, root)
        return
    console = Console()
    parts: dict[str, list[Said]] = {}
    for part in chosen or PARTS:
        with console.status(part):
            parts[part] = [row for rows in PARTS[part](quick) for row in rows]
    report = {"format": FORMAT, "machine": machine(), "parts": parts}
    publish(console, report, tables(parts), json_file, None)


if __name__ == "__main__":
    main()
