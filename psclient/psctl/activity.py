"""`psctl top` and `psctl events`: a job as it runs, what it does in a second, and what its servers were told last."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from psclient.psctl.output import table, terminal
from psclient.psctl.settings import WATCH, CommandSettings, ObservedCluster, command, connected, number
from psclient.psctl.status import lines, problem_line
from pswire.cluster import Task
from pswire.errors import ConfigError
from pswire.model.status import Happened
from pswire.telemetry.views.job_view import JobView, Problem, view_of
from pswire.telemetry.views.looked import Looked, why_silent
from pswire.telemetry.views.numbers import ago, short
from pswire.telemetry.views.rates import RateMeter, Rates, rate_words

if TYPE_CHECKING:
    from psclient._src.telemetry.observer import Servers


@command(
    WATCH,
    ("Follow a job on this machine", "psctl top --local"),
    ("Print one interval of ten seconds as JSON", "psctl top --json --interval 10"),
)
@number("--interval", click.FloatRange(0.1), "Time between two updates. [default: 1]", 1.0, "SECONDS")
def top(settings: CommandSettings, interval: float) -> int:
    """Show a live table of a job, until Ctrl-C.

    Without a terminal, or with --json, show one interval and exit.
    """
    cluster, console = settings.cluster(), terminal()
    with connected(settings, cluster) as servers:
        look = partial(_looked, servers, cluster, RateMeter())
        look()
        if console.is_terminal and not settings.json:
            return _live(look, console, interval)
        time.sleep(interval)
        view, rates = look()
    return settings.tell({**vars(view), "rates": rates}, *lines(view, rate_words(rates)))


def _live(look: Callable[[], tuple[JobView, Rates]], console: Console, interval: float) -> int:
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                view, rates = look()
                live.update(Group(*lines(view, rate_words(rates), console.width)), refresh=True)
                time.sleep(interval)
    except KeyboardInterrupt:
        return 0


def _looked(servers: Servers, cluster: ObservedCluster, meter: RateMeter) -> tuple[JobView, Rates]:
    """The job now, and its rates since the last look."""
    view = view_of(servers.look(), cluster.expected)
    return view, meter.measure(view, time.monotonic())


# ---- What servers were told last ----


@command(
    WATCH,
    ("Show the last calls of all servers", "psctl events --local"),
    ("Show those of server 1", "psctl events --server 1 --address 10.0.0.7:2222,10.0.0.8:2222"),
)
@number("--server", click.IntRange(0), "Show only this server.", metavar="NUMBER")
def events(settings: CommandSettings, server: int | None) -> int:
    """Show the last calls and finished work of servers.

    The newest call is last. Each server keeps a hundred calls. Heartbeats and other periodic calls are left out unless
    they were refused. Exit with 1 if a server does not answer.
    """
    with connected(settings) as servers:
        found = [one for one in servers.events() if server in (None, one.task.index)]
    if server is not None and not found:
        raise ConfigError(
            f"{Task('ps', server)} is not at any of the addresses; name all servers of the job in --address"
        )
    problems = [Problem(why_silent(one), str(one.task), one.error.message) for one in found if one.error]
    said = {
        "servers": [{"task": str(one.task), "address": one.address, "events": one.recent} for one in found],
        "problems": problems,
    }
    return settings.tell(said, *_told(found, problems), wrong=bool(problems))


def _told(found: Sequence[Looked], problems: Sequence[Problem]) -> Iterator[RenderableType]:
    rows = [(str(one.task), each) for one in found for each in one.recent]
    if rows:
        yield _table(sorted(rows, key=lambda row: -row[1].seconds))
    elif len(problems) < len(found):
        yield "nothing yet"
    yield from (problem_line(problem.task, problem.message) for problem in problems)


def _table(rows: Iterable[tuple[str, Happened]]) -> Table:
    """What all servers were told, in the order in which it came."""
    cells = ((ago(each.seconds), short(task), each.what, _said(each)) for task, each in rows)
    return table(("ago", "server", "what", "said"), cells)


def _said(happened: Happened) -> Text:
    """By whom and about what; below that, in red, why it was refused."""
    said = Text(short(happened.said))
    return said.append(f"\n{happened.refused}", style="red") if happened.refused else said
