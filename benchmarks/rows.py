"""Time of a step that trains some rows of a large variable: gradients of rows out, the rows of the next batch back.

    python benchmarks/rows.py                                  every transport, SGD and Adagrad
    python benchmarks/rows.py --python peers/bin/python        and the peers that this Python has, in turns
    python benchmarks/rows.py --zipf 1.05 --optimizer adam --optimizer closedadam --optimizer lazyadam    what rows miss
    python benchmarks/rows.py --table static --table dynamic --transport shm             and of a table without a size
    python benchmarks/rows.py --device cpu --device gpu:0      and with the table on a GPU of the server
    python benchmarks/rows.py --quick                          a few steps of each

One server, two workers, all real processes on this machine. In a step of ours the worker has the rows of its batch,
sends a gradient for each, and has the rows of its next batch as they are after the round. The peers do the same in one
call, or with `push` only the first half of it: torch RPC, actors of Ray, and TensorFlow's parameter server. The sum of
the table is checked at the end. Adagrad as all have it: the rows for one place are summed first. Wake-ups are how often
threads of all processes of ours wait in a step.

`--json FILE` writes `{"format", "machine", "rows", "excluded"}`; docs/lab/performance.md says what is in it.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
from figures import machine
from measures import Failed, check_exit, spread, wake_ups
from rich.console import Console
from rich.table import Table

import psclient as ps
from psclient._src.config import child_environ
from psclient._src.launch.cluster import Cluster
from psclient._src.processes.output import Line
from psclient._src.processes.process import spawn
from pswire.cluster import Task
from pswire.network.traffic import TRANSPORTS
from pswire.server_options import ServerOptions

FORMAT = 1
SECONDS = 600
WORKERS = 2
BATCHES = 32
"""Batches of uniform ids that a worker goes through, again and again."""

FILLED = 1 << 15
"""Rows of a dynamic table that a round makes before the first step."""

RATE = 0.125
FIRST = Task("worker", 0)
BEGIN, MEASURED = "begin", "measured"
OPTIMIZERS: Mapping[str, Callable[[], ps.optimizers.Optimizer]] = {
    "sgd": lambda: ps.optimizers.SGD(RATE),
    "adagrad": lambda: ps.optimizers.Adagrad(RATE, initial_accumulator_value=0.1, epsilon=1e-7),
    "adam": lambda: ps.optimizers.Adam(1e-3),
    "closedadam": lambda: ps.optimizers.Adam(1e-3, catch_up="closed_form"),
    "lazyadam": lambda: ps.optimizers.LazyAdam(1e-3),
    "rowwise": lambda: ps.optimizers.RowwiseAdagrad(RATE),
}
PEERS = ("sgd", "adagrad")
"""Optimizers that others have for rows."""

TABLES = ("static", "dynamic")
"""Kinds of tables: a variable, or one without a size."""

PROGRAMS = {
    "torch-shm": ("torch", "torch_rows.py", "shm"),
    "torch-tcp": ("torch", "torch_rows.py", "uv"),
    "ray": ("ray", "ray_rows.py"),
    "tensorflow": ("tensorflow", "tensorflow_rows.py"),
}
"""Of each peer: the package that it needs, its program among the peers, and what that is told beside the work."""

CALLS = ("push", "both")
"""What a call of a peer does: takes gradients, or takes them and gives the next rows."""


@dataclass(frozen=True)
class Work:
    """What every system does.

    Attributes:
        rows, width: shape of the table, float32.
        ids: rows of a batch.
        steps: how many are measured.
        warm: how many come before.
        zipf: exponent of the frequency of ids; 0 for ids that are all as frequent. Each batch is another one then.
        dynamic: True for a table without a size, which has all these rows before the first step.
    """

    rows: int
    width: int
    ids: int
    steps: int
    warm: int
    zipf: float = 0.0
    dynamic: bool = False

    def batches(self, worker: int) -> list[np.ndarray[Any, np.dtype[np.int64]]]:
        """The ids of a worker's batches; some come twice in one."""
        rng = np.random.default_rng(worker)
        if not self.zipf:
            return [rng.integers(0, self.rows, self.ids) for _ in range(BATCHES)]
        shares = np.cumsum(np.arange(1, self.rows + 1) ** -self.zipf)
        places = np.random.default_rng(WORKERS).permutation(self.rows)  # frequent rows lie anywhere
        count = self.warm + self.steps + 1
        return [places[np.searchsorted(shares, shares[-1] * rng.random(self.ids))] for _ in range(count)]

    def places(self) -> int:
        """How many rows all workers change in all steps, each once in a step of a worker."""
        sizes = [[len(np.unique(ids)) for ids in self.batches(worker)] for worker in range(WORKERS)]
        return sum(own[step % len(own)] for own in sizes for step in range(self.warm + self.steps))

    def check(self, total: float) -> None:
        """Raises `ValueError` unless the sum of the table is what SGD makes of gradients of 1."""
        right = -RATE * self.places() * self.width
        if abs(total - right) > 1e-3 * abs(right):
            raise ValueError(f"the table sums to {total}, and should to {right}")


class Lap(NamedTuple):
    """The times and wake-ups of one run of a system.

    Attributes:
        seconds: of each step.
        wakes: wake-ups of a step; None where they are not counted.
    """

    seconds: list[float]
    wakes: float | None = None


# ---- In a worker of ours ----


def made(work: Work) -> Any:
    """Creates the table, of zeros; all rows of a dynamic one are there when this returns."""
    if not work.dynamic:
        return ps.Variable(np.zeros((work.rows, work.width), "float32"), name="table")
    table = ps.dynamic_embedding.get_variable("table", dim=work.width, initializer=ps.initializers.Zeros())
    for first in range(0, work.rows, FILLED):
        keys = np.arange(first, min(first + FILLED, work.rows))
        table.scatter_add(ps.IndexedSlices(np.zeros((len(keys), work.width), "float32"), keys))
    return table


def train(work: Work, name: str) -> None:
    """Makes the steps; worker 0 tells of them."""
    with ps.ParameterServerStrategy(devices=["cpu:0"]) as strategy, strategy.scope():
        table = made(work)
        optimizer = OPTIMIZERS[name]()
        batches = work.batches(strategy.task.index)
        gradient = np.ones((work.ids, work.width), "float32")

        def step(number: int) -> None:
            rows = table.lookup(batches[number % len(batches)])
            optimizer.apply_gradients([(rows.gradient(gradient[: len(rows.ids)]), table)])

        seconds = []
        for number in range(work.warm + work.steps):
            if number == work.warm and strategy.task == FIRST:
                print(BEGIN, flush=True)
            table.prefetch(batches[(number + 1) % len(batches)])
            start = time.perf_counter()
            strategy.run(step, args=(number,))
            table.lookup(batches[(number + 1) % len(batches)])  # waits for the round, and finds them
            seconds.append(time.perf_counter() - start)
        whole = table.export()[1] if work.dynamic else table.numpy()
        total = float(whole.sum(dtype=np.float64))
        if strategy.task == FIRST:
            if name == "sgd":
                work.check(total)
            print(MEASURED, json.dumps(seconds[work.warm :]), flush=True)


def run_ours(work: Work, transport: str, optimizer: str, device: str) -> Lap:
    """Starts a cluster on one transport, its tables on a device."""
    found: list[float] = []
    woken: list[int] = []

    def hear(line: Line) -> None:
        if line.task == FIRST and not line.error and line.text.startswith((BEGIN, MEASURED)):
            woken.append(sum(wake_ups(process.pid) for process in cluster.processes.values()))
            if line.text.startswith(MEASURED):
                found.extend(json.loads(line.text.removeprefix(MEASURED)))

    with Cluster(
        sink=hear,
        ps=1,
        workers=WORKERS,
        chief="none",
        transport=transport,
        script=str(Path(__file__)),
        args=("--as-worker", json.dumps(asdict(work)), "--optimizer", optimizer),
        server=ServerOptions(device=device),
    ) as cluster:
        outcome = cluster.wait(SECONDS)
    if outcome.code or not found:
        raise click.ClickException(f"{transport} transport, {optimizer}: {outcome.report}")
    return Lap(found, (woken[1] - woken[0]) / work.steps)


# ---- Peers ----


def run_peer(python: str, work: Work, name: str, optimizer: str, calls: str) -> Lap:
    """Has a peer make the same steps."""
    _, file, *told = PROGRAMS[name]
    program = Path(__file__).resolve().parent / "peers" / file
    setting = json.dumps(asdict(work) | {"rate": RATE, "batches": BATCHES, "workers": WORKERS})
    command = [python, str(program), setting, *told, optimizer, calls]
    with tempfile.TemporaryFile() as errors:
        process = spawn(command, child_environ(1 + WORKERS, None), subprocess.PIPE, errors.fileno())
        try:
            out, _ = process.communicate(timeout=SECONDS)
        finally:
            process.kill()
            process.wait()
        check_exit(process, errors)
    return Lap(json.loads(out.decode().splitlines()[-1]))


def pythons_of(pythons: Sequence[str]) -> dict[str, str]:
    """Returns by peer the first of some Pythons that has its package."""
    found = {}
    for name, (package, *_) in PROGRAMS.items():
        look = f"import importlib.util as u, sys; sys.exit(u.find_spec({package!r}) is None)"
        has = [each for each in pythons if not subprocess.run([each, "-c", look], check=False).returncode]
        if has:
            found[name] = has[0]
    return found


# ---- All of them ----


def measure(
    work: Work,
    transports: Sequence[str],
    tables: Sequence[str],
    devices: Sequence[str],
    optimizers: Sequence[str],
    pythons: Sequence[str],
    repeats: int,
) -> tuple[dict[tuple[str, str], list[Lap]], list[str]]:
    """Measures all systems in turns; returns laps by system and optimizer, and who is left out."""
    compares = bool(set(PEERS) & set(optimizers)) and not work.zipf
    found = pythons_of(pythons) if compares else {}
    missing = [name for name in PROGRAMS if compares and name not in found]
    excluded = [f"{name}: no Python that has {PROGRAMS[name][0]} was given" for name in missing]
    peers = [f"{name}, {calls}" for name, calls in product(found, CALLS)]
    total: dict[tuple[str, str], list[Lap]] = {}
    ours = {
        f"{transport}, {table}" + f", {at}" * (at != "cpu"): at
        for transport, table, at in product(transports, tables, devices)
    }
    for _, optimizer, system in product(range(repeats), optimizers, (*ours, *peers)):
        name, _, what = system.partition(", ")
        if system in peers and optimizer not in PEERS:
            continue
        try:
            lap = (
                run_peer(found[name], work, name, optimizer, what)
                if system in peers
                else run_ours(replace(work, dynamic=what.startswith("dynamic")), name, optimizer, ours[system])
            )
        except Failed as error:
            excluded.append(f"{system}, {optimizer}: {error}")
            continue
        total.setdefault((system, optimizer), []).append(lap)
    return total, excluded


def report(work: Work, total: dict[tuple[str, str], list[Lap]], excluded: list[str]) -> dict[str, Any]:
    """Everything as it is written with `--json`."""
    rows = [
        {
            "system": system,
            "optimizer": optimizer,
            **asdict(work),
            "laps": len(laps),
            "ms": spread([second for lap in laps for second in lap.seconds], 1e3),
            "lap_medians_ms": [1e3 * statistics.median(lap.seconds) for lap in laps],
            "wakes": None if laps[0].wakes is None else statistics.median(lap.wakes or 0.0 for lap in laps),
        }
        for (system, optimizer), laps in total.items()
    ]
    return {"format": FORMAT, "machine": machine(), "rows": rows, "excluded": excluded}


@click.command(help=(__doc__ or "").partition("\n\n")[0])
@click.option(
    "--transport",
    "transports",
    multiple=True,
    type=click.Choice(TRANSPORTS),
    default=TRANSPORTS[::-1],
    show_default=True,
)
@click.option("--optimizer", "optimizers", multiple=True, type=click.Choice(list(OPTIMIZERS)), default=PEERS)
@click.option("--table", "tables", multiple=True, type=click.Choice(TABLES), default=TABLES[:1], show_default=True)
@click.option("--device", "devices", multiple=True, default=("cpu",), show_default=True, help="The server's.")
@click.option("--zipf", type=click.FloatRange(0), default=0.0, help="Exponent of the frequency of ids; 0 for none.")
@click.option("--rows", type=click.IntRange(1), default=1_000_000, show_default=True)
@click.option("--width", type=click.IntRange(1), default=64, show_default=True)
@click.option("--ids", type=click.IntRange(1), default=4096, show_default=True)
@click.option("--steps", type=click.IntRange(1), help="How many to measure at a time [default: 300, with --quick 20].")
@click.option("--repeats", type=click.IntRange(1), help="How many times over [default: 3, with --quick 1].")
@click.option("--python", "pythons", multiple=True, help="A Python that may have peers.")
@click.option("--quick", is_flag=True, help="A few steps only.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures here.")
@click.option("--as-worker", "said", hidden=True)
def main(
    transports: tuple[str, ...],
    tables: tuple[str, ...],
    devices: tuple[str, ...],
    optimizers: tuple[str, ...],
    zipf: float,
    rows: int,
    width: int,
    ids: int,
    steps: int | None,
    repeats: int | None,
    pythons: tuple[str, ...],
    quick: bool,
    json_file: Path | None,
    said: str | None,
) -> None:
    """Measures, or is a worker of a cluster that is measured."""
    if said:
        train(Work(**json.loads(said)), optimizers[0])
        return
    work = Work(rows, width, ids, steps or (20 if quick else 300), 10 if quick else 60, zipf)
    tried = (*pythons, sys.executable)
    total, excluded = measure(work, transports, tables, devices, optimizers, tried, repeats or (1 if quick else 3))
    found = report(work, total, excluded)
    table = Table(
        title=f"Steps of {ids} of {rows} rows x {width}, {WORKERS} workers, ms; load {found['machine']['load']:.1f}"
    )
    for heading in ("system", "optimizer", "median", "p90", "min", "wake-ups"):
        table.add_column(heading, justify="left" if heading in ("system", "optimizer") else "right")
    for each in found["rows"]:
        ms = each["ms"]
        wakes = "-" if each["wakes"] is None else f"{each['wakes']:.1f}"
        table.add_row(each["system"], each["optimizer"], *(f"{ms[key]:.2f}" for key in ("median", "p90", "min")), wakes)
    console = Console()
    console.print(table, *excluded, sep="\n")
    if json_file:
        json_file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
