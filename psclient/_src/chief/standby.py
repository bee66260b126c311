"""Who takes the place of a chief that is gone: a chief on standby, a worker, and `psctl job delete` to end the job."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal

from psclient._src.chief.driver import Chief
from psclient._src.chief.job_log import JobLog
from psclient._src.chief.timers import is_here
from psclient._src.network.remote_server import RemoteServer, expect, follow_moves, look_again
from psclient._src.network.session import Session
from pswire.api import ParameterServer
from pswire.cluster import Task
from pswire.errors import ConfigError, Forbidden, PSError, ServerLost, TaskTaken
from pswire.limits import Timeouts
from pswire.model.log import Done
from pswire.model.status import ServerStatus, newest_of
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


class Deputy:
    """Drives the job beside a worker's script, once nobody else does.

    Args:
        task: the worker.
        make: makes a chief, with connections of its own.
        drives: given the chief that drives from now on; returns False if this process has no part in the job any more.
    """

    def __init__(self, task: Task, make: Callable[[], Chief], drives: Callable[[Chief], bool]) -> None:
        self._task = task
        self._make = make
        self._drives = drives
        self._busy = threading.Lock()
        self._refused = False

    def told(self) -> None:
        """Server 0 says that this worker is to drive the job; it says so again until somebody does. Does not wait."""
        if not self._refused and self._busy.acquire(blocking=False):
            threading.Thread(target=self._become_chief, daemon=True, name="deputy").start()

    def _become_chief(self) -> None:
        try:
            chief = self.take_over()
            if chief is not None and not self._drives(chief):
                chief.stop(abandon=True)
        finally:
            self._busy.release()

    def take_over(self) -> Chief | None:
        """Takes the chief's place; returns the chief that drives in a thread from now on, None if it may not."""
        chief = None
        try:
            chief = self._make()
            chief.start(takes_over=True, waits=False)
        except TaskTaken:
            log.info("%s does not take over as chief: another process did", self._task)
        except Forbidden as error:
            self._refused = True
            log.warning("the job has no chief, and %s is not allowed to take over: %s", self._task, error)
        except PSError as error:
            log.warning("the job has no chief, and %s could not take over: %s", self._task, error)
        else:
            log.warning("the chief is down: %s takes over as chief", self._task)
            return chief
        if chief is not None:
            chief.close()
        return None

    def look(self, server: ParameterServer, timeouts: Timeouts) -> Chief | None:
        """Takes the chief's place at the end of a script, if it is gone: else nobody might say that the job is over."""
        try:
            if outlook(server.status(), timeouts) == "gone":
                return self.take_over()
        except PSError as error:
            log.debug("%s cannot find out whether the job has a chief: %s", self._task, error)
        return None


def discard(task: Task, servers: Sequence[ParameterServer], timeouts: Timeouts) -> str:
    """Ends the job that the servers hold, in the place of a chief that is gone.

    Args:
        task: the chief task.
        servers: connections to all servers, by number.
        timeouts: time limits of the calls.

    Returns:
        The job's identity.

    Raises:
        ConfigError: they hold none, or processes of it are there.
        PSError: a server does not answer.
    """
    status = _keeper(servers)
    here = sorted({str(s.member.task) for s in status.sessions if is_here(s, timeouts.session_timeout)})
    if here:
        raise ConfigError(f"still connected: {', '.join(here)}; end these processes before discarding the job")
    session = Session(task, servers, 0, True, timeouts, job=status.job, copied=bool(status.losses))
    session.open(waits=False)
    error = "the job could not be discarded"
    try:
        log = JobLog(servers, session, takes_over=True)
        log.attach()
        log.insist(Done(), timeouts.call_timeout)
        log.copy()
        error = ""
    finally:
        session.leave(error)
    return status.job


def _keeper(servers: Sequence[ParameterServer]) -> ServerStatus:
    """Returns the status of the server that keeps the log and the sessions, wherever it is.

    Raises:
        ConfigError: the servers hold no job that is not over.
        PSError: none of them answers.
    """
    statuses, errors = list[ServerStatus](), list[PSError]()
    for server in servers:
        try:
            statuses.append(server.status())
        except PSError as error:
            errors.append(error)
    if errors and not statuses:
        raise errors[0]
    newest = newest_of(statuses)
    if newest is None or newest.over:
        raise ConfigError("these servers do not hold a job, so there is nothing to discard")
    if errors and not newest.gone and not newest.moved:
        raise errors[0]
    follow_moves(servers, newest.moved)
    return servers[newest.keeper].status()
