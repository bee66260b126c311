"""Recommenders end to end: two workers and a server, beside a parameter server by torch RPC, and torch in one process.

    python benchmarks/recommenders.py                                   both networks, over shared memory
    python benchmarks/recommenders.py --transport tcp --model dlrm      one of them, over TCP
    python benchmarks/recommenders.py --python peers/bin/python         with the peers' torch
    python benchmarks/recommenders.py --quick                           a few steps of each

Needs torch in the Python that runs it. All are real processes on this machine, and take turns.

- **towers**: two towers over a million users and 200,000 items, and a network over both.
- **dlrm**: 26 tables and 13 numbers in the shape of Criteo's data, tables of at most a million rows.

Rows have 16 numbers; ids are frequent as Zipf's law says, with exponent 1.05. A batch of 4,096 examples is that of all
workers together, so that all systems make the same steps. Data and labels are made, and each example is in one batch.
Adagrad by torch's formula trains rows and networks. AUC is that of the same 65,536 examples, which no system has
trained on; "best" is that of the chances by which the labels were drawn.

Ours are PyTorch's replicas over dynamic tables in a `pst.EmbeddingBagCollection`. torch RPC is
benchmarks/peers/torch_recommender.py: tables without an index, each row once in one message a step, whose answer has
the rows of the next batch. Its processes and ours compute in as many threads. torch in one process is measured with one
thread, and with one on each core.

`--json FILE` writes `{"format", "machine", "transport", "rows", "excluded"}`; a row has `work`, `system`, `laps`, the
examples in a second (`rate`, median of laps, and `lap_rates`), `ratio` to torch RPC, `cpu_ms` of each process for a
step and of all, `threads`, `auc`, and `best`. `--plot FILE` draws the rates of all systems side by side.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
from figures import machine, publish
from measures import Failed, Watch, run_cluster, run_program
from rich.console import Console
from rich.table import Table

import psclient as ps
from pswire.cluster import Task

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE / "peers"), str(HERE.parent / "examples")]

from clicks import NUMBERS, Clicks, auc, criteo_sizes, make_clicks  # noqa: E402

FORMAT = 1
SECONDS = 1200
WORKERS = 2
FIRST = Task("worker", 0)
TEST = 1 << 16
"""Examples that are not trained on."""

STEPS, WARM, QUICK_STEPS, QUICK_WARM = 300, 300, 20, 10
"""Steps that are measured, and that come before; small variables have a kernel only after a while."""

RATE = 0.02
SHAPES: dict[str, tuple[tuple[int, ...], int]] = {
    "towers": ((1_000_000, 200_000), 0),
    "dlrm": (criteo_sizes(1_000_000), NUMBERS),
}
"""Each network's tables, by their numbers of ids, and how many features are numbers."""

OURS, RPC, PLAIN, THREADS = "paramserver", "torch RPC", "torch, one process", "torch, one process, all cores"
SYSTEMS = {"ours": OURS, "rpc": RPC, "plain": PLAIN, "threads": THREADS}
"""Names on the command line, and for people."""

CHANNELS = {"shm": "shm", "tcp": "uv"}
"""torch RPC's transport beside each of ours."""


# ---- In a worker of ours ----


def train(said: str) -> None:
    """Trains in a worker; the first one tells of it."""
    import torch
    from recommender_steps import EPSILON, Work, loss_of
    from torch import nn

    import psclient.torch as pst

    work = Work.read(said)
    names = [f"feature{number}" for number in range(len(work.sizes))]

    class Bags(nn.Module):
        """Rows of all tables, which are stored as one."""

        def __init__(self) -> None:
            super().__init__()
            self.bags = pst.EmbeddingBagCollection([pst.EmbeddingBagConfig(name, work.dim, [name]) for name in names])

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            flat = ids.t().flatten()
            features = pst.KeyedJaggedTensor(names, flat, torch.ones_like(flat))
            return self.bags(features).values().unflatten(1, (len(names), work.dim))

    with ps.ParameterServerStrategy(["cpu:0"]) as strategy, strategy.scope():
        net, rows = work.network(), Bags()
        optimizer = pst.Optimizer(nn.ModuleList([net, rows]), torch.optim.Adagrad, lr=work.rate, eps=EPSILON)
        data = ps.ArrayDataset(work.load("train")._asdict()).batch(work.batch)
        batches = iter(pst.Loader(data, optimizer))

        def step(_: int) -> None:
            batch = next(batches)
            optimizer.zero_grad()
            loss_of(net(rows(batch["ids"]), batch["numbers"]), batch["clicked"]).backward()
            optimizer.step()

        work.make_steps(step, strategy.task == FIRST)
        if strategy.task == FIRST:
            work.tell_auc(lambda ids, numbers: net(rows(ids), numbers))


# ---- In the launcher ----


@dataclass
class Row:
    """The figures of one system.

    Attributes:
        rates: examples in a second, for each lap.
        cpu: seconds of processor time for a step, of each process by its name, for each lap.
        threads: in which a worker's torch computes.
        auc: of each lap.
    """

    rates: list[float] = field(default_factory=list)
    cpu: list[dict[str, float]] = field(default_factory=list)
    threads: int = 0
    auc: list[float] = field(default_factory=list)

    def add(self, watch: Watch, batch: int) -> None:
        """Adds what was heard of a lap."""
        self.cpu.append(watch.used_per_step())
        self.rates.append(watch.steps * batch / watch.said["seconds"])
        self.threads = watch.said["threads"]
        self.auc.append(watch.said["auc"])

    def report(self) -> dict[str, Any]:
        """Medians, as they are written with `--json`."""
        cpu = {name: 1e3 * statistics.median(lap[name] for lap in self.cpu) for name in sorted(self.cpu[0])}
        return {
            "laps": len(self.rates),
            "rate": statistics.median(self.rates),
            "lap_rates": self.rates,
            "cpu_ms": cpu | {"all": 1e3 * statistics.median(sum(lap.values()) for lap in self.cpu)},
            "threads": self.threads,
            "auc": statistics.median(self.auc),
        }


def make_data(work: dict[str, Any]) -> float:
    """Makes the examples of all steps, and those of the test; returns the AUC of the best guesses."""
    from recommender_steps import Work

    made = Work(**work)
    count = work["batch"] * (work["warm"] + work["steps"])
    clicks = make_clicks(count + TEST, work["sizes"], work["numbers"])
    made.save("train", Clicks(*(array[:count] for array in clicks)))
    test = Clicks(*(array[count:] for array in clicks))
    made.save("test", test)
    return auc(test.best, test.clicked)


def run(system: str, work: dict[str, Any], transport: str, python: str) -> Watch:
    """Measures a system once; raises `Failed` if it did not end well."""
    watch, said = Watch(work["steps"]), json.dumps(work)
    if system == OURS:
        args = ("--as-worker", said)
        run_cluster(watch, SECONDS, ps=1, workers=WORKERS, transport=transport, script=__file__, args=args)
        return watch
    how, processes = {PLAIN: ("plain", len(os.sched_getaffinity(0))), THREADS: ("plain", 1)}.get(
        system, (CHANNELS[transport], 1 + WORKERS)
    )
    command = [python, str(HERE / "peers" / "torch_recommender.py"), said, how]
    run_program(watch, command, processes, SECONDS)
    return watch


def has_torch(python: str) -> bool:
    """Returns whether a Python has torch."""
    look = "import importlib.util as u, sys; sys.exit(u.find_spec('torch') is None)"
    return not subprocess.run([python, "-c", look], check=False).returncode


def table(found: dict[str, Any]) -> Table:
    """Rows are systems."""
    load = found["machine"]["load"]
    drawn = Table(
        "work",
        "system",
        title=f"Recommenders over {found['transport']}; processor time in ms for a step; load {load:.1f}",
        title_justify="left",
    )
    for heading in (
        "1,000 examples/s",
        "/ torch RPC",
        "worker 0",
        "worker 1",
        "server",
        "all",
        "threads",
        "AUC",
        "best",
    ):
        drawn.add_column(heading, justify="right", no_wrap=True)
    for row in found["rows"]:
        cpu = [f"{row['cpu_ms'][name]:.3g}" if name in row["cpu_ms"] else "-" for name in CPU]
        ratio = f"{row['ratio']:.2f}" if row["ratio"] else "-"
        scores = f"{row['auc']:.4f}", f"{row['best']:.4f}"
        drawn.add_row(row["work"], row["system"], f"{row['rate'] / 1e3:.1f}", ratio, *cpu, str(row["threads"]), *scores)
    return drawn


CPU = ("worker 0", "worker 1", "server 0", "all")


def draw(found: dict[str, Any], path: Path) -> None:
    """Draws the examples in a second of each system, and beside them its AUC.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    works = list(dict.fromkeys(row["work"] for row in found["rows"]))
    figure, axes = pyplot.subplots(1, len(works), figsize=(9, 3), squeeze=False)
    for work, own in zip(works, axes[0], strict=True):
        rows = [row for row in found["rows"] if row["work"] == work][::-1]
        bars = own.barh([row["system"] for row in rows], [row["rate"] / 1e3 for row in rows], height=0.6)
        own.bar_label(bars, [f" AUC {row['auc']:.3f}" for row in rows], fontsize="small")
        own.margins(x=0.35)
        own.set(xlabel="thousand examples/s", title=f"{work}, best AUC {rows[0]['best']:.3f}")
        own.set_axisbelow(True)
        own.grid(axis="x", alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


@click.command(help=(__doc__ or "").partition("\n\n")[0])
@click.option("--model", "models", multiple=True, type=click.Choice(list(SHAPES)), default=list(SHAPES))
@click.option("--system", "systems", multiple=True, type=click.Choice(list(SYSTEMS)), default=list(SYSTEMS))
@click.option("--transport", type=click.Choice(list(CHANNELS)), default="shm", show_default=True)
@click.option("--batch", type=click.IntRange(WORKERS), default=4096, show_default=True, help="Of all workers together.")
@click.option("--dim", type=click.IntRange(1), default=16, show_default=True, help="The width of rows.")
@click.option("--hidden", type=click.IntRange(1), default=64, show_default=True, help="The width of hidden layers.")
@click.option("--steps", type=click.IntRange(1), help=f"Steps to measure [default: {STEPS}].")
@click.option("--warm", type=click.IntRange(0), help=f"Steps before these [default: {WARM}].")
@click.option("--repeats", type=click.IntRange(1), help="How many times over [default: 3, with --quick 1].")
@click.option("--python", "pythons", multiple=True, help="A Python that has torch, for the others [default: this one].")
@click.option("--quick", is_flag=True, help="A few steps only.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures here.")
@click.option(
    "--plot", type=click.Path(dir_okay=False, path_type=Path), help="Also draw this file; needs matplotlib (`bench`)."
)
@click.option("--as-worker", "said", hidden=True)
def main(
    models: Sequence[str],
    systems: Sequence[str],
    transport: str,
    batch: int,
    dim: int,
    hidden: int,
    steps: int | None,
    warm: int | None,
    repeats: int | None,
    pythons: tuple[str, ...],
    quick: bool,
    json_file: Path | None,
    plot: Path | None,
    said: str | None,
) -> None:
    """Measures, or is a worker of a cluster that is measured; exits with 1 if a system failed."""
    if said:
        train(said)
        return
    if find_spec("torch") is None:
        raise click.ClickException("this Python has no torch; `make test-frameworks` installs it into .venv")
    python = next(filter(has_torch, (*pythons, sys.executable)))
    numbers = {"warm": (QUICK_WARM if quick else WARM) if warm is None else warm}
    numbers |= {"steps": steps or (QUICK_STEPS if quick else STEPS)}
    numbers |= {"batch": batch - batch % WORKERS, "dim": dim, "hidden": hidden}
    console, rows, excluded = Console(), list[dict[str, Any]](), list[str]()
    for model in models:
        sizes, others = SHAPES[model]
        laps: dict[str, Row] = {}
        with tempfile.TemporaryDirectory() as directory:
            work = {"model": model, "sizes": sizes, "numbers": others, "rate": RATE, "data": directory, **numbers}
            with console.status(f"{model}: making {numbers['batch']} x {numbers['warm'] + numbers['steps']} examples"):
                best = make_data(work)
            for lap in range(repeats or (1 if quick else 3)):
                for system in (SYSTEMS[name] for name in systems):
                    with console.status(f"{model}, lap {lap + 1}: {system}"):
                        try:
                            laps.setdefault(system, Row()).add(run(system, work, transport, python), numbers["batch"])
                        except Failed as error:
                            excluded.append(f"{model}, {system}: {error}")
        found = {system: row.report() for system, row in laps.items() if row.rates}
        for system, row in found.items():
            ratio = row["rate"] / found[RPC]["rate"] if RPC in found else None
            rows.append({"work": model, "system": system, "ratio": ratio, "best": best, **numbers, **row})
    figures = {"format": FORMAT, "machine": machine(), "transport": transport, "rows": rows, "excluded": excluded}
    publish(console, figures, [table(figures)], json_file, partial(draw, figures, plot) if plot else None)
    console.print(*excluded, sep="\n")
    sys.exit(bool(excluded))


if __name__ == "__main__":
    main()
