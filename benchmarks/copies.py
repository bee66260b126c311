"""What copies of variables cost, and what a lost server costs then.

    python benchmarks/copies.py             rounds of 4 KB and of 100 MB with copies and without; losses of servers
    python benchmarks/copies.py --quick     a few of each, for a first look

Real processes on this machine: two servers, two workers, a chief of its own. Jobs with copies and without take turns.
The variable lies on one server, or on that and its copy. A loss is SIGKILL; its figure is the time from the signal to
the end of the first round that both workers make without the server, which makes rounds all the time. A return is the
longest wait for a round after the server was started again: that in which it is readmitted.

`--json FILE` writes `{"format", "machine", "rounds", "losses", "returns"}`; times in seconds.
"""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import click
from figures import machine
from rich.console import Console
from rich.table import Table

import psclient as ps
from pstesting.processes import CALM, PS0, PS1, W0, W1, ProcessCluster
from pstesting.script import add_all, say

FORMAT = 2
SIZES = {"4 KB": 1024, "100 MB": 25_000_000}
"""Numbers of float32 that each worker contributes."""

TRANSPORTS = "shm", "tcp"


def make_rounds(size: int, count: int, first: int) -> None:
    """Makes rounds, and says how long each took; the first ones are not measured."""
    import time

    import numpy as np

    strategy = ps.ParameterServerStrategy(devices=["cpu:0"])
    with strategy.scope():
        v = ps.Variable(np.zeros(size, "float32"), name="v")
    mine, took = np.ones(size, "float32"), []
    for _ in range(first + count):
        began = time.perf_counter()
        strategy.run(lambda: add_all([(v, mine)]))
        v.numpy()
        took.append(time.perf_counter() - began)
    assert float(v.numpy()[0]) == 2.0 * (first + count)
    say("took", took[first:])


def endure(rounds: int, size: int) -> None:
    """Makes rounds, and says when each ended, on the clock of the machine."""
    import time

    import numpy as np

    strategy = ps.ParameterServerStrategy(devices=["cpu:0"])
    with strategy.scope():
        v = ps.Variable(np.zeros(size, "float32"), name="v")
    say("begins")
    mine, ends = np.ones(size, "float32"), []
    for _ in range(rounds):
        strategy.run(lambda: add_all([(v, mine)]))
        v.numpy()
        ends.append(time.monotonic())
        time.sleep(0.002)
    assert float(v.numpy()[0]) == 2.0 * rounds
    say("ends", ends)


def cluster(
    program: Any, args: tuple[Any, ...], directory: str, replication_factor: int, transport: str
) -> ProcessCluster:
    """Returns a cluster of two servers and two workers that runs a program."""
    keys: dict[str, Any] = {"ps": 2, "workers": 2, "chief": "driver", "transport": transport, "timeouts": CALM}
    return ProcessCluster(program, Path(directory), args, replication_factor=replication_factor, **keys)


def rounds(size: int, count: int, replication_factor: int, transport: str) -> list[float]:
    """Returns the seconds of each round, of the slower worker."""
    args = size, count, max(count // 4, 2)
    with (
        tempfile.TemporaryDirectory() as directory,
        cluster(make_rounds, args, directory, replication_factor, transport) as job,
    ):
        job.finish()
        return [max(both) for both in zip(*(job.said(task, "took")[0] for task in (W0, W1)), strict=True)]


def loss(number: int, transport: str) -> float:
    """Returns the seconds from the end of a server to that of the next round of both workers."""
    with tempfile.TemporaryDirectory() as directory, cluster(endure, (1500, 1024), directory, 1, transport) as job:
        for task in (W0, W1):
            job.hear(task, "begins")
        time.sleep(1.0)
        at = time.monotonic()
        job.kill((PS0, PS1)[number % 2])
        after = rounds_of(job)
        # The round under way may have been made with the server: the longest wait after it is the loss.
        gap, end = max((late - early, late) for early, late in itertools.pairwise(after) if late > at)
        return float(end - at if end - gap <= at + 0.05 else gap)


def rounds_of(job: ProcessCluster) -> list[float]:
    """Returns when each round of both workers had ended."""
    ends: list[list[float]] = [job.hear(task, "ends") for task in (W0, W1)]
    return [max(both) for both in zip(*ends, strict=True)]


def comeback(number: int, size: int, transport: str) -> float:
    """Returns the seconds of the round before which a server is readmitted."""
    args = 3000 if size < 1 << 20 else 40, size
    with tempfile.TemporaryDirectory() as directory, cluster(endure, args, directory, 1, transport) as job:
        for task in (W0, W1):
            job.hear(task, "begins")
        time.sleep(1.0)
        server = (PS1, PS0)[number % 2]
        job.kill(server)
        for task in (W0, W1):
            job.hear_error(task, f"goes on without {server}")
        time.sleep(0.5)
        job.start(server)
        at = time.monotonic()
        for task in (W0, W1):
            job.hear_error(task, f"uses {server} again, which was readmitted")
        return max(late - early for early, late in itertools.pairwise(rounds_of(job)) if early > at)


@click.command(help=__doc__, context_settings={"max_content_width": 100})
@click.option("--quick", is_flag=True, help="A few of each.")
@click.option("--json", "file", type=click.Path(path_type=Path), help="Where to write the figures.")
def main(quick: bool, file: Path | None) -> None:
    """Runs the benchmark."""
    laps, losses, before = (1, 2, machine()) if quick else (3, 20, machine())
    found: dict[str, dict[str, list[float]]] = {}
    for _ in range(laps):
        for name, size in SIZES.items():
            for transport in TRANSPORTS:
                count = 500 if size < 1 << 20 else 12
                for copies in (0, 1):
                    key = found.setdefault(f"{name}, {transport}", {"without": [], "with": []})
                    key["with" if copies else "without"] += rounds(size, count, 1 + copies, transport)
    table = Table("round", "without copies, ms", "with copies, ms", "more, ms", "ratio")
    for kind, each in found.items():
        without, copied = (1e3 * statistics.median(each[which]) for which in ("without", "with"))
        table.add_row(kind, f"{without:.2f}", f"{copied:.2f}", f"{copied - without:.2f}", f"{copied / without:.2f}")
    Console().print(table)
    lost = [loss(number, TRANSPORTS[0]) for number in range(losses)]
    Console().print(
        f"killed server to next round, of {losses}: median {statistics.median(lost):.2f} s, "
        f"least {min(lost):.2f}, most {max(lost):.2f}"
    )
    back: dict[str, list[float]] = {}
    for name, size in SIZES.items():
        back[name] = [comeback(number, size, TRANSPORTS[0]) for number in range(2 if quick else 6)]
        took = statistics.median(back[name])
        Console().print(f"the round before which a server is readmitted, {name}: median {took:.2f} s")
    if file is not None:
        figures = {"format": FORMAT, "machine": before, "rounds": found, "losses": lost, "returns": back}
        file.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
