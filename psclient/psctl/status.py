"""`psctl status`: every server and every task of a job, and what is wrong."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import click
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from psclient.psctl.job_view import JobView, ServerView, SpareView, TaskView, view_of
from psclient.psctl.observer import connected
from psclient.psctl.output import breadth, duration, short, size, table, terminal
from psclient.psctl.settings import CommandSettings, options, settings

STATES = {
    "none": "no job: no chief has begun one",
    "starting": "job starts: nobody takes part yet",
    "running": "job runs",
    "over": "job is done",
    "broken": "job is broken: a round failed halfway",
    "unknown": "no server answers",
}

MODES = {
    "": "nobody takes part",
    "whole": "sync",
    "sync": "sync without whole rounds",
    "async": "async",
    "bounded": "bounded",
}

COLOURS = {"up": "green", "open": "green", "left": "dim", "over": "dim"}
"""Of states; those that are not here are red."""


@click.command()
@click.option(
    "--watch",
    "every",
    type=click.FloatRange(0.1),
    metavar="SECONDS",
    help="Say it again at this interval, until Ctrl-C.",
)
@options
@settings
def status(settings: CommandSettings, every: float | None) -> int:
    """Shows every server and every task of a job.

    Who is there, in which round, and whom it waits for; below that what is wrong, and what to do. Exits with 1 where
    something is.
    """
    cluster = settings.cluster()
    with connected(settings, cluster) as servers:
        while True:
            view = view_of(servers.look(), cluster.expected)
            code = settings.tell(dataclasses.asdict(view), *lines(view), wrong=bool(view.problems))
            if every is None:
                return code
            time.sleep(every)


def lines(view: JobView, rates: Rates | None = None, width: int | None = None) -> list[RenderableType]:
    """Returns a job's state as tables for people.

    Args:
        view: the job's state.
        rates: more columns for the servers.
        width: number of columns of the terminal; None for those of `output.terminal`.
    """
    width = width or terminal().width
    shown: list[RenderableType] = [heading(view), server_table(view.servers, rates or {}, width)]
    shown += [task_table(view.tasks, width)] if view.tasks else []
    shown += [spare_line(spare) for spare in view.spares]
    return shown + [problem_line(problem.task, problem.message) for problem in view.problems]


def heading(view: JobView) -> Text:
    """The job in one line."""
    said = STATES[view.state]
    if view.epoch:
        rounds = f"round {view.round}" if view.round >= 0 else "no round yet"
        said += f": epoch {view.epoch}, {rounds}, {view.replicas} replicas, {MODES[view.mode]}"
        if view.mode == "bounded":
            said += f", {view.gap} of at most {view.staleness} rounds apart"
    return Text(said, style="bold")


def spare_line(spare: SpareView) -> Text:
    """Returns where a process waits, and for which place."""
    place = f"gets the place of {short(spare.place)}" if spare.place else "waits for the place of a server"
    return Text(f"{spare.address} (in {spare.domain}) {place}")


def problem_line(task: str, message: str) -> Text:
    """Returns what is wrong, with the task that it is about."""
    return Text.assemble(("! ", "bold red"), f"{short(task)}: {message}" if task else message)


Rates = Mapping[str, Mapping[str, str]]
"""Rates of servers, per second: by server and column."""

Columns = Mapping[str, Callable[[Any], str | Text]]
"""By its heading what a column has of a server or a task."""

SERVER_COLUMNS: Columns = {
    "server": lambda s: short(s.task),
    "address": lambda s: s.address,
    "state": lambda s: coloured(s.state),
    "up": lambda s: duration(max(time.time() - s.started_at, 0)) if s.started_at else "",
    "epoch": lambda s: str(s.epoch),
    "round": lambda s: _round(s.round),
    "lag": lambda s: str(s.lag),
    "variables": lambda s: str(s.variables),
    "their bytes": lambda s: of(s.variable_bytes, s.memory_limit),
    "memory": lambda s: size(s.resident_bytes) if s.resident_bytes else "",
    "device": lambda s: s.device,
    "lanes": lambda s: ", ".join(f"{count} {lane}" for lane, count in sorted(s.lanes.items())),
    "waits for": lambda s: ", ".join(map(short, s.waits_for)),
    "saves": lambda s: ", ".join(f"{each['path']} (round {each['round']})" for each in s.saving),
    "old values": lambda s: of(s.snapshot_bytes, s.snapshot_limit) if s.snapshot_bytes or s.snapshot_limit else "",
}
"""Columns of the table of servers; a column that is empty for all is left out."""

OF_SILENT = ("server", "address", "state")
"""Columns of a server that does not answer."""

TASK_COLUMNS: Columns = {
    "task": lambda t: short(t.task) + (" (drives)" if t.drives else ""),
    "state": lambda t: coloured(t.state),
    "session": lambda t: str(t.session & 0xFFFFF) if t.session else "",
    "replicas": lambda t: str(t.replicas) if t.session and not t.drives else "",
    "last heard": lambda t: f"{duration(t.silent_seconds)} ago" if t.session else "",
    "round": lambda t: _round(t.round),
    "lag": lambda t: str(t.lag) if t.takes_part else "",
    "steps": lambda t: str(t.steps) if t.steps else "",
    "rounds, waits a step": lambda t: f"{t.rounds / t.steps:.1f}, {t.waits / t.steps:.1f}" if t.steps else "",
    "lanes": lambda t: ", ".join(t.lanes),
    "waits for": lambda t: ", ".join(map(short, t.waits_for)),
}
"""Columns of the table of tasks."""


DISPENSABLE = (
    "address",
    "device",
    "epoch",
    "up",
    "variables",
    "lanes",
    "memory",
    "old values",
    "last heard",
    "session",
    "steps",
    "rounds, waits a step",
)
"""Columns that are left out, the first one first, where there is no room for all."""


def server_table(servers: Sequence[ServerView], rates: Rates, width: int) -> Table:
    """The servers, and their rates if there are any."""
    names = dict.fromkeys(name for rate in rates.values() for name in rate)
    rows = [
        {name: cell(server) for name, cell in SERVER_COLUMNS.items() if server.incarnation or name in OF_SILENT}
        | dict(rates.get(server.task, {}))
        for server in servers
    ]
    return _fitting([*SERVER_COLUMNS, *names], rows, width)


def task_table(tasks: Sequence[TaskView], width: int) -> Table:
    """The other tasks."""
    return _fitting(TASK_COLUMNS, [{name: cell(task) for name, cell in TASK_COLUMNS.items()} for task in tasks], width)


def _fitting(headings: Iterable[str], rows: Sequence[Mapping[str, str | Text]], width: int) -> Table:
    """A table without the columns that are empty, and without dispensable ones that it has no room for."""
    shown = [name for name in headings if any(str(row.get(name, "")) for row in rows)]
    for name in (*DISPENSABLE, ""):
        made = table(shown, ([row.get(name, "") for name in shown] for row in rows))
        if breadth(made) <= width:
            break
        shown = [other for other in shown if other != name]
    return made


def coloured(state: str) -> Text:
    """A state in its colour."""
    return Text(state, style=COLOURS.get(state, "red"))


def of(used: int, limit: int) -> str:
    """Bytes, and of how many."""
    return f"{size(used)} of {size(limit)}" if limit else size(used)


def _round(number: int) -> str:
    return str(number) if number >= 0 else "-"
