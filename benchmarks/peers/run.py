"""The same synchronous rounds, made by other systems and by this one: times of worker 0 beside each other.

    python benchmarks/peers/run.py             everything that is installed
    python benchmarks/peers/run.py --quick     a few rounds of each, for a first look

A round: each of two workers pushes a gradient for every variable, one server sums the two and applies gradient descent
in place, both workers have the new values. All are real processes on this machine, which get the allocator's settings
of our own launcher. Systems take turns with measurements of memcpy and of plain TCP on loopback. The values after the
last round are checked.

This project needs none of the peers. They may be installed for any Python, and --python says which; several may be
given, and the first that has the package runs a peer:

    python3 -m venv peers
    peers/bin/pip install numpy torch --index-url https://download.pytorch.org/whl/cpu
    peers/bin/pip install ray tensorflow-cpu
    python benchmarks/peers/run.py --python peers/bin/python

`--json FILE` writes `{"format", "machine", "limits", "rounds", "excluded"}`.
"""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from figures import machine
from limits import Limits
from measures import Failed, check_exit, spread
from models import MODELS, SIZES
from rounds import WORKERS, Work, to_text

from psclient._src.config import child_environ
from psclient._src.processes.process import send, spawn

FORMAT = 1
HERE = Path(__file__).resolve().parent
SECONDS = 200
"""How long the rounds of one system may take: TensorFlow with SyncReplicas stood still here once in four runs."""

VERSION = """
import sys
from importlib import metadata, util
if not util.find_spec(sys.argv[1]):
    sys.exit("missing")
print(metadata.version(metadata.packages_distributions()[sys.argv[1]][0]))
"""
"""What a Python is asked about a package."""


@dataclass(frozen=True)
class Peer:
    """A system to measure.

    Attributes:
        name: for people.
        package: what must be importable.
        command: its program in this directory, and what follows the rounds on its command line.
        beside: our transport that it is to be compared with.
    """

    name: str
    package: str
    command: tuple[str, ...]
    beside: str


PEERS = {
    "grpc-floor": Peer("gRPC in Python, bytes alone", "grpc", ("grpc_floor.py",), "grpc"),
    "tf-replicas": Peer("TensorFlow, SyncReplicas", "tensorflow", ("tensorflow_ps.py", "replicas"), "grpc"),
    "tf-graph": Peer("TensorFlow, one graph", "tensorflow", ("tensorflow_ps.py", "graph"), "grpc"),
    "torch-tcp": Peer("torch RPC, TCP", "torch", ("torch_rpc.py", "uv"), "tcp"),
    "torch-shm": Peer("torch RPC, shared memory", "torch", ("torch_rpc.py", "shm"), "shm"),
    "ray": Peer("Ray", "ray", ("ray_actor.py",), "shm"),
    "gloo": Peer("gloo all-reduce", "torch", ("gloo.py",), "no server"),
}

OWN_PACKAGE = "grpc"
"""What this Python has, as this project needs it."""

OURS = "ours"
"""Names this system where peers are named."""


@dataclass
class Row:
    """The figures of one system.

    Attributes:
        name: for people.
        beside: the transport that it has, or is to be compared with.
        version: of the package.
        ms: for each model and lap the least, median and 90th percentile of a round.
    """

    name: str
    beside: str
    version: str = ""
    ms: dict[str, list[dict[str, float]]] = field(default_factory=dict)

    def whole(self, size: str) -> dict[str, float]:
        """Of all laps: the least, and the medians of medians and of percentiles."""
        laps = self.ms[size]
        least = min(lap["min"] for lap in laps)
        return {"min": least} | {key: statistics.median(lap[key] for lap in laps) for key in ("median", "p90")}


# ---- Peers ----


def python_for(package: str, pythons: Sequence[str]) -> tuple[str, str] | None:
    """The first Python that has a package, and the package's version; None if none has."""
    for python in pythons:
        command = [python, "-c", VERSION, package]
        asked = subprocess.run(command, capture_output=True, text=True, check=False)
        if not asked.returncode:
            return python, asked.stdout.strip()
    return None


def works(sizes: Sequence[str], quick: bool) -> list[Work]:
    """The rounds to make of each model: those of `round.py`."""
    found = []
    for size in sizes:
        model = MODELS[size]
        lengths = tuple(length for (length,) in model.shapes())
        found.append(Work(size, lengths, model.count(quick), model.warm))
    return found


def run_program(command: list[str]) -> str:
    """Runs a program to its end, and everything that it has started; returns what it printed.

    Raises:
        Failed: it exited with an error, or took too long.
    """
    with tempfile.TemporaryFile() as errors:
        process = spawn(command, child_environ(1 + WORKERS, None), subprocess.DEVNULL, errors.fileno())
        try:
            out, _ = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            raise Failed(f"took more than {SECONDS} s") from None
        finally:
            send(process, signal.SIGKILL)
            process.wait()
        check_exit(process, errors)
    return out.decode()


def run_peer(peer: Peer, python: str, asked: Sequence[Work]) -> dict[str, dict[str, float]]:
    """Has a peer make its rounds; returns milliseconds for each model."""
    program, *rest = peer.command
    lines = run_program([python, str(HERE / program), to_text(asked), *rest]).splitlines()
    said = [json.loads(line) for line in lines if line.startswith("{")]
    return {each["size"]: spread(each["seconds"], 1e3) for each in said}


def run_ours(sizes: Sequence[str], quick: bool) -> dict[str, dict[str, dict[str, float]]]:
    """Has `round.py` make its rounds; returns milliseconds for each transport, without and with buffers, and model."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "round.json"
        setting = ["--workers", str(WORKERS), "--servers", "1", "--chief", "worker", "--repeats", "1"]
        setting += ["--gradients", "arrays", "--gradients", "buffers"]
        chosen = [word for size in sizes for word in ("--sizes", size)] + ["--quick"] * quick
        run_program([sys.executable, str(HERE.parent / "round.py"), *setting, *chosen, "--json", str(file)])
        rows = json.loads(file.read_text(encoding="utf-8"))["rounds"]
    found: dict[str, dict[str, dict[str, float]]] = {}
    for row in rows:
        transport = row["transport"] + " transport" + ", buffers" * (row["gradients"] == "buffers")
        found.setdefault(transport, {})[row["size"]] = row["ms"]
    return found


# ---- All of them ----


@dataclass
class Comparison:
    """Everything that was measured in one run.

    Attributes:
        sizes: keys of `MODELS`.
        quick: whether to measure a few rounds only.
        pythons: that may have the peers' packages.
        rows: by a name for each system and transport.
        excluded: systems that were not measured, and why.
        failed: whether one was left out because it failed.
        limits: of the machine.
    """

    sizes: Sequence[str]
    quick: bool
    pythons: Sequence[str]
    rows: dict[str, Row] = field(default_factory=dict)
    excluded: dict[str, str] = field(default_factory=dict)
    failed: bool = False
    limits: Limits = field(default_factory=Limits)

    def lap(self, systems: Sequence[str]) -> None:
        """Measures each system once, in turns with the limits."""
        self.limits.measure()
        for system in systems:
            if system in self.excluded:
                continue
            try:
                self._measure(system)
            except Failed as error:
                self.excluded[system] = f"failed, {error}"
                self.failed = True
            self.limits.measure()

    def _measure(self, system: str) -> None:
        if system == OURS:
            for name, found in run_ours(self.sizes, self.quick).items():
                self._add(Row(f"this project, {name}", name.split()[0]), found)
            return
        peer = PEERS[system]
        chosen = python_for(peer.package, [sys.executable] if peer.package == OWN_PACKAGE else self.pythons)
        if not chosen:
            self.excluded[system] = f"skipped, {peer.package} is not installed for {' or '.join(self.pythons)}"
            return
        python, version = chosen
        self._add(
            Row(peer.name, peer.beside, f"{peer.package} {version}"),
            run_peer(peer, python, works(self.sizes, self.quick)),
        )

    def _add(self, row: Row, found: dict[str, dict[str, float]]) -> None:
        row = self.rows.setdefault(row.name, row)
        for size, ms in found.items():
            row.ms.setdefault(size, []).append(ms)

    def report(self) -> dict[str, Any]:
        """Everything as it is written with `--json`."""
        return {
            "format": FORMAT,
            "machine": machine(),
            "limits": self.limits.report(),
            "rounds": [
                {"system": row.name, "beside": row.beside, "version": row.version, "size": size, "ms": row.whole(size)}
                for row in self.rows.values()
                for size in self.sizes
                if size in row.ms
            ],
            "excluded": self.excluded,
        }


def limit_times(found: dict[str, Any], size: str) -> Iterator[float]:
    """Milliseconds that plain TCP, and memcpy, take for the bytes that a round moves: all pushes and pulls."""
    moved = 2 * WORKERS * MODELS[size].nbytes
    limits = {name: each["median"] for name, each in found["limits"].items()}
    yield limits["tcp_round_trip_us"] / 1e3 + moved / limits["tcp_gb_per_s"] / 1e6
    yield moved / limits["memcpy_gb_per_s"] / 1e6


def table(found: dict[str, Any], sizes: Sequence[str]) -> Table:
    """Rows are systems and limits, columns the models. A limit is the time that it needs for all pushes and pulls."""
    title = f"A synchronous round, {WORKERS} workers, 1 server: median ms (p90)"
    drawn = Table(title=title, title_justify="left")
    for heading in ("system", "beside"):
        drawn.add_column(heading, no_wrap=True)
    for size in sizes:
        drawn.add_column(f"{size} in {MODELS[size].variables}", justify="right", no_wrap=True)
    ms = {(row["system"], row["size"]): row["ms"] for row in found["rounds"]}
    for name, beside in dict.fromkeys((row["system"], row["beside"]) for row in found["rounds"]):
        drawn.add_row(name, beside, *(cell(ms.get((name, size))) for size in sizes))
    drawn.add_section()
    names = ("limit: TCP one way", "limit: memcpy")
    for name, times in zip(names, zip(*(limit_times(found, size) for size in sizes), strict=True), strict=True):
        drawn.add_row(name, "", *(f"{time:.3g}" for time in times))
    return drawn


def cell(ms: dict[str, float] | None) -> str:
    """A figure, and in brackets how far it scatters."""
    return f"{ms['median']:.3g} ({ms['p90']:.3g})" if ms else "-"


@click.command(help=(__doc__ or "").partition("\n\n")[0])
@click.option("--sizes", multiple=True, type=click.Choice(list(MODELS)), default=SIZES, show_default=True)
@click.option("--systems", multiple=True, type=click.Choice([OURS, *PEERS]), help="Systems to measure [default: all].")
@click.option("--python", "pythons", multiple=True, help="A Python that has peers' packages [default: this one].")
@click.option("--repeats", type=click.IntRange(1), help="How many times over [default: 3, with --quick 1].")
@click.option("--quick", is_flag=True, help="A few rounds only.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures here.")
def main(
    sizes: tuple[str, ...],
    systems: tuple[str, ...],
    pythons: tuple[str, ...],
    repeats: int | None,
    quick: bool,
    json_file: Path | None,
) -> None:
    """Measures everything, and prints it; exits with 1 if a system failed."""
    console = Console()
    compared = Comparison(sizes, quick, pythons or (sys.executable,))
    laps = repeats or (1 if quick else 3)
    for lap in range(laps):
        with console.status(f"lap {lap + 1} of {laps}"):
            compared.lap(systems or (OURS, *PEERS))
    found = compared.report()
    console.print(table(found, sizes))
    for system, why in compared.excluded.items():
        console.print(f"{PEERS[system].name if system in PEERS else system}: {why}", soft_wrap=True)
    if json_file:
        json_file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    sys.exit(compared.failed)


if __name__ == "__main__":
    main()
