"""A training step of examples/digits.py, by this system, by torch RPC, and by a plain loop in NumPy.

    python benchmarks/step.py             everything that is installed
    python benchmarks/step.py --quick     a few steps of each, for a first look

The same network, batches of 64 examples over all workers, and Adam at the same rate; with us exactly the loop of the
example, in which every step wants the mean loss of all workers; `own loss` is the same with each worker's own, as in
torch RPC's loop: one round less. All are real processes on this machine, with the allocator and the threads
that our launcher gives to so many. Systems take turns. Processor time is that of every process between the first and
the last measured step; it hardly depends on who else uses the machine, as steps per second do. Waits are the answers of
servers for which worker 0 stood still, where the strategy counts them.

This project does not need torch. It may be installed for any Python, and --python says which:

    python3 -m venv peers
    peers/bin/pip install numpy torch --index-url https://download.pytorch.org/whl/cpu
    python benchmarks/step.py --python peers/bin/python

`--json FILE` writes `{"format", "machine", "steps", "excluded"}`.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np
from figures import machine
from measures import Failed, Watch, run_cluster, run_program
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "examples"))

import digits  # noqa: E402

import psclient as ps  # noqa: E402

FORMAT = 1
BATCH, RATE, SEED = 64, 0.002, 0
"""Those of the example."""

STEPS, WARM, QUICK_STEPS, QUICK_WARM = 300, 300, 20, 5
"""Steps that are measured, and that come before; small variables have a kernel only after a while."""

SECONDS = 300
"""How long one system may take."""

PROCESSES = 2
"""Among which the loop in NumPy shares the cores: BLAS spins in threads that have none."""

NUMPY = "NumPy loop"
OURS = {"ours, 1 + 1": (1, 1), "ours, 2 + 2": (2, 2), "ours, 2 + 2, own loss": (2, 2)}
TORCH = {"torch RPC, 1 + 1": (1, 1), "torch RPC, 2 + 2": (2, 2)}
"""Workers and servers of each cluster."""

NAMES = ("ours-1", "ours-2", "ours-2-own-loss", "torch-1", "torch-2")

SYSTEMS = {"numpy": NUMPY, **dict(zip(NAMES, (*OURS, *TORCH), strict=True))}
"""Names on the command line, and for people."""

HAS_TORCH = "import sys; from importlib.util import find_spec; sys.exit(find_spec('torch') is None)"


@dataclass
class Row:
    """The figures of one system, once for each lap.

    Attributes:
        rate: steps in a second.
        worker_cpu, server_cpu: seconds of processor time for a step, of each worker and of each server.
        waits: of worker 0 for a step; None where nobody counts them.
        loss: mean of the last steps' losses.
    """

    rate: list[float] = field(default_factory=list)
    worker_cpu: list[list[float]] = field(default_factory=list)
    server_cpu: list[list[float]] = field(default_factory=list)
    waits: list[float | None] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)

    def report(self, system: str) -> dict[str, Any]:
        """Medians, as they are written with `--json`; of processes the mean of each kind."""
        counted = [waits for waits in self.waits if waits is not None]
        total = [sum(workers) + sum(servers) for workers, servers in zip(self.worker_cpu, self.server_cpu, strict=True)]
        return {
            "system": system,
            "steps_per_s": statistics.median(self.rate),
            "worker_cpu_ms": 1e3 * statistics.median(map(statistics.fmean, self.worker_cpu)),
            "server_cpu_ms": 1e3 * statistics.median(sum(each) / max(len(each), 1) for each in self.server_cpu),
            "cpu_ms": 1e3 * statistics.median(total),
            "waits": statistics.median(counted) if counted else None,
            "loss": statistics.median(self.loss),
            "laps": len(self.rate),
        }


# ---- In the process that trains ----


def measure(
    step: Callable[[Any], float], batches: Iterator[Any], steps: tuple[int, int], waits: Callable[[], int | None]
) -> None:
    """Makes all steps, and tells the launcher when the measured ones begin and end.

    Args:
        step: makes a step of a batch; returns its loss.
        batches: enough of them.
        steps: how many come before, and how many are measured.
        waits: returns how often this process has waited for a server; None where nobody counts.
    """
    warm, measured = steps
    for _ in range(warm):
        step(next(batches))
    tell(now="begin")
    waited, began = waits(), time.perf_counter()
    losses = [step(next(batches)) for _ in range(measured)]
    seconds = time.perf_counter() - began
    after = waits()
    spent = None if waited is None or after is None else (after - waited) / measured
    tell(now="end", seconds=seconds, loss=float(np.mean(losses[-23:])), waits=spent)


def tell(**said: Any) -> None:
    """Prints a line of JSON for the launcher."""
    print(json.dumps(said), flush=True)


def dataset(train: Any) -> ps.ArrayDataset:
    """The batches of all workers, each of the same size, as torch's loop has them."""
    return ps.ArrayDataset(train).shuffle(SEED).batch(BATCH, drop_remainder=True)


def endless(batches: ps.ArrayDataset) -> Iterator[Any]:
    """The batches of one epoch after the other."""
    while True:
        yield from batches


def train_ours(steps: tuple[int, int], own_loss: bool = False) -> None:
    """A worker: the loop of the example, or with its own loss in each step. The first one tells of it."""
    train, _ = digits.load_data()
    strategy = ps.ParameterServerStrategy(["cpu:0"])
    batches = strategy.experimental_distribute_dataset(dataset(train))
    with strategy.scope():
        layers = digits.make_layers(SEED)
        variables = [variable for layer in layers for variable in layer]
        optimizer = ps.optimizers.Adam(RATE)
        optimizer.build(variables)

        def replica(images: Any, targets: Any) -> tuple[Any, list[Any]]:
            values = [(w.read_value(), b.read_value()) for w, b in layers]
            return digits.losses_and_gradients(values, images, targets, BATCH)

        def step(batch: Any) -> float:
            losses, gradients = strategy.run(replica, args=batch)
            optimizer.apply_gradients(zip(gradients, variables, strict=True))
            return float(losses.mean() if own_loss else strategy.reduce("mean", losses, axis=0))

        def rounds() -> Iterator[Any]:
            for _ in batches.epochs(sum(steps)):
                yield from batches

        if strategy.task.index == 0:
            measure(step, rounds(), steps, lambda: strategy.blocking_waits)
        else:
            each = rounds()
            for _ in range(sum(steps)):
                step(next(each))


def train_numpy(steps: tuple[int, int]) -> None:
    """One process without servers, whose optimizer is a few lines."""
    train, _ = digits.load_data()
    random = np.random.default_rng(SEED)
    sizes = list(zip(digits.SIZES, digits.SIZES[1:], strict=False))
    weights = [random.normal(0, (2 / rows) ** 0.5, (rows, columns)).astype("float32") for rows, columns in sizes]
    layers = [(w, np.zeros(w.shape[1], "float32")) for w in weights]
    variables = [variable for layer in layers for variable in layer]
    slots = [(np.zeros_like(variable), np.zeros_like(variable)) for variable in variables]
    count = 0

    def step(batch: Any) -> float:
        nonlocal count
        count += 1
        images, targets = batch
        losses, gradients = digits.losses_and_gradients(layers, images, targets, BATCH)
        rate = np.float32(RATE * (1 - 0.999**count) ** 0.5 / (1 - 0.9**count))
        for variable, gradient, (first, second) in zip(variables, gradients, slots, strict=True):
            first += (gradient - first) * np.float32(0.1)
            second += (gradient * gradient - second) * np.float32(0.001)
            variable -= rate * first / (np.sqrt(second) + np.float32(1e-7))
        return float(losses.mean())

    tell(pids={"worker 0": os.getpid()})
    measure(step, endless(dataset(train)), steps, lambda: None)


# ---- In the launcher ----


def add_to(row: Row, watch: Watch) -> None:
    """Adds what was heard of a system; raises `Failed` if the end was not heard."""
    used = watch.used_per_step()
    row.rate.append(watch.steps / watch.said["seconds"])
    for kind, into in (("worker", row.worker_cpu), ("server", row.server_cpu)):
        into.append([seconds for name, seconds in used.items() if name.startswith(kind)])
    row.waits.append(watch.said["waits"])
    row.loss.append(watch.said["loss"])


def run_ours(system: str, steps: tuple[int, int]) -> Watch:
    """Has a cluster of ours train."""
    watch, (workers, servers) = Watch(steps[1]), OURS[system]
    args = ("--as-worker", system, "--steps", str(steps[1]), "--warm", str(steps[0]))
    run_cluster(watch, SECONDS, ps=servers, workers=workers, script=__file__, args=args)
    return watch


def run_peer(command: Sequence[str], processes: int, steps: tuple[int, int]) -> Watch:
    """Has another program train, whose processes share the cores."""
    watch = Watch(steps[1])
    run_program(watch, command, processes, SECONDS)
    return watch


def run_torch(program: str, python: str, **job: Any) -> Watch:
    """Has a program of peers/ train with the digits.

    Args:
        program: its name.
        python: a Python that has torch.
        job: the fields of `peers.torch_step.Job` but for the data.
    """
    with tempfile.TemporaryDirectory() as directory:
        (images, targets), _ = digits.load_data()
        data = Path(directory) / "digits.npz"
        np.savez(data, images=images, labels=targets.argmax(axis=1))
        command = [python, str(HERE / "peers" / program), json.dumps({**job, "data": str(data)})]
        return run_peer(command, job["workers"] + job["servers"], (job["warm"], job["steps"]))


def run(system: str, pythons: Sequence[str], steps: tuple[int, int]) -> Watch | str:
    """Measures a system once; returns why not, if what it needs is not there.

    Raises:
        Failed: it did not end well.
    """
    if system in OURS:
        return run_ours(system, steps)
    numbers = ("--steps", str(steps[1]), "--warm", str(steps[0]))
    if system == NUMPY:
        return run_peer([sys.executable, __file__, "--as-worker", NUMPY, *numbers], PROCESSES, steps)
    found = [python for python in pythons if not subprocess.run([python, "-c", HAS_TORCH], check=False).returncode]
    if not found:
        return (
            f"skipped, torch is not installed for {' or '.join(pythons)}; pip install numpy torch --index-url "
            "https://download.pytorch.org/whl/cpu into an environment of its own, and give its Python with --python"
        )
    workers, servers = TORCH[system]
    return run_torch(
        "torch_step.py",
        found[0],
        model="digits",
        rate=RATE,
        batch=BATCH,
        warm=steps[0],
        steps=steps[1],
        workers=workers,
        servers=servers,
    )


def table(found: dict[str, Any]) -> Table:
    """Rows are systems."""
    title = f"A training step of {BATCH} digits; processor time in ms a step, of one process of each kind and of all"
    drawn = Table("system", title=title, title_justify="left")
    for heading in ("steps/s", "worker", "server", "all", "waits", "loss"):
        drawn.add_column(heading, justify="right", no_wrap=True)
    for row in found["steps"]:
        waits = "-" if row["waits"] is None else f"{row['waits']:.2f}"
        cpu = [f"{row[key]:.3g}" if row[key] else "-" for key in ("worker_cpu_ms", "server_cpu_ms", "cpu_ms")]
        drawn.add_row(row["system"], f"{row['steps_per_s']:.0f}", *cpu, waits, f"{row['loss']:.4f}")
    return drawn


@click.command(help=(__doc__ or "").partition("\n\n")[0])
@click.option("--systems", multiple=True, type=click.Choice(list(SYSTEMS)), help="Systems to measure [default: all].")
@click.option("--python", "pythons", multiple=True, help="A Python that has torch [default: this one].")
@click.option("--steps", type=click.IntRange(1), help=f"Steps to measure [default: {STEPS}].")
@click.option("--warm", type=click.IntRange(0), help=f"Steps before these [default: {WARM}].")
@click.option("--repeats", type=click.IntRange(1), help="How many times over [default: 3, with --quick 1].")
@click.option("--quick", is_flag=True, help="A few steps only.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures here.")
@click.option("--as-worker", "own", hidden=True)
def main(
    systems: tuple[str, ...],
    pythons: tuple[str, ...],
    steps: int | None,
    warm: int | None,
    repeats: int | None,
    quick: bool,
    json_file: Path | None,
    own: str | None,
) -> None:
    """Measures everything, or is a process that trains; exits with 1 if a system failed."""
    chosen = (
        (QUICK_WARM if quick else WARM) if warm is None else warm,
        steps or (QUICK_STEPS if quick else STEPS),
    )
    if own == NUMPY:
        train_numpy(chosen)
        return
    if own:
        train_ours(chosen, own_loss="own loss" in own)
        return
    console = Console()
    rows: dict[str, Row] = {}
    excluded: dict[str, str] = {}
    failed = False
    laps = repeats or (1 if quick else 3)
    for lap in range(laps):
        for system in (SYSTEMS[name] for name in systems or SYSTEMS):
            if system in excluded:
                continue
            with console.status(f"lap {lap + 1} of {laps}: {system}"):
                try:
                    watch = run(system, pythons or (sys.executable,), chosen)
                    if isinstance(watch, str):
                        excluded[system] = watch
                    else:
                        add_to(rows.setdefault(system, Row()), watch)
                except Failed as error:
                    excluded[system], failed = f"failed, {error}", True
    report = [row.report(system) for system, row in rows.items() if row.rate]
    found = {"format": FORMAT, "machine": machine(), "steps": report, "excluded": excluded}
    console.print(table(found))
    for system, why in excluded.items():
        console.print(f"{system}: {why}", soft_wrap=True)
    if json_file:
        json_file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    sys.exit(failed)


if __name__ == "__main__":
    main()
