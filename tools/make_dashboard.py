"""Writes configs/grafana/paramserver.json, a dashboard of jobs, from the table of panels below."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TARGET = Path(__file__).resolve().parent.parent / "configs" / "grafana" / "paramserver.json"

COLUMNS = 24
"""Columns of Grafana's grid."""

JOB = 'job=~"$job"'
"""What each selector has: the jobs that are picked at the top."""

RATE = "[$__rate_interval]"
"""The window of a rate: Grafana makes it fit the scrapes and the width of the panel."""


@dataclass(frozen=True)
class Panel:
    """A panel.

    Attributes:
        title: its title.
        about: a sentence of what to see in it.
        queries: for each legend its query.
        unit: Grafana's name of the unit.
        kind: Grafana's name of the panel.
        width: its width in columns; a row of panels has `COLUMNS` at most.
        height: its height in rows of the grid.
    """

    title: str
    about: str
    queries: dict[str, str]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 8
    height: int = 8


def rate(metric: str, *more: str) -> str:
    """The rate of a counter."""
    return f"rate({metric}{{{', '.join((JOB, *more))}}}{RATE})"


def gauge(metric: str, *more: str) -> str:
    """A gauge."""
    return f"{metric}{{{', '.join((JOB, *more))}}}"


def quantile(metric: str, by: str = "") -> str:
    """The 95th percentile of a histogram, for each job, and for each value of a label."""
    return f"histogram_quantile(0.95, sum by (job, le{', ' + by if by else ''}) ({rate(metric + '_bucket')}))"


SERVER, WORKER, CHIEF = "paramserver_server_", "paramserver_worker_", "paramserver_chief_"
COMPLETED, OTHERWISE = 'outcome="completed"', 'outcome!="completed"'
COMPUTING, GRPC = 'phase="computing"', 'transport="grpc"'

ROWS: dict[str, Sequence[Panel]] = {
    "Job": (
        Panel(
            "Rounds per second",
            "Zero for minutes while sessions are open: psctl status says whom the job waits for.",
            {"{{job}}": f"max by (job) ({rate(SERVER + 'rounds_total', COMPLETED)})"},
            kind="stat",
            width=5,
            height=5,
        ),
        Panel(
            "Members",
            "Workers of the newest generation.",
            {"{{job}}": f"max by (job) ({gauge(CHIEF + 'members')})"},
            kind="stat",
            width=4,
            height=5,
        ),
        Panel(
            "Missing tasks",
            "Tasks of the cluster without a session.",
            {"{{task}}": gauge(CHIEF + "missing")},
            kind="stat",
            width=5,
            height=5,
        ),
        Panel(
            "Chief silent for",
            "Nothing new is approved, and no checkpoint completed, while there is no chief.",
            {"{{job}}": f"max by (job) ({gauge(SERVER + 'chief_silent_seconds')})"},
            unit="s",
            kind="stat",
            width=5,
            height=5,
        ),
        Panel(
            "Certificates expire in",
            "The first of all tasks. Once it has expired, nobody connects to that task again.",
            {"{{job}}": f"min by (job) ({gauge('paramserver_certificate_expiry_timestamp_seconds')}) - time()"},
            unit="s",
            kind="stat",
            width=5,
            height=5,
        ),
        Panel(
            "Tasks",
            "What runs at each address.",
            {"": gauge("paramserver_build_info")},
            kind="table",
            width=12,
        ),
        Panel(
            "Sessions of workers",
            "As server 0 knows them. Those that were lost were silent for longer than their lease.",
            {"{{job}} {{state}}": f"sum by (job, state) ({gauge(SERVER + 'sessions')})"},
            width=12,
        ),
    ),
    "Rounds": (
        Panel(
            "Rounds per second, by server",
            "Servers that a plan does not touch take no part in its rounds.",
            {"{{instance}}": f"sum by (instance) ({rate(SERVER + 'rounds_total', COMPLETED)})"},
        ),
        Panel(
            "95th percentile of a round's time",
            "Waiting for gradients, applying them, and responding.",
            {"{{job}} {{phase}}": quantile(SERVER + "round_phase_seconds", "phase")},
            unit="s",
        ),
        Panel(
            "Rounds that were not completed",
            "Failed for all members alike, or skipped, since a contribution had NaN or infinity.",
            {"{{instance}} {{outcome}}": rate(SERVER + "rounds_total", OTHERWISE)},
        ),
        Panel(
            "Left out",
            "Contributions of lost members that completed rounds lack, and sessions that were lost.",
            {
                "{{instance}} contributions": rate(SERVER + "excluded_pushes_total"),
                "{{instance}} sessions": rate(SERVER + "session_timeouts_total"),
            },
        ),
        Panel(
            "95th percentile of a vote's time",
            "From a server's vote until a round of several servers was decided.",
            {"{{job}}": quantile(SERVER + "vote_seconds")},
            unit="s",
        ),
        Panel(
            "NaN and infinity",
            "Contributions that have it, and variables that it has reached and that still have it.",
            {
                "{{instance}} contributions": rate(SERVER + "nonfinite_pushes_total"),
                "{{instance}} variables": gauge(SERVER + "nonfinite_variables"),
            },
        ),
        Panel(
            "Staleness",
            "For asynchronous workers: rounds of others between a read and the application of the push, on average.",
            {
                "{{job}}": f"sum by (job) ({rate(SERVER + 'staleness_rounds_sum')})"
                f" / sum by (job) ({rate(SERVER + 'staleness_rounds_count')})"
            },
        ),
        Panel(
            "Gap of clocks",
            "With bounded staleness: rounds between the fastest and the slowest worker.",
            {"{{instance}}": gauge(SERVER + "clock_gap_rounds")},
        ),
        Panel(
            "Servers without connections to others",
            "Servers to which a server has votes to send but no connection.",
            {"{{instance}}": gauge(SERVER + "servers_missing")},
        ),
    ),
    "Workers": (
        Panel(
            "Steps per second",
            "Of each worker.",
            {"{{instance}}": rate(WORKER + "steps_total")},
        ),
        Panel(
            "Time by phase",
            "The share of computing, waiting and reading in the time of all workers.",
            {
                "{{job}} {{phase}}": f"sum by (job, phase) ({rate(WORKER + 'phase_seconds_sum')})"
                f" / on (job) group_left sum by (job) ({rate(WORKER + 'phase_seconds_sum')})"
            },
            unit="percentunit",
        ),
        Panel(
            "Computing time of a step, by worker",
            "The others wait for the slowest.",
            {
                "{{instance}}": f"{rate(WORKER + 'phase_seconds_sum', COMPUTING)}"
                f" / {rate(WORKER + 'phase_seconds_count', COMPUTING)}"
            },
            unit="s",
        ),
        Panel(
            "Waits per step",
            "One in most loops; more means that the script looks at values in between.",
            {"{{instance}}": f"{rate(WORKER + 'blocking_waits_total')} / {rate(WORKER + 'steps_total')}"},
        ),
        Panel(
            "Members of the last round",
            "Whose contributions the last round has, and who was left out.",
            {"{{instance}} {{outcome}}": gauge(WORKER + "last_round_members")},
        ),
        Panel(
            "Cores in use",
            "Of every process.",
            {"{{instance}}": rate("process_cpu_seconds_total")},
        ),
    ),
    "Bytes": (
        Panel(
            "Payload, by transport",
            "Bytes per second that servers send and receive.",
            {"{{transport}} {{direction}}": f"sum by (transport, direction) ({rate(SERVER + 'payload_bytes_total')})"},
            unit="Bps",
        ),
        Panel(
            "Share of gRPC",
            "Payload that goes over gRPC although a faster transport may exist.",
            {
                "{{job}}": f"sum by (job) ({rate(SERVER + 'payload_bytes_total', GRPC)})"
                f" / sum by (job) ({rate(SERVER + 'payload_bytes_total')})"
            },
            unit="percentunit",
        ),
        Panel(
            "In flight",
            "Contributions that servers hold and have not used yet.",
            {"{{instance}}": gauge(SERVER + "in_flight_bytes")},
            unit="bytes",
        ),
        Panel(
            "Variables",
            "Their bytes on each server, and their share of the limit where there is one.",
            {"{{instance}}": gauge(SERVER + "variable_bytes")},
            unit="bytes",
        ),
        Panel(
            "Share of the memory limit",
            "At 1 the next variable is refused.",
            {"{{instance}}": f"{gauge(SERVER + 'variable_bytes')} / ({gauge(SERVER + 'memory_limit_bytes')} > 0)"},
            unit="percentunit",
        ),
        Panel(
            "Resident memory",
            "Of every process; flat in a healthy job.",
            {"{{instance}}": gauge("process_resident_memory_bytes")},
            unit="bytes",
        ),
        Panel(
            "Rows of dynamic tables",
            "On all servers together.",
            {"{{table}}": f"sum by (job, table) ({gauge(SERVER + 'table_rows')})"},
        ),
        Panel(
            "Bytes of dynamic tables",
            "On all servers together.",
            {"{{table}}": f"sum by (job, table) ({gauge(SERVER + 'table_bytes')})"},
            unit="bytes",
        ),
        Panel(
            "Evicted and refused",
            "Rows that were evicted from a table, and gradients that its filter dropped, per second.",
            {
                "{{table}} evicted": f"sum by (job, table) ({rate(SERVER + 'table_evicted_total')})",
                "{{table}} refused": f"sum by (job, table) ({rate(SERVER + 'table_refused_total')})",
            },
        ),
    ),
    "Checkpoints and kernels": (
        Panel(
            "Checkpoints in the last hour",
            "Of the job, as its chief counts them.",
            {"{{job}} {{outcome}}": f"sum by (job, outcome) (increase({gauge(CHIEF + 'checkpoints_total')}[1h]))"},
        ),
        Panel(
            "95th percentile of a checkpoint's time",
            "From the order until the manifest was written, and until each server's part was.",
            {
                "{{job}} whole": quantile(CHIEF + "checkpoint_seconds"),
                "{{job}} part": quantile(SERVER + "checkpoint_shard_seconds"),
            },
            unit="s",
        ),
        Panel(
            "Held for checkpoints",
            "Bytes of old values, while checkpoints are being written.",
            {"{{instance}}": gauge(SERVER + "held_checkpoint_bytes")},
            unit="bytes",
        ),
        Panel(
            "Cores in kernels",
            "Running time of update functions per second.",
            {"{{instance}}": rate(SERVER + "kernel_seconds_total")},
        ),
        Panel(
            "Kernels",
            "That were compiled here, loaded, or failed to compile.",
            {"{{instance}} {{outcome}}": gauge(SERVER + "kernels_compiled_total")},
        ),
        Panel(
            "Programs without a kernel",
            "Per second; small ones are interpreted on purpose.",
            {"{{instance}}": rate(SERVER + "programs_interpreted_total")},
        ),
    ),
}


def dashboard() -> dict[str, Any]:
    """The dashboard, as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in ROWS.items():
        place = {"h": 1, "w": COLUMNS, "x": 0, "y": top}
        panels.append({"id": len(panels) + 1, "type": "row", "title": title, "collapsed": False, "gridPos": place})
        top, left, tallest = top + 1, 0, 0
        for panel in row:
            if left + panel.width > COLUMNS:
                top, left, tallest = top + tallest, 0, 0
            place = {"h": panel.height, "w": panel.width, "x": left, "y": top}
            panels.append(_panel(panel, len(panels) + 1, place))
            left, tallest = left + panel.width, max(tallest, panel.height)
        top += tallest
    return {
        "title": "Parameter servers",
        "uid": "paramserver",
        "tags": ["paramserver"],
        "description": "Training jobs on parameter servers. docs/metrics.md explains each metric.",
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "",
        "annotations": {"list": []},
        "links": [],
        "templating": {"list": [_datasource(), _jobs()]},
        "panels": panels,
    }


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    table = panel.kind == "table"
    targets = [
        {
            "refId": chr(ord("A") + index),
            "datasource": SOURCE,
            "expr": query,
            "legendFormat": legend,
            **({"instant": True, "format": "table"} if table else {}),
        }
        for index, (legend, query) in enumerate(panel.queries.items())
    ]
    found: dict[str, Any] = {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": SOURCE,
        "gridPos": place,
        "targets": targets,
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "options": {},
    }
    if panel.kind == "stat":
        found["options"] = {"reduceOptions": {"calcs": ["lastNotNull"]}, "textMode": "value_and_name"}
    if table:
        hidden = ("Time", "Value", "__name__")
        found["transformations"] = [{"id": "organize", "options": {"excludeByName": dict.fromkeys(hidden, True)}}]
    return found


SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus", "current": {}}


def _jobs() -> dict[str, Any]:
    query = "label_values(paramserver_build_info, job)"
    return {
        "name": "job",
        "label": "Job",
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": "jobs"},
        "definition": query,
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


if __name__ == "__main__":
    TARGET.write_text(json.dumps(dashboard(), indent=2) + "\n", encoding="utf-8")
