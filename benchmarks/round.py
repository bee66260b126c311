"""Time of a synchronous round: gradients out, update on the servers, new values back on every worker.

    python benchmarks/round.py             every transport, with both kinds of chief
    python benchmarks/round.py --quick     the same in a few seconds each, for a first look
    make bench

Each cluster is one of real processes on this machine. The clusters take turns with measurements of memcpy
and of plain TCP on loopback, several times over, so that all sides see the same machine. A round begins
when a worker has its gradients and ends when it has the values of all variables. Processor time and memory are
looked at while all workers wait: between the warm-up and the first measured round, and after the last one.

Not measured unless asked for, since they are long or large:

    --rounds 10000 --sizes 4KB             does memory grow?
    --sizes 3GiB --workers 1               one variable of 3 GiB
    --optimizer sgd --optimizer adam       beside each other
    --allocator tuned --allocator plain    with what our launcher tells the allocator, and without
    --security token --security tls        with a token alone, and with mutual TLS as well
    --gradients arrays --gradients buffers without and with `strategy.buffer`
    --compression none --compression int8  as they are, and compressed
    --device cpu --device gpu:0            variables on the CPU, and on a GPU
    --worker-device gpu:0                  gradients and values of workers on a GPU
    --traces off --traces otlp             without and with spans, for a collector that is there

`--json FILE` writes `{"format", "machine", "limits", "rounds"}`; docs/lab/performance.md says what is in it.
"""

from __future__ import annotations

import json
import logging
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from io import FileIO
from itertools import product
from pathlib import Path
from typing import Any, TypeVar, get_args

import click
import numpy as np
from figures import draw, machine, publish, tables
from limits import Limits
from measures import Cost, at_rest, spread
from models import MODELS, SIZES
from rich.console import Console

import psclient as ps
from psclient._src.arrays.devices import Device, namespace, to_device
from psclient._src.config import GLIBC_TUNABLES
from psclient._src.launch.cluster import Cluster
from psclient._src.processes.output import Line
from psclient._src.rounds.placement import PsStrategy
from psclient.psctl.certificate_authority import Authority, paths
from pswire.cluster import Task
from pswire.network.traffic import TRANSPORTS
from pswire.security.identity import SecurityOptions
from pswire.security.names import task_name
from pswire.server_options import ServerOptions
from pswire.traces.options import CHOICES

Command = TypeVar("Command", bound=Callable[..., object])

FORMAT = 2
SECONDS = 3600
"""How long the rounds of one cluster may take."""

PLOT = Path(__file__).resolve().parent.parent / "docs" / "round.png"
FIRST = Task("worker", 0)
CHIEFS = {"own": "driver", "worker": "none"}
"""Who is chief, a task of its own or worker 0, and what a launch calls that."""

ALLOCATORS = {"tuned": GLIBC_TUNABLES, "plain": ""}
"""The allocator of all processes: what the launcher tells it, huge pages among that, or nothing."""

GRADIENTS = ("arrays", "buffers")
"""Where workers compute gradients."""

SECURITY = ("token", "tls")
"""What keeps others out: the token that our launcher draws, or mutual TLS as well."""

OPTIMIZERS: Mapping[str, Callable[[], ps.optimizers.Optimizer]] = {
    "sgd": lambda: ps.optimizers.SGD(0.1),
    "adam": lambda: ps.optimizers.Adam(1e-3),
}

COMPRESSION: Mapping[str, ps.compression.Compression | None] = {
    "none": None,
    "float16": ps.compression.Float16(),
    "bfloat16": ps.compression.BFloat16(),
    "int8": ps.compression.Int8(),
    "int4": ps.compression.Int4(),
    "topk": ps.compression.TopK(0.01),
}
"""How contributions travel; `topk` sends one in a hundred."""

LOOK = "look"
"""What worker 0 prints while all workers wait; they go on when a byte has come through the gate."""

MEASURED = "measured"
"""What it prints before the file in which the figures of a model are."""


@dataclass(frozen=True)
class Setting:
    """A cluster to measure.

    Attributes:
        transport: the only one that may be used.
        chief: a key of `CHIEFS`.
        workers, servers: how many.
        optimizer: a key of `OPTIMIZERS`.
        allocator: a key of `ALLOCATORS`.
        security: one of `SECURITY`.
        gradients: one of `GRADIENTS`.
        compression: a key of `COMPRESSION`.
        device: the servers' device.
        worker_device: the device of each worker's replica.
        traces: "off", or "otlp" to a collector that `OTEL_EXPORTER_OTLP_ENDPOINT` names.
    """

    transport: str
    chief: str
    workers: int
    servers: int
    optimizer: str
    allocator: str
    security: str
    gradients: str
    compression: str
    device: str = "cpu"
    worker_device: str = "cpu:0"
    traces: str = "off"

    def __str__(self) -> str:
        return (
            f"{self.transport} transport, {self.workers} workers, {self.servers} servers, chief: {self.chief}, "
            f"{self.optimizer}, {self.allocator} allocator, {self.security}, "
            f"gradients in {self.gradients}, compression: {self.compression}, variables on {self.device}, "
            f"replicas on {self.worker_device}, traces: {self.traces}"
        )


@dataclass
class Measured:
    """What was measured of one model in one cluster; all but `seconds` once for each series of rounds.

    Attributes:
        seconds: of each round, as worker 0 sees it.
        server_cpu, worker_cpu: seconds of processor time for a round, of the busiest server and of worker 0.
        server_rss: resident bytes of the largest server after the last round.
        server_growth, worker_growth: by how much they have become more since the warm-up.
        sent: bytes that worker 0 sent in a round.
    """

    seconds: list[float] = field(default_factory=list)
    server_cpu: list[float] = field(default_factory=list)
    worker_cpu: list[float] = field(default_factory=list)
    server_rss: list[int] = field(default_factory=list)
    server_growth: list[int] = field(default_factory=list)
    worker_growth: list[int] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, said: dict[str, Any], before: Sequence[Cost], after: Sequence[Cost]) -> Measured:
        """One series: what worker 0 says, and what the servers had used before and after it."""
        used = [end.since(begin) for begin, end in zip(before, after, strict=True)]
        rounds = len(said["seconds"])
        return cls(
            said["seconds"],
            [max(each.seconds for each in used) / rounds],
            [said["cpu"] / rounds],
            [max(each.rss for each in after)],
            [max(each.rss for each in used)],
            [said["growth"]],
            [said["sent"] / rounds],
        )

    def add(self, other: Measured) -> None:
        """One more series."""
        for each in fields(self):
            getattr(self, each.name).extend(getattr(other, each.name))


@dataclass(frozen=True)
class Options:
    """What every cluster is told.

    Attributes:
        sizes: keys of `MODELS`.
        quick: whether to measure a few rounds only.
        rounds: how many to measure at a time; None leaves it to the model.
        ps_strategy: which server holds a variable.
    """

    sizes: tuple[str, ...]
    quick: bool
    rounds: int | None
    ps_strategy: PsStrategy

    def args(self, setting: Setting, gate: Path) -> tuple[str, ...]:
        """The arguments of the worker script, which is this file."""
        sizes = [arg for size in self.sizes for arg in ("--sizes", size)]
        names = ("optimizer", "gradients", "compression", "worker_device")
        chosen = [arg for name in names for arg in (f"--{name.replace('_', '-')}", getattr(setting, name))]
        rounds = [] if self.rounds is None else ["--rounds", str(self.rounds)]
        chosen += ["--ps-strategy", self.ps_strategy, *["--quick"] * self.quick]
        return ("--as-worker", str(gate), *sizes, *chosen, *rounds)

    def count(self, size: str) -> int:
        """How many rounds of a model are measured at a time."""
        return self.rounds or MODELS[size].count(self.quick)


# ---- In a worker ----


class Worker:
    """Makes rounds of each model; worker 0 tells the launcher of them.

    Args:
        options: what to do.
        optimizer: a key of `OPTIMIZERS`.
        gradients: one of `GRADIENTS`.
        compression: a key of `COMPRESSION`.
        worker_device: the device of its replica.
        gate: a pipe through which the launcher lets worker 0 go on.
    """

    def __init__(
        self,
        options: Options,
        optimizer: str,
        gradients: str,
        compression: str,
        worker_device: str,
        gate: Path,
    ) -> None:
        self._options = options
        self._buffers = gradients == "buffers"
        self._optimizer = optimizer
        self._gate = gate
        self._transports = _Transports()
        self._device = Device.parse(worker_device)
        self._strategy = ps.ParameterServerStrategy(
            devices=[worker_device],
            ps_strategy=options.ps_strategy,
            compression=COMPRESSION[compression],
        )
        self._compressed = COMPRESSION[compression] is not None

    def run(self) -> None:
        """Everything, to its end."""
        with self._strategy, self._strategy.scope():
            for size in self._options.sizes:
                said = self._measure(size)
                if self._strategy.task == FIRST:
                    # Not as a line: many rounds make one that is longer than the launcher takes.
                    report = self._gate.with_name(f"{size}.json")
                    report.write_text(
                        json.dumps({"size": size, "transport": self._transports.last, **said}), encoding="utf-8"
                    )
                    print(MEASURED, report, flush=True)

    def _measure(self, size: str) -> dict[str, Any]:
        shapes = MODELS[size].shapes()
        variables = [ps.Variable(np.zeros(shape, "float32"), name=f"{size}/{i}") for i, shape in enumerate(shapes)]
        gradients = [np.full(shape, 1e-3, "float32") for shape in shapes]
        if self._compressed:  # of which some are larger than others
            rng = np.random.default_rng(0)
            gradients = [rng.standard_normal(shape, "float32") * np.float32(1e-3) for shape in shapes]
        gradients = [to_device(gradient, self._device) for gradient in gradients]
        optimizer = OPTIMIZERS[self._optimizer]()

        def make_round() -> float:
            nonlocal gradients
            if self._buffers:
                gradients = [self._strategy.buffer(variable) for variable in variables]
                for gradient in gradients:
                    if gradient[0] != np.float32(1e-3):  # both of a variable keep what was once computed
                        gradient.fill(1e-3)
            start = time.perf_counter()
            self._strategy.run(optimizer.apply_gradients, args=(list(zip(gradients, variables, strict=True)),))
            self._look_at(variables)
            return time.perf_counter() - start

        for _ in range(2):  # the second time with the kernels that the servers have compiled by then
            for _ in range(MODELS[size].warm):
                make_round()
            self._wait()
        before, sent = Cost.of(os.getpid()), self._strategy.bytes_transferred[0]
        seconds = [make_round() for _ in range(self._options.count(size))]
        used = Cost.of(os.getpid()).since(before)
        sent = self._strategy.bytes_transferred[0] - sent
        self._wait()
        return {"seconds": seconds, "cpu": used.seconds, "growth": used.rss, "sent": sent}

    def _look_at(self, variables: Sequence[ps.Variable]) -> None:
        """Waits for the values of all variables where the replica computes."""
        if self._device.kind == "cpu":
            for variable in variables:
                variable.numpy()
            return
        self._strategy.run(lambda: [variable.read_value() for variable in variables])
        namespace(self._device).cuda.Device(self._device.index).synchronize()

    def _wait(self) -> None:
        """All workers wait while the launcher looks at the servers."""
        if self._strategy.task == FIRST:
            print(LOOK, flush=True)
            with FileIO(self._gate) as gate:
                gate.read(1)
        self._strategy.reduce("sum", np.float32(0), axis=None)


class _Transports(logging.Handler):
    """Hears in the log which transport is used: the one that was asked for may not work, and then the next one is."""

    def __init__(self) -> None:
        super().__init__()
        self.last = "grpc"  # of which nothing is said where nothing else is wanted
        log = logging.getLogger("psclient.transports")
        log.setLevel(logging.INFO)
        log.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        match = re.match(r"(\w+) transport to ", record.getMessage())
        if match:
            self.last = match[1]


# ---- In the launcher ----


def measure(setting: Setting, options: Options) -> dict[str, Measured]:
    """Starts a cluster, has it make rounds of each model, and ends it.

    Raises:
        ClickException: a task failed, or used another transport.
    """
    found: dict[str, Measured] = {}
    looks: list[list[Cost]] = []
    transports = set[str]()

    def hear(line: Line) -> None:
        if line.task != FIRST or line.error:
            return
        if line.text == LOOK:
            looks.append(_costs_at_rest(cluster))
            gate.write(b"\0")
        elif line.text.startswith(MEASURED):
            said = json.loads(Path(line.text.removeprefix(MEASURED).strip()).read_text(encoding="utf-8"))
            found[said["size"]] = Measured.of(said, *looks[-2:])
            transports.add(said["transport"])

    with _gate() as (path, gate), _security(setting) as security:
        cluster = Cluster(
            sink=hear,
            ps=setting.servers,
            workers=setting.workers,
            chief=CHIEFS[setting.chief],
            transport=setting.transport,
            security=security,
            script=str(Path(__file__)),
            args=options.args(setting, path),
            server=ServerOptions(device=setting.device),
            traces=setting.traces,
        )
        with _allocator(setting.allocator), cluster:
            outcome = cluster.wait(SECONDS)
    if outcome.code:
        raise click.ClickException(f"{setting}: {outcome.report}")
    if transports != {setting.transport}:
        raise click.ClickException(f"{setting}: worker 0 used {', '.join(sorted(transports))}")
    return found


@contextmanager
def _gate() -> Iterator[tuple[Path, FileIO]]:
    """A named pipe, which never blocks us: we hold both of its ends."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "gate"
        os.mkfifo(path)
        with FileIO(path, "r+") as gate:
            yield path, gate


@contextmanager
def _allocator(name: str) -> Iterator[None]:
    """The processes that are started have this allocator."""
    before = os.environ.get("GLIBC_TUNABLES")
    os.environ["GLIBC_TUNABLES"] = ALLOCATORS[name]
    try:
        yield
    finally:
        del os.environ["GLIBC_TUNABLES"]
        os.environ |= {"GLIBC_TUNABLES": before} if before is not None else {}


@contextmanager
def _security(setting: Setting) -> Iterator[SecurityOptions]:
    """The files of a cluster's tasks."""
    if setting.security != "tls":
        yield SecurityOptions()
        return
    with tempfile.TemporaryDirectory() as directory:
        authority = Authority(Path(directory), 1)
        tasks = [Task("ps", index) for index in range(setting.servers)]
        tasks += [Task("worker", index) for index in range(setting.workers)]
        for task in (*tasks, Task("chief", 0)):
            authority.issue(task_name(task), renew=False)
        yield paths(Path(directory))


def _costs_at_rest(cluster: Cluster) -> list[Cost]:
    return at_rest([process.pid for task, process in cluster.processes.items() if task.job == "ps"])


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
                total.setdefault((size, setting), Measured()).add(measured)
            limits.measure()
    return limits, total


# ---- Results ----


def report(limits: Limits, total: dict[tuple[str, Setting], Measured], options: Options) -> dict[str, Any]:
    """Everything as it is written with `--json`."""
    rows = [
        row(size, setting, total[size, setting], options, limits)
        for size in options.sizes
        for setting in [setting for found, setting in total if found == size]
    ]
    for each in rows:
        each["to_sgd"] = _ratio(each, rows, "optimizer", "sgd")
        each["to_token"] = _ratio(each, rows, "security", "token")
        each["to_whole"] = _ratio(each, rows, "compression", "none")
    return {"format": FORMAT, "machine": machine(), "limits": limits.report(), "rounds": rows}


def row(size: str, setting: Setting, measured: Measured, options: Options, limits: Limits) -> dict[str, Any]:
    """One line of the table."""
    model = MODELS[size]
    rate = 2 * model.nbytes * setting.workers / statistics.median(measured.seconds)
    return {
        "size": size,
        "nbytes": model.nbytes,
        "variables": model.variables,
        **vars(setting),
        "ps_strategy": options.ps_strategy,
        "rounds": len(measured.seconds),
        "ms": spread(measured.seconds, 1e3),
        "gb_per_s": rate / 1e9,
        "to_tcp": rate / statistics.median(limits.tcp),
        "to_memcpy": rate / statistics.median(limits.memcpy),
        "server_cpu_ms": 1e3 * statistics.median(measured.server_cpu),
        "worker_cpu_ms": 1e3 * statistics.median(measured.worker_cpu),
        "server_rss_mb": max(measured.server_rss) / 1e6,
        "server_growth_mb": max(measured.server_growth) / 1e6,
        "worker_growth_mb": max(measured.worker_growth) / 1e6,
        "sent_mb": statistics.median(measured.sent) / 1e6,
    }


def _ratio(row: dict[str, Any], rows: Sequence[dict[str, Any]], key: str, base: str) -> float | None:
    """Its time beside that of the row of the same model and cluster otherwise; None where there is none."""
    same = ("size", *(each.name for each in fields(Setting) if each.name != key))
    found = (other for other in rows if other[key] == base and all(other[name] == row[name] for name in same))
    return next((row["ms"]["median"] / other["ms"]["median"] for other in found), None)


def _choices(name: str, known: Sequence[str], default: Sequence[str], text: str) -> Callable[[Command], Command]:
    """An option of several values."""
    return click.option(name, multiple=True, type=click.Choice(known), default=default, show_default=True, help=text)


@click.command(help=(__doc__ or "").partition("\n\n")[0])
@_choices("--sizes", list(MODELS), SIZES, "Models to measure.")
@_choices("--transport", TRANSPORTS, TRANSPORTS[::-1], "Transports to measure.")
@_choices("--chief", list(CHIEFS), list(CHIEFS), "A chief of its own, or worker 0.")
@click.option("--workers", multiple=True, type=click.IntRange(1), default=(2,), show_default=True)
@click.option("--servers", multiple=True, type=click.IntRange(1), default=(1,), show_default=True)
@_choices("--optimizer", list(OPTIMIZERS), ("sgd",), "With sgd and adam, the table has their ratio.")
@_choices("--allocator", list(ALLOCATORS), ("tuned",), "As our launcher sets it, with huge pages, or not at all.")
@_choices("--security", SECURITY, SECURITY[:1], "With token and tls, the table has their ratio.")
@_choices("--gradients", GRADIENTS, GRADIENTS[:1], "In arrays of its own, or in those of strategy.buffer.")
@_choices("--compression", list(COMPRESSION), ("none",), "With none and others, the table has their ratio.")
@click.option("--device", multiple=True, default=("cpu",), show_default=True, help="The servers': cpu, or gpu:N.")
@click.option("--worker-device", multiple=True, default=("cpu:0",), show_default=True, help="The replicas'.")
@_choices("--traces", CHOICES, CHOICES[:1], "With otlp a collector has to be there, by OTEL_EXPORTER_OTLP_ENDPOINT.")
@click.option("--ps-strategy", type=click.Choice(get_args(PsStrategy)), default="greedy", show_default=True)
@click.option("--rounds", type=click.IntRange(1), help="How many to measure at a time [default: the model's].")
@click.option("--repeats", type=click.IntRange(1), help="How many times over [default: 3, with --quick 1].")
@click.option("--quick", is_flag=True, help="A few rounds only.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures here.")
@click.option("--plot", is_flag=True, help="Also draw docs/round.png; needs matplotlib, which the extra `bench` has.")
@click.option("--as-worker", "gate", type=click.Path(path_type=Path), hidden=True)
def main(
    sizes: tuple[str, ...],
    rounds: int | None,
    ps_strategy: PsStrategy,
    repeats: int | None,
    quick: bool,
    json_file: Path | None,
    plot: bool,
    gate: Path | None,
    **chosen: tuple[Any, ...],
) -> None:
    """Measures, or is a worker of a cluster that is measured."""
    options = Options(sizes, quick, rounds, ps_strategy)
    if gate:
        names = ("optimizer", "gradients", "compression", "worker_device")
        asked = {name: chosen[name][0] for name in names}
        Worker(options, gate=gate, **asked).run()
        return
    console = Console()
    settings = [Setting(*each) for each in product(*(chosen[each.name] for each in fields(Setting)))]
    limits, total = laps(settings, options, repeats or (1 if quick else 3), console)
    found = report(limits, total, options)
    publish(console, found, tables(found), json_file, partial(draw, found, PLOT) if plot else None)


if __name__ == "__main__":
    main()
