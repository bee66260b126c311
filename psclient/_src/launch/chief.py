"""The process of a chief that has no script."""

from __future__ import annotations

from psclient._src.chief.driver import Chief
from psclient._src.telemetry import Exporter
from psclient._src.transport.remote_server import connect
from pswire.cluster import TaskConfig
from pswire.limits import Refused, Timeouts
from pswire.security.identity import Security


def drive(
    config: TaskConfig, timeouts: Timeouts, security: Security, job: str, refused: Refused, copied: bool = False
) -> None:
    """A chief without a script: drives the job until it is done, in the calling thread."""
    servers = connect(config.cluster, timeouts, security=security, drives=True, refused=refused, copied=copied)
    chief = Chief(config.task, servers, config.cluster, timeouts, job=job, copied=copied)
    exporter = Exporter(config.task, security)
    exporter.add_chief(chief)
    try:
        chief.drive()
    finally:
        exporter.stop()
