"""The parts of the status page, each as HTML by its name. They use the words of `psctl`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import cast

from pswire.model.log import Snapshotted
from pswire.model.status import SessionState
from pswire.telemetry.page.markup import Html, escaped, items, paragraph, table
from pswire.telemetry.page.time_line import time_line
from pswire.telemetry.views.columns import cells_of, columns_of
from pswire.telemetry.views.history import Event, lives_of
from pswire.telemetry.views.job_view import JobView, ServerView, TaskView
from pswire.telemetry.views.looked import Looked
from pswire.telemetry.views.numbers import ago, duration, short, size
from pswire.telemetry.views.rates import PHASES, Rates, rate_words
from pswire.telemetry.views.words import heading, standby_line

MOST_ROWS = 200
"""Rows of a table that are shown; a sentence says how many there are beyond."""

MOST_CHARACTERS = 100
"""Characters of a section that are shown."""

EVENTS = 30
"""Events that are shown: the newest."""


@dataclass(frozen=True)
class Sight:
    """All that the page shows, at one time.

    Attributes:
        task: the task whose page it is.
        scope: a sentence that says what this page shows.
        job: the identity of the job, "" for none.
        view: the job.
        rates: what its servers do in a second.
        looked: the servers' answers.
        sessions: all sessions that the server tells which keeps them.
        events: what the log says.
        variables: rows of the table of variables.
        now: the time, in monotonic seconds.
    """

    task: str
    scope: str
    job: str
    view: JobView
    rates: Rates
    looked: Sequence[Looked]
    sessions: Sequence[SessionState]
    events: Sequence[Event]
    variables: Sequence[Mapping[str, str]]
    now: float
    clock: datetime = field(default_factory=lambda: datetime.now(UTC))


def render(sight: Sight) -> dict[str, Html]:
    """Returns the parts of the page, by the names of their places."""
    return {name: part(sight) for name, (_, part) in SECTIONS.items()}


def _summary(sight: Sight) -> Html:
    job = f"Job {sight.job}. " if sight.job else ""
    when = f"As of {sight.clock:%Y-%m-%d %H:%M:%S} UTC."
    return Html(f'<p class="state">{escaped(heading(sight.view))}</p>' + paragraph(f"{job}{sight.scope} {when}"))


def _problems(sight: Sight) -> Html:
    found = [f"{short(each.task)}: {each.message}" if each.task else each.message for each in sight.view.problems]
    return items(f"! {each}" for each in found) if found else paragraph("None.")


def _servers(sight: Sight) -> Html:
    rates = rate_words(sight.rates)
    rows = [
        server.cells() | {name: text for name, text in rates.get(server.task, {}).items() if name == "rounds/s"}
        for server in sight.view.servers
    ]
    standbys = items(map(standby_line, sight.view.standbys)) if sight.view.standbys else Html("")
    return Html(table("Servers, and what they hold", [*columns_of(ServerView), "rounds/s"], rows) + standbys)


def _tasks(sight: Sight) -> Html:
    rows = [*map(cells_of, sight.view.tasks)]
    if not rows:
        return paragraph(
            "No tasks are known here. See the page of the chief, or of the server that keeps the sessions."
        )
    return table("Workers and the chief, and the tasks they wait for", columns_of(TaskView), rows)


def _time_line(sight: Sight) -> Html:
    drawn = time_line(lives_of(sight.sessions), sight.events, sight.now)
    shown = sight.events[-EVENTS:][::-1]
    rows = [{"ago": _when(event, sight.now), "what": event.what, "said": event.said} for event in shown]
    return Html(drawn + (table("What the log says, the newest first", ("ago", "what", "said"), rows) if rows else ""))


def _when(event: Event, now: float) -> str:
    return "earlier" if event.time is None else duration(max(now - event.time, 0.0))


def _rounds(sight: Sight) -> Html:
    rows = []
    for server in sight.view.servers:
        rate = sight.rates.get(server.task) or {}
        spent = rate.get("round_seconds", {})
        whole = sum(spent.values())
        row = {"server": short(server.task), "rounds/s": f"{rate['rounds_per_second']:.1f}" if rate else ""}
        if whole:
            row["a round's time"] = f"{1000 * whole:.1f} ms"
            row |= {name: f"{100 * spent.get(name, 0.0) / whole:.0f} %" for name in PHASES}
            row["shares"] = _shares([spent.get(name, 0.0) / whole for name in PHASES])
        rows.append(row)
    caption = "Waiting for gradients after the first push, applying them, responding; since the last update"
    waiting = [_oldest(server) for server in sight.view.servers if server.waits_for]
    headings = ("server", "rounds/s", "a round's time", *PHASES, "shares")
    return Html(table(caption, headings, rows) + (items(waiting) if waiting else ""))


def _oldest(server: ServerView) -> str:
    """Says in words for whom the oldest open round of a server waits."""
    first = server.waiting[0]
    section, more = first.section, len(server.waiting) - 1
    what = section if len(section) <= MOST_CHARACTERS else f"{section[:MOST_CHARACTERS]} ..."
    after = f", and {more} rounds after it" if more else ""
    waits = ", ".join(map(short, server.waits_for))
    return f"{short(server.task)}: round {first.round}{after} waits for {waits}; {what}"


def _shares(shares: Sequence[float]) -> Html:
    words = ", ".join(f"{name} {100 * share:.0f} %" for name, share in zip(PHASES, shares, strict=True))
    drawn, left = "", 0.0
    for name, share in zip(PHASES, shares, strict=True):
        drawn += f'<rect class="{name}" x="{left:.0f}" y="0" width="{1000 * share:.0f}" height="20"/>'
        left += 1000 * share
    head = f'<svg viewBox="0 0 1000 20" preserveAspectRatio="none" role="img" aria-label="{escaped(words)}">'
    return Html(f"{head}{drawn}</svg>")


def _transports(sight: Sight) -> Html:
    rows = []
    for server in sight.view.servers:
        moved = sight.rates.get(server.task, {}).get("bytes_per_second", {})
        for transport in sorted({name.split()[0] for name, count in server.traffic.items() if count}):
            received, sent = f"{transport} received", f"{transport} sent"
            rows.append(
                {
                    "server": short(server.task),
                    "transport": transport,
                    "in": f"{size(moved.get(received, 0))}/s" if moved else "",
                    "out": f"{size(moved.get(sent, 0))}/s" if moved else "",
                    "received so far": size(server.traffic.get(received, 0)),
                    "sent so far": size(server.traffic.get(sent, 0)),
                }
            )
    if not rows:
        return paragraph("No values have been transferred yet.")
    headings = ("server", "transport", "in", "out", "received so far", "sent so far")
    return table("Bytes of payloads, as counted by the servers", headings, rows)


def _variables(sight: Sight) -> Html:
    if not sight.variables:
        return paragraph("There are no variables yet.")
    shown = sight.variables[:MOST_ROWS]
    found = table(
        "Variables; slot variables are listed below their variable",
        ("variable", "shape", "dtype", "bytes", "servers"),
        shown,
    )
    more = len(sight.variables) - len(shown)
    return Html(found + (paragraph(f"And {more} more; psctl vars lists all.") if more else "") + _tables(sight))


def _tables(sight: Sight) -> Html:
    rows = [
        {
            "table": name,
            "server": short(server.task),
            "rows": f"{count:,}",
            "bytes": size(server.table_bytes.get(name, 0)),
        }
        for server in sight.view.servers
        for name, count in sorted(server.table_rows.items())
    ]
    shown = sorted(rows, key=lambda row: (row["table"], row["server"]))[:MOST_ROWS]
    return table("Dynamic tables", ("table", "server", "rows", "bytes"), shown) if shown else Html("")


def _checkpoints(sight: Sight) -> Html:
    rows = [
        {
            "checkpoint": each.path,
            "round": str(each.round),
            "state": "being written",
            "by": short(server.task),
            "left": size(each.bytes),
        }
        for server in sight.view.servers
        for each in server.saving
    ]
    settled = [event for event in reversed(sight.events) if isinstance(event.entry, Snapshotted)]
    rows += [_settled(event, sight.now) for event in settled]
    if not rows:
        return paragraph("None yet.")
    headings = ("checkpoint", "round", "state", "ago", "by", "left", "why")
    return table("Checkpoints, newest first", headings, rows[:EVENTS])


def _settled(event: Event, now: float) -> dict[str, str]:
    entry = cast(Snapshotted, event.entry)
    state = "failed" if entry.error else "saved"
    found = {"checkpoint": entry.path, "round": str(entry.round), "state": state, "ago": _when(event, now)}
    return {**found, "why": entry.error}


def _refused(sight: Sight) -> Html:
    found = sorted(
        ((each.seconds, short(str(one.task)), each) for one in sight.looked for each in one.recent if each.refused),
        key=lambda row: row[0],
    )
    rows = [
        {"ago": ago(seconds), "server": server, "what": each.what, "said": short(each.said), "why": each.refused}
        for seconds, server, each in found[:EVENTS]
    ]
    if not rows:
        return paragraph("None in the last calls.")
    return table("Calls that servers rejected, and failed work", ("ago", "server", "what", "said", "why"), rows)


SECTIONS: Mapping[str, tuple[str, Callable[[Sight], Html]]] = {
    "summary": ("", _summary),
    "problems": ("Problems", _problems),
    "servers": ("Servers", _servers),
    "tasks": ("Tasks", _tasks),
    "time-line": ("Time line", _time_line),
    "rounds": ("Rounds", _rounds),
    "transports": ("Transports", _transports),
    "variables": ("Variables", _variables),
    "checkpoints": ("Checkpoints", _checkpoints),
    "refused": ("Rejected callers", _refused),
}
"""By the name of its place each part of the page: its heading, and what makes it."""
