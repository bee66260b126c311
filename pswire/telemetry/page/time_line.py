"""Draws the lifetimes of sessions as bars with generations as marks, and writes the same in words beside each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pswire.telemetry.page.markup import Html, escaped, table
from pswire.telemetry.views.history import Event, Life
from pswire.telemetry.views.numbers import duration, short

ENDS = {
    "left": "left",
    "failed": "failed",
    "lost": "lost: no heartbeat",
    "hung": "hung: it held up a round",
}
"""Words for the end of a life."""

CAPTION = "Lifetime of each task, from the left until now; dashed lines are generations"


def time_line(lives: Sequence[Life], events: Iterable[Event], now: float) -> Html:
    """A table with a bar for each session.

    Args:
        lives: the sessions.
        events: what the log says; generations are drawn where their time is known.
        now: the time, in monotonic seconds.
    """
    begin = max((life.began for life in lives), default=0.0)
    if not begin:
        return Html("")
    generations = [now - event.time for event in events if event.what == "generation" and event.time is not None]
    rows = [_row(life, begin, generations) for life in lives]
    return table(f"{CAPTION}. The width is {duration(begin)}.", ("task", "life", "since", "until"), rows)


def _row(life: Life, begin: float, generations: Iterable[float]) -> Mapping[str, str]:
    until = "now" if life.state == "open" else f"{duration(life.ended)} ago: {ENDS.get(life.state, life.state)}"
    name = short(life.task) + (" (drives)" if life.drives else "")
    since = f"{duration(life.began)} ago"
    words = f"{name}: from {since} until {until}"
    left, right = (1000 * (1 - min(seconds, begin) / begin) for seconds in (life.began, life.ended))
    kind = "open" if life.state == "open" else "left" if life.state == "left" else "ended"
    bar = f'<rect class="{kind}" x="{left:.0f}" y="3" width="{max(right - left, 4):.0f}" height="14"/>'
    if kind == "ended":
        x = max(right, 8)
        bar += f'<path class="end" d="M{x - 8:.0f} 3L{x + 8:.0f} 17M{x + 8:.0f} 3L{x - 8:.0f} 17"/>'
    marks = "".join(
        f'<path class="generation" d="M{1000 * (1 - seconds / begin):.0f} 0V20"/>'
        for seconds in generations
        if seconds <= begin
    )
    head = f'<svg viewBox="0 0 1000 20" preserveAspectRatio="none" role="img" aria-label="{escaped(words)}">'
    return {"task": name, "life": f"{head}{bar}{marks}</svg>", "since": since, "until": until}
