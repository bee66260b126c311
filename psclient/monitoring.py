"""The metrics of a worker and of a chief, for Prometheus: read from what is counted anyway, when somebody asks.

docs/observability.md says what they are good for. What a script counts with `prometheus_client` is served with them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY, CollectorRegistry, start_http_server
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from psclient.config import metrics_from
from pswire.cluster import Task, join_address
from pswire.exposition import end, families, harden, refused
from pswire.metrics import ALL, Row, Values
from pswire.versions import versions

if TYPE_CHECKING:
    from psclient.chief import Chief
    from psclient.exchange import Exchange
    from psclient.rpc import RemoteServer

log = logging.getLogger("psclient")


@dataclass(frozen=True)
class Worker:
    """What a worker's metrics are of.

    Attributes:
        exchange: its rounds.
        servers: its connections.
    """

    exchange: Exchange
    servers: Sequence[RemoteServer]


def _phases(worker: Worker) -> Values:
    found = worker.exchange.measures
    return {("computing",): found.computing, ("waiting",): found.waiting, ("reading",): found.reading}


def _payloads(worker: Worker) -> Values:
    moved: dict[tuple[str, ...], float] = {}
    for server in worker.servers:
        for lane, each in server.traffic.items():
            moved[lane, "received"] = moved.get((lane, "received"), 0) + each.received
            moved[lane, "sent"] = moved.get((lane, "sent"), 0) + each.sent
    return moved


def _rounds(worker: Worker) -> Values:
    return {(outcome,): count for outcome, count in worker.exchange.measures.rounds.items()}


WORKER = "paramserver_worker_"
CHIEF = "paramserver_chief_"

PROCESS: tuple[Row[Task], ...] = (
    Row(
        "paramserver_build_info",
        "gauge",
        "What runs here: always 1.",
        lambda task: {(versions()["paramserver"], str(task)): 1.0},
        ("version", "task"),
    ),
)

OF_WORKERS: tuple[Row[Worker], ...] = (
    Row(WORKER + "rounds", "counter", "Rounds that this process has made.", _rounds, ("outcome",)),
    Row(WORKER + "round", "gauge", "The next round.", lambda w: {ALL: w.exchange.group.round}),
    Row(
        WORKER + "phase_seconds",
        "histogram",
        "Its time: computing between two rounds, waiting for a round, reading what it does not have.",
        _phases,
        ("phase",),
    ),
    Row(
        WORKER + "payload_bytes",
        "counter",
        "Bytes of payloads that travelled, repeats included.",
        _payloads,
        ("lane", "direction"),
    ),
    Row(
        WORKER + "contributions_left_out",
        "counter",
        "Contributions of others that this process's rounds were completed without, on each server.",
        lambda w: {ALL: w.exchange.measures.left_out},
    ),
)

OF_CHIEFS: tuple[Row[Chief], ...] = (
    Row(CHIEF + "epochs", "counter", "Epochs of this job.", lambda c: {ALL: c.driven.epochs}),
    Row(CHIEF + "members", "gauge", "Members of the newest epoch.", lambda c: {ALL: c.driven.members}),
    Row(CHIEF + "plans_approved", "counter", "Plans of this job that may run.", lambda c: {ALL: c.driven.plans}),
    Row(
        CHIEF + "missing",
        "gauge",
        "Tasks of the cluster without a session: always 1.",
        lambda c: {(str(task),): 1.0 for task in c.driven.missing},
        ("task",),
    ),
    Row(
        CHIEF + "checkpoints",
        "counter",
        "Checkpoints of this job.",
        lambda c: {(outcome,): count for outcome, count in c.driven.checkpoints.items()},
        ("outcome",),
    ),
    Row(
        CHIEF + "checkpoint_seconds",
        "histogram",
        "From a checkpoint's order until its manifest was written, or it failed.",
        lambda c: {ALL: c.driven.saving},
    ),
)


class Metrics(Collector):
    """Reads metrics, in the thread of whoever asks."""

    def __init__(self) -> None:
        self._reads: list[Callable[[], Iterator[Metric]]] = []

    def add(self, rows: Sequence[Row[Any]], source: Any) -> None:
        """From now on these metrics are read, too."""
        self._reads.append(lambda: families(rows, source))

    def collect(self) -> Iterator[Metric]:
        """All metrics, as of now."""
        for read in tuple(self._reads):
            yield from read()


class Exporter:
    """Serves a process's metrics over HTTP, if `PS_METRICS_PORT` says where.

    Args:
        task: which task this process is.

    Raises:
        ConfigError: the port cannot be had.
    """

    def __init__(self, task: Task) -> None:
        self._metrics = Metrics()
        self._metrics.add(PROCESS, task)
        self._serving: Any = None
        host, port = metrics_from()
        if port is not None:
            self._serve(host, port)

    def _serve(self, host: str, port: int) -> None:
        registry = CollectorRegistry()
        registry.register(self._metrics)
        registry.register(REGISTRY)
        try:
            self._serving = start_http_server(port, host, registry)
        except OSError as error:
            raise refused(host, port, error) from error
        harden(self._serving[0])
        # Who has it picked has no other way to know.
        level = logging.INFO if port else logging.WARNING
        log.log(level, "metrics are at http://%s/metrics", join_address(host, self._serving[0].server_port))

    def add_worker(self, exchange: Exchange, servers: Sequence[RemoteServer]) -> None:
        """This process is a worker."""
        self._metrics.add(OF_WORKERS, Worker(exchange, servers))

    def add_chief(self, chief: Chief) -> None:
        """This process drives."""
        self._metrics.add(OF_CHIEFS, chief)

    def stop(self) -> None:
        """Ends; a second call does nothing."""
        serving, self._serving = self._serving, None
        if serving is not None:
            end(serving)
