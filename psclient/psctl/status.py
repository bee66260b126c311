"""`psctl status`: every server and every task of a job, and what is wrong."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping, Sequence

import click
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from psclient.psctl.output import breadth, table, terminal
from psclient.psctl.settings import WATCH, CommandSettings, connected, options, settings
from pswire.flags import Command, Flag
from pswire.telemetry.views.job_view import JobView, ServerView, TaskView, view_of
from pswire.telemetry.views.numbers import short
from pswire.telemetry.views.rates import RateWords
from pswire.telemetry.views.words import OF_SILENT, SERVER_COLUMNS, TASK_COLUMNS, heading, standby_line

COLOURS = {"up": "green", "open": "green", "left": "dim", "over": "dim"}
"""Of states; those that are not here are red."""


@click.command(
    cls=Command,
    section=WATCH,
    examples=(
        ("Show the job that TF_CONFIG names, every ten seconds", "psctl status --watch 10"),
        ("Print the state of a job as JSON", "psctl status --json --address 10.0.0.7:2222"),
    ),
)
@click.option(
    "--watch",
    "every",
    cls=Flag,
    type=click.FloatRange(0.1),
    metavar="SECONDS",
    help="Repeat at this interval, until Ctrl-C.",
)
@options
@settings
def status(settings: CommandSettings, every: float | None) -> int:
    """Show every server and task of a job, and its problems.

    For each task show its state, its round, and the tasks that it waits for. Below that list problems with advice. Exit
    with 1 if there is a problem.
    """
    cluster = settings.cluster()
    with connected(settings, cluster) as servers:
        while True:
            view = view_of(servers.look(), cluster.expected)
            code = settings.tell(dataclasses.asdict(view), *lines(view), wrong=bool(view.problems))
            if every is None:
                return code
            time.sleep(every)


def lines(view: JobView, rates: RateWords | None = None, width: int | None = None) -> list[RenderableType]:
    """Returns a job's state as tables for people.

    Args:
        view: the job's state.
        rates: more columns for the servers.
        width: number of columns of the terminal; None for those of `output.terminal`.
    """
    width = width or terminal().width
    shown: list[RenderableType] = [Text(heading(view), style="bold"), server_table(view.servers, rates or {}, width)]
    shown += [task_table(view.tasks, width)] if view.tasks else []
    shown += [Text(standby_line(standby)) for standby in view.standbys]
    return shown + [problem_line(problem.task, problem.message) for problem in view.problems]


def problem_line(task: str, message: str) -> Text:
    """Returns what is wrong, with the task that it is about."""
    return Text.assemble(("! ", "bold red"), f"{short(task)}: {message}" if task else message)


DISPENSABLE = (
    "address",
    "device",
    "generation",
    "up",
    "variables",
    "transports",
    "memory",
    "old values",
    "a round's time",
    "opened",
    "last heard",
    "session",
    "steps",
    "rounds, waits a step",
)
"""Columns that are left out, the first one first, where there is no room for all."""


def server_table(servers: Sequence[ServerView], rates: RateWords, width: int) -> Table:
    """The servers, and their rates if there are any."""
    names = dict.fromkeys(name for rate in rates.values() for name in rate)
    rows = [
        {
            name: _cell(name, cell(server))
            for name, cell in SERVER_COLUMNS.items()
            if server.incarnation or name in OF_SILENT
        }
        | dict(rates.get(server.task, {}))
        for server in servers
    ]
    return _fitting([*SERVER_COLUMNS, *names], rows, width)


def task_table(tasks: Sequence[TaskView], width: int) -> Table:
    """The other tasks."""
    rows = [{name: _cell(name, cell(task)) for name, cell in TASK_COLUMNS.items()} for task in tasks]
    return _fitting(TASK_COLUMNS, rows, width)


def _cell(heading: str, text: str) -> str | Text:
    return coloured(text) if heading == "state" else text


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
