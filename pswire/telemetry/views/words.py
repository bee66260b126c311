"""The words for a job, its servers and its tasks: those of `psctl status` and `psctl top`, and of the status page."""

from __future__ import annotations

from pswire.telemetry.views.job_view import JobView, StandbyView
from pswire.telemetry.views.numbers import short

STATES = {
    "none": "no job: the chief has not started one",
    "starting": "job is starting: no worker takes part yet",
    "running": "job is running",
    "over": "job is done",
    "broken": "job is broken: a round failed after some of its updates",
    "unknown": "no server answers",
}

MODES = {
    "": "no workers",
    "sync": "sync",
    "async": "async",
    "bounded": "bounded",
}


def heading(view: JobView) -> str:
    """The job in one line."""
    said = STATES[view.state]
    if view.generation:
        rounds = f"round {view.round}" if view.round >= 0 else "no round yet"
        said += f": generation {view.generation}, {rounds}, {view.replicas} replicas, {MODES[view.mode]}"
        if view.mode == "bounded":
            said += f", {view.gap} of at most {view.staleness} rounds apart"
    return said


def standby_line(standby: StandbyView) -> str:
    """Returns where a process waits, and for which place."""
    place = f"will replace {short(standby.place)}" if standby.place else "standby"
    return f"{standby.address} (in {standby.domain}) {place}"
