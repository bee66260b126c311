"""The end of a job that nobody drives any more: `psctl job end`."""

from __future__ import annotations

from collections.abc import Sequence

from psclient._src.chief.abandonment import is_here
from psclient._src.chief.job_log import JobLog
from psclient._src.transport.session import Session
from pswire.api import ParameterServer
from pswire.cluster import Task
from pswire.errors import ConfigError
from pswire.limits import Timeouts
from pswire.model.log import Done


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
    status = servers[0].status()
    if not status.incarnations or status.over:
        raise ConfigError("these servers hold no job: nothing is to be discarded")
    here = sorted({str(s.member.task) for s in status.sessions if is_here(s, timeouts.lease)})
    if here:
        raise ConfigError(f"{', '.join(here)} of the job are here; end these processes first, then discard it")
    session = Session(task, servers, 0, True, timeouts, job=status.job)
    session.open(waits=False)
    error = "the job could not be discarded"
    try:
        log = JobLog(servers, session)
        log.attach()
        log.insist(Done(), timeouts.call)
        log.copy()
        error = ""
    finally:
        session.leave(error)
    return status.job
