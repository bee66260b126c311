"""Rounds over servers whose links are slower than this machine: hosts of 1 Gbit, and of 250 Mbit.

    python benchmarks/hosts.py             1, 2 and 4 servers, 1 and 2 workers, each layout of variables
    python benchmarks/hosts.py --quick     the ends of that with fewer rounds, for a first look

Hosts are network namespaces (`pstesting.hosts`), which needs root. Each server has a host, whose link carries the rate
each way; the links of workers' hosts are not limited. Each cluster is one of real processes on the tcp transport,
worker 0 is the chief. A round begins when a worker has its gradients and ends when it has the new values of all
variables. The model is 64 MB, updated by SGD, in one of these layouts:

    whole     one variable, cut into one shard for each server
    shards    one variable, cut into shards of 2 MB
    many      32 variables, each on one server

Bandwidth is what all workers send and receive in a round, by its time. The limit beside it is that of plain sockets:
between the same hosts, as many bytes go both ways at once. Processor time is told beside it: hosts of one machine share
its cores, as hosts do not. While rounds are made the links are looked at every 10 ms: a link is busy, one way, in a
look in which it carries half of its rate.

`--json FILE` writes `{"format", "machine", "limits", "rounds"}`.
"""

from __future__ import annotations

import json
import socket
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import click
import numpy as np
from figures import machine, publish
from measures import Cost, spread
from rich.console import Console
from rich.table import Table

import psclient as ps
from psclient._src.processes.output import Line
from pstesting.hosts import Host, HostCluster, Hosts, HostsUnavailable, Moved
from pswire.cluster import Task

FORMAT = 1
NBYTES = 64_000_000
"""Of the model."""

WIDTH = 1000
"""Numbers of a row, along which nothing is cut."""

SHARD_BYTES = 2_000_000
VARIABLES = 32
LAYOUTS = ("whole", "shards", "many")
RATES = (1000.0, 250.0)
"""Mbit per second."""

SERVERS, WORKERS = (1, 2, 4), (1, 2)
WARM = 3
"""Rounds before those that are measured."""

LOOK_SECONDS = 0.01
LIMIT_SECONDS = 600.0
"""Seconds that a cluster may take."""

TURNS = 3
"""Measurements of plain sockets at a time."""

PORT = 5000
BLOCK = 1 << 18
"""Bytes of one call of a plain socket."""

FIRST = Task("worker", 0)


# ---- In a worker ----


def be_worker(layout: str, nbytes: int, rounds: int) -> None:
    """Makes rounds; worker 0 says when those that are measured begin and end, and how long they took."""
    partitioners = ps.experimental.partitioners
    servers = len(ps.TFConfigClusterResolver().cluster_spec().as_dict()["ps"])
    cuts: Mapping[str, Any] = {
        "whole": partitioners.FixedShardsPartitioner(servers),
        "shards": partitioners.MaxSizePartitioner(SHARD_BYTES),
        "many": None,
    }
    number = VARIABLES if layout == "many" else 1
    shape = nbytes // (4 * WIDTH * number), WIDTH
    strategy = ps.ParameterServerStrategy(devices=["cpu:0"], variable_partitioner=cuts[layout])
    with strategy, strategy.scope():
        variables = [ps.Variable(np.zeros(shape, "float32"), name=f"v{index}") for index in range(number)]
        optimizer = ps.optimizers.SGD(0.5)
        gradients = [np.ones(shape, "float32") for _ in variables]
        pairs = list(zip(gradients, variables, strict=True))

        def make_round() -> float:
            began = time.perf_counter()
            strategy.run(optimizer.apply_gradients, args=(pairs,))
            for variable in variables:
                variable.numpy()
            return time.perf_counter() - began

        for _ in range(WARM):
            make_round()
        say("begin")
        took = [make_round() for _ in range(rounds)]
        say("end", took)
        expected = -0.5 * (WARM + rounds) * strategy.num_replicas_in_sync
        assert all(float(v.numpy()[at]) == expected for v in variables for at in ((0, 0), (-1, -1)))


def say(what: str, value: Any = None) -> None:
    """Tells the launcher something."""
    print(json.dumps({what: value}), flush=True)


# ---- In the launcher ----


@dataclass
class Looks:
    """Looks at all links, and at the processor time of processes, between two moments.

    Attributes:
        links: when, in monotonic seconds, and what each host had moved.
        costs: processor time of each process at both moments.
    """

    links: list[tuple[float, dict[str, Moved]]] = field(default_factory=list)
    costs: list[dict[Task, float]] = field(default_factory=list)


class Watch:
    """Looks at the links every 10 ms in a thread of its own, from `begin` to `end`.

    Args:
        hosts: the hosts.
    """

    def __init__(self, hosts: Hosts) -> None:
        self.looks = Looks()
        self._hosts = hosts
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def begin(self, cluster: HostCluster) -> None:
        """Rounds begin."""
        self._cost(cluster)
        self._thread.start()

    def end(self, cluster: HostCluster) -> None:
        """They have ended."""
        self._over.set()
        self._thread.join()
        self._cost(cluster)

    def _cost(self, cluster: HostCluster) -> None:
        self.looks.costs.append({task: Cost.of(process.pid).seconds for task, process in cluster.processes.items()})

    def _run(self) -> None:
        while not self._over.wait(LOOK_SECONDS):
            self.looks.links.append((time.monotonic(), self._hosts.moved()))


@dataclass(frozen=True)
class Setting:
    """A cluster to measure.

    Attributes:
        rate: Mbit per second of a server's link, each way.
        layout: one of `LAYOUTS`.
        workers, servers: how many.
        nbytes: size of the model.
    """

    rate: float
    layout: str
    workers: int
    servers: int
    nbytes: int

    def __str__(self) -> str:
        return f"{self.rate:g} Mbit, {self.layout}, {self.workers} workers, {self.servers} servers"


def measure(hosts: Hosts, setting: Setting, rounds: int) -> dict[str, Any]:
    """Starts a cluster, has it make rounds, and ends it; returns what was measured.

    Raises:
        ClickException: a task failed.
    """
    watch, took = Watch(hosts), list[float]()

    def hear(line: Line) -> None:
        if line.task == FIRST and not line.error and line.text.startswith("{"):
            said = json.loads(line.text)
            if "begin" in said:
                watch.begin(cluster)
            else:
                watch.end(cluster)
                took.extend(said["end"])

    where = {Task("ps", index): f"ps{index}" for index in range(setting.servers)}
    where |= {Task("worker", index): f"worker{index}" for index in range(setting.workers)}
    args = ("--as-worker", setting.layout, "--nbytes", str(setting.nbytes), "--rounds", str(rounds))
    cluster = HostCluster(hosts, where, sink=hear, chief="none", script=str(Path(__file__)), args=args)
    with cluster:
        outcome = cluster.wait(LIMIT_SECONDS)
    if outcome.code or not took:
        raise click.ClickException(f"{setting}: {outcome.report}")
    return {"seconds": took, **_cpu(watch.looks, took), **_links(watch.looks, setting)}


def _cpu(looks: Looks, took: Sequence[float]) -> dict[str, float]:
    """Seconds of processor time for a round, of all servers and of all workers."""
    before, after = looks.costs
    used = {task: after[task] - before[task] for task in before}
    return {
        f"{name}_cpu": sum(used[task] for task in used if task.job == job) / len(took)
        for name, job in (("server", "ps"), ("worker", "worker"))
    }


def _links(looks: Looks, setting: Setting) -> dict[str, Any]:
    """How busy the links of servers were, and when each of them had moved how much.

    Returns:
        `push_use`, `answer_use`: the part of its rate that a link carried one way, of all servers and looks.
        `push_busy`, `answer_busy`: the part of the time in which a link was busy.
        `duplex`: the part of the time in which a link was busy both ways.
        `servers_busy`: how many servers' links were busy in some way, in the mean over looks in which one was.
        `links`: seconds, and for each server the bytes to it and from it, of all looks.
    """
    rate, names = setting.rate * 1e6 / 8, [f"ps{index}" for index in range(setting.servers)]
    pushed, answered, both, busy = [], [], [], []
    for (then, before), (now, after) in pairwise(looks.links):
        most = rate * (now - then)
        down = [(after[name].received - before[name].received) / most for name in names]
        up = [(after[name].sent - before[name].sent) / most for name in names]
        pushed += down
        answered += up
        both += [min(one, other) for one, other in zip(down, up, strict=True)]
        busy.append(sum(max(one, other) >= 0.5 for one, other in zip(down, up, strict=True)))
    start = looks.links[0][0]
    return {
        "push_use": statistics.mean(pushed),
        "answer_use": statistics.mean(answered),
        "push_busy": statistics.mean(use >= 0.5 for use in pushed),
        "answer_busy": statistics.mean(use >= 0.5 for use in answered),
        "duplex": statistics.mean(use >= 0.5 for use in both),
        "servers_busy": statistics.mean([number for number in busy if number] or [0]),
        "links": [
            (round(at - start, 4), [(moved[name].received, moved[name].sent) for name in names])
            for at, moved in looks.links
        ],
    }


# ---- Plain sockets between the same hosts ----


def be_sink(nbytes: int, turns: int, back: bool) -> None:
    """Takes bytes, and where `back` sends as many meanwhile, so many times; then says so with one byte."""
    with socket.create_server(("0.0.0.0", PORT)) as listener:
        print("ready", flush=True)
        peer, _ = listener.accept()
    with peer:
        for _ in range(turns):
            _exchange([peer], nbytes, nbytes * back)
            peer.sendall(b"\0")


def be_source(addresses: Sequence[str], nbytes: int, turns: int, back: bool) -> None:
    """Moves bytes to each address, and where `back` as many from it, at once; prints the seconds of each turn."""
    peers = [socket.create_connection((address, PORT)) for address in addresses]
    took = []
    for _ in range(turns):
        began = time.perf_counter()
        _exchange(peers, nbytes, nbytes * back)
        for peer in peers:
            peer.recv(1)
        took.append(time.perf_counter() - began)
    print(json.dumps(took), flush=True)


def _exchange(peers: Sequence[socket.socket], out: int, back: int) -> None:
    """Sends and receives so many bytes on each connection, all at once."""

    def send(peer: socket.socket) -> None:
        block = memoryview(bytes(BLOCK))
        for at in range(0, out, BLOCK):
            peer.sendall(block[: min(BLOCK, out - at)])

    def receive(peer: socket.socket, size: int) -> None:
        buffer, left = memoryview(bytearray(BLOCK)), size
        while left:
            left -= peer.recv_into(buffer[: min(left, BLOCK)])

    # The sink of a connection receives what its source sends, be it the only way or one of two.
    source = len(peers) > 1 or peers[0].getsockname()[1] != PORT
    takes = back if source else out
    gives = out if source else back
    threads = [threading.Thread(target=receive, args=(peer, takes)) for peer in peers if takes]
    threads += [threading.Thread(target=send, args=(peer,)) for peer in peers if gives]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def plain(hosts: Hosts, servers: int, nbytes: int, turns: int, back: bool) -> list[float]:
    """Returns the bytes per second that plain sockets move between worker 0 and some servers, both ways together."""
    names = [f"ps{index}" for index in range(servers)]
    each = nbytes // servers
    common = ["--nbytes", str(each), "--rounds", str(turns), *["--back"] * back]
    script = [sys.executable, str(Path(__file__))]
    sinks = [hosts.start(name, [*script, "--as-sink", *common], stdout=-1) for name in names]
    for sink in sinks:
        assert sink.stdout is not None
        sink.stdout.readline()
    addresses = [hosts.addresses[name] for name in names]
    source = hosts.start("worker0", [*script, "--as-source", ",".join(addresses), *common], stdout=-1)
    said = source.communicate(timeout=LIMIT_SECONDS)[0]
    for sink in sinks:
        sink.communicate(timeout=LIMIT_SECONDS)
    return [each * servers * (1 + back) / seconds for seconds in json.loads(said)]


# ---- All of it ----


def hosts_of(rate: float, servers: int, workers: int) -> Hosts:
    """Hosts for so many servers, of a rate in Mbit per second, and for so many workers, of none."""
    slow = [Host(f"ps{index}", 1e6 * rate) for index in range(servers)]
    return Hosts([*slow, *(Host(f"worker{index}") for index in range(workers))])


def laps(
    settings: Sequence[Setting], repeats: int, rounds: int, console: Console
) -> tuple[list[dict[str, Any]], dict[Setting, list[dict[str, Any]]]]:
    """Measures plain sockets and each cluster, in turns; returns the limits, and what was measured in each turn.

    Raises:
        HostsUnavailable: no hosts can be made here.
    """
    found: dict[Setting, list[dict[str, Any]]] = {setting: [] for setting in settings}
    plainly: dict[tuple[float, int, bool], list[float]] = {}
    most = max(setting.servers for setting in settings), max(setting.workers for setting in settings)
    for _ in range(repeats):
        for rate in dict.fromkeys(setting.rate for setting in settings):
            mine = [setting for setting in settings if setting.rate == rate]
            with hosts_of(rate, *most) as hosts:
                for number, back in product(sorted({setting.servers for setting in mine}), (False, True)):
                    said = plain(hosts, number, mine[0].nbytes, TURNS, back)
                    plainly.setdefault((rate, number, back), []).extend(said)
                for setting in mine:
                    with console.status(str(setting)):
                        found[setting].append(measure(hosts, setting, rounds))
    limits = [
        {
            "rate": rate,
            "servers": number,
            "ways": 1 + back,
            "mb_per_s": spread(values, 1e-6),
            "of_rate": statistics.median(values) * 8 / (1e6 * rate * number * (1 + back)),
        }
        for (rate, number, back), values in plainly.items()
    ]
    return limits, found


def report(found: Mapping[Setting, list[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """The rows of the report."""
    bandwidth = dict[Setting, float]()
    for setting, laps in found.items():
        seconds = [each for lap in laps for each in lap["seconds"]]
        bandwidth[setting] = 2 * setting.nbytes * setting.workers / statistics.median(seconds)
        one = replace(setting, servers=1)
        names = [name for name in laps[0] if name not in ("seconds", "links")]
        yield {
            **vars(setting),
            "ms": spread(seconds, 1e3),
            "mb_per_s": bandwidth[setting] / 1e6,
            "to_one": bandwidth[setting] / bandwidth[one] if one in bandwidth else None,
            "of_rate": bandwidth[setting] * 8 / (2e6 * setting.rate * setting.servers),
            **{name: statistics.median(lap[name] for lap in laps) for name in names},
            "links": laps[-1]["links"],
        }


def tables(found: Mapping[str, Any]) -> Iterator[Table]:
    """The report as two tables."""
    limits = Table(title="Plain sockets, all servers at once, MB/s of all links together", title_justify="left")
    for name in ("rate", "servers", "ways", "MB/s", "of the rate"):
        limits.add_column(name, justify="right")
    for row in found["limits"]:
        of_rate = f"{row['of_rate']:.3f}"
        limits.add_row(
            f"{row['rate']:g}", str(row["servers"]), str(row["ways"]), f"{row['mb_per_s']['median']:.0f}", of_rate
        )
    yield limits
    shown = Table(
        title=f"Rounds of {found['rounds'][0]['nbytes'] / 1e6:.0f} MB; bandwidth both ways; CPU: s for a round of all"
    )
    names = ("rate", "layout", "workers", "servers", "ms", "MB/s", "/ one", "of the rate", "duplex", "CPU ps", "CPU w")
    for name in names:
        shown.add_column(name, justify="right")
    for row in found["rounds"]:
        shown.add_row(
            f"{row['rate']:g}",
            *(str(row[name]) for name in ("layout", "workers", "servers")),
            f"{row['ms']['median']:.0f}",
            f"{row['mb_per_s']:.0f}",
            f"{row['to_one']:.2f}" if row["to_one"] else "-",
            f"{row['of_rate']:.2f}",
            f"{row['duplex']:.2f}",
            f"{row['server_cpu']:.2f}",
            f"{row['worker_cpu']:.2f}",
        )
    yield shown


@click.command(help=(__doc__ or "").partition("\n\n")[0])
@click.option("--rate", "rates", multiple=True, type=float, help="Mbit/s of servers' links.")
@click.option("--layout", "layouts", multiple=True, type=click.Choice(LAYOUTS), help="Of the model.")
@click.option("--servers", multiple=True, type=int, help="Numbers of servers.")
@click.option("--workers", multiple=True, type=int, help="Numbers of workers.")
@click.option("--repeats", type=int, help="Clusters of each kind.")
@click.option("--quick", is_flag=True, help="Fewer of all, for a first look.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures here.")
@click.option("--as-worker", "layout", hidden=True)
@click.option("--as-sink", is_flag=True, hidden=True)
@click.option("--as-source", default="", hidden=True)
@click.option("--nbytes", type=int, default=NBYTES, show_default=True, help="Size of the model.")
@click.option("--back", is_flag=True, hidden=True)
@click.option("--rounds", type=int, help="Rounds that are measured at a time.")
def main(
    rates: tuple[float, ...],
    layouts: tuple[str, ...],
    servers: tuple[int, ...],
    workers: tuple[int, ...],
    repeats: int | None,
    quick: bool,
    json_file: Path | None,
    layout: str | None,
    as_sink: bool,
    as_source: str,
    nbytes: int,
    back: bool,
    rounds: int | None,
) -> None:
    """Measures, or is one end of what is measured."""
    rounds = rounds or (3 if quick else 6)
    if layout:
        be_worker(layout, nbytes, rounds)
        return
    if as_sink:
        be_sink(nbytes, rounds, back)
        return
    if as_source:
        be_source(as_source.split(","), nbytes, rounds, back)
        return
    rates = rates or RATES
    layouts = layouts or (LAYOUTS[:1] if quick else LAYOUTS)
    servers = servers or ((1, 4) if quick else SERVERS)
    workers = workers or ((1,) if quick else WORKERS)
    settings = [Setting(*each, nbytes) for each in product(rates, layouts, workers, servers)]
    console, before = Console(width=140), machine()
    try:
        limits, found = laps(settings, repeats or (1 if quick else 3), rounds, console)
    except HostsUnavailable as error:
        click.echo(f"benchmarks/hosts.py is left out: {error}", err=True)
        return
    figures = {"format": FORMAT, "machine": before, "limits": limits, "rounds": list(report(found))}
    publish(console, figures, tables(figures), json_file, None)


if __name__ == "__main__":
    main()
