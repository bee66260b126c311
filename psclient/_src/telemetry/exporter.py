"""The metrics of a worker and of a chief, for Prometheus: read from what is counted anyway, when somebody asks.

docs/metrics.md says what they are good for. What a script counts with `prometheus_client` is served with them.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from psclient._src.config import job_from, metrics_from, trace_options
from pswire.cluster import Task
from pswire.security.identity import Security
from pswire.telemetry.metrics import ALL, PROCESS, ProcessReadings, Reading, Row, Values

if TYPE_CHECKING:
    from psclient._src.chief.driver import Chief
    from psclient._src.network.remote_server import RemoteServer
    from psclient._src.rounds.rounds import Exchange
    from psclient._src.telemetry.chief_page import ChiefPage
    from pswire.telemetry.prometheus import Page
    from pswire.telemetry.web_server import HttpReply, Request

log = logging.getLogger("psclient")

PATHS = ("/", "/events")
"""The paths of a status page."""

NO_PAGE = "this process is not the chief and has no status page; psctl dashboard shows the address of one"


@dataclass(frozen=True)
class WorkerParts:
    """The parts of a worker that its metrics read.

    Attributes:
        exchange: the worker's rounds.
        servers: the worker's connections.
    """

    exchange: Exchange
    servers: Sequence[RemoteServer]


def _phases(worker: WorkerParts) -> Values:
    found = worker.exchange.measures
    return {("computing",): found.computing, ("waiting",): found.waiting, ("reading",): found.reading}


def _payloads(worker: WorkerParts) -> Values:
    moved: dict[tuple[str, ...], float] = {}
    for server in worker.servers:
        for transport, each in server.traffic.items():
            moved[transport, "received"] = moved.get((transport, "received"), 0) + each.received
            moved[transport, "sent"] = moved.get((transport, "sent"), 0) + each.sent
    return moved


def _rounds(worker: WorkerParts) -> Values:
    return {(outcome,): count for outcome, count in worker.exchange.measures.rounds.items()}


def _contributions(worker: WorkerParts) -> Values:
    near = worker.exchange.pushes.near
    return {} if near is None else {("in_sums",): near.summed, ("singly",): near.singly}


def _local_tokens(worker: WorkerParts) -> Values:
    local = worker.exchange.measures.local
    return {} if local is None or not local.tokens else {ALL: local.tokens}


def _local_steps(worker: WorkerParts) -> Values:
    local = worker.exchange.measures.local
    return {} if local is None else {ALL: local.steps}


def _last_round(worker: WorkerParts) -> Values:
    last = worker.exchange.window.last_round
    return {} if last is None else {("counted",): len(last.contributors), ("excluded",): len(last.excluded)}


WORKER = "paramserver_worker_"
CHIEF = "paramserver_chief_"

OF_WORKERS: tuple[Row[WorkerParts], ...] = (
    Row(WORKER + "rounds", "counter", "Rounds of this process.", _rounds, ("outcome",)),
    Row(WORKER + "steps", "counter", "Calls of `strategy.run`.", lambda w: {ALL: w.exchange.measures.steps}),
    Row(WORKER + "local_steps", "counter", "Local steps, such as those of DiLoCo.", _local_steps),
    Row(WORKER + "local_tokens", "counter", "Tokens or examples of local steps, if counted.", _local_tokens),
    Row(
        WORKER + "blocking_waits",
        "counter",
        "Number of times this process waited for a round; in most loops once per step.",
        lambda w: {ALL: w.exchange.measures.waits},
    ),
    Row(WORKER + "round", "gauge", "The next round.", lambda w: {ALL: w.exchange.group.round}),
    Row(
        WORKER + "phase_seconds",
        "histogram",
        ("Seconds spent computing between two rounds, waiting for a round, and reading values that are not cached."),
        _phases,
        ("phase",),
    ),
    Row(
        WORKER + "payload_bytes",
        "counter",
        "Payload bytes sent and received, including repeats.",
        _payloads,
        ("transport", "direction"),
    ),
    Row(
        WORKER + "local_reductions",
        "counter",
        (
            "With local reduction: gradient pushes of this host's workers that this process sent as sums, and "
            "its own that it pushed separately."
        ),
        _contributions,
        ("how",),
    ),
    Row(
        WORKER + "excluded_pushes",
        "counter",
        "Pushes of other workers that were excluded from this process's rounds, on each server.",
        lambda w: {ALL: w.exchange.measures.excluded},
    ),
    Row(
        WORKER + "last_round_members",
        "gauge",
        "Members of the last completed round: counted, whose pushes it contains, and excluded.",
        _last_round,
        ("outcome",),
    ),
)

OF_CHIEFS: tuple[Row[Chief], ...] = (
    Row(CHIEF + "generations", "counter", "Generations of this job.", lambda c: {ALL: c.driven.generations}),
    Row(CHIEF + "members", "gauge", "Members of the newest generation.", lambda c: {ALL: c.driven.members}),
    Row(
        CHIEF + "plans_approved", "counter", "Compiled steps of this job that may run.", lambda c: {ALL: c.driven.plans}
    ),
    Row(
        CHIEF + "missing",
        "gauge",
        "Tasks of the cluster without a session; always 1.",
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
        "Seconds from the start of a checkpoint until its manifest was written, or it failed.",
        lambda c: {ALL: c.driven.saving},
    ),
)


class Exporter:
    """Serves a process's metrics over HTTP, and a chief's status page, if `PS_METRICS_PORT` says where.

    Exports its traces as well, if `PS_TRACES` says so.

    Args:
        task: the task that this process is.
        security: the certificate and token that this process shows.

    Raises:
        ConfigError: the port cannot be had; traces are on, and OpenTelemetry is not installed.
    """

    def __init__(self, task: Task, security: Security) -> None:
        self._task = task
        self._security = security
        self._readings: list[Reading] = [(PROCESS, ProcessReadings(task, lambda: security.newest().expiry))]
        self._page: Page | None = None
        self._chief: ChiefPage | None = None
        self._tracer = trace_options().open(task, job_from())
        host, port = metrics_from()
        if port is None:
            return
        from pswire.telemetry.prometheus import Page

        beside = {path: partial(self._answer, path) for path in PATHS}
        self._page = Page(host, port, self._readings.copy, beside, context=security.page_context())
        # Who has it picked has no other way to know.
        log.log(logging.INFO if port else logging.WARNING, "metrics are at %s", self._page.url)

    def add_worker(self, exchange: Exchange, servers: Sequence[RemoteServer]) -> None:
        """This process is a worker."""
        if self._tracer is not None:
            from psclient._src.telemetry.traces.worker import StepTraces

            begun = exchange.session.begun
            traces = StepTraces(self._tracer, str(self._task), begun.job, begun.incarnations)
            exchange.traces = exchange.measures.traces = traces
        self._readings.append((OF_WORKERS, WorkerParts(exchange, servers)))

    def add_chief(self, chief: Chief) -> None:
        """This process drives, by this chief from now on."""
        if self._tracer is not None:
            from psclient._src.telemetry.traces.chief import ChiefTraces

            chief.traces = ChiefTraces(self._tracer, str(self._task))
        self._readings[:] = [(rows, of) for rows, of in self._readings if rows is not OF_CHIEFS]
        self._readings.append((OF_CHIEFS, chief))
        if self._page is None:
            return
        from psclient._src.telemetry.chief_page import ChiefPage

        before, self._chief = self._chief, ChiefPage(chief, self._task, self._security)
        if before is not None:
            before.close()
        chief.page = reachable(self._page.url).removesuffix("metrics")

    def _answer(self, path: str, request: Request) -> HttpReply:
        """Answers with the chief's page, where this process drives."""
        if self._chief is None:
            from pswire.telemetry.web_server import HttpReply

            return HttpReply(NO_PAGE.encode(), status=404)
        return self._chief.answers[path](request)

    def stop(self) -> None:
        """Ends; a second call does nothing."""
        page, self._page = self._page, None
        chief, self._chief = self._chief, None
        if chief:
            chief.close()
        if page:
            page.close()
        tracer, self._tracer = self._tracer, None
        if tracer is not None:
            tracer.close()


def reachable(url: str) -> str:
    """Returns a URL with the name of this machine, where it is for all of the machine's addresses."""
    for everywhere in ("//0.0.0.0:", "//[::]:"):
        url = url.replace(everywhere, f"//{socket.gethostname()}:")
    return url
