"""The end of a job that nobody drives any more: `psctl job delete`."""

from __future__ import annotations

from collections.abc import Sequence

from psclient._src.chief.abandonment import is_here
from psclient._src.chief.job_log import JobLog
from psclient._src.network.remote_server import follow_moves
from psclient._src.network.session import Session
from pswire.api import ParameterServer
from pswire.cluster import Task
from pswire.errors import ConfigError, PSError
from pswire.limits import Timeouts
from pswire.model.log import Done
from pswire.model.status import ServerStatus, newest_of


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
