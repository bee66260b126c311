"""What servers do in a second, from two views of a job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pswire.telemetry.views.job_view import JobView, ServerView
from pswire.telemetry.views.numbers import size

Rates = Mapping[str, Mapping[str, Any]]
"""For each server its rounds per second, bytes per second by transport and direction, and seconds of a round by
phase."""

PHASES = ("waiting", "applying", "answering")
"""The phases of a round, in their order."""

RateWords = Mapping[str, Mapping[str, str]]
"""Rates for people: by server and column."""


class RateMeter:
    """Compares each view of a job with the one before. Used by one thread."""

    def __init__(self) -> None:
        self._last: dict[str, ServerView] = {}
        self._then = 0.0

    def measure(self, view: JobView, now: float) -> Rates:
        """Returns the rates since the last view; `now` is its time, in monotonic seconds."""
        last, self._last = self._last, {server.task: server for server in view.servers}
        seconds, self._then = now - self._then, now
        return {s.task: rates(last[s.task], s, seconds) for s in view.servers if s.task in last and seconds > 0}


def rates(before: ServerView, after: ServerView, seconds: float) -> dict[str, Any]:
    """Returns a server's rates over some seconds: none where it is not the same process any more."""
    if before.incarnation != after.incarnation or not after.incarnation:
        return {}
    moved = {name: (after.traffic[name] - before.traffic.get(name, 0)) / seconds for name in after.traffic}
    rounds = max(after.round - before.round, 0)  # a job that begins anew begins at no round
    spent = {name: max(after.phases[name] - before.phases.get(name, 0.0), 0.0) for name in after.phases}
    return {
        "rounds_per_second": rounds / seconds,
        "bytes_per_second": {name: rate for name, rate in moved.items() if rate > 0},
        "round_seconds": {name: each / rounds for name, each in spent.items()} if rounds else {},
    }


def rate_words(rates: Rates) -> dict[str, dict[str, str]]:
    """Rates for people, by server and column."""
    return {task: _columns(each) for task, each in rates.items() if each}


def _columns(rate: Mapping[str, Any]) -> dict[str, str]:
    found = {"rounds/s": f"{rate['rounds_per_second']:.1f}", "a round's time": phase_words(rate["round_seconds"])}
    for direction, heading in (("received", "in"), ("sent", "out")):
        moved = {name.split()[0]: number for name, number in rate["bytes_per_second"].items() if direction in name}
        found[heading] = ", ".join(f"{transport} {size(number)}/s" for transport, number in sorted(moved.items()))
    return found


def phase_words(seconds: Mapping[str, float]) -> str:
    """A round's time, and the share of each phase in it: `3.1 ms: waiting 62 %, applying 30 %, answering 8 %`."""
    whole = sum(seconds.values())
    if not whole:
        return ""
    shares = ", ".join(f"{name} {100 * seconds.get(name, 0.0) / whole:.0f} %" for name in PHASES)
    return f"{1000 * whole:.1f} ms: {shares}"
