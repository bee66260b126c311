"""The process of a chief that has no script."""

from __future__ import annotations

import logging

from psclient._src.chief.driver import Chief
from psclient._src.chief.standby import stand_by, taken_over_by
from psclient._src.telemetry import Exporter
from psclient._src.transport.remote_server import connect
from pswire.cluster import TaskConfig
from pswire.errors import TaskTaken
from pswire.limits import Refused, Timeouts
from pswire.security.identity import Security

log = logging.getLogger("psworker")


def drive(
    config: TaskConfig, timeouts: Timeouts, security: Security, job: str, refused: Refused, standby: bool = False
) -> None:
    """A chief without a script: drives the job until it is done, in the calling thread.

    Where another process has taken its place it stands by.

    Args:
        config: the cluster and this task.
        timeouts, security, refused: of all connections.
        job: the identity of the job.
        standby: True to wait until nobody drives the job any more.
    """
    servers = connect(config.cluster, timeouts, security=security, drives=True, refused=refused)
    chief = Chief(config.task, servers, config.cluster, timeouts, job=job)
    exporter = Exporter(config.task, security)
    exporter.add_chief(chief)
    try:
        while not standby or stand_by(servers[0], config.task, timeouts):
            try:
                chief.drive(takes_over=standby, waits=not standby)
                return
            except TaskTaken:
                if not standby:
                    other = taken_over_by(servers[0], config.task)
                    if other is None:
                        raise
                    log.warning("%s drives the job in the place of %s, which stands by", other, config.task)
                standby = True
    finally:
        chief.close()
        exporter.stop()
