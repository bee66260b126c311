"""Many clients of one server: time of a round against workers, and what a connection costs the server.

    python benchmarks/fanin.py             1 to 64 workers, on each transport
    python benchmarks/fanin.py --quick     fewer rounds of fewer workers, for a first look
    python benchmarks/fanin.py --local-reduction                        in sums of their host, beside each by itself

Every client is a worker task with a `ParameterServerStrategy` of its own: its own session, lease and connections, and
rounds that end when all workers have pushed. A machine of few cores has no room for 64 Python processes that compute,
so clients share processes, as threads: one each as long as there are no more clients than `--processes`, then several
in each. The server cannot tell: it has as many connections and pushes, each with its bytes. The round's time has
the clients' own work in it, which they do on the same cores; so what the server spends of processor time for a
round stands beside it, which does not depend on how the clients share their processes. What comes out is checked.

`--json FILE` writes `{"format", "machine", "nbytes", "processes", "rows"}`.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import click
import numpy as np
from figures import COLOURS, machine, publish
from measures import Cost, at_rest, read_share, spread
from rich.console import Console
from rich.table import Table

import psclient as ps
from psclient._src.config import child_environ
from psclient._src.launch.cluster import start_server
from psclient._src.processes.process import send, spawn
from pswire.network.traffic import TRANSPORTS, TransportName

FORMAT = 3
WORKERS = (1, 2, 4, 8, 16, 32, 64)
QUICK_WORKERS = (1, 4, 16)
PROCESSES = 8
"""That clients share."""

NBYTES = 4000
"""Of the variable, and of each push and each answer."""

ROUNDS, QUICK_ROUNDS = 200, 10
WARM = 300
"""Rounds that are not measured: after so many the server has a kernel also for a small variable."""
RATE, STEP = 0.125, 2.0**-10
"""Powers of two, so that float32 computes exactly."""

SECONDS = 300.0
"""How long anything may take that is waited for."""

PLOT = Path(__file__).resolve().parent.parent / "docs" / "fanin.png"


# ---- In a process of clients ----


@dataclass(frozen=True)
class Share:
    """What one process of clients is told.

    Attributes:
        server: the server's address.
        workers: how many clients there are in all.
        mine: the numbers of those in this process.
        rounds: how many are measured.
        nbytes: of the variable.
        transport: the fastest that may be used.
        local_reduction: whether they sum what they contribute.
    """

    server: str
    workers: int
    mine: tuple[int, ...]
    rounds: int
    nbytes: int
    transport: TransportName
    local_reduction: bool


def be_clients(share: Share) -> None:
    """Runs this process's clients in threads; at each gate says so, and waits for a line of the launcher."""
    gate = threading.Barrier(len(share.mine), action=_ask)
    with ThreadPoolExecutor(len(share.mine)) as threads:
        series = list(threads.map(lambda worker: be_client(share, worker, gate), share.mine))
    print(json.dumps(series[0]), flush=True)


def _ask() -> None:
    print("at the gate", flush=True)
    if not sys.stdin.readline():
        raise RuntimeError("the launcher is gone")


def be_client(share: Share, worker: int, gate: threading.Barrier) -> list[float]:
    """One client, in a thread of its own; returns the seconds of its rounds.

    Raises:
        ValueError: the variable does not have the value that it must have.
    """
    cluster = ps.ClusterSpec({"ps": [share.server], "worker": ["127.0.0.1:0"] * share.workers})
    resolver = ps.SimpleClusterResolver(cluster, task_type="worker", task_id=worker)
    how: dict[str, Any] = {"transport": share.transport, "local_reduction": share.local_reduction}
    made = ps.ParameterServerStrategy(devices=["cpu:0"], cluster_resolver=resolver, **how)
    with made as strategy, strategy.scope():
        variable = ps.Variable(np.zeros(share.nbytes // 4, "float32"), name="v")
        gradient = np.full(share.nbytes // 4, (worker + 1) * STEP, "float32")
        optimizer = ps.optimizers.SGD(RATE)

        def make_round() -> float:
            start = time.perf_counter()
            strategy.run(optimizer.apply_gradients, args=([(gradient, variable)],))
            variable.numpy()
            return time.perf_counter() - start

        for _ in range(WARM):
            make_round()
        gate.wait(SECONDS)
        seconds = [make_round() for _ in range(share.rounds)]
        _check(variable.numpy(), share)
        gate.wait(SECONDS)
    return seconds


def _check(value: Any, share: Share) -> None:
    right = -RATE * STEP * sum(range(1, share.workers + 1)) * (WARM + share.rounds)
    if not np.all(value == np.float32(right)):
        raise ValueError(f"the variable should be {right} after all rounds, is {value}")


# ---- In the launcher ----


def measure(
    local_reduction: bool, transport: TransportName, workers: int, processes: int, rounds: int, nbytes: int
) -> dict[str, Any]:
    """Starts a server and its clients, has them make rounds, and ends them; one row of the report.

    Raises:
        ClickException: a process failed.
    """
    with ExitStack() as stack:
        server, address = stack.enter_context(_server())
        alone = Cost.of(server.pid)
        mine = [tuple(range(first, workers, processes)) for first in range(min(workers, processes))]
        shares = [Share(address, workers, each, rounds, nbytes, transport, local_reduction) for each in mine]
        clients = [stack.enter_context(_clients(share, len(mine) + 1)) for share in shares]
        _wait_at_gate(clients)
        [before] = at_rest([server.pid])
        _open_gate(clients)
        _wait_at_gate(clients)
        after = Cost.of(server.pid)
        _open_gate(clients)
        series = [json.loads(_hear(client)) for client in clients]
        for client in clients:
            client.wait(SECONDS)
    cpu = after.since(before).seconds / rounds
    return {
        "local_reduction": local_reduction,
        "transport": transport,
        "workers": workers,
        "rounds": rounds,
        "ms": spread(series[0], 1e3),
        "server_ms": 1e3 * cpu,
        "server_us_per_push": 1e6 * cpu / workers,
        "server_rss_mb": after.rss / 1e6,
        "server_rss_alone_mb": alone.rss / 1e6,
        "server_threads": after.threads,
    }


@contextmanager
def _server() -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    process, address = start_server(flags=("--log-level", "warning"))
    with process:
        try:
            yield process, address
        finally:
            if process.stdin:
                process.stdin.close()  # its lifeline


@contextmanager
def _clients(share: Share, tasks: int) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, str(Path(__file__).resolve()), "--as-clients", json.dumps(vars(share))]
    process = spawn(command, child_environ(tasks, None), subprocess.PIPE, None)
    with process:
        try:
            yield process
        finally:
            send(process, signal.SIGKILL)


def _wait_at_gate(clients: Sequence[subprocess.Popen[bytes]]) -> None:
    for client in clients:
        _hear(client)


def _open_gate(clients: Sequence[subprocess.Popen[bytes]]) -> None:
    for client in clients:
        assert client.stdin is not None  # we asked for the pipe
        client.stdin.write(b"\n")


def _hear(client: subprocess.Popen[bytes]) -> str:
    assert client.stdout is not None  # we asked for the pipe
    line = client.stdout.readline().decode()
    if not line:
        raise click.ClickException("a process of clients failed; see its output above")
    return line


# ---- Results ----


def report(rows: Sequence[dict[str, Any]], processes: int, nbytes: int) -> dict[str, Any]:
    """Everything as it is written with `--json`."""
    return {
        "format": FORMAT,
        "machine": machine(),
        "nbytes": nbytes,
        "processes": processes,
        "rows": list(rows),
        "server_kb_per_worker": {
            transport: _kb_per_worker(series) for transport, series in by_transport(rows).items() if series[1:]
        },
    }


def by_transport(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The rows of each transport; those with sums by themselves."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["transport"] + ", sums" * (row["local_reduction"]), []).append(row)
    return found


def _kb_per_worker(series: Sequence[dict[str, Any]]) -> float:
    """Memory of the server for each worker: the slope of the least squares."""
    slope, _ = np.polyfit([row["workers"] for row in series], [row["server_rss_mb"] for row in series], 1)
    return 1e3 * float(slope)


COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "transport": lambda row: row["transport"],
    "sums": lambda row: row["local_reduction"],
    "workers": lambda row: str(row["workers"]),
    "ms": lambda row: f"{row['ms']['median']:.3g}",
    "p90": lambda row: f"{row['ms']['p90']:.3g}",
    "ms/worker": lambda row: f"{row['ms']['median'] / row['workers']:.3g}",
    "server ms": lambda row: f"{row['server_ms']:.3g}",
    "us/push": lambda row: f"{row['server_us_per_push']:.0f}",
    "MB": lambda row: f"{row['server_rss_mb']:.0f}",
    "threads": lambda row: str(row["server_threads"]),
}
"""Headings of the table, and what stands below them. `server ms` and `us/push` are the server's processor time for a
round and a push, `MB` is its resident memory."""


def table(found: dict[str, Any]) -> Table:
    """The report as a table."""
    drawn = Table(title=f"Synchronous rounds of one variable of {found['nbytes']} bytes", title_justify="left")
    for heading in COLUMNS:
        drawn.add_column(heading, justify="right", no_wrap=True)
    for row in found["rows"]:
        drawn.add_row(*(write(row) for write in COLUMNS.values()))
    if found["server_kb_per_worker"]:
        each = ", ".join(f"{transport} {kb:.0f} KB" for transport, kb in found["server_kb_per_worker"].items())
        drawn.caption = f"memory of the server for each worker: {each}"
    return drawn


def draw(found: dict[str, Any], path: Path) -> None:
    """Draws the time of a round, and what the server needs of it, against the number of workers.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (times, memory) = pyplot.subplots(1, 2, figsize=(10, 4))
    for transport, rows in by_transport(found["rows"]).items():
        workers, colour = [row["workers"] for row in rows], COLOURS[rows[0]["transport"]]
        medians = [row["ms"]["median"] for row in rows]
        times.plot(workers, medians, "o-", color=colour, label=f"{transport} transport, a round, median")
        cpu = [row["server_ms"] for row in rows]
        times.plot(workers, cpu, "o--", color=colour, label=f"{transport} transport, the server's processor time")
        memory.plot(workers, [row["server_rss_mb"] for row in rows], "o-", color=colour, label=f"{transport} transport")
    times.set(xscale="log", yscale="log", xlabel="workers", ylabel="ms")
    counts = sorted({row["workers"] for row in found["rows"]})
    times.set_xticks(counts, counts)
    times.set_xticks([], minor=True)
    most = max(row["server_rss_mb"] for row in found["rows"])
    memory.set(xlabel="workers", ylabel="resident memory of the server, MB", ylim=(0, 1.2 * most))
    for axes in (times, memory):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


@click.command(help=(__doc__ or "").partition("\n\n")[0])
@click.option("--workers", multiple=True, type=click.IntRange(1), help=f"How many [default: {WORKERS}].")
@click.option(
    "--transport",
    "transports",
    multiple=True,
    type=click.Choice(TRANSPORTS),
    default=TRANSPORTS[::-1],
    show_default=True,
    help="Transports.",
)
@click.option("--local-reduction", is_flag=True, help="Also with workers that send the sum of their gradients.")
@click.option("--processes", type=click.IntRange(1), default=PROCESSES, show_default=True, help="For all clients.")
@click.option("--nbytes", type=click.IntRange(4), default=NBYTES, show_default=True, help="Of the variable.")
@click.option("--quick", is_flag=True, help=f"A few rounds, of {QUICK_WORKERS} workers.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures here.")
@click.option("--plot", is_flag=True, help="Also draw docs/fanin.png; needs matplotlib, which the extra `bench` has.")
@click.option("--as-clients", hidden=True)
def main(
    workers: tuple[int, ...],
    transports: tuple[TransportName, ...],
    local_reduction: bool,
    processes: int,
    nbytes: int,
    quick: bool,
    json_file: Path | None,
    plot: bool,
    as_clients: str | None,
) -> None:
    """Measures, or is a process of clients."""
    if as_clients:
        be_clients(read_share(Share, as_clients))
        return
    console = Console()
    rounds = QUICK_ROUNDS if quick else ROUNDS
    rows, kinds = [], (False, True)[: 1 + local_reduction]
    for transport, count, kind in product(transports, workers or (QUICK_WORKERS if quick else WORKERS), kinds):
        with console.status(f"{transport} transport, {count} workers"):
            rows.append(measure(kind, transport, count, processes, rounds, nbytes))
    found = report(rows, processes, nbytes)
    publish(console, found, [table(found)], json_file, partial(draw, found, PLOT) if plot else None)


if __name__ == "__main__":
    main()
