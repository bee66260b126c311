"""The process of a chief that has no script."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from functools import partial

from psclient._src.chief.driver import Chief
from psclient._src.chief.job_log import JobOver
from psclient._src.chief.standby import stand_by, taken_over_by
from psclient._src.network.remote_server import connect, expect
from psclient._src.processes.sigterm import NOTICE
from psclient._src.telemetry.exporter import Exporter
from pswire.cluster import Task, TaskConfig
from pswire.errors import ServerLost, TaskTaken
from pswire.limits import Refused, Timeouts
from pswire.security.identity import Security

log = logging.getLogger("psworker")

DRIVES_ON = "received a signal to end, and waits for the workers that are leaving the job"
"""What a chief does at SIGTERM."""


def drive(
    config: TaskConfig,
    timeouts: Timeouts,
    security: Security,
    job: str,
    refused: Refused,
    standby: bool = False,
    copied: bool = False,
) -> None:
    """A chief without a script: drives the job until it is done, in the calling thread.

    Where another process has taken its place it stands by. At SIGTERM it ends with code 143, after members that leave.

    Args:
        config: the cluster and this task.
        timeouts: the timeouts of all connections.
        security: the certificates and token of all connections.
        refused: the meaning of a refused connection.
        job: the identity of the job.
        standby: True to wait until nobody drives the job any more.
        copied: True if variables have copies.
    """
    while True:
        servers = connect(config.cluster, timeouts, security=security, drives=True, refused=refused, copied=copied)
        chief = Chief(config.task, servers, config.cluster, timeouts, job=job, copied=copied)
        # Before it has driven, and while it stands by, SIGTERM ends it at once.
        begun = partial(NOTICE.take_part, chief.steps_down.tell, timeouts.termination_grace, False, DRIVES_ON)
        exporter = Exporter(config.task, security)
        exporter.add_chief(chief)
        try:
            over = not standby and _drives(chief, config.task, begun)
            while not over:
                match stand_by(servers if copied else servers[:1], config.task, timeouts, begins=not standby):
                    case "gone":
                        over = _takes_over(chief, begun)
                    case "none":
                        over = _drives(chief, config.task, begun)
                    case _:
                        over = True
            if chief.steps_down.over:
                raise SystemExit(128 + signal.SIGTERM)
            return
        except JobOver as error:  # it was over by then, by a loss that nobody has told yet
            log.warning("%s cannot go on: %s", config.task, error)
        finally:
            NOTICE.has_left(chief.steps_down.tell)
            chief.close()
            exporter.stop()


def _takes_over(chief: Chief, begun: Callable[[], object]) -> bool:
    """Drives on to its end a job whose chief is gone; returns False if it may not be, or somebody was quicker."""
    try:
        chief.drive(takes_over=True, waits=False, begun=begun)
    except TaskTaken:
        return False
    except ServerLost as error:
        if chief.opened:
            raise
        log.warning("%s; the job is over or lost", error)
    return True


def _drives(chief: Chief, task: Task, begun: Callable[[], object]) -> bool:
    """Drives a job to its end; returns False if another process does, in the place of this task."""
    try:
        chief.drive(waits=False, begun=begun)
    except TaskTaken:
        server = chief.log_server
        expect(server)
        other = taken_over_by(server, task)
        if other is not None:
            log.warning("%s has taken over the job from %s, which is the standby now", other, task)
            return False
        try:
            chief.drive(begun=begun)
        except TaskTaken:
            if taken_over_by(server, task) is None:
                raise
            return False
        except ServerLost:
            if chief.opened:
                raise
            return False  # while it waited another process drove the job to its end
    return True
