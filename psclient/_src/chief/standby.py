"""A chief that stands by: it waits until nobody drives the job any more, and then takes it over."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Literal

from psclient._src.network.remote_server import RemoteServer, expect, follow_moves, look_again
from pswire.api import ParameterServer
from pswire.cluster import Task
from pswire.errors import ServerLost
from pswire.limits import Timeouts
from pswire.model.status import ServerStatus
from pswire.telemetry.reminder import Reminder

log = logging.getLogger("psclient.chief")

LOOK_SECONDS = 0.25
"""Seconds between two looks at the chief's session: within these it is known to be gone."""

SILENT_HEARTBEATS = 1.25
"""Heartbeats for which a chief is silent that may be gone."""

Outlook = Literal["none", "driven", "gone", "over"]
"""No job is there to go on with; a chief drives one; that chief is gone; the job is over."""


def outlook(status: ServerStatus, timeouts: Timeouts) -> Outlook:
    """Returns how a job is driven, as server 0's status tells it: its newest chief counts."""
    chief = next((session for session in reversed(status.sessions) if session.drives), None)
    if status.broken:  # whose processes all end, and begin anew
        return "none"
    if status.over:
        return "over"
    if chief is None:
        return "none"
    if chief.state == "left":
        return "over"
    # Sooner than a worker is told to drive. Where the chief is only late, its server refuses another one.
    return (
        "driven"
        if chief.state == "open" and chief.silent <= SILENT_HEARTBEATS * timeouts.heartbeat_interval
        else "gone"
    )


def taken_over_by(server: ParameterServer, task: Task) -> Task | None:
    """Returns who drives the job in the place of a task, or of an earlier process of it; None if nobody does."""
    status = server.status()
    chiefs = [session for session in status.sessions if session.drives]
    if not chiefs or chiefs[-1].state != "open" or status.broken:
        return None
    other = chiefs[-1].member.task
    return other if other != task or len(chiefs) > 1 else None


def stand_by(servers: Sequence[RemoteServer], task: Task, timeouts: Timeouts, begins: bool) -> Outlook:
    """Waits until nobody drives the job that the servers hold.

    Args:
        servers: connections, of this process alone: to server 0, and where variables have copies to all others, one of
            which keeps the sessions once that is gone.
        task: the task that this process is.
        timeouts: time limits of the cluster.
        begins: True for a process that may begin a job as well.

    Returns:
        "gone" once nobody does; "over" where the job is over, or all these servers have ended; "none" to who may begin
        one.
    """
    states = {"none": "a chief starts the job", "driven": "its chief is down, or the job ends"}
    seen: Outlook = "none"
    since: float | None = None  # when no server was found any more that keeps the sessions of the job
    for server in servers:
        look_again(server)
    reminder = Reminder(
        timeouts.report_interval, lambda: log.info("%s is on standby until %s", task, states.get(seen, "it is chief"))
    )
    while True:
        time.sleep(LOOK_SECONDS)
        try:
            status = _ask(servers)
        except ServerLost as error:  # it has answered before: see `expect`
            log.warning("%s is no longer on standby: server 0 has ended (%s)", task, error)
            return "over"
        seen = outlook(status, timeouts)
        if status.incarnations and not (status.sessions or status.over or status.broken):
            since = time.monotonic() if since is None else since
            if (
                time.monotonic() - since > timeouts.session_timeout
            ):  # a chief that was there would have told of its loss
                return "gone"
        else:
            since = None
        if seen in ("gone", "over") or (begins and seen == "none"):
            return seen
        reminder.look()


def _ask(servers: Sequence[RemoteServer]) -> ServerStatus:
    """Returns the status of the server that keeps the sessions, or of the first that has not ended.

    Raises `ServerLost` if all have.
    """
    found: list[ServerStatus] = []
    for server in servers:
        try:
            status = server.status()
        except ServerLost:
            if server is servers[-1] and not found:
                raise
            continue
        # All have answered the chief that began the job: a server where nobody listens any more has ended.
        for each in servers if status.incarnations else [server]:
            expect(each)
        follow_moves(servers, [moved for moved in status.moved if moved.server < len(servers)])
        if status.sessions:
            return status
        found.append(status)
    return found[0]
