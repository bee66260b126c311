"""Bounded staleness as a client has it: servers are told what they cannot see of a worker's rounds."""

from __future__ import annotations

from collections.abc import Iterable

from psclient._src.network.patience import Deadline
from psclient._src.network.session import Session
from pswire.api import ParameterServer
from pswire.errors import Unreachable


def passes(session: Session, servers: Iterable[int], next: int) -> None:
    """Tells servers at once, without a wait, the next round of which something may come to them."""
    if session.clock is not None:
        for index in servers:
            session.clock.passed(index, next)
            session.wakes[index].set()


def goes_on(session: Session, next: int) -> int:
    """Tells the servers that this process makes rounds, if they take it to be at rest; returns its next round.

    From then on they count it, at the least of the others' clocks: so these get no further ahead of it than they may.

    Args:
        session: this process's session.
        next: the round with which it would go on.
    """
    if session.clock is None or not session.clock.begin():
        return next
    session.clock.come_back(next)
    deadline = session.deadline(session.timeouts.call_timeout)
    for index, server in enumerate(session.servers):
        _await_generation(session, server, deadline)
        session.heartbeat_now(index)
    places = [place for server in session.servers for place in server.status().places if place.task == session.task]
    return max([next, *(place.clock for place in places)])


def _await_generation(session: Session, server: ParameterServer, deadline: Deadline) -> None:
    """Waits until a server knows that this process takes part: the chief copies the log to all but the first."""

    def word() -> str:
        return "waits for the chief to announce it to all servers"

    while (status := server.status()).generation is None or status.generation.session(session.number) is None:
        news = server.watch(session.number, status.log, -1)
        session.wait(news, deadline, lambda: Unreachable(f"{session.task} {word()}", str(session.task)), word)
