"""`psctl top` and `psctl recent`: a job as it runs, what it does in a second, and what its servers were told last."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from psclient.psctl.job_view import JobView, Problem, ServerView, view_of, why_silent
from psclient.psctl.observer import Looked, Servers, connected
from psclient.psctl.output import duration, short, size, table, terminal
from psclient.psctl.settings import CommandSettings, ObservedCluster, options, settings
from psclient.psctl.status import lines, problem_line
from pswire.cluster import Task
from pswire.errors import ConfigError
from pswire.model.status import Happened

Rates = Mapping[str, Mapping[str, Any]]
"""For each server its rounds per second, and bytes per second by lane and direction."""


@click.command()
@click.option(
    "--interval", type=click.FloatRange(0.1), default=1.0, show_default=True, help="Seconds between two looks."
)
@options
@settings
def top(settings: CommandSettings, interval: float) -> int:
    """Shows a job as it runs, until Ctrl-C.

    Where there is no terminal, or with --json, it shows what the job does in one interval.
    """
    cluster, console = settings.cluster(), terminal()
    with connected(settings, cluster) as servers:
        watcher = Watcher(servers, cluster)
        watcher.look()
        if console.is_terminal and not settings.json:
            return _live(watcher, console, interval)
        time.sleep(interval)
        view, rates = watcher.look()
    return settings.tell({**dataclasses.asdict(view), "rates": rates}, *lines(view, _words(rates)))


def _live(watcher: Watcher, console: Console, interval: float) -> int:
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                view, rates = watcher.look()
                live.update(Group(*lines(view, _words(rates), console.width)), refresh=True)
                time.sleep(interval)
    except KeyboardInterrupt:
        return 0


class Watcher:
    """Looks at a job again and again, and says what it has done in between.

    Args:
        servers: connections to the servers.
        cluster: the cluster that is observed.
    """

    def __init__(self, servers: Servers, cluster: ObservedCluster) -> None:
        self._servers = servers
        self._cluster = cluster
        self._last: dict[str, ServerView] = {}
        self._then = 0.0

    def look(self) -> tuple[JobView, Rates]:
        """The job now, and its rates since the last look."""
        view, now = view_of(self._servers.look(), self._cluster.expected), time.monotonic()
        last, self._last = self._last, {server.task: server for server in view.servers}
        seconds, self._then = now - self._then, now
        return view, {s.task: rates(last[s.task], s, seconds) for s in view.servers if s.task in last}


def rates(before: ServerView, after: ServerView, seconds: float) -> dict[str, Any]:
    """Returns a server's rates over some seconds: none where it is not the same process any more."""
    if before.incarnation != after.incarnation or not after.incarnation:
        return {}
    moved = {name: (after.traffic[name] - before.traffic.get(name, 0)) / seconds for name in after.traffic}
    rounds = max(after.round - before.round, 0) / seconds  # a job that begins anew begins at no round
    return {"rounds_per_second": rounds, "bytes_per_second": {name: rate for name, rate in moved.items() if rate > 0}}


def _words(rates: Rates) -> dict[str, dict[str, str]]:
    """Rates for people, by server and column."""
    return {task: _columns(each) for task, each in rates.items() if each}


def _columns(rate: Mapping[str, Any]) -> dict[str, str]:
    found = {"rounds/s": f"{rate['rounds_per_second']:.1f}"}
    for direction, heading in (("received", "in"), ("sent", "out")):
        moved = {name.split()[0]: number for name, number in rate["bytes_per_second"].items() if direction in name}
        found[heading] = ", ".join(f"{lane} {size(number)}/s" for lane, number in sorted(moved.items()))
    return found


# ---- What servers were told last ----


@click.command()
@click.option("--server", "number", type=click.IntRange(0), metavar="NUMBER", help="Show this server alone.")
@options
@settings
def recent(settings: CommandSettings, number: int | None) -> int:
    """Shows the last calls that servers took, and work that is over.

    The newest is last; of each server there are a hundred at most. What comes by itself, such as beats, is left out
    unless it was refused. Exits with 1 where a server does not answer.
    """
    with connected(settings) as servers:
        found = [one for one in servers.recent() if number in (None, one.task.index)]
    if number is not None and not found:
        raise ConfigError(f"no address leads to {Task('ps', number)}; name all servers of the job in --address")
    problems = [Problem(why_silent(one), str(one.task), one.error.message) for one in found if one.error]
    said = {
        "servers": [
            {"task": str(one.task), "address": one.address, "recent": list(map(dataclasses.asdict, one.recent))}
            for one in found
        ],
        "problems": list(map(dataclasses.asdict, problems)),
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
    cells = ((_ago(each.seconds), short(task), each.what, _said(each)) for task, each in rows)
    return table(("ago", "server", "what", "said"), cells)


def _said(happened: Happened) -> Text:
    """By whom and about what; below that, in red, why it was refused."""
    said = Text(short(happened.said))
    return said.append(f"\n{happened.refused}", style="red") if happened.refused else said


def _ago(seconds: float) -> str:
    """A time for people; of rounds that follow each other fast as exact as they are."""
    return f"{seconds:.2f} s" if seconds < 10 else duration(seconds)
