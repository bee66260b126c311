"""`psctl status`: every server and every task of a job, and what is wrong."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

import click
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from psclient.psctl.output import breadth, table, terminal
from psclient.psctl.settings import WATCH, CommandSettings, command, connected, number
from pswire.telemetry.views.columns import cells_of, columns_of
from pswire.telemetry.views.job_view import JobView, ServerView, TaskView, view_of
from pswire.telemetry.views.numbers import short
from pswire.telemetry.views.rates import RateWords
from pswire.telemetry.views.words import heading, standby_line

COLOURS = {"up": "green", "open": "green", "left": "dim", "over": "dim"}
"""Of states; those that are not here are red."""


@command(
    WATCH,
    ("Show the job that TF_CONFIG names, every ten seconds", "psctl status --watch 10"),
    ("Print the state of a job as JSON", "psctl status --json --address 10.0.0.7:2222"),
)
@number("--watch", click.FloatRange(0.1), "Repeat at this interval, until Ctrl-C.", metavar="SECONDS")
def status(settings: CommandSettings, watch: float | None) -> int:
    """Show every server and task of a job, and its problems.

    For each task show its state, its round, and the tasks that it waits for. Below that list problems with advice. Exit
    with 1 if there is a problem.
    """
    cluster = settings.cluster()
    with connected(settings, cluster) as servers:
        while True:
            view = view_of(servers.look(), cluster.expected)
            code = settings.tell(vars(view), *lines(view), wrong=bool(view.problems))
            if watch is None:
                return code
            time.sleep(watch)


def lines(view: JobView, rates: RateWords | None = None, width: int | None = None) -> list[RenderableType]:
    """Returns a job's state as tables for people.

    Args:
        view: the job's state.
        rates: more columns for the servers.
        width: number of columns of the terminal; None for those of `output.terminal`.
    """
    width = width or terminal().width
    shown: list[RenderableType] = [Text(heading(view), style="bold"), server_table(view.servers, rates or {}, width)]
    if view.tasks:
        shown.append(_fitting(columns_of(TaskView), [_coloured(cells_of(task)) for task in view.tasks], width))
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
    "tokens",
    "bytes a local step",
    "last exchange",
    "local steps",
)
"""Columns that are left out, the first one first, where there is no room for all."""


def server_table(servers: Sequence[ServerView], rates: RateWords, width: int) -> Table:
    """The servers, and their rates if there are any."""
    names = dict.fromkeys(name for rate in rates.values() for name in rate)
    rows = [_coloured(server.cells()) | dict(rates.get(server.task, {})) for server in servers]
    return _fitting([*columns_of(ServerView), *names], rows, width)


def _coloured(row: Mapping[str, str]) -> dict[str, str | Text]:
    """A row with its state in its colour."""
    return {**row, "state": Text(row["state"], style=COLOURS.get(row["state"], "red"))}


def _fitting(headings: Iterable[str], rows: Sequence[Mapping[str, str | Text]], width: int) -> Table:
    """A table without the columns that are empty, and without dispensable ones that it has no room for."""
    shown = [name for name in headings if any(str(row.get(name, "")) for row in rows)]
    for name in (*DISPENSABLE, ""):
        made = table(shown, ([row.get(name, "") for name in shown] for row in rows))
        if breadth(made) <= width:
            break
        shown = [other for other in shown if other != name]
    return made
