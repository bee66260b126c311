"""The words for a job, its servers and its tasks: those of `psctl status` and `psctl top`, and of the status page."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pswire.security.session_numbers import count_of
from pswire.telemetry.views.job_view import JobView, StandbyView
from pswire.telemetry.views.numbers import duration, short, size

STATES = {
    "none": "no job: the chief has not started one",
    "starting": "job is starting: no worker takes part yet",
    "running": "job is running",
    "over": "job is done",
    "broken": "job is broken: a round failed after some of its updates",
    "unknown": "no server answers",
}

MODES = {
    "": "no workers",
    "sync": "sync",
    "async": "async",
    "bounded": "bounded",
}


def heading(view: JobView) -> str:
    """The job in one line."""
    said = STATES[view.state]
    if view.generation:
        rounds = f"round {view.round}" if view.round >= 0 else "no round yet"
        said += f": generation {view.generation}, {rounds}, {view.replicas} replicas, {MODES[view.mode]}"
        if view.mode == "bounded":
            said += f", {view.gap} of at most {view.staleness} rounds apart"
    return said


def standby_line(standby: StandbyView) -> str:
    """Returns where a process waits, and for which place."""
    place = f"will replace {short(standby.place)}" if standby.place else "standby"
    return f"{standby.address} (in {standby.domain}) {place}"


Columns = Mapping[str, Callable[[Any], str]]
"""By its heading what a column has of a server or a task."""

SERVER_COLUMNS: Columns = {
    "server": lambda s: short(s.task),
    "address": lambda s: s.address,
    "state": lambda s: s.state,
    "up": lambda s: duration(s.up_seconds),
    "generation": lambda s: str(s.generation),
    "round": lambda s: _round(s.round),
    "lag": lambda s: str(s.lag),
    "variables": lambda s: str(s.variables),
    "bytes": lambda s: of(s.variable_bytes, s.memory_limit),
    "in files": lambda s: size(s.tier_bytes) if s.tier_memory else "",
    "of these in memory": lambda s: of(s.tier_resident_bytes, s.tier_memory) if s.tier_memory else "",
    "memory": lambda s: size(s.resident_bytes) if s.resident_bytes else "",
    "device": lambda s: s.device,
    "transports": lambda s: ", ".join(f"{count} {transport}" for transport, count in sorted(s.transports.items())),
    "waits for": lambda s: ", ".join(map(short, s.waits_for)),
    "saves": lambda s: ", ".join(f"{each['path']} (round {each['round']})" for each in s.saving),
    "old values": lambda s: of(s.snapshot_bytes, s.snapshot_limit) if s.snapshot_bytes or s.snapshot_limit else "",
}
"""Columns of the table of servers; a column that is empty for all is left out."""

OF_SILENT = ("server", "address", "state")
"""Columns of a server that does not answer."""

TASK_COLUMNS: Columns = {
    "task": lambda t: short(t.task) + (" (drives)" if t.drives else ""),
    "state": lambda t: t.state,
    "session": lambda t: str(count_of(t.session)) if t.session else "",
    "replicas": lambda t: str(t.replicas) if t.session and not t.drives else "",
    "opened": lambda t: f"{duration(t.opened_seconds)} ago" if t.opened_seconds else "",
    "last heard": lambda t: f"{duration(t.silent_seconds)} ago" if t.session else "",
    "round": lambda t: _round(t.round),
    "lag": lambda t: str(t.lag) if t.takes_part else "",
    "steps": lambda t: str(t.steps) if t.steps else "",
    "rounds, waits a step": lambda t: f"{t.rounds / t.steps:.1f}, {t.waits / t.steps:.1f}" if t.steps else "",
    "transports": lambda t: ", ".join(t.transports),
    "waits for": lambda t: ", ".join(map(short, t.waits_for)),
}
"""Columns of the table of tasks."""


def of(used: int, limit: int) -> str:
    """Bytes, and of how many."""
    return f"{size(used)} of {size(limit)}" if limit else size(used)


def _round(number: int) -> str:
    return str(number) if number >= 0 else "-"
