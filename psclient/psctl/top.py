"""`psctl top`: a job as it runs, with what it does in a second."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

import click
from rich.console import Console, Group
from rich.live import Live

from psclient.psctl.job_view import JobView, ServerView, view_of
from psclient.psctl.observer import Servers, connected
from psclient.psctl.output import size, terminal
from psclient.psctl.settings import CommandSettings, ObservedCluster, options, settings
from psclient.psctl.status import lines

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
