"""Connections to the servers of a cluster, for who only looks: no session, no round, nobody waits for us."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, as_completed
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import TracebackType

from psclient._src.network.daemon_threads import Threads
from psclient._src.network.remote_server import RemoteServer, follow_moves
from pswire.cluster import Task
from pswire.errors import ConfigError, PSError, Unreachable
from pswire.limits import Timeouts
from pswire.model.log import Created, LogEntry
from pswire.model.plan import PlacedVariable
from pswire.model.status import ServerStatus, newest_of
from pswire.model.tensor import Array
from pswire.security.identity import Security
from pswire.telemetry.views.looked import Looked, gone_of, keeper_of

NOBODY = 0
"""The session of who has none."""


class Servers:
    """A connection to each server of a cluster; a context manager that ends them. Used by one thread.

    Args:
        addresses: the servers and their addresses, in order.
        seconds: time that each may take to answer.
        security: certificate and token that are shown to them.
    """

    def __init__(self, addresses: Mapping[Task, str], seconds: float, security: Security) -> None:
        timeouts = Timeouts(call_timeout=seconds, round_timeout=seconds, session_timeout=2 * seconds)
        self._remote = [RemoteServer(address, task, timeouts, security=security) for task, address in addresses.items()]
        self._threads = Threads("observer")
        self._seconds = seconds

    def __enter__(self) -> Servers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connections."""
        for server in self._remote:
            server.close()
        self._threads.close()

    def look(self, recent: bool = False) -> list[Looked]:
        """Asks all servers at once; those that have moved, where they are now.

        Args:
            recent: True to ask as well what they were told last.
        """
        return self._each(_ask_more if recent else _ask)

    def events(self) -> list[Looked]:
        """Asks all servers at once, and what they were told last."""
        return self._each(_ask_recent)

    def move(self, server: int, address: str) -> str:
        """Has a server moved to a process that waits; returns its address.

        Args:
            server: index of the server.
            address: the address of the process; "" for any.

        Raises:
            PSError: it cannot move there, or the server that keeps the log does not answer.
        """
        return self._find(keeper_of).move(server, address)

    def _each(self, ask: Callable[[RemoteServer], Looked]) -> list[Looked]:
        looks, found, followed = self._begin(ask), list[ServerStatus](), False
        for look in as_completed(looks):
            # Nobody waits for an answer from where a server was: the first that tells of its move ends that call.
            found += [status] if (status := look.result().status) else []
            newest = newest_of(found)
            moved = [each for each in newest.moved if each.server < len(looks)] if newest and not newest.over else []
            followed = bool(follow_moves(self._remote, moved)) or followed
        return [look.result() for look in (self._begin(ask) if followed else looks)]

    def _begin(self, ask: Callable[[RemoteServer], Looked]) -> list[Future[Looked]]:
        return [self._threads.submit(partial(ask, server)) for server in self._remote]

    def variables(self) -> list[PlacedVariable]:
        """The variables of the job, in the order in which they were created.

        Raises:
            PSError: server 0 does not answer.
        """
        server = self._find(keeper_of)
        entries: list[LogEntry] = []
        while True:
            # A long log comes in several answers; one of another job, from its beginning.
            try:
                watched = server.watch(NOBODY, len(entries), 0).result(self._seconds)
            except TimeoutError:
                raise Unreachable(f"no answer for {self._seconds:g} s", str(server.task)) from None
            if not watched.entries:
                break
            entries = [*entries[: watched.start], *watched.entries]
        return [entry.variable for entry in entries if isinstance(entry, Created)]

    def read(self, variable: PlacedVariable) -> tuple[int, Array]:
        """The value of a variable as it is now, and the last round that it has seen.

        Raises:
            PSError: its server does not answer, or has no value of it yet.
        """

        def home(statuses: Iterable[ServerStatus]) -> int:
            gone = gone_of(statuses)
            return next((each for each in variable.servers if each not in gone), variable.servers[0])

        server = self._find(home)
        reply = server.pull(NOBODY, [variable.id], -1).result()
        return reply.round, reply.payload.tensors([variable.spec.tensor])[0]

    def _find(self, choose: Callable[[Iterable[ServerStatus]], int]) -> RemoteServer:
        """Returns the server whose number is chosen by what all say, wherever it is in the list of addresses."""
        looked = self.look()
        number = choose([found.status for found in looked if found.status])
        for server, found in zip(self._remote, looked, strict=True):
            if found.status and found.status.server == number:
                return server
        errors = [found.error for found in looked if found.error]
        if errors:
            raise errors[0]
        raise ConfigError(
            f"none of the addresses leads to {Task('ps', number)}; list all servers of the job in --address"
        )


def _ask(server: RemoteServer) -> Looked:
    began = time.time()
    try:
        status = server.status()
    except PSError as error:
        return Looked(server.task, server.address, error=error)
    ended = time.time()
    skew = status.process.clock - (began + ended) / 2 if status.process else 0.0
    return Looked(Task("ps", status.server), server.address, status, None, skew, ended - began)


def _ask_more(server: RemoteServer) -> Looked:
    looked = _ask(server)
    if looked.status:
        with suppress(PSError):
            return replace(looked, recent=server.events())
    return looked


def _ask_recent(server: RemoteServer) -> Looked:
    looked = _ask(server)  # which says which server it is, and that it is one
    try:
        return replace(looked, recent=server.events()) if looked.status else looked
    except PSError as error:
        return replace(looked, status=None, error=error)
