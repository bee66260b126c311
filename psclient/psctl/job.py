"""`psctl job`: what is done about a job as a whole."""

from __future__ import annotations

import dataclasses

import click

from psclient._src.chief.discard import discard
from psclient._src.transport.remote_server import connect
from psclient.psctl.settings import CommandSettings, options, settings
from pswire.cluster import ClusterSpec, Task
from pswire.limits import Timeouts
from pswire.security.names import task_name

CHIEF = Task("chief", 0)


@click.group(no_args_is_help=False)
def job() -> None:
    """Does something about a job as a whole."""


@job.command()
@options
@settings
def end(told: CommandSettings) -> int:
    """Discards the job that the servers hold, once its processes are gone.

    Servers keep the variables of a job that was not left cleanly, so that its processes may come back. After this any
    other job begins, and servers with --until-done end. Checkpoints stay. It needs the chief's certificate.
    """
    cluster = ClusterSpec({"ps": tuple(told.cluster().servers.values())})
    timeouts = dataclasses.replace(Timeouts(), start=told.seconds, call=told.seconds)
    servers = connect(cluster, timeouts, security=told.paths().read(task_name(CHIEF)), drives=True)
    try:
        name = discard(CHIEF, servers, timeouts)
    finally:
        for server in servers:
            server.close()
    return told.tell({"job": name}, f"the job {name!r} is over" if name else "the job without a name is over")
