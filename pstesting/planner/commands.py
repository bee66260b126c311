"""Commands that `psctl` has where this package is installed."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast, get_args

import click
from rich.table import Table

from psclient.psctl.output import table
from psclient.psctl.settings import PLAN, CommandSettings, command
from pstesting.planner import network as networks
from pstesting.planner.tables import Collection, PlannedTable, Sample, collections_of, plan_tables
from pstesting.planner.typical import TYPICAL
from pstesting.simulation.costs import Costs
from pswire.cluster import check_address
from pswire.errors import ConfigError
from pswire.flags import Decorated, Flag
from pswire.limits import Timeouts
from pswire.model.compression import Codec, CodecKind
from pswire.model.tensor import TensorSpec
from pswire.network.traffic import TransportName
from pswire.sizes import counted, human, parse_bytes

if TYPE_CHECKING:
    from pstesting.planner.local_steps import LocalPrediction
    from pstesting.planner.plan import Prediction

MEASURED = Path("costs.json")
"""Where `psctl calibrate` writes, and `psctl plan` looks, unless they are told otherwise."""

BUSY = 0.5
"""Load of each core, before it begins, above which a calibration says that others use this machine."""


@command(
    PLAN,
    ("Measure this host, and write costs.json", "psctl calibrate"),
    ("Answer another host once, on port 2300", "psctl calibrate --answer 2300"),
    ("Measure that host's network as well, from another host", "psctl calibrate --peer node1:2300"),
    connects=False,
)
@click.option(
    "--transport",
    "transports",
    multiple=True,
    type=click.Choice(get_args(TransportName)),
    default=get_args(TransportName),
    show_default=True,
    help="Transports to measure.",
)
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    default=str(MEASURED),
    show_default=True,
    help="File for the cost model.",
)
@click.option(
    "--turns",
    cls=Flag,
    type=click.IntRange(1),
    default=1,
    show_default=True,
    metavar="N",
    help="Measure N times and take medians; more on a host whose speed varies.",
)
@click.option(
    "--peer", metavar="HOST:PORT", help="Also measure the network to a host that runs psctl calibrate --answer."
)
@click.option(
    "--answer", "answers", metavar="[HOST:]PORT", help="Answer another host's --peer on this port once, and exit."
)
def calibrate(
    told: CommandSettings,
    transports: tuple[TransportName, ...],
    output: Path,
    turns: int,
    peer: str | None,
    answers: str | None,
) -> int:
    """Measure this host for psctl plan.

    Run small jobs of one to eight workers, for about a minute per transport and turn, and write a cost model: the times
    of a push, a round, a variable and a byte. Nothing else should use the host meanwhile. --peer adds ten seconds.
    """
    if answers is not None:
        host, port = check_address(answers if ":" in answers else f"0.0.0.0:{answers}", "--answer")
        networks.answer(
            host, port, lambda at: click.echo(f"waiting at {at} for the measurement of another host", err=True)
        )
        return 0
    pair = None if peer is None else check_address(peer, "--peer")
    try:
        from pstesting.planner.fit import calibrated
        from pstesting.planner.measurements import measure
    except ImportError as error:
        raise _lacking("calibrate", error) from error
    if not output.parent.is_dir():
        raise ConfigError(f"--output {output}: there is no directory {output.parent}")
    load, begun = os.getloadavg()[0] / (os.cpu_count() or 1), time.monotonic()
    if load > BUSY:
        click.echo(
            f"psctl: other processes use this host (load {load:.1f} per core), so the measured costs are too high",
            err=True,
        )
    found = None if pair is None else networks.measure(*pair)  # first: what is wrong is told at once
    costs = calibrated([measure(transports) for _ in range(turns)])
    if found is not None:
        costs = replace(costs, network=found.rate, network_latency=found.latency)
    costs.write(output)
    seconds = time.monotonic() - begun
    lines = [f"{output}: {costs.machine}, {costs.cores} cores, in {seconds:.0f} s"]
    if found is not None:
        later = f"{1e6 * found.latency:.0f} us more latency than within it"
        lines.append(f"between this host and {peer}: {8e-9 * found.rate:.3g} Gbit/s each way, {later}")
    return told.tell({"costs": costs, "file": str(output), "seconds": seconds}, _drawn(costs), *lines)


def _number(
    name: str, kind: click.IntRange | click.FloatRange, default: float, about: str
) -> Callable[[Decorated], Decorated]:
    """An option with a number."""
    return click.option(name, cls=Flag, type=kind, default=default, show_default=True, metavar="N", help=about)


_RATE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)bit(?:/s)?\s*", re.IGNORECASE)
_TIME = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(us|ms|s|min|h|d)\s*")
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_COUNT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMG]?)\s*")
_TABLE = re.compile(r"(.*):([0-9]{1,6})\s*")
_THOUSANDS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def rate_of(text: str) -> float:
    """Bytes per second of `25Gbit`."""
    match = _RATE.fullmatch(text)
    if not match or float(match[1]) == 0:
        raise ConfigError(f"--network {text!r} is not a rate; write bits per second with a unit, such as 25Gbit")
    return float(match[1]) * _THOUSANDS[match[2].upper()] / 8


def _seconds(text: str, flag: str) -> float:
    """Seconds of `120ms`."""
    match = _TIME.fullmatch(text)
    if not match:
        raise ConfigError(f"{flag} {text!r} is not a time; write a number with a unit, such as 120ms, 10min or 90d")
    return float(match[1]) * _UNITS[match[2]]


def _count(text: str) -> float | None:
    """A number of `200M`; None if it is none."""
    match = _COUNT.fullmatch(text)
    return float(match[1]) * _THOUSANDS[match[2].upper()] if match else None


def _table(text: str) -> tuple[float, int]:
    """Rows and dimension of `200M:64`."""
    match = _TABLE.fullmatch(text)
    rows, dimension = (_count(match[1]), int(match[2])) if match else (None, 0)
    if rows is None or dimension == 0:
        raise ConfigError(f"--rows {text!r} is not a table; write rows and numbers per row, such as 200M:64")
    return rows, dimension


@command(
    PLAN,
    (
        "A dense model of 10 GB on 16 workers with 25 Gbit/s",
        "psctl plan --workers 16 --parameters 10GB --network 25Gbit --step 120ms",
    ),
    (
        "An embedding table of 200 million rows of 64 numbers",
        "psctl plan --workers 8 --rows 200M:64 --ids 50000 --network 10Gbit",
    ),
    (
        "Tables of 16 numbers per row, of which sample.npz has ids",
        "psctl plan --workers 8 --tables sample.npz --examples 45M --batch 4096",
    ),
    connects=False,
)
@click.option("--workers", cls=Flag, type=click.IntRange(1), required=True, metavar="N", help="Number of workers.")
@_number("--per-host", click.IntRange(1), 1, "Number of workers on each host.")
@click.option("--parameters", default="0", show_default=True, metavar="SIZE", help="Bytes of all dense variables.")
@_number("--variables", click.IntRange(1), 100, "Number of dense variables.")
@click.option("--rows", metavar="ROWS:DIM", help="Rows of all tables and numbers per row, such as 200M:64.")
@_number("--ids", click.IntRange(0), 0, "Distinct ids in a worker's batch.")
@click.option(
    "--tables",
    "sample",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="SAMPLE",
    help="File with ids of some examples (.npz, .npy or .csv): suggests tables, and replaces --rows and --ids.",
)
@click.option("--examples", metavar="N", help="Number of the job's examples, such as 45M. [default: those of --tables]")
@_number("--dim", click.IntRange(1), 16, "Numbers per row of --tables.")
@_number("--batch", click.IntRange(1), 1024, "Examples in a worker's batch of --tables.")
@click.option("--network", metavar="RATE", help="Bandwidth per host and direction. [default: that of --costs]")
@click.option("--step", default="0s", show_default=True, metavar="TIME", help="Time that a worker computes per step.")
@_number("--slots", click.IntRange(0), 2, "Slot variables per variable: 2 for Adam, 0 for SGD.")
@click.option("--memory", default="0", show_default=True, metavar="SIZE", help="Memory of a server; 0 for unlimited.")
@click.option(
    "--copies", is_flag=True, help="Keep a copy of each variable on another server (PS_REPLICATION_FACTOR=2)."
)
@click.option(
    "--transport",
    type=click.Choice(get_args(TransportName)),
    default="tcp",
    show_default=True,
    help="Transport of pushes.",
)
@click.option("--mtbf", default="90d", show_default=True, metavar="TIME", help="Mean time between failures of a host.")
@click.option("--save-every", default="10min", show_default=True, metavar="TIME", help="Time between checkpoints.")
@click.option("--restart", default="1min", show_default=True, metavar="TIME", help="Time that a restart takes.")
@click.option(
    "--compression",
    type=click.Choice(["none", "float16", "bfloat16", "int8", "int4"]),
    default="none",
    show_default=True,
    help="How gradients are compressed.",
)
@click.option("--round-trip", metavar="TIME", help="Time of a message and its answer. [default: that of --costs]")
@click.option(
    "--sync-every",
    type=click.IntRange(1),
    multiple=True,
    metavar="H",
    help="Train by local steps (DiLoCo), and exchange after each H of them. Several are compared.",
)
@_number("--fragments", click.IntRange(1), 1, "Fragments of the model, which local steps exchange one by one.")
@_number("--sync-delay", click.IntRange(0), 0, "Local steps that are made while an exchange is under way.")
@click.option("--grace", metavar="TIME", help="Time that a quorum waits for a lost worker. [default: session timeout]")
@_number("--worth", click.FloatRange(0.01, 0.9), 0.1, "Part of a step that twice as many servers must save.")
@click.option(
    "--costs",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Cost model that psctl calibrate wrote on such a host. [default: costs.json if it is there, else built-in]",
)
@click.option(
    "--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw a PNG or SVG file; needs matplotlib."
)
def plan(
    told: CommandSettings,
    workers: int,
    per_host: int,
    parameters: str,
    variables: int,
    rows: str | None,
    ids: int,
    sample: Path | None,
    examples: str | None,
    dim: int,
    batch: int,
    network: str | None,
    step: str,
    slots: int,
    memory: str,
    copies: bool,
    transport: TransportName,
    mtbf: str,
    save_every: str,
    restart: str,
    compression: str,
    round_trip: str | None,
    sync_every: tuple[int, ...],
    fragments: int,
    sync_delay: int,
    grace: str | None,
    worth: float,
    costs: Path | None,
    plot: Path | None,
) -> int:
    """Predict how many servers a job needs, and its bottleneck.

    Simulate the job with 1, 2, 4 and more servers by a cost model of the machines, each server on its own host. This
    takes seconds to minutes. Or predict training by local steps. Predictions are as good as the cost model: measure
    your hosts with psctl calibrate, and compare a prediction with a job that you have. The built-in costs show how a
    job scales, on a network of 10 Gbit/s.

    From ids of examples that were drawn at random also suggest tables: a .npz file with an array per table, (examples,)
    or (examples, ids); a .npy file with an array (examples, tables); or a .csv file with the names of the tables in its
    first line, and ids in the cells, several with spaces between them. For each table it shows the distinct ids among
    all examples with an interval of 95 %, if rare ids follow a power law; the error of the same estimate from a tenth
    of the sample; the kind of table that takes less memory; and the collection in which it can be stored with others.
    For 20 times the ids of samples from Zipf laws the estimates were within 10 %.
    """
    try:
        from pstesting.planner import local_steps
        from pstesting.planner import plan as planning

        if plot is not None:  # what it needs is missed before minutes of work
            from pstesting.planner.drawing import draw
    except ImportError as error:
        raise _lacking("plan", error) from error
    if costs is None and MEASURED.exists():
        costs = MEASURED
    model = TYPICAL if costs is None else Costs.read(costs)
    if network is None and not model.network:
        raise ConfigError(
            f"{costs} has no network between hosts; give --network, such as 25Gbit, or measure it with psctl "
            "calibrate --peer"
        )
    if round_trip is not None:
        model = replace(model, network_latency=_seconds(round_trip, "--round-trip") / 2)
    count, dimension = _table(rows) if rows else (0.0, 0)
    tables: list[PlannedTable] = []
    if sample is not None:
        if rows or ids:
            raise ConfigError("--tables finds rows and ids itself; leave out --rows and --ids")
        tables = _planned_tables(sample, examples, batch, 4.0 * dim * (1 + slots))
        count, dimension = float(sum(each.rows for each in tables)), dim
        ids = math.ceil(sum(each.batch for each in tables))
    question = planning.Question(
        model,
        workers,
        parse_bytes(parameters, "--parameters"),
        variables,
        count,
        dimension,
        ids,
        model.network if network is None else rate_of(network),
        _seconds(step, "--step"),
        slots,
        parse_bytes(memory, "--memory"),
        copies,
        transport,
        worth,
        _seconds(mtbf, "--mtbf") or math.inf,
        _seconds(save_every, "--save-every"),
        _seconds(restart, "--restart"),
        per_host,
        _compressed(compression),
    )
    if sync_every:
        wait = Timeouts().session_timeout if grace is None else _seconds(grace, "--grace")
        alike = local_steps.LocalSteps(1, wait=wait, rejoin=question.restart)
        ways = [replace(alike, sync_every=h, fragments=fragments, sync_delay=sync_delay) for h in sorted(sync_every)]
        predicted = local_steps.plan_local(question, [alike, *ways])
        return told.tell({"local_steps": predicted}, _by_sync_every(predicted))
    found = planning.plan(question)
    if plot is not None:
        draw(found, plot)
    others = {name: value for name, value in vars(found).items() if name != "chosen"}
    said = {**vars(found.chosen), **others, "slow_by": planning.SLOW}
    collections = collections_of(tables, found.chosen.servers)
    if tables:
        said |= {"tables": [{**vars(each), "expected": each.expected._asdict()} for each in tables]}
        said |= {"collections": collections, "ids": ids}
    lines = [
        ("with one more server", found.one_more),
        ("without copies" if copies else "with copies", found.other_copies),
    ]
    lines += [
        (f"with one worker {planning.SLOW:g} times slower", found.slow),
        ("the same, and a backup worker", found.backed),
    ]
    if found.summed is not None:
        lines.append((f"with {found.summed.servers} servers and local reduction", found.summed))
    shown = {each.servers: each for each in found.tried}
    lost = [(f"with{'' if copies else 'out'} copies", found.chosen.lost)]
    lost += [(f"with{'out' if copies else ''} copies", found.other_copies.lost)] if found.other_copies else []
    heads = ("servers", "step, ms", "of that, the round", "a server holds", "bottleneck")
    return told.tell(
        said,
        *([_drawn_tables(tables)] if tables else []),
        *(f"collection {number}: {_told(each)}" for number, each in enumerate(collections)),
        table(heads, [_row(each, each is found.chosen) for _, each in sorted(shown.items())]),
        f"{found.chosen.servers} servers are enough: twice as many would save less than {100 * worth:.0f} % of a step.",
        *(f"{what}: {1e3 * each.step_seconds:.1f} ms a step" for what, each in lines if each is not None),
        *(
            f"time lost to host failures, {what}: {each.workers + each.servers:.0f} s per day, of that "
            f"{each.servers:.0f} s because of servers"
            for what, each in lost
        ),
        *(
            [f"{costs} has no cost for local reduction; run psctl calibrate again"]
            if per_host > 1 and not (ids or model.prices_sums)
            else []
        ),
        f"costs of {model.machine or costs}"
        + ("" if costs else ", which are built in: psctl calibrate measures those of your hosts"),
    )


def _compressed(kind: str) -> float:
    """The part of the bytes of float32 gradients that a compression sends."""
    if kind == "none":
        return 1.0
    whole = TensorSpec("float32", (1 << 20,))
    return Codec(cast(CodecKind, kind)).nbytes(whole) / whole.nbytes


def _by_sync_every(predicted: Sequence[LocalPrediction]) -> Table:
    heads = (
        *("sync every", "servers", "exchange, s", "of that, exposed", "local steps/s", "of those without exchanges"),
        *("goodput", "a local step sends", "and receives"),
    )
    rows = [
        [
            f"{each.sync_every}",
            f"{each.servers}",
            f"{each.exchange_seconds:.2f}",
            f"{each.exposed_seconds:.2f}",
            f"{each.steps_per_second:.3g}",
            f"{each.efficiency:.3f}",
            f"{each.goodput:.3f}",
            human(int(each.sent_bytes)),
            human(int(each.received_bytes)),
        ]
        for each in predicted
    ]
    return table(heads, rows)


def _row(found: Prediction, chosen: bool) -> list[str]:
    used = f"{found.bottleneck}, {100 * found.use[found.bottleneck]:.0f} %"
    name = f"{found.servers} *" if chosen else str(found.servers)
    step, round = 1e3 * found.step_seconds, 1e3 * found.round_seconds
    return [name, f"{step:.1f}", f"{round:.1f}", human(int(found.held_bytes)), used]


def _planned_tables(sample: Path, examples: str | None, batch: int, row_bytes: float) -> list[PlannedTable]:
    read = Sample.read(sample)
    count = float(read.examples) if examples is None else _count(examples)
    if count is None:
        raise ConfigError(f"--examples {examples!r} is not a number; write examples, such as 45M")
    return plan_tables(read, count, batch, row_bytes)


def _drawn_tables(tables: Sequence[PlannedTable]) -> Table:
    heads = ("table", "ids seen", "ids expected", "95 % interval", "check", "kind", "rows", "memory", "ids of a batch")
    return table(
        (*heads, "collection"),
        [
            [
                each.name,
                f"{each.seen:,}",
                f"{each.expected.value:,.0f}",
                f"{each.expected.low:,.0f} to {each.expected.high:,.0f}",
                f"{100 * each.checked:+.0f} %",
                each.kind,
                f"{each.rows:,}",
                human(int(each.held_bytes)),
                f"{each.batch:,.0f}",
                str(each.collection),
            ]
            for each in tables
        ],
    )


def _told(collection: Collection) -> str:
    on = counted(collection.shards, "server")
    many = counted(len(collection.tables), f"{collection.kind} table")
    return f"{many}, {collection.rows:,} rows, {human(int(collection.held_bytes))} on {on}"


def _lacking(command: str, error: ImportError) -> ConfigError:
    extra = "bench" if error.name == "matplotlib" else "simulation"
    return ConfigError(f"psctl {command} needs a package ({error}); in the clone: pip install -e '.[{extra}]'")


def _drawn(costs: Costs) -> Table:
    """The costs of pushes and their answers on each transport, in microseconds and nanoseconds for each KB."""
    rows = []
    for name, transport in costs.transports.items():
        worker, server = transport.send + transport.take, transport.receive + transport.answer
        bytes_of = transport.send_byte + transport.take_byte, transport.receive_byte + transport.answer_byte
        rows.append(
            [
                name,
                f"{1e6 * worker:.0f}",
                f"{1e6 * server:.0f}",
                *(f"{1e12 * each:.0f}" for each in bytes_of),
                f"{1e6 * transport.latency:.0f}",
            ]
        )
    rows.append(
        ["a round", f"{1e6 * costs.step:.0f}", f"{1e6 * costs.round:.0f}", "", f"{1e12 * costs.apply_byte:.0f}"]
    )
    rows.append(["a contribution, summed", "", "", "", f"{1e12 * costs.kernel_byte:.0f}"])
    rows.append(["a variable", f"{1e6 * costs.step_variable:.1f}", f"{1e6 * costs.round_variable:.1f}"])
    rows.append(["a round's rows", f"{1e6 * costs.step_table:.0f}", f"{1e6 * costs.table:.0f}"])
    rows.append(["a row", f"{1e6 * costs.step_row:.2f}", f"{1e6 * costs.row:.2f}"])
    rows.append(
        ["a worker in a sum", f"{4e6 * costs.hand:.0f}", f"{1e6 * costs.part:.0f}", f"{4e12 * costs.hand_byte:.0f}"]
    )
    return table(
        ("processor time", "worker, us", "server, us", "worker, ns/KB", "server, ns/KB", "latency, us"),
        rows,
    )
