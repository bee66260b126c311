"""A server's metrics for Prometheus, computed from its counters when they are asked for, and its status page.

docs/metrics.md explains each metric.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from psserver.config import ServerConfig
from psserver.core.core import Core
from psserver.state.counters import ServerCounters
from psserver.tables.table import Table
from pswire.cluster import Task
from pswire.errors import ConfigError
from pswire.model.log import LogEntry
from pswire.model.status import Happened, ProcessStatus, ServerStatus
from pswire.network.traffic import Traffic, TransportName
from pswire.telemetry.metrics import ALL, PROCESS, ProcessReadings, Row, Values
from pswire.telemetry.views.looked import Looked

if TYPE_CHECKING:
    from pswire.telemetry.page.sampler import PageSource


@dataclass(frozen=True)
class Seen:
    """A server's state at the time of a request for its metrics.

    Attributes:
        core: the server proper.
        status: its status.
        traffic: payload bytes of each transport.
        refused: how many callers were refused before they reached the core, by reason.
    """

    core: Core
    status: ServerStatus
    traffic: Mapping[TransportName, Traffic]
    refused: Mapping[str, int] = field(default_factory=dict)

    @property
    def tally(self) -> ServerCounters:
        """The server's counters."""
        return self.core.tally


def _phases(seen: Seen) -> Values:
    tally = seen.tally
    return {("waiting",): tally.waiting, ("applying",): tally.applying, ("answering",): tally.answering}


def _payloads(seen: Seen) -> Values:
    moved: dict[tuple[str, ...], float] = {}
    for transport, each in seen.traffic.items():
        moved |= {(transport, "received"): each.received, (transport, "sent"): each.sent}
    return moved


def _sessions(seen: Seen) -> Values:
    return Counter((session.state,) for session in seen.status.sessions if not session.drives)


def _chief(seen: Seen) -> Values:
    return {} if math.isinf(seen.status.chief) else {ALL: seen.status.chief}


def _compiled(seen: Seen) -> Values:
    compiler = seen.core.kernels.compiler
    return {("compiled",): compiler.compiled, ("loaded",): compiler.loaded, ("failed",): compiler.failed}


def _tables(value: Callable[[Table], float]) -> Callable[[Seen], Values]:
    """Returns a function that returns a number of each dynamic table of which a part is here."""
    return lambda seen: {(one.part.table,): value(one.table) for one in seen.core.machine.job.store.tables()}


def _tier_moves(seen: Seen) -> Values:
    tier = seen.core.machine.job.store.native.tier
    return {("in",): tier.came, ("out",): tier.left} if tier else {("in",): 0, ("out",): 0}


def _tier_hits(seen: Seen) -> Values:
    tier = seen.core.machine.job.store.native.tier
    return {ALL: tier.hit_rate if tier else 1.0}


def _tier_pages(seen: Seen) -> Values:
    tier = seen.core.machine.job.store.native.tier
    return _by_label(tier.outcomes if tier else {"hinted": 0, "hit": 0, "waited": 0})


def _by_label(numbers: Mapping[str, float]) -> Values:
    """Returns a number for each value of a metric's one label."""
    return {(value,): number for value, number in numbers.items()}


OUTCOME = ("outcome",)
TABLE = ("table",)
SERVER = "paramserver_server_"


def _of_status(name: str, text: str, *labels: str) -> Row[Seen]:
    """A gauge of the status's field of that name; where that has numbers by name, with a label."""

    def read(seen: Seen) -> Values:
        value = getattr(seen.status, name)
        return _by_label(value) if labels else {ALL: value}

    return Row(SERVER + name, "gauge", text, read, labels)


ROWS: tuple[Row[Seen], ...] = (
    # Rounds.
    Row(
        SERVER + "rounds",
        "counter",
        "Rounds that ended: completed, failed for all workers, or skipped because of NaN or infinity.",
        lambda s: _by_label(s.tally.rounds),
        OUTCOME,
    ),
    Row(
        SERVER + "round",
        "gauge",
        "Last completed round, -1 before the first; for asynchronous workers their number of rounds minus one.",
        lambda s: {ALL: s.status.round},
    ),
    Row(
        SERVER + "round_phase_seconds",
        "histogram",
        "Time of a round: waiting for gradients after the first push, applying them, and responding.",
        _phases,
        ("phase",),
    ),
    Row(
        SERVER + "excluded_pushes",
        "counter",
        "Gradient pushes of lost workers, without which rounds were completed.",
        lambda s: {ALL: s.tally.excluded},
    ),
    Row(
        SERVER + "votes",
        "counter",
        "Votes on which pushes a round of several servers contains: sent, and received.",
        lambda s: _by_label(s.tally.votes),
        ("direction",),
    ),
    Row(
        SERVER + "vote_seconds",
        "histogram",
        "Time from this server's vote until the round was decided.",
        lambda s: {ALL: s.tally.voting},
    ),
    Row(
        SERVER + "servers_missing",
        "gauge",
        "Servers to which this server has votes to send but no connection.",
        lambda s: {ALL: len(s.status.missed)},
    ),
    Row(
        SERVER + "digests",
        "counter",
        "Comparisons of variables with the copies on another server: equal, or different.",
        lambda s: _by_label(s.tally.digests),
        OUTCOME,
    ),
    Row(
        SERVER + "digest_seconds",
        "counter",
        "Time spent on computing checksums for these comparisons.",
        lambda s: {ALL: s.tally.hashing},
    ),
    Row(
        SERVER + "servers_differing",
        "gauge",
        "Servers whose copies have different values.",
        lambda s: {ALL: len(s.status.differences)},
    ),
    _of_status(
        "recovering", "1 while a readmitted server recovers: it reads its variables and applies the rounds it missed."
    ),
    Row(
        SERVER + "nonfinite_pushes",
        "counter",
        "Gradient pushes with NaN or infinity, counted per worker, reduction and round.",
        lambda s: {ALL: s.tally.nonfinite_contributions},
    ),
    Row(
        SERVER + "nonfinite_variables",
        "gauge",
        "Variables that contain NaN or infinity since an update.",
        lambda s: {ALL: s.tally.nonfinite_variables},
    ),
    Row(
        SERVER + "staleness_rounds",
        "histogram",
        "For asynchronous workers: rounds of other workers between a worker's read and the application of its push.",
        lambda s: {ALL: s.tally.staleness},
    ),
    Row(
        SERVER + "clock_gap_rounds",
        "gauge",
        "With bounded staleness: rounds between the fastest and the slowest worker.",
        lambda s: {ALL: s.status.gap},
    ),
    Row(
        SERVER + "in_flight_bytes",
        "gauge",
        "Bytes of gradients that were received and not used yet.",
        lambda s: {ALL: s.core.in_flight},
    ),
    Row(
        SERVER + "payload_bytes",
        "counter",
        "Bytes of payloads that were transferred, including resends.",
        _payloads,
        ("transport", "direction"),
    ),
    # Variables.
    _of_status("variables", "Variables that the server knows."),
    _of_status("variable_bytes", "Bytes of variables on this server."),
    Row(
        SERVER + "memory_limit_bytes",
        "gauge",
        "Maximum bytes of variables, 0 for no limit.",
        lambda s: {ALL: s.status.memory_limit},
    ),
    # Dynamic tables.
    _of_status("table_rows", "Rows of a dynamic table on this server.", *TABLE),
    _of_status("table_bytes", "Bytes of a dynamic table on this server.", *TABLE),
    Row(
        SERVER + "table_evicted",
        "counter",
        "Rows that were evicted from a dynamic table.",
        _tables(lambda t: t.evicted),
        TABLE,
    ),
    Row(
        SERVER + "table_refused",
        "counter",
        "Gradients that were dropped, because the table's filter refused their key.",
        _tables(lambda t: t.refusals),
        TABLE,
    ),
    _of_status("tier_bytes", "Bytes of files with rows of dynamic tables, 0 if all rows are in memory."),
    _of_status("tier_resident_bytes", "Bytes of these files that are in memory."),
    Row(
        SERVER + "tier_memory_bytes",
        "gauge",
        "Maximum bytes of these files in memory.",
        lambda s: {ALL: s.status.tier_memory},
    ),
    Row(
        SERVER + "tier_moved_bytes",
        "counter",
        "Bytes read from these files into memory, and written back.",
        _tier_moves,
        ("direction",),
    ),
    Row(
        SERVER + "tier_pages",
        "counter",
        "Pages of these files: read by hints, found in memory, and read while a round waited.",
        _tier_pages,
        OUTCOME,
    ),
    Row(
        SERVER + "tier_hit_ratio",
        "gauge",
        "Share of recently used pages that were in memory; 1 if all rows are in memory.",
        _tier_hits,
    ),
    # Checkpoints.
    Row(
        SERVER + "held_checkpoints",
        "gauge",
        "Checkpoints that are not completely written yet, and whose values are kept.",
        lambda s: {ALL: len(s.status.saving)},
    ),
    Row(
        SERVER + "held_checkpoint_bytes",
        "gauge",
        "Bytes of old values that are kept for checkpoints.",
        lambda s: {ALL: s.status.snapshot_bytes},
    ),
    Row(
        SERVER + "checkpoint_shards",
        "counter",
        "Checkpoint shards of this server: saved, or failed.",
        lambda s: _by_label(s.tally.shards),
        OUTCOME,
    ),
    Row(
        SERVER + "checkpoint_written_bytes",
        "counter",
        "Bytes of checkpoint shards that were written.",
        lambda s: {ALL: s.tally.shard_bytes},
    ),
    Row(
        SERVER + "checkpoint_shard_seconds",
        "histogram",
        "Time to write a checkpoint shard.",
        lambda s: {ALL: s.tally.writing},
    ),
    Row(
        SERVER + "restores",
        "counter",
        "Restores of checkpoints: restored, or failed.",
        lambda s: _by_label(s.tally.restores),
        OUTCOME,
    ),
    # Kernels.
    Row(
        SERVER + "kernel_seconds",
        "counter",
        "Time for which kernels ran; on a GPU the time to launch them.",
        lambda s: {ALL: s.core.kernels.crew.seconds},
    ),
    Row(
        SERVER + "kernels_compiled",
        "counter",
        "Kernels: compiled, loaded from the cache, or failed to compile.",
        _compiled,
        OUTCOME,
    ),
    Row(
        SERVER + "kernel_compile_seconds",
        "counter",
        "Time for which kernels were compiled or loaded, in parallel to rounds.",
        lambda s: {ALL: s.core.kernels.compiler.seconds},
    ),
    Row(
        SERVER + "programs_interpreted",
        "counter",
        "Update functions, or parts of them, that ran without a kernel.",
        lambda s: {ALL: s.core.kernels.interpretations},
    ),
    Row(
        SERVER + "refused",
        "counter",
        "Callers that were rejected, by the reason: token, certificate, handshake, or session.",
        lambda s: _by_label(s.refused),
        ("reason",),
    ),
    # Sessions and the chief, which server 0 knows.
    Row(
        SERVER + "sessions",
        "gauge",
        "Sessions of workers, on server 0: open, left, failed, lost, or hung.",
        _sessions,
        ("state",),
    ),
    Row(
        SERVER + "session_timeouts",
        "counter",
        "Sessions that ended without heartbeats for PS_SESSION_TIMEOUT, on server 0.",
        lambda s: {ALL: s.tally.lost},
    ),
    Row(
        SERVER + "chief_silent_seconds",
        "gauge",
        "Time since the last message from a chief, on server 0; absent before the first.",
        _chief,
    ),
)


@dataclass(frozen=True)
class Rim:
    """What the network side of a server tells, for its status page. Its functions are called in any thread.

    Attributes:
        address: the server's address.
        process: returns the status of its process; raises `TimeoutError` where it does not come at once.
        events: returns what it was told last, the newest last.
        refused: returns how many callers were refused, by reason.
    """

    address: str
    process: Callable[[], ProcessStatus]
    events: Callable[[], Sequence[Happened]]
    refused: Callable[[], Mapping[str, int]]


class MetricsPort:
    """A server's metrics and its status page over HTTP, in threads of their own.

    Args:
        core: the server proper.
        traffic: payload bytes of each transport.
        config: the server's configuration.
        port: the port; 0 picks a free one.
        rim: tells what the core does not know; None for no status page.

    Raises:
        ConfigError: the port is in use or not allowed.

    Attributes:
        url: URL of the metrics.
        page_url: URL of the status page, "" for none.
    """

    def __init__(
        self,
        core: Core,
        traffic: Mapping[TransportName, Traffic],
        config: ServerConfig,
        port: int,
        rim: Rim | None = None,
    ) -> None:
        from pswire.telemetry.page.status_page import StatusPage
        from pswire.telemetry.prometheus import PATH, Page

        process = ProcessReadings(config.task, lambda: config.security.newest().expiry)
        self._status = rim and StatusPage(_source(core, config.task, rim), config.security.token)
        try:
            self._page = Page(
                config.metrics_host,
                port,
                lambda: [(PROCESS, process), (ROWS, Seen(core, core.status(), traffic, rim.refused() if rim else {}))],
                self._status.answers if self._status else {},
                core.well,
                config.security.page_context(),
            )
        except ConfigError:
            self._close_status()
            raise
        self.url = self._page.url
        self.page_url = self.url.removesuffix(PATH) + "/" if self._status else ""

    def close(self) -> None:
        """Stops serving."""
        self._close_status()
        self._page.close()

    def _close_status(self) -> None:
        if self._status:
            self._status.close()


def _source(core: Core, task: Task, rim: Rim) -> PageSource:
    """Returns what a server's page shows: what it knows by itself. It asks no other server, which might ask it."""
    from pswire.telemetry.page.sampler import PageSource

    def look() -> tuple[Sequence[Looked], Sequence[Task]]:
        try:
            process = rim.process()
        except TimeoutError:  # its event loop is busy: the page says the rest
            process = None
        status = replace(core.status(), process=process)
        return [Looked(task, rim.address, status, recent=tuple(rim.events()))], ()

    def read(index: int) -> tuple[LogEntry | None, Sequence[LogEntry]]:
        entries = core.machine.job.log.entries  # without the lock: a new job between the two is seen at the next look
        return next(iter(entries[:1]), None), entries[index:]

    return PageSource(task, f"Job as seen by {task}; the chief's page shows all servers.", look, read, alone=True)
